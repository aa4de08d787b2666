"""PyTorch's own files (.pt, .bin) as tensors: read by torch's weights-only loader alone, memory-mapped where it can be.

What a file holds is known from its listing before torch sees it. What that loader refuses to build is refused here
with its name; nothing in a file is ever executed.
"""

import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from gptcli.checkpoint.pickles import Pickled, listed
from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.errors import GptcliError

if TYPE_CHECKING:
    from torch import Tensor


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The model's tensors, by name. Raises GptcliError that says what the file is instead, or what in it is refused."""
    return _loadable(path).model


def _loadable(path: Path) -> Pickled:
    """The listing of a file that torch's weights-only loader should take."""
    held = listed(path)
    if held.form == "torchscript":
        said = "a TorchScript archive, which holds code beside its weights"
        raise GptcliError(f"{path}: {said}", "save its state_dict by torch.save", "pickle")
    if held.foreign:
        said = f"it holds the Python object {held.foreign[0]}, which torch's weights-only loader refuses to build"
        raise GptcliError(f"{path}: {said}", "save its state_dict alone", "pickle")
    if not held.model:
        among = f" ({', '.join(held.unused[:3])})" if held.unused else ""
        raise GptcliError(f"{path}: no state dict with a tensor in it{among}", "save a state_dict", "pickle")
    return held


def load(path: Path) -> "dict[str, Tensor]":
    """The model's tensors, loaded once. Raises GptcliError as read_header does."""
    state = path.stat()
    return _load(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=256)
def _load(path: Path, changed: int, size: int) -> "dict[str, Tensor]":
    """changed and size tell a file from one that was written over it."""
    import torch

    listing = _loadable(path)
    try:
        with warnings.catch_warnings(action="ignore"):
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=listing.form == "zip")
    except Exception as error:  # the loader meets a broken file in many ways
        said = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        hint = "save its state_dict by torch.save as it is by default"
        raise GptcliError(f"{path}: torch's weights-only loader refuses it ({said})", hint, "pickle") from None
    for key in listing.keys:
        held = held[key]
    return {str(name): x for name, x in held.items() if str(name) in listing.model}
