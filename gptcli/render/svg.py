"""`draw -o x.svg`: the drawing as a picture. What is inside an attention or an MLP stands in a panel beside the stack.

Sizes are pixels, y grows downwards. Every text is measured by widths that no common font exceeds, so that it fits where
it stands whichever font shows it. Colours are attributes and arrowheads are shapes, for programs that know no more.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from gptcli.render.files import write
from gptcli.render.screen import exact
from gptcli.render.signs import harmless
from gptcli.report.draw import Box, DrawReport, Figure, Flow, boxes

SANS = "Inter, 'Helvetica Neue', Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace"
PAPER, INK, FAINT, RULE, WIRE = "#fcfbf8", "#23272f", "#666d7a", "#d6d9df", "#7b8494"
RESIDUAL, MEMORY, DIFFERS = "#e8590c", "#7c5cbf", "#b0257a"
# Fill and edge of a box, by its kind.
COLOURS = {
    "table": ("#e8eef8", "#a4b6d8"),
    "aside": ("#e8eef8", "#a4b6d8"),
    "norm": ("#f5f1e7", "#cdc3a8"),
    "attention": ("#dde9f7", "#88acd8"),
    "cross": ("#e8e1f5", "#ab95d3"),
    "mlp": ("#e0f0e6", "#8cbf9f"),
    "experts": ("#ffffff", "#8cbf9f"),
    "head": ("#fbeadb", "#deb088"),
    "folded": ("#f0f1f3", "#bfc4cc"),
    "layer": ("#ffffff", "#c9cdd5"),
    "matrix": ("#ffffff", "#a9b0bc"),
    "step": ("#fafafa", "#d3d7dd"),
}
# Widths: of a box in a stack, of one in a branch, of a narrow one in a panel, of one beside the stack.
BOX, BRANCH, LEAST, ASIDE = 304, 240, 116, 150
GAP, FORK, PAD, LINE_HEIGHT, RADIUS = 38, 16, 12, 16, 10
RAIL = 26  # of the residual path, left of the boxes
SIDE = 22  # between a frame's edge and what is inside
BETWEEN = 40  # columns
TITLE, TEXT, SMALL = 13.0, 11.5, 10.0

NARROW, BROAD = frozenset("iljI.,:;|!'·()[]/ ft-r"), frozenset("mwMW@%→…")


def text_width(text: str, size: float, mono: bool = False, bold: bool = False) -> float:
    """Pixels that a text takes at most, in any of the fonts that are asked for."""
    if mono:
        return 0.63 * size * len(text)
    each = (0.42 if c in NARROW else 1.0 if c in BROAD else 0.66 if c.islower() or c.isdigit() else 0.86 for c in text)
    return size * sum(each) * (1.1 if bold else 1.0)


def wrapped(text: str, room: float, size: float, mono: bool = False, bold: bool = False) -> list[str]:
    """Lines of words within so many pixels; a word that is longer is broken."""
    lines, line = [], ""
    for word in text.split():
        while text_width(word, size, mono, bold) > room:
            cut = next(n for n in range(len(word), 0, -1) if n == 1 or text_width(word[:n], size, mono, bold) <= room)
            lines += [line] * bool(line) + [word[:cut]]
            line, word = "", word[cut:]
        longer = f"{line} {word}".strip()
        if text_width(longer, size, mono, bold) <= room:
            line = longer
        else:
            lines.append(line)
            line = word
    return lines + [line] * bool(line)


def flowed(chunks: Iterable[str], room: float, size: float, gap: str = " · ", mono: bool = False) -> list[str]:
    """Chunks in lines within so many pixels, `gap` between them."""
    lines: list[str] = []
    for chunk in chunks:
        if lines and text_width(lines[-1] + gap + chunk, size, mono) <= room:
            lines[-1] += gap + chunk
        else:
            lines += wrapped(chunk, room, size, mono)
    return lines


class _Ink:
    """Collects shapes in layers, the first below the others."""

    LAYERS = ("frames", "zooms", "wires", "boxes", "chips", "texts")

    def __init__(self):
        self.shapes: dict[str, list[str]] = {layer: [] for layer in self.LAYERS}
        self.right = self.bottom = 0.0

    def put(self, layer: str, tag: str, body: str = "", **attributes: object) -> None:
        said = "".join(
            f' {name.replace("_", "-")}="{escape(str(v), {chr(34): "&quot;"})}"' for name, v in attributes.items()
        )
        self.shapes[layer].append(f"<{tag}{said}>{body}</{tag}>" if body else f"<{tag}{said}/>")

    def rect(self, layer: str, kind: str, x: float, y: float, w: float, h: float, r: float, fill: str, stroke: str,
             **more: object) -> None:  # fmt: skip
        self.right, self.bottom = max(self.right, x + w), max(self.bottom, y + h)
        place = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{w:g}", "height": f"{h:g}", "rx": f"{r:g}"}
        self.put(layer, "rect", **{"class": kind}, **place, fill=fill, stroke=stroke, **more)

    def text(self, x: float, y: float, said: str, size: float, fill: str = INK, anchor: str = "start",
             mono: bool = False, bold: bool = False, kind: str = "in", **more: object) -> None:  # fmt: skip
        font = {"font_size": f"{size:g}", "font_family": MONO if mono else SANS} | (
            {"font_weight": "600"} if bold else {}
        )
        place = {"class": kind, "x": f"{x:g}", "y": f"{y:g}", "text_anchor": anchor}
        self.put("texts", "text", escape(harmless(said)), **place, **font, fill=fill, **more)

    def wire(self, points: Sequence[tuple[float, float]], stroke: str = WIRE, width: float = 1.4, head: bool = False,
             dash: str = "") -> None:  # fmt: skip
        """A line through the points with rounded corners, and an arrowhead at its end."""
        x, y = points[0]
        d = f"M{x:g} {y:g}"
        for before, (x, y), after in zip(points, points[1:-1], points[2:]):
            d += f" L{_toward((x, y), before)} Q{x:g} {y:g} {_toward((x, y), after)}"
        x, y = points[-1]
        d += f" L{x:g} {y:g}"
        more = {"stroke-dasharray": dash} if dash else {}
        self.put(
            "wires", "path", **{"class": "wire"}, d=d, fill="none", stroke=stroke, stroke_width=f"{width:g}", **more
        )
        if head:
            dx, dy = _sign(x - points[-2][0]), _sign(y - points[-2][1])
            back, out = (x - 7 * dx, y - 7 * dy), (4 * dy, 4 * dx)
            tips = [(x, y), (back[0] + out[0], back[1] + out[1]), (back[0] - out[0], back[1] - out[1])]
            self.put("wires", "polygon", points=" ".join(f"{a:g},{b:g}" for a, b in tips), fill=stroke)

    def chip(self, x: float, y: float, carried: Flow | None, brief: bool, stroke: str = RULE) -> None:
        """What a wire carries, on it, its centre at (x, y)."""
        if carried is None:
            return
        said = carried.said(brief)
        w = text_width(said, SMALL, mono=True) + 12
        self.rect("chips", "chip", x - w / 2, y - 8.5, w, 17, 8.5, PAPER, stroke)
        self.text(x, y + 3.5, said, SMALL, INK, "middle", mono=True)

    def svg(self, title: str, margin: float) -> str:
        w, h = self.right + margin, self.bottom + margin
        body = "\n".join("\n".join(self.shapes[layer]) for layer in self.LAYERS)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:g} {h:g}" width="{w:g}" height="{h:g}">'
        paper = f'<rect class="paper" width="{w:g}" height="{h:g}" rx="18" fill="{PAPER}"/>'
        return f"{head}\n<title>{escape(harmless(title))}</title>\n{paper}\n{body}\n</svg>\n"


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def _toward(corner: tuple[float, float], other: tuple[float, float], most: float = 8) -> str:
    """The point so far from a corner, on the way to the other."""
    (x, y), dx, dy = corner, other[0] - corner[0], other[1] - corner[1]
    near = min(most, max(abs(dx), abs(dy)) / 2)
    return f"{x + near * _sign(dx):g} {y + near * _sign(dy):g}"


class _End(NamedTuple):
    """Where something flows on, and what. told: a chip further up says it."""

    x: float
    y: float
    carries: Flow | None
    told: bool = False
    stroke: str = WIRE


class _Zoomed(NamedTuple):
    """A box whose inside stands in a panel, where it is, and what it reads."""

    box: Box
    left: float
    right: float
    top: float
    bottom: float
    reads: Flow | None


class _Drawing:
    """Places boxes downwards. panel: whose boxes fill its width; memory: what an encoder hands across into it."""

    def __init__(self, ink: _Ink, marked: frozenset[str], panel: bool = False, memory: Flow | None = None):
        self.ink, self.marked, self.panel, self.memory = ink, marked, panel, memory
        self.zoomed: list[_Zoomed] = []
        self.crosses: list[tuple[float, float]] = []  # left edges of cross attentions

    # Widths

    def width(self, sequence: Sequence[Box], branch: bool = False) -> float:
        """What a sequence needs."""
        return max((self.need(box, branch) for box in sequence), default=84.0)

    def need(self, box: Box, branch: bool) -> float:
        if box.kind in ("split", "residual"):
            several = len(box.branches) > 1
            return sum(self.width(one, branch or several) for one in box.branches) + 20 * (len(box.branches) - 1)
        if box.kind == "layer":
            return self.width(box.branches[0]) + 2 * (RAIL + 14 + SIDE)  # the axis in the middle
        if not self.panel:
            return BRANCH if branch else BOX
        chip = text_width(box.gives.said(brief=True), SMALL, mono=True) + 22 if box.gives else 0
        weights = max((text_width(one, SMALL, mono=True) for one in _weights(box)), default=0)
        number = text_width(_number(box, False), TEXT) if box.parameters else 0
        title = min(text_width(box.title, TITLE, bold=True), 150)
        return max(LEAST, chip, weights + 2 * PAD, title + number + 2.5 * PAD)

    # Sequences

    def sequence(
        self, several: Sequence[Box], left: float, width: float, y: float, ends: list[_End]
    ) -> tuple[float, list[_End]]:
        """Boxes in a row within [left, left + width], below y; returns where it ends, and what flows on."""
        axis = left + width / 2
        dot: _End | None = None
        for box in several:
            if box.kind in ("split", "residual"):
                if box.kind == "residual":
                    dot = _End(axis, y + FORK, ends[0].carries)
                    self.ink.wire([(ends[0].x, ends[0].y), (axis, dot.y)])
                    y, ends = dot.y, [dot]
                y, ends = self.beside(box, left, width, y, ends)
            elif box.kind == "add":
                y, ends = self.join(box, left, axis, y, ends, dot)
            elif box.kind == "layer":
                y, ends = self.frame(box, left, width, y, ends)
            elif box.kind == "aside":
                self.aside(box, left + width, y)
            elif box.kind in ("input", "output"):
                y, ends = self.pill(box, axis, y, ends)
            else:
                y, ends = self.leaf(box, left, width, y, ends)
        return y, ends

    def arrow(self, end: _End, x: float, y: float) -> None:
        """From an end down to (x, y), what it carries said on the way unless it was."""
        self.ink.wire([(end.x, end.y), (x, y)], end.stroke, head=True)
        if not end.told:
            self.ink.chip(x, y - GAP / 2 - 1, end.carries, self.panel)

    def beside(self, box: Box, left: float, width: float, y: float, ends: list[_End]) -> tuple[float, list[_End]]:
        """Branches side by side, fed by one wire that forks where several read it."""
        if len(box.branches) == 1:
            return self.sequence(box.branches[0], left, width, y, ends)
        columns = self.columns(box, left, width)
        heads = [self.heads(branch, x, w) for branch, x, w in columns]
        flat = [head for group in heads for head in group]
        if len(ends) != len(flat):
            y, ends = self.fork(flat, y, ends[0])
        lowest, flowing, taken = y, [], 0
        for (branch, x, w), group in zip(columns, heads):
            below, live = self.sequence(branch, x, w, y, ends[taken : taken + len(group)])
            taken += len(group)
            lowest, flowing = max(lowest, below), flowing + live
        return lowest, flowing

    def columns(self, box: Box, left: float, width: float) -> list[tuple[Sequence[Box], float, float]]:
        """Its branches, each with its left edge and its width: what it needs, and a share of what is left."""
        widths = [self.width(branch, True) for branch in box.branches]
        spare, found = (width - sum(widths) - 20 * (len(widths) - 1)) / len(widths), []
        for branch, own in zip(box.branches, widths):
            found.append((branch, left, own + spare))
            left += own + spare + 20
        return found

    def heads(self, branch: Sequence[Box], left: float, width: float) -> list[tuple[float, Box | None]]:
        """Where a branch is entered: the axes of its first boxes."""
        if branch and branch[0].kind == "split":
            return [head for column in self.columns(branch[0], left, width) for head in self.heads(*column)]
        return [(left + width / 2, branch[0] if branch else None)]

    def fork(self, heads: list[tuple[float, Box | None]], y: float, end: _End) -> tuple[float, list[_End]]:
        """A trunk, what it carries, and a bus to all who read it; keys and values across are the memory's."""
        across = [x for x, box in heads if self.memory and box is not None and box.id.endswith((".k", ".v"))]
        stream = [x for x, _ in heads if x not in across]
        bus = y + GAP + 4
        trunk = sum(stream) / len(stream) if across else end.x
        for xs, at, carried, stroke in (
            (stream, trunk, end.carries, WIRE),
            (across, _middle(across), self.memory, MEMORY),
        ):
            if not xs:
                continue
            start = end.y if not across else y - 4
            self.ink.wire([(at, start), (at, bus)], stroke)
            self.ink.wire([(min(*xs, at), bus), (max(*xs, at), bus)], stroke)
            self.ink.chip(at, y + GAP / 2 - 3, carried, self.panel)
        ends = [_End(x, bus, end.carries, True, MEMORY if x in across else WIRE) for x, _ in heads]
        return bus - GAP + FORK, ends

    def join(
        self, box: Box, left: float, axis: float, y: float, ends: list[_End], dot: _End | None
    ) -> tuple[float, list[_End]]:
        """⊕: the branches from above, the residual path from the left."""
        top = y + GAP + (FORK + 6 if len(ends) > 1 else 0)
        if len(ends) > 1:
            bus = y + GAP
            for end in ends:
                self.ink.wire([(end.x, end.y), (end.x, bus), (axis, bus)])
                self.ink.chip(end.x, y + GAP / 2, end.carries, self.panel)
            self.ink.wire([(axis, bus), (axis, top)], head=True)
        else:
            self.arrow(ends[0], axis, top)
        middle = top + RADIUS
        if dot is not None:
            rail = left - RAIL
            points = [(axis, dot.y), (rail, dot.y), (rail, middle), (axis - RADIUS, middle)]
            self.ink.wire(points, RESIDUAL, 2.2, head=True)
            self.ink.put("chips", "circle", **{"class": "dot"}, cx=f"{axis:g}", cy=f"{dot.y:g}", r="3.2", fill=RESIDUAL)
            met = [
                at for _, at in self.crosses if dot.y < at < middle
            ]  # where what crosses the rail would cross its text
            x, at = rail - 6, ((met or [dot.y])[0] + middle) / 2
            turn = {"transform": f"rotate(-90 {x:g} {at:g})"}
            said = dot.carries.said(brief=True) if dot.carries else ""
            self.ink.text(x, at, said, SMALL - bool(met), RESIDUAL, "middle", True, kind="rail", **turn)
        place = {"cx": f"{axis:g}", "cy": f"{middle:g}", "r": f"{RADIUS:g}"}
        self.ink.put("boxes", "circle", **{"class": "sum"}, **place, fill="#ffffff", stroke=RESIDUAL, stroke_width="2")
        plus = f"M{axis - 5:g} {middle:g} h10 M{axis:g} {middle - 5:g} v10"
        self.ink.put("boxes", "path", d=plus, stroke=RESIDUAL, stroke_width="2")
        if box.lines:
            self.ink.text(axis + RADIUS + 8, middle + 4, " · ".join(box.lines), SMALL, FAINT, kind="beside")
        return top + 2 * RADIUS, [_End(axis, top + 2 * RADIUS, box.gives)]

    def frame(self, box: Box, left: float, width: float, y: float, ends: list[_End]) -> tuple[float, list[_End]]:
        """A layer opened up, in a frame; copies behind it where it stands for many."""
        axis, top = left + width / 2, y + GAP
        inner = self.width(box.branches[0])
        w = inner + RAIL + 14 + 2 * SIDE
        x = axis - inner / 2 - RAIL - 14 - SIDE
        half = axis - x - 28
        left_lines = wrapped(self.title(box), half, TITLE, bold=True)
        right_lines = flowed(_total(box), x + w - axis - 28, TEXT, " ")
        begin = top + 14 + LINE_HEIGHT * max(len(left_lines), len(right_lines))
        self.ink.wire([(axis, ends[0].y), (axis, begin)])
        self.ink.chip(axis, top - GAP / 2 - 1, ends[0].carries, False)
        below, live = self.sequence(
            box.branches[0], axis - inner / 2, inner, begin, [_End(axis, begin, ends[0].carries)]
        )
        bottom = below + 18
        behind = 10 if box.times > 1 else 0
        self.ink.wire([(axis, live[0].y), (axis, bottom + behind)])
        fill, edge = COLOURS["layer"]
        for off in (10, 5) if box.times > 1 else ():
            self.ink.rect("frames", "copy", x + off, top + off, w, bottom - top, 14, fill, RULE)
        self.ink.rect("frames", "frame", x, top, w, bottom - top, 14, fill, edge, stroke_width="1.3")
        for i, said in enumerate(left_lines):
            self.ink.text(x + 16, top + 22 + i * LINE_HEIGHT, said, TITLE, self.ink_of(box), bold=True)
        for i, said in enumerate(right_lines):
            self.ink.text(x + w - 16, top + 22 + i * LINE_HEIGHT, said, TEXT, FAINT, "end")
        return bottom + behind, [_End(axis, bottom + behind, box.gives)]

    # Boxes

    def title(self, box: Box) -> str:
        return ("≠ " if box.id in self.marked else "") + box.title

    def ink_of(self, box: Box) -> str:
        return DIFFERS if box.id in self.marked else INK

    def pill(self, box: Box, axis: float, y: float, ends: list[_End]) -> tuple[float, list[_End]]:
        """What goes in or comes out."""
        top = y + GAP if ends else y
        for end in ends:
            self.arrow(end, axis, top)
        w = text_width(box.title, TITLE, bold=True) + 32
        self.ink.rect("boxes", "box", axis - w / 2, top, w, 26, 13, INK, INK)
        self.ink.text(axis, top + 17.5, box.title, TITLE, "#ffffff", "middle", bold=True)
        return top + 26, [_End(axis, top + 26, box.gives)]

    def leaf(self, box: Box, left: float, width: float, y: float, ends: list[_End]) -> tuple[float, list[_End]]:
        """A box within the width, below the arrows that end on it."""
        axis, top = left + width / 2, y + GAP
        w = width if self.panel else min(width, BOX)
        for end in ends:
            self.arrow(end, end.x if self.panel else axis, top)
        bottom = self.box(box, axis - w / 2, top, w)
        if box.branches:
            self.zoomed.append(_Zoomed(box, axis - w / 2, axis + w / 2, top, bottom, ends[0].carries))
        if box.kind == "cross" and not self.panel:
            self.crosses.append((axis - w / 2, (top + bottom) / 2))
        return bottom, [_End(axis, bottom, box.gives)]

    def aside(self, box: Box, right: float, y: float) -> None:
        """A table beside the flow, right of the frame of the layers that read it."""
        edge = right - RAIL - 14
        self.box(box, edge + 34, y - 46, ASIDE)
        self.ink.wire([(edge + 34, y + GAP + 16), (edge + 1, y + GAP + 16)], dash="4 3", head=True)

    def box(self, box: Box, x: float, y: float, w: float) -> float:
        """Title and number, then what there is to say; returns the lower edge."""
        fill, edge = COLOURS[box.kind]
        room, number = w - 2 * PAD, _number(box, not self.panel)
        title = self.title(box)
        beside = text_width(title, TITLE, bold=True) + text_width(number, TEXT) + PAD <= room
        titles = wrapped(title, room, TITLE, bold=True)
        said = [(line, SMALL, True) for line in flowed(_weights(box), room, SMALL, "  ", True)] if self.panel else []
        if not self.panel or box.kind == "experts":
            said = [(line, TEXT, False) for line in flowed(box.lines, room, TEXT)]
        if number and not beside:
            said.insert(0, (number, TEXT, False))
        h = 2 * 9 + LINE_HEIGHT * (len(titles) + len(said)) - 2
        differs = box.id in self.marked
        for off in (8, 4) if box.kind == "folded" and box.times > 1 else ():
            self.ink.rect("frames", "copy", x + off, y + off, w, h, 9, fill, edge)
        self.ink.rect(
            "boxes", "box", x, y, w, h, 9, fill, DIFFERS if differs else edge, stroke_width="2" if differs else "1.3"
        )
        at = y + 9 + 11.5
        for line in titles:
            self.ink.text(x + PAD, at, line, TITLE, self.ink_of(box), bold=True)
            at += LINE_HEIGHT
        if number and beside:
            self.ink.text(x + w - PAD, at - LINE_HEIGHT, number, TEXT, FAINT, "end")
        for line, size, mono in said:
            self.ink.text(x + PAD, at, line, size, FAINT, mono=mono)
            at += LINE_HEIGHT
        return y + h


