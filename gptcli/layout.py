"""Every weight of an architecture, declared once.

Counting, random initialisation, loading, validation and sharding all read this table, so none of them can drift.
Matrices are stored as torch's Linear stores them, [out, in]. Letters: V vocabulary, C hidden size, H heads, G key/value
heads, D head size, F MLP size, n context length.
"""

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

from gptcli.spec import Dense, LayerNorm, Learned, NoNorm, Spec

# What a dimension counts, and its letter.
AXES = {"vocab": "V", "context": "n", "hidden": "C", "heads": "H·D", "kv_heads": "G·D", "head_dim": "D", "mlp": "F"}


class Param(NamedTuple):
    """One weight: its path, its shape, what each dimension counts (AXES), and its part in the model.

    role: `table` is read by rows; `matrix` multiplies; `residual` is a matrix whose product is added to the residual
    stream; `gain` scales (ones at the start), `bias` shifts (zeros). tied_to: another Param's name that holds the data.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    role: Literal["table", "matrix", "residual", "gain", "bias"]
    tied_to: str = ""

    @property
    def size(self) -> int:
        """Numbers that this weight adds to the model: none when it is tied."""
        return 0 if self.tied_to else prod(self.shape)


def layout(spec: Spec) -> Iterator[Param]:
    """Every weight that the forward pass reads, in the order in which it reads them."""
    yield Param("embed.weight", (spec.vocab_size, spec.hidden_size), ("vocab", "hidden"), "table")
    if isinstance(spec.position, Learned):
        yield Param("pos_embed.weight", (spec.context_length, spec.hidden_size), ("context", "hidden"), "table")
    for i in range(spec.n_layers):
        yield from _layer(f"layers.{i}", spec)
    if spec.norm.final:
        yield from _norm("final_norm", spec.hidden_size, "hidden", spec)
    tied_to = "embed.weight" if spec.lm_head.tied else ""
    yield Param("lm_head.weight", (spec.vocab_size, spec.hidden_size), ("vocab", "hidden"), "matrix", tied_to)
    if spec.lm_head.bias:
        yield Param("lm_head.bias", (spec.vocab_size,), ("vocab",), "bias")


def _layer(at: str, spec: Spec) -> Iterator[Param]:
    a, mlp, hidden = spec.attention, spec.mlp, (spec.hidden_size, "hidden")
    heads, kv_heads = (a.n_heads * a.head_dim, "heads"), (a.n_kv_heads * a.head_dim, "kv_heads")
    if spec.norm.placement == "pre":
        yield from _norm(f"{at}.attn_norm", *hidden, spec)
    yield from _linear(f"{at}.attn.q", heads, hidden, a.bias)
    yield from _linear(f"{at}.attn.k", kv_heads, hidden, a.bias)
    yield from _linear(f"{at}.attn.v", kv_heads, hidden, a.bias)
    if a.qk_norm:
        yield from _norm(f"{at}.attn.q_norm", a.head_dim, "head_dim", spec)
        yield from _norm(f"{at}.attn.k_norm", a.head_dim, "head_dim", spec)
    yield from _linear(f"{at}.attn.o", hidden, heads, a.o_bias, "residual")
    if spec.norm.placement == "post":
        yield from _norm(f"{at}.attn_norm", *hidden, spec)
    if isinstance(mlp, Dense):
        size = (mlp.size, "mlp")
        if spec.norm.placement == "pre":
            yield from _norm(f"{at}.mlp_norm", *hidden, spec)
        yield from _linear(f"{at}.mlp.up", size, hidden, mlp.bias)
        if mlp.gated:
            yield from _linear(f"{at}.mlp.gate", size, hidden, mlp.bias)
        yield from _linear(f"{at}.mlp.down", hidden, size, mlp.bias, "residual")
        if spec.norm.placement == "post":
            yield from _norm(f"{at}.mlp_norm", *hidden, spec)


def _norm(at: str, size: int, axis: str, spec: Spec) -> Iterator[Param]:
    if isinstance(spec.norm, NoNorm):
        return
    yield Param(f"{at}.weight", (size,), (axis,), "gain")
    if isinstance(spec.norm, LayerNorm) and spec.norm.bias:
        yield Param(f"{at}.bias", (size,), (axis,), "bias")


def _linear(at: str, out: tuple[int, str], into: tuple[int, str], bias: bool, role="matrix") -> Iterator[Param]:
    yield Param(f"{at}.weight", (out[0], into[0]), (out[1], into[1]), role)
    if bias:
        yield Param(f"{at}.bias", (out[0],), (out[1],), "bias")
