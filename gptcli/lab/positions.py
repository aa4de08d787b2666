"""Positions: a learned table beside rotation, on words of two numbers, so that each step can be done by hand."""

from math import pi
from typing import TYPE_CHECKING, Any

from gptcli.errors import GptcliError, nearest
from gptcli.lab.engine import ROUNDING, at_most, by_hand, listed, require, watched
from gptcli.report.lab import Look, Placed, PositionsReport
from gptcli.spec import Spec, read_spec

if TYPE_CHECKING:
    from torch import Tensor

VECTORS = {"cat": [2.0, 0.0], "chase": [0.0, 2.0], "dog": [2.0, 1.0]}
TABLE = [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]
TEXT = ["cat", "chase", "dog"]
MOST_WORDS, MOST_SHIFT = 64, 2048
FILLER = len(VECTORS)  # the id of a token of zeros, of which a shifted text has some before it


def positions_report(words: list[str], degrees: float, shift: int) -> PositionsReport:
    """The text, its words reversed, and the text moved along by `shift`, told its places in both ways, in float64.

    Each position turns a word by `degrees`. Raises GptcliError for a word that has no vector.
    """
    words = words or TEXT
    for word in words:
        if word not in VECTORS:
            hint = f"{nearest(word, VECTORS)} the words are {', '.join(VECTORS)}".strip()
            raise GptcliError(f"unknown word {word!r}", hint, "word")
    require(len(words) <= MOST_WORDS, f"{len(words)} words", f"give {MOST_WORDS} at most")
    turns = degrees == 0 or 1e-6 <= abs(degrees) <= 360
    require(turns, f"--degrees {degrees:g}: not 0, nor 0.000001 to 360", "30 is a twelfth of a turn; below 0, back")
    plain, reversed_, shifted = (
        _placed(words, 0, degrees),
        _placed(words[::-1], 0, degrees),
        _placed(words, shift, degrees),
    )
    last, pairs = len(words) - 1, zip(plain.rotated, shifted.rotated)
    right = Look(query=words[0], key=words[-1], distance=last, score=plain.rotated[0][last])
    left = Look(query=words[0], key=words[-1], distance=-last, score=reversed_.rotated[last][0])
    moved = max(abs(a - b) for before, after in pairs for a, b in zip(before, after))
    return PositionsReport(
        degrees=degrees,
        shift=shift,
        vectors=VECTORS,
        learned_table=TABLE,
        plain=plain,
        reversed=reversed_,
        shifted=shifted,
        looks=[right, left],
        moved=moved,
        see=f"{_rotated(right, left, degrees)}{_moved(shift, moved)}; {_learned(plain, reversed_, shifted)}",
    )


def _placed(words: list[str], shift: int, degrees: float) -> Placed:
    ids = [FILLER] * shift + [list(VECTORS).index(word) for word in words]
    learned = None
    if len(ids) <= len(TABLE):
        spec = _spec({"kind": "learned"}, len(TABLE))
        learned = watched(spec, _weights(spec), ids, "embed")["embed"][shift:].tolist()  # [T, C]
    spec = _spec(_rotation(degrees), len(ids))
    path = "layers.0.attn.scores"
    scores = watched(spec, _weights(spec), ids, path, queries=slice(shift, None))[path]  # [1, T, shift + T]
    return Placed(words=words, first_position=shift, learned=learned, rotated=scores[0, :, shift:].tolist())


def _rotation(degrees: float) -> dict[str, Any]:
    """A head's only pair turns by 1 radian a position; divided by the factor, by so many degrees."""
    if degrees == 0:
        return {"kind": "none"}
    factor = 180 / (pi * abs(degrees))
    direction = "forward" if degrees > 0 else "backward"
    return {"kind": "rope", "direction": direction, "scaling": {"kind": "linear", "factor": factor}}


def _spec(position: dict[str, Any], context_length: int) -> Spec:
    """One layer that scores the words' own vectors: q and k are what is read, and a score is q·k as it is."""
    return read_spec(
        {
            "vocab_size": len(VECTORS) + 1,
            "context_length": context_length,
            "hidden_size": 2,
            "n_layers": 1,
            "position": position,
            "norm": "none",
            "attention": {"n_heads": 1, "causal": False, "scale": 1.0},
            "mlp": "none",
            "lm_head": None,
        }
    )


def _weights(spec: Spec) -> "dict[str, Tensor]":
    rows = {"rows": dict(enumerate(VECTORS.values()))}
    table = {"pos_embed.weight": TABLE} if spec.position.kind == "learned" else {}
    return by_hand(spec, {"embed.weight": rows, "layers.0.attn.{q,k,v,o}.weight": "identity", **table})


def _rotated(right: Look, left: Look, degrees: float) -> str:
    a, b, far = right.query, right.key, right.distance
    if far == 0:
        return f"rotated, a lone {a} scores itself {right.score:.2f}"
    if abs(right.score - left.score) <= ROUNDING * max(1.0, abs(right.score)):
        return f"turned by {degrees:g} degrees a place, {a} scores {b} {right.score:.2f} from {far} away on either side"
    return f"rotated, {a} scores {b} {right.score:.2f} at {far} to the right and {left.score:.2f} at {far} to the left"


def _moved(shift: int, moved: float) -> str:
    """What the shift does to the scores."""
    return f", and the same {shift} further on, {at_most(moved)}" if shift else ""


def _learned(plain: Placed, reversed_: Placed, shifted: Placed) -> str:
    """What the table does to the first word, by where it stands."""
    word, rows, last = plain.words[0], len(TABLE), len(plain.words) - 1
    if plain.learned is None:
        return f"a table of {rows} rows is too short for {len(plain.words)} words"
    places = {0: plain.learned[0], last: reversed_.learned[last]}
    if shifted.learned is not None:
        places[shifted.first_position] = shifted.learned[0]
    told = f"a table makes {word} {listed(f'{_vector(x)} at {i}' for i, x in places.items())}"
    beyond = shifted.first_position + last
    return told if shifted.learned is not None else f"{told}, and has no row for position {beyond}"


def _vector(numbers: list[float]) -> str:
    return f"({', '.join(f'{x:g}' for x in numbers)})"
