"""Models side by side in a terminal: a column a model; a star and a colour mark what is not as in the first."""

from gptcli.render import params
from gptcli.render.costs import title
from gptcli.render.screen import Part, Screen
from gptcli.report.side import Cell, SideReport, SideTable

MARK = "*"


def draw(report: SideReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    for letter, name, one in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", report.columns, report.models):
        screen.line((f"{letter} ", "bold"), (name, "bold"), f" ({one.model.source}) · {one.model.dtype}")
    screen.line((f"{MARK} marks what is not as in the first", "dim"))
    for table in report.tables:
        _table(table, report.columns, screen)


def _table(table: SideTable, columns: list[str], screen: Screen) -> None:
    """With the models' names above, or where that is too wide their letters, or each in a line of its own."""
    title(screen, table.name, table.about)
    letters = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(columns)])
    rows = [["  " * row.indent + row.name, *map(_cell, row.cells, row.differs)] for row in table.rows]
    right = range(1, 1 + len(columns))
    for names in (columns, letters):
        # The mark stands behind a number, so that numbers stand below one another.
        header = ["", *(f"{name} " for name in names)]
        if screen.fits(rows, header):
            screen.table(rows, header, right=right)
            return
    stacked = []
    for row in table.rows:
        for i, (name, cell, differs) in enumerate(zip(letters, row.cells, row.differs)):
            label = "  " * row.indent + row.name if i == 0 else ""
            stacked.append([label, (name, "bold"), _cell(cell, differs)])
    screen.table(stacked, right=(2,))


def _cell(cell: Cell, differs: bool) -> Part:
    text = "–" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell
    return (f"{text}{MARK}", "yellow") if differs else f"{text} "


def verdict(report: SideReport) -> str:
    """What `-q` prints: of each model what it prints of one."""
    return "\n".join(params.verdict(one) for one in report.models)
