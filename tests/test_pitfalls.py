"""What goes wrong with tools of this kind: one test for each kind of fault, by a small input made here, end to end.

Where another file shows a kind in full, a comment names it.
"""

import itertools
import json
import math
import os
import pickle
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import gptcli
from gptcli.model.forward import Inputs, forward
from gptcli.source import open_model
from gptcli.trace import Recorder, Selection, points
from tests.command import gptcli as run
from tests.oracle import save_toy
from tests.test_families_gemma import NESTED
from tests.toys import gpt2_vocabulary

CPU = torch.device("cpu")
IDS = [5, 17, 3, 60, 22, 8, 41, 9, 30, 31, 2, 44, 13, 6, 21, 50, 11, 1, 62, 7]  # positions to 19
FED = ["--ids", ",".join(map(str, IDS))]
GPT2 = {"model_type": "gpt2", "vocab_size": 67, "n_positions": 32, "n_embd": 8, "n_layer": 2, "n_head": 2}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
}
WEIGHTS = "model.safetensors"


def logits(path: Path, *words: str) -> list:
    """What `forward` computes, by its JSON: every candidate's logit after the last position, in the order of ids."""
    ran = run("forward", "-m", path, *(words or FED), "--json", "-k", "67")
    assert ran.status == 0, ran
    return [[one["logit"] for one in sorted(found["top"], key=lambda one: one["id"])] for found in ran.json["next"]]


def near(a: list, b: list, allowed: float = 1e-9) -> bool:
    return len(a) == len(b) and all(
        abs(x - y) < allowed for row, other in zip(a, b) for x, y in zip(row, other, strict=True)
    )


def refused(*words: object) -> str:
    """The one line that a person reads of what can't run."""
    ran = run(*words)
    assert ran.status == 2 and not ran.out, ran
    assert re.fullmatch(r"gptcli: [^\n]+\n", ran.err) and "Traceback" not in ran.err, ran.err
    assert ran.err[:-1].isprintable()
    return ran.err


def refused_model(path: Path) -> str:
    """Every command that opens the model says the same."""
    said = {refused(command, "-m", path, *(FED if command != "params" else ())) for command in ("forward", "params")}
    assert len(said) == 1, said
    return said.pop()


# Counting, as far as loading decides it


def test_a_tied_head_adds_no_parameters_and_names_its_partner(toys):
    """2 tables and 2 layers of C=8: 67·8 + 32·8 + 2·(12·8·8 + 13·8) + 2·8."""
    report = run("params", toys(GPT2), "--json").json
    assert report["parameters"]["total"] == 67 * 8 + 32 * 8 + 2 * (12 * 64 + 13 * 8) + 16 == 2552
    assert "lm_head → embed (tied)" in run("params", toys(GPT2)).out
    assert (
        run("params", toys(GPT2 | {"tie_word_embeddings": False}), "--json").json["parameters"]["total"] == 2552 + 536
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32])
def test_masks_and_frequencies_in_a_file_are_buffers_and_no_parameters(dtype, toys, copy):
    def add(tensors):
        mask = torch.tril(torch.ones(32, 32)).to(dtype)[None, None]
        buffers = {f"transformer.h.{i}.attn.bias": mask for i in (0, 1)}
        return tensors | buffers | {"transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}

    here = copy(GPT2, add)
    report = run("params", here, "--json").json
    assert report["parameters"]["total"] == 2552 and len(report["buffers"]) == 3
    assert near(logits(here), logits(toys(GPT2)))
    here = copy(LLAMA, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}, name="llama")
    assert near(logits(here), logits(toys(LLAMA)))


def test_the_config_s_word_wins_over_a_rule_of_thumb(toys):
    """An MLP that is not 4 times the hidden size, a head size that is not hidden size / heads."""
    spec = open_model(str(toys(GPT2 | {"n_inner": 12}))).spec
    assert spec.mlp.size == 12
    spec = open_model(str(toys(LLAMA))).spec
    assert (spec.attention.head_dim, spec.hidden_size // spec.attention.n_heads, spec.mlp.size) == (6, 4, 24)


def words_vocabulary(folder: Path, words: list[str], bos: str | None = None) -> None:
    """A tokenizer.json of whole words; bos: its own rule puts it before every text."""
    vocabulary = {word: id_ for id_, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos is not None:
        made.add_special_tokens([bos])
        made.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, vocabulary[bos])])
    made.save(str(folder / "tokenizer.json"))


def test_more_rows_than_tokens_is_padding_and_fewer_is_said(copy):
    """A table of 67 rows beside a tokenizer of 3, and of 70, whose last words have no row."""
    few = copy(GPT2, name="few")
    words_vocabulary(few, ["?", "cats", "sit"])
    ran = run("topk", "-m", few, "cats sit", "-k", "67", "--json")
    assert ran.status == 0 and len(ran.json["next"][0]["top"]) == 67  # ids without a token crash nothing
    assert "knows 3 ids and the table has 67 rows: the rows beyond are padding" in ran.err
    many = copy(GPT2, name="many")
    words_vocabulary(many, [f"w{i}" for i in range(70)])
    assert run("topk", "-m", many, "w1 w66").status == 0
    assert "id 69 is outside the vocabulary; ids run from 0 to 66" in run("topk", "-m", many, "w1 w69").err


