"""A config file: the Spec, and beside it what makes a config a worked example (words, a prompt, weights by hand).

YAML is read by version 1.2's rules for scalars: `on` is a word, `1e-5` is a number. A key given twice is an error.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from gptcli import shipped
from gptcli.errors import GptcliError, nearest
from gptcli.spec import Spec, SpecError, decode, read_spec, show


@dataclass(frozen=True, kw_only=True)
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


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """PyYAML's safe loader with YAML 1.2's core schema: no other scalars, no other tags, no merging of mappings."""

    yaml_implicit_resolvers: ClassVar[dict] = {}
    yaml_constructors: ClassVar[dict] = {}

    def construct_mapping(self, node, deep=False):
        if not isinstance(node, yaml.MappingNode):
            raise _fault(node, "not a mapping")
        table = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _fault(key_node, "a key is a word or a number")
            key = self.construct_object(key_node)
            if key in table:
                raise _fault(key_node, f'the key "{key_node.value}" stands twice')
            table[key] = self.construct_object(value_node, deep)
        return table


def _fault(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _int(text: str) -> int:
    """Decimal (a leading zero means nothing), 0o and 0x."""
    value = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) <= 32 else 2**64
    if abs(value) >= 2**64:  # no size is as large, and Python prints no integer of very many digits
        raise ValueError("a whole number beyond 64 bits: write it with an exponent")
    return value


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


# YAML 1.2, section 10.3.2: the core schema's scalars, the characters that each may begin with, and what each means.
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""], lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF"), lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789"), _int),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
        _float,
    ),
}


def _scalar(kind: str, pattern: re.Pattern, value: Callable[[str], Any]) -> Callable[[_Loader, yaml.Node], Any]:
    """What makes a scalar of one kind, which its text must be even where a tag (`!!int`) says so."""

    def construct(loader: _Loader, node: yaml.Node) -> Any:
        text = loader.construct_scalar(node)
        if not pattern.fullmatch(text):
            raise _fault(node, f"{show(text)} is no {kind}")
        try:
            return value(text)
        except ValueError as error:
            raise _fault(node, str(error)) from None

    return construct


def _unknown_tag(loader: _Loader, node: yaml.Node) -> None:
    raise _fault(node, f"unknown tag {node.tag}")


for _kind, (_pattern, _first, _value) in _SCALARS.items():
    _tag, _whole = f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$")
    _Loader.add_implicit_resolver(_tag, _whole, _first)
    _Loader.add_constructor(_tag, _scalar(_kind, _whole, _value))
for _kind in ("str", "seq", "map"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", getattr(yaml.SafeLoader, f"construct_yaml_{_kind}"))
_Loader.add_constructor(None, _unknown_tag)


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML document. Raises GptcliError with the line and the column of a fault."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - _Loader is a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = ", ".join(filter(None, (error.context, error.problem)))
        raise GptcliError(f"{where}{place}: {reason}", "mend the YAML", "yaml") from None
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
