"""`trace -o x.safetensors`, `trace --from`: what a run held is in the file, and is shown again as the run showed it."""

import json
import os
import re
import struct
import sys
from functools import cache
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import gptcli
from gptcli import shipped
from gptcli.config import read_config
from gptcli.layout import layout
from gptcli.model.forward import forward
from gptcli.model.init import random_weights
from gptcli.model.stream import Stream, header
from gptcli.model.weights import Weights
from gptcli.run import Run
from gptcli.source import open_model
from gptcli.trace import shapes
from tests import test_families_seq2seq as seq2seq
from tests.command import gptcli as run
from tests.command import strict
from tests.test_trace_families import IDS, SOURCE_IDS, attentions
from tests.toys import fed as inputs_of
from tests.toys import shrunk

CPU = torch.device("cpu")
FED = ("--ids", ",".join(map(str, IDS)))
# Families with every part that a file has to hold: fused and shared heads, rotation, norms in every place, caps,
# windows, sinks, experts, both stacks, biases by distance.
SAMPLE = (
    *("gpt2", "llama", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "gptj", "olmo2", "bert", "bert, no head"),
    *("marian", "bart", "t5"),
)


def words_of(name: str) -> list[str]:
    source = ["--source-ids", ",".join(map(str, SOURCE_IDS))] if name in seq2seq.CASES else []
    return [*FED, *source]


@cache
def held(path: Path, dtype: str, source: bool) -> dict[str, torch.Tensor]:
    return gptcli.open(path, dtype=dtype).activations(IDS, "*", source=SOURCE_IDS if source else None)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("name", SAMPLE)
