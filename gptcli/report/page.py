"""`trace -o x.html`: what the page holds of a run, with what it costs, counted before anything runs.

Of every head the weights; of the heads that were asked for also the scores before and after scaling, and walks. Small
runs are held as they are (float32). Of larger ones each number becomes a code of 16 bits (the heads asked for) or of 8
(the others): scores in even steps, weights in even steps of their square root, which tells small ones apart. What the
file has no room for is left out in this order: scores of heads that were not asked for, small steps, layers that were
not asked for.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptcli.cost import Size
from gptcli.report import Finding, RunReport
from gptcli.report.formulas import score_formula
from gptcli.report.lens import LeadingReport, leading_report
from gptcli.report.page_codes import FINE, Plane, even, fine, recoded, roots
from gptcli.report.page_plan import BASE64, LEVELS, LIMIT, Plan, best_of
from gptcli.report.patterns import Patterns, Weights
from gptcli.report.proof import Check
from gptcli.report.trace import TraceReport, Walk, trace_report
from gptcli.report.view import Attending, View, stack_of
from gptcli.run import Run
from gptcli.spec import Relative
from gptcli.trace import Recorder, Selection

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

GOOD = 4  # of the steps, so many are small enough to give scores the room first
SAMPLE = 8  # of so many heads one tells roughly how well all of them pack


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One head's q·k [T, S], and as scaled (capped, biased)."""

    products: Plane
    scaled: Plane


@dataclass(frozen=True, kw_only=True)
class Head:
    """One head's weights, row after row, and its sink's [T], if it has one. layer_index and head count from 0.

    seen: which of the page's `spans` the mask lets the queries see; spans: which of them the weights fill (an edit may
    have put some where nothing is seen); score: how q·k becomes a score.
    """

    layer_index: int
    path: str
    head: int
    n_heads: int
    kv_head: int
    n_kv_heads: int
    window: int | None
    causal: bool
    seen: int
    spans: int
    score: str
    weights: Plane
    sink: Plane | None
    scores: Scores | None


@dataclass(frozen=True, kw_only=True)
class Origins:
    """A walk with what its numbers are made of: q as it meets the keys, q·k term by term, and the softmax's sum.

    highest: the largest score that the mask lets see; parts: e^(score - highest) of each key, total: their sum, that of
    the sink among them.
    """

    walk: Walk
    q: list[float]
    terms: list[list[float]]
    highest: float
    parts: list[float]
    total: float


@dataclass(kw_only=True)
class PageReport(RunReport):
    """asked: layer, head and query to begin with; replayed: the run came out of a trace's file; spans: for each way of
    seeing, of every query the first key and how many; lens: of every position the best tokens by layer; said: what is
    exact, what is not, and what is left out and how to get it.
    """

    schema = "gptcli.page/1"
    attention: Attending
    n_layers: int
    replayed: bool
    asked: tuple[int, int, int]
    spans: list[list[tuple[int, int]]]
    heads: list[Head]
    walks: list[Origins]
    lens: LeadingReport | None
    said: list[str]
    proof: list[Check]


def page_report(run: Run, plan: Plan, walked: TraceReport | None = None) -> PageReport:
    """The page that was planned. walked: the walks that were asked for, where they are there already."""
    patterns = Patterns(run, plan.attending)
    spans: list[list[tuple[int, int]]] = []
    layers, heads, queries = plan.asked
    chosen = plan.chosen()

    def take(found: Weights) -> "_Held":
        exact = plan.whole or bool((found.pattern < 0).any() or (found.pattern > 1).any())  # an edit's
        seen, filled = (_span(x, spans) for x in (found.seen, found.seen | (found.pattern.nan_to_num() != 0)))
        values = _flat(found.pattern, spans[filled])
        sink = None if found.sink is None else fine(found.sink, exact)
        return _Held(patterns.place(found) | {"seen": seen, "spans": filled}, fine(values, exact), sink)

    watched = patterns(plan.layers, slice(None), slice(None), take)
    if walked is None or plan.walks != plan.asked:
        walked = None if not plan.walks[0] else trace_report(run, *plan.walks[:2], _position(plan), plan.attending)
    of_scores = _scores(run, patterns, plan, plan.layers if plan.whole else layers)
    others = {one: scores for one, scores in of_scores.items() if one not in chosen}
    lens, why = _lens(run)
    held, levels, kept = _fitted(watched.taken, others, plan)
    scores = {one: found for one, found in of_scores.items() if one in chosen or one in kept}
    found = [_head(one, levels, patterns, scores, plan) for one in held]
    checks = {check.claim: check for report in (watched, walked, lens) if report for check in report.proof}
    problems: list[Finding] = [one for report in (watched, walked, lens) if report for one in report.findings]
    return PageReport(
        **run.told(),
        attention=plan.attending,
        n_layers=patterns.stack.n_layers,
        replayed=run.replayed,
        asked=(layers[0], heads[0], queries[-1]),
        spans=spans,
        heads=found,
        walks=[_origins(walk) for walk in walked.walks] if walked else [],
        lens=lens,
        said=list(_said(plan, levels, found, run.replayed, why)),
        proof=list(checks.values()),
        findings=list({one.message: one for one in problems}.values()),
    )


