"""What an architecture costs: arithmetic over its layout. No torch, nothing allocated.

A FLOP is one multiplication or one addition: a matrix product of [m, k] and [k, n] is 2·m·k·n. Norms, activations,
softmax and the embedding's look-up are left out, as is usual.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod

from gptcli.errors import GptcliError
from gptcli.layout import Param, Place, layout
from gptcli.spec import Attention, Spec

# Bytes of one number, by type.
ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
SHORT = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16"}
# What only those positions go through whose logits are wanted.
AFTER = ("embed_out", "lm_head")
# The parts of a forward pass, as its FLOPs are told apart.
PROJECTIONS, PAIRS, ACROSS, CROSS_PAIRS, MLP, EMBED, HEAD = (
    "attention projections", "scores and values", "cross projections", "cross scores and values", "mlp",
    "embedding projection", "head",
)  # fmt: skip


def dtype_name(wanted: str, stored: str) -> str:
    """The type that --dtype means; `auto` is the one that the checkpoint stores. Raises GptcliError."""
    name = stored if wanted == "auto" else SHORT.get(wanted, wanted)
    if name not in ITEM_BYTES:
        raise GptcliError(
            f"--dtype {wanted}: no such type", f"one of auto, {', '.join([*SHORT, *ITEM_BYTES])}", "dtype"
        )
    return name


def in_bytes(size: str) -> int:
    """Bytes that `24GiB` (of 1024s), `24GB` (of 1000s) or a bare number means. Raises GptcliError."""
    match = re.fullmatch(r"([0-9]{1,15})(\.[0-9]{1,6})?\s*(?:([kmgt]?)(i?)b)?", size.strip(), re.I)
    if not match or (match[4] and not match[3]):
        hint = "24GiB is 24 × 1024³ bytes and 24GB 24 × 1000³; without a unit, bytes"
        raise GptcliError(f"--memory {size}: not a size", hint, "memory")
    whole, rest, letter, binary = match.groups()
    unit = (1024 if binary else 1000) ** " kmgt".index((letter or " ").lower())
    return int(whole) * unit + int((rest or ".0")[1:]) * unit // 10 ** (len(rest or ".0") - 1)


def total(params: Iterable[Param]) -> int:
    """Distinct numbers: a tied weight adds none."""
    return sum(p.size for p in params)


def untied(params: Iterable[Param]) -> int:
    """Numbers if every name held its own."""
    return sum(prod(p.shape) for p in params)


def non_embedding(params: Iterable[Param]) -> int:
    """The layers and the final norm: no table, no head."""
    return sum(p.size for p in params if component(p.name) in ("layers", "final_norm"))


def without_positions(params: Iterable[Param]) -> int:
    """Everything but the position table: what nanoGPT's get_num_params reports."""
    return sum(p.size for p in params if component(p.name) != "pos_embed")


def active(params: Iterable[Param], spec: Spec) -> int:
    """What one token meets: of a layer's experts only those that it takes. Tables and head are counted whole."""
    return sum(p.size for p in params if _taken(p.name, spec))


def with_one_expert(params: Iterable[Param]) -> int:
    """What would be left if each layer had one expert: the size that `8x7B` gives for one of eight."""
    return sum(p.size for p in params if _expert(p.name) in (None, 0))


def _expert(name: str) -> int | None:
    """Which expert a weight belongs to (from 0), if to any."""
    return int(name.partition(".experts.")[2].partition(".")[0]) if ".experts." in name else None


def _taken(name: str, spec: Spec) -> bool:
    """Does a token meet this weight? Experts are alike, so the first stand for those that it takes."""
    expert = _expert(name)
    return expert is None or expert < Place.of(name).spec(spec).mlp.top_k


def component(name: str) -> str:
    """What of its stack a weight belongs to: `embed`, `pos_embed`, `layers`, `final_norm`, `lm_head`…"""
    place = Place.of(name)
    return "layers" if place.layer is not None else place.name.partition(".")[0]


def layer_part(name: str) -> str:
    """What a weight called so within a layer belongs to: `attention`, `cross-attention`, `mlp` or `norms`.

    q/k norms count as attention's.
    """
    part = name.partition(".")[0]
    return {"attn": "attention", "cross": "cross-attention", "mlp": "mlp"}.get(part, "norms")


def kinds(spec: Spec) -> Iterator[tuple[Spec, tuple[int, ...]]]:
    """Layers that are alike, in the order of their first: (the Spec as it is there, their indices from 0)."""
    named: dict[int, list[int]] = {}
    for i in range(spec.n_layers if spec.variants else 0):
        first = next((n for n, variant in enumerate(spec.variants) if i in variant.layers), -1)
        named.setdefault(first, []).append(i)
    if not spec.variants:
        yield spec, tuple(range(spec.n_layers))
    for layers in named.values():
        yield spec.at(layers[0]), tuple(layers)


def kept(part: Attention, tokens: int) -> int:
    """Positions whose keys and values a cache holds after `tokens` of them: a window's latest, else all."""
    return min(tokens, part.window or tokens)


