"""What a family's record is made of, and how a config.json is read by it.

A template has the shape of a YAML config with a Key (or a From) wherever the config has a word to say. A config key is
consumed by the template, irrelevant to the forward pass, or listed in `fixed` with the only values that are implemented;
any other is unknown, and reported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gptcli.errors import GptcliError
from gptcli.spec import Spec, SpecError, read_spec, show

REQUIRED = object()
Get = Callable[..., Any]  # a config's `get`: get(key, default)


class Key(NamedTuple):
    """A value of the Spec that one config key decides.

    default: what the family takes where the key is absent or null (a function of the config's get, or a value);
    reads: values translated, by a table or a function.
    """

    name: str
    default: Any = REQUIRED
    reads: Mapping | Callable[[Any], Any] | None = None


class From(NamedTuple):
    """A value of the Spec that several config keys decide: make(get) → the value."""

    keys: tuple[str, ...]
    make: Callable[[Get], Any]


class Stored(NamedTuple):
    """A checkpoint's name for one of our stems, or for several that it keeps fused in one tensor.

    `#` stands for the layer and `@` for the expert (or head); a name without the stem's `@` is one tensor of all of them,
    stacked along its first axis. transposed: matrices lie [in, out]. fused: several stems follow one another (`blocks`),
    follow one another within each head (`heads`), or take turns row by row (`turns`). leaves: what ends the names of a
    weight and of a bias. outside: the family's prefix does not apply.
    """

    name: str
    transposed: bool = False
    fused: Literal["blocks", "heads", "turns"] = "blocks"
    leaves: tuple[str, str] = (".weight", ".bias")
    outside: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """names: our stem (or whole name), or a tuple of stems fused in one tensor, to Stored.

    fixed: config keys that change the forward pass, each with the values that are implemented. inside: the key of the
    config that holds the language model's own. prefixes: what may stand before every stored name; buffers: patterns of
    stored tensors that are no weights; unused: patterns of weights that another part of the model reads.
    """

    template: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, tuple] = field(default_factory=dict)
    irrelevant: tuple[str, ...] = ()
    inside: str = ""
    names: dict[str | tuple[str, ...], Stored] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("",)
    buffers: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


# Keys that change nothing in a forward pass: training, generation, bookkeeping.
IRRELEVANT = frozenset(
    """
    _attn_implementation _commit_hash _name_or_path add_cross_attention_unused architectures attention_dropout attn_pdrop
    auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing hidden_dropout id2label initializer_range is_decoder is_encoder_decoder
    keys_to_ignore_at_inference label2id length_penalty max_length min_length model_type n_ctx no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states output_past output_scores
    pad_token_id prefix pretraining_tp problem_type pruned_heads remove_invalid_values reorder_and_upcast_attn
    repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unk_token_id use_bfloat16 use_cache
    """.split()
)

ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu_squared",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "silu": "silu",
    "swish": "silu",
}


class Resolved(NamedTuple):
    """A Spec read from a config.json, and the keys of it that nobody knows."""

    spec: Spec
    unknown: tuple[str, ...]


def resolve(config: dict[str, Any], family: Family, name: str, where: str) -> Resolved:
    """The Spec that a config.json describes. Raises GptcliError naming the key at fault."""
    if family.inside:
        config = config.get(family.inside)
        if not isinstance(config, dict):
            raise GptcliError(f"{where}: {family.inside}: missing", "it holds the language model's settings", "config")
    for key, allowed in family.fixed.items():
        if key in config and config[key] not in allowed:
            raise GptcliError(
                f"{where}: {key}: {show(config[key])} changes the forward pass and is not implemented",
                f"{key}: {' or '.join(show(value) for value in allowed)} is",
                "config",
            )
    consumed: set[str] = set()
    try:
        spec = read_spec({"name": name} | _fill(family.template, config, consumed))
    except SpecError as error:
        raise SpecError(f"{where}: {error.message}", error.hint, error.code) from None
    known = consumed | IRRELEVANT | set(family.fixed) | set(family.irrelevant)
    return Resolved(spec, tuple(key for key in config if key not in known))


def _fill(template: Any, config: dict[str, Any], consumed: set[str]) -> Any:
    """The template with every Key and From replaced by what the config says, or by the family's default."""
    if isinstance(template, dict):
        return {field: _fill(value, config, consumed) for field, value in template.items()}
    if isinstance(template, From):
        consumed.update(template.keys)
        return template.make(getter(config))
    if not isinstance(template, Key):
        return template
    consumed.add(template.name)
    value = config.get(template.name)
    if value is None:
        require_key(template.default is not REQUIRED, f"{template.name}: missing")
        value = template.default(getter(config)) if callable(template.default) else template.default
    if isinstance(template.reads, Mapping):
        known = ", ".join(str(word) for word in template.reads)
        listed = isinstance(value, (str, bool, int)) and value in template.reads
        require_key(listed, f"{template.name}: {show(value)} is not implemented (known: {known})")
        return template.reads[value]
    return template.reads(value) if template.reads else value


def getter(config: dict[str, Any]) -> Get:
    """config.get, for which null is absent."""

    def get(key: str, default: Any = None) -> Any:
        value = config.get(key)
        return default if value is None else value

    return get


def require_key(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message, code="config")


# What families share: rotation, windows by layer, head size.

ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
# Words inside a rope_scaling or rope_parameters table.
ROPE_WORDS = frozenset(
    """
    type rope_type rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor short_factor long_factor
    original_max_position_embeddings beta_fast beta_slow attention_factor mscale mscale_all_dim truncate finetuned
    """.split()
)


def whole(value: Any, key: str) -> int:
    """A config's whole number, for arithmetic on it."""
    require_key(type(value) is int and value > 0, f"{key}: {show(value)} is not a whole number above 0")
    return value


def number(value: Any, key: str) -> float:
    """A config's number, for arithmetic on it."""
    require_key(type(value) in (int, float), f"{key}: {show(value)} is not a number")
    return float(value)


def head_dim(get: Get, heads: str = "num_attention_heads", size: str = "hidden_size") -> int:
    """The config's own word, else hidden size / heads."""
    if get("head_dim") is not None:
        return whole(get("head_dim"), "head_dim")
    return whole(get(size), size) // whole(get(heads), heads)


def rope(
    get: Get,
    layer_type: str = "",
    theta: float = 10_000.0,
    partial: float = 1.0,
    pairs: str = "halves",
    size: Callable[[Get], int] = head_dim,
) -> dict[str, Any]:
    """The rotation that a config describes: `rope_theta`, `rope_scaling` (type or rope_type), `rope_parameters`, or these
    by layer type. theta and partial: the family's defaults; size: the head size. Raises SpecError for a kind unknown.
    """
    table = get("rope_scaling") or get("rope_parameters") or {}
    require_key(isinstance(table, dict), f"rope_parameters: {show(table)} is not a table")
    if any(isinstance(value, dict) for value in table.values()):
        table = table.get(layer_type) or {}
    unknown = [word for word in table if word not in ROPE_WORDS]
    require_key(not unknown, f"rope_parameters.{', '.join(map(str, unknown))}: not implemented")
    say = getter(table)
    share = number(say("partial_rotary_factor", get("partial_rotary_factor", partial)), "partial_rotary_factor")
    turning = int(size(get) * share)
    return {
        "kind": "rope",
        "theta": say("rope_theta", get("rope_theta", theta)),
        "pairs": pairs,
        "rotary_dim": None if turning == size(get) else turning,
        "scaling": _scaling(say, get),
    }


def _scaling(say: Get, get: Get) -> dict[str, Any]:
    import math

    kind = say("rope_type", say("type", "default"))
    context = get("max_position_embeddings", 0)
    original = get("original_max_position_embeddings", say("original_max_position_embeddings", context))
    given = say("factor", context / original if original and type(context) is type(original) is int else None)
    match kind:
        case "default":
            return {"kind": "none"}
        case "linear":
            return {"kind": "linear", "factor": given}
        case "dynamic":
            return {"kind": "dynamic", "factor": given, "original_context": context}
        case "llama3":
            low, high = say("low_freq_factor", 1.0), say("high_freq_factor", 4.0)
            marks = {"low_freq_factor": low, "high_freq_factor": high}
            return {"kind": "llama3", "factor": given, **marks, "original_context": original}
        case "yarn":
            factor = number(given, "rope_parameters.factor")

            def magnitude(mscale: float) -> float:
                return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

            attention = say("attention_factor")
            if attention is None and say("mscale") and say("mscale_all_dim"):
                attention = magnitude(say("mscale")) / magnitude(say("mscale_all_dim"))
            betas = {"beta_fast": say("beta_fast", 32.0), "beta_slow": say("beta_slow", 1.0)}
            rest = {"attention_factor": attention, "truncate": say("truncate", True)}
            return {"kind": "yarn", "factor": factor, "original_context": original, **betas, **rest}
        case "longrope" | "su":
            factor, attention = number(given, "rope_parameters.factor"), say("attention_factor")
            if attention is None:
                attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            sets = {"short_factors": say("short_factor"), "long_factors": say("long_factor")}
            return {"kind": "longrope", **sets, "original_context": original, "attention_factor": attention}
    raise SpecError(
        f"rope_type: {show(kind)} is not implemented (default, linear, dynamic, llama3, yarn, longrope are)",
        code="config",
    )


def windows(
    get: Get, window: int | None, sliding: Callable[[int], bool], layers: str = "num_hidden_layers"
) -> list[int]:
    """The layers (from 0) that see a window: what `layer_types` says, else the family's rule `sliding(layer)`."""
    if window is None:
        return []
    types, number = get("layer_types"), whole(get(layers), layers)
    if types is None:
        return [i for i in range(number) if sliding(i)]
    known = {"full_attention", "sliding_attention"}
    require_key(isinstance(types, list) and len(types) >= number, "layer_types: not a word for every layer")
    for word in types:
        require_key(word in known, f"layer_types: {show(word)} is not implemented (known: {', '.join(sorted(known))})")
    return [i for i in range(number) if types[i] == "sliding_attention"]


def windowed(layers: list[int], window: int | None, **others: Any) -> list[dict[str, Any]]:
    """The variant of the layers that see a window; others: what else is theirs."""
    return [{"layers": layers, "attention": {"window": window}, **others}] if layers else []
