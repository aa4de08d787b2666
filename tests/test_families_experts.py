"""Decoders with experts equal transformers at toy size."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from gptcli.errors import GptcliError
from gptcli.families import FAMILIES, experts
from gptcli.families.record import Resolved, resolve
from gptcli.layout import layout
from gptcli.model.forward import Inputs, forward
from gptcli.source import Model, open_model
from gptcli.spec import Dense, Experts
from gptcli.trace import Recorder, points, sizes
from tests.oracle import CPU, assert_near, check_exactly, check_family, save_toy

torch.set_num_threads(1)  # at toy size threads only wait for one another

SMALL = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
MIXTRAL = SMALL | {"model_type": "mixtral", "num_local_experts": 4}
QWEN = SMALL | {"num_experts": 4, "moe_intermediate_size": 14}
QWEN2 = QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 18}
QWEN3 = QWEN | {"model_type": "qwen3_moe"}
YARN = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 16}
GPT_OSS = SMALL | {"model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 5, "rope_scaling": YARN}

CASES = {
    "mixtral": MIXTRAL | {"sliding_window": 7},
    "qwen2_moe": QWEN2
    | {
        "use_sliding_window": True,
        "sliding_window": 5,
        "mlp_only_layers": [0],
        "num_hidden_layers": 4,
        "num_experts": 3,
    },
    "qwen3_moe": QWEN3 | {"decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": True},
    # A limit within the spread of what it limits.
    "gpt_oss": GPT_OSS | {"swiglu_limit": 0.5},
}
RARE = {
    "mixtral: head size from the hidden size, tied, one expert a token": MIXTRAL
    | {"head_dim": None, "tie_word_embeddings": True, "num_experts_per_tok": 1, "num_local_experts": 3},
    "mixtral: other words": {k: v for k, v in MIXTRAL.items() if k != "num_local_experts"}
    | {"num_experts": 3, "rope_theta": 50.0, "hidden_act": "gelu"},
    "qwen2_moe: no biases, weights to 1": QWEN2 | {"qkv_bias": False, "norm_topk_prob": True},
    "qwen2_moe: windows by layer_types": QWEN2
    | {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "decoder_sparse_step": 3,
    },
    "qwen2_moe: windows by max_window_layers, one in use": QWEN2
    | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "attention_bias": True},
    "qwen2_moe: no layer has experts, windows all the same": QWEN2
    | {"num_experts": 0, "use_sliding_window": True, "sliding_window": 5},
    "qwen3_moe: every layer has a window, q, k, v and o have biases": QWEN3
    | {"use_sliding_window": True, "sliding_window": 5, "attention_bias": True, "mlp_only_layers": [1, 7]},
    "qwen3_moe: use_sliding_window with no window": QWEN3 | {"use_sliding_window": True, "sliding_window": None},
    "qwen3_moe: no layer has experts": QWEN3 | {"mlp_only_layers": [0, 1, 2], "tie_word_embeddings": True},
    "gpt_oss: no biases, own layer types, unscaled": GPT_OSS
    | {
        "attention_bias": False,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        "tie_word_embeddings": True,
    },
    "gpt_oss: its own yarn, three experts a token": {k: v for k, v in GPT_OSS.items() if k != "rope_scaling"}
    | {"rope_parameters": None, "num_experts_per_tok": 3, "hidden_act": "relu", "max_position_embeddings": 131072},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, tmp_path):
    check_family(CASES[case], tmp_path)
    check_points(open_model(str(tmp_path)))


@pytest.mark.parametrize("case", RARE)
def test_rare_switches(case, tmp_path):
    check_exactly(RARE[case], tmp_path)


def check_points(model: Model) -> None:
    """What is recorded is what is declared, in order and with its axes, and recording changes no bit."""
    ids = torch.arange(18).view(2, 9) % model.spec.vocab_size
    weights, recorder = model.weights(torch.float32, CPU), Recorder("*")
    assert torch.equal(forward(Inputs(ids), weights, model.spec), forward(Inputs(ids), weights, model.spec, recorder))
    declared = dict(points(model.spec))
    assert list(recorder.kept) == list(declared)
    for path, tensor in recorder.kept.items():
        layer = path.split(".")[1] if path.startswith("layers.") else "0"
        letters = sizes(model.spec.at(int(layer)), 2, 9, 9)
        assert tuple(tensor.shape) == tuple(letters[axis] for axis in declared[path]), path


def resolved(config: dict) -> Resolved:
    return resolve(config, FAMILIES[config["model_type"]], "toy", "config.json")


def check_defaults(kind: str) -> None:
    """A config of the library's defaults has no unknown key, says what an empty one does, and counts as the library."""
    config = AutoConfig.for_model(kind)
    found = resolved(config.to_dict())
    assert not found.unknown
    assert found.spec == resolved({"model_type": kind}).spec
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert sum(p.size for p in layout(found.spec)) == sum(p.numel() for p in theirs.parameters())


