"""`draw` in a terminal: boxes from top to bottom, the residual path as a line at their side; a table of two models.

All is painted on a canvas of cells, in signs of one column each, so that a terminal without box-drawing signs gets the
same picture in ASCII.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from rich.cells import cell_len

from gptcli.render.screen import Screen, exact
from gptcli.render.signs import harmless, printable
from gptcli.report.draw import SIDE_BY_SIDE, Box, DrawReport, Figure, Flow, boxes

WIDTH = 80  # of a drawing in a pipe
NARROWEST = 48
WIDEST = 112  # a box's text is no easier to read beyond
TWO_MODELS = 120  # columns from which two models stand side by side
GUTTER = 4  # between an encoder and its decoder
SIGNS = "┌┐└┘─│├┤┬┴┼╭╮╰╯▼◄►⊕≠·×→θε√…–²"  # what a drawing needs; an encoding that lacks one gets ASCII alone

LINE, TITLE, SHAPE, RESIDUAL, MARK, MEMORY = "dim", "bold", "cyan", "yellow", "bold magenta", "green"
_Say = Callable[[str], str]


def draw(report: DrawReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    say = _say(screen.stream.encoding)
    width = max(screen.width or WIDTH, NARROWEST)
    if len(report.figures) == 1:
        _headed(report.figures[0], width, say).show(screen)
        return
    if width >= TWO_MODELS:
        half, canvas = (width - 2) // 2, _Canvas(say)
        for left, figure in zip((0, half + 2), report.figures):
            canvas.paste(_headed(figure, half, say), 0, left)
        canvas.show(screen)
        screen.line()
    _table(report, width, say, screen)


def verdict(report: DrawReport) -> str:
    """What `-q` prints: the chain of stages, or the names of the rows in which two models differ."""
    if len(report.figures) > 1:
        return "\n".join(row.name for row in report.rows if not row.same)
    stacks = report.figures[0].stacks
    chains = [(f"{stack.title}: " if len(stacks) > 1 else "") + _chain(stack.branches[0]) for stack in stacks]
    return " | ".join(chains)


def _chain(sequence: Iterable[Box]) -> str:
    said = []
    for box in sequence:
        if box.kind in ("layer", "folded"):
            inside = f" ({_chain(box.branches[0])})" if box.branches else ""
            said.append(f"{box.times} ×{inside or ' other layer' + 's' * (box.times > 1)}")
        elif box.kind in SIDE_BY_SIDE:
            said.append(" | ".join(_chain(branch) for branch in box.branches))
        elif box.kind != "aside":
            said.append(box.title)
    return " → ".join(said)


# What a drawing in a terminal and one in a file have in common


class End(NamedTuple):
    """Where something flows on, and what. told: the drawing says it further up; memory: it is an encoder's vectors."""

    x: float
    y: float
    carries: Flow | None
    told: bool = False
    memory: bool = False


class Walk:
    """Goes down a sequence of boxes, each drawn by the method for its kind.

    A method takes the box, the columns it may fill, where the box before ends, and what flows on from there. It returns
    where this one ends; `beside` and `aside`, through which several arrows go or one passes, also what flows on.
    """

    def sequence(self, several: Sequence[Box], at: Any, y: float, ends: list[End]) -> tuple[float, list[End]]:
        """Boxes in a row; returns where the last one ends, and what flows on: one thing, or one a branch."""
        for box in several:
            match box.kind:
                case "split" | "residual":
                    y, ends = self.beside(box, at, y, ends)
                    continue
                case "aside":
                    y, ends = self.aside(box, at, y, ends)
                    continue
                case "add":
                    y = self.join(box, at, y, ends)
                case "layer":
                    y = self.frame(box, at, y, ends)
                case "input" | "output":
                    y = self.pill(box, at, y, ends)
                case _:
                    y = self.leaf(box, at, y, ends)
            ends = [End(at.axis, y, box.gives)]
        return y, ends


