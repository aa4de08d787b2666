"""The Llama line: RMSNorm, rotation, gated MLP, few biases or none."""

from typing import Any

from gptcli.families.record import (
    ACTIVATIONS,
    ROPE_KEYS,
    Family,
    From,
    Get,
    Key,
    Stored,
    head_dim,
    number,
    require_key,
    rope,
    whole,
    windowed,
    windows,
)
from gptcli.spec import show

NAMES = {
    "embed": Stored("embed_tokens"),
    "layers.#.attn_norm": Stored("layers.#.input_layernorm"),
    "layers.#.attn.q": Stored("layers.#.self_attn.q_proj"),
    "layers.#.attn.k": Stored("layers.#.self_attn.k_proj"),
    "layers.#.attn.v": Stored("layers.#.self_attn.v_proj"),
    "layers.#.attn.o": Stored("layers.#.self_attn.o_proj"),
    "layers.#.mlp_norm": Stored("layers.#.post_attention_layernorm"),
    "layers.#.mlp.up": Stored("layers.#.mlp.up_proj"),
    "layers.#.mlp.gate": Stored("layers.#.mlp.gate_proj"),
    "layers.#.mlp.down": Stored("layers.#.mlp.down_proj"),
    "final_norm": Stored("norm"),
    "lm_head": Stored("lm_head", outside=True),
}
QK_NORMS = {
    "layers.#.attn.q_norm": Stored("layers.#.self_attn.q_norm"),
    "layers.#.attn.k_norm": Stored("layers.#.self_attn.k_norm"),
}
PREFIXES = ("model.", "")
BUFFERS = ("rotary_emb.inv_freq",)

LLAMA = Family(
    defaults={
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("max_position_embeddings"),
        "hidden_size": Key("hidden_size"),
        "n_layers": Key("num_hidden_layers"),
        "position": From((*ROPE_KEYS, "head_dim"), rope),
        "norm": {"kind": "rmsnorm", "eps": Key("rms_norm_eps")},
        "attention": {
            "n_heads": Key("num_attention_heads"),
            "n_kv_heads": Key("num_key_value_heads", lambda get: get("num_attention_heads")),
            "head_dim": From(("head_dim",), head_dim),
            "bias": Key("attention_bias"),
        },
        "mlp": {
            "kind": "dense",
            "size": Key("intermediate_size"),
            "activation": Key("hidden_act", reads=ACTIVATIONS),
            "gated": True,
            "bias": Key("mlp_bias"),
        },
        "lm_head": {"tied": Key("tie_word_embeddings")},
    },
    # A trainer's own word: true says that pairs are neighbours.
    fixed={"rope_interleaved": (False,)},
    irrelevant=("is_llama_config", "transformers.js_config"),
    names=NAMES,
    prefixes=PREFIXES,
    buffers=BUFFERS,
)
ATTENTION = LLAMA.template["attention"]
MLP = LLAMA.template["mlp"] | {"bias": False}


def _one_window(get: Get) -> int | None:
    """The window of every layer. A layer_types that says otherwise is refused: the library's class doesn't read it."""
    window, types = get("sliding_window"), get("layer_types")
    alike = "full_attention" if window is None else "sliding_attention"
    said = f"layer_types: {show(types)} is not implemented here: by sliding_window every layer is {alike}"
    require_key(types is None or (isinstance(types, list) and all(word == alike for word in types)), said)
    return window


MISTRAL = Family(
    defaults=LLAMA.defaults
    | {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "sliding_window": 4096,
    },
    template=LLAMA.template
    | {
        "attention": ATTENTION | {"bias": False, "window": From(("sliding_window", "layer_types"), _one_window)},
        "mlp": MLP,
    },
    names=NAMES,
    prefixes=PREFIXES,
    buffers=BUFFERS,
)


def _late_windows(get: Get) -> list[dict[str, Any]]:
    """Windows only with use_sliding_window, from layer max_window_layers on."""
    window = get("sliding_window") if get("use_sliding_window") else None
    first = whole(get("max_window_layers", 0), "max_window_layers", least=0)
    return windowed(windows(get, window, lambda i: i >= first), window)


WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
QWEN2 = Family(
    defaults=LLAMA.defaults
    | {
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "intermediate_size": 22016,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    template=LLAMA.template
    | {
        "attention": ATTENTION | {"bias": True, "o_bias": False},
        "mlp": MLP,
        "variants": From(WINDOW_KEYS, _late_windows),
    },
    # Three positions a token, for images: another rotation.
    fixed={"use_mrope": (False,)},
    irrelevant=("attention_bias",),  # q, k and v have biases and o has none, whatever it says
    names=NAMES,
    prefixes=PREFIXES,
    buffers=BUFFERS,
)

QWEN3 = Family(
    defaults=QWEN2.defaults | {"head_dim": 128},
    template=QWEN2.template | {"attention": ATTENTION | {"qk_norm": "head"}},
    names=NAMES | QK_NORMS,
    prefixes=PREFIXES,
    buffers=BUFFERS,
)

OLMO2 = Family(
    defaults=LLAMA.defaults | {"vocab_size": 50304, "rms_norm_eps": 1e-5},
    template=LLAMA.template
    | {
        "norm": {"kind": "rmsnorm", "eps": Key("rms_norm_eps"), "placement": "output"},
        "attention": ATTENTION | {"qk_norm": "whole"},
        "mlp": MLP,
    },
    names=NAMES
    | QK_NORMS
    | {
        "layers.#.attn_out_norm": Stored("layers.#.post_attention_layernorm"),
        "layers.#.mlp_out_norm": Stored("layers.#.post_feedforward_layernorm"),
    },
    prefixes=PREFIXES,
    buffers=BUFFERS,
)


def _divisor(value: Any) -> float:
    """What logits are multiplied by, where the config says what they are divided by."""
    value = number(value, "logits_scaling")
    require_key(value != 0, "logits_scaling: 0 divides nothing")
    return 1 / value


GRANITE = Family(
    defaults=LLAMA.defaults
    | {"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    template=LLAMA.template
    | {
        "embed_scale": Key("embedding_multiplier"),
        "attention": ATTENTION | {"scale": Key("attention_multiplier")},
        "residual_scale": Key("residual_multiplier"),
        "lm_head": {"tied": Key("tie_word_embeddings"), "scale": Key("logits_scaling", reads=_divisor)},
    },
    names=NAMES,
    prefixes=PREFIXES,
    buffers=BUFFERS,
)


def _still_and_windowed(get: Get) -> list[dict[str, Any]]:
    """Layers that don't turn (a 0 in no_rope_layers, else every no_rope_layer_interval-th), and layers with a window
    (what layer_types says, else, with use_sliding_window, those that don't turn).
    """
    layers = range(whole(get("num_hidden_layers"), "num_hidden_layers"))
    turns = get("no_rope_layers")
    if turns is None:
        every = whole(get("no_rope_layer_interval"), "no_rope_layer_interval")
        turns = [int((i + 1) % every != 0) for i in layers]
    listed = isinstance(turns, list) and len(turns) >= len(layers) and all(one in (0, 1) for one in turns)
    require_key(listed, f"no_rope_layers: {show(turns)} is not a 0 or a 1 for every layer")
    window = get("sliding_window") if get("use_sliding_window") else None
    narrow = windows(get, window, lambda i: not turns[i])
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for i in layers:
        kinds.setdefault((not turns[i], i in narrow), []).append(i)
    return [
        {"layers": found}
        | ({"position": {"kind": "none"}} if still else {})
        | ({"attention": {"window": window}} if windowed else {})
        for (still, windowed), found in kinds.items()
        if still or windowed
    ]


SMOLLM3 = Family(
    defaults=LLAMA.defaults
    | {
        "vocab_size": 128256,
        "max_position_embeddings": 32768,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
    template=LLAMA.template
    | {
        "variants": From(
            ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types"),
            _still_and_windowed,
        )
    },
    irrelevant=("max_window_layers",),
    names=NAMES,
    prefixes=PREFIXES,
    buffers=BUFFERS,
)

RECORDS = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "olmo2": OLMO2,
    "granite": GRANITE,
    "smollm3": SMOLLM3,
}
