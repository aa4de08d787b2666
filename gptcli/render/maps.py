"""`trace --map` in a terminal: one map with its tokens on both axes, or a grid of small ones.

A cell holds its number where all of them find room; else it is a block two columns wide; else half a block, so that two
rows share a line. Without colour it is a sign.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Literal, NamedTuple

from rich.cells import cell_len

from gptcli.errors import GptcliError
from gptcli.render.common import fed, title
from gptcli.render.screen import Part, Screen
from gptcli.render.shades import cell, halves, in_color, joined, numbered, ramp
from gptcli.render.signs import printable
from gptcli.report.maps import Axis, HeadMap, MapReport
from gptcli.report.proof import Check
from gptcli.tokens import Token

PIPE = 100  # columns where there is no terminal
NUMBERED = 12  # cells a side of a map with numbers
TALL = 40  # rows of a map that have a line each, where they need not
NAME = 10  # columns of a token on an axis
SINK = 6  # columns of the sink's weights, and of what parts them from the keys'
SIDE = 24  # columns of a map in a grid, at most; more where a quarter of the screen is more
Line = list[Part]


class Look(NamedTuple):
    """How a map is drawn: what a cell is, its columns, and those of the rows' labels."""

    kind: Literal["numbers", "cells", "halves"]
    width: int
    label: int = 0

    @property
    def per_line(self) -> int:
        """Rows of the map in a line."""
        return 2 if self.kind == "halves" else 1


def room(screen: Screen) -> int:
    """The columns that there are."""
    return screen.width or PIPE


