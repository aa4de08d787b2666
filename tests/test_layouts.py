"""The layouts that checkpoints lie in: one model, many ways of keeping it, the same logits."""

import json
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gptcli.errors import GptcliError
from gptcli.model.forward import Inputs, forward
from gptcli.source import open_model
from tests.oracle import save_toy

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 17, 3, 60, 22, 8, 41]])
LLAMA = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 32,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 67, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}


def same(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for the order of sums, which a kernel chooses by where a mapped tensor happens to lie in memory."""
    return torch.allclose(ours, expected, rtol=1e-12, atol=1e-12)


def logits(source: Path | str, config: str | None = None) -> torch.Tensor:
    model = open_model(str(source), config)
    return forward(Inputs(IDS), model.weights(torch.float64, CPU), model.spec)


def notes(source: Path) -> str:
    model = open_model(str(source))
    model.weights(torch.float64, CPU)
    return " | ".join(model.notes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """A directory as the library saves it, and the logits that it should give (from this project, tested elsewhere)."""
    folder = tmp_path_factory.mktemp("llama")
    save_toy(LLAMA, folder)
    return folder, logits(folder)


def copy(folder: Path, to: Path, without: str = "model.safetensors") -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    (to / without).unlink()
    return to


def shards_of(tensors: dict, number: int) -> list[dict]:
    names = list(tensors)
    return [{name: tensors[name] for name in names[i::number]} for i in range(number)]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_with_an_index(llama, tmp_path, suffix):
    folder, expected = llama
    tensors = load_file(folder / "model.safetensors")
    here, stem, table = copy(folder, tmp_path), "model" if suffix == "safetensors" else "pytorch_model", {}
    for i, shard in enumerate(shards_of(tensors, 3)):
        name = f"{stem}-{i + 1:05}-of-00003.{suffix}"
        save_file(shard, here / name) if suffix == "safetensors" else torch.save(shard, here / name)
        table |= dict.fromkeys(shard, name)
    (here / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    assert same(logits(here), expected)
    first = here / f"{stem}-00002-of-00003.{suffix}"
    first.rename(here / "elsewhere")
    with pytest.raises(GptcliError, match=rf"shard {first.name} is missing, and with it \d+ of 21 tensors"):
        open_model(str(here))
    shutil.copy(here / f"{stem}-00001-of-00003.{suffix}", first)
    with pytest.raises(GptcliError, match=r"is in .* and in "):
        open_model(str(here))


def test_an_index_that_names_a_tensor_of_another_shard(llama, tmp_path):
    folder, _ = llama
    here = copy(folder, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, here / "model-1.safetensors")
    save_file({"x": torch.zeros(1)}, here / "model-2.safetensors")
    table = dict.fromkeys(tensors, "model-1.safetensors") | {"model.norm.weight": "model-2.safetensors"}
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    with pytest.raises(GptcliError, match=r"the index puts 'model\.norm\.weight' in model-2\.safetensors"):
        open_model(str(here))
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(GptcliError, match="no weight_map"):
        open_model(str(here))


@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_model_bin(llama, tmp_path, zipped):
    folder, expected = llama
    here = copy(folder, tmp_path)
    state = load_file(folder / "model.safetensors")
    torch.save(state, here / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert same(logits(here), expected)


def test_safetensors_before_bin(llama, tmp_path):
    folder, expected = llama
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    torch.save({"not": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert same(logits(tmp_path), expected)
    assert "not read: pytorch_model.bin" in notes(tmp_path)


def test_configs_of_the_library_4_and_5(tmp_path):
    """`rope_theta` and `rope_scaling` beside one another, or both in `rope_parameters`."""
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    save_toy(LLAMA | {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **scaling}}, tmp_path)
    expected = logits(tmp_path)
    for spelling in (
        {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **scaling}, "torch_dtype": "float32"},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "llama3", **scaling}, "dtype": "float32"},
    ):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | spelling))
        assert same(logits(tmp_path), expected)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rope_theta": 500.0}))
    assert not same(logits(tmp_path), expected)


WRAPPED = [
    "_orig_mod.{}",
    "module.{}",
    "module._orig_mod.{}",
    "_orig_mod.module.{}",
    "_fsdp_wrapped_module.{}",
    "_forward_module.module.{}",
]


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrappers_before_a_name(llama, tmp_path, wrapper):
    folder, expected = llama
    here = copy(folder, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({wrapper.format(name): x for name, x in tensors.items()}, here / "model.safetensors")
    assert same(logits(here), expected)
    for word in wrapper.removesuffix(".{}").split("."):
        assert f"{word}." in notes(here)


def test_wrappers_inside_a_name(llama, tmp_path):
    folder, expected = llama
    here = copy(folder, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    inside = {name.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."): x for name, x in tensors.items()}
    save_file({f"_fsdp_wrapped_module.{name}": x for name, x in inside.items()}, here / "model.safetensors")
    assert same(logits(here), expected)
    twice = tensors | {"module.model.norm.weight": torch.ones(16)}
    save_file(twice, here / "model.safetensors")
    with pytest.raises(GptcliError, match="are one once wrappers are taken off"):
        open_model(str(here))


def nanogpt_state(folder: Path, prefix: str) -> dict:
    """GPT-2's saved tensors under nanoGPT's names: Linear's [out, in], both names of the tied table."""
    state = {}
    for name, x in load_file(folder / "model.safetensors").items():
        turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        state[prefix + name] = x.T.contiguous() if turned else x
    state[f"{prefix}lm_head.weight"] = state[f"{prefix}transformer.wte.weight"]
    return state


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt_checkpoint_equals_gpt2_with_exact_gelu(tmp_path, prefix):
    hf = tmp_path / "hf"
    save_toy(GPT2 | {"activation_function": "gelu"}, hf)
    settings = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "block_size": 32,
        "bias": True,
        "vocab_size": 67,
        "dropout": 0.1,
    }
    held = {
        "model": nanogpt_state(hf, prefix),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4)}}, "param_groups": []},
        "model_args": settings,
        "iter_num": 7,
        "best_val_loss": torch.tensor(3.2),
        "config": {"dataset": "shakespeare"},
    }
    torch.save(held, tmp_path / "ckpt.pt")
    theirs = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float64).eval()
    with torch.no_grad():
        expected = theirs(IDS).logits
    torch.testing.assert_close(logits(tmp_path / "ckpt.pt"), expected, rtol=0, atol=1e-9)
    said = notes(tmp_path / "ckpt.pt")
    assert "optimizer, iter_num" in said
    assert ("_orig_mod." in said) == bool(prefix)


