"""How far two tensors lie apart, in float64, a block at a time: no copy is larger than a block."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

BLOCK = 1 << 18  # numbers
FAINT = 1e-3  # of a tensor's largest number: a row whose own is smaller is measured by this

Pairs = Sequence[tuple[Tensor, Tensor]]


class Gap(NamedTuple):
    """max_abs: max |a - b|; relative: ‖a - b‖ / ‖a‖; cosine of the two; all over what is finite in both.

    deviation: of all rows (along the last axis), the largest of max |a - b| beside the row's max |a|. worst: the index
    where |a - b| is largest, and both numbers there. lost: how many are finite on one side alone, or not finite in two
    ways; then worst is the first of them, and deviation is infinite.
    """

    max_abs: float
    relative: float
    cosine: float
    deviation: float
    worst: tuple[int, ...]
    a: float
    b: float
    lost: int


SAME = Gap(0.0, 0.0, 1.0, 0.0, (), 0.0, 0.0, 0)


def gap(a: Tensor, b: Tensor) -> Gap:
    """The gap between two tensors of one shape, of any types."""
    found = gap_over([(a, b)])
    return found._replace(worst=found.worst[1:])


def gap_over(pairs: Pairs) -> Gap:
    """The gap between several pairs taken as one; its worst index begins with the pair's number."""
    faint = FAINT * max(_largest(a) for a, _ in pairs)
    sums, most, deviation, lost, worst = torch.zeros(3, dtype=torch.float64), -1.0, 0.0, 0, ()
    for pair, start, x, y in _blocks(pairs):
        off = (x - y).abs_()
        if not math.isfinite(largest := float(off.max())):
            both = x.isfinite() & y.isfinite()
            unlike = _unlike(x, y) & ~both
            if unlike.any() and not lost:
                worst = _place(unlike.int(), pair, start, x, y)
            lost += int(unlike.sum())
            x, y, off = (z.where(both, 0.0) for z in (x, y, off))
            largest = float(off.max())
        if largest > most:
            most, worst = largest, worst if lost else _place(off, pair, start, x, y)
        of_rows = off.amax(-1)
        shares = of_rows / x.abs().amax(-1).clamp_(min=faint)
        deviation = max(deviation, float(shares.where(of_rows > 0, 0.0).max()))
        x, y, off = x.flatten(), y.flatten(), off.flatten()
        sums += torch.stack([off @ off, x @ x, y @ y]).cpu()
    (squares, of_a, of_b), deviation = sums.tolist(), math.inf if lost else deviation
    relative = math.sqrt(squares / of_a) if of_a else math.inf if squares else 0.0
    # a·b from the difference, whose square is known better than that of a product of two that are nearly one.
    lengths = math.sqrt(of_a) * math.sqrt(of_b)
    cosine = min((of_a + of_b - squares) / 2 / lengths, 1.0) if lengths else math.nan
    return Gap(most, relative, cosine, deviation, *worst, lost)


def alike(pairs: Pairs) -> bool:
    """Are all of them the same, bit for bit? NaN is the same as NaN, and types may differ where numbers don't."""
    return all(_same(a, b) for a, b in pairs)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype == b.dtype and a.device == b.device and torch.equal(a, b):
        return True
    return all(not _unlike(x, y).any() for _, _, x, y in _blocks([(a, b)]))


def outside(pairs: Pairs, atol: float, rtol: float) -> int:
    """How many numbers have |a - b| > atol + rtol · |a|, or are finite on one side alone."""
    found = 0
    for _, _, x, y in _blocks(pairs):
        found += int((~((x - y).abs_() <= x.abs().mul_(rtol).add_(atol)) & _unlike(x, y)).sum())
    return found


def both_lost(pairs: Pairs) -> int:
    """How many numbers are not finite in both."""
    found = 0
    for a, b in pairs:
        if not math.isfinite(float(a.sum(dtype=torch.float32))):  # one pass where all is well
            found += int((~a.isfinite() & ~b.to(a.device).isfinite()).sum())
    return found


