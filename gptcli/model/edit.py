"""Changes to an activation on its way, each a new tensor, and what they changed.

where: an index of the whole tensor, its batch axis first.
"""

from typing import NamedTuple

from torch import Tensor

from gptcli.model.measure import double

Where = tuple[int | slice, ...]


class Difference(NamedTuple):
    """What a change did to a tensor: how many of its numbers are other ones, the largest |difference|, the norm (the
    root of the sum of squares) of the tensor before and of the difference. NaN is the same as NaN.
    """

    changed: int
    size: int
    largest: float
    norm: float
    norm_change: float


def written(x: Tensor, where: Where, values: Tensor | float) -> Tensor:
    """x with other values there, cast to its type."""
    new = x.clone()
    new[where] = values.to(x.device, x.dtype) if isinstance(values, Tensor) else values
    return new


def averaged(x: Tensor, where: Where, axis: int) -> Tensor:
    """x with its mean along an axis there. The mean is taken in double precision."""
    mean = double(x).mean(axis, keepdim=True).to(x.device, x.dtype).expand_as(x)
    return written(x, where, mean[where])


def difference(before: Tensor, after: Tensor) -> Difference:
    """How a tensor differs from what it was, in double precision."""
    before, after = before.cpu().double(), after.cpu().double()
    same = (before == after) | (before.isnan() & after.isnan())
    gap = (after - before).masked_fill(same, 0)
    return Difference(int((~same).sum()), same.numel(), float(gap.abs().max()), float(before.norm()), float(gap.norm()))
