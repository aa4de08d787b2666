"""Norms: LayerNorm taken apart, RMSNorm beside it, each checked against the engine's."""

from math import fsum
from typing import Any, Literal

from gptcli.lab.engine import ROUNDING, at_most, require
from gptcli.report.lab import NormsReport, NormSteps
from gptcli.spec import read_spec

LARGEST = 1e100  # the square of a larger number is beyond float64


def norms_report(values: list[float], eps: float, weight: list[float], bias: list[float]) -> NormsReport:
    """Every step on one vector. weight and bias: one number for each of the vector's, or one for all.

    Raises GptcliError where their numbers don't fit, or nothing is left to divide by.
    """
    size = len(values)
    for option, given in (("--weight", weight), ("--bias", bias)):
        fits = len(given) in (1, size)
        require(fits, f"{option}: {len(given)} numbers for {size} values", "give one for each, or one for all")
    largest = max(map(abs, (*values, *weight, *bias)))
    require(largest <= LARGEST, f"{largest:g} is beyond {LARGEST:g}", "take smaller numbers")
    require(0 <= eps <= LARGEST, f"--eps {eps:g}: not a number from 0 on", "1e-5 is usual")
    weight, bias = (given * size if len(given) == 1 else given for given in (weight, bias))
    mean = fsum(values) / size
    layer = _steps("layernorm", mean, values, eps, weight, bias)
    rms = _steps("rmsnorm", None, values, eps, weight, [0.0] * size)
    return NormsReport(
        values=values, eps=eps, weight=weight, bias=bias, layernorm=layer, rmsnorm=rms, see=_see(layer, rms)
    )


def _steps(
    kind: Literal["layernorm", "rmsnorm"],
    mean: float | None,
    values: list[float],
    eps: float,
    weight: list[float],
    bias: list[float],
) -> NormSteps:
    deviations = [x - (mean or 0.0) for x in values]
    mean_square = fsum(x * x for x in deviations) / len(values)
    divisor = (mean_square + eps) ** 0.5
    alike = "alike" if kind == "layernorm" else "0"
    require(divisor > 0, f"the values are all {alike} and --eps is 0: nothing to divide by", "give an eps above 0")
    normalised = [x / divisor for x in deviations]
    result = [x * w + b for x, w, b in zip(normalised, weight, bias)]
    norm: dict[str, Any] = {"kind": kind, "eps": eps}
    engine = _engine(norm, values, weight, bias)
    return NormSteps(
        kind=kind,
        mean=mean,
        deviations=deviations,
        mean_square=mean_square,
        divisor=divisor,
        normalised=normalised,
        result=result,
        engine=engine,
        gap=max(abs(ours - theirs) for ours, theirs in zip(result, engine)),
    )


def _engine(part: dict[str, Any], values: list[float], weight: list[float], bias: list[float]) -> list[float]:
    """What the model's own norm makes of the vector, in float64."""
    import torch

    from gptcli.model.ops import norm
    from gptcli.model.weights import Weights

    sizes = {"vocab_size": 1, "context_length": 1, "hidden_size": len(values), "n_layers": 1, "lm_head": None}
    parts = {"position": "none", "attention": {"n_heads": 1}, "mlp": "none", "norm": part}
    tensors = {"norm.weight": torch.tensor(weight, dtype=torch.float64)}
    if part["kind"] == "layernorm":
        tensors["norm.bias"] = torch.tensor(bias, dtype=torch.float64)
    x = torch.tensor(values, dtype=torch.float64)
    return norm(x, Weights(tensors), "norm", read_spec(sizes | parts)).tolist()


def _see(layer: NormSteps, rms: NormSteps) -> str:
    said = f"both equal the engine's norms {at_most(max(layer.gap, rms.gap))}"
    size, largest = len(layer.normalised), max(map(abs, layer.deviations))
    of_rms = f"{rms.divisor:.4f}"
    if largest <= ROUNDING * abs(layer.mean):
        return f"the numbers are all alike: LayerNorm leaves only its bias, RMSNorm divides by {of_rms}; {said}"
    if abs(layer.mean) <= ROUNDING * largest:
        return f"the mean is 0 already, so LayerNorm and RMSNorm both just divide by {of_rms}; {said}"
    spread = (fsum(x * x for x in layer.normalised) / size) ** 0.5
    kept = fsum(rms.normalised) / size
    taken = f"takes off the mean {layer.mean:.4f} and divides by {layer.divisor:.4f}"
    return (
        f"LayerNorm {taken}, to a spread of {spread:.4f}; "
        f"RMSNorm only divides, by {of_rms}, and a mean of {kept:.4f} stays; {said}"
    )
