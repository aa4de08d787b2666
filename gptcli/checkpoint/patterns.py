"""Many names as few patterns: `h.{0-11}.attn.c_attn.weight` stands for twelve, and for exactly those.

A number between dots may stand for a set of numbers, `{0-5,7}`, and a word for a set of words, `{q,k,v}`. A pattern of
several sets stands for every combination of them, so that names which are not all there make several patterns. A name
that has braces of its own stands for itself.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import product
from typing import NamedTuple

MOST_NUMBERS = 8  # in one name: no model has more than layers, experts and heads


class Pattern(NamedTuple):
    """A pattern, and the names that it stands for, in the order of its numbers."""

    text: str
    names: list[str]


def fold(names: Iterable[str]) -> list[Pattern]:
    """Patterns that stand for exactly these names, each name once, in the order in which their first names come."""
    groups: dict[tuple[str, int], dict[tuple[int, ...], str]] = {}
    for name in names:
        template, numbers = split(name)
        groups.setdefault((template, len(numbers)), {})[numbers] = name  # a name may look like another's template
    return [pattern for (template, _), group in groups.items() for pattern in _patterns(template, group)]


def split(name: str) -> tuple[str, tuple[int, ...]]:
    """`h.3.attn` → `h.{}.attn` and (3,).

    A number with a leading zero is a word, and so are very long ones and all of a name with braces or many numbers.
    """
    parts, numbers = name.split("."), []
    for i in [i for i, part in enumerate(parts) if part.isdecimal()]:
        part = parts[i]
        if part.isascii() and (part[0] != "0" or part == "0") and len(part) < 19:
            numbers.append(int(part))
            parts[i] = "{}"
    if not numbers or len(numbers) > MOST_NUMBERS or "{" in name or "}" in name:
        return name, ()
    return ".".join(parts), tuple(numbers)


def _patterns(template: str, by_numbers: dict[tuple[int, ...], str]) -> Iterator[Pattern]:
    for texts, tuples in boxes(by_numbers):
        # A lone name stands for itself, braces and all.
        text = template.format(*texts) if len(tuples) > 1 else by_numbers[tuples[0]]
        yield Pattern(text, [by_numbers[one] for one in tuples])


def boxes(tuples: Iterable[tuple[int, ...]]) -> Iterator[tuple[list[str], list[tuple[int, ...]]]]:
    """Tuples of numbers, all as long, as few products of sets: for each its sets as text, and its tuples in order."""
    for sets in _boxes(sorted(tuples)):
        texts = [f"{{{ranges(numbers)}}}" if len(numbers) > 1 else str(numbers[0]) for numbers in sets]
        yield texts, list(product(*sets))


def _boxes(tuples: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """Sorted tuples as products of sets: for every product, one list of numbers a place."""
    if not tuples[0]:
        return [[]]
    if len(tuples[0]) == 1:
        return [[[number for (number,) in tuples]]]
    inner: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in tuples:
        inner.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, rests in inner.items():
        alike.setdefault(tuple(rests), []).append(first)
    return [[firsts, *box] for rests, firsts in alike.items() for box in _boxes(list(rests))]


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers, each once: 0, 1, 2, 5 → `0-2,5`. Two neighbours are named both."""
    return ",".join(f"{a}" if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in runs(numbers))


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """The first and the last of every run of neighbours: 0, 1, 2, 5 → [0, 2], [5, 5]."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def unfold(pattern: str, times: int) -> list[str]:
    """The names that a pattern of so many names stands for, in the order of its numbers."""
    if times == 1:
        return [pattern]
    parts: list[list[str]] = [[]]
    for i, piece in enumerate(pattern.replace("}", "{").split("{")):
        choices = [piece] if i % 2 == 0 else [one for text in piece.split(",") for one in _choices(text)]
        parts = [[*before, choice] for before in parts for choice in choices]
    return ["".join(one) for one in parts]


def _choices(text: str) -> Iterable[str]:
    first, dash, last = text.partition("-")
    return map(str, range(int(first), int(last) + 1)) if dash and first.isdecimal() and last.isdecimal() else [text]


def braced(names: Collection[str]) -> str:
    """One pattern for all of these names, their words folded too; empty where no pattern stands for just them all."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(name.split(".") for name in names))]
    size = 1
    for column in columns:
        size *= len(column)
    if size != len(set(names)) or len({name.count(".") for name in names}) > 1:
        return ""
    return ".".join(column[0] if len(column) == 1 else f"{{{_folded(column)}}}" for column in columns)


def _folded(column: list[str]) -> str:
    numbers = all(part.isdecimal() for part in column)
    return ranges(sorted(map(int, column))) if numbers else ",".join(column)
