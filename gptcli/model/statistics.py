"""Statistics of stored tensors in double precision, each tensor read once, in blocks that fit the processor's cache.

A block's mean and its squared deviations from that are joined to those of the blocks before it (Chan, Golub and LeVeque
1983), so that large sums are never subtracted from one another.
"""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

import numpy
import torch
from torch import Tensor

from gptcli.checkpoint.gguf import UNPACKED
from gptcli.checkpoint.packed import Packed
from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.checkpoint.scan import IN_ORDER, Lay, Statistics, Step, in_order, opened
from gptcli.data import entry
from gptcli.errors import GptcliError
from gptcli.model import ggml
from gptcli.model.dequantise import whole

NUMBERS = 1 << 19  # of a block
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
LONG = (torch.float64, torch.int64, torch.int32, torch.uint64, torch.uint32)  # what float32 can't hold exactly
KEPT = 32 * 2**20  # bytes of a file that may stay in memory behind what is being read
ITERATIONS = 12  # of the power method
SPREAD = 1e-4  # of the mean square: where the variance is less, it is taken from differences


def statistics_of(
    infos: Mapping[str, TensorInfo],
    lays: Mapping[str, Lay],
    packed: Mapping[str, Packed],
    spectral: bool,
    step: Step,
) -> Iterator[tuple[str, Statistics]]:
    """Every tensor's, in the order of infos. packed: those that are dequantised first, by name.

    lays: how numbers lie where that is not in order; step is told the bytes read. Skips types that are no numbers here.
    """
    files = _Files()
    for name, info in infos.items():
        size = info.end - info.start
        if name in packed:
            weight = packed[name]
            yield name, _statistics(_Reading(files.unpacked(weight), weight.shape, weight.bytes, step), spectral)
        elif info.dtype in UNPACKED:
            flat = ggml.dequantised(ggml.lying(info, files.bytes(info.file)), info.dtype).reshape(-1)
            yield name, _statistics(_Reading(flat, info.shape, size, step), spectral)
        elif info.dtype not in TYPES:
            step(size)
        elif lays.get(name, IN_ORDER) != IN_ORDER:
            yield name, _statistics(_Reading(_gathered(info, lays[name]), info.shape, size, step), spectral)
        else:
            read = _Reading(files.numbers(info), info.shape, size, step, files.keep_up_with(info))
            yield name, _statistics(read, spectral)


@entry
class _Reading:
    """A tensor's numbers one after the other. size: its bytes in the file, of which step and forget are told."""

    flat: Tensor
    shape: tuple[int, ...]
    size: int
    step: Step
    forget: Callable[[int], None] = lambda read: None


def _statistics(read: _Reading, spectral: bool) -> Statistics:
    flat, shape = read.flat, read.shape
    numbers, row = prod(shape), shape[-1] if shape else 1
    sums, told = _Sums(), 0
    for start, stop in _blocks(numbers, row):
        sums.add(flat[start:stop], row)
        reached = read.size * stop // numbers
        read.step(reached - told)
        read.forget(reached)
        told = reached
    finite = sums.finite > 0
    clean = finite and not sums.nan and not sums.inf
    return Statistics(
        numbers=numbers,
        mean=sums.mean if finite else None,
        std=math.sqrt(max(sums.square, 0.0) / sums.finite) if finite else None,
        min=sums.min if finite else None,
        max=sums.max if finite else None,
        zeros=sums.zeros,
        nan=sums.nan,
        inf=sums.inf,
        first_nan=_index(sums.first_nan, shape),
        first_inf=_index(sums.first_inf, shape),
        rows=numbers // row if row and shape else 0,
        equal_rows=sums.equal_rows if shape else 0,
        zero_rows=sums.zero_rows if shape else 0,
        spectral=_spectral(flat.view(shape)) if spectral and clean and len(shape) == 2 else None,
    )


