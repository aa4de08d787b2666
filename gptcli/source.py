"""What a person named (a path, a sample, a config), opened: its Spec, its layout, its weights, its tokenizer.

Opening reads headers and configs only. torch is loaded when weights are asked for.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gptcli import config as configs
from gptcli import count, shipped
from gptcli.config import Config
from gptcli.errors import GptcliError, nearest
from gptcli.layout import Param, layout
from gptcli.report import ModelFacts
from gptcli.spec import Spec

if TYPE_CHECKING:
    import torch

    from gptcli.checkpoint.bind import Binding
    from gptcli.checkpoint.safetensors import TensorInfo
    from gptcli.model.weights import Weights
    from gptcli.tokens import Tokenizer

EXAMPLE = "cats"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A file of weights, joined to the layout: its stored tensors and where each parameter lies among them."""

    path: Path
    infos: Mapping[str, "TensorInfo"]
    binding: "Binding"


@dataclass(kw_only=True)
class Model:
    """A model that was named, not yet in memory.

    source: where it was found (`shipped`, or a path); notes: what a person should know of how it was read; named: False
    for the worked example that runs when nothing is named.
    """

    spec: Spec
    source: str
    config: Config | None = None
    directory: Path | None = None
    checkpoint: Checkpoint | None = None
    seed: int = 0
    offline: bool = False
    named: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def shown(self) -> str:
        return f"{self.spec.name} ({self.source})"

    @property
    def kind(self) -> Literal["checkpoint", "hand-written", "random"]:
        """Where the weights come from."""
        if self.checkpoint:
            return "checkpoint"
        return "hand-written" if self.config and self.config.weights else "random"

    @cached_property
    def layout(self) -> tuple[Param, ...]:
        return tuple(layout(self.spec))

    @cached_property
    def stored_dtype(self) -> str:
        """The type in which most of the checkpoint's bytes are stored; float32 without a checkpoint."""
        if self.checkpoint is None:
            return "float32"
        from gptcli.checkpoint.safetensors import FLOATS

        total: dict[str, int] = {}
        for name in {bound.stored for bound in self.checkpoint.binding.bounds.values()}:
            info = self.checkpoint.infos[name]
            total[info.dtype] = total.get(info.dtype, 0) + info.end - info.start
        return FLOATS[max(total, key=total.__getitem__)]

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """Raises GptcliError where the model brings none and names none that can be had."""
        from gptcli import tokens

        if self.config and self.config.vocabulary:
            return tokens.Words(self.config.vocabulary, self.spec.name, self.named)
        found = tokens.from_files(self.directory) if self.directory else None
        if found is None and not self.spec.tokenizer:
            raise GptcliError(f"{self.shown} has no tokenizer", "give --ids 12,45,78", "tokenizer")
        return found or tokens.from_name(self.spec.tokenizer, self.offline)

    @cached_property
    def labels(self) -> "Tokenizer | None":
        """A tokenizer to label ids with, if one is at hand without the network."""
        try:
            if "tokenizer" in self.__dict__:
                return self.tokenizer
            self.offline, asked = True, self.offline
            try:
                return self.tokenizer
            finally:
                self.offline = asked
        except GptcliError:
            return None

    def facts(self, dtype: str, device: str | None = None) -> ModelFacts:
        """Which model this is, for a report; dtype and device: how it ran, or the type whose bytes are shown."""
        return ModelFacts(
            name=self.spec.name,
            source=self.source,
            weights=self.kind,
            seed=self.seed if self.kind == "random" else None,
            parameters=count.total(self.layout),
            dtype=dtype,
            device=device,
            notes=list(self.notes),
        )

    def weights(self, dtype: "torch.dtype", device: "torch.device") -> "Weights":
        """The weights in that type on that device, each made when it is first read. Raises GptcliError."""
        from gptcli.model.weights import Weights

        if self.kind == "hand-written":
            from gptcli.model.written import written_weights

            try:
                tensors = written_weights(self.layout, self.config.weights, dtype)
            except GptcliError as error:
                raise GptcliError(f"{self.config.path}: {error.message}", error.hint, error.code) from None
            return Weights.of(self.layout, {name: tensor.to(device) for name, tensor in tensors.items()})
        if self.kind == "random":
            from gptcli.model.device import check_room
            from gptcli.model.init import random_weights

            what = f"{self.shown}, random weights in {str(dtype).removeprefix('torch.')}"
            check_room(count.total(self.layout) * dtype.itemsize, device, what)
            return Weights.of(self.layout, random_weights(self.spec, self.layout, self.seed, dtype, device))
        from gptcli.model.load import settle_tie, stored_weights

        tensors = stored_weights(self.checkpoint.binding, self.checkpoint.infos, dtype, device)
        if self.checkpoint.binding.spare_head and settle_tie(tensors, {p.name: p for p in self.layout}):
            self.notes.append(
                f"the config ties the head, but {self.checkpoint.binding.spare_head} in the file differs from the "
                "embedding: the file's head is used"
            )
        return Weights.of(self.layout, tensors)


