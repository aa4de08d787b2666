"""`trace --ablate`, `--patch`, `--set`: a run with activations changed on the way, beside the run as it is.

An edit is asked for by one option, and touches the activations that it names, at the places that it names. One that
touches nothing is an error: its result would be taken for an effect that is none.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gptcli.errors import GptcliError
from gptcli.layout import Place
from gptcli.names import Names
from gptcli.report import Finding, ModelFacts, Report
from gptcli.report.trace import Attending, Check, Walk, stack_of
from gptcli.run import Run, positions
from gptcli.tokens import Token, visible
from gptcli.trace import BESIDE, Editor, shapes

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.edit import Difference, Where
    from gptcli.model.measure import Ranked

Kind = Literal["ablate", "patch", "set"]


class Target(NamedTuple):
    """An activation that an edit names, with its axes and its shape in this run; head: the one of it that is meant."""

    path: str
    axes: str
    shape: tuple[int, ...]
    head: int | None = None

    @property
    def along(self) -> int:
        """Its axis of positions: of queries, where it has keys too."""
        return next(i for i, axis in enumerate(self.axes) if axis in "TS")


@dataclass(frozen=True, kw_only=True)
class Touched:
    """What an edit did to one activation: where (by axis), how many of its numbers are other ones, the largest
    |difference|, and the norms (roots of the sums of squares) of the activation before and of the difference.
    """

    edit: str
    path: str
    axes: str
    where: str
    changed: int
    size: int
    largest: float
    norm: float
    norm_change: float


@dataclass(frozen=True, kw_only=True)
class Moved:
    """An id before and after. ranks count from 1; tie: the first and the last rank of the ids with the same logit, if
    there are others; asked: it stands here because somebody asked for it.
    """

    id: int
    token: str
    bytes: list[int] | None
    rank_without: int
    rank_with: int
    tie_without: tuple[int, int] | None
    tie_with: tuple[int, int] | None
    logit_without: float
    logit_with: float
    logit_change: float
    prob_without: float
    prob_with: float
    asked: bool


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What became of one position (from 0): KL(without || with) of what it says comes next, and the candidates.

    fills: they stand for the position itself, as a model has it that fills in masks. moved: the best before, the best
    after and those asked for, by rank before. A model without a head has neither; of its final vector, and of logits,
    largest_change and norm_change tell (the largest |difference|, and the root of the sum of squares), beside norm.
    """

    position: int
    token: str
    fills: bool
    kl_nats: float | None
    kl_bits: float | None
    largest_change: float
    norm: float
    norm_change: float
    moved: list[Moved]


@dataclass(kw_only=True)
class EditsReport(Report):
    """explicit: layers whose attention is computed step by step, because scores or pattern of it are replaced.

    walks and proof: of the edited run, for the heads that were asked for.
    """

    schema = "gptcli.edits/1"
    model: ModelFacts
    n_layers: int
    n_heads: int
    tokens: list[list[Token]]
    source: list[list[Token]]
    touched: list[Touched]
    explicit: list[str]
    effects: list[Effect]
    walks: list[Walk] = field(default_factory=list)
    proof: list[Check] = field(default_factory=list)


class Edited:
    """Edits that were made, in their order: each as it was asked for, and the activations that it names."""

    def __init__(self, made: Sequence[tuple[str, Sequence[str]]] = ()):
        self.made = list(made)

    @property
    def said(self) -> list[str]:
        """Each as it was asked for."""
        return [said for said, _ in self.made]

    def of(self, path: str) -> list[str]:
        """The edits that name an activation."""
        return [said for said, paths in self.made if path in paths]


class Edits(Edited):
    """Edits of one run, and the probe that makes them.

    touched: what the latest pass changed; notes: what a person should know of them.
    """

    def __init__(self):
        super().__init__()
        self.notes: list[str] = []
        self.changes: dict[str, list[Callable[[Any], Any]]] = {}
        self._touched: dict[tuple[int, str], Touched] = {}
        self.editor = Editor(self.changes)

    @property
    def in_text(self) -> bool:
        """Do positions of the text mean something to them, or only those of a source?"""
        places = [(Place.of(path), path.rpartition(".")[2]) for path in self.changes]
        return any(not place.stack and not (place.name.startswith("cross.") and name in "kv") for place, name in places)

    @property
    def touched(self) -> list[Touched]:
        """By edit, and by activation in order of birth."""
        return [touched for _, touched in sorted(self._touched.items(), key=lambda item: item[0][0])]

    def add(self, said: str, targets: list[tuple[Target, "Where", Callable[[Any], Any]]]) -> None:
        """One edit: of each activation that it names, where it touches it, and the tensor that takes its place."""
        number = len(self.made)
        self.made.append((said, [target.path for target, _, _ in targets]))
        for target, where, change in targets:
            self.changes.setdefault(target.path, []).append(self._noting(number, said, target, where, change))

    def _noting(
        self, number: int, said: str, target: Target, where: "Where", change: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        def noted(x: "Tensor") -> "Tensor":
            from gptcli.model.edit import difference

            new = change(x)
            self._touched[number, target.path] = _touched(said, target, where, difference(x, new))
            return new

        return noted

    def check(self) -> None:
        """Raises GptcliError where an edit changed no number of the pass."""
        for number, (said, paths) in enumerate(self.made):
            if not any(touched.changed for (edit, _), touched in self._touched.items() if edit == number):
                named = paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]}"
                raise GptcliError(f"{said}: touches nothing: {named} has these values already", "", "edit")


