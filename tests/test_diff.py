"""`diff`: where two sides part, how far, and whether it is a bug or rounding."""

import json
import math
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import gptcli
from gptcli.diff.lockstep import abreast, common, together
from gptcli.diff.sides import kind_of
from gptcli.errors import GptcliError
from gptcli.layout import layout
from gptcli.model import gaps
from gptcli.report.diff import diff_report
from gptcli.run import Run
from gptcli.source import open_model
from gptcli.spec import Variant, to_dict
from gptcli.trace import SILENT, Recorder, points
from tests import packed_toys
from tests.command import gptcli as run
from tests.converted import convert, exact_toy
from tests.oracle import save_toy
from tests.test_layouts import copy, nanogpt_state, shards_of
from tests.test_trace_families import TOYS, auto

LLAMA = {
    "model_type": "llama", "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 67, "n_positions": 64, "n_embd": 16, "n_layer": 3, "n_head": 4,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu",
}  # fmt: skip
IDS = list(range(3, 63, 3))
FED = ("--ids", ",".join(map(str, IDS)))


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("toys")
    for config in (LLAMA, GPT2):
        exact_toy(config, made / config["model_type"])
    return made


def changed(folder: Path, to: Path, change=lambda tensors: None, **config) -> Path:
    """A copy with other tensors, or other words in its config.json."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, to / "model.safetensors", {"format": "pt"})
    told = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(told))
    return to


def plus(name: str, amount: float = 0.5, row: int = 5):
    """Adds to the third number of a tensor's row."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][row, 2] += amount

    return change


def of(folder: Path | str, ids: list[int] = IDS, dtype: str = "auto", **more) -> Run:
    return Run(open_model(str(folder)), [ids], dtype, **more)


def kept(side: Run, dtype: str = "float64") -> dict[str, numpy.ndarray]:
    """Everything of a run, as numpy has it."""
    recorder = Recorder("*")
    side.forward("all", recorder)
    return {path: x.to(getattr(torch, dtype)).numpy() for path, x in recorder.kept.items()}


# What is the same.


def test_a_checkpoint_beside_its_copy(toys, tmp_path):
    ran = run("diff", toys / "llama", shutil.copytree(toys / "llama", tmp_path / "copy"), *FED)
    assert ran.status == 0 and ran.out.startswith("identical: ")
    assert ran.out.endswith("51 agree\n")  # 3 layers of 16, embed, final_norm, logits
    found = run("diff", toys / "llama", tmp_path / "copy", *FED, "--json").json
    assert (found["schema"], found["status"], found["verdict"]) == ("gptcli.diff/1", "ok", "identical")
    assert found["parted"] is None and found["logits"] is None and found["causes"] == []
    assert all(one["agrees"] and one["max_abs"] == one["relative"] == 0 for one in found["activations"])


def own_directory(folder: Path, to: Path) -> Path:
    """The same model by this project's names, described by its YAML."""
    model, to = open_model(str(folder)), to / "own"
    to.mkdir()
    weights = model.weights(torch.float32, torch.device("cpu"))
    save_file(
        {p.name: weights[p.name].contiguous().clone() for p in layout(model.spec) if not p.tied_to},
        to / "model.safetensors",
    )
    (to / "config.yaml").write_text(json.dumps(to_dict(model.spec)))
    return to


