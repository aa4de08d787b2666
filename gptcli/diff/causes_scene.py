"""What a search for a cause looks at: the part of A where B parts from it, run by itself, and B's values there."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from gptcli.checkpoint.patterns import braced, fold, split
from gptcli.errors import GptcliError
from gptcli.layout import Place
from gptcli.run import Run
from gptcli.spec import Spec
from gptcli.trace import points

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.part import Change, Part

ABSENT = object()
EMBEDDING = ("embed", "embed_norm", "layers.0.resid_pre")
LAST = 16  # positions of each text that are run behind the layers, where no position looks at another


class Guess(NamedTuple):
    """A hypothesis: its code, what it says of B and A, what is to be mended, and the change that makes A do as B."""

    code: str
    said: str
    mend: str
    change: "Change"


class Shown(NamedTuple):
    """A guess that closes the gap: at which activations (by full path), and how far the first is from B's still."""

    guess: Guess
    closes: list[str]
    gap: float


@dataclass(frozen=True)
class Scene:
    """whole: the architecture of the part's stack; before: what names in the part have before them in a path; parted:
    the first activation that differs; theirs: B's values; window: the names at which the cause may show first, behind
    the last that agreed and up to the parted one.
    """

    part: "Part"
    whole: Spec
    before: str
    parted: str
    theirs: "Mapping[str, Tensor]"
    close: "Callable[[str, Tensor, Tensor], bool]"
    window: frozenset[str]

    @property
    def spec(self) -> Spec:
        return self.part.spec

    @cached_property
    def ours(self) -> "dict[str, Tensor]":
        """A's own values where B's are known."""
        from gptcli.model.part import Change

        return self.part.run(Change(), self.theirs)

    @property
    def fits(self) -> bool:
        """Are B's values as many as A's?"""
        return self.ours[self.parted].shape == self.theirs[self.parted].shape

    def with_field(self, path: str, value: Any, name: str) -> "Tensor":
        """A's activation with another value of a field."""
        from gptcli.model.part import Change

        return self.part.run(Change(spec=lambda spec: put(spec, path, value)), [name])[name]

    def named(self, names: Iterable[str]) -> str:
        """Weights of the part by their full names, those of one block in braces: `layers.0.attn.{q,k,v}.bias`."""
        groups: dict[str, list[str]] = {}
        for full in (self.before + name for name in names):
            groups.setdefault(split(full)[0].rsplit(".", 2)[0], []).append(full)
        return ", ".join(braced(group) or ", ".join(one.text for one in fold(group)) for group in groups.values())

    def try_out(self, guess: Guess) -> Shown | None:
        """What the guess closes; None where B's values don't come out at the first activation that both have."""
        try:
            found = self.part.run(guess.change, [self.parted]) or self.part.run(guess.change, self.theirs)
            first = next((name for name in self.theirs if name in found), None)
            if first is None or not self._closes(first, found[first]):
                return None
            found = self.part.run(guess.change, self.theirs)
        except (GptcliError, RuntimeError, LookupError, TypeError, ValueError):
            return None  # such a model can't be, or not with these weights
        closed = [self.before + name for name, x in found.items() if self._closes(name, x)]
        theirs = self.theirs[first].double()
        return Shown(guess, closed, float((found[first] - theirs).norm() / theirs.norm().clamp(min=1e-300)))

    def _closes(self, name: str, x: "Tensor") -> bool:
        theirs = self.theirs[name]
        return x.shape == theirs.shape and self.close(self.before + name, x, theirs)


