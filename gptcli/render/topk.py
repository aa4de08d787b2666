"""`topk` in a terminal: the next tokens by rank, ties folded."""

from itertools import groupby

from gptcli.render.common import fed, title
from gptcli.render.screen import Screen
from gptcli.report.topk import Candidate, Next, TopkReport

BAR = 12  # columns of the longest bar


def draw(report: TopkReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    title(screen, report.model)
    fed(screen, report.tokens, report.source)
    for found in report.next:
        token = report.tokens[found.text][found.position]
        text = f"text {found.text}, " if len(report.tokens) > 1 else ""
        heat = f", temperature {report.temperature:g}" if report.temperature != 1 else ""
        after = "at" if found.fills else "after"
        screen.line(
            (f"{text}{after} position {found.position} ", "dim"), (token.token or str(token.id), "cyan"), (heat, "dim")
        )
        next_table(screen, found)


def verdict(report: TopkReport) -> str:
    """What `-q` prints."""
    return "\n".join(f"{one.id}\t{one.token}" for found in report.next for one in found.top)


def next_table(screen: Screen, found: Next) -> None:
    """Candidates by rank, ids that tie in one row. A bar's length is the probability beside the best one's."""
    best = max((one.prob for one in found.top), default=0.0)
    rows = [_candidate(group, best, screen) for group in _ties(found.top)]
    screen.table(rows, ("rank", "id", "token", "logit", "prob", "log-prob"), right=(0, 1, 3, 4, 5))


def _ties(top: list[Candidate]) -> list[Candidate]:
    """One candidate for every tie: the ones asked for by name, else the first in the order of ids."""
    kept = []
    for _, group in groupby(top, key=lambda one: one.tie or one.rank):
        group = list(group)
        kept += [one for one in group if one.asked] or group[:1]
    return kept


def _candidate(one: Candidate, best: float, screen: Screen) -> list:
    rank = f"{one.tie[0]}–{one.tie[1]}" if one.tie else str(one.rank)
    bar = "█" * round(BAR * one.prob / best) if best > 0 else ""
    ties = f"  {one.tie[1] - one.tie[0] + 1} ids tie" if one.tie else ""
    return [
        rank,
        str(one.id),
        (one.token, "cyan"),
        screen.number(one.logit),
        screen.number(one.prob),
        screen.number(one.logprob),
        (bar + ties, "green"),
    ]
