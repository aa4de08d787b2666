"""`trace --map`: softmax weights of heads as maps, rows queries and columns keys, pooled to the cells that find room.

What is drawn is what stands here: a renderer chooses colours and signs, and computes no weight.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from gptcli.cost import Choice, listed
from gptcli.errors import GptcliError
from gptcli.report import RunReport
from gptcli.report.patterns import Patterns, Weights
from gptcli.report.proof import Check
from gptcli.report.room import Room
from gptcli.report.view import Attending
from gptcli.tokens import Token

if TYPE_CHECKING:
    from torch import Tensor

SMALL = 4096  # weights of all maps together that stand in the report as they are, without --full
BESIDES = 4  # numbers of one head that stand beside one another: scores, those behind the mask, weights, their products
DECADES = 4  # a logarithmic scale goes down so many powers of ten
Pooling = Literal["max", "mean"]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Positions start … stop - 1 of the `text` or the `source`, which has `length`, in cells of `pool` positions.

    The last cell may hold fewer.
    """

    of: Literal["text", "source"]
    length: int
    start: int
    stop: int
    pool: int = 1

    @property
    def cells(self) -> int:
        """How many there are."""
        return math.ceil((self.stop - self.start) / self.pool)

    def span(self, cell: int) -> range:
        """The positions of a cell."""
        begin = self.start + cell * self.pool
        return range(begin, min(begin + self.pool, self.stop))

    def fitted(self, cells: int) -> "Axis":
        """With so many cells at most."""
        return replace(self, pool=max(1, math.ceil((self.stop - self.start) / max(cells, 1))))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How a weight becomes a shade: by itself, or by its logarithm; from low (and all below) to high."""

    kind: Literal["linear", "log"]
    low: float
    high: float

    def place(self, weight: float) -> float:
        """Where a weight stands between the scale's ends: 0 to 1."""
        if self.high <= self.low or weight <= self.low:
            return 0.0
        if self.kind == "log":
            return min(1.0, math.log(weight / self.low) / math.log(self.high / self.low))
        return min(1.0, (weight - self.low) / (self.high - self.low))


@dataclass(frozen=True, kw_only=True)
class HeadMap:
    """One head's weights. layer_index and head count from 0; n_heads, n_kv_heads and window are its layer's.

    cells: the rows of the map as drawn; null where the mask hides all of a cell's pairs (as JSON also where it is no
    number, of which a finding tells). sink: the weight that goes to
    no key, by rows of the map, where the head has a sink. share: of all weight of the queries, what goes to the keys
    that are drawn. weights: the same rows and columns before pooling; null where they are many (--full keeps them).
    """

    layer_index: int
    path: str
    head: int
    n_heads: int
    kv_head: int
    n_kv_heads: int
    causal: bool
    window: int | None
    share: float
    cells: list[list[float | None]]
    sink: list[float] | None
    weights: list[list[float]] | None


@dataclass(kw_only=True)
class MapReport(RunReport):
    """Maps of heads in one kind of attention, layer by layer, all over the same rows and columns, on one scale.

    pooling: what a cell of several pairs shows: their largest weight, or their mean, of those that the mask lets see.
    drop_first: key 0, which often takes nearly all, is left out.
    """

    schema = "gptcli.maps/1"
    attention: Attending
    n_layers: int
    rows: Axis
    columns: Axis
    pooling: Pooling
    drop_first: bool
    scale: Scale
    maps: list[HeadMap]
    proof: list[Check]

    def labels(self, axis: Axis) -> list[Token]:
        """The tokens of a text, by position."""
        return (self.source if axis.of == "source" else self.tokens)[0]

    @property
    def layers(self) -> list[list[HeadMap]]:
        """The maps, a list a layer."""
        every = dict.fromkeys(one.layer_index for one in self.maps)
        return [[one for one in self.maps if one.layer_index == layer] for layer in every]


def axes_of(patterns: Patterns, rows: str | None, columns: str | None, drop_first: bool) -> tuple[Axis, Axis]:
    """The queries and keys that --rows, --cols and --drop-first choose, not yet pooled. Raises GptcliError."""
    of_query = "source" if patterns.attending == "encoder" else "text"
    of_key = "text" if patterns.attending == "self" else "source"
    start, stop = _window("--rows", rows, len(patterns.queries))
    first, end = _window("--cols", columns, len(patterns.keys))
    if drop_first:
        if first > 0:
            raise GptcliError(f"--cols {columns} and --drop-first", "key 0 is not among them: leave one out")
        if end == 1:
            raise GptcliError("--drop-first: key 0 is the only one", "leave it out")
        first = 1
    queries = Axis(of=of_query, length=len(patterns.queries), start=start, stop=stop)
    return queries, Axis(of=of_key, length=len(patterns.keys), start=first, stop=end)


def _window(option: str, wanted: str | None, length: int) -> tuple[int, int]:
    """`A:B` as Python reads it: from A to B - 1, either left out, negative ones from the end."""
    if wanted is None:
        return 0, length
    found = re.fullmatch(r"(-?[0-9]{1,9})?:(-?[0-9]{1,9})?", wanted)
    if found is None:
        raise GptcliError(f"{option} {wanted}: not A:B", "16:32 shows positions 16 to 31")
    start, stop, _ = slice(*(None if part is None else int(part) for part in found.groups())).indices(length)
    if start >= stop or int(found[2] or 0) > length:
        raise GptcliError(f"{option} {wanted}: not in the text", f"its positions are 0:{length}")
    return start, stop


