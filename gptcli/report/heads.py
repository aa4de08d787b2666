"""`heads`: every head of every layer, ranked by what it does with a text.

Each number is a mean over the text's queries that have a choice: that see two keys or more (a sink counts as one), for
of one key alone the weight is 1 whatever the head does.

previous    weight on the key one before the query
first       weight on key 0, over the queries after it
self        weight on the query's own key
induction   weight on the key after the latest earlier occurrence of the query's token (arXiv:2209.11895)
entropy     -Σ p·log2 p over the keys and the sink, in bits; its share: that by log2 of how many the query sees
distance    Σ p·|query - key| / Σ p over the keys, in positions

The first four are means over those of these queries that see that key.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from gptcli.cost import bytes_text, free_memory
from gptcli.errors import GptcliError
from gptcli.report import RunReport
from gptcli.report.maps import BESIDES
from gptcli.report.patterns import Patterns, Weights
from gptcli.report.proof import Check
from gptcli.run import Run
from gptcli.source import Model
from gptcli.tokens import OWN_RULE, Encoded, Rule

By = Literal["previous", "first", "self", "entropy", "induction", "distance"]
FIELDS = {"self": "itself", "entropy": "entropy_share"}  # where a measure is called otherwise in a report


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """What one head does; null where no query of the text tells. layer_index and head count from 0.

    n_heads, n_kv_heads and window are its layer's; entropy is in bits, entropy_share of what it could be at most,
    distance in positions.
    """

    layer_index: int
    path: str
    head: int
    n_heads: int
    kv_head: int
    n_kv_heads: int
    window: int | None
    previous: float | None
    first: float | None
    itself: float | None
    induction: float | None
    entropy: float | None
    entropy_share: float | None
    distance: float | None

    def measure(self, by: By) -> float | None:
        """The number by which heads are ranked."""
        return getattr(self, FIELDS.get(by, by))


@dataclass(frozen=True, kw_only=True)
class Best:
    """The head that does most of a kind; `sharpest` has the least of the entropy that it could have."""

    kind: Literal["previous", "first", "self", "induction", "entropy", "sharpest", "distance"]
    layer_index: int
    head: int
    value: float


@dataclass(kw_only=True)
class HeadsReport(RunReport):
    """Every head, the one first that has most of what `by` names. top: how many a person is shown.

    repeated: so many random tokens (by this seed) were fed twice; recurring: queries whose token came before.
    """

    schema = "gptcli.heads/1"
    attention: Literal["self", "encoder"]
    n_layers: int
    repeated: int | None
    seed: int | None
    recurring: int
    by: By
    top: int
    best: list[Best]
    heads: list[HeadFacts]
    proof: list[Check]


def heads_report(
    run: Run,
    by: By = "previous",
    top: int = 10,
    attending: Literal["self", "encoder"] = "self",
    repeated: int | None = None,
    seed: int | None = None,
) -> HeadsReport:
    """Ranks the heads in one text. One head's weights are held at a time. Raises GptcliError."""
    from torch import tensor

    from gptcli.model.patterns import measures

    patterns = Patterns(run, attending)
    after = followers([token.id for token in patterns.queries])
    if len(after) < 2:
        raise GptcliError("one token has only itself to look at", "give two tokens or more", "inputs")
    _check_room(run, len(after))
    of_after = tensor(after)

    def take(found: Weights) -> HeadFacts:
        numbers = measures(found.pattern, found.sink, found.seen, of_after)._asdict()
        return HeadFacts(
            **patterns.place(found),
            **{name: x if math.isfinite(x) else None for name, x in numbers.items()},
        )

    watched = patterns(list(range(patterns.stack.n_layers)), slice(None), slice(None), take)
    ranked = sorted(watched.taken, key=lambda one: -_or(one.measure(by), -1.0))
    return HeadsReport(
        **run.told(),
        attention=attending,
        n_layers=patterns.stack.n_layers,
        repeated=repeated,
        seed=seed,
        recurring=sum(key >= 0 for key in after),
        by=by,
        top=top,
        best=list(_best(watched.taken)),
        heads=ranked,
        proof=watched.proof,
        findings=watched.findings,
    )


def _check_room(run: Run, width: int) -> None:
    """Raises GptcliError where one head's scores, weights and mask, and what is measured on them in double precision,
    are more than what is free.
    """
    held, free = width**2 * (BESIDES * run.dtype.itemsize + 9 + 5 * 8), free_memory()
    if free is not None and held > free:
        what = f"one head's weights among {width:,} tokens take {bytes_text(held)}, and {bytes_text(free)} are free"
        raise GptcliError(what, "take a shorter text", "memory")


def _or(x: float | None, other: float) -> float:
    return other if x is None else x


def _best(heads: list[HeadFacts]) -> Iterator[Best]:
    """Of every kind the head that does most of it; none where no query tells."""
    for kind in ("previous", "first", "self", "induction", "entropy", "sharpest", "distance"):
        by, sign = ("entropy", -1) if kind == "sharpest" else (kind, 1)
        told = [(sign * one.measure(by), one) for one in heads if one.measure(by) is not None]
        if told:
            value, one = max(told, key=lambda pair: pair[0])
            yield Best(kind=kind, layer_index=one.layer_index, head=one.head, value=sign * value)


def followers(ids: list[int]) -> list[int]:
    """For each token, the position after the latest earlier one of the same id; -1 where there is none, or where that
    position is the token's own.
    """
    latest: dict[int, int] = {}
    found = []
    for position, id_ in enumerate(ids):
        key = latest.get(id_, -2) + 1
        found.append(key if key < position else -1)
        latest[id_] = position
    return found


def random_twice(model: Model, number: int, seed: int, rule: Rule = OWN_RULE) -> Encoded:
    """So many random ids, each another one, and the same again; around them what the tokenizer's rule adds to a text.

    Raises GptcliError where they have not
    so many, and for a model that reads a source beside its text.
    """
    spec = model.spec
    if spec.encoder is not None:
        raise GptcliError("--repeat: this model reads a source beside its text", "give texts that repeat themselves")
    labels = model.labels
    known = [id_ for id_ in range(spec.vocab_size) if labels is None or labels.piece(id_) is not None]
    before, end = _marks(model, rule)
    if number > len(known):
        raise GptcliError(
            f"--repeat {number}: the vocabulary has {len(known):,} tokens", f"give {len(known):,} or fewer"
        )
    if 2 * number + len(before) + len(end) > spec.most_tokens:
        room = (spec.context_length - len(before) - len(end)) // 2
        what = f"--repeat {number}: twice as many are more than the context of {spec.context_length:,}"
        raise GptcliError(what, f"give {room:,} or fewer", "context")
    drawn = Random(seed).sample(known, number) * 2  # noqa: S311 - nothing secret
    return Encoded([*before, *drawn, *end], [*(True for _ in before), *(False for _ in drawn), *(True for _ in end)])


def _marks(model: Model, rule: Rule) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's rule puts before a text and after it; none where there is no tokenizer."""
    try:
        ids, added = model.tokenizer.marked("a", rule)
    except GptcliError:  # no tokenizer, or one of words that doesn't have this one and adds nothing to any
        return [], []
    text = [i for i, mark in enumerate(added) if not mark] or [len(ids)]
    return ids[: text[0]], ids[text[-1] + 1 :]
