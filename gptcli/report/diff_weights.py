"""`diff A B --weights`: two models' weights side by side, by this project's names. Nothing is run.

What a file does to weights (prefixes, transposed or fused matrices, shards, permuted rows, packed blocks) is undone by
how it is read, so that what differs here are the numbers.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Literal

from gptcli import count
from gptcli.layout import Param, Place
from gptcli.report import Finding, ModelFacts, Report
from gptcli.report.traits import traits
from gptcli.report.weights_verdict import SAME, Verdict, verdict_of
from gptcli.source import Model
from gptcli.spec import Rope

if TYPE_CHECKING:
    from gptcli.model.differences import Gap
    from gptcli.model.held import Held
    from gptcli.model.likeness import Layout

# How two tensors compare: every number equal and in one type; equal, `stored` in different types; one the other
# `rounded` to a type; changed in a way that the architectures tell; `different`; of another `shape`.
Kind = Literal["identical", "stored", "rounded", "told", "different", "shape"]


@dataclass(frozen=True, kw_only=True)
class TensorGap:
    """A tensor that both models have. dtype, bits: the type that holds it, and its bits a number.

    max_abs: of b - a; relative: ‖b - a‖ / ‖a‖ (Frobenius); cosine of the angle between both; changed: the share of
    numbers that differ; null where there is none (zeros throughout, another shape). not_finite: numbers in a and in b.
    said: what makes b of a, and left: what that leaves of b, ‖changed a - b‖ / ‖b‖. rank: of b - a, where it is low:
    its singular values above rank_above.
    """

    name: str
    kind: Kind
    shape_a: list[int]
    shape_b: list[int]
    dtype_a: str
    dtype_b: str
    bits_a: float
    bits_b: float
    max_abs: float | None = 0.0
    relative: float | None = 0.0
    cosine: float | None = 1.0
    changed: float | None = 0.0
    not_finite: list[int] = field(default_factory=lambda: [0, 0])
    said: str = ""
    left: float | None = None
    rank: int | None = None
    rank_above: float | None = None


@dataclass(frozen=True)
class Lone:
    """A tensor that one of the models has alone."""

    name: str
    shape: list[int]


@dataclass(frozen=True, kw_only=True)
class PartGap:
    """A part of the model: all of `embed`, or of one layer its `attention`, `cross-attention`, `mlp` or `norms`.

    layer_index: from 0; None outside the layers. tensors: that both have, and how many of them are not the same;
    relative, max_abs: over those, and over what is rounded; changed: the share of all numbers.
    """

    stack: str
    layer_index: int | None
    part: str
    tensors: int
    different: int
    max_abs: float
    relative: float | None
    changed: float


@dataclass(kw_only=True)
class WeightsDiffReport(Report):
    """said: the verdict in one line. tensors: in the order of A's layout; ties: what of the heads is tied in one model
    alone; architecture: in what else the two differ, each choice as [what, in A, in B]; bits: a number, of all weights.
    """

    schema = "gptcli.diff.weights/1"
    tells_findings = True
    a: ModelFacts
    b: ModelFacts
    verdict: Verdict
    said: str
    bits_a: float
    bits_b: float
    only_a: list[Lone]
    only_b: list[Lone]
    ties: list[str]
    architecture: list[list[str | None]]
    tensors: list[TensorGap]
    parts: list[PartGap]


Progress = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]


def weights_report(
    a: Model, b: Model, progress: Progress = lambda what, size: nullcontext(lambda done: None)
) -> WeightsDiffReport:
    """Compares the weights of two models. progress: as a context that gives a step, told how many bytes are done.

    Raises GptcliError where weights can't be read.
    """
    sides = here, there = _Side(a), _Side(b)
    common = [name for name in here.params if name in there.params and not (here.tied(name) and there.tied(name))]
    sizes = {name: 4 * prod(here.params[name].shape) for name in common}
    compared: list[tuple[TensorGap, Gap | None]] = []
    with progress("weights", sum(sizes.values())) as step:
        for name, size in sizes.items():
            compared.append(_compared(name, here, there))
            step(size)
    _judge(compared, here, there)
    tensors = [tensor for tensor, _ in compared]
    only_a, only_b = ([Lone(p.name, list(p.shape)) for p in x.params.values() if p.name not in y.params]
                      for x, y in (sides, sides[::-1]))  # fmt: skip
    verdict, said = verdict_of(tensors, only_a, only_b)
    findings = [Finding("weights-differ", said)] if verdict == "different" else []
    return WeightsDiffReport(
        findings=[*findings, *_not_finite(tensors)],
        a=a.facts(_most([(t.dtype_a, prod(t.shape_a)) for t in tensors])),
        b=b.facts(_most([(t.dtype_b, prod(t.shape_b)) for t in tensors])),
        verdict=verdict,
        said=said,
        bits_a=_mean([(t.bits_a, prod(t.shape_a)) for t in tensors]),
        bits_b=_mean([(t.bits_b, prod(t.shape_b)) for t in tensors]),
        only_a=only_a,
        only_b=only_b,
        ties=[_tie(name, here, there) for name in common if here.tied(name) or there.tied(name)],
        architecture=_architecture(a, b),
        tensors=tensors,
        parts=_parts(compared),
    )


def _most(types: list[tuple[str, int]]) -> str:
    """The type that holds most numbers."""
    found: Counter[str] = Counter()
    for word, numbers in types:
        found[word] += numbers
    return found.most_common(1)[0][0] if found else "float32"


def _mean(weighed: list[tuple[float, int]]) -> float:
    return sum(x * numbers for x, numbers in weighed) / max(1, sum(numbers for _, numbers in weighed))


class _Side:
    """A model's parameters by name, and where they lie."""

    def __init__(self, model: Model):
        from gptcli.model.held import parameters

        self.model, self.params, self.own = model, {p.name: p for p in model.layout}, parameters(model)
        self.beside: dict[tuple, list[str]] = {}
        for param in model.layout:
            self.beside.setdefault(_place(param), []).append(param.name)

    def tied(self, name: str) -> bool:
        return name not in self.own

    def held(self, name: str) -> "Held":
        return self.own[self.params[name].tied_to if self.tied(name) else name]()


