"""The GPT line: learned positions and LayerNorm, and what came of it."""

from gptcli.families.record import ACTIVATIONS, Family, Key, Stored

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
            "size": Key("n_inner", lambda get: 4 * get("n_embd", 768)),
            "activation": Key("activation_function", "gelu_new", ACTIVATIONS),
            "bias": True,
        },
        "lm_head": {"tied": Key("tie_word_embeddings", True)},
        "tokenizer": "gpt2",
    },
    fixed={"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
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

RECORDS = {"gpt2": GPT2}