def scene_of(
    a: Run,
    parted: str,
    theirs: "Mapping[str, Tensor]",
    close: "Callable[[str, Tensor, Tensor], bool]",
    agreed: str | None,
    known: "Mapping[str, Tensor]",
) -> Scene:
    """theirs by full path; agreed: the last activation that agreed, where one did; known: what is at hand of A."""
    place, order = Place.of(parted), [path for path, _ in points(a.model.spec)]
    mine = [path for path in order if _part_of(path) == _part_of(parted)]
    begin = mine.index(agreed) + 1 if agreed in mine else 0
    before = parted[: len(parted) - len(_name(parted))]
    part, cut = _part(a, parted, known)
    held = mine[mine.index(parted) :]
    values = {path.removeprefix(before): theirs[path][:, cut] for path in held if path in theirs}
    names = frozenset(path.removeprefix(before) for path in mine[begin : mine.index(parted) + 1])
    stack = a.model.spec.encoder if place.stack else a.model.spec
    return Scene(part, stack, before, _name(parted), values, close, names)


def _name(path: str) -> str:
    """What an activation is called in its part."""
    inside = path.removeprefix("encoder.")
    return inside if inside in EMBEDDING else Place.of(path).name


def _part_of(path: str) -> tuple[str, int | None, bool]:
    """The stack and the layer, None outside the layers, and whether it is the embedding."""
    place, embedding = Place.of(path), _name(path) in EMBEDDING
    return place.stack, None if embedding else place.layer, embedding


def _part(a: Run, parted: str, known: "Mapping[str, Tensor]") -> "tuple[Part, slice]":
    """The part where an activation stands, with A's exact input of it, and the positions that it is run at."""
    from gptcli.model.forward import Inputs, Memory, Sight
    from gptcli.model.part import Catch, Enough, Part

    place, spec, request = Place.of(parted), a.model.spec, a.inputs("all")
    at = "encoder." if place.stack else ""
    if at:
        inputs, weights, spec = request.source, a.weights.at("encoder"), spec.encoder
    else:
        inputs, weights = request, a.weights
    if _name(parted) in EMBEDDING:
        return Part(inputs, weights, spec), slice(None)
    read, across = _reads(spec, place.layer, at), spec.encoder is not None and place.layer is not None
    memory = _reads(spec.encoder, None, "encoder.", final=True) if across else read
    if not {read, memory} <= known.keys():
        catch = Catch({read, memory})
        with suppress(Enough):
            a.forward("all", catch)
        known = catch.kept
    x, memory = known[read], known[memory] if across else None
    if place.layer is None:
        cut = slice(-LAST, None)
        mask = None if inputs.mask is None else inputs.mask[:, cut]
        return Part(Inputs(inputs.ids[:, cut], mask), weights, spec, x=x[:, cut]), cut
    if across:
        sight = Sight.of(spec.cross, inputs.positions, request.source.mask, request.source.positions)
        memory = Memory(memory, sight)
    return Part(inputs, weights, spec.at(place.layer), place.layer, x, memory), slice(None)


def _reads(spec: Spec, layer: int | None, at: str, final: bool = False) -> str:
    """The activation that a layer reads, or what stands behind the layers; final: the one that comes out of a stack."""
    if final and spec.norm.final:
        return f"{at}final_norm"
    return f"{at}layers.{spec.n_layers - 1}.resid_post" if layer is None else f"{at}layers.{layer}.resid_pre"


def value_at(part: Any, path: str) -> Any:
    """The value of a field (`norm.eps`); ABSENT where the part has none of that name."""
    head, _, rest = path.partition(".")
    if not is_dataclass(part) or head not in {field.name for field in fields(part)}:
        return ABSENT
    return value_at(getattr(part, head), rest) if rest else getattr(part, head)


def put(part: Any, path: str, value: Any) -> Any:
    """The same architecture with another value of a field. Raises SpecError where it can't be."""
    head, _, rest = path.partition(".")
    return replace(part, **{head: put(getattr(part, head), rest, value) if rest else value})


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """The fields in which two architectures differ: of parts of one kind, the fields within."""
    for field in fields(ours):
        one, other, here = getattr(ours, field.name), getattr(theirs, field.name), f"{path}{field.name}"
        if one == other:
            continue
        if is_dataclass(one) and type(one) is type(other):
            yield from differences(one, other, f"{here}.")
        else:
            yield here
