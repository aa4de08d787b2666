"""`draw -o x.svg`: the drawing as a picture. What is inside an attention or an MLP stands in a panel beside the stack.

Sizes are pixels, y grows downwards. Every text is measured by widths that no common font exceeds, so that it fits where
it stands whichever font shows it. Colours are attributes and arrowheads are shapes, for programs that know no more.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from gptcli.render.draw import End, Walk, flowed, numbers
from gptcli.render.files import write
from gptcli.render.screen import exact
from gptcli.render.signs import harmless
from gptcli.report.draw import SIDE_BY_SIDE, Box, DrawReport, Figure, Flow, boxes

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
NARROW, BROAD = frozenset("iljI.,:;|!'·()[]/ ft-r"), frozenset("mwMW@%→…")


class Font(NamedTuple):
    """How a text looks; size: pixels."""

    size: float
    bold: bool = False
    mono: bool = False

    def width(self, text: str) -> float:
        """Pixels that a text takes at most, in any of the fonts that are asked for."""
        if self.mono:
            return 0.63 * self.size * len(text)
        each = (
            0.42 if c in NARROW else 1.0 if c in BROAD else 0.66 if c.islower() or c.isdigit() else 0.86 for c in text
        )
        return self.size * sum(each) * (1.1 if self.bold else 1.0)

    def wrapped(self, text: str, room: float) -> list[str]:
        """Lines of words within so many pixels; a word that is longer is broken."""
        pieces = []
        for word in text.split():
            while self.width(word) > room:
                cut = next(n for n in range(len(word), 0, -1) if n == 1 or self.width(word[:n]) <= room)
                pieces.append(word[:cut])
                word = word[cut:]
            pieces += [word] * bool(word)
        return flowed(pieces, room, " ", self.width, lambda piece, _: [piece])

    def flowed(self, chunks: Iterable[str], room: float, gap: str = " · ") -> list[str]:
        """Chunks in lines within so many pixels, `gap` between them."""
        return flowed(chunks, room, gap, self.width, self.wrapped)


MODEL, STACK, TITLE = Font(20, bold=True), Font(15, bold=True), Font(13, bold=True)
TEXT, SMALL, SIZES = Font(11.5), Font(10), Font(10, mono=True)


class _Ink:
    """Collects shapes in layers, the first below the others."""

    LAYERS = ("frames", "zooms", "wires", "boxes", "chips", "texts")

    def __init__(self):
        self.shapes: dict[str, list[str]] = {layer: [] for layer in self.LAYERS}
        self.right = self.bottom = 0.0

    def put(self, layer: str, tag: str, body: str = "", **attributes: float | str) -> None:
        """An element; of an attribute's name, `_` is `-` there, and none at its end (`class_`)."""
        said = ""
        for name, value in attributes.items():
            value = value if isinstance(value, str) else f"{value:g}"
            said += f" {name.rstrip('_').replace('_', '-')}={quoteattr(value)}"
        self.shapes[layer].append(f"<{tag}{said}>{body}</{tag}>" if body else f"<{tag}{said}/>")

    def rect(self, layer: str, kind: str, x: float, y: float, w: float, h: float, r: float, fill: str, stroke: str,
             **more: float) -> None:  # fmt: skip
        self.right, self.bottom = max(self.right, x + w), max(self.bottom, y + h)
        self.put(layer, "rect", class_=kind, x=x, y=y, width=w, height=h, rx=r, fill=fill, stroke=stroke, **more)

    def text(self, x: float, y: float, said: str, font: Font, fill: str = INK, anchor: str = "start", kind: str = "in",
             **more: str) -> None:  # fmt: skip
        place = {"class_": kind, "x": x, "y": y, "text_anchor": anchor}
        look = {"font_size": font.size, "font_family": MONO if font.mono else SANS}
        look |= {"font_weight": "600"} if font.bold else {}
        self.put("texts", "text", escape(harmless(said)), **place, **look, fill=fill, **more)

    def lines(self, x: float, y: float, lines: Iterable[str], font: Font, *look: str, kind: str = "in") -> None:
        """Texts below one another."""
        for i, said in enumerate(lines):
            self.text(x, y + i * LINE_HEIGHT, said, font, *look, kind=kind)

    def wire(self, points: Sequence[tuple[float, float]], stroke: str = WIRE, width: float = 1.4, head: bool = False,
             **more: str) -> None:  # fmt: skip
        """A line through the points with rounded corners, and an arrowhead at its end."""
        d = "M{:g} {:g}".format(*points[0])
        for before, (x, y), after in zip(points, points[1:-1], points[2:]):
            d += f" L{_toward((x, y), before)} Q{x:g} {y:g} {_toward((x, y), after)}"
        x, y = points[-1]
        d += f" L{x:g} {y:g}"
        self.put("wires", "path", class_="wire", d=d, fill="none", stroke=stroke, stroke_width=width, **more)
        if head:
            dx, dy = _sign(x - points[-2][0]), _sign(y - points[-2][1])
            back, out = (x - 7 * dx, y - 7 * dy), (4 * dy, 4 * dx)
            tips = [(x, y), (back[0] + out[0], back[1] + out[1]), (back[0] - out[0], back[1] - out[1])]
            self.put("wires", "polygon", points=_points(tips), fill=stroke)

    def chip(self, x: float, y: float, carried: Flow | None, brief: bool, stroke: str = RULE) -> None:
        """What a wire carries, on it, its centre at (x, y)."""
        if carried is None:
            return
        said = carried.said(brief)
        w = SIZES.width(said) + 12
        self.rect("chips", "chip", x - w / 2, y - 8.5, w, 17, 8.5, PAPER, stroke)
        self.text(x, y + 3.5, said, SIZES, INK, "middle")

    def svg(self, title: str, margin: float) -> str:
        w, h = self.right + margin, self.bottom + margin
        body = "\n".join("\n".join(self.shapes[layer]) for layer in self.LAYERS)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:g} {h:g}" width="{w:g}" height="{h:g}">'
        paper = f'<rect class="paper" width="{w:g}" height="{h:g}" rx="18" fill="{PAPER}"/>'
        return f"{head}\n<title>{escape(harmless(title))}</title>\n{paper}\n{body}\n</svg>\n"


