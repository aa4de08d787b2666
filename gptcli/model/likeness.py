"""What was done to a parameter to make another of it: rows or heads in another order, turned, scaled, a low rank added.

A guess is tried on a few rows, then on all, a block at a time. It holds where what is left is what rounding to the
stored types can leave, or, of quantised numbers, most of the difference is gone.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gptcli.model.differences import NUMBERS, Gap, spans
from gptcli.model.held import Held

FIRST = 1 << 12  # numbers on which a guess is tried before all
GONE = 1 / 4  # of the difference: what a guess that holds may leave
MOST_LEFT = 1 / 4  # of the numbers themselves, where they are quantised
EXACT = 256  # columns of a matrix that is decomposed whole
CORNER = 96  # rows and columns that are looked at first
MOST_RANK = 64  # that is looked for
SPARE = 16  # directions more than that, so that the strongest are caught whole

# Half of the spacing at 1: how far rounding moves a number at most, as a share of it.
UNITS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

View = Callable[[slice], Tensor]  # some rows of what a guess makes


class Layout(NamedTuple):
    """What is known of a parameter's rows. head: how many belong to one head, or columns, where `across`; turning: the
    first numbers of a head, which are rotated in pairs (0: none).
    """

    head: int = 1
    across: bool = False
    turning: int = 0


class Change(NamedTuple):
    """What makes b of a. code: stable; said: in words; left: ‖changed a - b‖ / ‖b‖."""

    code: str
    said: str
    left: float


def change(
    a: Held, b: Held, shape: tuple[int, int], gap: Gap, layout: Layout, others: Mapping[str, Held]
) -> Change | None:
    """The first guess that holds, of parameters [rows, columns] (a vector: one column) that differ by gap.

    others: parameters of the same shape in the same place, by what they are called there.
    """
    norm = math.sqrt(gap.square_b)
    if any(gap.not_finite):
        return None
    if not norm:
        return Change("zeros", "zeros throughout", 0.0)
    unit = max(_unit(a), _unit(b))
    before = math.sqrt(gap.square) / norm
    for code, said, view in _guesses(a, b, shape, gap, layout, others):
        slack = math.sqrt(gap.numbers) / norm if code.endswith("-one") else 1.0  # the sum's own rounding
        allowed = MOST_LEFT if a.quantised or b.quantised else 2 * unit * max(1.0, slack)
        left = _left(view, b, shape, min(allowed, GONE * before))
        if left is not None:
            return Change(code, said, left)
    return None


def reshaped(a: Held, b: Held, shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> Change | None:
    """What makes b of an a of another shape: turned, or with more or fewer rows."""
    allowed = MOST_LEFT if a.quantised or b.quantised else 2 * max(_unit(a), _unit(b))
    if len(shape_a) == len(shape_b) == 2 and shape_a == shape_b[::-1]:
        left = _left(_turned(a, shape_a), b, shape_b, allowed)
        return None if left is None else Change("transposed", "transposed", left)
    if shape_a[1:] != shape_b[1:]:
        return None
    rows, width = min(shape_a[0], shape_b[0]), math.prod(shape_a[1:])
    left = _left(a.numbers, b, (rows, width), allowed)
    if left is None:
        return None
    longer, more = (a, shape_a[0] - rows) if shape_a[0] > rows else (b, shape_b[0] - rows)
    beyond = longer.numbers(slice(rows, rows + more))
    filled = "zeros" if not beyond.any() else "not zeros"
    return Change("padded", f"the first {rows:,} rows are equal, {more:,} more are {filled}", left)


def _unit(one: Held) -> float:
    """How far rounding to the type that holds it moves a number; 0 where that is no rounding."""
    return 0.0 if one.quantised else UNITS[one.raw.dtype]


def _left(view: View, b: Held, shape: tuple[int, int], allowed: float) -> float | None:
    """‖view - b‖ / ‖b‖; None as soon as it is clear that it is more than is allowed."""
    square = total = 0.0
    for span in spans(*shape, NUMBERS, FIRST):
        y = b.numbers(span).double()
        square += float((view(span).double().view_as(y) - y).square_().sum())
        total += float(y.square().sum())
        if square > 4 * allowed**2 * total:
            return None
    left = math.sqrt(square / total) if total else math.inf
    return left if left <= allowed else None


def _guesses(
    a: Held, b: Held, shape: tuple[int, int], gap: Gap, layout: Layout, others: Mapping[str, Held]
) -> Iterator[tuple[str, str, View]]:
    """Guesses as (code, words, rows of what it makes), the plainest first."""
    rows, columns = shape
    yield from (("other", f"it holds A's {name}", other.numbers) for name, other in others.items())
    if rows == columns:
        yield "transposed", "transposed", _turned(a, shape)
    if layout.turning and rows % layout.head == 0:
        for code, said, order in _rotary(rows, layout):
            yield code, said, _reordered(a, order)
    yield from _heads(a, b, shape, layout)
    if columns == 1:
        for code, said, shift in (("plus-one", "1 more", 1), ("minus-one", "1 less", -1)):
            yield code, f"{said} (a norm's 1 + weight)", _mapped(a, lambda x, shift=shift: x + shift)
    if not (a.quantised or b.quantised):
        yield from _permuted(a, b, shape)
    factor = gap.product / gap.square_a if gap.square_a else 0.0
    if factor:
        known = 4 * max(_unit(a), _unit(b), 1e-7) / math.sqrt(gap.numbers)  # rounding moves it about as far
        digits = max(2, min(6, int(-math.log10(known))))
        yield "factor", f"{factor:.{digits}g} times A's", _mapped(a, lambda x: x * factor)


def _permuted(a: Held, b: Held, shape: tuple[int, int]) -> Iterator[tuple[str, str, View]]:
    """Rows, or columns, in any other order: those of one product with a seeded random vector are one another's."""
    draw = torch.Generator().manual_seed(0)
    across, down = (torch.randn(size, generator=draw, dtype=torch.float64) for size in shape[::-1])

    def blocks(one: Held) -> Iterator[tuple[slice, Tensor]]:
        return ((span, one.numbers(span).double().reshape(-1, shape[1])) for span in spans(*shape, NUMBERS))

    order = _order(*(torch.cat([x @ across for _, x in blocks(one)]) for one in (a, b)))
    if order is not None:
        said = f"its {'numbers' if shape[1] == 1 else 'rows'} are in another order"
        yield "rows", said, _reordered(a, order)
    elif shape[1] > 1:
        order = _order(*(sum(down[span] @ x for span, x in blocks(one)) for one in (a, b)))
        if order is not None:
            yield "columns", "its columns are in another order", lambda span: a.numbers(span)[:, order]


