"""What two tensors differ by, a block at a time: in double precision, and never more of it than a block.

Tensors that are equal are told by comparing blocks as they lie.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import numpy
import torch
from torch import Tensor

from gptcli.model.held import Held, parameters
from gptcli.source import Model

NUMBERS = 1 << 17  # of a block in double precision, which a processor's cache holds
AS_THEY_LIE = 1 << 22  # of a block that is only compared
NARROWER = (torch.float32, torch.bfloat16, torch.float16)  # what numbers may have been rounded to on their way


class Gap(NamedTuple):
    """Two tensors side by side: their finite numbers' max |b - a|; how many numbers differ, of all; how many are not
    finite in each; Σ (b - a)², Σ a², Σ b² and Σ a·b over what is finite in both.
    """

    max_abs: float
    changed: int
    numbers: int
    not_finite: tuple[int, int]
    square: float
    square_a: float
    square_b: float
    product: float

    @property
    def relative(self) -> float | None:
        """‖b - a‖ / ‖a‖ (Frobenius); None where a is zero throughout, or too large for its squares to be summed."""
        if self.square == 0:
            return 0.0
        found = math.sqrt(self.square / self.square_a) if self.square_a else math.inf
        return found if math.isfinite(found) else None

    @property
    def cosine(self) -> float | None:
        """a·b / (‖a‖·‖b‖); None where either is zero throughout."""
        if self.square == 0:
            return 1.0
        below = math.sqrt(self.square_a) * math.sqrt(self.square_b)
        found = self.product / below if below else math.nan
        return max(-1.0, min(1.0, found)) if math.isfinite(found) else None


class Meter:
    """A Gap in the making."""

    def __init__(self) -> None:
        self.max_abs = self.square = self.square_a = self.square_b = self.product = 0.0
        self.changed = self.numbers = self.not_finite_a = self.not_finite_b = 0
        self.room = torch.empty(2, 0, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """The next numbers of both, of one shape."""
        count = x.numel()
        self.numbers += count
        if not count:
            return
        if self.room.shape[1] < count:
            self.room = torch.empty(2, count, dtype=torch.float64)
        a, d = self.room[0, :count], self.room[1, :count]
        a.view(x.shape).copy_(x)
        d.view(y.shape).copy_(y)
        squares = float(a.dot(a)), float(d.dot(d))
        if not math.isfinite(sum(squares)):
            a, d = self._finite(a, d)
            squares = float(a.dot(a)), float(d.dot(d))
        self.product += float(a.dot(d))
        d.sub_(a).abs_()
        self.square_a, self.square_b = self.square_a + squares[0], self.square_b + squares[1]
        if changed := int(numpy.count_nonzero(d.view(torch.int64).numpy())):  # much faster than of floats
            self.changed += changed
            self.square += float(d.dot(d))
            self.max_abs = max(self.max_abs, float(d.amax()))

    def _finite(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Both with zeros where either is not finite. Counts what is not, and of it what differs."""
        held_a, held_b = a.isfinite(), b.isfinite()
        self.not_finite_a += int((~held_a).sum())
        self.not_finite_b += int((~held_b).sum())
        away = ~(held_a & held_b)
        self.changed += int((away & (a != b) & ~(a.isnan() & b.isnan())).sum())
        return a.masked_fill(away, 0), b.masked_fill(away, 0)

    @property
    def gap(self) -> Gap:
        away, sums = (self.not_finite_a, self.not_finite_b), (self.square, self.square_a, self.square_b, self.product)
        return Gap(self.max_abs, self.changed, self.numbers, away, *sums)


class Rounding(NamedTuple):
    """One side's numbers are the other's, rounded to a type. side: `a` or `b`, the one that was rounded."""

    side: str
    word: str


class Compared(NamedTuple):
    """Two parameters of one shape. gap: None where all numbers are equal and finite.

    kind: `identical`; `stored`: the same numbers in two types; `rounded`: one side's are the other's, rounded;
    `different`.
    """

    kind: Literal["identical", "stored", "rounded", "different"]
    gap: Gap | None
    rounding: Rounding | None = None


