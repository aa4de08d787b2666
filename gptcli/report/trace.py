"""`trace`: one head of one layer at one query, number by number, and the proof that watching changed nothing.

The run is the fused run. What is shown beside it (scores, mask, weights) is computed from the same q, k, v.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptcli.errors import GptcliError, nearest
from gptcli.report import Finding, ModelFacts, Report
from gptcli.run import Run, positions
from gptcli.spec import (
    Attention,
    Experts,
    LayerNorm,
    Learned,
    LinearScaling,
    NoMLP,
    NoNorm,
    NoScaling,
    RMSNorm,
    Rope,
    Spec,
)
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
    norms of k and of weight · v.
    """

    position: int
    token: str
    id: int
    k: list[float]
    norm_k: float
    product: float
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

    layer_index and head count from 0. score: how q·k becomes a score: scale multiplies it, softcap bounds it, where
    there is one. window: how many keys are seen at most (to each side, where not causal). sink: the weight that goes to
    no key, where the head has one; weights: the sum of all. heaviest: positions of the keys that weigh most (at most
    HEAVIEST); rest_weight: what the others weigh.
    """

    layer_index: int
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
    walks: list[Walk]
    proof: list[Check]


@dataclass(frozen=True)
class PointFacts:
    path: str
    axes: str
    shape: list[int]


@dataclass(kw_only=True)
class PointsReport(Report):
    schema = "gptcli.points/1"
    model: ModelFacts
    tokens: list[list[Token]]
    points: list[PointFacts]


@dataclass(kw_only=True)
class ActivationReport(Report):
    """One activation, whole: values nest as its shape says."""

    schema = "gptcli.activation/1"
    model: ModelFacts
    tokens: list[list[Token]]
    path: str
    axes: str
    shape: list[int]
    values: list
    mean: float
    std: float
    max_abs: float


def points_report(run: Run) -> PointsReport:
    """Every activation that this model has, with its shape for these ids."""
    every = shapes(run.model.spec, len(run.ids), run.width, run.source_width)
    found = [PointFacts(path, axes, list(shape)) for path, axes, shape in every]
    return PointsReport(model=run.facts(), tokens=run.tokens(), points=found)


def activation_report(run: Run, path: str) -> ActivationReport:
    """One activation of the run. Raises GptcliError for a path that this model doesn't have."""
    from gptcli.model.measure import statistics

    axes = dict(points(run.model.spec))
    if path not in axes:
        raise GptcliError(
            f"--at {path}: no such activation", f"{nearest(path, axes)} --list prints all".strip(), "path"
        )
    recorder = Recorder(path)
    run.forward("all", recorder)
    x = recorder.kept[path]
    stats = statistics(x)
    return ActivationReport(
        model=run.facts(),
        tokens=run.tokens(),
        path=path,
        axes=axes[path],
        shape=list(x.shape),
        values=x.tolist(),
        **stats._asdict(),
        findings=[] if math.isfinite(stats.max_abs) else [_not_finite(path)],
    )


def _not_finite(path: str) -> Finding:
    return Finding("not-finite", f"{path} holds NaN or infinity", path)


def layers_of(wanted: str, spec: Spec) -> list[int]:
    """Indices from 0 that --layer means: 1 … N as documents count, L0 … from 0, -1 the last, `all`."""
    return _counted("--layer", wanted, spec.n_layers, first=1, letter="L")


def heads_of(wanted: str, spec: Spec) -> list[int]:
    """Indices from 0 that --head means: 0 … H-1, H0 …, -1 the last, `all`; H of the layer that has most."""
    most = max(spec.at(layer).attention.n_heads for layer in range(spec.n_layers))
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