# Keys and configs

WRAPPERS = ["_orig_mod", "module", "_fsdp_wrapped_module", "_forward_module"]


@pytest.mark.parametrize("order", list(itertools.permutations(WRAPPERS, 3)), ids=".".join)
def test_wrapper_prefixes_nested_in_any_order(order, toys, copy):
    here = copy(GPT2, lambda tensors: {".".join([*order, name]): x for name, x in tensors.items()})
    ran = run("forward", "-m", here, *FED)
    assert ran.status == 0
    assert f"wrapper prefixes taken off: {', '.join(f'{word}.' for word in order)}" in ran.err
    assert near(logits(here), logits(toys(GPT2)))


def test_a_wrapper_inside_a_name(toys, copy):
    """Activation checkpointing wraps every layer, FSDP every part that it shards."""

    def wrap(tensors):
        inside = {name: name.replace(".attn.", "._fsdp_wrapped_module.attn.") for name in tensors}
        return {re.sub(r"(h\.\d\.)", r"\1_checkpoint_wrapped_module.", inside[name]): x for name, x in tensors.items()}

    here = copy(GPT2, wrap)
    assert near(logits(here), logits(toys(GPT2)))
    assert "_checkpoint_wrapped_module., _fsdp_wrapped_module." in run("forward", "-m", here, *FED).err


def test_a_tensor_with_its_wrapper_and_without_is_a_contradiction(copy):
    here = copy(GPT2, lambda t: t | {f"module.{name}": x for name, x in t.items() if "ln_f" in name})
    assert "are one once wrappers are taken off" in refused_model(here)


def test_gpt2_s_prefix_may_be_there_or_not(toys, copy):
    here = copy(GPT2, lambda tensors: {name.removeprefix("transformer."): x for name, x in tensors.items()})
    assert near(logits(here), logits(toys(GPT2)))


def test_a_head_beside_a_tie(toys, copy):
    """An equal one is redundant; a different one contradicts the config, and the file's own is used."""
    table = "transformer.wte.weight"
    equal = copy(GPT2, lambda tensors: tensors | {"lm_head.weight": tensors[table].clone()}, name="equal")
    assert near(logits(equal), logits(toys(GPT2)))
    assert "head" not in run("forward", "-m", equal, *FED).err
    other = copy(GPT2, lambda tensors: tensors | {"lm_head.weight": 3 * tensors[table]}, name="other")
    assert near(logits(other), [[3 * x for x in row] for row in logits(toys(GPT2))])
    assert (
        "lm_head.weight in the file differs from the embedding: the file's head is used"
        in run("forward", "-m", other, *FED).err
    )


@pytest.mark.parametrize("config", [GPT2 | {"tie_word_embeddings": False}, LLAMA], ids=lambda c: c["model_type"])
def test_an_untied_head_that_is_missing_is_an_error(config, copy):
    here = copy(config, lambda tensors: {name: x for name, x in tensors.items() if name != "lm_head.weight"})
    assert "tensor 'lm_head.weight' is missing" in refused_model(here)


def test_a_square_matrix_is_read_as_its_format_lays_it(toys, tmp_path):
    """GPT-2 keeps [in, out] and nanoGPT [out, in]; of 8 by 8 numbers the shape can't tell which."""
    tensors = load_file(toys(GPT2) / WEIGHTS)
    name = "transformer.h.0.attn.c_proj.weight"
    assert tensors[name].shape == (8, 8) and not torch.equal(tensors[name], tensors[name].T)
    m = gptcli.open(toys(GPT2))
    assert torch.equal(m.weights["layers.0.attn.o.weight"], tensors[name].T)
    matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    args = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 32, "vocab_size": 67, "bias": True, "dropout": 0.0}
    linear = {key: x.T.contiguous() if key.endswith(matrices) else x for key, x in tensors.items()}
    torch.save({"model": linear, "model_args": args}, tmp_path / "ckpt.pt")
    n = gptcli.open(tmp_path / "ckpt.pt")
    assert torch.equal(n.weights["layers.0.attn.o.weight"], linear[name])
    # The same arithmetic, but for the GELU: tanh there, exact here (0.5·x·(1 + erf(x/√2)), at most 5e-4 apart).
    attention = "layers.0.resid_mid"
    assert torch.allclose(
        m.activations(IDS, attention)[attention], n.activations(IDS, attention)[attention], atol=1e-12
    )
    assert near(m.logits(IDS).tolist(), n.logits(IDS).tolist(), 0.05)


@pytest.mark.parametrize("said", [None, True, False])
def test_qwen2_has_biases_on_q_k_and_v_whatever_its_config_says(said, toys):
    config = LLAMA | {"model_type": "qwen2"} | ({} if said is None else {"attention_bias": said})
    names = {param.name for param in open_model(str(toys(config))).layout}
    assert {f"layers.0.attn.{letter}.bias" for letter in "qkv"} <= names and "layers.0.attn.o.bias" not in names
    m = gptcli.open(toys(config))
    x = m.activations(IDS, "layers.0.attn_norm", "layers.0.attn.q")
    w = m.weights
    q = F.linear(x["layers.0.attn_norm"], w["layers.0.attn.q.weight"], w["layers.0.attn.q.bias"])
    assert torch.allclose(q.unflatten(-1, (4, 6)).transpose(1, 2), x["layers.0.attn.q"])


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("letter", "qk")
def test_a_missing_norm_of_queries_or_keys_is_an_error(kind, letter, copy):
    lost = f"model.layers.1.self_attn.{letter}_norm.weight"
    here = copy(LLAMA | {"model_type": kind}, lambda tensors: {k: x for k, x in tensors.items() if k != lost})
    assert f"tensor {lost!r} is missing (layers.1.attn.{letter}_norm.weight [6])" in refused_model(here)


