"""An encoder beside a decoder: the Transformer of 2017 as trained for translation, its relatives that fill in a text
(arXiv:1910.13461), and those that tell positions by distances (arXiv:1910.10683).
"""

from typing import Any

from gptcli.families.record import ACTIVATIONS, Family, From, Get, Key, Stored, require_key, whole
from gptcli.spec import show

# What these models are without: decoders alone, encoders alone.
BOTH_STACKS = {"is_encoder_decoder": (True,), "is_decoder": (False,)}


def _embed_scale(get: Get) -> float:
    return whole(get("d_model"), "d_model") ** 0.5 if get("scale_embedding") else 1.0


def _tied(get: Get) -> bool:
    tied = get("tie_word_embeddings", True)
    require_key(isinstance(tied, bool), f"tie_word_embeddings: {show(tied)} is not true or false")
    return tied


def _one_table(get: Get) -> bool:
    """Do both stacks look tokens up in one table?

    The library shares it among them only where it ties the head to it too.
    """
    shared = get("share_encoder_decoder_embeddings", True)
    require_key(isinstance(shared, bool), f"share_encoder_decoder_embeddings: {show(shared)} is not true or false")
    return shared and _tied(get)


SHARING = ("tie_word_embeddings", "share_encoder_decoder_embeddings")


def _decoder_vocabulary(get: Get) -> int:
    """The decoder's own number of words, where it has its own table; where not, the library has no ear for it."""
    own, size = get("decoder_vocab_size", get("vocab_size")), get("vocab_size")
    if not get("share_encoder_decoder_embeddings", True):
        return own
    said = f"decoder_vocab_size: {show(own)} is not vocab_size: {show(size)}, the number of the head's words"
    require_key(_tied(get) or own == size, said)
    return size


# Both stacks are post-norm layers of the same make; each has its own number of them, of heads and of the MLP's units.
STACKS: dict[str, Any] = {
    "hidden_size": Key("d_model"),
    "context_length": Key("max_position_embeddings"),
    "n_layers": Key("decoder_layers"),
    "embed_scale": From(("scale_embedding",), _embed_scale),
    "attention": {"n_heads": Key("decoder_attention_heads"), "bias": True},
    "mlp": {
        "kind": "dense",
        "size": Key("decoder_ffn_dim"),
        "activation": Key("activation_function", reads=ACTIVATIONS),
        "bias": True,
    },
    "encoder": {
        "vocab_size": Key("vocab_size"),
        "n_layers": Key("encoder_layers"),
        "attention": {"n_heads": Key("encoder_attention_heads")},
        "mlp": {"size": Key("encoder_ffn_dim")},
    },
    "encoder_embed": From(SHARING, lambda get: "shared" if _one_table(get) else "own"),
    "lm_head": {"tied": Key("tie_word_embeddings", True), "bias": True},
}


def _stack_names(stack: str) -> dict[str, str]:
    """A stack's stems, less what stands before them, as its files call them."""
    layer = f"{stack}.layers.#"
    attentions = {"attn": "self_attn"} | ({"cross": "encoder_attn"} if stack == "decoder" else {})
    names = {"embed": f"{stack}.embed_tokens", "layers.#.mlp_norm": f"{layer}.final_layer_norm"}
    names |= {f"layers.#.mlp.{ours}": f"{layer}.{theirs}" for ours, theirs in (("up", "fc1"), ("down", "fc2"))}
    for ours, theirs in attentions.items():
        names[f"layers.#.{ours}_norm"] = f"{layer}.{theirs}_layer_norm"
        names |= {f"layers.#.{ours}.{letter}": f"{layer}.{theirs}.{letter}_proj" for letter in "qkv"}
        names[f"layers.#.{ours}.o"] = f"{layer}.{theirs}.out_proj"
    return names


def _both(names: Any) -> dict[str, Stored]:
    """names(stack) of both stacks as our stems, to Stored."""
    decoder = {ours: Stored(theirs) for ours, theirs in names("decoder").items()}
    return decoder | {f"encoder.{ours}": Stored(theirs) for ours, theirs in names("encoder").items()}


