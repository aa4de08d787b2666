"""What training scripts write themselves: nanoGPT's ckpt.pt and nanochat's model_*.pt, with the settings beside."""

from gptcli.families.record import Family, Key, Stored

# nanoGPT: GPT-2 with Linear's own [out, in], biases by a flag, and exact GELU.
NANOGPT = Family(
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("block_size"),
        "hidden_size": Key("n_embd"),
        "n_layers": Key("n_layer"),
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": 1e-5, "bias": Key("bias", True)},
        "attention": {"n_heads": Key("n_head"), "bias": Key("bias", True)},
        "mlp": {
            "kind": "dense",
            "size": Key("n_embd", reads=lambda size: 4 * size),
            "activation": "gelu",
            "bias": Key("bias", True),
        },
        "lm_head": {"tied": True},
        "tokenizer": "gpt2",
    },
    irrelevant=("dropout",),
    names={
        "embed": Stored("wte"),
        "pos_embed": Stored("wpe"),
        "layers.#.attn_norm": Stored("h.#.ln_1"),
        ("layers.#.attn.q", "layers.#.attn.k", "layers.#.attn.v"): Stored("h.#.attn.c_attn"),
        "layers.#.attn.o": Stored("h.#.attn.c_proj"),
        "layers.#.mlp_norm": Stored("h.#.ln_2"),
        "layers.#.mlp.up": Stored("h.#.mlp.c_fc"),
        "layers.#.mlp.down": Stored("h.#.mlp.c_proj"),
        "final_norm": Stored("ln_f"),
        "lm_head": Stored("lm_head", outside=True),
    },
    prefixes=("transformer.",),
    buffers=(".attn.bias",),
)

# nanochat: norms without weights (also after the embedding and, behind the rotation, on q and k), squared ReLU, logits
# capped at 15. Its norm leaves eps to torch, which takes the smallest float32 step.
NANOCHAT = Family(
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("sequence_len"),
        "hidden_size": Key("n_embd"),
        "n_layers": Key("n_layer"),
        "position": {"kind": "rope", "theta": 10_000.0, "direction": "backward"},
        "norm": {"kind": "rmsnorm", "eps": 2.0**-23, "weight": False, "embedding": True},
        "attention": {
            "n_heads": Key("n_head"),
            "n_kv_heads": Key("n_kv_head", lambda get: get("n_head")),
            "qk_norm": "head",
            "qk_norm_place": "after",
        },
        "mlp": {"kind": "dense", "size": Key("n_embd", reads=lambda size: 4 * size), "activation": "relu_squared"},
        "lm_head": {"softcap": 15.0},
    },
    names={
        "embed": Stored("transformer.wte"),
        "layers.#.attn.q": Stored("transformer.h.#.attn.c_q"),
        "layers.#.attn.k": Stored("transformer.h.#.attn.c_k"),
        "layers.#.attn.v": Stored("transformer.h.#.attn.c_v"),
        "layers.#.attn.o": Stored("transformer.h.#.attn.c_proj"),
        "layers.#.mlp.up": Stored("transformer.h.#.mlp.c_fc"),
        "layers.#.mlp.down": Stored("transformer.h.#.mlp.c_proj"),
    },
    buffers=("cos", "sin"),
)

# Not model_types of a config.json: the names by which source.py calls them.
RECORDS = {"nanogpt-checkpoint": NANOGPT, "nanochat-checkpoint": NANOCHAT}
