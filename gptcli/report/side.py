"""`params A B …`: several models side by side, a column each, with what differs from the first marked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from gptcli import count
from gptcli.data import entry, mutable
from gptcli.layout import Place
from gptcli.report import Report
from gptcli.report.costs import Costs
from gptcli.report.params import By, ParamsReport
from gptcli.source import Model

Cell = int | str | None  # None: this model has no such thing


@entry
class SideRow:
    """One thing in every model. differs: for each, whether it is not as in the first."""

    name: str
    indent: int
    cells: list[Cell]
    differs: list[bool]


@entry
class SideTable:
    """Rows of one kind: parameters, shapes, FLOPs, bytes. about: what a cell counts."""

    name: str
    about: str
    rows: list[SideRow]


@mutable
class SideReport(Report):
    """models: the report of each alone; columns: what each is called here; tables: what they have, row by row."""

    schema = "gptcli.params.side/1"
    by: By
    models: list[ParamsReport]
    columns: list[str]
    tables: list[SideTable]


class _Key(NamedTuple):
    """What a row is, in all models: its name and how deep it stands below the row above."""

    name: str
    indent: int = 0


Column = Mapping[_Key, Cell]


def side_by_side(models: Sequence[Model], reports: list[ParamsReport], by: By, full: bool) -> SideReport:
    """The reports of several models as columns. full: layers that are alike in every model are not folded."""
    weights = {"component": _components, "layer": _layers, "tensor": _tensors}[by]
    rows = _joined([weights(model) for model in models])
    rows = rows if full or by != "layer" else list(_folded(rows))
    about = "shapes [out, in], as many as there are" if by == "tensor" else "parameters"
    tables = [
        SideTable("weights", about, rows),
        SideTable("counts", "parameters", _counts(reports)),
        SideTable("bytes", "of the weights", _joined([_bytes(report) for report in reports])),
    ]
    if all(report.costs is not None for report in reports):
        tables += _costs([report.costs for report in reports])
    return SideReport(by=by, models=reports, columns=_names(models), tables=[t for t in tables if t.rows])


def _names(models: Sequence[Model]) -> list[str]:
    """What each model is called: where two are called alike, where they lie as well."""
    names = [model.spec.name for model in models]
    names = [name if names.count(name) == 1 else model.shown for name, model in zip(names, models)]
    return [name if names.count(name) == 1 else f"{i + 1} {name}" for i, name in enumerate(names)]


def _joined(columns: Sequence[Column]) -> list[SideRow]:
    """A row for everything that any model has: in the first one's order, the others' own after what they follow."""
    keys: list[_Key] = []
    for column in columns:
        at = 0
        for key in column:
            if key in keys:
                at = keys.index(key) + 1
            else:
                keys.insert(at, key)
                at += 1
    return [_row(key, [column.get(key) for column in columns]) for key in keys]


def _row(key: _Key, cells: list[Cell]) -> SideRow:
    return SideRow(key.name, key.indent, cells, [cell != cells[0] for cell in cells])


def _components(model: Model) -> Column:
    """Parameters of every component; of all layers together, by what they are made of. An encoder's stand below it."""
    found: dict[_Key, Cell] = {}
    for param in model.layout:
        place, part = Place.of(param.name), count.component(param.name)
        at, deep = (f"{place.stack} ", 1) if place.stack else ("", 0)
        keys = [_Key(place.stack)] if place.stack else []
        keys.append(_Key(f"{at}{part}", deep))
        if place.layer is not None and keys[-1] not in found:  # in this order, whichever norm comes first
            parts = ("attention", "cross-attention", "mlp", "norms")
            found |= {keys[-1]: 0} | {_Key(f"{at}{name}", deep + 1): 0 for name in parts}
        if place.layer is not None:
            keys.append(_Key(f"{at}{count.layer_part(place.name)}", deep + 1))
        for key in keys:
            found[key] = found.get(key, 0) + param.size
    made = {f"{at}{name}" for at in ("", "encoder ") for name in ("cross-attention", "mlp", "norms")}
    return {key: size for key, size in found.items() if size or key.name not in made}


def _layers(model: Model) -> Column:
    """Parameters of every layer, and of what stands outside them."""
    found: dict[_Key, Cell] = {}
    for param in model.layout:
        place = Place.of(param.name)
        at = f"{place.stack} " if place.stack else ""
        key = _Key(at + (count.component(param.name) if place.layer is None else f"layer {place.layer + 1}"))
        found[key] = found.get(key, 0) + param.size
    return found


