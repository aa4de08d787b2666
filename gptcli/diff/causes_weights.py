"""What a conversion may have done to weights, as hypotheses: a table of where each shows first and what it changes.

H heads, G key/value heads, D head size, C hidden size.
"""

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import TYPE_CHECKING, Literal, NamedTuple

from gptcli.diff.causes_fields import NORMS, TURNED, WEIGHED
from gptcli.diff.causes_scene import Guess, Scene
from gptcli.spec import Experts, Rope

if TYPE_CHECKING:
    from torch import Tensor

# Where the product of a matrix is seen.
PRODUCTS = {
    **{f"{at}.{letter}": f"{at}.{letter}" for at in ("attn", "cross") for letter in "qkv"},
    "attn.o": "attn_out", "cross.o": "cross_out",
    "mlp.up": "mlp.up", "mlp.gate": "mlp.gate", "mlp.down": "mlp_out", "mlp.router": "mlp.router",
    "embed_in": "embed", "embed_out": "embed_out", "lm_head.dense": "lm_head.dense", "lm_head": "logits",
}  # fmt: skip
ANY = " ".join((*PRODUCTS.values(), NORMS))
QKV, GATE_UP = ("attn.q", "attn.k", "attn.v"), ("mlp.gate", "mlp.up")
LEAVES = (".weight", ".bias")
FUSED = {"blocks": "one after the other", "heads": "head by head", "turns": "row by row"}
Fused = Literal["blocks", "heads", "turns"]


class Row(NamedTuple):
    """A hypothesis on weights: its code, where it can show first, what is to be mended, and the guesses it makes, each
    what it says of B and the weights that are otherwise.
    """

    code: str
    at: str
    mend: str
    guesses: "Callable[[Scene], Iterator[tuple[str, dict[str, Tensor | None]]]]"


def held(scene: Scene, *stems: str) -> "dict[str, Tensor]":
    """The weights and biases of these that A has."""
    names = [stem + leaf for stem in stems for leaf in LEAVES]
    return {name: scene.part.local[name] for name in names if name in scene.part.local}


def _norms(scene: Scene, leaf: str) -> "dict[str, Tensor]":
    """The weights (or biases) of all norms of a layer; elsewhere of those that may show here."""
    local, inside = scene.part.local, scene.part.layer is not None
    stems = NORMS.split() + [f"attn.{x}_norm.{i}" for x in "qk" for i in range(scene.spec.attention.n_heads)]
    return {
        stem + leaf: local[stem + leaf]
        for stem in stems
        if (inside or stem in scene.window) and stem + leaf in local
    }  # fmt: skip


def _transposed(scene: Scene) -> Iterator:
    for stem, product in PRODUCTS.items():
        weight = scene.part.local.get(f"{stem}.weight") if product in scene.window else None
        if weight is not None and weight.shape[0] == weight.shape[1]:
            yield f"B's {scene.before}{stem}.weight is transposed", {f"{stem}.weight": weight.T}


def _rotary_rows(scene: Scene) -> Iterator:
    """Rows of q and k from halves to neighbours, or back; of whole heads, or of what turns in them."""
    import torch

    if not isinstance(scene.spec.position, Rope):
        return
    size = scene.spec.attention.head_dim
    for part in dict.fromkeys((size, scene.spec.position.rotary_dim or size)):
        there = torch.arange(part).view(2, -1).T.flatten()  # 0, R/2, 1, …: where neighbours come from
        for order, said in ((there, "from halves to neighbours"), (there.argsort(), "from neighbours to halves")):
            order = torch.cat((order, torch.arange(part, size)))
            for letters in ("qk", "q", "k"):
                weights = held(scene, *(f"attn.{letter}" for letter in letters)).items()
                changed = {name: x.unflatten(0, (-1, size))[:, order].flatten(0, 1) for name, x in weights}
                whose = "q and k" if letters == "qk" else f"{letters} alone"
                yield f"rows of {whose} are permuted in B {said}, for the other rotary convention", changed


def _merged(scene: Scene) -> Iterator:
    """The output's columns in the order of heads merged number by number, or back."""
    a, weight = scene.spec.attention, scene.part.local["attn.o.weight"]
    for sizes in ((a.head_dim, a.n_heads), (a.n_heads, a.head_dim)):
        changed = weight.unflatten(1, sizes).transpose(1, 2).flatten(1)  # [C, D·H] → [C, H·D], or back
        yield "B merges heads as [D, H] where A merges them as [H, D]", {"attn.o.weight": changed}