def trace_report(run: Run, layers: list[int], heads: list[int], position: str) -> TraceReport:
    """Walks for every layer, head and position asked for, in one text, with one proof for all of them.

    Of several heads, each layer shows those that it has.
    """
    if len(run.ids) > 1:
        raise GptcliError(f"{len(run.ids)} texts, but trace walks through one", "give one text")
    queries = positions(position, run.width)
    spec = run.model.spec
    for layer in layers:
        number = spec.at(layer).attention.n_heads
        if min(heads) >= number:
            what = f"--head {min(heads)}: layer {layer + 1} has {number} heads, counted from 0"
            raise GptcliError(what, f"give 0 to {number - 1}, -1 or all" if len(layers) == 1 else "name the layer")
    shown = slice(None) if run.width <= PROOF_ROWS or len(queries) > 1 else slice(queries[0], queries[0] + 1)
    select = Selection(heads=slice(min(heads), max(heads) + 1), queries=shown)
    recorder = Recorder(*(f"layers.{layer}.*" for layer in layers), select=select)
    watched = run.forward("all", recorder)
    look = _Look(run, recorder.kept, select)
    proof = [check for layer in layers for check in look.proof(layer, len(layers) > 1)]
    proof.append(_check("logits have the same bits unwatched", _differing(watched, run.forward("all")), 0))
    findings = [Finding("proof", f"{c.claim}: off by {c.error:g}, {c.allowed:g} allowed") for c in proof if not c.ok]
    if not findings and not watched.isfinite().all():
        findings = [_not_finite("logits")]
    return TraceReport(
        model=run.facts(),
        n_layers=run.model.spec.n_layers,
        n_heads=spec.attention.n_heads,
        tokens=run.tokens(),
        walks=[
            look.walk(layer, head, query)
            for layer in layers
            for head in heads
            if head < spec.at(layer).attention.n_heads
            for query in queries
        ],
        proof=proof,
        findings=findings,
    )


