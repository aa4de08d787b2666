"""Numbers about tensors, taken in double precision, handed on as plain Python."""

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
    mean = sum(float(block.double().sum()) for block in blocks) / size
    square = sum(float((block.double() - mean).square_().sum()) for block in blocks)
    return Stats(mean, (square / size) ** 0.5, float(x.abs().max()))


class Ranked(NamedTuple):
    """One id among all: its rank from 1 (equal logits in the order of ids), and the ranks that its tie spans."""

    rank: int
    id: int
    logit: float
    prob: float
    logprob: float
    tie_first: int
    tie_last: int


def rank(logits: Tensor, k: int, also: tuple[int, ...] = (), temperature: float = 1.0) -> list[Ranked]:
    """The k best ids of logits [V] and the ids in `also`, by rank. Softmax of logits / temperature, in float64."""
    logits = logits.double()
    # A logit that is no number ranks last, and is reported as what it is.
    ordered = logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    worst = ordered.topk(min(k, len(ordered))).values[-1]
    candidates = (ordered >= worst).nonzero().flatten().tolist()
    values = ordered.tolist() if len(candidates) > 1024 else {id_: float(ordered[id_]) for id_ in candidates}
    best = sorted(candidates, key=lambda id_: (-values[id_], id_))[:k]
    logprobs = (logits / temperature).log_softmax(-1)
    found = [_ranked(id_, logits, ordered, logprobs) for id_ in {*best, *also}]
    return sorted(found, key=lambda ranked: ranked.rank)


def _ranked(id_: int, logits: Tensor, ordered: Tensor, logprobs: Tensor) -> Ranked:
    above = int((ordered > ordered[id_]).sum())
    equal = ordered == ordered[id_]
    logprob = float(logprobs[id_])
    return Ranked(
        rank=above + int(equal[: id_ + 1].sum()),
        id=id_,
        logit=float(logits[id_]),
        prob=float(logprobs[id_].exp()),
        logprob=logprob,
        tie_first=above + 1,
        tie_last=above + int(equal.sum()),
    )


def surprise(logits: Tensor, ids: list[int]) -> tuple[list[float], list[int]]:
    """For logits [T, V] and the ids [T] that came: each id's log-probability (float64) and rank from 1."""
    logprobs, ranks = [], []
    for row, id_ in zip(logits, ids):
        row = row.double()
        logprobs.append(float(row.log_softmax(-1)[id_]))
        ranks.append(int((row > row[id_]).sum() + (row[: id_ + 1] == row[id_]).sum()))
    return logprobs, ranks
