"""What an architecture is, as plain frozen data.

Three ideas. A Spec holds every choice that a forward pass depends on and nothing else. A choice between mechanisms is a
tagged part (`position: {kind: rope, …}`) with fields of its own, never a flag. Reading is strict: an unknown field, a
wrong type or an impossible combination is an error that names its path (`attention.n_kv_heads: 3 does not divide …`).
"""

import math
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from reprlib import Repr
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from gptcli.data import data
from gptcli.errors import GptcliError, nearest

MOST_LAYERS = 100_000  # each is declared weight by weight: a slip of the keyboard should not fill the memory


class SpecError(GptcliError):
    """A Spec that can't be. `message` starts with the path of the field at fault."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message, code="spec")


@data
class NoPosition:
    """The model is told nothing of order, beyond what a causal mask gives away."""

    kind: ClassVar[str] = "none"


@data
class Learned:
    """A table of context_length rows (and `offset` unused ones before them), added to the token embedding."""

    kind: ClassVar[str] = "learned"
    offset: Literal[0, 2] = 0


@data
class Sinusoidal:
    """Sines and cosines of position · theta^(-2i/C), added to the token embedding (arXiv:1706.03762).

    pairs: where the sine and the cosine of one frequency stand: side by side (`neighbours`), or all sines before all
    cosines (`halves`).
    """

    kind: ClassVar[str] = "sinusoidal"
    theta: float = 10_000.0
    pairs: Literal["halves", "neighbours"] = "neighbours"

    def __post_init__(self):
        require(self.theta > 0, f"theta: {self.theta:g} is not positive")


@data
class Relative:
    """A learned number for each head and distance, added to the scores of all layers' own attention (arXiv:1910.10683).

    Distances share `buckets`: near ones have one each, far ones more and more of them share one, and from max_distance
    on all share the last. Without a causal mask, half of the buckets are for keys to the right.
    """

    kind: ClassVar[str] = "relative"
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self):
        require(self.buckets % 4 == 0, f"buckets: {self.buckets} is not a multiple of 4")
        require(self.max_distance > self.buckets // 2, f"max_distance: {self.max_distance} is within the near buckets")


@data
class NoScaling:
    """Rotary frequencies as the base gives them."""

    kind: ClassVar[str] = "none"


@data
class LinearScaling:
    """Every rotary frequency divided by `factor` (position interpolation, arXiv:2306.15595)."""

    kind: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self):
        require(self.factor > 0, f"factor: {self.factor:g} is not positive")


@data
class DynamicScaling:
    """A base that grows once a text is longer than `original_context` (NTK-aware scaling, anew at each length)."""

    kind: ClassVar[str] = "dynamic"
    factor: float
    original_context: int

    def __post_init__(self):
        require(self.factor > 0, f"factor: {self.factor:g} is not positive")


@data
class YarnScaling:
    """Slow pairs interpolated by `factor`, fast ones kept, a ramp between (arXiv:2309.00071).

    beta_fast and beta_slow: turns within the original context that bound the ramp; attention_factor multiplies cosine
    and sine (null: 0.1·ln(factor) + 1); truncate: the ramp's bounds are whole pairs.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        for field in ("factor", "beta_fast", "beta_slow"):
            require(getattr(self, field) > 0, f"{field}: {getattr(self, field):g} is not positive")


@data
class LongRopeScaling:
    """A divisor for each pair's frequency, one set for texts within `original_context`, one beyond (arXiv:2402.13753).

    attention_factor multiplies cosine and sine.
    """

    kind: ClassVar[str] = "longrope"
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int
    attention_factor: float = 1.0

    def __post_init__(self):
        for field in ("short_factors", "long_factors"):
            require(all(f > 0 for f in getattr(self, field)), f"{field}: not all are positive")


