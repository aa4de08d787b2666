"""How long it takes to say what a checkpoint is, and how much memory, beside what others take to open or count it.

    python tests/benchmarks/headers.py [--sft /path/to/sft]

Made up in a temporary folder: Llama-3.1-405B in bfloat16, 191 shards with an index, every shard a header and a hole (a
few MB on disk in all); and one file of 10,000 tensors. Measured, each as a whole process, in turn, round after round
after one that is not counted: `gptcli inspect`; a bare command of Typer that prints a table by Rich, which is what any
such tool takes to start; safetensors' safe_open with torch, asked for every tensor's shape; transformers' count of the
model built on the meta device; and sft-cli (`sft ls` of all shards, `sft info` of the one file), where it is installed.

Each line is JSON: seconds is the median, min the fastest run, cpu the least time of a processor, peak_MiB the most
resident memory; ratio is the median over the rounds of gptcli's time by the peer's in the same round, cpu_ratio that of
the least processor times. On a machine that has other work, read the latter. No network is used.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROUNDS = 9
LAYER = {
    "input_layernorm": ("C",), "self_attn.q_proj": ("Q", "C"), "self_attn.k_proj": ("K", "C"),
    "self_attn.v_proj": ("K", "C"), "self_attn.o_proj": ("C", "Q"), "post_attention_layernorm": ("C",),
    "mlp.gate_proj": ("F", "C"), "mlp.up_proj": ("F", "C"), "mlp.down_proj": ("C", "F"),
}  # fmt: skip
LARGE = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
MANY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1110,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip

BARE = """
import typer
from rich.console import Console
from rich.table import Table
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
@app.command()
def show(path: str) -> None:
    table = Table(box=None)
    for name in ("tensor", "type", "shape"):
        table.add_column(name)
    for i in range(12):
        table.add_row(f"layers.{i}", "BF16", "[16384, 16384]")
    Console().print(table)
app()
"""
SAFE_OPEN = """
import sys
from pathlib import Path
import torch
from safetensors import safe_open
count = 0
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            count += torch.Size(file.get_slice(name).get_shape()).numel()
print(count)
"""
META = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
print(sum(p.numel() for p in model.parameters()))
"""


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape, as transformers names them."""
    hidden, head = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    size = {"C": hidden, "Q": hidden, "K": head * config["num_key_value_heads"], "F": config["intermediate_size"]}
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{i}.{name}.weight": tuple(size[s] for s in axes) for name, axes in LAYER.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def write(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """A file with its header, and nothing where its numbers would be."""
    at, header = 0, {"__metadata__": {"format": "pt"}}
    for name, shape in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def make_large(folder: Path, number: int = 191) -> int:
    """Shards of about the same size, and their index; the count of parameters."""
    tensors = shapes(LARGE)
    each = sum(map(prod, tensors.values())) / number
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(number)]
    at = 0
    for name, shape in tensors.items():
        parts[min(int(at / each), number - 1)][name] = shape
        at += prod(shape)
    table = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05}-of-{number:05}.safetensors"
        write(folder / file, part)
        table |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (folder / "config.json").write_text(json.dumps(LARGE))
    return at


def make_many(folder: Path) -> int:
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (8,) for i in range(7)}
    tensors = shapes(MANY)
    assert len(tensors | buffers) == 10_000
    write(folder / "model.safetensors", dict(sorted((tensors | buffers).items())))
    (folder / "config.json").write_text(json.dumps(MANY))
    return sum(map(prod, tensors.values()))


class Spent(NamedTuple):
    seconds: float
    cpu: float
    peak_MiB: float
    said: str


def spend(command: list[str], environment: dict[str, str]) -> Spent:
    """What one process takes. Raises CalledProcessError where it fails."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True)
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Spent(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, said)


def measure(what: str, folder: Path, count: int, sft: str | None, environment: dict[str, str]) -> None:
    """Prints a line for gptcli and one for each peer, all run in turn."""
    python = sys.executable
    commands = {
        "gptcli inspect": [python, "-m", "gptcli", "inspect", str(folder)],
        "gptcli inspect --json": [python, "-m", "gptcli", "inspect", str(folder), "--json"],
        "a bare Typer and Rich": [python, "-c", BARE, str(folder)],
        "safe_open, torch": [python, "-c", SAFE_OPEN, str(folder)],
        "transformers on meta": [python, "-c", META, str(folder)],
    }
    if sft:
        files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
        commands["sft"] = [sft, "ls" if len(files) > 1 else "info", *files]
    runs: dict[str, list[Spent]] = {name: [] for name in commands}
    for turn in range(ROUNDS + 1):
        for name, command in commands.items():
            spent = spend(command, environment)
            runs[name] += [spent] if turn else []
    assert f"{count:,}" in runs["gptcli inspect"][0].said.split("\n")[0]
    assert int(runs["transformers on meta"][0].said) == count
    ours, bare = runs["gptcli inspect"], min(one.cpu for one in runs["a bare Typer and Rich"])
    for name, found in runs.items():
        cpu = min(one.cpu for one in found)
        line = {
            "benchmark": what,
            "of": name,
            "seconds": round(median(one.seconds for one in found), 4),
            "min": round(min(one.seconds for one in found), 4),
            "cpu": round(cpu, 4),
            "above_bare_cpu_ms": round(1000 * (cpu - bare), 1),
            "peak_MiB": round(max(one.peak_MiB for one in found), 1),
            "ratio": round(median(a.seconds / b.seconds for a, b in zip(ours, found)), 3),
            "cpu_ratio": round(min(one.cpu for one in ours) / cpu, 3),
        }
        print(json.dumps(line), flush=True)
    if not sft:
        print(json.dumps({"benchmark": what, "of": "sft", "absent": "give its place by --sft"}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sft", default=shutil.which("sft"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Bytecode is what an installed package has; the first round, which isn't counted, writes it.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        for what, make in (("405B in 191 shards", make_large), ("10,000 tensors in a file", make_many)):
            (folder / what).mkdir()
            measure(what, folder / what, make(folder / what), given.sft, environment)


if __name__ == "__main__":
    main()
