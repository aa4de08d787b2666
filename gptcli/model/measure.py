"""Numbers about tensors, taken in double precision, handed on as plain Python."""

import math
from typing import NamedTuple

from torch import Tensor

BLOCK = 1 << 20  # numbers that are held in double precision at once


class Stats(NamedTuple):
    """Over a whole tensor: mean, standard deviation (population), largest absolute value."""

    mean: float
    std: float
    max_abs: float


def statistics(x: Tensor) -> Stats:
    """Two passes in float64, a block at a time, so that a large tensor is never held twice. NaN stays NaN."""
    flat, size = x.reshape(-1), x.numel()
    blocks = flat.split(BLOCK)
    mean = sum(float(double(block).sum()) for block in blocks) / size
    square = sum(float((double(block) - mean).square_().sum()) for block in blocks)
    return Stats(mean, (square / size) ** 0.5, float(x.abs().max()))


def alone(x: Tensor) -> Tensor:
    """x for who keeps it: a copy, where it is part of something larger that would stay in memory with it."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def double(x: Tensor) -> Tensor:
    """x in float64, where its device has that; on the CPU otherwise."""
    return (x.cpu() if x.device.type == "mps" else x).double()


class Ranked(NamedTuple):
    """One id among all: its rank from 1 (equal logits in the order of ids), and the ranks that its tie spans."""

    rank: int
    id: int
    logit: float
    prob: float
    logprob: float
    tie_first: int
    tie_last: int

    @property
    def tie(self) -> tuple[int, int] | None:
        """Those ranks; None where no other id has its logit."""
        return (self.tie_first, self.tie_last) if self.tie_last > self.tie_first else None


def rank(logits: Tensor, k: int, also: tuple[int, ...] = (), temperature: float = 1.0) -> list[Ranked]:
    """The k best ids of logits [V] and the ids in `also`, by rank. Softmax of logits / temperature, in float64."""
    logits = logits.cpu().double()
    # A logit that is no number ranks last, and is reported as what it is.
    ordered = logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    worst = ordered.topk(min(k, len(ordered))).values[-1]
    if also:
        worst = worst.minimum(ordered[list(also)].min())
    line = (ordered >= worst).nonzero().flatten()  # all that rank as high, in the order of ids, then by logit
    line = line[ordered[line].argsort(descending=True, stable=True)]
    _, tie, sizes = ordered[line].unique_consecutive(return_inverse=True, return_counts=True)
    ends = sizes.cumsum(0)
    logprobs = (logits / temperature).log_softmax(-1)
    places = [place for place, id_ in enumerate(line.tolist()) if place < k or id_ in also]
    ids, tie = line[places], tie[places]
    columns = (ids, logits[ids], logprobs[ids].exp(), logprobs[ids], ends[tie] - sizes[tie] + 1, ends[tie])
    return [Ranked(place + 1, *row) for place, row in zip(places, zip(*(column.tolist() for column in columns)))]


def surprise(logits: Tensor, ids: list[int]) -> tuple[list[float], list[int]]:
    """For logits [T, V] and the ids [T] that came: each id's log-probability (float64) and rank from 1."""
    logprobs, ranks = [], []
    for row, id_ in zip(logits, ids):
        row = double(row)
        logprobs.append(float(row.log_softmax(-1)[id_]))
        ranks.append(int((row > row[id_]).sum() + (row[: id_ + 1] == row[id_]).sum()))
    return logprobs, ranks


class Best(NamedTuple):
    """The id of a row's largest logit (the first of those that share it, `tied` in number), and its probability."""

    id: int
    logit: float
    prob: float
    tied: int


def best(logits: Tensor) -> list[Best]:
    """The best of each row of logits [T, V]. Softmax in float64; a logit that is no number ranks last."""
    ordered = logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    top = ordered.amax(-1, keepdim=True)  # → [T, 1]
    ids, tied = ordered.argmax(-1), (ordered == top).sum(-1)
    found = logits.gather(-1, ids[:, None])[:, 0]
    probs = (double(found) - double(logits).logsumexp(-1)).exp()
    return [Best(*row) for row in zip(ids.tolist(), found.tolist(), probs.tolist(), tied.tolist())]


class Leading(NamedTuple):
    """One of a row's best ids: its logit and its probability."""

    id: int
    logit: float
    prob: float


def leading(logits: Tensor, k: int) -> list[list[Leading]]:
    """The k best of each row of logits [T, V], equal ones in the order of ids, as `rank` has them."""
    ordered = logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    k = min(k, logits.shape[-1])
    worst = ordered.topk(k).values[:, -1:]  # → [T, 1]
    above, level = ordered > worst, ordered == worst
    kept = above | (level & (level.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    ids = kept.nonzero()[:, 1].view(-1, k)  # [T, k], in the order of ids
    ids = ids.gather(-1, ordered.gather(-1, ids).argsort(dim=-1, descending=True, stable=True))
    found = logits.gather(-1, ids)
    probs = (double(found) - double(logits).logsumexp(-1, keepdim=True)).exp()
    return [[Leading(*one) for one in zip(*row)] for row in zip(ids.tolist(), found.tolist(), probs.tolist())]


def entropy(logits: Tensor) -> float:
    """Of what logits [V] say, in bits: -Σ p·log₂ p. In float64."""
    logprobs = double(logits).log_softmax(-1)
    return float(-_weighed(logprobs.exp(), logprobs).sum() / math.log(2))


def divergence(logits: Tensor, other: Tensor) -> float:
    """KL(p ‖ q) in bits, Σ p·log₂(p/q), of what two rows of logits [V] say: p of the first. In float64."""
    p, q = double(logits).log_softmax(-1), double(other).log_softmax(-1)
    return float(_weighed(p.exp(), p - q).sum() / math.log(2))


def _weighed(p: Tensor, x: Tensor) -> Tensor:
    """p · x, and 0 where p is 0, whatever x is."""
    return (p * x).masked_fill(p == 0, 0)
