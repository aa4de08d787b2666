"""`diff` in a terminal: the verdict, where they part and how far, what it does to the logits, why, and the table."""

import math
import re
from dataclasses import replace

from gptcli.render.common import fed, title
from gptcli.render.screen import Part, Screen
from gptcli.report.diff import Activation, DiffReport, LogitsGap, Parted, Worst, folded

COLORS = {"identical": "bold green", "rounding": "bold green", "parted": "bold red"}
LABEL = 13  # columns of what stands before a line


def draw(report: DiffReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    screen.line((report.said, COLORS[report.verdict]))
    title(screen, replace(report.a, name=f"A  {report.a.name}"))
    if report.tokens_b:
        fed(screen, report.tokens)
    title(screen, replace(report.b, name=f"B  {report.b.name}"))
    fed(screen, report.tokens_b or report.tokens, report.source)
    if report.told:
        screen.table([[(line, "yellow")] for line in report.told], wrap=True)
    if report.parted is not None:
        _where(screen, report.parted)
    if report.logits is not None:
        _logits(screen, report.logits)
    if report.parted is not None:
        _three(screen, report.parted, report)
    for cause in report.causes:
        rows = (("cause", (cause.said, "bold")), ("mend", cause.mend))
        screen.table([[(label.ljust(LABEL - 2), "dim"), said] for label, said in rows], wrap=True)
    _table(screen, report)


def verdict(report: DiffReport) -> str:
    """What `-q` prints."""
    return report.said


def _where(screen: Screen, parted: Parted) -> None:
    if parted.path != "ids":
        _labelled(screen, "last agreed", [[parted.last_agreed or "nothing before it"]])
    if parted.worst is not None:
        _labelled(screen, "worst", _worst(screen, parted.worst))


def _worst(screen: Screen, worst: Worst) -> list[list[Part]]:
    of = f" of text {worst.text}" if worst.text else ""
    at = [[(f"position {worst.position}{of} ", "dim"), (worst.token or f"id {worst.id}", "cyan")]]
    at += [[f"{name} {i}"] for name in ("head", "channel", "key") if (i := getattr(worst, name)) is not None]
    if worst.out_token is not None:
        at[-1] = [f"the logit of id {worst.channel}", (f" {worst.out_token}" * bool(worst.out_token), "cyan")]
    return [*at, [f"A {screen.number(worst.a)}"], [f"B {screen.number(worst.b)}"]]


def _labelled(screen: Screen, label: str, chunks: list[list[Part]]) -> None:
    screen.flow([[(label.ljust(LABEL), "dim"), *chunks[0]], *chunks[1:]], " · ", LABEL)


def _logits(screen: Screen, gap: LogitsGap) -> None:
    of = f" of text {gap.text}" if gap.text else ""
    chunks: list[list[Part]] = [
        [f"KL(A || B) {size(gap.kl_nats_mean)} nats on average"],
        [f"{size(gap.kl_nats_max)} at position {gap.position}{of} ", (gap.token or f"id {gap.id}", "cyan")],
        [f"the likeliest id is the same at {gap.same_first} of {gap.positions}"],
        [f"{100 * gap.top_k_shared:.4g} % of the {gap.top_k} likeliest are shared"],
    ]
    _labelled(screen, "logits", chunks)
    if all(one.rank_a == one.rank_b for one in gap.ranks):
        return
    names = any(one.token for one in gap.ranks)
    rows = [
        [
            " " * (LABEL - 2),
            str(one.rank_a),
            f"→ {one.rank_b}",
            str(one.id),
            *([(one.token, "cyan")] if names else []),
            screen.number(one.logit_a),
            f"→ {screen.number(one.logit_b)}",
        ]
        for one in gap.ranks
    ]
    header = ["", "rank", "", "id", *(["token"] if names else []), "logit", ""]
    screen.table(rows, header, right=(1, 3, len(header) - 2))


def _three(screen: Screen, parted: Parted, report: DiffReport) -> None:
    """Exact, expected and seen, with what each is."""
    types = list(dict.fromkeys((report.a.dtype, report.b.dtype)))
    rounds = f"what {' and '.join(types)} {'round' if len(types) > 1 else 'rounds'}"
    about = {"exact": "in float64", "expected": rounds, "seen": "as they ran"}
    if report.by == "one side's float64":
        about |= {"exact": "from the float64 of the side that runs"}
    rows: list[list[Part]] = [
        [(name, "dim"), *map(size, (numbers.relative, numbers.max_abs)), (what, "dim")]
        for name, what in about.items()
        if (numbers := getattr(parted, name)) is not None
    ]
    if rows:
        screen.table(rows, (" " * (LABEL - 2), "relative", "max |A-B|", ""), right=(1, 2))


def _table(screen: Screen, report: DiffReport) -> None:
    """A row an activation, and one for all that agree and follow one another."""
    shown = ([one] for one in report.activations) if screen.full else folded(report)
    rows = [_row(group, report) for group in shown]
    header = ["activation", "shape", "max |A-B|", "relative", "expected", "cosine", ""]
    for column in (5, 1, 3, 1):  # cosine, shape, expected, max |A-B|: left out in that order where the screen is narrow
        if screen.fits(rows, header):
            break
        header, *rows = ([*row[:column], *row[column + 1 :]] for row in (header, *rows))
    else:
        rows = [[(re.sub(r"(\S+\.)(\S+ … )\1", r"\1\2", row[0][0]), row[0][1]), *row[1:]] for row in rows]
    if rows:
        screen.table(
            rows, header, right=[i for i, name in enumerate(header) if name not in ("activation", "shape", "")]
        )


def _row(group: list[Activation], report: DiffReport) -> list[Part]:
    first, last = group[0], group[-1]
    worst = max(group, key=lambda one: one.relative)
    known = [one.expected for one in group if one.expected is not None]
    parts = report.parted is not None and report.parted.path == first.path
    several, word = len(group) > 1, "agree" if first.agrees else "differ"
    said = "parted" if parts else f"{len(group)} {word}" if several else f"{word}s"
    return [
        (f"{first.path} … {last.path}" if several else first.path, "bold" if parts else ""),
        ("" if several else f"[{','.join(map(str, first.shape))}]", "dim"),
        size(max(one.max_abs for one in group)),
        size(worst.relative),
        size(max(known)) if known else "",
        "1"
        if worst.relative == 0
        else ""
        if math.isnan(worst.cosine) or math.isinf(worst.relative)
        else f"{worst.cosine:.6f}",
        (said, "bold red" if parts else "green" if first.agrees else "red"),
    ]


def size(x: float) -> str:
    """The size of a gap."""
    return "0" if x == 0 else "∞" if math.isinf(x) else f"{x:.1e}"
