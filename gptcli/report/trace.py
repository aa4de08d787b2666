"""`trace`: one head of one layer at one query, number by number, and the proof that watching changed nothing.

The run is the fused run. What is shown beside it (scores, mask, weights) is computed from the same q, k, v.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptcli.report import RunReport
from gptcli.report.formulas import formulas, scaled, score_formula
from gptcli.report.proof import TOLERANCE, Check, check, findings, softmax_claims, unwatched
from gptcli.report.view import Attending, View
from gptcli.run import Run, positions
from gptcli.spec import Spec
from gptcli.trace import BESIDE, Recorder, Selection

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.attention import Sight

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
class Walk:
    """The numbers of one of a layer's n_heads heads, in the order of birth: before, keys, after.

    layer_index and head count from 0. attention: a text's own (self), across to its source (cross), or the source's own
    (encoder); n_layers: of this stack. score: how q·k becomes a score: scale multiplies it, softcap bounds it, where
    there is one. window: how many keys are seen at most (to each side, where not causal). sink: the weight that goes to
    no key, where the head has one; weights: the sum of all. heaviest: positions of the keys that weigh most (at most
    HEAVIEST); rest_weight: what the others weigh. edited: what an edit changed of keys' vectors, scores and weights.
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
class TraceReport(RunReport):
    schema = "gptcli.trace/1"
    n_layers: int
    n_heads: int
    walks: list[Walk]
    proof: list[Check]


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
    run.single("trace walks through one")
    look = _Look(run, attending)
    look.check(layers, heads)
    queries = positions(position, len(look.queries))
    look.select = selection_of(len(look.queries), heads, queries)
    recorder = Recorder(*(f"{look.path(layer)}.*" for layer in layers), select=look.select)
    watched = run.forward("all", recorder)
    look.kept = recorder.kept
    proof = [one for layer in layers for one in look.proof(layer, len(layers) > 1)]
    proof += [] if run.replayed else [unwatched(run, watched)]
    chosen = ((layer, head) for layer in layers for head in heads if head < look.spec(layer).attention.n_heads)
    return TraceReport(
        **run.told(),
        n_layers=look.stack.n_layers,
        n_heads=look.stack.attention.n_heads,
        walks=[look.walk(layer, head, query) for layer, head in chosen for query in queries],
        proof=proof,
        findings=findings(run, proof, watched),
    )


