"""Encoders alone: every position sees both ways, and the head fills in what was masked (arXiv:1810.04805, 1907.11692,
1910.01108); the latest line with rotation, and windows in most layers (arXiv:2412.13663).
"""

from typing import Any

from gptcli.families.record import (
    ACTIVATIONS,
    Family,
    From,
    Get,
    Key,
    Stored,
    require_key,
    rope_scaling,
    turning,
    whole,
    windowed,
    windows,
)
from gptcli.spec import show

# What the library's classes add to a family's own name: those with the head that fills in masks, and those without.
HEADED = ("ForMaskedLM", "ForPreTraining", "LMHeadModel", "ForCausalLM")
BARE = (
    *("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
    "ForNextSentencePrediction",
)
# Keys by which an encoder would become a decoder.
FIXED = {"is_causal": (False,), "is_decoder": (False,), "add_cross_attention": (False,)}
DROPOUTS = ("attention_probs_dropout_prob", "hidden_dropout_prob")
# How a pooler was once made, in configs converted from TensorFlow.
POOLER = tuple(
    f"pooler_{word}" for word in ("type", "fc_size", "num_fc_layers", "num_attention_heads", "size_per_head")
)
# What other tasks read off the final vectors.
OTHER_HEADS = ("pooler.dense.*", "classifier.*", "qa_outputs.*")


def _head(family: str, transform: dict[str, Any], bias: Any = True) -> From:
    """The head that fills in masks, or none where every architecture that the config lists is without it.

    family: what the names of the library's classes begin with; transform and bias: as the head has them.
    """
    headed, bare = ([family + ending for ending in endings] for endings in (HEADED, BARE))

    def make(get: Get) -> dict[str, Any] | None:
        listed = get("architectures", [])
        named = isinstance(listed, list) and all(isinstance(name, str) for name in listed)
        require_key(named, f"architectures: {show(listed)} is not a list of names")
        for name in listed:
            known = ", ".join((*headed, *bare))
            said = f"architectures: {show(name)} is not implemented (known: {known})"
            require_key(name in headed or name in bare, said)
        if listed and not any(name in headed for name in listed):
            return None
        return {"tied": Key("tie_word_embeddings"), "bias": bias, "transform": transform}

    parts = (part.name for part in (*transform.values(), bias) if isinstance(part, Key))
    return From(("architectures", "tie_word_embeddings", *parts), make)


def _old_norms(names: dict[str, Stored]) -> dict[str, Stored]:
    """The norms as files converted from TensorFlow call their two weights."""
    norms = {stem: stored for stem, stored in names.items() if stored.name.endswith("LayerNorm")}
    return {stem: stored._replace(leaves=(".gamma", ".beta")) for stem, stored in norms.items()}


LAYER_NAMES = {
    "embed": Stored("embeddings.word_embeddings"),
    "pos_embed": Stored("embeddings.position_embeddings"),
    "segment_embed": Stored("embeddings.token_type_embeddings"),
    "embed_norm": Stored("embeddings.LayerNorm"),
    "layers.#.attn.q": Stored("encoder.layer.#.attention.self.query"),
    "layers.#.attn.k": Stored("encoder.layer.#.attention.self.key"),
    "layers.#.attn.v": Stored("encoder.layer.#.attention.self.value"),
    "layers.#.attn.o": Stored("encoder.layer.#.attention.output.dense"),
    "layers.#.attn_norm": Stored("encoder.layer.#.attention.output.LayerNorm"),
    "layers.#.mlp.up": Stored("encoder.layer.#.intermediate.dense"),
    "layers.#.mlp.down": Stored("encoder.layer.#.output.dense"),
    "layers.#.mlp_norm": Stored("encoder.layer.#.output.LayerNorm"),
}
BERT_NAMES = LAYER_NAMES | {
    "lm_head.dense": Stored("cls.predictions.transform.dense", outside=True),
    "lm_head.norm": Stored("cls.predictions.transform.LayerNorm", outside=True),
    "lm_head": Stored("cls.predictions.decoder", outside=True),
}
TABLE_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")

BERT = Family(
    defaults={
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    },
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("max_position_embeddings"),
        "hidden_size": Key("hidden_size"),
        "n_layers": Key("num_hidden_layers"),
        "n_segments": Key("type_vocab_size"),
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": Key("layer_norm_eps"), "placement": "post", "embedding": True},
        "attention": {"n_heads": Key("num_attention_heads"), "bias": True, "causal": False},
        "mlp": {
            "kind": "dense",
            "size": Key("intermediate_size"),
            "activation": Key("hidden_act", reads=ACTIVATIONS),
            "bias": True,
        },
        "lm_head": _head("Bert", {"activation": Key("hidden_act", reads=ACTIVATIONS)}),
    },
    fixed=FIXED | {"position_embedding_type": ("absolute",), "directionality": ("bidi",)},
    irrelevant=(*DROPOUTS, *POOLER),
    names=BERT_NAMES,
    others=(_old_norms(BERT_NAMES),),
    # The library ties a bias beside the decoder to the decoder's own, which its forward pass reads. Most files hold the
    # first alone.
    copies={"lm_head": (Stored("cls.predictions", outside=True),)},
    prefixes=("bert.", ""),
    buffers=TABLE_BUFFERS,
    unused=(
        *OTHER_HEADS,
        "cls.seq_relationship.*",
        "cls.predictions.transform.*",
        "cls.predictions.decoder.*",
        "cls.predictions.bias",
    ),
)

