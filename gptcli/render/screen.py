"""How things look in a terminal: colour, signs, numbers, columns. Nothing is cut; a terminal wraps what is long."""

import io
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

# What to print where the terminal's encoding has no such sign.
ASCII = {
    "·": "-", "…": "...", "–": "-", "→": "->", "█": "#", "␣": r"\s", "√": "sqrt", "ε": "eps", "²": "^2", "−": "-",
    "Σ": "sum ", "θ": "theta", "×": "x", "∞": "inf",
}  # fmt: skip


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
        self.console = Console(
            file=io.StringIO(),
            width=100_000,
            force_terminal=colored,
            color_system="standard" if colored else None,
            no_color=not colored,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )

    def line(self, *parts: str | tuple[str, str]) -> None:
        """One line of texts, or (text, style) pairs."""
        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def table(
        self, rows: Iterable[Sequence], header: Sequence[str] = (), right: Iterable[int] = (), gap: int = 2
    ) -> None:
        """Columns of texts or (text, style) pairs, `gap` blanks apart; `right` are the columns of numbers."""
        right = set(right)
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=bool(header), header_style="dim")
        rows = [[Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row] for row in rows]
        for i in range(max([len(header), *map(len, rows)])):
            title = header[i] if i < len(header) else ""
            table.add_column(Text(title), justify="right" if i in right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def show(self) -> None:
        """Writes everything collected, in signs that the stream's encoding has."""
        text = self.console.file.getvalue()
        text = "".join(line.rstrip(" ") + "\n" for line in text.split("\n")[:-1])
        self.stream.write(printable(text, self.stream.encoding))
        self.console.file = io.StringIO()

    def number(self, x: float | None) -> str:
        return number(x, self.digits)

    def vector(self, values: Sequence[float], room: int | None = None, aligned: bool = True) -> str:
        """Numbers side by side: all with --full or where `room` columns suffice, else the first few … the last."""
        texts = [self.number(x).rjust(self.digits + 3 if aligned else 0) for x in values]
        if self.full or (len(texts) <= 8 and (room is None or len(" ".join(texts)) <= room)):
            return " ".join(texts)
        cell = max(map(len, texts)) + 1
        keep = 6 if room is None else max(2, min(6, (room - 1) // cell))
        first, last = keep - keep // 2, keep // 2
        return " ".join([*texts[:first], "…", *texts[len(texts) - last :]])


def printable(text: str, encoding: str | None) -> str:
    """The text in signs that the encoding has: ASCII look-alikes, then escapes."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        text = text.translate({ord(sign): instead for sign, instead in ASCII.items()})
        return text.encode(encoding, "backslashreplace").decode(encoding)


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
