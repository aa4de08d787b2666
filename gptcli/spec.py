"""What an architecture is, as plain frozen data.

Three ideas. A Spec holds every choice that a forward pass depends on and nothing else. A choice between mechanisms is a
tagged part (`position: {kind: rope, …}`) with fields of its own, never a flag. Reading is strict: an unknown field, a
wrong type or an impossible combination is an error that names its path (`attention.n_kv_heads: 3 does not divide …`).
"""

from dataclasses import MISSING, dataclass, fields, is_dataclass
from reprlib import Repr
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from gptcli.errors import GptcliError, nearest


class SpecError(GptcliError):
    """A Spec that can't be. `message` starts with the path of the field at fault."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message, code="spec")


@dataclass(frozen=True, kw_only=True)
class NoPosition:
    """The model is told nothing of order, beyond what a causal mask gives away."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A table of context_length rows, added to the token embedding (GPT-2)."""

    kind: ClassVar[str] = "learned"


@dataclass(frozen=True, kw_only=True)
class NoScaling:
    """Rotary frequencies as the base gives them."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every rotary frequency divided by `factor` (position interpolation, arXiv:2306.15595)."""

    kind: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self):
        require(self.factor > 0, f"factor: {self.factor:g} is not positive")


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Queries and keys turned by an angle that grows with their position (arXiv:2104.09864).

    Pair i of a head turns by position · theta^(-2i/D). `pairs` says which two numbers of a head make a pair:
    `halves` (i and i + D/2, as most checkpoints store them) or `neighbours` (2i and 2i + 1, as the paper writes it).
    """

    kind: ClassVar[str] = "rope"
    theta: float = 10_000.0
    pairs: Literal["halves", "neighbours"] = "halves"
    scaling: NoScaling | LinearScaling | Llama3Scaling = NoScaling()

    def __post_init__(self):
        require(self.theta > 0, f"theta: {self.theta:g} is not positive")


@dataclass(frozen=True, kw_only=True)
class NoNorm:
    """No normalisation anywhere (the hand-made examples)."""

    kind: ClassVar[str] = "none"
    placement: ClassVar[str] = "none"
    final: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) · weight + bias (arXiv:1607.06450).

    placement `pre` norms what a sublayer reads, `post` what its sum with the residual gives; final: one more before
    the head.
    """

    kind: ClassVar[str] = "layernorm"
    eps: float = 1e-5
    bias: bool = True
    placement: Literal["pre", "post"] = "pre"
    final: bool = True

    def __post_init__(self):
        require(self.eps >= 0, f"eps: {self.eps:g} is below 0")


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """x / sqrt(mean(x²) + eps) · (offset + weight) (arXiv:1910.07467); Gemma stores its weights less an offset of 1."""

    kind: ClassVar[str] = "rmsnorm"
    eps: float = 1e-6
    offset: float = 0.0
    placement: Literal["pre", "post"] = "pre"
    final: bool = True

    def __post_init__(self):
        require(self.eps >= 0, f"eps: {self.eps:g} is below 0")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """H query heads of D numbers read G key/value heads: G = H is multi-head, G < H grouped-query, G = 1 multi-query.

    bias: of q, k and v; o_bias: of the output projection. qk_norm: the model's norm on each head's q and k before the
    rotation. scale multiplies q·k (null: 1/√D). window: a query sees that many latest keys, itself among them.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    bias: bool = False
    o_bias: bool = False
    causal: bool = True
    qk_norm: bool = False
    scale: float | None = None
    window: int | None = None

    def __post_init__(self):
        divides = self.n_heads % self.n_kv_heads == 0
        require(divides, f"n_kv_heads: {self.n_kv_heads} does not divide n_heads: {self.n_heads}")


@dataclass(frozen=True, kw_only=True)
class NoMLP:
    """A layer that only attends."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class Dense:
    """down(act(up(x))), or gated: down(act(gate(x)) · up(x)) (arXiv:2002.05202). `gelu` is exact, by erf."""

    kind: ClassVar[str] = "dense"
    size: int
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"]
    gated: bool = False
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Head:
    """Logits: final vector · weight [V, C] (+ bias). tied: the weight is the token embedding's."""

    tied: bool = False
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Spec:
    """An architecture. Sizes are V vocab_size, C hidden_size, N n_layers, H, G, D in `attention`, F in `mlp`.

    embed_scale multiplies the token embedding (Gemma: √C). `tokenizer` names an encoding that ships with a library.
    """

    name: str = ""
    vocab_size: int
    context_length: int
    hidden_size: int
    n_layers: int
    embed_scale: float = 1.0
    position: NoPosition | Learned | Rope
    norm: NoNorm | LayerNorm | RMSNorm
    attention: Attention
    mlp: NoMLP | Dense
    lm_head: Head
    tokenizer: str = ""

    def __post_init__(self):
        odd_heads = isinstance(self.position, Rope) and self.attention.head_dim % 2
        require(not odd_heads, f"attention.head_dim: {self.attention.head_dim} is odd, and rotation turns pairs")
        nothing_to_norm_by = self.attention.qk_norm and isinstance(self.norm, NoNorm)
        require(not nothing_to_norm_by, "attention.qk_norm: true, but norm.kind: none says of no norm to use")


