"""`trace`: one head of one layer at one query, number by number, and the proof that watching changed nothing.

The run is the fused run. What is shown beside it (scores, mask, weights) is computed from the same q, k, v.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gptcli.errors import GptcliError
from gptcli.layout import Place
from gptcli.names import Names, Vocabulary
from gptcli.report import Finding, ModelFacts, Report
from gptcli.report.birth import birth
from gptcli.report.formulas import formulas, scaled, score_formula
from gptcli.run import Run, positions
from gptcli.spec import Spec
from gptcli.tokens import Token
from gptcli.trace import Recorder, Selection, points, shapes

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.attention import Sight

# Largest |weights @ v - fused| that rounding explains, relative to the head's largest Σ weight·|v|: of a long text's
# many values most cancel, and z itself may be far smaller than what was rounded.
TOLERANCE = {"float64": 1e-14, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
# Queries of a head whose whole [T, S] weights the proof looks at; beyond, only the query that is shown.
PROOF_ROWS = 2048
HEAVIEST = 16  # keys that a person is shown of a longer text, by weight

# Which attention: a text's own, a decoder's across to its source, or the source's own in the encoder.
Attending = Literal["self", "cross", "encoder"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One vector of the walk, at the query's position: what it is called, how it came about, all its numbers.

    mean and norm (the root of the sum of squares) are over all of them, in double precision.
    """

    path: str
    label: str
    formula: str
    values: list[float]
    mean: float
    norm: float


@dataclass(frozen=True, kw_only=True)
class KeyStep:
    """One key as the query sees it: product q·k, scaled, whether the mask lets it through, weight, weight · v.

    k and v: this head's vectors, k in the form that the query meets (rotated, normed); norm_k and norm_weighted: the
    norms of k and of weight · v; bias: what its distance adds to the score, where positions are told so.
    """

    position: int
    token: str
    id: int
    k: list[float]
    norm_k: float
    product: float
    bias: float | None
    scaled: float
    visible: bool
    weight: float
    v: list[float]
    weighted: list[float]
    norm_weighted: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim of the proof: an error beside what is allowed (0: must be exact)."""

    claim: str
    error: float
    allowed: float
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The numbers of one of a layer's n_heads heads, in the order of birth: before, keys, after.

    layer_index and head count from 0. attention: a text's own (self), across to its source (cross), or the source's own
    (encoder); n_layers: of this stack. score: how q·k becomes a score: scale multiplies it, softcap bounds it, where
    there is one. window: how many keys are seen at most (to each side, where not causal). sink: the weight that goes to
    no key, where the head has one; weights: the sum of all. heaviest: positions of the keys that weigh most (at most
    HEAVIEST); rest_weight: what the others weigh. edited: what an edit changed of scores and weights.
    """

    attention: Attending
    layer_index: int
    n_layers: int
    path: str
    head: int
    n_heads: int
    kv_head: int
    position: int
    token: str
    score: str
    scale: float
    softcap: float | None
    causal: bool
    window: int | None
    sink: float | None
    weights: float
    heaviest: list[int]
    rest_weight: float
    edited: list[str]
    before: list[Step]
    keys: list[KeyStep]
    after: list[Step]


@dataclass(kw_only=True)
class TraceReport(Report):
    schema = "gptcli.trace/1"
    model: ModelFacts
    n_layers: int
    n_heads: int
    tokens: list[list[Token]]
    source: list[list[Token]]
    walks: list[Walk]
    proof: list[Check]


@dataclass(frozen=True)
class PointFacts:
    """name: what the asked vocabulary calls the activation, where it has a name for it."""

    path: str
    axes: str
    shape: list[int]
    name: str | None


@dataclass(kw_only=True)
class PointsReport(Report):
    schema = "gptcli.points/1"
    model: ModelFacts
    tokens: list[list[Token]]
    vocabulary: Vocabulary
    points: list[PointFacts]


@dataclass(kw_only=True)
class ActivationReport(Report):
    """One activation, whole: values nest as its shape says. name: what the asked vocabulary calls it.

    rows: the tokens that its positions stand for, of each text; columns: its keys, where the last axis counts those.
    """

    schema = "gptcli.activation/1"
    model: ModelFacts
    tokens: list[list[Token]]
    source: list[list[Token]]
    rows: list[list[Token]]
    columns: list[list[Token]] | None
    path: str
    name: str | None
    axes: str
    shape: list[int]
    values: list
    mean: float
    std: float
    max_abs: float


