"""Bug or rounding: a gap that stays when both sides compute in float64 is a bug.

First both run in their own types, and what is the same bit for bit needs no more. Else both run again in float64,
beside themselves in their own types, up to the first activation that differs there. Three numbers tell of it: `exact`,
between the two in float64; `expected`, each side's distance from its own float64 run, added up (sides whose exact
values agree can't lie further apart); `seen`, between the two as they ran.

Distances are measured row by row (the largest |a - b| of a position's vector beside the largest |a| in it), so that one
token, or one head, isn't lost among many.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from gptcli.diff.lockstep import abreast, together
from gptcli.layout import Place
from gptcli.run import Run
from gptcli.trace import BESIDE, points

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.gaps import Effect, Gap, Pairs, Ranked

# What float64 itself rounds lies far below: 1.1e-16 a step, √K of that for a sum of K products (2e-14 for K = 30,000),
# and some hundred sublayers that hand it on. What is wrong lies above: a constant kept in float32 is off by up to 6e-8.
EXACT = 1e-9
# Another implementation adds in another order, and rounds in between where ours doesn't: a file may lie so many times
# as far from the exact values as our own run in its type does.
TIMES = 8
READ = ("resid_pre", "resid_post", "final_norm")  # what layers, and what stands behind them, read
MOST_SCORES = 1 << 27  # numbers of one activation: 1 GiB in float64
TOP = 10  # likeliest ids that are compared


class Constants(NamedTuple):
    """|a - b| <= atol + rtol · |a| is agreement."""

    atol: float
    rtol: float


@dataclass
class Comparison:
    """Two sides, and what was found. By path, in order of birth: seen, exact, those that add up to expected, shapes.

    allowed: the row-by-row distance up to which an activation agrees; apart: whose shapes can't be compared; by: what
    decides; lost: how many numbers are not finite on both sides; bug: None where nothing can tell; wide: the sides in
    float64; theirs: of B (of A where A can't run), in float64 where that can be had, the activation where they part and
    the later ones of its layer; reads: what that layer reads in the other side, run again; stored: whose weights are
    the other's in a coarser type, and in which; place: the text and the position where logits lie furthest apart.
    """

    a: Run
    b: Run
    seen: "dict[str, Gap]" = field(default_factory=dict)
    exact: "dict[str, Gap]" = field(default_factory=dict)
    expected: "dict[str, list[Gap]]" = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    apart: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    by: Literal["bits", "float64", "one side's float64", "an estimate", "constants"] = "bits"
    parted: str | None = None
    bug: bool | None = None
    wide: tuple[Run | None, Run | None] = (None, None)
    lost: dict[str, int] = field(default_factory=dict)
    theirs: "dict[str, Tensor]" = field(default_factory=dict)
    reads: "dict[str, Tensor]" = field(default_factory=dict)
    stored: tuple[str, str] | None = None
    effect: "Effect | None" = None
    place: tuple[int, int] = (0, 0)
    ranked: "list[Ranked]" = field(default_factory=list)

    def __post_init__(self):
        self.axes = dict(points(self.a.model.spec))

    def run(self, paths: list[str], constants: Constants | None = None, only: bool = False) -> "Comparison":
        """Compares these activations, in the order of A's. only: no others are looked at to tell where they part."""
        from gptcli.model.gaps import outside

        beyond = {}

        def look(path: str, x: "Tensor", y: "Tensor") -> bool:
            if pairs := self.pairs(path, x, y):
                self._see(path, pairs)
                if constants is not None and differs(self.seen[path]):
                    beyond[path] = outside(pairs, *constants)
            return True

        together(self.a, self.b, look, paths)
        if constants is not None:
            self.by = "constants"
            self.allowed = {path: 0.0 if beyond.get(path) else float("inf") for path in self.seen}
            self.parted = next((path for path, count in beyond.items() if count), None)
        elif any(map(differs, self.seen.values())):
            self._decide(only)
        return self

    def agrees(self, path: str) -> bool:
        """Is the gap there what rounding makes? Beyond the layer where they part, by the rounding before it."""
        seen, allowed = self.seen[path], self.allowed.get(path)
        if allowed is None:
            allowed = max((deviation(gaps) for gaps in self.expected.values()), default=0.0)
        return not seen.lost and self.exact.get(path, seen).deviation <= allowed

    def close(self, path: str, x: "Tensor", y: "Tensor") -> bool:
        """Would these agree in that place?"""
        from gptcli.model.gaps import gap_over

        allowed = self.allowed.get(path, self.allowed[self.parted])
        return x.shape == y.shape and gap_over(list(zip(*self._seen_by_a(path, x, y)))).deviation <= allowed

    def pairs(self, path: str, x: "Tensor", y: "Tensor") -> "Pairs | None":
        """Of every text its own part of both, without padding, and of two vocabularies what both have."""
        axes, place = self.axes[path], Place.of(path)
        if axes[-1] == "V":
            x, y = (z[..., : min(x.shape[-1], y.shape[-1])] for z in (x, y))
        if "T" in axes and x.ndim == y.ndim:  # a file may hold the last position alone
            at = axes.index("T")
            if 1 in (x.shape[at], y.shape[at]):
                x, y = (z.narrow(at, z.shape[at] - 1, 1) for z in (x, y))
        if x.shape != y.shape:
            self.apart[path] = list(x.shape), list(y.shape)
            return None
        self.shapes.setdefault(path, list(x.shape))
        x, y = self._seen_by_a(path, x, y)
        across = place.stack or place.name.startswith("cross.")
        lengths = {"T": self.a.ids, "S": self.a.source if across else self.a.ids}

        def of(z: "Tensor", text: int) -> "Tensor":
            z = z[text]
            for i, axis in enumerate(axes[1:]):
                if axis in lengths and (padding := z.shape[i] - len(lengths[axis][text])) > 0:
                    z = z.narrow(i, padding, z.shape[i] - padding)
            return z

        return [(of(x, text), of(y, text)) for text in range(len(x))]

    def _seen_by_a(self, path: str, x: "Tensor", y: "Tensor") -> "tuple[Tensor, Tensor]":
        """Scores that A's mask hides, made the same on both sides: other codes hold -inf there, or a large number.

        The ordinary one of the two stands for both, so that rows are as large as before.
        """
        import torch

        from gptcli.model.attention import Sight

        place = Place.of(path)
        part = place.spec(self.a.model.spec).attention
        if place.name != "attn.scores" or not (part.causal or part.window):
            return x, y
        sight = Sight.of(part, torch.arange(x.shape[-1], device=x.device)[None])
        hidden = ~sight.at(slice(x.shape[-1] - x.shape[-2], None)).mask()  # [1, 1, T, S]
        plain = x.where(x.abs() <= y.abs(), y).nan_to_num(0.0, 0.0, 0.0)
        return plain.to(x.dtype).where(hidden, x), plain.to(y.dtype).where(hidden, y)

    def _see(self, path: str, pairs: "Pairs") -> None:
        from gptcli.model.gaps import SAME, alike, both_lost, effect, gap_over, ranked

        same = alike(pairs)
        self.seen[path] = SAME if same else gap_over(pairs)
        if lost := both_lost(pairs):
            self.lost[path] = lost
        if path == "logits" and not same:
            k = min(TOP, self.shapes[path][-1])
            self.effect = effect(pairs, k)
            every = [(kl, (text, at)) for text, row in enumerate(self.effect.kl) for at, kl in enumerate(row)]
            text, at = max(every, key=lambda one: (one[0] != one[0], one[0]))[1]
            self.place = text, len(self.a.ids[text]) - len(pairs[text][0]) + at
            self.ranked = ranked(*(z[at] for z in pairs[text]), min(5, k))

    def _decide(self, only: bool) -> None:
        first = next(path for path, gap in self.seen.items() if differs(gap))
        exact = self.wide = self.a.exact(), self.b.exact()
        if not any(exact):
            self.by = "an estimate"
            self.allowed = {path: self._estimate(path) for path in self.seen}
            self.parted = next((path for path in self.seen if not self.agrees(path)), None)
            return
        self.by = "float64" if all(exact) else "one side's float64"
        stored = _shared(self.a, self.b, *exact) if all(exact) else None
        # What no tensor of the pass holds is computed only where it may tell more closely where they part.
        near = () if only else self._beside(first)
        self._exactly([*self.seen, *near], exact)
        if not only and self.parted and not near and (near := self._beside(self.parted)):
            z, self.parted = self.parted, None
            self._exactly([*near, z], exact)
        self.stored = stored and stored()

    def _beside(self, path: str) -> list[str]:
        """Scores and weights of the attention whose z this is, where they are not too large to hold."""
        scope, _, name = path.rpartition(".")
        heads = self.shapes[path][1] if name == "z" else 0
        keys = max(self.a.width, self.a.source_width)
        return [f"{scope}.{one}" for one in BESIDE] if 0 < heads * keys**2 <= MOST_SCORES else []

    def _exactly(self, paths: Iterable[str], exact: tuple[Run | None, Run | None]) -> None:
        """Runs each side beside itself in float64, to the end of the layer in which they part."""
        from gptcli.model.gaps import SAME, alike, gap_over

        latest = {}

        def look(path: str, xa: "Tensor", xb: "Tensor", *wide: "Tensor") -> bool:
            if self.parted is not None and Place.of(path)[:2] != Place.of(self.parted)[:2]:
                return False
            rest, own = iter(wide), (xa, xb)
            x, y = (next(rest) if run else z for run, z in zip(exact, own))
            place = Place.of(path)
            if place.name in READ:
                latest[place.stack, place.name] = path, x if exact[0] else y
                self.reads = dict(latest.values())
            if path not in self.seen:
                self._see(path, self.pairs(path, xa, xb))
            exactly = self.pairs(path, x, y)
            found = self.exact[path] = SAME if alike(exactly) else gap_over(exactly)
            ran = [(z, w) for z, w in zip(own, (x, y)) if z is not w]
            both_alike = not differs(self.seen[path]) and not differs(found)  # then so is what they round
            rounds = [gap_over(self.pairs(path, *one)) for one in (ran[:1] if both_alike else ran)]
            rounds = self.expected[path] = (rounds * 2)[: len(ran)]
            self.allowed[path] = EXACT if all(exact) else max(EXACT, TIMES * max(self._eps(), deviation(rounds)))
            if self.parted is None and not self.agrees(path):
                self.parted, self.bug = path, found.deviation > self.allowed[path]
            if self.parted is not None:
                self.theirs[path] = y if exact[0] else x
            return True

        sides = [self.a, self.b]
        if not all(exact):  # what runs shows the rounding of the file's type
            runs = 0 if exact[0] else 1
            sides[runs] = _as_coarse_as(sides[runs], sides[1 - runs])
        abreast([*sides, *filter(None, exact)], look, paths)

    def _eps(self) -> float:
        """Of the coarser of the two types."""
        import torch

        return max(torch.finfo(side.dtype).eps for side in (self.a, self.b))

    def _estimate(self, path: str) -> float:
        """How far rounding may have come there: √C steps of it in every layer that was passed."""
        place, spec = Place.of(path), self.a.model.spec
        before = spec.encoder.n_layers if spec.encoder is not None and not place.stack else 0
        passed = place.spec(spec).n_layers if place.layer is None and "embed" not in place.name else place.layer or 0
        return max(EXACT, self._eps() * spec.hidden_size**0.5 * (before + passed + 1))


def _as_coarse_as(side: Run, other: Run) -> Run:
    """The side in the other's type, where that is the coarser one."""
    import torch

    finer = torch.finfo(side.dtype).eps < torch.finfo(other.dtype).eps
    return replace(side, dtype_name=str(other.dtype).removeprefix("torch.")) if finer else side


def differs(gap: "Gap") -> bool:
    return bool(gap.deviation or gap.max_abs)


def deviation(gaps: "Iterable[Gap]") -> float:
    return sum(gap.deviation for gap in gaps)


def _shared(a: Run, b: Run, exact_a: Run, exact_b: Run) -> "Callable[[], tuple[str, str] | None]":
    """Where one side's weights are the other's, rounded to the type that its file stores, or to a narrower one that all
    its numbers have gone through, both compute with the same.

    The function that comes back says, after both have run, whose weights were the other's, and in which type; None
    where one was another.
    """
    import torch

    from gptcli.model.differences import between
    from gptcli.model.weights import Lazy, Weights

    names = [side.model.stored_dtype if side.model.checkpoint else "float64" for side in (a, b)]  # a config's decimals
    if "random" in (a.model.kind, b.model.kind):
        return lambda: None
    if names[0] == names[1]:
        rounding = between(a.model, b.model)
        if rounding is None:
            return lambda: None
        names["ab".index(rounding.side)] = rounding.word
    types, ours, theirs = [getattr(torch, name) for name in names], exact_a.weights, exact_b.weights
    whose: list[str] = []

    def rounds_to(fine: "Tensor", coarse: "Tensor", dtype: torch.dtype) -> bool:
        return fine.shape == coarse.shape and torch.equal(fine.to(dtype).to(fine.dtype), coarse)

    def settled(name: str) -> "Callable[..., Tensor]":
        def make(*ids: "Tensor") -> "Tensor":
            x, y = (w.rows(name, *ids) if ids else w[name] for w in (ours, theirs))
            if torch.equal(x, y):
                return y
            whose.append("A" if rounds_to(y, x, types[0]) else "B" if rounds_to(x, y, types[1]) else "")
            return x if whose[-1] else y

        return make if name in ours else lambda *ids: theirs.rows(name, *ids) if ids else theirs[name]

    exact_b.weights = Weights(Lazy({name: settled(name) for name in theirs.tensors}, theirs.tensors), theirs.ties)
    known = dict(zip("AB", names))
    return lambda: (whose[0], known[whose[0]]) if len({*whose}) == 1 and whose[0] else None
