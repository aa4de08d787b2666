"""`diff`: two sides of one computation, where they part, how far, whether by a bug or by rounding, and why."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from gptcli.diff.lockstep import common
from gptcli.diff.rounding import TOP, Comparison, Constants, differs
from gptcli.diff.why import causes_of, packed
from gptcli.errors import GptcliError
from gptcli.layout import Place
from gptcli.names import Names
from gptcli.report import Finding, ModelFacts, Report
from gptcli.run import Run
from gptcli.spec import Spec, to_dict
from gptcli.tokens import Token
from gptcli.trace import BESIDE

if TYPE_CHECKING:
    from gptcli.model.gaps import Gap

Verdict = Literal["identical", "rounding", "parted"]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """max_abs: max |a - b|; relative: ‖a - b‖ / ‖a‖; deviation: the largest max |a - b| / max |a| of a position's
    vector, by which it is decided. Infinite where a number is finite on one side alone.
    """

    max_abs: float
    relative: float
    deviation: float
    cosine: float | None = None


@dataclass(frozen=True, kw_only=True)
class Worst:
    """Where |a - b| is largest: in which text, at which of its positions (from 0), in which head, at which channel (of
    logits, an id, which the token out_token has; null of others) or, of scores and weights, at which key's position.
    a, b: what stands there.
    """

    text: int
    position: int
    id: int
    token: str
    head: int | None
    channel: int | None
    key: int | None
    out_token: str | None
    a: float
    b: float


@dataclass(frozen=True, kw_only=True)
class Parted:
    """The first activation out of tolerance, and the last before it that agreed. bug: the gap stays when precision
    rises; null where nothing could tell.
    """

    path: str
    last_agreed: str | None
    exact: Numbers | None
    expected: Numbers | None
    seen: Numbers | None
    worst: Worst | None
    bug: bool | None


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One of the likeliest next tokens on either side. Ranks count from 1; ids of one logit share theirs."""

    id: int
    token: str
    rank_a: int
    rank_b: int
    logit_a: float
    logit_b: float