def _fuse(parts: "list[Tensor]", how: Fused, groups: int) -> "Tensor":
    """Parts as rows of one tensor. groups: heads, or groups of heads, that each have a share of all parts."""
    import torch

    if how == "blocks":
        return torch.cat(parts)
    if how == "turns":
        return torch.stack(parts, 1).flatten(0, 1)
    return torch.cat([x.unflatten(0, (groups, -1)) for x in parts], 1).flatten(0, 1)


def _cut(fused: "Tensor", sizes: list[int], how: Fused, groups: int) -> "list[Tensor]":
    """The parts again."""
    if how == "blocks":
        return list(fused.split(sizes))
    if how == "turns":
        return [fused[i :: len(sizes)] for i in range(len(sizes))]
    shares = fused.unflatten(0, (groups, -1)).split([size // groups for size in sizes], 1)
    return [share.flatten(0, 1) for share in shares]


def _recut(scene: Scene, stems: tuple[str, ...], order: tuple[str, ...], how: Fused, cut: Fused) -> "dict[str, Tensor]":
    """The weights and biases of the stems, fused one way, and cut another way in another order."""
    groups, found = scene.spec.attention.n_kv_heads, {}
    for leaf in LEAVES:
        parts = {stem: scene.part.local.get(stem + leaf) for stem in stems}
        if all(x is not None for x in parts.values()):
            pieces = _cut(_fuse(list(parts.values()), how, groups), [len(parts[x]) for x in order], cut, groups)
            found |= {stem + leaf: piece for stem, piece in zip(order, pieces)}
    return found


def _fused(*stems: str) -> Callable[[Scene], Iterator]:
    """Parts of one tensor, taken in another order or cut another way."""

    def guesses(scene: Scene) -> Iterator:
        if any(f"{stem}.weight" not in scene.part.local for stem in stems):
            return
        ours = ", ".join(stem.rpartition(".")[2] for stem in stems)
        by_heads: tuple[Fused, ...] = ("heads",) if stems == QKV else ()
        alike = len({len(scene.part.local[f"{stem}.weight"]) for stem in stems}) == 1
        for how in ("blocks", *by_heads) if stems == QKV else ():
            for order in list(permutations(stems))[1:]:
                theirs = ", ".join(stem.rpartition(".")[2] for stem in order)
                yield f"B takes {theirs} for {ours}", _recut(scene, stems, order, how, how)
        for how, cut in permutations(("blocks", *by_heads, *["turns"] * alike), 2):
            said = f"B cuts the fused {ours} {FUSED[cut]} where they lie {FUSED[how]}"
            yield said, _recut(scene, stems, stems, how, cut)

    return guesses


def _swapped(scene: Scene) -> Iterator:
    local, mlp, stems = scene.part.local, scene.spec.mlp, ["mlp."]
    if isinstance(mlp, Experts):
        stems = [f"mlp.experts.{i}." for i in range(mlp.n_experts)]
    swaps = (("gate", "up"), ("up", "gate"))
    names = {f"{at}{one}{leaf}": f"{at}{other}{leaf}" for at in stems for one, other in swaps for leaf in LEAVES}
    if f"{stems[0]}gate.weight" in local:
        yield "B takes gate for up and up for gate", {one: local[other] for one, other in names.items() if one in local}


def _without_bias(scene: Scene) -> Iterator:
    """All biases of q, k and v; then any bias by itself."""
    groups = [[f"{stem}.bias" for stem in QKV]] if scene.window.intersection(QKV) else []
    groups += [[f"{stem}.bias"] for stem, product in PRODUCTS.items() if product in scene.window]
    groups += [[name] for name in _norms(scene, ".bias")]
    for group in groups:
        names = [name for name in group if name in scene.part.local]
        if names:
            yield f"B has no {scene.named(names)}", dict.fromkeys(names)


def _more_bias(scene: Scene) -> Iterator:
    """Where B is more than A by the same in every position, it has a bias that A lacks."""
    stem = next((stem for stem, product in PRODUCTS.items() if product == scene.parted), scene.parted)
    more = scene.theirs[scene.parted].double() - scene.ours[scene.parted]
    more = more.transpose(1, 2).flatten(-2) if more.ndim == 4 else more  # [B, H, T, D] → [B, T, H · D]
    several = more.shape[0] * more.shape[1] > 1  # of one position, everything would be a bias
    if several and f"{stem}.bias" not in scene.part.local and (stem in PRODUCTS or stem in NORMS.split()):
        yield f"B has a bias in {scene.before}{stem} and A has none", {f"{stem}.bias": more.flatten(0, 1).mean(0)}


def _without_sinks(scene: Scene) -> Iterator:
    if "attn.sinks" in scene.part.local:
        yield "B has no sinks in its softmax", {"attn.sinks": None}


def _offset(scene: Scene) -> Iterator:
    for step, theirs, ours in ((1, "1 + w", "w"), (-1, "w", "1 + w")):
        changed = {name: x + step for name, x in _norms(scene, ".weight").items()}
        if changed:
            yield f"B scales what it norms by {theirs} where A scales by {ours}", changed


def _unweighted(scene: Scene) -> Iterator:
    """All norms without weights; then any norm by itself."""
    names = list(_norms(scene, ".weight"))
    for group in ([names] if len(names) > 1 else []) + [[name] for name in names]:
        yield f"B has no {scene.named(group)}", dict.fromkeys(group)


def _headless(scene: Scene) -> Iterator:
    local = scene.part.local
    if not scene.spec.lm_head.tied and local["embed.weight"].shape == local["lm_head.weight"].shape:
        said = "B's head is its token embedding where A's has weights of its own"
        yield said, {"lm_head.weight": local["embed.weight"]}


def _permuted(scene: Scene) -> Iterator:
    """Rows in an order that the values tell: each of B's is nearest to one of A's."""
    import torch

    stem, size = scene.parted, scene.spec.attention.head_dim
    both = (scene.theirs[stem].double(), scene.ours[stem])
    theirs, ours = (x.transpose(1, 2).flatten(-2) if x.ndim == 4 else x for x in both)  # → [B, T, rows]
    order = torch.cdist(*(x.flatten(0, 1).T.contiguous() for x in (theirs, ours))).argmin(1)
    if order.unique().numel() != order.numel():
        return
    heads = order.view(-1, size) if ours is not both[1] else order[:, None]
    whole = ours is not both[1] and torch.equal(heads, heads[:, :1] + torch.arange(size, device=order.device))
    stems = QKV[1:] if whole and stem in QKV[1:] else (stem,)  # which share their heads
    named = (heads[:, 0] // size if whole else order).tolist()
    listed = f"{', '.join(map(str, named[:12]))}{' …' * (len(named) > 12)}"
    what = f"{'heads' if whole else 'rows'} of {scene.before}{' and '.join(stems)}"
    said = f"{what} stand in another order in B: A's {listed}"
    yield said, {name: x[order] for name, x in held(scene, *stems).items()}


TABLE = (
    Row("transposed", " ".join(PRODUCTS.values()), "turn that matrix when converting: ours lie [out, in]", _transposed),
    Row("rotary-rows", f"attn.q attn.k {TURNED}", "the permutation of q and k rows when converting", _rotary_rows),
    Row("fused-order", " ".join(QKV), "the order of q, k, v when converting, and how they are cut", _fused(*QKV)),
    Row("gate-up", "mlp.up mlp.gate mlp.act mlp_out", "the order of gate and up, converting or in the MLP", _swapped),
    Row("fused-order", "mlp.up mlp.gate", "how the fused gate, up is cut when converting", _fused(*GATE_UP)),
    Row("missing-bias", ANY, "bring the biases along when converting, and the config's word for them", _without_bias),
    Row("norm-offset", NORMS, "1 + w is taken once: when converting, or in the norm", _offset),
    Row("norm-weight", NORMS, "bring the weights of norms along when converting", _unweighted),
    Row("extra-bias", ANY, "a bias that one side has alone: the config's word for it", _more_bias),
    Row("sinks", WEIGHED, "bring the sinks along when converting; each counts in its head's softmax", _without_sinks),
    Row("heads-merged", "attn_out", "heads go back to [T, H, D] before they are merged", _merged),
    Row("tie", "logits", "tie_word_embeddings, and which tensor the head reads", _headless),
)
# What is read off the values alone: tried where nothing else is a cause.
LAST = (Row("permuted", " ".join(x for x in PRODUCTS if PRODUCTS[x] == x), "the order of rows", _permuted),)


def guesses(scene: Scene, table: tuple[Row, ...] = TABLE) -> Iterator[Guess]:
    """Every change to weights that can show first here."""
    from gptcli.model.part import Change

    for row in table:
        if scene.window.intersection(row.at.split()):
            for said, weights in row.guesses(scene):
                yield Guess(row.code, said, row.mend, Change(weights=weights))
