"""The forward pass, from token ids to next-token logits: pure functions of (inputs, weights, spec, probe).

B texts, T positions, C hidden size, V vocabulary. A layer is two lines: r = x + attention(norm(x)) and
y = r + mlp(norm(r)).
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from gptcli.errors import GptcliError
from gptcli.model.attention import Sight, attention
from gptcli.model.ops import embed, head, linear, mlp, norm, rotary
from gptcli.model.weights import Weights
from gptcli.spec import NoMLP, Spec
from gptcli.trace import SILENT, Silent


@dataclass(frozen=True)
class Inputs:
    """A request. ids [B, T]; mask [B, T]: True for a token, False for the padding left of it (None: no padding).

    rows: the positions whose logits are wanted, `all` or only the `last`. source: what an encoder reads; segments:
    segment ids [B, T].
    """

    ids: Tensor
    mask: Tensor | None = None
    source: "Inputs | None" = None
    segments: Tensor | None = None
    rows: Literal["last", "all"] = "all"

    @property
    def positions(self) -> Tensor:
        """Each token's position among its text's tokens, from 0: [1, T], or [B, T] with padding (at -1)."""
        if self.mask is None:
            return torch.arange(self.ids.shape[1], device=self.ids.device)[None]
        return self.mask.long().cumsum(-1) - 1


def check(inputs: Inputs, spec: Spec) -> None:
    """Refuses inputs that this architecture can't take. Raises GptcliError."""
    ids = inputs.ids
    if inputs.source is not None or inputs.segments is not None:
        what = "a source text" if inputs.source is not None else "segments"
        raise GptcliError(f"{what} given to a decoder-only model", "leave it out", "inputs")
    if ids.numel() == 0:
        raise GptcliError("an empty text holds no token to run", "give a text of at least one token", "empty")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= spec.vocab_size:
        bad = low if low < 0 else high
        raise GptcliError(
            f"id {bad} is outside the vocabulary", f"ids run from 0 to {spec.vocab_size - 1}", "vocabulary"
        )
    longest = int(inputs.positions.max()) + 1
    if longest > spec.context_length:
        raise GptcliError(
            f"{longest:,} tokens are more than the context of {spec.context_length:,}", "shorten the text", "context"
        )
    if inputs.mask is not None and not (inputs.mask[:, -1].all() and (inputs.mask[:, 1:] >= inputs.mask[:, :-1]).all()):
        raise GptcliError("padding stands right of a token", "pad on the left", "inputs")


def forward(inputs: Inputs, weights: Weights, spec: Spec, probe: Silent = SILENT) -> Tensor:
    """Logits [B, T, V], or [B, 1, V] for rows=last: float32, float64 in float64. Raises GptcliError on bad inputs.

    For rows=last, only the last position goes through the last layer's queries, output and MLP, and through the head.
    """
    check(inputs, spec)
    positions, everyone = inputs.positions, slice(None)
    steps = positions.clamp(min=0)  # padding, which nobody sees, takes the place of the first token
    x = probe("embed", embed(inputs.ids, steps, weights, spec))  # [B, T] → [B, T, C]
    if spec.norm.embedding:
        x = probe("embed_norm", norm(x, weights, "embed_norm", spec))
    # Layers of one kind share one mask and one table of angles.
    sights = cache(lambda part: Sight.of(part, positions, inputs.mask))
    rotations = cache(lambda part: rotary(replace(spec, position=part), steps, x.dtype))
    for i in range(spec.n_layers):
        here = spec.at(i)
        rows = slice(-1, None) if inputs.rows == "last" and i == spec.n_layers - 1 else everyone
        sight, rotation = sights(here.attention), rotations(here.position)
        x = layer(x, rows, sight, rotation, weights.at(f"layers.{i}"), here, probe.at(f"layers.{i}"))
    if spec.norm.final:
        x = probe("final_norm", norm(x, weights, "final_norm", spec))
    if "embed_out.weight" in weights:  # token rows have a size of their own
        x = probe("embed_out", linear(x, weights, "embed_out"))  # [B, T, C] → [B, T, P]
    return probe("logits", head(x, weights, spec.lm_head))  # [B, T, C] → [B, T, V]


def layer(
    x: Tensor,
    rows: slice,
    sight: Sight,
    rotation: tuple[Tensor, Tensor] | None,
    w: Weights,
    spec: Spec,
    probe: Silent,
) -> Tensor:
    """r = x + attention(norm(x)); y = r + mlp(norm(r)). x [B, T, C] → [B, rows of T, C]."""
    x = probe("resid_pre", x)
    h = read(x, "attn_norm", w, spec, probe)
    turns = rotation and (tuple(table[:, :, rows] for table in rotation), rotation)
    x, out = x[:, rows], attention(h[:, rows], h, sight.at(rows), turns, w.at("attn"), spec, probe.at("attn"))
    r = probe("resid_mid", add(x, out, "attn", w, spec, probe))
    if isinstance(spec.mlp, NoMLP):
        return probe("resid_post", r)
    h = mlp_reads(x, h[:, rows], r, w, spec, probe)
    out = mlp(h, w.at("mlp"), spec.mlp, probe.at("mlp"))
    return probe("resid_post", add(r, out, "mlp", w, spec, probe))


def mlp_reads(x: Tensor, h: Tensor, r: Tensor, w: Weights, spec: Spec, probe: Silent) -> Tensor:
    """What the attention left (r), or in parallel what it read: x by a norm of its own, or h, which it had normed."""
    if spec.residual == "parallel_shared":
        return h
    return read(r if spec.residual == "sequential" else x, "mlp_norm", w, spec, probe)


def read(x: Tensor, name: str, w: Weights, spec: Spec, probe: Silent) -> Tensor:
    """The residual stream as a sublayer reads it: normed, where this architecture norms before its sublayers."""
    return probe(name, norm(x, w, name, spec)) if spec.norm.placement in ("pre", "sandwich") else x


def add(x: Tensor, out: Tensor, name: str, w: Weights, spec: Spec, probe: Silent) -> Tensor:
    """The residual stream with what a sublayer gives; normed is the output or the sum, where this architecture does."""
    out = probe(f"{name}_out", out)
    if spec.norm.placement in ("output", "sandwich"):
        out = probe(f"{name}_out_norm", norm(out, w, f"{name}_out_norm", spec))
    x = x + (out if spec.residual_scale == 1.0 else out * spec.residual_scale)
    return probe(f"{name}_norm", norm(x, w, f"{name}_norm", spec)) if spec.norm.placement == "post" else x