def test_nanogpt_without_biases(tmp_path):
    save_toy(GPT2 | {"activation_function": "gelu"}, tmp_path)
    bare = {name: x for name, x in nanogpt_state(tmp_path, "").items() if not name.endswith(".bias")}
    settings = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "bias": False, "vocab_size": 67}
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model": bare, "model_args": settings}, tmp_path / "ckpt.pt")
    model = open_model(str(tmp_path / "ckpt.pt"))
    assert not model.spec.norm.bias and not model.spec.attention.bias and not model.spec.mlp.bias
    assert logits(tmp_path / "ckpt.pt").isfinite().all()


def nanochat_logits(state: dict, settings: dict) -> torch.Tensor:
    """The network of nanochat's first release, written out: an independent reference."""

    def rms(x):
        return F.rms_norm(x, (x.shape[-1],))

    heads, kv_heads = settings["n_head"], settings["n_kv_head"]
    size = settings["n_embd"] // heads
    steps = torch.arange(IDS.shape[1], dtype=torch.float64)
    angles = torch.outer(steps, 1.0 / 10_000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turn(x):  # [T, heads, D]
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat([a * cos + b * sin, a * -sin + b * cos], -1)

    x = rms(state["transformer.wte.weight"][IDS[0]])
    for i in range(settings["n_layer"]):
        w = {name.removeprefix(f"transformer.h.{i}."): t for name, t in state.items()}
        h = rms(x)
        q = rms(turn((h @ w["attn.c_q.weight"].T).view(-1, heads, size)))
        k = rms(turn((h @ w["attn.c_k.weight"].T).view(-1, kv_heads, size)))
        v = (h @ w["attn.c_v.weight"].T).view(-1, kv_heads, size)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        scores = scores.masked_fill(~torch.ones(len(x), len(x)).tril().bool(), float("-inf"))
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w["attn.c_proj.weight"].T
        x = x + F.relu(rms(x) @ w["mlp.c_fc.weight"].T).square() @ w["mlp.c_proj.weight"].T
    return 15 * torch.tanh(rms(x) @ state["lm_head.weight"].T / 15)


def test_nanochat_checkpoint(tmp_path):
    settings = {"sequence_len": 32, "vocab_size": 67, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 24}
    draw = torch.Generator().manual_seed(3)

    def normal(*shape):
        return 0.3 * torch.randn(shape, generator=draw, dtype=torch.float64)

    state = {"transformer.wte.weight": normal(67, 24), "lm_head.weight": normal(67, 24)}
    for i in range(2):
        sizes = {"attn.c_q": (24, 24), "attn.c_k": (12, 24), "attn.c_v": (12, 24), "attn.c_proj": (24, 24)}
        sizes |= {"mlp.c_fc": (96, 24), "mlp.c_proj": (24, 96)}
        state |= {f"transformer.h.{i}.{name}.weight": normal(*shape) for name, shape in sizes.items()}
    torch.save({f"_orig_mod.{name}": x for name, x in state.items()}, tmp_path / "model_000650.pt")
    torch.save({"stale": torch.zeros(1)}, tmp_path / "model_000100.pt")
    (tmp_path / "meta_000650.json").write_text(json.dumps({"step": 650, "model_config": settings}))
    # float32's smallest step is what torch's rms_norm takes for eps there; here it runs in float64, whose is smaller.
    expected = nanochat_logits(state, settings)
    for source in (tmp_path, tmp_path / "model_000650.pt"):
        torch.testing.assert_close(logits(source)[0], expected, rtol=0, atol=2e-5)
    assert open_model(str(tmp_path)).checkpoint.infos["lm_head.weight"].file.name == "model_000650.pt"


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".safetensors"])
def test_lone_weights_with_a_config(llama, tmp_path, suffix):
    folder, expected = llama
    state, file = load_file(folder / "model.safetensors"), tmp_path / f"weights{suffix}"
    save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
    with pytest.raises(GptcliError, match="describe it by -c"):
        open_model(str(file))
    assert same(logits(file, str(folder / "config.json")), expected)
    model = open_model(str(folder))
    from gptcli.report.listing import config_report

    (tmp_path / "toy.yaml").write_text(config_report(model).yaml)
    assert same(logits(file, str(tmp_path / "toy.yaml")), expected)