def _folded(rows: list[SideRow]) -> Iterator[SideRow]:
    """Neighbouring layers that are alike in every model, as one row."""

    def alike(row: SideRow) -> tuple:
        stack, layer, _ = row.name.rpartition("layer ")
        return (stack, layer, row.cells) if layer else (row.name,)

    for (_, *is_layer), group in groupby(rows, key=alike):
        first, *rest = list(group)
        if is_layer and rest:
            stack, _, number = first.name.rpartition("layer ")
            last = rest[-1].name.rpartition(" ")[2]
            each = f"{stack}layers {number}–{last}, each"
            yield SideRow(each, first.indent, first.cells, first.differs)
        else:
            yield from (first, *rest)


def _tensors(model: Model) -> Column:
    """Shapes of every tensor; of all layers' together, each with how often it stands there."""
    shapes: dict[_Key, dict[str, int]] = {}
    for param in model.layout:
        place = Place.of(param.name)
        inside = f"layers.#.{_any_expert(place.name)}" if place.layer is not None else place.name
        shape = f"[{','.join(map(str, param.shape))}]"
        shape = f"→ {param.tied_to.rsplit('.', 1)[0]} (tied)" if param.tied_to else shape
        of_name = shapes.setdefault(_Key(f"{place.stack}.{inside}".removeprefix(".")), {})
        of_name[shape] = of_name.get(shape, 0) + 1
    return {key: ", ".join(_times(*item) for item in found.items()) for key, found in shapes.items()}


def _any_expert(name: str) -> str:
    """`mlp.experts.7.up.weight` as `mlp.experts.@.up.weight`."""
    before, experts, after = name.partition(".experts.")
    return f"{before}.experts.@.{after.partition('.')[2]}" if experts else name


def _times(shape: str, times: int) -> str:
    return shape if times == 1 else f"{times} × {shape}"


def _counts(reports: list[ParamsReport]) -> list[SideRow]:
    """Every way to count that gives some model another number than its total."""
    rows = _joined([{_Key(one.name): one.count for one in report.counts} for report in reports])
    totals = [report.parameters.total for report in reports]
    in_file = ("stored", "logical")  # of what no file holds, there is no such number
    filled = (
        (row, [t if c is None and row.name not in in_file else c for c, t in zip(row.cells, totals)]) for row in rows
    )
    return [_row(_Key(row.name), cells) for row, cells in filled]


def _bytes(report: ParamsReport) -> Column:
    in_file = {} if report.file_bytes is None else {_Key("in the file"): report.file_bytes}
    return {_Key("dtype"): report.model.dtype, _Key("weights"): report.bytes, **in_file}


def _costs(costs: list[Costs]) -> Iterator[SideTable]:
    """What a run of the same size costs in each."""
    first = costs[0]
    run = f"B = {first.batch:,}" + (f", T = {first.tokens:,}" if first.tokens is not None else "")
    if first.tokens is not None:
        by_column: list[tuple[str, Callable]] = [
            ("FLOPs, full attention", lambda part: part.full),
            ("FLOPs, what the mask lets through", lambda part: part.masked),
            ("FLOPs, the next token", lambda part: part.next),
        ]
        for name, take in by_column:
            columns = [{_Key(_part(one)): take(one) for one in (*c.flops.parts, *c.flops.total)} for c in costs]
            yield SideTable(name, run, _joined(columns))
        yield SideTable("memory", f"bytes, {run}", _joined([_memory(one) for one in costs]))
    if first.longest:
        about = f"tokens, {run.partition(',')[0]}, {first.longest[0].memory:,} bytes of memory"
        columns = [{_Key(f"head on {one.head}"): one.tokens for one in c.longest} for c in costs]
        yield SideTable("longest text", about, _joined(columns))


def _part(one) -> str:
    return f"{one.stack}: {one.name}" if one.stack else one.name


def _memory(costs: Costs) -> Column:
    matrices = sum(one.bytes for one in costs.matrices)
    found = {_Key("attention matrices, if stored"): matrices, _Key("weights"): costs.memory.weights}
    found[_Key("KV cache")] = costs.memory.cache if costs.cache is not None else None
    for one in costs.memory.activations:
        found[_Key(f"activations, head on {one.head}")] = one.bytes
        found[_Key(f"all, head on {one.head}")] = one.sum
    return found
