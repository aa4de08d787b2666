"""What describes a checkpoint: its config, value by value, or what its own tensors tell. For `inspect`."""

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from gptcli.checkpoint.files import read_json
from gptcli.checkpoint.gather import Fault, Gathered, meta_of, settings_in
from gptcli.data import data, mutable
from gptcli.errors import GptcliError
from gptcli.families import Family, family_of
from gptcli.families.record import Origin, explain
from gptcli.spec import Spec, to_dict

# Values that a Spec takes from others, where the config has no word for them.
FOLLOWS = {
    "attention.n_kv_heads": ("attention.n_heads",),
    "attention.head_dim": ("hidden_size", "attention.n_heads"),
    "attention.o_bias": ("attention.bias",),
}
NOT_RUN = ("name", "tokenizer")  # of a Spec: what no forward pass reads
IN_ALL, BY_DEFAULT = Origin("family"), Origin("default")


@data
class ConfigValue:
    """A value that the forward pass uses, by its path in a Spec, and where it comes from.

    origin: the file says it (`config`), or says what it follows from (`derived`); the file is silent and there is a
    `default`; it is so in all models of the `family`; or a tensor's `shape` tells. keys: the config's, or the tensor.
    """

    path: str
    value: Any
    origin: Literal["config", "derived", "default", "family", "shape"]
    keys: list[str]


@mutable
class Described:
    """source: the file that says it, empty where there is none. family: its name, and the record of it.

    idle: keys that change nothing in a forward pass; checked: keys that would, and have a value that is implemented;
    unknown: keys that nobody knows.
    """

    source: str = ""
    spec: Spec | None = None
    family: str = ""
    record: Family | None = None
    values: list[ConfigValue] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def describe(found: Gathered, config: str | None) -> Described:
    """What a config says of a checkpoint; config: the one named by -c. What is wrong with it is among the faults.

    Raises GptcliError where a config that was named can't be found.
    """
    described = Described()
    try:
        _describe(described, found, config)
    except GptcliError as error:
        if config is not None and error.code == "file":
            raise
        said = error.message.removeprefix(f"{found.directory}/")
        if error.code == "family" or "not implemented" in error.message:
            described.notes.append(f"{said}: the tensors are not held against it")
        else:
            described.faults.append(Fault("config", said, described.source))
    return described


def _describe(described: Described, found: Gathered, config: str | None) -> None:
    from gptcli.families.training import RECORDS

    first = found.weights
    name = found.directory.resolve().name
    if config is not None and not config.endswith(".json"):
        from gptcli.config import find_config

        _by_yaml(described, found, find_config(config))
    elif config is not None:
        _by_json(described, Path(config), name)
    elif found.described is not None:
        _by_metadata(described, found)
    elif settings := settings_in(found):
        described.source = f"model_args in {first.name}"
        _by_family(described, settings, "nanogpt-checkpoint", RECORDS["nanogpt-checkpoint"], first.stem)
    elif first is not None and found.pickled and (settings := meta_of(first)):
        described.source = first.name.replace("model_", "meta_", 1).replace(first.suffix, ".json")
        _by_family(described, settings, "nanochat-checkpoint", RECORDS["nanochat-checkpoint"], first.stem)
    elif (path := found.directory / "config.json").is_file():
        _by_json(described, path, name)
    else:
        beside = [found.directory / "config.yaml"] + ([first.with_suffix(".yaml")] if first else [])
        path = next((path for path in beside if path.is_file()), None)
        if path is not None:
            _by_yaml(described, found, path)


def _by_json(described: Described, path: Path, name: str) -> None:
    described.source = path.name
    described.raw = read_json(path)
    family = family_of(described.raw, path.name)
    _by_family(described, described.raw, described.raw["model_type"], family, name)


def _by_family(described: Described, raw: dict[str, Any], family: str, record: Family, name: str) -> None:
    described.family, described.record = family, record
    explained = explain(raw, record, name, described.source)
    described.spec = explained.spec
    described.values = list(_values(explained.spec, explained.origins))
    described.idle, described.checked = list(explained.idle), list(explained.checked)
    described.unknown = list(explained.unknown)


def _by_metadata(described: Described, found: Gathered) -> None:
    """A .gguf file says itself what it is."""
    from gptcli.checkpoint.gguf import numbers_of
    from gptcli.families.gguf import described as read

    infos, path = found.described.infos, found.weights
    described.source = "its metadata"
    shapes = {name: info.shape for name, info in infos.items()}
    said = read(found.described.metadata, shapes, lambda name: numbers_of(infos[name]), path.stem, path.name)
    described.spec, described.record = said.spec, said.family
    described.family, described.unknown = found.described.metadata["general.architecture"], list(said.unknown)
    described.values = list(_values(said.spec, said.origins))


def _by_yaml(described: Described, found: Gathered, path: Path) -> None:
    from gptcli.checkpoint.bind import recognise
    from gptcli.config import read_config, read_yaml
    from gptcli.families import OWN
    from gptcli.families.guess import ALL, OWN_NAMES
    from gptcli.layout import layout

    described.source = path.name
    config = read_config(path)
    described.spec = config.spec
    records = {OWN_NAMES: OWN, **ALL}
    described.record = recognise(layout(config.spec), found.infos, records.values())
    described.family = next(name for name, record in records.items() if record is described.record)
    written = dict(_leaves(read_yaml(path.read_text(encoding="utf-8"), path.name)))
    origins = {key: Origin("config", (key,)) for key in written}
    described.values = list(_values(config.spec, origins, BY_DEFAULT))


def _values(spec: Spec, origins: dict[str, Origin], otherwise: Origin = IN_ALL) -> Iterator[ConfigValue]:
    """Every value of a Spec that a forward pass reads, with the origin of the nearest part that has one.

    Left out is a mechanism that is absent (null) and that no config key could have brought.
    """
    leaves = dict(_leaves(to_dict(spec)))
    for path, value in leaves.items():
        if path.startswith("variants.") and leaves.get(path.split(".", 2)[2]) == value:
            continue  # as in the other layers
        if path.partition(".")[0] in NOT_RUN or value == [] or (path == "encoder_embed" and spec.encoder is None):
            continue
        origin = origins.get(path) or _above(path, origins)
        if origin is None and path in FOLLOWS:
            above = [origins.get(one, otherwise) for one in FOLLOWS[path]]
            keys = tuple(key for one in above if one.kind in ("config", "derived") for key in one.keys)
            origin = Origin("derived", keys) if keys else above[0]
        origin = origin or otherwise
        if value is not None or (path in origins and origin.keys):
            yield ConfigValue(path=path, value=value, origin=origin.kind, keys=list(origin.keys))


def _above(path: str, origins: dict[str, Origin]) -> Origin | None:
    while "." in path:
        path = path.rpartition(".")[0]
        if path in origins:
            return origins[path]
    return None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value inside a nested one by its path; a list of plain values is one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{i}")
    else:
        yield path, value


def shapes_tell(values: list[Any]) -> list[ConfigValue]:
    """What tensors tell, as values of a config (see families/guess.py)."""
    return [ConfigValue(path=v.path, value=v.value, origin="shape", keys=[v.stored]) for v in values]
