"""`draw` in a terminal: boxes from top to bottom, the residual path as a line at their side; a table of two models.

All is painted on a canvas of cells, in signs of one column each, so that a terminal without box-drawing signs gets the
same picture in ASCII.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import field

from rich.cells import cell_len

from gptcli.data import entry, mutable
from gptcli.render.screen import Part, Screen, exact
from gptcli.render.signs import harmless, printable
from gptcli.report.draw import Box, DrawReport, Figure, Flow, Row, boxes

WIDTH = 80  # of a drawing in a pipe
NARROWEST = 48
WIDEST = 112  # a box's text is no easier to read beyond
TWO_MODELS = 120  # columns from which two models stand side by side
GUTTER = 4  # between an encoder and its decoder
SIGNS = "┌┐└┘─│├┤┬┴┼╭╮╰╯▼◄►⊕≠·×→θε√…–²"  # what a drawing needs; an encoding that lacks one gets ASCII alone

LINE, TITLE, SHAPE, RESIDUAL, MARK, MEMORY = "dim", "bold", "cyan", "yellow", "bold magenta", "green"


def draw(report: DrawReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    say = _Say(screen.stream.encoding)
    width = max(screen.width or WIDTH, NARROWEST)
    if len(report.figures) == 1:
        _show(_headed(report.figures[0], width, say), screen)
        return
    if width >= TWO_MODELS:
        half = (width - 2) // 2
        sides = [_headed(figure, half, say) for figure in report.figures]
        canvas = _Canvas()
        for left, side in zip((0, half + 2), sides):
            canvas.paste(side, 0, left)
        _show(canvas, screen)
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
        elif box.kind in ("split", "residual"):
            said.append(" | ".join(_chain(branch) for branch in box.branches))
        elif box.kind != "aside":
            said.append(box.title)
    return " → ".join(said)


@entry
class _Say:
    """A text in signs that the stream has, all of one column: its width is then what it will be."""

    encoding: str | None

    def __call__(self, text: str) -> str:
        return printable(harmless(text), self.encoding if printable(SIGNS, self.encoding) == SIGNS else "ascii")


class _Canvas:
    """Cells (sign, style) in rows that grow as they are painted; a sign of two columns leaves the next cell empty."""

    def __init__(self):
        self.rows: list[list[tuple[str, str]]] = []

    def put(self, row: int, column: int, text: str, style: str = "") -> None:
        self.rows += [[] for _ in range(row + 1 - len(self.rows))]
        cells = self.rows[row]
        for sign in text:
            wide = cell_len(sign)
            cells += [(" ", "")] * (column + wide - len(cells))
            cells[column : column + wide] = [(sign, style), ("", style)][:wide]
            column += wide

    def across(self, row: int, first: int, last: int, style: str, sign: str = "─") -> None:
        self.put(row, first, sign * (last + 1 - first), style)

    def down(self, first: int, last: int, column: int, style: str) -> None:
        for row in range(first, last + 1):
            self.put(row, column, "│", style)

    def paste(self, other: "_Canvas", top: int, left: int) -> None:
        for row, cells in enumerate(other.rows):
            for column, (sign, style) in enumerate(cells):
                if sign.strip():
                    self.put(top + row, left + column, sign, style)

    def lines(self) -> Iterable[list[Part]]:
        """Each row as runs of one style."""
        for cells in self.rows:
            parts: list[tuple[str, str]] = []
            for sign, style in cells:
                if parts and parts[-1][1] == style:
                    parts[-1] = (parts[-1][0] + sign, style)
                else:
                    parts.append((sign, style))
            yield parts


def _show(canvas: _Canvas, screen: Screen) -> None:
    for parts in canvas.lines():
        screen.line(*parts)


def _headed(figure: Figure, width: int, say: _Say) -> _Canvas:
    """A drawing with its title above."""
    model, canvas = figure.model, _Canvas()
    name, rest = say(model.name), say(f"({model.source}) · {exact(model.parameters)} parameters")
    if cell_len(name) + 1 + cell_len(rest) <= width:
        canvas.put(0, 0, name, "bold")
        canvas.put(0, cell_len(name) + 1, rest)
    else:
        lines = [
            *((line, "bold") for line in textwrap.wrap(name, width)),
            *((line, "") for line in textwrap.wrap(rest, width)),
        ]
        for row, (line, style) in enumerate(lines):
            canvas.put(row, 0, line, style)
    for line in _flowed(map(say, figure.legend), width, say(" · ")):
        canvas.put(len(canvas.rows), 0, line, "dim")
    canvas.paste(_drawing(figure, width, say), len(canvas.rows), 0)
    return canvas


def _drawing(figure: Figure, width: int, say: _Say) -> _Canvas:
    """The stacks: one; two side by side, the encoder's vectors led across; or, where that is too narrow, in a row."""
    painter = _Painter(say, frozenset(figure.differing))
    if len(figure.stacks) == 1:
        painter.stack(figure.stacks[0], 0, 0, min(width, WIDEST) - 1)
        return painter.canvas
    encoder, decoder = figure.stacks
    each = (min(width, 2 * WIDEST) - GUTTER) // 2
    if width < WIDTH:
        row = painter.stack(encoder, 0, 0, width - 1)
        painter.canvas.put(row, 4, say("▼ to each cross attention"), MEMORY)
        painter.stack(decoder, row + 2, 0, width - 1)
        return painter.canvas
    end = painter.stack(encoder, 0, 0, each - 1)
    painter.stack(decoder, 0, each + GUTTER, 2 * each + GUTTER - 1)
    painter.lead_across(end, 4, each + 1)
    return painter.canvas


