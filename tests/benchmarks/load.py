"""From a checkpoint on disk to the next token: time and memory of the whole process, beside transformers'.

    python tests/benchmarks/load.py [FOLDER]

Makes a Llama-3.2-1B-shaped checkpoint in bfloat16, random, in five shards (2.3 GiB in FOLDER or a temporary folder),
and runs both on the same eight ids, in turn, each in a process of its own. One JSON line for each: `seconds` (median of
the runs) and `ratio` to transformers'; `anonymous_MiB`, memory that is the process's own and not the file's pages, when
the logits are there, and its share of the checkpoint. The library rounds its logits to bfloat16, so that near ties may
change places.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from gptcli.config import find_config, read_config
from gptcli.layout import layout

IDS = [128000, 791, 8415, 7731, 389, 279, 5634, 1606]
RUNS = 3
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip

OURS = ["gptcli", "topk", "--ids", ",".join(map(str, IDS)), "-q", "-m"]  # then the folder
THEIRS = f"""
import sys, torch
from transformers import AutoModelForCausalLM
with torch.inference_mode():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[-1], dtype="auto")
    logits = model(torch.tensor([{IDS}]), logits_to_keep=1).logits[0, -1]
print(*logits.topk(10).indices.tolist(), sep="\\n")
"""
MEMORY = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["RssAnon"].split()[0]) // 1024)
"""


def make(folder: Path) -> None:
    """Every weight of the layout under its published name, drawn at random, an equal share of names a shard."""
    names = {
        "embed": "embed_tokens", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.o_proj", "mlp.up": "mlp.up_proj", "mlp.gate": "mlp.gate_proj",
        "mlp.down": "mlp.down_proj", "final_norm": "norm",
    }  # fmt: skip
    params = [p for p in layout(read_config(find_config("llama3.2-1b")).spec) if not p.tied_to]
    draw, table = torch.Generator().manual_seed(0), {}
    for shard in range(5):
        tensors = {}
        for param in params[shard::5]:
            head, _, stem = param.name.removesuffix(".weight").rpartition("layers.")
            layer, _, inside = stem.partition(".") if head == "" and "layers." in param.name else ("", "", stem)
            name = f"model.layers.{layer}.{names[inside]}.weight" if layer else f"model.{names[inside]}.weight"
            gain = param.role == "gain"
            tensor = torch.ones(param.shape) if gain else torch.empty(param.shape).normal_(0, 0.02, generator=draw)
            tensors[name] = tensor.to(torch.bfloat16)
        file = f"model-{shard + 1:05}-of-00005.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        table |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def run(command: list[str]) -> tuple[float, list[str]]:
    """Seconds, and the lines that a process prints."""
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - begun, done.stdout.split("\n")[:-1]


def measure(folder: Path) -> None:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20
    script = f"import sys; from gptcli.cli.main import main; sys.argv = {[*OURS, str(folder)]}; main()"
    commands = {"gptcli": [*OURS, str(folder)], "transformers": [sys.executable, "-c", THEIRS, str(folder)]}
    asking = {"gptcli": script + MEMORY, "transformers": THEIRS + MEMORY}  # the same, then a word on memory
    found: dict[str, list] = {name: [] for name in commands}
    for _ in range(RUNS + 1):  # the first fills the caches
        for name, command in commands.items():
            found[name].append(run(command))
    seconds = {name: statistics.median(one[0] for one in runs[1:]) for name, runs in found.items()}
    best = {name: {line.split("\t")[0] for line in runs[-1][1]} for name, runs in found.items()}
    for name in commands:
        memory = int(run([sys.executable, "-c", asking[name], str(folder)])[1][-1])
        line = {
            "benchmark": "1B bfloat16 checkpoint in five shards to the top ten, T=8",
            "of": name,
            "seconds": round(seconds[name], 3),
            "ratio": round(seconds[name] / seconds["transformers"], 3),
            "anonymous_MiB": memory,
            "share_of_checkpoint": round(memory / size, 3),
            "top_ten_as_transformers": len(best[name] & best["transformers"]),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as made:
        make(Path(made))
        measure(Path(made))
