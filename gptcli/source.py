"""What a person named (a path, a sample, a config), opened: its Spec, its layout, its weights, its tokenizer.

Opening reads headers and configs only. torch is loaded when weights are asked for.
"""

import math
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gptcli import config as configs
from gptcli import count, shipped
from gptcli.config import Config
from gptcli.data import data, mutable
from gptcli.errors import GptcliError, nearest
from gptcli.layout import Param, layout
from gptcli.report import ModelFacts
from gptcli.spec import Spec

if TYPE_CHECKING:
    import torch

    from gptcli.checkpoint.bind import Binding
    from gptcli.checkpoint.files import Files
    from gptcli.checkpoint.gguf import Gguf
    from gptcli.checkpoint.packed import Packing
    from gptcli.checkpoint.safetensors import TensorInfo
    from gptcli.families import Family
    from gptcli.model.weights import Weights
    from gptcli.tokens import Tokenizer

EXAMPLE = "cats"
TRANSLATION = "translate"  # the worked example of a source and its translation
Streaming = Literal["auto", "on", "off"]  # of weights that are not kept once their layer is done
READERS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")  # files of weights


@data
class Checkpoint:
    """A file of weights, joined to the layout: its stored tensors and where each parameter lies among them.

    packing: of a quantised one; infos are then as if it were unpacked.
    """

    path: Path
    infos: Mapping[str, "TensorInfo"]
    binding: "Binding"
    packing: "Packing | None" = None


@mutable
class Model:
    """A model that was named, not yet in memory.

    source: where it was found (`shipped`, or a path); notes: what a person should know of how it was read; named: False
    for the worked example that runs when nothing is named; unknown: keys of its config.json that nobody knows; start:
    the id that a decoder's text begins with, beside an encoder; gguf: the header of the .gguf file that it is.
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
    unknown: tuple[str, ...] = ()
    start: int | None = None
    gguf: "Gguf | None" = None

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
        """The type in which most of the checkpoint's bytes are stored; float32 for packed ones, or without any."""
        if self.checkpoint is None:
            return "float32"
        from gptcli.checkpoint.safetensors import FLOATS

        total: dict[str, int] = {}
        for name in {bound.stored for bound in self.checkpoint.binding.bounds.values()}:
            info = self.checkpoint.infos[name]
            total[info.dtype] = total.get(info.dtype, 0) + info.end - info.start
        return FLOATS.get(max(total, key=total.__getitem__), "float32")

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """Raises GptcliError where the model brings none and names none that can be had."""
        return self._find_tokenizer(self.offline)

    @cached_property
    def labels(self) -> "Tokenizer | None":
        """A tokenizer to label ids with, if one is at hand without the network."""
        try:
            return self.__dict__.get("tokenizer") or self._find_tokenizer(offline=True)
        except GptcliError:
            return None

    def _find_tokenizer(self, offline: bool) -> "Tokenizer":
        from gptcli import tokens

        if self.config and self.config.vocabulary:
            return tokens.Words(self.config.vocabulary, self.spec.name, self.named)
        if self.gguf:
            found = tokens.from_gguf(self.gguf)
        else:
            found = tokens.from_files(self.directory) if self.directory else None
        if found is None and not self.spec.tokenizer:
            raise GptcliError(f"{self.shown} has no tokenizer", "give --ids 12,45,78", "tokenizer")
        found = found or tokens.from_name(self.spec.tokenizer, offline)
        read = (self.spec.encoder or self.spec).vocab_size
        for size, rows in dict.fromkeys([(found.size, read), (found.target.size, self.spec.vocab_size)]):
            if size != rows:
                beyond = "the rows beyond are padding" if size < rows else "ids beyond it have no row"
                known = f"the tokenizer knows {size:,} ids and the table has {rows:,} rows: {beyond}"
                self.notes += [known] if known not in self.notes else []
        return found

    @property
    def fills(self) -> bool:
        """Does it fill in what is masked in a text, seeing both ways, instead of telling what comes next?"""
        return not self.spec.attention.causal and self.spec.encoder is None

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

    def weights(self, dtype: "torch.dtype", device: "torch.device", stream: Streaming = "auto") -> "Weights":
        """The weights in that type on that device, each made when it is first read. Raises GptcliError.

        stream: keep none of a checkpoint's once a part of a layer is done; `auto`: where those that would be kept need
        more than half of the memory that is free.
        """
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
        from gptcli.model.load import settle_ties, stored_weights

        if self.checkpoint.binding.unread:
            said = f"{self.checkpoint.path}: {self.checkpoint.binding.unread[0]}"
            raise GptcliError(said, "convert the model to another type", "dtype")
        packing = self.checkpoint.packing
        if packing:
            packing.refuse_to_run(str(self.checkpoint.path))
        streams = stream == "on" or (stream == "auto" and self._presses(dtype, device))
        tensors = stored_weights(self.checkpoint.binding, self.checkpoint.infos, dtype, device, packing, streams)
        found = settle_ties(tensors, self.checkpoint.binding, self.layout)
        self.notes += [note for note in found if note not in self.notes]
        return Weights.of(self.layout, tensors)

    def _presses(self, dtype: "torch.dtype", device: "torch.device") -> bool:
        """Would the weights that can't stay in the file's pages take more than half of the free memory?"""
        from gptcli.checkpoint.safetensors import FLOATS
        from gptcli.model.device import free_bytes

        name, kept = str(dtype).removeprefix("torch."), 0
        packed = self.checkpoint.packing.weights if self.checkpoint.packing else {}
        for param in self.layout:
            bound = self.checkpoint.binding.bounds.get(param.name)
            if bound is None:
                continue
            stored = FLOATS.get(self.checkpoint.infos[bound.stored].dtype)
            if device.type != "cpu" or stored != name or bound.stored in packed:
                kept += math.prod(param.shape) * dtype.itemsize
        free = free_bytes(device)
        return free is not None and kept > free / 2


