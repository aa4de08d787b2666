"""Decoders whose MLPs are experts, of which a router picks a few for each token."""

from gptcli.families.llama import ATTENTION, BUFFERS, LLAMA, MLP, NAMES, PREFIXES
from gptcli.families.record import (
    ACTIVATIONS,
    ROPE_KEYS,
    Family,
    From,
    Get,
    Key,
    Stored,
    require_key,
    rope,
    whole,
    windowed,
    windows,
)

GATE, UP, DOWN = (f"layers.#.mlp.experts.@.{letter}" for letter in ("gate", "up", "down"))
# The library's own modules keep all experts of a layer in two tensors, and may be saved so.
STACKED = {
    (GATE, UP): Stored("layers.#.mlp.experts.gate_up_proj", leaves=("", "")),
    DOWN: Stored("layers.#.mlp.experts.down_proj", leaves=("", "")),
}
AUXILIARY = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # of training alone
SPARSE_NAMES = {stem: stored for stem, stored in NAMES.items() if not stem.startswith("layers.#.mlp.")}

MIXTRAL = Family(
    template=LLAMA.template
    | {
        "attention": ATTENTION | {"bias": False, "window": Key("sliding_window", None)},
        "mlp": {
            "kind": "experts",
            "n_experts": Key("num_local_experts"),
            "top_k": Key("num_experts_per_tok"),
            "size": Key("intermediate_size"),
            "activation": Key("hidden_act", reads=ACTIVATIONS),
        },
    },
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rope_theta": 1_000_000.0,
    },
    aliases={"num_experts": "num_local_experts"},
    irrelevant=AUXILIARY,
    names=SPARSE_NAMES
    | {
        "layers.#.mlp.router": Stored("layers.#.block_sparse_moe.gate"),
        GATE: Stored("layers.#.block_sparse_moe.experts.@.w1"),
        UP: Stored("layers.#.block_sparse_moe.experts.@.w3"),
        DOWN: Stored("layers.#.block_sparse_moe.experts.@.w2"),
    },
    others=(STACKED | {"layers.#.mlp.router": Stored("layers.#.mlp.gate")},),
    prefixes=PREFIXES,
    buffers=BUFFERS,
)


# Qwen's: some layers may keep a dense MLP instead.

SPARSE_KEYS = ("num_experts", "decoder_sparse_step", "mlp_only_layers", "num_hidden_layers")


def _layers(get: Get) -> list[int]:
    return list(range(whole(get("num_hidden_layers"), "num_hidden_layers")))


def _dense_layers(get: Get) -> list[int]:
    """The layers (from 0) without experts: those listed, and those that the step leaves out."""
    step, listed = whole(get("decoder_sparse_step"), "decoder_sparse_step"), get("mlp_only_layers", [])
    natural = isinstance(listed, list) and all(type(i) is int and i >= 0 for i in listed)
    require_key(natural, "mlp_only_layers: not a list of layers")
    return [i for i in _layers(get) if i in listed or get("num_experts") == 0 or (i + 1) % step != 0]


EXPERTS = {
    "kind": "experts",
    "n_experts": Key("num_experts"),
    "top_k": Key("num_experts_per_tok"),
    "size": Key("moe_intermediate_size"),
    "activation": Key("hidden_act", reads=ACTIVATIONS),
    "normalized": Key("norm_topk_prob"),
}


def _mlp(experts: dict) -> From:
    """The experts of most layers; a dense MLP where no layer has any."""
    words = [value.name for part in (MLP, experts) for value in part.values() if isinstance(value, Key)]
    return From((*SPARSE_KEYS, *words), lambda get: experts if _dense_layers(get) != _layers(get) else MLP)


def _variants(get: Get, sliding: list[int], window: int | None) -> list[dict]:
    """Layers that see a window, layers with a dense MLP, and layers with both."""
    dense = _dense_layers(get)
    if dense == _layers(get):
        return windowed(sliding, window)
    both, alone = [i for i in dense if i in sliding], [i for i in dense if i not in sliding]
    narrow = windowed([i for i in sliding if i not in dense], window)
    return narrow + windowed(both, window, mlp=MLP) + ([{"layers": alone, "mlp": MLP}] if alone else [])


def _qwen2_variants(get: Get) -> list[dict]:
    """Windows only with use_sliding_window: every other layer from the first on, below max_window_layers."""
    window = get("sliding_window") if get("use_sliding_window") else None
    last = whole(get("max_window_layers"), "max_window_layers", least=0)
    return _variants(get, windows(get, window, lambda i: i % 2 == 0 and i < last), window)