@dataclass(frozen=True, kw_only=True)
class LogitsGap:
    """KL(A || B) in nats over all positions, with the text and the position where it is largest, and what the ranks are
    there. same_first: positions whose likeliest id is the same; top_k_shared: of A's k likeliest ids, the share that is
    among B's.
    """

    kl_nats_mean: float
    kl_nats_max: float
    text: int
    position: int
    id: int
    token: str
    positions: int
    same_first: int
    top_k: int
    top_k_shared: float
    ranks: list[Moved]


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation of both. expected: what rounding makes of `relative`, where it was measured."""

    path: str
    axes: str
    shape: list[int]
    max_abs: float
    relative: float
    cosine: float
    expected: float | None
    agrees: bool


@dataclass(frozen=True, kw_only=True)
class Why:
    """A known transformation that closes the gap at the activations in `closes`; mend: what is to be changed."""

    code: str
    said: str
    mend: str
    closes: list[str]


@dataclass(kw_only=True)
class DiffReport(Report):
    """said: the verdict in a line; by: what decides of rounding; told: what a person should know of the comparison;
    tokens_b: B's, where it reads others.
    """

    schema = "gptcli.diff/1"
    tells_findings = True
    a: ModelFacts
    b: ModelFacts
    tokens: list[list[Token]]
    source: list[list[Token]]
    tokens_b: list[list[Token]]
    verdict: Verdict
    said: str
    by: str
    parted: Parted | None
    logits: LogitsGap | None
    causes: list[Why]
    told: list[str]
    activations: list[Activation] = field(default_factory=list)


def diff_report(
    a: Run, b: Run, at: Sequence[str] = (), constants: Constants | None = None, told: Sequence[str] = ()
) -> DiffReport:
    """Compares two sides. at: names or patterns of the activations to compare; constants: what agreement is, in place
    of what float64 says. Raises GptcliError for sides that can't be compared.
    """
    if (a.ids, a.source) != (b.ids, b.source):
        if a.replayed or b.replayed:
            raise GptcliError("A and B are of other texts", "take files of one text, or give none beside them", "ids")
        return _other_ids(a, b, told)
    paths = _paths(a, b, at)
    found = Comparison(a, b).run(paths, constants, only=bool(at))
    if not found.seen:
        path, (ours, theirs) = next(iter(found.apart.items()))
        said = f"nothing to compare: {path} is {ours} in A and {theirs} in B"
        raise GptcliError(said, "take sides of one architecture", "compare")
    order = [path for path in found.axes if path in found.seen]
    parted = _parted(found, order)
    findings = [] if parted is None else [Finding("parted", f"A and B part at {parted.path}", parted.path)]
    findings += [Finding("not-finite", _lost(path, count), path) for path, count in list(found.lost.items())[:1]]
    told = [*told, *_unlike(a.model.spec, b.model.spec, found)]
    if a.model.spec.n_layers != b.model.spec.n_layers:
        findings.append(Finding("layers", f"{a.model.spec.n_layers} layers in A, {b.model.spec.n_layers} in B"))
    verdict = "parted" if parted else "rounding" if any(map(differs, found.seen.values())) else "identical"
    if verdict == "identical" and type(a) is type(b) is Run and (fields := _other_fields(a.model.spec, b.model.spec)):
        told.append(f"no number shows what differs in the architectures: {fields}")
    return DiffReport(
        a=a.facts(),
        b=b.facts(),
        tokens=a.tokens(),
        source=a.source_tokens(),
        tokens_b=[],
        verdict=verdict,
        said="; but ".join([_said(verdict, parted, found), *(_lost(*one) for one in list(found.lost.items())[:1])]),
        by=found.by,
        parted=parted,
        logits=_logits(found),
        causes=[Why(**asdict(cause)) for cause in causes_of(found)],
        told=told,
        activations=[_activation(found, path) for path in order],
        findings=findings,
    )


def _paths(a: Run, b: Run, at: Sequence[str]) -> list[str]:
    """What is compared. Scores and softmax weights are computed on the side, for who asks."""
    ours, theirs = a.model.spec, b.model.spec
    if (ours.encoder is None) != (theirs.encoder is None):
        raise GptcliError("one side has an encoder and the other has none", "take sides of one kind", "compare")
    if ours.hidden_size != theirs.hidden_size and not at:
        said = f"hidden_size is {ours.hidden_size} in A and {theirs.hidden_size} in B: their vectors can't be compared"
        raise GptcliError(said, "--at logits compares what comes out", "compare")
    both = common(a, b)
    if at:
        names = Names(a.model)
        try:
            wanted = {path for one in at for path in names.select("--at", one)}
        except GptcliError as error:
            hint = error.hint.replace("--list prints all", "`gptcli trace --list` prints a model's")
            raise GptcliError(error.message, hint, error.code) from None
        paths = [path for path in both if path in wanted]
    else:
        held = a.replayed or b.replayed
        paths = [path for path in both if held or path.rpartition(".")[2] not in BESIDE]
    if not paths:
        said = f"--at {' '.join(at)}: not on both sides" if at else "A and B have no activation in common"
        raise GptcliError(said, "`gptcli trace --list` names a model's activations", "compare")
    return paths


def _unlike(a: Spec, b: Spec, found: Comparison) -> list[str]:
    """What the two can't be compared in."""
    told = []
    if a.vocab_size != b.vocab_size:
        rows = min(a.vocab_size, b.vocab_size)
        told.append(f"{a.vocab_size:,} ids in A and {b.vocab_size:,} in B: the first {rows:,} are compared")
    if a.n_layers != b.n_layers:
        layers = min(a.n_layers, b.n_layers)
        told.append(f"{a.n_layers} layers in A and {b.n_layers} in B: the first {layers} are compared")
    if found.apart:
        path, (ours, theirs) = next(iter(found.apart.items()))
        more = f" (and {len(found.apart) - 1} more)" if len(found.apart) > 1 else ""
        told.append(f"not compared: {path}{more}, which is {ours} in A and {theirs} in B")
    if found.stored is not None:
        side, dtype = found.stored
        told.append(f"{side}'s weights are {'AB'.replace(side, '')}'s in {dtype}: the exact values are the finer ones")
    return told