def open_model(
    model: str | None = None,
    config: str | None = None,
    seed: int = 0,
    offline: bool = False,
    revision: str | None = None,
    config_only: bool = False,
    strict: bool = False,
    example: str = EXAMPLE,
) -> Model:
    """Opens what --model and --config name; the worked `example` when neither is given. Raises GptcliError.

    revision: of a Hub name; config_only: of a Hub name only the config is fetched, for who wants no weights; strict:
    refuses a config.json with keys that nobody knows.
    """
    if revision is not None and (model is None or _local(model) is not None):
        raise GptcliError(f"--revision {revision}", "only a name on the Hub has revisions", "file")
    if model is None:
        opened = _from_config(configs.find_config(config or example))
        opened.named = config is not None
    elif (path := _local(model)) is None:
        opened = _from_hub(model, config, revision, offline, config_only)
    else:
        if (file := _gguf_at(path)) is not None:
            if config is not None:
                raise GptcliError(f"-c {config}: {file} describes itself", "leave -c out")
            opened = _from_gguf(file)
        elif path.is_dir() or path.suffix in READERS:
            opened = _from_checkpoint(path, config)
        elif path.suffix in (".yaml", ".yml", ".json"):
            if config is not None:
                raise GptcliError(f"two configs: -m {model} and -c {config}", "name one")
            opened = _from_config(path)
        else:
            known = ", ".join(READERS)
            hint = f"give a directory, a file ({known}), a .yaml config or a config.json"
            raise GptcliError(f"{model}: not a model", hint, "file")
        if path == shipped.samples().get(model):
            opened.source = "shipped sample"
    if strict and opened.unknown:
        keys = ", ".join(opened.unknown)
        raise GptcliError(f"{opened.shown}: unknown keys in its config: {keys}", "--strict refuses them", "strict")
    opened.seed, opened.offline = seed, offline
    return opened


def locate(model: str, revision: str | None = None, offline: bool = False) -> Path:
    """The directory or file that a person names, for who looks at files alone. Raises GptcliError."""
    path = _local(model)
    if path is not None:
        return path
    from gptcli.checkpoint import hub

    if not hub.is_name(model):
        hint = nearest(model, shipped.samples()) or "give a checkpoint's directory or file"
        raise GptcliError(f"{model}: no such file or directory", hint, "file")
    return hub.snapshot(model, revision, offline=offline)


