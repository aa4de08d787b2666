"""Architectures as .gguf files describe them: which metadata keys read as which Spec, and what tensors are called.

A file says less than a config.json: the activation, what norms stand where, and which layers see a window follow from
`general.architecture` alone. Keys stand here without the architecture before them. What begins with @ is no key but
something that the file's tensors tell. Two things are written otherwise than in the models' own files and put back:
rows of q and k whose pairs are to turn as neighbours (`paired`), and norm weights with 1 added (`plus`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gptcli.errors import GptcliError, nearest
from gptcli.families.record import Family, From, Get, Key, Origin, Stored, explain, number, require_key, whole
from gptcli.spec import MOST_LAYERS, Spec, show

# Keys that change the forward pass, and the values of them that change nothing: read by some architectures, and refused
# with any other value by the rest.
NEUTRAL: dict[str, tuple] = {
    "attention.causal": (True,),
    "attention.scale": (None,),
    "attention.sliding_window": (0,),
    "attention.sliding_window_pattern": (None,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0, 1, 3),  # a softmax, over all or over those taken, whose shares are the same
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0, 1),
    "rope.freq_base_swa": (None,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "swin_norm": (False,),
    **dict.fromkeys(
        """
        activation_sparsity_scale attention.clamp_kqv attention.max_alibi_bias attention.output_scale
        attention.q_lora_rank attention.kv_lora_rank attention.key_length_mla attention.value_length_mla
        attention.relative_buckets_count attention.shared_kv_layers attention.temperature_length
        attention.temperature_scale attention.indexer.head_count attention.indexer.top_k
        embedding_length_per_layer_input expert_chunk_feed_forward_length expert_shared_count
        expert_shared_feed_forward_length experts_per_group expert_group_scale full_attention_interval
        leading_dense_block_count moe_latent_size n_deepstack_layers nextn_predict_layers rescale_every_n_layers
        router_logit_softcapping
        """.split(),
        (0,),
    ),
    **dict.fromkeys(
        "altup.active_idx altup.num_inputs rope.dimension_sections swiglu_clamp_exp swiglu_clamp_shexp".split(), (None,)
    ),
}
IRRELEVANT = (
    *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),  # the norm's own is read
    *("rope.scaling.finetuned", "tensor_data_layout", "pooling_type"),
)

# What the forward pass reads of rotations is in the Spec.
BUFFERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", ".attn_rot_embd.inv_freq")


def one(key: str) -> Callable[[Get], Any]:
    """A key whose value may stand once or once a layer, where all layers have the same."""

    def make(get: Get) -> Any:
        value = get(key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            alike = len(value) > 0 and all(each == value[0] for each in value)
            require_key(alike, f"{key}: {show(value)} is not the same in all layers, as implemented")
            return value[0]
        return value

    return make


def counted(key: str) -> From:
    """A number that the file must state."""

    def make(get: Get) -> int:
        require_key(get(key) is not None, f"{key}: missing")
        return whole(one(key)(get), key)

    return From((key,), make)


def layers_of(get: Get) -> int:
    """How many layers there are, which a file may overstate."""
    count = whole(get("block_count"), "block_count")
    require_key(count <= MOST_LAYERS, f"block_count: {show(count)} is more than {MOST_LAYERS:,}")
    return count


def heads(get: Get) -> int:
    return whole(one("attention.head_count")(get), "attention.head_count")


def head_dim(get: Get) -> int:
    """What the file says, else hidden size / heads. Keys and values of two sizes are refused."""
    size = get("attention.key_length")
    shared = size is None
    size = whole(get("embedding_length"), "embedding_length") // heads(get) if shared else size
    size = whole(size, "embedding_length by head" if shared else "attention.key_length")
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        require_key(get(key, size) == size, f"{key}: {show(get(key))}, but keys have {size}: not implemented")
    return size


HEAD_DIM = From(
    ("attention.key_length", "attention.value_length", "attention.key_length_swa", "attention.value_length_swa"),
    head_dim,
)


def present(tensor: str) -> From:
    """Does the file hold this tensor?"""
    return From(("@tensors",), lambda get: tensor in get("@tensors"))


TIED = {"tied": From(("@tensors",), lambda get: "output.weight" not in get("@tensors"))}

# Rotations

ROPE_KEYS = (
    *("rope.dimension_count", "rope.dimension_count_swa", "rope.freq_base", "rope.scale_linear", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    *("@rope_freqs", "@rope_factors_long", "@rope_factors_short"),
)


def rotary(get: Get, truncate: bool = True) -> dict[str, Any]:
    """The rotation of all layers, or of those without a window."""
    size = head_dim(get)
    turning = whole(get("rope.dimension_count", size), "rope.dimension_count")
    theta = number(get("rope.freq_base", 10_000.0), "rope.freq_base")
    require_key(0 < theta < math.inf, f"rope.freq_base: {theta:g} is not a number above 0")
    local = get("rope.dimension_count_swa", turning)
    require_key(
        local == turning, f"rope.dimension_count_swa: {show(local)}, but others have {turning}: not implemented"
    )
    return {
        "kind": "rope",
        "theta": theta,
        "rotary_dim": None if turning == size else turning,
        "scaling": scaling(get, theta, turning, truncate),
    }


ROPE = From(ROPE_KEYS, rotary)


def wholly(get: Get) -> dict[str, Any]:
    """The same, of heads that turn whole: their rows were put into pairs so."""
    size, turning = head_dim(get), get("rope.dimension_count", head_dim(get))
    require_key(turning == size, f"rope.dimension_count: {show(turning)}, but heads have {size}: not implemented")
    return rotary(get)


WHOLE_ROPE = From(ROPE_KEYS, wholly)


def scaling(get: Get, theta: float, turning: int, truncate: bool) -> dict[str, Any]:
    """How frequencies are changed: by a factor, by a divisor for each pair, or by a published formula."""
    kind, factor = get("rope.scaling.type"), get("rope.scaling.factor", get("rope.scale_linear", 0.0))
    factor = number(factor, "rope.scaling.factor")
    divisors, sets = get("@rope_freqs"), (get("@rope_factors_short"), get("@rope_factors_long"))
    context = whole(get("context_length"), "context_length")
    original = whole(get("rope.scaling.original_context_length", context), "rope.scaling.original_context_length")
    strength = number(get("rope.scaling.attn_factor", 1.0), "rope.scaling.attn_factor")
    known = kind in (None, "none", "linear", "yarn", "longrope")
    require_key(known, f"rope.scaling.type: {show(kind)} is not implemented (known: none, linear, yarn, longrope)")
    if kind == "longrope" or any(sets):
        fits = all(sets) and kind in (None, "none", "longrope") and factor in (0, 1) and divisors is None
        require_key(
            fits, "rope.scaling.type: longrope needs rope_factors_short and rope_factors_long, and nothing else"
        )
        short, long = sets
        given = {"short_factors": short, "long_factors": long, "original_context": original}
        return {"kind": "longrope", **given, "attention_factor": strength}
    require_key(strength == 1, f"rope.scaling.attn_factor: {strength:g} is not implemented with this scaling")
    if divisors is not None:
        alone = kind in (None, "none") or factor in (0, 1)
        require_key(alone, f"rope_freqs.weight: not implemented beside rope.scaling.type: {show(kind)}")
        return divided(divisors, theta, turning, context)
    if kind == "yarn":
        betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
        said = {word: number(get(key), key) for word, key in betas.items() if get(key) is not None}
        attention = get("rope.scaling.yarn_attn_factor")
        given = {"factor": factor, "original_context": original, "attention_factor": attention}
        return {"kind": "yarn", **given, **said, "truncate": truncate}
    if kind == "none" or factor in (0, 1):
        return {"kind": "none"}
    return {"kind": "linear", "factor": factor}


# Llama 3.1's formula as its files have it.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192


def divided(divisors: list[float], theta: float, turning: int, context: int) -> dict[str, Any]:
    """A divisor for each pair: recognised where they are what Llama 3.1's formula gives, else taken as they are.

    The formula's own numbers are exact, and the file's are rounded to float32.
    """
    require_key(all(0 < one < math.inf for one in divisors), "rope_freqs.weight: not all numbers are above 0")

    def expected(frequency: float, factor: float) -> float:
        kept = (ORIGINAL * frequency / (2 * math.pi) - LOW) / (HIGH - LOW)
        kept = min(max(kept, 0.0), 1.0)
        return 1 / (kept + (1 - kept) / factor)

    factor = max(divisors, default=1.0)
    frequencies = [theta ** (-2 * pair / turning) for pair in range(len(divisors))]
    near = factor > 1 and all(
        abs(given / expected(frequency, factor) - 1) < 1e-5 for given, frequency in zip(divisors, frequencies)
    )
    if near:
        marks = {"low_freq_factor": LOW, "high_freq_factor": HIGH, "original_context": ORIGINAL}
        return {"kind": "llama3", "factor": factor, **marks}
    return {
        "kind": "longrope",
        "short_factors": divisors,
        "long_factors": divisors,
        "original_context": context,
    }


# Windows

WINDOW_KEYS = ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")


def narrow(period: int, width: int | None = None, theta: float | None = None, scaled: bool = True) -> From:
    """The variant of the layers that see a window: those that the file marks, else all but every period-th.

    width: the window where the file has none; theta: the base of their rotation (None: that of all), which is scaled as
    the others' is, or not.
    """

    def make(get: Get) -> list[dict[str, Any]]:
        window, count = get("attention.sliding_window", width), layers_of(get)
        if not window:
            return []
        marks = get("attention.sliding_window_pattern", period)
        if type(marks) is int:
            marks = [marks > 0 and i % marks < marks - 1 for i in range(count)]
        listed = isinstance(marks, Sequence) and len(marks) == count
        require_key(listed, f"attention.sliding_window_pattern: {show(marks)} is not one mark a layer")
        layers = [i for i in range(count) if marks[i]]
        turning = rotary(get)
        base = number(get("rope.freq_base_swa", theta or turning["theta"]), "rope.freq_base_swa")
        local = turning | {"theta": base} | ({} if scaled else {"scaling": {"kind": "none"}})
        variant = {"layers": layers, "attention": {"window": window}}
        return [variant | ({} if local == turning else {"position": local})] if layers else []

    return From((*WINDOW_KEYS, *ROPE_KEYS), make)


EVERYWHERE = From(WINDOW_KEYS[:1], lambda get: get("attention.sliding_window") or None)

# The Llama line

ATTENTION = {
    "n_heads": counted("attention.head_count"),
    "n_kv_heads": From(
        ("attention.head_count_kv",),
        lambda get: heads(get) if get("attention.head_count_kv") is None else one("attention.head_count_kv")(get),
    ),
    "head_dim": HEAD_DIM,
    "bias": False,
}
MLP = {"kind": "dense", "size": counted("feed_forward_length"), "activation": "silu", "gated": True}
RMS_EPS = Key("attention.layer_norm_rms_epsilon")
COMMON = {
    "vocab_size": From(("@rows", "vocab_size"), lambda get: get("@rows")),
    "context_length": Key("context_length"),
    "hidden_size": Key("embedding_length"),
    "n_layers": Key("block_count"),
    "position": ROPE,
    "norm": {"kind": "rmsnorm", "eps": RMS_EPS},
    "attention": ATTENTION,
    "mlp": MLP,
    "lm_head": TIED,
}
NAMES = {
    "embed": Stored("token_embd"),
    "layers.#.attn_norm": Stored("blk.#.attn_norm"),
    "layers.#.attn.q": Stored("blk.#.attn_q"),
    "layers.#.attn.k": Stored("blk.#.attn_k"),
    "layers.#.attn.v": Stored("blk.#.attn_v"),
    "layers.#.attn.o": Stored("blk.#.attn_output"),
    "layers.#.mlp_norm": Stored("blk.#.ffn_norm"),
    "layers.#.mlp.up": Stored("blk.#.ffn_up"),
    "layers.#.mlp.gate": Stored("blk.#.ffn_gate"),
    "layers.#.mlp.down": Stored("blk.#.ffn_down"),
    "final_norm": Stored("output_norm"),
    "lm_head": Stored("output"),
}
PAIRED = {f"layers.#.attn.{letter}": Stored(f"blk.#.attn_{letter}", paired=True) for letter in "qk"}
QK_NORMS = {f"layers.#.attn.{letter}_norm": Stored(f"blk.#.attn_{letter}_norm") for letter in "qk"}
EXPERTS = {f"layers.#.mlp.experts.@.{part}": Stored(f"blk.#.ffn_{part}_exps") for part in ("gate", "up", "down")}
# Files of the first months have a tensor an expert.
LOOSE_EXPERTS = {f"layers.#.mlp.experts.@.{part}": Stored(f"blk.#.ffn_{part}.@") for part in ("gate", "up", "down")}
SPARSE = {stem: stored for stem, stored in NAMES.items() if not stem.startswith("layers.#.mlp.")} | {
    "layers.#.mlp.router": Stored("blk.#.ffn_gate_inp"),
    **EXPERTS,
}
BIASES = {
    "bias": present("blk.0.attn_q.bias"),
    "o_bias": present("blk.0.attn_output.bias"),
}


def words(template: Any) -> set[str]:
    """The keys that a template reads."""
    if isinstance(template, Mapping):
        return set().union(*map(words, template.values()))
    if isinstance(template, From):
        return set(template.keys)
    return {template.name} if isinstance(template, Key) else set()


def family(template: dict[str, Any], names: dict, others: tuple = (), reads: tuple[str, ...] = ()) -> Family:
    """The record of an architecture. reads: keys that the template's parts read on a condition."""
    known = words(template) | set(reads)
    fixed = {key: values for key, values in NEUTRAL.items() if key not in known}
    return Family(
        template=template, names=names, others=others, fixed=fixed, irrelevant=(*IRRELEVANT, *reads), buffers=BUFFERS
    )


