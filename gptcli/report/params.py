"""`params`: what an architecture's weights count and weigh. Loads no torch."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Literal

from gptcli import count
from gptcli.data import data, entry, mutable
from gptcli.layout import AXES, Param, Place
from gptcli.report import ModelFacts, Report
from gptcli.report.cards import Card, Count, explained, in_name, rounded
from gptcli.source import Model
from gptcli.spec import Experts, Spec

if TYPE_CHECKING:
    from gptcli.checkpoint.safetensors import TensorInfo
    from gptcli.report.costs import Costs, Workload

By = Literal["component", "layer", "tensor"]


@data
class Row:
    """One line: `times` alike things of `each` parameters. share is of the total; indent: part of the row above.

    axes and shape: of a single tensor, else empty. tied_to: the weight that holds the data; it then counts nothing.
    stored: the types in which a .gguf file holds it.
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
    stored: list[str]


@entry
class StoredAs:
    """What a .gguf file holds in one type: how many tensors and numbers, bits a number, and bytes."""

    type: str
    tensors: int
    numbers: int
    bits: float
    bytes: int


@entry
class Totals:
    """total = unique: distinct numbers, of packed weights as they are unpacked; the rest are other ways to count.

    stored: elements of the file's tensors, packed ones and a tied head's copy as they lie there (null without a file);
    logical: the same unpacked; untied: if every name held its own; active: what one token meets, of experts those that
    it takes; non_embedding: layers and final norm; layers: the layers alone; nanogpt: all but the position table, as
    nanoGPT reports it.
    """

    total: int
    unique: int
    stored: int | None
    logical: int
    untied: int
    active: int
    non_embedding: int
    layers: int
    nanogpt: int


@mutable
class ParamsReport(Report):
    """counts: the ways to count that give different numbers, the total first; cards: numbers that the model's name or
    its card states, and which count gives them; file_bytes: of a checkpoint's tensors as they lie, where that is not
    `bytes`; packed: how a quantised one is; types: by stored type, the most bytes first, then `all`, for a .gguf file;
    bf16_bytes: of all of it as bfloat16; costs: of a run, where one was described.
    """

    schema = "gptcli.params/1"
    model: ModelFacts
    by: By
    parameters: Totals
    counts: list[Count]
    cards: list[Card]
    rows: list[Row]
    bytes: int
    file_bytes: int | None
    packed: str
    bf16_bytes: int
    types: list[StoredAs]
    buffers: list[str]
    costs: "Costs | None"


AS_STORED = "as stored"


def params_report(
    model: Model, by: By, dtype: str, full: bool, workload: "Workload | None" = None, card: str | None = None
) -> ParamsReport:
    """Counts by component, layer or tensor. full: layers that are alike are not folded.

    workload: a run whose costs are wanted; card: a number that a model card states. Raises GptcliError.
    """
    params, kinds = model.layout, _stored_types(model)
    as_stored = bool(kinds) and dtype == "auto"
    dtype = AS_STORED if as_stored else count.dtype_name(dtype, model.stored_dtype)
    sizes = {name: info.bytes for name, info in kinds.items()} if as_stored else {}
    totals, types = _totals(model), {name: info.type for name, info in kinds.items()}
    counter = _Counter(totals.total, 0 if as_stored else count.ITEM_BYTES[dtype], sizes, types)
    counts, costs, size = list(_counts(totals, model.spec)), None, counter.bytes(params)
    if workload is not None:
        from gptcli.report.costs import costs_of

        costs = costs_of(model, workload, "bfloat16" if as_stored else dtype, size)
    file_bytes = _file_bytes(model)
    return ParamsReport(
        model=model.facts(dtype),
        by=by,
        parameters=totals,
        counts=counts,
        cards=list(_cards(model, totals, counts, card)),
        rows=list(counter.rows(params, by, full)),
        bytes=size,
        file_bytes=file_bytes if file_bytes != size else None,
        packed=model.checkpoint.packing.said if model.checkpoint and model.checkpoint.packing else "",
        bf16_bytes=totals.total * count.ITEM_BYTES["bfloat16"],
        types=_by_type(model, kinds),
        buffers=model.checkpoint.binding.buffers if model.checkpoint else [],
        costs=costs,
    )