ROBERTA_NAMES = LAYER_NAMES | {
    "lm_head.dense": Stored("lm_head.dense", outside=True),
    "lm_head.norm": Stored("lm_head.layer_norm", outside=True),
    "lm_head": Stored("lm_head.decoder", outside=True),
}


def _after_padding(get: Get) -> int:
    """The table's rows less two: positions count from the row after the padding's, which is the second."""
    return whole(get("max_position_embeddings"), "max_position_embeddings", least=3) - 2


ROBERTA = Family(
    defaults=BERT.defaults | {"vocab_size": 50265},
    template=BERT.template
    | {
        "context_length": From(("max_position_embeddings",), _after_padding),
        "position": {"kind": "learned", "offset": 2},
        # Whatever the layers' activation is.
        "lm_head": _head("Roberta", {"activation": "gelu"}),
    },
    # Where positions begin.
    fixed=FIXED | {"position_embedding_type": ("absolute",), "pad_token_id": (1,)},
    irrelevant=DROPOUTS,
    names=ROBERTA_NAMES,
    others=(_old_norms(ROBERTA_NAMES),),
    copies={"lm_head": (Stored("lm_head", outside=True),)},
    prefixes=("roberta.", ""),
    buffers=TABLE_BUFFERS,
    unused=(*OTHER_HEADS, "lm_head.dense.*", "lm_head.layer_norm.*", "lm_head.decoder.*", "lm_head.bias"),
)

DISTILBERT = Family(
    defaults={
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "n_layers": 6,
        "n_heads": 12,
        "dim": 768,
        "hidden_dim": 3072,
        "activation": "gelu",
        "tie_word_embeddings": True,
    },
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("max_position_embeddings"),
        "hidden_size": Key("dim"),
        "n_layers": Key("n_layers"),
        # A file holds the table, whether its rows were learned or are sines and cosines.
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": 1e-12, "placement": "post", "embedding": True},
        "attention": {"n_heads": Key("n_heads"), "bias": True, "causal": False},
        "mlp": {
            "kind": "dense",
            "size": Key("hidden_dim"),
            "activation": Key("activation", reads=ACTIVATIONS),
            "bias": True,
        },
        "lm_head": _head("DistilBert", {"activation": Key("activation", reads=ACTIVATIONS)}),
    },
    fixed=FIXED,
    irrelevant=("sinusoidal_pos_embds", "dropout", "qa_dropout", "seq_classif_dropout", "tie_weights_"),
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    names={
        "embed": Stored("embeddings.word_embeddings"),
        "pos_embed": Stored("embeddings.position_embeddings"),
        "embed_norm": Stored("embeddings.LayerNorm"),
        "layers.#.attn.q": Stored("transformer.layer.#.attention.q_lin"),
        "layers.#.attn.k": Stored("transformer.layer.#.attention.k_lin"),
        "layers.#.attn.v": Stored("transformer.layer.#.attention.v_lin"),
        "layers.#.attn.o": Stored("transformer.layer.#.attention.out_lin"),
        "layers.#.attn_norm": Stored("transformer.layer.#.sa_layer_norm"),
        "layers.#.mlp.up": Stored("transformer.layer.#.ffn.lin1"),
        "layers.#.mlp.down": Stored("transformer.layer.#.ffn.lin2"),
        "layers.#.mlp_norm": Stored("transformer.layer.#.output_layer_norm"),
        "lm_head.dense": Stored("vocab_transform", outside=True),
        "lm_head.norm": Stored("vocab_layer_norm", outside=True),
        "lm_head": Stored("vocab_projector", outside=True),
    },
    prefixes=("distilbert.", ""),
    buffers=TABLE_BUFFERS,
    unused=(*OTHER_HEADS, "vocab_transform.*", "vocab_layer_norm.*", "vocab_projector.*"),
)


