"""`params` in a terminal: a row a component, a layer or a tensor, then the totals by name."""

from gptcli.render.screen import Screen, short
from gptcli.report.params import ParamsReport


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
            rows.append([(name, style), shape, f"{row.parameters:,}", stored])
        else:
            each, share = f"{row.each:,}" if row.times > 1 else "", "" if row.tied_to else f" {100 * row.share:.2f} %"
            rows.append([(name, style), f" {each}", f" {row.parameters:,}", share, f" {stored}"])
    views = (
        ("untied", totals.untied, "every name counted"),
        ("non-embedding", totals.non_embedding, "layers and final norm"),
        ("nanoGPT's convention", totals.nanogpt, "no positions"),
    )
    views = [view for view in views if view[1] != totals.total]
    whole = f"{report.bytes / size:,.2f}"
    for name, count, stored in (("total", totals.total, whole), *((name, count, "") for name, count, _ in views)):
        rounded = f"({short(count)})" if count >= 10**6 else ""
        counts = [rounded, f"{count:,}"] if tensors else ["", f" {count:,}", rounded]
        rows.append([(name, "bold" if name == "total" else "dim"), *counts, stored])
    if tensors:
        screen.table(rows, ("tensor", "shape", "parameters", unit), right=(2, 3))
    else:
        # Columns stand two blanks apart, but a count and its short form one: 124,439,808 (124.44M).
        header = (report.by, " each", " parameters", " share", f" {unit} ({model.dtype})")
        screen.table(rows, header, right=(1, 2, 3, 4), gap=1)
    if views:
        screen.flow([[(f"{name}: {what}", "dim")] for name, _, what in views], gap=" · ")
    if report.buffers:
        screen.line((f"buffers, not counted: {len(report.buffers)} ({report.buffers[0]} …)", "dim"))


def verdict(report: ParamsReport) -> str:
    """What `-q` prints."""
    return str(report.parameters.total)