def _order(a: Tensor, b: Tensor) -> Tensor | None:
    """Which of a's numbers each of b's is; None where they are not the same ones."""
    (x, of_a), (y, of_b) = a.sort(), b.sort()
    if not torch.allclose(x, y, rtol=1e-9, atol=1e-12 * float(x.abs().max())):
        return None
    return torch.empty_like(of_a).scatter_(0, of_b, of_a)


def _turned(a: Held, shape: tuple[int, int]) -> View:
    """Rows of the transposed; of a packed one, block by block, so that it is never unpacked whole."""
    blocks = list(spans(*shape, NUMBERS if a.packed else math.prod(shape)))
    return lambda span: torch.cat([a.numbers(rows)[:, span] for rows in blocks]).T


def _reordered(a: Held, order: Tensor) -> View:
    return lambda span: a.numbers(order[span])


def _mapped(a: Held, make: Callable[[Tensor], Tensor]) -> View:
    return lambda span: make(a.numbers(span).double())


def _rotary(rows: int, layout: Layout) -> Iterator[tuple[str, str, Tensor]]:
    """Rows of every head in the other order of pairs: (i, i + R/2) side by side, and back."""
    inside = torch.arange(layout.head)
    pairs = inside[: layout.turning].view(2, -1)  # [2, R/2]
    for said, turning in (
        ("halves → neighbours", pairs.T.reshape(-1)),
        ("neighbours → halves", pairs.reshape(-1, 2).T.reshape(-1)),
    ):
        order = torch.cat((turning, inside[layout.turning :]))
        heads = torch.arange(0, rows, layout.head)[:, None]
        code = "to-neighbours" if said.endswith("neighbours") else "to-halves"
        yield code, f"rows permuted (rotary {said})", (heads + order).flatten()  # [H, D] → [H · D]