def open_model(model: str | None = None, config: str | None = None, seed: int = 0, offline: bool = False) -> Model:
    """Opens what --model and --config name; the worked example when neither is given. Raises GptcliError."""
    if model is None:
        opened = _from_config(configs.find_config(config or EXAMPLE))
        opened.named = config is not None
    else:
        path = Path(model)
        if not path.exists():
            path = _shipped(model)
        if path.is_dir():
            opened = _from_directory(path, config)
        elif path.suffix == ".safetensors":
            opened = _from_file(path, config)
        elif path.suffix in (".yaml", ".yml"):
            if config is not None:
                raise GptcliError(f"two configs: -m {model} and -c {config}", "name one")
            opened = _from_config(path)
        else:
            raise GptcliError(
                f"{model}: not a model", "give a directory, a .safetensors file or a .yaml config", "file"
            )
        if model in shipped.samples() and not Path(model).exists():
            opened.source = "shipped sample"
    opened.seed, opened.offline = seed, offline
    return opened


def _shipped(model: str) -> Path:
    """A sample or config that ships under this name."""
    samples, ships = shipped.samples(), shipped.configs()
    path = samples.get(model) or ships.get(model.removesuffix(".yaml"))
    if path is not None:
        return path
    looks_like_a_path = model.startswith((".", "/", "~")) or "/" in model or "." in model
    if looks_like_a_path:
        raise GptcliError(f"-m {model}: no such file or directory", nearest(model, [*samples, *ships]), "file")
    hint = f"{nearest(model, [*samples, *ships])} samples: {', '.join(samples)}; configs: {', '.join(ships)}".strip()
    raise GptcliError(f"-m {model}: no file, sample or config of this name", hint, "file")


def _from_config(path: Path) -> Model:
    config = configs.read_config(path)
    ships = path in shipped.configs().values()
    return Model(spec=config.spec, source="shipped" if ships else str(path), config=config)


def _from_directory(path: Path, config: str | None) -> Model:
    """A checkpoint's directory: a config.json or a .yaml config, and its weights."""
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        others = [p.name for p in sorted(path.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".npz")]
        only = f" (it holds {', '.join(others[:3])}, which can't be read)" if others else ""
        raise GptcliError(
            f"{path}: no .safetensors file in this directory{only}", "name a checkpoint's directory", "file"
        )
    named = path / "model.safetensors"
    if named not in weights and len(weights) > 1:
        names = ", ".join(p.name for p in weights[:3])
        raise GptcliError(f"{path}: several weight files ({names})", "name one file, with its config by -c", "file")
    opened = _from_file(named if named in weights else weights[0], config)
    opened.source = str(path)
    return opened


def _from_file(path: Path, config: str | None) -> Model:
    """One file of weights, and the config that describes it: the one given, or the one beside it."""
    from gptcli.checkpoint.bind import bind, recognise
    from gptcli.checkpoint.safetensors import read_header
    from gptcli.families import FAMILIES, OWN, resolve

    beside = path.parent
    candidates = [beside / "config.json", beside / "config.yaml", path.with_suffix(".yaml")]
    if config is not None:
        described = Path(config) if Path(config).suffix == ".json" else configs.find_config(config)
    else:
        described = next((p for p in candidates if p.is_file()), None)
    if described is None:
        raise GptcliError(
            f"{beside}: no config.json or config.yaml beside {path.name}", "describe it by -c CONFIG", "file"
        )
    infos, notes, own = read_header(path), [], None
    if described.suffix == ".json":
        raw = read_json(described)
        resolved = resolve(raw, beside.resolve().name, str(described))
        spec, family = resolved.spec, FAMILIES[raw["model_type"]]
        if resolved.unknown:
            notes.append(f"{described}: unknown keys, not used: {', '.join(resolved.unknown)}")
    else:
        own = configs.read_config(described)
        spec = own.spec
        family = recognise(tuple(layout(spec)), infos, (OWN, *FAMILIES.values()))
    binding = bind(tuple(layout(spec)), infos, family, str(path))
    return Model(
        spec=spec,
        source=str(path),
        config=own,
        directory=beside,
        checkpoint=Checkpoint(path=path, infos=infos, binding=binding),
        notes=notes,
    )


class _Twice(ValueError):
    """A key that stands twice: the first value would be dropped without a word."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return table


def read_json(path: Path) -> dict:
    """A config.json. Raises GptcliError with the line and the column of a fault."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise GptcliError(f"{path}: {error.strerror}", "give a readable config", "file") from None
    except json.JSONDecodeError as error:
        raise GptcliError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}", "mend the JSON", "json"
        ) from None
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, _Twice) else "not JSON"
        raise GptcliError(f"{path}: {reason}", "mend the file", "json") from None
    if not isinstance(raw, dict):
        raise GptcliError(f"{path}: holds no table of settings", "give a checkpoint's config.json", "json")
    return raw
