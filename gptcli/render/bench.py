"""`bench` in a terminal: time, rate and memory, then a row for each stage."""

from gptcli.render.common import title
from gptcli.render.costs import scaled
from gptcli.render.screen import Screen
from gptcli.report.bench import BenchReport

BAR = 24  # columns of the longest bar


def draw(report: BenchReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    title(screen, report.model)
    threads = f"{report.threads} thread{'s' * (report.threads != 1)}"
    source = f" and sources of {report.source_tokens:,}" if report.source_tokens else ""
    texts = "one text" if report.batch == 1 else f"{report.batch} texts"
    logits = "every position" if report.rows == "all" else "the last position"
    screen.flow([[f"{texts} of T = {report.tokens:,}{source}"], [f"logits of {logits}"], [threads]], gap=" · ")
    share = report.flops_per_second / report.product_flops_per_second
    rows = [
        (
            "least",
            f"{1000 * report.least:,.2f}",
            f"ms, of {len(report.seconds)} pass{'es' * (len(report.seconds) != 1)}",
        ),
        ("median", f"{1000 * report.median:,.2f}", "ms"),
        ("rate", f"{report.tokens_per_second:,.0f}", "tokens/s"),
        ("work", scaled(report.flops), "FLOPs a pass (2 × multiply-adds, masked pairs left out)"),
        ("reached", scaled(int(report.flops_per_second)), f"FLOP/s, {100 * share:.2g} % of the fastest product's"),
        ("product", scaled(int(report.product_flops_per_second)), "FLOP/s, the best of large matrix products"),
    ]
    if report.peak_bytes is not None:
        rows.append(("memory", f"{report.peak_bytes / 2**20:,.0f}", "MiB held at most, libraries and files' pages too"))
    screen.table(rows, right=(1,))
    screen.line()
    most = max(stage.share for stage in report.stages)
    cells = [
        [
            one.name,
            f"{1000 * one.seconds:,.3f}",
            f"{100 * one.share:.1f} %",
            ("█" * round(BAR * one.share / most), "green"),
        ]
        for one in report.stages
    ]
    screen.table(cells, ("stage", "ms a pass", "share", ""), right=(1, 2))


def verdict(report: BenchReport) -> str:
    """What `-q` prints: the fastest pass in seconds."""
    return repr(report.least)
