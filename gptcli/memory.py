"""What a forward pass holds at once, moment by moment: arithmetic, no torch. The largest moment is its peak.

The model is the forward pass as gptcli/model/ runs it. The tests hold its peak against what torch's allocator gave on a
CPU, kernels' own scratch included: at toy sizes within a tenth below and a sixth above, most often within 1 %. The
residual stream and what a sublayer reads live until the layer ends; attention adds queries, keys, values and the
weighted values, an MLP its widest vectors, the head its logits; masks and the rotation's angles stay for all layers.
Half types compute norms, rotations and logits in float32, whose copies count. No text is padded, and one expert may be
given every token.

B texts, T queries, S source positions, C hidden size, H heads, G key/value heads, D head size, F MLP size, V
vocabulary. Sizes are bytes.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from gptcli.count import ITEM_BYTES, kinds
from gptcli.spec import Experts, LayerNorm, NoMLP, NoNorm, Relative, Rope, Spec

Rows = Literal["all", "last"]
Alive = dict[str, int]  # bytes by name: an activation's as `trace` has it, or what a temporary is
HEAD_BLOCK = 1024  # rows of the head that half types turn into float32 at once: they stay in the processor's cache
QUERY_BLOCK = 128  # queries that attention takes at once, where its kernel needs a mask


class Moment(NamedTuple):
    """A point of the forward pass, and what is alive there."""

    name: str
    alive: Alive

    @property
    def bytes(self) -> int:
        return sum(self.alive.values())


class _Request(NamedTuple):
    """B, T and S, and the bytes of a number."""

    batch: int
    tokens: int
    source: int
    item: int

    @property
    def half(self) -> bool:
        return self.item < 4

    @property
    def wide(self) -> int:
        """Bytes of a number in the sums that half types take in float32."""
        return max(self.item, 4)

    def numbers(self, width: int) -> int:
        """Numbers of one vector a position."""
        return self.batch * self.tokens * width


def peak(spec: Spec, tokens: int, dtype: str, batch: int = 1, rows: Rows = "last", source: int = 0) -> Moment:
    """The moment that holds most, in a forward pass over [B, T] tokens (and [B, S] of the source) in that type.

    rows: whose logits are wanted. Weights, ids and a cache are not in it.
    """
    return max(moments(spec, tokens, dtype, batch, rows, source), key=lambda moment: moment.bytes)


def moments(
    spec: Spec, tokens: int, dtype: str, batch: int = 1, rows: Rows = "last", source: int = 0
) -> Iterator[Moment]:
    """Every moment that may be the peak: those of one layer of each kind, then the head's."""
    request, kept = _Request(batch, tokens, source, ITEM_BYTES[dtype]), {}
    if spec.encoder is not None:
        for inside in moments(spec.encoder, source, dtype, batch, "all"):
            yield Moment(f"encoder: {inside.name}", {f"encoder.{name}": n for name, n in inside.alive.items()})
        kept = {"encoder's vectors": batch * source * spec.encoder.hidden_size * request.item}
    known = set()
    for here, _ in kinds(spec):
        if here.attention not in known and (mask := _mask(here, request)):
            kept["masks"] = kept.get("masks", 0) + mask
        if isinstance(here.position, Rope) and here.position not in known:
            turning = (here.position.rotary_dim or here.attention.head_dim) * request.wide
            kept["rotation's angles"] = kept.get("rotation's angles", 0) + tokens * turning
        known |= {here.attention, here.position}
    if isinstance(spec.position, Relative):
        embed = {"embed": request.numbers(spec.hidden_size) * request.item}
        yield Moment("distances", kept | embed | {"distances and buckets": (4 * 8 + 4) * tokens**2})
    for here, _ in kinds(spec):
        yield from (Moment(name, kept | alive) for name, alive in _layer(here, request))
    encoded = {name: size for name, size in kept.items() if name == "encoder's vectors"}
    yield from (Moment(name, encoded | alive) for name, alive in _head(spec, request, rows))


def _masked(spec: Spec, request: _Request) -> bool:
    """Does the kernel need more than its causal flag?"""
    a = spec.attention
    narrow = a.window is not None and a.window < request.tokens
    return narrow or a.sinks or a.softcap is not None or isinstance(spec.position, Relative)


def _mask(spec: Spec, request: _Request) -> int:
    """Bytes of what stays and says who sees whom: a byte a pair, but for blocks of queries, whose masks pass; and a
    number for each head and pair where distances add to the scores.
    """
    a, pairs = spec.attention, request.tokens**2
    stays = _masked(spec, request) and (request.tokens <= QUERY_BLOCK or a.softcap is not None)
    added = a.n_heads * pairs * request.item if isinstance(spec.position, Relative) else 0
    return stays * pairs + added


def _layer(spec: Spec, request: _Request) -> Iterator[Moment]:
    """Moments of one layer."""
    size = request.numbers(spec.hidden_size) * request.item
    reads = spec.norm.placement in ("pre", "sandwich")
    stream, normed = {"resid_pre": size}, {"attn_norm": size} if reads and spec.attention.normed else {}
    yield from _attention("attn", spec, request, request.tokens, stream | normed)
    stream |= {"attn_out": size, "resid_mid": size}
    if spec.encoder is not None:
        yield from _attention("cross", spec.across, request, request.source, stream | normed | {"cross_norm": size})
        stream |= {"resid_cross": stream.pop("resid_mid")}
    if not isinstance(spec.mlp, NoMLP):
        yield Moment("mlp_norm", stream | normed | _norm("mlp_norm", spec, request, spec.hidden_size))
        yield from _mlp(spec, request, stream | ({"mlp_norm": size} if reads else {}))