MOST_EXPERTS = 10_000  # each is declared by itself


def experts_of(get: Get) -> int:
    count = whole(get("expert_count"), "expert_count")
    require_key(count <= MOST_EXPERTS, f"expert_count: {show(count)} is more than {MOST_EXPERTS:,}")
    return count


def _llama_mlp(get: Get) -> dict[str, Any]:
    count = get("expert_count", 0)
    if not count:
        return MLP | {"bias": present("blk.0.ffn_up.bias")}
    return {
        "kind": "experts",
        "n_experts": experts_of(get),
        "top_k": counted("expert_used_count"),
        "size": From(
            ("feed_forward_length", "expert_feed_forward_length"),
            lambda get: get("expert_feed_forward_length") or one("feed_forward_length")(get),
        ),
        "activation": "silu",
    }


EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length", "feed_forward_length")
LLAMA = family(
    COMMON
    | {
        "position": WHOLE_ROPE,
        "attention": ATTENTION | BIASES | {"scale": Key("attention.scale", None), "window": EVERYWHERE},
        "mlp": From((*EXPERT_KEYS, "@tensors"), _llama_mlp),
    },
    NAMES | SPARSE | PAIRED,
    others=(LOOSE_EXPERTS,),
)


def _still(get: Get) -> list[dict[str, Any]]:
    """Every fourth layer does not turn."""
    layers = range(3, layers_of(get), 4)
    return [{"layers": list(layers), "position": {"kind": "none"}}] if layers else []