def points_report(run: Run, names: Names) -> PointsReport:
    """Every activation that this model has (or a trace's file holds), with its shape for these ids."""
    every = shapes(run.model.spec, len(run.ids), run.width, run.source_width)
    found = [PointFacts(path, axes, list(shape), names.of(path)) for path, axes, shape in every if run.holds(path)]
    return PointsReport(model=run.facts(), tokens=run.tokens(), vocabulary=names.vocabulary, points=found)


def activation_report(run: Run, path: str, names: Names) -> ActivationReport:
    """One activation of the run, by our path."""
    from gptcli.model.measure import statistics

    axes = dict(points(run.model.spec))
    recorder = Recorder(path)
    logits = run.forward("all", recorder)
    x = recorder.kept[path]
    stats = statistics(x)
    place, tokens, source = Place.of(path), run.tokens(), run.source_tokens()
    across = place.name.startswith("cross.")
    keys = source if across or place.stack else tokens
    return ActivationReport(
        model=run.facts(),
        tokens=tokens,
        source=source,
        rows=keys if place.stack or "S" in axes[path][:-1] else tokens,
        columns=keys if axes[path].endswith("S") else None,
        path=path,
        name=names.of(path),
        axes=axes[path],
        shape=list(x.shape),
        values=x.tolist(),
        **stats._asdict(),
        findings=[] if (logits if logits.numel() else x).isfinite().all() else [birth(run)],
    )


def layers_of(wanted: str, spec: Spec) -> list[int]:
    """Indices from 0 that --layer means: 1 … N as documents count, L0 … from 0, -1 the last, `all`."""
    return _counted("--layer", wanted, spec.n_layers, first=1, letter="L")


def heads_of(wanted: str, spec: Spec, attending: Attending = "self") -> list[int]:
    """Indices from 0 that --head means: 0 … H-1, H0 …, -1 the last, `all`; H of the layer that has most."""
    layers = (spec.at(layer) for layer in range(spec.n_layers))
    most = max((here.cross if attending == "cross" else here.attention).n_heads for here in layers)
    return _counted("--head", wanted, most, first=0, letter="H")


def _counted(option: str, wanted: str, size: int, first: int, letter: str) -> list[int]:
    if wanted == "all":
        return list(range(size))
    from_zero = re.fullmatch(rf"{letter}([0-9]{{1,18}})", wanted, re.IGNORECASE)
    number = re.fullmatch(r"-?[0-9]{1,18}", wanted)
    if not from_zero and not number:
        raise GptcliError(f"{option} {wanted}: not a number", f"give {first} to {size - 1 + first}, -1 or all")
    index = int(from_zero[1]) if from_zero else int(wanted) - first
    if number and int(wanted) < 0:
        index = size + int(wanted)
    if not 0 <= index < size:
        noun = option.strip("-")
        why = f"{noun}s count from {first}" if wanted == "0" else f"this model has {size} {noun}s, counted from {first}"
        raise GptcliError(f"{option} {wanted}: {why}", f"give {first} to {size - 1 + first}, {letter}0, -1 or all")
    return [index]


def at_head(wanted: str) -> tuple[str, str] | None:
    """`L0H1` as (--layer, --head) that mean the same; None for anything else."""
    match = re.fullmatch(r"L([0-9]+)H([0-9]+)", wanted, re.IGNORECASE)
    return (f"L{match[1]}", match[2]) if match else None


def stack_of(attending: Attending, spec: Spec) -> Spec:
    """The architecture whose layers hold that attention. Raises GptcliError where there is none."""
    if attending == "self":
        return spec
    if spec.encoder is None:
        raise GptcliError(f"--attention {attending}: this model is one stack", "leave it out", "attention")
    return spec.encoder if attending == "encoder" else spec


def selection_of(width: int, heads: list[int], queries: list[int]) -> Selection:
    """The part of scores and weights that walks through these heads look at: every query, of a text that isn't long."""
    every = width <= PROOF_ROWS or len(queries) > 1
    shown = slice(None) if every else slice(queries[0], queries[0] + 1)
    return Selection(heads=slice(min(heads), max(heads) + 1), queries=shown)


