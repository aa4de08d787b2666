"""Why a model card's number is not the total: which count of the model gives it. By arithmetic alone."""

import re
from typing import Literal

from gptcli.data import mutable
from gptcli.errors import GptcliError

UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
SIZE = r"(?:([0-9]{1,4})x)?([0-9]{1,5}(?:\.[0-9]{1,3})?)([kmbt])"
# In a model's name a size stands alone, or after the `a` of `active`; a `16k` there is a context.
IN_A_NAME = r"(?<![0-9a-z.])a?((?:[0-9]{1,4}x)?[0-9]{1,5}(?:\.[0-9]{1,3})?[mbt])(?![0-9a-z])"


@mutable
class Count:
    """A way to count parameters: what it is called, the number, to three digits, and what it counts."""

    name: str
    count: int
    rounded: str
    what: str


@mutable
class Match:
    """A count that gives a card's number, and how."""

    name: str
    count: int
    how: Literal["rounded", "cut off"]


@mutable
class Card:
    """A number that a model's name or its card states, and the counts that give it; none where the number is wrong.

    experts: of `8x7B` the 8, each of which counts again what all share.
    """

    said: str
    where: Literal["name", "card"]
    matches: list[Match]
    experts: int | None = None


def rounded(count: int) -> str:
    """A count as cards write it, in three digits: 124,439,808 → 124M."""
    for unit, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        # A number that would round to 1000 of a unit is written in the next.
        if 2000 * count >= 1999 * unit:
            value = count / unit
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{letter}"
    return str(count)


def in_name(name: str) -> list[str]:
    """The sizes that a model's name states: `x-30b-a3b` says 30b and 3b."""
    return re.findall(IN_A_NAME, name, re.I)


def explained(said: str, where: Literal["name", "card"], counts: list[Count], experts: int, with_one: int) -> Card:
    """Which counts give the number that is said. Raises GptcliError for a text that is no size.

    The first of counts is the total: where it gives the number, the others don't matter. experts: how many a layer
    has; with_one: the count if it had one.
    """
    match = re.fullmatch(SIZE, said.strip(), re.I)
    if not match:
        hint = "give a number as a model card has it: 124M, 0.6B, 8x7B"
        raise GptcliError(f"--card {said}: not a size", hint, "card")
    several, digits, unit = match[1] and int(match[1]), match[2], UNITS[match[3].lower()]
    whole, _, decimals = digits.partition(".")
    step = unit // 10 ** len(decimals)  # what the last digit counts
    number = int(whole + decimals) * step
    if several is not None:
        counts = [Count("with one expert a layer", with_one, "", "")] if several == experts else []
    found = _rounded(counts, number, step)
    if counts and not (found and found[0].name == counts[0].name) and 0 <= counts[0].count - number < step:
        found.append(Match(counts[0].name, counts[0].count, "cut off"))
    if not found and not decimals:  # zeros at the end may be digits or not: 270M is exact to the million, or to ten
        found = _rounded(counts, number, step * 10 ** (len(whole) - max(len(whole.rstrip("0")), 1)))
    settled = bool(found) and found[0].name == counts[0].name
    return Card(said.strip(), where, found[:1] if settled else found, several)


def _rounded(counts: list[Count], number: int, step: int) -> list[Match]:
    """The counts that give the number when they are rounded to the step."""
    return [Match(one.name, one.count, "rounded") for one in counts if 2 * abs(one.count - number) <= step]
