"""`trace --map` in a terminal: one map with its tokens on both axes, or a grid of small ones.

A cell holds its number where all of them find room; else it is a block two columns wide; else half a block, so that two
rows share a line. Without colour it is a sign.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from rich.cells import cell_len

from gptcli.errors import GptcliError
from gptcli.render.common import fed, title
from gptcli.render.screen import Part, Screen
from gptcli.render.shades import cell, halves, in_color, joined, numbered, ramp
from gptcli.render.signs import printable
from gptcli.report.maps import Axis, HeadMap, MapReport
from gptcli.report.trace import Check
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


# What finds room


def room(screen: Screen) -> int:
    """The columns that there are."""
    return screen.width or PIPE


def fitted(
    screen: Screen, rows: Axis, columns: Axis, tokens: tuple[list[Token], list[Token]], sink: bool, grid: bool
) -> tuple[Axis, Axis]:
    """Rows and columns in the smallest cells with which a map (or a map of a grid) finds room on the screen.

    tokens: of the queries and of the keys; sink: there is a column for it. A text's map on itself stays as tall as it
    is wide.
    """
    queries, keys = rows.stop - rows.start, columns.stop - columns.start
    alike = keys <= queries <= keys + 1  # without key 0 there is one less
    tall = 1 if in_color(screen) else 2  # a sign is twice as tall as half a block
    most = min(max(SIDE, room(screen) // 4), room(screen)) if grid else max(room(screen) - 2 * NAME, 8)
    lines = rows.fitted(most if queries <= TALL else most // tall)
    for pool in range(1, keys + 1):
        across = replace(columns, pool=pool)
        down = replace(rows, pool=pool * tall) if alike and pool > 1 else lines
        if across.cells <= most if grid else _look(screen, down, across, tokens, sink):
            return down, across
    return lines, replace(columns, pool=keys)


def given(
    screen: Screen,
    rows: Axis,
    columns: Axis,
    tokens: tuple[list[Token], list[Token]],
    sink: bool,
    grid: bool,
    pool: int,
    shown: bool,
) -> tuple[Axis, Axis]:
    """Rows and columns in cells of so many positions. shown: they will be, and a terminal may be too narrow for them,
    for which GptcliError is raised.
    """
    queries, keys = replace(rows, pool=pool), replace(columns, pool=pool)
    fits = keys.cells + 2 * sink <= room(screen) if grid else _look(screen, queries, keys, tokens, sink)
    if shown and screen.width is not None and not fits:
        _, least = fitted(screen, rows, columns, tokens, sink, grid)
        said = f"--pool {pool}: {keys.cells} columns are more than this terminal's {screen.width} hold"
        raise GptcliError(said, f"--pool {least.pool} fits, and --cols A:B shows a part")
    return queries, keys


def _look(
    screen: Screen, rows: Axis, columns: Axis, tokens: tuple[list[Token], list[Token]], sink: bool
) -> Look | None:
    """The largest way of drawing that fits; None where none does."""
    queries, _ = tokens
    single = rows.pool == columns.pool == 1
    if single and max(rows.cells, columns.cells) <= NUMBERED:
        width = screen.digits + (4 if in_color(screen) else 5)
        label = _widest(screen, rows, queries, 1)
        if label + 1 + (columns.cells + sink) * width <= room(screen):
            return Look("numbers", width, label)
    small: tuple[Literal["cells", "halves"], int] = ("halves", 1) if in_color(screen) else ("cells", 1)
    for kind, width in (("cells", 2), small):
        look = Look(kind, width, _widest(screen, rows, queries, 2 if kind == "halves" else 1))
        short = width == 1 or rows.cells <= TALL or not in_color(screen)
        if short and look.label + 1 + columns.cells * width + SINK * sink <= room(screen):
            return look
    return None


def _widest(screen: Screen, axis: Axis, tokens: list[Token], per_line: int) -> int:
    return max(cell_len(label) for label in _labels(screen, axis, tokens, per_line))


# Tokens on the axes


def _name(screen: Screen, token: Token, most: int = NAME) -> str:
    """A token in at most so many columns, in signs that the screen's encoding has; one without a text by its id."""
    return shortened(screen, token.token or str(token.id), most)


def shortened(screen: Screen, text: str, most: int) -> str:
    """A text in at most so many columns, in signs that the screen's encoding has; one of them says where it goes on."""
    shown, more = printable(text, screen.stream.encoding), printable("…", screen.stream.encoding)
    if cell_len(shown) <= most:
        return shown
    while text and cell_len(shown + more) > most:
        text = text[:-1]
        shown = printable(text, screen.stream.encoding)
    return (shown + more)[:most]