@dataclass
class _Look:
    """What was recorded of one text's run, and how to read it."""

    run: Run
    kept: dict[str, "Tensor"]
    select: Selection

    def __post_init__(self):
        self.tokens = self.run.tokens()[0]

    def spec(self, layer: int) -> Spec:
        return self.run.model.spec.at(layer)

    def kv_head(self, layer: int, head: int) -> int:
        """The key/value head that a query head reads."""
        a = self.spec(layer).attention
        return head // (a.n_heads // a.n_kv_heads)

    def of(self, layer: int, name: str) -> "Tensor":
        """The recorded activation of a layer for the one text, without its batch axis."""
        return self.kept[f"layers.{layer}.{name}"][0]

    def has(self, layer: int, name: str) -> bool:
        return f"layers.{layer}.{name}" in self.kept

    def key_name(self, layer: int, letter: str) -> str:
        """The last form of q or k before the product: rotated, normed, or as projected."""
        later = (f"attn.{letter}_rot", f"attn.{letter}_norm")
        later = later if self.spec(layer).attention.qk_norm_place == "before" else later[::-1]
        return next(name for name in (*later, f"attn.{letter}") if self.has(layer, name))

    def walk(self, layer: int, head: int, query: int) -> Walk:
        steps = list(self.steps(layer, head, query))
        cut = next(i for i, step in enumerate(steps) if step.path.endswith(".attn.z"))
        a = self.spec(layer).attention
        scale = a.head_dim**-0.5 if a.scale is None else a.scale
        sink = float(self.of(layer, "attn.sink")[self.inside(head, query)]) if self.has(layer, "attn.sink") else None
        keys = self.keys(layer, head, query)
        heaviest = sorted(sorted(range(len(keys)), key=lambda i: -keys[i].weight)[:HEAVIEST])
        return Walk(
            layer_index=layer,
            path=f"layers.{layer}",
            head=head,
            n_heads=a.n_heads,
            kv_head=self.kv_head(layer, head),
            position=query,
            token=self.tokens[query].token,
            score=_score_formula(a, scale),
            scale=scale,
            softcap=a.softcap,
            causal=a.causal,
            window=a.window,
            sink=sink,
            weights=math.fsum([sink or 0.0, *(key.weight for key in keys)]),
            heaviest=heaviest,
            rest_weight=math.fsum(key.weight for i, key in enumerate(keys) if i not in heaviest),
            before=steps[:cut],
            keys=keys,
            after=steps[cut:],
        )

    def steps(self, layer: int, head: int, query: int) -> Iterator[Step]:
        """Every recorded activation of the layer but scores and weights, at this head and query."""
        told = formulas(self.spec(layer), layer)
        for path, tensor in self.kept.items():
            at, name = f"layers.{layer}.", path.removeprefix(f"layers.{layer}.")
            if not path.startswith(at) or name in ("attn.scores", "attn.pattern", "attn.sink"):
                continue
            x = tensor[0]
            if x.ndim == 3:  # [H or G, T, D]
                x = x[self.kv_head(layer, head) if re.fullmatch(r"attn\.[kv](_.*)?", name) else head]
            yield _step(path, name, told[name], x[query])
            if name == "attn.z":
                yield _step(path, "merged", "all heads' z, side by side", tensor[0][:, query].flatten())

    def inside(self, head: int, query: int) -> tuple[int, int]:
        """Where a head and a query stand among those whose weights were computed."""
        return head - self.select.heads.start, query - (self.select.queries.start or 0)

    def keys(self, layer: int, head: int, query: int) -> list[KeyStep]:
        kv = self.kv_head(layer, head)
        k, v = self.of(layer, self.key_name(layer, "k"))[kv], self.of(layer, "attn.v")[kv]  # [S, D]
        q = self.of(layer, self.key_name(layer, "q"))[head, query]  # [D]
        inside = self.inside(head, query)
        scores, pattern = self.of(layer, "attn.scores")[inside], self.of(layer, "attn.pattern")[inside]  # [S]
        products = k.to(scores.dtype) @ q.to(scores.dtype)
        weighted = pattern[:, None] * v.to(pattern.dtype)  # [S, D]
        seen = self.sight(layer, slice(query, query + 1)).mask()[0, 0, 0].tolist()
        norms = k.double().norm(dim=-1), weighted.double().norm(dim=-1)  # [S]
        columns = [x.tolist() for x in (k, norms[0], products, scores, pattern, v, weighted, norms[1])]
        return [
            KeyStep(
                position=position,
                token=token.token,
                id=token.id,
                k=key,
                norm_k=norm_k,
                product=product,
                scaled=scaled,
                visible=seen[position],
                weight=weight,
                v=value,
                weighted=part,
                norm_weighted=norm_weighted,
            )
            for position, (token, key, norm_k, product, scaled, weight, value, part, norm_weighted) in enumerate(
                zip(self.tokens, *columns)
            )
        ]

    def sight(self, layer: int, queries: slice) -> "Sight":
        from gptcli.model.attention import Sight

        return Sight.of(self.spec(layer).attention, self.run.inputs("all").positions, None).at(queries)

    def proof(self, layer: int, layer_is_named: bool) -> Iterator[Check]:
        """What must hold of a layer, over every head and query whose weights were computed."""
        spec, at = self.spec(layer), f"layers.{layer}: " if layer_is_named else ""
        pattern = self.of(layer, "attn.pattern")  # [h, t, S]
        z = self.of(layer, "attn.z")[self.select.heads, self.select.queries]  # [h, t, D]
        chosen = range(spec.attention.n_heads)[self.select.heads]
        v = self.of(layer, "attn.v")[[self.kv_head(layer, head) for head in chosen]]
        gap = (pattern @ v.to(pattern.dtype) - z.to(pattern.dtype)).abs().amax((1, 2))
        gap = gap / (pattern @ v.abs().to(pattern.dtype)).amax((1, 2)).clamp(min=1e-30)
        dtype = str(z.dtype).removeprefix("torch.")
        kernel = "the fused kernel's z" if spec.attention.softcap is None else "the z of the step-by-step function"
        yield _check(f"{at}weights @ v = {kernel}", float(gap.max()), TOLERANCE[dtype])
        sums = pattern.double().sum(-1)
        if spec.attention.sinks:
            sums = sums + self.of(layer, "attn.sink").double()
        with_sink = " with their sink" if spec.attention.sinks else ""
        allowed = 1e-12 if dtype == "float64" else 1e-5
        yield _check(f"{at}rows of weights{with_sink} sum to 1", float((sums - 1).abs().max()), allowed)
        seen = self.sight(layer, self.select.queries).mask()[0]  # [1, t, S]
        yield _check(f"{at}masked weights are 0", float(pattern.masked_fill(seen, 0).abs().max()), 0)
        if spec.norm.placement == "post":
            return  # there a sum is normed before anything keeps it
        for before, out, after in (("resid_pre", "attn_out", "resid_mid"), ("resid_mid", "mlp_out", "resid_post")):
            out = f"{out}_norm" if self.has(layer, f"{out}_norm") else out
            if self.has(layer, out):
                added = self.of(layer, out)
                added = added if spec.residual_scale == 1.0 else added * spec.residual_scale
                error = float((self.of(layer, before) + added - self.of(layer, after)).abs().max())
                yield _check(f"{at}{before} + {_scaled(out, spec)} = {after}", error, 0)


