"""What an architecture costs: arithmetic over its layout. No torch, nothing allocated.

A FLOP is one multiplication or one addition: a matrix product of [m, k] and [k, n] is 2·m·k·n. Norms, activations,
softmax and the embedding's look-up are left out, as is usual.
"""

from collections.abc import Iterable
from math import prod

from gptcli.errors import GptcliError
from gptcli.layout import Param, layout
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
    """The first part of a path: `embed`, `pos_embed`, `layers`, `final_norm`, `lm_head`…"""
    return name.partition(".")[0]


def layer_index(name: str) -> int | None:
    """3 for `layers.3.attn.q.weight`, None outside the layers."""
    return int(name.split(".")[1]) if component(name) == "layers" else None


def layer_part(name: str) -> str:
    """What a weight inside a layer belongs to: `attention`, `mlp` or `norms`. q/k norms count as attention's."""
    part = name.split(".")[2]
    return {"attn": "attention", "mlp": "mlp"}.get(part, "norms")


def kv_cache_bytes(spec: Spec, tokens: int, item_bytes: int, batch: int = 1) -> int:
    """Bytes of all layers' keys and values after `tokens` tokens; a window keeps only its latest."""
    parts = [spec.at(i).attention for i in range(spec.n_layers)]
    kept = sum(min(tokens, a.window or tokens) * a.n_kv_heads * a.head_dim for a in parts)
    return 2 * batch * kept * item_bytes


def attention_matrix_bytes(spec: Spec, tokens: int, item_bytes: int) -> int:
    """Bytes of one layer's [H, T, T] attention weights, if they were stored."""
    return spec.attention.n_heads * tokens * tokens * item_bytes


def visible_pairs(part: Attention, tokens: int) -> int:
    """(query, key) pairs of one head that the mask lets through: T² in full, T(T+1)/2 causal, less with a window."""
    if not part.causal:
        return tokens * tokens
    window = min(part.window or tokens, tokens)
    return window * (window + 1) // 2 + (tokens - window) * window


def flops_forward(spec: Spec, tokens: int, batch: int = 1, masked: bool = True, head_rows: int | None = None) -> int:
    """FLOPs of one forward pass over [B, T] tokens.

    masked: count only the (query, key) pairs that the mask lets through, instead of all T². head_rows: positions of
    each text that go through the head (None: all of them).
    """
    products = [p for p in layout(spec) if p.role in ("matrix", "residual")]
    matrices = sum(_active(p, spec) for p in products if component(p.name) not in AFTER)
    attention = 0
    for a in (spec.at(i).attention for i in range(spec.n_layers)):
        attention += 2 * (visible_pairs(a, tokens) if masked else tokens * tokens) * a.n_heads * a.head_dim
    after = sum(prod(p.shape) for p in products if component(p.name) in AFTER)
    head = (tokens if head_rows is None else head_rows) * after
    return 2 * batch * (tokens * matrices + attention + head)


def _active(param: Param, spec: Spec) -> int:
    """Numbers of a matrix that one token meets: of experts, which are alike, the first stand for those it takes."""
    if ".experts." in param.name:
        taken = int(param.name.split(".")[4]) < spec.at(layer_index(param.name)).mlp.top_k
        return prod(param.shape) if taken else 0
    return prod(param.shape)