def _labels(screen: Screen, axis: Axis, tokens: list[Token], per_line: int) -> list[str]:
    """For each line of rows its positions and their tokens: the first alone, and a sign, where cells hold several."""
    lines = [range(i, min(i + per_line, axis.cells)) for i in range(0, axis.cells, per_line)]
    spans = [range(axis.span(line[0])[0], axis.span(line[-1])[-1] + 1) for line in lines]
    dash, more = printable("–", screen.stream.encoding), printable("…", screen.stream.encoding)
    places = [f"{span[0]}{dash}{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    width = max(map(len, places))
    names = []
    for span in spans:
        if axis.pool == 1:
            most = NAME if per_line == 1 else NAME - 2
            names.append(" ".join(_name(screen, tokens[position], most) for position in span))
        else:
            names.append(_name(screen, tokens[span[0]], NAME - 2) + more * (len(span) > 1))
    return [f"{place:>{width}} {name}" for place, name in zip(places, names)]


def _letters(text: str) -> list[str]:
    """A text's letters, each with the signs that have no width of their own."""
    found: list[str] = []
    for letter in text:
        if found and cell_len(letter) == 0:
            found[-1] += letter
        else:
            found.append(letter)
    return found


def _upright(screen: Screen, axis: Axis, tokens: list[Token], width: int) -> Iterator[str]:
    """Positions and tokens above columns too narrow for them, written downwards."""
    places = [[str(axis.span(i)[0]), _name(screen, tokens[axis.span(i)[0]])] for i in range(axis.cells)]
    longest = max(len(place) for place, _ in places)
    columns = [[*place.rjust(longest), *_letters(name)] for place, name in places]
    for line in range(max(map(len, columns))):
        signs = (column[line] if line < len(column) else " " for column in columns)
        yield "".join(one + " " * (width - cell_len(one)) for one in signs).rstrip()


def _ticks(screen: Screen, axis: Axis, tokens: list[Token], width: int) -> Iterator[str]:
    """Positions and tokens of some columns, as many as stand side by side, and marks below them."""
    step = -(-(NAME + 2) // width)
    names, marks = "", ""
    for i in range(0, axis.cells, step):
        position, left = axis.span(i)[0], (axis.cells - i) * width
        if i and left < len(str(position)):
            break
        most = step * width - 1 if i + step < axis.cells else max(left, len(str(position)))
        names += " " * (i * width - cell_len(names))
        name = f" {_name(screen, tokens[position])}" if most > len(str(position)) + 2 else ""
        names += shortened(screen, f"{position}{name}", most)
        marks += " " * (i * width - len(marks)) + "│"
    yield names
    yield marks


def _header(screen: Screen, axis: Axis, tokens: list[Token], look: Look) -> list[str]:
    """What stands above the columns."""
    if look.kind == "numbers":
        places = (axis.span(i)[0] for i in range(axis.cells))
        named = [f"{i} {_name(screen, tokens[i], look.width - 2 - len(str(i)))}" for i in places]
        return ["".join(" " * (look.width - cell_len(one)) + one for one in named)]
    if look.width > 1 and axis.pool == 1:
        return list(_upright(screen, axis, tokens, look.width))
    return list(_ticks(screen, axis, tokens, look.width))


# A map


def _cells(screen: Screen, report: MapReport, one: HeadMap, look: Look) -> Iterator[Line]:
    """The lines of a map, without labels."""
    scale, sinks = report.scale, one.sink or [None] * len(one.cells)
    for i in range(0, len(one.cells), look.per_line):
        row = one.cells[i]
        if look.kind == "numbers":
            sink = [] if one.sink is None else [sinks[i]]
            yield joined([part for x in (*row, *sink) for part in numbered(screen, scale, x, look.width)])
            continue
        if look.kind == "cells":
            line = [cell(screen, scale, x, look.width) for x in row]
            end = [cell(screen, scale, sinks[i], look.width)]
        else:
            below = one.cells[i + 1] if i + 1 < len(one.cells) else [None] * len(row)
            line = [halves(screen, scale, *pair) for pair in zip(row, below)]
            end = [halves(screen, scale, sinks[i], sinks[i + 1] if i + 1 < len(sinks) else None)]
        yield joined([*line, *([] if one.sink is None else [" ", *end])])


def _large(screen: Screen, report: MapReport, one: HeadMap) -> None:
    """One map with tokens on both axes."""
    tokens = report.labels(report.rows), report.labels(report.columns)
    look = _look(screen, report.rows, report.columns, tokens, one.sink is not None)
    look = look or Look("halves" if in_color(screen) else "cells", 1, NAME)  # wider than the screen, as was asked
    between = "" if look.kind == "numbers" and not in_color(screen) else " "
    labels = _labels(screen, report.rows, tokens[0], look.per_line)
    header = _header(screen, report.columns, tokens[1], look)
    if one.sink is not None:
        named = f"{'sink':>{look.width}}" if look.kind == "numbers" else " sink"
        header[0] += " " * (report.columns.cells * look.width - cell_len(header[0])) + named
    for line in header:
        screen.line(" " * look.label + between, (line, "cyan"))
    for label, line in zip(labels, _cells(screen, report, one, look)):
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
    grid = len(report.maps) > 1
    if grid:
        fed(screen, report.tokens, report.source)
    if not grid:
        _said(screen, [head_title(report, report.maps[0]), *_masked(report, report.maps)], "bold")
        _large(screen, report, report.maps[0])
    elif all(len(layer) == 1 for layer in report.layers):
        _said(screen, [f"{_kind(report)}Head {report.maps[0].head} of {len(report.maps)} layers"], "bold")
        _grid(screen, report, report.maps)
    else:
        for layer in report.layers:
            _said(screen, [layer_title(report, layer), *_masked(report, layer)], "bold")
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
    i = one.layer_index
    return (
        f"{_kind(report)}Layer {i + 1} of {report.n_layers} ({one.path}) · Head {one.head} of {one.n_heads}"
        f" = L{i}H{one.head}{kv}"
    )


def layer_title(report: MapReport, layer: Sequence[HeadMap]) -> str:
    """The same for all the heads of a layer."""
    one = layer[0]
    return f"{_kind(report)}Layer {one.layer_index + 1} of {report.n_layers} ({one.path}) · {len(layer)} heads"


def _masked(report: MapReport, maps: Sequence[HeadMap]) -> list[str]:
    """What hides keys beyond what a causal mask hides, and what takes weight beside them."""
    one = maps[0]
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
