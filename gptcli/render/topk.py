"""`topk` in a terminal: the next tokens by rank, ties folded."""

from gptcli.render.common import fed, folded, rank, title
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
    rows = [_candidate(one, best, screen) for one in folded(found.top, lambda one: one.tie or one.rank)]
    before = ("rank was", "prob was") if any(one.rank_without for one in found.top) else ()
    header = ("rank", "id", "token", "logit", "prob", "log-prob", *before)
    screen.table(rows, header, right=(0, 1, *range(3, len(header))))


def _candidate(one: Candidate, best: float, screen: Screen) -> list:
    bar = "█" * round(BAR * one.prob / best) if best > 0 else ""
    ties = f"  {one.tie[1] - one.tie[0] + 1} ids tie" if one.tie else ""
    before = one.rank_without is not None
    return [
        rank(one.rank, one.tie),
        str(one.id),
        (one.token, "cyan"),
        screen.number(one.logit),
        screen.number(one.prob),
        screen.number(one.logprob),
        *([rank(one.rank_without, one.tie_without), screen.number(one.prob_without)] if before else []),
        (bar + ties, "green"),
    ]