def _totals(model: Model) -> Totals:
    params = model.layout
    total, logical, stored = count.total(params), None, None
    if model.checkpoint is not None:
        packing = model.checkpoint.packing
        logical = sum(prod(info.shape) for info in _weights(model).values())
        stored = logical - packing.count + packing.stored if packing else logical
    return Totals(
        total=total,
        unique=total,
        stored=stored,
        logical=total if logical is None else logical,
        untied=count.untied(params),
        active=count.active(params, model.spec),
        non_embedding=count.non_embedding(params),
        layers=sum(p.size for p in params if count.component(p.name) == "layers"),
        nanogpt=count.without_positions(params),
    )


def _weights(model: Model) -> dict[str, "TensorInfo"]:
    """The file's tensors that are the model's: no buffers, and nothing of other parts."""
    binding = model.checkpoint.binding
    apart = {*binding.buffers, *binding.unused}
    return {name: info for name, info in model.checkpoint.infos.items() if name not in apart}


def _file_bytes(model: Model) -> int | None:
    """Bytes of the model's tensors as they lie in the file; None without one."""
    if model.checkpoint is None:
        return None
    packing = model.checkpoint.packing
    packed = packing.weights if packing else {}
    plain = sum(info.end - info.start for name, info in _weights(model).items() if name not in packed)
    return plain + (packing.bytes if packing else 0)


def _counts(totals: Totals, spec: Spec) -> Iterator[Count]:
    """The ways to count whose number differs from the total's, and the total."""
    experts = [here.mlp for here, _ in count.kinds(spec) if isinstance(here.mlp, Experts)]
    taken = f"{experts[0].top_k} of {experts[0].n_experts} experts a layer" if experts else ""
    ways = (
        ("total", totals.total, "each distinct weight once"),
        ("stored", totals.stored, "the elements of the file's tensors"),
        ("logical", totals.logical, "the file's weights unpacked, copies too"),
        ("active", totals.active, f"what a token meets, {taken}"),
        ("untied", totals.untied, "the head counted too"),
        ("non-embedding", totals.non_embedding, "layers and final norm"),
        ("nanoGPT's convention", totals.nanogpt, "no positions"),
    )
    for name, number, what in ways:
        if name == "total" or number not in (None, totals.total):
            yield Count(name, number, rounded(number), what)


def _cards(model: Model, totals: Totals, counts: list[Count], card: str | None) -> Iterator[Card]:
    """What the model's name and its card state, each with the counts that give it."""
    said = [(size, "name") for size in in_name(model.spec.name)]
    said += [(card, "card")] if card is not None else []
    if not said:
        return
    experts = next((here.mlp.n_experts for here, _ in count.kinds(model.spec) if isinstance(here.mlp, Experts)), 1)
    with_one = count.with_one_expert(model.layout)
    # A file may hold more or less than the model: no card speaks of that.
    ways = [one for one in counts if one.name not in ("stored", "logical")]
    for size, where in said:
        yield explained(size, where, ways, experts, with_one)


def _stored_types(model: Model) -> dict[str, StoredAs]:
    """How a .gguf file stores each parameter; a part of a larger tensor takes its share of the bytes."""
    if model.gguf is None:
        return {}
    found, params = {}, {p.name: p for p in model.layout}
    for name, bound in model.checkpoint.binding.bounds.items():
        info = model.checkpoint.infos[bound.stored]
        bits = 8 * (info.end - info.start) / max(prod(info.shape), 1)
        size = prod(params[name].shape)
        found[name] = StoredAs(info.dtype, 1, size, bits, round(size * bits / 8))
    return found