LINEAR = {"factor": 2.0}
SPELLINGS = {  # the same rotation, unscaled and by half as fast, in every spelling that configs have
    "base": [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_theta": 500.0}},
    ],
    "linear": [
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear"} | LINEAR},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear"} | LINEAR},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "type": "linear"} | LINEAR},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0} | LINEAR},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "linear"} | LINEAR},
    ],
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_one_rotation_in_every_spelling(kind, toys, copy):
    """All kinds and spellings against transformers: test_rope.py."""
    found = [logits(copy(LLAMA, settings=LLAMA | said, name=str(i))) for i, said in enumerate(SPELLINGS[kind])]
    assert all(near(one, found[0]) for one in found)
    assert not near(found[0], logits(toys(LLAMA)), 1e-3)  # whose base is 10,000


def test_a_rotation_for_each_kind_of_layer(copy):
    """Nested by layer type, and by the older words rope_theta and rope_local_base_freq."""
    gemma = LLAMA | {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}
    older = {"rope_theta": 300.0, "rope_local_base_freq": 50.0}
    newer = {"rope_parameters": {"full_attention": {"rope_theta": 300.0}, "sliding_attention": {"rope_theta": 50.0}}}
    here = [copy(gemma, settings=gemma | said, name=str(i)) for i, said in enumerate((older, newer))]
    assert near(logits(here[0]), logits(here[1]))
    spec = open_model(str(here[1])).spec
    assert [(spec.at(i).position.theta, spec.at(i).attention.window) for i in (0, 1)] == [(50.0, 8), (300.0, None)]


@pytest.mark.parametrize(
    "said",
    [
        {"rope_scaling": {"rope_type": "sparkle", "factor": 2.0}},
        {"rope_scaling": {"type": "mrope"}},
        {"rope_parameters": {"rope_type": "sparkle"}},
        {"rope_parameters": NESTED},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "sparkle": 1}},
    ],
    ids=lambda said: json.dumps(said)[:40],
)
def test_a_rotation_that_is_not_implemented_is_refused_and_named(said, copy):
    told = refused_model(copy(LLAMA, settings=LLAMA | said))
    assert "config.json: rope_" in told and ("not implemented" in told)


