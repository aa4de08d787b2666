"""Joins a checkpoint's tensors to a layout, name by name, and refuses what does not fit. Reads no weights."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, NamedTuple

from gptcli.checkpoint.packed import Spare, Upright
from gptcli.checkpoint.safetensors import BITS, FLOATS, TensorInfo
from gptcli.data import data
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


@data
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
    untied = [param for param in names.table.values() if not param.tied_to]
    for param in (*untied, *(param for param in names.table.values() if param.tied_to)):
        wanted = names.wanted(param, prefix)
        places = [place for place in wanted if place[0].stored in infos]
        if param.tied_to:
            holder = found.bounds.get(param.tied_to)
            if not places or (holder and places[0][0].stored == holder.stored):
                continue
        if not places:
            own, *copies = wanted
            if names.zeros(param):
                found.zeros[param.name] = param.shape
                found.notes.append(f"{own[0].stored} is not in the file: zeros stand for it")
            elif own[0].stored not in missed:
                missed.add(own[0].stored)
                faults.append(_missing(param, own, copies))
        for i, (bound, shape) in enumerate(places):
            used.add(bound.stored)
            info = infos[bound.stored]
            if type(info) is Upright:
                bound, shape = _upright(bound, shape)
            if info.shape != shape or info.dtype not in FLOATS:
                misfit = _misfit(bound.stored, info, param, shape)
                if info.dtype in BITS or info.shape != shape:
                    faults += misfit
                else:  # a type that nobody unpacks can be listed all the same
                    found.unread.extend(fault.said for fault in misfit)
            if i:
                found.copies.append((param.name, bound))
            else:
                found.bounds[param.name] = bound
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


def _upright(bound: Bound, shape: tuple[int, ...]) -> tuple[Bound, tuple[int, ...]]:
    """A place in a tensor that unpacks to [out, in], however the family stores it."""
    if bound.transposed:
        return bound._replace(transposed=False), (*shape[:-2], shape[-1], shape[-2])
    return bound, shape


def _misfit(stored: str, info: TensorInfo, param: Param, shape: tuple[int, ...]) -> list[Fault]:
    """What keeps a stored tensor from being a parameter, if anything."""
    if info.shape != shape:
        said = f"tensor {stored!r} is {list(info.shape)}, but {param.name} needs {list(shape)}"
        return [Fault("shape", stored, said, param.name, info.shape, shape)]
    from gptcli.checkpoint.gguf import UNPACKED

    said = f"tensor {stored!r} is {info.dtype}, which holds no weights that can be run"
    return [] if info.dtype in UNPACKED else [Fault("dtype", stored, said, param.name, info.shape, shape)]


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
        self.alike: dict[tuple, _Place] = {}
        self.places = {p.name: self._place(p) for p in params}
        self.stored = {name: _filled(place.stored, self.templates[name][1]) for name, place in self.places.items()}

    def found(self, names: Container[str], prefix: str) -> int:
        """How many of the layout's own weights stand under this prefix."""
        return sum(stored in names for stored in self.untied(prefix).values())

    def untied(self, prefix: str) -> dict[str, str]:
        """The stored names of the layout's own weights, by ours."""
        own = {name: self.stored[name] for name, param in self.table.items() if not param.tied_to}
        return {name: stored if self.places[name].outside else prefix + stored for name, stored in own.items()}

    def prefix_among(self, names: Mapping[str, TensorInfo]) -> str:
        """The prefix under which most are found; the first that has them all is as good as any."""
        prefixes = self.family.prefixes
        if len(prefixes) == 1 or names.keys() >= {*self.untied(prefixes[0]).values()}:
            return prefixes[0]
        return max(prefixes, key=lambda prefix: self.found(names, prefix))

    def wanted(self, param: Param, prefix: str) -> list[tuple[Bound, tuple[int, ...]]]:
        """Every stored tensor that a parameter may lie in, its own first: its place there, and that tensor's shape.

        Where another untied parameter lies is no copy of it.
        """
        own, copies = self.places[param.name].under(prefix, self.stored[param.name]), ()
        if self.family.copies and not param.tied_to:
            copies = self.family.copies.get(self.templates[param.name][0].rpartition(".")[0], ())
        if not copies:
            return [own]
        taken = {stored for name, stored in self.untied(prefix).items() if name != param.name}
        places, numbers = [self._place(param, copy) for copy in copies], self.templates[param.name][1]
        found = [place.under(prefix, _filled(place.stored, numbers)) for place in places]
        return [own, *(place for place in found if place[0].stored not in taken)]

    def zeros(self, param: Param) -> bool:
        """Does a file that lacks the parameter mean zeros?"""
        return self._entry(self.templates[param.name][0])[2].absent == "zeros"

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
            return kept
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
        rows, share = (start, start + param.shape[0]), (part, parts, param.head_dim)
        bound = (item, transposed, stored.fused, *rows, *share, stored.paired, stored.plus)
        place = _Place(stored.name + ending, bound, shape, stored.outside)
        if len(stems) == 1 and item is None and copy is None:  # nothing else in its layer has a say
            self.alike[template, param.shape, param.head_dim] = place
        return place


class _Place(NamedTuple):
    """Where a parameter should lie, and those like it in other layers.

    stored: the tensor's name before any prefix, with signs for its numbers; bound: a Bound but for the name; shape: of
    the whole tensor; outside: no prefix applies.
    """

    stored: str
    bound: tuple
    shape: tuple[int, ...]
    outside: bool

    def under(self, prefix: str, stored: str) -> tuple[Bound, tuple[int, ...]]:
        """The place in the tensor of that name, below a prefix where one applies, and the tensor's shape."""
        return Bound(stored if self.outside else prefix + stored, *self.bound), self.shape


def _template(name: str) -> tuple[str, dict[str, str]]:
    """`layers.3.mlp.experts.7.up.weight` → `layers.#.mlp.experts.@.up.weight` and what # and @ stand for."""
    stack, layers, inside = name.rpartition("layers.")
    if not layers:
        return _signed(name, "#")
    number, _, rest = inside.partition(".")
    template, numbers = _in_stack(stack, rest)
    return template, {"#": number, **numbers}


@lru_cache(maxsize=4096)
def _in_stack(stack: str, rest: str) -> tuple[str, dict[str, str]]:
    """A template that is the same text for all layers, and what @ stands for."""
    template, numbers = _signed(rest, "@")
    return f"{stack}layers.#.{template}", numbers


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
