"""Where B's own weights are at hand: which of them, put in the place of A's, close the gap, and how they differ."""

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING

from gptcli.diff.causes_scene import Guess, Scene
from gptcli.layout import Place

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.weights import Weights

OF_EMBEDDING = ("embed", "embed_in", "pos_embed", "segment_embed", "embed_norm", "rel_bias")


def guesses(scene: Scene, b_weights: "Weights", names: Iterable[str]) -> Iterator[Guess]:
    """Each weight of the part that differs, B's in the place of A's; then all of them together.

    names: of both sides' weights.
    """
    from gptcli.model.part import Change

    here, ours, theirs = Place.of(scene.before + scene.parted), scene.part.local, {}
    for full in dict.fromkeys(names):
        place, name, x = Place.of(full), full.removeprefix(scene.before), b_weights.get(full)
        first = place.name.rpartition(".")[0] in OF_EMBEDDING
        inside = place[:2] == here[:2] and (place.layer is not None or first == (scene.part.x is None))
        if inside and not _equal(ours.get(name), x):
            theirs[name] = None if x is None else x.to(scene.part.dtype)
    mend = "that tensor, or the step that converts it"
    for name, x in theirs.items():
        code, said, how = "weight", f"B's {scene.before}{name} {_relation(name, ours, x)}", mend
        if name == "lm_head.weight" and scene.spec.lm_head.tied:
            code, said = "tie", "B's head has weights of its own where A's is the token embedding"
            how = "tie_word_embeddings, and which tensor the head reads"
        yield Guess(code, said, how, Change(weights={name: x}))
    if len(theirs) > 1:
        listed = ", ".join(scene.before + name for name in theirs)
        yield Guess("weight", f"B's {listed} are other ones than A's", mend, Change(weights=theirs))


def _equal(ours: "Tensor | None", theirs: "Tensor | None") -> bool:
    import torch

    if ours is None or theirs is None:
        return ours is theirs
    return ours.shape == theirs.shape and torch.equal(ours, theirs.to(ours.dtype))


def _relation(name: str, ours: "Weights", theirs: "Tensor | None") -> str:
    """What makes B's weight of A's, as far as it is known."""
    from gptcli.model.differences import compare
    from gptcli.model.held import Held
    from gptcli.model.likeness import Layout, change

    mine = ours.get(name)
    if mine is None or theirs is None:
        return "is one that A lacks" if mine is None else "is lacking"
    if mine.shape != theirs.shape:
        return f"is {list(theirs.shape)} where A's is {list(mine.shape)}"
    a, b = (Held(x, "float64", 64.0) for x in (mine, theirs))
    gap = compare(a, b, mine.shape).gap
    if gap.square_b == 0:
        return "is all zeros"
    made = change(a, b, (mine.shape[0], prod(mine.shape[1:])), gap, Layout(), {})
    if made:
        return f"isn't A's: {made.said}"
    return f"isn't A's: {gap.relative:.2g} of its size apart, in {gap.changed / gap.numbers:.0%} of its numbers"