def test_pairs_as_halves_and_as_neighbours_at_position_17(copy):
    """The same at position 0, where nothing turns; at 17 each equals multiplication by e^(i·17·θ^(-2i/R))."""
    kept = {"rotary_dim": 4, "n_head": 1, "n_layer": 1}
    m = gptcli.open(copy(GPT2 | kept | {"model_type": "gptj"}, name="neighbours"))
    n = gptcli.open(copy(LLAMA | {"rope_theta": 10_000.0}, name="halves"))
    for model, size, pairs in ((m, 4, "neighbours"), (n, 6, "halves")):
        assert model.spec.position.pairs == pairs
        x = model.activations(IDS, "layers.0.attn.q", "layers.0.attn.q_rot")
        before, after = x["layers.0.attn.q"][0, 0], x["layers.0.attn.q_rot"][0, 0]
        assert torch.allclose(after[0], before[0])
        first = torch.arange(size // 2) if pairs == "halves" else torch.arange(0, size, 2)
        second = first + (size // 2 if pairs == "halves" else 1)
        angle = 17 * 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        turned = torch.complex(before[17, first], before[17, second]) * torch.polar(torch.ones_like(angle), angle)
        assert torch.allclose(torch.complex(after[17, first], after[17, second]), turned)
        assert torch.equal(after[:, size:], before[:, size:])


GEMMA2 = LLAMA | {
    "model_type": "gemma2",
    "sliding_window": 6,
    "query_pre_attn_scalar": 9,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.25,
}


def test_gemma_s_offset_scale_caps_query_scale_and_windows(toys):
    """Parity with transformers: test_families_gemma.py. Here each choice by itself, as the paper states it."""
    m = gptcli.open(toys(GEMMA2), dtype="bf16")
    x, w = m.activations(IDS, "*"), m.weights
    # √16 = 4, which every type holds exactly.
    assert torch.equal(x["embed"], w["embed.weight"][IDS][None] * torch.tensor(4.0, dtype=torch.bfloat16))
    h = x["layers.0.resid_pre"].float()
    h = (
        h
        * torch.rsqrt(h.square().mean(-1, keepdim=True) + m.spec.norm.eps)
        * (1 + w["layers.0.attn_norm.weight"].float())
    )
    assert torch.equal(x["layers.0.attn_norm"], h.bfloat16())
    m = gptcli.open(toys(GEMMA2))
    x = m.activations(IDS, "*")
    gate, up = x["layers.0.mlp.gate"], x["layers.0.mlp.up"]
    tanh = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    assert torch.allclose(x["layers.0.mlp.act"], tanh * up)
    q, k = x["layers.0.attn.q_rot"], x["layers.0.attn.k_rot"].repeat_interleave(2, 1)
    assert torch.allclose(x["layers.0.attn.scores"], 0.5 * torch.tanh(q @ k.mT / math.sqrt(9) / 0.5))
    plain = F.linear(x["final_norm"], m.weights["embed.weight"])
    assert torch.allclose(x["logits"], 0.25 * torch.tanh(plain / 0.25))
    seen = [(x[f"layers.{i}.attn.pattern"][0, 0, 19] > 0).nonzero()[:, 0].tolist() for i in (0, 1)]
    assert seen == [list(range(14, 20)), list(range(20))]  # local, then global


def test_the_scale_of_embeddings_is_rounded_to_the_model_s_type(toys):
    """√24 = 4.898979… is 4.90625 in bfloat16."""
    m = gptcli.open(toys(GEMMA2 | {"hidden_size": 24}), dtype="bf16")
    x = m.activations([5], "embed")["embed"]
    assert torch.equal(x[0, 0], m.weights["embed.weight"][5] * torch.tensor(4.90625, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "word, exact", [("gelu", True), ("gelu_new", False), ("gelu_pytorch_tanh", False)], ids=lambda value: str(value)
)
def test_gelu_is_exact_or_by_tanh_as_the_config_says(word, exact, copy):
    m = gptcli.open(copy(GPT2, settings=GPT2 | {"activation_function": word}))
    x = m.activations(IDS, "layers.0.mlp.*")
    up, act = x["layers.0.mlp.up"], x["layers.0.mlp.act"]
    by_erf = 0.5 * up * (1 + torch.erf(up / math.sqrt(2)))
    assert torch.allclose(act, by_erf, atol=1e-12) == exact and torch.allclose(act, by_erf, atol=2e-3)


@pytest.mark.parametrize("eps", [1e-5, 1e-12, 0.5])
def test_a_norm_s_eps_is_the_config_s(eps, copy):
    m = gptcli.open(copy(GPT2, settings=GPT2 | {"layer_norm_epsilon": eps}))
    x = m.activations(IDS, "layers.0.resid_pre", "layers.0.attn_norm")
    h, w = x["layers.0.resid_pre"], m.weights
    h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    assert torch.allclose(
        h * w["layers.0.attn_norm.weight"] + w["layers.0.attn_norm.bias"], x["layers.0.attn_norm"], atol=1e-12
    )


def test_three_ways_to_fuse_q_k_and_v(toys):
    """GPT-2: columns q k v. NeoX: rows q k v within each head. Phi-3: rows q, then k, then v, of grouped heads."""
    sizes = {"vocab_size": 67, "hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 3, "max_position_embeddings": 32}
    neox, phi3 = (
        sizes | {"model_type": "gpt_neox", "rotary_pct": 0.5},
        sizes | {"model_type": "phi3", "num_key_value_heads": 1},
    )
    phi3 |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    stored = load_file(toys(GPT2) / WEIGHTS)["transformer.h.0.attn.c_attn.weight"]
    w = gptcli.open(toys(GPT2)).weights
    for i, letter in enumerate("qkv"):
        assert torch.equal(w[f"layers.0.attn.{letter}.weight"], stored[:, 8 * i : 8 * i + 8].T)
    stored = load_file(toys(neox) / WEIGHTS)["gpt_neox.layers.0.attention.query_key_value.weight"]
    w = gptcli.open(toys(neox)).weights
    for i, letter in enumerate("qkv"):
        rows = [12 * head + 4 * i + number for head in range(3) for number in range(4)]
        assert torch.equal(w[f"layers.0.attn.{letter}.weight"], stored[rows])
    stored = load_file(toys(phi3) / WEIGHTS)["model.layers.0.self_attn.qkv_proj.weight"]
    w = gptcli.open(toys(phi3)).weights
    for letter, rows in (("q", slice(0, 12)), ("k", slice(12, 16)), ("v", slice(16, 20))):
        assert torch.equal(w[f"layers.0.attn.{letter}.weight"], stored[rows])
    stored = load_file(toys(phi3) / WEIGHTS)["model.layers.0.mlp.gate_up_proj.weight"]
    assert torch.equal(w["layers.0.mlp.gate.weight"], stored[:24]) and torch.equal(
        w["layers.0.mlp.up.weight"], stored[24:]
    )


def test_a_key_that_changes_the_forward_pass_is_refused_and_one_that_nobody_knows_is_named(copy):
    config = GPT2 | {"add_cross_attention": True}
    told = refused_model(copy(GPT2, settings=config, name="known"))
    assert "add_cross_attention: True changes the forward pass and is not implemented" in told
    here = copy(GPT2, settings=GPT2 | {"sparkle": 1}, name="unknown")
    assert "unknown keys, not used: sparkle" in run("forward", "-m", here, *FED).err
    assert "sparkle" in refused("forward", "-m", here, *FED, "--strict")


# Files


def framed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, stop: int) -> dict:
    return {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]}


BROKEN = {  # what lies in model.safetensors, and what must be said of it
    "an LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n",
        "a Git LFS po",
    ),
    "a page": (b"<!DOCTYPE html>\n<html><body>404</body></html>", "an HTML page, not weights"),
    "nothing": (b"", "the file is empty"),
    "a header of terabytes": (struct.pack("<Q", 2**42) + b"{}", f"a header of {2**42:,} bytes in a file of 10"),
    "a hole": (framed({"a": entry(0, 8), "b": entry(12, 16)}, bytes(16)), "tensor 'b' begins at byte"),
    "an overlap": (framed({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "tensor 'b' begins at byte"),
    "a key twice": (framed(b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 8)).encode(),) * 2), bytes(8)), "stands twice"),
    "bytes beyond": (framed({"a": entry(0, 8)}, bytes(12)), "bytes and the file has"),
    "a pickle": (b"\x80\x02}q\x00." + bytes(8), "a PyTorch file under another name"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_checkpoint_is_said_in_one_line(case, copy):
    """Every damage to a header: test_safetensors.py."""
    here = copy(GPT2)
    data, said = BROKEN[case]
    (here / WEIGHTS).write_bytes(data)
    assert said in refused_model(here)


@pytest.mark.parametrize("kept", [4, 100, 0.5, 0.999])
def test_a_download_cut_short_says_the_bytes_needed_and_present(kept, copy):
    here = copy(GPT2)
    whole = (here / WEIGHTS).read_bytes()
    size = kept if kept > 1 else int(kept * len(whole))
    (here / WEIGHTS).write_bytes(whole[:size])
    told = refused_model(here)
    assert f"{size:,}" in told or f"{size} bytes" in told
    assert size < 1000 or f"its tensors need {len(whole):,} bytes and the file has {size:,}" in told


def test_names_with_control_characters_never_reach_the_terminal(copy):
    here = copy(GPT2, lambda tensors: tensors | {"evil\x1b]0;title\x07\x1b[2J": torch.zeros(1)})
    told = refused_model(here)  # which holds nothing that can't be printed
    assert "is left over" in told and "evil" in told


def test_a_key_of_the_config_that_stands_twice_is_refused(copy):
    here = copy(GPT2)
    (here / "config.json").write_text(json.dumps(GPT2)[:-1] + ', "n_head": 4}')
    assert "config.json: the key 'n_head' stands twice" in refused_model(here)


def sharded(here: Path, copies: int = 0) -> tuple[Path, dict]:
    """The model in two shards with an index; copies: tensors that the second shard holds as well."""
    tensors = load_file(here / WEIGHTS)
    (here / WEIGHTS).unlink()
    names = sorted(tensors)
    halves = names[::2], names[1::2]
    table = {name: f"model-0000{i + 1}-of-00002.safetensors" for i in (0, 1) for name in halves[i]}
    for i in (0, 1):
        held = halves[i] + (halves[0][:copies] if i else [])
        save_file({name: tensors[name] for name in held}, here / f"model-0000{i + 1}-of-00002.safetensors")
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return here, table


def test_a_shard_that_the_index_names_is_absent(toys, copy):
    here, table = sharded(copy(GPT2))
    assert near(logits(here), logits(toys(GPT2)))
    lost = "model-00002-of-00002.safetensors"
    (here / lost).unlink()
    number = sum(shard == lost for shard in table.values())
    assert f"shard {lost} is missing, and with it {number} of {len(table)} tensors" in refused_model(here)


def test_two_full_sets_of_weights_in_one_folder(toys, copy):
    """The index is followed, and what is not read is named; of two files alike in rank none is guessed."""
    here, _ = sharded(copy(GPT2))
    shutil.copy(toys(GPT2) / WEIGHTS, here / "consolidated.safetensors")
    ran = run("forward", "-m", here, *FED)
    assert ran.status == 0 and "not read: consolidated.safetensors" in ran.err
    assert near(logits(here), logits(toys(GPT2)))
    here = copy(GPT2, name="alike")
    (here / WEIGHTS).rename(here / "a.safetensors")
    shutil.copy(here / "a.safetensors", here / "b.safetensors")
    assert "several weight files (a.safetensors, b.safetensors)" in refused_model(here)


def test_a_tensor_in_two_shards(copy):
    here, table = sharded(copy(GPT2), copies=1)
    told = refused_model(here)
    assert f"tensor {min(table)!r} is in model-00001-of-00002.safetensors and in model-00002" in told


class Trap:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_runs_no_code(zipped, copy, tmp_path):
    here, mark = copy(GPT2), tmp_path / "executed"
    (here / WEIGHTS).unlink()
    torch.save(
        {"a": torch.ones(1), "trap": Trap(mark)}, here / "pytorch_model.bin", _use_new_zipfile_serialization=zipped
    )
    told = refused_model(here)
    assert "weights-only loader refuses" in told and "mkdir" in told
    (here / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    refused_model(here)
    assert not mark.exists()


@pytest.mark.parametrize("section", ["model", "state_dict", "model_state_dict"])
def test_a_training_checkpoint_shows_its_sections_and_its_model_is_used(section, toys, copy):
    here = copy(GPT2)
    tensors = load_file(here / WEIGHTS)
    (here / WEIGHTS).unlink()
    moments = {i: {"exp_avg": x, "exp_avg_sq": x, "step": torch.tensor(7.0)} for i, x in enumerate(tensors.values())}
    held = {section: tensors, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}, "iter_num": 700}
    torch.save(held, here / "pytorch_model.bin")
    assert near(logits(here), logits(toys(GPT2)))
    assert run("params", here, "--json").json["parameters"]["total"] == 2552
    said = run("forward", "-m", here, *FED).err
    assert "training checkpoint: optimizer, iter_num not used" in said


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "name, first, weight",
    [
        ("transformer.h.0.attn.c_proj.weight", "layers.0.attn_out", "layers.0.attn.o.weight[3, 0]"),
        ("transformer.h.1.mlp.c_fc.bias", "layers.1.mlp.up", "layers.1.mlp.up.bias[3]"),
        ("transformer.ln_f.bias", "final_norm", "final_norm.bias[3]"),
    ],
)
def test_a_weight_that_is_not_finite_is_a_finding_that_names_where_it_first_shows(bad, name, first, weight, copy):
    """Every weight, and what else may overflow: test_first_nan.py."""

    def spoil(tensors):
        tensors[name].view(-1)[3] = bad
        return tensors

    here = copy(GPT2, spoil)
    for command in ("forward", "topk", "score", "trace"):  # the walk of a layer that is sound is no pardon
        ran = run(command, "-m", here, *FED, "--json")
        assert ran.status == 1 and ran.json["status"] == "findings"
        [finding] = ran.json["findings"]
        assert (finding["code"], finding["path"]) == ("not-finite", first)
        assert f"weight {weight} is " in finding["message"]
    at = run("trace", "-m", here, *FED, "--at", first, "--json")
    assert at.status == 1 and [finding["code"] for finding in at.json["findings"]] == ["not-finite"]


