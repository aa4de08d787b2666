"""Every weight of an architecture, declared once.

Counting, random initialisation, loading, validation and sharding all read this table, so none of them can drift.
Matrices are stored as torch's Linear stores them, [out, in]. Letters: V vocabulary, C hidden size, P the size of a
token's row where it is not C, H heads, G key/value heads, D head size, F MLP size, E experts, n context length.
"""

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

from gptcli.spec import Dense, Experts, LayerNorm, Learned, NoNorm, Relative, Spec

# What a dimension counts, and its letter.
AXES = {
    "vocab": "V", "context": "n", "hidden": "C", "heads": "H·D", "kv_heads": "G·D", "head": "H", "head_dim": "D",
    "embed": "P", "mlp": "F", "experts": "E", "one": "1", "segments": "segments", "buckets": "buckets",
}  # fmt: skip


class Place(NamedTuple):
    """Where a weight or an activation stands: which stack (`encoder`, or empty), which layer (from 0), and what it is
    called there: `encoder.layers.3.attn.q` is Place("encoder", 3, "attn.q").
    """

    stack: Literal["", "encoder"]
    layer: int | None
    name: str

    @classmethod
    def of(cls, path: str) -> "Place":
        inside = path.removeprefix("encoder.")
        stack = "encoder" if inside != path else ""
        if not inside.startswith("layers."):
            return cls(stack, None, inside)
        _, index, name = inside.split(".", 2)
        return cls(stack, int(index), name)

    def spec(self, whole: Spec) -> Spec:
        """The architecture there: of the whole, this stack's, and in it this layer's."""
        stack = whole.encoder if self.stack else whole
        return stack if self.layer is None else stack.at(self.layer)


class Param(NamedTuple):
    """One weight: its path, its shape, what each dimension counts (AXES), and its part in the model.

    role: `table` is read by rows; `matrix` multiplies; `residual` is a matrix whose product is added to the residual
    stream; `gain` scales (ones at the start), `bias` shifts (zeros). tied_to: another Param's name that holds the data.
    head_dim: rows of its first dimension that belong to one head, where that dimension counts heads.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    role: Literal["table", "matrix", "residual", "gain", "bias"]
    tied_to: str = ""
    head_dim: int = 1

    @property
    def size(self) -> int:
        """Numbers that this weight adds to the model: none when it is tied."""
        return 0 if self.tied_to else prod(self.shape)


def layout(spec: Spec) -> Iterator[Param]:
    """Every weight that the forward pass reads, in the order in which it reads them."""
    if spec.encoder is not None:
        for param in layout(spec.encoder):
            shared = param.name == "embed.weight" and spec.encoder_embed == "shared"
            tied_to = "embed.weight" if shared else f"encoder.{param.tied_to}" if param.tied_to else ""
            yield param._replace(name=f"encoder.{param.name}", tied_to=tied_to)
    yield from _embedding(spec)
    before, inside = None, ()
    for i in range(spec.n_layers):
        here = spec.at(i)
        if here is not before:
            before, inside = here, tuple(_layer("", here))
        yield from (Param(f"layers.{i}{param.name}", *param[1:]) for param in inside)
    if spec.norm.final:
        yield from _norm("final_norm", spec.hidden_size, "hidden", spec)
    yield from _head(spec)


def _embedding(spec: Spec) -> Iterator[Param]:
    hidden, row = (spec.hidden_size, "hidden"), _row(spec)
    yield Param("embed.weight", (spec.vocab_size, row[0]), ("vocab", row[1]), "table")
    if spec.embed_size is not None:
        yield from _linear("embed_in", hidden, row, False)
    if isinstance(spec.position, Learned):
        rows = spec.context_length + spec.position.offset
        yield Param("pos_embed.weight", (rows, spec.hidden_size), ("context", "hidden"), "table")
    if spec.n_segments is not None:
        yield Param("segment_embed.weight", (spec.n_segments, spec.hidden_size), ("segments", "hidden"), "table")
    if spec.norm.embedding:
        yield from _norm("embed_norm", *hidden, spec)
    if isinstance(spec.position, Relative):
        shape = (spec.position.buckets, spec.attention.n_heads)
        yield Param("rel_bias.weight", shape, ("buckets", "head"), "table")


def _head(spec: Spec) -> Iterator[Param]:
    head, hidden, row = spec.lm_head, (spec.hidden_size, "hidden"), _row(spec)
    if head is None:
        return
    if spec.embed_size is not None:
        yield from _linear("embed_out", row, hidden, False)
    if head.transform is not None:
        yield from _linear("lm_head.dense", hidden, hidden, head.transform.bias)
        yield from _norm("lm_head.norm", *hidden, spec)
    tied_to = "embed.weight" if head.tied else ""
    yield Param("lm_head.weight", (spec.vocab_size, row[0]), ("vocab", row[1]), "matrix", tied_to)
    if head.bias:
        yield Param("lm_head.bias", (spec.vocab_size,), ("vocab",), "bias")


def _row(spec: Spec) -> tuple[int, str]:
    """The size of a token's row, and its axis."""
    return (spec.hidden_size, "hidden") if spec.embed_size is None else (spec.embed_size, "embed")


