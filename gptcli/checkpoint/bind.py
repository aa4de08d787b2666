"""Joins a checkpoint's tensors to a layout, name by name, and refuses what does not fit. Reads no weights."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from gptcli.checkpoint.safetensors import FLOATS, TensorInfo
from gptcli.errors import GptcliError
from gptcli.families import Family, Stored
from gptcli.layout import Param


class Bound(NamedTuple):
    """Where a parameter's data lies: rows start to stop of a stored tensor's output axis, which may be its last."""

    stored: str
    start: int
    stop: int
    transposed: bool


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Every untied parameter's Bound; what else the file holds: buffers, and a head beside a tie."""

    bounds: dict[str, Bound]
    buffers: list[str] = field(default_factory=list)
    spare_head: str = ""


def bind(params: Iterable[Param], infos: Mapping[str, TensorInfo], family: Family, where: str) -> Binding:
    """Finds every parameter of the layout among the stored tensors, by the family's names.

    Raises GptcliError for a tensor that is missing, misshaped, of a type that holds no weights, or left over.
    """
    table = {p.name: p for p in params}
    prefix = max(family.prefixes, key=lambda prefix: _found(table, infos, family, prefix))
    bounds, used, spare_head, faults = {}, set(), "", []
    for param in table.values():
        bound, shape = _wanted(param, table, family, prefix)
        info = infos.get(bound.stored)
        if param.tied_to:
            spare_head = bound.stored if info else ""
        elif info is None:
            said = f"tensor {bound.stored!r} is missing"
            if not any(fault.startswith(said) for fault in faults):  # a fused tensor is missed once
                faults.append(f"{said} ({param.name} {list(param.shape)})")
        if info is None:
            continue
        used.add(bound.stored)
        if info.shape != shape:
            faults.append(f"tensor {bound.stored!r} is {list(info.shape)}, but {param.name} needs {list(shape)}")
        elif info.dtype not in FLOATS:
            faults.append(f"tensor {bound.stored!r} is {info.dtype}, which holds no weights that can be run")
        bounds[param.name] = bound
    left = [name for name in infos if name not in used]
    buffers = [name for name in left if any(fnmatchcase(name, "*" + pattern) for pattern in family.buffers)]
    faults += [f"tensor {name!r} is left over: no parameter reads it" for name in left if name not in buffers]
    if faults:
        more = f" (and {len(faults) - 1} faults more)" if len(faults) > 1 else ""
        raise GptcliError(f"{where}: {faults[0]}{more}", "the config and the weights must be of one model", "bind")
    return Binding(bounds=bounds, buffers=buffers, spare_head=spare_head)


def _wanted(param: Param, table: Mapping[str, Param], family: Family, prefix: str) -> tuple[Bound, tuple[int, ...]]:
    """The stored tensor that a parameter should lie in, its rows there, and that tensor's whole shape."""
    stem, leaf = param.name.rsplit(".", 1)
    layer = re.search(r"\.(\d+)\.", stem)
    number = layer[1] if layer else ""
    names, stored = _entry(stem.replace(f".{number}.", ".#.", 1) if layer else stem, family)
    start = rows = 0
    for name in names:
        mate = table[f"{name.replace('#', number)}.{leaf}"]
        start = rows if mate is param else start
        rows += mate.shape[0]
    transposed = stored.transposed and len(param.shape) == 2
    shape = (rows, *param.shape[1:])
    name = ("" if stored.outside else prefix) + stored.name.replace("#", number) + "." + leaf
    return Bound(name, start, start + param.shape[0], transposed), shape[::-1] if transposed else shape


def _entry(stem: str, family: Family) -> tuple[tuple[str, ...], Stored]:
    for names, stored in family.names.items():
        names = (names,) if isinstance(names, str) else names
        if stem in names:
            return names, stored
    return (stem,), Stored(stem)


def _found(table: Mapping[str, Param], names: Iterable[str], family: Family, prefix: str) -> int:
    """How many of the layout's own weights stand under this family's names and prefix."""
    return sum(_wanted(p, table, family, prefix)[0].stored in names for p in table.values() if not p.tied_to)


def recognise(params: Iterable[Param], names: Mapping[str, TensorInfo], families: Iterable[Family]) -> Family:
    """The family whose names for this layout are found most often among the stored ones."""
    table = {p.name: p for p in params}
    return max(families, key=lambda family: max(_found(table, names, family, prefix) for prefix in family.prefixes))