def test_the_file_holds_what_a_recorder_keeps(name, dtype, toy, tmp_path):
    """Every activation in its own type and shape, read by the format's own library in one line."""
    path, file = toy(name), tmp_path / "all.safetensors"
    ran = run("trace", "-m", path, *words_of(name), "--dtype", dtype, "--at", "*", "-o", file, "--json")
    assert ran.status == 0, ran
    expected = held(path, dtype, name in seq2seq.CASES)
    found = load_file(file)
    beside = {key for key in found if key.endswith("rel_bias.weight")}
    assert beside == ({"rel_bias.weight", "encoder.rel_bias.weight"} if name == "t5" else set())
    assert found.keys() - beside == expected.keys()
    for point, x in expected.items():
        assert found[point].dtype == x.dtype and found[point].shape == x.shape, point
        if point.endswith((".scores", ".pattern", ".sink")):  # of one head at a time, which may round otherwise
            torch.testing.assert_close(found[point], x, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(found[point], x), point
    report = ran.json
    assert report["schema"] == "gptcli.capture/1" and report["written_bytes"] == file.stat().st_size
    sizes = {one["path"]: one["bytes"] for one in report["activations"]}
    assert sizes == {point: x.nbytes for point, x in expected.items()}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", ["gpt2", "marian"])
def test_what_the_file_says_of_itself(name, toy, tmp_path):
    path, file = toy(name), tmp_path / "x.safetensors"
    words = ["trace", "-m", path, *words_of(name), "--dtype", "f32", "-o", file]
    assert run(*words, "--at", "layers.*.resid_post", "--at", "embed").status == 0
    with safe_open(file, "pt") as opened:
        notes = opened.metadata()
    assert notes["schema"] == "gptcli.activations/1" and notes["gptcli"] == gptcli.__version__
    assert re.fullmatch("sha256:[0-9a-f]{64}", notes["digest"])
    told = {key: strict(f"{notes[key]}\n") for key in notes.keys() - {"schema", "gptcli", "digest"}}
    assert told["model"]["name"] == path.name and told["model"]["dtype"] == "float32"
    assert told["ids"] == [IDS] and told["source_ids"] == ([SOURCE_IDS] if name == "marian" else [])
    assert [[token["id"] for token in text] for text in told["tokens"]] == told["ids"]
    layers = range(gptcli.open(path).spec.n_layers)
    assert told["axes"] == {"embed": "BTC"} | {f"layers.{i}.resid_post": "BTC" for i in layers}
    assert told["segments"] is None and told["edited"] == []
    # The tensors begin where their type can be read in place.
    size = struct.unpack("<Q", file.read_bytes()[:8])[0]
    assert size % 8 == 0


def test_the_digest_tells_weights_apart(toy, tmp_path):
    def digest(*words: object) -> str:
        ran = run("trace", *words, "--ids", "1,2", "--at", "layers.0.resid_post", "-o", tmp_path / "d.safetensors",
                  "--force", "--json")  # fmt: skip
        assert ran.status == 0, ran
        return ran.json["digest"]

    path = toy("gpt2")
    mine = digest("-m", path)
    assert digest("-m", path) == mine
    tensors = load_file(path / "model.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text((path / "config.json").read_text())
    prefix = "" if any(name.startswith("h.") for name in tensors) else "transformer."
    # Under the names of a base model, in another order: the same weights.
    renamed = {name.removeprefix(prefix): x for name, x in reversed(tensors.items())}
    save_file(renamed, copy / "model.safetensors")
    assert digest("-m", copy) == mine
    renamed["h.1.ln_1.bias"] = renamed["h.1.ln_1.bias"] + 0.5
    save_file(renamed, copy / "model.safetensors")
    assert digest("-m", copy) != mine
    assert digest("-c", "gpt2-small") != digest("-c", "gpt2-small", "--seed", "1") != digest("-c", "gpt2-medium")


def without(report: dict) -> dict:
    """A trace's report without what differs in a file: where the model was found, and the proof that needs a run."""
    proof = [check for check in report["proof"] if check["claim"] != "logits have the same bits unwatched"]
    # Rounding differs where one head is computed at a time.
    proof = [check["claim"] for check in proof if check["ok"]]
    return report | {"model": report["model"] | {"source": ""}, "proof": proof}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_walk_from_a_file_is_the_walk_of_the_run(name, toy, tmp_path):
    path, file = toy(name), tmp_path / "x.safetensors"
    model = ["trace", "-m", path, *words_of(name)]
    assert run(*model, "--at", "*", "-o", file, "-q").out == f"{file}\n"
    for attention in attentions(name):
        words = ["--layer", "all", "--head", "all", "--position", "3", "--attention", attention, "--json"]
        shown, again = run(*model, *words), run("trace", "--from", file, *words)
        assert shown.status == again.status == 0, again
        assert again.json["model"]["source"] == f"from the file x.safetensors, traced from {path}"
        first, second = (without(ran.json) for ran in (shown, again))
        assert first.keys() == second.keys() and first["proof"] == second["proof"]
        for one, other in zip(first["walks"], second["walks"], strict=True):
            close(one, other)
        assert {key: first[key] for key in first if key != "walks"} == {
            key: second[key] for key in second if key != "walks"
        }


def close(one: dict, other: dict) -> None:
    """Walks are the same to the last bit, but for scores and weights, which are the same but for rounding."""
    assert [step["path"] for step in one["before"]] == [step["path"] for step in other["before"]]
    assert (one["before"], one["after"]) == (other["before"], other["after"])
    for key, like in zip(one["keys"], other["keys"], strict=True):
        assert key.keys() == like.keys()
        for name, value in key.items():
            assert value == like[name] if isinstance(value, (str, bool, int)) else value == pytest.approx(like[name])


@pytest.mark.parametrize("name", ["llama", "marian"])
def test_one_activation_and_the_list_from_a_file(name, toy, tmp_path):
    path, file = toy(name), tmp_path / "x.safetensors"
    model = ["trace", "-m", path, *words_of(name)]
    at = ["layers.1.mlp.act", "logits", "layers.0.attn.pattern"]
    at += ["encoder.layers.0.attn.k", "layers.0.cross.pattern"] if name == "marian" else []
    assert run(*model, *(word for one in at for word in ("--at", one)), "-o", file).status == 0
    for one in at:
        shown, again = (run(*words, "--at", one, "--json").json for words in (model, ["trace", "--from", file]))
        values = torch.tensor([shown.pop("values"), again.pop("values")], dtype=torch.float64)
        torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=1e-14)
        for report in (shown, again):
            report["model"].pop("source")
            for number in ("mean", "std", "max_abs"):
                report[number] = pytest.approx(report[number])
        assert shown == again
    listed = run("trace", "--from", file, "--list", "--json").json["points"]
    every = run(*model, "--list", "--json").json["points"]
    assert listed == [point for point in every if point["path"] in at]
    ran = run("trace", "--from", file, "--at", "embed")
    assert ran.status == 2 and "holds no such activation" in ran.err
    ran = run("trace", "--from", file)
    assert ran.status == 2 and "it holds no layers.0.resid_pre" in ran.err


def test_the_default_is_everything_of_the_layers_that_are_walked(tmp_path):
    file = tmp_path / "x.safetensors"
    ran = run("trace", "--layer", "2", "--head", "1", "-o", file)
    assert ran.status == 0 and "Layer 2 of 2 (layers.1) · Head 1 of 2" in ran.out
    assert re.search(r"^17 activations in .*x.safetensors, \d.\d KiB, \d+ bytes held at once$", ran.err, re.M)
    assert all(name.startswith("layers.1.") for name in load_file(file))
    # Where no layer is named, the first that the file holds is shown.
    again = run("trace", "--from", file, "--head", "1").out
    assert "(from the file x.safetensors, traced from shipped, hand-written weights)" in again
    assert ran.out.splitlines()[1:24] == again.splitlines()[1:24]
    assert "Layer 2 of 2 (layers.1)" in again and "unwatched" not in again
    file = tmp_path / "y.safetensors"
    assert run("trace", "--at", "L0H1", "-o", file).status == 0
    assert all(name.startswith("layers.0.") for name in load_file(file))


def test_a_map_from_a_file(tmp_path):
    file = tmp_path / "x.safetensors"
    run("trace", "--at", "layers.0.attn.*", "-o", file)
    shown, again = (
        run("trace", "--map", "--head", "all").out,
        run("trace", "--from", file, "--map", "--head", "all").out,
    )
    drawn = [line for line in shown.splitlines()[1:] if "proof" not in line]
    assert drawn == [line for line in again.splitlines()[1:] if "proof" not in line]


def test_texts_of_different_lengths_keep_their_batch_axis(toy, tmp_path):
    file = tmp_path / "x.safetensors"
    words = ["trace", "-m", toy("gpt2"), "--ids", "[[5,17,3],[60,22]]"]
    assert run(*words, "--at", "*", "-o", file).status == 0
    model = open_model(str(toy("gpt2")))
    from gptcli.trace import Recorder

    recorder = Recorder("*")
    Run(model, [[5, 17, 3], [60, 22]]).forward("all", recorder)
    found = load_file(file)
    assert found["layers.0.attn.pattern"].shape == (2, 4, 3, 3)
    for point, x in recorder.kept.items():
        torch.testing.assert_close(found[point], x, rtol=1e-12, atol=1e-14)
    shown = run(*words, "--at", "layers.1.attn.v", "--json").json
    again = run("trace", "--from", file, "--at", "layers.1.attn.v", "--json").json
    assert shown["values"] == again["values"] and shown["rows"] == again["rows"]


@pytest.mark.parametrize("name", shipped.configs())
def test_writing_changes_no_bit_and_holds_some_queries_at_a_time(name, tmp_path, monkeypatch):
    spec = shrunk(read_config(shipped.configs()[name]).spec)
    params = list(layout(spec))
    weights = Weights.of(params, random_weights(spec, params, 0, torch.float32, CPU))
    inputs = inputs_of(spec, torch.arange(9).expand(2, 9) % spec.vocab_size)
    tensors = {path: ("float32", shape) for path, _, shape in shapes(spec, 2, 9, 11)}
    begin, slots = header(tensors, {})
    parts = []
    monkeypatch.setattr("gptcli.trace.QUERY_BLOCK", 4)
    honest = Stream.write
    monkeypatch.setattr(Stream, "write", lambda self, path, x: parts.append((path, x.shape)) or honest(self, path, x))
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(begin)
        probe = Stream(file, slots)
        watched = forward(inputs, weights, spec, probe)
        probe.check()
    assert torch.equal(watched, forward(inputs, weights, spec))
    assert load_file(tmp_path / "x.safetensors").keys() == tensors.keys()
    queries = [shape[2] for path, shape in parts if path.endswith((".scores", ".pattern", ".sink"))]
    assert set(queries) <= {4, 3, 1} and {4, 1} <= set(queries)  # 9 are 4, 4 and 1; 11 are 4, 4 and 3


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' names are text")
def test_a_file_whose_name_is_no_text_is_refused_in_a_line(tmp_path):
    file, named = tmp_path / "x.safetensors", Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff.safetensors"))
    assert run("trace", "Cats sit on", "-o", file, "-q").status == 0
    file.rename(named)
    for words in (("--from", named), ("Cats sit on", "--patch", f"{named}:layers.0.attn.z")):
        ran = run("trace", *words)
        assert ran.status == 2 and "give it a path in UTF-8" in ran.err and ran.err.count("\n") == 1


def test_an_array_of_one_activation(toy, tmp_path):
    path = toy("gpt2")
    for dtype, kind in (("f32", "float32"), ("f64", "float64"), ("bf16", "float32")):
        file = tmp_path / f"{dtype}.npy"
        words = ["trace", "-m", path, *FED, "--dtype", dtype]
        assert run(*words, "--at", "layers.1.attn.z", "-o", file).status == 0
        found = numpy.load(file)
        assert found.dtype == kind
        assert torch.equal(
            torch.from_numpy(found), held(path, dtype, False)["layers.1.attn.z"].to(getattr(torch, kind))
        )
    ran = run("trace", "-m", path, *FED, "--at", "layers.*.attn.z", "-o", tmp_path / "x.npy")
    assert ran.status == 2 and "one array, and 3 activations" in ran.err


def test_an_edited_run_in_a_file_says_so(toy, tmp_path):
    file = tmp_path / "x.safetensors"
    words = ["--set", "layers.0.attn.pattern[1,7,2]=0.5", "--ablate", "L0H2"]
    ran = run("trace", "-m", toy("gpt2"), *FED, *words, "--at", "*", "-o", file)
    assert ran.status == 0, ran
    found = load_file(file)
    assert found["layers.0.attn.pattern"][0, 1, 7, 2] == 0.5 and not found["layers.0.attn.z"][0, 2].any()
    again = run("trace", "--from", file, "--head", "1")
    assert again.status == 0 and "EDITED --ablate L0H2" in again.out
    assert "edited attn.pattern: --set layers.0.attn.pattern[1,7,2]=0.5" in again.out
    assert "all heads' z" in again.out and "then --ablate L0H2" in again.out


def test_a_file_appears_whole_or_not_at_all(toy, tmp_path, monkeypatch):
    file = tmp_path / "x.safetensors"
    ran = run("trace", "-m", toy("gpt2"), "--ids", ",".join(["1"] * 65), "--at", "*", "-o", file)
    assert ran.status == 2 and not list(tmp_path.iterdir())
    words = ["trace", "--at", "embed", "-o", file]
    assert run(*words).status == 0
    before = file.read_bytes()
    ran = run(*words)
    assert ran.status == 2 and "the file is there; --force writes over it" in ran.err

    def full(self, path, x):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Stream, "write", full)
    ran = run(*words, "--force")
    assert ran.status == 2 and f"-o {file}: No space left on device" in ran.err
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


