"""Each family is one record of data: how its config.json reads as a Spec, and what its checkpoints call our weights.

A template has the shape of a YAML config with a Key wherever the config has a word to say. A config key is consumed by
the template, irrelevant to the forward pass, or listed in `fixed` with the only value that is implemented; any other is
unknown and reported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gptcli.errors import GptcliError, nearest
from gptcli.spec import Spec, SpecError, read_spec, show

REQUIRED = object()


class Key(NamedTuple):
    """A value of the Spec that a config key decides.

    default: what the family takes where the key is absent or null (a function of the config's get, or a value);
    reads: values translated, by a table or a function.
    """

    name: str
    default: Any = REQUIRED
    reads: Mapping | Callable | None = None


class Stored(NamedTuple):
    """A checkpoint's name for one of our stems, or for several that it keeps fused, in order, in one tensor.

    transposed: matrices lie [in, out]; outside: the family's prefix does not apply.
    """

    name: str
    transposed: bool = False
    outside: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """names: our stem (`#` is the layer), or a tuple of stems fused in one tensor, to Stored.

    prefixes: what may stand before every stored name; buffers: patterns of stored tensors that are no weights.
    """

    template: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    names: dict[str | tuple[str, ...], Stored] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("",)
    buffers: tuple[str, ...] = ()


# Keys that change nothing in a forward pass: training, generation, bookkeeping.
IRRELEVANT = frozenset(
    """
    _name_or_path _attn_implementation architectures attention_dropout attn_pdrop bos_token_id chunk_size_feed_forward
    decoder_start_token_id dtype embd_pdrop eos_token_id finetuning_task gradient_checkpointing hidden_dropout
    id2label initializer_range is_encoder_decoder keys_to_ignore_at_inference label2id layer_norm_eps_unused model_type
    n_ctx output_attentions output_hidden_states output_past pad_token_id prefix pretraining_tp problem_type
    reorder_and_upcast_attn resid_pdrop return_dict summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj task_specific_params tokenizer_class torch_dtype torchscript transformers_version
    unk_token_id use_bfloat16 use_cache
    """.split()
)

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def _times(factor: int, size: Any) -> Any:
    """A size that follows from another; what is no number is handed on, to be refused where it stands."""
    return factor * size if type(size) is int else size


# This project's own names, as a YAML config beside weights implies.
OWN = Family()

GPT2 = Family(
    template={
        "vocab_size": Key("vocab_size", 50257),
        "context_length": Key("n_positions", 1024),
        "hidden_size": Key("n_embd", 768),
        "n_layers": Key("n_layer", 12),
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": Key("layer_norm_epsilon", 1e-5)},
        "attention": {
            "n_heads": Key("n_head", 12),
            "bias": True,
            "scale": Key("scale_attn_weights", True, {True: None, False: 1.0}),
        },
        "mlp": {
            "kind": "dense",
            "size": Key("n_inner", lambda get: _times(4, get("n_embd") or 768)),
            "activation": Key("activation_function", "gelu_new", ACTIVATIONS),
            "bias": True,
        },
        "lm_head": {"tied": Key("tie_word_embeddings", True)},
        "tokenizer": "gpt2",
    },
    fixed={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    names={
        "embed": Stored("wte"),
        "pos_embed": Stored("wpe"),
        "layers.#.attn_norm": Stored("h.#.ln_1"),
        ("layers.#.attn.q", "layers.#.attn.k", "layers.#.attn.v"): Stored("h.#.attn.c_attn", transposed=True),
        "layers.#.attn.o": Stored("h.#.attn.c_proj", transposed=True),
        "layers.#.mlp_norm": Stored("h.#.ln_2"),
        "layers.#.mlp.up": Stored("h.#.mlp.c_fc", transposed=True),
        "layers.#.mlp.down": Stored("h.#.mlp.c_proj", transposed=True),
        "final_norm": Stored("ln_f"),
        "lm_head": Stored("lm_head", outside=True),
    },
    prefixes=("transformer.", ""),
    buffers=(".attn.bias", ".attn.masked_bias"),
)

FAMILIES = {"gpt2": GPT2}


@dataclass(frozen=True)
class Resolved:
    """A Spec read from a config.json, and the keys of it that nobody knows."""

    spec: Spec
    unknown: tuple[str, ...]


def resolve(config: dict[str, Any], name: str, where: str) -> Resolved:
    """The Spec that a config.json describes. Raises GptcliError naming the key at fault."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        said = f"model_type {kind!r} is not implemented" if kind is not None else "no model_type"
        raise GptcliError(
            f"{where}: {said}", f"{nearest(kind, FAMILIES)} known: {', '.join(FAMILIES)}".strip(), "family"
        )
    family = FAMILIES[kind]
    for key, only in family.fixed.items():
        if config.get(key, only) != only:
            raise GptcliError(
                f"{where}: {key}: {show(config[key])} changes the forward pass and is not implemented",
                f"only {key}: {show(only)} is",
                "config",
            )
    consumed = set()
    try:
        spec = read_spec({"name": name} | _fill(family.template, config, consumed))
    except SpecError as error:
        raise SpecError(f"{where}: {error.message}", error.hint, error.code) from None
    unknown = [key for key in config if key not in consumed | IRRELEVANT | set(family.fixed)]
    return Resolved(spec, tuple(unknown))


def _fill(template: Any, config: dict[str, Any], consumed: set[str]) -> Any:
    """The template with every Key replaced by what the config says, or by the family's default."""
    if isinstance(template, dict):
        return {field: _fill(value, config, consumed) for field, value in template.items()}
    if not isinstance(template, Key):
        return template
    consumed.add(template.name)
    value = config.get(template.name)
    if value is None:
        if template.default is REQUIRED:
            raise SpecError(f"{template.name}: missing", code="spec")
        value = template.default(config.get) if callable(template.default) else template.default
    if callable(template.reads):
        return template.reads(value)
    if template.reads is not None:
        if not isinstance(value, (str, bool, int)) or value not in template.reads:
            known = ", ".join(str(word) for word in template.reads)
            raise SpecError(f"{template.name}: {show(value)} is not implemented (known: {known})", code="spec")
        return template.reads[value]
    return value
