"""Curves in a terminal, each drawn with a sign of its own, so that they can be told apart without colour."""

from collections.abc import Sequence

from gptcli.render.screen import Part, Screen

SIGNS, PLAIN_SIGNS = "●○◆◇", "*o+x"
AXES, PLAIN_AXES = "┤│└─", "||+-"
STYLES = ("green", "yellow", "magenta", "blue")
HEIGHT, WIDTH = 12, 60  # rows, and columns in a pipe


def speaks(screen: Screen, signs: str) -> bool:
    """Does the screen's encoding have these signs?"""
    try:
        signs.encode(screen.stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def curves(screen: Screen, series: Sequence[tuple[str, Sequence[float]]], along: str) -> None:
    """Each series of (name, a number for each step from 1 on), over one axis from 0 to the largest number.

    along: what the steps count. A curve's name and last number stand at its end. Of more steps than columns, those are
    drawn that fall on a column.
    """
    rich = speaks(screen, SIGNS + AXES)
    signs, (tick, wall, corner, floor) = (SIGNS, AXES) if rich else (PLAIN_SIGNS, PLAIN_AXES)
    steps, top = len(series[0][1]), max(max(values) for _, values in series)
    labels = {0: screen.number(0.0), HEIGHT // 2: screen.number(top / 2), HEIGHT: screen.number(top)}
    margin = max(map(len, labels.values()))

    def height(value: float) -> int:
        return round(HEIGHT * value / top) if top > 0 else 0

    ends = [[] for _ in range(HEIGHT + 1)]  # of the curves that end in each row
    for i, (name, values) in enumerate(series):
        ends[height(values[-1])].append((f" {name} {screen.number(values[-1])}", STYLES[i]))
    beside = margin + 2 + max(sum(len(text) for text, _ in row) for row in ends)
    width = max(10, min(screen.width - beside, WIDTH)) if screen.width else WIDTH
    step_at = [round(column * (steps - 1) / (width - 1)) for column in range(width)]
    for row in range(HEIGHT, -1, -1):
        line: list[Part] = [(f"{labels.get(row, ''):>{margin}} {tick if row in labels else wall}", "dim")]
        for column, step in enumerate(step_at):
            there = [i for i, (_, values) in enumerate(series) if height(values[step]) == row]
            # Where curves meet, they take turns.
            line.append((signs[i], STYLES[i]) if (i := _turn(there, column)) is not None else " ")
        screen.line(*line, *ends[row])
    screen.line((f"{'':{margin}} {corner}{floor * width}", "dim"))
    last = str(steps)
    screen.line((f"{'':{margin}}  {'1':<{max(1, width - len(last))}}{last} {along}", "dim"))
    screen.flow([[(signs[i], STYLES[i]), f" {name}"] for i, (name, _) in enumerate(series)], gap="   ")


def _turn(there: list[int], column: int) -> int | None:
    return there[column % len(there)] if there else None
