"""The header of a .safetensors file: names, types, shapes and byte ranges, read without torch.

The file begins with the header's length (8 bytes, little-endian) and the header itself, JSON of
{name: {dtype, shape, data_offsets}}; the tensors' bytes follow without holes. Every length is checked against the file
before it is believed, and no header passes that the format's own library would refuse.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from gptcli.errors import GptcliError

# Bits of one number, by the format's name of its type.
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_HEADER = 100_000_000  # the format's own limit, in bytes


class TensorInfo(NamedTuple):
    """A stored tensor: its type, its shape, where its bytes lie in the file, and its name there."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    key: str = ""


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a .safetensors file, by name. Raises GptcliError that says what the file is instead."""

    def refuse(reason: str, hint: str = "fetch or write the file again") -> GptcliError:
        return GptcliError(f"{path}: {reason}", hint, "corrupt")

    try:
        if path.exists() and not path.is_file():  # a pipe would wait for a writer
            raise GptcliError(f"{path}: not a regular file", "give a readable file", "file")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if size < 8:
                raise refuse(f"{size} bytes are too few for a safetensors file" if size else "the file is empty")
            length = int.from_bytes(start, "little")
            if length > min(size - 8, MAX_HEADER):
                file.seek(0)
                raise refuse(what_else(file.read(256), f"a header of {length:,} bytes in a file of {size:,}"))
            text = file.read(length)
    except OSError as error:
        raise GptcliError(f"{path}: {error.strerror}", "give a readable file", "file") from None
    try:
        hooks = {"parse_int": _natural, "parse_float": _no_number, "parse_constant": _no_number}
        entries = json.loads(text.decode(), object_pairs_hook=_table, **hooks)
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
            infos[name] = _info(entry, path, 8 + length)
        except ValueError as error:
            raise refuse(f"its header's entry for {_shown(name)} is malformed ({error})") from None
    reached = 8 + length
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != reached:
            raise refuse(f"tensor {_shown(name)} begins at byte {info.start:,}, but the one before ends at {reached:,}")
        reached = info.end
    if reached != size:
        raise refuse(f"its tensors need {reached:,} bytes and the file has {size:,}")
    return infos


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names and texts are Unicode (an escape can be half a character), each name given once."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        for text in (name, value) if isinstance(value, str) else (name,):
            text.encode()
        if name in table:
            raise ValueError(f"{_shown(name)} stands twice")
        table[name] = value
    return table


def _natural(digits: str) -> int:
    """A whole number from 0 to 2^63 - 1, the only kind that a header holds (`-0` is none)."""
    if not digits.isdigit() or len(digits) > 19 or int(digits) >= 2**63:
        _no_number(digits)
    return int(digits)


def _no_number(text: str) -> None:
    raise ValueError(f"{text[:40]} is not a whole number from 0 to 2^63 - 1")


def _shown(name: str) -> str:
    return repr(name if len(name) <= 200 else name[:199] + "…")


def _info(entry: Any, path: Path, base: int) -> TensorInfo:
    """One entry of the header. Raises ValueError where it makes no sense."""

    def naturals(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int for v in values)

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("not a table of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"the type {_shown(dtype)} is unknown" if isinstance(dtype, str) else "the type is not text")
    if not naturals(shape):
        raise ValueError("the shape is not a list of whole numbers")
    if not naturals(offsets) or len(offsets) != 2:
        raise ValueError("the offsets are not two whole numbers")
    numbers = 1
    for size in shape:
        numbers *= size
        if numbers >= 2**64:  # at once, for a product of a million sizes would take minutes
            raise ValueError("the shape is too large for any file")
    if (offsets[1] - offsets[0]) * 8 != numbers * BITS[dtype]:
        raise ValueError(f"{offsets[1] - offsets[0]:,} bytes for {numbers:,} numbers of {BITS[dtype]} bits")
    return TensorInfo(dtype, tuple(shape), path, base + offsets[0], base + offsets[1])


def what_else(beginning: bytes, otherwise: str) -> str:
    """What a file that begins like this is, where that is plain to see."""
    if beginning.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the weights that it points to"
    if beginning.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page, not weights"
    if beginning.startswith(b"GGUF"):
        return "a GGUF file under another name"
    if beginning.startswith((b"PK\x03\x04", b"\x80\x02")):
        return "a PyTorch file under another name"
    return otherwise