def test_a_file_of_a_format_that_is_not_read_is_named_as_such(copy, tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07" + bytes(16))
    assert "model.onnx: not a model; give a directory, a file (.safetensors" in refused(
        "params", tmp_path / "model.onnx"
    )
    here = copy(GPT2)
    (here / WEIGHTS).rename(here / "model.onnx")
    assert "no weights in this directory (it holds model.onnx, which can't be read)" in refused_model(here)


# The forward pass


@pytest.mark.parametrize("config", [GPT2, LLAMA, GEMMA2], ids=lambda config: config["model_type"])
def test_watching_changes_no_bit(config, toys):
    """Every family: test_trace_families.py, whose proof claims it; every shipped architecture: test_names.py."""
    model = open_model(str(toys(config)))
    for dtype in (torch.float32, torch.bfloat16):
        weights, ids = model.weights(dtype, CPU), torch.tensor([IDS])
        for rows in ("all", "last"):
            inputs = Inputs(ids, rows=rows)
            silent = forward(inputs, weights, model.spec)
            assert torch.equal(forward(inputs, weights, model.spec, Recorder("*")), silent)
    [bits] = [c for c in run("trace", "-m", toys(config), *FED, "--json").json["proof"] if "same bits" in c["claim"]]
    assert bits["ok"] and bits["allowed"] == 0


def test_a_masked_weight_is_zero_and_not_merely_small(toys, copy):
    """Scores of 10⁶ would show through a mask of -10⁴ or -10⁵; a weight behind -∞ is exactly 0."""
    here = copy(
        LLAMA, lambda tensors: {k: x * (1e3 if "q_proj" in k or "k_proj" in k else 1) for k, x in tensors.items()}
    )
    x = gptcli.open(here).activations(IDS, "layers.0.attn.*")
    scores, pattern = x["layers.0.attn.scores"][0], x["layers.0.attn.pattern"][0]
    later = torch.ones(20, 20).triu(1).bool()
    assert float(scores[:, later].max()) > 1e5 and float(pattern[:, later].abs().max()) == 0
    assert run("trace", "-m", here, *FED, "--position", "0").status == 0


def test_a_row_that_sees_nothing_reads_nothing(toys):
    """Positions in the padding see no key: zeros, not NaN."""
    model = open_model(str(toys(LLAMA)))
    ids = torch.tensor([[0] * 15 + IDS[:5], IDS])
    mask = torch.tensor([[False] * 15 + [True] * 5, [True] * 20])
    recorder = Recorder("layers.0.attn.*")
    found = forward(Inputs(ids, mask=mask), model.weights(torch.float64, CPU), model.spec, recorder)
    pattern, z = recorder.kept["layers.0.attn.pattern"], recorder.kept["layers.0.attn.z"]
    assert float(pattern[0, :, :15].abs().max()) == 0 and float(z[0, :, :15].abs().max()) == 0
    assert found.isfinite().all()


@pytest.mark.parametrize("config", [GPT2, LLAMA, GEMMA2], ids=lambda config: config["model_type"])
def test_a_padded_text_gives_what_it_gives_alone(config, toys):
    """Positions come from the mask, by learned rows and by rotation."""
    texts = [IDS, IDS[3:5], IDS[:11]]
    batch = logits(toys(config), "--ids", json.dumps(texts))
    for text, found in zip(texts, batch):
        assert near([found], logits(toys(config), "--ids", json.dumps(text)))


def test_the_last_query_sees_all_keys(toys):
    """Fewer queries than keys: a causal flag that aligned to the upper left would show the first key alone."""
    for config in (GPT2, LLAMA, GEMMA2):
        model = open_model(str(toys(config)))
        weights, ids = model.weights(torch.float64, CPU), torch.tensor([IDS])
        every = forward(Inputs(ids), weights, model.spec)
        last = forward(Inputs(ids, rows="last"), weights, model.spec)
        assert last.shape[1] == 1 and torch.allclose(last, every[:, -1:], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_take_norms_and_softmax_in_float32(dtype, toys):
    """Each equals float32 arithmetic on the same half inputs, rounded once; float64 stays in itself."""
    m = gptcli.open(toys(GPT2), dtype=str(dtype).removeprefix("torch."))
    x, w = m.activations(IDS, "*"), m.weights
    h = x["layers.1.resid_post"].float()
    weight, bias = w["final_norm.weight"].float(), w["final_norm.bias"].float()
    assert torch.equal(x["final_norm"], F.layer_norm(h, (8,), weight, bias, 1e-5).to(dtype))
    q, k = x["layers.0.attn.q"].float(), x["layers.0.attn.k"].float()
    causal = torch.ones(20, 20).tril().bool()
    pattern = (q @ k.mT / 2).masked_fill(~causal, -math.inf).softmax(-1)
    assert x["layers.0.attn.pattern"].dtype == torch.float32
    assert torch.allclose(x["layers.0.attn.pattern"], pattern, atol=1e-6)
    assert x["logits"].dtype == torch.float32
    assert {t.dtype for t in gptcli.open(toys(GPT2)).activations(IDS, "*").values()} == {torch.float64}


def test_what_can_not_run_says_so_in_a_line(toys):
    path = toys(GPT2)
    long = ",".join(["1"] * 33)
    assert "33 tokens are more than the context of 32" in refused("forward", "-m", path, "--ids", long)
    assert run("forward", "-m", path, "--ids", long[:-2]).status == 0
    assert "an empty text holds no token to run" in refused("forward", "-m", path, "--ids", "[]")
    assert "the text is empty" in refused("forward", "")
    assert "--device cuda:99: not on this machine; there is: cpu" in refused(
        "forward", "-m", path, *FED, "--device", "cuda:99"
    )
    assert "--dtype f8: no such type" in refused("forward", "-m", path, *FED, "--dtype", "f8")
    assert "id 67 is outside the vocabulary" in refused("forward", "-m", path, "--ids", "67")


def test_float16_runs_on_a_cpu(toys):
    ran = run("forward", "-m", toys(GPT2), *FED, "--dtype", "f16", "--device", "cpu", "--json")
    assert ran.status == 0 and ran.json["model"]["dtype"] == "float16"
    exact = logits(toys(GPT2))
    assert near(logits(toys(GPT2), *FED, "--dtype", "f16", "--device", "cpu"), exact, 0.02)


@pytest.fixture(scope="module")
def gpt2_words(tmp_path_factory) -> Path:
    """GPT-2's vocabulary beside a model of width 4."""
    here = tmp_path_factory.mktemp("gpt2")
    save_toy(GPT2 | {"vocab_size": 50257, "n_embd": 4, "n_layer": 1, "n_head": 1}, here)
    return gpt2_vocabulary(here)


def test_endoftext_in_a_prompt_is_ordinary_text_unless_asked(gpt2_words):
    """`<|endoftext|>` is 27 91 437 1659 5239 91 29 letter by letter, and 50256 by --special."""
    shown = run("tokens", "-m", gpt2_words, "<|endoftext|>", "--json").json["tokens"][0]
    assert [token["id"] for token in shown] == [27, 91, 437, 1659, 5239, 91, 29]
    shown = run("tokens", "-m", gpt2_words, "<|endoftext|>", "--special", "--json").json["tokens"][0]
    assert [token["id"] for token in shown] == [50256]
    assert "27" in run("forward", "-m", gpt2_words, "<|endoftext|>").out.splitlines()[1]


def test_bos_is_added_once_by_the_tokenizer_s_rule_and_marked(copy):
    here = copy(GPT2)
    words_vocabulary(here, ["?", "<s>", "cats", "sit"], bos="<s>")
    (here / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "chat_template": "{{ bos_token }} {{ messages[0]['content'] }}"})
    )

    def fed(*words: str) -> list[tuple[int, bool]]:
        return [(t["id"], t["added"]) for t in run("forward", "-m", here, *words, "--json").json["tokens"][0]]

    assert fed("cats sit") == fed("cats sit", "--bos") == [(1, True), (2, False), (3, False)]
    assert fed("cats sit", "--no-bos") == [(2, False), (3, False)]
    assert [id_ for id_, _ in fed("cats sit", "--chat")] == [1, 2, 3]  # the template writes its own
    [scored] = run("score", "-m", here, "cats sit", "--json").json["texts"]
    assert [one["rank"] is not None for one in scored["tokens"]] == [False, True, True]  # something precedes "cats"
    assert "1 added" in run("forward", "-m", here, "cats sit").out
    plain = copy(GPT2, name="plain")  # a tokenizer without such a rule adds none
    words_vocabulary(plain, ["?", "<s>", "cats", "sit"])
    assert [t["id"] for t in run("forward", "-m", plain, "cats sit", "--json").json["tokens"][0]] == [2, 3]


