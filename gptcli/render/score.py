"""`score` in a terminal: a row a token, then the sums."""

from gptcli.render.common import title
from gptcli.render.screen import Screen
from gptcli.report.score import ScoreReport


def draw(report: ScoreReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    title(screen, report.model)
    for number, text in enumerate(report.texts):
        if len(report.texts) > 1:
            screen.line((f"text {number}", "dim"))
        rows = [
            [
                str(one.position),
                str(one.id),
                (one.token + " (added)" * one.added, "cyan"),
                screen.number(one.logprob) if one.rank else "–",
                f"{one.rank:,}" if one.rank else "–",
                screen.number(one.bits) if one.rank else "nothing precedes it",
            ]
            for one in text.tokens
        ]
        screen.table(rows, ("position", "id", "token", "log-prob", "rank", "bits"), right=(0, 1, 3, 4, 5))
        said = f"sum {screen.number(text.sum)} · mean {screen.number(text.mean)} · {screen.number(text.bits)} bits"
        screen.line(f"{text.scored} scored: {said} · perplexity {screen.number(text.perplexity)}")


def verdict(report: ScoreReport) -> str:
    """What `-q` prints."""
    return "\n".join(f"{text.sum!r}" for text in report.texts)
