"""Weights as shades of one hue in a terminal: as many colours as it has, or signs where it has none."""

from typing import NamedTuple

from gptcli.render.chart import speaks
from gptcli.render.screen import Part, Screen
from gptcli.report.maps import Scale

# From no weight to the scale's end. Dark to light, on a ground of their own, so that they read alike on any terminal.
DARK, MIDDLE, LIGHT = (18, 30, 66), (38, 118, 204), (222, 243, 255)
STEPS = 32
# Where a terminal has no more than 256, or 16: those that come nearest, each lighter than the one before.
FEWER = {
    "256": [f"color({n})" for n in (17, 18, 19, 25, 26, 32, 33, 39, 75, 81, 117, 153, 189, 195)],
    "standard": ["blue", "bright_blue", "cyan", "bright_cyan", "bright_white"],
}
SIGNS = ".:-=+*#%@"


class Shade(NamedTuple):
    """A colour, and one that can be read on it."""

    color: str
    ink: str


NO_NUMBER = Shade("bright_red", "bright_white")


def in_color(screen: Screen) -> bool:
    """Can the screen show shades by half blocks?"""
    return screen.console.color_system is not None and speaks(screen, "▀▄█")


def shade(screen: Screen, scale: Scale, weight: float) -> Shade:
    """A weight's colour; what is no number has one of another hue."""
    if weight != weight:
        return NO_NUMBER
    place = scale.place(weight)
    if fewer := FEWER.get(screen.console.color_system):
        step = min(int(place * len(fewer)), len(fewer) - 1)
        return Shade(fewer[step], "black" if place > 0.4 else "bright_white")
    place = round(place * (STEPS - 1)) / (STEPS - 1)
    near, far, along = (DARK, MIDDLE, 2 * place) if place < 0.5 else (MIDDLE, LIGHT, 2 * place - 1)
    red, green, blue = (round(a + (b - a) * along) for a, b in zip(near, far))
    return Shade(f"#{red:02x}{green:02x}{blue:02x}", "#000000" if place > 0.45 else "#ffffff")


def sign(scale: Scale, weight: float) -> str:
    """A weight's sign where there is no colour."""
    if weight != weight:
        return "?"
    return SIGNS[min(int(scale.place(weight) * len(SIGNS)), len(SIGNS) - 1)]


def ramp(screen: Screen, scale: Scale) -> list[Part]:
    """All shades from low to high."""
    if not in_color(screen):
        return [SIGNS]
    steps = [scale.low + (scale.high - scale.low) * i / 15 for i in range(16)]
    if scale.kind == "log" and scale.low > 0:
        steps = [scale.low * (scale.high / scale.low) ** (i / 15) for i in range(16)]
    return [("█", shade(screen, scale, weight).color) for weight in steps]


def halves(screen: Screen, scale: Scale, upper: float | None, lower: float | None) -> Part:
    """Two rows' cells in one sign; None is blank."""
    if upper is None:
        return " " if lower is None else ("▄", shade(screen, scale, lower).color)
    if lower is None:
        return ("▀", shade(screen, scale, upper).color)
    return ("▀", f"{shade(screen, scale, upper).color} on {shade(screen, scale, lower).color}")


def cell(screen: Screen, scale: Scale, weight: float | None, width: int) -> Part:
    """A cell of a whole line's height, so many columns wide."""
    if weight is None:
        return " " * width
    if not in_color(screen):
        return sign(scale, weight) * width
    return ("█" * width, shade(screen, scale, weight).color)


def numbered(screen: Screen, scale: Scale, weight: float | None, width: int) -> list[Part]:
    """A cell with its number in it, so many columns wide."""
    if weight is None:
        return [" " * width]
    number = fixed(screen, weight)
    if not in_color(screen):
        return [f" {sign(scale, weight)}{number:>{width - 2}}"]
    at = shade(screen, scale, weight)
    return [(f"{number:>{width}}", f"{at.ink} on {at.color}")]


def fixed(screen: Screen, x: float) -> str:
    """So many decimals, however small: what stands in a column of weights keeps its place."""
    return f"{x:.{screen.digits}f}"


def joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one style as one part."""
    found: list[tuple[str, str]] = []
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        if found and found[-1][1] == style:
            found[-1] = (found[-1][0] + text, style)
        else:
            found.append((text, style))
    return list(found)
