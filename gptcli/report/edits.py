"""`trace --ablate`, `--patch`, `--set`: a run with activations changed on the way, beside the run as it is.

An edit is asked for by one option, and touches the activations that it names, at the places that it names. One that
touches nothing is an error: its result would be taken for an effect that is none.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gptcli.errors import GptcliError
from gptcli.layout import Place
from gptcli.names import Names
from gptcli.report import RunReport
from gptcli.report.birth import birth
from gptcli.report.proof import Check
from gptcli.report.trace import Walk
from gptcli.report.view import Attending, at_head, layer_path, layer_spec, stack_of
from gptcli.run import Run, positions
from gptcli.tokens import Token
from gptcli.trace import Editor, points, shapes

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.edit import Where


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
class EditsReport(RunReport):
    """explicit: layers whose attention is computed step by step, because scores or pattern of it are replaced.

    walks and proof: of the edited run, for the heads that were asked for.
    """

    schema = "gptcli.edits/1"
    n_layers: int
    n_heads: int
    touched: list[Touched]
    explicit: list[str]
    effects: list[Effect]
    walks: list[Walk] = field(default_factory=list)
    proof: list[Check] = field(default_factory=list)


class Request(NamedTuple):
    """What a person asks for: --ablate, --patch or --set, and its value; ablate_with: what stands in."""

    kind: Literal["ablate", "patch", "set"]
    value: str
    ablate_with: Literal["zero", "mean"] = "zero"

    @property
    def said(self) -> str:
        instead = " --ablate-with mean" if self.kind == "ablate" and self.ablate_with == "mean" else ""
        return f"--{self.kind} {self.value}{instead}"

    def refused(self, why: str, hint: str) -> GptcliError:
        """What is raised where it can't be done."""
        return GptcliError(f"{self.said}: {why}", hint, "edit")


class Part(NamedTuple):
    """What an edit does to one activation: where, and what stands there then; `mean`: its mean over positions."""

    target: Target
    where: "Where"
    values: "Tensor | float | Literal['mean']"

    def __call__(self, x: "Tensor") -> "Tensor":
        from gptcli.model.edit import averaged, written

        mean = isinstance(self.values, str)
        return averaged(x, self.where, self.target.along) if mean else written(x, self.where, self.values)

    @property
    def at(self) -> "At":
        """Where, as numbers."""
        return tuple(None if index == slice(None) else index for index in self.where)

    @property
    def said(self) -> str:
        """Where, in words: `head 1, query 3`; empty for all of it."""
        words = {"H": "head", "G": "kv head", "D": "channel", "C": "channel", "F": "unit", "V": "id", "E": "expert"}
        weighs = self.target.axes.endswith(("TS", "SS"))
        words |= {"P": "channel"} | dict.fromkeys("TS", "query" if weighs else "position")
        said = []
        for axis, (letter, index) in enumerate(zip(self.target.axes, self.where)):
            if index != slice(None):
                word = "key" if axis > self.target.along and letter in "TS" else words[letter]
                said.append(f"{word} {index}")
        return ", ".join(said)


# A place in an activation, by axis, the batch first: an index, or None for all of it. Axes left out are meant whole.
At = tuple[int | None, ...]


class Edited:
    """Edits that were made, in their order: each as it was asked for, and where it touches the activations it names.

    notes: what a person should know of them.
    """

    def __init__(self, made: Sequence[tuple[str, Mapping[str, At]]] = ()):
        self.made = list(made)
        self.notes: list[str] = []

    @property
    def said(self) -> list[str]:
        """Each as it was asked for."""
        return [said for said, _ in self.made]

    def of(self, path: str, at: At = ()) -> list[str]:
        """The edits that touch an activation at that place."""
        return [said for said, places in self.made if path in places and _meet(places[path], at)]


def _meet(a: At, b: At) -> bool:
    """Have two places something in common?"""
    return all(i is None or j is None or i == j for i, j in zip(a, b))