def sharded(folder: Path, to: Path) -> Path:
    to, tensors = copy(folder, to / "shards"), load_file(folder / "model.safetensors")
    for i, shard in enumerate(shards_of(tensors, 3)):
        save_file(shard, to / f"model-{i}.safetensors", {"format": "pt"})
    table = {name: f"model-{i}.safetensors" for i, shard in enumerate(shards_of(tensors, 3)) for name in shard}
    (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return to


def wrapped(folder: Path, to: Path) -> Path:
    to, tensors = copy(folder, to / "wrapped"), load_file(folder / "model.safetensors")
    torch.save({f"module.{name}": x for name, x in tensors.items()}, to / "pytorch_model.bin")
    return to


def nanogpt(folder: Path, to: Path) -> Path:
    settings = {"n_layer": 3, "n_head": 4, "n_embd": 16, "block_size": 64, "bias": True, "vocab_size": 67}
    torch.save({"model": nanogpt_state(folder, ""), "model_args": settings}, to / "ckpt.pt")
    return to / "ckpt.pt"


FORMATS = {
    "shards": sharded,
    "wrapped": wrapped,
    "own": own_directory,
    "gguf": lambda folder, to: convert(folder, to / "toy.gguf"),
    "nanogpt": nanogpt,
}
CASES = [(kind, name) for kind in ("llama", "gpt2") for name in FORMATS if (kind, name) != ("llama", "nanogpt")]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_one_model_in_every_format(toys, tmp_path, kind, name):
    folder = toys / kind
    if (kind, name) == ("gpt2", "gguf"):  # which knows the other form of GELU alone
        folder = changed(folder, tmp_path / "tanh", activation_function="gelu_new")
    other = FORMATS[name](folder, tmp_path)
    for sides in ((folder, other), (other, folder)):
        found = run("diff", *sides, *FED, "--json").json
        assert found["verdict"] in ("identical", "rounding"), found["said"]
        assert found["causes"] == [] and found["parted"] is None and found["told"] == []


# What is rounding.


@pytest.mark.parametrize("dtypes", [("f32", "bf16"), ("f16", "bf16"), ("f64", "f32"), ("bf16", "f64")])
def test_two_types_of_one_checkpoint_differ_by_rounding(toys, dtypes):
    a, b = dtypes
    ran = run("diff", toys / "llama", toys / "llama", *FED, "--dtype", a, "--dtype-b", b, "--json")
    found = ran.json
    assert ran.status == 0 and found["verdict"] == "rounding" and found["by"] == "float64"
    assert [found[side]["dtype"] for side in "ab"] != [found["a"]["dtype"]] * 2
    assert found["logits"]["kl_nats_max"] > 0
    # No two sides can lie further apart than both from their common exact value.
    for one in found["activations"]:
        assert one["agrees"] and one["relative"] <= one["expected"] * 1.01 + 1e-15


@pytest.mark.parametrize("kept_in", ["bfloat16", "float16"])
def test_weights_that_are_the_other_s_rounded_are_named(toys, tmp_path, kept_in):
    def narrow(tensors):
        tensors |= {name: (x * 1.001).to(getattr(torch, kept_in)) for name, x in tensors.items()}

    def finer(tensors):
        tensors |= {name: x * 1.001 for name, x in tensors.items()}

    fine, coarse = (
        changed(toys / "llama", tmp_path / "fine", finer),
        changed(toys / "llama", tmp_path / "coarse", narrow),
    )
    found = run("diff", fine, coarse, *FED, "--json").json
    assert found["verdict"] == "rounding"
    assert found["told"] == [f"B's weights are A's in {kept_in}: the exact values are the finer ones"]
    # The types of the runs don't matter: what is stored does.
    found = run("diff", coarse, fine, *FED, "--dtype", "f32", "--json").json
    assert found["verdict"] == "rounding"
    assert found["told"] == [f"A's weights are B's in {kept_in}: the exact values are the finer ones"]
    # A weight that isn't the other's rounded is no rounding.
    worse = changed(coarse, tmp_path / "worse", plus("model.layers.1.mlp.up_proj.weight"))
    found = run("diff", fine, worse, *FED, "--json").json
    assert found["parted"]["path"] == "layers.1.mlp.up" and found["parted"]["bug"] and found["told"] == []


def test_weights_that_have_gone_through_a_narrower_type_are_named(toys, tmp_path):
    """Saved in float32 on both sides. Of numbers that fit bfloat16 on both sides, one changed tensor is no rounding."""

    def through(tensors):
        tensors |= {name: x.bfloat16().float() for name, x in tensors.items()}

    def finer(tensors):
        tensors |= {name: x * 1.001 for name, x in tensors.items()}

    def touched(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"] *= 1.00024

    def flipped(tensors):
        bits = tensors["model.layers.1.mlp.down_proj.weight"].view(torch.int32)
        bits[3, 2] ^= 1 << 10

    fine = changed(toys / "llama", tmp_path / "fine", finer)
    coarse = changed(fine, tmp_path / "coarse", through)
    for sides, letters in (((fine, coarse), "BA"), ((coarse, fine), "AB")):
        ran = run("diff", *sides, *FED, "--json")
        told = f"{letters[0]}'s weights are {letters[1]}'s in bfloat16: the exact values are the finer ones"
        assert (ran.status, ran.json["verdict"], ran.json["told"]) == (0, "rounding", [told])
        ran = run("diff", *sides, "--weights", "-q")
        assert (ran.status, ran.out) == (0, f"{letters[0]}'s weights are {letters[1]}'s in bfloat16 (rounded)\n")
    for name, change, path in (("t", touched, "layers.1.mlp.up"), ("f", flipped, "layers.1.mlp_out")):
        other = changed(coarse, tmp_path / name, change)
        ran = run("diff", coarse, other, *FED, "--json")
        assert (ran.status, ran.json["parted"]["path"], ran.json["parted"]["bug"]) == (1, path, True)
        ran = run("diff", coarse, other, "--weights", "-q")
        assert ran.status == 1 and "only layers.1.mlp." in ran.out


def test_each_rounds_to_the_type_that_it_stores(toys, tmp_path):
    """Numbers of bfloat16 below 2^-14 are rounded again in float16, whose steps there are 2^-24 wide."""

    def kept_in(dtype):
        def change(tensors):
            tensors |= {name: (x * 2**-16).bfloat16().to(dtype) for name, x in tensors.items() if "norm" not in name}

        return change

    a, b = (changed(toys / "llama", tmp_path / word, kept_in(getattr(torch, word))) for word in ("bfloat16", "float16"))
    for sides, letters in (((a, b), "BA"), ((b, a), "AB")):
        found = run("diff", *sides, *FED, "--dtype", "f32", "--json").json
        told = f"{letters[0]}'s weights are {letters[1]}'s in float16: the exact values are the finer ones"
        assert (found["verdict"], found["told"]) == ("rounding", [told])


def test_a_quantised_side(tmp_path):
    """Beside what its numbers are in float32: the same; beside the original: where that is felt first, and no bug."""
    toy, plain = packed_toys.save(tmp_path / "fp8", "fp8-row"), tmp_path / "plain"
    save_toy(toy.config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", plain)
    save_file({name: x.float().contiguous() for name, x in toy.plain.items()}, plain / "model.safetensors")
    fed = ("--ids", "1,2,3,4,5", "--dtype", "f32", "--json")
    assert run("diff", tmp_path / "fp8", plain, *fed).json["verdict"] in ("identical", "rounding")
    found = run("diff", plain, tmp_path / "fp8", *fed, "--dtype-b", "bf16").json
    assert (found["verdict"], found["causes"]) == ("rounding", [])

    def only_rounded(tensors):
        tensors |= {name: x.bfloat16() for name, x in tensors.items()}

    ran = run("diff", changed(tmp_path / "whole", tmp_path / "half", only_rounded), tmp_path / "fp8", *fed)
    found = ran.json
    assert ran.status == 1 and found["said"].startswith("parted at layers.0.attn.q: quantised otherwise")
    assert found["causes"][0]["code"] == "quantised" and "A's weights are not" in found["causes"][0]["said"]


# What is a bug.

PLANTED = {
    # a tensor: the first activation that it makes, the last before, the channel that its sixth row makes
    "model.embed_tokens.weight": ("embed", None, 2),
    "model.layers.0.self_attn.k_proj.weight": ("layers.0.attn.k", "layers.0.attn.q", 1),
    "model.layers.1.self_attn.v_proj.weight": ("layers.1.attn.v", "layers.1.attn.k", 1),
    "model.layers.1.self_attn.o_proj.weight": ("layers.1.attn_out", "layers.1.attn.z", 5),
    "model.layers.2.mlp.gate_proj.weight": ("layers.2.mlp.gate", "layers.2.mlp.up", 5),
    "model.layers.2.mlp.down_proj.weight": ("layers.2.mlp_out", "layers.2.mlp.act", 5),
    "lm_head.weight": ("logits", "final_norm", 5),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_changed_weight_is_found_where_it_works(toys, tmp_path, name):
    path, last, channel = PLANTED[name]
    row = IDS[4] if name.startswith("model.embed") else 5
    other = changed(toys / "llama", tmp_path / "other", plus(name, row=row))
    ran = run("diff", toys / "llama", other, *FED, "--json")
    found, parted = ran.json, ran.json["parted"]
    assert ran.status == 1 and found["status"] == "findings" and found["verdict"] == "parted"
    assert (parted["path"], parted["last_agreed"], parted["bug"]) == (path, last, True)
    assert found["findings"][0]["code"] == "parted" and found["findings"][0]["path"] == path
    # Two numbers of a row of 4 (D) make the third of their head: row 5 is number 1 of head 1.
    worst, a, b = parted["worst"], kept(of(toys / "llama").exact()), kept(of(other).exact())
    gap = numpy.abs(a[path] - b[path])
    index = numpy.unravel_index(gap.argmax(), gap.shape)
    assert worst["channel"] == index[-1] == channel
    assert worst["position"] == index[-2] and worst["id"] == IDS[worst["position"]]
    assert worst["head"] == (index[1] if gap.ndim == 4 else None)
    assert (worst["a"], worst["b"]) == (a[path][index], b[path][index])
    order = [one["path"] for one in found["activations"]]
    assert all(one["agrees"] for one in found["activations"][: order.index(path)])
    assert not found["activations"][order.index(path)]["agrees"]


def test_the_three_numbers_are_numpy_s_own(toys, tmp_path):
    """exact: between the two in float64; expected: each from its own float64, added; seen: as they ran."""
    other = changed(toys / "llama", tmp_path / "other", plus("model.layers.1.mlp.up_proj.weight"))
    found = run("diff", toys / "llama", other, *FED, "--dtype-b", "bf16", "--json").json
    path, parted = "layers.1.mlp.up", found["parted"]
    assert parted["path"] == path
    a, b = kept(of(toys / "llama")), kept(of(other, dtype="bf16"))
    wide_a, wide_b = kept(of(toys / "llama", dtype="f64")), kept(of(other, dtype="f64"))

    def numbers(x: numpy.ndarray, y: numpy.ndarray) -> list[float]:
        gap, rows = numpy.abs(x - y), numpy.maximum(numpy.abs(x).max(-1), 1e-3 * numpy.abs(x).max())
        return [gap.max(), numpy.linalg.norm(x - y) / numpy.linalg.norm(x), (gap.max(-1) / rows).max()]

    def told(name: str) -> list[float]:
        return [parted[name][word] for word in ("max_abs", "relative", "deviation")]

    close = {"rel": 1e-9, "abs": 0}
    assert told("exact") == pytest.approx(numbers(wide_a[path], wide_b[path]), **close)
    assert told("seen") == pytest.approx(numbers(a[path], b[path]), **close)
    summed = numpy.add(numbers(a[path], wide_a[path]), numbers(b[path], wide_b[path]))
    assert told("expected") == pytest.approx(list(summed), **close)
    flat_a, flat_b = a[path].ravel(), b[path].ravel()
    cosine = flat_a @ flat_b / numpy.linalg.norm(flat_a) / numpy.linalg.norm(flat_b)
    assert parted["seen"]["cosine"] == pytest.approx(cosine, abs=1e-12)
    table = {one["path"]: one for one in found["activations"]}
    for path in ("embed", "layers.0.attn.z", "layers.1.mlp.up", "layers.2.attn_out", "logits"):
        most, relative, _ = numbers(a[path], b[path])
        assert (table[path]["max_abs"], table[path]["relative"]) == pytest.approx((most, relative), **close)
    assert table["logits"]["expected"] is None  # behind the layer where they part nothing is measured


def test_what_becomes_of_the_logits_is_torch_s_own(toys, tmp_path):
    other = changed(toys / "llama", tmp_path / "other", plus("model.layers.1.mlp.up_proj.weight", 3.0))
    found = run("diff", toys / "llama", other, *FED, "--json").json["logits"]
    a, b = (of(side).forward("all")[0].double() for side in (toys / "llama", other))
    kl = torch.nn.functional.kl_div(b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    assert found["kl_nats_mean"] == pytest.approx(float(kl.mean()), rel=1e-9)
    assert found["kl_nats_max"] == pytest.approx(float(kl.max()), rel=1e-9)
    assert found["position"] == int(kl.argmax()) and found["id"] == IDS[found["position"]]
    assert (found["positions"], found["same_first"]) == (20, int((a.argmax(-1) == b.argmax(-1)).sum()))
    shared = [len(set(x.topk(10).indices.tolist()) & set(y.topk(10).indices.tolist())) for x, y in zip(a, b)]
    assert found["top_k"] == 10 and found["top_k_shared"] == pytest.approx(sum(shared) / 200)
    x, y = a[found["position"]], b[found["position"]]
    best = set(x.topk(5).indices.tolist()) | set(y.topk(5).indices.tolist())
    assert {one["id"] for one in found["ranks"]} == best
    for one in found["ranks"]:
        for side, logits in (("a", x), ("b", y)):
            order = logits.argsort(descending=True).tolist()
            assert one[f"rank_{side}"] == order.index(one["id"]) + 1
            assert one[f"logit_{side}"] == float(logits[one["id"]])
    assert [one["rank_a"] for one in found["ranks"]] == sorted(one["rank_a"] for one in found["ranks"])


def test_a_fault_below_the_rounding_of_float32_is_a_bug(toys, tmp_path):
    other = changed(toys / "llama", tmp_path / "other", rms_norm_eps=1e-5 * (1 + 2e-4))
    found = run("diff", toys / "llama", other, *FED, "--json").json
    parted = found["parted"]
    assert (parted["path"], parted["last_agreed"], parted["bug"]) == ("layers.0.attn_norm", "layers.0.resid_pre", True)
    assert parted["exact"]["deviation"] < parted["expected"]["deviation"]
    assert found["logits"]["kl_nats_max"] < 1e-9


def test_a_fault_that_the_types_of_the_runs_hide_is_found_before_one_that_they_show(toys, tmp_path):
    def hidden(tensors):
        q = tensors["model.layers.0.self_attn.q_proj.weight"]
        q.copy_(q.bfloat16().float() * (1 + 1e-5))

    def shown(tensors):
        hidden(tensors)
        tensors["model.layers.1.mlp.down_proj.weight"][5, 2] += 0.5

    def plain(tensors):
        q = tensors["model.layers.0.self_attn.q_proj.weight"]
        q.copy_(q.bfloat16().float())

    a, b = changed(toys / "llama", tmp_path / "a", plain), changed(toys / "llama", tmp_path / "b", shown)
    found = run("diff", a, b, *FED, "--dtype", "bf16", "--json").json
    table = {one["path"]: one for one in found["activations"]}
    assert table["layers.0.attn.q"]["max_abs"] == 0 and table["layers.1.mlp_out"]["max_abs"] > 0
    assert (found["parted"]["path"], found["parted"]["last_agreed"]) == ("layers.0.attn.q", "layers.0.attn_norm")
    assert found["parted"]["bug"] and not table["layers.0.attn.q"]["agrees"]


def test_a_nan_on_one_side(toys, tmp_path):
    other = changed(toys / "llama", tmp_path / "other", plus("model.layers.1.self_attn.o_proj.weight", math.nan))
    ran = run("diff", toys / "llama", other, *FED, "--json")
    parted = ran.json["parted"]
    assert ran.status == 1 and (parted["path"], parted["bug"]) == ("layers.1.attn_out", True)
    assert parted["seen"]["max_abs"] is None  # infinite, which JSON has no word for
    assert parted["worst"]["channel"] == 5 and parted["worst"]["b"] is None
    [cause] = ran.json["causes"]
    assert cause["code"] == "not-finite" and "layers.1.attn.o.weight[5, 2] is NaN" in cause["said"]
    # NaN in the same places is the same, and a finding.
    ran = run("diff", other, other, *FED, "-q")
    assert ran.status == 1 and ran.out.startswith("identical")
    assert "from layers.1.attn_out on there is NaN or Inf on both sides (20 numbers)" in ran.out  # one a position
    assert "A's layers.1.attn.o.weight holds 1 number" in run("diff", other, other, "--weights", "-q").out
    table = run("diff", toys / "llama", other, *FED).out.splitlines()
    assert all("1.000000" not in line for line in table if "∞" in line)


def test_what_one_type_does_not_hold_is_no_bug(toys, tmp_path):
    """65,504 is the largest number of float16; up · silu(gate) is beyond, and no weight is."""

    def large(tensors):
        for word in ("up", "gate"):
            tensors[f"model.layers.1.mlp.{word}_proj.weight"] *= 2000

    large = changed(toys / "llama", tmp_path / "large", large)
    ran = run("diff", large, large, *FED, "--dtype-b", "f16", "--json")
    parted, [cause] = ran.json["parted"], ran.json["causes"]
    assert ran.status == 1 and (parted["path"], parted["bug"]) == ("layers.1.mlp.act", False)
    assert parted["exact"]["max_abs"] == 0
    assert cause["code"] == "not-finite" and "--dtype f32" in cause["mend"]


def test_what_no_tensor_of_the_pass_holds_is_looked_into(toys, tmp_path):
    """Another scale of the scores: q and k are the same, z is not, and the scores between them say so."""
    model = open_model(str(toys / "llama"))
    model.spec = replace(model.spec, attention=replace(model.spec.attention, scale=0.4))
    report = diff_report(of(toys / "llama"), Run(model, [IDS]))
    assert (report.parted.path, report.parted.last_agreed) == ("layers.0.attn.scores", "layers.0.attn.k_rot")
    # Where types differ, the first bits that differ say nothing of the place.
    spec = open_model(str(toys / "llama")).spec
    model.spec = replace(spec, variants=(Variant(layers=(1,), attention=replace(spec.attention, scale=0.4)),))
    report = diff_report(of(toys / "llama"), Run(model, [IDS], "bf16"))
    assert (report.parted.path, report.parted.last_agreed) == ("layers.1.attn.scores", "layers.1.attn.k_rot")
    assert report.parted.bug


# What can't be the same.


def test_a_padded_vocabulary_is_compared_in_what_both_have(toys, tmp_path):
    def pad(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat((tensors[name], torch.ones(5, 16)))

    padded = changed(toys / "llama", tmp_path / "padded", pad, vocab_size=72)
    found = run("diff", toys / "llama", padded, *FED, "--json").json
    assert found["verdict"] in ("identical", "rounding")
    assert found["told"] == ["67 ids in A and 72 in B: the first 67 are compared"]


def test_fewer_layers_are_compared_as_far_as_they_go(toys, tmp_path):
    def cut(tensors):
        for name in [name for name in tensors if ".layers.2." in name]:
            del tensors[name]

    short = changed(toys / "llama", tmp_path / "short", cut, num_hidden_layers=2)
    ran = run("diff", short, toys / "llama", *FED, "--json")
    found = ran.json
    assert ran.status == 1 and found["told"] == ["2 layers in A and 3 in B: the first 2 are compared"]
    assert found["parted"]["last_agreed"] == "layers.1.resid_post" and found["parted"]["path"] == "final_norm"
    assert [one["code"] for one in found["findings"]] == ["parted", "layers"]


def test_vectors_of_other_sizes_can_not_be_compared(toys, tmp_path):
    exact_toy(LLAMA | {"hidden_size": 24}, tmp_path / "wide")
    ran = run("diff", toys / "llama", tmp_path / "wide", *FED)
    assert ran.status == 2 and ran.out == ""
    assert ran.err == (
        "gptcli: hidden_size is 16 in A and 24 in B: their vectors can't be compared; "
        "--at logits compares what comes out\n"
    )
    found = run("diff", toys / "llama", tmp_path / "wide", *FED, "--at", "logits", "--json").json
    assert found["parted"]["path"] == "logits" and found["parted"]["last_agreed"] is None


def test_an_encoder_s_side(tmp_path):
    save_toy(TOYS["marian"], tmp_path / "a", auto=auto("marian"))
    fed = ("--ids", "3,4,5", "--source-ids", "9,2,33,4,4,11")
    assert run("diff", tmp_path / "a", tmp_path / "a", *fed, "--dtype-b", "f32", "-q").status == 0
    [name] = [n for n in load_file(tmp_path / "a" / "model.safetensors") if "encoder.layers.1.fc2.weight" in n]
    other = changed(tmp_path / "a", tmp_path / "b", plus(name))
    found = run("diff", tmp_path / "a", other, *fed, "--json").json
    assert found["parted"]["path"] == "encoder.layers.1.mlp_out"
    worst = found["parted"]["worst"]
    assert worst["id"] == [9, 2, 33, 4, 4, 11][worst["position"]]
    ran = run("diff", tmp_path / "a", tmp_path / "a", "--ids", "3,4,5")
    assert ran.status == 2 and "no source text" in ran.err


def test_other_ids_for_one_text(tmp_path):
    """Two vocabularies of words: the sides read other ids, and nothing is run until --ids feeds both the same."""
    told = (Path(gptcli.__file__).parent.parent / "configs" / "cats.yaml").read_text()
    assert "45: sit" in told
    (tmp_path / "other.yaml").write_text(told.replace("45: sit", "46: sit"))
    ran = run("diff", "cats", tmp_path / "other.yaml", "Cats sit on", "--json")
    found = ran.json
    assert ran.status == 1 and found["parted"]["path"] == "ids" and found["parted"]["bug"] is None
    assert [[one["id"] for one in found[name][0]] for name in ("tokens", "tokens_b")] == [[12, 45, 78], [12, 46, 78]]
    assert [one["code"] for one in found["causes"]] == ["tokenizer"] and found["activations"] == []
    assert "--ids" in " ".join(found["told"])
    assert run("diff", "cats", tmp_path / "other.yaml", "--ids", "12,45,78", "-q").status == 0


def test_a_side_without_a_tokenizer_reads_the_other_s_ids(toys, tmp_path):
    (tmp_path / "a").mkdir()
    own_directory(toys / "gpt2", tmp_path / "a")
    described = json.loads((tmp_path / "a" / "own" / "config.yaml").read_text())
    words = {i: f"w{i}" for i in range(67)}
    (tmp_path / "a" / "own" / "config.yaml").write_text(yaml.safe_dump(described | {"vocabulary": words}))
    for sides, letters in (
        ((tmp_path / "a" / "own", toys / "gpt2"), "BA"),
        ((toys / "gpt2", tmp_path / "a" / "own"), "AB"),
    ):
        found = run("diff", *sides, "w3 w4 w5", "--json").json
        assert found["verdict"] in ("identical", "rounding")
        assert found["told"] == [f"{letters[0]} has no tokenizer, and reads {letters[1]}'s ids"]
        assert [one["id"] for one in found["tokens"][0]] == [3, 4, 5]
    ran = run("diff", toys / "gpt2", toys / "llama", "w3")
    assert ran.status == 2 and "has no tokenizer" in ran.err


def test_padding_is_not_compared(toys, tmp_path):
    """Two texts of different lengths; what stands left of the shorter one is nobody's."""
    assert run("diff", toys / "llama", toys / "llama", "--ids", "[[1,2,3,4],[5,6]]", "-q").status == 0
    row = 6
    other = changed(toys / "llama", tmp_path / "b", plus("model.embed_tokens.weight", row=row))
    found = run("diff", toys / "llama", other, "--ids", "[[1,2,3,4],[5,6]]", "--json").json
    assert found["parted"]["path"] == "embed"
    assert {word: found["parted"]["worst"][word] for word in ("text", "position", "id", "channel")} == {
        "text": 1, "position": 1, "id": row, "channel": 2,
    }  # fmt: skip
    assert found["logits"]["positions"] == 6
    # Token 0 stands in the padding: another row of it is no difference.
    other = changed(toys / "llama", tmp_path / "c", plus("model.embed_tokens.weight", row=0))
    found = run("diff", toys / "llama", other, "--ids", "[[1,2,3,4],[5,6]]", "--json").json
    assert found["verdict"] == "identical"


# Files as sides.


@pytest.fixture(scope="module")
def traced(toys, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("traced") / "run.safetensors"
    ran = run("trace", "-m", toys / "llama", *FED, "--at", "*", "-o", file, "-q")
    assert ran.status == 0
    return file


def rewritten(file: Path, to: Path, change) -> Path:
    """The trace with other numbers."""
    from safetensors import safe_open

    with safe_open(file, "pt") as held:
        notes = held.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, to, notes)
    return to


def test_a_trace_beside_its_model(toys, traced):
    for sides in ((toys / "llama", traced), (traced, toys / "llama")):
        found = run("diff", *sides, "--json").json
        assert found["verdict"] == "identical" and len(found["activations"]) == 57  # with scores and weights
    found = run("diff", toys / "llama", traced, "--dtype", "f64", "--json").json
    assert (found["verdict"], found["by"]) == ("rounding", "one side's float64")
    assert run("diff", traced, traced, "-q").out == "identical: every number is the same, bit for bit\n"
    ran = run("diff", traced, toys / "llama", *FED)
    assert ran.status == 2 and "leave the text out" in ran.err


def test_a_trace_with_noise_of_rounding_s_size_and_with_more(toys, traced, tmp_path):
    """Noise of 2^-24 of a row's largest number at every activation agrees; a thousand times that at one does not."""

    def noise(times: dict[str, float]):
        def change(tensors):
            generator = torch.Generator().manual_seed(0)
            for name, x in tensors.items():
                size = x.abs().amax(-1, keepdim=True) * 2**-24 * times.get(name, 1.0)
                x += torch.empty_like(x).uniform_(-1, 1, generator=generator) * size

        return change

    near = rewritten(traced, tmp_path / "near.safetensors", noise({}))
    found = run("diff", toys / "llama", near, "--json").json
    assert (found["verdict"], found["by"]) == ("rounding", "one side's float64")
    far = rewritten(traced, tmp_path / "far.safetensors", noise({"layers.1.attn.v": 1000.0}))
    for sides in ((toys / "llama", far), (far, toys / "llama")):
        ran = run("diff", *sides, "--json")
        parted = ran.json["parted"]
        assert ran.status == 1 and (parted["path"], parted["bug"]) == ("layers.1.attn.v", True)
    # Neither can be run: how far rounding comes is estimated, and nothing tells whether it is a bug.
    found = run("diff", traced, near, "--json").json
    assert (found["verdict"], found["by"]) == ("rounding", "an estimate")
    found = run("diff", traced, far, "--json").json
    assert (found["parted"]["path"], found["parted"]["bug"]) == ("layers.1.attn.v", None)
    assert found["parted"]["exact"] is None


def test_a_trace_of_another_model(toys, traced, tmp_path):
    other = changed(toys / "llama", tmp_path / "b", rope_theta=500000.0)
    found = run("diff", other, traced, "--json").json
    assert (found["parted"]["path"], found["parted"]["last_agreed"]) == ("layers.0.attn.q_rot", "layers.0.attn.v")
    assert [cause["code"] for cause in found["causes"]] and "10000" in found["causes"][0]["said"]


def test_what_kind_a_side_is(toys, traced, tmp_path):
    (tmp_path / "arrays").mkdir()
    numpy.save(tmp_path / "arrays" / "logits.npy", numpy.zeros((1, 2, 3), numpy.float32))
    save_file({"logits": torch.zeros(1, 2, 3)}, tmp_path / "arrays" / "lone.safetensors")
    torch.save({"logits": torch.zeros(1, 2, 3)}, tmp_path / "arrays" / "lone.pt")
    torch.save({"model": {"wte.weight": torch.zeros(2, 2)}}, tmp_path / "ckpt.pt")
    kinds = {
        toys / "llama": "model", toys / "llama" / "model.safetensors": "model", traced: "trace", "cats": "model",
        tmp_path / "arrays": "dumps", tmp_path / "arrays" / "logits.npy": "dumps", tmp_path / "ckpt.pt": "model",
        tmp_path / "arrays" / "lone.safetensors": "dumps", tmp_path / "arrays" / "lone.pt": "dumps",
    }  # fmt: skip
    assert {path: kind_of(str(path)) for path in kinds} == kinds
    (tmp_path / "arrays" / "config.json").write_text("{}")
    with pytest.raises(GptcliError, match="arrays beside a model's description") as error:
        kind_of(str(tmp_path / "arrays"))
    assert error.value.hint == f"write model:{tmp_path / 'arrays'} or dumps:{tmp_path / 'arrays'}"


# What a person says.


def test_constants_decide_in_place_of_float64(toys, tmp_path):
    other = changed(toys / "llama", tmp_path / "b", plus("lm_head.weight", 0.01))
    a, b = kept(of(toys / "llama"), "float32")["logits"], kept(of(other), "float32")["logits"]
    most = float(numpy.abs(a.astype(float) - b).max())
    found = run("diff", toys / "llama", other, *FED, "--atol", most, "--json").json
    assert (found["verdict"], found["by"]) == ("rounding", "constants")
    ran = run("diff", toys / "llama", other, *FED, "--atol", most * 0.999, "--json")
    assert ran.status == 1 and (ran.json["parted"]["path"], ran.json["parted"]["bug"]) == ("logits", None)
    ran = run("diff", toys / "llama", other, *FED, "--atol", 10, "-q")
    assert ran.out == "equal within the tolerance that was given\n"
    share = float((numpy.abs(a.astype(float) - b) / numpy.abs(a.astype(float))).max())
    assert run("diff", toys / "llama", other, *FED, "--rtol", share * 1.001, "-q").status == 0
    assert run("diff", toys / "llama", other, *FED, "--rtol", share * 0.999, "-q").status == 1


def test_only_these_activations(toys, tmp_path):
    other = changed(toys / "llama", tmp_path / "b", plus("model.layers.0.self_attn.q_proj.weight"))
    found = run("diff", toys / "llama", other, *FED, "--at", "layers.*.resid_post", "--json").json
    assert [one["path"] for one in found["activations"]] == [f"layers.{i}.resid_post" for i in range(3)]
    assert found["parted"]["path"] == "layers.0.resid_post" and found["logits"] is None
    found = run("diff", toys / "llama", other, *FED, "--at", "layers.1.attn.pattern", "--json").json
    assert [one["path"] for one in found["activations"]] == ["layers.1.attn.pattern"]
    assert run("diff", toys / "llama", other, *FED, "--at", "nothing").status == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cats"], "one side; name two"),
        (["cats", "./nowhere/at-all"], "gptcli: ./nowhere/at-all: no such file"),
        (["cats", "tiny-gpt2", "--ids", "1"], "hidden_size is 4 in A"),
        (["cats", "cats", "--weights", "Cats sit"], "--weights beside a text"),
        (["cats", "cats", "--weights", "--at", "logits"], "--weights beside --at"),
        (["cats", "cats", "Cats", "--map", "names.yaml"], "neither side is dumps"),
        (["trace:cats.safetensors", "cats"], "gptcli: cats.safetensors: cats.safetensors: no such file"),
        (["cats", "cats", "Cats", "--ids", "1"], "a text and --ids"),
        (["cats", "cats", "--atol", "-1"], "atol"),
        (["cats", "cats", "--atol", "nan"], "--atol nan: no tolerance"),
        (["cats", "cats", "Cats", "--dtype-b", "f8"], "--dtype-b f8: no such type"),
        (
            ["cats", "tiny-gpt2", "--reference", "transformers"],
            "'tiny-gpt2' is a model, not a text; with --reference only",
        ),
        (["cats", "cats", "Cats", "--at", "foo"], "`gptcli trace --list` prints"),
        (["cats", "cats", "--ids", "1,999999"], "id 999999 is outside A's vocabulary"),
        (["cats", "--reference", "llama.cpp"], "reference"),
        (["cats", "cats", "Dogs"], "Dogs"),
    ],
)
def test_what_can_not_be_compared(words, said):
    ran = run("diff", *words)
    assert ran.status == 2 and ran.out == "" and ran.err.count("\n") == 1
    assert said in ran.err


def test_how_it_reads(toys, tmp_path):
    other = changed(toys / "llama", tmp_path / "b", plus("model.layers.1.mlp.down_proj.weight", 1.0))
    sides = (toys / "llama", other)
    wide = run("diff", *sides, *FED)
    first = "parted at layers.1.mlp_out: a bug, the gap stays in float64"
    lines = wide.out.splitlines()
    assert lines[0] == first and wide.err == ""
    order = ["A  llama", "B  b (", "tokens", "last agreed", "worst", "logits", "exact", "expected", "seen", "cause"]
    order += ["mend", "activation", "embed …"]
    places = [next(i for i, line in enumerate(lines) if line.strip().startswith(word)) for word in order]
    assert places == sorted(places)
    [folded] = [line for line in lines if line.startswith("embed … layers.1.mlp.act")]
    assert folded.endswith("31 agree")  # embed, 16 of layer 0, 14 of layer 1 before it
    [behind] = [line for line in lines if line.startswith("layers.2.resid_pre … layers.2.resid_post")]
    assert behind.endswith("16 differ")
    full = run("diff", *sides, *FED, "--full").out
    assert all(
        any(line.startswith(path) for line in full.splitlines()) for path in ("layers.0.attn.q ", "layers.2.attn.z")
    )
    narrow = run("diff", *sides, *FED, columns=80, NO_COLOR="1").out
    assert "\x1b" not in narrow
    told = [line for line in narrow.splitlines() if str(tmp_path) not in line and str(toys) not in line]
    assert max(map(len, told)) <= 80
    lines = run("diff", *sides, *FED, columns=60, NO_COLOR="1").out.splitlines()
    begins = next(i for i, line in enumerate(lines) if line.startswith("activation"))
    assert max(map(len, lines[begins:])) <= 60
    assert "\x1b[1;31mparted" in run("diff", *sides, *FED, columns=80).out
    run("diff", *sides, *FED, encoding="ascii").out.encode("ascii")
    quiet = run("diff", *sides, *FED, "-q")
    assert (quiet.status, quiet.out) == (1, f"{first}\n")
    report = tmp_path / "report.json"
    assert run("diff", *sides, *FED, "-q", "-o", report).status == 1
    assert json.loads(report.read_text()) == run("diff", *sides, *FED, "--json").json


def test_ids_out_of_a_file_are_read_once(toys, tmp_path):
    """A pipe can't be read again for the other side."""
    read, write = os.pipe()
    os.write(write, b"[[3, 6], [9, 12]]")
    os.close(write)
    ran = run("diff", toys / "llama", toys / "llama", "--ids", f"@/dev/fd/{read}", "--json")
    os.close(read)
    assert ran.status == 0 and [[one["id"] for one in text] for text in ran.json["tokens"]] == [[3, 6], [9, 12]]


def test_what_no_number_shows_is_told(toys, tmp_path):
    """At position 0 nothing turns."""
    other = changed(toys / "llama", tmp_path / "b", rope_theta=5000.0)
    found = run("diff", toys / "llama", other, "--ids", "5", "--json").json
    said = "no number shows what differs in the architectures: position.theta (10000.0 in A, 5000.0 in B)"
    assert (found["verdict"], found["told"]) == ("identical", [said])


def test_the_worst_logit_is_an_id_s(toys, tmp_path):
    other = changed(toys / "llama", tmp_path / "b", plus("lm_head.weight", 0.5, row=66))
    assert "the logit of id 66 ·" in run("diff", toys / "llama", other, *FED).out


def test_standard_input_is_read_for_both(toys):
    ran = run("diff", "cats", "cats", "-", "--json", stdin=b"Cats sit\n")
    assert ran.status == 0 and [one["id"] for one in ran.json["tokens"][0]] == [12, 45]
    ran = run("diff", "cats", "cats", "-", "--batch", "--json", stdin=b"Cats sit\nCats\n")
    assert ran.status == 0 and [len(text) for text in ran.json["tokens"]] == [2, 1]


def test_from_python(toys, traced):
    ours = gptcli.open(str(toys / "llama"))
    assert ours.diff(str(traced)).verdict == "identical"
    assert ours.diff(gptcli.open(str(toys / "llama"), dtype="bf16"), IDS).verdict == "rounding"
    with pytest.raises(GptcliError, match="no text"):
        ours.diff(ours)


# How it is done.


def test_watching_changes_no_bit(toys):
    a, b, wide = of(toys / "llama"), of(toys / "llama", dtype="bf16"), of(toys / "llama").exact()
    seen = {}

    def look(path: str, *xs: Tensor) -> bool:
        seen[path] = [x.clone() for x in xs]
        return True

    abreast([a, b, wide], look, common(a, b))
    assert list(seen) == [path for path, _ in points(a.model.spec)]
    for i, side in enumerate((a, b, wide)):
        alone = _recorded(side)
        assert all(torch.equal(seen[path][i], alone[path]) for path in seen)


def _recorded(side: Run) -> dict[str, Tensor]:
    recorder = Recorder("*")
    side.forward("all", recorder)
    return recorder.kept


def test_a_side_s_own_default_type_is_no_other_s(toys):
    """One side runs with float64 by default, which belongs to the process: no other side sees it."""

    class Wide(Run):
        def forward(self, *args, **more) -> Tensor:
            torch.set_default_dtype(torch.float64)
            try:
                return super().forward(*args, **more)
            finally:
                torch.set_default_dtype(torch.float32)

    a, b, found = of(toys / "llama"), Wide(open_model(str(toys / "llama")), [IDS]), set()
    together(a, b, lambda path, x, y: not found.add(torch.zeros(1).dtype), common(a, b))
    assert found == {torch.float32} and torch.get_default_dtype() == torch.float32


def test_one_error_or_one_word_ends_all_sides(toys):
    a, b, bad = of(toys / "llama"), of(toys / "llama"), of(toys / "llama", [1, 2, 99])
    threads, seen = threading.active_count(), []
    abreast([a, b, of(toys / "llama")], lambda path, *xs: seen.append(path) or len(seen) < 5, common(a, b))
    assert len(seen) == 5 and threading.active_count() == threads
    for sides in ((a, bad), (bad, a)):
        with pytest.raises(GptcliError, match="id 99 is outside the vocabulary"):
            together(*sides, lambda path, x, y: True, common(a, b))
        assert threading.active_count() == threads

    def broken(path: str, x: Tensor, y: Tensor) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        together(a, b, broken, common(a, b))
    assert threading.active_count() == threads


def test_sides_whose_order_differs_are_shown_where_the_later_one_is_born(toys):
    """One side norms q and k before it turns them, the other after: each activation of both, once, of its own name."""
    sides = []
    for place in ("before", "after"):
        spec = open_model(str(toys / "llama")).spec
        spec = replace(spec, attention=replace(spec.attention, qk_norm="head", qk_norm_place=place))
        model = open_model(None, "cats")
        model = replace(model, spec=spec, config=None)
        sides.append(Run(model, [IDS]))
    seen = {}
    together(*sides, lambda path, x, y: seen.setdefault(path, (x, y)) is not None, common(*sides))
    assert list(seen) == [path for path, _ in points(sides[0].model.spec)]
    for i, side in enumerate(sides):
        alone = _recorded(side)
        assert all(torch.equal(seen[path][i], alone[path]) for path in seen)


def test_the_exact_side_keeps_no_weight(toys):
    (toys / "drawn.yaml").write_text(json.dumps(to_dict(open_model(str(toys / "llama")).spec)))
    side = of(toys / "llama")
    wide = side.exact()
    logits = wide.forward("all", SILENT)
    assert logits.dtype == torch.float64 and wide.weights.tensors.made == {}
    assert torch.equal(logits, of(toys / "llama", dtype="f64").forward("all"))
    half = of(toys / "llama", dtype="bf16").exact()  # of what is stored, not of what the run has rounded
    assert torch.equal(half.forward("all"), logits)
    drawn = Run(open_model(None, str(toys / "drawn.yaml")), [IDS], "bf16").exact()
    assert torch.equal(drawn.forward("all"), Run(drawn.model, [IDS], "f64").forward("all"))


@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 4, 300, 2000), (1, 1, 300_000), (3,)])
def test_a_gap_is_numpy_s_own_in_blocks_too(shape):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(shape, generator=generator)
    b = a + 1e-3 * torch.randn(shape, generator=generator)
    found, x, y = gaps.gap(a, b.half()), a.double().numpy(), b.half().double().numpy()
    off = numpy.abs(x - y)
    assert found.max_abs == off.max() and found.worst == numpy.unravel_index(off.argmax(), off.shape)
    assert (found.a, found.b) == (x[found.worst], y[found.worst])
    assert found.relative == pytest.approx(numpy.linalg.norm(off) / numpy.linalg.norm(x), rel=1e-9)
    cosine = float((x * y).sum() / numpy.linalg.norm(x) / numpy.linalg.norm(y))
    assert found.cosine == pytest.approx(cosine, abs=1e-12)


def test_numbers_that_are_not_finite():
    nan, inf = math.nan, math.inf
    a = torch.tensor([[1.0, nan, inf, -inf, 5.0]])
    assert gaps.alike([(a, a.clone())]) and gaps.gap(a, a).deviation == 0 and gaps.gap(a, a).lost == 0
    found = gaps.gap(a, torch.tensor([[1.5, nan, -inf, 2.0, 5.0]]))
    assert (found.lost, found.worst, found.a, found.b) == (2, (0, 2), inf, -inf)
    assert found.deviation == inf and found.max_abs == 0.5
    assert gaps.outside([(a, torch.tensor([[1.5, nan, -inf, 2.0, 5.0]]))], 1.0, 0.0) == 2