class _Look(View):
    """What was recorded of a run (`kept`), of scores and weights the part `select`, and how to read it."""

    kept: "dict[str, Tensor]"
    select: Selection

    def has(self, layer: int, name: str) -> bool:
        return f"{self.path(layer)}.{name}" in self.kept

    def of(self, layer: int, name: str) -> "Tensor":
        """The recorded activation of a layer for the one text, without its batch axis."""
        return self.kept[f"{self.path(layer)}.{name}"][0]

    def own(self, layer: int, name: str) -> "Tensor":
        """The same of this attention's own: `q`, `pattern`…"""
        return self.kept[self.inner(layer, name)][0]

    def met(self, layer: int, letter: str) -> "Tensor":
        """The last form of q or k before the product, [H or G, T or S, D]: rotated, normed, or as projected."""
        later = (f"{letter}_rot", f"{letter}_norm")
        later = later if self.spec(layer).attention.qk_norm_place == "before" else later[::-1]
        return next(self.own(layer, name) for name in (*later, letter) if self.inner(layer, name) in self.kept)

    def walk(self, layer: int, head: int, query: int) -> Walk:
        steps = list(self.steps(layer, head, query))
        cut = next(i for i, step in enumerate(steps) if step.label == f"{self.part}.z")
        a = self.spec(layer).attention
        sink = float(self.own(layer, "sink")[self.inside(head, query)]) if a.sinks else None
        keys = self.steps_to(layer, head, query)
        heaviest = sorted(sorted(range(len(keys)), key=lambda i: -keys[i].weight)[:HEAVIEST])
        return Walk(
            attention=self.attending,
            layer_index=layer,
            n_layers=self.stack.n_layers,
            path=self.path(layer),
            head=head,
            n_heads=a.n_heads,
            kv_head=self.kv_head(layer, head),
            position=query,
            token=self.queries[query].token,
            score=score_formula(self.spec(layer)),
            scale=a.head_dim**-0.5 if a.scale is None else a.scale,
            softcap=a.softcap,
            causal=a.causal,
            window=a.window,
            edited=list(self.edited(layer, head, query)),
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
        told = formulas(self.stack.at(layer), layer, self.path(0).removesuffix("layers.0"))
        other = "attn" if self.part == "cross" else "cross"
        before = ("resid_pre", "attn_norm", "attn_out", "attn_out_norm") if self.part == "cross" else ()
        aside = (*before, *(f"{self.part}.{name}" for name in BESIDE))
        for path, tensor in self.kept.items():
            name = path.removeprefix(f"{self.path(layer)}.")
            if name == path or name in aside or name.startswith(f"{other}."):
                continue
            x, at = tensor[0], (query,)
            if x.ndim == 3:  # [H or G, T or S, D]
                of_keys = re.fullmatch(r"\w+\.[kv](_.*)?", name)
                at = (self.kv_head(layer, head) if of_keys else head, query)
                if of_keys and self.part == "cross":
                    continue  # there are as many as the source has tokens, and none is the query's
            edits = self.edits(path, *at)
            yield _step(path, name, ", then ".join((told[name], *edits)), x[at])
            if name == f"{self.part}.z":
                others = (edit for edit in self.edits(path, None, query) if edit not in edits)
                formula = ", then ".join(("all heads' z, side by side", *others))
                yield _step(path, "merged", formula, x[:, query].flatten())

    def edited(self, layer: int, head: int, query: int) -> Iterator[str]:
        """What edits did to what a key is shown by: its vectors, its score, its weight, in words."""
        kv = self.kv_head(layer, head)
        vectors = dict.fromkeys(("k", "v", "k_norm", "k_rot"), (kv,))
        for name, at in (vectors | dict.fromkeys(("scores", "pattern"), (head, query))).items():
            if edits := self.edits(self.inner(layer, name), *at):
                yield f"{self.part}.{name}: {', '.join(edits)}"

    def inside(self, head: int, query: int) -> tuple[int, int]:
        """Where a head and a query stand among those whose weights were computed."""
        return head - self.select.heads.start, query - (self.select.queries.start or 0)

    def steps_to(self, layer: int, head: int, query: int) -> list[KeyStep]:
        """Every key, as the query sees it."""
        kv, inside = self.kv_head(layer, head), self.inside(head, query)
        k, v = self.met(layer, "k")[kv], self.own(layer, "v")[kv]  # [S, D]
        q = self.met(layer, "q")[head, query]  # [D]
        scores, pattern = self.own(layer, "scores")[inside], self.own(layer, "pattern")[inside]  # [S]
        weighted = pattern[:, None] * v.to(pattern.dtype)  # [S, D]
        sight = self.sight(layer, slice(query, query + 1))
        bias = self.bias(layer, head, sight)
        columns = {
            "k": k,
            "norm_k": k.double().norm(dim=-1),
            "product": k.to(scores.dtype) @ q.to(scores.dtype),
            "bias": [None] * len(k) if bias is None else bias,
            "scaled": scores,
            "visible": sight.mask()[0, 0, 0],
            "weight": pattern,
            "v": v,
            "weighted": weighted,
            "norm_weighted": weighted.double().norm(dim=-1),
        }
        rows = zip(*(column if isinstance(column, list) else column.tolist() for column in columns.values()))
        return [
            KeyStep(position=position, token=token.token, id=token.id, **dict(zip(columns, row)))
            for position, (token, row) in enumerate(zip(self.keys, rows))
        ]

    def bias(self, layer: int, head: int, sight: "Sight") -> "Tensor | None":
        """What distances add to the scores [S] of the one query of a sight; None where they add nothing."""
        weights = self.run.weights
        sight = sight.biased(weights.at("encoder") if self.attending == "encoder" else weights, self.spec(layer))
        return None if sight.bias is None else sight.bias[0, head, 0]

    def proof(self, layer: int, layer_is_named: bool) -> Iterator[Check]:
        """What must hold of a layer, over every head and query whose weights were computed."""
        spec, at, replaced = self.spec(layer), f"{self.path(layer)}: " if layer_is_named else "", self.replaced(layer)
        pattern = self.own(layer, "pattern")  # [h, t, S]
        z = self.own(layer, "z")[self.select.heads, self.select.queries]  # [h, t, D]
        chosen = range(spec.attention.n_heads)[self.select.heads]
        v = self.own(layer, "v")[[self.kv_head(layer, head) for head in chosen]].to(pattern.dtype)
        gap = (pattern @ v - z.to(pattern.dtype)).abs().amax((1, 2))
        gap = gap / (pattern @ v.abs()).amax((1, 2)).clamp(min=1e-30)
        if "z" not in replaced:
            allowed = TOLERANCE[str(z.dtype).partition(".")[2]]
            yield check(f"{at}weights @ v = {self.kernel(layer)}", float(gap.max()), allowed)
        if "pattern" not in replaced:
            sink = self.own(layer, "sink") if spec.attention.sinks else None
            seen = self.sight(layer, self.select.queries).mask()[0]  # [1, t, S]
            for claim, errors, allowed in softmax_claims(pattern, sink, seen, "scores" in replaced):
                yield check(at + claim, float(errors.max()), allowed)
        if spec.norm.placement != "post":  # there a sum is normed before anything keeps it
            yield from self.sums(layer, spec, at)

    def sums(self, layer: int, spec: Spec, at: str) -> Iterator[Check]:
        """The residual stream after a sublayer is the one before it and what the sublayer gives."""
        streams = ("resid_pre", "resid_mid", "resid_cross", "resid_post")
        streams = [name for name in streams if self.has(layer, name)]
        given = [name for name in ("attn_out", "cross_out", "mlp_out") if self.has(layer, name)]
        for before, out, after in zip(streams, given, streams[1:]):
            if self.edits(f"{self.path(layer)}.{after}"):
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
