"""How things look in a terminal: colour, numbers, columns. Nothing is cut; a terminal wraps what is long."""

import io
import math
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gptcli.render.signs import harmless, printable

Part = str | tuple[str, str]  # a text, or (text, style)
TRAILING = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")  # blanks at a line's end, and what ends a colour among them


class Screen:
    """Collects what a command prints, for one stream.

    color: auto, always or never; digits: decimals of a number; full: print every number of a vector. width: columns of
    the terminal; None in a pipe, where a line may be as long as it needs.
    """

    def __init__(self, stream: TextIO, color: str = "auto", digits: int = 4, full: bool = False):
        terminal = stream.isatty()
        colored = color == "always" or (
            color == "auto" and terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        self.stream, self.digits, self.full = stream, digits, full
        self.width = shutil.get_terminal_size().columns if terminal else None
        self.written: list[str] = []
        self.console = Console(
            file=io.StringIO(),
            width=10_000_000,
            force_terminal=colored,
            color_system=_colors() if colored else None,
            no_color=not colored,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )

    def line(self, *parts: Part) -> None:
        """One line."""
        self._print(_text(*parts))

    def flow(self, chunks: Iterable[Sequence[Part]], gap: str, indent: int = 2) -> None:
        """Chunks in a row, `gap` apart; in a terminal, one that does not fit begins a new line."""
        line = Text()
        for parts in chunks:
            chunk = _text(*parts)
            if not line:
                line = chunk
            elif self.width is None or self._columns(line) + len(gap) + self._columns(chunk) <= self.width:
                line = Text.assemble(line, gap, chunk)
            else:
                self._print(line)
                line = Text.assemble(" " * indent, chunk)
        if line:
            self._print(line)

    def _columns(self, text: Text) -> int:
        """What a text takes in signs that the stream's encoding has."""
        return cell_len(printable(text.plain, self.stream.encoding))

    def table(
        self,
        rows: Iterable[Sequence[Part]],
        header: Sequence[str] = (),
        right: Iterable[int] = (),
        gap: int = 2,
        wrap: bool = False,
    ) -> None:
        """Columns, `gap` blanks apart; `right` are the columns of numbers. wrap: a terminal wraps the last column."""
        right, wrap = set(right), wrap and self.width is not None
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=bool(header), header_style="dim")
        rows = [[_text(cell) for cell in row] for row in rows]
        columns = max([len(header), *map(len, rows)])
        for i in range(columns):
            title = Text(harmless(header[i])) if i < len(header) else ""
            wraps = wrap and i == columns - 1
            table.add_column(title, justify="right" if i in right else "left", no_wrap=not wraps)
        for row in rows:
            table.add_row(*row)
        self._print(table, self.width if wrap else None)

    def fits(self, rows: Iterable[Sequence[Part]], header: Sequence[str], gap: int = 2) -> bool:
        """Does such a table stand in the terminal without wrapping?"""
        columns = zip(header, *rows)
        widths = [max(_text(cell).cell_len for cell in column) for column in columns]
        return self.width is None or sum(widths) + gap * (len(widths) - 1) <= self.width

    def verbatim(self, text: str) -> None:
        """A file's text as it is, to the letter where a file may take it up; harmless in a terminal."""
        self.written.append(text if self.width is None else harmless(text, keep="\n\t"))

    def _print(self, what: Text | Table, width: int | None = None) -> None:
        self.console.print(what, soft_wrap=width is None, width=width)
        lines = self.console.file.getvalue().split("\n")[:-1]
        self.written += [TRAILING.sub(lambda end: end[0].replace(" ", ""), line) + "\n" for line in lines]
        self.console.file = io.StringIO()

    def show(self) -> None:
        """Writes everything collected, in signs that the stream's encoding has."""
        self.stream.write(printable("".join(self.written), self.stream.encoding))
        self.written = []

    def number(self, x: float | None) -> str:
        return number(x, self.digits)

    def vector(self, values: Sequence[float], room: int | None = None) -> str:
        """Numbers side by side: up to eight, or all with --full, else the first few … the last that `room` holds."""
        return self.vectors([values], room, self.digits + 3)[0]

    def vectors(self, several: Sequence[Sequence[float]], room: int | None = None, least: int = 0) -> list[str]:
        """Vectors that stand below one another, each number, `least` columns wide or more, under its like."""
        texts = [[self.number(x).rjust(least) for x in values] for values in several]
        for keep in (8, 6, 5, 4, 3, 2):
            rows = [row if self.full or len(row) <= keep else _ends(row, min(keep, 6)) for row in texts]
            widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
            if self.full or room is None or sum(widths) + len(widths) - 1 <= room:
                break
        return [" ".join(text.rjust(width) for text, width in zip(row, widths)) for row in rows]


def _colors() -> str:
    """As many as the terminal says that it has; sixteen where it says nothing of any."""
    return "standard" if os.environ.get("TERM") == "dumb" else "auto"


def _ends(texts: list[str], keep: int) -> list[str]:
    """So many of the texts: the first … the last."""
    last = keep // 2
    return [*texts[: keep - last], "…", *texts[len(texts) - last :]]


def _text(*parts: Part) -> Text:
    """Parts of a line or the one part of a cell, with nothing in them that a terminal would obey."""
    return Text.assemble(*(harmless(p) if isinstance(p, str) else (harmless(p[0]), p[1]) for p in parts))


def number(x: float | None, digits: int) -> str:
    """Fixed decimals; a number too small or too large for them in scientific notation; -0 as 0."""
    if x is None:
        return ""
    if not math.isfinite(x):
        return str(x)
    if x != 0 and (abs(x) < 0.5 * 10**-digits or abs(x) >= 1e7):
        return f"{x:.{max(digits - 1, 0)}e}"
    return f"{x + 0.0:.{digits}f}"


def short(count: int) -> str:
    """124,439,808 → 124.44M."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.2f}{letter}"
    return str(count)


def exact(count: int) -> str:
    """124,439,808 (124.44M)."""
    return f"{count:,}" if count < 10**6 else f"{count:,} ({short(count)})"
