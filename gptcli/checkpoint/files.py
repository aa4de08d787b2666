"""Which files of a directory are the checkpoint, and all their tensors under names that wrappers have not touched."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptcli.checkpoint import pickled, safetensors
from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.errors import GptcliError

PICKLES = (".bin", ".pt", ".pth")
READERS: dict[str, Callable[[Path], dict[str, TensorInfo]]] = {
    ".safetensors": safetensors.read_header,
    **dict.fromkeys(PICKLES, pickled.read_header),
}
# What torch.compile, DDP, FSDP, DeepSpeed and activation checkpointing put into the names of what they wrap.
WRAPPERS = frozenset(
    ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_flat_param")
)


@dataclass(frozen=True)
class Files:
    """weights: the files to read, an index's shards in order; beside: other weights in the directory, not read."""

    weights: tuple[Path, ...]
    index: dict[str, str] | None = None
    beside: tuple[str, ...] = ()


def find(directory: Path) -> Files:
    """The checkpoint in a directory: safetensors before pickles, an index before a single file. Raises GptcliError."""
    everything = sorted(p for p in directory.iterdir() if p.suffix in READERS)
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index, single = directory / f"{stem}.index.json", directory / stem
        if index.is_file():
            return _indexed(index, everything)
        if single in everything:
            return Files((single,), beside=_others(everything, (single,)))
    if not everything:
        others = sorted(
            p.name for p in directory.iterdir() if p.suffix in (".gguf", ".npz", ".h5", ".msgpack", ".onnx")
        )
        only = f" (it holds {', '.join(others[:3])}, which can't be read)" if others else ""
        raise GptcliError(f"{directory}: no weights in this directory{only}", "name a checkpoint's directory", "file")
    steps = [p for p in everything if re.fullmatch(r"model_\d+\.pt", p.name)]
    if steps:
        return Files((steps[-1],), beside=_others(everything, (steps[-1],)))
    if len(everything) > 1:
        names = ", ".join(p.name for p in everything[:3])
        raise GptcliError(
            f"{directory}: several weight files ({names})", "name one file, with its config by -c", "file"
        )
    return Files((everything[0],))


def _others(everything: list[Path], taken: tuple[Path, ...]) -> tuple[str, ...]:
    return tuple(p.name for p in everything if p not in taken)


def _indexed(index: Path, everything: list[Path]) -> Files:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(v, str) and Path(v).name == v for v in table.values()):
        raise GptcliError(f"{index}: no weight_map of names to files", "fetch the index again", "corrupt")
    shards = tuple(index.parent / name for name in dict.fromkeys(table.values()))
    lost = [p.name for p in shards if not p.is_file()]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        tensors = sum(name in lost for name in table.values())
        raise GptcliError(
            f"{index.parent}: shard {lost[0]} is missing{more}, and with it {tensors} of {len(table)} tensors",
            "fetch it, or mend the index",
            "incomplete",
        )
    return Files(shards, table, _others(everything, shards))


def read_tensors(files: Files) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint by its own name. Raises GptcliError where files and index disagree."""
    infos: dict[str, TensorInfo] = {}
    for path in files.weights:
        for name, info in READERS[path.suffix](path).items():
            if name in infos:
                raise GptcliError(f"tensor {name!r} is in {infos[name].file.name} and in {path.name}", code="corrupt")
            infos[name] = info._replace(key=name)
    for name, shard in (files.index or {}).items():
        if name not in infos or infos[name].file.name != shard:
            raise GptcliError(f"{files.weights[0].parent}: the index puts {name!r} in {shard}, and it is not there",
                              "fetch the shard and the index again", "corrupt")  # fmt: skip
    return infos


def unwrapped(infos: dict[str, TensorInfo]) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """The tensors under the names that they had before any wrapper, and the wrappers' words that were taken off."""
    found: dict[str, TensorInfo] = {}
    taken: dict[str, None] = {}
    for name, info in infos.items():
        parts = name.split(".")
        clean = ".".join(part for part in parts if part not in WRAPPERS)
        taken |= dict.fromkeys(part for part in parts if part in WRAPPERS)
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