def _layer(at: str, spec: Spec) -> Iterator[Param]:
    if spec.attention.normed:
        yield from _sublayer_norms(f"{at}.attn", spec, before=True)
    yield from _attention(f"{at}.attn", spec, spec.hidden_size)
    yield from _sublayer_norms(f"{at}.attn", spec, before=False)
    if spec.encoder is not None:
        yield from _sublayer_norms(f"{at}.cross", spec, before=True)
        yield from _attention(f"{at}.cross", spec.across, spec.encoder.hidden_size)
        yield from _sublayer_norms(f"{at}.cross", spec, before=False)
    if isinstance(spec.mlp, (Dense, Experts)):
        # Where one norm serves both sublayers, the MLP has none of its own.
        if spec.residual != "parallel_shared":
            yield from _sublayer_norms(f"{at}.mlp", spec, before=True)
        yield from _mlp(f"{at}.mlp", spec) if isinstance(spec.mlp, Dense) else _experts(f"{at}.mlp", spec)
        yield from _sublayer_norms(f"{at}.mlp", spec, before=False)


def _sublayer_norms(at: str, spec: Spec, before: bool) -> Iterator[Param]:
    """The norms around a sublayer: of what it reads; of what it gives; of its sum with the residual."""
    placement, hidden = spec.norm.placement, (spec.hidden_size, "hidden")
    if before and placement in ("pre", "sandwich"):
        yield from _norm(f"{at}_norm", *hidden, spec)
    if not before and placement in ("output", "sandwich"):
        yield from _norm(f"{at}_out_norm", *hidden, spec)
    if not before and placement == "post":
        yield from _norm(f"{at}_norm", *hidden, spec)


def _attention(at: str, spec: Spec, read_size: int) -> Iterator[Param]:
    """read_size: of the vectors that keys and values are made of."""
    a, hidden, read = spec.attention, (spec.hidden_size, "hidden"), (read_size, "hidden")
    heads, kv_heads = (a.n_heads * a.head_dim, "heads"), (a.n_kv_heads * a.head_dim, "kv_heads")
    for letter, size, into in (("q", heads, hidden), ("k", kv_heads, read), ("v", kv_heads, read)):
        yield from _linear(f"{at}.{letter}", size, into, a.bias, head_dim=a.head_dim)
    for letter, number, size in (("q", a.n_heads, heads), ("k", a.n_kv_heads, kv_heads)):
        if a.qk_norm == "head":
            yield from _norm(f"{at}.{letter}_norm", a.head_dim, "head_dim", spec)
        elif a.qk_norm == "whole":
            yield from _norm(f"{at}.{letter}_norm", *size, spec)
        elif a.qk_norm == "each":
            for head in range(number):
                yield Param(f"{at}.{letter}_norm.{head}.weight", (a.head_dim,), ("head_dim",), "gain")
    if a.sinks:
        yield Param(f"{at}.sinks", (a.n_heads,), ("head",), "bias")
    yield from _linear(f"{at}.o", hidden, heads, a.o_bias, "residual")


def _mlp(at: str, spec: Spec) -> Iterator[Param]:
    mlp = spec.mlp
    yield from _unit(at, spec.hidden_size, mlp.size, mlp.gated, mlp.bias)


def _experts(at: str, spec: Spec) -> Iterator[Param]:
    mlp, hidden = spec.mlp, (spec.hidden_size, "hidden")
    yield from _linear(f"{at}.router", (mlp.n_experts, "experts"), hidden, mlp.router_bias)
    for expert in range(mlp.n_experts):
        yield from _unit(f"{at}.experts.{expert}", spec.hidden_size, mlp.size, True, mlp.bias)
    if mlp.shared_size is not None:
        yield from _unit(f"{at}.shared", spec.hidden_size, mlp.shared_size, True, mlp.bias)
        yield from _linear(f"{at}.shared_router", (1, "one"), hidden, False)


def _unit(at: str, hidden_size: int, size: int, gated: bool, bias: bool) -> Iterator[Param]:
    """The matrices of one MLP."""
    hidden, inner = (hidden_size, "hidden"), (size, "mlp")
    yield from _linear(f"{at}.up", inner, hidden, bias)
    if gated:
        yield from _linear(f"{at}.gate", inner, hidden, bias)
    yield from _linear(f"{at}.down", hidden, inner, bias, "residual")


def _norm(at: str, size: int, axis: str, spec: Spec) -> Iterator[Param]:
    if isinstance(spec.norm, NoNorm):
        return
    if spec.norm.weight:
        yield Param(f"{at}.weight", (size,), (axis,), "gain")
    if isinstance(spec.norm, LayerNorm) and spec.norm.bias:
        yield Param(f"{at}.bias", (size,), (axis,), "bias")


def _linear(
    at: str, out: tuple[int, str], into: tuple[int, str], bias: bool, role="matrix", head_dim: int = 1
) -> Iterator[Param]:
    yield Param(f"{at}.weight", (out[0], into[0]), (out[1], into[1]), role, head_dim=head_dim)
    if bias:
        yield Param(f"{at}.bias", (out[0],), (out[1],), "bias", head_dim=head_dim)