COMBINATIONS = [
    (("-m", "cats"), "--from and -m"),
    (("-c", "cats"), "--from and -c"),
    (("Cats",), "--from and a text"),
    (("--ids", "1"), "--from and --ids"),
    (("--dtype", "f64"), "--from and --dtype"),
    (("--ablate", "L0H0"), "--from and --ablate"),
    (("--set", "embed=0"), "--from and --set"),
    (("--seed", "1"), "--from and --seed"),
    (("-o", "y.safetensors"), "--from and -o y.safetensors"),
    (("--attribute", "mats"), "--attribute and --from"),
    (("--attention", "cross"), "this model is one stack"),
    (("--layer", "3"), "2 layers"),
    (("--position", "3"), "beyond the text"),
]


@pytest.mark.parametrize(("words", "says"), COMBINATIONS)
def test_what_a_file_has_said_already(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("trace", "--at", "*", "-o", "x.safetensors")
    ran = run("trace", "--from", "x.safetensors", *words)
    assert ran.status == 2 and says in ran.err and ran.err.count("\n") == 1, ran
    # A model in the environment is not one that was asked for.
    assert run("trace", "--from", "x.safetensors", GPTCLI_MODEL="gpt2-small").status == 0


def rewritten(file: Path, change) -> Path:
    """The file with its metadata changed, or taken away."""
    with safe_open(file, "pt") as opened:
        notes, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    notes = change(notes, tensors)
    save_file(tensors, file, notes)
    return file


def spoilt(key: str, value: str):
    return lambda notes, tensors: notes | {key: value}


def changed(key: str, change):
    return lambda notes, tensors: notes | {key: json.dumps(change(json.loads(notes[key])))}


def lost(key: str):
    return lambda notes, tensors: {name: value for name, value in notes.items() if name != key}


def more(name: str, tensor: torch.Tensor):
    return lambda notes, tensors: tensors.update({name: tensor}) or notes


FAULTS = {
    "no metadata": (lambda notes, tensors: None, "no trace's file"),
    "another schema": (spoilt("schema", "gptcli.activations/9"), "no trace's file"),
    "no model": (lost("model"), "its metadata can't be read (KeyError: 'model')"),
    "no json": (spoilt("tokens", "[[{"), "its metadata can't be read"),
    "deep json": (spoilt("tokens", "[" * 100_000), "its metadata can't be read"),
    "tokens of another kind": (spoilt("tokens", "[[1, 2, 3]]"), "its metadata can't be read"),
    "an id that is text": (
        changed("tokens", lambda t: [[t[0][0] | {"id": "x"}, *t[0][1:]]]),
        "its metadata can't be read",
    ),
    "tokens that are not the ids": (changed("ids", lambda ids: [[1, 2, 3]]), "the tokens are not those of the ids"),
    "no tokens": (lambda notes, tensors: notes | {"tokens": "[]", "ids": "[]"}, "an empty text"),
    "no architecture": (spoilt("spec", "{}"), "its metadata: vocab_size: missing"),
    "an impossible architecture": (changed("spec", lambda s: s | {"n_layers": 0}), "n_layers: 0 is below 1"),
    "a type that is none": (changed("model", lambda m: m | {"dtype": "complex64"}), "complex64"),
    "a model of another kind": (spoilt("model", '{"name": 1}'), "its metadata can't be read"),
    "longer texts": (
        lambda notes, tensors: (
            notes | {"tokens": json.dumps([2 * json.loads(notes["tokens"])[0]]), "ids": "[[12, 45, 78, 12, 45, 78]]"}
        ),
        "embed is [1, 3, 4], and its tokens make it [1, 6, 4]",
    ),
    "another tensor": (more("model.weight", torch.zeros(3)), "model.weight is no activation of that architecture"),
    "another shape": (more("embed", torch.zeros(1, 3, 5)), "embed is [1, 3, 5], and its tokens make it [1, 3, 4]"),
    "another type": (more("embed", torch.zeros(1, 3, 4).half()), "embed is F16 in a run of float32"),
    "edits of another kind": (spoilt("edited", '[["a"]]'), "its metadata can't be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_contradicts_itself_is_refused_in_one_line(fault, tmp_path):
    change, says = FAULTS[fault]
    file = tmp_path / "x.safetensors"
    run("trace", "--at", "*", "-o", file)
    rewritten(file, change)
    for words in ((), ("--list",), ("--at", "embed")):
        ran = run("trace", "--from", file, *words)
        assert ran.status == 2 and ran.out == "", ran
        assert ran.err.startswith("gptcli: --from ") and ran.err.count("\n") == 1 and says in ran.err, ran.err


def test_a_file_that_is_no_file_of_tensors(tmp_path):
    file = tmp_path / "x.safetensors"
    run("trace", "--at", "*", "-o", file)
    whole = file.read_bytes()
    for content, says in (
        (whole[:-5], "its tensors need"),
        (whole[:100], "a header of"),
        (b"", "the file is empty"),
        (b"<html>not here</html>", "an HTML page"),
    ):
        file.write_bytes(content)
        ran = run("trace", "--from", file)
        assert ran.status == 2 and ran.err.count("\n") == 1 and says in ran.err, ran.err
    for other, says in (("none.safetensors", "no such file"), ("x.bin", "no .safetensors or .npy file")):
        ran = run("trace", "--from", tmp_path / other)
        assert ran.status == 2 and says in ran.err
    numpy.save(tmp_path / "x.npy", numpy.zeros(3))
    ran = run("trace", "--from", tmp_path / "x.npy")
    assert ran.status == 2 and "no trace's file" in ran.err


def test_numbers_of_a_file_that_are_not_finite_are_a_finding(tmp_path):
    file = tmp_path / "x.safetensors"
    run("trace", "--at", "*", "-o", file)

    def spoil(notes, tensors):
        tensors["layers.0.mlp_out"][0, 1, 2] = float("nan")
        tensors["logits"][0, 1, 2] = float("nan")
        return notes

    rewritten(file, spoil)
    for words in ((), ("--at", "layers.0.mlp_out")):
        ran = run("trace", "--from", file, *words, "--json")
        assert ran.status == 1 and ran.json["findings"][0]["code"] == "not-finite", ran


def test_a_file_says_what_a_terminal_may_see(tmp_path, toy):
    """Names in a file are somebody else's: nothing of them reaches a terminal as it is."""
    file = tmp_path / "x.safetensors"
    run("trace", "--at", "*", "-o", file)
    evil = "\x1b[31mred"
    rewritten(file, lambda notes, tensors: notes | {
        "model": json.dumps(json.loads(notes["model"]) | {"name": evil}),
        "tokens": json.dumps([[token | {"token": evil} for token in json.loads(notes["tokens"])[0]]]),
        "edited": json.dumps([[evil, ["layers.0.attn.z"]]]),
    })  # fmt: skip
    for words in ((), ("--list",), ("--at", "layers.0.attn.pattern"), ("--map",)):
        ran = run("trace", "--from", file, *words, columns=80, NO_COLOR="1")
        assert ran.status == 0 and "\x1b[31m" not in ran.out + ran.err, ran
