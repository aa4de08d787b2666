"""The GPT line equals transformers at toy size, by every switch of its configs that changes the forward pass."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from gptcli import count
from gptcli.errors import GptcliError
from gptcli.families import FAMILIES
from gptcli.families.record import ACTIVATIONS, resolve
from gptcli.layout import layout
from gptcli.model.forward import Inputs, forward
from gptcli.model.weights import Weights
from gptcli.source import open_model
from gptcli.spec import Spec
from gptcli.trace import Recorder, points, sizes
from tests.oracle import CPU, assert_near, check_exactly, check_family, save_toy

SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
OLD_SIZES = {"vocab_size": 97, "n_embd": 24, "n_inner": 40, "n_layer": 3, "n_head": 4, "n_positions": 40}
NEO_SIZES = {key: size for key, size in SIZES.items() if not key.startswith("num_")} | {"num_layers": 3, "num_heads": 4}
SMALL = {
    "gpt2": OLD_SIZES,
    "gpt_neo": NEO_SIZES | {"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 7},
    # Of a head's six numbers two turn, or four.
    "gpt_neox": SIZES | {"rotary_pct": 0.4},
    "gptj": OLD_SIZES | {"rotary_dim": 4},
    "opt": {key: size for key, size in SIZES.items() if key != "intermediate_size"} | {"ffn_dim": 40},
    "phi": SIZES | {"num_key_value_heads": 2, "head_dim": 10, "partial_rotary_factor": 0.4},
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
CASES = {
    "gpt2": {},
    "gpt2, each layer's scale": {"scale_attn_by_inverse_layer_idx": True},
    "gpt2, each layer's scale and no other": {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    "gpt2, unscaled": {"scale_attn_weights": False},
    "gpt2, untied": {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3, "n_inner": None},
    "gpt_neo": {},
    "gpt_neo, a word a layer": {"attention_types": None, "attention_layers": ["local", "global", "local"]},
    "gpt_neo, local everywhere": {"attention_types": [[["local"], 3]], "window_size": 1, "intermediate_size": None},
    "gpt_neo, untied": {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    "gpt_neox": {},
    "gpt_neox, one after the other": {"use_parallel_residual": False},
    "gpt_neox, no attention bias, tied": {"attention_bias": False, "tie_word_embeddings": True},
    "gpt_neox, whole heads turn, another base": {"rotary_pct": 1.0, "rotary_emb_base": 500, "layer_norm_eps": 1e-3},
    "gpt_neox, no head turns": {"rotary_pct": 0.0},
    "gpt_neox, by rope_parameters": {
        "rotary_pct": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.7},
    },
    "gpt_neox, linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "gpt_neox, yarn": {"rotary_pct": 0.7, "rope_scaling": YARN},
    "gptj": {},
    "gptj, tied": {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-3, "n_inner": None},
    "gptj, whole heads turn": {"rotary_dim": 6},
    "opt": {},
    "opt, norms after": {"do_layer_norm_before": False},
    "opt, rows of their own size": {"word_embed_proj_dim": 10},
    "opt, rows of their own size, untied, norms after": {
        "word_embed_proj_dim": 30,
        "tie_word_embeddings": False,
        "do_layer_norm_before": False,
    },
    "opt, no biases": {"enable_bias": False},
    "opt, norms without weights": {"layer_norm_elementwise_affine": False},
    "opt, norms after, without weights": {"layer_norm_elementwise_affine": False, "do_layer_norm_before": False},
    "opt, no final norm": {"_remove_final_layer_norm": True},
    "phi": {},
    "phi, q and k normed": {"qk_layernorm": True, "head_dim": 6},
    "phi, tied, whole heads turn": {"tie_word_embeddings": True, "partial_rotary_factor": 1.0, "layer_norm_eps": 1e-3},
    "phi, as many key heads": {"num_key_value_heads": None, "rope_theta": 300.0},
    "phi, linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "phi, yarn": {"partial_rotary_factor": 0.8, "rope_scaling": YARN},
}


def small(kind: str, config: dict | None = None) -> dict:
    """A small config of the family, without the keys that are taken away by None."""
    merged = {"model_type": kind} | SMALL[kind] | (config or {})
    return {key: value for key, value in merged.items() if value is not None}


def read(config: dict) -> Spec:
    return resolve(config, FAMILIES[config["model_type"]], "toy", "config.json").spec


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, tmp_path):
    check = check_exactly if "," in case else check_family
    check(small(case.partition(",")[0], CASES[case]), tmp_path)


@pytest.mark.parametrize("word", ACTIVATIONS)
def test_every_activation(word, tmp_path):
    check_exactly(small("gpt2", {"activation_function": word, "n_layer": 1}), tmp_path)


def test_scores_in_another_order_are_the_same_scores(tmp_path):
    """reorder_and_upcast_attn: the library scales and widens in another order, and only in float32."""
    save_toy(small("gpt2"), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"reorder_and_upcast_attn": True}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    model, ids = open_model(str(tmp_path)), torch.arange(24)[None]
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
    assert theirs.config.reorder_and_upcast_attn
    assert_near(forward(Inputs(ids), model.weights(torch.float32, CPU), model.spec), expected, 1e-4)


BOOL, SEED = st.booleans(), st.integers(0, 100)
WORDS = st.sampled_from(["gelu_new", "gelu", "relu", "silu", "tanh"])
EPS = st.sampled_from([1e-5, 1e-3])
BASE = st.sampled_from([50.0, 10_000.0])
SCALING = st.sampled_from(
    [None, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}, YARN | {"beta_fast": 4.0}]
)
DRAWN = {
    "gpt2": {
        "n_head": st.sampled_from([1, 3, 6]),
        "n_inner": st.sampled_from([None, 20]),
        "activation_function": WORDS,
        "layer_norm_epsilon": EPS,
        "scale_attn_weights": BOOL,
        "scale_attn_by_inverse_layer_idx": BOOL,
        "tie_word_embeddings": BOOL,
    },
    "gpt_neo": {
        "num_heads": st.sampled_from([1, 3, 6]),
        "intermediate_size": st.sampled_from([None, 20]),
        "activation_function": WORDS,
        "layer_norm_epsilon": EPS,
        "attention_types": st.lists(st.sampled_from(["global", "local"]), min_size=1, max_size=3).map(
            lambda words: [[words, 1], [["local"], 3 - len(words)]]
        ),
        "window_size": st.sampled_from([1, 5, 24, 30]),
        "tie_word_embeddings": BOOL,
    },
    "gpt_neox": {
        "num_attention_heads": st.sampled_from([1, 3]),
        "hidden_act": WORDS,
        "layer_norm_eps": EPS,
        "rotary_pct": st.sampled_from([0.25, 0.5, 1.0]),
        "rotary_emb_base": BASE,
        "rope_scaling": SCALING,
        "use_parallel_residual": BOOL,
        "attention_bias": BOOL,
        "tie_word_embeddings": BOOL,
    },
    "gptj": {
        "n_head": st.sampled_from([1, 3, 6]),
        "n_inner": st.sampled_from([None, 20]),
        "activation_function": WORDS,
        "layer_norm_epsilon": EPS,
        "rotary_dim": st.sampled_from([2, 4]),
        "tie_word_embeddings": BOOL,
    },
    "opt": {
        "num_attention_heads": st.sampled_from([1, 3, 6]),
        "activation_function": WORDS,
        "do_layer_norm_before": BOOL,
        "_remove_final_layer_norm": BOOL,
        "word_embed_proj_dim": st.sampled_from([None, 10, 24, 31]),
        "enable_bias": BOOL,
        "layer_norm_elementwise_affine": BOOL,
        "tie_word_embeddings": BOOL,
    },
    "phi": {
        "num_key_value_heads": st.sampled_from([None, 1, 2]),
        "hidden_act": WORDS,
        "layer_norm_eps": EPS,
        "partial_rotary_factor": st.sampled_from([0.4, 0.8, 1.0]),
        "rope_theta": BASE,
        "rope_scaling": SCALING,
        "qk_layernorm": BOOL,
        "tie_word_embeddings": BOOL,
    },
}


def any_of(kind: str):
    """A property test over what DRAWN says of the family."""

    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(st.fixed_dictionaries(DRAWN[kind]), SEED)
    def check(config, seed):
        if kind == "phi" and config["qk_layernorm"]:
            config["head_dim"] = 6  # the library's norms of q and k know no other head size than hidden size / heads
        with tempfile.TemporaryDirectory() as folder:
            check_exactly(small(kind, config), Path(folder), seed=seed)

    return check


test_any_gpt2 = any_of("gpt2")
test_any_gpt_neo = any_of("gpt_neo")
test_any_gpt_neox = any_of("gpt_neox")
test_any_gptj = any_of("gptj")
test_any_opt = any_of("opt")
test_any_phi = any_of("phi")


@pytest.mark.parametrize("kind", SMALL)
def test_defaults_are_the_library_s(kind):
    settings = AutoConfig.for_model(kind)
    stated = resolve(settings.to_dict(), FAMILIES[kind], "default", "config.json")
    assert not stated.unknown
    assert stated.spec == resolve({"model_type": kind}, FAMILIES[kind], "default", "config.json").spec
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(settings)
    # parameters() names a tied weight once, as the layout counts it.
    assert count.total(layout(stated.spec)) == sum(p.numel() for p in theirs.parameters())


# What the published files of some models say, the words of their time among it, and their known sizes.
PUBLISHED = {
    "gpt_neo": (
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]}
        | {"attention_layers": ["global", "local"] * 6, "resid_dropout": 0, "summary_type": "cls_index"},
        125_198_592,
    ),
    "gpt_neox": (
        {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 6}
        | {"vocab_size": 50304, "rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True},
        70_426_624,
    ),
    "gptj": ({"rotary": True, "scale_attn_weights": True, "gradient_checkpointing": False}, 6_050_882_784),
    "opt": (
        {"hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16, "num_hidden_layers": 24, "prefix": "</s>"}
        | {"word_embed_proj_dim": 512, "do_layer_norm_before": False, "activation_dropout": 0.0, "layerdrop": 0.0},
        331_196_416,
    ),
    "phi": (
        {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"partial_rotary_factor": 0.4, "rope_scaling": None, "rope_theta": 10000.0, "resid_pdrop": 0.1},
        2_779_683_840,
    ),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configs(kind):
    config, size = PUBLISHED[kind]
    found = resolve(config, FAMILIES[kind], "published", "config.json")
    assert not found.unknown
    assert count.total(layout(found.spec)) == size


REFUSED = [
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention: True"),
    ("gpt2", {"activation_function": "mish"}, "activation_function: 'mish'"),
    ("gpt2", {"is_causal": False}, "is_causal: False"),
    ("gpt2", {"per_layer_config": {"1": {"n_head": 2}}}, "per_layer_config"),
    ("gpt2", {"hidden_size": 48}, "hidden_size: 48 contradicts n_embd: 24"),
    ("gpt2", {"n_positions": 0}, "context_length: 0"),
    ("gpt_neo", {"activation_function": "mish"}, "activation_function: 'mish'"),
    ("gpt_neo", {"attention_types": [[["global", "far"], 1], [["local"], 1]]}, "attention_types: 'far'"),
    ("gpt_neo", {"attention_types": [[["global"], 10**12]]}, "attention_types: words for 1000000000000 layers"),
    ("gpt_neo", {"attention_types": ["global"]}, "attention_types: ['global']"),
    ("gpt_neo", {"attention_types": None}, "attention_types: words for 24 layers, but num_layers: 3"),
    ("gpt_neo", {"attention_layers": ["global"] * 3}, "attention_layers: ['global', 'global', 'global'] contradicts"),
    ("gpt_neo", {"attention_types": None, "attention_layers": ["global"]}, "attention_layers: not a word for every"),
    ("gpt_neox", {"hidden_act": "mish"}, "hidden_act: 'mish'"),
    ("gpt_neox", {"rope_theta": 500.0}, "rope_theta: 500.0 contradicts"),
    ("gpt_neox", {"partial_rotary_factor": 1.0}, "partial_rotary_factor: 1.0 contradicts"),
    ("gpt_neox", {"head_dim": 12}, "head_dim: 12 contradicts"),
    ("gpt_neox", {"rotary_pct": 0.5}, "rotary_dim: 3 is odd"),
    ("gpt_neox", {"rotary_pct": "all"}, "rotary_pct: 'all'"),
    ("gpt_neox", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "type: 'ntk'"),
    ("gptj", {"activation_function": "mish"}, "activation_function: 'mish'"),
    ("gptj", {"rotary": False}, "rotary: False"),
    ("gptj", {"scale_attn_weights": False}, "scale_attn_weights: False"),
    ("gptj", {"rotary_dim": 0}, "rotary_dim: 0"),
    ("gptj", {"rotary_dim": 3}, "rotary_dim: 3 is odd"),
    ("opt", {"activation_function": "mish"}, "activation_function: 'mish'"),
    ("opt", {"learned_embeddings": False}, "learned_embeddings: False"),
    ("opt", {"scale_embeddings": True}, "scale_embeddings: True"),
    ("phi", {"hidden_act": "mish"}, "hidden_act: 'mish'"),
    ("phi", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "type: 'ntk'"),
    ("phi", {"partial_rotary_factor": 0.5}, "rotary_dim: 5 is odd"),
]


@pytest.mark.parametrize(("kind", "config", "said"), REFUSED, ids=[f"{kind}: {said}" for kind, _, said in REFUSED])
def test_what_is_known_and_not_implemented_is_refused_by_name(kind, config, said):
    with pytest.raises(GptcliError) as caught:
        read(small(kind, config))
    assert said in caught.value.message


def test_a_null_rotary_dim_is_the_whole_hidden_size():
    """Which fits a head only where there is one: the library knew no more."""
    config = small("gptj")
    assert read(config | {"n_head": 1, "rotary_dim": None}) == read(config | {"n_head": 1, "rotary_dim": 24})
    with pytest.raises(GptcliError, match="rotary_dim: 24 is more than"):
        read(config | {"rotary_dim": None})


def test_words_repeated_by_other_versions_are_heard_once():
    neox = small("gpt_neox", {"rotary_emb_base": 500})
    assert read(neox | {"rope_theta": 500, "partial_rotary_factor": 0.4, "head_dim": 6}) == read(neox)
    words = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    words |= {"n_positions": "max_position_embeddings"}
    for kind in ("gpt2", "gptj"):
        config = small(kind)
        assert read({words.get(key, key): value for key, value in config.items()}) == read(config)
    neo, theirs = small("gpt_neo"), {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    assert read({theirs.get(key, key): value for key, value in neo.items()}) == read(neo)


def test_a_word_a_layer_says_what_words_that_recur_say():
    neo = small("gpt_neo")
    assert read(neo | {"attention_layers": ["global", "local", "local"]}) == read(neo)


@pytest.mark.parametrize("kind", SMALL)
def test_no_more_tokens_than_the_context_holds(kind):
    with pytest.raises(GptcliError, match="41 tokens are more than the context of 40"):
        forward(Inputs(torch.zeros(1, 41, dtype=torch.long)), Weights({}), read(small(kind)))


BUFFERS = {
    "gpt2": ("transformer.h.0.attn.bias", "transformer.h.2.attn.masked_bias"),
    "gpt_neo": ("transformer.h.0.attn.attention.bias", "transformer.h.0.attn.attention.masked_bias"),
    "gpt_neox": (
        "gpt_neox.layers.0.attention.bias",
        "gpt_neox.layers.0.attention.masked_bias",
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq",
        "gpt_neox.rotary_emb.inv_freq",
    ),
    "gptj": (
        "transformer.h.0.attn.bias",
        "transformer.h.0.attn.masked_bias",
        "transformer.h.0.attn.embed_positions",
        "transformer.rotary_emb.embed_positions",
    ),
    "opt": (),
    "phi": ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
}


@pytest.mark.parametrize("kind", SMALL)
def test_buffers_are_no_weights_and_unknown_keys_are_named(kind, tmp_path):
    save_toy(small(kind), tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    save_file(load_file(file) | {name: mask.clone() for name in BUFFERS[kind]}, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"warp_factor": 9}))
    model = open_model(str(tmp_path))
    assert sorted(model.checkpoint.binding.buffers) == sorted(BUFFERS[kind])
    assert any("warp_factor" in note for note in model.notes)
    assert count.total(model.layout) == sum(t.numel() for n, t in load_file(file).items() if n not in BUFFERS[kind])


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "gpt_neox", "opt"])
def test_the_base_model_alone_runs_where_the_head_is_tied(kind, tmp_path):
    theirs = save_toy(small(kind, {"tie_word_embeddings": True}), tmp_path)
    theirs.base_model.save_pretrained(tmp_path)
    ids = torch.arange(24)[None]
    model, expected = open_model(str(tmp_path)), theirs(ids, use_cache=False).logits.detach()
    assert model.checkpoint.binding.prefix == ("decoder." if kind == "opt" else "")
    assert_near(forward(Inputs(ids), model.weights(torch.float64, CPU), model.spec), expected, 1e-5)


@pytest.mark.parametrize("kind", SMALL)
def test_the_base_model_alone_is_refused_where_the_head_is_not_tied(kind, tmp_path):
    save_toy(small(kind, {"tie_word_embeddings": False}), tmp_path).base_model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small(kind, {"tie_word_embeddings": False})))
    with pytest.raises(GptcliError, match=r"(lm_head|embed_out)\.weight' is missing"):
        open_model(str(tmp_path))


def test_a_head_by_its_other_name(tmp_path):
    save_toy(small("gpt_neox"), tmp_path)
    file, ids = tmp_path / "model.safetensors", torch.arange(24)[None]
    before = open_model(str(tmp_path))
    expected = forward(Inputs(ids), before.weights(torch.float64, CPU), before.spec)
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors.pop("embed_out.weight")}, file, metadata={"format": "pt"})
    model = open_model(str(tmp_path))
    assert torch.equal(forward(Inputs(ids), model.weights(torch.float64, CPU), model.spec), expected)


def test_rows_of_their_own_size_are_watched_and_counted(tmp_path):
    save_toy(small("opt", {"word_embed_proj_dim": 10}), tmp_path)
    model, recorder = open_model(str(tmp_path)), Recorder("*")
    forward(Inputs(torch.arange(24)[None]), model.weights(torch.float64, CPU), model.spec, recorder)
    declared, letters = dict(points(model.spec)), sizes(model.spec, 1, 24, 24)
    assert list(recorder.kept) == list(declared)
    assert {path: tuple(x.shape) for path, x in recorder.kept.items()} == {
        path: tuple(letters[axis] for axis in axes) for path, axes in declared.items()
    }
    # One position more through the head: from C to P, and from P to V.
    flops = [count.flops_forward(model.spec, 24, head_rows=rows) for rows in (1, 2)]
    assert flops[1] - flops[0] == 2 * (24 * 10 + 10 * 97)