def _touched(said: str, target: Target, where: "Where", found: "Difference") -> Touched:
    return Touched(edit=said, path=target.path, axes=target.axes, where=_where(target, where), **found._asdict())


def _where(target: Target, where: "Where") -> str:
    """`head 1, query 3`; empty for all of it."""
    words = {"H": "head", "G": "kv head", "D": "channel", "C": "channel", "F": "unit", "V": "id", "E": "expert"}
    weighs = target.axes.endswith(("TS", "SS"))
    words |= {"P": "channel"} | dict.fromkeys("TS", "query" if weighs else "position")
    said = []
    for axis, (letter, index) in enumerate(zip(target.axes, where)):
        if index == slice(None):
            continue
        word = "key" if axis > target.along and letter in "TS" else words[letter]
        said.append(f"{word} {index if isinstance(index, int) else index.start}")
    return ", ".join(said)


class Request(NamedTuple):
    """What a person asks for: --ablate, --patch or --set, and the option's value."""

    kind: Kind
    value: str

    @property
    def said(self) -> str:
        return f"--{self.kind} {self.value}"


def edits_of(
    run: Run,
    requests: list[Request],
    ablate_with: Literal["zero", "mean"] = "zero",
    position: str | None = None,
    attending: Attending = "self",
    names: Names | None = None,
) -> Edits:
    """The edits that the options mean, for `run.edits`. Nothing is run yet.

    position: where ablations and patches touch (None: everywhere). Raises GptcliError for a head, an activation, a
    place or a file that is not there, and for shapes that don't fit.
    """
    if len(run.ids) > 1:
        raise GptcliError(f"{requests[0].said}: {len(run.ids)} texts, but edits are made in one", "give one text")
    reader = _Reader(run, attending, names or Names(run.model), position)
    edits = Edits()
    for request in requests:
        match request.kind:
            case "ablate":
                edits.add(request.said, reader.ablation(request, ablate_with))
            case "patch":
                found, notes = reader.patch(request)
                edits.add(request.said, found)
                edits.notes += notes
            case "set":
                edits.add(request.said, reader.setting(request))
    return edits


Part = tuple[Target, "Where", Callable[[Any], Any]]


