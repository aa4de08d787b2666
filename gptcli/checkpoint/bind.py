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
    """Every untied parameter's Bound; what else the file holds: buffers, unused weights, and a head beside a tie."""

    bounds: dict[str, Bound]
    prefix: str = ""
    buffers: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    spare_head: str = ""


def bind(params: Iterable[Param], infos: Mapping[str, TensorInfo], family: Family, where: str) -> Binding:
    """Finds every parameter of the layout among the stored tensors, by the family's names.

    Raises GptcliError for a tensor that is missing, misshaped, of a type that holds no weights, or left over.
    """
    tables = _spellings(tuple(params), family)
    names = tables[0] if len(tables) == 1 else max(tables, key=lambda t: t.found(infos, t.prefix_among(infos)))
    prefix = names.prefix_among(infos)
    bounds, used, spare_head, faults = {}, set(), "", []
    for param in names.table.values():
        bound, shape = names.wanted(param, prefix)
        info = infos.get(bound.stored)
        if param.tied_to:
            spare_head = bound.stored if info else ""
        elif info is None:
            said = f"tensor {bound.stored!r} is missing"
            packed = [f"{bound.stored}{end}" for end in PACKED if f"{bound.stored}{end}" in infos]
            why = f": {packed[0]!r} is {PACKED[packed[0][len(bound.stored) :]]}, not implemented" if packed else ""
            if not any(fault.startswith(said) for fault in faults):  # a fused tensor is missed once
                faults.append(f"{said} ({param.name} {list(param.shape)}){why}")
        if info is None:
            continue
        used.add(bound.stored)
        if info.shape != shape:
            faults.append(f"tensor {bound.stored!r} is {list(info.shape)}, but {param.name} needs {list(shape)}")
        elif info.dtype not in FLOATS:
            faults.append(f"tensor {bound.stored!r} is {info.dtype}, which holds no weights that can be run")
        bounds[param.name] = bound
    left = [name for name in infos if name not in used]
    buffers = [name for name in left if _matches(name, family.buffers)]
    unused = [name for name in left if _matches(name, family.unused)]
    known = {*buffers, *unused}
    faults += [f"tensor {name!r} is left over: no parameter reads it" for name in left if name not in known]
    if faults:
        more = f" (and {len(faults) - 1} faults more)" if len(faults) > 1 else ""
        raise GptcliError(f"{where}: {faults[0]}{more}", "the config and the weights must be of one model", "bind")
    return Binding(bounds=bounds, prefix=prefix, buffers=buffers, unused=unused, spare_head=spare_head)


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

    def wanted(self, param: Param, prefix: str) -> tuple[Bound, tuple[int, ...]]:
        """The stored tensor that a parameter should lie in, its place there, and that tensor's whole shape."""
        template, numbers = _template(param.name)
        stem, _, leaf = template.rpartition(".")
        if template in self.entries:
            stem, leaf = template, ""
        stems, stored = self.entries.get(stem, ((stem,), Stored(stem)))
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
        item = None
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
