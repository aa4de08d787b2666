"""Maps as pictures, png or svg, drawn by matplotlib without a display. The same report gives the same bytes."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import bidirectional

from gptcli.render.files import write
from gptcli.render.maps import head_title, layer_title, reading, small_title
from gptcli.report.maps import Axis, HeadMap, MapReport
from gptcli.tokens import Token

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Fonts that hold Chinese, Japanese and Korean; the first that is installed is used.
CJK = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Source Han Sans SC", "Source Han Sans"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "PingFang SC", "Hiragino Sans GB"),
    *("Hiragino Sans", "Microsoft YaHei", "SimHei", "Yu Gothic", "Arial Unicode MS", "Unifont"),
)
HUE = ("#e6eff8", "#6aaed6", "#08306b")  # from no weight to the scale's end
INK, BAD = "#1c2733", "#d62728"
NUMBERED, NAMED, NAME = 12, 48, 14  # cells a side with numbers; with a token each; letters of a token
SMALL_NAMED, SMALL_NAME = 32, 7  # the same in a grid
DPI = 150
LEFT_TO_RIGHT = "\u200e"


def write_picture(path: Path, report: MapReport) -> None:
    """`.png` or `.svg`. Raises GptcliError where the file can't be written."""
    import matplotlib

    kind = path.suffix.removeprefix(".")
    about = {"png": {"Software": "gptcli"}, "svg": {"Creator": "gptcli", "Date": None}}[kind]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the person's own settings are
        matplotlib.rcParams.update(
            {
                "svg.hashsalt": "gptcli",
                "text.parse_math": False,  # a token may be a dollar
                "font.family": [family for family, _ in fonts()],
                "font.size": 8,
                **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
            }
        )
        figure = _grid(report) if len(report.maps) > 1 else _large(report)
        draft = {"format": kind, "metadata": about, "dpi": DPI, "bbox_inches": "tight", "pad_inches": 0.15}
        write(path, lambda place: figure.savefig(place, **draft))


# Text


@cache
def fonts() -> list[tuple[str, frozenset[int]]]:
    """The families to draw with, each for the letters that those before it lack, and the letters that it has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

    installed = {font.name for font in fontManager.ttflist}
    families = ["DejaVu Sans", *[name for name in CJK if name in installed][:1]]
    return [(name, frozenset(get_font(findfont(FontProperties(family=name))).get_charmap())) for name in families]


def lettered(text: str) -> str:
    """The text with every letter that no font has escaped."""
    has = {ord(" ")}.union(*(letters for _, letters in fonts()))
    return "".join(one if ord(one) in has else f"\\u{{{ord(one):x}}}" for one in text)


def _name(token: Token, most: int) -> str:
    """So many letters of a token at most; where letters are escaped, twice as many signs."""
    text = token.token or str(token.id)
    text = text if len(text) <= most else text[: most - 1] + "…"
    whole = next(n for n in range(len(text), 0, -1) if n == 1 or len(lettered(text[:n])) <= 2 * most)
    return lettered(text[:whole]) + "…" * (whole < len(text))


def _ticks(axis: Axis, tokens: list[Token], most: int, letters: int) -> tuple[list[int], list[str]]:
    """Which cells are named, and how: all of so many at most, some of more; by so many letters."""
    step = 1 if axis.cells <= most else -(-axis.cells // (most // 2))
    cells = list(range(0, axis.cells, step))
    names = []
    for cell in cells:
        span = axis.span(cell)
        place = f"{span[0]}–{span[-1]}" if len(span) > 1 else str(span[0])
        name = _name(tokens[span[0]], letters)
        # Beside letters that run to the left, the position stays on the left of its token.
        mark = LEFT_TO_RIGHT * any(bidirectional(letter) in ("R", "AL") for letter in name)
        names.append(f"{mark}{place} {name}{'…' if len(span) > 1 else ''}")
    return cells, names


# Maps


def _colors(report: MapReport) -> dict[str, Any]:
    """Colour map and scale; below a logarithmic scale's low end is its palest."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    scale, hue = report.scale, LinearSegmentedColormap.from_list("weight", HUE)
    high = scale.high or 1.0
    norm = LogNorm(scale.low or high * 1e-4, high, clip=True) if scale.kind == "log" else Normalize(0, high, clip=True)
    return {"cmap": hue, "norm": norm}


def _matrix(one: HeadMap) -> Any:
    """The cells, and after a gap the sink's; what is hidden is masked."""
    import numpy

    sinks = [] if one.sink is None else one.sink
    rows = [[*row, *((None, sinks[i]) if sinks else ())] for i, row in enumerate(one.cells)]
    hidden = [[x is None for x in row] for row in rows]
    values = numpy.array([[0.0 if x is None else x for x in row] for row in rows])
    return numpy.ma.array(values, mask=hidden)


