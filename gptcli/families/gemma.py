"""The Gemma line: norm weights stored less 1, embeddings times the root of the hidden size, a tanh GELU in a gated MLP;
later norms on both sides of a sublayer, and windows in most layers (arXiv:2403.08295, 2408.00118, 2503.19786).
"""

from dataclasses import replace
from typing import Any

from gptcli.families.llama import BUFFERS, LLAMA, NAMES, PREFIXES, QK_NORMS
from gptcli.families.record import (
    ACTIVATIONS,
    Family,
    From,
    Get,
    Key,
    Stored,
    number,
    require_key,
    rope_scaling,
    turning,
    whole,
    windowed,
    windows,
)
from gptcli.spec import show

MLP = LLAMA.template["mlp"] | {"bias": False}
TANH = "gelu_pytorch_tanh"
# Attention both ways, for models that embed a text.
CAUSAL = Key("use_bidirectional_attention", False, {False: True, True: False})


def _root(get: Get) -> float:
    """What token embeddings are multiplied by (the forward pass rounds it to the type that it computes in)."""
    return whole(get("hidden_size"), "hidden_size") ** 0.5


GEMMA = Family(
    defaults=LLAMA.defaults
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "intermediate_size": 24576,
        "hidden_act": TANH,
        "tie_word_embeddings": True,
    },
    template=LLAMA.template
    | {
        "embed_scale": From(("hidden_size",), _root),
        "norm": {"kind": "rmsnorm", "eps": Key("rms_norm_eps"), "offset": 1.0},
        "attention": LLAMA.template["attention"] | {"causal": CAUSAL},
        # The first configs say `gelu` and mean its tanh form, as every later one says.
        "mlp": MLP | {"activation": Key("hidden_act", TANH, ACTIVATIONS | {"gelu": "gelu_tanh"})},
    },
    fixed={"hidden_activation": (TANH,)},  # the library's class read it once, and now reads hidden_act alone
    names=NAMES,
    prefixes=PREFIXES,
    buffers=BUFFERS,
)


def _root_of_scalar(value: Any) -> float:
    """What scores are multiplied by, where the config says whose root they are divided by."""
    value = number(value, "query_pre_attn_scalar")
    require_key(value > 0, f"query_pre_attn_scalar: {show(value)} is not above 0")
    return value**-0.5


def _window(get: Get) -> int:
    """How far a local layer sees: where attention goes both ways, the config's word is the width of both sides."""
    window = whole(get("sliding_window"), "sliding_window")
    return window // 2 + 1 if get("use_bidirectional_attention") else window


def _every_other(get: Get) -> list[dict[str, Any]]:
    """Windows in the layers that layer_types names, else in the first and every second one from there."""
    return windowed(windows(get, _window(get), lambda i: i % 2 == 0), _window(get))


GEMMA2 = Family(
    defaults=GEMMA.defaults
    | {
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 9216,
        "hidden_activation": TANH,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    template=GEMMA.template
    | {
        "norm": GEMMA.template["norm"] | {"placement": "sandwich"},
        "attention": LLAMA.template["attention"]
        | {
            "scale": Key("query_pre_attn_scalar", reads=_root_of_scalar),
            "softcap": Key("attn_logit_softcapping", None),
        },
        "mlp": MLP | {"activation": Key("hidden_activation", TANH, ACTIVATIONS)},
        "lm_head": {"tied": Key("tie_word_embeddings"), "softcap": Key("final_logit_softcapping", None)},
        "variants": From(("sliding_window", "layer_types"), _every_other),
    },
    # The library's kernels differ: some obey it, some mask as ever.
    fixed={"use_bidirectional_attention": (False,)},
    irrelevant=("hidden_act", "sliding_window_size"),
    names=NAMES
    | {
        "layers.#.attn_out_norm": Stored("layers.#.post_attention_layernorm"),
        "layers.#.mlp_norm": Stored("layers.#.pre_feedforward_layernorm"),
        "layers.#.mlp_out_norm": Stored("layers.#.post_feedforward_layernorm"),
    },
    prefixes=PREFIXES,
    buffers=BUFFERS,
)


LOCAL = turning("sliding_attention", "rope_local_base_freq")


def _local(get: Get) -> list[dict[str, Any]]:
    """Windows and a rotation of their own in the layers that layer_types names, else in all but every pattern-th."""
    every = whole(get("sliding_window_pattern"), "sliding_window_pattern")
    layers = windows(get, _window(get), lambda i: (i + 1) % every != 0)
    return windowed(layers, _window(get), position=LOCAL.make(get))


GEMMA3_TEXT = Family(
    defaults=GEMMA2.defaults
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    template=GEMMA2.template
    | {
        "position": turning("full_attention", "rope_theta", rope_scaling),
        "attention": LLAMA.template["attention"]
        | {
            "causal": CAUSAL,
            "qk_norm": "head",
            "scale": GEMMA2.template["attention"]["scale"],
        },
        "variants": From((*LOCAL.keys, "sliding_window", "sliding_window_pattern", "layer_types"), _local),
    },
    fixed={"attn_logit_softcapping": (None,)},  # the library's config has it, and its model doesn't read it
    irrelevant=("_sliding_window_pattern",),
    names=GEMMA2.names | QK_NORMS,
    prefixes=PREFIXES,
    buffers=BUFFERS,
)

GEMMA3 = replace(
    GEMMA3_TEXT,
    # The library's model for text alone reads these, and the one for images and text doesn't.
    fixed=GEMMA3_TEXT.fixed | {"final_logit_softcapping": (None,), "use_bidirectional_attention": (False,)},
    irrelevant=(
        *GEMMA3_TEXT.irrelevant,
        *("vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index"),
    ),
    inside="text_config",
    others=({"lm_head": Stored("language_model.lm_head", outside=True)},),
    prefixes=("language_model.model.", "model.language_model.", "language_model."),
    unused=("vision_tower.*", "multi_modal_projector.*"),
)

RECORDS = {"gemma": GEMMA, "gemma2": GEMMA2, "gemma3_text": GEMMA3_TEXT, "gemma3": GEMMA3}
