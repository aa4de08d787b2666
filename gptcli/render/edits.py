"""A run beside its edited one in a terminal: what was touched, what became of the next tokens, and walks through it."""

from gptcli.render.common import fed, folded, rank, title
from gptcli.render.screen import Screen
from gptcli.render.trace import walks_and_proof
from gptcli.report.edits import EditsReport, Effect, Moved, Touched


def draw(report: EditsReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    title(screen, report.model)
    fed(screen, report.tokens, report.source)
    _touched(screen, report.touched)
    if report.explicit:
        screen.line((f"computed step by step, to go on with what was set: {', '.join(report.explicit)}", "dim"))
    for effect in report.effects:
        _effect(screen, effect)
    if report.walks:
        walks_and_proof(screen, report)


def verdict(report: EditsReport) -> str:
    """What `-q` prints: KL in nats after each position, or the largest change of a final vector."""
    numbers = [effect.largest_change if effect.kl_nats is None else effect.kl_nats for effect in report.effects]
    return "\n".join(f"{effect.position}\t{number:.6g}" for effect, number in zip(report.effects, numbers))


def _touched(screen: Screen, touched: list[Touched]) -> None:
    header = ("edit", "touched", "numbers", "largest", "|change|/|x|")
    rows, last = [], None
    for one in touched:
        share = screen.number(one.norm_change / one.norm) if one.norm else "of 0"
        where = f"{one.path}{', ' if one.where else ''}{one.where}"
        said = one.edit if one.edit != last else ""
        rows.append([said, where, f"{one.changed:,} of {one.size:,}", screen.number(one.largest), share])
        last = one.edit
    if screen.fits(rows, header):
        screen.table(rows, header, right=(2, 3, 4))
        return
    last = None
    for row, one in zip(rows, touched):
        if one.edit != last:
            screen.line((one.edit, "bold"))
            last = one.edit
        screen.flow(
            [[f"  {row[1]}"], [f"{row[2]} numbers"], [f"largest {row[3]}"], [f"|change|/|x| {row[4]}"]], "  ", 4
        )


def _effect(screen: Screen, effect: Effect) -> None:
    word = "at" if effect.fills else "after"
    said = [(f"{word} position {effect.position} ", "dim"), (effect.token, "cyan")]
    if effect.kl_nats is None:
        change = f"final vector: |x| {screen.number(effect.norm)}, |change| {screen.number(effect.norm_change)}"
        screen.flow([said, [change], [f"largest {screen.number(effect.largest_change)}"]], " · ")
        return
    nats, bits = screen.number(effect.kl_nats), screen.number(effect.kl_bits)
    screen.flow([said, [(f"KL(without || with) {nats} nats = {bits} bits", "bold")]], " · ")
    header = ("rank", "", "id", "token", "logit", "", "change", "prob", "")
    rows = [
        _moved(screen, one)
        for one in folded(effect.moved, lambda one: (one.tie_without or one.id, one.tie_with or one.id))
    ]
    if not screen.fits(rows, header):
        header, rows = header[:7], [row[:7] for row in rows]
    screen.table(rows, header, right=(0, 2, 4, 6, 7))


def _moved(screen: Screen, one: Moved) -> list:
    return [
        rank(one.rank_without, one.tie_without),
        f"→ {rank(one.rank_with, one.tie_with)}",
        str(one.id),
        (one.token, "cyan"),
        screen.number(one.logit_without),
        f"→ {screen.number(one.logit_with)}",
        (f"{'+' if one.logit_change > 0 else ''}{screen.number(one.logit_change)}", _colour(one.logit_change)),
        screen.number(one.prob_without),
        f"→ {screen.number(one.prob_with)}",
    ]


def _colour(change: float) -> str:
    return "green" if change > 0 else "red" if change < 0 else ""