def test_a_token_is_scored_by_the_logits_before_it(toys):
    """The first token has no score; the sum is over the others."""
    found = gptcli.open(toys(GPT2)).logits(IDS).log_softmax(-1)
    [text] = run("score", "-m", toys(GPT2), *FED, "--json").json["texts"]
    assert text["tokens"][0]["logprob"] is None and text["scored"] == 19
    expected = [float(found[t - 1, IDS[t]]) for t in range(1, 20)]
    assert [one["logprob"] for one in text["tokens"][1:]] == pytest.approx(expected, abs=1e-9)
    assert text["sum"] == pytest.approx(math.fsum(expected), abs=1e-9)
    shifted = math.fsum(float(found[t, IDS[t]]) for t in range(1, 20))
    assert abs(text["sum"] - shifted) > 0.1


def test_pieces_of_bytes_are_shown_as_what_they_are(gpt2_words):
    """A space as one visible mark, a byte that is no letter alone as an escape, a position beside every token."""
    ran = run("tokens", "-m", gpt2_words, "the the 日 naïve\n", "--json")
    tokens = ran.json["tokens"][0]
    assert bytes(b for token in tokens for b in token["bytes"]).decode() == "the the 日 naïve\n"
    shown = [token["token"] for token in tokens]
    assert shown[:2] == ["the", "␣the"] and not any("Ġ" in word or "▁" in word or "Ã" in word for word in shown)
    assert any(re.search(r"\\x[0-9a-f]{2}", word) for word in shown) and all(word.isprintable() for word in shown)
    ran = run("forward", "-m", gpt2_words, "the cat the cat")
    assert re.search(r"0 the .*1 ␣cat .*2 ␣the .*3 ␣cat ", ran.out.splitlines()[1])


