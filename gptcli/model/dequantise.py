"""Packed weights as numbers again: fp8 with scales, MXFP4, and bitsandbytes' 4 bits.

Arithmetic is in float32, or in float64 where that is asked for. What a parameter does not need of a stored tensor (the
other experts, the rows of other parts) is cut away before it is unpacked, wherever rows are packed one by one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gptcli.checkpoint.bind import Bound
from gptcli.checkpoint.packed import Packed

# A sign, two bits of exponent, one of fraction: E2M1 of the OCP Microscaling Formats 1.0.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}

Read = Callable[[str], Tensor]  # a stored tensor of a packed weight, by its role


def whole(packed: Packed, read: Read, dtype: torch.dtype) -> Tensor:
    """A packed weight in its whole shape, in dtype. packed.runs must hold."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if packed.scheme == "mxfp4":
        return mxfp4(read("numbers"), read("scales"), wide).to(dtype)
    if packed.scheme == "fp8":
        return fp8(read("numbers"), read("scales"), packed.block, wide).to(dtype)
    return _bitsandbytes(packed, read).to(dtype)


def dequantised(
    packed: Packed, bound: Bound, read: Read, cut: Callable[[Tensor, Bound], Tensor], dtype: torch.dtype
) -> Tensor:
    """The parameter that `cut` takes out of a packed weight, in dtype and in memory of its own."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if packed.scheme not in ("mxfp4", "fp8"):
        return cut(_bitsandbytes(packed, read), bound).to(dtype, copy=True)
    numbers, scales = read("numbers"), read("scales")
    if bound.item is not None:
        numbers, scales = numbers[bound.item], scales[bound.item] if scales.numel() > 1 else scales
        bound = bound._replace(item=None)
    if packed.scheme == "mxfp4":
        return mxfp4(cut(numbers, bound), cut(scales, bound), wide).to(dtype)
    if bound.transposed:  # its rows are the columns of what is stored
        return cut(fp8(numbers, scales, packed.block, wide), bound).to(dtype, copy=True)
    scales = by_row(scales, numbers.shape, packed.block[0], packed.block[1])
    return fp8(cut(numbers, bound), cut(scales, bound), (1, packed.block[1]), wide).to(dtype)


def fp8(numbers: Tensor, scales: Tensor, block: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """numbers [..., out, in] times the scale of their block: one number, [..., out], or [..., ⌈out / block[0]⌉, ⌈in /
    block[1]⌉]. The last block of a row or column may be shorter.
    """
    rows, columns = block
    scales = by_row(scales, numbers.shape, rows, columns).to(dtype)  # [..., out, ⌈in / columns⌉]
    whole_blocks = numbers.shape[-1] // columns * columns
    found = numbers.to(dtype)
    if whole_blocks:
        part = found[..., :whole_blocks].unflatten(-1, (-1, columns))  # [..., out, in / columns, columns]
        part *= scales[..., : whole_blocks // columns, None]
    found[..., whole_blocks:] *= scales[..., whole_blocks // columns :]
    return found


def by_row(scales: Tensor, shape: torch.Size, rows: int, columns: int) -> Tensor:
    """The scales of a weight [..., out, in], those of each of its rows: [..., out, ⌈in / columns⌉]."""
    *stack, out, into = shape
    known = stack if scales.numel() > 1 else [1] * len(stack)
    grid = exponents(scales).reshape(*known, -(-out // rows), -(-into // columns))
    return grid.repeat_interleave(rows, -2)[..., :out, :].expand(*stack, out, -1)


def exponents(scales: Tensor) -> Tensor:
    """Scales as numbers: bytes are exponents of two, less 127, and 255 is no number (E8M0)."""
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    return scales.float() if scales.dtype == torch.float8_e8m0fnu else scales


def mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks [..., G, 16] of two numbers a byte, the low half first, and scales [..., G] → [..., 32 · G]."""
    table = torch.tensor(E2M1, dtype=dtype, device=blocks.device)
    found = _looked_up(blocks, table, high_first=False).view(*blocks.shape[:-1], 32)  # [..., G, 32]
    found *= exponents(scales).to(dtype)[..., None]
    return found.flatten(-2)  # → [..., 32 · G]


def four_bits(numbers: Tensor, scales: Tensor, table: Tensor, block: int, count: int) -> Tensor:
    """bytes [⌈count / 2⌉] of two indices each, the high half first, into a table [16], times the scale of their block:
    [count], in float32.
    """
    return _by_block(_looked_up(numbers, table, high_first=True)[:count], scales, block)


def _bitsandbytes(packed: Packed, read: Read) -> Tensor:
    """A weight of 4-bit indices, rounded to the type that its state names, as its own library does."""
    scales = read("scales")
    if packed.nested is not None:
        block, offset = packed.nested
        scales = _by_block(read("nested_quant_map")[scales.int()], read("nested_scales"), block) + offset
    numbers = read("numbers").flatten().view(torch.uint8)
    found = four_bits(numbers, scales, read("quant_map"), packed.block[0], packed.count)
    return found.to(TYPES[packed.dtype]).view(packed.shape)


def _by_block(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    """numbers [n], overwritten: times the scale of each `block` of them, the last being shorter where need be."""
    whole_blocks = len(numbers) // block
    numbers[: whole_blocks * block].view(-1, block).mul_(scales[:whole_blocks, None])
    if len(scales) > whole_blocks:
        numbers[whole_blocks * block :] *= scales[whole_blocks]
    return numbers


def _looked_up(numbers: Tensor, table: Tensor, high_first: bool) -> Tensor:
    """The numbers that both halves of each byte mean by a table [16], one after the other: [2 · bytes]."""
    byte = torch.arange(256, device=table.device)
    high, low = table[byte >> 4], table[byte & 15]
    pairs = torch.stack((high, low) if high_first else (low, high), 1)  # [256, 2]
    return pairs.index_select(0, numbers.flatten().int()).flatten()