def _local(model: str) -> Path | None:
    """The path that a person means, or what ships under this name; None where neither is there.

    A config in the working directory comes before what ships, as for -c.
    """
    path, beside = Path(model), Path(f"{model}.yaml")
    if path.exists() or beside.is_file():
        return path if path.exists() else beside
    return shipped.samples().get(model) or shipped.configs().get(model.removesuffix(".yaml"))


def _from_hub(model: str, config: str | None, revision: str | None, offline: bool, config_only: bool) -> Model:
    """A name on the Hub, from its cache or fetched into it. An error tells the nearest of what ships."""
    from gptcli.checkpoint import hub

    ships = list(dict.fromkeys((*shipped.samples(), *shipped.configs())))
    if not hub.is_name(model):
        raise GptcliError(f"-m {model}: no such file or directory", nearest(model, ships), "file")
    try:
        directory = hub.snapshot(model, revision, config_only, offline)
    except GptcliError as error:
        meant = f"{nearest(model, ships)} what ships: {', '.join(ships)}; " if "/" not in model else ""
        raise GptcliError(error.message, f"{meant}{error.hint}".strip(), error.code) from None
    name = model.rpartition("/")[2]
    if config_only:
        opened = _described_only(directory / "config.json", name)
    else:
        opened = _from_checkpoint(directory, config, name)
    opened.source = f"Hub, {revision or 'main'} at {directory.name[:7]}"
    return opened


def _described_only(path: Path, name: str) -> Model:
    """A config.json without weights: what it says can be counted and drawn."""
    from gptcli.checkpoint.files import read_json
    from gptcli.families import family_of

    raw = read_json(path)
    found = _resolved(raw, family_of(raw, str(path)), name, str(path))
    return Model(
        spec=found.spec,
        source=str(path),
        directory=path.parent,
        notes=list(found.notes),
        unknown=found.unknown,
        start=found.start,
    )


def _from_config(path: Path) -> Model:
    if path.suffix == ".json":
        return _described_only(path, path.resolve().parent.name if path.stem == "config" else path.stem)
    config = configs.read_config(path)
    ships = path in shipped.configs().values()
    return Model(spec=config.spec, source="shipped" if ships else str(path), config=config)


def _from_checkpoint(path: Path, config: str | None, name: str | None = None) -> Model:
    """A directory or one file of weights, and what describes it: -c, a config beside it, or the file itself."""
    from gptcli.checkpoint import adapter, packed
    from gptcli.checkpoint.bind import bind
    from gptcli.checkpoint.files import Files, find, read_tensors, unwrapped

    adapter.refuse(path)
    files = find(path) if path.is_dir() else Files((path,))
    directory = path if path.is_dir() else path.parent
    infos, wrappers = unwrapped(read_tensors(files))
    described = _described(files, directory, config, infos, name or directory.resolve().name)
    notes = list(described.notes)
    if packing := packed.recognise(infos, described.raw):
        infos = packing.logical(infos)
        notes.append(f"quantised: {packing.said}")
    elif method := packed.told_method(described.raw or {}):
        notes.append(f"the config's quant_method is {method}, and no weight is packed")
    if files.beside:
        notes.append(f"not read: {', '.join(files.beside[:3])}, beside {files.weights[0].name}")
    if wrappers:
        notes.append(f"wrapper prefixes taken off: {', '.join(f'{word}.' for word in wrappers)}")
    binding = bind(tuple(layout(described.spec)), infos, described.family, str(path))
    notes += binding.notes
    if binding.unused:
        notes.append(f"{len(binding.unused)} tensors of the file are not read ({binding.unused[0]} …)")
    return Model(
        spec=described.spec,
        source=str(path),
        config=described.config,
        directory=directory,
        checkpoint=Checkpoint(path=path, infos=infos, binding=binding, packing=packing),
        notes=notes,
        unknown=described.unknown,
        start=described.start,
    )


