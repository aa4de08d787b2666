"""`params`: what is counted and what a run costs, as the command's own report has it.

Expected numbers come from tests/data/oracles.json, from arithmetic done here by hand, from transformers' own count on
the meta device, from torch's FLOP counter, and from what torch's allocator gave to a real forward pass.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from gptcli import count, memory
from gptcli.config import read_config
from gptcli.families import FAMILIES
from gptcli.families.record import resolve
from gptcli.layout import layout
from gptcli.model import kernels
from gptcli.model.forward import Inputs, forward
from gptcli.model.init import random_weights
from gptcli.model.weights import Weights
from gptcli.report.cards import explained, in_name
from gptcli.shipped import configs
from gptcli.spec import (
    Dense,
    Experts,
    NoMLP,
    Relative,
    Rope,
    Spec,
    Variant,
    to_dict,
)
from tests.command import gptcli
from tests.oracle import save_toy
from tests.test_counts import ORACLES, qwen2, tinyllama, without_biases
from tests.test_imports import HEAVY
from tests.toys import shrunk

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shipped(name: str) -> Spec:
    return read_config(configs()[name]).spec


def written(spec: Spec, name: str = "made.yaml") -> str:
    """The Spec as a config in the working directory."""
    stem = Path(name).stem
    Path(name).write_text(json.dumps(to_dict(replace(spec, name=stem))), encoding="utf-8")
    return name


def report(*words: object) -> dict:
    ran = gptcli("params", *words, "--json")
    assert ran.status == 0 and ran.err == "", ran
    return ran.json


def shown(*words: object, **options) -> str:
    ran = gptcli("params", *words, **options)
    assert ran.status == 0, ran
    return ran.out


def refused(*words: object) -> str:
    ran = gptcli("params", *words)
    assert ran.status == 2 and not ran.out and ran.err.count("\n") == 1 and "defect" not in ran.err, ran
    return ran.err


# What oracles.json says, by the command's own report.

GPT2 = shipped("gpt2-small")
MADE = {
    "gpt2 with vocabulary padded to 50304": replace(GPT2, vocab_size=50304),
    "gpt2 without biases (nanoGPT bias=False)": without_biases(GPT2),
    "tinyllama-1.1b": tinyllama(),
    "qwen2.5-7b": qwen2(),
}
NAMED = {
    "gpt2": "gpt2-small",
    "gpt2 in its layers only": "gpt2-small",
    "gpt2 untied view": "gpt2-small",
    "llama-2-7b": "llama2-7b",
    "llama-3-8b": "llama3-8b",
    "llama-3-70b": "llama3-70b",
    "llama-3.1-405b": "llama3.1-405b",
    "llama-3.2-1b": "llama3.2-1b",
    "mistral-7b-v0.1": "mistral-7b",
    "gemma-3-270m": "gemma3-270m",
}
FIELDS = {"gpt2 in its layers only": "layers", "gpt2 untied view": "untied"}


@pytest.mark.parametrize("name", ORACLES["parameters"])
def test_parameters(name):
    where = ["-c", written(MADE[name])] if name in MADE else [NAMED.get(name, name)]
    assert report(*where)["parameters"][FIELDS.get(name, "total")] == ORACLES["parameters"][name]


RUNS = {
    "gpt2, T=1024, fp16": ["gpt2-small", "--seq-len", 1024, "--dtype", "f16"],
    "llama-3-8b, bf16, one token": ["llama3-8b", "--seq-len", 1, "--dtype", "bf16"],
    "llama-3-8b, bf16, T=8192": ["llama3-8b", "--seq-len", 8192, "--dtype", "bf16"],
    "qwen3-0.6b, bf16, T=4096": ["qwen3-0.6b", "--seq-len", 4096, "--dtype", "bf16"],
}


@pytest.mark.parametrize("name", ORACLES["kv_cache_bytes"])
def test_kv_cache(name):
    costs = report(*RUNS[name])["costs"]
    assert costs["cache"]["bytes"] == ORACLES["kv_cache_bytes"][name] == costs["memory"]["cache"]


def test_attention_matrices():
    [one] = report("gpt2-small", "--seq-len", 1024)["costs"]["matrices"]
    expected = ORACLES["attention_matrix_bytes"]
    assert one["each"] == expected["gpt2, T=1024, fp32, one layer"]
    assert one["bytes"] == expected["gpt2, T=1024, fp32, all layers"]
    assert one["shape"] == [1, 12, 1024, 1024] and one["layers"] == 12


def test_flops():
    on_all, on_last = report("gpt2-small", "--seq-len", 1024)["costs"]["flops"]["total"]
    expected = ORACLES["flops_forward"]
    full = "gpt2, T=1024, batch 1, every position through the head, full attention"
    assert on_all["full"] == expected[full]
    assert on_all["masked"] == expected["the same with causal attention"]
    assert on_last["full"] == expected["the same as full attention with the head on the last position only"]


# A config that ships, against the library's own.

GEMMA3_270M = {
    "model_type": "gemma3_text",
    "_sliding_window_pattern": 6,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}


def test_sliding_and_global_layers_as_published():
    """The shipped config is what the family reads from the published one, and the library counts as many parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    found = resolve(GEMMA3_270M, FAMILIES["gemma3_text"], "gemma3-270m", "")
    assert found.spec == shipped("gemma3-270m") and not found.unknown
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GEMMA3_270M))
    theirs = sum(p.numel() for p in model.parameters())  # a tied head is listed once
    assert report("gemma3-270m")["parameters"]["total"] == theirs == 268_098_176
    assert model.config.layer_types == GEMMA3_270M["layer_types"]


