"""Joins a checkpoint's tensors to a layout, name by name, and refuses what does not fit. Reads no weights."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from gptcli.checkpoint.safetensors import FLOATS, TensorInfo
from gptcli.errors import GptcliError
from gptcli.families import Family, Stored
from gptcli.layout import Param

# What ends the name of a tensor that holds a weight's numbers packed, and how they are.
PACKED = {"_blocks": "MXFP4 (4-bit numbers in blocks)"}


class Bound(NamedTuple):
    """Where a parameter's data lies in a stored tensor.

    Take `item` of the first axis (None: the whole), transpose, then cut the rows. fused says how several parts share
    them: `blocks` (rows start to stop), `heads` (in every parts · group rows, the part-th group of them),
    or `turns` (every parts-th row from the part-th on).
    """

    stored: str
    item: int | None
    transposed: bool
    fused: Literal["blocks", "heads", "turns"]
    start: int
    stop: int
    part: int
    parts: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Where every parameter lies: each untied one's Bound, and a tied one's where the file holds it all the same.

    copies: parameters that the file holds more than once, each with where it lies again; zeros: the shapes of those
    that it lacks and that are zeros then; notes: what a person should know of it. Besides, the file's buffers, and its
    weights that nothing here reads.
    """

    bounds: dict[str, Bound]
    copies: list[tuple[str, Bound]] = field(default_factory=list)
    zeros: dict[str, tuple[int, ...]] = field(default_factory=dict)
    prefix: str = ""
    buffers: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def bind(params: Iterable[Param], infos: Mapping[str, TensorInfo], family: Family, where: str) -> Binding:
    """Finds every parameter of the layout among the stored tensors, by the family's names.

    Raises GptcliError for a tensor that is missing, misshaped, of a type that holds no weights, or left over.
    """
    tables = _spellings(tuple(params), family)
    names = tables[0] if len(tables) == 1 else max(tables, key=lambda t: t.found(infos, t.prefix_among(infos)))
    prefix = names.prefix_among(infos)
    found = Binding(bounds={}, prefix=prefix)
    used, faults = set(), []
    for param in sorted(names.table.values(), key=lambda param: bool(param.tied_to)):
        places = [place for place in names.places(param, prefix) if place[0].stored in infos]
        holder = found.bounds.get(param.tied_to)
        if param.tied_to and (not places or (holder and places[0][0].stored == holder.stored)):
            continue
        for bound, shape in places:
            used.add(bound.stored)
            faults += _misfit(bound.stored, infos[bound.stored], param, shape)
        if places:
            found.bounds[param.name] = places[0][0]
            found.copies.extend((param.name, bound) for bound, _ in places[1:])
        elif names.zeros(param):
            stored = names.wanted(param, prefix)[0].stored
            found.zeros[param.name] = param.shape
            found.notes.append(f"{stored} is not in the file: zeros stand for it")
        else:
            said = _missing(names, param, prefix, infos)
            if not any(fault.startswith(said.partition(" (")[0]) for fault in faults):  # a fused tensor is missed once
                faults.append(said)
    # What a tied parameter reads if it differs is no mere copy.
    tied = {found.bounds[p.name].stored for p in names.table.values() if p.tied_to and p.name in found.bounds}
    copies = [(name, bound) for name, bound in found.copies if bound.stored not in tied]
    left = [name for name in infos if name not in used]
    buffers = [name for name in left if _matches(name, family.buffers)]
    unused = [name for name in left if _matches(name, family.unused)]
    known = {*buffers, *unused}
    faults += [f"tensor {name!r} is left over: no parameter reads it" for name in left if name not in known]
    if faults:
        more = f" (and {len(faults) - 1} faults more)" if len(faults) > 1 else ""
        raise GptcliError(f"{where}: {faults[0]}{more}", "the config and the weights must be of one model", "bind")
    return replace(found, copies=copies, buffers=buffers, unused=unused)


def _misfit(stored: str, info: TensorInfo, param: Param, shape: tuple[int, ...]) -> list[str]:
    """What keeps a stored tensor from being a parameter, if anything."""
    if info.shape != shape:
        return [f"tensor {stored!r} is {list(info.shape)}, but {param.name} needs {list(shape)}"]
    said = f"tensor {stored!r} is {info.dtype}, which holds no weights that can be run"
    return [] if info.dtype in FLOATS else [said]


def _missing(names: "_Names", param: Param, prefix: str, infos: Mapping[str, TensorInfo]) -> str:
    """That a parameter is not in the file: by which names, and whether its numbers are there packed."""
    stored, *others = (bound.stored for bound, _ in names.places(param, prefix))
    beside = f", and so are {', '.join(map(repr, others))}" if others else ""
    packed = [f"{stored}{end}" for end in PACKED if f"{stored}{end}" in infos]
    why = f": {packed[0]!r} is {PACKED[packed[0][len(stored) :]]}, not implemented" if packed else ""
    return f"tensor {stored!r} is missing{beside} ({param.name} {list(param.shape)}){why}"


