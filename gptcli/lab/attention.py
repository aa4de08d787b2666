"""Attention in six steps: project, score, scale, mask, softmax, weighted sum, and the fused kernel's answer beside."""

from collections.abc import Iterator
from dataclasses import replace
from math import isclose
from typing import TYPE_CHECKING

from gptcli.data import mutable
from gptcli.lab.engine import listed, require
from gptcli.report import Finding
from gptcli.report.lab import AttentionReport, Matrix, Step
from gptcli.report.proof import TOLERANCE
from gptcli.run import Run
from gptcli.spec import Attention, Relative, Spec
from gptcli.trace import Recorder, Selection

if TYPE_CHECKING:
    from torch import Tensor

MOST_WEIGHTS = 4096  # numbers of a weight that are shown
STEPS = ("project", "score", "scale", "mask", "softmax", "weighted sum")


def attention_report(run: Run, layer: int, head: int, both_ways: bool) -> AttentionReport:
    """The six steps of one head (from 0) of one layer (from 0), for one text. both_ways: nothing is masked.

    Raises GptcliError where there are several texts, or the layer has no such head.
    """
    require(len(run.ids) == 1, f"{len(run.ids)} texts, but the steps are of one", "give one text")
    if both_ways:
        run = replace(run, model=replace(run.model, spec=unmasked(run.model.spec)))
    part = run.model.spec.at(layer).attention
    known = f"layer {layer + 1} has {part.n_heads} heads, counted from 0"
    require(head < part.n_heads, f"--head {head}: {known}", f"give 0 to {part.n_heads - 1}")
    recorder = Recorder(f"layers.{layer}.*", select=Selection(heads=slice(head, head + 1)))
    run.forward("all", recorder)
    look = _Look(run, layer, head, {path.split(".", 2)[2]: x[0] for path, x in recorder.kept.items()})
    seen, gap = look.sight.mask(), look.gap()
    hidden, pairs = int((~seen).sum()), seen.numel()
    read = _read_by_the_last(look.labels, look.kept["attn.pattern"][0, -1].tolist())
    return AttentionReport(
        model=run.facts(),
        tokens=run.tokens(),
        both_ways=both_ways,
        layer_index=layer,
        n_layers=run.model.spec.n_layers,
        head=head,
        kv_head=look.kv_head,
        n_heads=part.n_heads,
        given=list(look.given()),
        steps=[Step(number=i, name=name, matrices=of) for i, (name, of) in enumerate(zip(STEPS, look.steps()), 1)],
        hidden=hidden,
        pairs=pairs,
        kernel="the fused kernel" if part.softcap is None else "the engine's step-by-step function",
        gap=gap,
        see=f"{read}; {_masked(hidden, pairs)}",
        findings=[] if gap <= look.allowed() else [Finding("proof", f"weights @ V is off by {gap:g}")],
    )