def _step(path: str, label: str, formula: str, x: "Tensor") -> Step:
    wide = x.double()
    mean, norm = float(wide.mean()), float(wide.norm())
    return Step(path=path, label=label, formula=formula, values=x.tolist(), mean=mean, norm=norm)


def _scaled(name: str, spec: Spec) -> str:
    return name if spec.residual_scale == 1.0 else f"{spec.residual_scale:g}·{name}"


def _differing(a: "Tensor", b: "Tensor") -> float:
    """How many numbers of two tensors are not the same; NaN is the same as NaN."""
    return float((~((a == b) | (a.isnan() & b.isnan()))).sum())


def _check(claim: str, error: float, allowed: float) -> Check:
    return Check(claim=claim, error=error, allowed=allowed, ok=error <= allowed)


def _score_formula(a: Attention, scale: float) -> str:
    """How a product of query and key becomes a score."""
    scaled = "q·k/√D" if math.isclose(scale * a.head_dim**0.5, 1, rel_tol=1e-12) else f"q·k·{scale:g}"
    return scaled if a.softcap is None else f"{a.softcap:g}·tanh({scaled}/{a.softcap:g})"


OUTPUTS = ("attn_out", "mlp_out")


def formulas(spec: Spec, layer: int) -> dict[str, str]:
    """How each activation of a layer comes about, in the project's letters. W is stored [out, in]; x·W reads xWᵀ."""
    a, placement = spec.attention, spec.norm.placement
    normed, before = _norm_formula(spec.norm), placement in ("pre", "sandwich")
    b, o_b = "+b" if a.bias else "", "+b" if a.o_bias else ""
    source = "attn_norm" if before else "resid_pre"
    added = {name: _scaled(f"{name}_norm" if placement in ("output", "sandwich") else name, spec) for name in OUTPUTS}
    found = {
        "resid_pre": _embedded(spec) if layer == 0 else f"layers.{layer - 1}.resid_post",
        "attn_norm": normed + (f", x = resid_pre + {added['attn_out']}" if placement == "post" else ""),
        "attn.q": f"{source}·Wq{b}",
        "attn.k": f"{source}·Wk{b}",
        "attn.v": f"{source}·Wv{b}",
        "attn.z": "Σ weight·v",
        "attn_out": f"merged·Wo{o_b}",
        "attn_out_norm": normed,
        "resid_mid": "attn_norm" if placement == "post" else f"resid_pre + {added['attn_out']}",
        "mlp_norm": normed + (f", x = resid_mid + {added['mlp_out']}" if placement == "post" else ""),
        "mlp_out_norm": normed,
        "resid_post": "mlp_norm" if placement == "post" else f"resid_mid + {added['mlp_out']}",
    }
    for letter in "qk":
        found |= _head_formulas(letter, spec)
    return found | _mlp_formulas(spec)


def _embedded(spec: Spec) -> str:
    """What enters the first layer."""
    said = "embed[id]" + "·Wembed_in" * (spec.embed_size is not None)
    said += f" · {spec.embed_scale:g}" if spec.embed_scale != 1 else ""
    if isinstance(spec.position, Learned):
        offset = f" + {spec.position.offset}" if spec.position.offset else ""
        said += f" + pos_embed[position{offset}]"
    return f"{_norm_formula(spec.norm)}, x = {said}" if spec.norm.embedding else said


def _norm_formula(norm: NoNorm | LayerNorm | RMSNorm, weight: str = "w", bias: bool = True) -> str:
    """bias: does this one have the bias that the model's norms have?"""
    if isinstance(norm, LayerNorm):
        return "(x-mean(x))/√(var(x)+ε)" + f"·{weight}" * norm.weight + "+b" * (norm.bias and bias)
    if isinstance(norm, RMSNorm):
        gain = "" if not norm.weight else f"·({norm.offset:g}+{weight})" if norm.offset else f"·{weight}"
        return f"x/√(mean(x²)+ε){gain}"
    return ""


