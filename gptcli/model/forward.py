"""The forward pass, from token ids to next-token logits: pure functions of (inputs, weights, spec, probe).

B texts, T positions, C hidden size, V vocabulary. A layer is two lines: r = x + attention(norm(x)) and
y = r + mlp(norm(r)).
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gptcli.errors import GptcliError
from gptcli.model.attention import Sight, attention
from gptcli.model.ops import embed, head, mlp, norm, rotary
from gptcli.model.weights import Weights
from gptcli.spec import NoMLP, Spec
from gptcli.trace import SILENT, Silent


@dataclass(frozen=True)
class Inputs:
    """A request. ids [B, T]; mask [B, T]: True for a token, False for the padding left of it (None: no padding).

    rows: the positions whose logits are wanted, `all` or only the `last`. source: what the encoder reads, where there
    is one beside the decoder; segments [B, T]: which part of its text each token belongs to (None: the first).
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
    if inputs.source is not None and spec.encoder is None:
        raise GptcliError("a source text, but this model has no encoder to read it", "leave it out", "inputs")
    if inputs.source is None and spec.encoder is not None:
        raise GptcliError("no source text, which this model's encoder reads", 'give --source "…"', "inputs")
    if inputs.source is not None:
        if len(inputs.source.ids) != len(inputs.ids):
            said = f"{len(inputs.source.ids)} source texts for {len(inputs.ids)} texts"
            raise GptcliError(said, "give one for each", "inputs")
        try:
            check(inputs.source, spec.encoder)
        except GptcliError as error:
            raise GptcliError(f"source: {error.message}", error.hint, error.code) from None
    _check_text(inputs, spec)


def _check_text(inputs: Inputs, spec: Spec) -> None:
    ids, segments = inputs.ids, inputs.segments
    if ids.numel() == 0:
        raise GptcliError("an empty text holds no token to run", "give a text of at least one token", "empty")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= spec.vocab_size:
        bad = low if low < 0 else high
        raise GptcliError(
            f"id {bad} is outside the vocabulary", f"ids run from 0 to {spec.vocab_size - 1}", "vocabulary"
        )
    if segments is not None:
        if spec.n_segments is None:
            raise GptcliError("segments, but this model doesn't tell any apart", "leave them out", "inputs")
        if segments.shape != ids.shape or int(segments.min()) < 0 or int(segments.max()) >= spec.n_segments:
            what = f"one from 0 to {spec.n_segments - 1} for each of {ids.shape[1]} tokens"
            raise GptcliError("segments don't fit the text", f"give {what}", "inputs")
    longest = int(inputs.positions.max()) + 1
    if longest > spec.most_tokens:
        raise GptcliError(
            f"{longest:,} tokens are more than the context of {spec.context_length:,}", "shorten the text", "context"
        )
    if inputs.mask is not None and not (inputs.mask[:, -1].all() and (inputs.mask[:, 1:] >= inputs.mask[:, :-1]).all()):
        raise GptcliError("padding stands right of a token", "pad on the left", "inputs")


class Memory(NamedTuple):
    """What a decoder looks across at: the encoder's final vectors [B, S, C], and who may see which of them."""

    x: Tensor
    sight: Sight


def forward(inputs: Inputs, weights: Weights, spec: Spec, probe: Silent = SILENT) -> Tensor:
    """Logits [B, T, V], or [B, 1, V] for rows=last: float32, float64 in float64. Raises GptcliError on bad inputs.

    For rows=last, only the last position goes through the last layer's queries, output and MLP, and through the head.
    A model without a head gives its final vectors [B, T, C].
    """
    check(inputs, spec)
    memory = None
    if spec.encoder is not None:
        source = inputs.source
        x = stack(source, None, weights.at("encoder"), spec.encoder, probe.at("encoder"))  # [B, S] → [B, S, C]
        memory = Memory(x, Sight.of(spec.cross, inputs.positions, source.mask, source.positions))
    x = stack(inputs, memory, weights, spec, probe)  # [B, T] → [B, T, C]
    return x if spec.lm_head is None else probe("logits", head(x, weights, spec, probe))  # → [B, T, V]


def stack(inputs: Inputs, memory: Memory | None, weights: Weights, spec: Spec, probe: Silent) -> Tensor:
    """Ids through the embedding, the layers and the final norm: [B, T] → [B, T, C], or [B, 1, C] for rows=last."""
    positions, everyone = inputs.positions, slice(None)
    steps = positions.clamp(min=0)  # padding, which nobody sees, takes the place of the first token
    x = probe("embed", embed(inputs.ids, steps, weights, spec, inputs.segments))  # [B, T] → [B, T, C]
    if spec.norm.embedding:
        x = probe("embed_norm", norm(x, weights, "embed_norm", spec))
    # Layers of one kind share one mask and one table of angles.
    sights = cache(lambda part: Sight.of(part, positions, inputs.mask).biased(weights, spec))
    rotations = cache(lambda part: rotary(replace(spec, position=part), steps, x.dtype))
    for i in range(spec.n_layers):
        here = spec.at(i)
        rows = slice(-1, None) if inputs.rows == "last" and i == spec.n_layers - 1 else everyone
        sight, rotation = sights(here.attention), rotations(here.position)
        x = layer(x, rows, sight, rotation, memory, weights.at(f"layers.{i}"), here, probe.at(f"layers.{i}"))
    return probe("final_norm", norm(x, weights, "final_norm", spec)) if spec.norm.final else x


def layer(
    x: Tensor,
    rows: slice,
    sight: Sight,
    rotation: tuple[Tensor, Tensor] | None,
    memory: Memory | None,
    w: Weights,
    spec: Spec,
    probe: Silent,
) -> Tensor:
    """r = x + attention(norm(x)); r = r + cross(norm(r)), if any; y = r + mlp(norm(r)). x [B, T, C] → rows of it."""
    x = probe("resid_pre", x)
    h = read(x, "attn_norm", w, spec, probe) if spec.attention.normed else x
    turns = rotation and (tuple(table[:, :, rows] for table in rotation), rotation)
    out = attention(_of_rows(h, rows), h, sight.at(rows), turns, w.at("attn"), spec, probe.at("attn"))
    x = x[:, rows]
    r = probe("resid_mid", add(x, out, "attn", w, spec, probe))
    if memory is not None:
        r = look_across(r, memory.x, memory.sight.at(rows), w, spec, probe)
    if isinstance(spec.mlp, NoMLP):
        return probe("resid_post", r)
    h = mlp_reads(x, h[:, rows], r, w, spec, probe)
    out = mlp(h, w.at("mlp"), spec.mlp, probe.at("mlp"))
    return probe("resid_post", add(r, out, "mlp", w, spec, probe))


def _of_rows(x: Tensor, rows: slice) -> Tensor:
    """These positions of x [B, T, C]; x itself, and no view of it, where they are all: attention knows it for one."""
    return x if rows == slice(None) else x[:, rows]


def look_across(r: Tensor, source: Tensor, sight: Sight, w: Weights, spec: Spec, probe: Silent) -> Tensor:
    """r + cross(norm(r)): queries from r [B, T, C], keys and values from the encoder's vectors [B, S, C]."""
    h = read(r, "cross_norm", w, spec, probe)
    out = attention(h, source, sight, None, w.at("cross"), spec.across, probe.at("cross"))
    return probe("resid_cross", add(r, out, "cross", w, spec, probe))


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