def _map(axes: "Axes", report: MapReport, one: HeadMap, named: tuple[int, int]) -> Any:
    """One map with its axes. named: of how many rows and columns each has its token at most; 0: none is named."""
    from numpy import ma

    colors, matrix = _colors(report), _matrix(one)
    if report.scale.kind == "log":  # a masked zero would be drawn as hidden
        matrix = ma.array(matrix.data.clip(min=colors["norm"].vmin), mask=matrix.mask)
    image = axes.imshow(matrix, interpolation="nearest", aspect="equal", **colors)
    for y, x in zip(*((matrix.data != matrix.data) & ~matrix.mask).nonzero()):
        axes.text(x, y, "NaN", ha="center", va="center", color=BAD, fontsize=6)
    for axis, of, most in ((axes.yaxis, report.rows, named[0]), (axes.xaxis, report.columns, named[1])):
        letters = NAME if len(report.maps) == 1 else SMALL_NAME
        cells, names = _ticks(of, report.labels(of), most, letters) if most else ([], [])
        if axis is axes.xaxis and one.sink is not None and most:
            cells, names = [*cells, of.cells + 1], [*names, "sink"]
        axis.set_ticks(cells, names)
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", rotation=90, length=0, pad=2)
    axes.tick_params(axis="y", length=0, pad=2)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def _large(report: MapReport) -> "Figure":
    """One map with its tokens, its numbers where they are few, and the scale."""
    from matplotlib.figure import Figure

    one = report.maps[0]
    cells = max(len(one.cells), len(one.cells[0]))
    side = min(max((0.42 if cells <= NUMBERED else 0.25) * cells, 2.4), 8.0)
    wide, tall = (side * n / cells for n in (len(one.cells[0]) + 2 * (one.sink is not None), len(one.cells)))
    figure = Figure(figsize=(max(wide, 0.5) + 1.6, max(tall, 0.5) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    image = _map(axes, report, one, (NAMED, NAMED))
    axes.set_ylabel("query")
    axes.set_xlabel("key")
    axes.xaxis.set_label_position("top")
    if cells <= NUMBERED:
        for y, row in enumerate(one.cells):
            for x, weight in enumerate(row):
                if weight is not None and weight == weight:
                    ink = "white" if report.scale.place(weight) > 0.55 else INK
                    axes.text(x, y, f"{weight:.2f}", ha="center", va="center", fontsize=6, color=ink)
    _scale(figure, image, report, axes)
    _titled(figure, report, head_title(report, one))
    return figure


def _grid(report: MapReport) -> "Figure":
    """Small maps: of a layer in rows of four or six, of several layers a row each."""
    from matplotlib.figure import Figure

    layers = report.layers
    many = len(layers) > 1 and len(layers[0]) > 1
    columns = max(map(len, layers)) if many else _columns(len(report.maps))
    rows = [list(layer) for layer in layers] if many else _rows(report.maps, columns)
    side = 1.3 if columns > 6 else 1.9
    figure = Figure(figsize=(columns * (side + 0.25) + 1.2, len(rows) * (side + 0.35) + 0.8), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    image = None
    for y, row in enumerate(rows):
        for x, axes in enumerate(grid[y]):
            if x >= len(row):
                axes.set_axis_off()
                continue
            image = _map(axes, report, row[x], (SMALL_NAMED * (x == 0), SMALL_NAMED * (y == 0)))
            axes.tick_params(labelsize=5 if report.columns.cells > NUMBERED else 6)
            axes.set_title(small_title(row[x], len(layers) > 1), fontsize=8, pad=3)
    _scale(figure, image, report, grid)
    _titled(figure, report, _grid_title(report, layers, many))
    return figure


def _grid_title(report: MapReport, layers: list[list[HeadMap]], many: bool) -> str:
    if len(layers) == 1:
        return layer_title(report, layers[0])
    heads = f"{len(report.maps)} heads" if many else f"head {report.maps[0].head}"
    return f"{len(layers)} of {report.n_layers} layers · {heads}"


def _columns(number: int) -> int:
    """As many as leave the last row full, if some do."""
    return next((n for n in (4, 6, 5, 3) if number % n == 0), min(number, 4))


def _rows(maps: Sequence[HeadMap], columns: int) -> list[list[HeadMap]]:
    return [list(maps[i : i + columns]) for i in range(0, len(maps), columns)]


def _scale(figure: "Figure", image: Any, report: MapReport, axes: Any) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.7, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label("weight, logarithmic" if report.scale.kind == "log" else "weight")
    bar.ax.tick_params(length=2, labelsize=7)
    if report.scale.kind == "log":
        bar.ax.yaxis.set_major_formatter(lambda weight, _: f"{weight:g}")
        bar.ax.yaxis.set_minor_formatter("")


def _titled(figure: "Figure", report: MapReport, said: str) -> None:
    """What is shown, of which model, and how to read it, above all maps."""
    model = report.model
    seed = f" · RANDOM WEIGHTS (seed {model.seed})" if model.seed is not None else ""
    edits = f" · EDITED ({', '.join(model.edits)})" if model.edits else ""
    about = f"{model.name} ({model.source}){seed}{edits}"
    lines = [said, about, *_wrapped(reading(report))]
    figure.suptitle("\n".join(map(lettered, lines)), x=0.01, ha="left", fontsize=8, linespacing=1.4)


def _wrapped(said: Iterator[str]) -> list[str]:
    """Two statements a line."""
    parts = list(said)
    return [" · ".join(parts[i : i + 2]) for i in range(0, len(parts), 2)]
