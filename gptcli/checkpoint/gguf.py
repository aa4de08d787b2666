"""The header of a .gguf file: metadata and the table of tensors, read without torch.

The file begins with `GGUF`, a version, and how many tensors and keys there are. The keys follow, each with a typed
value, then the table of tensors (name, sizes, type, offset), then, from the next multiple of an alignment on, their
bytes. Every number is little-endian, or every one big-endian. No count is believed before it fits into what is left of
the file, and nothing of a vocabulary is decoded before it is asked for.
"""

import mmap
import re
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from gptcli.checkpoint.safetensors import TensorInfo, shown, what_else
from gptcli.data import data
from gptcli.errors import GptcliError

SUFFIX = ".gguf"
VERSIONS = (2, 3)
ALIGNMENT = 32  # where general.alignment says nothing else
MOST_SIZES = 4  # dimensions of a tensor
MOST_NESTING = 4  # arrays in arrays
PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


class Kind(NamedTuple):
    """A type of tensor: its numbers lie in blocks of `numbers`, each of which takes `bytes`."""

    name: str
    numbers: int
    bytes: int


# By the number that stands for it in a file.
KINDS = {
    0: Kind("F32", 1, 4), 1: Kind("F16", 1, 2), 2: Kind("Q4_0", 32, 18), 3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22), 7: Kind("Q5_1", 32, 24), 8: Kind("Q8_0", 32, 34), 9: Kind("Q8_1", 32, 40),
    10: Kind("Q2_K", 256, 84), 11: Kind("Q3_K", 256, 110), 12: Kind("Q4_K", 256, 144), 13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210), 15: Kind("Q8_K", 256, 292), 16: Kind("IQ2_XXS", 256, 66), 17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98), 19: Kind("IQ1_S", 256, 50), 20: Kind("IQ4_NL", 32, 18), 21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82), 23: Kind("IQ4_XS", 256, 136), 24: Kind("I8", 1, 1), 25: Kind("I16", 1, 2),
    26: Kind("I32", 1, 4), 27: Kind("I64", 1, 8), 28: Kind("F64", 1, 8), 29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2), 34: Kind("TQ1_0", 256, 54), 35: Kind("TQ2_0", 256, 66), 39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36), 41: Kind("Q1_0", 128, 18),
}  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS.values()}
# Packed types whose numbers can be had.
UNPACKED = frozenset(
    """
    Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS
    TQ1_0 TQ2_0 MXFP4 NVFP4
    """.split()
)

# Types of a metadata value, by number: the letter of the struct module for one number.
LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32, TEXT, ARRAY = 6, 8, 9


class Values(Sequence):
    """An array of the metadata: its values are decoded when they are first asked for."""

    def __init__(self, data: bytes, kind: int, count: int, order: str):
        self.data, self.kind, self.count, self.order, self.made = data, kind, count, order, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index):
        return self.list[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.list)

    def __eq__(self, other) -> bool:
        return isinstance(other, Sequence) and self.list == list(other)

    __hash__ = None

    def __repr__(self) -> str:
        shown = ", ".join(repr(value) for value in islice(self, 8))
        return f"[{shown}, … {self.count:,}]" if self.count > 8 else f"[{shown}]"

    @property
    def list(self) -> list:
        """All the values: numbers, texts, or lists of them."""
        if self.made is None:
            if self.kind in LETTERS:
                self.made = _numbers(self.data, self.kind, self.order)
            else:
                self.made = _Walk(self.data, self.order).elements(self.kind, self.count)
        return self.made


class Place(NamedTuple):
    """Where one tensor lies by a file's table: `kind` None where nobody knows its type, by number."""

    name: str
    sizes: tuple[int, ...]  # the first moves fastest
    number: int
    kind: Kind | None
    offset: int


@data
class Gguf:
    """What a file, or the files that a model was split into, says of itself.

    metadata: numbers, texts, true or false, and Values; infos: the stored tensors by name, in the table's order, their
    shapes as torch has them (the last size moves fastest); files: in order. A type that nobody knows has the name
    `type 99`, and its bytes are taken to reach as far as they can.
    """

    metadata: dict[str, Any]
    infos: dict[str, TensorInfo]
    files: tuple[Path, ...]