@mutable
class _Painter:
    """Paints boxes downwards.

    marked: ids of boxes that another model has otherwise. met: where (row, column of the left edge) a cross attention
    is met from the side.
    """

    say: _Say
    marked: frozenset[str]
    canvas: _Canvas = field(default_factory=_Canvas)
    met: list[tuple[int, int]] = field(default_factory=list)

    def put(self, row: int, column: int, text: str, style: str = "") -> None:
        self.canvas.put(row, column, self.say(text), style)

    def stack(self, stack: Box, top: int, left: int, right: int) -> int:
        """A stack between two columns; returns the row below its last."""
        if stack.title:
            self.put(top, left, stack.title, TITLE)
            self.put(top, left + len(stack.title), f" · {stack.parameters:,} parameters")
            top += 1
        ends = stack.branches[0][-1].kind == "output"
        row, _ = self.sequence(stack.branches[0], top, left, right, left + 4, open_end=not ends)
        return row

    def lead_across(self, end: int, axis: int, gutter: int) -> None:
        """The encoder's vectors, from its end to every cross attention."""
        first, last = min(end, *(row for row, _ in self.met)), max(end, *(row for row, _ in self.met))
        self.canvas.down(first, last, gutter, MEMORY)
        self.canvas.across(end, axis, gutter, MEMORY)
        self.put(end, axis, "╰", MEMORY)
        self.put(end, gutter, "┤" if first < end < last else "╯" if first < end else "╮", MEMORY)
        for row, edge in self.met:
            corner = "╭" if row == first else "╰" if row == last else "├"
            # On the row where the encoder ends it goes straight on, and parts where others lie above or below.
            level = "─" if first == last else "┬" if row == first else "┴" if row == last else "┼"
            self.put(row, gutter, level if row == end else corner, MEMORY)
            self.canvas.across(row, gutter + 1, edge - 2, MEMORY)
            self.put(row, edge - 2, "┼", MEMORY)
            self.put(row, edge - 1, "►", MEMORY)

    def sequence(
        self, several: Sequence[Box], top: int, left: int, right: int, axis: int,
        given: Flow | None = None, open_end: bool = False, note: str = "",
    ) -> tuple[int, list[int]]:  # fmt: skip
        """Boxes in a row, and between them an arrow with what it carries.

        given: what the first one reads; open_end: an arrow leaves the last too, with a note. Returns the row below, and
        the columns in which something flows on: one, or one a branch.
        """
        row, axes, rail = top, [axis], right
        for number, box in enumerate(several):
            following = several[number + 1] if number + 1 < len(several) else None
            if box.kind in ("residual", "split"):
                rail = right if box.kind == "residual" else rail
                note_here = following.lines[0] if following and following.kind == "add" and following.lines else note
                row, axes = self.beside(box, given, row, left, right, axis, note_here)
                continue
            if box.kind == "add":
                row = self.join(row, axes, rail)
                axes = [axis]
            elif box.kind in ("input", "output"):
                self.put(row, axis, box.title, TITLE)
                row += 1
            elif box.kind == "layer":
                row = self.frame(box, row, left, right, axis, given)
            elif box.kind == "aside":
                row = self.aside(box, row, axis, right)
                continue
            else:
                row = self.box(box, row, left, right, axis)
            given = box.gives or given
            forks = following is not None and following.kind in ("residual", "split")
            if (following is not None and not forks) or (following is None and open_end):
                row = self.flow(row, axis, right, given, note if following is None else "")
        return row, axes

    def flow(self, row: int, axis: int, right: int, carried: Flow | None, note: str = "") -> int:
        """A piece of an arrow, what it carries, and a note beside or below that."""
        room = right - axis - 2
        said = self.shape(carried, room)
        self.put(row, axis, "│", LINE)
        self.put(row, axis + 2, said, SHAPE)
        if not note:
            return row + 1
        beside = cell_len(said) + 2
        if beside + len(note) > room:
            row, beside = row + 1, 0
            self.put(row, axis, "│", LINE)
        self.put(row, axis + 2 + beside, note)
        return row + 1

    def shape(self, carried: Flow | None, room: int) -> str:
        """`[B,T,C] = [B,T,768]`, or the sizes alone where there is no room, or all are letters."""
        if carried is None:
            return ""
        return carried.said(brief=len(carried.said()) > room)

    def beside(
        self, box: Box, read: Flow | None, row: int, left: int, right: int, axis: int, note: str
    ) -> tuple[int, list[int]]:
        """Branches side by side below a line that forks; of a residual, its path down the right edge."""
        residual, number = box.kind == "residual", len(box.branches)
        edge = right - 3 if residual else right
        each = (edge - left + 2) // number - 1
        lefts = [left + i * (each + 1) for i in range(number)]
        rights = [one + each - 1 for one in lefts[:-1]] + [edge]
        axes = [one + axis - left for one in lefts]
        style, end = (RESIDUAL, right) if residual else (LINE, axes[-1])
        self.canvas.across(row, axis + 1, end - 1, style)
        self.put(row, axis, "├", LINE)
        self.put(row, axis + 2, f" {self.shape(read, [*axes, end][1] - axis - 6)} ", SHAPE)
        for column in axes[1:]:
            self.put(row, column, "┬", style)
        self.put(row, end, "╮", style)
        ends, live = [], []
        for branch, first, last, column in zip(box.branches, lefts, rights, axes):
            below, flowing = self.sequence(branch, row + 1, first, last, column, read, True, note)
            ends.append(below)
            live += [(one, below) for one in flowing]
        bottom = max(ends)
        for column, below in live:
            self.canvas.down(below, bottom - 1, column, LINE)
        if residual:
            self.canvas.down(row + 1, bottom - 1, right, RESIDUAL)
        return bottom, [column for column, _ in live]

    def join(self, row: int, axes: list[int], rail: int) -> int:
        """⊕: what flows in all these columns, and down the rail, becomes one."""
        self.canvas.across(row, axes[0] + 1, rail - 1, RESIDUAL)
        self.put(row, axes[0], "⊕", RESIDUAL)
        self.put(row, axes[0] + 1, "◄", RESIDUAL)
        for column in axes[1:]:
            self.put(row, column, "┴", RESIDUAL)
        self.put(row, rail, "╯", RESIDUAL)
        return row + 1

    def frame(self, box: Box, row: int, left: int, right: int, axis: int, given: Flow | None) -> int:
        """A layer opened up."""
        self.border(box, row, left, right, axis, box.title)
        below, _ = self.sequence(box.branches[0], row + 1, left + 2, right - 2, axis, given)
        self.close(row + 1, below, left, right, axis)
        return below + 1

    def box(self, box: Box, row: int, left: int, right: int, axis: int) -> int:
        """A box with its lines, and a row for each step inside. One with little to say is two rows high."""
        title, room = box.title, right - left - 3
        beside = " · ".join([title, *box.lines])
        if not box.branches and len(beside) + len(self.parameters(box, room)) + 9 <= right - left + 1:
            title, lines = beside, []
        else:
            lines = [(line, "") for line in _flowed(map(self.say, box.lines), room, self.say(" · "))]
            lines += self.steps(box, room)
        if not self.border(box, row, left, right, axis, title):
            lines.insert(0, (self.parameters(box, room), ""))
        if box.kind == "cross":
            self.met.append((row + 1, left))
        for line, style in lines:
            row += 1
            self.put(row, left + 2, line, style)
        self.close(row + 1 - len(lines), row + 1, left, right, axis)
        return row + 2

    def aside(self, box: Box, row: int, axis: int, right: int) -> int:
        """A box beside the arrow, which passes it."""
        below = self.box(box, row, axis + 3, right, -1)
        self.canvas.down(row, below - 1, axis, LINE)
        return below

    def border(self, box: Box, row: int, left: int, right: int, axis: int, title: str) -> bool:
        """The upper edge: an arrow's head, the title, and the parameters if they find room there (returned)."""
        marked = box.id in self.marked
        self.canvas.across(row, left + 1, right - 1, LINE)
        self.put(row, left, "┌", LINE)
        self.put(row, right, "┐", LINE)
        if axis >= 0:
            self.put(row, axis, "▼", LINE)
        at = max(axis, left) + 2
        title = self.say(f" {'≠ ' * marked}{title} ")
        if at + cell_len(title) > right - 1:
            title = title[: right - 2 - at] + " "
        said = self.parameters(box, right - at - cell_len(title) - 5)
        self.canvas.put(row, at, title, MARK if marked else TITLE)
        fits = at + cell_len(title) + len(said) + 4 <= right
        if said and fits:
            self.put(row, right - len(said) - 3, f" {said} ")
        return fits

    def close(self, first: int, last: int, left: int, right: int, axis: int) -> None:
        """The sides, and the lower edge in the row `last`."""
        for column in (left, right):
            self.canvas.down(first, last - 1, column, LINE)
        self.canvas.across(last, left + 1, right - 1, LINE)
        self.put(last, left, "└", LINE)
        self.put(last, right, "┘", LINE)
        if axis >= 0:
            self.put(last, axis, "┬", LINE)

    def parameters(self, box: Box, room: int) -> str:
        """A box's own number, in as many words as there is room for."""
        if box.tied_to:
            said = ["0 new"] if box.parameters == 0 else [f"{box.parameters:,} new"]
        elif box.kind in ("layer", "folded") and box.times > 1:
            total = box.parameters * box.times
            said = [f"{box.times:,} × {box.parameters:,} = {exact(total)}", f"{box.times:,} × {box.parameters:,}"]
        elif box.times > 1:
            said = [f"{box.times:,} × {box.parameters:,}"]
        else:
            said = [exact(box.parameters), f"{box.parameters:,}"]
        return self.say(next((one for one in said if len(one) <= room), said[-1]))

    def steps(self, box: Box, room: int) -> list[tuple[str, str]]:
        """The steps inside a closed box: what each is called, the shape that it gives, its parameters."""
        leaves = [one for branch in box.branches for one in boxes(branch) if not one.branches]
        counts = [self.parameters(one, 0) if one.parameters else "" for one in leaves]
        titles = [self.say(one.title) for one in leaves]
        shapes = [self.shape(one.gives, 0) for one in leaves]
        full = [
            f"[{','.join(one.gives.axes)}]".ljust(9) + f" = {shape}" for one, shape in zip(leaves, shapes) if one.gives
        ]
        weights = ["  ".join(weight.said for weight in one.weights) for one in leaves]
        for columns in ([titles, full, weights, counts], [titles, full, counts], [titles, shapes, counts]):
            rows = _columns(columns, room) if columns and all(len(one) == len(leaves) for one in columns) else None
            if rows is not None:
                return [(row, "") for row in rows]
        said: list[str] = []
        for title, shape, number in zip(titles, shapes, counts):
            given = f"{shape} {number}".rstrip()
            if len(title) + 1 + len(given) <= room:
                said.append(title + given.rjust(room - len(title)))
            else:
                said += [*textwrap.wrap(title, room), *(one.rjust(room) for one in _flowed([shape, number], room, " "))]
        return [(line, "") for line in said]


