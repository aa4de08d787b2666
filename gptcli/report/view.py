"""One kind of attention of a run: where its numbers stand, who looks at whom, and which layers and heads are meant."""

import re
from typing import TYPE_CHECKING, Literal

from gptcli.errors import GptcliError
from gptcli.run import Run
from gptcli.spec import Spec
from gptcli.tokens import Token

if TYPE_CHECKING:
    from gptcli.model.attention import Sight

# Which attention: a text's own, a decoder's across to its source, or the source's own in the encoder.
Attending = Literal["self", "cross", "encoder"]


def stack_of(attending: Attending, spec: Spec) -> Spec:
    """The architecture whose layers hold that attention. Raises GptcliError where there is none."""
    if attending == "self":
        return spec
    if spec.encoder is None:
        raise GptcliError(f"--attention {attending}: this model is one stack", "leave it out", "attention")
    return spec.encoder if attending == "encoder" else spec


def layer_path(attending: Attending, layer: int) -> str:
    """Where a layer's weights and activations stand."""
    return f"{'encoder.' if attending == 'encoder' else ''}layers.{layer}"


def layer_spec(attending: Attending, spec: Spec, layer: int) -> Spec:
    """The layer (from 0), with that attention in its attention's place."""
    here = stack_of(attending, spec).at(layer)
    return here.across if attending == "cross" else here


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


def at_head(wanted: str) -> tuple[int, int] | None:
    """Layer and head, from 0, that `L0H1` means; None for anything else."""
    match = re.fullmatch(r"L([0-9]{1,9})H([0-9]{1,9})", wanted, re.IGNORECASE)
    return (int(match[1]), int(match[2])) if match else None


class View:
    """One text's run, looked at in one kind of attention. Raises GptcliError where the model has no such one."""

    def __init__(self, run: Run, attending: Attending = "self"):
        self.run, self.attending = run, attending
        self.stack = stack_of(attending, run.model.spec)
        self.part = "cross" if attending == "cross" else "attn"

    @property
    def queries(self) -> list[Token]:
        """The tokens that look."""
        return (self.run.source_tokens() if self.attending == "encoder" else self.run.tokens())[0]

    @property
    def keys(self) -> list[Token]:
        """The tokens that are looked at."""
        return (self.run.tokens() if self.attending == "self" else self.run.source_tokens())[0]

    def path(self, layer: int) -> str:
        """Where a layer's weights and activations stand."""
        return layer_path(self.attending, layer)

    def inner(self, layer: int, name: str) -> str:
        """Where an activation of this attention stands: `q`, `pattern`…"""
        return f"{self.path(layer)}.{self.part}.{name}"

    def spec(self, layer: int) -> Spec:
        """The layer, with the attention that is looked at."""
        return layer_spec(self.attending, self.run.model.spec, layer)

    def kv_head(self, layer: int, head: int) -> int:
        """The key/value head that a query head reads."""
        a = self.spec(layer).attention
        return head // (a.n_heads // a.n_kv_heads)

    def check(self, layers: list[int], heads: list[int]) -> None:
        """Raises GptcliError for a layer that has none of the heads."""
        for layer in layers:
            number = self.spec(layer).attention.n_heads
            if min(heads) >= number:
                what = f"--head {min(heads)}: layer {layer + 1} has {number} heads, counted from 0"
                raise GptcliError(what, f"give 0 to {number - 1}, -1 or all" if len(layers) == 1 else "name the layer")

    def edits(self, path: str, *at: int | None) -> list[str]:
        """The edits of the run that touch an activation of the one text, as they were asked for. at: the place that is
        meant, by axis behind the batch; None, or left out: anywhere.
        """
        return [] if self.run.edits is None else self.run.edits.of(path, (None, *at))

    def replaced(self, layer: int) -> set[str]:
        """What of this layer's attention an edit replaces: scores, pattern, z."""
        return {name for name in ("scores", "pattern", "z") if self.edits(self.inner(layer, name))}

    def kernel(self, layer: int) -> str:
        """What computed this layer's z, for a claim."""
        step_by_step = self.spec(layer).attention.softcap is not None or self.replaced(layer) & {"scores", "pattern"}
        return "the z of the step-by-step function" if step_by_step else "the fused kernel's z"

    def sight(self, layer: int, queries: slice) -> "Sight":
        """Who may see whom, of these queries."""
        from gptcli.model.attention import Sight

        inputs = self.run.inputs("all")
        text = inputs.source if self.attending == "encoder" else inputs
        keys = inputs.source.positions if self.attending == "cross" else None
        return Sight.of(self.spec(layer).attention, text.positions, None, keys).at(queries)
