"""Tensors of ggml's types as numbers: blocks of packed whole numbers, with a scale and often a minimum each.

A row of a tensor is a run of blocks, so rows can be read alone. Every product and sum is rounded as ggml's own code
rounds it; the layouts of the blocks are those of its `ggml-common.h`. n blocks of so many bytes, k numbers a group.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gptcli.checkpoint.gguf import BY_NAME, UNPACKED
from gptcli.checkpoint.safetensors import FLOATS, TensorInfo
from gptcli.errors import GptcliError

AT_ONCE = 2**18  # numbers unpacked at a time, which a processor's cache holds


class Packed(NamedTuple):
    """What a block's bytes say: (numbers - less) · scales + shifts, a scale (and a shift) for every group.

    numbers [n, groups, k], of one byte each; scales and shifts [n, groups], float32.
    """

    numbers: Tensor
    scales: Tensor
    less: int = 0
    shifts: Tensor | None = None


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block: [n, bytes] → [n, 1], float32."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def fields(packed: Tensor, bits: int) -> Tensor:
    """All bytes' lowest fields of so many bits, then all their next ones: [n, …, k] → [n, …, 8 / bits, k]."""
    packed = packed.contiguous()
    return torch.stack([packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)], -2)


# A byte's bits as eight bytes, the lowest first, each worth 16 where it is set.
SPREAD = ((torch.arange(256)[:, None] >> torch.arange(8) & 1) << 4).byte().view(torch.int64).flatten()


def fives(blocks: Tensor, at: int) -> Tensor:
    """5-bit numbers: 32 high bits in four bytes, then the low fours: → [n, 1, 32]."""
    high = SPREAD[blocks[:, at : at + 4].int()].view(torch.uint8)  # [n, 4] → [n, 32]
    return fields(blocks[:, at + 4 :], 4).flatten(1).bitwise_or_(high)[:, None]


def q4_0(blocks: Tensor) -> Packed:
    return Packed(fields(blocks[:, 2:], 4).view(-1, 1, 32), half(blocks, 0), 8)


def q4_1(blocks: Tensor) -> Packed:
    return Packed(fields(blocks[:, 4:], 4).view(-1, 1, 32), half(blocks, 0), shifts=half(blocks, 2))


def q5_0(blocks: Tensor) -> Packed:
    return Packed(fives(blocks, 2), half(blocks, 0), 16)


def q5_1(blocks: Tensor) -> Packed:
    return Packed(fives(blocks, 4), half(blocks, 0), shifts=half(blocks, 2))


def q8_0(blocks: Tensor) -> Packed:
    return Packed(blocks[:, None, 2:].view(torch.int8), half(blocks, 0))


def q2_k(blocks: Tensor) -> Packed:
    """16 groups of 16 numbers, each with a 4-bit scale and a 4-bit minimum."""
    packed = blocks[:, :16].contiguous()
    q = fields(blocks[:, 16:80].unflatten(1, (2, 32)), 2)  # [n, 2, 32] → [n, 2, 4, 32]
    scales, minima = half(blocks, 80) * (packed & 15), half(blocks, 82) * (packed >> 4)  # [n, 16]
    return Packed(q.view(-1, 16, 16), scales, shifts=-minima)


def q3_k(blocks: Tensor) -> Packed:
    """16 groups of 16 numbers, each with a 6-bit scale. A number is its low two bits, less 4 if its high bit is off."""
    packed = blocks[:, 96:108]
    scales = fields(packed[:, :8], 4).flatten(1) | fields(packed[:, 8:], 2).flatten(1) << 4  # [n, 16]
    low = fields(blocks[:, 32:96].unflatten(1, (2, 32)), 2).flatten(1)  # [n, 2, 32] → [n, 2, 4, 32] → [n, 256]
    high = fields(blocks[:, :32], 1).flatten(1)  # [n, 32] → [n, 8, 32] → [n, 256]
    return Packed((low | high << 2).view(-1, 16, 16), half(blocks, 108) * (scales.float() - 32), 4)


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and minima in 12 bytes, each times the float16 that all of its kind share: two of [n, 8]."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, rest & 15 | (first >> 6) << 4), 1)
    minima = torch.cat((second & 63, rest >> 4 | (second >> 6) << 4), 1)
    return half(blocks, 0) * scales, half(blocks, 2) * minima


