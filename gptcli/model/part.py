"""A part of a model by itself: the embedding, one layer, or what stands after the layers, run from its exact input and
with something in it changed. The functions are those of the forward pass. B texts, T positions, C hidden size.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from gptcli.model.forward import Inputs, Memory, forward, stack
from gptcli.model.weights import Weights
from gptcli.spec import NoNorm, Spec
from gptcli.trace import EVERYTHING, Both, Editor, Selection, Silent

FIRST = "layers.0.resid_pre"  # what the embedding ends with


class Enough(Exception):
    """All that was wanted of a forward pass has been seen."""


class Catch(Silent):
    """A probe that keeps the activations of these paths, and ends the forward pass (Enough) when it has them all."""

    def __init__(self, wanted: Collection[str], scope: str = "", kept: dict[str, Tensor] | None = None):
        self.wanted, self.scope, self.kept = wanted, scope, {} if kept is None else kept

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if self.scope + name in self.wanted:
            self.kept[self.scope + name] = x
            if len(self.kept) == len(self.wanted):
                raise Enough
        return x

    def at(self, scope: str) -> "Catch":
        return Catch(self.wanted, f"{self.scope}{scope}.", self.kept)

    def selection(self, name: str) -> Selection | None:
        return EVERYTHING if self.scope + name in self.wanted else None


class Changed(Weights):
    """Weights of which some are `others` (None: absent), by full path. Of a layer nothing but these is seen; one that
    isn't there raises LookupError.
    """

    def __init__(self, base: Weights, others: Mapping[str, Tensor | None], scope: str | None = None):
        super().__init__(base.tensors, base.ties, base.scope if scope is None else scope)
        self.others = others

    def at(self, scope: str) -> "Changed":
        return Changed(self, self.others, f"{self.scope}{scope}.")

    def _mine(self, name: str) -> bool:
        return self.scope + name in self.others or ".layers.0." in f".{self.scope}"

    def __contains__(self, name: str) -> bool:
        return self.others.get(self.scope + name) is not None if self._mine(name) else super().__contains__(name)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise LookupError(self.scope + name)
        return self.others[self.scope + name] if self._mine(name) else super().__getitem__(name)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        return self[name][ids] if self._mine(name) else super().rows(name, ids)


@dataclass(frozen=True)
class Shifted(Inputs):
    """A request whose positions count from `by` on."""

    by: int = 0

    @property
    def positions(self) -> Tensor:
        return super().positions + self.by


@dataclass(frozen=True)
class Change:
    """What of a part is to be otherwise: its architecture; weights (None: absent); positions; the ids themselves."""

    spec: Callable[[Spec], Spec] = lambda spec: spec
    weights: Mapping[str, Tensor | None] = field(default_factory=dict)
    shift: int = 0
    ids: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Part:
    """inputs: of its stack; weights: its stack's; spec: as it is there, a layer's own parts in it; layer: from 0, None
    outside the layers; x [B, T, C]: what it reads, None for the embedding; memory: what the layer looks across at.
    """

    inputs: Inputs
    weights: Weights
    spec: Spec
    layer: int | None = None
    x: Tensor | None = None
    memory: Memory | None = None

    @cached_property
    def local(self) -> Weights:
        """The part's weights by their names in it (`attn.q.weight`); a layer's are held."""
        if self.layer is None:
            return self.weights
        before = f"{self.weights.scope}layers.{self.layer}."
        mine = [name for name in self.weights.tensors if name.startswith(before)]
        return Weights({name.removeprefix(before): self.weights.tensors[name] for name in mine})

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self.weights["embed.weight"].dtype

    def run(self, change: Change, wanted: Collection[str]) -> dict[str, Tensor]:
        """The activations of these names (`attn.q`) that it has, with that change. Raises GptcliError, or what torch
        raises where sizes don't fit, for a change that is none.
        """
        before = "" if self.layer is None else "layers.0."
        held = {} if self.layer is None else self.local.tensors
        others = {f"{self.weights.scope}{before}{name}": x for name, x in {**held, **change.weights}.items()}
        weights, spec, inputs = Changed(self.weights, others), change.spec(self.spec), self.inputs
        ids = inputs.ids if change.ids is None else change.ids(inputs.ids)
        inputs = Shifted(ids, inputs.mask, None, inputs.segments, by=change.shift)
        catch = Catch({before + name for name in wanted})
        edits = {FIRST: [_ended]} if self.x is None else {"embed": [lambda _: self.x]}
        probe = Both(catch, Editor(edits))
        try:
            with torch.inference_mode():
                self._run(inputs, weights, spec, probe)
        except Enough:
            pass
        return {path.removeprefix(before): x for path, x in catch.kept.items()}

    def _run(self, inputs: Inputs, weights: Weights, spec: Spec, probe: Silent) -> None:
        if self.layer is not None:
            spec = replace(spec, n_layers=1, variants=(), norm=_without(spec, embedding=False, final=False))
            stack(inputs, self.memory, weights, spec, probe)
            return
        spec = replace(spec, n_layers=0, variants=(), encoder=None, cross=None)
        if self.x is None:
            spec = replace(spec, n_layers=1, norm=_without(spec, final=False))
            stack(inputs, None, weights, spec, probe)
        else:
            forward(inputs, weights, replace(spec, norm=_without(spec, embedding=False)), probe)


def _ended(_: Tensor) -> Tensor:
    raise Enough


def _without(spec: Spec, **fields: bool):
    """The architecture's norm with these fields; where it has none, none."""
    return spec.norm if isinstance(spec.norm, NoNorm) else replace(spec.norm, **fields)