def _by_type(model: Model, kinds: dict[str, StoredAs]) -> list[StoredAs]:
    """The same, summed up; a tensor of which several parameters are parts counts once."""

    def summed(kind: str, names: list[str]) -> StoredAs:
        numbers, size = sum(kinds[name].numbers for name in names), sum(kinds[name].bytes for name in names)
        tensors = len({model.checkpoint.binding.bounds[name].stored for name in names})
        return StoredAs(kind, tensors, numbers, 8 * size / numbers, size)

    types = dict.fromkeys(one.type for one in kinds.values())
    found = [summed(kind, [name for name in kinds if kinds[name].type == kind]) for kind in types]
    return [*sorted(found, key=lambda one: -one.bytes), summed("all", list(kinds))] if found else []


@entry
class _Counter:
    """item_bytes: of one number; or, of a packed file, sizes: the bytes of each weight. types: as it stores them."""

    total: int
    item_bytes: int
    sizes: dict[str, int]
    types: dict[str, str]

    def bytes(self, params: Iterable[Param]) -> int:
        return sum(self.sizes.get(p.name, 0) if self.sizes else p.size * self.item_bytes for p in params)

    def row(self, name: str, params: list[Param], every: list[Param], times: int = 1, indent: int = 0) -> Row:
        """`times` things, each made of these params: of every one of those, under its full name."""
        each = sum(p.size for p in params)
        only = params[0] if len(params) == 1 else None
        return Row(
            name=name,
            indent=indent,
            times=times,
            each=each,
            parameters=each * times,
            share=each * times / self.total,
            bytes=self.bytes(every),
            axes=[AXES[axis] for axis in only.axes] if only else [],
            shape=list(only.shape) if only else [],
            tied_to=only.tied_to if only else "",
            stored=sorted({self.types[p.name] for p in every if p.name in self.types}),
        )

    def rows(self, params: tuple[Param, ...], by: By, full: bool) -> Iterator[Row]:
        """In the order of the layout; a run of layers that are alike is one row. Two stacks have a row each, theirs
        below it.
        """
        stacks = {stack: list(group) for stack, group in groupby(params, key=lambda p: Place.of(p.name).stack)}
        for stack, inside in stacks.items():
            apart = len(stacks) > 1 and by != "tensor"
            if apart:
                yield self.row(stack or "decoder", inside, inside)
            for row in self.stack_rows(inside, by, full):
                yield replace(row, indent=row.indent + 1) if apart else row

    def stack_rows(self, params: list[Param], by: By, full: bool) -> Iterator[Row]:
        for name, group in groupby(params, key=lambda p: count.component(p.name)):
            group = list(group)
            if name == "layers":
                for first, last, inside in _runs(group, full):
                    every = [p for p in group if first <= Place.of(p.name).layer <= last]
                    yield from self.layer_rows(first, last, inside, every, by)
            elif by == "tensor":
                yield from (self.row(p.name, [p], [p]) for p in group)
            else:
                yield self.row(name, group, group)

    def layer_rows(self, first: int, last: int, inside: list[Param], every: list[Param], by: By) -> Iterator[Row]:
        """Of a run of alike layers: inside: one's weights, by their names within it; every: all of theirs."""
        times, stack = last - first + 1, Place.of(every[0].name).stack
        named: dict[str, list[Param]] = {}
        for param in every:
            named.setdefault(Place.of(param.name).name, []).append(param)
        if by == "tensor":
            numbers = f"{first}" if times == 1 else f"{{{first}-{last}}}"
            at = f"{stack}.layers.{numbers}".removeprefix(".")
            yield from (self.row(f"{at}.{p.name}", [p], named[p.name], times) for p in inside)
            return
        yield self.row(f"layer {first + 1}" if times == 1 else f"layers {first + 1}–{last + 1}", inside, every, times)
        if by == "component":
            for part in ("attention", "cross-attention", "mlp", "norms"):
                of_part = [p for p in inside if count.layer_part(p.name) == part]
                if of_part:
                    theirs = [p for each in of_part for p in named[each.name]]
                    yield self.row(part, of_part, theirs, times, indent=1)


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