SMOLLM3 = family(
    COMMON
    | {
        "position": WHOLE_ROPE,
        "attention": ATTENTION | BIASES | {"scale": Key("attention.scale", None)},
        "mlp": MLP | {"bias": present("blk.0.ffn_up.bias")},
        "variants": From(("block_count",), _still),
    },
    NAMES | PAIRED,
)
QWEN2 = family(COMMON | {"attention": ATTENTION | {"bias": True, "o_bias": False}}, NAMES)
QWEN3 = family(COMMON | {"attention": ATTENTION | BIASES | {"qk_norm": "head"}}, NAMES | QK_NORMS)
OLMO2 = family(
    COMMON
    | {
        "norm": {"kind": "rmsnorm", "eps": RMS_EPS, "placement": "output"},
        "attention": ATTENTION | {"qk_norm": "whole"},
        "variants": narrow(4, scaled=False),
    },
    NAMES
    | QK_NORMS
    | {
        "layers.#.attn_out_norm": Stored("blk.#.post_attention_norm"),
        "layers.#.mlp_out_norm": Stored("blk.#.post_ffw_norm"),
    },
)

# The Gemma line


def _norms_plus_one(names: dict[str, Stored]) -> dict[str, Stored]:
    return {stem: stored._replace(plus=1.0) if stem.endswith("norm") else stored for stem, stored in names.items()}


