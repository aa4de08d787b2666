"""The Llama line: RMSNorm, rotation, gated MLP, no biases."""

from gptcli.families.record import ACTIVATIONS, ROPE_KEYS, Family, From, Key, Stored, head_dim, rope, windowed, windows

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
PREFIXES = ("model.", "")
BUFFERS = ("rotary_emb.inv_freq",)

LLAMA = Family(
    template={
        "vocab_size": Key("vocab_size", 32000),
        "context_length": Key("max_position_embeddings", 2048),
        "hidden_size": Key("hidden_size", 4096),
        "n_layers": Key("num_hidden_layers", 32),
        "position": From((*ROPE_KEYS, "head_dim"), rope),
        "norm": {"kind": "rmsnorm", "eps": Key("rms_norm_eps", 1e-6)},
        "attention": {
            "n_heads": Key("num_attention_heads", 32),
            "n_kv_heads": Key("num_key_value_heads", lambda get: get("num_attention_heads", 32)),
            "head_dim": From(("head_dim",), head_dim),
            "bias": Key("attention_bias", False),
        },
        "mlp": {
            "kind": "dense",
            "size": Key("intermediate_size", 11008),
            "activation": Key("hidden_act", "silu", ACTIVATIONS),
            "gated": True,
            "bias": Key("mlp_bias", False),
        },
        "lm_head": {"tied": Key("tie_word_embeddings", False)},
    },
    names=NAMES,
    prefixes=PREFIXES,
    buffers=BUFFERS,
)

MISTRAL = Family(
    template=LLAMA.template
    | {
        "context_length": Key("max_position_embeddings", 131072),
        "attention": {
            "n_heads": Key("num_attention_heads", 32),
            "n_kv_heads": Key("num_key_value_heads", 8),
            "head_dim": From(("head_dim",), head_dim),
            "window": Key("sliding_window", None),
        },
        "mlp": LLAMA.template["mlp"] | {"size": Key("intermediate_size", 14336), "bias": False},
    },
    names=NAMES,
    prefixes=PREFIXES,
    buffers=BUFFERS,
)

QWEN3 = Family(
    template=LLAMA.template
    | {
        "vocab_size": Key("vocab_size", 151936),
        "context_length": Key("max_position_embeddings", 32768),
        "attention": {
            "n_heads": Key("num_attention_heads", 32),
            "n_kv_heads": Key("num_key_value_heads", 32),
            "head_dim": Key("head_dim", 128),
            "bias": Key("attention_bias", False),
            "qk_norm": "head",
        },
        "variants": From(
            ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
            lambda get: _qwen_windows(get),
        ),
        "mlp": LLAMA.template["mlp"] | {"size": Key("intermediate_size", 22016), "bias": False},
    },
    names=NAMES
    | {
        "layers.#.attn.q_norm": Stored("layers.#.self_attn.q_norm"),
        "layers.#.attn.k_norm": Stored("layers.#.self_attn.k_norm"),
    },
    prefixes=PREFIXES,
    buffers=BUFFERS,
)


def _qwen_windows(get) -> list[dict]:
    """Windows only with use_sliding_window, from layer max_window_layers on."""
    window = get("sliding_window", 4096) if get("use_sliding_window", False) else None
    return windowed(windows(get, window, lambda i: i >= get("max_window_layers", 28)), window)


RECORDS = {"llama": LLAMA, "mistral": MISTRAL, "qwen3": QWEN3}
