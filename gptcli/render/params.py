"""`params` in a terminal: a row a component, a layer or a tensor, then the totals by name."""

from collections.abc import Iterator

from gptcli.render.screen import Part, Screen, short
from gptcli.report.cards import Card
from gptcli.report.params import AS_STORED, ParamsReport, Totals


def draw(report: ParamsReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    model, totals, tensors = report.model, report.parameters, report.by == "tensor"
    screen.line((model.name, "bold"), f" ({model.source})", f" · {model.dtype}" if tensors else "")
    unit, size = ("GiB", 2**30) if max(row.bytes for row in report.rows) >= 10 * 2**30 else ("MiB", 2**20)
    rows: list[list] = []
    for row in report.rows:
        name = "  " * row.indent + row.name + (f" → {row.tied_to.rsplit('.', 1)[0]} (tied)" if row.tied_to else "")
        style, stored = ("dim", "") if row.tied_to else ("", f"{row.bytes / size:,.2f}")
        if tensors:
            shape = f"[{','.join(row.axes)}] [{','.join(map(str, row.shape))}]"
            kinds = [", ".join(row.stored)] if report.types else []
            rows.append([(name, style), shape, *kinds, f"{row.parameters:,}", stored])
        else:
            each, share = f"{row.each:,}" if row.times > 1 else "", "" if row.tied_to else f" {100 * row.share:.2f} %"
            rows.append([(name, style), f" {each}", f" {row.parameters:,}", share, f" {stored}"])
    views = report.counts[1:]
    whole = f"{report.bytes / size:,.2f}"
    for name, count, stored in (("total", totals.total, whole), *((view.name, view.count, "") for view in views)):
        rounded = f"({short(count)})" if count >= 10**6 else ""
        blank = [""] if tensors and report.types else []
        counts = [*blank, rounded, f"{count:,}"] if tensors else ["", f" {count:,}", rounded]
        rows.append([(name, "bold" if name == "total" else "dim"), *counts, stored])
    if tensors:
        kinds = ["stored"] if report.types else []
        screen.table(rows, ("tensor", "shape", *kinds, "parameters", unit), right=(2 + len(kinds), 3 + len(kinds)))
    else:
        # Columns stand two blanks apart, but a count and its short form one: 124,439,808 (124.44M).
        header = (report.by, " each", " parameters", " share", f" {unit} ({model.dtype})")
        screen.table(rows, header, right=(1, 2, 3, 4), gap=1)
    if views:
        screen.flow([[(f"{view.name}: {view.what}", "dim")] for view in views], gap=" · ")
    if totals.total >= 10**6:
        to_three = [[(f"{view.name} {view.rounded}", "dim")] for view in report.counts]
        screen.flow([[("as cards round: ", "dim"), *to_three[0]], *to_three[1:]], gap=" · ")
    for card in report.cards:
        screen.flow(_card(card, totals), gap=" · ")
    screen.flow([[(chunk, "dim")] for chunk in _bytes(report)], gap=" · ")
    if report.types:
        screen.line()
        cells = [[one.type, f"{one.tensors:,}", f"{one.numbers:,}", f"{one.bits:.2f}", f"{one.bytes / size:,.2f}"]
                  for one in report.types]  # fmt: skip
        cells.append(["as bfloat16", "", "", "16.00", f"{report.bf16_bytes / size:,.2f}"])
        screen.table(cells, ("stored as", "tensors", "numbers", "bits a weight", unit), right=(1, 2, 3, 4))
    if report.buffers:
        screen.line((f"buffers, not counted: {len(report.buffers)} ({report.buffers[0]} …)", "dim"))
    if report.costs is not None:
        from gptcli.render import costs

        costs.draw(report.costs, screen)


def _bytes(report: ParamsReport) -> Iterator[str]:
    """The weights' exact bytes, and the file's where they differ."""
    yield f"{report.bytes:,} bytes {'' if report.model.dtype == AS_STORED else 'in '}{report.model.dtype}"
    if report.file_bytes is not None:
        bits = 8 * report.file_bytes / report.parameters.total
        yield f"{report.file_bytes:,} bytes in the file"
        if report.packed:
            yield f"{bits:.2f} bits a weight"
            yield report.packed


def _card(card: Card, totals: Totals) -> Iterator[list[Part]]:
    """Why a card's number is not the total, in words."""
    said = f"{card.said}, as its {'name' if card.where == 'name' else 'card'} says:"
    if not card.matches:
        yield [(f"{said} no count of this model gives it; the total is {short(totals.total)}", "dim")]
        return
    several = f" (what {card.experts} experts share counts once)" if card.experts is not None else ""
    for i, match in enumerate(card.matches):
        lead = f"{said} " if i == 0 else "or "
        yield [(f"{lead}{match.name} {short(match.count)}, {match.how}{several}", "dim")]
    if card.matches[0].name != "total":
        yield [(f"the total is {short(totals.total)}", "dim")]


def verdict(report: ParamsReport) -> str:
    """What `-q` prints: the total; where a memory is given, the longest text (with the head on the last position)."""
    longest = report.costs.longest if report.costs is not None else []
    return str(longest[-1].tokens if longest else report.parameters.total)
