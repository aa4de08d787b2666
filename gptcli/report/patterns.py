"""Softmax weights of chosen heads, one head after another, as a run gives birth to them.

What maps and rankings of heads share. Each head's weights are handed on when they are there, checked against what the
fused kernel gave, and let go: of all the heads of all the layers, one head's are held.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from gptcli.errors import GptcliError
from gptcli.layout import Place
from gptcli.report import Finding
from gptcli.report.birth import birth
from gptcli.report.trace import TOLERANCE, Attending, Check, check, stack_of
from gptcli.run import Run
from gptcli.spec import Spec
from gptcli.tokens import Token
from gptcli.trace import Recorder, Selection

if TYPE_CHECKING:
    from torch import Tensor


class Weights(NamedTuple):
    """One head's softmax weights: pattern [t, S] and its sink's [t] for the chosen queries, and who may be seen,
    seen [t, S].
    """

    layer: int
    head: int
    pattern: "Tensor"
    sink: "Tensor | None"
    seen: "Tensor"


class Watched(NamedTuple):
    """What `take` made of each head, by layer and head, and what is proved of all of them together."""

    taken: list[Any]
    proof: list[Check]
    findings: list[Finding]


class Patterns:
    """One text's run, looked at in one kind of attention."""

    def __init__(self, run: Run, attending: Attending = "self"):
        """Raises GptcliError for several texts, and for an attention that the model doesn't have."""
        if len(run.ids) > 1:
            raise GptcliError(f"{len(run.ids)} texts, but heads are looked at in one", "give one text")
        self.run, self.attending = run, attending
        self.stack = stack_of(attending, run.model.spec)
        self.part = "cross" if attending == "cross" else "attn"

    @property
    def queries(self) -> list[Token]:
        """The tokens that look."""
        return self.run.source_tokens()[0] if self.attending == "encoder" else self.run.tokens()[0]

    @property
    def keys(self) -> list[Token]:
        """The tokens that are looked at."""
        return self.run.tokens()[0] if self.attending == "self" else self.run.source_tokens()[0]

    def path(self, layer: int) -> str:
        """Where a layer's weights and activations stand."""
        return f"{'encoder.' if self.attending == 'encoder' else ''}layers.{layer}"

    def spec(self, layer: int) -> Spec:
        """The layer, with the attention that is looked at."""
        here = self.stack.at(layer)
        return here.across if self.attending == "cross" else here

    def kv_head(self, layer: int, head: int) -> int:
        """The key/value head that a query head reads."""
        a = self.spec(layer).attention
        return head // (a.n_heads // a.n_kv_heads)

    def place(self, found: Weights) -> dict[str, Any]:
        """Which head these weights are of, as every report says it, and how far it sees."""
        a = self.spec(found.layer).attention
        return {
            "layer_index": found.layer,
            "path": self.path(found.layer),
            "head": found.head,
            "n_heads": a.n_heads,
            "kv_head": self.kv_head(found.layer, found.head),
            "n_kv_heads": a.n_kv_heads,
            "window": a.window,
        }

    def edited(self, layer: int) -> set[str]:
        """What of this layer's attention an edit replaces: scores, pattern, z."""
        edits, at = self.run.edits, f"{self.path(layer)}.{self.part}"
        return set() if edits is None else {name for name in ("scores", "pattern", "z") if edits.of(f"{at}.{name}")}

    def __call__(self, layers: list[int], heads: slice, queries: slice, take: Callable[[Weights], Any]) -> Watched:
        """Runs the model once, without its head. `take` is called with the weights of every head, layer by layer.

        Of a trace's file, weights that it holds alone are taken as they are.
        """
        births = _Births(self, queries, heads, take)
        wanted = [f"{self.path(layer)}.{self.part}.{name}" for layer in layers for name in ("pattern", "sink")]
        others = [f"{self.path(layer)}.{self.part}.{name}" for layer in layers for name in ("v", "z")]
        wanted += filter(self.run.holds, others)
        recorder = Recorder(*wanted, select=Selection(heads, queries, each=True), note=births.note)
        x = self.run.forward("all", recorder, head=self.run.edits is not None)
        proof = list(births.proof())
        findings = [
            Finding("proof", f"{c.claim}: off by {c.error:g}, {c.allowed:g} allowed") for c in proof if not c.ok
        ]
        if not x.isfinite().all():
            findings = [birth(self.run)]
        return Watched(births.taken, proof, findings)

    def seen(self, queries: slice) -> "Callable[[int], Tensor]":
        """For a layer, who may be seen by the chosen queries: [t, S]. Made once for layers that see alike."""
        from gptcli.model.attention import Sight

        inputs = self.run.inputs("all")
        text = inputs.source if self.attending == "encoder" else inputs
        keys = inputs.source.positions if self.attending == "cross" else None

        @cache
        def by(part: Any) -> "Tensor":
            return Sight.of(part, text.positions, None, keys).at(queries).mask()[0, 0]

        return lambda layer: by(self.spec(layer).attention)