def _position(plan: Plan) -> str:
    return "all" if len(plan.walks[2]) > 1 else str(plan.walks[2][0])


@dataclass(frozen=True, eq=False)
class _Held:
    """A head's weights while the page is made: float32, or codes of 16 bits."""

    place: dict
    values: "ndarray"
    sink: "ndarray | None"

    @property
    def here(self) -> tuple[int, int]:
        """Layer and head, from 0."""
        return self.place["layer_index"], self.place["head"]


def _span(there: "Tensor", spans: list[list[tuple[int, int]]]) -> int:
    """Which of the spans holds these pairs of query and key [T, S]; a new one is added."""
    first, last = there.int().argmax(-1), there.shape[1] - there.flip(-1).int().argmax(-1)
    wanted = list(zip(first.tolist(), (last - first).masked_fill(~there.any(-1), 0).tolist()))
    if wanted not in spans:
        spans.append(wanted)
    return spans.index(wanted)


def _flat(pattern: "Tensor", spans: list[tuple[int, int]]) -> "Tensor":
    """The weights in the spans, row after row."""
    first, size = pattern.new_tensor(spans).T.unsqueeze(-1)  # [T, 1] twice
    keys = pattern.new_ones(pattern.shape[1]).cumsum(0) - 1  # [S]
    return pattern[(keys >= first) & (keys < first + size)]


def _fitted(
    held: list[_Held],
    others: dict[tuple[int, int], Scores],
    plan: Plan,
) -> tuple[list[_Held], int, set[tuple[int, int]]]:
    """What there is room for: the heads, the steps of their weights, and whose scores beside those asked for."""
    if plan.whole:
        return held, LEVELS[0], set(others)
    rest = [one for one in held if one.values.dtype.kind != "f" and one.here not in plan.fine()]
    asked = [one for one in rest if one.here[0] in plan.asked[0]]
    extra = BASE64 * sum(len(zlib.compress(one.products.data, 6)) for one in others.values())
    attempts = [(rest, levels, set(others)) for levels in LEVELS[:GOOD]]
    attempts += [(heads, levels, set()) for heads in (rest, asked) for levels in LEVELS]
    for heads, levels, kept in attempts:
        room = LIMIT - plan.fixed() - (extra if kept else 0)
        some = heads[::SAMPLE]  # packing all of them to find that they are too large takes long
        likely = _packed(some, levels) / max(len(some), 1) * len(heads)
        if BASE64 * likely < room and BASE64 * _packed(heads, levels) < room:
            break
    return [one for one in held if one not in rest or one in heads], levels, kept


def _packed(heads: list[_Held], levels: int) -> int:
    """Bytes of these heads' weights in so many steps, deflated."""
    pack = zlib.compressobj(6, zlib.DEFLATED, -15)
    return sum(len(pack.compress(recoded(one.values, levels))) for one in heads) + len(pack.flush())


def _head(
    held: _Held,
    levels: int,
    patterns: Patterns,
    scores: dict[tuple[int, int], Scores],
    plan: Plan,
) -> Head:
    here = held.here
    steps, spec = None if here in plan.fine() else levels, patterns.spec(here[0])
    return Head(
        **held.place,
        causal=spec.attention.causal,
        score=score_formula(spec),
        weights=roots(held.values, steps),
        sink=None if held.sink is None else roots(held.sink, steps),
        scores=scores.get(here),
    )


