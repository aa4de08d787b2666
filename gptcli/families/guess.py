"""Which family a checkpoint is of, and what sizes it has, told by its tensors alone, where no config describes it."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.data import data
from gptcli.families import FAMILIES, OWN, Family, Stored
from gptcli.families.training import RECORDS as TRAINING

ALL: dict[str, Family] = {**FAMILIES, **TRAINING}
OWN_NAMES = "gptcli's own names"
ENOUGH = 0.6  # of a file's kinds of tensors: fewer that a family knows are chance


class Place(NamedTuple):
    """A kind of stored tensor in a family's names: our stems that lie in it, and what ends them."""

    stems: tuple[str, ...]
    leaf: str
    transposed: bool


class Seen(NamedTuple):
    """A value that a stored tensor's shape tells, by its path in a Spec."""

    path: str
    value: Any
    stored: str


@data
class Guess:
    """families: all whose names fit alike. places: by a stored name with # and @ for its numbers."""

    families: tuple[str, ...]
    prefix: str = ""
    places: Mapping[str, Place] = field(default_factory=dict)
    values: tuple[Seen, ...] = ()

    def ours(self, stored: str) -> str:
        """The project's name for a stored one, several in braces, empty where there is none."""
        template, numbers = split(stored)
        place = self.places.get(template)
        if place is None:
            return ""
        stems = [stem.split(".") for stem in place.stems]
        columns = [list(dict.fromkeys(column)) for column in zip(*stems)]
        parts = [column[0] if len(column) == 1 else f"{{{','.join(column)}}}" for column in columns]
        name = ".".join([*parts, place.leaf] if place.leaf else parts)
        for sign, number in numbers.items():
            name = name.replace(sign, number)
        return name


def split(name: str) -> tuple[str, dict[str, str]]:
    """`h.3.experts.7.up` → `h.#.experts.@.up` and what # and @ stand for."""
    parts, numbers = name.split("."), {}
    for i, part in enumerate(parts):
        if part.isdecimal() and len(numbers) < 2:
            sign = "@" if numbers else "#"
            numbers[sign] = part
            parts[i] = sign
    return ".".join(parts), numbers


def guess(infos: Mapping[str, TensorInfo]) -> Guess | None:
    """The families whose names the tensors have, and what their shapes tell; None where no family's names fit."""
    kinds: dict[str, str] = {}
    for name in infos:
        kinds.setdefault(split(name)[0], name)
    best: tuple[int, int] = (-1, 0)
    alike: dict[str, tuple[str, dict[str, Place]]] = {}
    for name, family in {**ALL, OWN_NAMES: OWN}.items():
        rest = {kind for kind in kinds if not any(fnmatchcase(kind, f"*{mask}") for mask in family.buffers)}
        for prefix, places in _tables(family):
            known = sum(kind in places for kind in rest)
            lacking = sum(place.leaf == "weight" and kind not in kinds for kind, place in places.items())
            fits = known >= max(ENOUGH * len(rest), 2) and _upright(places, kinds, infos)
            if fits and (known, -lacking) > best:
                best, alike = (known, -lacking), {}
            if fits and (known, -lacking) == best:
                alike.setdefault(name, (prefix, places))
    if not alike:
        return None
    first, (prefix, places) = next(iter(alike.items()))
    position = ALL.get(first, OWN).template.get("position")
    offset = position.get("offset", 0) if isinstance(position, dict) else 0  # rows of the table that no position has
    return Guess(
        families=tuple(alike), prefix=prefix, places=places, values=tuple(_values(infos, kinds, places, offset))
    )


def _tables(family: Family) -> Iterator[tuple[str, dict[str, Place]]]:
    """The family's kinds of tensors, by stored name, for every prefix and every set of names."""
    names = family.names or {stem: Stored(stem) for one in ALL.values() for stem in _stems(one)}
    for other in ({}, *family.others):
        for prefix in family.prefixes:
            places = {}
            for stems, stored in (names | other).items():
                stems = stems if isinstance(stems, tuple) else (stems,)
                start = "" if stored.outside else prefix
                for ending, leaf in zip((*stored.leaves, ""), ("weight", "bias", "")):
                    places.setdefault(f"{start}{stored.name}{ending}", Place(stems, leaf, stored.transposed))
            yield prefix, places


