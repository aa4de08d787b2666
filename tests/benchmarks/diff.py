"""`diff` of two checkpoints beside the two forward passes that it can't do without: time, and memory.

    python tests/benchmarks/diff.py

Makes GPT-2-sized checkpoints in float32, random (124M parameters, 475 MiB each in a temporary folder): two of them the
same, and one with a weight of layer 7 changed; 256 tokens. One JSON line for each of two comparisons: `seconds`,
`ratio` to both forward passes (each the quickest of the runs), `processor_ratio`, the same in processor time, which
other work on the machine changes less, and `anonymous_MiB`, the most that the process came to hold of its own while it
compared, beside what it came to hold in one pass of each.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from gptcli.config import find_config
from gptcli.report.diff import diff_report
from gptcli.run import Run
from gptcli.source import open_model

RUNS = 3
LENGTH = 256
CHANGED = "layers.6.mlp.up.weight"


def make(folder: Path, changed: bool) -> None:
    folder.mkdir()
    model = open_model(None, "gpt2-small")
    weights = model.weights(torch.float32, torch.device("cpu")).tensors
    tensors = {name: weights[name].clone() for name in weights}
    if changed:
        tensors[CHANGED][0, 0] += 0.1
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.yaml").write_text(find_config("gpt2-small").read_text())


def run(folder: Path) -> Run:
    ids = torch.randint(0, 50257, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    return Run(open_model(str(folder)), [ids])


def anonymous() -> int:
    """MiB of memory that is the process's own, and not a file's pages."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) // 1024


def most(work: Callable[[], object]) -> int:
    """The most that is held while something runs, looked at every 2 ms."""
    seen, ended = [anonymous()], threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            seen.append(anonymous())

    watcher = threading.Thread(target=look)
    watcher.start()
    work()
    ended.set()
    watcher.join()
    return max(seen) - seen[0]


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """On the clock, and of the processors."""
    begun = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun[0], time.process_time() - begun[1]


def measure(a: Run, b: Run, what: str) -> None:
    held = most(lambda: (a.forward("all"), b.forward("all")))  # which reads the files, too
    passes, compared = [], []
    for _ in range(RUNS):
        passes.append(seconds(lambda: (a.forward("all"), b.forward("all"))))
        compared.append(seconds(lambda: diff_report(a, b)))
    both, took = ([min(one) for one in zip(*runs)] for runs in (passes, compared))
    line = {
        "benchmark": f"diff of two 124M checkpoints, T={LENGTH}, {what}",
        "seconds": round(took[0], 3),
        "ratio": round(took[0] / both[0], 3),
        "processor_ratio": round(took[1] / both[1], 3),
        "anonymous_MiB": most(lambda: diff_report(a, b)),
        "anonymous_MiB_of_passes": held,
        "verdict": diff_report(a, b).said,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for name, changed in (("a", False), ("same", False), ("changed", True)):
            make(Path(made) / name, changed)
        a = run(Path(made) / "a")
        measure(a, run(Path(made) / "same"), "identical")
        measure(a, run(Path(made) / "changed"), "parted")
