"""Softmax weights of chosen heads, one head after another, as a run gives birth to them.

What maps and rankings of heads share. Each head's weights are handed on when they are there, checked against what the
fused kernel gave, and let go: of all the heads of all the layers, one head's are held.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from gptcli.layout import Place
from gptcli.report import Finding
from gptcli.report.proof import TOLERANCE, Check, check, findings, softmax_claims
from gptcli.report.view import Attending, View
from gptcli.run import Run
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


class Patterns(View):
    """One text's run, looked at in one kind of attention."""

    def __init__(self, run: Run, attending: Attending = "self"):
        """Raises GptcliError for several texts, and for an attention that the model doesn't have."""
        run.single("heads are looked at in one")
        super().__init__(run, attending)

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

    def __call__(self, layers: list[int], heads: slice, queries: slice, take: Callable[[Weights], Any]) -> Watched:
        """Runs the model once, without its head. `take` is called with the weights of every head, layer by layer.

        Of a trace's file, weights that it holds alone are taken as they are.
        """
        births = _Births(self, heads, queries, take)
        wanted = [self.inner(layer, name) for layer in layers for name in ("pattern", "sink")]
        wanted += filter(self.run.holds, [self.inner(layer, name) for layer in layers for name in ("v", "z")])
        recorder = Recorder(*wanted, select=Selection(heads, queries, "head"), note=births.note)
        x = self.run.forward("all", recorder, head=self.run.needs_head(recorder.wants))
        proof = births.proof()
        return Watched(births.taken, proof, findings(self.run, proof, x))


class _Births:
    """Notes a layer's tensors as they pass: a head's weights are handed on; what they give is kept until z is there."""

    def __init__(self, patterns: Patterns, heads: slice, queries: slice, take: Callable[[Weights], Any]):
        self.patterns, self.heads, self.queries, self.take = patterns, heads, queries, take
        self.taken: list[Any] = []
        self.claims: dict[str, tuple[list[float], float]] = {}  # the errors of each, and what is allowed
        self.layer = -1

    def begin(self, layer: int) -> None:
        """Of the layer that is passing: the heads to come, who may be seen, v [G, S, D], and of the heads that have
        passed weights @ v [t, D] and the largest Σ weight·|v|.
        """
        self.layer, self.spec = layer, self.patterns.spec(layer)
        self.coming = iter(range(self.spec.attention.n_heads)[self.heads])
        self.seen = self.patterns.sight(layer, self.queries).mask()[0, 0]  # [t, S]
        self.v: Tensor | None = None
        self.given: list[tuple[Tensor, float]] = []

    def note(self, path: str, x: "Tensor") -> None:
        """Keeps nothing of what it is given, but what the proof of this layer needs."""
        place = Place.of(path)
        if place.layer != self.layer:
            self.begin(place.layer)
        match place.name.rpartition(".")[2]:
            case "v":
                self.v = x[0]  # [G, S, D]
            case "pattern":
                self.pattern = x[0, 0]  # [t, S]
                if not self.spec.attention.sinks:
                    self.head(None)
            case "sink":
                self.head(x[0, 0])
            case "z":
                self.whole(x[0])

    def head(self, sink: "Tensor | None") -> None:
        """All of a head's weights are there."""
        pattern, layer, head = self.pattern, self.layer, next(self.coming)
        replaced = self.patterns.replaced(layer)
        if self.v is not None:
            v = self.v[self.patterns.kv_head(layer, head)].to(pattern.dtype)  # [S, D]
            self.given.append((pattern @ v, float((pattern @ v.abs()).max())))
        for claim in () if "pattern" in replaced else softmax_claims(pattern, sink, self.seen, "scores" in replaced):
            self.claim(*claim)
        self.taken.append(self.take(Weights(layer, head, pattern, sink, self.seen)))

    def whole(self, z: "Tensor") -> None:
        """z [H, T, D] of the whole layer is there."""
        if "z" in self.patterns.replaced(self.layer):
            return
        said, allowed = f"weights @ v = {self.patterns.kernel(self.layer)}", TOLERANCE[str(z.dtype).partition(".")[2]]
        for (ours, moved), theirs in zip(self.given, z[self.heads, self.queries]):
            self.claim(said, (ours - theirs.to(ours.dtype)).abs() / max(moved, 1e-30), allowed)

    def claim(self, said: str, errors: "Tensor", allowed: float) -> None:
        self.claims.setdefault(said, ([], allowed))[0].append(float(errors.max()))

    def proof(self) -> list[Check]:
        """Each claim with its largest error over the heads; NaN is worse than any."""
        first = sorted(self.claims.items(), key=lambda item: not item[0].startswith("weights"))
        return [check(said, max(errors, key=lambda x: (x != x, x)), allowed) for said, (errors, allowed) in first]