def _middle(xs: Sequence[float]) -> float:
    return sum(xs) / len(xs) if xs else 0.0


def _weights(box: Box) -> list[str]:
    return [] if box.kind == "experts" else [weight.said for weight in box.weights]


def _number(box: Box, long: bool) -> str:
    """A box's parameters; nothing for a step that has none."""
    if box.tied_to:
        return f"{box.parameters:,} new"
    if box.kind in ("step", "add", "input", "output") and not box.parameters:
        return ""
    if box.times > 1:
        return f"{box.times:,} × {box.parameters:,}"
    return exact(box.parameters) if long else f"{box.parameters:,}"


def _total(box: Box) -> list[str]:
    """What so many layers count."""
    if box.times == 1:
        return [f"{box.parameters:,}"]
    return [f"{box.times:,} × {box.parameters:,}", f"= {box.times * box.parameters:,}"]


def _figure(ink: _Ink, figure: Figure, x: float, y: float) -> float:
    """One model: an encoder's panels left of it, a decoder's right of it; returns the right edge."""
    marked, model, two = frozenset(figure.differing), figure.model, len(figure.stacks) > 1
    ink.text(x, y + 18, model.name, 20, bold=True, kind="heading")
    ink.text(x, y + 38, f"{exact(model.parameters)} parameters", TEXT, FAINT, kind="heading")
    top, left = y + (80 if two else 66), x
    memory: _End | None = None
    gutter = 0.0
    for stack in figure.stacks:
        [inside] = stack.branches
        reads = two and stack is figure.stacks[0]
        drawing = _Drawing(ink, marked)
        if reads:
            left += _panels_width(inside, marked) + BETWEEN
        width = drawing.width(inside)
        if two:
            ink.text(left, top - 4, stack.title, 15, bold=True, kind="heading")
            ink.text(left + width, top - 4, f"{stack.parameters:,} parameters", TEXT, FAINT, "end", kind="heading")
        below, live = drawing.sequence(inside, left, width, top + 14 * two, [])
        if memory is not None:
            _lead_across(ink, memory, gutter, drawing.crosses)
        right = left + width + (ASIDE if any(box.kind == "aside" for box in inside) else 0)
        if reads:
            _panels(ink, drawing, marked, x, top, below, None, before=True)
            memory, gutter = live[0], right + 24
            left = right + BETWEEN + 4
            continue
        right = _panels(ink, drawing, marked, right + BETWEEN, top, below, memory and memory.carries)
    return max(right, x + text_width(model.name, 20, bold=True))


