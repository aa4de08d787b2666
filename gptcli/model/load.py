"""A bound checkpoint's tensors: memory-mapped, sliced as views, converted only when another type or device is asked."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gptcli.checkpoint.bind import Binding, Bound
from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.layout import Param
from gptcli.model.weights import Lazy


def stored_weights(binding: Binding, infos: Mapping[str, TensorInfo], dtype: torch.dtype, device: torch.device) -> Lazy:
    """Every bound parameter in the layout's shape. A 2-D weight that lies [in, out] becomes a transposed view."""
    files: dict[Path, Any] = {}

    def read(stored: str) -> Tensor:
        path = infos[stored].file
        if path not in files:
            files[path] = safe_open(path, framework="pt")
        return files[path].get_tensor(stored)

    def maker(bound: Bound) -> Callable[[], Tensor]:
        def make() -> Tensor:
            tensor = read(bound.stored)
            tensor = tensor.T if bound.transposed else tensor
            return tensor[bound.start : bound.stop].to(device, dtype)

        return make

    return Lazy({name: maker(bound) for name, bound in binding.bounds.items()})


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