def _gguf_at(path: Path) -> Path | None:
    """The .gguf file that a path means: itself, or the one in a directory that holds no other weights."""
    from gptcli.checkpoint import gguf

    if not path.is_dir():
        return path if path.suffix == gguf.SUFFIX else None
    others = any(file.suffix in READERS and file.suffix != gguf.SUFFIX for file in path.iterdir())
    return None if others else gguf.find(path)


def _from_gguf(path: Path) -> Model:
    """A .gguf file, or all the parts of a split one: architecture, weights and tokenizer in one."""
    from gptcli.checkpoint import gguf
    from gptcli.checkpoint.bind import bind
    from gptcli.families.gguf import described

    header = gguf.read_header(path)
    shapes = {name: info.shape for name, info in header.infos.items()}
    stem = gguf.PART.sub(r"\g<stem>", path.name).removesuffix(gguf.SUFFIX)
    found = described(header.metadata, shapes, lambda name: gguf.numbers_of(header.infos[name]), stem, str(path))
    notes = [f"{path}: unknown keys, not used: {', '.join(found.unknown)}"] if found.unknown else []
    binding = bind(tuple(layout(found.spec)), header.infos, found.family, str(path))
    return Model(
        spec=found.spec,
        source=str(path),
        checkpoint=Checkpoint(path=path, infos=header.infos, binding=binding),
        notes=notes,
        unknown=found.unknown,
        gguf=header,
    )


class _Description(NamedTuple):
    spec: Spec
    family: "Family"
    config: Config | None = None
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    start: int | None = None
    raw: Mapping[str, Any] | None = None  # the whole config.json


def _described(
    files: "Files", directory: Path, config: str | None, infos: Mapping[str, "TensorInfo"], name: str
) -> _Description:
    """The Spec of a checkpoint and the family whose names it uses."""
    from gptcli.checkpoint.bind import recognise
    from gptcli.checkpoint.files import PICKLES, read_json
    from gptcli.families import FAMILIES, OWN, family_of, training

    first = files.weights[0]
    candidates = [directory / "config.json", directory / "config.yaml", first.with_suffix(".yaml")]
    beside = next((p for p in candidates if p.is_file()), None)
    meta = first.with_name(first.name.replace("model_", "meta_", 1)).with_suffix(".json")
    held, extra = None, ()
    if first.suffix in PICKLES:
        from gptcli.checkpoint.pickles import listed

        held = listed(first)
        if held.unused:
            extra = (f"{first.name} is a training checkpoint: {', '.join(held.unused)} not used",)
    if config is not None:
        beside = Path(config) if Path(config).suffix == ".json" else configs.find_config(config)
    elif held is not None:
        if isinstance(settings := held.settings.get("model_args"), dict):
            family = training.RECORDS["nanogpt-checkpoint"]
            return _resolved(settings, family, first.stem, f"{first}: model_args", extra)
        if meta.is_file() and meta != first:
            settings = read_json(meta).get("model_config")
            if isinstance(settings, dict):
                return _resolved(settings, training.RECORDS["nanochat-checkpoint"], first.stem, str(meta), extra)
    if beside is None:
        raise GptcliError(
            f"{directory}: no config.json or config.yaml beside {first.name}", "describe it by -c CONFIG", "file"
        )
    if beside.suffix == ".json":
        raw = read_json(beside)
        return _resolved(raw, family_of(raw, str(beside)), name, str(beside), extra)
    own = configs.read_config(beside)
    family = recognise(layout(own.spec), infos, (OWN, *FAMILIES.values(), *training.RECORDS.values()))
    return _Description(own.spec, family, own, extra)


def _resolved(raw: dict, family: "Family", name: str, where: str, notes: tuple[str, ...] = ()) -> _Description:
    from gptcli.families.record import resolve

    resolved = resolve(raw, family, name, where)
    if resolved.unknown:
        notes = (*notes, f"{where}: unknown keys, not used: {', '.join(resolved.unknown)}")
    return _Description(resolved.spec, family, None, notes, resolved.unknown, resolved.start, raw)