EXPERT_NAMES = {
    "layers.#.mlp.router": Stored("layers.#.mlp.gate"),
    **{stem: Stored(f"layers.#.mlp.experts.@.{stem.rpartition('.')[2]}_proj") for stem in (GATE, UP, DOWN)},
}

QWEN2_MOE = Family(
    template=LLAMA.template
    | {
        "attention": ATTENTION | {"bias": Key("qkv_bias"), "o_bias": False},
        "mlp": _mlp(EXPERTS | {"shared_size": Key("shared_expert_intermediate_size")}),
        "variants": From(
            ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", *SPARSE_KEYS), _qwen2_variants
        ),
    },
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "norm_topk_prob": False,
        "qkv_bias": True,
    },
    irrelevant=(*AUXILIARY, "attention_bias"),
    names=NAMES
    | EXPERT_NAMES
    | {
        f"layers.#.mlp.shared.{part}": Stored(f"layers.#.mlp.shared_expert.{part}_proj")
        for part in ("gate", "up", "down")
    }
    | {"layers.#.mlp.shared_router": Stored("layers.#.mlp.shared_expert_gate")},
    others=(STACKED,),
    prefixes=PREFIXES,
    buffers=BUFFERS,
)

QWEN3_MOE = Family(
    template=LLAMA.template
    | {
        "attention": ATTENTION
        | {
            "qk_norm": "head",
            "window": From(
                ("use_sliding_window", "sliding_window"),
                lambda get: get("sliding_window") if get("use_sliding_window") else None,
            ),
        },
        "mlp": _mlp(EXPERTS),
        "variants": From(SPARSE_KEYS, lambda get: _variants(get, [], None)),
    },
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
    },
    aliases={"num_local_experts": "num_experts"},
    irrelevant=(*AUXILIARY, "max_window_layers"),  # windows are for all layers or for none
    names=NAMES
    | EXPERT_NAMES
    | {f"layers.#.attn.{letter}_norm": Stored(f"layers.#.self_attn.{letter}_norm") for letter in "qk"},
    others=(STACKED,),
    prefixes=PREFIXES,
    buffers=BUFFERS,
)


YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _yarn_unless_said(get: Get) -> dict:
    """A config that says nothing of its rotation's scaling, or null, has the family's."""
    return rope(lambda key, *rest: get(key, YARN) if key == "rope_parameters" else get(key, *rest))


GPT_OSS = Family(
    template=LLAMA.template
    | {
        "position": From((*ROPE_KEYS, "head_dim"), _yarn_unless_said),
        "attention": ATTENTION | {"sinks": True},
        "mlp": {
            "kind": "experts",
            "n_experts": Key("num_local_experts"),
            "top_k": Key("num_experts_per_tok"),
            "size": Key("intermediate_size"),
            # gate · sigmoid(1.702 · gate), whatever hidden_act says.
            "activation": "gelu_sigmoid",
            "bias": True,
            "router_bias": True,
            "limit": Key("swiglu_limit"),
        },
        "variants": From(
            ("sliding_window", "layer_types"),
            lambda get: windowed(windows(get, get("sliding_window"), lambda i: i % 2 == 0), get("sliding_window")),
        ),
    },
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_theta": 150_000.0,
    },
    aliases={"num_experts": "num_local_experts"},
    fixed={"swiglu_alpha": (1.702,)},
    irrelevant=(
        "hidden_act",
        "experts_per_token",
        "initial_context_length",
        "output_router_logits",
        "router_aux_loss_coef",
    ),
    names=SPARSE_NAMES
    | {
        "layers.#.attn.sinks": Stored("layers.#.self_attn.sinks"),
        "layers.#.mlp.router": Stored("layers.#.mlp.router"),
        # Columns alternate: one of the gate, one of the other.
        (GATE, UP): Stored("layers.#.mlp.experts.gate_up_proj", transposed=True, fused="turns", leaves=("", "_bias")),
        DOWN: Stored("layers.#.mlp.experts.down_proj", transposed=True, leaves=("", "_bias")),
    },
    prefixes=PREFIXES,
    buffers=BUFFERS,
)

RECORDS = {"mixtral": MIXTRAL, "qwen2_moe": QWEN2_MOE, "qwen3_moe": QWEN3_MOE, "gpt_oss": GPT_OSS}
