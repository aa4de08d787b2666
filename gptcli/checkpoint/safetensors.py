"""The header of a .safetensors file: names, types, shapes and byte ranges, read without torch.

The file begins with the header's length (8 bytes, little-endian) and the header itself, JSON of
{name: {dtype, shape, data_offsets}}; the tensors' bytes follow without holes. Every length is checked against the file
before it is believed.
"""

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from gptcli.errors import GptcliError

# Bits of one number, by the format's name of its type.
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
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
        entries = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise refuse(f"its header can't be read ({str(error).splitlines()[0]})") from None
    if not isinstance(entries, dict):
        raise refuse("its header is not a table of tensors")
    entries.pop("__metadata__", None)
    infos = {name: _info(entry, path, 8 + length) for name, entry in entries.items()}
    for name, info in infos.items():
        if info is None:
            raise refuse(f"its header's entry for {name!r} is malformed")
    reached = 8 + length
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != reached:
            raise refuse(f"tensor {name!r} begins at byte {info.start:,}, but the one before ends at {reached:,}")
        reached = info.end
    if reached != size:
        raise refuse(f"its tensors need {reached:,} bytes and the file has {size:,}")
    return infos


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands twice")
    return table


def _info(entry: Any, path: Path, base: int) -> TensorInfo | None:
    """One entry of the header, or None where it makes no sense."""

    def naturals(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)

    if not isinstance(entry, dict) or not naturals(entry.get("shape")) or not naturals(entry.get("data_offsets")):
        return None
    dtype, shape, offsets = entry.get("dtype"), tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in BITS or len(offsets) != 2 or (offsets[1] - offsets[0]) * 8 != prod(shape) * BITS[dtype]:
        return None
    return TensorInfo(dtype, shape, path, base + offsets[0], base + offsets[1])


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
