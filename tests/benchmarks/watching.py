"""Watching GPT-2 small beside TransformerLens' bridge and transformers: do they say the same, and what does it cost?

    python tests/benchmarks/watching.py [--names tests/data/hooks.json]

Wants `pip install 'transformer-lens>=4'`. All three read the same directory of random weights, in float32, on two
threads. No network is used.

First, at 8 positions: every activation that gptcli calls by a name of TransformerLens is there under that name, in the
same shape (or with positions before heads), and its numbers differ by 1e-4 at most; softmax weights and the residual
stream are those that transformers hands back. --names writes the hooks that the bridge has, with the letters of their
axes, for the tests.

Then, at T = 256 and 1024, each in a process of its own: all softmax weights and the residual stream after every layer.
gptcli keeps them (`activations`) or writes them to a file as they are born (`trace -o`), with all weights in memory or
with those of a part of a layer (`--stream on`); TransformerLens keeps what
`run_with_cache` is asked for by names, transformers what output_attentions and output_hidden_states give. Of logits,
transformers computes the last row; gptcli, asked for none, none. Each line is JSON, and all numbers are the least
of several requests and processes, which take turns: seconds by the clock and of the CPU (all threads), the process's
peak resident memory (VmHWM) at its first answer, and how much of that is beyond libraries and weights. `by …` is
gptcli's number divided by that peer's (below 1: gptcli needs less). On a machine that has other work, read cpu_seconds.
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_WAIT_POLICY": "PASSIVE"}

from startup import make_checkpoint

ROUNDS, REQUESTS = 2, 2  # processes of each kind; requests that each answers
COLUMNS = ("seconds", "cpu_seconds", "peak_mib", "beyond_mib")
PATHS = ("layers.*.attn.pattern", "layers.*.resid_post")
SIZES = {768: "C", 12: "H", 64: "D", 3072: "F", 50257: "V"}  # of GPT-2 small, by letter


def ids_of(positions: int):
    import torch

    return torch.randint(50257, (1, positions), generator=torch.Generator().manual_seed(0))


# Each opens the model, and gives what answers a request: a function of ids [1, T].


def ours_kept(folder: Path) -> Callable:
    import gptcli

    model = gptcli.open(str(folder))
    return lambda ids: model.activations(ids[0].tolist(), *PATHS)


def ours_written(folder: Path, stream_weights: str = "off") -> Callable:
    from gptcli.names import Names
    from gptcli.report.capture import chosen, stream
    from gptcli.run import Run
    from gptcli.source import open_model

    model = open_model(str(folder))
    weights, draft = Run(model, [[0]], stream=stream_weights).weights, folder / "written.safetensors"

    def request(ids) -> None:
        run = Run(model, ids.tolist())
        run.weights = weights
        stream(run, chosen(run, Names(model), list(PATHS), [], "self"), draft)
        draft.unlink()

    return request


def ours_streamed(folder: Path) -> Callable:
    return ours_written(folder, "on")


def bridge(folder: Path):
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2LMHeadModel

    peer = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    return TransformerBridge.boot_transformers(str(folder), hf_model=peer, device="cpu")


def transformerlens(folder: Path) -> Callable:
    model, ends = bridge(folder), ("hook_pattern", "hook_resid_post")
    return lambda ids: model.run_with_cache(ids, names_filter=lambda name: name.endswith(ends))


def transformers(folder: Path, kept: int = 1) -> Callable:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    asked = {"output_attentions": True, "output_hidden_states": True, "use_cache": False, "logits_to_keep": kept}
    return lambda ids: model(ids, **asked)


KINDS = {
    "gptcli, kept": ours_kept,
    "gptcli, written to a file": ours_written,
    "gptcli, written to a file, --stream on": ours_streamed,
    "TransformerLens": transformerlens,
    "transformers": transformers,
}


def resident(what: str) -> float:
    """MiB of this process: VmRSS, or VmHWM, which is the most that it ever was."""
    return int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def measure(kind: str, folder: Path, positions: int) -> tuple[float, ...]:
    """The fastest request's seconds, by the clock and of the CPU; the peak resident MiB at the end of the first, and
    how much of that is beyond the libraries and the weights, which a request of eight positions has read.
    """
    import torch

    torch.set_num_threads(2)
    with torch.inference_mode():
        request, ids = KINDS[kind](folder), ids_of(positions)
        request(ids[:, :8])
        loaded = resident("VmRSS")
        request(ids)
        peak = resident("VmHWM")
        times = []
        for _ in range(REQUESTS):
            begun, spent = time.perf_counter(), time.process_time()
            request(ids)
            times.append((time.perf_counter() - begun, time.process_time() - spent))
    return *map(min, zip(*times)), peak, peak - loaded


def costs(folder: Path) -> None:
    for positions in (256, 1024):
        found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in KINDS}
        for _ in range(ROUNDS):
            for kind in KINDS:
                with get_context("spawn").Pool(1) as pool:
                    found[kind].append(pool.apply(measure, (kind, folder, positions)))
        best = {kind: [*map(min, zip(*runs))] for kind, runs in found.items()}
        for kind, mine in best.items():
            line = {"benchmark": f"patterns and residual streams, T = {positions}", "by": kind}
            line |= {name: round(x, 3) for name, x in zip(COLUMNS, mine)}
            for peer in [peer for peer in KINDS if "gptcli" in kind and "gptcli" not in peer]:
                line[f"by {peer}"] = {name: round(a / b, 3) for name, a, b in zip(COLUMNS, mine, best[peer])}
            print(json.dumps(line), flush=True)


def agreement(folder: Path, names: Path | None) -> None:
    """Raises AssertionError where a name, a shape or a number differs."""
    import torch

    import gptcli
    from gptcli.names import Names

    ids, model = ids_of(8), gptcli.open(str(folder))
    ours = model.activations(ids[0].tolist(), "*")
    known = Names(model.model, "transformerlens")
    with torch.inference_mode():
        theirs = bridge(folder).run_with_cache(ids)[1]
        given = transformers(folder, kept=0)(ids)
    gaps = {}
    for path, mine in ours.items():
        if (name := known.of(path)) is not None:
            other = theirs[name]
            other = other if other.shape == mine.shape else other.transpose(1, 2)
            assert other.shape == mine.shape, (path, name, other.shape)
            shown = other > -1e30  # theirs of scores are the type's lowest number behind the mask
            gaps[path] = float((mine - other)[shown].abs().max())
    library = {f"layers.{i}.attn.pattern": x for i, x in enumerate(given.attentions)}
    library |= {f"layers.{i}.resid_pre": x for i, x in enumerate(given.hidden_states[:-1])}
    library |= {"final_norm": given.hidden_states[-1], "logits": given.logits}
    apart = max(float((ours[path] - x).abs().max()) for path, x in library.items())
    worst = max(gaps, key=gaps.get)
    assert gaps[worst] <= 1e-4, (worst, gaps[worst])
    assert apart <= 1e-4, apart
    line = {"benchmark": "names and values", "names": len(gaps), "without a name there": len(ours) - len(gaps)}
    line |= {"largest difference": gaps[worst], "at": worst, "from transformers": apart}
    print(json.dumps(line), flush=True)
    if names is not None:
        hooks = {re.sub(r"\.\d+\.", ".#.", name): _axes(x.shape) for name, x in theirs.items()}
        names.write_text(json.dumps({"transformer_lens": _version(), "gpt2": hooks}, indent=1) + "\n", encoding="utf-8")


def _axes(shape: tuple[int, ...]) -> str:
    """[1, 12, 8, 8] as BHTT; 1 for an axis that holds one number."""
    return "B" + "".join({8: "T", 1: "1"}.get(size) or SIZES[size] for size in shape[1:])


def _version() -> str:
    from importlib.metadata import version

    return version("transformer-lens")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name))
        agreement(Path(name), asked.names)
        costs(Path(name))


if __name__ == "__main__":
    main()
