"""Which files of a directory are the checkpoint, and all their tensors under names that wrappers have not touched."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gptcli.checkpoint import safetensors
from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.data import entry
from gptcli.errors import GptcliError

PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def _read_pickle(path: Path) -> dict[str, TensorInfo]:
    from gptcli.checkpoint import pickled  # where there is no pickle, what reads them need not be loaded

    return pickled.read_header(path)


READERS: dict[str, Callable[[Path], dict[str, TensorInfo]]] = {
    ".safetensors": safetensors.read_header,
    **dict.fromkeys(PICKLES, _read_pickle),
}
UNREAD = (".npz", ".h5", ".msgpack", ".onnx")  # weights in other formats
# What torch.compile, DDP, FSDP, DeepSpeed and activation checkpointing put into the names of what they wrap.
WRAPPERS = frozenset(
    ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_flat_param")
)


@entry
class Files:
    """weights: the files to read, an index's shards in order; beside: other weights in the directory, not read.

    index: the name of the file that each tensor should be in; absent: shards that it names and that are not there.
    """

    weights: tuple[Path, ...]
    index: dict[str, str] | None = None
    beside: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


def find(directory: Path) -> Files:
    """The checkpoint in a directory: safetensors before pickles, an index before a single file. Raises GptcliError."""
    files = look(directory)
    if files.absent:
        lost, table = files.absent, files.index or {}
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        tensors = sum(name in lost for name in table.values())
        raise GptcliError(
            f"{directory}: shard {lost[0]} is missing{more}, and with it {tensors} of {len(table)} tensors",
            "fetch it, or mend the index",
            "incomplete",
        )
    if not files.weights and files.beside:
        names = ", ".join(files.beside[:3])
        raise GptcliError(
            f"{directory}: several weight files ({names})", "name one file, with its config by -c", "file"
        )
    if not files.weights:
        others = sorted(name for name in _names(directory) if name.endswith(UNREAD))
        only = f" (it holds {', '.join(others[:3])}, which can't be read)" if others else ""
        raise GptcliError(f"{directory}: no weights in this directory{only}", "name a checkpoint's directory", "file")
    return files


def look(directory: Path) -> Files:
    """The files that make up the checkpoint in a directory, whether they are all there or not.

    No weights, but some beside: nothing says which of them are meant. Raises GptcliError for an index that can't be
    read.
    """
    there = _names(directory)
    everything = sorted(name for name in there if name.endswith(tuple(READERS)))
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if f"{whole}.index.json" in there:
            return indexed(directory / f"{whole}.index.json")
        if whole in everything:
            return _chosen(directory, whole, everything)
    steps = [name for name in everything if re.fullmatch(r"model_\d+\.pt", name)]
    if steps or len(everything) == 1:
        return _chosen(directory, (steps or everything)[-1], everything)
    return Files((), beside=tuple(everything))


def _names(directory: Path) -> set[str]:
    """The files in a directory. A link that leads nowhere is none."""
    with os.scandir(directory) as entries:
        return {entry.name for entry in entries if entry.is_file()}


def _chosen(directory: Path, name: str, everything: list[str]) -> Files:
    return Files((directory / name,), beside=tuple(other for other in everything if other != name))


def indexed(path: Path) -> Files:
    """The shards that an index names. Raises GptcliError for one that can't be read."""
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(v, str) and _is_shard(v) for v in table.values()):
        raise GptcliError(f"{path}: no weight_map of names to files", "fetch the index again", "corrupt")
    directory, there = path.parent, _names(path.parent)
    shards = tuple(dict.fromkeys(table.values()))
    named = {path.name, *shards}
    others = sorted(name for name in there if name.endswith(tuple(READERS)) and name not in named)
    here = tuple(directory / name for name in shards if name in there)
    return Files(here, table, tuple(others), tuple(name for name in shards if name not in there))


def _is_shard(name: str) -> bool:
    """The name of a file that can be read, without a way to it."""
    return name.endswith(tuple(READERS)) and not {"/", "\\", "\0"} & set(name)


def read_tensors(files: Files) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint by its own name. Raises GptcliError where files and index disagree."""
    infos: dict[str, TensorInfo] = {}
    for path in files.weights:
        for name, info in READERS[path.suffix](path).items():
            if name in infos:
                raise GptcliError(f"tensor {name!r} is in {infos[name].file.name} and in {path.name}", code="corrupt")
            infos[name] = info
    for name, shard in (files.index or {}).items():
        if name not in infos or infos[name].file.name != shard:
            raise GptcliError(f"{files.weights[0].parent}: the index puts {name!r} in {shard}, and it is not there",
                              "fetch the shard and the index again", "corrupt")  # fmt: skip
    return infos


def bare(name: str) -> str:
    """A tensor's name as it was before any wrapper."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped(infos: dict[str, TensorInfo]) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """The tensors under the names that they had before any wrapper, and the wrappers' words that were taken off."""
    text = "\n".join(infos)
    if not any(word in text for word in WRAPPERS):
        return infos, ()
    found: dict[str, TensorInfo] = {}
    taken: dict[str, None] = {}
    for name, info in infos.items():
        clean = bare(name)
        taken |= dict.fromkeys(part for part in name.split(".") if part in WRAPPERS)
        if clean in found:
            raise GptcliError(
                f"tensors {found[clean].key!r} and {name!r} are one once wrappers are taken off", code="corrupt"
            )
        found[clean] = info
    return found, tuple(taken)


class _Twice(ValueError):
    """A key that stands twice: the first value would be dropped without a word."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return table


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's table. Raises GptcliError with the line and the column of a fault."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise GptcliError(f"{path}: {error.strerror}", "give a readable file", "file") from None
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        said = safetensors.what_else(error.doc[:256].encode(), f"{where}: {error.msg}")
        said = said if said.startswith(where) else f"{path}: {said.replace(', not weights', '')}"
        raise GptcliError(said, "mend the JSON, or fetch the file", "json") from None
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, _Twice) else "not JSON"
        raise GptcliError(f"{path}: {reason}", "mend the file", "json") from None
    if not isinstance(raw, dict):
        raise GptcliError(f"{path}: holds no table of settings", "give a checkpoint's own file", "json")
    return raw
