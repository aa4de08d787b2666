"""Why two sides part: known causes tried at the first activation that differs, and those named that close the gap.

A cause is run: the part of A where the sides part (its embedding, one layer, what stands behind the layers), from A's
exact input, with one thing changed. What then gives B's values is a cause.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from gptcli.checkpoint.files import read_json
from gptcli.diff import causes_fields, causes_inputs, causes_own, causes_weights
from gptcli.diff.causes_fields import Field
from gptcli.diff.causes_scene import Guess, Scene, Shown, scene_of
from gptcli.families import family_of
from gptcli.families.gguf import ARCHITECTURES
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
    b_model: Model | None = None,
    agreed: str | None = None,
    known: "Mapping[str, Tensor] | None" = None,
) -> list[Cause]:
    """The causes that close the gap at `parted`, the one that closes most first; empty where none does.

    a: a side that can be run, in float64; theirs: B's values by path, at parted and at what is had of the same part
    behind it; close(path, ours, theirs): is a gap closed; agreed: the last activation that agreed (None: none did).
    Behind the layers the last positions alone are run and compared. b_spec: B's architecture where B ran by it here
    (None: someone else's code ran): nothing else is tried of a Spec then. b_weights: B's own. b_model: whose files
    are to be mended (None: someone else's code). known: values of A at hand, which need not be computed again.
    """
    scene = scene_of(a, parted, theirs, close, agreed, known or {})
    stack = b_spec and (b_spec.encoder if Place.of(parted).stack else b_spec)

    def mend(field: Field) -> str:
        return _word(b_model, field)

    if not scene.fits:
        return _told(_best(scene, causes_inputs.of_inputs(scene)))
    found = _best(
        scene,
        chain(
            causes_fields.guesses(scene, stack, mend),
            causes_weights.guesses(scene),
            causes_inputs.of_inputs(scene),
            causes_inputs.of_heads(scene),
        ),
    )
    if not found and stack is not None:
        found = _all(scene, causes_fields.together(scene, stack, mend))
    found = found or _best(scene, causes_weights.guesses(scene, causes_weights.LAST))
    if not found and b_weights is not None:
        names = (param.name for param in (*a.model.layout, *(layout(b_spec) if b_spec else ())))
        groups = causes_own.groups(scene, b_weights, names)
        found = next(filter(None, (_best(scene, group) for group in groups)), [])
        if not found and stack is not None:
            every = (causes_fields.together(scene, stack, mend, guess) for group in groups for guess in group)
            found = next(filter(None, (_all(scene, guesses) for guesses in every)), [])
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


def _all(scene: Scene, guesses: list[Guess]) -> list[Shown]:
    """Guesses that make one change together: all of them where it closes the gap."""
    shown = scene.try_out(guesses[0]) if guesses else None
    return [shown._replace(guess=guess) for guess in guesses] if shown else []


def _word(model: Model | None, field: Field) -> str:
    """Where B says a field: the keys of its config.json, or of its .gguf file, that decide it, and the field's path."""
    if model is None:
        return f"{field.path} in B's code"
    template, before, file = _template(model)
    part: Any = template
    for step in field.path.split("."):
        part = part.get(step) if isinstance(part, dict) else part
    found = [key for one in (part, template.get("variants")) for key in _keys(one)]
    named = [before + key for key in dict.fromkeys(found) if field.keys and re.search(field.keys, key)]
    if named:
        return f"{' or '.join(named)} in B's {file} ({field.path})"
    if model.gguf:
        return f"{field.path} as B's file has it"
    return f"{field.path} in B's config{' or code' if template else ''}"


def _template(model: Model) -> tuple[dict[str, Any], str, str]:
    """What reads the file that describes a model, what stands before its keys there, and what the file is called."""
    if model.gguf:
        kind = model.gguf.metadata["general.architecture"]
        return ARCHITECTURES[kind].template, f"{kind}.", "file"
    file = model.directory and model.directory / "config.json"
    if file and file.is_file():
        return family_of(read_json(file), str(file)).template, "", "config.json"
    return {}, "", "config"


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