def _scaled(get: Get) -> dict[str, Any]:
    """What changes the frequencies of both kinds of layer, where no table says so."""
    scaling = rope_scaling(get)
    require_key(not (get("rope_parameters") and scaling), "rope_scaling: stands beside rope_parameters")
    # By its older word, `type`, the library takes no notice of it.
    require_key(not scaling or "rope_type" in scaling, "rope_scaling.rope_type: missing")
    return scaling


GLOBAL = turning("full_attention", "global_rope_theta", _scaled)
LOCAL = turning("sliding_attention", "local_rope_theta", _scaled)


def _window(get: Get) -> int:
    """How many keys to one side a local layer sees, the query's own among them: the config's word is both sides."""
    width = whole(get("local_attention"), "local_attention", least=0)
    said = get("sliding_window", width // 2)
    require_key(said == width // 2, f"sliding_window: {show(said)} contradicts local_attention: {width}")
    return width // 2 + 1


def _layers(get: Get) -> list[dict[str, Any]]:
    """The first layer, which reads the embedding as its norm gave it, and the local ones: those that layer_types names,
    else all but every n-th.
    """
    every = whole(get("global_attn_every_n_layers", 3), "global_attn_every_n_layers")
    window = _window(get)
    local = windows(get, window, lambda i: i % every != 0)
    first: dict[str, Any] = {"layers": [0], "attention": {"normed": False}}
    if 0 in local:
        first = {"layers": [0], "attention": {"normed": False, "window": window}, "position": LOCAL.make(get)}
    return [first, *windowed([i for i in local if i > 0], window, position=LOCAL.make(get))]


MODERNBERT = Family(
    defaults={
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "local_attention": 128,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "mlp_bias": False,
        "decoder_bias": True,
        "classifier_bias": False,
        "classifier_activation": "gelu",
        "tie_word_embeddings": True,
    },
    template={
        "vocab_size": Key("vocab_size"),
        "context_length": Key("max_position_embeddings"),
        "hidden_size": Key("hidden_size"),
        "n_layers": Key("num_hidden_layers"),
        "position": GLOBAL,
        "norm": {"kind": "layernorm", "eps": Key("norm_eps"), "bias": Key("norm_bias"), "embedding": True},
        "attention": {"n_heads": Key("num_attention_heads"), "bias": Key("attention_bias"), "causal": False},
        "mlp": {
            "kind": "dense",
            "size": Key("intermediate_size"),
            "activation": Key("hidden_activation", reads=ACTIVATIONS),
            "gated": True,
            "bias": Key("mlp_bias"),
        },
        "variants": From(
            (*LOCAL.keys, "local_attention", "sliding_window", "layer_types", "global_attn_every_n_layers"), _layers
        ),
        "lm_head": _head(
            "ModernBert",
            {"activation": Key("classifier_activation", reads=ACTIVATIONS), "bias": Key("classifier_bias")},
            bias=Key("decoder_bias"),
        ),
    },
    fixed=FIXED,
    irrelevant=(
        *("embedding_dropout", "mlp_dropout", "initializer_cutoff_factor", "cls_token_id"),
        *("classifier_pooling", "sparse_prediction", "sparse_pred_ignore_index", "repad_logits_with_grad"),
        *("deterministic_flash_attn", "reference_compile"),
        # Words of other encoders in its published configs, which its model doesn't read.
        *("layer_norm_eps", "position_embedding_type"),
    ),
    names={
        "embed": Stored("embeddings.tok_embeddings"),
        "embed_norm": Stored("embeddings.norm"),
        "layers.#.attn_norm": Stored("layers.#.attn_norm"),
        tuple(f"layers.#.attn.{letter}" for letter in "qkv"): Stored("layers.#.attn.Wqkv"),
        "layers.#.attn.o": Stored("layers.#.attn.Wo"),
        "layers.#.mlp_norm": Stored("layers.#.mlp_norm"),
        ("layers.#.mlp.gate", "layers.#.mlp.up"): Stored("layers.#.mlp.Wi"),
        "layers.#.mlp.down": Stored("layers.#.mlp.Wo"),
        "final_norm": Stored("final_norm"),
        "lm_head.dense": Stored("head.dense", outside=True),
        "lm_head.norm": Stored("head.norm", outside=True),
        "lm_head": Stored("decoder", outside=True),
    },
    prefixes=("model.", ""),
    buffers=("inv_freq",),
    unused=("classifier.*", "head.dense.*", "head.norm.*"),
)

RECORDS = {"bert": BERT, "roberta": ROBERTA, "distilbert": DISTILBERT, "modernbert": MODERNBERT}