@data
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth passage in between."""

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self):
        require(self.factor > 0, f"factor: {self.factor:g} is not positive")
        require(self.high_freq_factor > self.low_freq_factor, "high_freq_factor: must be greater than low_freq_factor")


@data
class Rope:
    """Queries and keys turned by an angle that grows with their position (arXiv:2104.09864).

    Pair i of a head turns by position · theta^(-2i/R). `pairs` says which two numbers make a pair: `halves` (i and
    i + R/2, as most checkpoints store them) or `neighbours` (2i and 2i + 1, as the paper writes it). rotary_dim: R, the
    first numbers of a head that turn (null: all D). direction: of the turn from a pair's first number to its second.
    """

    kind: ClassVar[str] = "rope"
    theta: float = 10_000.0
    pairs: Literal["halves", "neighbours"] = "halves"
    rotary_dim: int | None = None
    direction: Literal["forward", "backward"] = "forward"
    scaling: NoScaling | LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling = NoScaling()

    def __post_init__(self):
        require(self.theta > 0, f"theta: {self.theta:g} is not positive")
        require((self.rotary_dim or 0) % 2 == 0, f"rotary_dim: {self.rotary_dim} is odd, and rotation turns pairs")
        ramped = isinstance(self.scaling, YarnScaling)
        require(not ramped or self.theta != 1, "theta: 1 turns all pairs alike, and yarn tells them apart")


@data
class NoNorm:
    """No normalisation anywhere (the hand-made examples)."""

    kind: ClassVar[str] = "none"
    placement: ClassVar[str] = "none"
    embedding: ClassVar[bool] = False
    final: ClassVar[bool] = False


@data
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) · weight + bias (arXiv:1607.06450).

    weight, bias: false where there are none. placement: `pre` norms what a sublayer reads, `output` what it gives,
    `sandwich` both, `post` its sum with the residual. embedding: one more after the embedding; final: one more before
    the head.
    """

    kind: ClassVar[str] = "layernorm"
    eps: float = 1e-5
    weight: bool = True
    bias: bool = True
    placement: Literal["pre", "post", "output", "sandwich"] = "pre"
    embedding: bool = False
    final: bool = True

    def __post_init__(self):
        require(self.eps >= 0, f"eps: {self.eps:g} is below 0")


@data
class RMSNorm:
    """x / sqrt(mean(x²) + eps) · (offset + weight) (arXiv:1910.07467).

    offset: 1 where the weights are stored less 1; weight: false where there are none. The rest as in LayerNorm.
    """

    kind: ClassVar[str] = "rmsnorm"
    eps: float = 1e-6
    offset: float = 0.0
    weight: bool = True
    placement: Literal["pre", "post", "output", "sandwich"] = "pre"
    embedding: bool = False
    final: bool = True

    def __post_init__(self):
        require(self.eps >= 0, f"eps: {self.eps:g} is below 0")


@data
class Attention:
    """H query heads of D numbers read G key/value heads: G = H is multi-head, G < H grouped-query, G = 1 multi-query.

    bias: of q, k and v; o_bias: of the output projection. scale multiplies q·k (null: 1/√D). window: a query sees that
    many latest keys, itself among them, and without `causal` as many to the other side. softcap: scores become
    cap·tanh(score/cap). sinks: each head has one learned score more in its softmax, for a key that holds nothing.
    qk_norm: the model's norm on q and k, of each `head` by one set of weights, of `each` head by its own (no bias), or
    of the `whole` projection; qk_norm_place: before or after the rotation. normed: false where it reads the residual
    stream as it is, though norms stand before sublayers.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    bias: bool = False
    o_bias: bool = False
    causal: bool = True
    qk_norm: Literal["none", "head", "each", "whole"] = "none"
    qk_norm_place: Literal["before", "after"] = "before"
    normed: bool = True
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self):
        divides = self.n_heads % self.n_kv_heads == 0
        require(divides, f"n_kv_heads: {self.n_kv_heads} does not divide n_heads: {self.n_heads}")


@data
class NoMLP:
    """A layer that only attends."""

    kind: ClassVar[str] = "none"


Activation = Literal["relu", "relu_squared", "gelu", "gelu_tanh", "gelu_sigmoid", "silu", "tanh"]


@data
class Dense:
    """down(act(up(x))), or gated: down(act(gate(x)) · up(x)) (arXiv:2002.05202). `gelu` is exact, by erf."""

    kind: ClassVar[str] = "dense"
    size: int
    activation: Activation
    gated: bool = False
    bias: bool = False


@data
class Experts:
    """Gated MLPs of which each token takes the top_k that a router prefers, weighed by its softmax (arXiv:2101.03961).

    normalized: the taken weights are scaled to sum to 1. shared_size: an MLP that every token takes beside them,
    weighed by a sigmoid of its own. limit: gate and up are clamped there and up is raised by 1.
    """

    kind: ClassVar[str] = "experts"
    n_experts: int
    top_k: int
    size: int
    activation: Activation
    normalized: bool = True
    bias: bool = False
    router_bias: bool = False
    shared_size: int | None = None
    limit: float | None = None

    def __post_init__(self):
        require(self.top_k <= self.n_experts, f"top_k: {self.top_k} is more than n_experts: {self.n_experts}")


@data
class Transform:
    """What a head does to the final vector first: norm(act(dense(x))), by a matrix [C, C] and the model's norm."""

    activation: Activation
    bias: bool = True


