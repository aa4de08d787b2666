"""A report as plain data and as strict JSON: numbers that are not finite are null."""

import codecs
import json
import math
from dataclasses import fields, is_dataclass
from typing import Any

from gptcli.errors import GptcliError
from gptcli.report import Report


def plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, all the way down."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def to_json(report: Report, encoding: str | None = "utf-8") -> str:
    """The report, whole, as one object: `schema` and `status` first."""
    return _dump({"schema": report.schema, "status": report.status} | plain(report), encoding)


def error_json(error: GptcliError, encoding: str | None = "utf-8") -> str:
    """An error as the object that `--json` prints in a report's place."""
    said = {"code": error.code, "message": error.message, "hint": error.hint}
    return _dump({"schema": "gptcli.error/1", "status": "error", "error": said}, encoding)


def _dump(value: dict, encoding: str | None) -> str:
    """One line; what can't be seen, which a terminal might obey, and what the encoding lacks, as \\uXXXX."""
    unicode = codecs.lookup(encoding or "utf-8").name.startswith("utf")
    text = json.dumps(value, ensure_ascii=not unicode, allow_nan=False)
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def _escape(letter: str) -> str:
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else json.dumps(letter)[1:-1]