class Frame(NamedTuple):
    """What a map is drawn in: rows and columns with their tokens, and a column for a sink where there is one.

    grid: it is a small one among others.
    """

    screen: Screen
    rows: Axis
    columns: Axis
    queries: list[Token]
    keys: list[Token]
    sink: bool
    grid: bool = False

    @property
    def sizes(self) -> tuple[Axis, Axis]:
        """Its rows and its columns."""
        return self.rows, self.columns

    def pooled(self, rows: int, columns: int) -> "Frame":
        """In cells of so many queries and keys."""
        return self._replace(rows=replace(self.rows, pool=rows), columns=replace(self.columns, pool=columns))

    def fitted(self) -> "Frame":
        """In the smallest cells with which it finds room on the screen. A text's map on itself stays as tall as it is
        wide.
        """
        queries, keys = (axis.stop - axis.start for axis in self.sizes)
        alike = keys <= queries <= keys + 1  # without key 0 there is one less
        tall = 1 if in_color(self.screen) else 2  # a sign is twice as tall as half a block
        most = min(max(SIDE, room(self.screen) // 4), room(self.screen))
        most = most if self.grid else max(room(self.screen) - 2 * NAME, 8)
        lines = self.rows.fitted(most if queries <= TALL else most // tall).pool
        for pool in range(1, keys + 1):
            found = self.pooled(pool * tall if alike and pool > 1 else lines, pool)
            if found.columns.cells <= most if self.grid else found.look:
                return found
        return self.pooled(lines, keys)

    def given(self, pool: int, shown: bool) -> "Frame":
        """In cells of so many positions. shown: they will be, and a terminal may be too narrow for them, for which
        GptcliError is raised.
        """
        found = self.pooled(pool, pool)
        fits = found.columns.cells + 2 * self.sink <= room(self.screen) if self.grid else found.look
        if shown and self.screen.width is not None and not fits:
            said = (
                f"--pool {pool}: {found.columns.cells} columns are more than this terminal's {self.screen.width} hold"
            )
            raise GptcliError(said, f"--pool {self.fitted().columns.pool} fits, and --cols A:B shows a part")
        return found

    @property
    def look(self) -> Look | None:
        """The largest way of drawing that fits; None where none does."""
        colored, cells = in_color(self.screen), self.columns.cells
        if self.rows.pool == self.columns.pool == 1 and max(self.rows.cells, cells) <= NUMBERED:
            look = Look("numbers", self.screen.digits + (4 if colored else 5), self.widest(1))
            if look.label + 1 + (cells + self.sink) * look.width <= room(self.screen):
                return look
        for kind, width in (("cells", 2), ("halves" if colored else "cells", 1)):
            look = Look(kind, width, self.widest(2 if kind == "halves" else 1))
            short = width == 1 or self.rows.cells <= TALL or not colored
            if short and look.label + 1 + cells * width + SINK * self.sink <= room(self.screen):
                return look
        return None

    # Tokens on the axes

    def name(self, token: Token, most: int = NAME) -> str:
        """A token in at most so many columns, in signs that the screen's encoding has; one without a text by its id."""
        return shortened(self.screen, token.token or str(token.id), most)

    def labels(self, per_line: int) -> list[str]:
        """Of each line of rows its positions and tokens: the first alone, and a sign, where cells hold several."""
        axis, dash, more = self.rows, *(printable(sign, self.screen.stream.encoding) for sign in "–…")
        lines = [range(i, min(i + per_line, axis.cells)) for i in range(0, axis.cells, per_line)]
        spans = [range(axis.span(line[0])[0], axis.span(line[-1])[-1] + 1) for line in lines]
        places = [f"{span[0]}{dash}{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
        names, width = [], max(map(len, places))
        for span in spans:
            most = NAME if axis.pool == per_line == 1 else NAME - 2
            if axis.pool == 1:
                names.append(" ".join(self.name(self.queries[position], most) for position in span))
            else:
                names.append(self.name(self.queries[span[0]], most) + more * (len(span) > 1))
        return [f"{place:>{width}} {name}" for place, name in zip(places, names)]

    def widest(self, per_line: int) -> int:
        """Columns of the rows' labels."""
        return max(map(cell_len, self.labels(per_line)))

    def header(self, look: Look) -> list[str]:
        """What stands above the columns."""
        starts = [self.columns.span(i)[0] for i in range(self.columns.cells)]
        if look.kind == "numbers":
            named = [f"{i} {self.name(self.keys[i], look.width - 2 - len(str(i)))}" for i in starts]
            return ["".join(" " * (look.width - cell_len(one)) + one for one in named)]
        upright = look.width > 1 and self.columns.pool == 1
        return list(self.upright(starts, look.width) if upright else self.ticks(starts, look.width))

    def upright(self, starts: list[int], width: int) -> Iterator[str]:
        """Positions and tokens above columns too narrow for them, written downwards."""
        longest = max(len(str(start)) for start in starts)
        columns = [[*str(start).rjust(longest), *_letters(self.name(self.keys[start]))] for start in starts]
        for signs in zip_longest(*columns, fillvalue=" "):
            yield "".join(one + " " * (width - cell_len(one)) for one in signs).rstrip()

    def ticks(self, starts: list[int], width: int) -> Iterator[str]:
        """Positions and tokens of some columns, as many as stand side by side, and marks below them."""
        step = -(-(NAME + 2) // width)
        names, marks = "", ""
        for i in range(0, len(starts), step):
            position, left = str(starts[i]), (len(starts) - i) * width
            if i and left < len(position):
                break
            most = step * width - 1 if i + step < len(starts) else max(left, len(position))
            name = f" {self.name(self.keys[starts[i]])}" if most > len(position) + 2 else ""
            names += " " * (i * width - cell_len(names)) + shortened(self.screen, position + name, most)
            marks += " " * (i * width - len(marks)) + "│"
        yield names
        yield marks


def shortened(screen: Screen, text: str, most: int) -> str:
    """A text in at most so many columns, in signs that the screen's encoding has; one of them says where it goes on."""
    shown, more = printable(text, screen.stream.encoding), printable("…", screen.stream.encoding)
    if cell_len(shown) <= most:
        return shown
    while text and cell_len(shown + more) > most:
        text = text[:-1]
        shown = printable(text, screen.stream.encoding)
    return (shown + more)[:most]


def _letters(text: str) -> list[str]:
    """A text's letters, each with the signs that have no width of their own."""
    found: list[str] = []
    for letter in text:
        if found and cell_len(letter) == 0:
            found[-1] += letter
        else:
            found.append(letter)
    return found


# A map


def _cells(screen: Screen, report: MapReport, one: HeadMap, look: Look) -> Iterator[Line]:
    """The lines of a map, without labels; a gap stands before the sink's cells."""
    scale, gap = report.scale, [" "] if look.kind != "numbers" else []
    rows = [(row, [] if one.sink is None else [one.sink[i]]) for i, row in enumerate(one.cells)]
    for i in range(0, len(rows), look.per_line):
        row, end = rows[i]
        if look.kind == "numbers":
            row, end = ([part for x in half for part in numbered(screen, scale, x, look.width)] for half in rows[i])
        elif look.kind == "cells":
            row, end = ([cell(screen, scale, x, look.width) for x in half] for half in rows[i])
        else:
            below = rows[i + 1] if i + 1 < len(rows) else ([None] * len(row), [None] * len(end))
            row, end = ([halves(screen, scale, *pair) for pair in zip(*both)] for both in zip(rows[i], below))
        yield joined([*row, *(gap if end else []), *end])


def _large(screen: Screen, report: MapReport, one: HeadMap) -> None:
    """One map with tokens on both axes."""
    queries, keys = report.labels(report.rows), report.labels(report.columns)
    frame = Frame(screen, report.rows, report.columns, queries, keys, one.sink is not None)
    look = frame.look or Look("halves" if in_color(screen) else "cells", 1, NAME)  # wider than the screen, as was asked
    between = "" if look.kind == "numbers" and not in_color(screen) else " "
    header = frame.header(look)
    if frame.sink:
        named = f"{'sink':>{look.width}}" if look.kind == "numbers" else " sink"
        header[0] += " " * (report.columns.cells * look.width - cell_len(header[0])) + named
    for line in header:
        screen.line(" " * look.label + between, (line, "cyan"))
    for label, line in zip(frame.labels(look.per_line), _cells(screen, report, one, look)):
        screen.line((label, "cyan"), " " * (look.label - cell_len(label)) + between, *line)


# A grid


def _small_look(screen: Screen, report: MapReport) -> Look:
    if in_color(screen):
        return Look("cells", 2) if report.columns.cells <= SIDE // 3 else Look("halves", 1)
    return Look("cells", 2 if report.columns.cells <= SIDE // 2 else 1)


def _grid(screen: Screen, report: MapReport, maps: Sequence[HeadMap]) -> None:
    """Small maps side by side, as many as the screen holds."""
    look, several = _small_look(screen, report), len({one.layer_index for one in maps}) > 1
    titles = [small_title(one, several) for one in maps]
    side = report.columns.cells * look.width + (1 + look.width) * any(one.sink is not None for one in maps)
    side = max(side, *(cell_len(printable(said, screen.stream.encoding)) for said in titles))
    number = max(1, (room(screen) + 3) // (side + 3))
    for i in range(0, len(maps), number):
        blocks = [
            [[(said, "bold")], *_cells(screen, report, one, look)]
            for said, one in zip(titles[i : i + number], maps[i : i + number])
        ]
        for lines in zip(*blocks):
            parts: Line = []
            for j, line in enumerate(lines):
                parts += [*line, " " * (side - _width(screen, line) + 3) if j + 1 < len(lines) else ""]
            screen.line(*parts)


def _width(screen: Screen, line: Line) -> int:
    texts = (part if isinstance(part, str) else part[0] for part in line)
    return sum(cell_len(printable(text, screen.stream.encoding)) for text in texts)


def small_title(one: HeadMap, several: bool) -> str:
    """`H5`, `L3H5` among heads of several layers, and the key/value head of a grouped one."""
    kv = f" → kv {one.kv_head}" if one.n_kv_heads < one.n_heads else ""
    return f"{f'L{one.layer_index}' if several else ''}H{one.head}{kv}"


# The report


def draw(report: MapReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    title(screen, report.model)
    if len(report.maps) == 1:
        _said(screen, [head_title(report, report.maps[0]), *_masked(report.maps[0])], "bold")
        _large(screen, report, report.maps[0])
    else:
        fed(screen, report.tokens, report.source)
        if all(len(layer) == 1 for layer in report.layers):
            _said(screen, [f"{_kind(report)}Head {report.maps[0].head} of {len(report.maps)} layers"], "bold")
            _grid(screen, report, report.maps)
        else:
            for layer in report.layers:
                _said(screen, [layer_title(report, layer), *_masked(layer[0])], "bold")
                _grid(screen, report, layer)
    _said(screen, list(reading(report)), "dim")
    _legend(screen, report)
    proof(screen, report.proof)


def _said(screen: Screen, chunks: list[str], style: str) -> None:
    screen.flow([[(chunk, style)] for chunk in chunks], gap=" · ")


def _kind(report: MapReport) -> str:
    return {"self": "", "cross": "Cross attention · ", "encoder": "Encoder · "}[report.attention]


def head_title(report: MapReport, one: HeadMap) -> str:
    """`Layer 1 of 2 (layers.0) · Head 0 of 2 = L0H0`, and the key/value head of a grouped one."""
    kv = f" · kv head {one.kv_head}" if one.n_kv_heads < one.n_heads else ""
    return f"{_layer(report, one)} · Head {one.head} of {one.n_heads} = L{one.layer_index}H{one.head}{kv}"


def layer_title(report: MapReport, layer: Sequence[HeadMap]) -> str:
    """The same for all the heads of a layer."""
    return f"{_layer(report, layer[0])} · {len(layer)} heads"


def _layer(report: MapReport, one: HeadMap) -> str:
    return f"{_kind(report)}Layer {one.layer_index + 1} of {report.n_layers} ({one.path})"


def _masked(one: HeadMap) -> list[str]:
    """What hides keys beyond what a causal mask hides, and what takes weight beside them."""
    sides = "" if one.causal else " to each side"
    said = [] if one.window is None else [f"a window of {one.window} keys{sides}"]
    return said + (["the last column is the sink's weight"] if one.sink is not None else [])


def reading(report: MapReport) -> Iterator[str]:
    """How to read the maps: what rows and columns stand for, and what was left out or taken together."""
    rows, columns = report.rows, report.columns
    pooled = rows.pool > 1 or columns.pool > 1
    yield f"rows: {_axis('queries', 'row', rows)}"
    yield f"columns: {_axis('keys', 'column', columns)}"
    if pooled:
        how = {"max": "the largest weight", "mean": "the mean weight"}[report.pooling]
        yield f"a cell shows {how} of its pairs"
    shares = [one.share for one in report.maps]
    if columns.start > 0 or columns.stop < columns.length:
        left_out = "key 0 is left out" if report.drop_first else "other keys are left out"
        low, high = min(shares), max(shares)
        held = f"{low:.4f}" if f"{low:.4f}" == f"{high:.4f}" else f"{low:.4f} to {high:.4f}"
        yield f"{left_out}: these hold {held} of the weight"
    if any(x is None for one in report.maps for row in one.cells for x in row):
        yield "blank is hidden by the mask"


def _axis(noun: str, cell_noun: str, axis: Axis) -> str:
    of = "" if (axis.start, axis.stop) == (0, axis.length) else f" of 0–{axis.length - 1}"
    said = f"{noun} {axis.start}–{axis.stop - 1}{of}"
    return said if axis.pool == 1 else f"{said} in {axis.cells} {cell_noun}{'s' * (axis.cells != 1)} of {axis.pool}"


def _legend(screen: Screen, report: MapReport) -> None:
    scale = report.scale
    low = f"{screen.number(scale.low)}{' or less' * (scale.kind == 'log')}"
    weight = [("weight ", "dim"), low, " ", *ramp(screen, scale), " ", screen.number(scale.high)]
    screen.line(*weight, (f" {'logarithmic' if scale.kind == 'log' else 'linear'}", "dim"))


def proof(screen: Screen, checks: Sequence[Check]) -> None:
    """What was proved, in a line; what failed, a line each."""
    for one in checks:
        if not one.ok:
            screen.line(("proof FAILED ", "bold red"), f"{one.claim}: off by {one.error:.1e} > {one.allowed:.0e}")
    if checks and all(one.ok for one in checks):
        claims = [[("proof ok ", "bold green"), checks[0].claim], *([one.claim] for one in checks[1:])]
        screen.flow(claims, gap=" · ")


def verdict(report: MapReport) -> str:
    """What `-q` prints: the cells, a line a row, tabs between them, an empty line between maps. What is hidden is 0."""
    return "\n\n".join("\n".join("\t".join(repr(x or 0.0) for x in row) for row in one.cells) for one in report.maps)
