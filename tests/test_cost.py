"""What a trace costs is said before anything runs: the bytes are those that a recorder keeps, and what is above the
limit is refused with the request that fits.
"""

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from gptcli import cost, shipped
from gptcli.config import read_config
from gptcli.errors import GptcliError
from gptcli.layout import layout
from gptcli.model.forward import Inputs, forward
from gptcli.model.init import random_weights
from gptcli.model.stream import Stream, header
from gptcli.model.weights import Weights
from gptcli.render.plain import to_json
from gptcli.report.capture import array, size_of
from gptcli.report.room import Room
from gptcli.report.trace import trace_report
from gptcli.run import Run
from gptcli.source import open_model
from gptcli.spec import to_dict
from gptcli.trace import SILENT, Recorder, Selection, Silent
from tests.command import gptcli as run
from tests.toys import shrunk

CPU = torch.device("cpu")
SHIPPED = sorted(shipped.configs())


@cache
def opened(name: str, dtype: torch.dtype) -> tuple:
    spec = shrunk(read_config(shipped.configs()[name]).spec)
    params = list(layout(spec))
    return spec, Weights.of(params, random_weights(spec, params, 0, dtype, CPU))


PATTERNS = (
    "*",
    "layers.0.*",
    "*.pattern",
    "*.scores",
    "*.attn.q",
    "layers.*.resid_post",
    "logits",
    "embed",
    "encoder.*",
)


@settings(deadline=None, max_examples=120)
@given(
    name=st.sampled_from(SHIPPED),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    wanted=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3),
    heads=st.tuples(st.integers(-5, 5), st.integers(-5, 5)),
    queries=st.tuples(st.integers(-10, 10), st.integers(-10, 10)),
    batch=st.integers(1, 2),
    width=st.integers(1, 9),
)
def test_the_bytes_are_those_that_a_recorder_keeps(name, dtype, wanted, heads, queries, batch, width):
    spec, weights = opened(name, dtype)
    ids = torch.arange(width).expand(batch, width) % spec.vocab_size
    source = None if spec.encoder is None else Inputs(torch.zeros(batch, width + 2, dtype=torch.long))
    select = Selection(slice(*heads), slice(*queries))
    recorder = Recorder(*wanted, select=select)
    forward(Inputs(ids, source=source), weights, spec, recorder)
    size = cost.Size(spec, batch, width, width + 2 if source else 0, str(dtype).removeprefix("torch."))
    assert cost.kept(size, recorder.wants, select) == sum(x.nbytes for x in recorder.kept.values())


def allocated(run: Callable[[], object]) -> int:
    """What torch's allocator holds for a run at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    events = (e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("wanted", [("scores",), ("pattern",), ("scores", "pattern")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 4])
def test_what_writing_holds_is_about_what_the_allocator_gave(groups, dtype, wanted):
    """Scores and weights by blocks of queries, in a layer so narrow that they are what is largest."""
    spec = replace(opened("llama3-8b", torch.float32)[0], context_length=700, n_layers=1)
    spec = replace(spec, attention=replace(spec.attention, n_heads=8, n_kv_heads=groups, head_dim=16))
    params = list(layout(spec))
    weights = Weights.of(params, random_weights(spec, params, 0, getattr(torch, dtype), CPU))
    size, paths = cost.Size(spec, 1, 600, 0, dtype), {f"layers.0.attn.{name}" for name in wanted}
    tensors = {path: (size.dtype_of(path), shape) for path, _, shape in size.points() if path in paths}
    inputs, slots = Inputs(torch.arange(600)[None] % 64, rows="all"), header(tensors, {})[1]

    def taken(probe: Silent) -> int:
        with torch.inference_mode():
            return allocated(lambda: forward(inputs, weights, spec, probe))

    with Path(os.devnull).open("wb") as nothing:
        most = taken(Stream(nothing, slots))
    said = cost.streamed(size, paths.__contains__)
    assert most - taken(SILENT) <= said <= 1.3 * most


@pytest.mark.parametrize("name", ["scores", "pattern", "sink"])
def test_an_array_of_scores_or_weights_is_held_whole(name, tmp_path):
    """About what torch's allocator gave; `-o x.npy` says it, and is refused for it."""
    spec = replace(opened("llama3-8b", torch.float32)[0], context_length=700, n_layers=1, name="a")
    spec = replace(spec, attention=replace(spec.attention, sinks=True))
    (tmp_path / "a.yaml").write_text(json.dumps(to_dict(spec)))
    words, path = ("-c", tmp_path / "a.yaml", "--ids", ",".join(["3"] * 600)), f"layers.0.attn.{name}"
    here = Run(open_model(config=str(tmp_path / "a.yaml")), [[3] * 600])
    plain, said = allocated(lambda: here.forward("all")), cost.arrayed(size_of(here), path)
    most = allocated(lambda: array(here, path))
    assert most - plain <= said <= 1.3 * most
    told = run("trace", *words, "--at", path, "-o", tmp_path / "x.npy", "--json").json["held_bytes"]
    assert told == said
    ran = run("trace", *words, "--at", path, "-o", tmp_path / "y.npy", "--max-memory", said - 1)
    assert ran.status == 2 and "-o FILE.safetensors" in ran.err and not (tmp_path / "y.npy").exists()


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_types_are_those_of_the_activations(name, dtype):
    spec, weights = opened(name, dtype)
    recorder = Recorder("*")
    source = None if spec.encoder is None else Inputs(torch.arange(7)[None] % spec.encoder.vocab_size)
    forward(Inputs(torch.arange(5)[None] % spec.vocab_size, source=source), weights, spec, recorder)
    size = cost.Size(spec, 1, 5, 7, str(dtype).removeprefix("torch."))
    found = {path: str(x.dtype).removeprefix("torch.") for path, x in recorder.kept.items()}
    assert found == {path: size.dtype_of(path) for path, _, _ in size.points()}