def _blocks(numbers: int, row: int) -> Iterator[tuple[int, int]]:
    """Where blocks begin and end: whole rows, or parts of one row."""
    if row <= NUMBERS:
        each = row * max(NUMBERS // max(row, 1), 1)
        yield from ((start, min(start + each, numbers)) for start in range(0, numbers, max(each, 1)))
        return
    for first in range(0, numbers, row):
        yield from ((start, min(start + NUMBERS, first + row)) for start in range(first, first + row, NUMBERS))


def _index(flat: int | None, shape: tuple[int, ...]) -> list[int] | None:
    if flat is None:
        return None
    return [int(i) for i in numpy.unravel_index(flat, shape)] if shape else []


class _Sums:
    """What has been seen of a tensor so far. at: numbers read; low, high: of a row that goes on in the next block."""

    def __init__(self) -> None:
        self.at = self.finite = self.zeros = self.nan = self.inf = self.equal_rows = self.zero_rows = 0
        self.mean = self.square = 0.0  # square: Σ (x - mean)²
        self.min, self.max = self.low, self.high = math.inf, -math.inf
        self.first_nan: int | None = None
        self.first_inf: int | None = None
        self.room(0)

    def room(self, size: int) -> None:
        self.wide, self.short = torch.empty(size, dtype=torch.float64), torch.empty(size)
        self.mask = numpy.empty(size, dtype=bool)

    def add(self, block: Tensor, row: int) -> None:
        """The next numbers, flat: whole rows, or a part of one."""
        size = block.numel()
        if len(self.mask) < size:
            self.room(size)
        wide = self.wide[:size]
        if block.dtype != torch.float32:
            place = wide if block.dtype in LONG else self.short[:size]
            block = place.copy_(block)
        x = block.numpy()
        low, high = (float(end) for end in torch.aminmax(block))  # a NaN makes both NaN
        self.zeros += int(numpy.count_nonzero(numpy.equal(x, 0, out=self.mask[:size])))
        self._rows(x, row, low, high)
        if block is not wide:
            wide.copy_(block)
        if not (math.isfinite(low) and math.isfinite(high)):
            self._note(wide)
            wide = wide[wide.isfinite()]
            low, high = (float(end) for end in torch.aminmax(wide)) if wide.numel() else (math.inf, -math.inf)
        self.at += size
        self.min, self.max = min(self.min, low), max(self.max, high)
        if wide.numel():
            self._join(wide.numel(), *_moments(wide))

    def _rows(self, x: numpy.ndarray, row: int, low: float, high: float) -> None:
        """Counts the rows that hold one number throughout; low, high: of the block."""
        if row <= NUMBERS:
            rows = x.reshape(-1, row)
            likely = rows[rows[:, 0] == rows[:, -1]]
            if len(likely):
                equal = likely[(likely == likely[:, :1]).all(1)]
                self.equal_rows += len(equal)
                self.zero_rows += int(numpy.count_nonzero(equal[:, 0] == 0))
            return
        # A comparison with NaN is false: a row that has one keeps it, and is equal to nothing.
        self.low = self.low if low > self.low or math.isnan(self.low) else low
        self.high = self.high if high < self.high or math.isnan(self.high) else high
        if (self.at + len(x)) % row == 0:
            self.equal_rows += self.low == self.high
            self.zero_rows += self.low == self.high == 0
            self.low, self.high = math.inf, -math.inf

    def _note(self, wide: Tensor) -> None:
        """Counts what is not finite."""
        for name, found in (("nan", wide.isnan()), ("inf", wide.isinf())):
            if count := int(found.sum()):
                setattr(self, name, getattr(self, name) + count)
                if getattr(self, f"first_{name}") is None:
                    setattr(self, f"first_{name}", self.at + int(found.nonzero()[0]))

    def _join(self, count: int, mean: float, square: float) -> None:
        joined, apart = self.finite + count, mean - self.mean
        self.mean += apart * count / joined
        self.square += square + apart * apart * self.finite * count / joined
        self.finite = joined


def _moments(wide: Tensor) -> tuple[float, float]:
    """The mean of float64 numbers, and the sum of their squared deviations from it. May write over them."""
    flat = wide.numpy()
    total, squares = float(wide.sum()), float(numpy.dot(flat, flat))
    mean = total / len(flat)
    if squares - total * mean > SPREAD * squares:
        return mean, squares - total * mean
    wide -= mean  # nearly all alike: the difference of two large sums would tell little
    return mean, float(numpy.dot(flat, flat))


def _spectral(matrix: Tensor) -> float:
    """The largest singular value, by the power method on WᵀW from a seeded vector: never more than the true one."""
    v = torch.randn(matrix.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v /= v.norm()
    value, each = 0.0, max(NUMBERS // max(matrix.shape[1], 1), 1)
    for _ in range(ITERATIONS):
        w = torch.zeros_like(v)
        for rows in matrix.split(each):
            part = rows.double()
            w += part.T @ (part @ v)
        value = float(w.norm())
        if value == 0:
            return 0.0
        v = w / value
    return math.sqrt(value)


class _Files:
    """Files in memory, page by page as they are read."""

    def __init__(self) -> None:
        self.maps: dict[Path, mmap.mmap] = {}

    def numbers(self, info: TensorInfo) -> Tensor:
        """A stored tensor's numbers, one after the other; nothing is read yet."""
        dtype, size = TYPES[info.dtype], info.end - info.start
        if size == 0:
            return torch.empty(0, dtype=dtype)
        if info.file not in self.maps:
            with info.file.open("rb") as file:
                # A private map: torch asks for one that could be written to.
                self.maps[info.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        held = self.maps[info.file]
        if info.end > len(held):
            raise GptcliError(f"{info.file}: it ends at byte {len(held):,}", "fetch the file again", "corrupt")
        if info.start % dtype.itemsize:
            return torch.frombuffer(bytearray(held[info.start : info.end]), dtype=dtype)
        return torch.frombuffer(held, dtype=dtype, count=size // dtype.itemsize, offset=info.start)

    def bytes(self, path: Path) -> Tensor:
        """A whole file, byte by byte; nothing is read yet."""
        return ggml.mapped(path)

    def keep_up_with(self, info: TensorInfo) -> Callable[[int], None]:
        """What gives back the memory of a tensor's bytes that were read, so that a large file never stays whole."""
        held, given = self.maps.get(info.file), info.start // mmap.PAGESIZE * mmap.PAGESIZE

        def forget(read: int) -> None:
            nonlocal given
            reached = (info.start + read) // mmap.PAGESIZE * mmap.PAGESIZE
            enough = reached - given >= KEPT or (read == info.end - info.start and reached > given)
            if enough and held is not None and hasattr(mmap, "MADV_DONTNEED"):
                held.madvise(mmap.MADV_DONTNEED, given, reached - given)
                given = reached

        return forget

    def unpacked(self, packed: Packed) -> Tensor:
        """A packed weight as numbers again, in float32, one after the other."""

        def part(role: str) -> Tensor:
            info = packed.parts[role]
            return self.numbers(info).reshape(info.shape)

        return whole(packed, part, torch.float32).reshape(-1)


def _gathered(info: TensorInfo, lay: Lay) -> Tensor:
    """The numbers of a tensor that do not lie in order, in memory of their own."""
    with opened() as read:
        data = bytearray(b"".join(in_order(info, lay, read)))
    return torch.frombuffer(data, dtype=TYPES[info.dtype]) if data else torch.empty(0, dtype=TYPES[info.dtype])
