"""What an architecture costs: arithmetic over its layout. No torch, nothing allocated.

A FLOP is one multiplication or one addition: a matrix product of [m, k] and [k, n] is 2·m·k·n. Norms, activations,
softmax and the embedding's look-up are left out, as is usual.
"""

from collections.abc import Iterable
from math import prod

from gptcli.errors import GptcliError
from gptcli.layout import Param, Place, layout
from gptcli.spec import Attention, Spec

# Bytes of one number, by type.
ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
SHORT = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16"}
# What only those positions go through whose logits are wanted.
AFTER = ("embed_out", "lm_head")


def dtype_name(wanted: str, stored: str) -> str:
    """The type that --dtype means; `auto` is the one that the checkpoint stores. Raises GptcliError."""
    name = stored if wanted == "auto" else SHORT.get(wanted, wanted)
    if name not in ITEM_BYTES:
        raise GptcliError(
            f"--dtype {wanted}: no such type", f"one of auto, {', '.join([*SHORT, *ITEM_BYTES])}", "dtype"
        )
    return name


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


def kv_cache_bytes(spec: Spec, tokens: int, item_bytes: int, batch: int = 1, source: int = 0) -> int:
    """Bytes of all layers' keys and values after `tokens` tokens; a window keeps only its latest.

    source: tokens of the source text, whose keys and values each layer's cross attention keeps.
    """
    kept = 0
    for here in (spec.at(i) for i in range(spec.n_layers)):
        a, cross = here.attention, here.cross
        kept += min(tokens, a.window or tokens) * a.n_kv_heads * a.head_dim
        kept += source * cross.n_kv_heads * cross.head_dim if cross else 0
    return 2 * batch * kept * item_bytes


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
    rows = tokens if head_rows is None else head_rows
    total = flops_forward(spec.encoder, source, batch, masked) if spec.encoder is not None else 0
    for param in layout(spec):
        place = Place.of(param.name)
        if param.role not in ("matrix", "residual") or place.stack:
            continue
        # Keys and values of a cross attention are made of the source.
        of_source = place.name.startswith(("cross.k.", "cross.v."))
        each = rows if component(param.name) in AFTER else source if of_source else tokens
        total += 2 * batch * each * _active(param, spec)
    for here in (spec.at(i) for i in range(spec.n_layers)):
        a, cross = here.attention, here.cross
        pairs = (visible_pairs(a, tokens) if masked else tokens * tokens) * a.n_heads * a.head_dim
        pairs += tokens * source * cross.n_heads * cross.head_dim if cross else 0
        total += 2 * batch * 2 * pairs  # scores, and weighted values
    return total


def _active(param: Param, spec: Spec) -> int:
    """Numbers of a matrix that one token meets: of experts, which are alike, the first stand for those it takes."""
    place = Place.of(param.name)
    if ".experts." in param.name:
        return prod(param.shape) if int(place.name.split(".")[2]) < place.spec(spec).mlp.top_k else 0
    return prod(param.shape)