def recognise(params: Iterable[Param], names: Mapping[str, TensorInfo], families: Iterable[Family]) -> Family:
    """The family whose names for this layout are found most often among the stored ones."""
    params = tuple(params)

    def found(family: Family) -> int:
        tables = _spellings(params, family)
        return max(table.found(names, prefix) for table in tables for prefix in family.prefixes)

    return max(families, key=found)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, f"*{pattern}") for pattern in patterns)


def _spellings(params: tuple[Param, ...], family: Family) -> list["_Names"]:
    """The layout in the family's names, and in each of the other sets that its files may use."""
    return [_Names(params, replace(family, names=family.names | other)) for other in ({}, *family.others)]


class _Names:
    """A layout in a family's names."""

    def __init__(self, params: tuple[Param, ...], family: Family):
        self.family, self.table = family, {p.name: p for p in params}
        self.entries = {
            stem: (stems if isinstance(stems, tuple) else (stems,), stored)
            for stems, stored in family.names.items()
            for stem in (stems if isinstance(stems, tuple) else (stems,))
        }
        # How many experts (or heads) a layer has of each thing that is declared one by one.
        self.siblings = Counter(_template(name, keep_layer=True)[0] for name in self.table)

    def found(self, names: Iterable[str], prefix: str) -> int:
        """How many of the layout's own weights stand under this prefix."""
        return sum(self.wanted(p, prefix)[0].stored in names for p in self.table.values() if not p.tied_to)

    def prefix_among(self, names: Mapping[str, TensorInfo]) -> str:
        prefixes = self.family.prefixes
        return prefixes[0] if len(prefixes) == 1 else max(prefixes, key=lambda prefix: self.found(names, prefix))

    def places(self, param: Param, prefix: str) -> list[tuple[Bound, tuple[int, ...]]]:
        """Every place where a parameter may lie, its own first. Where another untied one lies is no copy of it."""
        stem = _template(param.name)[0].rpartition(".")[0]
        own, copies = self.wanted(param, prefix), self.family.copies.get(stem, ())
        if param.tied_to or not copies:
            return [own]
        taken = {self.wanted(p, prefix)[0].stored for p in self.table.values() if p is not param and not p.tied_to}
        found = (self.wanted(param, prefix, copy) for copy in copies)
        return [own, *(place for place in found if place[0].stored not in taken)]

    def zeros(self, param: Param) -> bool:
        """Does a file that lacks the parameter mean zeros?"""
        return self._entry(param)[2].absent == "zeros"

    def _entry(self, param: Param) -> tuple[str, tuple[str, ...], Stored]:
        """What a parameter's name ends in, the stems that share its stored tensor, and that tensor."""
        template = _template(param.name)[0]
        stem, _, leaf = template.rpartition(".")
        if template in self.entries:
            stem, leaf = template, ""
        return leaf, *self.entries.get(stem, ((stem,), Stored(stem)))

    def wanted(self, param: Param, prefix: str, copy: Stored | None = None) -> tuple[Bound, tuple[int, ...]]:
        """The stored tensor that a parameter should lie in, its place there, and that tensor's whole shape.

        copy: another tensor to look in than its own.
        """
        stem, numbers = _template(param.name)
        leaf, stems, stored = self._entry(param)
        stem = stem.removesuffix(f".{leaf}")
        stored = stored if copy is None else copy
        names = (_filled(f"{one}.{leaf}" if leaf else one, numbers) for one in stems)
        mates = [
            self.table[name] for name in names if name in self.table
        ]  # not every layout has all that a family fuses
        sizes = [mate.shape[0] for mate in mates]
        part = mates.index(param)
        start = sum(sizes[:part])
        transposed = stored.transposed and len(param.shape) == 2
        shape = (sum(sizes), *param.shape[1:])
        shape = shape[::-1] if transposed else shape
        item = 0 if stored.row else None
        shape = (1, *shape) if stored.row else shape
        if "@" in stem and "@" not in stored.name:
            item = int(numbers["@"])
            shape = (self.siblings[_template(param.name, keep_layer=True)[0]], *shape)
        ending = dict(zip(("weight", "bias", ""), (*stored.leaves, "")))[leaf]
        name = ("" if stored.outside else prefix) + _filled(stored.name, numbers) + ending
        return Bound(
            name, item, transposed, stored.fused, start, start + sizes[part], part, len(sizes), param.head_dim
        ), shape


def _template(name: str, keep_layer: bool = False) -> tuple[str, dict[str, str]]:
    """`layers.3.mlp.experts.7.up.weight` → `layers.#.mlp.experts.@.up.weight` and what # and @ stand for."""
    numbers: dict[str, str] = {}
    parts = []
    for part in name.split("."):
        if part.isdigit():
            sign = "@" if "#" in numbers else "#"
            numbers[sign] = part
            part = part if keep_layer and sign == "#" else sign
        parts.append(part)
    return ".".join(parts), numbers


def _filled(template: str, numbers: Mapping[str, str]) -> str:
    for sign, number in numbers.items():
        template = template.replace(sign, number)
    return template
