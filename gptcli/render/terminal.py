"""Each report as a person reads it in a terminal, drawn in the room that is called as the report's own.

A room is loaded when its report is shown: to count parameters, nothing that draws a walk need be read.
"""

from importlib import import_module
from types import ModuleType

from gptcli.render.screen import Screen
from gptcli.report import Report


def draw(report: Report, screen: Screen) -> None:
    """Prints a report to the screen."""
    _room(report).draw(report, screen)


def verdict(report: Report) -> str:
    """What `-q` prints of a report: the verdict or the values alone."""
    return _room(report).verdict(report)


def _room(report: Report) -> ModuleType:
    """gptcli/render/params.py for a report of gptcli/report/params.py."""
    return import_module(f"gptcli.render.{type(report).__module__.rpartition('.')[2]}")