def numbers(box: Box) -> list[str]:
    """A box's parameters, in words that become fewer."""
    each = f"{box.parameters:,}"
    if box.tied_to:
        return [f"{each} new"]
    if box.times == 1:
        return [exact(box.parameters), each]
    several = f"{box.times:,} × {each}"
    total = [f"{several} = {exact(box.times * box.parameters)}"] if box.kind in ("layer", "folded") else []
    return [*total, several]


def flowed(
    chunks: Iterable[str], room: float, gap: str, width: Callable = cell_len, wrap: Callable = textwrap.wrap
) -> list[str]:
    """Chunks in lines of that width, `gap` between them; wrap: breaks one that is wider alone."""
    lines: list[str] = []
    for chunk in chunks:
        if lines and width(lines[-1] + gap + chunk) <= room:
            lines[-1] += gap + chunk
        else:
            lines += wrap(chunk, room)
    return lines


# Cells


def _say(encoding: str | None) -> _Say:
    """Makes of a text one in signs that the stream has, all of one column: its width is then what it will be."""
    known = encoding if printable(SIGNS, encoding) == SIGNS else "ascii"
    return lambda text: printable(harmless(text), known)


class _Canvas:
    """Cells (sign, style) in rows that grow as they are painted; a sign of two columns leaves the next cell empty."""

    def __init__(self, say: _Say):
        self.say = say
        self.rows: list[list[tuple[str, str]]] = []

    def put(self, row: int, column: int, text: str, style: str = "") -> None:
        self.rows += [[] for _ in range(row + 1 - len(self.rows))]
        cells = self.rows[row]
        for sign in self.say(text):
            wide = cell_len(sign)
            cells += [(" ", "")] * (column + wide - len(cells))
            cells[column : column + wide] = [(sign, style), ("", style)][:wide]
            column += wide

    def across(self, row: int, first: int, last: int, style: str, ends: str = "") -> None:
        """A level line; the first and the last of its cells may be other signs."""
        self.put(row, first, "─" * (last + 1 - first), style)
        for column, sign in zip((first, last), ends):
            self.put(row, column, sign, style)

    def down(self, first: int, last: int, column: int, style: str) -> None:
        for row in range(first, last + 1):
            self.put(row, column, "│", style)

    def paste(self, other: "_Canvas", top: int, left: int) -> None:
        for row, cells in enumerate(other.rows):
            for column, (sign, style) in enumerate(cells):
                if sign.strip():
                    self.put(top + row, left + column, sign, style)

    def show(self, screen: Screen) -> None:
        """Prints each row as runs of one style."""
        for cells in self.rows:
            runs = groupby(cells, key=itemgetter(1))
            screen.line(*(("".join(sign for sign, _ in run), style) for style, run in runs))


def _headed(figure: Figure, width: int, say: _Say) -> _Canvas:
    """A drawing with its title above."""
    model, canvas = figure.model, _Canvas(say)
    name, rest = say(model.name), say(f"({model.source}) · {exact(model.parameters)} parameters")
    if cell_len(name) + 1 + cell_len(rest) <= width:
        canvas.put(0, 0, name, TITLE)
        canvas.put(0, cell_len(name) + 1, rest)
    else:
        for text, style in ((name, TITLE), (rest, "")):
            for line in textwrap.wrap(text, width):
                canvas.put(len(canvas.rows), 0, line, style)
    for line in flowed(map(say, figure.legend), width, say(" · ")):
        canvas.put(len(canvas.rows), 0, line, "dim")
    canvas.paste(_drawing(figure, width, say), len(canvas.rows), 0)
    return canvas


