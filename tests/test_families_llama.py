"""The Llama line equals transformers at toy size."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import check_exactly, check_family

SMALL = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "llama": {"model_type": "llama"},
    "llama, tied, biased": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama3": {
        "model_type": "llama",
        "rope_theta": 5000.0,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 with windows": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, tmp_path):
    check_family(SMALL | CASES[case], tmp_path)


def drawn(config: dict, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_exactly(SMALL | config, Path(folder), seed=seed)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(
        {
            "num_key_value_heads": st.sampled_from([1, 2, 4]),
            "head_dim": st.sampled_from([6, 8]),
            "attention_bias": st.booleans(),
            "mlp_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "hidden_act": st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu"]),
            "rms_norm_eps": st.sampled_from([1e-6, 1e-5]),
            "rope_theta": st.sampled_from([100.0, 10_000.0]),
        }
    ),
    st.integers(0, 100),
)
def test_any_llama(config, seed):
    drawn({"model_type": "llama"} | config, seed)