def _place(param: Param) -> tuple:
    """What is the same of parameters that could be taken for one another: their part of the model, shape, and kind."""
    *inside, _, leaf = param.name.split(".")
    return tuple(inside), leaf, param.shape


def _judge(compared: "list[tuple[TensorGap, Gap | None]]", here: _Side, there: _Side) -> None:
    """What may have gone through a narrower type than both have is rounded only where all of its model has."""
    from gptcli.model.differences import general

    narrower = {t.said for t, _ in compared if t.kind == "rounded" and not t.said.endswith((t.dtype_a, t.dtype_b))}
    for said in narrower:
        pairs = ((gap, t.said == said, partial(here.held, t.name), here.params[t.name].shape) for t, gap in compared)
        if not general(said.rpartition(" ")[2], pairs):
            for i, (tensor, _) in enumerate(compared):
                if tensor.said == said:
                    compared[i] = _compared(tensor.name, here, there, rounds=False)


def _compared(name: str, here: _Side, there: _Side, rounds: bool = True) -> "tuple[TensorGap, Gap | None]":
    """The tensor's row, and what it comes from where numbers differ. rounds: as rounding, where it may be that."""
    from gptcli.model.differences import compare
    from gptcli.model.likeness import change, rank, reshaped

    a, b, p, q = here.held(name), there.held(name), here.params[name], there.params[name]
    row = partial(
        TensorGap, name=name, shape_a=list(p.shape), shape_b=list(q.shape), dtype_a=a.word, dtype_b=b.word,
        bits_a=a.bits, bits_b=b.bits,
    )  # fmt: skip
    if p.shape != q.shape:
        found = reshaped(a, b, p.shape, q.shape)
        none = dict.fromkeys(("max_abs", "relative", "cosine", "changed"))
        return row(kind="shape", **none, said=found.said if found else "", left=found and found.left), None
    kind, gap, rounding = compare(a, b, p.shape)
    kind, rounding = (kind, rounding) if rounds else ("different", None)
    if gap is None:
        return row(kind=kind), None
    numbers = {
        "max_abs": gap.max_abs, "relative": gap.relative, "cosine": gap.cosine, "changed": gap.changed / gap.numbers,
        "not_finite": list(gap.not_finite),
    }  # fmt: skip
    if rounding or kind != "different":
        other = {"a": "B", "b": "A"}
        said = f"{other[rounding.side]}'s in {rounding.word}" if rounding else ""
        return row(kind=kind, **numbers, said=said), gap
    shape = (p.shape[0], prod(p.shape[1:]))
    others = {one: here.held(one) for one in here.beside[_place(p)] if one != name}
    others |= {f"of layer {layer}": here.held(one) for layer, one in _elsewhere(name, here)} if not a.quantised else {}
    made = change(a, b, shape, gap, _rows(p, here.model), others)
    if made:
        told = made.code in _told(name, here.model, there.model)
        return row(kind="told" if told else "different", **numbers, said=made.said, left=made.left), gap
    low = rank(a, b, shape, gap) if p.role in ("matrix", "residual") else None
    return row(kind="different", **numbers, rank=low and low.rank, rank_above=low and low.above), gap