class Edits(Edited):
    """Edits of one run, and the probe that makes them."""

    def __init__(self):
        super().__init__()
        self.changes: dict[str, list[Callable[[Any], Any]]] = {}
        self.editor = Editor(self.changes)
        self._touched: dict[tuple[int, str], Touched] = {}

    @property
    def in_text(self) -> bool:
        """Do positions of the text mean something to them, or only those of a source?"""
        places = [(Place.of(path), path.rpartition(".")[2]) for path in self.changes]
        return any(not place.stack and not (place.name.startswith("cross.") and name in "kv") for place, name in places)

    @property
    def touched(self) -> list[Touched]:
        """What the latest pass changed, by edit, and by activation in order of birth."""
        return [touched for _, touched in sorted(self._touched.items(), key=lambda item: item[0][0])]

    def add(self, said: str, parts: list[Part]) -> None:
        """One edit."""
        for part in parts:
            self.changes.setdefault(part.target.path, []).append(self._noting(len(self.made), said, part))
        self.made.append((said, {part.target.path: part.at for part in parts}))

    def _noting(self, number: int, said: str, part: Part) -> Callable[[Any], Any]:
        def noted(x: "Tensor") -> "Tensor":
            from gptcli.model.edit import difference

            new, (path, axes, *_) = part(x), part.target
            found = difference(x, new)._asdict()
            self._touched[number, path] = Touched(edit=said, path=path, axes=axes, where=part.said, **found)
            return new

        return noted

    def check(self) -> None:
        """Raises GptcliError where an edit changed no number of the pass."""
        for number, (said, places) in enumerate(self.made):
            if not any(touched.changed for (edit, _), touched in self._touched.items() if edit == number):
                first, *others = places
                named = f"{first} … {others[-1]}" if others else first
                raise GptcliError(f"{said}: touches nothing: {named} has these values already", "", "edit")