def _lead_across(ink: _Ink, end: _End, gutter: float, crosses: list[tuple[float, float]]) -> None:
    """The encoder's vectors: from its end through the gutter to every cross attention."""
    below = end.y + GAP
    for x, y in crosses:
        ink.wire([(end.x, end.y), (end.x, below), (gutter, below), (gutter, y), (x, y)], MEMORY, 1.8, head=True)
    ink.chip((end.x + gutter) / 2, below, end.carries, False, MEMORY)
    ink.bottom = max(ink.bottom, below + 12)


def _panels_width(several: Sequence[Box], marked: frozenset[str]) -> float:
    """What the panels of a stack need."""
    holders = [box for box in boxes(several) if box.kind in ("attention", "cross", "mlp")]
    return max((_panel(_Ink(), box, 0, 0, marked, None, None)[0] for box in holders), default=-BETWEEN)


def _panels(ink: _Ink, drawing: _Drawing, marked: frozenset[str], left: float, top: float, bottom: float,
            memory: Flow | None, before: bool = False) -> float:  # fmt: skip
    """What is inside each attention and MLP, as near to its own height as there is room; returns the right edge.

    before: the panels stand left of the stack.
    """
    shown: list[_Zoomed] = []
    for one in drawing.zoomed:
        if all(_inside(one.box) != _inside(other.box) for other in shown):
            shown.append(one)
    if not shown:
        return left - BETWEEN
    trials = [_panel(_Ink(), one.box, 0, 0, marked, one.reads, memory) for one in shown]
    width, heights = max(w for w, _ in trials), [h for _, h in trials]
    tops, at = [], top
    for one, height in zip(shown, heights):
        at = max(at, (one.top + one.bottom - height) / 2)
        tops.append(at)
        at += height + 22
    at = max(bottom, top + sum(heights) + 22 * (len(heights) - 1))
    for i in reversed(range(len(tops))):
        tops[i] = min(tops[i], at - heights[i])
        at = tops[i] - 22
    for one, y, height in zip(shown, tops, heights):
        near, far = (one.left, left + width) if before else (one.right, left)
        corners = [(near, one.top + 6), (far, y + 10), (far, y + height - 10), (near, one.bottom - 6)]
        points = " ".join(f"{a:g},{b:g}" for a, b in corners)
        fill, _ = COLOURS[one.box.kind]
        ink.put("zooms", "polygon", **{"class": "zoom"}, points=points, fill=fill, fill_opacity="0.45")
        _panel(ink, one.box, left, y, marked, one.reads, memory, width)
    return left + width


