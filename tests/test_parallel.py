"""One model on several ranks gives the logits of one. Ranks are threads here, and processes in a few tests."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptcli.cli.edits import EditOptions
from gptcli.config import read_config
from gptcli.errors import GptcliError
from gptcli.layout import Param, layout
from gptcli.model.forward import forward
from gptcli.model.init import random_weights
from gptcli.model.parallel import shared
from gptcli.model.weights import EVERY_ROW, Lazy, Weights
from gptcli.run import Run
from gptcli.shard import axis, local, span, splits, summed, whole
from gptcli.shipped import configs
from gptcli.source import open_model
from gptcli.spec import Experts, Relative, Spec
from tests.command import gptcli
from tests.oracle import save_toy
from tests.toys import fed, shrunk

CPU = torch.device("cpu")
SHIPPED = {name: shrunk(read_config(path).spec) for name, path in configs().items()}
SPECS = SHIPPED | {
    "experts": replace(
        SHIPPED["llama3-8b"], mlp=Experts(n_experts=4, top_k=2, size=20, activation="silu", shared_size=12)
    ),
    "heads that don't divide": replace(
        SHIPPED["llama3-8b"], attention=replace(SHIPPED["llama3-8b"].attention, n_heads=3, n_kv_heads=1)
    ),
    "a norm over all heads": replace(
        SHIPPED["llama3-8b"], attention=replace(SHIPPED["llama3-8b"].attention, qk_norm="whole")
    ),
    "a norm for each head": replace(
        SHIPPED["gpt2-small"], attention=replace(SHIPPED["gpt2-small"].attention, qk_norm="each")
    ),
    "distances": replace(SHIPPED["gpt2-small"], position=Relative(buckets=8, max_distance=20)),
    "sinks": replace(SHIPPED["llama3-8b"], attention=replace(SHIPPED["llama3-8b"].attention, sinks=True)),
    "an odd vocabulary": replace(SHIPPED["gpt2-small"], vocab_size=61, mlp=replace(SHIPPED["gpt2-small"].mlp, size=21)),
}  # fmt: skip


class Threads:
    """A rank that is a thread: what they give is put together at a barrier."""

    def __init__(self, rank: int, size: int, table: list, barrier: threading.Barrier):
        self.rank, self.ranks, self.table, self.barrier = rank, size, table, barrier

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.table[self.rank] = x
        self.barrier.wait(10)
        found = list(self.table)
        self.barrier.wait(10)
        return found

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self._all(x))

    def concat(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(x), -1)


def on_ranks(spec: Spec, size: int, weights: Weights, ids: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's logits."""
    table, barrier, found = [None] * size, threading.Barrier(size), [None] * size

    def rank(number: int) -> None:
        own = shared(weights, spec, Threads(number, size, table, barrier))
        with torch.inference_mode():
            found[number] = forward(fed(spec, ids), own, local(spec, size))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    [thread.start() for thread in threads]
    [thread.join(20) for thread in threads]
    return found


def toy(spec: Spec) -> tuple[Weights, torch.Tensor]:
    params = tuple(layout(spec))
    weights = Weights.of(params, random_weights(spec, params, 0, torch.float64, CPU))
    for name in weights.tensors:  # biases and gains too, or an addition too many would not be seen
        weights.tensors[name].add_(0.05 * torch.randn(weights.tensors[name].shape, dtype=torch.float64))
    return weights, torch.tensor([[5, 17, 3, 6, 22, 9]]) % spec.vocab_size


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_ranks_give_the_logits_of_one(name: str, size: int):
    torch.manual_seed(1)
    spec = SPECS[name]
    weights, ids = toy(spec)
    with torch.inference_mode():
        right = forward(fed(spec, ids), weights, spec)
    for logits in on_ranks(spec, size, weights, ids):
        assert logits is not None and torch.allclose(logits, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SPECS)
def test_each_rank_holds_its_share_and_all_hold_everything(name: str):
    """Sizes that the local architecture has are those of the cut weights; what is cut adds up to the whole."""
    spec, size = SPECS[name], 2
    here = {param.name: param for param in layout(local(spec, size))}
    for param in layout(spec):
        cut = axis(param, spec, size)
        if cut is None or param.name not in here:
            continue
        parts = [span(param.shape[cut], size, rank) for rank in range(size)]
        assert parts[0].start == 0 and parts[0].stop == parts[1].start and parts[1].stop == param.shape[cut]
        if not param.name.startswith("lm_head."):
            assert here[param.name].shape[cut] == parts[0].stop - parts[0].start


def test_a_rank_reads_its_own_rows():
    """Of what is cut by rows, and of tables, nothing else is asked for."""
    spec, asked = SHIPPED["gpt2-small"], {}

    def maker(param: Param):
        def make(rows=EVERY_ROW):
            asked.setdefault(param.name, []).append(rows)
            return torch.zeros(param.shape)[rows]

        return make

    params = [param for param in layout(spec) if not param.tied_to]
    makers = {param.name: maker(param) for param in params}
    own = shared(Weights.of(layout(spec), Lazy(makers, set(makers))), spec, Threads(1, 2, [], threading.Barrier(1)))
    assert own["layers.0.attn.q.weight"].shape == (12, 16) and asked["layers.0.attn.q.weight"] == [slice(12, 24)]
    assert own["layers.0.attn.o.weight"].shape == (16, 12)
    assert own["lm_head.weight"].shape == (32, 16) and asked["embed.weight"] == [slice(32, 64)]  # the head is tied
    assert own.rows("embed.weight", torch.tensor([3])).shape == (1, 16) and len(asked["embed.weight"]) == 2
    assert "layers.0.attn.o.bias" not in own and "layers.0.attn.q.bias" in own


