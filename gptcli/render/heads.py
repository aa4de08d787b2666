"""`heads` in a terminal: the best of each kind, then the heads by rank, a row and a bar each."""

from gptcli.render.common import fed, title
from gptcli.render.maps import proof
from gptcli.render.screen import Part, Screen
from gptcli.render.shades import fixed
from gptcli.report.heads import FIELDS, Best, HeadFacts, HeadsReport

# What the best head of a kind is called, and what its number is.
KINDS = {
    "previous": ("previous token", ""),
    "first": ("first token", ""),
    "self": ("itself", ""),
    "induction": ("induction", ""),
    "entropy": ("broadest", "of the entropy that it could have"),
    "sharpest": ("sharpest", "of the entropy that it could have"),
    "distance": ("farthest", "positions"),
}
# What stands above a column, and the field that it shows.
COLUMNS = {
    "previous": "previous", "first": "first", "self": "itself", "induction": "induction",
    "bits": "entropy", "entropy": "entropy_share", "distance": "distance",
}  # fmt: skip
BARS = (12, 8, 5, 0)  # columns of the longest bar, as there is room


def draw(report: HeadsReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    title(screen, report.model)
    fed(screen, report.tokens, report.source)
    if report.repeated is not None:
        screen.line((f"{report.repeated} random tokens (seed {report.seed}), twice", "dim"))
    stack = "Encoder · " if report.attention == "encoder" else ""
    screen.line((f"{stack}{len(report.heads)} heads of {report.n_layers} layers", "bold"))
    _bests(screen, report)
    _ranking(screen, report)
    proof(screen, report.proof)


def _bests(screen: Screen, report: HeadsReport) -> None:
    found = {one.kind: one for one in report.best}
    rows: list[list[Part]] = []
    for kind, (name, unit) in KINDS.items():
        if (one := found.get(kind)) is not None:
            rows.append([name, (_name(one), "bold"), fixed(screen, one.value), (unit, "dim")])
        elif kind == "induction":
            rows.append([name, "–", "", ("no token comes again; --repeat N makes a text", "dim")])
    rows = rows if screen.fits(rows, [""] * 4) else [row[:3] for row in rows]
    screen.table(rows, right=(2,))


def _name(one: HeadFacts | Best) -> str:
    return f"L{one.layer_index}H{one.head}"


def _ranking(screen: Screen, report: HeadsReport) -> None:
    """A row a head. Where the screen is too narrow the bar shrinks, then only what ranks is shown."""
    shown = report.heads if screen.full else report.heads[: report.top]
    grouped = ["kv"] if any(one.n_kv_heads < one.n_heads for one in report.heads) else []
    for columns, bar in [(tuple(COLUMNS), bar) for bar in BARS] + [((report.by,), bar) for bar in BARS]:
        header = ["head", *grouped, *columns, *([" " * bar] if bar else [])]
        rows = [_row(screen, report, one, columns, bool(grouped), bar) for one in shown]
        if screen.fits(rows, header):
            break
    screen.table(rows, header, right=range(1, 1 + len(grouped) + len(columns)))
    if len(shown) < len(report.heads):
        screen.line((f"{len(report.heads) - len(shown)} more: --top {len(report.heads)}", "dim"))


def _row(
    screen: Screen, report: HeadsReport, one: HeadFacts, columns: tuple[str, ...], grouped: bool, bar: int
) -> list[Part]:
    """A bar's length is the head's number beside the first one's."""
    row: list[Part] = [(_name(one), "cyan"), *([str(one.kv_head)] if grouped else [])]
    for column in columns:
        value = getattr(one, COLUMNS[column])
        row.append("–" if value is None else (fixed(screen, value), "bold" if column == report.by else ""))
    most = max(1e-30, report.heads[0].measure(report.by) or 0.0)
    return [*row, ("█" * round(bar * (one.measure(report.by) or 0.0) / most), "green")] if bar else row


def verdict(report: HeadsReport) -> str:
    """What `-q` prints: the heads by rank, a line each, with the number that ranks them."""
    field = FIELDS.get(report.by, report.by)
    return "\n".join(f"{_name(one)}\t{_value(getattr(one, field))}" for one in report.heads[: report.top])


def _value(x: float | None) -> str:
    return "" if x is None else repr(x)