def _points(corners: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in corners)


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def _toward(corner: tuple[float, float], other: tuple[float, float], most: float = 8) -> str:
    """The point so far from a corner, on the way to the other."""
    (x, y), dx, dy = corner, other[0] - corner[0], other[1] - corner[1]
    near = min(most, max(abs(dx), abs(dy)) / 2)
    return f"{x + near * _sign(dx):g} {y + near * _sign(dy):g}"


class _Column(NamedTuple):
    """What a sequence of boxes may take of the width."""

    left: float
    width: float

    @property
    def axis(self) -> float:
        return self.left + self.width / 2

    def narrowed(self, width: float) -> "_Column":
        return _Column(self.axis - width / 2, width)


class _Zoomed(NamedTuple):
    """A box whose inside stands in a panel, where it is, and what it reads."""

    box: Box
    left: float
    right: float
    top: float
    bottom: float
    reads: Flow | None


class _Drawing(Walk):
    """Places boxes downwards. panel: whose boxes fill its width; memory: what an encoder hands across into it."""

    def __init__(self, ink: _Ink, marked: Sequence[str], panel: bool = False, memory: Flow | None = None):
        self.ink, self.marked, self.panel, self.memory = ink, marked, panel, memory
        self.zoomed: list[_Zoomed] = []
        self.dot: End | None = None  # where the residual path leaves that the next ⊕ ends

    @property
    def crosses(self) -> list[tuple[float, float]]:
        """The middles of cross attentions' left edges."""
        return [(one.left, (one.top + one.bottom) / 2) for one in self.zoomed if one.box.kind == "cross"]

    # Widths

    def width(self, sequence: Sequence[Box], branch: bool = False) -> float:
        """What a sequence needs."""
        return max((self.need(box, branch) for box in sequence), default=84.0)

    def need(self, box: Box, branch: bool) -> float:
        if box.kind in SIDE_BY_SIDE:
            widths = [self.width(one, branch or len(box.branches) > 1) for one in box.branches]
            return sum(widths) + 20 * (len(widths) - 1)
        if box.kind == "layer":
            return self.width(box.branches[0]) + 2 * (RAIL + 14 + SIDE)  # the axis in the middle
        if not self.panel:
            return BRANCH if branch else BOX
        chip = SIZES.width(box.gives.said(brief=True)) + 22
        weights = max(map(SIZES.width, _weights(box)), default=0)
        number = TEXT.width(_number(box, False)) if box.parameters else 0
        title = min(TITLE.width(box.title), 150)
        return max(LEAST, chip, weights + 2 * PAD, title + number + 2.5 * PAD)

    # Sequences

    def arrow(self, end: End, x: float, y: float) -> None:
        """From an end down to (x, y), what it carries said on the way unless it was."""
        self.ink.wire([(end.x, end.y), (x, y)], MEMORY if end.memory else WIRE, head=True)
        if not end.told:
            self.ink.chip(x, y - GAP / 2 - 1, end.carries, self.panel)

    def beside(self, box: Box, at: _Column, y: float, ends: list[End]) -> tuple[float, list[End]]:
        """Branches side by side, fed by one wire that forks where several read it."""
        if box.kind == "residual":
            self.dot = End(at.axis, y + FORK, ends[0].carries)
            self.ink.wire([(ends[0].x, ends[0].y), (at.axis, self.dot.y)])
            y, ends = self.dot.y, [self.dot]
        columns = self.columns(box, at)
        heads = [self.heads(*column) for column in columns]
        if len(ends) != sum(map(len, heads)):
            y, ends = self.fork([head for group in heads for head in group], y, ends[0])
        lowest, flowing, waiting = y, [], iter(ends)
        for (branch, column), group in zip(columns, heads):
            below, live = self.sequence(branch, column, y, [next(waiting) for _ in group])
            lowest, flowing = max(lowest, below), flowing + live
        return lowest, flowing

    def columns(self, box: Box, at: _Column) -> list[tuple[list[Box], _Column]]:
        """Its branches, each with what it needs of the width, and a share of what is left."""
        widths = [self.width(branch, True) for branch in box.branches]
        spare, left, found = (at.width - sum(widths) - 20 * (len(widths) - 1)) / len(widths), at.left, []
        for branch, own in zip(box.branches, widths):
            found.append((branch, _Column(left, own + spare)))
            left += own + spare + 20
        return found

    def heads(self, branch: Sequence[Box], at: _Column) -> list[tuple[float, Box | None]]:
        """Where a branch is entered: the axes of its first boxes."""
        if branch and branch[0].kind == "split":
            return [head for column in self.columns(branch[0], at) for head in self.heads(*column)]
        return [(at.axis, branch[0] if branch else None)]

    def fork(self, heads: list[tuple[float, Box | None]], y: float, end: End) -> tuple[float, list[End]]:
        """A trunk, what it carries, and a bus to all who read it; keys and values across are the memory's."""
        bus = y + GAP + 4
        across = [x for x, box in heads if self.memory and box is not None and box.id.endswith((".k", ".v"))]
        stream = [x for x, _ in heads if x not in across]
        trunks = [(stream, end.carries, WIRE)] + [(across, self.memory, MEMORY)] * bool(across)
        for xs, carried, stroke in trunks:
            at, start = (sum(xs) / len(xs), y - 4) if across else (end.x, end.y)
            self.ink.wire([(at, start), (at, bus)], stroke)
            self.ink.wire([(min(*xs, at), bus), (max(*xs, at), bus)], stroke)
            self.ink.chip(at, y + GAP / 2 - 3, carried, self.panel)
        ends = [End(x, bus, end.carries, told=True, memory=x in across) for x, _ in heads]
        return bus - GAP + FORK, ends

    def join(self, box: Box, at: _Column, y: float, ends: list[End]) -> float:
        """⊕: the branches from above, the residual path from the left."""
        ink, axis, bus = self.ink, at.axis, y + GAP
        top = bus
        if len(ends) == 1:
            self.arrow(ends[0], axis, top)
        else:
            top = bus + FORK + 6
            for end in ends:
                ink.wire([(end.x, end.y), (end.x, bus), (axis, bus)])
                ink.chip(end.x, y + GAP / 2, end.carries, self.panel)
            ink.wire([(axis, bus), (axis, top)], head=True)
        middle = top + RADIUS
        self.rail(at, middle)
        ink.put("boxes", "circle", class_="sum", cx=axis, cy=middle, r=RADIUS, fill="#ffffff", stroke=RESIDUAL,
                stroke_width=2)  # fmt: skip
        plus = f"M{axis - 5:g} {middle:g} h10 M{axis:g} {middle - 5:g} v10"
        ink.put("boxes", "path", d=plus, stroke=RESIDUAL, stroke_width=2)
        if box.lines:
            ink.text(axis + RADIUS + 8, middle + 4, " · ".join(box.lines), SMALL, FAINT, kind="beside")
        return top + 2 * RADIUS

    def rail(self, at: _Column, end: float) -> None:
        """The residual path, from where it leaves down left of the boxes to a ⊕, and what it carries."""
        axis, y, carried = at.axis, self.dot.y, self.dot.carries
        x = at.left - RAIL
        self.ink.wire([(axis, y), (x, y), (x, end), (axis - RADIUS, end)], RESIDUAL, 2.2, head=True)
        self.ink.put("chips", "circle", class_="dot", cx=axis, cy=y, r=3.2, fill=RESIDUAL)
        # What crosses the rail would cross its text.
        met = [crossed for _, crossed in self.crosses if y < crossed < end]
        x, middle = x - 6, (([*met, y])[0] + end) / 2
        font = SIZES._replace(size=SIZES.size - bool(met))
        turn = f"rotate(-90 {x:g} {middle:g})"
        self.ink.text(x, middle, carried.said(brief=True), font, RESIDUAL, "middle", "rail", transform=turn)

    def frame(self, box: Box, at: _Column, y: float, ends: list[End]) -> float:
        """A layer opened up, in a frame; copies behind it where it stands for many."""
        ink, axis, top = self.ink, at.axis, y + GAP
        inner = at.narrowed(self.width(box.branches[0]))
        x, w = inner.left - RAIL - 14 - SIDE, inner.width + RAIL + 14 + 2 * SIDE
        titles = TITLE.wrapped(self.title(box), axis - x - 28)
        total = TEXT.flowed(_total(box), x + w - axis - 28, " ")
        begin = top + 14 + LINE_HEIGHT * max(len(titles), len(total))
        ink.wire([(axis, ends[0].y), (axis, begin)])
        ink.chip(axis, top - GAP / 2 - 1, ends[0].carries, False)
        below, live = self.sequence(box.branches[0], inner, begin, [End(axis, begin, ends[0].carries)])
        bottom = below + 18
        behind = (10, 5) if box.times > 1 else ()
        end = bottom + max(behind, default=0)
        ink.wire([(axis, live[0].y), (axis, end)])
        fill, edge = COLOURS["layer"]
        for off in behind:
            ink.rect("frames", "copy", x + off, top + off, w, bottom - top, 14, fill, RULE)
        ink.rect("frames", "frame", x, top, w, bottom - top, 14, fill, edge, stroke_width=1.3)
        ink.lines(x + 16, top + 22, titles, TITLE, self.ink_of(box))
        ink.lines(x + w - 16, top + 22, total, TEXT, FAINT, "end")
        return end

    # Boxes

    def title(self, box: Box) -> str:
        return ("≠ " if box.id in self.marked else "") + box.title

    def ink_of(self, box: Box) -> str:
        return DIFFERS if box.id in self.marked else INK

    def pill(self, box: Box, at: _Column, y: float, ends: list[End]) -> float:
        """What goes in or comes out."""
        axis, top = at.axis, y + GAP if ends else y
        for end in ends:
            self.arrow(end, axis, top)
        w = TITLE.width(box.title) + 32
        self.ink.rect("boxes", "box", axis - w / 2, top, w, 26, 13, INK, INK)
        self.ink.text(axis, top + 17.5, box.title, TITLE, "#ffffff", "middle")
        return top + 26

    def leaf(self, box: Box, at: _Column, y: float, ends: list[End]) -> float:
        """A box within the width, below the arrows that end on it."""
        top = y + GAP
        left, width = at if self.panel else at.narrowed(min(at.width, BOX))
        for end in ends:
            self.arrow(end, end.x if self.panel else at.axis, top)
        bottom = self.box(box, left, top, width)
        if box.branches:
            self.zoomed.append(_Zoomed(box, left, at.axis + width / 2, top, bottom, ends[0].carries))
        return bottom

    def aside(self, box: Box, at: _Column, y: float, ends: list[End]) -> tuple[float, list[End]]:
        """A table beside the flow, right of the frame of the layers that read it."""
        edge, level = at.left + at.width - RAIL - 14, y + GAP + 16
        self.box(box, edge + 34, y - 46, ASIDE)
        self.ink.wire([(edge + 34, level), (edge + 1, level)], head=True, stroke_dasharray="4 3")
        return y, ends

    def box(self, box: Box, x: float, y: float, w: float) -> float:
        """Title and number, then what there is to say; returns the lower edge."""
        ink, room, differs = self.ink, w - 2 * PAD, box.id in self.marked
        (fill, edge), title, number = COLOURS[box.kind], self.title(box), _number(box, not self.panel)
        titles = TITLE.wrapped(title, room)
        weights = SIZES.flowed(_weights(box), room, "  ") if self.panel else []
        lines = TEXT.flowed(box.lines, room) if not self.panel or box.kind == "experts" else []
        beside = TITLE.width(title) + TEXT.width(number) + PAD <= room
        above = [number] if number and not beside else []
        h = 16 + LINE_HEIGHT * len(titles + above + weights + lines)
        for off in (8, 4) if box.kind == "folded" and box.times > 1 else ():
            ink.rect("frames", "copy", x + off, y + off, w, h, 9, fill, edge)
        stroke, width = (DIFFERS, 2) if differs else (edge, 1.3)
        ink.rect("boxes", "box", x, y, w, h, 9, fill, stroke, stroke_width=width)
        at = y + 20.5
        ink.lines(x + PAD, at, titles, TITLE, self.ink_of(box))
        at += LINE_HEIGHT * len(titles)
        if number and beside:
            ink.text(x + w - PAD, at - LINE_HEIGHT, number, TEXT, FAINT, "end")
        for said, font in ((above, TEXT), (weights, SIZES), (lines, TEXT)):
            ink.lines(x + PAD, at, said, font, FAINT)
            at += LINE_HEIGHT * len(said)
        return y + h

    # Panels

    def panels(self, left: float, top: float, bottom: float, memory: Flow | None) -> float:
        """What is inside each attention and MLP, as near to its own height as there is room; returns the right edge."""
        shown: list[_Zoomed] = []
        for one in self.zoomed:
            if all(_inside(one.box) != _inside(other.box) for other in shown):
                shown.append(one)
        if not shown:
            return left - BETWEEN
        width = max(_panel_width(one.box) for one in shown)
        heights = [self.zoom(_Ink(), one, _Column(0, width), 0, memory) for one in shown]
        tops, at = [], top
        for one, height in zip(shown, heights):
            tops.append(max(at, (one.top + one.bottom - height) / 2))
            at = tops[-1] + height + 22
        at = max(bottom, top + sum(heights) + 22 * (len(heights) - 1))
        for i in reversed(range(len(tops))):
            tops[i] = min(tops[i], at - heights[i])
            at = tops[i] - 22
        for one, y, height in zip(shown, tops, heights):
            near, far = (one.left, left + width) if left < one.left else (one.right, left)
            corners = [(near, one.top + 6), (far, y + 10), (far, y + height - 10), (near, one.bottom - 6)]
            look = {"fill": COLOURS[one.box.kind][0], "fill_opacity": "0.45"}
            self.ink.put("zooms", "polygon", class_="zoom", points=_points(corners), **look)
            self.zoom(self.ink, one, _Column(left, width), y, memory)
        return left + width

    def zoom(self, ink: _Ink, one: _Zoomed, at: _Column, y: float, memory: Flow | None) -> float:
        """A panel with what is inside a box; returns its height."""
        (x, width), box, begin = at, one.box, y + 40
        inside = _Drawing(ink, self.marked, panel=True, memory=memory if box.kind == "cross" else None)
        column = at.narrowed(_panel_width(box) - 2 * SIDE)
        if inside.memory is not None:
            ink.text(x + SIDE, begin + 2, "from the decoder", SMALL, FAINT, kind="beside")
            ink.text(x + width - SIDE, begin + 2, "from the encoder", SMALL, FAINT, "end", kind="beside")
            begin += 14
        below, [end] = inside.sequence(box.branches[0], column, begin, [End(column.axis, begin - 8, one.reads)])
        ink.wire([(end.x, end.y), (end.x, below + GAP)], head=True)
        ink.chip(end.x, below + GAP / 2 - 2, end.carries, True)
        height = below + GAP + 8 - y
        ink.rect("zooms", "panel", x, y, width, height, 14, *COLOURS[box.kind], stroke_width=1.3)
        ink.text(x + 16, y + 24, f"inside: {box.title}", TITLE)
        ink.text(x + width - 16, y + 24, exact(box.parameters), TEXT, FAINT, "end")
        return height


