"""Why two sides part: known causes tried at the first activation that differs, and those named that close the gap.

A cause is run: the part of A where the sides part (its embedding, one layer, what stands behind the layers), from A's
exact input, with one thing changed. What then gives B's values is a cause.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from gptcli.checkpoint.files import read_json
from gptcli.diff import causes_fields, causes_inputs, causes_own, causes_weights
from gptcli.diff.causes_fields import Field
from gptcli.diff.causes_scene import Guess, Scene, Shown, scene_of
from gptcli.families import family_of
from gptcli.families.record import From, Key
from gptcli.layout import Place, layout
from gptcli.run import Run
from gptcli.source import Model
from gptcli.spec import Spec
from gptcli.tokens import Token

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.weights import Weights

NEAR = 3.0  # a plainer guess is taken for a nearer one up to so many times the gap that is left: that is rounding


@dataclass(frozen=True)
class Cause:
    """code: of a closed set of words; said: what B does where A does otherwise; mend: the config key or the step of a
    conversion; closes: the activations that come out as B's once A does so.
    """

    code: str
    said: str
    mend: str
    closes: list[str]


def explain(
    a: Run,
    parted: str,
    theirs: "Mapping[str, Tensor]",
    close: "Callable[[str, Tensor, Tensor], bool]",
    b_spec: Spec | None = None,
    b_weights: "Weights | None" = None,
    agreed: str | None = None,
) -> list[Cause]:
    """The causes that close the gap at `parted`, the one that closes most first; empty where none does.

    a: a side that can be run, in float64; theirs: B's values by path, at parted and at what is had of the same part
    behind it; close(path, ours, theirs): is a gap closed; agreed: the last activation that agreed (None: none did).
    Behind the layers the last positions alone are run and compared. b_spec: B's architecture where B ran by it here
    (None: someone else's code ran): nothing else is tried of a Spec then. b_weights: B's own.
    """
    scene = scene_of(a, parted, theirs, close, agreed)
    local = b_spec and _there(b_spec, parted)

    def mend(field: Field) -> str:
        return _word(a.model, field)

    if not scene.fits:
        return _told(_best(scene, causes_inputs.of_inputs(scene)))
    found = _best(
        scene,
        chain(
            causes_fields.guesses(scene, local, mend),
            causes_weights.guesses(scene),
            causes_inputs.of_inputs(scene),
            causes_inputs.of_heads(scene),
        ),
    )
    if not found and local is not None:
        found = [one for guess in causes_fields.together(scene, local, mend) if (one := scene.try_out(guess))]
    found = found or _best(scene, causes_weights.guesses(scene, causes_weights.LAST))
    if not found and b_weights is not None:
        found = _best(scene, _own(scene, b_weights, a.model, b_spec))
    return _told(found)


def _told(found: list[Shown]) -> list[Cause]:
    return [Cause(shown.guess.code, shown.guess.said, shown.guess.mend, shown.closes) for shown in found]


def _best(scene: Scene, guesses: Iterable[Guess]) -> list[Shown]:
    """Of each code the plainest guess that leaves no larger gap than others do; first what closes most, and none that
    closes less of the same.
    """
    found: dict[str, Shown] = {}
    for shown in filter(None, map(scene.try_out, guesses)):
        other = found.get(shown.guess.code)
        if other is None or (len(shown.closes), -NEAR * shown.gap) > (len(other.closes), -other.gap):
            found[shown.guess.code] = shown
    plain = sorted(found.values(), key=lambda shown: -len(shown.closes))
    return [shown for shown in plain if shown is plain[0] or not set(shown.closes) < set(plain[0].closes)]


def _there(spec: Spec, path: str) -> Spec | None:
    """B's architecture at an activation: of its stack and layer."""
    place = Place.of(path)
    stack = spec.encoder if place.stack else spec
    if stack is None or (place.layer is not None and place.layer >= stack.n_layers):
        return None
    return stack if place.layer is None else stack.at(place.layer)


def _own(scene: Scene, b_weights: "Weights", a: Model, b_spec: Spec | None) -> Iterator[Guess]:
    params = (*a.layout, *(layout(b_spec) if b_spec else ()))
    return causes_own.guesses(scene, b_weights, (param.name for param in params))


def _word(model: Model, field: Field) -> str:
    """Where a field is said: the keys of A's config.json that decide it, where there are some, and its path."""
    file = model.directory and model.directory / "config.json"
    if not file or not file.is_file():
        return f"{field.path} in B's config"
    template = family_of(read_json(file), str(file)).template
    part: Any = template
    for step in field.path.split("."):
        part = part.get(step) if isinstance(part, dict) else part
    found = [key for one in (part, template.get("variants")) for key in _keys(one)]
    named = [key for key in dict.fromkeys(found) if field.keys and re.search(field.keys, key)]
    return f"{' or '.join(named)} in B's config.json ({field.path})" if named else f"{field.path} in B's config or code"


def _keys(part: Any) -> tuple[str, ...]:
    """The keys of a config.json that a part of a template reads."""
    return part.keys if isinstance(part, From) else (part.name,) if isinstance(part, Key) else ()


def explain_ids(a: Run, b: Run) -> list[Cause]:
    """Why the two sides read other ids for the same text; empty where they read the same."""
    for ours, theirs, mine, yours in zip(a.ids, b.ids, a.tokens(), b.tokens()):
        if ours != theirs:
            return [_of_ids(mine, yours)]
    return []


def _of_ids(ours: list[Token], theirs: list[Token]) -> Cause:
    """What one text has more on one side, at its beginning or its end; else that the tokenizers differ."""
    for name, other, longer, shorter in (("A", "B", ours, theirs), ("B", "A", theirs, ours)):
        ids, fewer = [token.id for token in longer], [token.id for token in shorter]
        if ids[1:] == fewer:
            twice = ids[0] == fewer[0]
            said = f"{name} begins with {_named(longer[0])}{' twice' * twice}"
            said += f" and {other} {'once' if twice else 'does not'}"
            mend = "add_bos_token of the tokenizer, or a BOS that the text brings itself"
            return Cause("bos-doubled" if twice else "bos-missing", said, mend, [])
        if ids[:-1] == fewer:
            said = f"{name} ends with {_named(longer[-1])} and {other} does not"
            return Cause("eos-missing", said, "add_eos_token of the tokenizer", [])
    at = next((i for i, (x, y) in enumerate(zip(ours, theirs)) if x.id != y.id), min(len(ours), len(theirs)))
    shown = [_named(text[at]) if at < len(text) else "nothing" for text in (ours, theirs)]
    said = f"from token {at} on A reads {shown[0]} and B {shown[1]}"
    return Cause("tokenizer", said, "the tokenizer that goes with the weights", [])


def _named(token: Token) -> str:
    return f'id {token.id} "{token.token}"' if token.token else f"id {token.id}"
