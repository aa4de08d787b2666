"""The forward pass on random weights beside transformers, beside a matrix product, and beside float64.

    python tests/benchmarks/forward.py [1b]

Measured in one process with two threads. GPT-2 of 124M parameters at T = 8, 128 and 1024 positions, float32 and, at
1024, bfloat16; with `1b`, the shape of Llama-3.2-1B in bfloat16 at T = 128 (5 GiB of memory and 2.4 of disk). gptcli
gives the last position's logits; the peer is transformers with its fused attention (sdpa) as it comes (logits of all
positions, keys and values kept), and asked for the last position's alone. All run in turn, after a round that is not
counted.

Each line is JSON: seconds are the fastest of all rounds, ratio is gptcli's by the peer's (below 1: gptcli is faster),
cpu_ratio the same of both cores' time, which other work on the machine moves less, and noise gptcli's median by its
fastest. The lines of the product tell FLOP/s (2 × multiply-adds) of the pass at T = 1024 beside the best of several
large products of the same type, and, as floor, what the ratio to each peer would be if every one of its operations ran
at that best: no code gets below it on that machine. The line of float64 tells the relative error at T = 1024, and
whether the ten best are the same in order. No network is used.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # the latter as the console entry sets it

import torch
from startup import VOCABULARY, make_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from gptcli.cli.main import keep_memory
from gptcli.count import flops_forward, flops_spared
from gptcli.model.forward import Inputs, forward
from gptcli.model.kernels import is_known
from gptcli.model.weights import Weights
from gptcli.source import Model, open_model

CPU = torch.device("cpu")
ROUNDS = {8: 30, 128: 12, 1024: 7}  # by positions
LLAMA = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}


def in_turn(runs: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Of each run, wall and processor seconds of every round."""
    found = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: times[1:] for name, times in found.items()}


def compare(what: str, model: Model, weights: Weights, peer: torch.nn.Module, positions: int) -> dict[str, float]:
    """Prints a line for each way to ask the peer; gives its seconds."""
    ids = random_ids(positions)
    runs = {
        "gptcli": lambda: forward(Inputs(ids, rows="last"), weights, model.spec),
        "transformers, sdpa, as it comes": lambda: peer(ids).logits[:, -1:],
        "transformers, sdpa, last logits": lambda: peer(ids, use_cache=False, logits_to_keep=1).logits,
    }
    difference = {name: float((run() - runs["gptcli"]()).abs().max()) for name, run in runs.items()}
    times = in_turn(runs, ROUNDS[positions])
    wall = {name: min(one[0] for one in found) for name, found in times.items()}
    cpu = {name: min(one[1] for one in found) for name, found in times.items()}
    own = wall.pop("gptcli")
    for name, seconds in wall.items():
        line = {"benchmark": f"{what}, T = {positions}", "seconds": round(own, 5), "peer": name}
        line |= {"peer_seconds": round(seconds, 5), "ratio": round(own / seconds, 3)}
        line |= {"cpu_ratio": round(cpu["gptcli"] / cpu[name], 3), "difference": difference[name]}
        print(json.dumps(line | {"noise": round(median(t for t, _ in times["gptcli"]) / own, 2)}), flush=True)
    return wall


def random_ids(positions: int) -> Tensor:
    return torch.randint(VOCABULARY, (1, positions), generator=torch.Generator().manual_seed(0))


def product_share(what: str, model: Model, weights: Weights, peers: dict[str, float]) -> None:
    """How near the pass comes to what large products of its type reach (float32: oneDNN's), all run in turn."""
    dtype = weights["embed.weight"].dtype
    multiply = torch.ops.mkldnn._linear_pointwise if is_known() and dtype == torch.float32 else None
    sizes = ((1024, 768, 3072), (1024, 3072, 768), (1024, 1024, 1024), (2048, 2048, 2048), (3072, 3072, 3072))
    runs = {"pass": lambda: forward(Inputs(random_ids(1024), rows="last"), weights, model.spec)}
    for rows, inner, columns in sizes:
        x, w = torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype)
        plain = lambda x=x, w=w: torch.nn.functional.linear(x, w)  # noqa: E731
        runs[f"{rows} {inner} {columns}"] = (
            (lambda x=x, w=w: multiply(x, w, None, "none", [], "")) if multiply else plain
        )
    keep_memory()  # as the console entry does
    times = in_turn(runs, 9)
    flops = {f"{a} {b} {c}": 2 * a * b * c for a, b, c in sizes}
    flops["pass"] = flops_forward(model.spec, 1024, head_rows=1) - flops_spared(model.spec, 1024)
    for clock, name in enumerate(("wall", "processor")):
        rate = {run: flops[run] / min(one[clock] for one in found) for run, found in times.items()}
        own, peak = rate.pop("pass"), max(rate.values())
        line = {"benchmark": f"{what}, FLOP/s beside a product's, {name} time", "gflops": round(own / 1e9)}
        line |= {"product_gflops": round(peak / 1e9), "ratio": round(own / peak, 3)}
        if name == "wall":
            line["floor"] = {peer: round(flops["pass"] / peak / seconds, 3) for peer, seconds in peers.items()}
        print(json.dumps(line), flush=True)


def exactness(model: Model) -> None:
    """float32 beside float64, at T = 1024."""
    inputs = Inputs(random_ids(1024), rows="last")
    found, exact = (forward(inputs, model.weights(t, CPU), model.spec)[0, 0] for t in (torch.float32, torch.float64))
    best = [logits.topk(10).indices.tolist() for logits in (found, exact)]
    error = float((found.double() - exact).norm() / exact.norm())
    line = {"benchmark": "float32 beside float64, T = 1024", "relative_error": error, "same_ten": best[0] == best[1]}
    print(json.dumps(line), flush=True)


def llama_checkpoint(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(2)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        if sys.argv[1:] == ["1b"]:
            llama_checkpoint(Path(name))
            plan = [("Llama-3.2-1B's shape, bfloat16", torch.bfloat16, (128,))]
        else:
            make_checkpoint(Path(name))
            plan = [
                ("GPT-2 124M, float32", torch.float32, (8, 128, 1024)),
                ("GPT-2 124M, bfloat16", torch.bfloat16, (1024,)),
            ]
        model = open_model(name)
        for what, dtype, positions in plan:
            weights = model.weights(dtype, CPU)
            peer = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdpa", dtype=dtype).eval()
            for tokens in positions:
                peers = compare(what, model, weights, peer, tokens)
            if tokens == 1024:
                product_share(f"{what}, T = 1024", model, weights, peers)
            if dtype == torch.float32:
                exactness(model)


if __name__ == "__main__":
    main()