def _drawing(figure: Figure, width: int, say: _Say) -> _Canvas:
    """The stacks: one; two side by side, the encoder's vectors led across; or, where that is too narrow, in a row."""
    painter = _Painter(_Canvas(say), figure.differing)
    if len(figure.stacks) == 1:
        painter.stack(figure.stacks[0], 0, 0, min(width, WIDEST) - 1)
        return painter.canvas
    encoder, decoder = figure.stacks
    if width < WIDTH:
        row = painter.stack(encoder, 0, 0, width - 1)
        painter.canvas.put(row, 4, "▼ to each cross attention", MEMORY)
        painter.stack(decoder, row + 2, 0, width - 1)
        return painter.canvas
    each = (min(width, 2 * WIDEST) - GUTTER) // 2
    end = painter.stack(encoder, 0, 0, each - 1)
    painter.stack(decoder, 0, each + GUTTER, 2 * each + GUTTER - 1)
    painter.lead_across(end, 4, each + 1)
    return painter.canvas


class _Columns(NamedTuple):
    """What boxes may take, and where their arrow runs; None where it passes them."""

    left: int
    right: int
    axis: int | None


class _Painter(Walk):
    """Paints boxes downwards; `y` counts rows.

    marked: ids of boxes that another model has otherwise. met: where (row, column of the left edge) a cross attention
    is met from the side. note: what happens to each sublayer's output before the sum.
    """

    def __init__(self, canvas: _Canvas, marked: Sequence[str]):
        self.canvas, self.marked, self.note = canvas, marked, ""
        self.met: list[tuple[int, int]] = []

    def stack(self, stack: Box, top: int, left: int, right: int) -> int:
        """A stack between two columns; returns the row below its last."""
        if stack.title:
            self.canvas.put(top, left, stack.title, TITLE)
            self.canvas.put(top, left + len(stack.title), f" · {stack.parameters:,} parameters")
            top += 1
        self.note = next((line for box in boxes([stack]) if box.kind == "add" for line in box.lines), "")
        at = _Columns(left, right, left + 4)
        return self.arrow(*self.sequence(stack.branches[0], at, top, []), at)

    def lead_across(self, end: int, axis: int, gutter: int) -> None:
        """The encoder's vectors, from its end to every cross attention."""
        rows = [end, *(row for row, _ in self.met)]
        first, last = min(rows), max(rows)
        self.canvas.down(first, last, gutter, MEMORY)
        turn = "┤" if first < end < last else "╯" if first < end else "╮"
        self.canvas.across(end, axis, gutter, MEMORY, f"╰{turn}")
        for row, edge in self.met:
            corner = "╭" if row == first else "╰" if row == last else "├"
            if row == end:  # there it goes straight on, and parts where others lie above or below
                corner = "─" if first == last else "┬" if row == first else "┴" if row == last else "┼"
            self.canvas.across(row, gutter, edge - 2, MEMORY, f"{corner}┼")
            self.canvas.put(row, edge - 1, "►", MEMORY)

    def arrow(self, row: int, ends: list[End], at: _Columns, note: str = "") -> int:
        """A piece of an arrow with what it carries, and a note beside or below that; returns the row below."""
        if not ends or ends[0].told or ends[0].carries is None:
            return row
        room = at.right - at.axis - 2
        said = _shape(ends[0].carries, room)
        self.canvas.put(row, at.axis, "│", LINE)
        self.canvas.put(row, at.axis + 2, said, SHAPE)
        beside = cell_len(said) + 2
        if note and beside + len(note) > room:
            row, beside = row + 1, 0
            self.canvas.put(row, at.axis, "│", LINE)
        self.canvas.put(row, at.axis + 2 + beside, note)
        return row + 1

    def beside(self, box: Box, at: _Columns, y: int, ends: list[End]) -> tuple[int, list[End]]:
        """Branches side by side below a line that forks; of a residual, its path down the right edge."""
        residual, [read] = box.kind == "residual", ends
        edge = at.right - 3 if residual else at.right
        each = (edge - at.left + 2) // len(box.branches)
        lefts = [at.left + i * each for i in range(len(box.branches))]
        rights = [left - 2 for left in lefts[1:]] + [edge]
        columns = [_Columns(left, right, left + at.axis - at.left) for left, right in zip(lefts, rights)]
        style, end = (RESIDUAL, at.right) if residual else (LINE, columns[-1].axis)
        self.canvas.across(y, at.axis + 1, end - 1, style)
        self.canvas.put(y, at.axis, "├", LINE)
        forks = [column.axis for column in columns[1:]]
        self.canvas.put(y, at.axis + 2, f" {_shape(read.carries, [*forks, end][0] - at.axis - 6)} ", SHAPE)
        for fork in forks:
            self.canvas.put(y, fork, "┬", style)
        self.canvas.put(y, end, "╮", style)
        flowing = []
        for branch, column in zip(box.branches, columns):
            below, live = self.sequence(branch, column, y + 1, [read._replace(told=True)])
            below = self.arrow(below, live, column, self.note)
            flowing += [(end.x, below) for end in live]
        bottom = max(below for _, below in flowing)
        for x, below in flowing:
            self.canvas.down(below, bottom - 1, x, LINE)
        if residual:
            self.canvas.down(y + 1, bottom - 1, at.right, RESIDUAL)
        return bottom, [End(x, bottom, None) for x, _ in flowing]

    def join(self, box: Box, at: _Columns, y: int, ends: list[End]) -> int:
        """⊕: what flows in all these columns, and down the rail, becomes one."""
        self.canvas.across(y, at.axis, at.right, RESIDUAL, "⊕╯")
        self.canvas.put(y, at.axis + 1, "◄", RESIDUAL)
        for end in ends[1:]:
            self.canvas.put(y, end.x, "┴", RESIDUAL)
        return y + 1

    def pill(self, box: Box, at: _Columns, y: int, ends: list[End]) -> int:
        """What goes in or comes out."""
        row = self.arrow(y, ends, at)
        self.canvas.put(row, at.axis, box.title, TITLE)
        return row + 1

    def frame(self, box: Box, at: _Columns, y: int, ends: list[End]) -> int:
        """A layer opened up."""
        row = self.arrow(y, ends, at)
        self.border(box, row, at, box.title)
        inside = _Columns(at.left + 2, at.right - 2, at.axis)
        below, _ = self.sequence(box.branches[0], inside, row + 1, [ends[0]._replace(told=True)])
        self.close(row + 1, below, at)
        return below + 1

    def leaf(self, box: Box, at: _Columns, y: int, ends: list[End]) -> int:
        """A closed box, on the arrow."""
        return self.box(box, self.arrow(y, ends, at), at)

    def aside(self, box: Box, at: _Columns, y: int, ends: list[End]) -> tuple[int, list[End]]:
        """A box beside the arrow, which passes it."""
        row = self.arrow(y, ends, at)
        below = self.box(box, row, _Columns(at.axis + 3, at.right, None))
        self.canvas.down(row, below - 1, at.axis, LINE)
        return below, [ends[0]._replace(told=True)]

    def box(self, box: Box, row: int, at: _Columns) -> int:
        """A box with its lines, and a row for each step inside. One with little to say is two rows high."""
        say, title, room = self.canvas.say, box.title, at.right - at.left - 3
        beside = " · ".join([title, *box.lines])
        if not box.branches and len(beside) + len(self.number(box, room)) + 5 <= room:
            title, lines = beside, []
        else:
            lines = [*flowed(map(say, box.lines), room, say(" · ")), *self.steps(box, room)]
        if not self.border(box, row, at, title):
            lines.insert(0, self.number(box, room))
        if box.kind == "cross":
            self.met.append((row + 1, at.left))
        for i, line in enumerate(lines, 1):
            self.canvas.put(row + i, at.left + 2, line)
        self.close(row + 1, row + 1 + len(lines), at)
        return row + 2 + len(lines)

    def border(self, box: Box, row: int, at: _Columns, title: str) -> bool:
        """The upper edge: an arrow's head, the title, and the parameters if they find room there (returned)."""
        marked, first = box.id in self.marked, at.left + 2
        self.canvas.across(row, at.left, at.right, LINE, "┌┐")
        if at.axis is not None:
            first = at.axis + 2
            self.canvas.put(row, at.axis, "▼", LINE)
        title = self.canvas.say(f" {'≠ ' * marked}{title} ")
        if first + cell_len(title) > at.right - 1:
            title = title[: at.right - 2 - first] + " "
        room = at.right - first - cell_len(title) - 4
        said = self.number(box, room - 1)
        self.canvas.put(row, first, title, MARK if marked else TITLE)
        if len(said) <= room:
            self.canvas.put(row, at.right - len(said) - 3, f" {said} ")
        return len(said) <= room

    def close(self, first: int, last: int, at: _Columns) -> None:
        """The sides, and the lower edge in the row `last`."""
        self.canvas.down(first, last - 1, at.left, LINE)
        self.canvas.down(first, last - 1, at.right, LINE)
        self.canvas.across(last, at.left, at.right, LINE, "└┘")
        if at.axis is not None:
            self.canvas.put(last, at.axis, "┬", LINE)

    def number(self, box: Box, room: int) -> str:
        """A box's own number, in as many words as there is room for."""
        said = numbers(box)
        return self.canvas.say(next((one for one in said if len(one) <= room), said[-1]))

    def steps(self, box: Box, room: int) -> list[str]:
        """The steps inside a closed box: what each is called, the shape that it gives, its parameters."""
        leaves = [one for branch in box.branches for one in boxes(branch) if not one.branches]
        titles = [self.canvas.say(one.title) for one in leaves]
        counts = [self.number(one, 0) if one.parameters else "" for one in leaves]
        weights = ["  ".join(weight.said for weight in one.weights) for one in leaves]
        shapes = [one.gives.said(brief=True) for one in leaves]
        full = [f"[{','.join(one.gives.axes)}]".ljust(9) + f" = {shape}" for one, shape in zip(leaves, shapes)]
        for columns in ([titles, full, weights, counts], [titles, full, counts], [titles, shapes, counts]):
            if rows := _columns(columns, room):
                return rows
        said: list[str] = []
        for title, shape, number in zip(titles, shapes, counts):
            given = f"{shape} {number}".rstrip()
            if len(title) + 1 + len(given) <= room:
                said.append(title + given.rjust(room - len(title)))
            else:
                said += [*textwrap.wrap(title, room), *(one.rjust(room) for one in flowed([shape, number], room, " "))]
        return said


