"""What writing activations costs beside the run itself: GPT-2 small's shape with random weights.

    python tests/benchmarks/capture.py

At T = 256 and 1024 positions, float32: a run that shows the next tokens after every position, and one that writes to a
file besides: all activations; every softmax weight and residual stream. Each in a process of its own, its file in a
temporary directory that is deleted. Each line is JSON: seconds are a command's whole time, peak_mib its peak resident
memory, file_mib what it wrote.

The last lines keep all activations in Python instead (`Model.activations`): bound is the peak by torch (the process
that has imported it), the weights and what is kept, all together, least the peak that this needs. No network is used.
"""

import json
import re
import resource
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

from gptcli.cli.main import main as gptcli

REQUESTS = {
    "the run alone": ["topk", "--position", "all"],
    "all activations": ["trace", "--at", "*"],
    "patterns and residual streams": ["trace", "--at", "layers.*.attn.pattern", "--at", "layers.*.resid_post"],
}


def measure(words: list[str]) -> tuple[float, float]:
    """Seconds and peak resident MiB of one command. Runs in a process of its own."""
    sys.argv, begun = ["gptcli", *words], time.perf_counter()
    sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: PTH123, SIM115 - as long as the process
    if gptcli() != 0:
        raise SystemExit(f"{words} failed")
    return time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def status(what: str) -> float:
    """MiB of this process: VmRSS, or VmHWM, the most that it ever was."""
    return int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def keep(ids: list[int]) -> tuple[float, float, float, float]:
    """MiB: of torch, of the weights, of all activations of one text, and the process's peak."""
    import torch

    torch.ones(1)
    alone = status("VmRSS")
    from gptcli import open as opened

    model = opened("gpt2-small")
    kept = model.activations(ids, "*")
    size = sum(x.untyped_storage().nbytes() for x in {x.data_ptr(): x for x in kept.values()}.values())
    return alone, 4 * model.params().parameters.unique / 2**20, size / 2**20, status("VmHWM")


def main() -> None:
    for positions in (256, 1024):
        ids = ",".join(str(i * 37 % 50257) for i in range(positions))
        for name, words in REQUESTS.items():
            with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(1) as pool:
                file = Path(folder) / "x.safetensors"
                out = ["-o", str(file)] if words[0] == "trace" else []
                words = [*words, "-c", "gpt2-small", "--ids", ids, "-q", *out]
                seconds, peak = pool.apply(measure, (words,))
                size = file.stat().st_size / 2**20 if out else 0
            line = {"benchmark": f"{name}, T = {positions}", "seconds": round(seconds, 2), "peak_mib": round(peak)}
            print(json.dumps(line | {"file_mib": round(size)}), flush=True)
        with get_context("spawn").Pool(1) as pool:
            torch, weights, kept, peak = pool.apply(keep, ([i * 37 % 50257 for i in range(positions)],))
        line = {
            "benchmark": f"all activations, kept, T = {positions}",
            "peak_mib": round(peak),
            "kept_mib": round(kept),
        }
        print(json.dumps(line | {"bound": round(peak / (torch + weights + kept), 3)}), flush=True)


if __name__ == "__main__":
    main()
