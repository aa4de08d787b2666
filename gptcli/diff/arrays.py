"""Arrays in files of others: .npy, .npz, .safetensors, and what torch.save wrote, by its weights-only loader alone."""

import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gptcli.checkpoint.safetensors import FLOATS
from gptcli.errors import GptcliError
from gptcli.report.capture import Tensors

if TYPE_CHECKING:
    from torch import Tensor


class Unfit(Exception):
    """What an array is, where it is none of plain numbers."""


class Array(NamedTuple):
    """dtype: as torch calls it; read: the numbers."""

    shape: tuple[int, ...]
    dtype: str
    read: "Callable[[], Tensor]"


def arrays(path: Path) -> dict[str, Array]:
    """The arrays of a file, or of all such files in a directory, by name: a file's own where it holds one alone.

    Raises GptcliError for a file that can't be read, for two arrays of one name, and where there is none.
    """
    if not path.exists():
        raise GptcliError(
            f"{path}: no such file or directory", f"give {', '.join(READERS)}, or their directory", "file"
        )
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found: dict[str, Array] = {}
    for file in files:
        if file.suffix not in READERS or not file.is_file():
            continue
        try:
            held = dict(READERS[file.suffix](file))
        except (Unfit, OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            said = getattr(error, "strerror", None) or f"no whole {file.suffix} file"
            said = str(error) if isinstance(error, Unfit) else "it holds Python objects" if _pickled(error) else said
            raise GptcliError(f"{file}: {said}", "give files of plain numbers", "file") from None
        if twice := found.keys() & held.keys():
            raise GptcliError(f"{path}: two arrays are called {min(twice)}", "leave one out", "file")
        found |= held
    if not found:
        raise GptcliError(f"{path}: no array in it", f"give {', '.join(READERS)}, or their directory", "file")
    return found


def _pickled(error: Exception) -> bool:
    """Does numpy refuse to build Python objects? Of what is no array it says nearly the same."""
    return any(said in str(error) for said in ("Object arrays", "Python objects"))


def _npy(path: Path) -> Iterator[tuple[str, Array]]:
    import numpy

    yield path.stem, _of_numpy(path.stem, numpy.load(path, mmap_mode="r", allow_pickle=False))


def _npz(path: Path) -> Iterator[tuple[str, Array]]:
    import numpy

    with numpy.load(path, allow_pickle=False) as held:
        for name in held.files:
            yield name, _of_numpy(name, held[name])


def _of_numpy(name: str, held: Any) -> Array:
    import numpy
    import torch

    if held.dtype.kind not in "fiu":
        raise Unfit(f"the numbers of {name} are {held.dtype}")
    native = held.dtype.newbyteorder("=")
    return Array(held.shape, held.dtype.name, lambda: torch.from_numpy(numpy.array(held, dtype=native)))


def _safetensors(path: Path) -> Iterator[tuple[str, Array]]:
    file = Tensors(path, str(path))
    for name, info in file.infos.items():
        yield name, Array(info.shape, FLOATS.get(info.dtype, info.dtype), partial(file.file.get_tensor, name))


def _saved(path: Path) -> Iterator[tuple[str, Array]]:
    import torch

    from gptcli.checkpoint.pickles import listed

    if foreign := listed(path).foreign:
        said = f"it holds the Python object {foreign[0]}, which torch's weights-only loader refuses to build"
        raise GptcliError(f"{path}: {said}", "save a plain dict of tensors: dict(outputs)", "pickle")
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the loader meets a broken file in many ways
        said = (str(error).splitlines() or [type(error).__name__])[0][:80]
        said = f"{path}: torch's weights-only loader refuses it ({said})"
        raise GptcliError(said, "save a plain dict of tensors", "pickle") from None
    for name, x in _inside(held, ""):
        yield name or path.stem, Array(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.detach)


def _inside(held: Any, at: str) -> "Iterator[tuple[str, Tensor]]":
    """The tensors in dicts, lists and tuples: `hidden_states.3`."""
    import torch

    if isinstance(held, torch.Tensor):
        if held.is_nested or held.is_meta or held.is_quantized or held.layout != torch.strided:
            raise Unfit(f"{at or 'the tensor'} is sparse, nested, quantised or without numbers")
        yield at, held
    elif isinstance(held, dict | list | tuple):
        for key, value in held.items() if isinstance(held, dict) else enumerate(held):
            yield from _inside(value, f"{at}.{key}".lstrip("."))


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Array]]]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".pt": _saved,
    ".pth": _saved,
}
