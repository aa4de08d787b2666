"""Where the first number of a forward pass that is not finite was born.

Looked for only where the logits say that there is one: the pass is run once more, with a probe that stops at it.
"""

import math
from typing import TYPE_CHECKING, Literal

from gptcli.data import entry
from gptcli.layout import Place
from gptcli.report import Finding
from gptcli.run import Run
from gptcli.tokens import Token
from gptcli.trace import Selection, points

if TYPE_CHECKING:
    from gptcli.model.birth import NotFinite, Search


@entry
class Birth(Finding):
    """The first activation that is not finite, and its first number that isn't.

    layer_index: from 0; None outside the layers. of_source: it stands in the encoder's text, or reads it. position:
    None in the padding before a text. channel: along the last axis: a key's position, of scores; an id, of logits.
    count: how many of its numbers are not finite. weight: the weight that is not finite itself, and where; None where
    all that the activation is made of is finite, and it is more than its type holds.
    """

    layer_index: int | None = None
    text: int = 0
    of_source: bool = False
    position: int | None = None
    token: str = ""
    head: int | None = None
    channel: int = 0
    value: str = ""
    count: int = 0
    weight: str | None = None
    weight_index: list[int] | None = None


def birth(run: Run, rows: Literal["last", "all"] = "all") -> Finding:
    """The finding for a run whose logits (or final vectors) are not finite. rows: as in that run."""
    from gptcli.model.birth import Search

    if run.group is not None:  # a rank that stops at what it alone holds would leave the others waiting
        return Finding("not-finite", "logits hold NaN or infinity: one process alone tells where it is born", "logits")
    axes = dict(points(run.model.spec))
    born = _stopped(run, rows, Search(axes))
    if born is None:  # what made it is no part of the pass alone
        return Finding("not-finite", "logits hold NaN or infinity", "logits")
    scope, _, name = born.path.rpartition(".")
    if name == "z":
        _, head, query, _ = born.index
        select = Selection(slice(head, head + 1), slice(query, query + 1))
        closer = _stopped(run, rows, Search(axes, aside=(f"{scope}.", select)))
        if closer is not None and closer.path != born.path:
            closer.index[1:3], closer.shape = (head, query), (*born.shape[:3], *closer.shape[3:])
            born = closer
    return _told(run, born)


def _stopped(run: Run, rows: Literal["last", "all"], search: "Search") -> "NotFinite | None":
    """What a search comes to in the same run."""
    from gptcli.model.birth import NotedWeights, NotFinite, Watch

    weights, run.weights = run.weights, NotedWeights(run.weights, search)
    try:
        run.forward(rows, Watch(search))
    except NotFinite as found:
        return found
    finally:
        run.weights = weights
    return None


def _told(run: Run, born: "NotFinite") -> Birth:
    from gptcli.model.birth import culprit

    place, index = Place.of(born.path), dict(zip(born.axes, born.index))
    along = 1 if born.axes[1] in "TS" else 2  # the axis of positions
    of_source = bool(place.stack) or (place.name.startswith("cross.") and born.axes[along] == "S")
    texts, width = (run.source_tokens(), run.source_width) if of_source else (run.tokens(), run.width)
    text = index["B"]
    column = born.index[along] + width - born.shape[along]  # of the last position alone, the last
    position = column - (width - len(texts[text]))
    token = texts[text][position] if position >= 0 else None
    head, channel = index.get("H", index.get("G")), born.index[-1]
    # What an attention weighs by belongs to heads; elsewhere a matrix has a row for each number of each head.
    weighing = place.name.endswith((".scores", ".pattern", ".sink", ".z"))
    unit = channel if head is None else head if weighing else head * born.shape[-1] + channel
    reads = {name: one for name, one in born.read.items() if weighing or not one.lasting}
    found = culprit(reads, unit, text, column)
    where = [_token(text, position, token, len(run.ids), of_source)]
    where += [] if head is None else [f"{'head' if 'H' in index else 'kv head'} {head}"]
    where += _channel(run, born)
    because = f"weight {found.name}{_brackets(found.index)} is {_value(found.value)}" if found else _beyond(born)
    return Birth(
        code="not-finite",
        message=f"{_value(born.value)} is born in {born.path}{_layer(place)}, {', '.join(where)}: {because}",
        path=born.path,
        layer_index=place.layer,
        text=text,
        of_source=of_source,
        position=None if token is None else position,
        token="" if token is None else token.token,
        head=head,
        channel=channel,
        value=_value(born.value),
        count=born.count,
        weight=found and found.name,
        weight_index=found and found.index,
    )


def _value(x: float) -> str:
    return "NaN" if math.isnan(x) else str(x)


def _brackets(index: list[int]) -> str:
    return f"[{', '.join(map(str, index))}]"


def _layer(place: Place) -> str:
    stack = f"{place.stack} " if place.stack else ""
    return "" if place.layer is None else f" ({stack}layer {place.layer + 1})"


def _token(text: int, position: int, token: Token | None, texts: int, of_source: bool) -> str:
    which = f"text {text}, " if texts > 1 else ""
    if token is None:
        return f"{which}padding"
    shown = f'"{token.token}"' if token.token else f"(id {token.id})"
    return f"{which}{'source ' if of_source else ''}token {position} {shown}"


def _channel(run: Run, born: "NotFinite") -> list[str]:
    """What the last axis counts there."""
    number = born.index[-1]
    match born.axes[-1]:
        case "V":
            token = Token.of(number, run.labels)
            return [f'id {number} "{token.token}"' if token.token else f"id {number}"]
        case "S":
            return [f"key {number}"]
        case "E":
            return [f"expert {number}"]
        case "T":  # a sink's share has no axis of its own
            return []
    return [f"channel {number}"]


def _beyond(born: "NotFinite") -> str:
    import torch

    ends = f"{str(born.dtype).removeprefix('torch.')} ends at {torch.finfo(born.dtype).max:g}"
    if math.isnan(born.value):
        return f"its inputs and weights are finite, something on the way to it is not ({ends})"
    return f"its inputs and weights are finite ({ends})"
