"""The Llama line equals transformers at toy size, switch by switch, and refuses what it does not implement."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from gptcli import count, shipped
from gptcli.config import read_config
from gptcli.errors import GptcliError
from gptcli.families import FAMILIES
from gptcli.families.llama import RECORDS
from gptcli.families.record import resolve
from gptcli.layout import layout
from gptcli.model.forward import Inputs, forward
from gptcli.source import open_model
from tests.oracle import CPU, check_exactly, check_family, save_toy

# A head size that is not hidden size / heads, grouped heads, ids within the vocabulary.
SMALL = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 3.0, 4.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 16,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}

# In float64 and float32.
CASES = {
    "llama": {"rope_theta": 5000.0, "rope_scaling": LLAMA3},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "olmo2": {},
    "granite": MULTIPLIERS,
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5},
}


@pytest.mark.parametrize("kind", CASES)
def test_equals_transformers(kind, tmp_path):
    check_family(SMALL | {"model_type": kind} | CASES[kind], tmp_path)


RARE = {
    "llama: biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama: head size and key/value heads left out": {"head_dim": None, "num_key_value_heads": None},
    "llama: rope_type default": {"rope_scaling": {"rope_type": "default"}, "rope_theta": 300.0},
    "llama: linear, by its older word": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama: dynamic, beyond its context": {
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 16,
    },
    "llama: yarn": {"rope_parameters": YARN | {"rope_theta": 500.0, "beta_fast": 16.0, "truncate": False}},
    "llama: longrope, beyond its context": {"rope_parameters": LONG},
    "llama: the original context beside the table": {"rope_scaling": YARN, "original_max_position_embeddings": 8},
    "mistral: no window": {"sliding_window": None},
    "mistral: layer types that say the same": {"sliding_window": 5, "layer_types": [SLIDING] * 3},
    "qwen2: attention_bias says nothing": {"attention_bias": False},
    "qwen2: windows by layer_types": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": [SLIDING, FULL, SLIDING],
    },
    "qwen2: a window not in use": {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
    "qwen3: key/value heads null": {"num_key_value_heads": None},
    "qwen3: windows by layer_types": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": [SLIDING, FULL, SLIDING],
        "attention_bias": True,
    },
    "olmo2: biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "granite: biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "smollm3: which layers turn": {"no_rope_layers": [0, 1, 1]},
    "smollm3: every fourth does not": {"num_hidden_layers": 4, "tie_word_embeddings": False},
    "smollm3: windows by layer_types": {
        "no_rope_layers": [0, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": [SLIDING, FULL, SLIDING],
    },
}


@pytest.mark.parametrize("case", RARE)
def test_a_rare_switch_equals_transformers(case, tmp_path):
    check_exactly(SMALL | {"model_type": case.split(":")[0]} | RARE[case], tmp_path)


# What each family may say. The first of each choice is what the first example draws, so it's never the default.
BIAS = {"attention_bias": st.sampled_from([True, False])}
MLP_BIAS = {"mlp_bias": st.sampled_from([True, False])}
COMMON = {
    "num_key_value_heads": st.sampled_from([1, 4, 2]),
    "head_dim": st.sampled_from([8, 6]),
    "hidden_act": st.sampled_from(["gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "gelu_new", "silu"]),
    "rms_norm_eps": st.sampled_from([1e-3, 1e-5, 1e-6]),
    "tie_word_embeddings": st.sampled_from([True, False]),
}
LONG4 = LONG | {"short_factor": LONG["short_factor"][:3], "long_factor": LONG["long_factor"][:3]}
TURNS = st.sampled_from(
    [
        {"rope_theta": 100.0},
        {"rope_parameters": {"rope_theta": 200.0, "rope_type": "default"}},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
        {"rope_scaling": YARN | {"attention_factor": 1.7}, "rope_theta": 50.0},
        {"rope_scaling": LONG4 | {"attention_factor": 1.2}, "head_dim": 6},
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 12},
    ]
)
LAYER_TYPES = st.lists(st.sampled_from([SLIDING, FULL]), min_size=3, max_size=3)
IN_USE = {"use_sliding_window": st.just(True), "sliding_window": st.integers(3, 9)}
UNUSED = st.fixed_dictionaries({"use_sliding_window": st.just(False), "sliding_window": st.sampled_from([4, None])})
WINDOWS = st.one_of(
    st.fixed_dictionaries(IN_USE | {"max_window_layers": st.integers(0, 3)}),
    st.fixed_dictionaries(IN_USE | {"layer_types": LAYER_TYPES}),
    UNUSED,
)
STILL = st.one_of(
    st.fixed_dictionaries({"no_rope_layers": st.lists(st.sampled_from([0, 1]), min_size=3, max_size=3)}),
    st.fixed_dictionaries({"no_rope_layer_interval": st.integers(1, 3)}),
)
SWITCHES = {
    "llama": [st.fixed_dictionaries(BIAS | MLP_BIAS)],
    "mistral": [st.fixed_dictionaries({"sliding_window": st.sampled_from([4, 9, None])})],
    "qwen2": [WINDOWS],
    "qwen3": [WINDOWS, st.fixed_dictionaries(BIAS)],
    "olmo2": [st.fixed_dictionaries(BIAS)],
    "granite": [
        st.fixed_dictionaries(BIAS | MLP_BIAS | {key: st.floats(0.05, 8.0) for key in MULTIPLIERS}),
    ],
    "smollm3": [
        st.fixed_dictionaries(BIAS | MLP_BIAS),
        STILL,
        st.one_of(st.fixed_dictionaries(IN_USE), st.fixed_dictionaries(IN_USE | {"layer_types": LAYER_TYPES}), UNUSED),
    ],
}


def check_drawn(config: dict, parts: list, data: st.DataObject) -> None:
    """check_exactly of the config with a choice drawn from each part."""
    for part in parts:
        config = config | data.draw(part)
    with tempfile.TemporaryDirectory() as folder:
        check_exactly(config, Path(folder), seed=data.draw(st.integers(0, 100)))


@pytest.mark.parametrize("kind", SWITCHES)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.data())
def test_any_switches_equal_transformers(kind, data):
    check_drawn(SMALL | {"model_type": kind}, [st.fixed_dictionaries(COMMON), TURNS, *SWITCHES[kind]], data)


REFUSED = {
    "llama: rope_interleaved": {"rope_interleaved": True},
    "llama: partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "llama: rope_type": {"rope_scaling": {"rope_type": "proportional"}},
    "llama: rope_scaling.factor": {"rope_scaling": {"rope_type": "linear"}},
    "llama: rope_parameters": {"rope_parameters": {FULL: {"rope_theta": 100.0}}},
    "llama: hidden_act": {"hidden_act": "gelu_10"},
    "llama: is_causal": {"is_causal": False},
    "llama: per_layer_config": {"per_layer_config": {"1": {"num_attention_heads": 2}}},
    "mistral: layer_types": {"layer_types": [SLIDING, FULL, SLIDING]},
    "qwen2: use_mrope": {"use_mrope": True},
    "qwen2: layer_types": {"layer_types": [SLIDING] * 3, "use_sliding_window": False},
    "qwen3: layer_types": {"layer_types": ["chunked_attention"] * 3},
    "smollm3: no_rope_layers": {"no_rope_layers": [1, 0]},
    "smollm3: no_rope_layer_interval": {"no_rope_layer_interval": 0},
    "granite: logits_scaling": {"logits_scaling": 0},
}


def check_refused(config: dict, key: str) -> None:
    with pytest.raises(GptcliError) as error:
        resolve(config, FAMILIES[config["model_type"]], "", "config.json")
    assert key in error.value.message


@pytest.mark.parametrize("case", REFUSED)
def test_a_switch_that_is_not_implemented_is_refused_by_name(case):
    kind, key = case.split(": ")
    check_refused(SMALL | {"model_type": kind} | REFUSED[case], key)


def check_defaults(empty: dict, decoder: str = "") -> None:
    """A config of nothing but its model_type is what the library takes for it, of as many parameters (in `decoder`)."""
    kind = empty["model_type"]
    config = AutoConfig.for_model(kind)
    resolved = resolve(json.loads(config.to_json_string(use_diff=False)), FAMILIES[kind], "", "")
    assert not resolved.unknown
    assert resolve(empty, FAMILIES[kind], "", "").spec == resolved.spec
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # The library's tied head is the same tensor as its embedding, and is listed once.
    theirs = sum(p.numel() for p in model.get_submodule(decoder).parameters())
    assert theirs == count.total(tuple(layout(resolved.spec)))


@pytest.mark.parametrize("kind", RECORDS)
def test_the_defaults_are_those_of_the_library(kind):
    check_defaults({"model_type": kind})


def logits(folder: Path) -> torch.Tensor:
    model = open_model(str(folder))
    return forward(Inputs(torch.arange(20)[None]), model.weights(torch.float64, CPU), model.spec)


def check_base(config: dict, folder: Path) -> None:
    """The base model as the library saves it, without a prefix and a head, gives the same logits."""
    model = save_toy(config | {"tie_word_embeddings": True}, folder)
    model.base_model.save_pretrained(folder / "base")
    (folder / "base" / "config.json").write_text((folder / "config.json").read_text())
    assert open_model(str(folder / "base")).checkpoint.binding.prefix == ""
    torch.testing.assert_close(logits(folder / "base"), logits(folder), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", RECORDS)
def test_a_base_model_is_stored_without_its_prefix(kind, tmp_path):
    check_base(SMALL | {"model_type": kind}, tmp_path)


def check_missing_norm(config: dict, folder: Path) -> None:
    save_toy(config, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(GptcliError, match=r"layers\.1\.self_attn\.q_norm\.weight' is missing"):
        open_model(str(folder))


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_a_missing_norm_of_queries_is_an_error(kind, tmp_path):
    check_missing_norm(SMALL | {"model_type": kind}, tmp_path)


def test_an_unknown_key_is_named(tmp_path):
    save_toy(SMALL | {"model_type": "qwen2"}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sparkle": 3}))
    assert [note for note in open_model(str(tmp_path)).notes if "sparkle" in note]


def check_padding(config: dict, folder: Path) -> None:
    """Texts of 5 and 20 tokens in one batch, the short one padded on the left, equal each alone."""
    save_toy(config, folder)
    model = open_model(str(folder))
    weights = model.weights(torch.float64, CPU)
    ids = torch.randint(0, model.spec.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :15] = False
    together = forward(Inputs(ids, mask), weights, model.spec)
    for text, start in ((0, 15), (1, 0)):
        alone = forward(Inputs(ids[text : text + 1, start:]), weights, model.spec)
        torch.testing.assert_close(together[text : text + 1, start:], alone, rtol=0, atol=1e-12)


PADDED = {
    "windows": {"model_type": "mistral", "sliding_window": 4},
    "layers that don't turn": {"model_type": "smollm3", "no_rope_layers": [0, 1, 0]},
}


@pytest.mark.parametrize("case", PADDED)
def test_padding_on_the_left_changes_nothing(case, tmp_path):
    check_padding(SMALL | PADDED[case], tmp_path)


# What the published config.json of each says of the architecture.
PUBLISHED = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "llama3.1-405b": {
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 128,
        "num_hidden_layers": 126,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
}


def check_published(name: str, config: dict) -> None:
    resolved = resolve(config, FAMILIES[config["model_type"]], name, "config.json")
    assert not resolved.unknown
    assert resolved.spec == read_config(shipped.configs()[name]).spec


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_config_is_the_published_one(name):
    check_published(name, PUBLISHED[name])
