"""`draw -o x.mmd`: the drawing as a Mermaid flowchart, which many sites and editors show as a picture.

Mermaid lays it out by itself: a box is a node or, where it holds others, a subgraph; the residual path is dotted.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from gptcli.render import svg
from gptcli.render.files import write
from gptcli.render.signs import harmless
from gptcli.render.svg import COLOURS, INK
from gptcli.report.draw import Box, DrawReport, Edge, Figure

LIKE = {"aside": "table", "matrix": "step", "experts": "step", "output": "input", "stack": "layer"}
# How a kind of box is filled and edged, and its text.
CLASSES = {kind: f"fill:{fill},stroke:{edge},color:{INK}" for kind, (fill, edge) in COLOURS.items() if kind not in LIKE}
CLASSES |= {
    "step": CLASSES["layer"],
    "add": f"fill:#ffffff,stroke:{svg.RESIDUAL},stroke-width:2px,color:{INK}",
    "input": f"fill:{INK},stroke:{INK},color:#ffffff",
}
DIFFERS = f"stroke:{svg.DIFFERS},stroke-width:3px"
RESIDUAL, MEMORY = (f"stroke:{colour},stroke-width:2px" for colour in (svg.RESIDUAL, svg.MEMORY))
SHAPES = {"input": ("([", "])"), "output": ("([", "])"), "add": ("((", "))"), "table": ("[", "]")}
ARROWS = {"data": "-->", "residual": "-.->", "memory": "==>", "tie": "-.-", "bias": "-.->"}


def to_mermaid(report: DrawReport) -> str:
    """A flowchart from top to bottom; of two models, each is a subgraph."""
    names = " and ".join(figure.model.name for figure in report.figures)
    lines = ["---", f"title: {json.dumps(harmless(names), ensure_ascii=False)}", "---", "flowchart TB"]
    edges: list[Edge] = []
    marked: list[str] = []
    for number, figure in enumerate(report.figures):
        prefix = f"m{number}_"
        drawn = [*_stacks(figure, prefix), *(_edge(edge, prefix) for edge in figure.edges)]
        if len(report.figures) > 1:
            title = f"{figure.model.name} · {figure.model.parameters:,} parameters"
            drawn = [f"subgraph {prefix}model[{quoted([title])}]", "  direction TB", *_indented(drawn), "end"]
        lines += _indented(drawn)
        edges += figure.edges
        marked += [node(prefix, id_) for id_ in figure.differing]
    lines += [f"  classDef {name} {style}" for name, style in CLASSES.items()]
    if marked:
        lines += [f"  classDef differs {DIFFERS}", f"  class {','.join(marked)} differs"]
    for kind, style in (("residual", RESIDUAL), ("memory", MEMORY)):
        which = [str(i) for i, edge in enumerate(edges) if edge.kind == kind]
        lines += [f"  linkStyle {','.join(which)} {style}"] * bool(which)
    return "\n".join(lines) + "\n"


def write_mermaid(path: Path, report: DrawReport) -> None:
    """Raises GptcliError where the file can't be written."""
    write(path, lambda draft: draft.write_text(to_mermaid(report), encoding="utf-8"))


def node(prefix: str, id_: str) -> str:
    """A box's id as Mermaid takes it: letters, digits and underscores."""
    return prefix + re.sub(r"\W", "_", id_)


def quoted(lines: Iterable[str]) -> str:
    """Lines of a label between quotes, every sign that Mermaid or HTML would read as its own escaped."""
    escaped = (re.sub(r'["#&<>`;|{}\\*_~]', lambda sign: f"#{ord(sign[0])};", harmless(line)) for line in lines)
    return f'"{"<br/>".join(escaped)}"'


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _stacks(figure: Figure, prefix: str) -> Iterator[str]:
    for stack in figure.stacks:
        if len(figure.stacks) == 1:
            yield from _sequence(stack.branches[0], prefix)
        else:
            yield from _subgraph(stack, prefix)


def _sequence(several: Iterable[Box], prefix: str) -> Iterator[str]:
    for box in several:
        if box.kind in ("split", "residual"):
            for branch in box.branches:
                yield from _sequence(branch, prefix)
        elif box.branches:
            yield from _subgraph(box, prefix)
        else:
            before, after = SHAPES.get(box.kind, ("[", "]"))
            lines = [box.title] if box.kind == "add" else [box.title, *box.lines, *_number(box)]
            yield f"{node(prefix, box.id)}{before}{quoted(lines)}{after}:::{LIKE.get(box.kind, box.kind)}"


def _subgraph(box: Box, prefix: str) -> Iterator[str]:
    name = node(prefix, box.id)
    yield f"subgraph {name}[{quoted([' · '.join([box.title, *box.lines, *_number(box)])])}]"
    yield "  direction TB"
    yield from _indented(_sequence(box.branches[0], prefix))
    yield "end"
    yield f"class {name} {LIKE.get(box.kind, box.kind)}"


def _number(box: Box) -> list[str]:
    """A box's parameters; nothing for what has none."""
    if box.times > 1:
        return [f"{box.times:,} × {box.parameters:,}"]
    return [f"{box.parameters:,} new" if box.tied_to else f"{box.parameters:,}"] if box.weights or box.branches else []


def _edge(edge: Edge, prefix: str) -> str:
    label = ""
    if edge.kind == "tie":
        label = f"|{quoted(['tied'])}|"
    elif edge.carries is not None:
        label = f"|{quoted([edge.carries.said()])}|"
    return f"{node(prefix, edge.source)} {ARROWS[edge.kind]}{label} {node(prefix, edge.target)}"
