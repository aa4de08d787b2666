"""The bytes of stored tensors, read in blocks: compared with one another, and digested. Loads no torch.

A tensor's digest is the SHA-256 of its type and shape and its numbers, little-endian, the last axis running fastest:
what stands in a .safetensors file. A model's digest is the SHA-256 over its tensors' names, in the order of their
UTF-8 bytes, and their digests. Neither depends on how a checkpoint is cut into files, on the order in them, or on their
format.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.data import data
from gptcli.errors import GptcliError

BLOCK = 1 << 20  # bytes
SAMPLES, SAMPLE = 64, 4096  # blocks of two large tensors that are compared, and their bytes
# Bytes of a number that are turned round together where a file is big-endian: a complex number is two.
WORD = {"C64": 4, "C128": 8, "C32": 2}


class Lay(NamedTuple):
    """How a tensor's numbers lie between its first byte and its last, where that is not one after the other.

    strides: in numbers, empty where they lie in order; big: the most significant byte comes first; bits: of a number.
    """

    strides: tuple[int, ...] = ()
    big: bool = False
    bits: int = 8


IN_ORDER = Lay()
Step = Callable[[int], object]  # told the bytes that were read


@data
class Statistics:
    """Of one tensor. mean, std (population), min and max: of the numbers that are finite, None where there is none.

    nan, inf: how many, and the index of the first. rows: vectors along the last axis; equal_rows: those that hold one
    number throughout; zero_rows: those that hold zeros alone. spectral: an estimate of a matrix's largest singular
    value, from below, None where it was not asked for.
    """

    numbers: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    zeros: int
    nan: int
    inf: int
    first_nan: list[int] | None
    first_inf: list[int] | None
    rows: int
    equal_rows: int
    zero_rows: int
    spectral: float | None


def alike(a: TensorInfo, b: TensorInfo) -> tuple[bool | None, int]:
    """Whether two stored tensors hold the same bytes, and how many of each were compared; None: they can't be compared.

    Of large ones, samples are: the first bytes, the last, and places between.
    """
    size = a.end - a.start
    if (a.dtype, a.shape) != (b.dtype, b.shape) or size != b.end - b.start:
        return None, 0
    if (a.file, a.start) == (b.file, b.start):
        return True, size
    if size <= SAMPLES * SAMPLE:
        places = [(0, size)]
    else:
        places = [((size - SAMPLE) * i // (SAMPLES - 1), SAMPLE) for i in range(SAMPLES)]
    with opened() as read:
        same = all(read(a.file, a.start + at, n) == read(b.file, b.start + at, n) for at, n in places)
    return same, sum(n for _, n in places)


Read = Callable[[Path, int, int], bytes]


@contextmanager
def opened() -> Iterator[Read]:
    """read(file, start, size): bytes of files, each of which is opened once. Raises GptcliError where a file ends."""
    files: dict[Path, int] = {}

    def read(path: Path, start: int, size: int) -> bytes:
        if path not in files:
            files[path] = os.open(path, os.O_RDONLY)
        data = os.pread(files[path], size, start)
        if len(data) < size:
            raise GptcliError(f"{path}: it ends at byte {start + len(data):,}", "fetch the file again", "corrupt")
        return data

    try:
        yield read
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def blocks(info: TensorInfo, read: Read, size: int = BLOCK) -> Iterator[bytes]:
    """A tensor's bytes as they lie in its file, so many at a time."""
    for at in range(info.start, info.end, size):
        yield read(info.file, at, min(size, info.end - at))


def in_order(info: TensorInfo, lay: Lay, read: Read) -> Iterator[bytes]:
    """A tensor's numbers little-endian, the last axis running fastest, in blocks."""
    size = lay.bits // 8
    word = WORD.get(info.dtype, size)
    if not lay.strides:
        for block in blocks(info, read):
            yield turned(block, word) if lay.big else block
        return
    data = read(info.file, info.start, info.end - info.start)
    data = turned(data, word) if lay.big else data
    for at in _rows(info.shape[:-1], lay.strides):
        yield picked(data, at, info.shape[-1], lay.strides[-1], size)


def turned(data: bytes, size: int) -> bytes:
    """Every `size` bytes in the opposite order."""
    if size == 1:
        return data
    out = bytearray(len(data))
    for i in range(size):
        out[i::size] = data[size - 1 - i :: size]
    return bytes(out)


def picked(data: bytes, at: int, count: int, stride: int, size: int) -> bytes:
    """So many numbers of `size` bytes, every stride-th from the at-th on."""
    if stride == 0 or count == 1:
        return data[at * size : (at + 1) * size] * count
    out, last = bytearray(count * size), (at + (count - 1) * stride) * size
    for i in range(size):
        out[i::size] = data[at * size + i : last + i + 1 : stride * size]
    return bytes(out)


def _rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[int]:
    """Where the rows of a strided tensor begin, in the order of its axes."""
    if not shape:
        yield 0
        return
    for i in range(shape[0]):
        yield from (i * strides[0] + rest for rest in _rows(shape[1:], strides[1:]))


class Digest(NamedTuple):
    """The digests of tensors by name, and of all of them, in hexadecimal digits."""

    model: str
    tensors: dict[str, str]


def digest(infos: Mapping[str, TensorInfo], lays: Mapping[str, Lay], step: Step) -> Digest:
    """Digests of every tensor and of the model. lays: of those whose numbers don't lie in order, by name."""
    import hashlib

    tensors: dict[str, bytes] = {}
    with opened() as read:
        for name, info in _by_place(infos):
            hashed = hashlib.sha256(f"{info.dtype} {'x'.join(map(str, info.shape))}\n".encode())
            for block in in_order(info, lays.get(name, IN_ORDER), read):
                hashed.update(block)
                step(len(block))
            tensors[name] = hashed.digest()
    whole = hashlib.sha256()
    for name in sorted(tensors, key=str.encode):
        word = name.encode()
        whole.update(len(word).to_bytes(8, "little") + word + tensors[name])
    return Digest(whole.hexdigest(), {name: tensors[name].hex() for name in infos})


def _by_place(infos: Mapping[str, TensorInfo]) -> Iterable[tuple[str, TensorInfo]]:
    """In the order of their bytes, file by file, which a disk reads fastest."""
    return sorted(infos.items(), key=lambda item: (str(item[1].file), item[1].start))
