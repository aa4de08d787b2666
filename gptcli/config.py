"""A config file: the Spec, and beside it what makes a config a worked example (words, a prompt, weights by hand).

YAML is read by the rules of yaml12.py.
"""

from dataclasses import field
from pathlib import Path
from typing import Any

from gptcli import shipped
from gptcli.data import data
from gptcli.errors import GptcliError, nearest
from gptcli.spec import Spec, SpecError, decode, read_spec, show


@data
class Config:
    """A Spec and its trimmings.

    vocabulary: words by id, for texts of words parted by spaces; prompt: the text when none is given; source: what an
    encoder reads when none is given; show: words whose row a list of next tokens always holds; weights: values by
    pattern of parameter names (see model/written.py).
    """

    spec: Spec
    vocabulary: dict[int, str] = field(default_factory=dict)
    prompt: str | None = None
    source: str | None = None
    show: tuple[str, ...] = ()
    weights: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML document. Raises GptcliError with the line and the column of a fault."""
    from gptcli import yaml12

    return yaml12.read_yaml(text, where)


def read_config(path: Path) -> Config:
    """The config in a YAML file. Raises GptcliError naming the file and the field."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise GptcliError(f"{path}: {reason}", "give a YAML config", "file") from None
    raw = read_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise GptcliError(f"{path}: holds no mapping", "a config begins with lines such as `vocab_size: 256`", "config")
    try:
        extras = {key: read(raw.pop(key)) for key, read in _EXTRAS.items() if key in raw}
        # A config.yaml describes the weights beside it, and is called as their folder is.
        name = path.resolve().parent.name if path.stem == "config" else path.stem
        config = Config(spec=read_spec({"name": name} | raw), path=path, **extras)
        _check_vocabulary(config)
    except SpecError as error:
        raise SpecError(f"{path}: {error.message}", error.hint, error.code) from None
    return config


def _vocabulary(raw: Any) -> dict[int, str]:
    if not isinstance(raw, dict):
        raise SpecError("vocabulary: not a mapping of ids to words", code="spec")
    for id_, word in raw.items():
        if type(id_) is not int or id_ < 0 or not isinstance(word, str) or not word or word.split() != [word]:
            raise SpecError(f"vocabulary.{id_}: {show(word)}, but an entry is an id and one word", code="spec")
    if len(set(raw.values())) < len(raw):
        raise SpecError("vocabulary: a word stands under two ids", code="spec")
    return raw


def _show(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(word, str) for word in raw):
        raise SpecError("show: not a list of words", code="spec")
    return tuple(raw)


def _weights(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict) or not all(isinstance(pattern, str) for pattern in raw):
        raise SpecError("weights: not a mapping of parameter names to values", code="spec")
    return raw


_EXTRAS = {
    "vocabulary": _vocabulary,
    "prompt": lambda raw: decode(str, raw, "prompt"),
    "source": lambda raw: decode(str, raw, "source"),
    "show": _show,
    "weights": _weights,
}


def _check_vocabulary(config: Config) -> None:
    for id_, word in config.vocabulary.items():
        if id_ >= config.spec.vocab_size:
            raise SpecError(f'vocabulary.{id_}: "{word}" is beyond vocab_size: {config.spec.vocab_size}', code="spec")
    for word in config.show if config.vocabulary else ():
        if word not in config.vocabulary.values():
            raise SpecError(f"show: {show(word)} is not a word of the vocabulary", code="spec")


def find_config(name: str) -> Path:
    """The file that a person means by `gpt2-small`, `gpt2-small.yaml` or a path.

    A file in the working directory comes first, then what ships. Raises GptcliError, listing what ships.
    """
    for candidate in (Path(name), Path(f"{name}.yaml")):
        try:
            if candidate.is_file():
                return candidate
        except OSError as error:  # a name too long, a directory that may not be read
            raise GptcliError(f"--config {name}: {error.strerror}", "give a readable file", "file") from None
    ships = shipped.configs()
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    if stem in ships:
        return ships[stem]
    if Path(name).is_dir():
        raise GptcliError(f"--config {name}: a directory", f"a checkpoint is named by -m {name}", "file")
    hint = f"{nearest(stem, ships)} what ships: {', '.join(ships)}".strip()
    raise GptcliError(f"no config {name!r} here or among what ships", hint, "file")
