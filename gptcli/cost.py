"""What a trace holds in memory and writes, counted before anything runs. No torch, nothing allocated."""

import os
import re
import shutil
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

from gptcli.count import ITEM_BYTES
from gptcli.errors import GptcliError
from gptcli.layout import Place
from gptcli.memory import QUERY_BLOCK
from gptcli.spec import Spec
from gptcli.trace import BESIDE, EVERYTHING, Selection, shapes

SHARE = 4  # without --max-memory, one part in so many of what is free
FALLBACK = 2 << 30  # bytes, where a system doesn't say what is free
UNITS = {
    **dict.fromkeys(("", "b"), 1),
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
# Bytes of a number in a report: a float and its place in a list; as JSON, its place in a copy and its digits twice.
LISTED, AS_JSON = 32, 90
# Bytes of what a report holds of one key beside its vectors.
KEY, KEY_AS_JSON = 900, 2200


class Size(NamedTuple):
    """The sizes of one run: B texts of T tokens, read with sources of S, computed in a type."""

    spec: Spec
    batch: int
    width: int
    source_width: int
    dtype: str

    def points(self) -> Iterable[tuple[str, str, tuple[int, ...]]]:
        """(path, axes, shape) of every activation."""
        return shapes(self.spec, self.batch, self.width, self.source_width)

    def dtype_of(self, path: str) -> str:
        """The type of an activation: half types compute scores, weights and logits in float32."""
        sensitive = path == "logits" or path.rpartition(".")[2] in BESIDE
        return "float32" if sensitive and ITEM_BYTES[self.dtype] < 4 else self.dtype


def kept(size: Size, wanted: Callable[[str], bool], select: Selection = EVERYTHING) -> int:
    """Bytes of the activations that a recorder keeps: those that are `wanted`, of scores and weights the selection."""
    total = 0
    for path, _, shape in size.points():
        if wanted(path):
            total += prod(_selected(path, shape, select)) * ITEM_BYTES[size.dtype_of(path)]
    return total


def _selected(path: str, shape: tuple[int, ...], select: Selection) -> tuple[int, ...]:
    if path.rpartition(".")[2] not in BESIDE:
        return shape
    batch, heads, queries, *keys = shape
    return batch, len(range(heads)[select.heads]), len(range(queries)[select.queries]), *keys


def streamed(size: Size, wanted: Callable[[str], bool]) -> int:
    """Bytes that are held to write them: the largest at once, of scores and weights what some queries' take."""
    largest, keys = 0, ()
    for path, _, shape in size.points():
        name = path.rpartition(".")[2]
        keys = shape if name == "k" else keys
        if wanted(path):
            numbers = prod(shape) * ITEM_BYTES[size.dtype_of(path)]
            largest = max(largest, _of_queries(size, shape, keys) if name in BESIDE else numbers)
    return largest


def _of_queries(size: Size, shape: tuple[int, ...], keys: tuple[int, ...]) -> int:
    """Bytes that scores and weights [B, H, T, ...] of a block of queries take, read from keys [B, G, S, D]."""
    batch, heads, queries, *_ = shape
    item, groups, half = ITEM_BYTES[size.dtype], keys[1], ITEM_BYTES[size.dtype] < 4
    # Scores, those behind the mask, weights, and what softmax makes; keys for each query head, and in float32.
    numbers = 4 * min(queries, QUERY_BLOCK) * keys[2] * (4 if half else item)
    copies = keys[2] * keys[3] * ((item if groups < heads else 0) + (4 if half else 0))
    return batch * heads * (numbers + copies)


def arrayed(size: Size, path: str) -> int:
    """Bytes that are held to write one activation as an array: all of it, and what it is made from."""
    at, _, name = path.rpartition(".")
    if name not in BESIDE:
        return kept(size, path.__eq__)
    blocks = streamed(size, path.__eq__)
    if size.width <= QUERY_BLOCK:
        return blocks
    weights = kept(size, f"{at}.pattern".__eq__)  # a whole matrix for each head, and another of scores
    return blocks + (2 if name == "scores" else 1) * weights


def listed(numbers: int, as_json: bool) -> int:
    """Bytes of so many numbers in a report."""
    return numbers * (LISTED + AS_JSON * as_json)


def walk(size: Size, part: Spec, keys: int, as_json: bool) -> int:
    """Bytes of one head's walk at one query over so many keys. part: the layer, with the attention looked at."""
    vectors = 3 * part.attention.head_dim * keys
    steps = sum(_at_one(axes, shape) for path, axes, shape in size.points() if Place.of(path).layer == 0)
    return listed(vectors + steps, as_json) + keys * (KEY + KEY_AS_JSON * as_json)


def _at_one(axes: str, shape: tuple[int, ...]) -> int:
    """Numbers of an activation at one position of one head."""
    return 0 if axes.endswith(("TS", "HT", "HS", "SS")) else shape[-1]


def most(text: str | None) -> int:
    """The bytes that --max-memory means, or the default. Raises GptcliError for what is no size."""
    if text is None:
        free = free_memory()
        return FALLBACK if free is None else free // SHARE
    said = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if said is None or said[2] not in UNITS:
        raise GptcliError(f"--max-memory {text}: not a size", "such as 2GiB, 500MB or 1000000", "memory")
    return int(float(said[1]) * UNITS[said[2]])


def free_memory() -> int | None:
    """Bytes that can be had without pushing anything out; None where the system doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        told = next((line for line in lines if line.startswith("MemAvailable:")), None)
        if told is not None:
            return min(int(told.split()[1]) * 1024, _group_memory())
    except (OSError, ValueError, IndexError):
        pass
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        try:
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            continue
    return None


def _group_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that a container's limit leaves; more than any machine has where there is none."""
    try:
        return max(0, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        return 1 << 62


def bytes_text(number: int) -> str:
    """12.3 MiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.1f} {unit}"
    return f"{number} bytes"


class Choice(NamedTuple):
    """A request and what it would hold: how it is asked for, and bytes."""

    said: str
    held: int


def refuse_above(limit: int, asked: Choice, others: Iterable[Choice], given: bool, otherwise: str) -> None:
    """Raises GptcliError where a request would hold more than the limit, with the first of the others that wouldn't.

    given: the limit was given, instead of taken from what is free; otherwise: what to do where none of them fits.
    """
    if asked.held <= limit:
        return
    of_free = "--max-memory" if given else f"1/{SHARE} of what is free (--max-memory changes it)"
    fits = next((f"{one.said} holds {bytes_text(one.held)}" for one in others if one.held <= limit), otherwise)
    said = f"{asked.said} would hold {bytes_text(asked.held)}, and {bytes_text(limit)} is {of_free}"
    raise GptcliError(said, fits, "memory")


def refuse_full(path: Path, size: int) -> None:
    """Raises GptcliError where a file of that size finds no room on its disk."""
    free = shutil.disk_usage(path.parent).free
    if size > free:
        said = f"-o {path}: {bytes_text(size)}, and its disk has {bytes_text(free)} free"
        raise GptcliError(said, "choose fewer activations by --at, or another disk", "output")