@data
class Head:
    """Logits: scale · (final vector · weight [V, C] (+ bias)). tied: the weight is the token embedding's.

    softcap: logits become cap·tanh(logit/cap). transform: of the final vector, before.
    """

    tied: bool = False
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    transform: Transform | None = None


@data
class Variant:
    """Layers (from 0) that have another position, attention or MLP than the Spec says; null keeps the Spec's."""

    layers: tuple[int, ...]
    position: NoPosition | Rope | None = None
    attention: Attention | None = None
    mlp: NoMLP | Dense | Experts | None = None


@data
class Spec:
    """An architecture. Sizes are V vocab_size, C hidden_size, N n_layers, H, G, D in `attention`, F in `mlp`.

    embed_size: the size of a token's row where it is not C; a matrix takes it to C, and one takes the final vector back
    before the head. embed_scale multiplies the token embedding, residual_scale what a sublayer adds to the residual.
    n_segments: rows of a table that tells a text's parts from one another, added to the token embedding.
    residual: the MLP reads what the attention left (`sequential`), or what the attention read: by a norm of its own
    (`parallel`), or by the attention's (`parallel_shared`). `tokenizer` names an encoding that ships with a library.

    encoder: what reads a source text, an architecture without a head; every layer then has, between its own attention
    and its MLP, the cross attention from its text to the encoder's final vectors. encoder_embed: the encoder looks
    tokens up in the decoder's table (`shared`) or in its `own`. lm_head null: the final vectors are what comes out.
    """

    name: str = ""
    vocab_size: int
    context_length: int
    hidden_size: int
    n_layers: int
    embed_size: int | None = None
    embed_scale: float = 1.0
    n_segments: int | None = None
    position: NoPosition | Learned | Sinusoidal | Relative | Rope
    norm: NoNorm | LayerNorm | RMSNorm
    attention: Attention
    mlp: NoMLP | Dense | Experts
    residual: Literal["sequential", "parallel", "parallel_shared"] = "sequential"
    residual_scale: float = 1.0
    variants: tuple[Variant, ...] = ()
    encoder: "Spec | None" = None
    encoder_embed: Literal["shared", "own"] = "shared"
    cross: Attention | None = None
    lm_head: Head | None
    tokenizer: str = ""

    def __post_init__(self):
        a, parts = self.attention, enumerate(self.variants)
        rotations = [("", self.position, a)]
        rotations += [(f"variants.{i}.", v.position or self.position, v.attention or a) for i, v in parts]
        for path, rope, attention in rotations:
            if isinstance(rope, Rope):
                _check_rotation(rope, attention, path)
        normless = isinstance(self.norm, NoNorm)
        require(
            a.qk_norm == "none" or not normless,
            f"attention.qk_norm: {a.qk_norm}, but norm.kind: none says of no norm to use",
        )
        require(self.n_layers <= MOST_LAYERS, f"n_layers: {show(self.n_layers)} is more than {MOST_LAYERS:,}")
        alone = self.norm.placement == "pre" or self.residual == "sequential"
        require(alone, f"residual: {self.residual} needs norm.placement: pre")
        halved = not isinstance(self.position, Sinusoidal) or self.hidden_size % 2 == 0
        require(halved, f"hidden_size: {self.hidden_size} is odd, and sines and cosines share it in halves")
        self._check_encoder()
        for variant in self.variants:
            for layer in variant.layers:
                require(layer < self.n_layers, f"variants.layers: {layer} is beyond n_layers: {self.n_layers} (from 0)")

    def _check_encoder(self) -> None:
        encoder, cross = self.encoder, self.cross
        require((encoder is None) == (cross is None), "cross: an encoder and a cross attention come together")
        if encoder is None:
            return
        require(encoder.encoder is None and encoder.lm_head is None, "encoder: it has no encoder and no lm_head itself")
        unmasked = not cross.causal and cross.window is None
        require(unmasked, "cross: no mask and no window parts a text from its source")
        require(cross.normed, "cross.normed: false, which only a layer's own attention may be")
        require(self.residual == "sequential", f"residual: {self.residual}, but cross attention stands in a row")
        for field in ("vocab_size", "hidden_size", "embed_size"):
            theirs, ours = getattr(encoder, field), getattr(self, field)
            alike = self.encoder_embed == "own" or theirs == ours
            require(alike, f"encoder.{field}: {theirs} is not {ours}, and encoder_embed: shared says of one table")

    @property
    def most_tokens(self) -> float:
        """How many tokens a text may have: the context, but no end where positions are told by distances, of which all
        far ones share a number; context_length is then what the model was made for.
        """
        return math.inf if isinstance(self.position, Relative) else self.context_length

    @property
    def across(self) -> "Spec":
        """This Spec as its cross attention is built by it."""
        return replace(self, attention=self.cross, position=NoPosition(), encoder=None, cross=None)

    def at(self, layer: int) -> "Spec":
        """This Spec as it is for one layer (from 0): the parts of the variant that names it, where one does."""
        for variant in self.variants:
            if layer in variant.layers:
                parts = ("position", "attention", "mlp")
                return replace(self, variants=(), **{p: getattr(variant, p) or getattr(self, p) for p in parts})
        return self