def _scores(run: Run, view: View, plan: Plan, layers: list[int]) -> dict[tuple[int, int], Scores]:
    """q·k and scores of the layers' heads, in a run of their own: one head's are held as they are."""
    names = ("q", "q_norm", "q_rot", "k", "k_norm", "k_rot", "scores")
    layers = [layer for layer in layers if all(run.holds(view.inner(layer, name)) for name in ("q", "k", "scores"))]
    coming, met, found = plan.heads(layers), {}, {}

    def note(path: str, x: "Tensor") -> None:
        name = path.rpartition(".")[2]
        if name != "scores":
            met[name[0]] = x[0]  # the last form of q and of k is the one that meets
            return
        layer, head = next(coming)
        scores = x[0, 0]  # [T, S]
        q, k = met["q"][head].to(scores.dtype), met["k"][view.kv_head(layer, head)].to(scores.dtype)
        spec = view.spec(layer)
        linear = spec.attention.softcap is None and not isinstance(spec.position, Relative)
        linear = linear and "scores" not in view.replaced(layer)
        scale = spec.attention.head_dim**-0.5 if spec.attention.scale is None else spec.attention.scale
        levels = None if plan.whole else FINE if (layer, head) in plan.fine() else LEVELS[0]
        products = even(q @ k.mT, levels)
        # In even steps both are the same codes.
        same = linear and levels is not None
        scaled = products._replace(low=products.low * scale, step=products.step * scale) if same else None
        found[layer, head] = Scores(products=products, scaled=scaled or even(scores, levels))

    wanted = [view.inner(layer, name) for layer in layers for name in names]
    recorder = Recorder(*filter(run.holds, wanted), select=Selection(by="head"), note=note)
    if layers:
        run.forward("all", recorder, head=run.edits is not None)
    return found


def _lens(run: Run) -> tuple[LeadingReport | None, str]:
    """The lens, or why there is none."""
    if run.model.spec.lm_head is None:
        return None, "no lens and no next token: the model has no head"
    if run.replayed:
        return None, "no lens and no next token: the file holds no weights to read layers by (run without --from)"
    return leading_report(run, best_of(Size(run.model.spec, 1, run.width, 0, ""))), ""


def _origins(walk: Walk) -> Origins:
    """What the numbers of a walk are made of."""
    q = next((s.values for s in reversed(walk.before) if s.label.partition(".")[2].startswith("q")), [])
    scores = [key.scaled for key in walk.keys if key.visible]
    highest = max(scores, default=0.0)
    parts = [math.exp(key.scaled - highest) if key.visible else 0.0 for key in walk.keys]
    keys = math.fsum(parts)
    return Origins(
        walk=walk,
        q=q,
        terms=[[a * b for a, b in zip(q, key.k)] for key in walk.keys],
        highest=highest,
        parts=parts,
        total=keys / (1 - walk.sink) if walk.sink is not None and walk.sink < 1 else keys,
    )


def _said(plan: Plan, levels: int, heads: list[Head], replayed: bool, why: str) -> Iterator[str]:
    """What is exact, what is in steps, what is left out and how to get it."""
    layers, of_heads, _ = plan.asked
    named = f"--layer {layers[0] + 1} --head {of_heads[0]}"
    if plan.whole:
        yield "Every number is the run's own, in float32."
    else:
        yield "Exact (float32): the walks and the lens."
        steps = "weights in even steps of their square root"
        if plan.fine():
            yield f"The heads asked for: codes of 16 bits, scores in 65,534 even steps, {steps} of 1/65,534."
        off = f"a weight of 0.5 is within ±{0.5**0.5 / levels:.1g}, one of 0.01 within ±{0.1 / levels:.1g}"
        which = "All other heads" if plan.fine() else "All heads"
        yield f"{which}: codes of 8 bits, {steps} of 1/{levels} ({off}); their numbers are marked ≈."
    with_scores = sum(one.scores is not None for one in heads)
    if with_scores < len(heads):
        whose = "of layers that the trace's file holds whole" if replayed else f"{named} chooses whose"
        yield f"Scores of {with_scores} of {len(heads)} heads are here: {whose}."
    gone = len(plan.layers) - len({one.layer_index for one in heads})
    if gone:
        yield f"Weights of {gone} layers are left out, for which {LIMIT // 10**6} MB have no room: --layer chooses."
    missing = stack_of(plan.attending, plan.size.spec).n_layers - len(plan.layers)
    if missing:
        yield f"Weights of {missing} layers are not here: {'the file lacks them' if replayed else 'memory lacks room'}."
    if why:
        yield f"There is {why}."
    if plan.size.spec.encoder is not None:
        yield "One kind of attention a page: --attention self, cross or encoder chooses it."
