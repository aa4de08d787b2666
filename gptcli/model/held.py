"""A model's parameters where they lie: some rows at a time, in the type that holds them. Nothing is kept.

What a file has in order, in a type of torch's, is looked at in place. Packed blocks of a .gguf file are unpacked by
rows; other packed formats one parameter at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gptcli.checkpoint.bind import Bound
from gptcli.checkpoint.gguf import BY_NAME, UNPACKED
from gptcli.checkpoint.packed import TITLES
from gptcli.checkpoint.safetensors import FLOATS
from gptcli.model import ggml
from gptcli.model.dequantise import dequantised
from gptcli.model.load import cut, reader
from gptcli.model.weights import Rows
from gptcli.source import Checkpoint, Model


@dataclass(frozen=True)
class Held:
    """One parameter. raw: its numbers [rows, …], or rows of blocks of ggml's type `packed`; word: the type that holds
    it (`bfloat16`, `Q4_1`); bits: that a number takes; plus: what the stored numbers are more; order: where in raw each
    row lies (None: in order); whole: it is quantised, and unpacked already.
    """

    raw: Tensor
    word: str
    bits: float
    packed: str = ""
    plus: float = 0.0
    order: Tensor | None = None
    whole: bool = False

    @property
    def quantised(self) -> bool:
        return bool(self.packed) or self.whole

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""
        return torch.float64 if self.plus else torch.float32 if self.packed else self.raw.dtype

    def like(self, other: "Held") -> bool:
        """Do the same stored bytes mean the same numbers in both?"""
        kinds = ((one.raw.dtype, one.packed, one.plus) for one in (self, other))
        return len(set(kinds)) == 1

    def stored(self, rows: Rows) -> Tensor:
        """These rows as they are stored."""
        return self.raw[rows] if self.order is None else self.raw[self.order[rows]]

    def numbers(self, rows: Rows) -> Tensor:
        """These rows as numbers."""
        x = self.stored(rows)
        x = ggml.dequantised(x, self.packed) if self.packed else x
        return x.double() - self.plus if self.plus else x

    def rounded(self, x: Tensor) -> Tensor:
        """Numbers as this parameter would hold them. Not for a quantised one."""
        if self.plus:
            return (x.double() + self.plus).to(self.raw.dtype).double() - self.plus
        return x.to(self.raw.dtype)


def parameters(model: Model) -> dict[str, Callable[[], Held]]:
    """What gives each parameter that has numbers of its own, by name; a tied one that is no copy of its partner too.

    Raises GptcliError for weights that can't be read.
    """
    loaded = model.weights(getattr(torch, model.stored_dtype), torch.device("cpu")).tensors
    if model.checkpoint is None:
        return {name: partial(_plain, tensor) for name, tensor in loaded.items()}
    bounds, read = model.checkpoint.binding.bounds, reader()
    zeros = {
        name: partial(_plain, torch.zeros(()).expand(size)) for name, size in model.checkpoint.binding.zeros.items()
    }
    found = {name: partial(_held, model.checkpoint, bounds[name], read) for name in loaded if name in bounds}
    return found | zeros


def _plain(tensor: Tensor) -> Held:
    return Held(tensor, str(tensor.dtype).removeprefix("torch."), 8.0 * tensor.dtype.itemsize)


def _held(checkpoint: Checkpoint, bound: Bound, read: Callable) -> Held:
    packed = checkpoint.packing.weights.get(bound.stored) if checkpoint.packing else None
    info = checkpoint.infos[bound.stored]
    if packed is not None:
        numbers = dequantised(packed, bound, lambda role: read(packed.parts[role], role), cut, torch.float32)
        return Held(numbers, TITLES[packed.scheme], packed.bits_a_weight, whole=True)
    raw = read(info, bound.stored)
    if info.dtype in UNPACKED and raw.ndim == 1:
        raw = ggml.dequantised(raw, info.dtype)
        return Held(cut(raw, bound), info.dtype, _bits(info.dtype), plus=bound.plus, whole=True)
    raw = raw if bound.item is None else raw[bound.item]
    raw = raw.T if bound.transposed else raw
    packing = {"packed": info.dtype} if info.dtype in UNPACKED else {}
    word = FLOATS.get(info.dtype, info.dtype)
    order = None
    if bound.paired or bound.fused != "blocks":
        order = cut(torch.arange(len(raw)), bound._replace(item=None, transposed=False))
    else:
        raw = raw[bound.start : bound.stop]
    return Held(raw, word, _bits(info.dtype), plus=bound.plus, order=order, **packing)


def _bits(kind: str) -> float:
    """That a number of a type takes."""
    form = BY_NAME[kind]
    return 8 * form.bytes / form.numbers