def read_spec(raw: Any) -> Spec:
    """A Spec from the nested mapping that a YAML config (or a family's record) holds.

    Left out, n_kv_heads is n_heads, head_dim is hidden_size / n_heads, o_bias is bias, and a model whose norms stand
    before its sublayers has a final norm. Raises SpecError, naming the path.
    """
    return decode(Spec, _with_defaults(raw), "")


def _with_defaults(raw: Any) -> Any:
    if not isinstance(raw, dict):
        return raw
    raw = dict(raw)
    attention, norm = raw.get("attention"), raw.get("norm")
    if isinstance(attention, dict):
        attention = raw["attention"] = dict(attention)
        heads, size = attention.get("n_heads"), raw.get("hidden_size")
        attention.setdefault("n_kv_heads", heads)
        attention.setdefault("o_bias", attention.get("bias", False))
        if "head_dim" not in attention and "n_heads" in attention and "hidden_size" in raw:
            heads, size = decode(int, heads, "attention.n_heads"), decode(int, size, "hidden_size")
            require(
                size % heads == 0,
                f"attention.n_heads: {heads} does not divide hidden_size: {size} (or give attention.head_dim)",
            )
            attention["head_dim"] = size // heads
    if isinstance(norm, dict) and norm.get("placement") == "post" and norm.get("kind") != "none":
        raw["norm"] = {"final": False} | norm
    return raw


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
        return _decode_tagged(options, raw, path) if is_dataclass(options[0]) else decode(options[0], raw, path)
    if is_dataclass(kind):
        return _decode_fields(kind, raw, path)
    if origin is Literal:
        require(raw in args, f"{here}: {show(raw)} is not one of {', '.join(args)}")
        return raw
    if kind is float and type(raw) is int:
        require(abs(raw) < 2**1000, f"{here}: {show(raw)} is not a finite number")  # beyond any float
        raw = float(raw)
    require(type(raw) is kind, f"{here}: {show(raw)} is not {WORDS[kind]}")
    require(kind is not int or raw >= 1, f"{here}: {show(raw)} is below 1")
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
    known = {f.name: f for f in fields(kind)}
    for key in raw:
        if key not in known:
            raise SpecError(
                f"{prefix}{key}: unknown field", nearest(key, known) or f"known: {', '.join(known)}", "spec"
            )
    for field in known.values():
        missing = field.name not in raw and field.default is MISSING
        require(not missing, f"{prefix}{field.name}: missing")
    values = {k: decode(known[k].type, v, prefix + k) for k, v in raw.items()}
    try:
        return kind(**values)
    except SpecError as error:
        raise SpecError(prefix + error.message, error.hint, "spec") from None


def to_dict(part: Any) -> Any:
    """A Spec as the nested mapping that read_spec takes, every value stated."""
    if not is_dataclass(part):
        return part
    kind = {"kind": part.kind} if hasattr(part, "kind") else {}
    return kind | {f.name: to_dict(getattr(part, f.name)) for f in fields(part)}