def _check_rotation(rope: Rope, attention: Attention, path: str) -> None:
    """A rotation must fit the heads that it turns."""
    size, head_dim, scaling = rope.rotary_dim, attention.head_dim, rope.scaling
    require(size or head_dim % 2 == 0, f"{path}attention.head_dim: {head_dim} is odd, and rotation turns pairs")
    fits = (size or 0) <= head_dim
    require(fits, f"{path}position.rotary_dim: {size} is more than attention.head_dim: {head_dim}")
    pairs = (size or head_dim) // 2
    alone = pairs == 1 and isinstance(scaling, DynamicScaling)
    require(not alone, f"{path}position.scaling.kind: dynamic needs two pairs or more, and a head has one")
    if isinstance(scaling, LongRopeScaling):
        for field in ("short_factors", "long_factors"):
            n = len(getattr(scaling, field))
            require(n == pairs, f"{path}position.scaling.{field}: {n} numbers, but a head has {pairs} pairs")


def read_spec(raw: Any) -> Spec:
    """A Spec from the nested mapping that a YAML config (or a family's record) holds.

    Left out, n_kv_heads is n_heads, head_dim is hidden_size / n_heads, o_bias is bias, and a model whose norms stand
    before its sublayers has a final norm. An encoder says only what differs from the decoder, but that it sees both
    ways; so does the cross attention. Raises SpecError, naming the path.
    """
    return decode(Spec, _with_defaults(raw), "")


def _with_defaults(raw: Any) -> Any:
    if not isinstance(raw, dict):
        return raw
    raw = dict(raw)
    norm, variants, attention = raw.get("norm"), raw.get("variants"), raw.get("attention")
    if isinstance(raw.get("encoder"), dict) and isinstance(attention, dict):
        both_ways = raw | {"attention": attention | {"causal": False}}
        raw["encoder"] = _encoder_with_defaults(raw["encoder"], both_ways)
        cross = raw.get("cross") if raw.get("cross") is not None else {}
        if isinstance(cross, dict):
            raw["cross"] = _attention_with_defaults(both_ways["attention"] | cross, raw)
    if isinstance(norm, dict) and norm.get("placement") == "post" and norm.get("kind") != "none":
        raw["norm"] = {"final": False} | norm
    if isinstance(raw.get("attention"), dict):
        raw["attention"] = _attention_with_defaults(raw["attention"], raw)
    if isinstance(variants, list):
        raw["variants"] = [_variant_with_defaults(one, raw) if isinstance(one, dict) else one for one in variants]
    return raw


def _encoder_with_defaults(encoder: dict, raw: dict) -> dict:
    """The decoder's fields and what the encoder says in their place: of a part of the same kind, only what differs."""
    apart = ("encoder", "encoder_embed", "cross", "variants", "lm_head", "tokenizer", "name")
    common = {field: value for field, value in raw.items() if field not in apart}
    for field, value in encoder.items():
        ours = common.get(field)
        parts = isinstance(value, dict) and isinstance(ours, dict)
        alike = parts and value.get("kind", ours.get("kind")) == ours.get("kind")
        common[field] = ours | value if alike else value
    return _with_defaults({"lm_head": None} | common)


def _attention_with_defaults(attention: dict, raw: dict) -> dict:
    attention = dict(attention)
    attention.setdefault("n_kv_heads", attention.get("n_heads"))
    attention.setdefault("o_bias", attention.get("bias", False))
    if "head_dim" not in attention and "n_heads" in attention and "hidden_size" in raw:
        heads = decode(int, attention["n_heads"], "attention.n_heads")
        size = decode(int, raw["hidden_size"], "hidden_size")
        require(
            size % heads == 0,
            f"attention.n_heads: {heads} does not divide hidden_size: {size} (or give attention.head_dim)",
        )
        attention["head_dim"] = size // heads
    return attention


def _variant_with_defaults(variant: dict, raw: dict) -> dict:
    """A variant's attention says only what differs from the Spec's."""
    attention, common = variant.get("attention"), raw.get("attention")
    if isinstance(attention, dict) and isinstance(common, dict):
        return variant | {"attention": common | attention}
    return variant


