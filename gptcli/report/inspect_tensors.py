"""A checkpoint's tensors as rows: one a pattern of names, or one a tensor. For `inspect`."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Literal, NamedTuple

from gptcli.checkpoint.files import bare
from gptcli.checkpoint.patterns import boxes, braced, fold, split
from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.data import data

Kind = Literal["weight", "packed", "scale", "buffer", "unused", "left over", "adapter", "tensor"]


@data
class TensorRow:
    """Alike tensors. stored: the file's own name, or a pattern of as many; name: the project's for what lies in them.

    kind: a `weight`, or a `packed` one and the `scale`s and tables beside it; a `buffer`; `unused`: of another part of
    the model; `left over`: no parameter reads it; of an `adapter`; a `tensor`, where no layout says. shape: of each, as
    torch has it; logical: before packing, where it is packed. numbers, bytes: of all of them. file: empty where they
    are in several; start, end: where the bytes of a single one lie in it.
    """

    stored: str
    name: str
    times: int
    kind: Kind
    dtype: str
    shape: list[int]
    logical: list[int] | None
    numbers: int
    bytes: int
    file: str
    start: int | None
    end: int | None


class Owned(NamedTuple):
    """A stored tensor's part in the model: the parameters that lie in it, by our names."""

    names: tuple[str, ...]
    kind: Kind
    logical: tuple[int, ...] = ()


NO_OWNER = Owned((), "tensor")


def tensor_rows(
    infos: Mapping[str, TensorInfo], owned: Mapping[str, Owned], each: bool, wanted: str | None
) -> list[TensorRow]:
    """The rows, weights in the order of the layout, then the rest as the file has it.

    infos: by names without wrappers, and so is owned; each: a row a tensor; wanted: only those of which either name
    fits this pattern of a shell's.
    """
    parts = [(infos[name], own) for name, own in owned.items() if name in infos]
    parts += [(info, NO_OWNER) for name, info in infos.items() if name not in owned]
    parts = [(info, own) for info, own in parts if fits(wanted, info, own)]
    if each:
        return [_row(info.key, [info], own.names, own) for info, own in parts]
    groups: dict[tuple, dict[tuple[int, ...], tuple[TensorInfo, Owned]]] = {}
    for info, own in parts:
        template, numbers = split(info.key)
        key = (template, len(numbers), len(own.names), own.kind, info.dtype, info.shape, own.logical)
        groups.setdefault(key, {})[numbers] = (info, own)
    return [row for key, group in groups.items() for row in _folded(key[0], group)]


def fits(wanted: str | None, info: TensorInfo, own: Owned) -> bool:
    """Whether one of a tensor's names, with its wrappers or without, fits a shell's pattern; None: all do."""
    return wanted is None or any(fnmatchcase(name, wanted) for name in (info.key, bare(info.key), *own.names))


def _folded(template: str, group: dict[tuple[int, ...], tuple[TensorInfo, Owned]]) -> Iterator[TensorRow]:
    """Alike tensors as few rows, by the numbers in their names."""
    for texts, tuples in boxes(group):
        parts = [group[numbers] for numbers in tuples]
        info, own = parts[0]
        stored = template.format(*texts) if len(tuples) > 1 else info.key
        names = _parallel(texts, {numbers: own.names for numbers, (_, own) in zip(tuples, parts)})
        names = names or [name for _, own in parts for name in own.names]
        yield _row(stored, [info for info, _ in parts], names, own)


def _parallel(texts: list[str], ours: dict[tuple[int, ...], tuple[str, ...]]) -> list[str]:
    """Patterns for our names, where each has just the numbers that the file's own has; else none."""
    first = next(iter(ours.values()))
    if len(first) > 3 or not texts:
        return []
    templates = [split(name)[0] for name in first]
    if any(template.count("{}") != len(texts) for template in templates):
        return []
    alike = all([*names] == [template.format(*numbers) for template in templates] for numbers, names in ours.items())
    return [template.format(*texts) for template in templates] if alike else []


def named(names: Iterable[str]) -> str:
    """Our names as one pattern, or as few."""
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else braced(names) or ", ".join(one.text for one in fold(names))


def _row(stored: str, infos: list[TensorInfo], names: Iterable[str], own: Owned) -> TensorRow:
    first, alone = infos[0], len(infos) == 1
    return TensorRow(
        stored=stored,
        name=named(names),
        times=len(infos),
        kind=own.kind,
        dtype=first.dtype,
        shape=list(first.shape),
        logical=list(own.logical) if own.logical else None,
        numbers=prod(first.shape) * len(infos),
        bytes=sum(info.end - info.start for info in infos),
        file=first.file.name if all(info.file is first.file for info in infos) else "",
        start=first.start if alone else None,
        end=first.end if alone else None,
    )
