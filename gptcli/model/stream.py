"""Activations written to a .safetensors file as they are born: nothing is kept of one that has passed.

What the file says of them stands at its beginning, and is known before the first is there: name, type, shape, place.
"""

import json
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from gptcli.checkpoint.safetensors import FLOATS
from gptcli.trace import BESIDE, Selection, Silent

SOME = Selection(by="queries")
TYPES = {name: word for word, name in FLOATS.items()}  # float32 → F32


class Slot(NamedTuple):
    """Where a tensor goes in the file: its type (`float32`), its shape, and the byte that it begins at."""

    dtype: str
    shape: tuple[int, ...]
    start: int


def header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], notes: Mapping[str, str]
) -> tuple[bytes, dict[str, Slot]]:
    """The file's beginning, for tensors of a type and a shape each, and the place of each.

    Wider types come first, so that every tensor begins where its type can be read in place.
    """
    sizes = {name: getattr(torch, dtype).itemsize for name, (dtype, _) in tensors.items()}
    entries, slots, reached = {}, {}, 0
    for name in sorted(tensors, key=lambda name: -sizes[name]):
        dtype, shape = tensors[name]
        stop = reached + sizes[name] * torch.Size(shape).numel()
        entries[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [reached, stop]}
        slots[name], reached = Slot(dtype, shape, reached), stop
    text = json.dumps({"__metadata__": dict(notes)} | entries, allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {name: slot._replace(start=len(begin) + slot.start) for name, slot in slots.items()}


class Stream(Silent):
    """A probe that writes what the slots name. Of scores and weights, some queries' are computed at once and let go."""

    def __init__(
        self, file: BinaryIO, slots: Mapping[str, Slot], scope: str = "", filled: dict[str, int] | None = None
    ):
        self.file, self.slots, self.scope = file, slots, scope
        self.filled = {} if filled is None else filled  # by path: along the axis that grows, how far

    def at(self, scope: str) -> "Stream":
        return Stream(self.file, self.slots, f"{self.scope}{scope}.", self.filled)

    def selection(self, name: str) -> Selection | None:
        return SOME if self.scope + name in self.slots else None

    def __call__(self, name: str, x: Tensor) -> Tensor:
        path = self.scope + name
        if path in self.slots:
            self.write(path, x)
        return x

    def write(self, path: str, x: Tensor) -> None:
        """All of a tensor, or, of scores and weights [B, H, T, ...], the next queries of every head."""
        slot, done, axis = self.slots[path], self.filled.get(path, 0), _grows_along(path)
        others = (*slot.shape[:axis], *slot.shape[axis + 1 :])
        if str(x.dtype) != f"torch.{slot.dtype}" or (*x.shape[:axis], *x.shape[axis + 1 :]) != others:
            raise AssertionError(
                f"{path}: {x.dtype} {list(x.shape)} where {slot.dtype} {list(slot.shape)} was foreseen"
            )
        self.filled[path] = done + x.shape[axis]
        step = torch.Size(slot.shape[axis + 1 :]).numel() * x.dtype.itemsize  # bytes of one query
        for number, part in enumerate(x.detach().cpu().reshape(-1, *x.shape[axis:])):
            self.file.seek(slot.start + (number * slot.shape[axis] + done) * step)
            self.file.write(memoryview(part.contiguous().view(-1).view(torch.uint8).numpy()))

    def check(self) -> None:
        """Every slot is filled."""
        for path, slot in self.slots.items():
            if self.filled.get(path) != slot.shape[_grows_along(path)]:
                raise AssertionError(f"{path}: {self.filled.get(path, 0)} of {list(slot.shape)} written")


def _grows_along(path: str) -> int:
    """The axis along which a tensor's parts follow: T of [B, H, T, ...] for what is computed on the side."""
    return 2 if path.rpartition(".")[2] in BESIDE else 0