@mutable
class _Look:
    """What was recorded of one layer in one text's run, without its batch axis, and how to read it for one head."""

    run: Run
    layer: int
    head: int
    kept: "dict[str, Tensor]"

    def __post_init__(self):
        from gptcli.model.attention import Sight

        self.spec = self.run.model.spec.at(self.layer)
        self.part = self.spec.attention
        self.kv_head = self.head // (self.part.n_heads // self.part.n_kv_heads)
        self.labels = _labels([token.token or str(token.id) for token in self.run.tokens()[0]])
        self.sight = Sight.of(self.part, self.run.inputs("all").positions)

    def matrix(self, name: str, formula: str, inside: str, x: "Tensor") -> Matrix:
        """inside: the activation's name within the layer; empty where the engine keeps none."""
        path = f"layers.{self.layer}.{inside}" if inside else ""
        shape, values = list(x.shape), x.tolist()
        return Matrix(name=name, formula=formula, path=path, shape=shape, values=values, labels=self.labels)

    def given(self) -> Iterator[Matrix]:
        """What is read, and this head's weights as documents write them, [in, out]."""
        normed = "attn_norm" in self.kept and self.spec.norm.placement != "post"
        read = "attn_norm" if normed else "resid_pre"
        yield self.matrix("x", "what attention reads", read, self.kept[read])
        size = self.part.head_dim
        for letter in "qkv":
            path = f"layers.{self.layer}.attn.{letter}.weight"
            first = self.of(letter) * size
            w = self.run.weights[path][first : first + size].T  # [H·D or G·D, C] → [C, D]
            values = w.tolist() if w.numel() <= MOST_WEIGHTS else None
            yield Matrix(
                name=f"W_{letter.upper()}", formula="", path=path, shape=list(w.shape), values=values, labels=[]
            )

    def of(self, letter: str) -> int:
        """Which of the heads of q, k or v is this head's."""
        return self.head if letter == "q" else self.kv_head

    def last(self, letter: str) -> "Tensor":
        """q, k or v of this head as the scores meet it: projected, normed, turned. [T, D]."""
        return next(self.kept[name] for name in reversed(self.kept) if name.startswith(f"attn.{letter}"))[
            self.of(letter)
        ]

    def steps(self) -> Iterator[list[Matrix]]:
        from gptcli.model.attention import weigh

        yield list(self.projected())
        q, k = self.last("q"), self.last("k")
        raw = weigh(q[None, None], k[None, None], self.sight.mask(), 1.0)[0][0, 0]  # [T, S]
        yield [self.matrix("scores", "q·k of every pair", "", raw)]
        scores = self.kept["attn.scores"][0]
        yield [self.matrix("scaled", _scaled(self.spec), "attn.scores", scores)]
        masked = scores + self.sight.added(scores.dtype)[0, 0]
        yield [self.matrix("masked", "−∞ where the query may not look", "", masked)]
        shares = "e^score, by row: shares of their sum" + " and the sink's" * self.part.sinks
        yield [self.matrix("weights", shares, "attn.pattern", self.kept["attn.pattern"][0])]
        yield [self.matrix("out", "weights @ V", "attn.z", self.kept["attn.z"][self.head])]

    def projected(self) -> Iterator[Matrix]:
        """Q, K and V, and what Q and K become before they meet."""
        for name, x in self.kept.items():
            if name.startswith(("attn.q", "attn.k", "attn.v")):
                letter, later = name[5], name[7:]
                formula = f"x @ W_{letter.upper()}" + f" + b_{letter.upper()}" * self.part.bias
                formula = {"norm": "normed", "rot": "turned by position"}.get(later, formula)
                yield self.matrix(f"{letter.upper()} {later}".strip(), formula, name, x[self.of(letter)])

    def gap(self) -> float:
        """The largest |weights @ V − z|."""
        pattern, z = self.kept["attn.pattern"][0], self.kept["attn.z"][self.head]
        return float((pattern @ self.last("v").to(pattern.dtype) - z.to(pattern.dtype)).abs().max())

    def allowed(self) -> float:
        """The largest gap that rounding explains."""
        pattern, z = self.kept["attn.pattern"][0], self.kept["attn.z"]
        largest = (pattern @ self.last("v").abs().to(pattern.dtype)).max()
        return TOLERANCE[str(z.dtype).removeprefix("torch.")] * float(largest)


def unmasked(spec: Spec) -> Spec:
    """The same architecture, but that each token sees every one."""

    def opened(part: Attention | None) -> Attention | None:
        return part and replace(part, causal=False, window=None)

    variants = tuple(replace(variant, attention=opened(variant.attention)) for variant in spec.variants)
    return replace(spec, attention=opened(spec.attention), variants=variants)


def _labels(words: list[str]) -> list[str]:
    """The words, with their places where one stands twice."""
    return words if len(set(words)) == len(words) else [f"{i} {word}" for i, word in enumerate(words)]


def _scaled(spec: Spec) -> str:
    """How a product of query and key becomes a score."""
    part = spec.attention
    scale = part.head_dim**-0.5 if part.scale is None else part.scale
    said = f"scores/√{part.head_dim}" if isclose(scale, part.head_dim**-0.5) else f"scores·{scale:g}"
    said = said if part.softcap is None else f"{part.softcap:g}·tanh({said}/{part.softcap:g})"
    return f"{said} + what the distance adds" if isinstance(spec.position, Relative) else said


def _read_by_the_last(labels: list[str], weights: list[float]) -> str:
    heaviest = sorted(range(len(weights)), key=lambda i: -weights[i])[:3]
    return f"{labels[-1]} takes {listed(f'{weights[i]:.4f} of {labels[i]}' for i in heaviest)}"


def _masked(hidden: int, pairs: int) -> str:
    if pairs == 1:
        return "a token alone sees itself, mask or no mask"
    return f"the mask hides {hidden} of {pairs} pairs" if hidden else f"no mask: all {pairs} pairs count"
