"""The header of a .safetensors file: names, types, shapes and byte ranges, read without torch.

The file begins with the header's length (8 bytes, little-endian) and the header itself, JSON of
{name: {dtype, shape, data_offsets}}; the tensors' bytes follow without holes. Every length is checked against the file
before it is believed, and no header passes that the format's own library would refuse.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from gptcli.errors import GptcliError

# Bits of one number, by the format's name of its type.
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
FIELDS = {"dtype", "shape", "data_offsets"}
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_HEADER = 100_000_000  # the format's own limit, in bytes
MAX_READ = 25_000_000  # of which so many are read, for a header takes ten times its length while it is
MAX_SIGNS = {b"{": 60_000, b"[": 120_000, b",": 1_200_000}  # such as the header of as many tensors has


class TensorInfo(NamedTuple):
    """A stored tensor: its type, its shape, where its bytes lie in the file, and its name there."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    key: str = ""  # of one that a file holds, never empty


class Header(NamedTuple):
    """The tensors of a file by name, and what it says of itself."""

    tensors: dict[str, TensorInfo]
    notes: dict[str, str]


class CutShort(GptcliError):
    """A file that ends before its tensors do. header: what it would hold."""

    header: Header


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a .safetensors file, by name. Raises GptcliError that says what the file is instead."""
    return read(path).tensors


def read(path: Path) -> Header:
    """The header of a .safetensors file. Raises GptcliError that says what the file is instead, or where it ends."""

    def refuse(reason: str, code: str = "corrupt") -> GptcliError:
        return GptcliError(f"{path}: {reason}", "fetch or write the file again", code)

    try:
        state = path.stat()
        if not S_ISREG(state.st_mode):  # a pipe would wait for a writer
            raise GptcliError(f"{path}: not a regular file", "give a readable file", "file")
        size = state.st_size
        with path.open("rb") as file:
            start = file.read(8)
            if size < 8:
                few = f"{size} bytes are too few for a safetensors file"
                raise refuse(few) if size else refuse("the file is empty", "not-a-checkpoint")
            length = int.from_bytes(start, "little")
            if length > min(size - 8, MAX_HEADER):
                file.seek(0)
                other = what_else(file.read(512), "")
                reason = other or f"a header of {length:,} bytes in a file of {size:,}"
                raise refuse(reason, "not-a-checkpoint" if other else "corrupt")
            if length > MAX_READ:
                raise refuse(f"a header of {length:,} bytes, of which no more than {MAX_READ:,} are read")
            text = file.read(length)
            for sign, most in MAX_SIGNS.items():
                if text.count(sign) > most:
                    raise refuse(f"a header with {text.count(sign):,} times {sign.decode()}, more than {most:,}")
    except OSError as error:
        raise GptcliError(f"{path}: {error.strerror}", "give a readable file", "file") from None
    try:
        hooks = {"parse_float": _no_number, "parse_constant": _no_number}
        if b"-" in text:  # a minus before a number: in range are those from 0 on
            hooks["parse_int"] = _natural
        # Without an escape no text is half a character.
        entries = json.loads(text.decode(), object_pairs_hook=_table if b"\\" in text else _plain_table, **hooks)
    except (ValueError, RecursionError) as error:
        raise refuse(f"its header can't be read ({str(error).splitlines()[0]})") from None
    if not isinstance(entries, dict):
        raise refuse("its header is not a table of tensors")
    notes = entries.pop("__metadata__", None)
    if notes is not None and not (isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())):
        raise refuse("its header's __metadata__ is not a table of texts")
    infos = {}
    for name, entry in entries.items():
        try:
            infos[name] = _info(name, entry, path, 8 + length)
        except ValueError as error:
            raise refuse(f"its header's entry for {shown(name)} is malformed ({error})") from None
    reached = 8 + length
    for name, info in _by_place(infos, reached):
        if info.start != reached:
            raise refuse(f"tensor {shown(name)} begins at byte {info.start:,}, but the one before ends at {reached:,}")
        reached = info.end
    header = Header(infos, notes or {})
    if reached != size:
        fault = refuse(f"its tensors need {reached:,} bytes and the file has {size:,}")
        if reached > size:
            fault = CutShort(fault.message, fault.hint, fault.code)
            fault.header = header
        raise fault
    return header


def _by_place(infos: dict[str, TensorInfo], reached: int) -> Iterable[tuple[str, TensorInfo]]:
    """In the order of their bytes, which is most often that of the header already."""
    for info in infos.values():
        if info.start != reached:
            return sorted(infos.items(), key=lambda item: (item[1].start, item[1].end))
        reached = info.end
    return infos.items()


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names and texts are Unicode (an escape can be half a character), each name given once."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        for text in (name, value) if isinstance(value, str) else (name,):
            text.encode()
        if name in table:
            raise ValueError(f"{shown(name)} stands twice")
        table[name] = value
    return table


def _plain_table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The same, of names and texts that are known to be Unicode."""
    table = dict(pairs)
    return table if len(table) == len(pairs) else _table(pairs)


def _natural(digits: str) -> int:
    """A whole number from 0 to 2^63 - 1, the only kind that a header holds (`-0` is none)."""
    if not digits.isdigit() or len(digits) > 19 or int(digits) >= 2**63:
        _no_number(digits)
    return int(digits)


def _no_number(text: str) -> None:
    raise ValueError(f"{text[:40]} is not a whole number from 0 to 2^63 - 1")


def shown(name: str) -> str:
    """A name from a file, in quotes, escaped, and no longer than a line should be."""
    return repr(name if len(name) <= 200 else name[:199] + "…")


def _info(name: str, entry: Any, path: Path, base: int) -> TensorInfo:
    """One entry of the header. Raises ValueError where it makes no sense."""
    if not isinstance(entry, dict) or entry.keys() != FIELDS:
        raise ValueError("not a table of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"the type {shown(dtype)} is unknown" if isinstance(dtype, str) else "the type is not text")
    if not isinstance(shape, list) or [*map(type, shape)].count(int) < len(shape):
        raise ValueError("the shape is not a list of whole numbers")
    if not isinstance(offsets, list) or [*map(type, offsets)] != [int, int]:
        raise ValueError("the offsets are not two whole numbers")
    if (most := max(*shape, *offsets)) >= 2**63:
        _no_number(str(most))
    numbers = 1
    for size in shape:
        numbers *= size
        if numbers >= 2**64:  # at once, for a product of a million sizes would take minutes
            raise ValueError("the shape is too large for any file")
    if (offsets[1] - offsets[0]) * 8 != numbers * BITS[dtype]:
        raise ValueError(f"{offsets[1] - offsets[0]:,} bytes for {numbers:,} numbers of {BITS[dtype]} bits")
    return TensorInfo(dtype, tuple(shape), path, base + offsets[0], base + offsets[1], name)


# What other files begin with: what a download may bring in a checkpoint's place, or a wrong suffix hide.
OTHERS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the weights that it points to"),
    (b"GGUF", "a GGUF file under another name"),
    (b"PK\x03\x04", "a PyTorch file under another name"),
    (b"\x80\x02", "a PyTorch file under another name"),
    (b"\x93NUMPY", "an array of NumPy"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"<?xml", "an XML document, not weights"),
)


def what_else(beginning: bytes, otherwise: str) -> str:
    """What a file that begins like this is, where that is plain to see."""
    if beginning.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page, not weights"
    if beginning[257:262] == b"ustar":
        return "a tar archive"
    return next((what for start, what in OTHERS if beginning.startswith(start)), otherwise)