def _panel_width(box: Box) -> float:
    title = TITLE.width(box.title) + TEXT.width(exact(box.parameters)) + 40
    return max(_Drawing(_Ink(), (), panel=True).width(box.branches[0]), title) + 2 * SIDE


def _inside(box: Box) -> list[tuple[str, str, int]]:
    return [(one.kind, one.title, one.parameters) for one in boxes([box])]


def _weights(box: Box) -> list[str]:
    return [] if box.kind == "experts" else [weight.said for weight in box.weights]


def _number(box: Box, long: bool) -> str:
    """A box's parameters; nothing for a step that has none."""
    if box.kind == "step" and not box.parameters:
        return ""
    return numbers(box)[0 if long and box.times == 1 else -1]


def _total(box: Box) -> list[str]:
    """What so many layers count."""
    total = [f"= {box.times * box.parameters:,}"] if box.times > 1 else []
    return [numbers(box)[-1], *total]


def _figure(ink: _Ink, figure: Figure, x: float, y: float) -> float:
    """One model: an encoder's panels left of it, a decoder's right of it; returns the right edge."""
    model, two, left, top = figure.model, len(figure.stacks) > 1, x, y + 66
    ink.text(x, y + 18, model.name, MODEL, kind="heading")
    ink.text(x, y + 38, f"{exact(model.parameters)} parameters", TEXT, FAINT, kind="heading")
    if two:
        holders = [box for box in boxes(figure.stacks[:1]) if box.kind in ("attention", "mlp")]
        left, top = x + max(map(_panel_width, holders)) + BETWEEN, y + 80
    memory: End | None = None
    for stack in figure.stacks:
        [inside] = stack.branches
        drawing = _Drawing(ink, figure.differing)
        column = _Column(left, drawing.width(inside))
        right = left + column.width
        if two:
            ink.text(left, top - 4, stack.title, STACK, kind="heading")
            ink.text(right, top - 4, f"{stack.parameters:,} parameters", TEXT, FAINT, "end", kind="heading")
        below, [end] = drawing.sequence(inside, column, top + 14 * two, [])
        right += ASIDE if any(box.kind == "aside" for box in inside) else 0
        if two and memory is None:
            drawing.panels(x, top, below, None)
            memory, gutter, left = end, right + 24, right + BETWEEN + 4
            continue
        if memory is not None:
            _lead_across(ink, memory, gutter, drawing.crosses)
        right = drawing.panels(right + BETWEEN, top, below, memory and memory.carries)
    return max(right, x + MODEL.width(model.name))


