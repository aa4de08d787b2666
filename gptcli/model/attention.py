"""Attention, computed once by the fused kernel; scores and softmax weights are computed on the side for who asks.

B batch, T queries, S keys, C hidden size, H heads, G key/value heads, D head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gptcli.memory import QUERY_BLOCK
from gptcli.model.ops import distance_scores, linear, linears, norm, rotate, softcap, wide
from gptcli.model.weights import Weights
from gptcli.spec import Attention, Relative, Spec
from gptcli.trace import BESIDE, EVERYTHING, SILENT, Silent

FAR = 1 << 40  # beyond every position
FEW_HEADS = 4  # of fewer heads, scores are computed for more queries at once


class Sight:
    """Who may see whom: the one place where a mask comes from.

    queries [B or 1, T] and keys [B or 1, S]: positions; present [B, S]: keys that are tokens, not padding (None: all);
    bias [B or 1, H, T, S]: what is added to the scores of those that are seen.
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        present: Tensor | None,
        causal: bool,
        window: int | None,
        bias: Tensor | None = None,
    ):
        self.queries, self.keys, self.present, self.causal, self.window = queries, keys, present, causal, window
        self.bias, self.made, self.cut = bias, None, {}

    @classmethod
    def of(cls, part: Attention, queries: Tensor, present: Tensor | None = None, keys: Tensor | None = None) -> "Sight":
        """Every query sees by this part's rules. keys None: the queries' own positions."""
        return cls(queries, queries if keys is None else keys, present, part.causal, part.window)

    def biased(self, w: Weights, spec: Spec) -> "Sight":
        """With what a distance adds to each head's scores, where positions are told so."""
        if not isinstance(spec.position, Relative):
            return self
        distances = self.keys[:, None, :] - self.queries[:, :, None]  # → [B, T, S]
        bias = distance_scores(distances, self.causal, w, spec.position)
        return Sight(self.queries, self.keys, self.present, self.causal, self.window, bias)

    def at(self, rows: slice, columns: slice = slice(None)) -> "Sight":
        """Only these queries look, and only at these keys."""
        if rows == columns == slice(None):
            return self
        present = None if self.present is None else self.present[:, columns]
        bias = None if self.bias is None else self.bias[:, :, rows, columns]
        return Sight(self.queries[:, rows], self.keys[:, columns], present, self.causal, self.window, bias)

    def of_heads(self, heads: slice) -> "Sight":
        """For these query heads alone."""
        if self.bias is None:
            return self
        return Sight(self.queries, self.keys, self.present, self.causal, self.window, self.bias[:, heads])

    def blocks(self, size: int) -> list[tuple[slice, slice]]:
        """So many queries at a time, and the keys from the first to the last that any of them sees by order and
        distance: what lies outside a window, or after the last query, costs nothing, and no mask of [T, S] is made.
        """
        if size not in self.cut:
            rows = [slice(start, start + size) for start in range(0, self.queries.shape[1], size)]
            self.cut[size] = [(some, self._reach(some)) for some in rows]
        return self.cut[size]

    def _reach(self, rows: slice) -> slice:
        asked = self.queries[:, None, rows, None]
        seen = self._within(asked.amin(2, True), asked.amax(2, True)).flatten(0, 2).any(0).nonzero()
        return slice(int(seen[0]), int(seen[-1]) + 1)

    def mask(self) -> Tensor:
        """[B or 1, 1, T, S], True where the query may see the key. Made once."""
        if self.made is None:
            self.made = self._make()
        return self.made

    def _make(self) -> Tensor:
        asked = self.queries[:, None, :, None]
        seen = self._within(asked, asked)  # → [B, 1, T, S]
        return seen if self.present is None else seen & self.present[:, None, None, :]

    def _within(self, first: Tensor, last: Tensor) -> Tensor:
        """Keys that order and distance let a query at a position from first to last see: [B, 1, T, 1] → [B, 1, T, S].

        Compared, not subtracted: a byte a pair.
        """
        keys = self.keys[:, None, None, :]
        ahead = 0 if self.causal else FAR if self.window is None else self.window - 1
        seen = keys <= last + ahead
        return seen if self.window is None else seen.logical_and_(keys > first - self.window)

    def added(self, dtype: torch.dtype) -> Tensor:
        """What is added to the scores: the bias where the query may see the key, else -∞. [B or 1, H or 1, T, S]."""
        bias = torch.zeros((), dtype=dtype, device=self.queries.device) if self.bias is None else self.bias.to(dtype)
        return torch.where(self.mask(), bias, float("-inf"))

    def narrow(self) -> bool:
        """Does the window hide anything?"""
        return self.window is not None and self.window < self.keys.shape[1]

    def flag(self) -> dict | None:
        """The kernel's own arguments that say the same as the mask; None: none do."""
        if self.bias is not None or self.present is not None or self.narrow():
            return None
        if not self.causal or torch.equal(self.queries, self.keys[:, -1:]):  # the last query sees every key
            return {}
        return {"is_causal": True} if self.queries.shape[1] == self.keys.shape[1] else None

    def for_kernel(self, dtype: torch.dtype = torch.float32) -> dict:
        """This mask as the kernel's arguments."""
        flag = self.flag()
        if flag is None:
            return {"attn_mask": self.mask() if self.bias is None else self.added(dtype)}
        return flag


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
    # Held by no list: queries and keys go when they are turned. [B, T, H·D], [B, S, G·D] twice
    q, k, v = linears(x, w, "q", "k", "v") if x is memory else (linear(x, w, "q"), *linears(memory, w, "k", "v"))
    q = probe("q", split_heads(q, part.n_heads))
    k = probe("k", split_heads(k, part.n_kv_heads))
    v = probe("v", split_heads(v, part.n_kv_heads))
    if part.qk_norm_place == "before":
        q, k = norm_heads(q, "q_norm", w, spec, probe), norm_heads(k, "k_norm", w, spec, probe)
    if turns is not None:
        q = probe("q_rot", rotate(q, turns[0], spec.position))
        k = probe("k_rot", rotate(k, turns[1], spec.position))
    if part.qk_norm_place == "after":
        q, k = norm_heads(q, "q_norm", w, spec, probe), norm_heads(k, "k_norm", w, spec, probe)
    scale = q.shape[-1] ** -0.5 if part.scale is None else part.scale
    z = attend(q, k, v, sight, scale, w.get("sinks"), part.softcap, probe)
    return linear(merge_heads(probe("z", z)), w, "o")