def pooling_of(wanted: str | None) -> tuple[int | None, Pooling]:
    """What --pool means: `8`, `mean` or `8,mean` as (positions a cell, None to fit; how). Raises GptcliError."""
    number, how = None, "max"
    for part in (wanted or "max").split(","):
        if re.fullmatch(r"[1-9][0-9]{0,8}", part):
            number = int(part)
        elif part in ("max", "mean"):
            how = part
        else:
            raise GptcliError(f"--pool {wanted}: not a number, max or mean", "such as 8, mean or 8,mean")
    return number, how


def refuse_large(
    memory: Room,
    patterns: Patterns,
    layers: list[int],
    heads: list[int],
    sizes: Sequence[tuple[Axis, Axis]],
    full: bool,
) -> None:
    """Raises GptcliError where what the maps hold at once is more than memory may hold: one head's scores and weights
    with their mask, and the numbers of the report.
    """
    rows, number = sizes[0][0], len(layers) * len(heads)
    row = len(patterns.keys) * (BESIDES * (8 if memory.size.dtype == "float64" else 4) + 9)
    cells = number * sum(rows.cells * columns.cells for rows, columns in sizes)

    def held(queries: int) -> int:
        kept = cells + (number * queries * len(patterns.keys) if full else 0)
        return queries * row + listed(kept, memory.as_json)

    every = rows.stop - rows.start
    part = max(1, every // 8)
    fewer = Choice(f"--rows {rows.start}:{rows.start + part}", held(part))
    several = f"{number:,} maps" if number > 1 else "a map"
    memory.refuse(Choice(f"{several} of {every:,} queries and {len(patterns.keys):,} keys", held(every)), fewer)


def map_reports(
    patterns: Patterns,
    layers: list[int],
    heads: list[int],
    sizes: Sequence[tuple[Axis, Axis]],
    pooling: Pooling = "max",
    kind: Literal["linear", "log"] = "linear",
    drop_first: bool = False,
    full: bool = False,
) -> list[MapReport]:
    """Maps of the layers' heads (those of the heads that a layer has), a report for each of `sizes`, in one run.

    sizes: rows and columns, pooled to what one drawing has room for; they differ in their pooling alone. Raises
    GptcliError for a head that a layer doesn't have.
    """
    rows, columns = sizes[0]
    patterns.check(layers, heads)
    number = sum(min(len(heads), patterns.spec(layer).attention.n_heads) for layer in layers)
    whole = full or number * (rows.stop - rows.start) * (columns.stop - columns.start) <= SMALL

    def take(found: Weights) -> list[HeadMap]:
        return [_map(patterns, found, size, pooling, whole) for size in sizes]

    of_heads, of_queries = slice(min(heads), max(heads) + 1), slice(rows.start, rows.stop)
    watched = patterns(layers, of_heads, of_queries, take)
    reports = []
    for (rows, columns), maps in zip(sizes, zip(*watched.taken)):
        reports.append(
            MapReport(
                **patterns.run.told(),
                attention=patterns.attending,
                n_layers=patterns.stack.n_layers,
                rows=rows,
                columns=columns,
                pooling=pooling,
                drop_first=drop_first,
                scale=_scale(maps, kind),
                maps=list(maps),
                proof=watched.proof,
                findings=list(watched.findings),
            )
        )
    return reports


def _map(patterns: Patterns, found: Weights, size: tuple[Axis, Axis], pooling: Pooling, whole: bool) -> HeadMap:
    from gptcli.model.patterns import pooled

    rows, columns = size
    keys = slice(columns.start, columns.stop)
    pattern = found.pattern[:, keys]  # [t, S] → [t, s]
    cells, seen = pooled(pattern, found.seen[:, keys], rows.pool, columns.pool, pooling)
    return HeadMap(
        **patterns.place(found),
        causal=patterns.spec(found.layer).attention.causal,
        share=float(pattern.cpu().double().sum(-1).mean()),
        cells=[[x if there else None for x, there in zip(*row)] for row in zip(cells.tolist(), seen.tolist())],
        sink=None if found.sink is None else _pooled_sink(found.sink, rows, pooling),
        weights=pattern.tolist() if whole else None,
    )


def _pooled_sink(sink: "Tensor", rows: Axis, pooling: Pooling) -> list[float]:
    """The sink's weights [t], by rows of the map."""
    from gptcli.model.patterns import pooled

    column = sink[:, None]  # [t, 1]
    return pooled(column, column.new_ones(column.shape).bool(), rows.pool, 1, pooling)[0][:, 0].tolist()


def _scale(maps: Sequence[HeadMap], kind: Literal["linear", "log"]) -> Scale:
    """Up to the largest weight that is drawn on any of the maps."""
    drawn = (x for one in maps for row in (*one.cells, one.sink or ()) for x in row if x is not None)
    high = max(filter(math.isfinite, drawn), default=0.0)
    return Scale(kind=kind, low=high * 10.0**-DECADES if kind == "log" else 0.0, high=high)