def _heads(a: Held, b: Held, shape: tuple[int, int], layout: Layout) -> Iterator[tuple[str, str, View]]:
    """Heads in the order in which b seems to have them: each is known by its first row, or column of some rows."""
    along, size = shape[1 if layout.across else 0], layout.head
    if size < 2 or along % size or along == size:
        return
    sample = slice(0, 8) if layout.across else torch.arange(0, along, size)
    marks = []
    for one in (a, b):
        x = one.numbers(sample).double()
        marks.append(x[:, ::size].T if layout.across else x.view(len(x), -1))  # → [H, some numbers]
    nearest = torch.cdist(marks[1], marks[0]).argmin(1)
    heads = len(nearest)
    if nearest.unique().numel() < heads or torch.equal(nearest, torch.arange(heads)):
        return
    order = (nearest[:, None] * size + torch.arange(size)).flatten()
    said = ", ".join(map(str, nearest[:8].tolist())) + ", …" * (heads > 8)
    view = (lambda span: a.numbers(span)[:, order]) if layout.across else _reordered(a, order)
    yield "heads", f"heads in the order {said}", view


class Rank(NamedTuple):
    """A difference's numerical rank: its singular values above `above`."""

    rank: int
    above: float


def rank(a: Held, b: Held, shape: tuple[int, int], gap: Gap) -> Rank | None:
    """The rank of b - a [rows, columns], where it is low: at most MOST_RANK, and half of the full one. None where it is
    not, or where the numbers are not finite.

    A singular value counts where it is more than s · (√rows + √columns), about twice what rounding can add to one:
    s² = (u_a · rms(a))² + (u_b · rms(b))² + (8 · u · rms(b - a))², u being half of a stored type's spacing at 1; the
    last is what adding up MOST_RANK products rounds. What the others come to must be within what rounding leaves, at
    most s / √3 a number. A corner of seeded random rows and columns is looked at first, whose rank is never more. Then
    a matrix of up to EXACT columns is decomposed as it is; of a wider one the range of its rows is found from seeded
    random vectors (Halko, Martinsson and Tropp, arXiv:0909.4061).
    """
    if any(gap.not_finite) or not gap.square or not math.isfinite(gap.square_a + gap.square_b + gap.square):
        return None
    rows, columns = shape
    units = max(_unit(a), UNITS[torch.float64]), max(_unit(b), UNITS[torch.float64])
    units = (*units, math.sqrt(MOST_RANK) * max(units))
    squares = gap.square_a, gap.square_b, gap.square
    noise = math.hypot(*(unit * math.sqrt(square / gap.numbers) for unit, square in zip(units, squares)))
    above = noise * (math.sqrt(rows) + math.sqrt(columns))
    blocks = list(spans(rows, columns, NUMBERS))

    def apart(rows: slice | Tensor) -> Tensor:
        return b.numbers(rows).double() - a.numbers(rows).double()

    draw, most = torch.Generator().manual_seed(0), min(MOST_RANK, min(shape) // 2)

    def strong(values: Tensor, above: float, square: float, numbers: int) -> int | None:
        """How many singular values count, where what is left beside them is rounding."""
        found = values[values > above]
        left = square - float(found.square().sum())
        low = len(found) <= most and left <= max(numbers * noise**2 / 3, 1e-12 * square)
        return len(found) if low else None

    corner = apart(torch.randperm(rows, generator=draw)[:CORNER])
    corner = corner[:, torch.randperm(columns, generator=draw)[:CORNER]]
    sides = math.sqrt(corner.shape[0]) + math.sqrt(corner.shape[1])
    square = float(corner.square().sum())
    if strong(torch.linalg.svdvals(corner), noise * sides, square, 2 * corner.numel()) is None:
        return None
    if columns <= EXACT:
        found = _upper(apart(span) for span in blocks)
    else:
        within = torch.zeros(columns, most + SPARE, dtype=torch.float64)
        for span in blocks:
            part = apart(span)
            within += part.T @ torch.randn(len(part), most + SPARE, generator=draw, dtype=torch.float64)
        basis = torch.linalg.qr(within).Q  # [columns, k]
        found = _upper(apart(span) @ basis for span in blocks)
    counted = strong(torch.linalg.svdvals(found), above, gap.square, gap.numbers)
    return Rank(counted, above) if counted else None


def _upper(blocks: Iterator[Tensor]) -> Tensor:
    """R of the QR decomposition of blocks of rows: it has the singular values of them all."""
    upper = next(blocks)
    for block in blocks:
        upper = torch.linalg.qr(torch.cat((upper, block)), mode="r").R
    return upper
