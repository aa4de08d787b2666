"""How fast packed types are unpacked, beside the gguf package; and from a .gguf file to the next token.

    python tests/benchmarks/packed.py [MODEL.gguf]

One JSON line for each type: millions of numbers a second, of this project and of the package's numpy, on one thread
and on the same random blocks, and how many times faster the first is. With a model: seconds of the whole process from
its file to the ten most likely next tokens, T=8, and the same by transformers (which needs `accelerate`), in one run.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from gptcli.checkpoint.gguf import BY_NAME
from gptcli.model.ggml import OWN, dequantised

ROWS, COLUMNS, RUNS = 1536, 2048, 7
IDS = "504,3575,282,4649,314,7042,28,284"
LIBRARY = f"""
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
path = Path(sys.argv[1])
with torch.inference_mode():
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    logits = model(torch.tensor([[{IDS}]]), logits_to_keep=1).logits[0, -1]
print(*logits.topk(10).indices.tolist(), sep="\\n")
"""


def rate(work: Callable[[], object]) -> float:
    """Millions of numbers a second, in the best of some runs."""
    seconds = []
    for _ in range(RUNS):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return ROWS * COLUMNS / min(seconds) / 1e6


def unpacking() -> None:
    torch.set_num_threads(1)
    for kind in OWN:
        form = BY_NAME[kind]
        raw = np.random.default_rng(0).integers(0, 256, (ROWS, COLUMNS // form.numbers * form.bytes), dtype=np.uint8)
        blocks = torch.from_numpy(raw)
        with np.errstate(all="ignore"), torch.inference_mode():
            theirs = rate(lambda raw=raw, kind=kind: gguf.dequantize(raw, GGMLQuantizationType[kind]))
            ours = rate(lambda blocks=blocks, kind=kind: dequantised(blocks, kind))
        line = {"benchmark": "unpacking", "of": kind, "million_a_second": round(ours), "package": round(theirs)}
        print(json.dumps(line | {"times_faster": round(ours / theirs, 1)}), flush=True)


def whole(path: str) -> None:
    ours = [sys.executable, "-m", "gptcli", "topk", "--ids", IDS, "-q", "-m", path]
    commands = {"gptcli": ours, "transformers": [sys.executable, "-c", LIBRARY, path]}
    found: dict[str, list[tuple[float, list[str]]]] = {name: [] for name in commands}
    for _ in range(3):
        for name, command in commands.items():
            begun = time.perf_counter()
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            best = [line.split("\t")[0] for line in out.split("\n")[:-1]]
            found[name].append((time.perf_counter() - begun, best))
    seconds = {name: statistics.median(one[0] for one in runs) for name, runs in found.items()}
    for name in commands:
        line = {"benchmark": "a .gguf file to the top ten, T=8", "of": name, "seconds": round(seconds[name], 3)}
        line |= {"ratio": round(seconds[name] / seconds["transformers"], 3)}
        print(json.dumps(line | {"same_ten": found[name][-1][1] == found["transformers"][-1][1]}), flush=True)


if __name__ == "__main__":
    unpacking()
    if len(sys.argv) > 1:
        whole(sys.argv[1])
