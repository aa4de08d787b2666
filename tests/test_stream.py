"""Weights that pass: nothing of a checkpoint is kept beyond its layer, and not a bit of the result changes."""

import json
import math
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gptcli.model import device, load, pages
from gptcli.run import Run
from gptcli.source import open_model
from gptcli.trace import Silent
from tests.command import gptcli
from tests.converted import convert, exact_toy
from tests.oracle import save_toy
from tests.packed_toys import save

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
IDS = [[5, 17, 3, 60, 22]]


def as_stored(folder: Path) -> Path:
    save_toy(LLAMA, folder)
    return folder


def pickled(folder: Path) -> Path:
    save_toy(LLAMA, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def in_gguf(folder: Path) -> Path:
    exact_toy(LLAMA, folder)
    return convert(folder, folder / "toy.gguf")


def packed(folder: Path) -> Path:
    save(folder, "fp8-block")
    return folder


@pytest.fixture(params=[as_stored, pickled, in_gguf, packed])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return request.param(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_streamed_weights_give_the_same_bits_and_none_is_kept(path: Path, dtype: str):
    kept, passing = (Run(open_model(str(path)), IDS, dtype, stream=how) for how in ("off", "on"))
    for _ in range(2):
        assert torch.equal(kept.forward("all"), passing.forward("all"))
    assert not passing.weights.tensors.made and kept.weights.tensors.made


class Resident(Silent):
    """Bytes of a mapped file that are in memory when the embedding and when each layer has been computed."""

    def __init__(self, file: Path):
        self.file, self.found = file, []

    def at(self, scope: str) -> "Resident":
        return self

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name in ("embed", "resid_post", "logits"):
            self.found.append(self.resident())
        return x

    def resident(self) -> int:
        total, mine = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                mine = words[-1] == str(self.file)
            elif mine and words[0] == "Rss:":
                total += int(words[1]) * 1024
        return total


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages are in memory")
def test_pages_of_a_part_are_given_back_when_the_next_one_is_read(tmp_path: Path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 8192}
    save_toy(LLAMA | sizes | {"head_dim": 128}, tmp_path)
    file = tmp_path / "model.safetensors"
    mlp, attention = 8 * 3 * 512 * 2048, 8 * (2 * 512 * 512 + 2 * 512 * 256)
    ids = [list(range(0, 8192, 256))]  # rows that lie far apart
    for how, least, most in (("on", 0, 1.2 * mlp), ("off", 5 * (mlp + attention), file.stat().st_size + 4096)):
        probe = Resident(file)
        run = Run(open_model(str(tmp_path)), ids, stream=how)
        run.forward("all", probe)
        embedded, *layers, _ = probe.found
        assert least <= max(layers) <= most, how
        assert how == "off" or embedded <= 1 << 16
        del run
    assert Resident(file).resident() == 0


def test_only_pages_of_files_are_given_back(tmp_path: Path):
    own = torch.full((1 << 20,), 7.0)
    file = tmp_path / "numbers"
    file.write_bytes(bytes(1 << 16))
    mapping = torch.from_file(str(file), size=1 << 14)
    assert len(pages.mapped(file)) == (sys.platform == "linux") and pages.mapped(tmp_path / "other") == []
    for at in (pages.span(own), (0, 0), (0, 1 << 47)):
        pages.give_back(at, pages.mapped(file))
    pages.give_back(pages.span(own), [])
    assert not mapping.any()
    assert bool((own == 7).all())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells where a file is mapped")
@pytest.mark.parametrize("name", [b"a b", "line\u2028line\x85".encode(), b"\xff is no UTF-8", b" begins and ends "])
def test_a_file_of_any_name_is_found_where_it_is_mapped(name: bytes, tmp_path: Path):
    file = tmp_path / os.fsdecode(name)
    file.write_bytes(bytes(8192))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ):
        [(low, high)] = pages.mapped(file)
        assert high - low == 8192
    assert pages.mapped(file) == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take no such name")
def test_a_path_that_the_library_refuses_is_told_in_a_line(tmp_path: Path):
    folder = tmp_path / os.fsdecode(b"\xff")
    save_toy(LLAMA, tmp_path)
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).rename(folder / name)
    ran = gptcli("topk", "--ids", "5,17", "-m", folder)
    assert ran.status == 2 and "UTF-8" in ran.err and "defect" not in ran.err and ran.err.count("\n") == 1