def check_as_saved(config: dict) -> None:
    """The config that the library writes of a model means the same as the one that a person wrote."""
    written = AutoConfig.for_model(**json.loads(json.dumps(config))).to_dict()
    assert resolved(written) == resolved(config) and not resolved(config).unknown


@pytest.mark.parametrize("kind", experts.RECORDS)
def test_defaults_are_the_library_s(kind):
    check_defaults(kind)


@pytest.mark.parametrize("case", CASES | RARE)
def test_the_config_as_saved(case):
    check_as_saved((CASES | RARE)[case])


def test_which_layers_have_experts_and_windows():
    spec = resolved(CASES["qwen2_moe"]).spec
    assert [type(spec.at(i).mlp) for i in range(4)] == [Dense, Experts, Experts, Experts]
    assert [spec.at(i).attention.window for i in range(4)] == [5, None, 5, None]
    assert spec.at(0).mlp.size == 20 and spec.at(1).mlp.size == 14
    spec = resolved(CASES["gpt_oss"]).spec
    assert [spec.at(i).attention.window for i in range(3)] == [5, None, 5]


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_stacked_in_one_tensor(case, tmp_path):
    """The same weights as the library's modules keep them: three axes, gate above up."""
    theirs = save_toy(CASES[case], tmp_path)
    loose = open_model(str(tmp_path))
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    (tmp_path / "stacked/config.json").write_text(json.dumps(CASES[case]))
    stacked = open_model(str(tmp_path / "stacked"))
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in stacked.checkpoint.infos)
    ours, others = (model.weights(torch.float64, CPU).tensors for model in (loose, stacked))
    assert set(ours) == set(others)
    assert all(torch.equal(ours[name], others[name]) for name in ours)
    assert shared(others, "layers.3.mlp.experts." if case != "mixtral" else "layers.2.mlp.experts.") == 2


def shared(tensors, prefix: str) -> int:
    """How many storages hold all the tensors of these names."""
    return len({tensors[name].untyped_storage().data_ptr() for name in tensors if name.startswith(prefix)})


def test_stacked_experts_are_views(tmp_path):
    """All experts of a layer lie in the four tensors that the file has: nothing is copied, nothing is stacked."""
    theirs = save_toy(CASES["gpt_oss"], tmp_path)
    tensors = open_model(str(tmp_path)).weights(torch.float64, CPU).tensors
    assert shared(tensors, "layers.0.mlp.experts.") == 4
    fused = theirs.model.layers[0].mlp.experts.gate_up_proj
    for turn, letter in enumerate(("gate", "up")):
        found = tensors[f"layers.0.mlp.experts.3.{letter}.weight"]
        assert torch.equal(found, fused[3, :, turn::2].T)
        assert found.untyped_storage().nbytes() == fused.numel() * 8


def test_half_types_route_in_float32(tmp_path):
    """bfloat16 stays near the library: the router's softmax and the sums over experts in float32."""
    save_toy(CASES["qwen2_moe"], tmp_path)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **options).eval()
    model, ids = open_model(str(tmp_path)), torch.arange(24)[None]
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits.float()
    assert_near(forward(Inputs(ids), model.weights(torch.bfloat16, CPU), model.spec), expected, 0.2)