def _elsewhere(name: str, side: _Side) -> list[tuple[int, str]]:
    """The same parameter of other layers, where it has the same shape."""
    place = Place.of(name)
    if place.layer is None:
        return []
    layers = ((i, name.replace(f"layers.{place.layer}.", f"layers.{i}.", 1)) for i in range(side.model.spec.n_layers))
    shapes = ((i, one) for i, one in layers if i != place.layer and one in side.params and not side.tied(one))
    return [(i, one) for i, one in shapes if side.params[one].shape == side.params[name].shape]


def _rows(param: Param, model: Model) -> "Layout":
    """How the rows, or the columns, of a parameter belong to heads."""
    from gptcli.model.likeness import Layout

    place = Place.of(param.name)
    spec = place.spec(model.spec)
    size = (spec.across if place.name.startswith("cross.") else spec.attention).head_dim
    if param.axes[1:] == ("heads",):
        return Layout(head=size, across=True)
    if param.axes[0] not in ("heads", "kv_heads", "head_dim"):
        return Layout()
    turns = isinstance(spec.position, Rope) and place.name.startswith(("attn.q", "attn.k"))
    return Layout(head=size, turning=(spec.position.rotary_dim or size) if turns else 0)


def _told(name: str, a: Model, b: Model) -> set[str]:
    """The changes that make the same weights in both architectures."""
    here, there = (Place.of(name).spec(model.spec) for model in (a, b))
    found = set()
    if isinstance(here.position, Rope) and isinstance(there.position, Rope):
        found |= {f"to-{there.position.pairs}"} if there.position.pairs != here.position.pairs else set()
    shift = getattr(here.norm, "offset", 0.0) - getattr(there.norm, "offset", 0.0)
    return found | {{1: "plus-one", -1: "minus-one"}.get(shift, "")}


def _tie(name: str, here: _Side, there: _Side) -> str:
    """What of a tensor is tied in one of the two alone."""
    from gptcli.model.differences import compare

    tied, own, (a, b) = (here, there, "AB") if here.tied(name) else (there, here, "BA")
    partner = tied.params[name].tied_to
    alike = own.params[partner].shape == own.params[name].shape
    equal = alike and compare(own.held(name), own.held(partner), own.params[name].shape).gap is None
    return f"{name} is tied to {partner} in {a} alone; {b}'s {'equals' if equal else 'differs from'} its {partner}"


def _not_finite(tensors: Iterable[TensorGap]) -> Iterable[Finding]:
    for tensor in tensors:
        for letter, number in zip("AB", tensor.not_finite):
            if number:
                said = f"{letter}'s {tensor.name} holds {number:,} number{'s' * (number > 1)} not finite"
                yield Finding("not-finite", said, tensor.name)


def _architecture(a: Model, b: Model) -> list[list[str | None]]:
    x, y = (traits(m.spec, {one: len(layers) for one, layers in count.kinds(m.spec)}) for m in (a, b))
    return [[what, x.get(what), y.get(what)] for what in dict.fromkeys([*x, *y]) if x.get(what) != y.get(what)]


def _parts(compared: "Iterable[tuple[TensorGap, Gap | None]]") -> list[PartGap]:
    groups: dict[tuple[str, int | None, str], list[tuple[TensorGap, Gap | None]]] = {}
    for tensor, gap in compared:
        place = Place.of(tensor.name)
        part = count.component(tensor.name) if place.layer is None else count.layer_part(place.name)
        groups.setdefault((place.stack, place.layer, part), []).append((tensor, gap))
    found = []
    for (stack, layer, part), group in groups.items():
        gaps = [gap for _, gap in group if gap]
        square, square_a = sum(gap.square for gap in gaps), sum(gap.square_a for gap in gaps)
        found.append(
            PartGap(
                stack=stack,
                layer_index=layer,
                part=part,
                tensors=len(group),
                different=sum(tensor.kind not in SAME for tensor, _ in group),
                max_abs=max([gap.max_abs for gap in gaps], default=0.0),
                relative=math.sqrt(square / square_a) if square_a else None if square else 0.0,
                changed=sum(gap.changed for gap in gaps) / sum(prod(tensor.shape_a) for tensor, _ in group),
            )
        )
    return found
