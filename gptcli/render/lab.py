"""`lab` in a terminal: each experiment's numbers, and the line of what to see."""

import math
import textwrap
from collections.abc import Iterator, Sequence

from gptcli.render.chart import curves, speaks
from gptcli.render.common import by_type, fed, title
from gptcli.render.screen import Part, Screen
from gptcli.report.lab import (
    AttentionReport,
    Cost,
    ExperimentsReport,
    HeadsOfLayers,
    HeadsReport,
    LabReport,
    Mask,
    Matrix,
    NormsReport,
    OrderReport,
    Placed,
    PositionsReport,
    ResidualReport,
    Route,
    RoutesReport,
    Rows,
    ScalingReport,
)

FOLDED = 12  # rows of a matrix that are shown without --full
WIDE = 100  # columns of a table of words in a pipe


draw, verdict = by_type()


@verdict.register
def _(report: LabReport) -> str:
    return report.see


@verdict.register
def _(report: ExperimentsReport) -> str:
    return "\n".join(one.name for one in report.experiments)


@draw.register
def _(report: ExperimentsReport, screen: Screen) -> None:
    rows = [[(f"gptcli lab {one.name}", "cyan"), one.about] for one in report.experiments]
    screen.table(rows, ("experiment", "what it shows"), wrap=True)


def _see(screen: Screen, report: LabReport) -> None:
    """The closing line; in a terminal it breaks between words."""
    words = f"see: {report.see}".split(" ")
    screen.flow([[(word, "bold")] for word in words], gap=" ", indent=5)


# Matrices


def _vectors(screen: Screen, values: Rows, room: int | None) -> list[str]:
    """The rows of a matrix as texts of one width: no decimals where all are whole numbers, −∞ as documents write it."""
    whole = all(x == int(x) and abs(x) < 1e6 for row in values for x in row if math.isfinite(x))
    digits = screen.digits
    screen.digits = 0 if whole else digits
    texts = screen.vectors(values, room)
    screen.digits = digits
    return [text.replace("-inf", "  −∞") for text in texts] if speaks(screen, "−∞") else texts