def _inside(box: Box) -> list[tuple[str, str, int]]:
    return [(one.kind, one.title, one.parameters) for one in boxes([box])]


def _panel(ink: _Ink, box: Box, x: float, y: float, marked: frozenset[str], reads: Flow | None, memory: Flow | None,
           width: float = 0) -> tuple[float, float]:  # fmt: skip
    """A panel with a holder's inside; returns its size."""
    across = memory if box.kind == "cross" else None
    drawing = _Drawing(ink, marked, panel=True, memory=across)
    [inside] = box.branches
    inner = max(
        drawing.width(inside), text_width(box.title, TITLE, bold=True) + text_width(exact(box.parameters), TEXT) + 40
    )
    width = max(width, inner + 2 * SIDE)
    axis = x + width / 2
    begin = y + 40
    if across is not None:
        ink.text(x + SIDE, begin + 2, "from the decoder", SMALL, FAINT, kind="beside")
        ink.text(x + width - SIDE, begin + 2, "from the encoder", SMALL, FAINT, "end", kind="beside")
        begin += 14
    below, live = drawing.sequence(inside, axis - inner / 2, inner, begin, [_End(axis, begin - 8, reads)])
    ink.wire([(axis, live[0].y), (axis, below + GAP)], head=True)
    ink.chip(axis, below + GAP / 2 - 2, live[0].carries, True)
    height = below + GAP + 8 - y
    fill, edge = COLOURS[box.kind]
    ink.rect("zooms", "panel", x, y, width, height, 14, fill, edge, stroke_width="1.3")
    ink.text(x + 16, y + 24, f"inside: {box.title}", TITLE, bold=True)
    ink.text(x + width - 16, y + 24, exact(box.parameters), TEXT, FAINT, "end")
    return width, height


def to_svg(report: DrawReport) -> str:
    """The figures side by side, what the letters stand for below them."""
    ink, x, margin = _Ink(), 36.0, 36.0
    legends = []
    for figure in report.figures:
        right = _figure(ink, figure, x, margin)
        legends.append((x, flowed(figure.legend, right - x, TEXT)))
        x = right + 56
    for left, lines in legends:
        for i, line in enumerate(lines):
            ink.text(left, ink.bottom + 34 + i * LINE_HEIGHT, line, TEXT, FAINT, kind="legend")
    ink.right = max(ink.right, x - 56)
    ink.bottom += 24 + LINE_HEIGHT * max(len(lines) for _, lines in legends)
    return ink.svg(" and ".join(figure.model.name for figure in report.figures), margin)


def write_svg(path: Path, report: DrawReport) -> None:
    """Raises GptcliError where the file can't be written."""
    write(path, lambda draft: draft.write_text(to_svg(report), encoding="utf-8"))