def _lost(path: str, count: int) -> str:
    return f"from {path} on there is NaN or Inf on both sides ({count:,} numbers)"


TOLD = ("name", "tokenizer", "vocab_size", "n_layers")


def _other_fields(a: Spec, b: Spec) -> str:
    """`norm.eps (1e-05 in A, 1e-06 in B)`: in what two architectures differ, but for what is told by itself."""
    ours, theirs = (dict(_flat(to_dict(spec))) for spec in (a, b))
    apart = [name for name in {**ours, **theirs} if name not in TOLD and ours.get(name) != theirs.get(name)]
    said = [f"{name} ({ours.get(name, 'none')} in A, {theirs.get(name, 'none')} in B)" for name in apart[:3]]
    return ", ".join([*said, *([f"and {len(apart) - 3} more"] if len(apart) > 3 else [])])


def _flat(told: dict, at: str = "") -> Iterator[tuple[str, object]]:
    for name, value in told.items():
        yield from _flat(value, f"{at}{name}.") if isinstance(value, dict) else [(at + name, value)]


def _said(verdict: Verdict, parted: Parted | None, found: Comparison) -> str:
    layers = [side.model.spec.n_layers for side in (found.a, found.b)]
    if verdict != "parted" and layers[0] != layers[1]:
        return f"no gap in the {min(layers)} layers that both have: {layers[0]} in A, {layers[1]} in B"
    if verdict == "identical":
        return "identical: every number is the same, bit for bit"
    if verdict == "rounding":
        how = {
            "float64": "in float64 nothing parts",
            "one side's float64": "as near to the exact values as rounding comes",
            "an estimate": "as far as an estimate of rounding tells",
        }
        if found.by == "constants":
            return "equal within the tolerance that was given"
        return f"equal within rounding: {how[found.by]}"
    if parted.bug:
        stays = "the gap stays in float64" if found.by == "float64" else "the gap is beyond what rounding makes"
        return f"parted at {parted.path}: {'quantised otherwise' if packed(found) else 'a bug'}, {stays}"
    why = {"constants": "beyond the tolerance that was given", "an estimate": "beyond an estimate of rounding"}
    return f"parted at {parted.path}: {why.get(found.by, 'no bug, but numbers that one type does not hold')}"


def _numbers(gap: "Gap") -> Numbers:
    lost = math.inf if gap.lost else 0.0
    of = (gap.max_abs + lost, gap.relative + lost, gap.deviation)
    return Numbers(max_abs=of[0], relative=of[1], deviation=of[2], cosine=gap.cosine)


def _expected(gaps: "list[Gap]") -> Numbers:
    every = [_numbers(gap) for gap in gaps]
    sums = (sum(getattr(one, name) for one in every) for name in ("max_abs", "relative", "deviation"))
    return Numbers(**dict(zip(("max_abs", "relative", "deviation"), sums)))


def _parted(found: Comparison, order: list[str]) -> Parted | None:
    path = found.parted
    if path is None:
        return None
    agreed = order[: order.index(path)]
    exact = found.exact.get(path)
    return Parted(
        path=path,
        last_agreed=agreed[-1] if agreed else None,
        exact=None if exact is None else _numbers(exact),
        expected=_expected(found.expected[path]) if path in found.expected else None,
        seen=_numbers(found.seen[path]),
        worst=_worst(found, path, exact if found.bug else found.seen[path]),
        bug=found.bug,
    )