def _norm(name: str, spec: Spec, request: _Request, width: int) -> Alive:
    """What a norm of vectors of that width makes."""
    numbers = request.numbers(width)
    if isinstance(spec.norm, NoNorm):
        return {}
    alive = {name: numbers * request.item}
    if request.half:
        return alive | {f"{name}, float32": 2 * numbers * 4}
    return alive if isinstance(spec.norm, LayerNorm) else alive | {f"{name}, not yet scaled": numbers * request.item}


def _attention(at: str, spec: Spec, request: _Request, keys: int, stream: Alive) -> Iterator[Moment]:
    """Moments of one attention that reads so many keys: stream is what lives beside it."""
    a, item = spec.attention, request.item
    queries = request.numbers(a.n_heads * a.head_dim)
    read = request.batch * keys * a.n_kv_heads * a.head_dim
    stream = stream | {f"{at}.q": queries * item, f"{at}.k": read * item, f"{at}.v": read * item}
    if a.qk_norm != "none":
        yield Moment("q_norm", stream | _norm(f"{at}.q_norm", spec, request, a.n_heads * a.head_dim))
    if isinstance(spec.position, Rope):
        turned = queries * (spec.position.rotary_dim or a.head_dim) // a.head_dim
        made = {f"{at}.q_rot": queries * item, f"{at}.q_rot, its halves": turned * request.wide}
        yield Moment("rotation", stream | made | ({f"{at}.q_rot, float32": 2 * turned * 4} if request.half else {}))
    z, pairs = {f"{at}.z": queries * item}, request.tokens * keys
    if a.softcap is not None:
        every = 2 * request.batch * keys * a.n_heads * a.head_dim
        made = {f"{at}.k and v, a copy for each query head": every * item}
        made |= {f"{at}.q and k, float32": (queries + every // 2) * 4} if request.half else {}
        made |= {f"{at}.scores and pattern, 3 matrices": 3 * request.batch * a.n_heads * pairs * request.wide}
        yield Moment("attention", stream | made)
    elif at == "attn" and _masked(spec, request):
        beside = {f"{at}.k and v, beside a sink": 2 * read * item} if a.sinks else {}
        yield Moment("attention", stream | z | beside | _of_block(spec, request))
    out = {f"{at}.z, heads merged": queries * item, f"{at}_out": request.numbers(spec.hidden_size) * item}
    yield Moment("attention's output", stream | z | out)


def _of_block(spec: Spec, request: _Request) -> Alive:
    """What a block of queries that needs a mask takes: what is added to its scores, and its weighted values."""
    a, rows = spec.attention, min(request.tokens, QUERY_BLOCK)
    sides = 1 if a.causal else 2
    keys = request.tokens if a.window is None else min(request.tokens, rows + sides * (a.window - 1))
    copies = 2 * a.n_heads if isinstance(spec.position, Relative) else 1 + a.n_heads if a.sinks else 1
    made = {"what is added to scores": (copies * request.item + 1) * rows * keys}
    values = request.batch * rows * a.n_heads * a.head_dim * request.item
    return made if rows == request.tokens else made | {"weighted values of a block": values}


def _mlp(spec: Spec, request: _Request, stream: Alive) -> Iterator[Moment]:
    mlp, item, hidden = spec.mlp, request.item, request.numbers(spec.hidden_size)
    wide, out = request.numbers(mlp.size) * item, {"mlp_out": hidden * item}
    if isinstance(mlp, Experts):
        router = request.numbers(mlp.n_experts) * (item + request.half * request.wide)
        stream = stream | {"mlp.router": router, "mlp_out": hidden * request.wide}
        taken = {"an expert's tokens": hidden * item, "another's output": hidden * item}
        yield Moment("expert", stream | taken | _unit(wide))
        if mlp.shared_size is not None:
            yield Moment("shared expert", stream | _unit(request.numbers(mlp.shared_size) * item))
    elif mlp.gated:
        yield Moment("mlp", stream | {"mlp.up": wide, "mlp.gate": wide, "mlp.act": wide})
        yield Moment("mlp's output", stream | {"mlp.up": wide, "mlp.act": wide} | out)
    else:
        yield Moment("mlp", stream | {"mlp.up": wide, "mlp.act": wide} | out)


def _unit(wide: int) -> Alive:
    """The widest vectors of one expert."""
    return {"mlp.up": wide, "mlp.gate": wide, "mlp.gate, activated": wide, "mlp.act": wide}


def _head(spec: Spec, request: _Request, rows: Rows) -> Iterator[Moment]:
    """The last norm and the logits, of the rows that are wanted."""
    request = request._replace(tokens=request.tokens if rows == "all" else 1)
    head, size = spec.lm_head, request.numbers(spec.hidden_size) * request.item
    if spec.norm.final:
        yield Moment("final_norm", {"resid_post": size} | _norm("final_norm", spec, request, spec.hidden_size))
    if head is None:
        return
    row = spec.embed_size or spec.hidden_size
    alive = {
        "final_norm" if spec.norm.final else "resid_post": size,
        "logits": request.numbers(spec.vocab_size) * request.wide,
    }
    if request.half:
        alive["final vectors, float32"] = request.numbers(row) * 4
        block = min(HEAD_BLOCK, spec.vocab_size)
        made = {"a block of the head, float32": block * row * 4, "a block's logits": request.numbers(block) * 4}
        yield Moment("logits", alive | made)
    yield Moment("logits", alive | ({"logits, a copy": alive["logits"]} if head.softcap is not None else {}))
