"""What a report proves of what it shows: claims, each with an error beside what is allowed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptcli.report import Finding
from gptcli.report.birth import birth
from gptcli.run import Run

if TYPE_CHECKING:
    from torch import Tensor

# Largest |weights @ v - fused| that rounding explains, relative to the head's largest Σ weight·|v|: of a long text's
# many values most cancel, and z itself may be far smaller than what was rounded.
TOLERANCE = {"float64": 1e-14, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim of the proof: an error beside what is allowed (0: must be exact)."""

    claim: str
    error: float
    allowed: float
    ok: bool


def check(claim: str, error: float, allowed: float) -> Check:
    """A claim of the proof, from what was measured."""
    return Check(claim=claim, error=error, allowed=allowed, ok=error <= allowed)


def differing(a: "Tensor", b: "Tensor") -> float:
    """How many numbers of two tensors of one shape are not the same; NaN is the same as NaN."""
    return float((~((a == b) | (a.isnan() & b.isnan()))).sum())


def unwatched(run: Run, watched: "Tensor") -> Check:
    """The logits of the run that was watched beside those of one that nobody watches."""
    return check("logits have the same bits unwatched", differing(watched, run.forward("all")), 0)


def softmax_claims(
    pattern: "Tensor", sink: "Tensor | None", seen: "Tensor", edited: bool
) -> "Iterator[tuple[str, Tensor, float]]":
    """What must hold of softmax weights [h, t, S], their sink's [h, t] and who may be seen [t, S]: claim, errors, what
    is allowed. edited: scores were replaced, and a row of -∞ weighs none.
    """
    sums = pattern.double().sum(-1) if sink is None else pattern.double().sum(-1) + sink.double()
    off = (sums - 1).abs()
    exact = 1e-12 if pattern.dtype == sums.dtype else 1e-5
    with_sink = " with their sink" * (sink is not None)
    yield f"rows of weights{with_sink} sum to 1", off.masked_fill(sums == 0, 0) if edited else off, exact
    yield "masked weights are 0", pattern.masked_fill(seen, 0).abs(), 0.0


def findings(run: Run, proof: Sequence[Check], x: "Tensor") -> list[Finding]:
    """What failed; where the run's logits or final vectors are not finite, of which a proof knows nothing but that it
    failed, where that was born.
    """
    if not x.isfinite().all():
        return [birth(run)]
    return [Finding("proof", f"{c.claim}: off by {c.error:g}, {c.allowed:g} allowed") for c in proof if not c.ok]