def _worst(found: Comparison, path: str, gap: "Gap") -> Worst:
    text, *index = gap.worst
    at: dict[str, int] = {}
    for axis, i in zip(found.axes[path][1:], index):
        name = {"T": "position", "S": "position", "H": "head", "G": "head"}.get(axis, "channel")
        last = axis == "T" and found.shapes[path][found.axes[path].index("T")] == 1
        at["key" if name in at else name] = len(found.a.ids[text]) - 1 if last else i
    of_source = Place.of(path).stack or re.search(r"\.cross\.[kv]\b", path)
    token = (found.a.source_tokens() if of_source else found.a.tokens())[text][at["position"]]
    return Worst(
        text=text,
        position=at["position"],
        id=token.id,
        token=token.token,
        head=at.get("head"),
        channel=at.get("channel"),
        key=at.get("key"),
        out_token=Token.of(at["channel"], found.a.labels).token if found.axes[path][-1] == "V" else None,
        a=gap.a,
        b=gap.b,
    )


def _logits(found: Comparison) -> LogitsGap | None:
    effect = found.effect
    if effect is None:
        return None
    every = [kl for text in effect.kl for kl in text]
    shared = [count for text in effect.top for count in text]
    text, position = found.place
    k = min(TOP, found.shapes["logits"][-1])
    return LogitsGap(
        kl_nats_mean=math.fsum(every) / len(every),
        kl_nats_max=effect.kl[text][position - len(found.a.ids[text])],  # where only the last is known, of one
        text=text,
        position=position,
        id=found.a.ids[text][position],
        token=found.a.tokens()[text][position].token,
        positions=len(every),
        same_first=effect.first,
        top_k=k,
        top_k_shared=sum(shared) / len(shared) / k,
        ranks=[
            Moved(
                id=one.id,
                token=Token.of(one.id, found.a.labels).token,
                rank_a=one.rank_a,
                rank_b=one.rank_b,
                logit_a=one.logit_a,
                logit_b=one.logit_b,
            )
            for one in found.ranked
        ],
    )


def _activation(found: Comparison, path: str) -> Activation:
    seen, expected = _numbers(found.seen[path]), found.expected.get(path)
    return Activation(
        path=path,
        axes=found.axes[path],
        shape=found.shapes[path],
        max_abs=seen.max_abs,
        relative=seen.relative,
        cosine=seen.cosine,
        expected=_expected(expected).relative if expected is not None else None,
        agrees=found.agrees(path),
    )


def folded(report: DiffReport) -> Iterator[list[Activation]]:
    """Together: those that agree and follow one another, and those of one layer behind the one where they part."""
    here = report.parted and Place.of(report.parted.path)[:2]

    def kind(one: Activation) -> tuple:
        stack, layer, _ = Place.of(one.path)
        behind = layer is not None and (stack, layer) != here
        return (one.agrees, stack, layer) if behind and not one.agrees else (one.agrees, one.agrees or one.path)

    return (list(group) for _, group in groupby(report.activations, key=kind))


def _other_ids(a: Run, b: Run, told: Sequence[str]) -> DiffReport:
    """The two read other ids: nothing is run."""
    from gptcli.diff.causes import explain_ids

    return DiffReport(
        a=a.facts(),
        b=b.facts(),
        tokens=a.tokens(),
        source=a.source_tokens(),
        tokens_b=b.tokens(),
        verdict="parted",
        said="parted at ids: the two read other ids for the same text",
        by="ids",
        parted=Parted(path="ids", last_agreed=None, exact=None, expected=None, seen=None, worst=None, bug=None),
        logits=None,
        causes=[Why(**asdict(cause)) for cause in explain_ids(a, b)],
        told=[*told, "--ids feeds both the same"],
        findings=[Finding("ids", "A and B read other ids for the same text", "ids")],
    )