def spans(rows: int, width: int, numbers: int, first: int = 0) -> Iterator[slice]:
    """All rows in blocks of about so many numbers; `first`: so many in the first block, unless 0."""
    start, each = 0, max((first or numbers) // max(width, 1), 1)
    while start < rows:
        yield slice(start, min(start + each, rows))
        start, each = start + each, max(numbers // max(width, 1), 1)


def compare(a: Held, b: Held, shape: tuple[int, ...]) -> Compared:
    """Two parameters, of which as many rows are looked at as the shape says."""
    rows, width = shape[0] if shape else 1, math.prod(shape[1:])
    alike = a.like(b)
    same = "identical" if a.word == b.word else "stored"
    read = (lambda one, span: one.stored(span)) if alike else (lambda one, span: one.numbers(span))
    room = AS_THEY_LIE if not (a.packed or b.packed) or alike else NUMBERS
    if all(_equal(read(a, span), read(b, span)) for span in spans(rows, width, room)):
        return Compared(same, None)
    meter, roundings = Meter(), _roundings(a, b)
    for span in spans(rows, width, NUMBERS):
        x, y = a.numbers(span), b.numbers(span)
        meter.add(x, y)
        roundings = {one: held for one, held in roundings.items() if held(x, y)}
    gap = meter.gap
    if not gap.changed:
        return Compared(same, gap)
    rounding = next(iter(roundings), None)
    return Compared("rounded" if rounding else "different", gap, rounding)


def between(a: Model, b: Model) -> Rounding | None:
    """The rounding, to a type narrower than both have, that makes all that differs in one model of the other's.

    Raises GptcliError for weights that can't be read.
    """
    ours, theirs, shapes = parameters(a), parameters(b), [{p.name: p.shape for p in one.layout} for one in (a, b)]
    if ours.keys() != theirs.keys() or any(shapes[0][name] != shapes[1][name] for name in ours):
        return None
    found, compared = None, []
    for name, shape in ((name, shapes[0][name]) for name in ours):
        x, y = ours[name](), theirs[name]()
        if compare(x, y, (min(shape[0], 64), *shape[1:]) if shape else shape).kind == "different":  # told soon
            return None
        one = compare(x, y, shape)
        if one.kind == "different" or (found and one.rounding not in (None, found)):
            return None
        found = found or one.rounding
        compared.append((one.gap, one.rounding is not None, ours[name], shape))
    return found if found and general(found.word, compared) else None


def general(word: str, compared: Iterable[tuple[Gap | None, bool, Callable[[], Held], tuple[int, ...]]]) -> bool:
    """Does rounding to that type make one model of the other, or do most of the finer one's tensors fit it anyway, so
    that what differs was changed? compared: of every tensor its gap, whether it is that rounding, numbers, and shape.
    """
    rounded = fitting = 0
    for gap, is_rounding, held, shape in compared:
        if is_rounding:
            most = 2 * gap.changed > gap.numbers
            rounded, fitting = rounded + most, fitting + (not most)
        elif gap is None or not gap.changed:
            fitting += _fits(held(), shape, getattr(torch, word))
    return rounded > fitting


def _fits(held: Held, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Does a type hold all its numbers? Not of one number throughout, such as a gain of 1, which tells nothing."""
    rows, width = shape[0] if shape else 1, math.prod(shape[1:])
    first, constant = None, True
    for span in spans(rows, width, NUMBERS):
        x = held.numbers(span)
        first = x.flatten()[:1] if first is None else first
        constant = constant and bool((x == first).all())
        if not _equal(x.to(dtype), x):
            return False
    return not constant


def _equal(x: Tensor, y: Tensor) -> bool:
    wider = torch.promote_types(x.dtype, y.dtype)
    return torch.equal(x.to(wider), y.to(wider))


def _roundings(a: Held, b: Held) -> Mapping[Rounding, Callable[[Tensor, Tensor], bool]]:
    """What may make one side of the other by rounding, and whether it does for these numbers of both."""
    found = {}
    if not b.quantised and not a.like(b):
        found[Rounding("b", b.word)] = lambda x, y: _equal(b.rounded(x), y)
    if not a.quantised and not a.like(b):
        found[Rounding("a", a.word)] = lambda x, y: _equal(a.rounded(y), x)
    for dtype in NARROWER:
        word = str(dtype).removeprefix("torch.")
        if dtype.itemsize < min(a.dtype.itemsize, b.dtype.itemsize):
            found[Rounding("b", word)] = lambda x, y, to=dtype: _equal(x.to(to), y)
            found[Rounding("a", word)] = lambda x, y, to=dtype: _equal(y.to(to), x)
    return found