@pytest.mark.parametrize(
    ("layers", "heads", "position"), [([0, 1], [0, 1, 2, 3], "-1"), ([0], [0], "all"), ([0, 1], [2], "all")]
)
@pytest.mark.parametrize("config", ["gpt2-small", "tiny-gpt2"])
def test_a_walk_s_bytes_are_near_those_that_python_holds(config, layers, heads, position):
    """Within a third, of the report and of its JSON; tensors, which Python's own count doesn't see, are left out."""
    here = Run(open_model(config), [[i % 50 for i in range(12 if config == "gpt2-small" else 40)]])
    room = Room(size_of(here), 1 << 60, True, as_json=False)
    tensors = cost.kept(room.size, lambda path: path.startswith(tuple(f"layers.{i}." for i in layers)))
    here.forward("all")
    tracemalloc.start()
    try:
        report = trace_report(here, layers, heads, position)
        held = tracemalloc.get_traced_memory()[0]
        to_json(report)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    for measured, as_json in ((held, False), (peak, True)):
        counted = room._replace(as_json=as_json)._walks(layers, heads, position, "self") - tensors
        assert 0.67 < counted / measured < 1.5, (counted, measured)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1000b", 1000),
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        ("1.5kib", 1536),
        ("0.5TB", 500_000_000_000),
        ("3tib", 3 << 40),
    ],
)
def test_sizes(text, size):
    assert cost.most(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5.2MB", "10 bytes", "1e9", "GiB", "3PB"])
def test_what_is_no_size(text):
    ran = run("trace", "--max-memory", text)
    assert ran.status == 2 and ran.err.startswith(f"gptcli: --max-memory {text}: not a size; such as 2GiB")


def test_the_default_is_a_quarter_of_what_is_free(monkeypatch):
    monkeypatch.setattr(cost, "free_memory", lambda: 4000)
    assert cost.most(None) == 1000
    monkeypatch.setattr(cost, "free_memory", lambda: None)
    assert cost.most(None) == 2 << 30


def test_what_is_free_on_any_system(monkeypatch, tmp_path):
    free = cost.free_memory()
    assert 1 << 20 < free < 1 << 50
    # Without /proc: what the system's own numbers say, of free pages, then of all pages; else nothing.
    monkeypatch.setattr(cost, "Path", lambda *words: tmp_path / "nothing")
    names = {"SC_AVPHYS_PAGES": 1000, "SC_PHYS_PAGES": 4000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", lambda name: names[name] if name in names else _unknown(name))
    assert cost.free_memory() == 1000 * 4096
    del names["SC_AVPHYS_PAGES"]
    assert cost.free_memory() == 4000 * 4096
    names.clear()
    assert cost.free_memory() is None
    monkeypatch.delattr(os, "sysconf")
    assert cost.free_memory() is None


def _unknown(name: str):
    raise ValueError(f"unrecognized configuration name {name}")


def test_a_container_s_limit(tmp_path):
    assert cost._group_memory(tmp_path) == 1 << 62
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert cost._group_memory(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert cost._group_memory(tmp_path) == 1 << 62


TINY = ["trace", "-m", "tiny-gpt2", "--ids", ",".join(str(i) for i in range(30))]


def walks(layers: list[int], heads: list[int], position: str, as_json: bool = False) -> int:
    """What walks hold."""
    size = size_of(Run(open_model("tiny-gpt2"), [list(range(30))]))
    return Room(size, 0, True, as_json)._walks(layers, heads, position, "self")


def test_what_is_above_the_limit_is_refused_with_the_request_that_fits():
    everything = ["--layer", "all", "--head", "all", "--position", "all"]
    one, layer = walks([0], [0], "-1"), walks([0], [0, 1, 2, 3], "all")
    assert one < layer < walks([0, 1], [0, 1, 2, 3], "all")

    def refused(limit: int, *words: str) -> str:
        ran = run(*TINY, *words, "--max-memory", str(limit))
        assert ran.status == 2 and ran.out == "" and ran.err.count("\n") == 1, ran
        return ran.err

    said = refused(layer, *everything)
    assert said.startswith("gptcli: a trace of 2 layers, 4 heads, every position would hold ")
    assert f"and {cost.bytes_text(layer)} is --max-memory; --layer 1 holds {cost.bytes_text(layer)}\n" in said
    assert "; --layer 1 --head 0 --position -1 holds " in refused(one, *everything)
    assert "take a shorter text, or -o FILE.safetensors" in refused(one - 1)
    # The request that it names runs.
    assert run(*TINY, "--layer", "1", "--head", "all", "--position", "all", "--max-memory", str(layer)).status == 0
    assert run(*TINY, "--layer", "1", "--head", "0", "--position", "-1", "--max-memory", str(one)).status == 0


def test_json_costs_more(tmp_path):
    plain, as_json = walks([0], [0], "-1"), walks([0], [0], "-1", as_json=True)
    assert as_json > 2 * plain
    assert run(*TINY, "--max-memory", str(plain)).status == 0
    for words in (("--json",), ("-o", tmp_path / "x.json")):
        assert run(*TINY, *words, "--max-memory", str(as_json - 1)).status == 2
        assert run(*TINY, *words, "--max-memory", str(as_json)).status == 0


def test_one_activation_is_counted(tmp_path):
    words = (*TINY, "--at", "layers.0.attn.pattern", "--max-memory")
    size = 4 * 30 * 30 * (4 + cost.LISTED)
    assert run(*words, str(size)).status == 0
    ran = run(*words, str(size - 1))
    assert ran.status == 2 and "-o FILE.safetensors, which writes it and holds 56.2 KiB" in ran.err
    assert run(*words, str(size - 1), "-o", tmp_path / "x.safetensors").status == 0


def test_a_file_holds_some_queries_at_a_time(tmp_path):
    file = tmp_path / "x.safetensors"
    words = (*TINY, "--at", "*.pattern", "--force", "-o", file)
    one = 4 * 4 * 30 * 30 * 4  # scores and weights of four heads, and what softmax makes between
    assert run(*words, "--max-memory", str(one)).status == 0
    ran = run(*words, "--max-memory", str(one - 1))
    assert ran.status == 2 and "choose smaller ones by --at" in ran.err


def test_edits_are_counted():
    ran = run(*TINY, "--ablate", "L0H0", "--max-memory", "1kB")
    assert ran.status == 2 and "a run beside its edited one would hold" in ran.err


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    ran = run(*TINY, "--at", "*", "-o", tmp_path / "x.safetensors")
    assert ran.status == 2 and "its disk has 1000 bytes free; choose fewer activations by --at" in ran.err
    assert not list(tmp_path.iterdir())


def test_every_head_of_a_large_model_is_refused_before_a_weight_is_made(tmp_path):
    """69 GB of weights for 32 × 32 heads at 4096 tokens; nothing of the 8 billion random numbers is drawn."""
    ids = ",".join(["1"] * 4096)
    ran = run("trace", "-c", "llama3-8b", "--ids", ids, "--layer", "all", "--head", "all", "--max-memory", "64GiB")
    assert ran.status == 2 and "a trace of 32 layers, 32 heads would hold" in ran.err, ran
    spec = open_model("llama3-8b").spec
    size = cost.Size(spec, 1, 4096, 0, "float32")
    assert cost.kept(size, lambda path: path.endswith(".pattern")) == 32 * 32 * 4096 * 4096 * 4
    with pytest.raises(GptcliError, match=r"64\.0 GiB is --max-memory"):
        Room(size, 64 << 30, True, as_json=False).walks([0], list(range(32)), "all", "self")


def test_a_disk_holds_what_was_said(tmp_path):
    """The file is as large as the activations, and its header."""
    file = tmp_path / "x.safetensors"
    report = run(*TINY, "--at", "*", "-o", file, "--json").json
    size = size_of(Run(open_model("tiny-gpt2"), [list(range(30))]))
    counted = cost.kept(size, lambda path: True)
    header = int.from_bytes(Path(file).read_bytes()[:8], "little")
    assert report["written_bytes"] == file.stat().st_size == 8 + header + counted
