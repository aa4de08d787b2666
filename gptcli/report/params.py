"""`params`: what an architecture's weights count and weigh. Loads no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from gptcli import count
from gptcli.layout import AXES, Param, Place
from gptcli.report import ModelFacts, Report
from gptcli.source import Model

By = Literal["component", "layer", "tensor"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line: `times` alike things of `each` parameters. share is of the total; indent: part of the row above.

    axes and shape: of a single tensor, else empty. tied_to: the weight that holds the data; it then counts nothing.
    """

    name: str
    indent: int = 0
    times: int
    each: int
    parameters: int
    share: float
    bytes: int
    axes: list[str]
    shape: list[int]
    tied_to: str = ""


@dataclass(frozen=True)
class Totals:
    """total = unique: distinct numbers; untied: if every name held its own; non_embedding: layers and final norm.

    layers: the layers alone; nanogpt: all but the position table, as nanoGPT reports it.
    """

    total: int
    unique: int
    untied: int
    non_embedding: int
    layers: int
    nanogpt: int


@dataclass(kw_only=True)
class ParamsReport(Report):
    schema = "gptcli.params/1"
    model: ModelFacts
    by: By
    parameters: Totals
    rows: list[Row]
    bytes: int
    buffers: list[str]


def params_report(model: Model, by: By, dtype: str, full: bool) -> ParamsReport:
    """Counts by component, layer or tensor. full: layers that are alike are not folded."""
    dtype = count.dtype_name(dtype, model.stored_dtype)
    params = model.layout
    total = count.total(params)
    layers = sum(p.size for p in params if count.component(p.name) == "layers")
    counter = _Counter(total, count.ITEM_BYTES[dtype])
    return ParamsReport(
        model=model.facts(dtype),
        by=by,
        parameters=Totals(
            total=total,
            unique=total,
            untied=count.untied(params),
            non_embedding=count.non_embedding(params),
            layers=layers,
            nanogpt=count.without_positions(params),
        ),
        rows=list(counter.rows(params, by, full)),
        bytes=total * count.ITEM_BYTES[dtype],
        buffers=model.checkpoint.binding.buffers if model.checkpoint else [],
    )


@dataclass(frozen=True)
class _Counter:
    total: int
    item_bytes: int

    def row(self, name: str, params: list[Param], times: int = 1, indent: int = 0) -> Row:
        """`times` things, each made of these params."""
        each = sum(p.size for p in params)
        only = params[0] if len(params) == 1 else None
        return Row(
            name=name,
            indent=indent,
            times=times,
            each=each,
            parameters=each * times,
            share=each * times / self.total,
            bytes=each * times * self.item_bytes,
            axes=[AXES[axis] for axis in only.axes] if only else [],
            shape=list(only.shape) if only else [],
            tied_to=only.tied_to if only else "",
        )

    def rows(self, params: tuple[Param, ...], by: By, full: bool) -> Iterator[Row]:
        """In the order of the layout; a run of layers that are alike is one row. Two stacks have a row each, theirs
        below it.
        """
        stacks = {stack: list(group) for stack, group in groupby(params, key=lambda p: Place.of(p.name).stack)}
        for stack, inside in stacks.items():
            apart = len(stacks) > 1 and by != "tensor"
            if apart:
                yield self.row(stack or "decoder", inside)
            for row in self.stack_rows(inside, by, full):
                yield replace(row, indent=row.indent + 1) if apart else row

    def stack_rows(self, params: list[Param], by: By, full: bool) -> Iterator[Row]:
        for name, group in groupby(params, key=lambda p: count.component(p.name)):
            group = list(group)
            if name == "layers":
                for first, last, inside in _runs(group, full):
                    yield from self.layer_rows(first, last, inside, by, Place.of(group[0].name).stack)
            elif by == "tensor":
                yield from (self.row(p.name, [p]) for p in group)
            else:
                yield self.row(name, group)

    def layer_rows(self, first: int, last: int, inside: list[Param], by: By, stack: str) -> Iterator[Row]:
        times = last - first + 1
        if by == "tensor":
            numbers = f"{first}" if times == 1 else f"{{{first}-{last}}}"
            at = f"{stack}.layers.{numbers}".removeprefix(".")
            yield from (self.row(f"{at}.{p.name}", [p], times) for p in inside)
            return
        yield self.row(f"layer {first + 1}" if times == 1 else f"layers {first + 1}–{last + 1}", inside, times)
        if by == "component":
            for part in ("attention", "cross-attention", "mlp", "norms"):
                of_part = [p for p in inside if count.layer_part(p.name) == part]
                if of_part:
                    yield self.row(part, of_part, times, indent=1)


def _runs(params: list[Param], full: bool) -> Iterator[tuple[int, int, list[Param]]]:
    """(first, last, the weights of one) for every run of neighbouring layers with the same weights."""
    layers = []
    for _, group in groupby(params, key=lambda p: Place.of(p.name).layer):
        layers.append([p._replace(name=Place.of(p.name).name) for p in group])
    start = 0
    for i in range(1, len(layers) + 1):
        if i == len(layers) or full or layers[i] != layers[start]:
            yield start, i - 1, layers[start]
            start = i