def _shape(carried: Flow | None, room: int) -> str:
    """`[B,T,C] = [B,T,768]`, or the sizes alone where there is no room, or all are letters."""
    return "" if carried is None else carried.said(brief=len(carried.said()) > room)


def _columns(columns: list[list[str]], room: int) -> list[str]:
    """Texts below one another in columns, the last to the right; none where they don't fit."""
    *widths, last = [max(map(cell_len, column), default=0) for column in columns]
    rest = room - sum(width + 2 for width in widths)
    if last > rest:
        return []
    return ["  ".join([*map(str.ljust, row[:-1], widths), row[-1].rjust(rest)]) for row in zip(*columns)]


def _table(report: DrawReport, width: int, say: _Say, screen: Screen) -> None:
    """A row a choice; those that differ are marked."""
    first = max(len(say(row.name)) for row in report.rows)
    each = (min(width, WIDEST) - first - 6) // 2

    def print_row(name: str, values: Iterable[str], style: str, sign: str = "") -> None:
        wrapped = [textwrap.wrap(say(value), each) for value in values]
        for mark, title, one, other in zip_longest([say(sign)], [say(name)], *wrapped, fillvalue=""):
            cells = (f"{title:<{first}}  ", style), (f"{one:<{each}} ", style), (other, style)
            screen.line((f"{mark:<2} ", MARK), *cells)

    print_row("", [figure.model.name for figure in report.figures], TITLE)
    for row in report.rows:
        print_row(row.name, [value or "none" for value in row.values], "dim" * row.same, "≠" * (not row.same))
    differing = sum(not row.same for row in report.rows)
    screen.line((say(f"{differing} of {len(report.rows)} rows differ (≠)"), "dim"))
