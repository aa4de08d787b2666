"""Scaling: q·k of longer vectors spreads wider, and a softmax of wide scores lets little through."""

from typing import TYPE_CHECKING

from gptcli.lab.engine import drawing, require
from gptcli.report.lab import ScalingReport, Sharpness, Spread

if TYPE_CHECKING:
    from torch import Tensor

MOST_NUMBERS = 2 * 10**8  # of all sizes' vectors
BLOCK = 1 << 20  # numbers that are held at once
NEAR = 0.1  # of the root: so far off, there were too few pairs


def scaling_report(dims: list[int], samples: int, seed: int, scores: list[float], divide_dim: int) -> ScalingReport:
    """Spreads of q·k for pairs of vectors of each size, and the softmax of scores as they are and divided by √d.

    Computed by the engine's own scores and softmax in float64; gradients by autograd. Raises GptcliError.
    """
    drawn = 2 * samples * sum(dims)
    require(drawn <= MOST_NUMBERS, f"{drawn:,} random numbers", "take fewer --samples or a smaller --dim")
    require(len(scores) <= 64, f"{len(scores)} scores", "give 64 at most")
    spreads = [_spread(dim, samples, seed) for dim in dims]
    raw, divided = _sharpness(scores, 1.0), _sharpness(scores, divide_dim**0.5)
    return ScalingReport(
        samples=samples,
        seed=seed,
        divide_dim=divide_dim,
        spreads=spreads,
        raw=raw,
        divided=divided,
        see=f"{_spreading(spreads, samples)}; {_softened(raw, divided, divide_dim)}",
    )


def _spread(dim: int, samples: int, seed: int) -> Spread:
    import torch

    from gptcli.model.attention import weigh
    from gptcli.model.measure import statistics

    normal, seen = drawing(seed, f"vectors of {dim}"), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    products, divided = [], []
    for count in _blocks(samples, max(1, BLOCK // dim)):
        q, k = torch.randn(2, count, 1, 1, dim, generator=normal, dtype=torch.float64)  # [B, H = 1, T = 1, D] each
        products.append(weigh(q, k, seen, 1.0)[0].flatten())
        divided.append(weigh(q, k, seen, dim**-0.5)[0].flatten())
    stds = (statistics(torch.cat(found)).std for found in (products, divided))
    return Spread(dim=dim, root=dim**0.5, measured=next(stds), divided=next(stds))


def _blocks(total: int, size: int) -> list[int]:
    return [size] * (total // size) + [total % size] * (total % size > 0)


def _sharpness(scores: list[float], divisor: float) -> Sharpness:
    """A query of the one number 1 meets keys of one number each: q·k are the scores."""
    import torch

    from gptcli.model.attention import weigh

    k = torch.tensor(scores, dtype=torch.float64)[None, None, :, None].requires_grad_()  # [1, 1, S, 1]
    seen = torch.ones(1, 1, 1, len(scores), dtype=torch.bool)
    read, weights, _ = weigh(torch.ones(1, 1, 1, 1, dtype=torch.float64), k, seen, 1 / divisor)  # [1, 1, 1, S] twice
    return Sharpness(
        divisor=divisor,
        scores=read.flatten().tolist(),
        weights=weights.flatten().tolist(),
        gradients=[_answer(weights, read, i) for i in range(len(scores))],
    )


def _answer(weights: "Tensor", read: "Tensor", i: int) -> float:
    """How the weight i answers its own score."""
    import torch

    return float(torch.autograd.grad(weights[..., i].sum(), read, retain_graph=True)[0][..., i])


def _spreading(spreads: list[Spread], samples: int) -> str:
    least, most = (end(spreads, key=lambda one: one.dim) for end in (min, max))
    ends = dict.fromkeys(f"{one.measured:.2f} at d = {one.dim}" for one in (least, most))
    off = max(abs(one.measured / one.root - 1) for one in spreads)
    if off > NEAR:
        return f"q·k spreads by {' and '.join(ends)}: up to {off:.0%} off √d, {samples} pairs are too few to see it"
    if most.dim == 1:
        return f"q·k spreads by {' and '.join(ends)}: with one number there is nothing to divide"
    return f"q·k spreads by √d ({', '.join(ends)}), by {most.divided:.2f} once divided"


def _softened(raw: Sharpness, divided: Sharpness, dim: int) -> str:
    given = f"softmax({', '.join(f'{x:g}' for x in raw.scores)})"
    before = f"{given} gives the first {_share(raw.weights[0])}"
    if abs(raw.weights[0] - divided.weights[0]) < 1e-9:
        return f"{before}, divided by √{dim} or not"
    return (
        f"{before}, gradient {_share(raw.gradients[0])}; divided by √{dim} {_share(divided.weights[0])}, "
        f"gradient {_share(divided.gradients[0])}"
    )


def _share(x: float) -> str:
    """A weight or a gradient: two decimals, or as many as tell it from 0 and from 1."""
    near = min(x, 1 - x)
    if near >= 5e-6:
        return f"{x:.2f}" if near >= 0.005 else f"{x:.5f}"
    return "1" if x > 0.5 else f"{x:.1e}" if x else "0"
