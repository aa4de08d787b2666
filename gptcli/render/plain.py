"""A report as plain data and as strict JSON: numbers that are not finite are null."""

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


def to_json(report: Report) -> str:
    """The report, whole, as one object: `schema` and `status` first."""
    return _dump({"schema": report.schema, "status": report.status} | plain(report))


def error_json(error: GptcliError) -> str:
    """An error as the object that `--json` prints in a report's place."""
    said = {"code": error.code, "message": error.message, "hint": error.hint}
    return _dump({"schema": "gptcli.error/1", "status": "error", "error": said})


def _dump(value: dict) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