class _Births:
    """Notes a layer's tensors as they pass: a head's weights are handed on; what they give is kept until z is there."""

    def __init__(self, patterns: Patterns, queries: slice, heads: slice, take: Callable[[Weights], Any]):
        self.patterns, self.queries, self.heads, self.take = patterns, queries, heads, take
        self.seen = patterns.seen(queries)
        self.taken: list[Any] = []
        self.layer, self.number = -1, 0  # the layer that is passing, and how many of its heads have
        self.v: Tensor | None = None
        self.given: list[Tensor] = []  # of each of them: weights @ v [t, D]
        self.moved: list[float] = []  # the largest Σ weight·|v|
        self.dtype = "float32"
        self.errors: dict[str, list[float]] = {}

    def note(self, path: str, x: "Tensor") -> None:
        """Keeps nothing of what it is given, but what the proof of this layer needs."""
        layer, name = Place.of(path).layer, path.rpartition(".")[2]
        if layer != self.layer:
            self.layer, self.number, self.v, self.given, self.moved = layer, 0, None, [], []
        sinks = self.patterns.spec(layer).attention.sinks
        match name:
            case "v":
                self.v = x[0]  # [G, S, D]
            case "pattern":
                self.pattern = x[0, 0]  # [t, S]
                if not sinks:
                    self.head(None)
            case "sink":
                self.head(x[0, 0])
            case "z":
                self.whole(x[0])

    def head(self, sink: "Tensor | None") -> None:
        """All of a head's weights are there."""
        pattern, layer = self.pattern, self.layer
        seen, edited = self.seen(layer), self.patterns.edited(layer)
        head = range(self.patterns.spec(layer).attention.n_heads)[self.heads][self.number]
        self.number += 1
        if self.v is not None:
            v = self.v[self.patterns.kv_head(layer, head)].to(pattern.dtype)  # [S, D]
            self.given.append(pattern @ v)
            self.moved.append(float((pattern @ v.abs()).max()))
        if "pattern" not in edited:
            sums = pattern.sum(-1) if sink is None else pattern.sum(-1) + sink
            off = (sums - 1).abs()
            off = off.masked_fill(sums == 0, 0) if "scores" in edited else off  # a row of -∞ weighs none
            self.claim("rows of weights" + " with their sink" * (sink is not None) + " sum to 1", off)
            self.claim("masked weights are 0", pattern.masked_fill(seen, 0).abs())
        self.taken.append(self.take(Weights(layer, head, pattern, sink, seen)))

    def whole(self, z: "Tensor") -> None:
        """z [H, T, D] of the whole layer is there."""
        self.dtype = str(z.dtype).removeprefix("torch.")
        edited = self.patterns.edited(self.layer)
        if "z" in edited:
            return
        capped = self.patterns.spec(self.layer).attention.softcap is not None
        kernel = "the z of the step-by-step function" if capped or edited else "the fused kernel's z"
        for ours, theirs, moved in zip(self.given, z[self.heads, self.queries], self.moved):
            self.claim(f"weights @ v = {kernel}", (ours - theirs.to(ours.dtype)).abs() / max(moved, 1e-30))

    def claim(self, said: str, errors: "Tensor") -> None:
        self.errors.setdefault(said, []).append(float(errors.max()))

    def proof(self) -> Iterator[Check]:
        """Each claim with its largest error over the heads."""
        exact = 1e-12 if self.dtype == "float64" else 1e-5
        allowed = {"weights": TOLERANCE[self.dtype], "rows": exact, "masked": 0.0}
        for said, errors in sorted(self.errors.items(), key=lambda one: list(allowed).index(one[0].split()[0])):
            worst = next((error for error in errors if error != error), max(errors))  # NaN is worse than any
            yield check(said, worst, allowed[said.split()[0]])
