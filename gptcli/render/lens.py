"""`lens` in a terminal: a grid of layers and positions, the last layer on top, or one position opened."""

from itertools import groupby, zip_longest
from typing import NamedTuple

from rich.cells import cell_len

from gptcli.render.common import by_type, fed, rank, title
from gptcli.render.screen import Part, Screen
from gptcli.render.shades import in_color, shade
from gptcli.report.lens import Cell, LensReport, PositionReport, Reading
from gptcli.report.maps import Scale
from gptcli.report.proof import Check
from gptcli.report.topk import Candidate

GAP = 2  # blanks between columns
PROBABILITIES = Scale(kind="linear", low=0.0, high=1.0)


draw, verdict = by_type()  # the verdict: tokens of the last layer, or of every layer at one position, from the last


@draw.register
def _(report: LensReport, screen: Screen) -> None:
    title(screen, report.model)
    fed(screen, report.tokens, report.source)
    rows, tokens = report.rows[::-1], report.tokens[0]
    names = [row.name for row in rows]
    columns = []
    for cells in zip(*(row.cells for row in rows)):
        token = tokens[cells[0].position]
        title_ = f"{cells[0].position} {token.token or token.id}"
        columns.append(_Column(title_, [_words(cell, cell.tied, screen) for cell in cells]))
    bands = _bands(columns, names, screen)
    if not report.named:
        bands = [_bands(columns[::-1], names, screen)[0][::-1]]  # the latest, as many as fit
    meant = "what stands there" if report.fills else "what comes next"
    tied = any(cell.tied > 1 for row in rows for cell in row.cells[-len(bands[0]) :])
    screen.line((f"each layer's best guess of {meant}, and its probability" + ", ×n: n ids tie" * tied, "dim"))
    _table(screen, names, bands)
    shown = len(bands[0])
    if not report.named and shown < len(tokens):
        said = f"positions {len(tokens) - shown}–{len(tokens) - 1} of 0–{len(tokens) - 1}"
        screen.line((f"{said}; --full shows all, --position 2:9 some, 2 opens one", "dim"))
    _proof(screen, report.proof)


@verdict.register
def _(report: LensReport) -> str:
    return "\n".join(f"{cell.id}\t{cell.token}" for cell in report.rows[-1].cells)


class _Words(NamedTuple):
    """A cell's token, its probability as a number, and the style that shows it."""

    token: str
    number: str
    style: str


NOTHING = _Words("", "", "")


def _words(one: Cell | Candidate, tied: int, screen: Screen) -> _Words:
    at = shade(screen, PROBABILITIES, one.prob)
    number = screen.number(one.prob) + (f" ×{tied}" if tied > 1 else "")
    return _Words(_word(one), number, f"{at.ink} on {at.color}" if in_color(screen) else "")


def _word(one: Cell | Candidate) -> str:
    return one.token or f"id {one.id}"


class _Column:
    """Cells below one another, all of one width."""

    def __init__(self, title: str, cells: list[_Words]):
        self.title = title
        self.width = max(cell_len(title), *(cell_len(one.token) + 1 + cell_len(one.number) for one in cells))
        self.parts = [self._part(one) for one in cells]

    def _part(self, one: _Words) -> Part:
        return (one.token + " " * (self.width - cell_len(one.token) - cell_len(one.number)) + one.number, one.style)


def _bands(columns: list[_Column], names: list[str], screen: Screen) -> list[list[_Column]]:
    """The columns in groups that fit the terminal beside the names; a group has one column at least."""
    bands: list[list[_Column]] = []
    room = None if screen.width is None else screen.width - max(map(len, names))
    left = 0
    for column in columns:
        if not bands or (room is not None and left < GAP + column.width):
            bands.append([])
            left = room or 0
        bands[-1].append(column)
        left -= GAP + column.width
    return bands


def _table(screen: Screen, names: list[str], bands: list[list[_Column]]) -> None:
    for band in bands:
        rows = [[name, *(column.parts[i] for column in band)] for i, name in enumerate(names)]
        screen.table(rows, ("", *(column.title for column in band)), gap=GAP)


@draw.register
def _(report: PositionReport, screen: Screen) -> None:
    title(screen, report.model)
    fed(screen, report.tokens, report.source)
    meant = "stands there" if report.fills else "comes next"
    token = report.token or str(report.tokens[0][report.position].id)
    said = [(f"position {report.position} ", "dim"), (token, "cyan")]
    told = [f"each layer's guess of what {meant}", "entropy and KL(final||layer) in bits"]
    screen.flow([said, *([(part, "dim")] for part in told)], gap=" · ")
    asked = sorted((one.id, _word(one)) for one in report.readings[-1].top if one.asked)
    header = ["", "entropy", "KL", *(name for _, word in asked for name in (f"{word}: rank", "prob"))]
    readings = report.readings[::-1]
    names = [reading.name for reading in readings]
    rows = [[name, *_numbers(one, [id_ for id_, _ in asked], screen)] for name, one in zip(names, readings)]
    lists = [_best(reading.top, report.k, screen) for reading in readings]
    columns = [_Column(str(i + 1), list(column)) for i, column in enumerate(zip_longest(*lists, fillvalue=NOTHING))]
    beside = [row + [column.parts[i] for column in columns] for i, row in enumerate(rows)]
    titles = [column.title for column in columns]
    if screen.fits(beside, (*header, *titles)):
        screen.table(beside, (*header, *titles), right=range(1, len(header)))
    else:
        screen.table(rows, header, right=range(1, len(header)))
        _table(screen, names, _bands(columns, names, screen))
    _proof(screen, report.proof)


def _numbers(reading: Reading, asked: list[int], screen: Screen) -> list[str]:
    of = {one.id: one for one in reading.top}
    cells = [cell for id_ in asked for cell in (rank(of[id_].rank, of[id_].tie), screen.number(of[id_].prob))]
    return [screen.number(reading.entropy), screen.number(reading.kl), *cells]


def _best(top: list[Candidate], k: int, screen: Screen) -> "list[_Words]":
    """The k best, ids that tie as one."""
    groups = groupby((one for one in top if one.rank <= k), key=lambda one: one.tie or one.rank)
    firsts = (next(group) for _, group in groups)
    return [_words(one, one.tie[1] - one.tie[0] + 1 if one.tie else 1, screen) for one in firsts]


@verdict.register
def _(report: PositionReport) -> str:
    return "\n".join(
        f"{reading.name}\t{reading.top[0].id}\t{reading.top[0].token}" for reading in report.readings[::-1]
    )


def _proof(screen: Screen, proof: list[Check]) -> None:
    for check in proof:
        screen.line(("ok" if check.ok else "FAILED", "green" if check.ok else "bold red"), f"  {check.claim}")
