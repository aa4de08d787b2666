"""How long a command takes as a whole process, beside what Python and torch need to start at all.

    python tests/benchmarks/startup.py

Measured: `--help`, `params`, `forward "Cats sit on"`, and `topk` of 8 ids on a random GPT-2 of 124M parameters
(float32, written into a temporary folder), started as `gptcli …`, beside `python -c pass` and `python -c "import
torch"`. A peer and its commands run in turn, round after round, after one round that is not counted and fills the
caches.

Each line is JSON: seconds is the median, min the fastest run, and ratio the median over the rounds of the command's
time by its peer's time in the same round. On a machine that has other work, read ratio and min. No network is used.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

HIDDEN, LAYERS, VOCABULARY, CONTEXT = 768, 12, 50257, 1024  # GPT-2 small's sizes


def make_checkpoint(folder: Path, seed: int = 0) -> None:
    """config.json and model.safetensors of a random GPT-2: Hugging Face's names, matrices [in, out]."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0.0, 0.02, generator=generator)

    tensors = {"wte.weight": random(VOCABULARY, HIDDEN), "wpe.weight": random(CONTEXT, HIDDEN)}
    for norm in [f"h.{i}.ln_{n}" for i in range(LAYERS) for n in (1, 2)] + ["ln_f"]:
        tensors |= {f"{norm}.weight": 1 + random(HIDDEN), f"{norm}.bias": random(HIDDEN)}
    matrices = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    for i in range(LAYERS):
        for name, (into, out) in matrices.items():
            tensors[f"h.{i}.{name}.weight"] = random(into * HIDDEN, out * HIDDEN)
            tensors[f"h.{i}.{name}.bias"] = random(out * HIDDEN)
    tensors = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 12, "n_positions": CONTEXT, "vocab_size": VOCABULARY}
    said = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new"}
    (folder / "config.json").write_text(json.dumps(said | sizes), encoding="utf-8")


def seconds(command: Sequence[str], folder: Path) -> float:
    """Wall time of one process, run in the folder. Raises CalledProcessError where it fails."""
    begun = time.perf_counter()
    subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return time.perf_counter() - begun


def compare(peer: Sequence[str], commands: Sequence[Sequence[str]], folder: Path, rounds: int) -> None:
    """Prints a line for the peer and one for each command, all run in turn."""
    times = [[seconds(command, folder) for command in (peer, *commands)] for _ in range(rounds + 1)][1:]
    for command, spent in zip((peer, *commands), zip(*times)):
        line = {
            "benchmark": _shown(command),
            "seconds": round(median(spent), 4),
            "min": round(min(spent), 4),
            "peer": _shown(peer),
            "ratio": round(median(own / row[0] for own, row in zip(spent, times)), 3),
        }
        print(json.dumps(line), flush=True)


def _shown(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *(f'"{word}"' if " " in word else word for word in command[1:])])


def main() -> None:
    gptcli = str(Path(sys.executable).with_name("gptcli"))
    ids = "464,3797,3332,319,262,2603,290,262"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "gpt2-124m").mkdir()
        make_checkpoint(folder / "gpt2-124m")
        light = [["--help"], ["params", "gpt2-small"], ["params", "--config", "llama3.1-405b"]]
        heavy = [["forward", "Cats sit on"], ["topk", "-m", "gpt2-124m", "--ids", ids]]
        compare([sys.executable, "-c", "pass"], [[gptcli, *words] for words in light], folder, rounds=20)
        compare([sys.executable, "-c", "import torch"], [[gptcli, *words] for words in heavy], folder, rounds=10)


if __name__ == "__main__":
    main()
