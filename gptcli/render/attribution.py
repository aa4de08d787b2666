"""`trace --attribute` in a terminal: the largest parts of a logit as bars to both sides, or all of them by layer."""

from gptcli.render.common import fed, title
from gptcli.render.screen import Part as Shown
from gptcli.render.screen import Screen
from gptcli.report.attribution import AttributionReport, Group, Split

BAR = 14  # columns of the longest bar, to each side


def draw(report: AttributionReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    title(screen, report.model)
    fed(screen, report.tokens, report.source)
    for split in report.splits:
        token = report.tokens[0][split.position]
        _split(screen, split, "at" if report.fills else "after", token.token or str(token.id))
    if report.frozen:
        named = report.frozen if screen.full or len(report.frozen) < 3 else [report.frozen[0], "…", report.frozen[-1]]
        number = f"{len(report.frozen)} scale{'s' * (len(report.frozen) != 1)}"
        screen.line((f"{number} held at this run's numbers: {', '.join(named)}", "dim"))
    for check in report.proof:
        off = f"off by {check.error:.1e} {'≤' if check.ok else '>'} {check.allowed:.0e}" if check.error else "exactly"
        mark = ("ok", "green") if check.ok else ("FAILED", "bold red")
        screen.line(mark, f"  {check.claim}  ", (off, "dim"))


def verdict(report: AttributionReport) -> str:
    """What `-q` prints: each token's largest part."""
    lines = []
    for split in report.splits:
        part = split.parts[split.largest[0]]
        lines.append(f"{split.position}\t{split.target or split.id}\t{part.label}\t{part.value!r}")
    return "\n".join(lines)


def _split(screen: Screen, split: Split, where: str, token: str) -> None:
    screen.flow(
        [
            [
                ("logit ", "dim"),
                screen.number(split.logit),
                (" of ", "dim"),
                (split.target or f"id {split.id}", "cyan"),
            ],
            [(f"{where} position {split.position} ", "dim"), (token, "cyan")],
            [(f"rank {split.rank:,}", "dim")],
            [(f"probability {screen.number(split.prob)}", "dim")],
        ],
        gap=" · ",
    )
    longest = max(abs(part.value) for part in split.parts)
    rows: list[list[Shown]] = []
    if screen.full:
        for group in split.groups:
            rows += _group(screen, split, group, longest)
    else:
        rows = [_row(screen, split, i, longest) for i in split.largest]
        folded = len(split.parts) - len(split.largest)
        if folded:
            rows.append([(f"{folded} parts more", "dim"), screen.number(split.rest), *_bar(split.rest, longest)])
    rows.append([("sum", "bold"), (screen.number(split.sum), "bold"), "", ""])
    screen.table(rows, ("part", "gives"), right=(1, 2), gap=1)


def _group(screen: Screen, split: Split, group: Group, longest: float) -> list[list[Shown]]:
    """A layer's own row, and below it its parts."""
    rows = [_row(screen, split, i, longest, indent="  ") for i in group.parts]
    return [[(group.name, "bold"), (screen.number(group.value), "bold"), "", ""], *rows]


def _row(screen: Screen, split: Split, i: int, longest: float, indent: str = "") -> list[Shown]:
    part = split.parts[i]
    return [(indent + part.label, "cyan"), screen.number(part.value), *_bar(part.value, longest)]


def _bar(value: float, longest: float) -> list[Shown]:
    """Two cells, left of zero and right of it."""
    size = min(BAR, round(BAR * abs(value) / longest)) if longest > 0 and value == value else 0
    bar = "█" * size
    return [((bar if value < 0 else "") + "│", "red"), ("" if value < 0 else bar, "green")]