def test_hidden_states_have_names_and_only_the_final_norm_is_normed(toys):
    """`layers.1.resid_post` is before the final norm, `final_norm` after it; nothing is a number in a list of N + 1."""
    m = gptcli.open(toys(GPT2))
    x, w = m.activations(IDS, "*"), m.weights
    assert torch.equal(x["layers.0.resid_post"], x["layers.1.resid_pre"]) and "layers.2.resid_pre" not in x
    normed = F.layer_norm(x["layers.1.resid_post"], (8,), w["final_norm.weight"], w["final_norm.bias"], 1e-5)
    assert torch.allclose(normed, x["final_norm"]) and not torch.allclose(x["layers.1.resid_post"], x["final_norm"])
    listed = run("trace", "-m", toys(GPT2), *FED, "--list", "-q").out.split()
    assert listed == [path for path, _ in points(m.spec)] == list(x)


def test_a_query_head_names_the_key_head_that_it_reads(toys):
    """4 query heads read 2 key/value heads: 0 and 1 the first, 2 and 3 the second."""
    report = run("trace", "-m", toys(LLAMA), *FED, "--head", "all", "--json").json
    assert [walk["kv_head"] for walk in report["walks"]] == [0, 0, 1, 1]
    x = gptcli.open(toys(LLAMA)).activations(IDS, "layers.0.attn.*")
    for walk in report["walks"]:
        v = torch.tensor([key["v"] for key in walk["keys"]], dtype=torch.float64)
        assert torch.equal(v, x["layers.0.attn.v"][0, walk["kv_head"]])
    assert "Head 3 of 4 = L0H3 · kv head 1 · query 19" in run("trace", "-m", toys(LLAMA), *FED, "--head", "3").out