STACK_NAMES = _both(_stack_names) | {
    "lm_head": Stored("lm_head", outside=True),
    # A buffer of zeros in the library, which files of trained models fill with numbers.
    "lm_head.bias": Stored("final_logits_bias", outside=True, row=True, absent="zeros"),
}
# One table goes by the name that both stacks share, by either's own, or by the head's: old files hold it by all four.
TABLE = {
    "embed": (Stored("shared"), Stored("lm_head", outside=True), Stored("encoder.embed_tokens")),
    "encoder.embed": (Stored("shared"),),
}
# Words of the library's early days that tell architectures apart, and words that tell nothing of a forward pass.
STACK_FIXED = BOTH_STACKS | {"add_final_layer_norm": (False,), "normalize_before": (False,)}
STACK_IRRELEVANT = (
    *("dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std", "add_bias_logits"),
    *("classif_dropout", "force_bos_token_to_be_generated", "_num_labels"),
)
STACK_ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}
SIZES = {
    "max_position_embeddings": 1024,
    "d_model": 1024,
    "activation_function": "gelu",
    **{f"{stack}_{key}": size for stack in ("encoder", "decoder") for key, size in (("layers", 12), ("ffn_dim", 4096))},
    **{f"{stack}_attention_heads": 16 for stack in ("encoder", "decoder")},
}

MARIAN = Family(
    defaults=SIZES | {"vocab_size": 58101},
    template=STACKS
    | {
        "vocab_size": From(("vocab_size", "decoder_vocab_size", *SHARING), _decoder_vocabulary),
        "position": {"kind": "sinusoidal", "pairs": "halves"},
        "norm": {"kind": "layernorm", "eps": 1e-5, "placement": "post"},
    },
    fixed=STACK_FIXED | {"normalize_embedding": (False,), "static_position_embeddings": (True,)},
    irrelevant=(*STACK_IRRELEVANT, "extra_pos_embeddings"),
    aliases=STACK_ALIASES,
    names=STACK_NAMES,
    copies=TABLE,
    prefixes=("model.", ""),
    # Sines and cosines, which are computed here.
    buffers=(".embed_positions.weight",),
    start=Key("decoder_start_token_id", lambda get: get("pad_token_id", 58100)),
)

BART = Family(
    defaults=SIZES | {"vocab_size": 50265},
    template=STACKS
    | {
        "vocab_size": Key("vocab_size"),
        "position": {"kind": "learned", "offset": 2},
        "norm": {"kind": "layernorm", "eps": 1e-5, "placement": "post", "embedding": True},
        "encoder_embed": From(("tie_word_embeddings",), lambda get: "shared" if _tied(get) else "own"),
    },
    fixed=STACK_FIXED
    | {"normalize_embedding": (True,), "static_position_embeddings": (False,), "extra_pos_embeddings": (2,)},
    irrelevant=STACK_IRRELEVANT,
    aliases=STACK_ALIASES,
    names=STACK_NAMES
    | {
        f"{ours}{stem}": Stored(f"{theirs}.{name}")
        for ours, theirs in (("", "decoder"), ("encoder.", "encoder"))
        for stem, name in (("pos_embed", "embed_positions"), ("embed_norm", "layernorm_embedding"))
    },
    copies=TABLE,
    prefixes=("model.", ""),
    buffers=("encoder.version", "decoder.version"),
    # What other tasks read off the final vectors.
    unused=("classification_head.*", "qa_outputs.*"),
    start=Key("decoder_start_token_id", 2),
)