def _stems(family: Family) -> Iterator[str]:
    for stems in family.names:
        yield from stems if isinstance(stems, tuple) else (stems,)


def _first(stem: str, places: Mapping[str, Place], kinds: Mapping[str, str], leaf: str = "weight") -> str:
    """A stored tensor that holds this stem of ours, empty where there is none."""
    found = (
        kinds[kind] for kind, place in places.items() if kind in kinds and place.leaf == leaf and stem in place.stems
    )
    return next(found, "")


def _upright(places: Mapping[str, Place], kinds: Mapping[str, str], infos: Mapping[str, TensorInfo]) -> bool:
    """Whether the MLP's first matrix lies as the family lays it, where its shape can tell."""
    norm, up = (_first(stem, places, kinds) for stem in ("layers.#.attn_norm", "layers.#.mlp.up"))
    if not norm or not up or len(infos[up].shape) != 2 or len(infos[norm].shape) != 1:
        return True
    hidden, shape = infos[norm].shape[0], infos[up].shape
    transposed = next(place.transposed for place in places.values() if "layers.#.mlp.up" in place.stems)
    return shape[0] == shape[1] or shape[0 if transposed else 1] == hidden


def _values(
    infos: Mapping[str, TensorInfo], kinds: Mapping[str, str], places: Mapping[str, Place], offset: int
) -> Iterator[Seen]:
    """What shapes tell: never how many heads there are where nothing tells a head's size."""

    def shape(stem: str, leaf: str = "weight") -> tuple[str, tuple[int, ...]]:
        name = _first(stem, places, kinds, leaf)
        found = infos[name].shape if name else ()
        place = places.get(split(name)[0]) if name else None
        return name, found[::-1] if place is not None and place.transposed and len(found) == 2 else found

    name, table = shape("embed")
    if len(table) == 2:
        yield Seen("vocab_size", table[0], name)
    norm, hidden = shape("layers.#.attn_norm")
    if len(hidden) == 1 or len(table) == 2:
        yield Seen("hidden_size", hidden[0] if len(hidden) == 1 else table[1], norm if len(hidden) == 1 else name)
    inside = {kind for kind, place in places.items() if kind in kinds and place.stems[0].startswith("layers.#")}
    layers = {numbers["#"] for kind, numbers in map(split, infos) if kind in inside}
    if inside:
        yield Seen("n_layers", len(layers), kinds[min(inside)])
    name, positions = shape("pos_embed")
    if len(positions) == 2:
        yield Seen("context_length", positions[0] - offset, name)
    yield from _heads(shape)
    name, up = shape("layers.#.mlp.up")
    gate, _ = shape("layers.#.mlp.gate")
    if len(up) == 2:
        fused = gate == name and gate != ""
        yield Seen("mlp.size", up[0] // (1 + fused), name)
        yield Seen("mlp.gated", gate != "", gate or name)
    router, experts = shape("layers.#.mlp.router")
    if len(experts) == 2:
        yield Seen("mlp.n_experts", experts[0], router)
    head, _ = shape("lm_head")
    if head:
        yield Seen("lm_head.tied", False, head)


def _heads(shape: Any) -> Iterator[Seen]:
    """A head's size, where queries have a norm of it, and the heads that follow."""
    norm, size = shape("layers.#.attn.q_norm")
    q, queries = shape("layers.#.attn.q")
    k, keys = shape("layers.#.attn.k")
    if len(size) != 1 or size[0] == 0 or len(queries) != 2 or len(keys) != 2 or q == k or queries[0] % size[0]:
        return
    if queries[0] == size[0] and keys[0] != size[0]:  # a norm of the whole projection
        return
    yield Seen("attention.n_heads", queries[0] // size[0], q)
    yield Seen("attention.n_kv_heads", keys[0] // size[0], k)
    yield Seen("attention.head_dim", size[0], norm)