def test_a_head_beside_a_tie(tmp_path):
    save_toy(LLAMA | {"tie_word_embeddings": True}, tmp_path)
    expected, state = logits(tmp_path), load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in state
    save_file(state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    assert same(logits(tmp_path), expected)
    assert not notes(tmp_path)
    save_file(state | {"lm_head.weight": 2 * state["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    assert same(logits(tmp_path), 2 * expected)
    assert "the file's head is used" in notes(tmp_path)


def test_no_head_and_no_tie_is_an_error(llama, tmp_path):
    folder, _ = llama
    here = copy(folder, tmp_path)
    state = load_file(folder / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, here / "model.safetensors")
    with pytest.raises(GptcliError, match=r"'lm_head\.weight' is missing"):
        open_model(str(here))


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_base_model_with_and_without_its_prefix(tmp_path, prefixed):
    save_toy(LLAMA | {"tie_word_embeddings": True}, tmp_path)
    expected, state = logits(tmp_path), load_file(tmp_path / "model.safetensors")
    state = {name if prefixed else name.removeprefix("model."): x for name, x in state.items()}
    state |= {f"{'model.' * prefixed}layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    save_file(state, tmp_path / "model.safetensors")
    assert same(logits(tmp_path), expected)
    assert len(open_model(str(tmp_path)).checkpoint.binding.buffers) == 1


class Trap:
    """An object whose unpickling would make a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_runs_none(llama, tmp_path, zipped):
    folder, _ = llama
    here, mark = copy(folder, tmp_path), tmp_path / "executed"
    held = {"model.norm.weight": torch.ones(16), "trap": Trap(mark)}
    torch.save(held, here / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(GptcliError, match="weights-only loader refuses") as caught:
        open_model(str(here))
    assert "mkdir" in str(caught.value) and "\n" not in str(caught.value)
    assert not mark.exists()
    (here / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(GptcliError):
        open_model(str(here))
    assert not mark.exists()


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "an HTML page"),
        (b"PK\x03\x04 cut short", "PyTorch file"),
        (b"\x80\x02 cut short", "PyTorch file"),
    ],
)
def test_what_is_no_pickle_says_so_in_a_line(llama, tmp_path, content, said):
    folder, _ = llama
    here = copy(folder, tmp_path)
    (here / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(GptcliError, match=said) as caught:
        open_model(str(here))
    assert "\n" not in str(caught.value)


def test_a_pickle_is_memory_mapped(llama, tmp_path):
    """A weight read in its own type is the mapped file's memory, not a copy."""
    folder, _ = llama
    here = copy(folder, tmp_path)
    torch.save(load_file(folder / "model.safetensors"), here / "pytorch_model.bin")
    model = open_model(str(here))
    weights = model.weights(torch.float64, CPU)
    weight = weights["layers.0.mlp.up.weight"]
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list its mappings")
    mapped = [line.split() for line in maps.read_text().splitlines() if line.endswith("pytorch_model.bin")]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in mapped]
    assert any(low <= weight.data_ptr() < high for low, high in ranges)