def norm_heads(x: Tensor, name: str, w: Weights, spec: Spec, probe: Silent) -> Tensor:
    """q or k [B, H, T, D] normed where this architecture does so: head by head, or all heads together."""
    match spec.attention.qk_norm:
        case "none":
            return x
        case "head":
            x = norm(x, w, name, spec)
        case "each":
            x = torch.stack([norm(head, w, f"{name}.{i}", spec) for i, head in enumerate(x.unbind(1))], 1)
        case "whole":
            x = split_heads(norm(merge_heads(x), w, name, spec), x.shape[1])
    return probe(name, x)


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, T, H·D] → [B, H, T, D]


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)  # [B, H, T, D] → [B, T, H·D]


def fused(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, sinks: Tensor | None) -> Tensor:
    """Softmax-weighted values by the fused kernel: q [B, H, T, D], k and v [B, G, S, D] → [B, H, T, D].

    Where it needs a mask, a block of queries at a time: each has a mask of its own, and only the keys that it may see.
    """
    if (sinks is None and sight.flag() is not None) or q.shape[2] <= QUERY_BLOCK:
        return kernel(q, k, v, sight, scale, sinks)
    z = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)  # as the kernel lays it
    for rows, columns in sight.blocks(QUERY_BLOCK):
        seen = sight.at(rows, columns)
        z[:, :, rows] = kernel(q[:, :, rows], k[:, :, columns], v[:, :, columns], seen, scale, sinks)
    return z