def _t5_mlp(get: Get) -> dict[str, Any]:
    """The MLP by one word, such as `relu` or `gated-gelu`; what a config says of its parts goes before that."""
    said = get("feed_forward_proj", "relu")
    require_key(isinstance(said, str), f"feed_forward_proj: {show(said)} is not text")
    *gate, word = said.split("-")
    require_key(gate in ([], ["gated"]), f"feed_forward_proj: {show(said)} is not an activation, or gated-activation")
    word = get("dense_act_fn", "gelu_new" if said == "gated-gelu" else word)
    gated = get("is_gated_act", bool(gate))
    known = ", ".join(ACTIVATIONS)
    key = "feed_forward_proj" if get("dense_act_fn") is None else "dense_act_fn"
    listed = isinstance(word, str) and word in ACTIVATIONS
    require_key(listed, f"{key}: {show(word)} is not implemented (known: {known})")
    return {"kind": "dense", "size": Key("d_ff"), "activation": ACTIVATIONS[word], "gated": gated}


def _t5_head_scale(get: Get) -> float:
    """d_model^-0.5 where the head is tied, unless the config has a word of its own for it."""
    scaled = get("scale_decoder_outputs", _tied(get))
    require_key(isinstance(scaled, bool), f"scale_decoder_outputs: {show(scaled)} is not true or false")
    return whole(get("d_model"), "d_model") ** -0.5 if scaled else 1.0


def _t5_names(stack: str) -> dict[str, str]:
    layer, last = f"{stack}.block.#.layer", 2 if stack == "decoder" else 1
    attentions = {"attn": (0, "SelfAttention")} | ({"cross": (1, "EncDecAttention")} if stack == "decoder" else {})
    names = {
        "embed": f"{stack}.embed_tokens",
        "rel_bias": f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias",
        "layers.#.mlp_norm": f"{layer}.{last}.layer_norm",
        "layers.#.mlp.up": f"{layer}.{last}.DenseReluDense.wi",
        "layers.#.mlp.gate": f"{layer}.{last}.DenseReluDense.wi_0",
        "layers.#.mlp.down": f"{layer}.{last}.DenseReluDense.wo",
        "final_norm": f"{stack}.final_layer_norm",
    }
    for ours, (place, theirs) in attentions.items():
        names[f"layers.#.{ours}_norm"] = f"{layer}.{place}.layer_norm"
        names |= {f"layers.#.{ours}.{letter}": f"{layer}.{place}.{theirs}.{letter}" for letter in "qkvo"}
    return names


T5_NAMES = _both(_t5_names) | {"lm_head": Stored("lm_head")}

T5 = Family(
    defaults={
        "vocab_size": 32128,
        "n_positions": 512,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
    },
    template={
        "vocab_size": Key("vocab_size"),
        # No table ends at it: it is the length of the texts that the models were trained on.
        "context_length": Key("n_positions"),
        "hidden_size": Key("d_model"),
        "n_layers": Key("num_decoder_layers", lambda get: get("num_layers")),
        "position": {
            "kind": "relative",
            "buckets": Key("relative_attention_num_buckets"),
            "max_distance": Key("relative_attention_max_distance"),
        },
        "norm": {"kind": "rmsnorm", "eps": Key("layer_norm_epsilon")},
        "attention": {"n_heads": Key("num_heads"), "head_dim": Key("d_kv"), "bias": False, "scale": 1.0},
        "mlp": From(("feed_forward_proj", "dense_act_fn", "is_gated_act"), _t5_mlp),
        "encoder": {"n_layers": Key("num_layers")},
        "lm_head": {
            "tied": Key("tie_word_embeddings", True),
            "scale": From(("scale_decoder_outputs", "tie_word_embeddings"), _t5_head_scale),
        },
    },
    fixed=BOTH_STACKS,
    irrelevant=("dropout_rate", "initializer_factor"),
    aliases={
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
    },
    names=T5_NAMES,
    others=({stem: Stored(f"{stored.name}_1") for stem, stored in T5_NAMES.items() if stem.endswith("mlp.up")},),
    copies=TABLE,
    # A table of the first files' cross attention, which nothing reads.
    unused=("EncDecAttention.relative_attention_bias.weight",),
    start=Key("decoder_start_token_id", lambda get: get("pad_token_id", 0)),
)

RECORDS = {"marian": MARIAN, "bart": BART, "t5": T5}