def find(directory: Path) -> Path | None:
    """The one model of this format in a directory, split or not; None where there is none.

    Raises GptcliError where there are several.
    """
    everything = sorted(path for path in directory.iterdir() if path.suffix == SUFFIX)
    models = {PART.sub(r"\g<stem>", path.name): path for path in reversed(everything)}  # the first of its parts
    if len(models) > 1:
        names = ", ".join(path.name for path in list(reversed(models.values()))[:3])
        said = f"{directory}: several models ({names}{', …' if len(models) > 3 else ''})"
        raise GptcliError(said, "name one file", "file")
    return next(iter(models.values()), None)


def read_header(path: Path) -> Gguf:
    """A .gguf file's header; of one part of a split model, that of all its parts. Raises GptcliError."""
    named = PART.fullmatch(path.name)
    if named is None:
        alone = _read_file(path)
        count = alone.metadata.get("split.count", 0)
        if isinstance(count, int) and count > 1:
            said = f"one of {count} parts, which its name does not number"
            raise GptcliError(f"{path}: {said}", "name it as it was, …-00001-of-00002.gguf", "incomplete")
        return alone
    count = int(named["count"])
    if not 1 <= int(named["number"]) <= count:
        raise GptcliError(f"{path}: its name numbers no part of {count}", "name it as it was", "file")
    digits = f"-of-{named['count']}{SUFFIX}"
    paths, lost = [], []
    for number in range(1, count + 1):
        part = path.with_name(f"{named['stem']}-{number:05}{digits}")
        (paths if part.is_file() else lost).append(part)
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        names = ", ".join(part.name for part in lost[:3])
        said = f"{path}: {len(lost)} of its {count} parts are missing ({names}{more})"
        raise GptcliError(said, "fetch them into one directory", "incomplete")
    return _joined([_read_file(part) for part in paths], paths)


def _joined(parts: list[Gguf], paths: list[Path]) -> Gguf:
    """The parts of a split model as one. Raises GptcliError where they don't belong together."""
    infos: dict[str, TensorInfo] = {}
    for number, (part, path) in enumerate(zip(parts, paths)):
        said = part.metadata.get("split.no", number), part.metadata.get("split.count", len(parts))
        if said != (number, len(parts)):
            told = f"says that it is part {said[0]!r} (from 0) of {said[1]!r}"
            raise GptcliError(f"{path}: it {told}, and its name says another", "fetch the parts again", "corrupt")
        for name, info in part.infos.items():
            if name in infos:
                said = f"tensor {name!r} is in {infos[name].file.name} and in {path.name}"
                raise GptcliError(said, "fetch the parts again", "corrupt")
            infos[name] = info
    expected = parts[0].metadata.get("split.tensors.count", len(infos))
    if expected != len(infos):
        said = f"{paths[0]}: {expected} tensors are promised and the parts hold {len(infos)}"
        raise GptcliError(said, "fetch the parts again", "corrupt")
    return Gguf(metadata=parts[0].metadata, infos=infos, files=tuple(paths))


class _Malformed(ValueError):
    """What is wrong with a header, for a person."""