def kernel(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, sinks: Tensor | None) -> Tensor:
    """fused, for all these queries at once."""
    seen = {} if sinks is not None else sight.for_kernel(q.dtype)
    if sinks is not None:
        # A sink is one more key: its value is zero, and its score stands in the additive mask.
        mask = sight.added(q.dtype).expand(-1, q.shape[1], -1, -1)
        column = sinks.to(q.dtype)[None, :, None, None].expand(*mask.shape[:3], 1)
        seen = {"attn_mask": torch.cat((mask, column), -1)}  # [B, H, T, S + 1]
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))  # [B, G, S + 1, D]
    z = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **seen)
    # The CPU's kernel takes a query whose scores are NaN, or all -∞, for one that sees nothing, and gives zeros.
    doubtful = sinks is None and q.device.type == "cpu" and (z[..., 0] == 0).any()
    if doubtful and not bounded(q, k, scale):
        z = z.masked_fill(lost(q, k, sight, scale), float("nan"))
    return z if sight.present is None else z.masked_fill(~sight.mask().any(-1, keepdim=True), 0)


def bounded(q: Tensor, k: Tensor, scale: float) -> bool:
    """Are all numbers finite, and so small that every score is? By the largest of each."""
    largest = [x.abs().amax().to(wide(x.dtype)) for x in (q, k)]
    return bool((largest[0] * largest[1] * (q.shape[-1] * max(scale, 1))).isfinite())


