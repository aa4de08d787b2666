"""`tokens`, `config` and `list` in a terminal."""

from gptcli.render.common import by_type
from gptcli.render.screen import Screen
from gptcli.report.listing import ConfigReport, ListReport, TokensReport
from gptcli.tokens import Token

draw, verdict = by_type()


@draw.register
def _(report: TokensReport, screen: Screen) -> None:
    if report.text is not None:
        screen.verbatim("".join(f"{text}\n" for text in report.text))
        return
    screen.line((f"{report.tokenizer} · {report.size:,} tokens", "dim"))
    for number, tokens in enumerate(report.source):
        screen.line((f"source {number}" if len(report.source) > 1 else "source", "dim"))
        _tokens(screen, tokens)
    for number, tokens in enumerate(report.tokens):
        if len(report.tokens) > 1 or report.source:
            screen.line((f"text {number}" if len(report.tokens) > 1 else "text", "dim"))
        _tokens(screen, tokens)


def _tokens(screen: Screen, tokens: list[Token]) -> None:
    rows = [
        [
            str(position),
            str(token.id),
            (token.token + " (added)" * token.added, "cyan")
            if token.bytes is not None
            else ("no token has this id", "dim"),
            " ".join(f"{byte:02x}" for byte in token.bytes or ()),
        ]
        for position, token in enumerate(tokens)
    ]
    screen.table(rows, ("position", "id", "token", "bytes"), right=(0, 1))


@verdict.register
def _(report: TokensReport) -> str:
    return "\n".join(report.text or (" ".join(str(token.id) for token in tokens) for tokens in report.tokens))


@draw.register
def _(report: ConfigReport, screen: Screen) -> None:
    screen.verbatim(report.yaml.rstrip("\n") + "\n")


@verdict.register
def _(report: ConfigReport) -> str:
    return report.yaml.rstrip("\n")


@draw.register
def _(report: ListReport, screen: Screen) -> None:
    rows: list[list] = []
    for kind, named in (("config with weights", "-c"), ("config", "-c"), ("sample", "-m")):
        rows.append([(f"{kind} ({named})", "dim"), "", ""])
        rows += [[(one.name, "cyan"), f"{one.parameters:,}", one.about] for one in report.shipped if one.kind == kind]
    screen.table(rows, ("name", "parameters", ""), right=(1,), wrap=True)
    if report.cached:
        screen.line(("in the Hub's cache (-m)", "dim"))
        screen.table([[(c.name, "cyan"), c.revision, f"{c.bytes / 2**20:,.1f} MiB"] for c in report.cached], right=(2,))


@verdict.register
def _(report: ListReport) -> str:
    return "\n".join(one.name for one in (*report.shipped, *report.cached))
