"""`bench`: what it counts is counted right, and what it times is shared out among known stages."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptcli import count
from gptcli.config import read_config
from gptcli.model import kernels
from gptcli.model.clock import STAGE_OF, Clock
from gptcli.model.forward import forward
from gptcli.report.bench import bench_run
from gptcli.shipped import configs
from gptcli.source import open_model
from gptcli.trace import LAYER_POINTS, ON_THE_SIDE, POINTS
from tests.command import gptcli, process
from tests.test_params import TOYS, request, toy_weights


@pytest.mark.parametrize("name", TOYS)
def test_flops_for_the_last_position_are_what_torch_counts_in_a_real_pass(name, monkeypatch):
    """torch's counter knows its own products alone."""
    monkeypatch.setattr(kernels, "by_onednn", lambda: False)
    spec, source = TOYS[name], 11 if TOYS[name].encoder is not None else 0
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        forward(request(spec, 3, 9, 11, "last"), toy_weights(spec), spec)
    counted = count.flops_forward(spec, 9, 3, False, 1, source) - count.flops_spared(spec, 9, 3, False, source)
    assert counted == counter.get_total_flops()


@pytest.mark.parametrize("window", [None, 3])
def test_pairs_that_the_mask_lets_through_by_hand(window):
    """5 queries see 1 + 2 + 3 + 4 + 5 keys, in a window of 3 1 + 2 + 3 + 3 + 3; the last sees 5, or 3."""
    spec = replace(TOYS["gpt2-small"], n_layers=1)
    spec = replace(spec, attention=replace(spec.attention, window=window))
    full, masked = (count.flops_spared(spec, 5, 1, masked) for masked in (False, True))
    seen = 15 - 5 if window is None else 12 - 3
    assert full - masked == 4 * (4 * 5 - seen) * spec.attention.n_heads * spec.attention.head_dim


def test_every_activation_of_the_fused_pass_belongs_to_a_stage():
    names = {*LAYER_POINTS, *(path for path in POINTS if "layers." not in path and not path.startswith("encoder."))}
    assert set(STAGE_OF) >= names - {path.removeprefix("layers.#.") for path in ON_THE_SIDE}


def test_the_clock_gives_time_to_the_stage_that_it_was_spent_in(monkeypatch):
    times = iter([10.0, 11.0, 13.0, 16.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Clock(lambda: None)
    layer = clock.at("layers.0")
    clock("embed", None)
    layer.at("attn")("q", None)
    layer.at("cross")("k", None)
    clock.at("encoder").at("layers.3")("mlp_out", None)
    spent = {stage: seconds for stage, seconds in clock.spent.items() if seconds}
    assert spent == {"embedding": 1, "queries, keys, values": 2 + 3, "mlp": 4}


def test_timing_changes_no_bit():
    run = bench_run(open_model("tiny-gpt2"), 16, 2)
    assert torch.equal(run.forward("all"), run.forward("all", Clock(lambda: None)))


@pytest.mark.parametrize("config", [name for name in configs() if read_config(configs()[name]).spec.hidden_size <= 8])
def test_every_worked_example_is_timed(config):
    found = gptcli("bench", config, "--repeat", 2, "--json").json
    assert found["least"] == min(found["seconds"]) and len(found["seconds"]) == 2
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["least"])
    assert found["flops_per_second"] == pytest.approx(found["flops"] / found["least"])
    assert sum(stage["share"] for stage in found["stages"]) == pytest.approx(1)
    assert found["product_flops_per_second"] > 1e8 and found["peak_bytes"] > 50 * 2**20


def test_what_is_asked_for_is_what_is_timed():
    found = gptcli("bench", "-m", "tiny-gpt2", "--seq-len", 24, "--batch", 3, "--logits", "all", "--json").json
    assert (found["tokens"], found["batch"], found["rows"], len(found["seconds"])) == (24, 3, "all", 5)
    assert found["flops"] == count.flops_forward(open_model("tiny-gpt2").spec, 24, 3)


def test_how_it_reads():
    done = process("bench", "cats", "--repeat", 2)
    lines = done.out.splitlines()
    assert done.status == 0 and lines[0].startswith("cats (shipped, hand-written weights) · 2,324 parameters")
    assert [line.split()[0] for line in lines[2:9]] == "least median rate work reached product memory".split()
    assert lines[10].split() == ["stage", "ms", "a", "pass", "share"] and max(map(len, lines)) <= 80
    assert float(gptcli("bench", "cats", "-q").out) > 0


@pytest.mark.parametrize(
    "words, said",
    [(["--seq-len", 17], "--seq-len 17: cats"), (["--seq-len", 0], "--seq-len"), (["--repeat", 0], "--repeat")],
)
def test_what_can_not_be_timed(words, said):
    done = gptcli("bench", "cats", *words)
    assert done.status == 2 and said in done.err and done.err.count("\n") == 1


def test_a_repeated_run_tells_the_least_time_and_the_same_numbers():
    once, often = (gptcli("topk", "Cats sit on", "--repeat", n) for n in (1, 4))
    assert once.out == often.out and often.err.endswith("tokens/s\n")
    run = bench_run(open_model("cats"), 5, 1, repeat=3)
    taken = iter([0, 5, 10, 12, 20, 23.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: next(taken))
        run.forward("last")
    assert run.seconds == 2