def _folded(rows: list, screen: Screen) -> list:
    """The first and the last rows of many; None for those between."""
    return rows if screen.full or len(rows) <= FOLDED else [*rows[: FOLDED // 2], None, *rows[-FOLDED // 2 + 1 :]]


def _shape(matrix: Matrix) -> str:
    formula = f" = {matrix.formula}" if matrix.formula else ""
    return f"{matrix.name}{formula} [{','.join(map(str, matrix.shape))}]"


def _matrices(screen: Screen, corner: str, matrices: Sequence[Matrix]) -> None:
    """Matrices of as many rows, side by side as far as the screen holds them."""
    shown = [one for one in matrices if one.values is not None]
    for one in matrices:
        if one.values is None:
            screen.line((f"{_shape(one)}: too many numbers to show", "dim"))
    while shown:
        labels = shown[0].labels or [""] * len(shown[0].values)
        label_width = max(len(corner), *map(len, labels))
        room = None if screen.width is None else screen.width - label_width - 3
        columns = [_vectors(screen, one.values, room) for one in shown]
        for number in range(len(shown), 0, -1):
            header = (corner, *map(_shape, shown[:number]))
            rows = [[(label, "cyan"), *texts] for label, *texts in zip(labels, *columns[:number])]
            if number == 1 or screen.fits(rows, header, gap=3):
                break
        screen.table([row or [("…", "dim")] for row in _folded(rows, screen)], header, gap=3)
        shown, corner = shown[number:], " " * len(corner)


@draw.register
def _(report: AttentionReport, screen: Screen) -> None:
    title(screen, report.model)
    fed(screen, report.tokens)
    i, kv = report.layer_index, f" · kv head {report.kv_head}" if report.kv_head != report.head else ""
    screen.line(
        (f"Layer {i + 1} of {report.n_layers} (layers.{i}) · Head {report.head} of {report.n_heads}", "bold"),
        (f" = L{i}H{report.head}{kv}{' · both ways' if report.both_ways else ''}", "bold"),
    )
    _matrices(screen, "given", report.given[:1])
    _matrices(screen, "weights", report.given[1:])
    for step in report.steps:
        _matrices(screen, f"{step.number} {step.name}", step.matrices)
    screen.line((f"check: weights @ V equals the output of {report.kernel} {_exactly(report.gap)}", "dim"))
    _see(screen, report)


def _exactly(gap: float) -> str:
    return "exactly" if gap == 0 else f"to {gap:.1e}"


@draw.register
def _(report: OrderReport, screen: Screen) -> None:
    told = {"none": "no positions", "rope": "rotation", "learned": "a learned table"}[report.position]
    mask = "causal mask" if report.causal else "no mask"
    screen.line(("one attention over the words", "bold"), f" · {mask} · {told} · float64")
    text = [f"{i} {word}" for i, word in enumerate(report.words)]
    moved = [f"{i} {report.words[was]} (was {was})" for i, was in enumerate(report.permutation)]
    room = None if screen.width is None else screen.width - max(map(len, moved)) - 3
    outputs, permuted = (_vectors(screen, rows, room) for rows in (report.outputs, report.permuted))
    rows = [[(a, "cyan"), b, (c, "cyan"), d] for a, b, c, d in zip(text, outputs, moved, permuted)]
    header = ("text", "output", "permuted", "output")
    if screen.fits(rows, header, gap=3):
        screen.table([row or [("…", "dim")] for row in _folded(rows, screen)], header, gap=3)
    else:
        for part in (slice(0, 2), slice(2, 4)):
            cut = [row[part] if row else [("…", "dim")] for row in _folded(rows, screen)]
            screen.table(cut, header[part], gap=3)
    screen.line((f"the permutation undone: {screen.number(report.difference)} apart at most", "dim"))
    _see(screen, report)


@draw.register
def _(report: PositionsReport, screen: Screen) -> None:
    pairs = [[(name, "cyan"), f" {_pair(x)}"] for name, x in report.vectors.items()]
    screen.flow([["vectors"], *pairs], gap="  ")
    screen.flow([["table"], *([f"{i} {_pair(x)}"] for i, x in enumerate(report.learned_table))], gap="  ")
    texts = (report.plain, report.reversed, report.shifted)
    rows = [[(_name(text), "cyan"), _learned(text)] for text in texts]
    screen.table(rows, ("learned: word + row", "what attention reads"), wrap=True)
    matrices = [
        Matrix(
            name=f"from {text.first_position}",
            formula="",
            path="",
            shape=[len(text.words)] * 2,
            values=text.rotated,
            labels=text.words,
        )
        for text in texts
    ]
    corner = f"rotated by {report.degrees:g} degrees a place"
    screen.line((f"{corner}: score of each word (row) for each (column)", "dim"))
    _matrices(screen, "", [matrices[0], matrices[2]])
    _matrices(screen, "", [matrices[1]])
    _see(screen, report)


def _pair(numbers: Sequence[float]) -> str:
    return f"({', '.join(f'{x:g}' for x in numbers)})"


def _name(text: Placed) -> str:
    words = " ".join(text.words)
    return words if text.first_position == 0 else f"{words}, from {text.first_position}"


def _learned(text: Placed) -> str:
    return "the table ends before" if text.learned is None else " ".join(map(_pair, text.learned))


@draw.register
def _(report: ScalingReport, screen: Screen) -> None:
    screen.line(("spread of q·k", "bold"), f" · {report.samples:,} pairs of vectors N(0, 1) · seed {report.seed}")
    rows = [
        [str(one.dim), screen.number(one.root), screen.number(one.measured), screen.number(one.divided)]
        for one in report.spreads
    ]
    screen.table(rows, ("d", "√d", "std of q·k", "of q·k/√d"), right=(0, 1, 2, 3))
    screen.line(("softmax", "bold"), f" · scores as they are, and divided by √{report.divide_dim}")
    digits = max(screen.digits, 5)
    pairs = zip(*(zip(one.scores, one.weights, one.gradients) for one in (report.raw, report.divided)))
    rows = [[f"{x:g}" if i % 3 == 0 else f"{x:.{digits}f}" for i, x in enumerate((*a, *b))] for a, b in pairs]
    header = ("score", "weight", "gradient", "  divided", "weight", "gradient")
    screen.table(rows, header, right=range(6))
    _see(screen, report)


@draw.register
def _(report: NormsReport, screen: Screen) -> None:
    layer, rms = report.layernorm, report.rmsnorm
    screen.line(("norms by hand", "bold"), f" · eps {report.eps:g} · float64")
    steps: list[tuple[str, list[float] | float, list[float] | float | None]] = [
        ("x", report.values, report.values),
        ("mean", layer.mean, None),
        ("x − mean", layer.deviations, None),
        ("mean square", layer.mean_square, rms.mean_square),
        ("√(… + ε)", layer.divisor, rms.divisor),
        ("divided by it", layer.normalised, rms.normalised),
    ]
    if set(report.weight) != {1.0} or set(report.bias) != {0.0}:
        steps += [("weight", report.weight, report.weight), ("bias", report.bias, None)]
    steps += [("result", layer.result, rms.result), ("the engine's", layer.engine, rms.engine)]
    room = None if screen.width is None else (screen.width - max(len(name) for name, _, _ in steps) - 4) // 2
    columns = [_column(screen, [step[i] for step in steps], room) for i in (1, 2)]
    rows = [[(name, "cyan"), *texts] for (name, _, _), *texts in zip(steps, *columns)]
    screen.table(rows, ("", "LayerNorm", "RMSNorm"))
    _see(screen, report)


def _column(screen: Screen, values: list[list[float] | float | None], room: int | None) -> list[str]:
    """Vectors below one another, single numbers between them, and gaps."""
    vectors = iter(screen.vectors([x if isinstance(x, list) else [x] for x in values if x is not None], room))
    return ["" if x is None else next(vectors) for x in values]


@draw.register
def _(report: ResidualReport, screen: Screen) -> None:
    screen.flow(
        [
            [("residual stream", "bold")],
            [f"{report.n_layers} layers of {report.hidden_size}"],
            [f"{report.n_heads} heads"],
            [f"{report.norm}"],
            [f"{report.tokens} tokens"],
        ],
        gap=" · ",
    )
    screen.flow([[(part, "dim")] for part in report.drawn.split(", ")], gap=", ")
    screen.line("root mean square of resid_post")
    curves(screen, [(one.placement, [layer.stream for layer in one.layers]) for one in report.streams], "layers")
    if screen.full:
        for stream in report.streams:
            screen.line((f"{stream.placement}: enters at {screen.number(stream.start)}", "bold"))
            rows = [
                [
                    str(one.layer_index + 1),
                    *map(screen.number, (one.stream, one.attn, one.attn_share, one.mlp, one.mlp_share)),
                ]
                for one in stream.layers
            ]
            screen.table(rows, ("layer", "stream", "attn", "of it", "mlp", "of it"), right=range(6))
    _see(screen, report)


@draw.register
def _(report: HeadsReport, screen: Screen) -> None:
    chunks = [[(report.model.name, "bold"), f" ({report.model.source})"], [f"{report.tokens:,} tokens"]]
    chunks += [[f"{report.source_tokens:,} of the source"]] if report.source_tokens is not None else []
    screen.flow([*chunks, [report.model.dtype]], gap=" · ")
    for group in report.layers:
        _costs(screen, group)
    rows = [
        ["W_O parameters", f"{report.o_parameters:,}", ""],
        ["maps", f"{report.maps:,}", ""],
        ["weights in maps", f"{report.map_weights:,}", ""],
        ["bytes of maps, if stored", f"{report.map_bytes:,}", f"{report.map_bytes / 2**20:,.2f} MiB"],
        ["bytes of KV cache", f"{report.cache_bytes:,}", f"{report.cache_bytes / 2**20:,.2f} MiB"],
    ]
    screen.table(rows, ("all layers", "", ""), right=(1, 2))
    _see(screen, report)


KINDS = {"self": "own attention", "cross": "cross attention", "encoder": "the encoder's attention"}


def _costs(screen: Screen, group: HeadsOfLayers) -> None:
    """One attention of these layers, beside one head of its width."""
    layers, many, single = len(group.layer_indices), group.many, group.single
    said = [f"{layers} layer{'s' * (layers != 1)}"]
    said += [] if group.window is None else [f"window {group.window:,}"]
    said += [] if group.kv_heads == many.heads else [f"{group.kv_heads} key/value head{'s' * (group.kv_heads != 1)}"]
    screen.line((KINDS[group.kind], "bold"), f" · {' · '.join(said)}")
    lines = [("multiplications q·k", "multiplications", ""), ("multiplications weights·V", "multiplications", "")]
    lines += [("  where the mask lets see", "seen_multiplications", "")] if group.causal or group.window else []
    merged = "part of W_V" if many.heads > 1 else ""
    lines += [("W_O parameters", "o_parameters", merged), ("W_O FLOPs a token", "o_flops_per_token", "")]
    lines += [("maps", "maps", ""), ("weights in maps", "map_weights", ""), ("bytes of maps", "map_bytes", "")]
    lines += [("bytes of KV cache", "cache_bytes", "")] if group.kind != "encoder" else []
    rows = [
        [name, *(f"{getattr(cost, field):,}" for cost in (many, single)), (note, "dim")] for name, field, note in lines
    ]
    screen.table(rows, ("a layer", *map(_heads, (many, single)), ""), right=(1, 2))


def _heads(cost: Cost) -> str:
    return f"{cost.heads} head{'s' * (cost.heads != 1)} of {cost.head_dim:,}"


@draw.register
def _(report: RoutesReport, screen: Screen) -> None:
    on, off = ("█", "·") if speaks(screen, "█·") else ("#", ".")
    screen.line((f"rows look, columns are seen: {on} may be seen, {off} may not", "dim"))
    for route in report.routes:
        screen.line((route.name, "bold"), f" ({route.source}) · {route.route}")
        _masks(screen, route.masks, on, off)
    _properties(screen, report.routes)
    screen.line(("what each is built for, which is not all that it can do", "dim"))
    _see(screen, report)


def _masks(screen: Screen, masks: list[Mask], on: str, off: str) -> None:
    """Side by side, as many as the screen holds."""
    blocks = [_mask(mask, on, off) for mask in masks]
    while blocks:
        for number in range(len(blocks), 0, -1):
            rows = list(_beside(blocks[:number]))
            if number == 1 or screen.fits(rows, [""] * len(rows[0]), gap=2):
                break
        screen.table(rows, gap=2)
        blocks = blocks[number:]


def _mask(mask: Mask, on: str, off: str) -> list[list[Part]]:
    """A row (label, cells) for its name, for the keys' places, and for every query."""
    width = len(str(len(mask.keys) - 1))
    name = {"self": "own", "cross": "cross", "encoder": "encoder"}[mask.kind]
    number, every = len(mask.layer_indices), mask.n_layers
    where = "" if number == every else f" {number} of {every} layers"
    places = " ".join(f"{i:>{width}}" for i in range(len(mask.keys)))
    rows: list[list[Part]] = [[("", ""), (f"{name}{where}: {mask.seen_pairs} of {mask.pairs}", "")]]
    rows.append([("", ""), (places, "dim")])
    for i, (query, seen) in enumerate(zip(mask.queries, mask.seen)):
        cells = " ".join((on if one else off).rjust(width) for one in seen)
        rows.append([(f"{i:>{len(str(len(mask.queries) - 1))}} {query}", "cyan"), (cells, "green")])
    return rows


def _beside(blocks: list[list[list[Part]]]) -> Iterator[list[Part]]:
    for i in range(max(map(len, blocks))):
        yield [cell for block in blocks for cell in (block[i] if i < len(block) else ["", ""])]


def _properties(screen: Screen, routes: list[Route]) -> None:
    """A column a route; where they don't fit side by side, their words wrap within it."""
    label = max(map(len, Route.PROPERTIES))
    width = max(12, ((screen.width or WIDE) - label) // len(routes) - 2)
    rows: list[list[Part]] = []
    for name in Route.PROPERTIES:
        cells = [textwrap.wrap(getattr(route, name), width) for route in routes]
        for i in range(max(map(len, cells))):
            rows.append([(name if i == 0 else "", "cyan"), *(cell[i] if i < len(cell) else "" for cell in cells)])
    screen.table(rows, ("", *(textwrap.shorten(route.name, width, placeholder="…") for route in routes)))