def lost(q: Tensor, k: Tensor, sight: Sight, scale: float) -> Tensor:
    """Queries that see keys and whose softmax is none all the same: [B, H, T, 1]. A head at a time."""
    found, group = [], q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        bias = None if sight.bias is None else sight.bias[:, head, None]
        one = weigh(q[:, head, None], k[:, head // group, None], sight.mask(), scale, bias=bias)
        found.append(one.pattern.isnan().any(-1, keepdim=True))
    return torch.cat(found, 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    scale: float,
    sinks: Tensor | None,
    cap: float | None,
    probe: Silent = SILENT,
) -> Tensor:
    """Softmax-weighted values, q [B, H, T, D], k and v [B, G, S, D] → [B, H, T, D], and what the probe asks to see.

    By the fused kernel; step by step where it can't express what is wanted: a soft cap on the scores, or a probe that
    replaces scores or pattern.
    """
    if cap is None and not (probe.replaces("scores") or probe.replaces("pattern")):
        watch(q, k, sight, scale, sinks, cap, probe)
        return fused(q, k, v, sight, scale, sinks)
    whole = every_head(q, k, sight, scale, sinks, cap, probe)
    watch(q, k, sight, scale, sinks, cap, probe, whole)
    v = of_queries(v, q.shape[1]).to(whole.pattern.dtype)  # [B, G, S, D] → [B, H, S, D]
    return (whole.pattern @ v).to(q.dtype)  # [B, H, T, S] · [B, H, S, D] → [B, H, T, D]


def of_queries(x: Tensor, n_heads: int, heads: slice = slice(None)) -> Tensor:
    """The key/value head h // (H / G) that each of these query heads h reads: [B, G, S, D] → [B, H, S, D]."""
    group = n_heads // x.shape[1]
    return x[:, heads] if group == 1 else x[:, [head // group for head in range(n_heads)[heads]]]


def every_head(
    q: Tensor, k: Tensor, sight: Sight, scale: float, sinks: Tensor | None, cap: float | None, probe: Silent
) -> "Weighed":
    """Scores and softmax weights of the whole layer, as the probe replaces them."""
    k = of_queries(k, q.shape[1])  # [B, G, S, D] → [B, H, S, D]
    return weigh(q, k, sight.mask(), scale, sinks, cap, sight.bias, probe)


def watch(
    q: Tensor,
    k: Tensor,
    sight: Sight,
    scale: float,
    sinks: Tensor | None,
    cap: float | None,
    probe: Silent,
    whole: "Weighed | None" = None,
) -> None:
    """Scores and softmax weights of the heads and queries that the probe asks for: cut from the whole layer's, where
    the run itself went by those, else from what the kernel was given.
    """
    wanted = probe.selection("scores") or probe.selection("pattern") or probe.selection("sink")
    for part in () if wanted is None else wanted.parts(q.shape[1], q.shape[2]):
        if whole is None:
            heads, seen = part.heads, sight.at(part.queries).of_heads(part.heads)
            of_k, of_sinks = of_queries(k, q.shape[1], heads), None if sinks is None else sinks[heads]
            of_scores = probe.selection("scores") is not None
            found = in_blocks(q[:, heads, part.queries], of_k, seen, scale, of_sinks, cap, of_scores)
        else:
            found = (x if x is None or part == EVERYTHING else x[:, part.heads, part.queries].clone() for x in whole)
        for name, x in zip(BESIDE, found):
            if x is not None:
                probe(name, x)
        del found, x  # before the next part is made


class Weighed(NamedTuple):
    """Scores before the mask and softmax weights after it, both [B, H, T, S]; the sinks' share of them [B, H, T]."""

    scores: Tensor | None
    pattern: Tensor
    sink: Tensor | None


def in_blocks(
    q: Tensor, k: Tensor, sight: Sight, scale: float, sinks: Tensor | None, cap: float | None, of_scores: bool
) -> Weighed:
    """weigh, a block of queries at a time: what it makes on the way stays in the processor's cache, and keys that none
    of the block may see cost nothing. of_scores False: nobody wants scores.
    """
    blocks = sight.blocks(QUERY_BLOCK * max(1, FEW_HEADS // max(1, q.shape[1])))
    if len(blocks) == 1 and (of_scores or blocks[0][1] == slice(0, k.shape[2])):
        return weigh(q, k, sight.mask(), scale, sinks, cap, sight.bias)
    pattern = q.new_empty(*q.shape[:3], k.shape[2], dtype=wide(q.dtype))  # [B, H, T, S]
    scores = torch.empty_like(pattern) if of_scores else None
    sink = None if sinks is None else pattern.new_empty(q.shape[:3])  # [B, H, T]
    for rows, columns in reversed(blocks):  # the widest first: where its parts lay, the others' find room
        read = slice(0, k.shape[2]) if of_scores else columns
        seen = sight.at(rows, read)
        found = weigh(q[:, :, rows], k[:, :, read], seen.mask(), scale, sinks, cap, seen.bias)
        pattern[:, :, rows, read] = found.pattern
        beyond = found.pattern[..., :1] * 0  # NaN stays: a query without weights has none of any key
        pattern[:, :, rows, : read.start], pattern[:, :, rows, read.stop :] = beyond, beyond
        if scores is not None:
            scores[:, :, rows] = found.scores
        if sink is not None:
            sink[:, :, rows] = found.sink
        del found  # before the next is made
    return Weighed(scores, pattern, sink)


def weigh(
    q: Tensor,
    k: Tensor,
    mask: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    cap: float | None = None,
    bias: Tensor | None = None,
    probe: Silent = SILENT,
) -> Weighed:
    """q [B, H, T, D], k [B, H, S, D], mask [B, 1, T, S], bias [B, H, T, S] → scores and softmax weights.

    A query that sees no key, or whose scores are all replaced by -∞, weighs none (zeros). Half types compute in
    float32. probe: what replaces scores or pattern on the way.
    """
    q, k, hidden = q.to(wide(q.dtype)), k.to(wide(k.dtype)), float("-inf")
    # Passes over T × S numbers cost more than the products: they write in place where the tensor is this function's.
    scores = softcap((q @ k.mT).mul_(scale), cap)  # [B, H, T, D] · [B, H, D, S] → [B, H, T, S]
    scores = probe.replace("scores", scores if bias is None else scores.add_(bias.to(scores.dtype)))
    seen = torch.where(mask, scores, hidden)
    if sinks is not None:
        column = sinks.to(seen.dtype)[None, :, None, None].expand(*seen.shape[:3], 1)
        pattern = torch.cat((seen, column), -1).softmax(-1)  # [B, H, T, S + 1]
        return Weighed(scores, probe.replace("pattern", pattern[..., :-1]), pattern[..., -1])
    pattern = seen.softmax(-1)
    if pattern[..., 0].isnan().any():
        blind = (seen == hidden) if probe.replaces("scores") else ~mask
        pattern = pattern.masked_fill(blind.all(-1, keepdim=True), 0)
    return Weighed(scores, probe.replace("pattern", pattern), None)