class Effect(NamedTuple):
    """What a gap does to logits. kl: Σ p_A log(p_A / p_B) in nats, of every position of every text; top: how many of
    A's k likeliest ids are among B's, of every position; first: of how many positions the likeliest is the same.
    """

    kl: list[list[float]]
    top: list[list[int]]
    first: int


def effect(pairs: Pairs, k: int) -> Effect:
    """Logits [T, V] of every text on both sides."""
    kl, top, first = [[] for _ in pairs], [[] for _ in pairs], 0
    for text, _, x, y in _blocks(pairs):
        p, q = x.log_softmax(-1), y.log_softmax(-1)
        parts = p.exp() * (p - q)
        kl[text] += parts.where(p > -math.inf, 0.0).sum(-1).clamp_(min=0.0).tolist()  # rounding
        best, theirs = x.topk(k).indices, y.topk(k).indices
        top[text] += (best[:, :, None] == theirs[:, None]).sum((1, 2)).tolist()
        first += int((best[:, 0] == theirs[:, 0]).sum())
    return Effect(kl, top, first)


class Ranked(NamedTuple):
    """An id's rank (from 1; ids of one logit share it) and logit on both sides."""

    id: int
    rank_a: int
    rank_b: int
    logit_a: float
    logit_b: float


def ranked(a: Tensor, b: Tensor, k: int) -> list[Ranked]:
    """The k likeliest ids of either side, in A's order: logits [V] of one position. No id where one is NaN."""
    a, b = (x.cpu().double() for x in (a, b))
    if a.isnan().any() or b.isnan().any():
        return []
    ids = dict.fromkeys([*a.topk(k).indices.tolist(), *b.topk(k).indices.tolist()])
    found = [Ranked(i, *(int((x > x[i]).sum()) + 1 for x in (a, b)), float(a[i]), float(b[i])) for i in ids]
    return sorted(found, key=lambda one: (one.rank_a, one.rank_b))


def _unlike(x: Tensor, y: Tensor) -> Tensor:
    return ~((x == y) | (x.isnan() & y.isnan()))


def _largest(a: Tensor) -> float:
    found = float(a.abs().amax()) if a.numel() else 0.0
    return found if math.isfinite(found) else 0.0


Worst = tuple[tuple[int, ...], float, float]


def _place(off: Tensor, pair: int, start: tuple[int, ...], x: Tensor, y: Tensor) -> Worst:
    """Where a block is largest, and what stands there on both sides."""
    # numpy tells the place as torch does, without the 500 modules that torch.unravel_index brings in
    at = [int(i) for i in numpy.unravel_index(int(off.argmax()), off.shape)] if off.ndim else []
    inside = tuple(i + begin for i, begin in zip(at, (*start, *[0] * len(at))))
    return (pair, *inside), float(x[tuple(at)]), float(y[tuple(at)])


def _blocks(pairs: Pairs) -> Iterator[tuple[int, tuple[int, ...], Tensor, Tensor]]:
    """(number of the pair, where the block begins, a, b): whole rows of both in float64."""
    for pair, (a, b) in enumerate(pairs):
        device = "cpu" if a.device.type == "mps" else a.device  # which has no float64
        for slices in _slices(tuple(a.shape)) if a.numel() else ():
            x, y = (z[slices].to(device, torch.float64) for z in (a, b))
            yield pair, tuple(one.start for one in slices), x, y


def _slices(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Blocks of a tensor, by its first axes; its last axis stays whole."""
    inner = math.prod(shape[1:])
    if len(shape) < 2:
        yield ()
    elif inner > BLOCK and len(shape) > 2:
        yield from ((slice(i, i + 1), *rest) for i in range(shape[0]) for rest in _slices(shape[1:]))
    else:
        step = max(1, BLOCK // max(inner, 1))
        yield from ((slice(i, min(i + step, shape[0])),) for i in range(0, shape[0], step))
