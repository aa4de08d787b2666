"""The GPT line: LayerNorm and an MLP of two matrices, with learned positions at first and rotation later."""

from collections.abc import Callable
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
)
from gptcli.spec import show


def _even_head(get: Get, heads: str, size: str) -> int:
    """Hidden size / heads, in families that know no other head size."""
    return whole(get(size), size) // whole(get(heads), heads)


def _four_times(size: str) -> Callable[[Get], int]:
    """The MLP size where the config leaves it to the hidden size."""
    return lambda get: 4 * whole(get(size), size)


def _inverse_layer_scales(get: Get) -> list[dict[str, Any]]:
    """Scores of layer i (from 0) divided by i + 1 too: a variant for every layer but the first."""
    if not get("scale_attn_by_inverse_layer_idx"):
        return []
    scale = _even_head(get, "n_head", "n_embd") ** -0.5 if get("scale_attn_weights", True) else 1.0
    layers = range(1, whole(get("n_layer"), "n_layer"))
    return [{"layers": [i], "attention": {"scale": scale / (i + 1)}} for i in layers]


GPT2 = Family(
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
    },
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("n_positions"),
        "hidden_size": Key("n_embd"),
        "n_layers": Key("n_layer"),
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": Key("layer_norm_epsilon", 1e-5)},
        "attention": {
            "n_heads": Key("n_head"),
            "bias": True,
            "scale": Key("scale_attn_weights", True, {True: None, False: 1.0}),
        },
        "mlp": {
            "kind": "dense",
            "size": Key("n_inner", _four_times("n_embd")),
            "activation": Key("activation_function", "gelu_new", ACTIVATIONS),
            "bias": True,
        },
        "variants": From(("scale_attn_by_inverse_layer_idx",), _inverse_layer_scales),
        "lm_head": {"tied": Key("tie_word_embeddings", True)},
        "tokenizer": "gpt2",
    },
    fixed={"add_cross_attention": (False,)},
    aliases={
        "max_position_embeddings": "n_positions",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    },
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


def _local_layers(get: Get) -> list[dict[str, Any]]:
    """The variant of the layers that see a window: by a word for every layer, or by words and how often they recur."""
    count, words, key = whole(get("num_layers"), "num_layers"), get("attention_layers"), "attention_layers"
    types = get("attention_types", [[["global", "local"], 12]] if words is None else None)
    if types is not None:
        shaped = isinstance(types, list) and all(isinstance(one, list) and len(one) == 2 for one in types)
        shaped = shaped and all(isinstance(kinds, list) and type(times) is int for kinds, times in types)
        require_key(shaped, f"attention_types: {show(types)} is not a list of pairs [words, how often]")
        total = sum(len(kinds) * times for kinds, times in types)
        require_key(total == count, f"attention_types: words for {total} layers, but num_layers: {count}")
        expanded = [word for kinds, times in types for word in kinds * times]
        require_key(words in (None, expanded), f"attention_layers: {show(words)} contradicts attention_types")
        words, key = expanded, "attention_types"
    require_key(isinstance(words, list) and len(words) == count, f"{key}: not a word for every layer")
    for word in words:
        require_key(word in ("global", "local"), f"{key}: {show(word)} is not implemented (known: global, local)")
    return windowed([i for i in range(count) if words[i] == "local"], get("window_size", 256))


GPT_NEO = Family(
    defaults={
        "vocab_size": 50257,
        "max_position_embeddings": 2048,
        "hidden_size": 2048,
        "num_layers": 24,
        "num_heads": 16,
    },
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("max_position_embeddings"),
        "hidden_size": Key("hidden_size"),
        "n_layers": Key("num_layers"),
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": Key("layer_norm_epsilon", 1e-5)},
        # Its scores are not scaled at all.
        "attention": {"n_heads": Key("num_heads"), "bias": False, "o_bias": True, "scale": 1.0},
        "mlp": {
            "kind": "dense",
            "size": Key("intermediate_size", _four_times("hidden_size")),
            "activation": Key("activation_function", "gelu_new", ACTIVATIONS),
            "bias": True,
        },
        "variants": From(("attention_types", "attention_layers", "window_size"), _local_layers),
        "lm_head": {"tied": Key("tie_word_embeddings", True)},
    },
    irrelevant=("resid_dropout", "embed_dropout"),
    aliases={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    names={
        "embed": Stored("wte"),
        "pos_embed": Stored("wpe"),
        "layers.#.attn_norm": Stored("h.#.ln_1"),
        "layers.#.attn.q": Stored("h.#.attn.attention.q_proj"),
        "layers.#.attn.k": Stored("h.#.attn.attention.k_proj"),
        "layers.#.attn.v": Stored("h.#.attn.attention.v_proj"),
        "layers.#.attn.o": Stored("h.#.attn.attention.out_proj"),
        "layers.#.mlp_norm": Stored("h.#.ln_2"),
        "layers.#.mlp.up": Stored("h.#.mlp.c_fc"),
        "layers.#.mlp.down": Stored("h.#.mlp.c_proj"),
        "final_norm": Stored("ln_f"),
        "lm_head": Stored("lm_head", outside=True),
    },
    prefixes=("transformer.", ""),
    buffers=(".attn.attention.bias", ".attn.attention.masked_bias"),
)