class _Reader:
    """Reads what options say of one run."""

    def __init__(self, run: Run, attending: Attending, names: Names, position: str | None):
        self.run, self.attending, self.names, self.position = run, attending, names, position
        every = shapes(run.model.spec, len(run.ids), run.width, run.source_width)
        self.points = {path: Target(path, axes, shape) for path, axes, shape in every}

    def ablation(self, request: Request, ablate_with: Literal["zero", "mean"]) -> list[Part]:
        from gptcli.model.edit import averaged, written

        found = []
        for target in self.targets(request, request.value):
            where = self.where(target)
            if ablate_with == "zero":
                found.append((target, where, lambda x, where=where: written(x, where, 0.0)))
                continue
            if target.path.endswith((".scores", ".pattern")):
                said = f"{request.said} --ablate-with mean: queries see different keys, so {target.path} has no mean"
                raise GptcliError(said, "--ablate-with zero does it", "edit")
            found.append((target, where, lambda x, where=where, axis=target.along: averaged(x, where, axis)))
        return found

    def patch(self, request: Request) -> tuple[list[Part], list[str]]:
        from gptcli.model.edit import written

        name, _, wanted = request.value.rpartition(":")
        if not name or not wanted:
            raise GptcliError(f"{request.said}: not FILE:PATH", "such as run.safetensors:layers.0.attn.z", "edit")
        source = _Patch(Path(name), request)
        found = []
        for target in source.among(self.targets(request, wanted)):
            values = source.read(target)  # [B, …], as the activation
            where = self.where(target)
            part = values[where]
            found.append((target, where, lambda x, where=where, part=part: written(x, where, part)))
        return found, source.notes(self.run)

    def setting(self, request: Request) -> list[Part]:
        from gptcli.model.edit import written

        said = re.fullmatch(r"([^\[\]=]+)(?:\[([^\[\]]*)\])?=([^=]+)", request.value)
        if said is None:
            raise GptcliError(f"{request.said}: not PATH[index]=value", "such as layers.0.attn.pattern[0,3]=0", "edit")
        path, index, value = said.groups()
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if number != number:
            raise GptcliError(f"{request.said}: {value!r} is not a number", "give one, or -inf", "edit")
        found = []
        for target in self.targets(request, path):
            where = self.indexed(request, target, index)
            found.append((target, where, lambda x, where=where: written(x, where, number)))
        return found

    def targets(self, request: Request, wanted: str) -> list[Target]:
        """What a head (`L0H1`: its z) or an activation's name or pattern means."""
        if head := re.fullmatch(r"L([0-9]{1,9})H([0-9]{1,9})", wanted, re.IGNORECASE):
            return [self.head(request, int(head[1]), int(head[2]))]
        found = [self.points[path] for path in self.names.select(f"--{request.kind}", wanted)]
        flowing = [target for target in found if not target.path.endswith(".sink")]
        if not flowing:
            raise GptcliError(f"{request.said}: nothing reads {wanted}", "pattern is what the run goes on with", "edit")
        return flowing

    def head(self, request: Request, layer: int, head: int) -> Target:
        stack = stack_of(self.attending, self.run.model.spec)
        if layer >= stack.n_layers:
            hint = f"give L0 to L{stack.n_layers - 1}"
            raise GptcliError(f"{request.said}: this model has {stack.n_layers} layers, counted from 0", hint, "edit")
        here = stack.at(layer)
        number = (here.cross if self.attending == "cross" else here.attention).n_heads
        if head >= number:
            hint = f"give H0 to H{number - 1}"
            raise GptcliError(f"{request.said}: layer L{layer} has {number} heads, counted from 0", hint, "edit")
        stack_name = "encoder." if self.attending == "encoder" else ""
        path = f"{stack_name}layers.{layer}.{'cross' if self.attending == 'cross' else 'attn'}.z"
        return self.points[path]._replace(head=head)

    def where(self, target: Target) -> "Where":
        """The head that is meant and the positions that --position means, of the whole tensor."""
        index: list[int | slice] = [slice(None)] * len(target.axes)
        if target.head is not None:
            index[1] = target.head
        if self.position not in (None, "all"):
            [index[target.along]] = positions(self.position, target.shape[target.along])
        return tuple(index)

    def indexed(self, request: Request, target: Target, index: str | None) -> "Where":
        """`0,3` by the axes without the batch; `:` is a whole axis, and so are those that are left out."""
        axes, sizes = target.axes[1:], target.shape[1:]
        words = [] if index is None else index.split(",")
        letters = f"{target.path} is [{','.join(axes)}] = {list(sizes)}"
        if len(words) > len(axes):
            raise GptcliError(f"{request.said}: {len(words)} numbers, but {letters}", "one an axis at most", "edit")
        found: list[int | slice] = [slice(None)]
        if target.head is not None:
            axes, sizes, found = axes[1:], sizes[1:], [slice(None), target.head]
        for word, axis, size in zip((word.strip() for word in words), axes, sizes):
            if word == ":":
                found.append(slice(None))
                continue
            if not re.fullmatch(r"-?[0-9]{1,18}", word) or not -size <= int(word) < size:
                raise GptcliError(f"{request.said}: {axis} {word!r}, but {letters}", f"give 0 to {size - 1}", "edit")
            found.append(int(word) % size)
        return tuple(found)


class _Patch:
    """A file that activations are taken from: a trace's, any other .safetensors by our names, or one array (.npy)."""

    def __init__(self, path: Path, request: Request):
        from gptcli.report.capture import open_tensors

        self.path, self.said = path, request.said
        self.tensors = open_tensors(path, request.said)

    def among(self, targets: list[Target]) -> list[Target]:
        """Those that the file holds. Raises GptcliError where it holds none, or not the one that is named."""
        held = targets if self.tensors.unnamed else [target for target in targets if target.path in self.tensors]
        if not held:
            raise GptcliError(
                f"{self.said}: {self.path} holds no {targets[0].path}", f"it holds {self.tensors.shown()}", "edit"
            )
        if self.tensors.unnamed and len(held) > 1:
            raise GptcliError(f"{self.said}: one array for {len(held)} activations", "name one", "edit")
        return held

    def read(self, target: Target) -> "Tensor":
        """The activation's values [B, …]. Raises GptcliError where their shape is another one."""
        values = self.tensors[target.path]
        if values.shape == target.shape[1:]:
            values = values[None]
        if values.shape != target.shape:
            fits = f"{target.path} is {list(target.shape)} here ([{','.join(target.axes)}])"
            raise GptcliError(f"{self.said}: {list(values.shape)}, but {fits}", "take it from a text as long", "edit")
        return values

    def notes(self, run: Run) -> list[str]:
        from gptcli.report.capture import digest

        theirs, dtype = self.tensors.notes.get("digest"), f'"dtype": "{str(run.dtype).removeprefix("torch.")}"'
        # A digest is of the type that a run had.
        alike = theirs is not None and dtype in self.tensors.notes.get("model", "")
        another = alike and theirs != digest(run)
        return [f"{self.path} was traced from other weights than these"] if another else []


