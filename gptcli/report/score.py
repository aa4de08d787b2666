"""`score`: how likely a text's own tokens are, each under the logits of the position before it."""

import math
from dataclasses import dataclass

from gptcli.errors import GptcliError
from gptcli.report import ModelFacts, Report
from gptcli.report.birth import birth
from gptcli.run import Run
from gptcli.tokens import Token


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One token at a position (from 0); the first has no score. rank from 1; bits: -log2 of its probability.

    added: the tokenizer's rule put it there, not the text.
    """

    position: int
    id: int
    token: str
    bytes: list[int] | None
    added: bool
    logprob: float | None
    rank: int | None
    bits: float | None


@dataclass(frozen=True, kw_only=True)
class ScoredText:
    """A text's tokens and, over the scored ones: sum and mean of log-probabilities (nats), perplexity exp(-mean)."""

    tokens: list[Scored]
    scored: int
    sum: float
    mean: float
    perplexity: float
    bits: float


@dataclass(kw_only=True)
class ScoreReport(Report):
    schema = "gptcli.score/1"
    model: ModelFacts
    texts: list[ScoredText]


def score_report(run: Run) -> ScoreReport:
    """Scores of every text. Raises GptcliError for a text of one token, which has none."""
    if run.model.fills or run.model.spec.lm_head is None:
        why = "sees both ways and tells no next token" if run.model.fills else "has no head"
        raise GptcliError(f"no scores: {run.model.shown} {why}", "topk fills in [MASK]", "head")
    if any(len(ids) < 2 for ids in run.ids):
        raise GptcliError("a text of one token has no score: nothing precedes its only token", "give a longer text")
    texts = [_scored(tokens, *scores) for tokens, scores in zip(run.tokens(), _surprises(run))]
    broken = not all(math.isfinite(text.sum) for text in texts)
    return ScoreReport(
        model=run.facts(),
        texts=texts,
        findings=[birth(run)] if broken else [],
    )


def _surprises(run: Run) -> list[tuple[list[float], list[int]]]:
    """Of each text, the log-probability and the rank of every token but the first."""
    from gptcli.model.measure import surprise

    found = [([], []) for _ in run.ids]
    for first, logits in run.logits_in_blocks():
        for text, ids in enumerate(run.ids):
            begin = run.width - len(ids)  # of the text, among the padded positions
            low, high = max(first, begin), min(first + logits.shape[1], run.width - 1)
            if low < high:
                rows = surprise(logits[text, low - first : high - first], ids[low - begin + 1 : high - begin + 1])
                for kept, new in zip(found[text], rows):
                    kept += new
    return found


def _scored(tokens: list[Token], logprobs: list[float], ranks: list[int]) -> ScoredText:
    """tokens [T], and log-probabilities and ranks of all but the first."""
    rows = [
        Scored(
            position=position,
            id=token.id,
            token=token.token,
            bytes=token.bytes,
            added=token.added,
            logprob=logprob,
            rank=rank,
            bits=None if logprob is None else -logprob / math.log(2),
        )
        for position, (token, logprob, rank) in enumerate(zip(tokens, [None, *logprobs], [None, *ranks]))
    ]
    mean = sum(logprobs) / len(logprobs)
    return ScoredText(
        tokens=rows,
        scored=len(logprobs),
        sum=sum(logprobs),
        mean=mean,
        perplexity=math.exp(min(-mean, 700.0)),
        bits=-sum(logprobs) / math.log(2),
    )
