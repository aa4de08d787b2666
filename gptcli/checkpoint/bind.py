"""Joins a checkpoint's tensors to a layout, name by name, and refuses what does not fit. Reads no weights."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, NamedTuple

from gptcli.checkpoint.gguf import UNPACKED
from gptcli.checkpoint.packed import Spare, Upright
from gptcli.checkpoint.safetensors import BITS, FLOATS, TensorInfo
from gptcli.errors import GptcliError
from gptcli.families import Family, Stored
from gptcli.layout import Param


class Bound(NamedTuple):
    """Where a parameter's data lies in a stored tensor.

    Take `item` of the first axis (None: the whole), transpose, then cut the rows. fused says how several parts share
    them: `blocks` (rows start to stop), `heads` (in every parts · group rows, the part-th group of them),
    or `turns` (every parts-th row from the part-th on). paired: in every group of rows, neighbours are half a group
    apart in the parameter; plus: what the stored numbers are more than the parameter's.
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
    paired: bool = False
    plus: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Where every parameter lies: each untied one's Bound, and a tied one's where the file holds it all the same.

    copies: parameters that the file holds more than once, each with where it lies again; zeros: the shapes of those
    that it lacks and that are zeros then; notes: what a person should know of it; unread: what is wrong with tensors
    that can be listed, and not run. Besides, the file's buffers, and its weights that nothing here reads.
    """

    bounds: dict[str, Bound]
    copies: list[tuple[str, Bound]] = field(default_factory=list)
    zeros: dict[str, tuple[int, ...]] = field(default_factory=dict)
    prefix: str = ""
    buffers: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


class Fault(NamedTuple):
    """What of a checkpoint does not fit a layout: a stored tensor, the parameter that should lie there, and how.

    code: `missing-tensor`, `shape`, `dtype` (holds no weights that can be run), or `left-over-tensor` (no parameter
    reads it). found and needed: shapes, empty where there is none.
    """

    code: Literal["missing-tensor", "shape", "dtype", "left-over-tensor"]
    stored: str
    said: str
    param: str = ""
    found: tuple[int, ...] = ()
    needed: tuple[int, ...] = ()


def bind(params: Iterable[Param], infos: Mapping[str, TensorInfo], family: Family, where: str) -> Binding:
    """Finds every parameter of the layout among the stored tensors, by the family's names.

    Raises GptcliError for a tensor that is missing, misshaped, of a type that holds no weights, or left over.
    """
    binding, faults = compare(params, infos, family)
    if faults:
        more = f" (and {len(faults) - 1} faults more)" if len(faults) > 1 else ""
        raise GptcliError(f"{where}: {faults[0].said}{more}", "the config and the weights must be of one model", "bind")
    return binding


def compare(params: Iterable[Param], infos: Mapping[str, TensorInfo], family: Family) -> tuple[Binding, list[Fault]]:
    """Every parameter of the layout that is found among the stored tensors, and all that does not fit."""
    tables = _spellings(tuple(params), family)
    names = tables[0] if len(tables) == 1 else max(tables, key=lambda t: t.found(infos, t.prefix_among(infos)))
    prefix = names.prefix_among(infos)
    found = Binding(bounds={}, prefix=prefix)
    used: set[str] = set()
    missed: set[str] = set()  # a fused tensor is missed once
    faults: list[Fault] = []
    for param in sorted(names.table.values(), key=lambda param: bool(param.tied_to)):
        own, *copies = names.wanted(param, prefix)
        places = [place for place in (own, *copies) if place[0].stored in infos]
        holder = found.bounds.get(param.tied_to)
        if param.tied_to and (not places or (holder and places[0][0].stored == holder.stored)):
            continue
        bounds = [_upright(bound, shape, infos[bound.stored]) for bound, shape in places]
        for bound, shape in bounds:
            used.add(bound.stored)
            info = infos[bound.stored]
            misfit = _misfit(bound.stored, info, param, shape)
            if info.dtype in BITS or info.shape != shape:
                faults += misfit
            else:  # a type that nobody unpacks can be listed all the same
                found.unread.extend(fault.said for fault in misfit)
        if bounds:
            found.bounds[param.name] = bounds[0][0]
            found.copies.extend((param.name, bound) for bound, _ in bounds[1:])
        elif names.zeros(param):
            found.zeros[param.name] = param.shape
            found.notes.append(f"{own[0].stored} is not in the file: zeros stand for it")
        elif own[0].stored not in missed:
            missed.add(own[0].stored)
            faults.append(_missing(param, own, copies))
    # What a tied parameter reads if it differs is no mere copy.
    tied = {found.bounds[p.name].stored for p in names.table.values() if p.tied_to and p.name in found.bounds}
    copies = [(name, bound) for name, bound in found.copies if bound.stored not in tied]
    left = [name for name in infos if name not in used]
    buffers = [name for name in left if _matches(name, family.buffers)]
    unused = [name for name in left if isinstance(infos[name], Spare) or _matches(name, family.unused)]
    known = {*buffers, *unused}
    faults += [
        Fault("left-over-tensor", name, f"tensor {name!r} is left over: no parameter reads it", found=infos[name].shape)
        for name in left
        if name not in known
    ]
    return replace(found, copies=copies, buffers=buffers, unused=unused), faults


def _upright(bound: Bound, shape: tuple[int, ...], info: TensorInfo) -> tuple[Bound, tuple[int, ...]]:
    """A place in a tensor that unpacks to [out, in], however the family stores it."""
    if isinstance(info, Upright) and bound.transposed:
        return bound._replace(transposed=False), (*shape[:-2], shape[-1], shape[-2])
    return bound, shape


def _misfit(stored: str, info: TensorInfo, param: Param, shape: tuple[int, ...]) -> list[Fault]:
    """What keeps a stored tensor from being a parameter, if anything."""
    if info.shape != shape:
        said = f"tensor {stored!r} is {list(info.shape)}, but {param.name} needs {list(shape)}"
        return [Fault("shape", stored, said, param.name, info.shape, shape)]
    said = f"tensor {stored!r} is {info.dtype}, which holds no weights that can be run"
    known = info.dtype in FLOATS or info.dtype in UNPACKED
    return [] if known else [Fault("dtype", stored, said, param.name, info.shape, shape)]


def _missing(param: Param, own: tuple[Bound, tuple[int, ...]], copies: list[tuple[Bound, tuple[int, ...]]]) -> Fault:
    """That a parameter is not in the file, by any of its names."""
    stored, others = own[0].stored, [bound.stored for bound, _ in copies]
    beside = f", and so are {', '.join(map(repr, others))}" if others else ""
    said = f"tensor {stored!r} is missing{beside} ({param.name} {list(param.shape)})"
    return Fault("missing-tensor", stored, said, param.name, needed=own[1])


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
        self.templates = {name: _template(name) for name in self.table}
        # How many experts (or heads) a layer has of each thing that is declared one by one.
        self.siblings = Counter(_in_layer(*found) for found in self.templates.values() if "@" in found[1])
        self.alike: dict[tuple, tuple[str, _Place]] = {}
        self.places = {p.name: self._place(p) for p in params}

    def found(self, names: Container[str], prefix: str) -> int:
        """How many of the layout's own weights stand under this prefix."""
        places = self.places
        return sum(
            (place.bound.stored if place.outside else prefix + place.bound.stored) in names
            for name, place in places.items()
            if not self.table[name].tied_to
        )

    def prefix_among(self, names: Container[str]) -> str:
        prefixes = self.family.prefixes
        return prefixes[0] if len(prefixes) == 1 else max(prefixes, key=lambda prefix: self.found(names, prefix))

    def wanted(self, param: Param, prefix: str) -> list[tuple[Bound, tuple[int, ...]]]:
        """Every stored tensor that a parameter may lie in, its own first: its place there, and that tensor's shape.

        Where another untied parameter lies is no copy of it.
        """
        own, copies = _under(prefix, self.places[param.name]), self.family.copies.get(self._stem(param.name), ())
        if param.tied_to or not copies:
            return [own]
        taken = {
            _under(prefix, place)[0].stored
            for name, place in self.places.items()
            if name != param.name and not self.table[name].tied_to
        }
        found = (_under(prefix, self._place(param, copy)) for copy in copies)
        return [own, *(place for place in found if place[0].stored not in taken)]

    def zeros(self, param: Param) -> bool:
        """Does a file that lacks the parameter mean zeros?"""
        return self._entry(self.templates[param.name][0])[2].absent == "zeros"

    def _stem(self, name: str) -> str:
        return self.templates[name][0].rpartition(".")[0]

    def _entry(self, template: str) -> tuple[str, tuple[str, ...], Stored]:
        """What a parameter's name ends in, the stems that share its stored tensor, and that tensor."""
        stem, _, leaf = template.rpartition(".")
        if template in self.entries:
            stem, leaf = template, ""
        return leaf, *self.entries.get(stem, ((stem,), Stored(stem)))

    def _place(self, param: Param, copy: Stored | None = None) -> "_Place":
        """copy: another tensor to look in than the parameter's own."""
        template, numbers = self.templates[param.name]
        kept = self.alike.get((template, param.shape, param.head_dim)) if copy is None else None
        if kept:
            stored, place = kept
            return _Place(Bound(_filled(stored, numbers), *place.bound[1:]), place.shape, place.outside)
        leaf, stems, stored = self._entry(template)
        stored = stored if copy is None else copy
        part, parts, start, rows = 0, 1, 0, param.shape[0]
        if len(stems) > 1:
            names = (_filled(f"{one}.{leaf}" if leaf else one, numbers) for one in stems)
            mates = [self.table[n] for n in names if n in self.table]  # not every layout has all that a family fuses
            sizes = [mate.shape[0] for mate in mates]
            part, parts, rows = mates.index(param), len(mates), sum(sizes)
            start = sum(sizes[:part])
        transposed = stored.transposed and len(param.shape) == 2
        shape = (rows, *param.shape[1:])
        shape = shape[::-1] if transposed else shape
        item = 0 if stored.row else None
        shape = (1, *shape) if stored.row else shape
        if "@" in template and "@" not in stored.name:
            item = int(numbers["@"])
            shape = (self.siblings[_in_layer(template, numbers)], *shape)
        ending = {"weight": stored.leaves[0], "bias": stored.leaves[1], "": ""}.get(leaf, f".{leaf}")
        name = stored.name + ending
        stop = start + param.shape[0]
        rows, share = (start, stop), (part, parts, param.head_dim)
        bound = Bound(_filled(name, numbers), item, transposed, stored.fused, *rows, *share, stored.paired, stored.plus)
        place = _Place(bound, shape, stored.outside)
        if len(stems) == 1 and item is None and copy is None:  # nothing else in its layer has a say
            self.alike[template, param.shape, param.head_dim] = name, place
        return place


