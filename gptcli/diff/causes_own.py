"""Where B's own weights are at hand: which of them, put in the place of A's, close the gap, and how they differ."""

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

from gptcli.diff.causes_scene import Guess, Scene
from gptcli.diff.causes_weights import PRODUCTS
from gptcli.layout import Place

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.weights import Weights

OF_EMBEDDING = ("embed", "embed_in", "pos_embed", "segment_embed", "embed_norm", "rel_bias")
STEMS = {product: stem for stem, product in PRODUCTS.items() if product != "embed"}


def groups(scene: Scene, b_weights: "Weights", names: Iterable[str]) -> list[list[Guess]]:
    """Of the part's weights that differ, B's in the place of A's: each by itself; the weight and the bias of what makes
    the parted activation; all of them.

    names: of both sides' weights.
    """
    from gptcli.model.part import Change

    here = Place.of(scene.before + scene.parted).stack, scene.part.layer
    ours, theirs = scene.part.local, {}
    for full in dict.fromkeys(names):
        place, name, x = Place.of(full), full.removeprefix(scene.before), b_weights.get(full)
        first = place.name.rpartition(".")[0] in OF_EMBEDDING
        inside = place[:2] == here and (place.layer is not None or first == (scene.part.x is None))
        if inside and not _equal(ours.get(name), x):
            theirs[name] = None if x is None else x.to(scene.part.dtype)

    def guess(*taken: str) -> Guess:
        code, said, mend = "weight", f"B's {scene.named(taken)} ", "that tensor, or the step that converts it"
        if taken == ("lm_head.weight",) and scene.spec.lm_head.tied:
            code, said = "tie", "B's head has weights of its own where A's is the token embedding"
            mend = "tie_word_embeddings, and which tensor the head reads"
        else:
            said += _relation(taken[0], ours, theirs[taken[0]]) if len(taken) == 1 else "are other ones than A's"
        if others := len(theirs) - len(taken):
            said += f"; {others} other{'s' * (others > 1)} of {_where(scene)} differ{'s' * (others == 1)} too"
            mend += "; --weights compares them all"
        return Guess(code, said, mend, Change(weights={name: theirs[name] for name in taken}))

    stem = STEMS.get(scene.parted, scene.parted)
    near = [name for name in theirs if name in (f"{stem}.weight", f"{stem}.bias")]
    several = [taken for taken in (near, [*theirs]) if len(taken) > 1]
    return [[guess(name) for name in theirs], *([guess(*taken)] for taken in several)]


def _where(scene: Scene) -> str:
    """Which part it is, in words."""
    outside = "the embedding" if scene.part.x is None else "what stands behind the layers"
    return outside if scene.part.layer is None else scene.before.removesuffix(".")


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
    return f"isn't A's: {gap.relative:.2g} of its size apart, in {gap.changed:,} of {gap.numbers:,} numbers"