# Counting, line by line of what goes wrong.


def test_a_tied_head_is_named_and_counted_once():
    """The head would be another table of [50257, 768]."""
    found = report("gpt2-small")["parameters"]
    assert found["untied"] - found["total"] == 50257 * 768 and found["unique"] == found["total"]
    assert re.search(r"lm_head → embed \(tied\) +0\n", shown("gpt2-small"))
    assert "tied" not in shown("llama3-8b") and report("llama3-8b")["parameters"]["untied"] == 8_030_261_248


def test_every_way_to_count_is_named_and_defined_where_it_differs():
    """124.44M, 123.65M without positions, 85.06M in layers and final norm; 163.04M with the head again."""
    text = shown("gpt2-small")
    for name, number, what in (
        ("untied", "163,037,184", "the head counted too"),
        ("non-embedding", "85,056,000", "layers and final norm"),
        ("nanoGPT's convention", "123,653,376", "no positions"),
    ):
        assert re.search(rf"^{name} +{number} ", text, re.M) and f"{name}: {what}" in text
    assert [one["count"] for one in report("llama3-8b")["counts"]] == [8_030_261_248, 6_979_588_096]


@pytest.mark.parametrize(
    ("model", "said", "gives"),
    [
        ("gpt2-small", "124M", [("total", "rounded")]),
        ("gpt2-small", "117M", []),  # the early published names were wrong
        ("gpt2-medium", "345M", []),
        ("gpt2-medium", "355M", [("total", "rounded")]),
        ("gpt2-large", "762M", []),
        ("gpt2-large", "774M", [("total", "rounded")]),
        ("gpt2-xl", "1.5B", [("non-embedding", "rounded"), ("total", "cut off")]),  # 1,475,561,600 and 1,557,611,200
        ("gpt2-xl", "1558M", [("total", "rounded")]),
        ("gpt2-small", "163M", [("untied", "rounded")]),
        ("gpt2-small", "85M", [("non-embedding", "rounded")]),
        ("gpt2-small", "123.65M", [("nanoGPT's convention", "rounded")]),
        ("gpt2-small", "0.12B", [("total", "rounded")]),
    ],
)
def test_which_count_gives_a_card_s_number(model, said, gives):
    [found] = report(model, "--card", said)["cards"]
    assert [(one["name"], one["how"]) for one in found["matches"]] == gives
    text = shown(model, "--card", said)
    assert f"{said}, as its card says:" in text
    assert ("no count of this model gives it" in text) == (not gives)


@pytest.mark.parametrize(
    ("model", "gives"),
    [
        ("llama2-7b", {"7b": [("total", "rounded")]}),  # 6,738,415,616
        ("llama3-70b", {"70b": [("total", "cut off")]}),  # 70,553,706,496 would round to 71
        ("llama3.1-405b", {"405b": [("total", "cut off")]}),  # 405,853,388,800
        ("qwen3-0.6b", {"0.6b": [("total", "rounded")]}),  # 596,049,920
        ("gemma-2b", {"2b": [("non-embedding", "rounded"), ("total", "cut off")]}),  # 1,981,884,416 and 2,506,172,416
        ("gemma3-270m", {"270m": [("total", "rounded")]}),  # 268,098,176, to ten millions
        ("gpt2-small", {}),
    ],
)
def test_which_count_gives_the_number_in_a_name(model, gives):
    found = {one["said"]: [(m["name"], m["how"]) for m in one["matches"]] for one in report(model)["cards"]}
    assert found == gives


def test_sizes_in_names():
    assert in_name("Mixtral-8x7B-v0.1") == ["8x7B"] and in_name("x-30B-A3B") == ["30B", "3B"]
    assert in_name("llama2-7b-4bit-gptq-16k") == ["7b"] and in_name("gpt2") == in_name("v1.5b2") == []
    assert in_name("x-123456789b") == in_name("x-1.2345b") == in_name("") == []


def mixture(name: str = "some-8x7b", **parts) -> Spec:
    """Eight experts, of which a token takes two, at published sizes: 46.7 billion parameters, 12.9 of them active."""
    experts = Experts(n_experts=8, top_k=2, size=14336, activation="silu")
    return replace(shipped("mistral-7b"), name=name, mlp=experts, **parts)


def test_experts_are_counted_whole_and_as_a_token_meets_them():
    """By hand: a router of 8 · 4096 and eight MLPs of 3 · 4096 · 14336 in each of 32 layers, in place of one MLP."""
    unit, dense = 3 * 4096 * 14336, 7_241_732_096
    total, active = dense + 32 * (7 * unit + 8 * 4096), dense + 32 * (unit + 8 * 4096)
    found = report("-c", written(mixture()))
    assert (found["parameters"]["total"], found["parameters"]["active"]) == (total, active)
    assert "active: what a token meets, 2 of 8 experts a layer" in shown("-c", "made.yaml")
    assert report("llama3-8b")["parameters"]["active"] == 8_030_261_248


def test_a_name_that_multiplies_counts_what_experts_share_again():
    """With one expert a layer it would count 7.24B: 8 x 7B is no 56B."""
    [found] = report("-c", written(mixture(), "some-8x7b.yaml"))["cards"]
    with_one = 7_241_732_096 + 32 * 8 * 4096
    assert found["matches"] == [{"name": "with one expert a layer", "count": with_one, "how": "rounded"}]
    text = shown("-c", "some-8x7b.yaml")
    assert "with one expert a layer 7.24B, rounded (what 8 experts share counts once)" in text
    assert "the total is 46.70B" in text
    assert explained("4x7B", "card", [], experts=8, with_one=with_one).matches == []


