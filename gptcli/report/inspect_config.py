"""What describes a checkpoint: its config, value by value, or what its own tensors tell. For `inspect`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gptcli.checkpoint.files import read_json
from gptcli.checkpoint.gather import Gathered, meta_of, settings_in
from gptcli.data import data
from gptcli.errors import GptcliError
from gptcli.families import Family, family_of
from gptcli.families.record import Origin, explain
from gptcli.report import Finding
from gptcli.spec import Spec, to_dict

if TYPE_CHECKING:
    from gptcli.report.inspect import Inspected

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


class Description:
    """What describes a checkpoint; `out` is told what it says value by value, and what is wrong with it.

    spec, record: the architecture and its family's record, None where nothing is understood; raw: a config.json's keys.
    """

    def __init__(self, found: Gathered, out: "Inspected"):
        self.found, self.out = found, out
        self.spec: Spec | None = None
        self.record: Family | None = None
        self.raw: dict[str, Any] = {}

    def read(self, config: str | None) -> None:
        """config: the one named by -c. Raises GptcliError where it can't be found."""
        try:
            self.find(config)
        except GptcliError as error:
            if config is not None and error.code == "file":
                raise
            said = error.message.removeprefix(f"{self.found.directory}/")
            if error.code == "family" or "not implemented" in error.message:
                self.out.notes.append(f"{said}: the tensors are not held against it")
            else:
                self.out.findings.append(Finding("config", said, self.out.config))

    def find(self, config: str | None) -> None:
        from gptcli.families.training import RECORDS

        found, first = self.found, self.found.weights
        name = found.directory.resolve().name
        if config is not None and not config.endswith(".json"):
            from gptcli.config import find_config

            self.by_yaml(find_config(config))
        elif config is not None:
            self.by_json(Path(config), name)
        elif found.described is not None:
            self.by_metadata()
        elif settings := settings_in(found):
            self.out.config = f"model_args in {first.name}"
            self.by_family(settings, "nanogpt-checkpoint", RECORDS["nanogpt-checkpoint"], first.stem)
        elif first is not None and found.pickled and (settings := meta_of(first)):
            self.out.config = first.name.replace("model_", "meta_", 1).replace(first.suffix, ".json")
            self.by_family(settings, "nanochat-checkpoint", RECORDS["nanochat-checkpoint"], first.stem)
        elif (path := found.directory / "config.json").is_file():
            self.by_json(path, name)
        else:
            beside = [found.directory / "config.yaml"] + ([first.with_suffix(".yaml")] if first else [])
            if path := next(filter(Path.is_file, beside), None):
                self.by_yaml(path)

    def by_json(self, path: Path, name: str) -> None:
        self.out.config = path.name
        self.raw = read_json(path)
        family = family_of(self.raw, path.name)
        self.by_family(self.raw, self.raw["model_type"], family, name)

    def by_family(self, raw: dict[str, Any], family: str, record: Family, name: str) -> None:
        out = self.out
        out.families, self.record = [family], record
        self.spec, unknown, _, origins, idle, checked = explain(raw, record, name, out.config)
        out.values = list(_values(self.spec, origins))
        out.idle, out.checked, out.unknown = list(idle), list(checked), list(unknown)

    def by_metadata(self) -> None:
        """A .gguf file says itself what it is."""
        from gptcli.checkpoint.gguf import numbers_of
        from gptcli.families.gguf import described as read

        header, path = self.found.described, self.found.weights
        self.out.config = "its metadata"
        shapes = {name: info.shape for name, info in header.infos.items()}
        said = read(header.metadata, shapes, lambda name: numbers_of(header.infos[name]), path.stem, path.name)
        self.spec, self.record = said.spec, said.family
        self.out.families, self.out.unknown = [header.metadata["general.architecture"]], list(said.unknown)
        self.out.values = list(_values(said.spec, said.origins))

    def by_yaml(self, path: Path) -> None:
        from gptcli.checkpoint.bind import recognise
        from gptcli.config import read_config, read_yaml
        from gptcli.families import OWN
        from gptcli.families.guess import ALL, OWN_NAMES
        from gptcli.layout import layout

        self.out.config = path.name
        self.spec = read_config(path).spec
        records = {OWN_NAMES: OWN, **ALL}
        self.record = recognise(layout(self.spec), self.found.infos, records.values())
        self.out.families = [next(name for name, record in records.items() if record is self.record)]
        written = _leaves(read_yaml(path.read_text(encoding="utf-8"), path.name))
        origins = {key: Origin("config", (key,)) for key, _ in written}
        self.out.values = list(_values(self.spec, origins, BY_DEFAULT))


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
        origin = _nearest(path, origins)
        if origin is None and path in FOLLOWS:
            above = [origins.get(one, otherwise) for one in FOLLOWS[path]]
            keys = tuple(key for one in above if one.kind in ("config", "derived") for key in one.keys)
            origin = Origin("derived", keys) if keys else above[0]
        origin = origin or otherwise
        if value is not None or (path in origins and origin.keys):
            yield ConfigValue(path=path, value=value, origin=origin.kind, keys=list(origin.keys))


def _nearest(path: str, origins: dict[str, Origin]) -> Origin | None:
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins[path] if path else None


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
