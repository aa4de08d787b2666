"""Two models' weights side by side in a terminal: the verdict, where they differ, and the tensors, the worst first."""

from collections.abc import Callable, Sequence
from itertools import groupby
from math import ceil, inf

from gptcli.checkpoint.patterns import split
from gptcli.render.screen import Part, Screen
from gptcli.report.diff_weights import PartGap, TensorGap, WeightsDiffReport
from gptcli.report.weights_verdict import SAME, patterns

STYLES = {"identical": "bold green", "rounding": "bold green", "different": "bold yellow"}
# What stands above a column, of the widest table first.
COLUMNS = (
    ("types", "bits", "relative", "max |b-a|", "cosine", "changed"),
    ("types", "relative", "max |b-a|", "cosine", "changed"),
    ("types", "relative", "max |b-a|"),
    ("relative", "max |b-a|"),
    ("relative",),
)
MOST_ROWS = 12  # of layers that differ
KINDS = {
    "different": "different",
    "shape": "of another shape",
    "rounded": "rounded",
    "told": "as the architectures tell",
    "stored": "the same numbers in another type",
}


def draw(report: WeightsDiffReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    screen.flow([[(chunk, STYLES[report.verdict])] for chunk in report.said.split("; ")], gap="; ")
    for letter, model, bits in (("A", report.a, report.bits_a), ("B", report.b, report.bits_b)):
        held = f"{model.dtype}, {bits:.4g} bits a number"
        screen.flow([[(f"{letter} ", "bold"), model.name], [f"({model.source})"], [held]], gap=" ")
    if report.architecture:
        screen.table([[(what, "dim"), a or "–", "→", b or "–"] for what, a, b in report.architecture])
    for tie in report.ties:
        screen.line(tie)
    for letter, only in (("A", report.only_a), ("B", report.only_b)):
        if only:
            first, *more = patterns(lone.name for lone in only)
            screen.flow([[(f"only in {letter}", "bold"), f"  {first}"], *([name] for name in more)], gap=" · ")
    for finding in report.findings:
        if finding.code == "not-finite":
            screen.line((finding.message, "bold red"))
    _tensors(report, screen)
    if any(part.different for part in report.parts):
        _layers(report, screen)


def _layers(report: WeightsDiffReport, screen: Screen) -> None:
    """A row a layer, a column a part: how far they are apart. Alike ones fold; of many that are not, a row has some."""
    inside = [part for part in report.parts if part.layer_index is not None]
    columns = list(dict.fromkeys(part.part for part in inside))
    layers: dict[str, dict[str, PartGap]] = {}
    for part in inside:
        layers.setdefault(f"{part.stack}.layers.{part.layer_index}".lstrip("."), {})[part.part] = part
    apart = {name: any(_apart(part) for part in cells.values()) for name, cells in layers.items()}
    each = 1 if screen.full or sum(apart.values()) <= MOST_ROWS else ceil(sum(apart.values()) / MOST_ROWS)
    rows: list[list[Part]] = []
    for differ, run in groupby(layers, apart.__getitem__):
        names = list(run)
        step = each if differ else len(names)
        for some in (names[i : i + step] for i in range(0, len(names), step)):
            cells = ([layers[name][column] for name in some if column in layers[name]] for column in columns)
            rows.append([", ".join(patterns(some)), *(_cell(parts, screen) for parts in cells)])
    screen.line(("relative, by layer", "bold"), ("  of the tensors that differ; = none does", "dim"))
    screen.table(rows, ["", *columns], right=range(1, 1 + len(columns)))
    others = [part for part in report.parts if part.layer_index is None and _apart(part)]
    screen.flow([[f"{part.stack}.{part.part}".lstrip("."), " ", _cell([part], screen)] for part in others], gap=" · ")


def _apart(part: PartGap) -> bool:
    return part.different > 0 or part.changed > 0


def _cell(parts: list[PartGap], screen: Screen) -> Part:
    """The same part of some layers."""
    apart = [part for part in parts if _apart(part)]
    if not apart:
        return "=" if parts else ""
    changed = [part.relative for part in apart if part.changed]
    text = _range(changed, screen) if changed else "shape"
    return text, "yellow" if any(part.different for part in apart) else ""


def _figure(x: float | None, screen: Screen) -> str:
    return "–" if x is None else f"{x:.{max(screen.digits - 1, 1)}g}"


def _tensors(report: WeightsDiffReport, screen: Screen) -> None:
    """A section for what differs alike; in it a row a pattern, or with --full a row a tensor, the worst first."""
    sections: dict[tuple[str, str], dict[tuple, list[TensorGap]]] = {}
    for tensor in report.tensors:
        if tensor.kind != "identical":
            stem = "" if tensor.kind == "stored" else split(tensor.name)[0]
            alike = tensor.name if screen.full else stem, tensor.dtype_a, tensor.dtype_b
            sections.setdefault((tensor.kind, tensor.said), {}).setdefault(alike, []).append(tensor)
    groups = {key: sorted(section.values(), key=_worst, reverse=True) for key, section in sections.items()}
    ranked = any(tensor.rank for tensor in report.tensors)
    packed = any(tensor.bits_a % 8 or tensor.bits_b % 8 for tensor in report.tensors)
    rows, columns = {}, ()
    for columns in (choice + ("rank",) * ranked for choice in COLUMNS if packed or "bits" not in choice):
        rows = {key: [_row(group, key[0], columns, screen) for group in section] for key, section in groups.items()}
        numbered = [row for (kind, _), section in rows.items() if kind != "stored" for row in section]
        if screen.fits(numbered, ["", *columns]):
            break
    right = [i for i, column in enumerate(columns, 1) if column != "types"]
    for kind, said in sorted(rows, key=lambda key: key[0] in SAME):
        screen.line((KINDS[kind], "bold"), f": {said}" if said else "")
        if kind in ("shape", "stored"):
            screen.table(rows[kind, said], wrap=kind == "stored")
        else:
            screen.table(rows[kind, said], ["", *columns], right)
    rest = sum(tensor.kind == "identical" for tensor in report.tensors)
    if rest and rows:
        screen.line((f"{rest} of {len(report.tensors)} tensors are identical", "dim"))
    if ranked:
        screen.line(("rank: singular values of b-a beyond what rounding to the stored types can add", "dim"))


def _row(group: list[TensorGap], kind: str, columns: Sequence[str], screen: Screen) -> list[Part]:
    """Tensors that differ alike, and what the columns say of them."""
    names = ", ".join(patterns(tensor.name for tensor in group))
    if kind == "shape":
        return [names, str(group[0].shape_a), "→", str(group[0].shape_b)]
    return [_types(group, screen), names] if kind == "stored" else [names, *(CELLS[c](group, screen) for c in columns)]


def _worst(group: list[TensorGap]) -> float:
    return max(inf if tensor.relative is None else tensor.relative for tensor in group)


def _types(group: list[TensorGap], screen: Screen) -> str:
    first = group[0]
    return first.dtype_a if first.dtype_a == first.dtype_b else f"{first.dtype_a} → {first.dtype_b}"


def _bits(group: list[TensorGap], screen: Screen) -> str:
    a, b = f"{group[0].bits_a:.4g}", f"{group[0].bits_b:.4g}"
    return a if a == b else f"{a} → {b}"


def _range(found: list[float | int | None], screen: Screen) -> str:
    """The least and the largest."""
    known = [x for x in found if x is not None]
    ends = dict.fromkeys(_figure(x, screen) for x in (min(known), max(known))) if known else ["–"]
    return " … ".join(ends)


def _changed(group: list[TensorGap], screen: Screen) -> str:
    share = max(tensor.changed for tensor in group)
    return "all" if share == 1 else f"{100 * share:.3g} %"


CELLS: dict[str, Callable[[list[TensorGap], Screen], str]] = {
    "types": _types,
    "bits": _bits,
    "relative": lambda group, screen: _range([tensor.relative for tensor in group], screen),
    "max |b-a|": lambda group, screen: _figure(max(tensor.max_abs for tensor in group), screen),
    "cosine": lambda group, screen: screen.number(min((t.cosine for t in group if t.cosine is not None), default=None)),
    "changed": _changed,
    "rank": lambda group, screen: _range([tensor.rank for tensor in group], screen),
}


def verdict(report: WeightsDiffReport) -> str:
    """What `-q` prints: the verdict, and what is not finite."""
    return "; ".join([report.said, *(one.message for one in report.findings if one.code == "not-finite")])