def _scale(large: int) -> From:
    """Scores are divided by the root of a head's size; in the model of so many layers, of a head's share of C."""

    def make(get: Get) -> float:
        size = whole(get("embedding_length"), "embedding_length") // heads(get)
        return (whole(size, "embedding_length by head") if layers_of(get) == large else head_dim(get)) ** -0.5

    return From(("block_count", "embedding_length", "attention.head_count", *HEAD_DIM.keys), make)


def _cap(key: str) -> From:
    """A soft cap, where the file has one above 0."""
    return From((key,), lambda get: get(key) or None)


GEMMA_MLP = MLP | {"activation": "gelu_tanh"}
GEMMA_NORM = {"kind": "rmsnorm", "eps": RMS_EPS, "offset": 1.0}
SCALED_ROWS = From(("embedding_length",), lambda get: whole(get("embedding_length"), "embedding_length") ** 0.5)
SANDWICH = {
    "layers.#.attn_out_norm": Stored("blk.#.post_attention_norm"),
    "layers.#.mlp_out_norm": Stored("blk.#.post_ffw_norm"),
}
GEMMA = family(
    COMMON | {"embed_scale": SCALED_ROWS, "norm": GEMMA_NORM, "mlp": GEMMA_MLP},
    _norms_plus_one(NAMES),
)
GEMMA2_TEMPLATE = GEMMA.template | {
    "norm": GEMMA_NORM | {"placement": "sandwich"},
    "lm_head": TIED | {"softcap": _cap("final_logit_softcapping")},
}
GEMMA2 = family(
    GEMMA2_TEMPLATE
    | {
        "attention": ATTENTION | {"scale": _scale(46), "softcap": _cap("attn_logit_softcapping")},
        "variants": narrow(2, width=4096),
    },
    _norms_plus_one(NAMES | SANDWICH),
)
GEMMA3 = family(
    GEMMA2_TEMPLATE
    | {
        "attention": ATTENTION | {"scale": _scale(62), "qk_norm": "head"},
        "variants": narrow(6, theta=10_000.0, scaled=False),
    },
    _norms_plus_one(NAMES | SANDWICH | QK_NORMS),
)