def _head_formulas(letter: str, spec: Spec) -> dict[str, str]:
    """How q or k is normed and turned, in the layer's order."""
    a, found, x = spec.attention, {}, letter

    def norm() -> None:
        nonlocal x
        own = {"head": f"x = {x}", "each": f"x = {x}, w of this head", "whole": f"x = all heads' {x}, side by side"}
        said = _norm_formula(spec.norm, bias=a.qk_norm != "each")
        found[f"attn.{letter}_norm"], x = f"{said}, {own[a.qk_norm]}", f"{letter}_norm"

    if a.qk_norm != "none" and a.qk_norm_place == "before":
        norm()
    if isinstance(spec.position, Rope):
        found[f"attn.{letter}_rot"], x = _turned(x, spec.position, a.head_dim), f"{letter}_rot"
    if a.qk_norm != "none" and a.qk_norm_place == "after":
        norm()
    return found


def _turned(x: str, rope: Rope, head_dim: int) -> str:
    """The rotation with its base; where it is scaled, by what, and what that multiplies the vector by."""
    from gptcli.model.ops import frequencies

    size = rope.rotary_dim or head_dim
    letter, of = ("D", "") if size == head_dim else ("R", f", R = {size}")
    angle, scaling = f"θ^(-2i/{letter})", rope.scaling
    if isinstance(scaling, LinearScaling):
        angle = f"{angle}/{scaling.factor:g}"
    elif not isinstance(scaling, NoScaling):
        angle = f"{scaling.kind}({angle})"
    _, factor = frequencies(rope, size, 1)
    times = "" if factor == 1 else f"{factor:.5g}·"
    sign = "-" * (rope.direction == "backward")
    return f"{times}{x} turned by {sign}position·{angle}, {rope.pairs}{of}, θ = {rope.theta:.10g}"


def _mlp_formulas(spec: Spec) -> dict[str, str]:
    mlp, placement = spec.mlp, spec.norm.placement
    if isinstance(mlp, NoMLP):
        return {"resid_post": "resid_mid"}
    stream = "resid_mid" if spec.residual == "sequential" else "resid_pre"
    before = placement in ("pre", "sandwich")
    source = "attn_norm" if spec.residual == "parallel_shared" else "mlp_norm" if before else stream
    # Side by side with the attention it reads what stands further up.
    found = {"mlp_norm": f"{_norm_formula(spec.norm)}, x = resid_pre"} if spec.residual == "parallel" else {}
    b, act = "+b" * mlp.bias, mlp.activation
    if isinstance(mlp, Experts):
        return found | {
            "mlp.router": f"{source}·Wrouter{'+b' * mlp.router_bias}",
            "mlp_out": _experts_formula(mlp, source),
        }
    return found | {
        "mlp.up": f"{source}·Wup{b}",
        "mlp.gate": f"{source}·Wgate{b}",
        "mlp.act": f"{act}(mlp.gate)·mlp.up" if mlp.gated else f"{act}(mlp.up)",
        "mlp_out": f"mlp.act·Wdown{b}",
    }


def _experts_formula(mlp: Experts, source: str) -> str:
    b, limit = "+b" * mlp.bias, f"{mlp.limit:g}" if mlp.limit is not None else ""
    gate, up = f"x·Wgate{b}", f"x·Wup{b}"
    gate, up = (f"min({gate}, {limit})", f"clamp({up}, -{limit}, {limit}) + 1") if limit else (gate, up)
    to_one = " scaled to sum to 1" if mlp.normalized else ""
    shared = " + sigmoid(x·Wshared_router)·shared expert" if mlp.shared_size is not None else ""
    return (
        f"Σ p·expert over the top {mlp.top_k} of {mlp.n_experts}, p = softmax(mlp.router){to_one}{shared}; "
        f"an expert: {mlp.activation}({gate})·({up})·Wdown{b}, x = {source}"
    )
