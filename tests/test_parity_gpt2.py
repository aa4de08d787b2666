"""GPT-2 checkpoints through gptcli against transformers, which wrote them: the same files, the same logits."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

from gptcli.errors import GptcliError
from gptcli.run import Run
from gptcli.source import open_model
from tests.toys import gpt2_vocabulary

disable_progress_bar()


def randomised(config, seed, spread):
    """transformers' model of that config with seeded weights, norms and biases among them, and sharp attention."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter += 0.1 * torch.randn(parameter.shape)
        elif name.endswith("c_attn.weight"):
            parameter.normal_(0, spread)
    return model


def some_ids(length, vocab_size, seed=0):
    return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def ours(model, ids, rows="all", dtype="auto"):
    return Run(model, ids, dtype).forward(rows)


def gap(a, b):
    assert a.shape == b.shape
    return float((a - b).abs().max())


# GPT-2 small, 124M, in float32.


@pytest.fixture(scope="module")
def small():
    return randomised(GPT2Config(), seed=0, spread=0.06)


@pytest.fixture(scope="module")
def small_dir(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2-124M")
    small.save_pretrained(folder)
    yield gpt2_vocabulary(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def small_opened(small_dir):
    return open_model(str(small_dir))


@pytest.mark.parametrize("length", [1, 7, 1024])
def test_small_logits_are_transformers(small, small_opened, length):
    ids = some_ids(length, 50257)
    expected = small(ids).logits
    found = ours(small_opened, ids.tolist())
    assert gap(found, expected) <= 2e-5
    assert torch.equal(found[0, -1].topk(10).indices, expected[0, -1].topk(10).indices)
    assert gap(ours(small_opened, ids.tolist(), rows="last"), expected[:, -1:]) <= 2e-5


def test_small_is_understood_whole(small, small_opened):
    """124,439,808 parameters; no key of transformers' config.json and no tensor of its file is a surprise."""
    assert sum(p.size for p in small_opened.layout) == small.num_parameters() == 124_439_808
    assert small_opened.notes == [] and small_opened.checkpoint.binding.buffers == []


def gptcli(*arguments):
    done = subprocess.run([sys.executable, "-m", "gptcli", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_small_on_the_command_line(small, small_dir, tmp_path):
    ids = some_ids(7, 50257)
    expected = small(ids).logits
    given = ["-m", str(small_dir), "--ids", json.dumps(ids.tolist()), "--json"]

    best = expected[0, -1].topk(10)
    top = json.loads(gptcli("topk", *given, "-k", "10"))["next"][0]["top"]
    assert [one["id"] for one in top] == best.indices.tolist()
    assert [one["logit"] for one in top] == pytest.approx(best.values.tolist(), abs=2e-5)
    assert [one["prob"] for one in top] == pytest.approx(expected[0, -1].softmax(-1)[best.indices].tolist(), rel=1e-4)

    gptcli("forward", *given, "-o", str(tmp_path / "logits.safetensors"))
    written = load_file(tmp_path / "logits.safetensors")
    assert torch.equal(written["ids"], ids)
    assert gap(written["logits"], expected) <= 2e-5


TEXTS = [[464, 3797, 3332, 319, 262], [15496], [40, 716, 257, 3797, 290, 345, 389, 257, 3290]]


def padded(texts):
    """ids, mask and position ids as transformers takes a batch of texts padded on the left."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def test_small_padded_batch_is_transformers_and_each_text_alone(small, small_opened):
    expected = small(**padded(TEXTS)).logits
    batch = ours(small_opened, TEXTS)
    last = ours(small_opened, TEXTS, rows="last")
    assert batch.isfinite().all()
    for text, ids in enumerate(TEXTS):
        own = slice(-len(ids), None)
        assert gap(batch[text, own], expected[text, own]) <= 2e-5
        assert gap(batch[text, own], ours(small_opened, [ids])[0]) <= 1e-5
        assert gap(last[text, -1], batch[text, -1]) <= 1e-5


@pytest.mark.parametrize(("dtype", "unit"), [("bf16", 2.0**-8), ("f16", 2.0**-11)])
def test_small_in_half_types_stays_near_float32(small, small_opened, dtype, unit):
    """A rounding is off by at most unit. Each of 12 layers rounds the residual stream twice, and roundings that are
    independent add in squares: √24 of them, below 5, relative to the logits' size. Next to no error would mean that
    the type was not used.
    """
    ids = some_ids(7, 50257)
    expected = small(ids).logits
    found = ours(small_opened, ids.tolist(), dtype=dtype)
    assert found.dtype == torch.float32
    assert 0.1 * unit < float((found - expected).norm() / expected.norm()) < 5 * unit


# Toys, in float64: every choice that a GPT-2 config has.


def toy_config(**changes):
    sizes = {"vocab_size": 61, "n_positions": 24, "n_embd": 12, "n_layer": 2, "n_head": 3}
    return GPT2Config(**sizes | {"bos_token_id": 0, "eos_token_id": 0} | changes)


@pytest.fixture(scope="module")
def toy():
    return randomised(toy_config(), seed=1, spread=0.4)


def written(model, folder, tensors=None):
    """model as transformers saves it, or with these tensors in the file's place."""
    model.save_pretrained(folder)
    if tensors is not None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, Path(folder) / "model.safetensors")
    return open_model(str(folder))


toy_configs = st.builds(
    toy_config,
    n_embd=st.sampled_from([6, 12, 30]),
    n_head=st.sampled_from([1, 2, 3, 6]),
    n_layer=st.integers(1, 3),
    n_inner=st.sampled_from([None, 1, 17, 31]),
    activation_function=st.sampled_from(["relu", "gelu", "gelu_new", "silu", "gelu_pytorch_tanh"]),
    layer_norm_epsilon=st.sampled_from([1e-12, 1e-5, 0.1]),
    scale_attn_weights=st.booleans(),
    tie_word_embeddings=st.booleans(),
)


@given(toy_configs, st.integers(0, 99), st.integers(1, 24), st.sampled_from(["whole", "body"]))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_toy_logits_are_transformers(config, seed, length, saved):
    """body: the file that GPT2Model writes, without the head and without `transformer.` before its names."""
    model = randomised(config, seed, spread=0.4)
    body = saved == "body" and config.tie_word_embeddings
    with tempfile.TemporaryDirectory() as folder:
        opened = written(model.transformer if body else model, folder)
        names = set(opened.checkpoint.infos)
        assert all(name.startswith(("transformer.", "lm_head.")) != body for name in names)
        ids = some_ids(length, config.vocab_size, seed)
        found = ours(opened, ids.tolist(), dtype="f64")
        assert opened.notes == []
    assert gap(found, model.double()(ids).logits) <= 1e-9


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish"])
def test_toy_activation(activation, tmp_path):
    """Each one surely, whatever the examples above happen to draw. 1e-9 tells exact GELU from tanh."""
    model = randomised(toy_config(activation_function=activation), seed=2, spread=0.4)
    opened = written(model, tmp_path)
    ids = some_ids(20, 61)
    assert gap(ours(opened, ids.tolist(), dtype="f64"), model.double()(ids).logits) <= 1e-9


def test_toy_padded_batch_is_transformers(toy, tmp_path):
    texts = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15]]
    found = ours(written(toy, tmp_path), texts, dtype="f64")
    expected = randomised(toy.config, seed=1, spread=0.4).double()(**padded(texts)).logits
    for text, ids in enumerate(texts):
        assert gap(found[text, -len(ids) :], expected[text, -len(ids) :]) <= 1e-9


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_mask_buffers_are_no_parameters(toy, tmp_path, prefix, dtype):
    """Older files hold the causal mask of every layer, and the number that it masks by."""
    tensors = {name.replace("transformer.", prefix): t for name, t in toy.state_dict().items() if "lm_head" not in name}
    mask = torch.ones(1, 1, 24, 24).tril().to(dtype)
    buffers = {f"{prefix}h.{i}.attn.bias": mask.clone() for i in range(2)}
    buffers |= {f"{prefix}h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    opened = written(toy, tmp_path, tensors | buffers)
    ids = some_ids(9, 61)
    assert gap(ours(opened, ids.tolist()), toy(ids).logits) <= 1e-5
    assert set(opened.checkpoint.binding.buffers) == set(buffers)
    assert sum(p.size for p in opened.layout) == toy.num_parameters()
    assert opened.notes == []


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_beside_a_tie(toy, tmp_path, differs):
    """An equal head says nothing new. A different one contradicts the config: it is used, and a note says so."""
    tensors = {name: tensor.clone() for name, tensor in toy.state_dict().items()}
    if differs:
        tensors["lm_head.weight"] = torch.randn(61, 12, generator=torch.Generator().manual_seed(3))
    opened = written(toy, tmp_path, tensors)
    ids = some_ids(9, 61)
    assert opened.notes == []
    found = ours(opened, ids.tolist())
    expected = toy.transformer(ids).last_hidden_state @ tensors["lm_head.weight"].T
    assert gap(found, expected) <= 1e-5
    assert len(opened.notes) == differs
    assert all("lm_head.weight" in note and "the file's head is used" in note for note in opened.notes)


def test_no_head_although_the_config_unties_it(tmp_path):
    model = randomised(toy_config(tie_word_embeddings=False), seed=1, spread=0.4)
    with pytest.raises(GptcliError, match=r"'lm_head\.weight' is missing"):
        written(model, tmp_path, {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_file_in_a_half_type(tmp_path, dtype):
    """`auto` runs in the stored type; float32 runs the stored numbers exactly."""
    model = randomised(toy_config(), seed=1, spread=0.4).to(dtype)
    opened = written(model, tmp_path)
    ids = some_ids(9, 61)
    assert Run(opened, ids.tolist()).dtype == dtype
    expected = model.float()(ids).logits
    assert gap(ours(opened, ids.tolist(), dtype="f32"), expected) <= 1e-5
    assert ours(opened, ids.tolist()).dtype == torch.float32


@pytest.mark.parametrize(("length", "fits"), [(24, True), (25, False)])
def test_context_ends_where_the_position_table_does(toy, tmp_path, length, fits):
    opened = written(toy, tmp_path)
    if fits:
        assert ours(opened, some_ids(length, 61).tolist()).shape == (1, length, 61)
    else:
        with pytest.raises(GptcliError, match="25 tokens are more than the context of 24"):
            ours(opened, some_ids(length, 61).tolist())