# With experts and sinks

GPT_OSS = family(
    COMMON
    | {
        # The ramp's ends are no whole pairs in this model.
        "position": From(ROPE_KEYS, lambda get: rotary(get, truncate=False)),
        "attention": ATTENTION | {"bias": True, "sinks": True},
        "mlp": {
            "kind": "experts",
            "n_experts": From(("expert_count",), experts_of),
            "top_k": counted("expert_used_count"),
            "size": counted("expert_feed_forward_length"),
            "activation": "gelu_sigmoid",
            "bias": True,
            "router_bias": True,
            "limit": 7.0,
        },
        "variants": narrow(2),
    },
    SPARSE
    | {
        "layers.#.mlp_norm": Stored("blk.#.post_attention_norm"),
        "layers.#.attn.sinks": Stored("blk.#.attn_sinks.weight"),
    },
    reads=("feed_forward_length",),
)

# With LayerNorm

EPS = Key("attention.layer_norm_epsilon")
LAYER_NORM = {"kind": "layernorm", "eps": EPS}
QKV = {tuple(f"layers.#.attn.{letter}" for letter in "qkv"): Stored("blk.#.attn_qkv")}
UNGATED = MLP | {"gated": False, "activation": "gelu_tanh", "bias": True}
GPT2 = family(
    COMMON
    | {
        "position": {"kind": "learned"},
        "norm": LAYER_NORM,
        "attention": ATTENTION | {"bias": True},
        "mlp": UNGATED,
    },
    NAMES | QKV | {"pos_embed": Stored("position_embd")},
)
GPTNEOX = family(
    COMMON
    | {
        "norm": LAYER_NORM,
        "attention": ATTENTION | {"bias": True},
        "mlp": UNGATED | {"activation": "gelu"},
        "residual": Key("use_parallel_residual", True, {True: "parallel", False: "sequential"}),
    },
    NAMES | QKV,
)
STARCODER2 = family(
    COMMON | {"norm": LAYER_NORM, "attention": ATTENTION | {"bias": True}, "mlp": UNGATED},
    NAMES,
)

