"""phi3, starcoder2, stablelm and nanochat equal transformers at toy size."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptcli.errors import GptcliError
from gptcli.families import others
from gptcli.source import open_model
from tests.oracle import CPU, check_exactly, check_family, save_toy
from tests.test_families_experts import check_as_saved, check_defaults, check_points, resolved, shared

SMALL = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PHI3 = SMALL | {"model_type": "phi3"}
STARCODER2 = SMALL | {"model_type": "starcoder2", "head_dim": 10}
# Heads of 16, of which 4 turn.
STABLELM = SMALL | {"model_type": "stablelm", "hidden_size": 64}
NANOCHAT = SMALL | {"model_type": "nanochat", "head_dim": 10}

# Three pairs of ten turn in a head of ten; a text of 24 is beyond the 16 that the model was trained on.
SETS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0]}
WITHIN = {"original_max_position_embeddings": 16}  # the library wants it in the table too, under the first names
LONG = PHI3 | {"hidden_size": 40, "partial_rotary_factor": 0.6} | WITHIN

CASES = {
    "phi3": PHI3 | {"head_dim": 10, "sliding_window": 7},
    "starcoder2": STARCODER2 | {"sliding_window": 7},
    "stablelm": STABLELM | {"use_qkv_bias": True},
    "nanochat": NANOCHAT | {"final_logit_softcapping": 2.0},
}
RARE = {
    "phi3: long rotation of a part of each head": LONG | {"rope_scaling": {"type": "longrope"} | SETS},
    "phi3: its first name": LONG | {"rope_scaling": {"type": "su", "attention_factor": 1.3} | SETS | WITHIN},
    "phi3: its second name": LONG | {"rope_scaling": {"type": "yarn"} | SETS | WITHIN},
    "phi3: within its default of 4096, table or not": LONG
    | {
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 8192,
        "rope_scaling": {"type": "longrope"} | SETS | WITHIN,
    },
    "phi3: a part of each head, tied": PHI3
    | {"partial_rotary_factor": 0.4, "head_dim": 10, "tie_word_embeddings": True, "num_key_value_heads": None},
    "phi3: parameters in a table": PHI3
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}, "head_dim": 8},
    "starcoder2: no biases, untied, another activation": STARCODER2
    | {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu", "norm_epsilon": 0.1},
    "starcoder2: head size from the hidden size": STARCODER2 | {"head_dim": None, "rope_theta": 50.0},
    "stablelm: a norm for each head": STABLELM | {"qk_layernorm": True},
    "stablelm: side by side": STABLELM | {"use_parallel_residual": True, "qk_layernorm": True, "layer_norm_eps": 0.1},
    "stablelm: three quarters turn, scaled, tied": STABLELM
    | {
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "stablelm: all of a head turns": STABLELM | {"partial_rotary_factor": 1.0, "head_dim": 16},
    "nanochat: no cap": NANOCHAT | {"final_logit_softcapping": None, "tie_word_embeddings": True},
    "nanochat: biases, gated by nothing, cap of its own": {k: v for k, v in NANOCHAT.items() if k != "head_dim"}
    | {"attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 0.1, "num_key_value_heads": None},
    "nanochat: a scaled rotation": NANOCHAT
    | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, tmp_path):
    check_family(CASES[case], tmp_path)
    check_points(open_model(str(tmp_path)))


@pytest.mark.parametrize("case", RARE)
def test_rare_switches(case, tmp_path):
    check_exactly(RARE[case], tmp_path)


@pytest.mark.parametrize("case", ["stablelm: side by side", "phi3: long rotation of a part of each head"])
def test_points_of_rare_switches(case, tmp_path):
    save_toy(RARE[case], tmp_path)
    check_points(open_model(str(tmp_path)))


@pytest.mark.parametrize("kind", others.RECORDS)
def test_defaults_are_the_library_s(kind):
    check_defaults(kind)


@pytest.mark.parametrize("case", CASES | RARE)
def test_the_config_as_saved(case):
    check_as_saved((CASES | RARE)[case])


def test_fused_projections_are_views(tmp_path):
    save_toy(CASES["phi3"], tmp_path)
    tensors = open_model(str(tmp_path)).weights(torch.float64, CPU).tensors
    assert shared(tensors, "layers.0.mlp.") == 2  # gate with up, and down
    assert shared(tensors, "layers.0.attn.") == 2  # q with k and v, and o


REFUSED = {
    "rope_scaling.type: 'linear'": PHI3 | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_scaling.long_mscale": LONG | {"rope_scaling": {"type": "longrope", "long_mscale": 1.2} | SETS},
    "rope_scaling.short_factor: missing": LONG | {"rope_scaling": {"type": "longrope"}},
    "position.scaling.short_factors: 3 numbers, but a head has 5 pairs": LONG
    | {"partial_rotary_factor": 1.0, "rope_scaling": {"type": "longrope"} | SETS},
    "position.rotary_dim: 5 is odd": LONG | {"partial_rotary_factor": 0.5},
    "partial_rotary_factor: 'half' is not a number": PHI3 | {"partial_rotary_factor": "half"},
    "attention_bias": PHI3 | {"attention_bias": True},
    "mlp_bias": PHI3 | {"mlp_bias": True},
    "lm_head_bias": PHI3 | {"lm_head_bias": True},
    "full_attn_mod": PHI3 | {"full_attn_mod": 2},
    "interpolate_factor": PHI3 | {"interpolate_factor": 4},
    "mlp_type: 'gated'": STARCODER2 | {"mlp_type": "gated"},
    "norm_type: 'rms_norm'": STARCODER2 | {"norm_type": "rms_norm"},
    "partial_rotary_factor: 0.5 is not implemented": STARCODER2 | {"partial_rotary_factor": 0.5},
    "head_dim: 10 is not": STABLELM | {"head_dim": 10},
    "use_parallel_residual: 'yes' is not implemented": STABLELM | {"use_parallel_residual": "yes"},
    "position.scaling.kind: dynamic needs two pairs": STABLELM
    | {"hidden_size": 32, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "hidden_act: 'xielu'": NANOCHAT | {"hidden_act": "xielu"},
    "lm_head.softcap: 'none' is not a number": NANOCHAT | {"final_logit_softcapping": "none"},
    "per_layer_config": NANOCHAT | {"per_layer_config": {"0": {"head_dim": 4}}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name(message):
    with pytest.raises(GptcliError) as caught:
        resolved(REFUSED[message])
    assert message in caught.value.message


def test_unknown_keys_are_named(tmp_path):
    save_toy(NANOCHAT, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(NANOCHAT | {"logits_soft_cap": 15.0, "resid_pdrop": 0.1}))
    (note,) = open_model(str(tmp_path)).notes
    assert "logits_soft_cap" in note and "pdrop" not in note


def drawn(config: dict, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_exactly(config, Path(folder), seed=seed)


COMMON = {
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "tie_word_embeddings": st.booleans(),
    "rope_theta": st.sampled_from([100.0, 10_000.0]),
    "hidden_act": st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu2"]),
}
few = settings(max_examples=5, deadline=None, derandomize=True)
window = st.sampled_from([None, 3, 6])


@few
@given(
    st.fixed_dictionaries(
        COMMON
        | {
            "sliding_window": window,
            "partial_rotary_factor": st.sampled_from([0.6, 1.0]),
            "kind": st.sampled_from(["default", "longrope", "su"]),
            "original_max_position_embeddings": st.sampled_from([16, 32]),
            "factor": st.sampled_from([None, 1.0, 5.0]),
        }
    ),
    st.integers(0, 100),
)
def test_any_phi3(config, seed):
    kind, factor = config.pop("kind"), config.pop("factor")
    pairs = 3 if config["partial_rotary_factor"] == 0.6 else 5
    sets = {word: [step + i / 2 for i in range(pairs)] for word, step in (("short_factor", 1.0), ("long_factor", 2.0))}
    table = {"type": kind} | (sets | WITHIN if kind != "default" else {}) | ({"factor": factor} if factor else {})
    drawn(PHI3 | {"hidden_size": 40, "rope_scaling": table} | config, seed)


@few
@given(
    st.fixed_dictionaries(
        COMMON | {"sliding_window": window, "use_bias": st.booleans(), "head_dim": st.sampled_from([4, 10])}
    ),
    st.integers(0, 100),
)
def test_any_starcoder2(config, seed):
    drawn(STARCODER2 | config, seed)


@few
@given(
    st.fixed_dictionaries(
        COMMON
        | {
            "use_qkv_bias": st.booleans(),
            "qk_layernorm": st.booleans(),
            "use_parallel_residual": st.booleans(),
            "partial_rotary_factor": st.sampled_from([0.25, 0.5, 1.0]),
        }
    ),
    st.integers(0, 100),
)
def test_any_stablelm(config, seed):
    drawn(STABLELM | config, seed)


@few
@given(
    st.fixed_dictionaries(
        COMMON
        | {
            "final_logit_softcapping": st.sampled_from([None, 1.0, 15.0]),
            "attention_bias": st.booleans(),
            "head_dim": st.sampled_from([4, 10]),
        }
    ),
    st.integers(0, 100),
)
def test_any_nanochat(config, seed):
    drawn(NANOCHAT | config, seed)
