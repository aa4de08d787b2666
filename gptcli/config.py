"""A config file: the Spec, and beside it what makes a config a worked example (words, a prompt, weights by hand).

YAML is read by version 1.2's rules for scalars: `on` is a word, `1e-5` is a number. A key given twice is an error.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from gptcli import shipped
from gptcli.errors import GptcliError, nearest
from gptcli.spec import Spec, SpecError, decode, read_spec


@dataclass(frozen=True, kw_only=True)
class Config:
    """A Spec and its trimmings.

    vocabulary: words by id, for texts of words parted by spaces; prompt: the text when none is given; show: words whose
    row a list of next tokens always holds; weights: values by pattern of parameter names (see model/written.py).
    """

    spec: Spec
    vocabulary: dict[int, str] = field(default_factory=dict)
    prompt: str | None = None
    show: tuple[str, ...] = ()
    weights: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """PyYAML's safe loader with YAML 1.2's core scalars."""

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            word = key.value if isinstance(key, yaml.ScalarNode) else None
            if word is not None and word in seen:
                raise yaml.MarkedYAMLError(problem=f'the key "{word}" stands twice', problem_mark=key.start_mark)
            seen.add(word)
        return super().construct_mapping(node, deep)


# YAML 1.2, section 10.3.2: the core schema's scalars and the characters each may begin with.
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _construct_int(loader, node) -> int:
    """YAML 1.2 integers: decimal (a leading zero means nothing), 0o and 0x."""
    text = loader.construct_scalar(node)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML document. Raises GptcliError with the line and the column of a fault."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - _Loader is a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise GptcliError(f"{where}{place}: {error.problem or error.context}", "mend the YAML", "yaml") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise GptcliError(f"{where}: not YAML ({reason})", "mend the file", "yaml") from None


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
        config = Config(spec=read_spec({"name": path.stem} | raw), path=path, **extras)
        _check_vocabulary(config)
    except SpecError as error:
        raise SpecError(f"{path}: {error.message}", error.hint, error.code) from None
    return config


def _vocabulary(raw: Any) -> dict[int, str]:
    if not isinstance(raw, dict):
        raise SpecError("vocabulary: not a mapping of ids to words", code="spec")
    for id_, word in raw.items():
        if type(id_) is not int or id_ < 0 or not isinstance(word, str) or not word or word.split() != [word]:
            raise SpecError(f"vocabulary.{id_}: {word!r}, but an entry is an id and one word", code="spec")
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
    "show": _show,
    "weights": _weights,
}


def _check_vocabulary(config: Config) -> None:
    for id_, word in config.vocabulary.items():
        if id_ >= config.spec.vocab_size:
            raise SpecError(f'vocabulary.{id_}: "{word}" is beyond vocab_size: {config.spec.vocab_size}', code="spec")


def find_config(name: str) -> Path:
    """The file that a person means by `gpt2-small`, `gpt2-small.yaml` or a path.

    A file in the working directory comes first, then what ships. Raises GptcliError, listing what ships.
    """
    for candidate in (Path(name), Path(f"{name}.yaml")):
        if candidate.is_file():
            return candidate
    ships = shipped.configs()
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    if stem in ships:
        return ships[stem]
    if Path(name).is_dir():
        raise GptcliError(f"--config {name}: a directory", f"a checkpoint is named by -m {name}", "file")
    hint = f"{nearest(stem, ships)} what ships: {', '.join(ships)}".strip()
    raise GptcliError(f"no config {name!r} here or among what ships", hint, "file")