def q4_k(blocks: Tensor) -> Packed:
    """8 groups of 32 numbers, each with a 6-bit scale and a 6-bit minimum."""
    q = fields(blocks[:, 16:].unflatten(1, (4, 32)), 4)  # [n, 4, 32] → [n, 4, 2, 32]
    scales, minima = k_scales(blocks)
    return Packed(q.view(-1, 8, 32), scales, shifts=-minima)


def q5_k(blocks: Tensor) -> Packed:
    """As q4_k, with a high bit for each number before the low fours."""
    q = fields(blocks[:, 48:].unflatten(1, (4, 32)), 4).view(-1, 8, 32)
    q.bitwise_or_(fields(blocks[:, 16:48], 1).bitwise_left_shift_(4))  # [n, 32] → [n, 8, 32]
    scales, minima = k_scales(blocks)
    return Packed(q, scales, shifts=-minima)


def q6_k(blocks: Tensor) -> Packed:
    """16 groups of 16 numbers, each with an 8-bit scale."""
    q = fields(blocks[:, :128].unflatten(1, (2, 64)), 4).view(-1, 256)  # [n, 2, 64] → [n, 2, 2, 64]
    high = fields(blocks[:, 128:192].unflatten(1, (2, 32)), 2)  # [n, 2, 32] → [n, 2, 4, 32]
    q.bitwise_or_(high.bitwise_left_shift_(4).view(-1, 256))
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return Packed(q.view(-1, 16, 16), scales, 32)


OWN: dict[str, Callable[[Tensor], Packed]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k,
    "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip


def unpack(blocks: Tensor, kind: str, out: Tensor) -> None:
    """Puts what blocks [n, bytes] hold into out [n, numbers], float32. The rarer types go through the gguf package."""
    if kind not in OWN:
        import numpy
        from gguf import GGMLQuantizationType, dequantize

        rows = blocks.reshape(1, -1).numpy()  # it goes row by row
        with numpy.errstate(all="ignore"):
            out.copy_(torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind])).view_as(out))
        return
    packed = OWN[kind](blocks)
    grouped = out.view(packed.numbers.shape)  # [n, numbers] → [n, groups, k]
    grouped.copy_(packed.numbers)
    if packed.less:
        grouped.sub_(packed.less)
    grouped.mul_(packed.scales[..., None])
    if packed.shifts is not None:
        grouped.add_(packed.shifts[..., None])


def dequantised(rows: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of blocks as numbers of that type: bytes [..., B] → [..., numbers], rounded once, from float32.

    Raises GptcliError for a type that can't be unpacked.
    """
    if kind not in UNPACKED:
        raise GptcliError(f"tensors of type {kind} can't be unpacked", "convert the model to another type", "dtype")
    form = BY_NAME[kind]
    blocks = rows.reshape(-1, form.bytes)  # [..., B] → [n, bytes]
    out = torch.empty(len(blocks), form.numbers, dtype=dtype)
    step = AT_ONCE // form.numbers
    spare = None if dtype == torch.float32 else torch.empty(min(step, len(blocks)), form.numbers)
    for start in range(0, len(blocks), step):
        part = out[start : start + step]
        full = part if spare is None else spare[: len(part)]
        unpack(blocks[start : start + step], kind, full)
        if spare is not None:
            part.copy_(full)
    return out.view(*rows.shape[:-1], rows.shape[-1] // form.bytes * form.numbers)


def mapped(path: Path) -> Tensor:
    """A file's bytes, read when they are looked at. What is written into them stays in memory."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def lying(info: TensorInfo, data: Tensor) -> Tensor:
    """A stored tensor within its file's bytes: its numbers, or for a packed type its rows of blocks, [..., B]."""
    raw = data[info.start : info.end]
    if info.dtype in FLOATS:
        dtype = getattr(torch, FLOATS[info.dtype])
        raw = raw if info.start % dtype.itemsize == 0 else raw.clone()
        return raw.view(dtype).view(info.shape)
    form = BY_NAME[info.dtype]
    raw = raw if info.start % 2 == 0 else raw.clone()  # for the float16 in every block
    return raw.view(*info.shape[:-1], info.shape[-1] // form.numbers * form.bytes)