# With fused projections

PHI3 = family(
    COMMON | {"attention": ATTENTION | {"window": EVERYWHERE}},
    NAMES | QKV | {("layers.#.mlp.gate", "layers.#.mlp.up"): Stored("blk.#.ffn_up")},
)

ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gpt2": GPT2,
    "phi3": PHI3,
    "starcoder2": STARCODER2,
    "gptneox": GPTNEOX,
    "gpt-oss": GPT_OSS,
    "smollm3": SMOLLM3,
    "olmo2": OLMO2,
}

# What a config.json's model_type is called in a file, where that is another word.
WRITTEN_AS = {
    "mistral": "llama",
    "mixtral": "llama",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
}


def pairs_rows(kind: str) -> bool:
    """Are rows of q and k put into pairs when a model of this model_type is written to a file?"""
    record = ARCHITECTURES.get(WRITTEN_AS.get(kind, kind))
    return record is not None and "layers.#.attn.q" in record.names and record.names["layers.#.attn.q"].paired


class Described(NamedTuple):
    """An architecture read from a file's metadata, the keys of it that nobody knows, and where values come from."""

    spec: Spec
    family: Family
    unknown: tuple[str, ...]
    origins: dict[str, Origin]


def described(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    vector: Callable[[str], list[float]],
    name: str,
    where: str,
) -> Described:
    """The Spec of a file with this metadata and tensors of these shapes; vector reads a short tensor.

    Raises GptcliError naming the key at fault.
    """
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        said = "general.architecture: missing" if kind is None else f"general.architecture: {show(kind)}"
        hint = f"{nearest(str(kind), ARCHITECTURES)} known: {', '.join(ARCHITECTURES)}".strip()
        raise GptcliError(f"{where}: {said} is not implemented" if kind else f"{where}: {said}", hint, "family")
    record, at = ARCHITECTURES[kind], f"{kind}."
    if "token_embd.weight" not in shapes or len(shapes["token_embd.weight"]) != 2:
        raise GptcliError(
            f"{where}: tensor 'token_embd.weight' is missing, or no table", "fetch the file again", "bind"
        )
    own = {key.removeprefix(at): value for key, value in metadata.items() if key.startswith(at)}
    config = {key: value for key, value in own.items() if not key.startswith("@")}
    config |= {"@tensors": shapes.keys(), "@rows": shapes["token_embd.weight"][0]}
    for stem in ("rope_freqs", "rope_factors_long", "rope_factors_short"):
        if f"{stem}.weight" in shapes:
            config[f"@{stem}"] = vector(f"{stem}.weight")
    try:
        found = explain(config, record, name, where)
    except GptcliError as error:
        said = error.message.removeprefix(f"{where}: ")
        key = said.partition(":")[0]
        written = key in config or key in words(record.template) or key in NEUTRAL
        raise GptcliError(f"{where}: {at}{said}" if written else error.message, error.hint, error.code) from None
    unknown = tuple(at + key for key in own if key in found.unknown or key.startswith("@"))
    origins = {path: origin._replace(keys=_written(origin.keys, at)) for path, origin in found.origins.items()}
    return Described(found.spec, record, unknown, origins)


def _written(keys: tuple[str, ...], at: str) -> tuple[str, ...]:
    """Keys as the file has them; what the tensors tell has no key."""
    return tuple(at + key for key in keys if not key.startswith("@"))
