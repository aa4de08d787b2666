"""A bound checkpoint's tensors: memory-mapped, sliced as views, converted only when another type or device is asked.

Packed types are unpacked at each reading, and not kept; streamed, nothing is.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptcli.checkpoint import gguf
from gptcli.checkpoint.bind import Binding, Bound
from gptcli.checkpoint.packed import Packing
from gptcli.checkpoint.pickled import load as load_pickle
from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.errors import GptcliError
from gptcli.layout import Param
from gptcli.model import ggml
from gptcli.model.dequantise import dequantised
from gptcli.model.ops import wide
from gptcli.model.pages import Span, give_back, mapped, span
from gptcli.model.weights import EVERY_ROW, Lazy, Rows

ROWS = 16  # of a table that is streamed, picked at once
# What may be tied, in a person's words.
TIED = {"lm_head.weight": "head", "encoder.embed.weight": "encoder table"}


def reader() -> Callable[[TensorInfo, str], Tensor]:
    """What gives a stored tensor, by its place and its name, as it lies in its file: of a packed type, rows of blocks.

    Files are opened once, and mapped where they can be.
    """
    files: dict[Path, Any] = {}

    def read(info: TensorInfo, stored: str) -> Tensor:
        name = info.key or stored
        if info.file.suffix == gguf.SUFFIX:
            if info.file not in files:
                files[info.file] = ggml.mapped(info.file)
            return ggml.lying(info, files[info.file])
        if info.file.suffix != ".safetensors":
            return load_pickle(info.file)[name]
        if info.file not in files:
            files[info.file] = opened(info.file)
        return files[info.file].get_tensor(name)

    return read


def opened(file: Path) -> Any:
    """A .safetensors file, mapped. Raises GptcliError where the library takes it not."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:  # of a file whose header is sound: a path that is no UTF-8, most often
        raise GptcliError(
            f"{file}: the safetensors library refuses it ({error})", "give it a path in UTF-8", "file"
        ) from None


def stored_weights(
    binding: Binding,
    infos: Mapping[str, TensorInfo],
    dtype: torch.dtype,
    device: torch.device,
    packing: Packing | None = None,
    stream: bool = False,
) -> Lazy:
    """Every bound parameter in the layout's shape, each read, and dequantised, when it is first asked for.

    stream: nothing is kept, and the file's pages of a layer are given back when another layer is read. Beside the
    parameters stand the copies that the file holds, until settle_ties drops them.
    """
    packed = packing.weights if packing else {}
    at = device if device.type == "cuda" else torch.device("cpu")  # where 8-bit floats are known
    look, passing = reader(), _Passing() if stream else None

    def read(info: TensorInfo, stored: str) -> Tensor:
        found = look(info, stored)
        if passing:
            passing.note(found, info.file)
        return found

    def unpack(bound: Bound) -> Tensor:
        weight = packed[bound.stored]
        return dequantised(weight, bound, lambda role: read(weight.parts[role], role).to(at), cut, dtype).to(device)

    def maker(name: str, bound: Bound) -> Callable[..., Tensor]:
        def make(rows: Rows = EVERY_ROW) -> Tensor:
            info = infos[bound.stored]
            if passing:
                passing.enter(name, rows)
            if bound.stored in packed:
                return unpack(bound)[rows]
            tensor = cut(read(info, bound.stored), bound)
            rows = rows.cpu() if isinstance(rows, Tensor) else rows
            few = isinstance(rows, Tensor) and rows.numel() < len(tensor)
            tensor = passing.pick(tensor, rows) if passing and few else tensor[rows]
            if info.dtype in gguf.UNPACKED:
                tensor = ggml.dequantised(tensor, info.dtype, dtype)
            if bound.plus:
                tensor = tensor.to(wide(dtype)) - bound.plus
            return tensor.to(device, dtype)

        return make

    def zeros(shape: tuple[int, ...]) -> Callable[..., Tensor]:
        return lambda rows=EVERY_ROW: torch.zeros(shape, dtype=dtype, device=device)[rows]

    bounds = binding.bounds | {_again(bound): bound for _, bound in binding.copies}
    makers = {name: maker(name, bound) for name, bound in bounds.items()}
    makers |= {name: zeros(shape) for name, shape in binding.zeros.items()}
    unpacked = {name for name, bound in bounds.items() if infos[bound.stored].dtype in gguf.UNPACKED}
    return Lazy(makers, set(makers) if stream else unpacked)