# General words that this family has its own for.
GENERAL = ("rope_theta", "partial_rotary_factor", "head_dim")


def _neox_rope(get: Get) -> dict[str, Any]:
    """The rotation by rope_parameters, or by the family's own words, rotary_emb_base and rotary_pct.

    The library reads none of the general words here. Files of some of its versions repeat by them what the own ones
    say; a file where they say something else is refused.
    """
    theta, share = get("rotary_emb_base", 10_000.0), number(get("rotary_pct", 0.25), "rotary_pct")

    def hearing(*words: str) -> dict[str, Any]:
        def heard(key: str, default: Any = None) -> Any:
            return default if key in GENERAL and key not in words else get(key, default)

        return rope(heard, theta=theta, partial=share)

    found = hearing()
    for word in GENERAL:
        require_key(hearing(word) == found, f"{word}: {show(get(word))} contradicts the rest of the config")
    return found


GPT_NEOX = Family(
    defaults={
        "vocab_size": 50432,
        "max_position_embeddings": 2048,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
    },
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("max_position_embeddings"),
        "hidden_size": Key("hidden_size"),
        "n_layers": Key("num_hidden_layers"),
        "position": From((*ROPE_KEYS, "head_dim", "rotary_emb_base", "rotary_pct"), _neox_rope),
        "norm": {"kind": "layernorm", "eps": Key("layer_norm_eps", 1e-5)},
        "attention": {"n_heads": Key("num_attention_heads"), "bias": Key("attention_bias", True)},
        "mlp": {
            "kind": "dense",
            "size": Key("intermediate_size"),
            "activation": Key("hidden_act", "gelu", ACTIVATIONS),
            "bias": True,
        },
        "residual": Key("use_parallel_residual", True, {True: "parallel", False: "sequential"}),
        "lm_head": {"tied": Key("tie_word_embeddings", False)},
    },
    irrelevant=("attention_probs_dropout_prob", "hidden_dropout_prob"),
    names={
        "embed": Stored("embed_in"),
        "layers.#.attn_norm": Stored("layers.#.input_layernorm"),
        ("layers.#.attn.q", "layers.#.attn.k", "layers.#.attn.v"): Stored(
            "layers.#.attention.query_key_value", fused="heads"
        ),
        "layers.#.attn.o": Stored("layers.#.attention.dense"),
        "layers.#.mlp_norm": Stored("layers.#.post_attention_layernorm"),
        "layers.#.mlp.up": Stored("layers.#.mlp.dense_h_to_4h"),
        "layers.#.mlp.down": Stored("layers.#.mlp.dense_4h_to_h"),
        "final_norm": Stored("final_layer_norm"),
        "lm_head": Stored("embed_out", outside=True),
    },
    others=({"lm_head": Stored("lm_head", outside=True)},),
    prefixes=("gpt_neox.", ""),
    buffers=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
)


def _gptj_rotary_dim(get: Get) -> int:
    """null means the whole hidden size, which fits a head only where there is one."""
    return get("rotary_dim", get("n_embd"))


GPTJ = Family(
    defaults={
        "vocab_size": 50400,
        "n_positions": 2048,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "rotary_dim": 64,
    },
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("n_positions"),
        "hidden_size": Key("n_embd"),
        "n_layers": Key("n_layer"),
        "position": {"kind": "rope", "pairs": "neighbours", "rotary_dim": From(("rotary_dim",), _gptj_rotary_dim)},
        "norm": {"kind": "layernorm", "eps": Key("layer_norm_epsilon", 1e-5)},
        "attention": {"n_heads": Key("n_head"), "bias": False},
        "mlp": {
            "kind": "dense",
            "size": Key("n_inner", _four_times("n_embd")),
            "activation": Key("activation_function", "gelu_new", ACTIVATIONS),
            "bias": True,
        },
        "residual": "parallel_shared",
        "lm_head": {"tied": Key("tie_word_embeddings", False), "bias": True},
    },
    fixed={"rotary": (True,), "scale_attn_weights": (True,)},
    aliases=GPT2.aliases,
    names={
        "embed": Stored("wte"),
        "layers.#.attn_norm": Stored("h.#.ln_1"),
        "layers.#.attn.q": Stored("h.#.attn.q_proj"),
        "layers.#.attn.k": Stored("h.#.attn.k_proj"),
        "layers.#.attn.v": Stored("h.#.attn.v_proj"),
        "layers.#.attn.o": Stored("h.#.attn.out_proj"),
        "layers.#.mlp.up": Stored("h.#.mlp.fc_in"),
        "layers.#.mlp.down": Stored("h.#.mlp.fc_out"),
        "final_norm": Stored("ln_f"),
        "lm_head": Stored("lm_head", outside=True),
    },
    prefixes=("transformer.", ""),
    buffers=(".attn.bias", ".attn.masked_bias", ".embed_positions"),
)


