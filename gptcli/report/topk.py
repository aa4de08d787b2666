"""`topk`: the most likely next tokens after a position."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptcli.errors import GptcliError
from gptcli.report import RunReport
from gptcli.report.birth import birth
from gptcli.run import Run, positions
from gptcli.tokens import Token, visible

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An id that may come next. tie: the first and the last rank of the ids with the same logit, if there are others.

    asked: it stands here because somebody asked for it, whatever its rank. …_without: of a run with edits, the
    same without them.
    """

    rank: int
    id: int
    token: str
    bytes: list[int] | None
    logit: float
    prob: float
    logprob: float
    tie: tuple[int, int] | None
    asked: bool
    rank_without: int | None = None
    tie_without: tuple[int, int] | None = None
    prob_without: float | None = None


@dataclass(frozen=True, kw_only=True)
class Next:
    """The candidates after one position (from 0) of one text (from 0), in order of rank.

    fills: they stand for the position itself, as a model has it that fills in masks.
    """

    text: int
    position: int
    fills: bool
    top: list[Candidate]


@dataclass(kw_only=True)
class TopkReport(RunReport):
    schema = "gptcli.topk/1"
    temperature: float
    next: list[Next]


def topk_report(run: Run, k: int, words: tuple[str, ...], position: str, temperature: float) -> TopkReport:
    """The k best next tokens, and those that `words` name, after the positions that --position means.

    position `mask`: the positions that are to be filled in. Raises GptcliError where there are none, or no head.
    """
    if run.model.spec.lm_head is None:
        raise GptcliError(
            f"{run.model.shown} has no head: it ranks no tokens", "forward shows its final vectors", "head"
        )
    if not 0 < temperature < float("inf"):
        raise GptcliError(f"--temperature {temperature:g}: not a number above 0", "1 changes nothing")
    wanted = [(text, at) for text in range(len(run.ids)) for at in places(run, text, position)]
    rows = "last" if all(at == len(run.ids[text]) - 1 for text, at in wanted) else "all"

    def after(**how: bool) -> "list[Tensor]":
        """The logits [V] at each of the positions."""
        logits = run.forward(rows, **how)  # [B, 1 or T, V]
        return [logits[text, -1 if rows == "last" else run.column(text, at)] for text, at in wanted]

    without = [None] * len(wanted) if run.edits is None else after(edited=False)
    found = after()
    return TopkReport(
        **run.told(),
        temperature=temperature,
        next=[
            next_tokens(run, row, *place, k, words, temperature, bare)
            for place, row, bare in zip(wanted, found, without)
        ],
        findings=[] if all(bool(row.isfinite().all()) for row in found) else [birth(run, rows)],
    )


def places(run: Run, text: int, position: str) -> list[int]:
    """The positions that --position means in a text: `mask` is what is to be filled in. Raises GptcliError."""
    if position != "mask":
        return positions(position, len(run.ids[text]))
    masked = run.masked(text)
    if not masked:
        labels = run.labels
        word = visible(labels.piece(labels.mask)) if labels and labels.mask is not None else "mask"
        where = f"text {text} has" if len(run.ids) > 1 else "the text has"
        raise GptcliError(
            f"{where} no {word} to fill in", f"write {word} where a word is wanted, or --position", "mask"
        )
    return masked


def next_tokens(
    run: Run,
    logits: "Tensor",
    text: int,
    position: int,
    k: int,
    words: tuple[str, ...],
    temperature: float = 1.0,
    without: "Tensor | None" = None,
) -> Next:
    """What logits [V] say comes after a position. without: the logits there of a run without its edits."""
    from gptcli.model.measure import rank

    asked, top = tuple(run.find(word) for word in words), []
    ranks = rank(logits, k, asked, temperature)
    bare = [] if without is None else rank(without, 1, tuple(one.id for one in ranks), temperature)
    before = {one.id: one for one in bare}
    for one in ranks:
        token, old = Token.of(one.id, run.labels), before.get(one.id)
        top.append(
            Candidate(
                rank=one.rank,
                id=one.id,
                token=token.token,
                bytes=token.bytes,
                logit=one.logit,
                prob=one.prob,
                logprob=one.logprob,
                tie=one.tie,
                asked=one.id in asked,
                rank_without=old and old.rank,
                tie_without=old and old.tie,
                prob_without=old and old.prob,
            )
        )
    return Next(text=text, position=position, fills=run.model.fills, top=top)