def kv_cache_bytes(spec: Spec, tokens: int, item_bytes: int, batch: int = 1, source: int = 0) -> int:
    """Bytes of all layers' keys and values after `tokens` tokens; a window keeps only its latest.

    source: tokens of the source text, whose keys and values each layer's cross attention keeps.
    """
    total = 0
    for here, layers in kinds(spec):
        a, cross = here.attention, here.cross
        each = kept(a, tokens) * a.n_kv_heads * a.head_dim
        each += source * cross.n_kv_heads * cross.head_dim if cross else 0
        total += each * len(layers)
    return 2 * batch * total * item_bytes


def attention_matrix_bytes(spec: Spec, tokens: int, item_bytes: int) -> int:
    """Bytes of one layer's [H, T, T] attention weights, if they were stored."""
    return spec.attention.n_heads * tokens * tokens * item_bytes


def visible_pairs(part: Attention, tokens: int) -> int:
    """(query, key) pairs of one head that the mask lets through: T² in full, T(T+1)/2 causal, less with a window."""
    window = min(part.window or tokens, tokens)
    causal = window * (window + 1) // 2 + (tokens - window) * window
    return causal if part.causal else 2 * causal - tokens  # both ways: its mirror too, the diagonal once


def flops_forward(
    spec: Spec, tokens: int, batch: int = 1, masked: bool = True, head_rows: int | None = None, source: int = 0
) -> int:
    """FLOPs of one forward pass over [B, T] tokens, and over [B, S] of the source where an encoder reads one.

    masked: count only the (query, key) pairs that the mask lets through, instead of all T². head_rows: positions of
    each text that go through the head (None: all of them).
    """
    return sum(flops_by_part(spec, tokens, batch, masked, head_rows, source).values())


def flops_by_part(
    spec: Spec,
    tokens: int,
    batch: int = 1,
    masked: bool = True,
    head_rows: int | None = None,
    source: int = 0,
    before: int = 0,
) -> dict[tuple[str, str], int]:
    """flops_forward by (stack, part of it).

    before: positions before these whose keys and values are at hand, and with them all that is made of the source: each
    query reads those too. Only causal layers can keep them.
    """
    rows = tokens if head_rows is None else head_rows
    found: dict[tuple[str, str], int] = {}
    if spec.encoder is not None and not before:
        inside = flops_by_part(spec.encoder, source, batch, masked)
        found |= {("encoder", part): flops for (_, part), flops in inside.items()}
    for (part, of), numbers in _matrices(spec).items():
        each = {"tokens": tokens, "source": 0 if before else source, "rows": rows}[of]
        found["", part] = found.get(("", part), 0) + 2 * batch * each * numbers
        if part in (PROJECTIONS, ACROSS):  # the pairs stand beside the matrices that make them
            found.setdefault(("", PAIRS if part == PROJECTIONS else CROSS_PAIRS), 0)
    for here, layers in kinds(spec):
        a, cross, all_keys = here.attention, here.cross, before + tokens
        seen = visible_pairs(a, all_keys) - (visible_pairs(a, before) if before else 0) if masked else tokens * all_keys
        for part, of, pairs in ((PAIRS, a, seen), (CROSS_PAIRS, cross, tokens * source)):
            if of is not None:  # scores, and weighted values
                found["", part] += 2 * batch * 2 * pairs * of.n_heads * of.head_dim * len(layers)
    return found


def flops_spared(spec: Spec, tokens: int, batch: int = 1, masked: bool = True, source: int = 0) -> int:
    """FLOPs that flops_forward counts and a pass for the last position's logits leaves out of the last layer: what the
    other positions' queries, outputs and MLP would take there.
    """
    last, here, others = spec.n_layers - 1, spec.at(spec.n_layers - 1), tokens - 1
    read_by_all = ("attn.k.", "attn.v.", "cross.k.", "cross.v.")
    places = ((param, Place.of(param.name)) for param in layout(spec) if param.role in ("matrix", "residual"))
    numbers = sum(
        prod(param.shape)
        for param, place in places
        if not place.stack
        and place.layer == last
        and not place.name.startswith(read_by_all)
        and _taken(param.name, spec)
    )
    a, cross = here.attention, here.cross
    pairs = visible_pairs(a, tokens) - kept(a, tokens) if masked else others * tokens
    products = pairs * a.n_heads * a.head_dim + (others * source * cross.n_heads * cross.head_dim if cross else 0)
    return 2 * batch * (others * numbers + 2 * products)


@lru_cache(maxsize=4)  # a large mixture of experts declares some ten thousand weights
def _matrices(spec: Spec) -> dict[tuple[str, str], int]:
    """Numbers of this stack's matrices that one position meets, by (part, which positions do).

    The positions are the text's `tokens`, those of the `source` (a cross attention's keys and values are made of it),
    or the `rows` whose logits are wanted.
    """
    found: dict[tuple[str, str], int] = {}
    for param in layout(spec):
        place = Place.of(param.name)
        if param.role not in ("matrix", "residual") or place.stack or not _taken(param.name, spec):
            continue
        where = component(param.name)
        of = "source" if place.name.startswith(("cross.k.", "cross.v.")) else "rows" if where in AFTER else "tokens"
        inside = {"attention": PROJECTIONS, "cross-attention": ACROSS}
        part = inside.get(layer_part(place.name), MLP) if where == "layers" else HEAD if where in AFTER else EMBED
        found[part, of] = found.get((part, of), 0) + prod(param.shape)
    return found
