"""A model's .gguf file gives what its own directory gives, and what transformers computes from either."""

import math
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFValueType, GGUFWriter

from gptcli.checkpoint.gguf import Values, numbers_of, read_header
from gptcli.errors import GptcliError
from gptcli.families.gguf import ARCHITECTURES, NEUTRAL, ROPE_KEYS, described
from gptcli.model.forward import Inputs, forward
from gptcli.model.ops import frequencies
from gptcli.source import open_model
from gptcli.spec import LinearScaling, Llama3Scaling, LongRopeScaling, NoScaling, Rope
from tests.command import gptcli as run
from tests.converted import convert, exact_toy
from tests.oracle import CPU, assert_near, in_float64

# A head size that is not hidden size / heads where a family can have one, grouped heads, heads that can be told apart.
SMALL = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = SMALL | {"head_dim": 10}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
}
LAYER_NORM = {key: value for key, value in SMALL.items() if key not in ("rms_norm_eps", "num_key_value_heads")}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_positions": 64,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "layer_norm_epsilon": 1e-5,
}
GPT_OSS = WIDE | {
    "num_local_experts": 4,
    "num_experts_per_tok": 3,
    "sliding_window": 5,
    "attention_bias": True,
    "swiglu_limit": 7.0,
}

CASES = {
    "llama": WIDE | {"model_type": "llama"},
    # Wavelengths short, between the marks, and long.
    "llama: frequencies divided, biases": SMALL
    | {
        "model_type": "llama",
        "hidden_size": 32,
        "head_dim": 16,
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA3,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama: linear": WIDE | {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama: experts": WIDE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": WIDE | {"model_type": "qwen2"},
    "qwen2: yarn, tied": WIDE | {"model_type": "qwen2", "rope_scaling": YARN, "tie_word_embeddings": True},
    "qwen3": WIDE | {"model_type": "qwen3"},
    "gemma": WIDE | {"model_type": "gemma"},
    "gemma2": WIDE
    | {
        "model_type": "gemma2",
        "sliding_window": 6,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    # With a layer that sees everything, the sixth.
    "gemma3": WIDE
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "sliding_window": 6,
        "query_pre_attn_scalar": 10,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
    "gpt2": GPT2,
    "phi3": SMALL | {"model_type": "phi3", "sliding_window": 7},
    # Its factor of cosine and sine is rounded to float32.
    "phi3: long": SMALL | {"model_type": "phi3", "original_max_position_embeddings": 16, "rope_scaling": LONG},
    "starcoder2": SMALL | {"model_type": "starcoder2", "norm_epsilon": 1e-5, "sliding_window": None},
    "gptneox": LAYER_NORM
    | {"model_type": "gpt_neox", "layer_norm_eps": 1e-5, "rotary_pct": 0.34, "rope_theta": 10_000.0},
    "gptneox: in a row": LAYER_NORM
    | {
        "model_type": "gpt_neox",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 1.0,
        "rope_theta": 10_000.0,
        "use_parallel_residual": False,
    },
    "gpt-oss": GPT_OSS | {"model_type": "gpt_oss", "rope_scaling": YARN | {"truncate": False}},
    "smollm3": SMALL | {"model_type": "smollm3", "num_hidden_layers": 5},
    "olmo2": SMALL | {"model_type": "olmo2"},
}

# What transformers' own reader of .gguf files can read whole: it knows no biases, no scaling and no soft caps there,
# and takes sizes that it finds no key for from its defaults.
LARGE = SMALL | {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "query_pre_attn_scalar": 256}
READ_BY_LIBRARY = {
    "llama": WIDE | {"model_type": "llama"},
    "qwen2": SMALL | {"model_type": "qwen2"},
    "qwen3": SMALL | {"model_type": "qwen3", "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "gemma2": LARGE
    | {
        "model_type": "gemma2",
        "sliding_window": 6,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": LARGE
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "sliding_window": 6,
        "rope_local_base_freq": 10_000.0,
    },
    "gpt2": GPT2 | {"n_positions": 1024},
    "phi3": SMALL | {"model_type": "phi3"},
    "starcoder2": SMALL | {"model_type": "starcoder2", "norm_epsilon": 1e-5, "rope_theta": 10_000.0},
}


def test_every_architecture_has_a_case():
    assert {name.partition(":")[0] for name in CASES} == set(ARCHITECTURES)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_directory_and_transformers(case, tmp_path):
    """The same Spec and, in float64, the same logits, all rows and the last."""
    folder = tmp_path / "own"
    folder.mkdir()
    theirs = exact_toy(CASES[case], folder)
    path = convert(folder, tmp_path / "one.gguf")
    own, model = open_model(str(folder)), open_model(str(path))
    assert not model.notes and not model.unknown
    rounded = 1e-6 if case == "phi3: long" else 0
    if not rounded:
        assert replace(model.spec, name="", tokenizer="") == replace(own.spec, name="", tokenizer="")
    ids = torch.randint(0, model.spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    with in_float64(), torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
    weights = model.weights(torch.float64, CPU)
    assert_near(forward(Inputs(ids), weights, model.spec), expected, rounded or 1e-9)
    assert_near(forward(Inputs(ids, rows="last"), weights, model.spec), expected[:, -1:], rounded or 1e-9)
    # Every weight is the directory's own, under the same name and in the same order of rows.
    others = own.weights(torch.float64, CPU)
    for param in model.layout:
        if not param.tied_to:
            assert torch.equal(weights[param.name], others[param.name]), param.name


STORED = Path(__file__).parent / "data" / "converted.npz"


@pytest.mark.parametrize("case", READ_BY_LIBRARY)
def test_equals_what_transformers_reads_from_the_file_itself(case, tmp_path):
    """So that writing and reading don't share one wrong belief. Its logits are kept: see data/make_trained.py."""
    exact_toy(READ_BY_LIBRARY[case], tmp_path)
    model = open_model(str(convert(tmp_path, tmp_path / "drawn.gguf", draw=True)))
    ours = forward(Inputs(torch.arange(24)[None] * 4), model.weights(torch.float32, CPU), model.spec)[0]
    with np.load(STORED) as kept:
        assert_near(ours, torch.from_numpy(kept[case]), 1e-4)


# What a file may say otherwise.


def rewritten(path: Path, changes: dict[str, object], drop: tuple[str, ...] = ()) -> Path:
    """The same file with some keys changed, and some keys or tensors left out."""
    header = read_header(path)
    keys = {key: value for key, value in header.metadata.items() if key not in drop} | changes
    writer = GGUFWriter(path.with_name("changed.gguf"), keys.pop("general.architecture"))
    for key, value in keys.items():
        kind = GGUFValueType.ARRAY if isinstance(value, list | Values) else GGUFValueType.get_type(value)
        writer.add_key_value(key, list(value) if kind == GGUFValueType.ARRAY else value, kind)
    data = path.read_bytes()
    for name, info in header.infos.items():
        if name not in drop:
            numbers = np.frombuffer(data[info.start : info.end], np.float32).reshape(info.shape)
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("changed.gguf")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A toy's file by the name of its case, converted once."""

    @cache
    def make(case: str) -> Path:
        folder = tmp_path_factory.mktemp("written")
        exact_toy(CASES[case], folder)
        return convert(folder, folder / "one.gguf")

    return make


def changed(written, tmp_path, case: str, changes: dict[str, object], drop: tuple[str, ...] = ()):
    path = tmp_path / "one.gguf"
    path.write_bytes(written(case).read_bytes())
    return open_model(str(rewritten(path, changes, drop)))


REFUSED = {
    "no architecture": ("llama", {"general.architecture": "lama"}, (), r"architecture: 'lama' is not impl.*llama"),
    "a key": ("llama", {}, ("llama.block_count",), r"gguf: llama\.block_count: missing$"),
    "heads": ("llama", {}, ("llama.attention.head_count",), r"gguf: llama\.attention\.head_count: missing$"),
    "a text": ("llama", {"llama.context_length": "long"}, (), "context_length: 'long' is not a whole number"),
    "heads by layer": ("llama", {"llama.attention.head_count_kv": [2, 1, 2]}, (), r"head_count_kv: \[2, 1, 2\] is not"),
    "values of a size": ("qwen3", {"qwen3.attention.value_length": 12}, (), "qwen3.attention.value_length: 12, but"),
    "part of a head": ("llama", {"llama.rope.dimension_count": 6}, (), "llama.rope.dimension_count: 6, but heads"),
    "a scaling": ("qwen2", {"qwen2.rope.scaling.type": "mrope"}, (), "qwen2.rope.scaling.type: 'mrope' is not implem"),
    "no mask": ("qwen2", {"qwen2.attention.causal": False}, (), "qwen2.attention.causal: False changes the forward"),
    "a clamp": ("olmo2", {"olmo2.attention.clamp_kqv": 8.0}, (), "olmo2.attention.clamp_kqv: 8.0 changes the forward"),
    "a sum": ("llama", {"llama.residual_scale": 0.5}, (), "llama.residual_scale: 0.5 changes the forward pass"),
    "sigmoids": ("llama: experts", {"llama.expert_gating_func": 2}, (), "llama.expert_gating_func: 2 changes"),
    "extra layers": ("qwen3", {"qwen3.nextn_predict_layers": 1}, (), "qwen3.nextn_predict_layers: 1 changes"),
    "sections": ("qwen2", {"qwen2.rope.dimension_sections": [1, 2, 2, 0]}, (), "qwen2.rope.dimension_sections: "),
    "a window": ("qwen2", {"qwen2.attention.sliding_window": 5}, (), "qwen2.attention.sliding_window: 5 changes"),
    "marks": ("gemma2", {"gemma2.attention.sliding_window_pattern": [True]}, (), r"\[True\] is not one mark a layer"),
    "a cap": ("llama", {"llama.final_logit_softcapping": 30.0}, (), "llama.final_logit_softcapping: 30.0 changes"),
    "no table": ("llama", {}, ("token_embd.weight",), "tensor 'token_embd.weight' is missing, or no table"),
    "a norm": ("qwen3", {}, ("blk.1.attn_q_norm.weight",), r"tensor 'blk.1.attn_q_norm.weight' is missing \(layers.1"),
    "half of the factors": ("phi3: long", {}, ("rope_factors_long.weight",), "longrope needs rope_factors_short"),
    "two scalings": (
        "llama: frequencies divided, biases",
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        (),
        "rope_freqs.weight: not implemented beside rope.scaling.type: 'linear'",
    ),
    "a strength": ("qwen2", {"qwen2.rope.scaling.attn_factor": 1.5}, (), "qwen2.rope.scaling.attn_factor: 1.5 is not"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused(case, written, tmp_path):
    name, changes, drop, expected = REFUSED[case]
    with pytest.raises(GptcliError, match=expected) as caught:
        changed(written, tmp_path, name, changes, drop)
    assert "\n" not in str(caught.value) and str(tmp_path / "changed.gguf") in caught.value.message


def test_unknown_keys_are_told(written, tmp_path):
    model = changed(written, tmp_path, "llama", {"llama.new_trick": 3, "general.author": "x", "other.key": 1})
    assert model.unknown == ("llama.new_trick",)
    assert model.notes == [f"{tmp_path / 'changed.gguf'}: unknown keys, not used: llama.new_trick"]


def test_a_left_over_tensor_is_refused(written, tmp_path):
    """A head under another name, for one: without its own, the model would be a tied one."""
    path, length = tmp_path / "one.gguf", (13).to_bytes(8, "little")
    path.write_bytes(written("llama").read_bytes().replace(length + b"output.weight", length + b"outpux.weight"))
    with pytest.raises(GptcliError, match=r"tensor 'outpux.weight' is left over: no parameter reads it"):
        open_model(str(path))


UNCHANGED = {
    "llama.attention.causal": True,
    "llama.expert_count": 0,
    "llama.logit_scale": 1.0,
    "llama.attention.sliding_window": 0,
    "llama.rope.scaling.finetuned": False,
    "llama.tensor_data_layout": "Meta AI original pth",
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.factor": 1.0,
    "llama.attention.head_count_kv": [2, 2, 2],
    "llama.feed_forward_length": [40, 40, 40],
    "llama.attention.layer_norm_epsilon": 1e-3,
}


def test_values_that_change_nothing_change_nothing(written, tmp_path):
    model = changed(written, tmp_path, "llama", UNCHANGED)
    assert not model.unknown
    assert replace(model.spec, name="one") == open_model(str(written("llama"))).spec


def test_what_is_left_out_is_what_the_format_s_own_reader_takes(written, tmp_path):
    model = changed(
        written, tmp_path, "gptneox: in a row", {}, ("gptneox.rope.freq_base", "gptneox.rope.dimension_count")
    )
    assert replace(model.spec, name="one") == open_model(str(written("gptneox: in a row"))).spec
    model = changed(written, tmp_path, "gemma3", {}, ("gemma3.rope.freq_base_swa", "gemma3.rope.freq_base"))
    assert model.spec.position.theta == 10_000 and model.spec.at(0).position.theta == 10_000
    assert isinstance(model.spec.position.scaling, LinearScaling)
    assert isinstance(model.spec.at(0).position.scaling, NoScaling)


def test_a_window_of_the_line_of_llama_is_everywhere(written, tmp_path):
    model = changed(written, tmp_path, "llama", {"llama.attention.sliding_window": 5, "llama.attention.scale": 0.5})
    assert model.spec.attention.window == 5 and model.spec.attention.scale == 0.5 and not model.spec.variants


def test_layers_that_see_a_window_may_be_marked(written, tmp_path):
    marks = [True, False, True, True, False, False, True]
    model = changed(written, tmp_path, "gemma3", {"gemma3.attention.sliding_window_pattern": marks})
    assert [model.spec.at(i).attention.window == 6 for i in range(7)] == marks
    model = changed(written, tmp_path, "gemma3", {"gemma3.attention.sliding_window_pattern": 3})
    assert [model.spec.at(i).attention.window == 6 for i in range(7)] == [True, True, False] * 2 + [True]
    model = changed(written, tmp_path, "olmo2", {"olmo2.attention.sliding_window": 4})
    assert [model.spec.at(i).attention.window for i in range(3)] == [4, 4, 4]


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_scale_scores_by_another_size(family, layers):
    """Scores are over √(C / H) in the models of 46 and of 62 layers: 144 and 168 in their own configs."""
    hidden, heads, size = (4608, 32, 144) if layers == 46 else (5376, 32, 168)
    at = f"{family}."
    metadata = {
        "general.architecture": family,
        at + "block_count": layers,
        at + "context_length": 8192,
        at + "embedding_length": hidden,
        at + "feed_forward_length": 36864,
        at + "attention.head_count": heads,
        at + "attention.head_count_kv": 16,
        at + "attention.key_length": 128,
        at + "attention.layer_norm_rms_epsilon": 1e-6,
    }
    shapes = {"token_embd.weight": (256000, hidden)}
    for number in (layers, layers - 1):
        spec = described(metadata | {at + "block_count": number}, shapes, list, "x", "x").spec
        assert spec.attention.scale == (size if number == layers else 128) ** -0.5


def test_divisors_that_no_formula_gives_are_carried(written, tmp_path):
    """As many as pairs, each dividing its frequency; recognised are those of Llama 3.1."""
    path = written("llama: frequencies divided, biases")
    model = open_model(str(path))
    assert model.spec.position.scaling == Llama3Scaling(factor=8.0)
    info = read_header(path).infos["rope_freqs.weight"]
    data = bytearray(path.read_bytes())
    divisors = np.array([1, 2, 3, 4, 5, 6, 7, 8.5], dtype=np.float32)
    data[info.start : info.end] = divisors.tobytes()
    (tmp_path / "other.gguf").write_bytes(data)
    scaling = open_model(str(tmp_path / "other.gguf")).spec.position.scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.short_factors == scaling.long_factors == tuple(divisors.tolist())
    plain = 500_000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    for length in (1, 100):
        found, factor = frequencies(Rope(theta=500_000.0, scaling=scaling), 16, length)
        assert torch.equal(found, plain / torch.from_numpy(divisors).double()) and factor == 1


def test_fused_and_loose_experts(written, tmp_path):
    """Files of the first months have a tensor an expert: blk.0.ffn_up.3.weight."""
    path = written("llama: experts")
    header, data = read_header(path), path.read_bytes()
    writer = GGUFWriter(tmp_path / "loose.gguf", "llama")
    for key, value in header.metadata.items():
        if key.startswith("llama."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, info in header.infos.items():
        numbers = np.frombuffer(data[info.start : info.end], np.float32).reshape(info.shape)
        if "_exps" not in name:
            writer.add_tensor(name, numbers)
            continue
        for expert, one in enumerate(numbers):
            writer.add_tensor(name.replace("_exps", f".{expert}"), np.ascontiguousarray(one))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, loose = open_model(str(path)), open_model(str(tmp_path / "loose.gguf"))
    ids = torch.arange(20)[None]
    a, b = (forward(Inputs(ids), m.weights(torch.float32, CPU), m.spec) for m in (ours, loose))
    assert torch.equal(a, b)


def test_a_split_model_runs(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    exact_toy(CASES["qwen3"], folder)
    whole = convert(folder, tmp_path / "whole.gguf")
    convert(folder, tmp_path / "m.gguf", split_max_tensors=10)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 4
    one, several = open_model(str(whole)), open_model(str(parts[2]))
    assert several.spec.name == "m" and replace(several.spec, name="whole") == one.spec
    a, b = (forward(Inputs(torch.arange(9)[None]), m.weights(torch.float32, CPU), m.spec) for m in (one, several))
    assert torch.equal(a, b)


def test_a_directory_that_holds_one_model_is_that_model(written, tmp_path):
    path = tmp_path / "any.gguf"
    path.write_bytes(written("llama").read_bytes())
    assert open_model(str(tmp_path)).source == str(path)
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(GptcliError, match=r"several models \(any.gguf, other.gguf\); name one file"):
        open_model(str(tmp_path))
    (tmp_path / "other.gguf").unlink()
    convert(written("llama").parent, tmp_path / "m.gguf", split_max_tensors=10)
    path.unlink()
    model = open_model(str(tmp_path))
    assert model.source == str(sorted(tmp_path.glob("m-00001-of-*.gguf"))[0]) and model.spec.name == "m"
    with pytest.raises(GptcliError, match=r"-c cats: .*m-00001.* describes itself; leave -c out"):
        open_model(str(tmp_path), config="cats")


def test_a_directory_of_another_format_is_opened_as_it_is(written, tmp_path):
    folder = written("llama").parent
    assert (folder / "one.gguf").is_file() and open_model(str(folder)).gguf is None


STRANGE = (0, -1, 1, 3, 2**31, 2**63, 0.0, -1.0, math.nan, math.inf, 1e300, True, False, "", "x", [], [1], [0, 0, 0],
           ["a"], [[1]], None)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_no_value_of_any_key_does_harm(written, case):
    """Every key of a file, and every key that changes a forward pass, with values that make no sense."""
    header = read_header(written(case))
    shapes = {name: info.shape for name, info in header.infos.items()}
    kind = header.metadata["general.architecture"]
    keys = [*header.metadata, *(f"{kind}.{key}" for key in NEUTRAL), *(f"{kind}.{key}" for key in ROPE_KEYS)]
    for key in keys:
        for value in STRANGE:
            metadata = {k: v for k, v in (header.metadata | {key: value}).items() if v is not None}
            try:
                spec = described(metadata, shapes, lambda name: numbers_of(header.infos[name]), "x", "x.gguf").spec
            except GptcliError as error:
                assert "\n" not in str(error) and str(error).startswith("x.gguf: ")
                continue
            assert spec.n_layers <= 100_000


@pytest.mark.parametrize("values", [[0.0], [-1.0], [math.nan], [math.inf], [1.0] * 3, [1.0] * 9, []], ids=str)
def test_no_divisors_do_harm(written, values):
    header = read_header(written("llama: frequencies divided, biases"))
    shapes = {name: info.shape for name, info in header.infos.items()}
    with pytest.raises(GptcliError, match=r"^x: "):
        described(header.metadata, shapes, lambda name: (values * 8)[:8] if len(values) == 1 else values, "x", "x")


@pytest.mark.parametrize("words", [["params"], ["config"]], ids=" ".join)
def test_a_header_is_read_without_torch_or_numpy(written, words):
    code = (
        "import sys\n"
        "from gptcli.cli.main import main\n"
        f"sys.argv = ['gptcli', *{words!r}, '-m', {str(written('llama: frequencies divided, biases'))!r}]\n"
        "status = main()\n"
        "print(sorted({'torch', 'numpy', 'gguf', 'tokenizers'} & set(sys.modules)), status, file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout and ran.stderr == "[] 0\n"


def test_inspect_says_what_a_file_is_and_whether_it_is_whole(tmp_path):
    """By the model's own numbers; a weight of a packed type has the statistics of its unpacked numbers."""
    exact_toy(SMALL | {"model_type": "llama"}, tmp_path / "toy")
    path = convert(tmp_path / "toy", tmp_path / "toy.gguf")
    report = run("inspect", path, "--stats", "--json")
    assert report.status == 0
    [found] = report.json["checkpoints"]
    assert found["verdict"] == "whole" and found["format"] == "GGUF" and found["families"] == ["llama"]
    model = open_model(str(path))
    told = {value["path"]: value["value"] for value in found["values"]}
    assert (told["hidden_size"], told["n_layers"], told["attention.n_kv_heads"]) == (24, 3, 2)
    means = {row["stored"]: row["mean"] for row in found["statistics"]}
    stored = model.weights(torch.float64, CPU)["layers.0.mlp.up.weight"]
    assert means["blk.0.ffn_up.weight"] == pytest.approx(float(stored.mean()), abs=1e-9)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-100])
    ran = run("inspect", cut, "-q")
    assert ran.status == 1 and ran.out.startswith("corrupt:") and ran.out.count("\n") == 1