def edits_of(
    run: Run,
    requests: list[Request],
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
    edits, reader = Edits(), _Reader(run, attending, names or Names(run.model), position)
    read = {"ablate": reader.ablation, "patch": reader.patch, "set": reader.setting}
    for request in requests:
        edits.add(request.said, read[request.kind](request))
    edits.notes = reader.notes
    return edits


class _Reader:
    """Reads what options say of one run. notes: what a person should know of them."""

    def __init__(self, run: Run, attending: Attending, names: Names, position: str | None):
        self.run, self.attending, self.names, self.position = run, attending, names, position
        every = shapes(run.model.spec, len(run.ids), run.width, run.source_width)
        self.points = {path: Target(path, axes, shape) for path, axes, shape in every}
        self.notes: list[str] = []

    def ablation(self, request: Request) -> list[Part]:
        targets = self.targets(request, request.value)
        keyed = next((target for target in targets if target.path.endswith((".scores", ".pattern"))), None)
        mean = request.ablate_with == "mean"
        if mean and keyed is not None:
            why = f"--ablate-with mean: queries see different keys, so {keyed.path} has no mean"
            raise GptcliError(f"{request.said} {why}", "--ablate-with zero does it", "edit")
        return [Part(target, self.where(target), "mean" if mean else 0.0) for target in targets]

    def patch(self, request: Request) -> list[Part]:
        """The same activations as a file holds them: a trace's, any other .safetensors by our names, or a .npy."""
        from gptcli.report.capture import Tensors

        name, _, wanted = request.value.rpartition(":")
        if not name or not wanted:
            raise request.refused("not FILE:PATH", "such as run.safetensors:layers.0.attn.z")
        tensors, targets = Tensors(Path(name), request.said), self.targets(request, wanted)
        held = targets if tensors.unnamed else [target for target in targets if target.path in tensors]
        if not held:
            raise request.refused(f"{name} holds no {targets[0].path}", f"it holds {tensors.shown()}")
        if tensors.unnamed and len(held) > 1:
            raise request.refused(f"one array for {len(held)} activations", "name one")
        parts = []
        for target in held:
            values, where = tensors[target.path], self.where(target)
            values = values[None] if values.shape == target.shape[1:] else values  # [B, …], as the activation
            if values.shape != target.shape:
                fits = f"{target.path} is {list(target.shape)} here ([{','.join(target.axes)}])"
                raise request.refused(f"{list(values.shape)}, but {fits}", "take it from a text as long")
            parts.append(Part(target, where, values[where]))
        self.notes += [f"{name} was traced from other weights than these"] * tensors.of_others(self.run)
        return parts

    def setting(self, request: Request) -> list[Part]:
        said = re.fullmatch(r"([^\[\]=]+)(?:\[([^\[\]]*)\])?=([^=]+)", request.value)
        if said is None:
            raise request.refused("not PATH[index]=value", "such as layers.0.attn.pattern[0,3]=0")
        path, index, value = said.groups()
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            raise request.refused(f"{value!r} is not a number", "give one, or -inf")
        return [Part(target, self.indexed(request, target, index), number) for target in self.targets(request, path)]

    def targets(self, request: Request, wanted: str) -> list[Target]:
        """What a head (`L0H1`: its z) or an activation's name or pattern means."""
        if head := at_head(wanted):
            return [self.head(request, *head)]
        found = [self.points[path] for path in self.names.select(f"--{request.kind}", wanted)]
        flowing = [target for target in found if not target.path.endswith(".sink")]
        if not flowing:
            raise request.refused(f"nothing reads {wanted}", "pattern is what the run goes on with")
        return flowing

    def head(self, request: Request, layer: int, head: int) -> Target:
        spec = self.run.model.spec
        layers = stack_of(self.attending, spec).n_layers
        if layer >= layers:
            raise request.refused(f"this model has {layers} layers, counted from 0", f"give L0 to L{layers - 1}")
        heads = layer_spec(self.attending, spec, layer).attention.n_heads
        if head >= heads:
            raise request.refused(f"layer L{layer} has {heads} heads, counted from 0", f"give H0 to H{heads - 1}")
        part = "cross" if self.attending == "cross" else "attn"
        return self.points[f"{layer_path(self.attending, layer)}.{part}.z"]._replace(head=head)

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
            raise request.refused(f"{len(words)} numbers, but {letters}", "one an axis at most")
        found: list[int | slice] = [slice(None)]
        if target.head is not None:
            axes, sizes, found = axes[1:], sizes[1:], [slice(None), target.head]
        for word, axis, size in zip((word.strip() for word in words), axes, sizes):
            number = int(word) if re.fullmatch(r"-?[0-9]{1,18}", word) else size
            if word != ":" and not -size <= number < size:
                raise request.refused(f"{axis} {word!r}, but {letters}", f"give 0 to {size - 1}")
            found.append(slice(None) if word == ":" else number % size)
        return tuple(found)


def edits_report(run: Run, k: int, words: tuple[str, ...], shown: list[int]) -> EditsReport:
    """The run as it is and the edited run (`run.edits`) side by side, after the `shown` positions.

    words: tokens to look at besides the k best of either. Raises GptcliError where an edit changes nothing.
    """
    without, edited = run.forward("all", edited=False), run.forward("all")
    return EditsReport(
        **run.told(),
        n_layers=run.model.spec.n_layers,
        n_heads=run.model.spec.attention.n_heads,
        touched=run.edits.touched,
        explicit=_explicit(run),
        effects=[_effect(run, without[0, at], edited[0, at], at, k, words) for at in shown],
        findings=[] if edited.isfinite().all() else [birth(run)],
    )


def _explicit(run: Run) -> list[str]:
    """Attentions that the fused kernel would compute, were their scores or weights not replaced."""
    found = []
    for path, _ in points(run.model.spec):
        at, _, name = path.rpartition(".")
        place = Place.of(path)
        if name == "pattern" and {path, f"{at}.scores"} & set(run.edits.changes):
            here = place.spec(run.model.spec)
            part = here.cross if place.name.startswith("cross.") else here.attention
            found += [at] if part.softcap is None else []
    return found


def shown_positions(run: Run, position: str | None) -> list[int]:
    """The positions whose outcome is shown: what was asked for, and the last; a model that fills in: its masks."""
    last = (run.masked(0) if run.model.fills else []) or [run.width - 1]
    if position is None or (position != "all" and not run.edits.in_text):
        return last
    return sorted({*positions(position, run.width), *last})


def _effect(run: Run, without: "Tensor", edited: "Tensor", position: int, k: int, words: tuple[str, ...]) -> Effect:
    from gptcli.model.edit import difference
    from gptcli.model.measure import divergence

    headless, found = run.model.spec.lm_head is None, difference(without, edited)
    bits = None if headless else max(divergence(without, edited), 0.0)  # rounding may leave less; NaN stays
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
    ids, found = tuple({*best, *asked}), []
    after = {one.id: one for one in rank(edited, 1, ids)}
    for old in rank(without, 1, ids):
        new, token = after[old.id], Token.of(old.id, run.labels)
        numbers = {f"{name}_without": getattr(old, name) for name in ("rank", "tie", "logit", "prob")}
        numbers |= {f"{name}_with": getattr(new, name) for name in ("rank", "tie", "logit", "prob")}
        numbers["logit_change"] = new.logit - old.logit
        found.append(Moved(id=old.id, token=token.token, bytes=token.bytes, asked=old.id in asked, **numbers))
    return found