def test_more_rows_than_a_table_has_are_not_picked_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A table of distances has a few rows, which T × T pairs read: all at once. Of a large one a few are picked."""
    save_toy(LLAMA, tmp_path)
    asked, honest = [], load._Passing.pick
    monkeypatch.setattr(
        load._Passing, "pick", lambda self, table, rows: asked.append(len(rows)) or honest(self, table, rows)
    )
    table, rows = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"], torch.arange(40 * 40) % 96
    weights = open_model(str(tmp_path)).weights(torch.float64, torch.device("cpu"), "on")
    assert torch.equal(weights.rows("embed.weight", rows), table[rows]) and asked == []
    assert torch.equal(weights.rows("embed.weight", rows[:95]), table[:95]) and asked == [95]


def test_auto_streams_what_half_of_the_free_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_toy(LLAMA, tmp_path)
    converted = 4 * open_model(str(tmp_path)).facts("float32").parameters  # its file is in float64
    for free, dtype, streams in (
        (2 * converted - 2, torch.float32, True),
        (2 * converted + 2, torch.float32, False),
        (1, torch.float64, False),  # as stored: the file's own pages, of which the system disposes
        (None, torch.float32, False),
    ):
        monkeypatch.setattr(device, "free_bytes", lambda where, free=free: free)
        weights = open_model(str(tmp_path)).weights(dtype, torch.device("cpu"))
        assert weights["layers.0.attn.q.weight"].dtype == dtype
        assert bool(weights.tensors.made) != streams, (free, dtype)


def test_auto_streams_what_one_pass_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_toy(LLAMA, tmp_path)
    for stream, repeat, once, passes in (
        ("auto", 1, True, True),
        ("auto", 2, True, False),
        ("auto", 1, False, False),
        ("off", 1, True, False),
        ("on", 2, False, True),
    ):
        run = Run(open_model(str(tmp_path)), IDS, stream=stream, repeat=repeat, once=once)
        run.forward("last")
        assert bool(run.weights.tensors.made) != passes, (stream, repeat, once)
    made, honest = [], Run.weights.func
    noted = property(lambda run: made.append(honest(run)) or made[-1])
    monkeypatch.setattr(Run, "weights", noted)
    for words, passes in ((["topk"], True), (["forward"], True), (["topk", "--ablate", "L0H0"], False)):
        assert gptcli(*words, "--ids", "5,17", "-m", tmp_path).status == 0
        assert made and all(bool(weights.tensors.made) != passes for weights in made), words
        made.clear()


def test_the_option(tmp_path: Path):
    save_toy(LLAMA, tmp_path)
    shown = {how: gptcli("topk", "--ids", "5,17", "-m", tmp_path, "--stream", how).out for how in ("auto", "on", "off")}
    assert len(set(shown.values())) == 1 and shown["on"]
    wrong = gptcli("topk", "--ids", "5,17", "-m", tmp_path, "--stream", "never")
    assert wrong.status == 2 and "--stream" in wrong.err and wrong.err.count("\n") == 1


@pytest.mark.parametrize("block", [1, 2, 3])
def test_scores_in_blocks_of_positions_are_the_scores(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each token's log-probability from the logits of the position before it, of texts of unequal length."""
    save_toy(LLAMA, tmp_path)
    texts = [[5, 17, 3, 60, 22, 9, 9], [8, 1], [4, 4, 90, 2]]
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(texts))
    monkeypatch.setattr("gptcli.run.LOGITS_AT_ONCE", block * len(texts) * LLAMA["vocab_size"])
    found = gptcli("score", "-m", tmp_path, "--ids", f"@{ids}", "--json").json["texts"]
    for text, scored in zip(texts, found):
        logits = Run(open_model(str(tmp_path)), [text]).forward("all")[0].double().log_softmax(-1)
        right = [float(logits[i, id_]) for i, id_ in enumerate(text[1:])]
        assert [row["logprob"] for row in scored["tokens"]][1:] == pytest.approx(right, abs=1e-5)
        assert scored["perplexity"] == pytest.approx(math.exp(-sum(right) / len(right)), rel=1e-5)