def trace_report(
    run: Run, layers: list[int], heads: list[int], position: str, attending: Attending = "self"
) -> TraceReport:
    """Walks for every layer, head and position asked for, in one text, with one proof for all of them.

    Of several heads, each layer shows those that it has.
    """
    if len(run.ids) > 1:
        raise GptcliError(f"{len(run.ids)} texts, but trace walks through one", "give one text")
    width = run.source_width if attending == "encoder" else run.width
    queries = positions(position, width)
    select = selection_of(width, heads, queries)
    look = _Look(run, select, attending)
    for layer in layers:
        number = look.spec(layer).attention.n_heads
        if min(heads) >= number:
            what = f"--head {min(heads)}: layer {layer + 1} has {number} heads, counted from 0"
            raise GptcliError(what, f"give 0 to {number - 1}, -1 or all" if len(layers) == 1 else "name the layer")
    recorder = Recorder(*(f"{look.at(layer)}*" for layer in layers), select=select)
    watched = run.forward("all", recorder)
    look.kept = recorder.kept
    proof = [one for layer in layers for one in look.proof(layer, len(layers) > 1)]
    if not run.replayed:
        proof.append(check("logits have the same bits unwatched", differing(watched, run.forward("all")), 0))
    findings = [Finding("proof", f"{c.claim}: off by {c.error:g}, {c.allowed:g} allowed") for c in proof if not c.ok]
    if not watched.isfinite().all():  # of which a proof knows nothing but that it failed
        findings = [birth(run)]
    return TraceReport(
        model=run.facts(),
        n_layers=look.stack.n_layers,
        n_heads=look.stack.attention.n_heads,
        tokens=run.tokens(),
        source=run.source_tokens(),
        walks=[
            look.walk(layer, head, query)
            for layer in layers
            for head in heads
            if head < look.spec(layer).attention.n_heads
            for query in queries
        ],
        proof=proof,
        findings=findings,
    )