def test_what_is_whole_is_said():
    assert whole(SPECS["gpt2-small"], 2) == []
    assert whole(SPECS["a norm over all heads"], 2) == ["layers.#.attn: one norm spans all of its heads"]
    assert whole(SPECS["llama3-8b"], 4) == ["layers.#.attn: 2 key/value heads do not divide"]
    assert "layers.#.mlp: its width of 21 does not divide" in whole(SPECS["an odd vocabulary"], 2)
    assert not splits(SPECS["heads that don't divide"].attention, 2)
    assert list(summed(SPECS["gpt2-small"], 2))[:2] == ["layers.0.attn.o", "layers.0.mlp.down"]


# Processes

LLAMA = {
    "model_type": "llama", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def torchrun(*words: object, script: Path | None = None) -> subprocess.CompletedProcess:
    """gptcli on two ranks with --parallel tensor. script: what each process runs instead of `-m gptcli`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(script)] if script else ["-m", "gptcli"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = [*map(str, words), "--parallel", "tensor"]
    return subprocess.run([*command, *words], capture_output=True, text=True, env=env, timeout=120)


def told(done: subprocess.CompletedProcess) -> list[str]:
    """What gptcli says on standard error, among torchrun's own reports."""
    return [line for line in done.stderr.splitlines() if line.startswith("gptcli: ")]


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=["grouped heads, tied", "experts"])
def test_two_processes_print_what_one_does(config: dict, tmp_path: Path):
    save_toy(config, tmp_path)
    words = ["topk", "-m", tmp_path, "--ids", "5,17,3,60", "--json", "--dtype", "f32"]
    done, alone = torchrun(*words), gptcli(*words)
    assert done.returncode == 0, done.stderr
    two, one = (json.loads(out)["next"][0]["top"] for out in (done.stdout, alone.out))
    assert [row["id"] for row in two] == [row["id"] for row in one]
    assert [row["logit"] for row in two] == pytest.approx([row["logit"] for row in one], abs=1e-5)


def test_an_error_is_told_once(tmp_path: Path):
    save_toy(LLAMA, tmp_path)
    done = torchrun("topk", "-m", tmp_path, "--ids", "5,400")
    assert told(done) == ["gptcli: id 400 is outside the vocabulary; ids run from 0 to 98"] and not done.stdout


SECOND_RANK = """
import os, signal
from gptcli.cli.main import entry
from gptcli.errors import GptcliError
from gptcli.model.parallel import Processes

def killed(self, x):
    os.kill(os.getpid(), signal.SIGKILL)

def failed(self, x):
    raise GptcliError("this rank's disk is full", "make room")

if os.environ["RANK"] == "1":
    Processes.sum = {}
entry()
"""


@pytest.mark.parametrize(
    "how, said",
    [("killed", "gptcli: rank 0 of 2 has lost another ("), ("failed", "gptcli: this rank's disk is full; make room")],
)
def test_a_rank_that_goes_ends_the_others_with_one_line(how: str, said: str, tmp_path: Path):
    save_toy(LLAMA, tmp_path)
    script = tmp_path / "rank.py"
    script.write_text(SECOND_RANK.replace("{}", how))
    done = torchrun("topk", "-m", tmp_path, "--ids", "5,17", script=script)
    assert done.returncode and not done.stdout
    assert len(told(done)) == 1 and told(done)[0].startswith(said)


@pytest.mark.parametrize(
    "words, said",
    [
        (["topk", "-"], "standard input and --parallel"),
        (["topk", "Cats", "--stream", "on"], "--stream on and --parallel"),
        (["forward", "Cats", "--stages"], "--stages and --parallel"),
        (["params", "cats", "gpt2-small", "--seq-len", "4", "--devices", "2"], "--devices 2: several models are named"),
    ],
)
def test_what_ranks_can_not_do_together(words, said):
    done = gptcli(*words, *(["--parallel", "tensor"] * (words[0] != "params")))
    assert done.status == 2 and done.err.startswith(f"gptcli: {said}") and done.err.count("\n") == 1


def test_an_edit_needs_all_heads_in_one_process():
    run = Run(open_model("tiny-gpt2"), [[1, 2]], group=Threads(0, 2, [], threading.Barrier(1)))
    with pytest.raises(GptcliError, match="--ablate and --parallel"):
        EditOptions(ablate=["L0H1"]).make(run)
    assert run.notes == ["2 ranks, each with its share of the weights"]


def test_torchrun_without_the_option_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        done = gptcli("topk", "Cats sit on")
        assert (done.status, done.out, done.err.count("\n")) == (2, "", lines)


def test_one_process_alone_is_refused():
    done = gptcli("topk", "Cats sit on", "--parallel", "tensor")
    assert done.status == 2 and done.err.startswith("gptcli: --parallel tensor: this is one process alone; start it as")