def _columns(columns: list[list[str]], room: int) -> list[str] | None:
    """Texts below one another in columns, the last to the right; None where they don't fit."""
    widths = [max(map(cell_len, column), default=0) for column in columns]
    used = sum(widths) + 2 * (len(widths) - 1)
    if used > room:
        return None
    widths[-1] += room - used
    rows = zip(*columns)
    return ["  ".join([*(t.ljust(w) for t, w in zip(row, widths[:-1])), row[-1].rjust(widths[-1])]) for row in rows]


def _flowed(chunks: Iterable[str], room: int, gap: str) -> list[str]:
    """Chunks in lines of that width, `gap` between them."""
    lines: list[str] = []
    for chunk in chunks:
        if lines and cell_len(lines[-1] + gap + chunk) <= room:
            lines[-1] += gap + chunk
        else:
            lines += textwrap.wrap(chunk, room)
    return lines


def _table(report: DrawReport, width: int, say: _Say, screen: Screen) -> None:
    """A row a choice; those that differ are marked."""
    names = [say(row.name) for row in report.rows]
    first = max(map(len, names))
    each = (min(width, WIDEST) - first - 6) // 2
    mark = say("≠")

    def print_row(name: str, values: Sequence[str], row: Row | None) -> None:
        wrapped = [textwrap.wrap(value, each) or [""] for value in values]
        style = TITLE if row is None else "dim" if row.same else ""
        for i in range(max(map(len, wrapped))):
            cells = [lines[i] if i < len(lines) else "" for lines in wrapped]
            sign = mark if row is not None and not row.same and i == 0 else ""
            screen.line(
                (f"{sign:<2} ", MARK),
                (f"{name if i == 0 else '':<{first}}  ", style),
                (f"{cells[0]:<{each}} ", style),
                (cells[1], style),
            )

    print_row("", [say(figure.model.name) for figure in report.figures], None)
    for name, row in zip(names, report.rows):
        print_row(name, [say(value or "none") for value in row.values], row)
    differing = sum(not row.same for row in report.rows)
    screen.line((say(f"{differing} of {len(report.rows)} rows differ ({mark})"), "dim"))