def _opt_row_size(get: Get) -> int | None:
    size = get("hidden_size")
    return None if get("word_embed_proj_dim", size) == size else get("word_embed_proj_dim")


OPT = Family(
    defaults={
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
    },
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("max_position_embeddings"),
        "hidden_size": Key("hidden_size"),
        "embed_size": From(("word_embed_proj_dim",), _opt_row_size),
        "n_layers": Key("num_hidden_layers"),
        "position": {"kind": "learned", "offset": 2},
        "norm": {
            "kind": "layernorm",
            "weight": Key("layer_norm_elementwise_affine", True),
            "bias": Key("layer_norm_elementwise_affine", True),
            "placement": Key("do_layer_norm_before", True, {True: "pre", False: "post"}),
            "final": From(
                ("_remove_final_layer_norm",),
                lambda get: get("do_layer_norm_before", True) and not get("_remove_final_layer_norm", False),
            ),
        },
        "attention": {"n_heads": Key("num_attention_heads"), "bias": Key("enable_bias", True)},
        "mlp": {
            "kind": "dense",
            "size": Key("ffn_dim"),
            "activation": Key("activation_function", "relu", ACTIVATIONS),
            "bias": Key("enable_bias", True),
        },
        "lm_head": {"tied": Key("tie_word_embeddings", True)},
    },
    fixed={"learned_embeddings": (True,), "scale_embeddings": (False,)},
    irrelevant=("dropout", "activation_dropout", "layerdrop", "init_std", "output_projection"),
    names={
        "embed": Stored("embed_tokens"),
        "embed_in": Stored("project_in"),
        "pos_embed": Stored("embed_positions"),
        "layers.#.attn_norm": Stored("layers.#.self_attn_layer_norm"),
        "layers.#.attn.q": Stored("layers.#.self_attn.q_proj"),
        "layers.#.attn.k": Stored("layers.#.self_attn.k_proj"),
        "layers.#.attn.v": Stored("layers.#.self_attn.v_proj"),
        "layers.#.attn.o": Stored("layers.#.self_attn.out_proj"),
        "layers.#.mlp_norm": Stored("layers.#.final_layer_norm"),
        "layers.#.mlp.up": Stored("layers.#.fc1"),
        "layers.#.mlp.down": Stored("layers.#.fc2"),
        "final_norm": Stored("final_layer_norm"),
        "embed_out": Stored("project_out"),
        "lm_head": Stored("lm_head", outside=True),
    },
    prefixes=("model.decoder.", "decoder.", ""),
)

PHI = Family(
    defaults={
        "vocab_size": 51200,
        "max_position_embeddings": 2048,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "intermediate_size": 8192,
    },
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("max_position_embeddings"),
        "hidden_size": Key("hidden_size"),
        "n_layers": Key("num_hidden_layers"),
        "position": From((*ROPE_KEYS, "head_dim"), lambda get: rope(get, partial=0.5)),
        "norm": {"kind": "layernorm", "eps": Key("layer_norm_eps", 1e-5)},
        "attention": {
            "n_heads": Key("num_attention_heads"),
            "n_kv_heads": Key("num_key_value_heads", lambda get: get("num_attention_heads")),
            "head_dim": From(("head_dim",), head_dim),
            "bias": True,
            "qk_norm": Key("qk_layernorm", False, {True: "head", False: "none"}),
        },
        "mlp": {
            "kind": "dense",
            "size": Key("intermediate_size"),
            "activation": Key("hidden_act", "gelu_new", ACTIVATIONS),
            "bias": True,
        },
        "residual": "parallel_shared",
        "lm_head": {"tied": Key("tie_word_embeddings", False), "bias": True},
    },
    names={
        "embed": Stored("embed_tokens"),
        "layers.#.attn_norm": Stored("layers.#.input_layernorm"),
        "layers.#.attn.q": Stored("layers.#.self_attn.q_proj"),
        "layers.#.attn.k": Stored("layers.#.self_attn.k_proj"),
        "layers.#.attn.v": Stored("layers.#.self_attn.v_proj"),
        "layers.#.attn.q_norm": Stored("layers.#.self_attn.q_layernorm"),
        "layers.#.attn.k_norm": Stored("layers.#.self_attn.k_layernorm"),
        "layers.#.attn.o": Stored("layers.#.self_attn.dense"),
        "layers.#.mlp.up": Stored("layers.#.mlp.fc1"),
        "layers.#.mlp.down": Stored("layers.#.mlp.fc2"),
        "final_norm": Stored("final_layernorm"),
        "lm_head": Stored("lm_head", outside=True),
    },
    prefixes=("model.", ""),
    buffers=("rotary_emb.inv_freq",),
)


RECORDS = {"gpt2": GPT2, "gpt_neo": GPT_NEO, "gpt_neox": GPT_NEOX, "gptj": GPTJ, "opt": OPT, "phi": PHI}
