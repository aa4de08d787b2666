"""A bound checkpoint's tensors: memory-mapped, sliced as views, converted only when another type or device is asked."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gptcli.checkpoint.bind import Binding, Bound
from gptcli.checkpoint.pickled import load as load_pickle
from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.layout import Param
from gptcli.model.weights import Lazy


def stored_weights(
    binding: Binding,
    infos: Mapping[str, TensorInfo],
    dtype: torch.dtype,
    device: torch.device,
) -> Lazy:
    """Every bound parameter in the layout's shape, each read when it is first asked for."""
    files: dict[Path, Any] = {}

    def read(stored: str) -> Tensor:
        info = infos[stored]
        name = info.key or stored
        if info.file.suffix != ".safetensors":
            return load_pickle(info.file).tensors[name]
        if info.file not in files:
            files[info.file] = safe_open(info.file, framework="pt")
        return files[info.file].get_tensor(name)

    def maker(bound: Bound) -> Callable[[], Tensor]:
        return lambda: cut(read(bound.stored), bound).to(device, dtype)

    return Lazy({name: maker(bound) for name, bound in binding.bounds.items()})


def cut(tensor: Tensor, bound: Bound) -> Tensor:
    """A parameter out of the stored tensor that holds it: a view, but a copy where parts alternate within each head."""
    tensor = tensor if bound.item is None else tensor[bound.item]
    tensor = tensor.T if bound.transposed else tensor
    if bound.fused == "heads":
        grouped = tensor.unflatten(0, (-1, bound.parts, bound.group))  # [H · parts · D, …] → [H, parts, D, …]
        return grouped[:, bound.part].flatten(0, 1)  # → [H · D, …]
    return tensor[bound.part :: bound.parts] if bound.fused == "turns" else tensor[bound.start : bound.stop]


def settle_tie(weights: Lazy, params: Mapping[str, Param]) -> bool:
    """Where the file has a head although the config ties it: an equal one is dropped, a different one stays.

    Returns whether a different one stayed: the file contradicts its config.
    """
    for param in params.values():
        if param.tied_to and param.name in weights.makers:
            if not torch.equal(weights[param.name], weights[param.tied_to]):
                return True
            del weights.makers[param.name], weights.made[param.name]
    return False