def decode(kind: Any, raw: Any, path: str) -> Any:
    """`raw` as a value of the type `kind`: a dataclass, a union of tagged ones, Literal, int, float, bool, str.

    A mapping's unknown keys, a value of another type, a size below 1 and a number that is not finite raise SpecError.
    """
    origin, args = get_origin(kind), get_args(kind)
    here = path or "the config"
    if origin in (Union, UnionType):
        if raw is None and NoneType in args:
            return None
        options = [a for a in args if a is not NoneType]
        tagged = is_dataclass(options[0]) and hasattr(options[0], "kind")
        return _decode_tagged(options, raw, path) if tagged else decode(options[0], raw, path)
    if is_dataclass(kind):
        return _decode_fields(kind, raw, path)
    if origin is tuple:
        require(isinstance(raw, (list, tuple)), f"{here}: {show(raw)} is not a list")
        # Layers count from 0, so a list of whole numbers may hold it; a size may not.
        return tuple(
            one if args[0] is int and one == 0 and type(one) is int else decode(args[0], one, f"{path}.{i}")
            for i, one in enumerate(raw)
        )
    if origin is Literal:
        fits = type(raw) in map(type, args) and raw in args
        require(fits, f"{here}: {show(raw)} is not one of {', '.join(map(str, args))}")
        return raw
    if kind is float and type(raw) is int:
        require(abs(raw) < 2**1000, f"{here}: {show(raw)} is not a finite number")  # beyond any float
        raw = float(raw)
    require(type(raw) is kind, f"{here}: {show(raw)} is not {WORDS[kind]}")
    require(kind is not int or raw >= 1, f"{here}: {show(raw)} is below 1")
    require(kind is not int or raw < 2**63, f"{here}: {show(raw)} is beyond 64 bits")
    require(kind is not float or abs(raw) < float("inf"), f"{here}: {raw} is not a finite number")
    return raw


# repr itself could go on for ever, or too deep: YAML has aliases, and aliases of aliases.
_BRIEF = Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict, _BRIEF.maxstring, _BRIEF.maxlong = 3, 8, 8, 80, 80

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def show(raw: Any) -> str:
    """A raw config value in at most 40 characters, for an error."""
    text = _BRIEF.repr(raw)
    return text if len(text) <= 40 else text[:37] + "…"


def _decode_tagged(options: list, raw: Any, path: str) -> Any:
    """One of several parts, chosen by its `kind`; `position: none` is short for `position: {kind: none}`."""
    raw = {"kind": raw} if isinstance(raw, str) else raw
    kinds = {option.kind: option for option in options}
    require(isinstance(raw, dict), f"{path}: {show(raw)} is not a mapping with a kind ({', '.join(kinds)})")
    require("kind" in raw, f"{path}.kind: missing (one of {', '.join(kinds)})")
    kind = raw["kind"]
    require(isinstance(kind, str) and kind in kinds, f"{path}.kind: {show(kind)} is not one of {', '.join(kinds)}")
    return _decode_fields(kinds[kind], {k: v for k, v in raw.items() if k != "kind"}, path)


def _decode_fields(kind: Any, raw: Any, path: str) -> Any:
    require(isinstance(raw, dict), f"{path or 'the config'}: {show(raw)} is not a mapping")
    prefix = f"{path}." if path else ""
    known, types = {f.name: f for f in fields(kind)}, _types(kind)
    for key in raw:
        if key not in known:
            raise SpecError(
                f"{prefix}{key}: unknown field", nearest(key, known) or f"known: {', '.join(known)}", "spec"
            )
    for field in known.values():
        missing = field.name not in raw and field.default is MISSING
        require(not missing, f"{prefix}{field.name}: missing")
    values = {k: decode(types[k], v, prefix + k) for k, v in raw.items()}
    try:
        return kind(**values)
    except SpecError as error:
        raise SpecError(prefix + error.message, error.hint, "spec") from None


@cache
def _types(kind: type) -> dict[str, Any]:
    """Each field's type; a Spec has one of its own kind inside."""
    return get_type_hints(kind)


def to_dict(part: Any) -> Any:
    """A Spec as the nested mapping that read_spec takes, every value stated."""
    if isinstance(part, tuple):
        return [to_dict(one) for one in part]
    if not is_dataclass(part):
        return part
    kind = {"kind": part.kind} if hasattr(part, "kind") else {}
    return kind | {f.name: to_dict(getattr(part, f.name)) for f in fields(part)}