class _Look:
    """What was recorded of one text's run, in one kind of attention, and how to read it."""

    def __init__(self, run: Run, select: Selection, attending: Attending):
        self.run, self.select, self.attending = run, select, attending
        self.kept: dict[str, Tensor] = {}
        self.stack = stack_of(attending, run.model.spec)
        self.part = "cross" if attending == "cross" else "attn"
        source = (run.source_tokens() or [[]])[0]
        self.tokens = source if attending == "encoder" else run.tokens()[0]
        self.key_tokens = self.tokens if attending == "self" else source

    def at(self, layer: int) -> str:
        """What the paths of a layer begin with."""
        return f"{'encoder.' if self.attending == 'encoder' else ''}layers.{layer}."

    def spec(self, layer: int) -> Spec:
        """The layer, with the attention that is looked at."""
        here = self.stack.at(layer)
        return here.across if self.attending == "cross" else here

    def kv_head(self, layer: int, head: int) -> int:
        """The key/value head that a query head reads."""
        a = self.spec(layer).attention
        return head // (a.n_heads // a.n_kv_heads)

    def of(self, layer: int, name: str) -> "Tensor":
        """The recorded activation of a layer for the one text, without its batch axis."""
        return self.kept[self.at(layer) + name][0]

    def inner(self, layer: int, name: str) -> "Tensor":
        """The same of this attention's own: `q`, `pattern`…"""
        return self.of(layer, f"{self.part}.{name}")

    def has(self, layer: int, name: str) -> bool:
        return self.at(layer) + name in self.kept

    def key_name(self, layer: int, letter: str) -> str:
        """The last form of q or k before the product: rotated, normed, or as projected."""
        later = (f"{letter}_rot", f"{letter}_norm")
        later = later if self.spec(layer).attention.qk_norm_place == "before" else later[::-1]
        return next(name for name in (*later, letter) if self.has(layer, f"{self.part}.{name}"))

    def walk(self, layer: int, head: int, query: int) -> Walk:
        steps = list(self.steps(layer, head, query))
        cut = next(i for i, step in enumerate(steps) if step.label == f"{self.part}.z")
        a = self.spec(layer).attention
        sink = float(self.inner(layer, "sink")[self.inside(head, query)]) if a.sinks else None
        keys = self.keys(layer, head, query)
        heaviest = sorted(sorted(range(len(keys)), key=lambda i: -keys[i].weight)[:HEAVIEST])
        return Walk(
            attention=self.attending,
            layer_index=layer,
            n_layers=self.stack.n_layers,
            path=self.at(layer).removesuffix("."),
            head=head,
            n_heads=a.n_heads,
            kv_head=self.kv_head(layer, head),
            position=query,
            token=self.tokens[query].token,
            score=score_formula(self.spec(layer)),
            scale=a.head_dim**-0.5 if a.scale is None else a.scale,
            softcap=a.softcap,
            causal=a.causal,
            window=a.window,
            edited=self.edited(layer),
            sink=sink,
            weights=math.fsum([sink or 0.0, *(key.weight for key in keys)]),
            heaviest=heaviest,
            rest_weight=math.fsum(key.weight for i, key in enumerate(keys) if i not in heaviest),
            before=steps[:cut],
            keys=keys,
            after=steps[cut:],
        )

    def steps(self, layer: int, head: int, query: int) -> Iterator[Step]:
        """Every recorded activation of the layer but scores and weights, at this head and query.

        Of two attentions, the one that is looked at is opened; a walk across begins where the text's own has ended.
        """
        told = formulas(self.stack.at(layer), layer, self.at(0).removesuffix("layers.0."))
        other = "attn" if self.part == "cross" else "cross"
        before = ("resid_pre", "attn_norm", "attn_out", "attn_out_norm") if self.part == "cross" else ()
        aside = (*before, *(f"{self.part}.{name}" for name in ("scores", "pattern", "sink")))
        for path, tensor in self.kept.items():
            name = path.removeprefix(self.at(layer))
            if name == path or name in aside or name.startswith(f"{other}."):
                continue
            x = tensor[0]
            if x.ndim == 3:  # [H or G, T or S, D]
                of_keys = re.fullmatch(r"\w+\.[kv](_.*)?", name)
                x = x[self.kv_head(layer, head) if of_keys else head]
                if of_keys and self.part == "cross":
                    continue  # there are as many as the source has tokens, and none is the query's
            formula = ", then ".join((told[name], *self.edits(layer, name)))
            yield _step(path, name, formula, x[query])
            if name == f"{self.part}.z":
                yield _step(path, "merged", "all heads' z, side by side", tensor[0][:, query].flatten())

    def edits(self, layer: int, name: str) -> list[str]:
        """The edits of the run that touch an activation, as they were asked for."""
        return [] if self.run.edits is None else self.run.edits.of(self.at(layer) + name)

    def edited(self, layer: int) -> list[str]:
        """What they did to scores and weights, in words."""
        named = ((name, self.edits(layer, f"{self.part}.{name}")) for name in ("scores", "pattern"))
        return [f"{self.part}.{name}: {', '.join(edits)}" for name, edits in named if edits]

    def inside(self, head: int, query: int) -> tuple[int, int]:
        """Where a head and a query stand among those whose weights were computed."""
        return head - self.select.heads.start, query - (self.select.queries.start or 0)

    def keys(self, layer: int, head: int, query: int) -> list[KeyStep]:
        kv = self.kv_head(layer, head)
        k, v = self.inner(layer, self.key_name(layer, "k"))[kv], self.inner(layer, "v")[kv]  # [S, D]
        q = self.inner(layer, self.key_name(layer, "q"))[head, query]  # [D]
        inside = self.inside(head, query)
        scores, pattern = self.inner(layer, "scores")[inside], self.inner(layer, "pattern")[inside]  # [S]
        products = k.to(scores.dtype) @ q.to(scores.dtype)
        weighted = pattern[:, None] * v.to(pattern.dtype)  # [S, D]
        sight = self.sight(layer, slice(query, query + 1))
        seen = sight.mask()[0, 0, 0].tolist()
        biases = [None] * len(seen) if sight.bias is None else sight.bias[0, head, 0].tolist()
        norms = k.double().norm(dim=-1), weighted.double().norm(dim=-1)
        columns = [x.tolist() for x in (k, norms[0], products, scores, pattern, v, weighted, norms[1])]
        return [
            KeyStep(
                position=position,
                token=token.token,
                id=token.id,
                k=key,
                norm_k=norm_k,
                product=product,
                bias=biases[position],
                scaled=scaled,
                visible=seen[position],
                weight=weight,
                v=value,
                weighted=part,
                norm_weighted=norm_weighted,
            )
            for position, (token, key, norm_k, product, scaled, weight, value, part, norm_weighted) in enumerate(
                zip(self.key_tokens, *columns)
            )
        ]

    def sight(self, layer: int, queries: slice) -> "Sight":
        from gptcli.model.attention import Sight

        inputs, here = self.run.inputs("all"), self.spec(layer)
        if self.attending == "cross":
            return Sight.of(here.attention, inputs.positions, None, inputs.source.positions).at(queries)
        text = inputs.source if self.attending == "encoder" else inputs
        weights = self.run.weights.at("encoder") if self.attending == "encoder" else self.run.weights
        return Sight.of(here.attention, text.positions).biased(weights, here).at(queries)

    def proof(self, layer: int, layer_is_named: bool) -> Iterator[Check]:
        """What must hold of a layer, over every head and query whose weights were computed."""
        spec, at = self.spec(layer), self.at(layer)[:-1] + ": " if layer_is_named else ""
        pattern = self.inner(layer, "pattern")  # [h, t, S]
        z = self.inner(layer, "z")[self.select.heads, self.select.queries]  # [h, t, D]
        chosen = range(spec.attention.n_heads)[self.select.heads]
        v = self.inner(layer, "v")[[self.kv_head(layer, head) for head in chosen]]
        gap = (pattern @ v.to(pattern.dtype) - z.to(pattern.dtype)).abs().amax((1, 2))
        gap = gap / (pattern @ v.abs().to(pattern.dtype)).amax((1, 2)).clamp(min=1e-30)
        dtype = str(z.dtype).removeprefix("torch.")
        replaced = {name for name in ("scores", "pattern", "z") if self.edits(layer, f"{self.part}.{name}")}
        by_kernel = spec.attention.softcap is None and not replaced & {"scores", "pattern"}
        kernel = "the fused kernel's z" if by_kernel else "the z of the step-by-step function"
        if "z" not in replaced:
            yield check(f"{at}weights @ v = {kernel}", float(gap.max()), TOLERANCE[dtype])
        if "pattern" not in replaced:
            yield from self.rows(layer, pattern, dtype, at, "scores" in replaced)
        if spec.norm.placement != "post":  # there a sum is normed before anything keeps it
            yield from self.sums(layer, spec, at)

    def rows(self, layer: int, pattern: "Tensor", dtype: str, at: str, replaced: bool) -> Iterator[Check]:
        """What must hold of a softmax's rows [h, t, S]. replaced: its scores were, and a row of -∞ weighs none."""
        spec = self.spec(layer)
        sums = pattern.double().sum(-1)
        if spec.attention.sinks:
            sums = sums + self.inner(layer, "sink").double()
        with_sink = " with their sink" if spec.attention.sinks else ""
        allowed = 1e-12 if dtype == "float64" else 1e-5
        off = (sums - 1).abs()
        off = off.masked_fill(sums == 0, 0) if replaced else off
        yield check(f"{at}rows of weights{with_sink} sum to 1", float(off.max()), allowed)
        seen = self.sight(layer, self.select.queries).mask()[0]  # [1, t, S]
        yield check(f"{at}masked weights are 0", float(pattern.masked_fill(seen, 0).abs().max()), 0)

    def sums(self, layer: int, spec: Spec, at: str) -> Iterator[Check]:
        """The residual stream after a sublayer is the one before it and what the sublayer gives."""
        streams = ("resid_pre", "resid_mid", "resid_cross", "resid_post")
        streams = [name for name in streams if self.has(layer, name)]
        given = [name for name in ("attn_out", "cross_out", "mlp_out") if self.has(layer, name)]
        for before, out, after in zip(streams, given, streams[1:]):
            if self.edits(layer, after):
                continue
            out = f"{out}_norm" if self.has(layer, f"{out}_norm") else out
            added = self.of(layer, out)
            added = added if spec.residual_scale == 1.0 else added * spec.residual_scale
            error = float((self.of(layer, before) + added - self.of(layer, after)).abs().max())
            yield check(f"{at}{before} + {scaled(out, spec)} = {after}", error, 0)


def _step(path: str, label: str, formula: str, x: "Tensor") -> Step:
    wide = x.double()
    mean, norm = float(wide.mean()), float(wide.norm())
    return Step(path=path, label=label, formula=formula, values=x.tolist(), mean=mean, norm=norm)


def differing(a: "Tensor", b: "Tensor") -> float:
    """How many numbers of two tensors of one shape are not the same; NaN is the same as NaN."""
    return float((~((a == b) | (a.isnan() & b.isnan()))).sum())


def check(claim: str, error: float, allowed: float) -> Check:
    """A claim of the proof, from what was measured."""
    return Check(claim=claim, error=error, allowed=allowed, ok=error <= allowed)
