"""Numbers of an architecture solved for from B's values: where none that the field uses closes the gap.

Each function yields values to be tried, the roundest first: a result counts only once the part was run with it.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gptcli.diff.causes_scene import Scene, value_at
from gptcli.spec import LinearScaling, NoScaling

STILL = 1e4  # a divisor of frequencies beyond which nothing turns

if TYPE_CHECKING:
    from torch import Tensor


def rounded(x: float) -> Iterator[float]:
    """The number to one, two, … six digits, and as it is."""
    if math.isfinite(x):
        yield from dict.fromkeys([*(float(f"{x:.{digits}g}") for digits in range(1, 7)), x])


def factor(scene: Scene, path: str, name: str, cap_path: str = "") -> Iterator[float]:
    """A field by which something is multiplied whole: B's value lies on the line through A's and that of 0.

    cap_path: of the soft cap that is laid on it, where there is one.
    """
    if scene.parted != name:
        return
    limit = value_at(scene.spec, cap_path) if cap_path else None
    found = (scene.with_field(path, 0.0, name), scene.ours[name], scene.theirs[name].double())
    nothing, ours, theirs = found if limit is None else (limit * (x / limit).atanh() for x in found)
    seen = ours.isfinite() & theirs.isfinite()
    step, gone = (ours - nothing)[seen], (theirs - nothing)[seen]
    yield from rounded(_scale(scene, path) * float((step * gone).sum() / (step * step).sum()))


def _scale(scene: Scene, path: str) -> float:
    """A factor's value in A; of scores the default is told by nothing."""
    value = value_at(scene.spec, path)
    return scene.spec.attention.head_dim**-0.5 if value is None else value


def score_scale(scene: Scene) -> Iterator[float]:
    """From scores; else from softmax weights, whose logarithms differ within a row by the same factor."""
    yield from factor(scene, "attention.scale", "attn.scores", "attention.softcap")
    if scene.parted == "attn.pattern":
        ours, theirs = scene.ours["attn.pattern"], scene.theirs["attn.pattern"].double()
        seen = (ours > 0) & (theirs > 0)
        logs = [x.where(seen, 1).log() for x in (ours, theirs)]
        number = seen.sum(-1, keepdim=True).clamp(min=1)
        one, other = [(x - x.sum(-1, keepdim=True) / number) * seen for x in logs]
        share = float((one * other).sum() / (one * one).sum())
        yield from rounded(_scale(scene, "attention.scale") * share)


def cap(scene: Scene, path: str, name: str) -> Iterator[float]:
    """c where B's largest value is c·tanh(s/c) of the uncapped s."""
    if scene.parted != name:
        return
    plain, theirs = scene.with_field(path, None, name), scene.theirs[name].double()
    seen = plain.where(theirs.isfinite(), 0)
    at = int(seen.abs().argmax())
    s, capped = float(seen.flatten()[at]), float(theirs.flatten()[at])
    if not s or not 0 < capped / s < 1:
        return
    low, high = 1e-9, 1e9  # u = s/c, and tanh(u)/u falls from 1 to 0
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if math.tanh(middle) / middle > capped / s else (low, middle)
    yield from rounded(abs(s) / low)


def eps(scene: Scene) -> Iterator[float]:
    """From what a norm gives: A's with eps 1 tells the variance v of what it reads, and B's then its own eps.

    Less the bias, outputs are as 1/√(v + eps); an eps beyond all v leaves the bias alone.
    """
    name = scene.parted
    if "norm" not in name:
        return
    bias = scene.with_field("norm.eps", 1e30, name)
    ours, one, theirs = (
        x - bias for x in (scene.ours[name], scene.with_field("norm.eps", 1.0, name), scene.theirs[name].double())
    )
    size = (ours * ours).sum(-1)
    mine = scene.spec.norm.eps
    by_one, by_theirs = ((x * ours).sum(-1) / size for x in (one, theirs))
    variance = (by_one**2 - mine) / (1 - by_one**2)
    at = int(variance.argmin())  # where eps weighs most
    found = float(((variance + mine) / by_theirs**2 - variance).flatten()[at])
    yield from rounded(found) if found > 0 else ()


def _still(scene: Scene) -> "Tensor | None":
    """The parted queries or keys as they are before they turn."""
    if scene.parted not in ("attn.q_rot", "attn.k_rot"):
        return None
    return scene.with_field("position.scaling", LinearScaling(factor=1e300), scene.parted)


def turns(scene: Scene) -> tuple[float, float] | None:
    """The base, and the divisor of all frequencies, by which B turns the token at position 1: pair i by θ^(-2i/R)."""
    import torch

    rope, still = scene.spec.position, _still(scene)
    if still is None or scene.part.inputs.mask is not None or still.shape[2] < 2:
        return None
    size = rope.rotary_dim or still.shape[-1]

    def pairs(x: "Tensor") -> "Tensor":
        x = x[:, :, 1, :size].double()
        return torch.complex(*(x.chunk(2, -1) if rope.pairs == "halves" else (x[..., 0::2], x[..., 1::2])))

    turn = (pairs(scene.theirs[scene.parted]) * pairs(still).conj()).sum((0, 1)).angle().abs()
    if size < 4 or not bool((turn[:2] > 0).all()):
        return None
    return float(turn[0] / turn[1]) ** (size / 2), 1 / float(turn[0])


def size(scene: Scene) -> Iterator[int]:
    """How many numbers of a head B turns: up to the last that is another one than before."""
    still = _still(scene)
    if still is not None:
        apart = (scene.theirs[scene.parted].double() - still).abs().amax((0, 1, 2))
        turned = (apart > 1e-4 * still.abs().amax()).nonzero()
        yield from (int(turned[-1]) + 1,) if len(turned) else ()


def base(scene: Scene) -> Iterator[float]:
    found = turns(scene) if value_at(scene.spec, "position.scaling") == NoScaling() else None
    yield from rounded(found[0]) if found else ()


def linear(scene: Scene) -> Iterator[LinearScaling]:
    found = turns(scene)
    yield from (LinearScaling(factor=one) for one in rounded(found[1])) if found and 0 < found[1] < STILL else ()


def window(scene: Scene) -> Iterator[int]:
    """How many keys the last query sees."""
    if scene.parted == "attn.pattern":
        seen = int((scene.theirs["attn.pattern"][..., -1, :] > 0).sum(-1).max())
        yield from (seen,) if seen else ()
