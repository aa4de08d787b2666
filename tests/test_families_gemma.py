"""The Gemma line equals transformers at toy size, switch by switch, and refuses what it does not implement."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gptcli.families import FAMILIES
from gptcli.families.record import resolve
from gptcli.model.forward import Inputs, forward
from gptcli.model.ops import norm
from gptcli.source import open_model
from gptcli.trace import Recorder
from tests.oracle import CPU, assert_near, check_exactly, check_family, in_float64, save_toy
from tests.test_families_llama import (
    BIAS,
    COMMON,
    FULL,
    LAYER_TYPES,
    LLAMA3,
    SLIDING,
    SMALL,
    TURNS,
    YARN,
    check_base,
    check_defaults,
    check_drawn,
    check_missing_norm,
    check_padding,
    check_published,
    check_refused,
    logits,
)

CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
# The words of older configs: a base for each kind of layer, and a scaling that is the global layers' alone.
OLDER = {
    "rope_theta": 5000.0,
    "rope_local_base_freq": 100.0,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "sliding_window_pattern": 2,
}
NESTED = {FULL: LLAMA3 | {"rope_theta": 300.0}, SLIDING: {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}}

# In float64 and float32.
CASES = {
    "gemma": {},
    "gemma2": CAPS | {"sliding_window": 6, "query_pre_attn_scalar": 7},
    "gemma3_text": OLDER | {"sliding_window": 6, "query_pre_attn_scalar": 7},
}


@pytest.mark.parametrize("kind", CASES)
def test_equals_transformers(kind, tmp_path):
    check_family(SMALL | {"model_type": kind} | CASES[kind], tmp_path)


RARE = {
    "gemma: gelu means its tanh form": {"hidden_act": "gelu", "hidden_activation": None},
    "gemma: biases, untied": {"attention_bias": True, "tie_word_embeddings": False},
    "gemma2: no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 6},
    "gemma2: the caps and windows of an absent key": {"num_hidden_layers": 2},
    "gemma2: windows by layer_types": {"sliding_window": 6, "layer_types": [FULL, SLIDING, SLIDING]},
    "gemma2: another scaling": {"sliding_window": 6, "rope_scaling": YARN},
    "gemma3_text: a rotation for each layer type": {
        "sliding_window": 6,
        "rope_parameters": NESTED,
        "layer_types": [FULL, SLIDING, SLIDING],
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text: the pattern of an absent key": {"sliding_window": 6, "num_hidden_layers": 6},
    "gemma3_text: one rotation's words": {
        "sliding_window": 6,
        "rope_parameters": {FULL: {"rope_theta": 40.0}, SLIDING: None},
        "sliding_window_pattern": 3,
    },
    "gemma3_text: both ways": {"sliding_window": 6, "sliding_window_pattern": 2, "use_bidirectional_attention": True},
    "gemma3_text: both ways, an odd window": {
        "sliding_window": 7,
        "layer_types": [SLIDING, SLIDING, FULL],
        "use_bidirectional_attention": True,
    },
}


@pytest.mark.parametrize("case", RARE)
def test_a_rare_switch_equals_transformers(case, tmp_path):
    check_exactly(SMALL | {"model_type": case.split(":")[0]} | RARE[case], tmp_path)


def test_attention_goes_both_ways_by_the_kernel_that_obeys(tmp_path):
    """The first Gemma's word for it moves transformers' fused kernel, its default, and not its explicit one."""
    config = SMALL | {"model_type": "gemma", "use_bidirectional_attention": True}
    save_toy(config, tmp_path)
    ids = torch.arange(24)[None]
    with in_float64(), torch.no_grad():
        options = {"dtype": torch.float64, "attn_implementation": "sdpa"}
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()(ids, use_cache=False).logits
    model = open_model(str(tmp_path))
    assert_near(forward(Inputs(ids), model.weights(torch.float64, CPU), model.spec), expected, 1e-9)


# What each family may say; the first of each choice is never the default.
GELUS = ["gelu", "relu", "silu", "gelu_new", "gelu_pytorch_tanh"]
ACTIVATION = {"hidden_activation": st.sampled_from(GELUS)}
SCALAR = {"query_pre_attn_scalar": st.sampled_from([3, 17, 256])}
CAPPED = {key: st.sampled_from([1.5, 20.0, None]) for key in CAPS}
WINDOW = {"sliding_window": st.integers(3, 9)}
TYPED = st.one_of(st.fixed_dictionaries({"layer_types": LAYER_TYPES}), st.just({}))
GLOBAL = st.sampled_from(
    [
        {"rope_scaling": LLAMA3, "rope_theta": 300.0},
        {"rope_scaling": YARN, "rope_local_base_freq": 20.0},
        {"rope_parameters": {FULL: YARN | {"rope_theta": 100.0}, SLIDING: {"rope_type": "default"}}},
        {"rope_parameters": {FULL: {"rope_type": "dynamic", "factor": 4.0}}, "max_position_embeddings": 12},
        {"rope_parameters": {SLIDING: LLAMA3 | {"rope_theta": 30.0}}},
        {},
    ]
)
SWITCHES = {
    "gemma": [TURNS, st.fixed_dictionaries({"hidden_act": st.sampled_from(GELUS)})],
    "gemma2": [TURNS, st.fixed_dictionaries(ACTIVATION | SCALAR | CAPPED | WINDOW), TYPED],
    "gemma3_text": [
        GLOBAL,
        st.fixed_dictionaries(
            ACTIVATION
            | SCALAR
            | WINDOW
            | {
                "final_logit_softcapping": CAPPED["final_logit_softcapping"],
                "use_bidirectional_attention": st.sampled_from([True, False, None]),
                "sliding_window_pattern": st.integers(2, 4),
            }
        ),
        TYPED,
    ],
}


@pytest.mark.parametrize("kind", SWITCHES)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.data())
def test_any_switches_equal_transformers(kind, data):
    common = {key: choice for key, choice in COMMON.items() if key != "hidden_act"}
    check_drawn(SMALL | {"model_type": kind}, [st.fixed_dictionaries(common | BIAS), *SWITCHES[kind]], data)


REFUSED = {
    "gemma: hidden_activation": {"hidden_activation": "relu"},
    "gemma: partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "gemma2: use_bidirectional_attention": {"use_bidirectional_attention": True},
    "gemma2: rope_parameters": {"rope_parameters": NESTED},
    "gemma2: sliding_window": {"sliding_window": None},
    "gemma2: query_pre_attn_scalar": {"query_pre_attn_scalar": 0},
    "gemma3_text: attn_logit_softcapping": {"attn_logit_softcapping": 50.0},
    "gemma3_text: rope_parameters": {"rope_parameters": {"rope_theta": 100.0}},
    "gemma3_text: rope_parameters: ": {"rope_parameters": {"chunked_attention": {"rope_theta": 100.0}}},
    "gemma3_text: rope_type": {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
    "gemma3_text: layer_types": {"layer_types": ["chunked_attention"] * 3},
    "gemma3_text: sliding_window_pattern": {"sliding_window_pattern": 0},
    "gemma3_text: is_causal": {"is_causal": False},
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_switch_that_is_not_implemented_is_refused_by_name(case):
    kind, key = case.split(": ", 1)
    check_refused(SMALL | {"model_type": kind} | REFUSED[case], key)


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text"])
def test_the_defaults_are_those_of_the_library(kind):
    check_defaults({"model_type": kind})


def test_the_defaults_of_a_decoder_inside_are_those_of_the_library():
    check_defaults({"model_type": "gemma3", "text_config": {}}, "model.language_model")


@pytest.mark.parametrize("kind", CASES)
def test_a_base_model_is_stored_without_its_prefix(kind, tmp_path):
    check_base(SMALL | {"model_type": kind} | CASES[kind], tmp_path)


def test_a_missing_norm_of_queries_is_an_error(tmp_path):
    check_missing_norm(SMALL | {"model_type": "gemma3_text"}, tmp_path)


PADDED = {
    "soft caps and windows": {"model_type": "gemma2", "sliding_window": 4} | CAPS,
    "both ways": {"model_type": "gemma3_text", "sliding_window": 6, "use_bidirectional_attention": True},
}


@pytest.mark.parametrize("case", PADDED)
def test_padding_on_the_left_changes_nothing(case, tmp_path):
    check_padding(SMALL | PADDED[case], tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_round_the_scale_of_embeddings_and_norm_in_float32(dtype, tmp_path):
    save_toy(SMALL | {"model_type": "gemma2"}, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    model = open_model(str(tmp_path))
    weights, ids, recorder = model.weights(dtype, CPU), torch.arange(97)[None, :24], Recorder("embed")
    forward(Inputs(ids), weights, model.spec, recorder)
    x = recorder.kept["embed"]
    with torch.no_grad():
        assert torch.equal(x, theirs.model.embed_tokens(ids))
        assert torch.equal(norm(x, weights, "final_norm", model.spec), theirs.model.norm(x))


# A decoder beside an encoder of images.
BOTH = {
    "model_type": "gemma3",
    "text_config": SMALL | OLDER | {"sliding_window": 6},
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
    "mm_tokens_per_image": 4,
}


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_beside_an_encoder_of_images_equals_transformers(tied, tmp_path):
    theirs = save_toy(BOTH | {"tie_word_embeddings": tied}, tmp_path)
    model = open_model(str(tmp_path))
    assert "unknown" not in " ".join(model.notes)
    assert any("vision_tower" in name for name in model.checkpoint.binding.unused)
    with in_float64(), torch.no_grad():
        expected = theirs(torch.arange(20)[None], use_cache=False).logits
    assert_near(logits(tmp_path), expected, 1e-9)


def test_a_decoder_beside_an_encoder_of_images_in_float32(tmp_path):
    save_toy(BOTH, tmp_path)
    model, ids = open_model(str(tmp_path)), torch.arange(20)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
    assert_near(forward(Inputs(ids), model.weights(torch.float32, CPU), model.spec), expected, 1e-4)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    GLOBAL,
    st.fixed_dictionaries(ACTIVATION | SCALAR | WINDOW | BIAS | {"sliding_window_pattern": st.integers(2, 4)}),
    TYPED,
    st.booleans(),
)
def test_any_switches_of_the_decoder_inside_equal_transformers(turns, switches, typed, tied):
    config = BOTH | {"text_config": SMALL | turns | switches | typed, "tie_word_embeddings": tied}
    with tempfile.TemporaryDirectory() as name:
        theirs = save_toy(config, Path(name))
        ids = torch.arange(24)[None]
        with in_float64(), torch.no_grad():
            expected = theirs(ids, use_cache=False).logits
        model = open_model(name)
        assert_near(forward(Inputs(ids), model.weights(torch.float64, CPU), model.spec), expected, 1e-9)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model."])
def test_a_decoder_inside_is_found_under_every_prefix(prefix, tmp_path):
    save_toy(BOTH, tmp_path)
    expected = logits(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in tensors)
    save_file(
        {k.replace("language_model.model.", prefix): v for k, v in tensors.items()}, tmp_path / "model.safetensors"
    )
    assert open_model(str(tmp_path)).checkpoint.binding.prefix == prefix
    torch.testing.assert_close(logits(tmp_path), expected, rtol=0, atol=1e-12)


INSIDE = {
    "text_config": {"text_config": None},
    "tie_word_embeddings": {"tie_word_embeddings": False, "text_config": SMALL | {"tie_word_embeddings": True}},
    "final_logit_softcapping": {"text_config": SMALL | {"final_logit_softcapping": 30.0}},
    "use_bidirectional_attention": {"text_config": SMALL | {"use_bidirectional_attention": True}},
}


@pytest.mark.parametrize("key", INSIDE)
def test_what_a_decoder_inside_may_not_say_is_refused_by_name(key):
    check_refused(BOTH | INSIDE[key], key)


def test_unknown_keys_are_named_inside_and_outside():
    config = BOTH | {"sparkle": 1, "text_config": BOTH["text_config"] | {"glitter": 2}}
    assert set(resolve(config, FAMILIES["gemma3"], "", "").unknown) == {"sparkle", "glitter"}


def test_an_unknown_key_is_named(tmp_path):
    save_toy(SMALL | {"model_type": "gemma2"}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sparkle": 3}))
    assert [note for note in open_model(str(tmp_path)).notes if "sparkle" in note]


def test_a_shipped_config_is_the_published_one():
    published = {
        "model_type": "gemma",
        "attention_bias": False,
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "vocab_size": 256000,
    }
    check_published("gemma-2b", published)