def test_only_what_was_asked_for_is_held(toys):
    """Of [H, T, T] weights one head's one row, where a probe asks for that."""
    model = open_model(str(toys(LLAMA)))
    recorder = Recorder("layers.1.attn.pattern", select=Selection(slice(2, 3), slice(-1, None)))
    forward(Inputs(torch.tensor([IDS])), model.weights(torch.float32, CPU), model.spec, recorder)
    assert {path: list(x.shape) for path, x in recorder.kept.items()} == {"layers.1.attn.pattern": [1, 1, 1, 20]}


def test_statistics_are_of_the_whole_tensor_in_double_precision(toys, copy):
    """Not of the printed corner: one large number hides where none is printed. In float32, a sum of 2²⁴ + 1 loses 1."""
    ran = run("trace", "-m", toys(GPT2), *FED, "--at", "layers.1.mlp.act", "--json").json
    x = torch.tensor(ran["values"], dtype=torch.float64)
    assert ran["mean"] == pytest.approx(float(x.mean()), abs=1e-12)
    assert ran["std"] == pytest.approx(float(x.std(unbiased=False)), rel=1e-12)
    assert ran["max_abs"] == float(x.abs().max())

    def spoil(tensors):
        tensors["transformer.wte.weight"][:] = 1.0
        tensors["transformer.wte.weight"][IDS[9], 4] = 2.0**24
        tensors["transformer.wpe.weight"][:] = 0.0
        return {name: x.float() for name, x in tensors.items()}

    here = copy(GPT2, spoil)
    stage = run("forward", "-m", here, *FED, "--json").json["stages"][1]
    assert stage["path"] == "embed" and stage["max_abs"] == 2.0**24
    assert stage["mean"] == (2**24 + 159) / 160  # 20 positions of 8 numbers, summed exactly
