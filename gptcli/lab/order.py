"""Order: without mask and positions, permuting the inputs only permutes the outputs."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from gptcli import shipped
from gptcli.lab.engine import ROUNDING, drawing, require, watched
from gptcli.report.lab import OrderReport
from gptcli.source import open_model
from gptcli.spec import Learned, NoPosition, Rope

if TYPE_CHECKING:
    from torch import Tensor

BY_HAND = "attention-by-hand"  # its matrices, its words, and its text when none is given
MOST_WORDS = 1000
POSITIONS = {"none": NoPosition(), "rope": Rope(), "learned": Learned()}


def order_report(
    words: list[str], permutation: str | None, seed: int, causal: bool, position: Literal["none", "rope", "learned"]
) -> OrderReport:
    """Attention over the words and over their permutation, in float64.

    A word that the config doesn't know has a vector of N(0, 1) by seed, and so has each row of a learned table.
    permutation: `2,0,1`, `random`, or None: the last word comes first. Raises GptcliError for one that is none.
    """
    import torch

    hand = open_model(config=str(shipped.configs()[BY_HAND]))
    words = words or hand.config.prompt.split()
    require(len(words) <= MOST_WORDS, f"{len(words):,} words", f"give {MOST_WORDS:,} at most")
    permuted = permutation_of(permutation, len(words), seed)
    weights = hand.weights(torch.float64, torch.device("cpu"))
    table = _normal((len(words), hand.spec.hidden_size), seed, "positions")
    rows = {word: weights["embed.weight"][id_] for id_, word in hand.config.vocabulary.items()}
    rows |= {word: _normal((hand.spec.hidden_size,), seed, f"word {word}") for word in words if word not in rows}
    spec = replace(
        hand.spec,
        vocab_size=len(rows),
        context_length=len(words),
        position=POSITIONS[position],
        attention=replace(hand.spec.attention, causal=causal),
    )
    tensors = {**weights.tensors, "embed.weight": torch.stack(list(rows.values())), "pos_embed.weight": table}
    ids = [list(rows).index(word) for word in words]
    plain = watched(spec, tensors, ids, "embed", "layers.0.attn_out")
    outputs = plain["layers.0.attn_out"]  # [T, C]
    moved = watched(spec, tensors, [ids[i] for i in permuted], "layers.0.attn_out")["layers.0.attn_out"]
    undone = moved[torch.tensor(permuted).argsort()]
    gaps = (outputs - undone).abs().amax(-1)  # [T]
    worst, difference = int(gaps.argmax()), float(gaps.max())
    holds = difference <= ROUNDING * max(1.0, float(outputs.abs().max()))
    return OrderReport(
        words=words,
        permutation=permuted,
        seed=seed,
        causal=causal,
        position=position,
        inputs=plain["embed"].tolist(),
        outputs=outputs.tolist(),
        permuted=moved.tolist(),
        undone=undone.tolist(),
        difference=difference,
        worst=worst,
        see=_see(permuted == sorted(permuted), holds, difference, words[worst], causal, position),
    )


def _normal(shape: tuple[int, ...], seed: int, what: str) -> "Tensor":
    import torch

    return torch.randn(shape, generator=drawing(seed, what), dtype=torch.float64)


def permutation_of(wanted: str | None, size: int, seed: int) -> list[int]:
    """`2,0,1`, `random` (one that moves something), or None: the last comes first. Raises GptcliError."""
    import torch

    if wanted is None:
        return [size - 1, *range(size - 1)]
    if wanted == "random":
        found, generator = list(range(size)), drawing(seed, "permutation")
        while found == sorted(found) and size > 1:
            found = torch.randperm(size, generator=generator).tolist()
        return found
    parts = [part.strip() for part in wanted.split(",")]
    found = [int(part) for part in parts if re.fullmatch("[0-9]{1,9}", part)]
    whole = len(found) == len(parts) and sorted(found) == list(range(size))
    require(whole, f"--permutation {wanted}: not each of 0 to {size - 1} once", "such as 2,0,1 for three words; random")
    return found


def _see(still: bool, holds: bool, difference: float, worst: str, causal: bool, position: str) -> str:
    told = {"none": [], "rope": ["rotation"], "learned": ["a table of positions"]}[position]
    means = " and ".join(["a causal mask"] * causal + told)
    gap = "by nothing at all" if difference == 0 else f"by {difference:.1e}"
    if still:
        return "this permutation moves nothing, so there is nothing to see: try another"
    if holds and not means:
        return f"no mask, no positions: with the permutation undone the outputs differ {gap}; attention sees no order"
    if holds:
        return f"with {means}, yet for these words and this permutation the outputs, undone, differ {gap}"
    return (
        f"with {means or 'neither mask nor positions'}, order counts: with the permutation undone the outputs differ "
        f"by up to {difference:.4f} (at {worst})"
    )
