"""PyTorch's own files (.pt, .bin): a pickle, read by torch's weights-only loader alone, memory-mapped where it can be.

What that loader refuses is refused here with its reason; nothing in a file is ever executed.
"""

import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gptcli.checkpoint.safetensors import TensorInfo, what_else
from gptcli.errors import GptcliError

if TYPE_CHECKING:
    from torch import Tensor

# Where training scripts keep the model among optimizer and counters.
SECTIONS = ("model", "state_dict", "model_state_dict", "module")
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class Pickled(NamedTuple):
    """The model's tensors by name, the other sections' names, and nanoGPT's model_args where the file has them."""

    tensors: dict[str, "Tensor"]
    sections: tuple[str, ...]
    settings: dict[str, Any]


def load(path: Path) -> Pickled:
    """What a file holds, loaded once. Raises GptcliError that says what it is instead, or what in it is refused."""
    state = path.stat()
    return _load(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=256)
def _load(path: Path, changed: int, size: int) -> Pickled:
    """changed and size tell a file from one that was written over it."""
    import torch

    def refuse(reason: str, hint: str = "fetch or write the file again", code: str = "corrupt") -> GptcliError:
        return GptcliError(f"{path}: {reason}", hint, code)

    try:
        with path.open("rb") as file:
            beginning = file.read(256)
    except OSError as error:
        raise refuse(error.strerror, "give a readable file", "file") from None
    zipped = beginning.startswith(b"PK")
    other = what_else(beginning, "" if beginning else "the file is empty")
    if other and not zipped and not beginning.startswith(b"\x80"):
        raise refuse(other)
    try:
        with warnings.catch_warnings(action="ignore"):
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # the loader meets a broken file in many ways
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        if refused:
            said = f"it holds the Python object {refused[1]}, which torch's weights-only loader refuses to build"
            raise refuse(said, "save its state_dict alone", "pickle") from None
        said = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        raise refuse(f"not a PyTorch file that can be read ({said})") from None
    return _model_in(held, path)


def _model_in(held: Any, path: Path) -> Pickled:
    """The state dict in what a file holds, however deep the training script put it."""
    if not isinstance(held, dict):
        raise GptcliError(f"{path}: holds {type(held).__name__}, not a state dict", "save a state_dict", "pickle")
    sections: tuple[str, ...] = ()
    settings = held.get("model_args") if isinstance(held.get("model_args"), dict) else {}
    for _ in range(3):
        inner = next((name for name in SECTIONS if isinstance(held.get(name), dict)), None)
        if inner is None:
            break
        sections += tuple(str(name) for name in held if name not in (inner, "model_args"))
        held = held[inner]
    tensors = {name: x for name, x in held.items() if hasattr(x, "untyped_storage")}
    others = [str(name) for name, x in held.items() if name not in tensors and x is not None]
    if not tensors:
        raise GptcliError(f"{path}: no tensor in it ({', '.join(others[:3])})", "save a state_dict", "pickle")
    return Pickled(tensors, (*sections, *others), settings)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The model's tensors, by name."""
    return {
        name: TensorInfo(
            DTYPES.get(str(x.dtype).removeprefix("torch."), str(x.dtype)), tuple(x.shape), path, 0, x.nbytes
        )
        for name, x in load(path).tensors.items()
    }
