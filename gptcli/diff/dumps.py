"""Someone's own arrays as a side: each found by its name in any vocabulary, and brought into our axes.

A name is ours, TransformerLens', Hugging Face's (a module's, or one of a tuple: `hidden_states.3`, `attentions.3`),
ggml's, or what a file of --map says: `their name: our path`, with `{i}` for the layer in both, and where a shape leaves
it open, the axes: `layers.{i}.attn.q[B,T,H,D]`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from gptcli.checkpoint.safetensors import FLOATS
from gptcli.diff.arrays import Array, arrays
from gptcli.diff.births import shaped, share
from gptcli.diff.meanings import Meaning, letters, mapped, meanings, paired
from gptcli.errors import GptcliError
from gptcli.report import ModelFacts
from gptcli.report.capture import Replay, size_of
from gptcli.run import Run
from gptcli.source import Model
from gptcli.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

IDS = ("ids", "input_ids", "token_ids", "tokens")
DECODER_IDS, SOURCE_IDS = ("ids", "decoder_input_ids"), ("source_ids", "input_ids")


class Way(NamedTuple):
    """How an array lies: its axes in their order, each so long. flipped: the fastest axis comes first."""

    order: str
    sizes: dict[str, int]
    merged: bool = False
    flipped: bool = False

    def shape(self) -> tuple[int, ...]:
        """Less axes of one step, which tell nothing."""
        sizes = [self.sizes[axis] for axis in self.order]
        sizes = [*sizes[:-2], sizes[-2] * sizes[-1]] if self.merged else sizes
        return tuple(size for size in sizes if size > 1)

    def steps(self) -> frozenset[tuple[str, int]]:
        """How far a number lies from the next along each axis: ways of the same steps are one."""
        order = self.order[::-1] if self.flipped else self.order
        steps = {axis: prod(self.sizes[later] for later in order[i + 1 :]) for i, axis in enumerate(order)}
        return frozenset((axis, step) for axis, step in steps.items() if self.sizes[axis] > 1)

    def upright(self, x: "Tensor", axes: str) -> "Tensor":
        x = x.permute(*reversed(range(x.ndim))) if self.flipped else x
        x = x.reshape([self.sizes[axis] for axis in self.order])
        return x.permute([self.order.index(axis) for axis in axes])


class Dumps(Replay):
    """Arrays in a file or in a directory, of a model. names: a file of --map.

    They are of the ids that an array among them holds, else of those given; so for what an encoder reads. Raises
    GptcliError for what can't be read, where no name means anything or nothing says what was read (code `ids`), and for
    a shape that fits nothing, or fits in two ways.
    """

    def __init__(
        self,
        path: Path,
        model: Model,
        ids: list[list[int]] | None = None,
        source: list[list[int]] | None = None,
        names: Path | None = None,
    ):
        held, model, unread = arrays(path), copy(model), []
        model.notes = []
        self.said, self.path, self.file = str(path), path, _Fitted()
        read = {"ids": ids, "source": source} | _read(path, held, model.spec)
        if not read["ids"] or (model.spec.encoder is not None and not read["source"]):
            said = f"{path}: no array among them says what was read"
            if model.spec.encoder is not None and (read["ids"] or read["source"]):
                said += " by the encoder" if read["ids"] else " by the decoder"
            raise GptcliError(said, "give the text, or --ids", "ids")
        if len({*map(len, read["ids"])}) > 1 or len({*map(len, read["source"] or [])}) > 1:
            said = f"{path}: texts of different lengths, and nothing says at which end they are padded"
            raise GptcliError(said, "give one text at a time", "ids")
        known = meanings(model) | (mapped(held, names, model.spec) if names else {})
        Run.__init__(self, model, **read, dtype_name=_type_of_most(held, known), device_name="cpu")
        shapes = {name: (letters(axes), shape) for name, axes, shape in size_of(self).points()}
        turned = paired(model)
        for name, array in held.items():
            meant = known.get(name, [])
            if not meant or any(found.path in self.file for found in meant):
                unread += [name] if name not in (*IDS, *DECODER_IDS, *SOURCE_IDS) else []
                continue
            for choices in [[one] for one in meant] if meant[0].bound else [meant]:
                found, way = _fitted(f"{path}: {name}", array, choices, shapes)
                self.file.add(found, way, array, shapes[found.path], turned)
                if (theirs := way.sizes.get("V", rows := model.spec.vocab_size)) != rows:
                    both = f"{theirs:,} ids in {name} and {rows:,} in the model"
                    model.notes.append(f"{path}: {both}: the first {min(theirs, rows):,} are compared")
        more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
        said = f"{path}: arrays whose names mean nothing here: {', '.join(unread[:5])}{more}"
        if not self.file:
            raise GptcliError(said, "say what they are by --map FILE", "path")
        model.notes += [said] if unread else []

    tokens, source_tokens = Run.tokens, Run.source_tokens

    def facts(self) -> ModelFacts:
        """Of the model that they are compared with, but for where they come from."""
        own = {"name": self.path.name, "source": f"arrays in {self.path}", "weights": "checkpoint", "seed": None}
        return replace(self.model.facts(self.dtype_name, "cpu"), **own)


class _Fitted(Mapping[str, "Tensor"]):
    """Arrays under our paths, each brought into our axes when it is read."""

    infos: ClassVar[dict] = {}  # of weights, which stand beside a trace's activations

    def __init__(self):
        self.made: dict[str, Callable[[], Tensor]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)

    def add(self, found: Meaning, way: Way, array: Array, expected: tuple[str, tuple[int, ...]], turned: bool) -> None:
        """turned: rows of q and k stand in pairs."""
        axes, shape = expected
        shape = tuple(1 if axis == "T" and way.sizes["T"] == 1 else size for axis, size in zip(axes, shape))
        turned = turned and found.whose == "ggml" and found.path.endswith((".q", ".k", ".q_rot", ".k_rot"))

        def make() -> "Tensor":
            if found.bound is not None:
                return shaped(share(way.upright(array.read(), "BTO"), found.bound), axes, shape)
            x = way.upright(array.read(), axes)[..., : shape[-1]]
            return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if turned else x  # [.., D/2, 2] → [.., D]

        self.made[found.path] = make

    def __getitem__(self, name: str) -> "Tensor":
        return self.made[name]()


def _type_of_most(held: dict[str, Array], known: dict[str, list[Meaning]]) -> str:
    """The type that most of the numbers were computed in, of what is neither a table's row nor, where there is more,
    the logits, which many codes compute in float32.
    """
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for name, array in held.items():
        if name in known and array.dtype in FLOATS.values():
            edge = known[name][0].path.endswith(("embed", "layers.0.resid_pre", "logits"))
            counts[edge][_computed(array)] += prod(array.shape)
    found = counts[False] or counts[True] or Counter({"float32": 1})
    return found.most_common(1)[0][0]


def _computed(array: Array) -> str:
    """The coarsest type that holds all its numbers: numpy has no bfloat16, and what was float32 may lie in float64."""
    import torch

    if array.dtype not in ("float32", "float64"):
        return array.dtype
    x = array.read().nan_to_num(posinf=0.0, neginf=0.0)
    types = ("bfloat16", "float16", "float32")
    return next((name for name in types if torch.equal(x, x.to(getattr(torch, name)).to(x.dtype))), array.dtype)


def _read(path: Path, held: dict[str, Array], spec: Spec) -> dict[str, list[list[int]]]:
    """What arrays of ids say that was read: `ids`, and `source` by an encoder."""
    known = {"ids": (IDS, spec.vocab_size)}
    if spec.encoder is not None:
        known = {"ids": (DECODER_IDS, spec.vocab_size), "source": (SOURCE_IDS, spec.encoder.vocab_size)}
    if "attention_mask" in held and not held["attention_mask"].read().all():
        raise GptcliError(f"{path}: attention_mask hides tokens", "give texts without padding, one at a time", "inputs")
    found = {}
    for what, (names, rows) in known.items():
        if (name := next((name for name in names if name in held), None)) is not None:
            found[what] = _ids(f"{path}: {name}", held[name], rows)
    return found


def _ids(name: str, array: Array, rows: int) -> list[list[int]]:
    """[T] or [B, T]."""
    x = array.read()
    if x.is_floating_point() or x.ndim not in (1, 2) or not x.numel():
        raise GptcliError(f"{name}: {array.dtype} {list(x.shape)} is no list of ids", "give whole numbers", "inputs")
    low, high = int(x.min()), int(x.max())
    if low < 0 or high >= rows:
        said = f"{name}: id {low if low < 0 else high} is outside the vocabulary"
        raise GptcliError(said, f"ids run from 0 to {rows - 1}", "vocabulary")
    return (x[None] if x.ndim == 1 else x).tolist()


def _fitted(
    name: str, array: Array, choices: list[Meaning], shapes: dict[str, tuple[str, tuple[int, ...]]]
) -> tuple[Meaning, Way]:
    """The one activation and the one way that a shape fits. Raises GptcliError for none and for two."""
    if array.dtype not in FLOATS.values():
        raise GptcliError(f"{name} is {array.dtype}, not numbers that a model computes with", "", "dtype")
    found = {}
    for meaning in choices:
        for way in _ways(array.shape, meaning, *shapes[meaning.path]):
            # Of one name for before and after a rotation, the shape tells.
            if len(choices) == 1 or way.merged != meaning.path.endswith("_rot"):
                found.setdefault((meaning.path, way.steps()), (meaning, way))
    axes, shape = shapes[choices[0].path]
    if not found:
        letters = f"[{','.join(axes)}] {list(shape)}" if not choices[0].bound else f"[B,T,{choices[0].width}]"
        hint = "are they of this model, and of this text?"
        raise GptcliError(f"{name} is {list(array.shape)}, but {choices[0].path} is {letters}", hint, "shape")
    if len(found) > 1:
        ways = " and ".join(f"[{','.join(way.order)}]" + " flipped" * way.flipped for _, way in found.values())
        hint = f"take a text of another length, or say it by --map: {choices[0].path}[{','.join(axes)}]"
        raise GptcliError(f"{name}: {list(array.shape)} fits {choices[0].path} in two ways: {ways}", hint, "shape")
    return next(iter(found.values()))


def _padded(theirs: int, ours: int) -> bool:
    """Is one vocabulary the other, with rows to spare?"""
    return theirs > ours or ours in (-(-theirs // 64) * 64, -(-theirs // 128) * 128)


def _ways(seen: tuple[int, ...], meaning: Meaning, axes: str, shape: tuple[int, ...]) -> list[Way]:
    """Every way in which an array of that shape may hold an activation."""
    theirs, sizes = meaning.whose == "ggml", dict(zip(axes, shape))
    orders, sizes = ([axes], sizes) if not meaning.bound else (["BTO"], sizes | {"O": meaning.width})
    if len(axes) == 4 and axes[-1] == "D" and not meaning.bound:
        orders.append(axes[0] + axes[2] + axes[1] + axes[3])
    if axes[-1] == "V" and seen and not theirs and _padded(seen[-1], sizes["V"]):
        sizes["V"] = seen[-1]
    if theirs and axes[-1] == "S" and seen:
        sizes["S"] = max(sizes["S"], seen[-1])  # a cache has more room than keys
    # Logits, and what leads to them there, may be of the last position alone.
    lengths = [sizes, sizes | {"T": 1}] if axes == "BTV" or (theirs and axes[:2] == "BT") else [sizes]
    found = [
        way
        for order, sized, merged, flipped in product(
            [meaning.order] if meaning.order else orders, lengths, (False, True), (False, True) if theirs else (False,)
        )
        if not merged or order[-2:] in ("HD", "GD")
        for way in [Way(order, sized, merged, flipped)]
        if way.shape() == tuple(size for size in (seen[::-1] if flipped else seen) if size > 1)
    ]
    if axes[-1] != "D" or meaning.whose not in ("transformerlens", "ggml"):
        return found
    # These two have positions before heads, but for one tensor of ggml's.
    later = not (theirs and meaning.path.endswith(".z"))
    return [way for way in found if way.merged or (way.order != axes) == later] or found