def test_layers_and_heads_are_the_config_s_word():
    """An MLP that is not 4 times the hidden size; heads wider than hidden size / heads: 2 · (4 + 2) · 6 a layer."""
    settings = {"model_type": "llama", "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    Path("config.json").write_text(json.dumps(settings))
    layer = 2 * 16 * (4 + 2) * 6 + 3 * 16 * 24 + 2 * 16
    assert report("-c", "config.json")["parameters"]["total"] == 2 * 67 * 16 + 2 * layer + 16


def test_rows_of_padding_are_parameters():
    assert report("-c", written(replace(GPT2, vocab_size=50304)))["parameters"]["total"] == 124_439_808 + 47 * 768


LLAMA = {
    "model_type": "llama",
    "vocab_size": 72,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
LLAMA_COUNT = 2 * 72 * 16 + 2 * (2 * 16 * (4 + 2) * 8 + 3 * 16 * 24 + 2 * 16) + 16


def toy(folder, config: dict, change=None):
    """A checkpoint of the library's, its tensors changed."""
    save_toy(config, folder)
    if change is not None:
        changed = change(load_file(folder / "model.safetensors"))
        save_file({name: x.contiguous() for name, x in changed.items()}, folder / "model.safetensors")
    return folder


def test_a_tied_head_that_the_file_keeps_as_well_is_stored_and_not_counted(folder):
    def with_head(tensors):
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    found = report(toy(folder / "m", LLAMA | {"tie_word_embeddings": True}, with_head))
    total = LLAMA_COUNT - 72 * 16
    assert found["parameters"]["total"] == found["parameters"]["unique"] == total
    assert found["parameters"]["stored"] == found["parameters"]["logical"] == total + 72 * 16
    assert found["file_bytes"] == 8 * (total + 72 * 16) and found["bytes"] == 8 * total
    text = shown(folder / "m")
    assert (
        "stored: the elements of the file's tensors" in text and f"{8 * (total + 72 * 16):,} bytes in the file" in text
    )


def test_buffers_are_no_parameters(folder):
    def with_buffers(tensors):
        return tensors | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in (0, 1)}

    found = report(toy(folder / "m", LLAMA, with_buffers))
    assert found["parameters"]["total"] == found["parameters"]["stored"] == LLAMA_COUNT
    assert "buffers, not counted: 2 (model.layers.0.self_attn.rotary_emb.inv_freq …)" in shown(folder / "m")


def in_4_bits(tensors):
    """Every matrix of a layer as GPTQ packs it: words of 32 bits hold eight numbers of what one output reads."""
    found = {}
    for name, x in tensors.items():
        if "layers" in name and x.ndim == 2:
            (out, into), stem = x.shape, name.removesuffix(".weight")
            found[f"{stem}.qweight"] = torch.zeros(into // 8, out, dtype=torch.int32)
            found[f"{stem}.qzeros"] = torch.zeros(1, out // 8, dtype=torch.int32)
            found[f"{stem}.scales"] = torch.ones(1, out, dtype=torch.float16)
        else:
            found[name] = x.half()
    return found


def test_packed_weights_are_counted_as_what_they_stand_for(folder):
    """By hand: an eighth as many words, and a scale and an eighth of a word for each output."""
    toy(folder / "m", LLAMA, in_4_bits)
    config = json.loads((folder / "m/config.json").read_text())
    said = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    (folder / "m/config.json").write_text(json.dumps(config | {"quantization_config": said}))
    matrices = 2 * [(32, 16), (16, 16), (16, 16), (16, 32), (24, 16), (24, 16), (16, 24)]
    packed, outputs = sum(map(prod, matrices)), sum(out for out, _ in matrices)
    ran = gptcli("params", folder / "m", "--json")
    assert ran.status == 0 and ran.err.startswith("note: quantised: GPTQ"), ran
    found = ran.json
    assert found["parameters"]["total"] == found["parameters"]["logical"] == LLAMA_COUNT
    plain = LLAMA_COUNT - packed
    assert found["parameters"]["stored"] == plain + packed // 8 + outputs + outputs // 8
    assert found["file_bytes"] == 2 * plain + packed // 2 + 2 * outputs + outputs // 2
    text = gptcli("params", folder / "m").out
    assert "GPTQ" in text and f"{8 * found['file_bytes'] / LLAMA_COUNT:.2f} bits a weight" in text


# FLOPs


def toy_weights(spec: Spec, dtype: torch.dtype = torch.float32) -> Weights:
    """Random weights, all made, so that making them costs nothing later."""
    params = list(layout(spec))
    lazy = random_weights(spec, params, 0, dtype, CPU)
    return Weights.of(params, {p.name: lazy[p.name] for p in params if not p.tied_to})


def request(spec: Spec, batch: int, tokens: int, source: int, rows: str) -> Inputs:
    def ids(length: int) -> torch.Tensor:
        return torch.arange(batch * length).view(batch, length) % spec.vocab_size

    read = Inputs(ids(source)) if spec.encoder is not None else None
    return Inputs(ids(tokens), source=read, rows=rows)


TOYS = {name: shrunk(shipped(name)) for name in ("gpt2-small", "llama3-8b", "bert-base", "transformer-2017-base")}
TOYS["narrow rows"] = replace(TOYS["gpt2-small"], embed_size=6)
TOYS["experts"] = replace(
    TOYS["llama3-8b"], mlp=Experts(n_experts=4, top_k=2, size=20, activation="silu", shared_size=12)
)


@pytest.mark.parametrize("name", TOYS)
def test_flops_of_full_attention_are_what_torch_counts_in_a_real_pass(name, monkeypatch):
    """torch counts its own matrix products, those of attention step by step, which masks what it has computed."""
    monkeypatch.setattr(kernels, "by_onednn", lambda: False)
    spec = TOYS[name]
    source = ["--source-len", 11] if spec.encoder is not None else []
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        forward(request(spec, 3, 9, 11, "all"), toy_weights(spec), spec)
    flops = report("-c", written(spec), "--seq-len", 9, "--batch", 3, *source)["costs"]["flops"]
    assert flops["total"][0]["full"] == counter.get_total_flops()
    parts = [part for part in flops["parts"] if part["name"] != "head, the last position"]
    assert sum(part["full"] for part in parts) == flops["total"][0]["full"]
    assert sum(part["share"] for part in parts) == pytest.approx(1)


@pytest.mark.parametrize("name", [name for name in TOYS if name != "bert-base"])
def test_a_next_token_costs_what_a_longer_text_costs_more(name):
    """With the cache, nothing is computed again: T + 1 tokens at once are T and one more."""
    spec = TOYS[name]
    source = ["--source-len", 5] if spec.encoder is not None else []
    runs = [report("-c", written(spec), "--seq-len", t, *source)["costs"]["flops"]["total"][0] for t in (7, 8)]
    assert runs[0]["next"] == runs[1]["masked"] - runs[0]["masked"]


def test_a_next_token_with_windows_by_hand():
    """3 layers of one head of 2 in a width of 2, windows of 3 in two: after 5 tokens a query sees 3, 6 and 3 keys."""
    base = shrunk(shipped("cats"))
    attention = replace(base.attention, n_heads=1, n_kv_heads=1)
    windowed = replace(base, n_layers=3, hidden_size=2, attention=replace(attention, window=3), mlp=NoMLP())
    spec = replace(windowed, variants=(Variant(layers=(1,), attention=attention),))
    parts = {part["name"]: part for part in report("-c", written(spec), "--seq-len", 5)["costs"]["flops"]["parts"]}
    assert parts["scores and values"]["next"] == 2 * 2 * 2 * (3 + 6 + 3)
    # 1 + 2 + 3 + 3 + 3 pairs in a window, 15 without; 25 if every query read every key.
    assert parts["scores and values"]["masked"] == 2 * 2 * 2 * (12 + 15 + 12)
    assert parts["scores and values"]["full"] == 2 * 2 * 2 * 3 * 25
    assert parts["attention projections"]["next"] == 2 * 3 * 4 * 4


def test_attention_makes_cost_grow_faster_than_the_text():
    """Only the pairs are more than doubled: 12 layers of 12 heads of 64, 4 FLOPs each."""
    one, two = (report("gpt2-small", "--seq-len", t)["costs"]["flops"]["total"][0] for t in (256, 512))
    assert two["full"] - 2 * one["full"] == 4 * 12 * 768 * (512**2 - 2 * 256**2)
    assert two["masked"] - 2 * one["masked"] == 4 * 12 * 768 * (512 * 513 // 2 - 256 * 257)


def test_the_look_up_costs_nothing_and_the_head_the_same_whether_tied_or_not():
    """The head is 2·V·C a position; a table twice as long costs as much more as the head alone."""
    untied = replace(GPT2, lm_head=replace(GPT2.lm_head, tied=False))
    costs = [
        report(*words, "--seq-len", 10, "--batch", 3)["costs"]["flops"]
        for words in (
            ["gpt2-small"],
            ["-c", written(untied)],
            ["-c", written(replace(GPT2, vocab_size=2 * 50257), "b")],
        )
    ]
    assert costs[0] == costs[1]
    heads = {part["name"]: part["full"] for part in costs[0]["parts"]}
    assert heads["head, all positions"] == 3 * 10 * 2 * 50257 * 768
    assert heads["head, the last position"] == 3 * 2 * 50257 * 768
    assert costs[2]["total"][0]["full"] - costs[0]["total"][0]["full"] == 3 * 10 * 2 * 50257 * 768


def test_where_the_head_is_and_what_is_counted_is_said():
    text = shown("gpt2-small", "--seq-len", 1024)
    assert "FLOPs of a forward pass · B = 1, T = 1,024 · 2 × multiply-adds of its matrix products" in text
    assert re.search(r"all, head on all positions +291,648,307,200 +272,339,828,736 .*100.00 %", text)
    assert re.search(r"all, head on the last position +212,678,075,904 ", text)
    assert "of full: of all, head on all positions" in text
    assert "of full" not in shown("gpt2-small", "--seq-len", 1024, columns=80)  # no note on a column that has no room
    assert "the context is full: the model itself has no place for a next token" in text
    assert "the context is full" not in shown("gpt2-small", "--seq-len", 1023)


def test_what_sees_both_ways_has_no_cache_and_no_next_token():
    found = report("bert-base", "--seq-len", 128)["costs"]
    assert found["cache"] is None and found["memory"]["cache"] == 0
    assert all(part["next"] is None for part in found["flops"]["parts"])
    assert all(part["full"] == part["masked"] for part in found["flops"]["parts"])
    text = shown("bert-base", "--seq-len", 128)
    assert "KV cache ·" not in text and "no step for a next token: attention that sees both ways keeps nothing" in text


# The cache


def test_the_cache_keeps_of_each_layer_what_it_reads_again():
    """By hand: 2 · 1 head · 256 · 2 bytes a position; 15 layers keep their latest 512, 3 keep all."""
    found = report("gemma3-270m", "--seq-len", 2048, "--dtype", "bf16", "--batch", 3)["costs"]["cache"]
    windowed, whole = found["layers"]
    assert windowed["layers"] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16] and whole["layers"] == [5, 11, 17]
    assert (windowed["kept"], windowed["each"], whole["each"]) == (512, 3 * 1024 * 512, 3 * 1024 * 2048)
    assert found["bytes"] == 15 * windowed["each"] + 3 * whole["each"]
    assert "1–5, 7–11, 13–17 window 512" in shown("gemma3-270m", "--seq-len", 2048)


def test_the_cache_of_cross_attention_is_the_source_s():
    """8 heads of 64 in each of 6 layers: 100 positions of the text and 30 of the source, keys and values, 4 bytes."""
    found = report("transformer-2017-base", "--seq-len", 100, "--source-len", 30)["costs"]
    assert found["cache"]["bytes"] == 6 * 2 * 512 * 4 * (100 + 30)
    assert [(one["cross"], one["kept"]) for one in found["cache"]["layers"]] == [(False, 100), (True, 30)]
    shapes = {one["name"]: one["shape"][1:] for one in found["matrices"]}
    expected = {"encoder": [8, 30, 30], "self-attention": [8, 100, 100], "cross-attention": [8, 100, 30]}
    assert shapes == expected and found["source_tokens"] == 30
    assert report("transformer-2017-base", "--seq-len", 100)["costs"]["source_tokens"] == 100


# Memory


def peak_of(run) -> int:
    """What torch's allocator holds for a run at most, beyond what it held before."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    events = (e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]")
    level = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        most = max(most, level)
    return most


@pytest.fixture
def one_thread():
    """Each thread of a kernel has scratch of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def larger(spec: Spec) -> Spec:
    """Toy sizes at which what is counted outweighs what is not."""
    attention = spec.attention
    kv_heads = 4 if attention.n_kv_heads == attention.n_heads else 2
    attention = replace(attention, n_heads=4, n_kv_heads=kv_heads, head_dim=32, window=attention.window and 64)
    mlp = replace(spec.mlp, size=512) if isinstance(spec.mlp, Dense) else spec.mlp
    return replace(
        spec,
        vocab_size=1024,
        context_length=512,
        hidden_size=128,
        n_layers=2,
        attention=attention,
        mlp=mlp,
        variants=(),
        encoder=spec.encoder and larger(spec.encoder),
        cross=spec.cross and replace(attention, causal=False, window=None),
    )


LARGER = {name: larger(shipped(name)) for name in ("gpt2-small", "llama3-8b", "transformer-2017-base")}
ROTARY, LEARNED = LARGER["llama3-8b"], LARGER["gpt2-small"]
NARROW = replace(ROTARY.mlp, size=64)
LARGER |= {
    "post": larger(shipped("bert-base")),
    "scores capped": replace(ROTARY, attention=replace(ROTARY.attention, softcap=50.0)),
    "logits scaled and capped": replace(ROTARY, lm_head=replace(ROTARY.lm_head, scale=0.5, softcap=30.0)),
    "logits capped": replace(ROTARY, lm_head=replace(ROTARY.lm_head, softcap=30.0)),
    "a window": replace(ROTARY, attention=replace(ROTARY.attention, window=64), mlp=NARROW),
    "sinks": replace(ROTARY, attention=replace(ROTARY.attention, sinks=True, n_heads=8), mlp=NARROW),
    "distances": replace(ROTARY, position=Relative(), mlp=NARROW),
    "experts, all taken": replace(ROTARY, mlp=Experts(n_experts=3, top_k=3, size=512, activation="silu")),
    "a shared expert": replace(ROTARY, mlp=Experts(n_experts=2, top_k=2, size=64, activation="silu", shared_size=512)),
    "in parallel": replace(LEARNED, residual="parallel"),
    "both sides normed": replace(ROTARY, norm=replace(ROTARY.norm, placement="sandwich")),
    "wide heads": replace(ROTARY, attention=replace(ROTARY.attention, head_dim=128, qk_norm="head"), mlp=NARROW),
    "part of a head turns": replace(ROTARY, position=Rope(rotary_dim=8), mlp=NARROW),
    "attention alone": replace(LEARNED, mlp=NoMLP()),
    "wide vectors": replace(
        LEARNED, attention=replace(LEARNED.attention, head_dim=4), mlp=replace(LEARNED.mlp, size=8)
    ),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rows", ["all", "last"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LARGER)
def test_activations_are_what_the_allocator_gave(name, dtype, rows):
    """Not below what a pass took by more than the kernels' own scratch (a tenth), nor above it by a sixth."""
    spec, tokens, batch, source = LARGER[name], 320, 2, 300
    weights = toy_weights(spec, getattr(torch, dtype))
    inputs = request(spec, batch, tokens, source, rows)

    def run() -> None:
        with torch.inference_mode():
            forward(inputs, weights, spec)

    read = ["--source-len", source] if spec.encoder is not None else []
    words = ["-c", written(spec), "--seq-len", tokens, "--batch", batch, "--dtype", dtype, *read]
    held = report(*words)["costs"]["memory"]
    one = held["activations"][0 if rows == "all" else 1]
    assert 0.9 * peak_of(run) <= one["bytes"] <= 1.16 * peak_of(run)
    assert sum(part["bytes"] for part in one["alive"]) == one["bytes"]
    assert one["sum"] == held["weights"] + held["cache"] + one["bytes"]


def test_an_expert_may_get_every_token():
    """So what is said holds, wherever the router sends them."""
    experts = Experts(n_experts=8, top_k=1, size=512, activation="silu")
    taken = [memory.peak(replace(ROTARY, mlp=replace(experts, top_k=k)), 64, "float32").bytes for k in (1, 8)]
    assert taken[0] == taken[1]


def small() -> Spec:
    """One layer of one head of 2 in a width of 2: no norm, no MLP, no positions, a tied head over 4 words."""
    base = shipped("cats")
    attention = replace(base.attention, n_heads=1, n_kv_heads=1)
    return replace(
        base,
        vocab_size=4,
        context_length=64,
        hidden_size=2,
        n_layers=1,
        position=shipped("attention-by-hand").position,
        norm=shipped("attention-by-hand").norm,
        attention=attention,
        mlp=NoMLP(),
        lm_head=replace(base.lm_head, tied=True),
    )


# By hand, in float32: 24 weights; a cache of 2 · 2 numbers a token; alive at the attention's output are the residual,
# q, k, v, the weighted values, the same with heads merged, and the output, 2 numbers a token each.
WEIGHTS, A_TOKEN = 24 * 4, 4 * 2 * 2 + 7 * 4 * 2


@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
@pytest.mark.parametrize("short", [0, 1])
def test_the_longest_text_by_hand(tokens, short):
    room = WEIGHTS + tokens * A_TOKEN - short
    last = report("-c", written(small()), "--memory", room)["costs"]["longest"][1]
    assert last["tokens"] == tokens - short and last["limit"] == "memory"
    assert last["bytes"] == WEIGHTS + max(tokens - short, 1) * A_TOKEN
    assert last["beyond"] == WEIGHTS + (tokens - short + 1) * A_TOKEN > room


def test_the_longest_text_ends_where_the_context_does():
    last = report("-c", written(small()), "--memory", "1GiB")["costs"]["longest"][1]
    assert (last["tokens"], last["limit"], last["beyond"]) == (64, "context", None)
    assert last["bytes"] == WEIGHTS + 64 * A_TOKEN
    assert re.search(
        r"head on the last position +64 +4,704 +the whole context", shown("-c", "made.yaml", "--memory", "1GiB")
    )


def test_where_even_one_token_does_not_fit():
    text = shown("llama3-8b", "--dtype", "bf16", "--memory", "8GiB")
    assert re.search(r"head on the last position +none +[\d,]+ +even T = 1 needs 6.97 GiB more", text)
    assert gptcli("params", "llama3-8b", "--memory", "8GiB", "-q").out == "0\n"


@pytest.mark.parametrize(
    "words", [["gemma3-270m", "--dtype", "bf16", "--batch", 2], ["transformer-2017-base"]], ids=str
)
@pytest.mark.parametrize("head", [0, 1])
def test_the_longest_text_fits_and_one_token_more_does_not(words, head):
    """By the sums of runs of that length; the source is as long as the text."""
    room = report(*words, "--seq-len", 300)["costs"]["memory"]["activations"][head]["sum"] + 1000
    found = report(*words, "--memory", room)["costs"]["longest"][head]
    runs = [report(*words, "--seq-len", found["tokens"] + more)["costs"]["memory"] for more in (0, 1)]
    sums = [run["activations"][head]["sum"] for run in runs]
    assert sums[0] == found["bytes"] <= room < sums[1] == found["beyond"]


def test_units_of_1024_and_of_1000():
    """24 · 1024³ and 24 · 1000³ bytes; exact bytes stand beside."""
    rooms = {
        "24GiB": 24 * 1024**3,
        "24GB": 24 * 1000**3,
        "1.5MiB": 1572864,
        "512 KiB": 524288,
        "7000": 7000,
        "7000B": 7000,
    }
    for said, room in rooms.items():
        assert report("cats", "--memory", said)["costs"]["longest"][0]["memory"] == room
    assert "longest text in 22.35 GiB · 24,000,000,000 bytes" in shown("gpt2-small", "--memory", "24GB")
    text = shown("gpt2-small", "--seq-len", 1024, "--dtype", "f16")
    assert "37,748,736\n" in text and " 36.00 MiB\n" in text and "248,879,616 bytes in float16" in text
    assert "GB" not in text


# Side by side


def test_models_side_by_side_are_the_reports_of_each():
    words = ["--seq-len", 64, "--dtype", "bf16", "--by", "layer"]
    names = ["gpt2-small", "llama3-8b", "transformer-2017-base"]
    found = report(*names, *words)
    assert found["schema"] == "gptcli.params.side/1" and found["columns"] == names
    for one, name in zip(found["models"], names):
        alone = report(name, *words)
        assert one == {key: alone[key] for key in one} and set(alone) - set(one) == {"schema", "status"}


def rows_of(found: dict, table: str) -> dict:
    [rows] = [one["rows"] for one in found["tables"] if one["name"] == table]
    return {row["name"]: (row["cells"], row["differs"]) for row in rows}


def test_side_by_side_by_component():
    """BERT's layers are GPT-2's sizes; it has no final norm, and other tables."""
    rows = rows_of(report("gpt2-small", "bert-base"), "weights")
    assert rows["layers"] == ([85_054_464] * 2, [False, False])
    assert rows["embed"] == ([38_597_376, 30522 * 768], [False, True])
    assert rows["final_norm"] == ([1536, None], [False, True])
    assert rows["segment_embed"] == ([None, 1536], [False, True])
    names = list(rows)
    assert names.index("pos_embed") < names.index("segment_embed") < names.index("layers") < names.index("attention")
    counts = rows_of(report("gpt2-small", "llama3-8b"), "counts")
    assert counts["untied"][0] == [163_037_184, 8_030_261_248]


def test_side_by_side_by_layer():
    """Layers that are alike in every model are one row, with what one of them counts."""
    rows = rows_of(report("gpt2-small", "gpt2-medium", "--by", "layer"), "weights")
    assert rows["layers 1–12, each"][0] == [7_087_872, 12_596_224]
    assert rows["layers 13–24, each"][0] == [None, 12_596_224]
    every = rows_of(report("gpt2-small", "gpt2-medium", "--by", "layer", "--full"), "weights")
    assert every["layer 24"][0] == [None, 12_596_224] and len(every) == 24 + 4


def test_side_by_side_by_tensor():
    found = report("gpt2-small", "transformer-2017-base", "--by", "tensor")
    rows = rows_of(found, "weights")
    assert rows["layers.#.mlp.up.weight"][0] == ["12 × [3072,768]", "6 × [2048,512]"]
    assert rows["encoder.layers.#.attn.q.weight"][0] == [None, "6 × [512,512]"]
    assert rows["lm_head.weight"] == (["→ embed (tied)"] * 2, [False, False])
    mixed = rows_of(report("gemma-2b", written(mixture()), "--by", "tensor"), "weights")
    assert mixed["layers.#.mlp.experts.@.up.weight"][0] == [None, "256 × [14336,4096]"]


def test_side_by_side_costs():
    found = report("gpt2-small", "llama3-8b", "--seq-len", 512, "--memory", "40GiB")
    alone = [report(name, "--seq-len", 512, "--memory", "40GiB")["costs"] for name in ("gpt2-small", "llama3-8b")]
    full = rows_of(found, "FLOPs, full attention")
    assert full["mlp"][0] == [c["flops"]["parts"][2]["full"] for c in alone]
    assert full["all, head on the last position"][0] == [c["flops"]["total"][1]["full"] for c in alone]
    assert rows_of(found, "memory")["KV cache"][0] == [c["cache"]["bytes"] for c in alone]
    assert rows_of(found, "longest text")["head on all positions"][0] == [c["longest"][0]["tokens"] for c in alone]


def test_what_differs_is_marked_by_a_sign_as_well_as_by_colour():
    text = shown("gpt2-small", "bert-base")
    assert "* marks what is not as in the first" in text
    assert re.search(r"^layers +85,054,464 +85,054,464$", text, re.M)
    assert re.search(r"^embed +38,597,376 +23,440,896\*$", text, re.M)
    assert re.search(r"^final_norm +1,536 +–\*$", text, re.M)
    colored = shown("gpt2-small", "bert-base", "--color", "always")
    lines = {line.partition(" ")[0]: line for line in colored.splitlines()}
    assert "\x1b[33m23,440,896*" in lines["embed"] and "\x1b[33m" not in lines["layers"]


def test_models_called_alike_are_told_apart(folder):
    for name in "ab":
        (folder / name).mkdir()
        written(GPT2, f"{name}/same.yaml")
    found = report("a/same.yaml", "b/same.yaml", "gpt2-small", "gpt2-small")
    assert len(set(found["columns"])) == 4
    assert not any(any(row["differs"]) for table in found["tables"] for row in table["rows"])


FOUR = ["gpt2-small", "llama3-8b", "transformer-2017-big", "llama3.1-405b"]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("by", ["component", "layer", "tensor"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_it_fits_the_terminal(number, by, columns):
    words = [*FOUR[:number], "--by", by, "--seq-len", 100, "--memory", "24GiB", "--card", "1B"]
    text = shown(*words, columns=columns, NO_COLOR="1")
    assert max(cell_len(line) for line in text.splitlines()) <= columns
    for name in FOUR[:number]:
        assert name in text
    if number > 1:  # nothing is lost where it is too wide for columns
        assert f"{report(FOUR[1])['parameters']['total']:,}*" in text


@pytest.mark.parametrize("words", [["llama3.1-405b"], ["bert-base"], ["gemma3-270m"], ["mistral-7b"], FOUR], ids=len)
def test_costs_in_a_pipe_and_in_ascii(words):
    words = [*words, "--seq-len", 200, "--memory", "24GiB"]
    text = shown(*words)
    assert "\x1b" not in text and all(line == line.rstrip() for line in text.splitlines())
    plain = shown(*words, encoding="ascii")
    assert plain.isascii() and "\\u" not in plain and "?" not in plain
    assert text == shown(*words, columns=1000, NO_COLOR="1")


def test_quiet_prints_the_values():
    assert shown("gpt2-small", "llama3-8b", "-q") == "124439808\n8030261248\n"
    assert shown("gpt2-small", "--seq-len", 5, "-q") == "124439808\n"
    assert shown("gpt2-small", "--memory", "24GiB", "-q") == "1024\n"


# What is named


def test_a_config_in_the_working_directory_comes_before_what_ships(folder):
    """As for -c; and before a shipped sample of that name."""
    for name in ("gpt2-small", "cats"):
        written(replace(small(), vocab_size=5), f"{name}.yaml")
        for words in ([name], ["-m", name], ["-c", name], [f"{name}.yaml"]):
            found = report(*words)
            assert found["parameters"]["total"] == 26 and found["model"]["source"] == f"{name}.yaml"
    (folder / "gpt2-small.yaml").unlink()
    assert report("gpt2-small")["parameters"]["total"] == 124_439_808


def test_a_config_json_alone_is_enough(folder):
    (folder / "some").mkdir()
    (folder / "some/config.json").write_text(json.dumps(LLAMA))
    for words in (["-c", "some/config.json"], ["some/config.json"], ["-m", "some/config.json"]):
        found = report(*words)
        assert found["parameters"]["total"] == LLAMA_COUNT
        assert (found["model"]["name"], found["model"]["weights"]) == ("some", "random")
    both = report("some/config.json", "gpt2-small")
    assert [one["parameters"]["total"] for one in both["models"]] == [LLAMA_COUNT, 124_439_808]
    ran = gptcli("forward", "-c", "some/config.json", "--ids", "1,2,3", "--json")
    assert ran.status == 0 and ran.json["model"]["seed"] == 0
    (folder / "some/config.json").write_text(json.dumps(LLAMA | {"sparkle": 1}))
    ran = gptcli("params", "-c", "some/config.json")
    assert ran.status == 0 and "unknown keys, not used: sparkle" in ran.err
    assert "sparkle" in refused("-c", "some/config.json", "--strict")
    (folder / "some/config.json").write_text('{"model_type": "sparkle"}')
    assert "model_type 'sparkle' is not implemented" in refused("-c", "some/config.json")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gpt2-small", "--seq-len", "1025"], ["--seq-len 1,025", "the context of 1,024", "gpt2-small"]),
        (["gpt2-small", "llama3-8b", "--seq-len", "5000"], ["5,000", "gpt2-small"]),
        (["gpt2-small", "--seq-len", "0"], ["0", "--seq-len"]),
        (["gpt2-small", "--seq-len", "many"], ["many", "--seq-len"]),
        (["gpt2-small", "--seq-len", "5", "--source-len", "5"], ["--source-len 5", "has no encoder"]),
        (["transformer-2017-base", "--seq-len", "5", "--source-len", "513"], ["--source-len 513", "512"]),
        (["gpt2-small", "--batch", "2"], ["--batch", "--seq-len T, or --memory SIZE"]),
        (["gpt2-small", "--source-len", "2"], ["--source-len", "--seq-len"]),
        (["gpt2-small", "--memory", "24G"], ["--memory 24G", "24GiB is 24 × 1024³ bytes"]),
        (["gpt2-small", "--memory", "-1"], ["--memory"]),
        (["gpt2-small", "--memory", "1e9"], ["1e9"]),
        (["gpt2-small", "--memory", "24iB"], ["24iB"]),
        (["gpt2-small", "--card", "many"], ["--card many", "124M"]),
        (["gpt2-small", "--card", ""], ["--card"]),
        (["gpt2-small", "llama3-8b", "-c", "cats"], ["-c cats", "several models"]),
        (["gpt2-small", "-m", "llama3-8b"], ["two models"]),
        (["gpt2-small", "nothing-here"], ["nothing-here"]),
        (["gpt2-small", "llama3-8b", "--dtype", "int4"], ["int4"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_can_t_be_asked_is_said_in_one_line(words, says):
    said = refused(*words)
    assert all(one in said for one in says), said


def test_notes_say_which_model_they_are_of(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"sparkle": 1}))
    ran = gptcli("params", "gpt2-small", "config.json")
    assert ran.status == 0 and ran.err.startswith(f"note: {folder.name} (config.json): ")


def test_nothing_heavy_is_loaded(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for words in (
        ["params", "gpt2-small", "config.json", "--seq-len", "32", "--memory", "24GiB"],
        ["params", "-c", "config.json", "--by", "tensor", "--card", "1M"],
    ):
        code = (
            "import sys\n"
            "from gptcli.cli.main import main\n"
            f"sys.argv = ['gptcli', *{words!r}]\n"
            "status = main()\n"
            f"print(sorted({HEAVY!r} & set(sys.modules)), status, file=sys.stderr)\n"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert ran.stdout and ran.stderr == "[] 0\n"


def test_layers_that_are_alike_are_told_by_their_indices():
    """By turns; and where two variants name one layer, the first of them counts, as it does in the forward pass."""
    found = [(here.attention.window, layers) for here, layers in count.kinds(shipped("gemma3-270m"))]
    assert found == [(512, (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16)), (None, (5, 11, 17))]
    assert [layers for _, layers in count.kinds(GPT2)] == [tuple(range(12))]
    twice = [
        Variant(layers=layers, attention=replace(GPT2.attention, window=w)) for layers, w in (((2, 3), 5), ((1, 2), 7))
    ]
    spec = replace(GPT2, variants=tuple(twice))
    found = {i: here for here, layers in count.kinds(spec) for i in layers}
    assert found == {i: spec.at(i) for i in range(12)}
    assert [found[i].attention.window for i in range(5)] == [None, 7, 5, 5, None]