def _read_file(path: Path) -> Gguf:
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for a writer
            raise GptcliError(f"{path}: not a regular file", "give a readable file", "file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise GptcliError(f"{path}: the file is empty", "fetch it again", "corrupt")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(data, path)
    except OSError as error:
        raise GptcliError(f"{path}: {error.strerror or error}", "give a readable file", "file") from None
    except _Malformed as error:
        raise GptcliError(f"{path}: {error}", "fetch or write the file again", "corrupt") from None


def _read(data: mmap.mmap, path: Path) -> Gguf:
    """Raises _Malformed."""
    beginning = data[:256]
    if not beginning.startswith(b"GGUF"):
        older = beginning[:4] in (b"lmgg", b"fmgg", b"tjgg")
        other = "a file of GGML's formats before GGUF" if older else "not a GGUF file: it does not begin with GGUF"
        raise _Malformed(what_else(beginning, other))
    if len(data) < 24:
        raise _Malformed(f"{len(data)} bytes are too few for a GGUF file")
    version, order = _version(beginning[4:8])
    if version not in VERSIONS:
        why = ", which counted in 32 bits and is not read" if version == 1 else " is not known"
        raise _Malformed(f"GGUF version {version}{why} (2 and 3 are)")
    walk = _Walk(data, order, 8)
    tensors, keys = walk.number("Q", "how many tensors"), walk.number("Q", "how many keys")
    walk.fits(keys, 13, "keys")  # a length, a type, and a byte at least
    metadata: dict[str, Any] = {}
    for i in range(keys):
        key = walk.name(f"key {i + 1} of {keys}")
        if key in metadata:
            raise _Malformed(f"key {shown(key)} stands twice")
        metadata[key] = walk.value(f"key {shown(key)}")
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _Malformed(f"general.alignment: {str(alignment)[:20]} is not a power of two")
    places = _table(walk, tensors, alignment)
    base = -(-walk.at // alignment) * alignment
    return Gguf(metadata=metadata, infos=_infos(places, base, len(data), order, path), files=(path,))


def _version(raw: bytes) -> tuple[int, str]:
    """The version, and the order of bytes (of the struct module) in which it makes sense."""
    small, big = int.from_bytes(raw, "little"), int.from_bytes(raw, "big")
    return (big, ">") if small & 0xFFFF == 0 and big & 0xFFFF else (small, "<")


def _table(walk: "_Walk", count: int, alignment: int) -> list[Place]:
    """The table of tensors. Raises _Malformed for an entry that makes no sense."""
    walk.fits(count, 24, "tensors")  # a length, how many sizes, a type, an offset
    places, names = [], set()
    for i in range(count):
        name = walk.name(f"tensor {i + 1} of {count}")
        what = f"tensor {shown(name)}"
        if name in names:
            raise _Malformed(f"{what} stands twice")
        names.add(name)
        dimensions = walk.number("I", what)
        if dimensions > MOST_SIZES:
            raise _Malformed(f"{what} has {dimensions:,} dimensions, and {MOST_SIZES} are the most")
        sizes = tuple(walk.number("Q", what) for _ in range(dimensions))
        number, offset = walk.number("I", what), walk.number("Q", what)
        if prod(sizes) >= 2**63:
            raise _Malformed(f"{what} is too large for any file: {' × '.join(map(str, sizes))} numbers")
        kind = KINDS.get(number)
        row = sizes[0] if sizes else 1
        if kind and row % kind.numbers:
            raise _Malformed(f"{what}: a row of {row:,} does not divide into {kind.name}'s blocks of {kind.numbers}")
        if offset % alignment:
            raise _Malformed(f"{what} begins at {offset:,}, which is no multiple of {alignment}")
        places.append(Place(name, sizes, number, kind, offset))
    return places


def _infos(places: list[Place], base: int, size: int, order: str, path: Path) -> dict[str, TensorInfo]:
    """Where every tensor's bytes lie in the file. Raises _Malformed where they are beyond it, or in one another."""
    starts = sorted({base + place.offset for place in places if base + place.offset <= size} | {size})
    following = dict(zip(starts, [*starts[1:], size]))
    infos, reached, before = {}, base, ""
    for place in sorted(places, key=lambda p: p.offset):
        start = base + place.offset
        if place.kind is None:  # of unknown length: up to what comes next
            end = following.get(start, start + 1)
        else:
            end = start + prod(place.sizes) // place.kind.numbers * place.kind.bytes
        if end > size:
            said = f"tensor {shown(place.name)} ends at byte {end:,}, but the file has {size:,}"
            raise _Malformed(f"cut short: {said}")
        if start < reached and end > start:
            said = f"tensor {shown(place.name)} begins at byte {start:,}"
            raise _Malformed(f"{said}, and {shown(before)} ends at {reached:,}")
        dtype = place.kind.name if place.kind else f"type {place.number}"
        # The order of bytes within blocks is not told: such tensors are listed, and not run.
        dtype = dtype if order == "<" else f"big-endian {dtype}"
        infos[place.name] = TensorInfo(dtype, place.sizes[::-1], path, start, end, place.name)
        if end > reached:
            reached, before = end, place.name
    return {place.name: infos[place.name] for place in places}


class _Walk:
    """Steps through the bytes of a header. Every step raises _Malformed rather than leave the file."""

    def __init__(self, data: mmap.mmap | bytes, order: str, at: int = 0):
        self.data, self.order, self.at, self.size = data, order, at, len(data)
        self.formats = {letter: struct.Struct(order + letter) for letter in "BbHhIiQqfd?"}
        self.length = self.formats["Q"].unpack_from

    def fits(self, count: int, least: int, what: str) -> None:
        """Are there bytes enough for so many things of at least so many bytes?"""
        left = self.size - self.at
        if count * least > left:
            raise _Malformed(f"{count:,} {what} are promised, and {left:,} bytes are left")

    def number(self, letter: str, what: str) -> Any:
        form = self.formats[letter]
        if form.size > self.size - self.at:
            raise _Malformed(f"cut short within {what}")
        self.at += form.size
        return form.unpack_from(self.data, self.at - form.size)[0]

    def bytes(self, what: str) -> bytes:
        """A text: its length, and so many bytes."""
        length = self.number("Q", what)
        if length > self.size - self.at:
            raise _Malformed(f"{what}: a text of {length:,} bytes, and {self.size - self.at:,} are left")
        self.at += length
        return self.data[self.at - length : self.at]

    def name(self, what: str) -> str:
        try:
            return self.bytes(f"the name of {what}").decode()
        except UnicodeDecodeError:
            raise _Malformed(f"the name of {what} is not UTF-8") from None

    def value(self, what: str) -> Any:
        """A metadata value: its type, and the value."""
        kind = self.number("I", what)
        if kind == ARRAY:
            return self.array(what)
        if kind == TEXT:
            return self.bytes(what).decode(errors="replace")
        if kind not in LETTERS:
            raise _Malformed(f"{what} is of the unknown type {kind}")
        value = self.number(LETTERS[kind], what)
        return decimal(value) if kind == FLOAT32 else value

    def array(self, what: str) -> Values:
        """An array as it lies, stepped over and not decoded."""
        kind, count = self.number("I", what), self.number("Q", what)
        start = self.at
        self.step(kind, count, what, 1)
        return Values(self.data[start : self.at], kind, count, self.order)

    def step(self, kind: int, count: int, what: str, depth: int) -> None:
        """Over the elements of an array."""
        if kind in LETTERS:
            width = self.formats[LETTERS[kind]].size
            self.fits(count, width, f"values of {what}")
            self.at += count * width
        elif kind == TEXT:
            self.fits(count, 8, f"texts of {what}")
            at, length, data = self.at, self.length, self.data
            try:
                for _ in range(count):
                    at += 8 + length(data, at)[0]
            except (struct.error, OverflowError):
                raise _Malformed(f"{what}: cut short within its {count:,} texts") from None
            if at > self.size:
                raise _Malformed(f"{what}: cut short within its {count:,} texts")
            self.at = at
        elif kind == ARRAY:
            self.fits(count, 12, f"arrays of {what}")
            if depth == MOST_NESTING:
                raise _Malformed(f"{what}: arrays nested more than {MOST_NESTING} deep")
            for _ in range(count):
                self.step(self.number("I", what), self.number("Q", what), what, depth + 1)
        else:
            raise _Malformed(f"{what} is an array of the unknown type {kind}")

    def elements(self, kind: int, count: int) -> list:
        """The texts or the arrays that were stepped over before."""
        if kind == ARRAY:
            return [self.array("an array").list for _ in range(count)]
        data, length, at, found = self.data, self.length, self.at, []
        for _ in range(count):
            end = at + 8 + length(data, at)[0]
            found.append(data[at + 8 : end].decode(errors="replace"))
            at = end
        self.at = at
        return found


def _numbers(data: bytes, kind: int, order: str) -> list:
    """An array's numbers, of one type."""
    letter = LETTERS[kind]
    values = array("B" if letter == "?" else letter)
    values.frombytes(data)
    if (order == "<") != (sys.byteorder == "little"):
        values.byteswap()
    if letter == "?":
        return [value != 0 for value in values]
    return values.tolist()


def decimal(value: float) -> float:
    """A float32 as the shortest decimal number that it is nearest to: 1e-05, where the file has 9.99999974e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if abs(short) <= 3.4028235e38 and struct.unpack("<f", struct.pack("<f", short))[0] == value:
            return short
    return value


def numbers_of(info: TensorInfo) -> list[float]:
    """The numbers of a small stored vector (F32, F16 or F64), read without torch. Raises GptcliError."""
    letters = {"F32": "f", "F16": "e", "F64": "d"}
    if info.dtype not in letters or info.end - info.start > 2**20:
        said = f"tensor {shown(info.key)} is {list(info.shape)} of {info.dtype}, not a short vector of numbers"
        raise GptcliError(f"{info.file}: {said}", "fetch or write the file again", "corrupt")
    with info.file.open("rb") as file:
        file.seek(info.start)
        raw = file.read(info.end - info.start)
    return [one for (one,) in struct.iter_unpack("<" + letters[info.dtype], raw)]
