"""`forward` in a terminal: a row a stage, then the next token."""

from gptcli.render.common import fed, title
from gptcli.render.screen import Screen
from gptcli.render.topk import next_table
from gptcli.report.forward import ForwardReport, Stage
from gptcli.report.topk import Next


def draw(report: ForwardReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    title(screen, report.model)
    fed(screen, report.tokens, report.source)
    last = report.tokens[0][-1]
    of_text = " of text 0" if len(report.tokens) > 1 else ""
    rows = []
    for stage in report.stages:
        shape = f"[{','.join(map(str, stage.shape))}]"
        numbers = ("", "", "")
        if stage.mean is not None:
            numbers = (screen.number(stage.mean), screen.number(stage.std), screen.number(stage.max_abs))
        rows.append([stage.name, f"[{','.join(stage.axes)}]", shape, *numbers])
    used = sum(max(len(row[i]) for row in rows) + 1 for i in range(6)) + 1
    room = None if screen.width is None else screen.width - used
    vectors = iter(screen.vectors([stage.last for stage in report.stages if _is_vector(stage)], room))
    after = "filled in:" if any(found.fills for found in report.next) else "next token:"
    for row, stage in zip(rows, report.stages):
        row.append(" " + (next(vectors) if _is_vector(stage) else str(stage.last[0]) if stage.last else after))
    of_source = f", source: {report.source[0][-1].token or report.source[0][-1].id}" if report.source else ""
    label = f" last token{of_text} ({last.token or last.id}{of_source})"
    screen.table(rows, ("stage", "shape", "", "mean", "std", "max", label), right=(3, 4, 5), gap=1)
    for found in report.next:
        token = report.tokens[found.text][found.position]
        said = f"position {found.position} ({token.token or token.id}):" if found.fills else "next token:"
        if len(report.next) > 1 or found.fills:
            screen.line((f"text {found.text}, {said}" if len(report.tokens) > 1 else said, "dim"))
        next_table(screen, found)


def _is_vector(stage: Stage) -> bool:
    """Not the input ids, which are no numbers to compute with, nor the logits, which are listed as the next token."""
    return stage.mean is not None and bool(stage.last)


def verdict(report: ForwardReport) -> str:
    """What `-q` prints."""
    return "\n".join(_best(found) for found in report.next)


def _best(found: Next) -> str:
    return "\n".join(f"{one.id}\t{one.token}" for one in found.top[:1])