class _Passing:
    """What has been read of one part of a layer (attention, MLP, an expert), or of one block of a tensor outside the
    layers, until another is read.
    """

    def __init__(self):
        self.where, self.read = None, []
        # The reader keeps them open, and so mapped, as long as there are tensors.
        self.files: dict[Path, list[Span]] = {}

    def note(self, tensor: Tensor, file: Path) -> None:
        if file not in self.files:
            self.files[file] = mapped(file)
        self.read.append((span(tensor), self.files[file]))

    def enter(self, name: str, rows: Rows) -> None:
        layered = re.match(r"(encoder\.)?layers\.\d+\.", name)
        where = name.rsplit(".", 2)[0] if layered else (name, rows.start if isinstance(rows, slice) else None)
        if where != self.where:
            for at, file in self.read:
                give_back(at, file)
            self.where, self.read = where, []

    def pick(self, table: Tensor, rows: Tensor) -> Tensor:
        """Rows of the table that was read last, by their numbers [...] → [..., C], a few at a time: a system that maps
        a file's large pieces whole brings two MiB with each.
        """
        picked = []
        for some in rows.flatten().split(ROWS):
            picked.append(table[some])
            give_back(*self.read[-1])
        return torch.cat(picked).unflatten(0, rows.shape)


def _again(bound: Bound) -> str:
    """What a copy stands under: the file's name for it, which may be ours for something else, and a space."""
    return f"{bound.stored} again"


def cut(tensor: Tensor, bound: Bound) -> Tensor:
    """A parameter out of the stored tensor that holds it: a view, but a copy where parts alternate within each head."""
    tensor = tensor if bound.item is None else tensor[bound.item]
    tensor = tensor.T if bound.transposed else tensor
    if bound.fused == "heads":
        grouped = tensor.unflatten(0, (-1, bound.parts, bound.group))  # [H · parts · D, …] → [H, parts, D, …]
        return grouped[:, bound.part].flatten(0, 1)  # → [H · D, …]
    tensor = tensor[bound.part :: bound.parts] if bound.fused == "turns" else tensor[bound.start : bound.stop]
    if bound.paired:
        return (
            tensor.unflatten(0, (-1, bound.group // 2, 2)).transpose(1, 2).flatten(0, 2)
        )  # [H, D/2, 2, …] → [H · D, …]
    return tensor


def settle_ties(weights: Lazy, binding: Binding, params: Iterable[Param]) -> list[str]:
    """Where the file holds a weight again, an equal one is dropped; a different one stays where a parameter reads it.

    weights: as stored_weights gives them. Returns a note for each that differs: the file contradicts its config.
    """

    def drop(name: str) -> None:
        del weights.makers[name]
        weights.made.pop(name, None)

    notes = []
    for param in params:
        if param.tied_to and param.name in weights.makers:
            if torch.equal(weights[param.name], weights[param.tied_to]):
                drop(param.name)
                continue
            what, stored = TIED[param.name], binding.bounds[param.name].stored
            said = f"the config ties the {what}, but {stored} in the file differs from the embedding"
            notes.append(f"{said}: the file's {what} is used")
    for name, bound in binding.copies:
        if not torch.equal(weights[_again(bound)], weights[name]):
            notes.append(f"{bound.stored} in the file differs from {binding.bounds[name].stored}, which is used")
    for copy in {_again(bound) for _, bound in binding.copies}:
        drop(copy)
    return notes
