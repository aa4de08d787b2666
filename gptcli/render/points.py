"""`trace --list` and `--at` in a terminal: a list of activations, or one of them."""

from functools import singledispatch

from gptcli.render.common import title
from gptcli.render.screen import Screen
from gptcli.report import Report
from gptcli.report.points import ActivationReport, PointsReport
from gptcli.tokens import Token


@singledispatch
def draw(report: Report, screen: Screen) -> None:
    """Prints the report to the screen."""
    raise TypeError(f"no rendering for {type(report).__name__}")


@singledispatch
def verdict(report: Report) -> str:
    """What `-q` prints."""
    return report.status


@draw.register
def _(report: PointsReport, screen: Screen) -> None:
    title(screen, report.model)
    rows = [[p.path, f"[{','.join(p.axes)}]", f"[{','.join(map(str, p.shape))}]"] for p in report.points]
    if report.vocabulary == "ours":
        screen.table(rows, ("activation", "shape", ""))
        return
    named = [[*row, (p.name or "has no name there", "" if p.name else "dim")] for row, p in zip(rows, report.points)]
    screen.table(named, ("activation", "shape", "", report.vocabulary))


@verdict.register
def _(report: PointsReport) -> str:
    return "\n".join(point.name or point.path for point in report.points)


@draw.register
def _(report: ActivationReport, screen: Screen) -> None:
    title(screen, report.model)
    letters = f"[{','.join(report.axes)}]"
    figures = f"mean {screen.number(report.mean)} std {screen.number(report.std)} max {screen.number(report.max_abs)}"
    also = f" = {report.name}" if report.name not in (None, report.path) else ""
    screen.line((report.path, "bold"), f"{also} {letters} [{','.join(map(str, report.shape))}] {figures}")
    names = {"H": "head", "G": "kv head"}
    for text, values in enumerate(report.values):
        heads = values if len(report.axes) == 4 else [values]
        for head, matrix in enumerate(heads):
            if len(report.values) > 1 or len(heads) > 1:
                of_head = f"{names[report.axes[1]]} {head}" if len(report.axes) == 4 else ""
                screen.line((f"text {text} {of_head}" if len(report.values) > 1 else of_head, "dim"))
            name = names.get(report.axes[-2])
            labels = [f"{name} {i}" for i in range(len(matrix))] if name else _labels(len(matrix), report.rows[text])
            columns = report.columns and _labels(len(matrix[0]), report.columns[text])
            _matrix(screen, matrix, labels, columns)


def _labels(rows: int, tokens: list[Token]) -> list[str]:
    """A label for every position: its token; padding, which stands first, has none."""
    padding = rows - len(tokens)
    return [f"{i - padding} {tokens[i - padding].token}" if i >= padding else "padding" for i in range(rows)]


def _matrix(screen: Screen, matrix: list[list[float]], labels: list[str], columns: list[str] | None) -> None:
    """columns: the keys that a map's columns stand for, named where all of them find room."""
    if columns is not None:
        rows = [[(label, "cyan"), *map(screen.number, row)] for label, row in zip(labels, matrix)]
        if screen.fits(rows, ("", *columns)):
            screen.table(rows, ("", *columns), right=range(1, len(columns) + 1))
            return
    width = max(map(len, labels))
    room = None if screen.width is None else screen.width - width - 1
    screen.table([[(label, "cyan"), screen.vector(row, room)] for label, row in zip(labels, matrix)], gap=1)


@verdict.register
def _(report: ActivationReport) -> str:
    return repr(report.values)