class _Place(NamedTuple):
    """Where a parameter should lie, before any prefix; the stored tensor's whole shape; whether a prefix applies."""

    bound: Bound
    shape: tuple[int, ...]
    outside: bool


def _under(prefix: str, place: _Place) -> tuple[Bound, tuple[int, ...]]:
    """A place below a prefix, where one applies."""
    bound, shape, outside = place
    return bound if outside or not prefix else Bound(prefix + bound.stored, *bound[1:]), shape


def _template(name: str) -> tuple[str, dict[str, str]]:
    """`layers.3.mlp.experts.7.up.weight` → `layers.#.mlp.experts.@.up.weight` and what # and @ stand for."""
    stack, layers, inside = name.rpartition("layers.")
    if not layers:
        return _signed(name, "#")
    number, _, rest = inside.partition(".")
    template, numbers = _signed(rest, "@")
    return f"{stack}layers.#.{template}", {"#": number, **numbers}


@lru_cache(maxsize=4096)
def _signed(name: str, sign: str) -> tuple[str, dict[str, str]]:
    """A name with a sign in place of its number, and the number."""
    parts = name.split(".")
    found = [part for part in parts if part.isdigit()]
    template = ".".join(sign if part.isdigit() else part for part in parts)
    return template, {sign: found[-1]} if found else {}


def _in_layer(template: str, numbers: Mapping[str, str]) -> str:
    """What is declared one by one within one layer: `layers.3.mlp.experts.@.up.weight`."""
    return template.replace("#", numbers["#"])


def _filled(template: str, numbers: Mapping[str, str]) -> str:
    for sign, number in numbers.items():
        template = template.replace(sign, number)
    return template