def _lead_across(ink: _Ink, end: End, gutter: float, crosses: list[tuple[float, float]]) -> None:
    """The encoder's vectors: from its end through the gutter to every cross attention."""
    below = end.y + GAP
    for x, y in crosses:
        ink.wire([(end.x, end.y), (end.x, below), (gutter, below), (gutter, y), (x, y)], MEMORY, 1.8, head=True)
    ink.chip((end.x + gutter) / 2, below, end.carries, False, MEMORY)
    ink.bottom = max(ink.bottom, below + 12)


def to_svg(report: DrawReport) -> str:
    """The figures side by side, what the letters stand for below them."""
    ink, x, margin, legends = _Ink(), 36.0, 36.0, []
    for figure in report.figures:
        right = _figure(ink, figure, x, margin)
        legends.append((x, TEXT.flowed(figure.legend, right - x)))
        x = right + 56
    for left, lines in legends:
        ink.lines(left, ink.bottom + 34, lines, TEXT, FAINT, kind="legend")
    ink.right = max(ink.right, x - 56)
    ink.bottom += 24 + LINE_HEIGHT * max(len(lines) for _, lines in legends)
    return ink.svg(" and ".join(figure.model.name for figure in report.figures), margin)


def write_svg(path: Path, report: DrawReport) -> None:
    """Raises GptcliError where the file can't be written."""
    write(path, lambda draft: draft.write_text(to_svg(report), encoding="utf-8"))