REFUSED = {
    "swiglu_alpha": GPT_OSS | {"swiglu_alpha": 1.0},
    "layer_types: 'chunked_attention'": GPT_OSS | {"layer_types": ["chunked_attention"] * 3},
    "layer_types: not a word for every layer": GPT_OSS | {"layer_types": ["full_attention"]},
    "layer_types: sliding_attention": QWEN2 | {"layer_types": ["sliding_attention"] * 3},
    "hidden_act: 'mish'": MIXTRAL | {"hidden_act": "mish"},
    "hidden_act: 'gelu_10'": QWEN3 | {"hidden_act": "gelu_10"},
    "mlp.top_k: 5 is more": MIXTRAL | {"num_experts_per_tok": 5},
    "decoder_sparse_step": QWEN3 | {"decoder_sparse_step": 0},
    "mlp_only_layers": QWEN3 | {"mlp_only_layers": "none"},
    "partial_rotary_factor": MIXTRAL | {"partial_rotary_factor": 0.5},
    "num_experts: 3 contradicts num_local_experts: 4": MIXTRAL | {"num_experts": 3},
    "is_causal": MIXTRAL | {"is_causal": False},
    "attention.window: 0 is below 1": MIXTRAL | {"sliding_window": 0},
    "shared_expert_intermediate_size: missing": QWEN2 | {"shared_expert_intermediate_size": None},
    "swiglu_limit: missing": GPT_OSS | {"swiglu_limit": None},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name(message):
    with pytest.raises(GptcliError) as caught:
        resolved(REFUSED[message])
    assert message in caught.value.message


def test_unknown_keys_are_named(tmp_path):
    save_toy(MIXTRAL, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"expert_warp": 3, "router_jitter_noise": 0.1}))
    (note,) = open_model(str(tmp_path)).notes
    assert "expert_warp" in note and "jitter" not in note


def drawn(config: dict, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_exactly(config, Path(folder), length=32, seed=seed)


COMMON = {
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "head_dim": st.sampled_from([6, 8]),
    "tie_word_embeddings": st.booleans(),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-3]),
    "rope_theta": st.sampled_from([100.0, 10_000.0]),
    "num_experts_per_tok": st.sampled_from([2, 3]),
}
few = settings(max_examples=5, deadline=None, derandomize=True)
windows = {"use_sliding_window": st.booleans(), "sliding_window": st.sampled_from([3, 6])}
sparse = {
    "num_experts": st.sampled_from([3, 4]),
    "norm_topk_prob": st.booleans(),
    "decoder_sparse_step": st.sampled_from([1, 2]),
    "mlp_only_layers": st.sampled_from([None, [], [1], [2]]),
    "hidden_act": st.sampled_from(["silu", "gelu", "relu2"]),
}


@few
@given(
    st.fixed_dictionaries(
        COMMON
        | {
            "num_local_experts": st.sampled_from([3, 4]),
            "sliding_window": st.sampled_from([None, 6]),
            "hidden_act": st.sampled_from(["silu", "gelu_pytorch_tanh", "quick_gelu"]),
        }
    ),
    st.integers(0, 100),
)
def test_any_mixtral(config, seed):
    drawn(MIXTRAL | config, seed)


@few
@given(
    st.fixed_dictionaries(
        COMMON
        | windows
        | sparse
        | {
            "qkv_bias": st.booleans(),
            "max_window_layers": st.sampled_from([0, 1, 28]),
            "shared_expert_intermediate_size": st.sampled_from([8, 18]),
        }
    ),
    st.integers(0, 100),
)
def test_any_qwen2_moe(config, seed):
    drawn(QWEN2 | config, seed)


@few
@given(st.fixed_dictionaries(COMMON | windows | sparse | {"attention_bias": st.booleans()}), st.integers(0, 100))
def test_any_qwen3_moe(config, seed):
    drawn(QWEN3 | config, seed)


@few
@given(
    st.fixed_dictionaries(
        COMMON
        | {
            "num_local_experts": st.sampled_from([3, 4]),
            "sliding_window": st.sampled_from([3, 6]),
            "layer_types": st.sampled_from([None, ["full_attention", "sliding_attention", "full_attention"]]),
            "attention_bias": st.booleans(),
            "swiglu_limit": st.sampled_from([0.3, 1.0, 7.0]),
            "rope_scaling": st.sampled_from([None, YARN, YARN | {"truncate": True, "beta_fast": 4.0}]),
        }
    ),
    st.integers(0, 100),
)
def test_any_gpt_oss(config, seed):
    drawn(GPT_OSS | config, seed)
