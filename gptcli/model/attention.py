"""Attention, computed once by the fused kernel; scores and softmax weights are computed on the side for who asks.

B batch, T queries, S keys, C hidden size, H heads, G key/value heads, D head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gptcli.model.ops import linear, norm, rotate, wide
from gptcli.model.weights import Weights
from gptcli.spec import Attention, Spec
from gptcli.trace import Silent


@dataclass(frozen=True)
class Sight:
    """Who may see whom: the one place where a mask comes from.

    queries [B or 1, T] and keys [B or 1, S]: positions; present [B, S]: keys that are tokens, not padding (None: all).
    """

    queries: Tensor
    keys: Tensor
    present: Tensor | None
    causal: bool
    window: int | None

    @classmethod
    def of(cls, part: Attention, positions: Tensor, present: Tensor | None) -> "Sight":
        """Every position sees by this part's rules."""
        return cls(positions, positions, present, part.causal, part.window)

    def at(self, rows: slice) -> "Sight":
        """Only these queries look."""
        return Sight(self.queries[:, rows], self.keys, self.present, self.causal, self.window)

    def mask(self) -> Tensor:
        """[B or 1, 1, T, S], True where the query may see the key."""
        ago = self.queries[:, None, :, None] - self.keys[:, None, None, :]  # → [B, 1, T, S]
        seen = ago >= 0 if self.causal else torch.ones_like(ago, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (ago < self.window)
        return seen if self.present is None else seen & self.present[:, None, None, :]

    def narrow(self) -> bool:
        """Does the window hide anything?"""
        return self.window is not None and self.window < self.keys.shape[1]

    def for_kernel(self) -> dict:
        """This mask as the kernel's arguments: its own causal flag, or nothing, where that says the same."""
        if self.present is None and not self.narrow():
            if not self.causal or torch.equal(self.queries, self.keys[:, -1:]):  # the last query sees every key
                return {}
            if self.queries.shape[1] == self.keys.shape[1]:
                return {"is_causal": True}
        return {"attn_mask": self.mask()}


def attention(
    x: Tensor,
    memory: Tensor,
    sight: Sight,
    turns: tuple | None,
    w: Weights,
    spec: Spec,
    probe: Silent,
) -> Tensor:
    """Queries from x [B, T, C] read keys and values from memory [B, S, C] → [B, T, C].

    turns: rotations of the queries and of the keys, or None. arXiv:1706.03762, 2305.13245 (grouped key/value heads).
    """
    part = spec.attention
    q = probe("q", split_heads(linear(x, w, "q"), part.n_heads))
    k = probe("k", split_heads(linear(memory, w, "k"), part.n_kv_heads))
    v = probe("v", split_heads(linear(memory, w, "v"), part.n_kv_heads))
    if part.qk_norm:
        q, k = probe("q_norm", norm(q, w, "q_norm", spec)), probe("k_norm", norm(k, w, "k_norm", spec))
    if turns is not None:
        q = probe("q_rot", rotate(q, turns[0], spec.position))
        k = probe("k_rot", rotate(k, turns[1], spec.position))
    scale = q.shape[-1] ** -0.5 if part.scale is None else part.scale
    z = F.scaled_dot_product_attention(
        q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **sight.for_kernel()
    )  # [B, H, T, D]
    if sight.present is not None:
        z = z.masked_fill(~sight.mask().any(-1, keepdim=True), 0)  # a query that sees nothing reads nothing
    watch(q, k, sight, scale, probe)
    return linear(merge_heads(probe("z", z)), w, "o")


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, T, H·D] → [B, H, T, D]


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)  # [B, H, T, D] → [B, T, H·D]


def watch(q: Tensor, k: Tensor, sight: Sight, scale: float, probe: Silent) -> None:
    """Scores and softmax weights of the heads and queries that the probe asks for, from what the kernel was given."""
    wanted = probe.selection("scores") or probe.selection("pattern")
    if wanted is None:
        return
    heads = torch.arange(q.shape[1], device=q.device)[wanted.heads]
    kv_heads = heads // (q.shape[1] // k.shape[1])  # query head h reads key/value head h // (H / G)
    scores, pattern = weigh(q[:, heads, wanted.queries], k[:, kv_heads], sight.at(wanted.queries).mask(), scale)
    probe("scores", scores)
    probe("pattern", pattern)


def weigh(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scaled scores before the mask, and softmax weights after it: q [B, H, T, D], k [B, H, S, D] → two [B, H, T, S].

    A query that sees no key weighs none (zeros). Half types compute in float32.
    """
    q, k = q.to(wide(q.dtype)), k.to(wide(k.dtype))
    scores = q @ k.mT * scale  # [B, H, T, D] · [B, H, D, S] → [B, H, T, S]
    pattern = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return scores, pattern.masked_fill(~mask.any(-1, keepdim=True), 0)