def edits_report(run: Run, k: int, words: tuple[str, ...], shown: list[int]) -> EditsReport:
    """The run as it is and the edited run (`run.edits`) side by side, after the `shown` positions.

    words: tokens to look at besides the k best of either. Raises GptcliError where an edit changes nothing.
    """
    edits, run.edits = run.edits, None
    try:
        without = run.forward("all")
    finally:
        run.edits = edits
    edited = run.forward("all")
    replaced = {path.removesuffix(f".{name}") for path in edits.changes for name in BESIDE if path.endswith(f".{name}")}
    return EditsReport(
        model=run.facts(),
        n_layers=run.model.spec.n_layers,
        n_heads=run.model.spec.attention.n_heads,
        tokens=run.tokens(),
        source=run.source_tokens(),
        touched=edits.touched,
        explicit=[path for path in sorted(replaced, key=_order) if not _capped(run, path)],
        effects=[_effect(run, without[0, at], edited[0, at], at, k, words) for at in shown],
        findings=[] if edited.isfinite().all() else [_not_finite(run)],
    )


def _not_finite(run: Run) -> Finding:
    from gptcli.report.birth import birth

    return birth(run)


def _order(path: str) -> tuple[bool, int, str]:
    place = Place.of(path)
    return not place.stack, place.layer or 0, place.name


def _capped(run: Run, path: str) -> bool:
    """Is that attention computed step by step anyway?"""
    place = Place.of(f"{path}.z")
    here = place.spec(run.model.spec)
    return (here.cross if place.name.startswith("cross.") else here.attention).softcap is not None


def shown_positions(run: Run, position: str | None) -> list[int]:
    """The positions whose outcome is shown: what was asked for, and the last; a model that fills in: its masks."""
    last = (run.masked(0) if run.model.fills else []) or [run.width - 1]
    if position is None or (position != "all" and not run.edits.in_text):
        return last
    return sorted({*positions(position, run.width), *last})


def _effect(run: Run, without: "Tensor", edited: "Tensor", position: int, k: int, words: tuple[str, ...]) -> Effect:
    from gptcli.model.edit import difference
    from gptcli.model.measure import divergence

    headless = run.model.spec.lm_head is None
    bits = None if headless else divergence(without, edited)
    bits = 0.0 if bits is not None and bits < 0 else bits  # rounding, of what is the same
    found = difference(without, edited)
    return Effect(
        position=position,
        token=run.tokens()[0][position].token,
        fills=run.model.fills,
        kl_nats=None if bits is None else bits * math.log(2),
        kl_bits=bits,
        largest_change=found.largest,
        norm=found.norm,
        norm_change=found.norm_change,
        moved=[] if headless else _moved(run, without, edited, k, words),
    )


def _moved(run: Run, without: "Tensor", edited: "Tensor", k: int, words: tuple[str, ...]) -> list[Moved]:
    """The best of both, and those asked for: by rank before."""
    from gptcli.model.measure import rank

    asked = tuple(run.model.tokenizer.target.find(word) for word in words)
    best = {one.id for logits in (without, edited) for one in rank(logits, k)}
    ids = tuple({*best, *asked})
    before, after = ({one.id: one for one in rank(logits, 1, ids)} for logits in (without, edited))
    labels, found = run.labels, []
    for id_ in sorted(ids, key=lambda id_: before[id_].rank):
        old, new = before[id_], after[id_]
        piece = labels.piece(id_) if labels else None
        found.append(
            Moved(
                id=id_,
                token=visible(piece),
                bytes=None if piece is None else list(piece),
                rank_without=old.rank,
                rank_with=new.rank,
                tie_without=_tie(old),
                tie_with=_tie(new),
                logit_without=old.logit,
                logit_with=new.logit,
                logit_change=new.logit - old.logit,
                prob_without=old.prob,
                prob_with=new.prob,
                asked=id_ in asked,
            )
        )
    return found


def _tie(one: "Ranked") -> tuple[int, int] | None:
    return (one.tie_first, one.tie_last) if one.tie_last > one.tie_first else None
