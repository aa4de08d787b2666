"""Decoders with a choice of their own each: fused projections, long rotations, norms by the head or without weights."""

from gptcli.families.llama import ATTENTION, BUFFERS, LLAMA, MLP, NAMES, PREFIXES
from gptcli.families.record import ROPE_KEYS, Family, From, Get, Key, Stored, require_key, rope, whole

# Phi-3's long rotation went by other names.
PHI3_ROPE_TYPES = {"default": "none", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}

PHI3 = Family(
    template=LLAMA.template
    | {
        "position": From((*ROPE_KEYS, "head_dim"), lambda get: rope(get, partial=1.0, types=PHI3_ROPE_TYPES)),
        "attention": ATTENTION | {"bias": False, "window": Key("sliding_window", None)},
        "mlp": MLP,
    },
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    fixed={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "lm_head_bias": (False,),
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    },
    names=NAMES
    | {
        tuple(f"layers.#.attn.{letter}" for letter in "qkv"): Stored("layers.#.self_attn.qkv_proj"),
        ("layers.#.mlp.gate", "layers.#.mlp.up"): Stored("layers.#.mlp.gate_up_proj"),
    },
    prefixes=PREFIXES,
    buffers=BUFFERS,
)

STARCODER2 = Family(
    template=LLAMA.template
    | {
        "norm": {"kind": "layernorm", "eps": Key("norm_epsilon")},
        "attention": ATTENTION | {"bias": Key("use_bias"), "window": Key("sliding_window", None)},
        "mlp": MLP | {"gated": False, "bias": Key("use_bias")},
    },
    defaults={
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    fixed={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    irrelevant=("residual_dropout", "embedding_dropout"),
    names=NAMES | {"layers.#.mlp.up": Stored("layers.#.mlp.c_fc"), "layers.#.mlp.down": Stored("layers.#.mlp.c_proj")},
    prefixes=PREFIXES,
    buffers=BUFFERS,
)


def _whole_heads(get: Get) -> int:
    """Heads that share the hidden size among them, and a head_dim that says so, if any."""
    size = whole(get("hidden_size"), "hidden_size") // whole(get("num_attention_heads"), "num_attention_heads")
    said = get("head_dim", size)
    require_key(said == size, f"head_dim: {said} is not hidden_size / num_attention_heads, {size}, as implemented")
    return size


STABLELM = Family(
    template=LLAMA.template
    | {
        "position": From((*ROPE_KEYS, "head_dim"), lambda get: rope(get, partial=0.25, size=_whole_heads)),
        "norm": {"kind": "layernorm", "eps": Key("layer_norm_eps")},
        "attention": ATTENTION
        | {
            "head_dim": From(("head_dim",), _whole_heads),
            "bias": Key("use_qkv_bias"),
            "o_bias": False,
            "qk_norm": Key("qk_layernorm", reads={False: "none", True: "each"}),
        },
        "mlp": MLP,
        "residual": Key("use_parallel_residual", reads={False: "sequential", True: "parallel_shared"}),
    },
    defaults={
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    names=NAMES
    | {f"layers.#.attn.{letter}_norm.@": Stored(f"layers.#.self_attn.{letter}_layernorm.norms.@") for letter in "qk"},
    prefixes=PREFIXES,
    buffers=BUFFERS,
)

NANOCHAT = Family(
    template=LLAMA.template
    | {
        "position": From((*ROPE_KEYS, "head_dim"), lambda get: rope(get) | {"direction": "backward"}),
        "norm": {"kind": "rmsnorm", "eps": Key("rms_norm_eps"), "weight": False, "embedding": True},
        "attention": ATTENTION | {"qk_norm": "head", "qk_norm_place": "after"},
        "mlp": MLP | {"gated": False},
        "lm_head": {"tied": Key("tie_word_embeddings"), "softcap": Key("final_logit_softcapping", None)},
    },
    defaults={
        "vocab_size": 50304,
        "hidden_size": 768,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "hidden_act": "relu2",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 15.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    names=NAMES | {"layers.#.mlp.up": Stored("layers.#.mlp.fc1"), "layers.#.mlp.down": Stored("layers.#.mlp.fc2")},
    prefixes=PREFIXES,
    buffers=BUFFERS,
)

RECORDS = {"phi3": PHI3, "starcoder2": STARCODER2, "stablelm": STABLELM, "nanochat": NANOCHAT}
