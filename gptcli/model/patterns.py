"""What softmax weights say: pooled to the cells of a map, or summed up as what a head does.

T queries, S keys; t and s are the cells of a map. Sums are taken in double precision, on the CPU.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def pooled(
    x: Tensor, seen: Tensor, rows: int, columns: int, how: Literal["max", "mean"] = "max"
) -> tuple[Tensor, Tensor]:
    """Weights [T, S] in cells of rows × columns pairs, the last ones smaller where they don't divide T and S.

    Of a cell's pairs only those count that the mask lets see (`seen` [T, S]): the largest weight, or their mean.
    Returns the cells, 0 where none is seen, and where one is: two of [t, s].
    """
    x, seen = x.cpu(), seen.cpu()
    number = _cells(seen.long(), rows, columns, 0).sum((1, 3))  # [T, S] → [t, s]
    if how == "max":
        found = _cells(x.masked_fill(~seen, float("-inf")), rows, columns, float("-inf")).amax((1, 3))
    else:
        found = _cells(x.masked_fill(~seen, 0), rows, columns, 0).sum((1, 3), dtype=torch.float64)
        found = found / number.clamp(min=1)
    return found.masked_fill(number == 0, 0), number > 0


def _cells(x: Tensor, rows: int, columns: int, fill: float) -> Tensor:
    """Cut into cells, the last of each axis filled up: [T, S] → [t, rows, s, columns]."""
    x = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows), value=fill)
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


class Measures(NamedTuple):
    """What a head does, by mean over the queries that `measures` names; NaN where there is none."""

    previous: float
    first: float
    itself: float
    induction: float
    entropy: float
    entropy_share: float
    distance: float


def measures(pattern: Tensor, sink: Tensor | None, seen: Tensor, after: Tensor) -> Measures:
    """Weights of a text on itself [T, T], the sink's [T], who may be seen [T, T], and for each query the key that
    follows the latest earlier occurrence of its token [T] (-1: none) → means over queries.

    A query has a choice when it sees two keys or more, its sink counted as one. Over the queries that have one:
    previous, first, itself: the weight on the key one before, on key 0 (of the queries after it), on its own key, where
    it sees that key; induction: the weight on the key in `after`, likewise (arXiv:2209.11895); entropy: -Σ p·log2 p
    over keys and sink, in bits, and entropy_share: that by log2 of how many it sees; distance: Σ p·|query - key| / Σ p
    over the keys.
    """
    p, seen, after = pattern.cpu().double(), seen.cpu(), after.cpu()
    places = torch.arange(len(p))
    choices = seen.sum(-1) + (sink is not None)
    free = choices >= 2
    keys = {"previous": places - 1, "first": places * 0, "itself": places, "induction": after}
    held = {name: free & (key >= 0) & seen[places, key.clamp(min=0)] for name, key in keys.items()}
    held["first"] &= places > 0
    shares = p if sink is None else torch.cat((p, sink.cpu().double()[:, None]), -1)  # → [T, T + 1]
    bits = torch.special.entr(shares).sum(-1) / torch.tensor(2.0, dtype=torch.float64).log()
    apart = (places[:, None] - places).abs().double()  # [T, T]
    return Measures(
        *(_mean(p[places, key.clamp(min=0)], held[name]) for name, key in keys.items()),
        _mean(bits, free),
        _mean(bits / choices.double().log2(), free),
        _mean((p * apart).sum(-1) / p.sum(-1), free),
    )


def _mean(x: Tensor, held: Tensor) -> float:
    """The mean of the numbers that are held; NaN of none."""
    return float(x[held].mean()) if held.any() else float("nan")
