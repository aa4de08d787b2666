"""YAML by version 1.2's rules for scalars: `on` is a word, `1e-5` is a number. A key given twice is an error.

Apart from what reads configs, for loading PyYAML takes longer than much of what never needs it.
"""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

from gptcli.errors import GptcliError
from gptcli.spec import show


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
