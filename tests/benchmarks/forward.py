"""The forward pass of a random GPT-2 of 124M parameters, beside transformers' GPT2LMHeadModel on the same weights.

    python tests/benchmarks/forward.py

Measured in one process with two threads, at T = 8, 128 and 1024 positions, float32: gptcli's `forward` for the logits
of all positions and of the last one, beside the model of transformers with its fused attention (sdpa), which is asked
for the same rows. Both run in turn, after runs that are not counted and touch all weights.

Each line is JSON: seconds and peer_seconds are medians, ratio is the median over the pairs of gptcli's time by the
peer's (below 1: gptcli is faster), and difference is the largest |difference| of any logit. No network is used.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # the latter as the console entry sets it

import torch
from startup import VOCABULARY, make_checkpoint
from transformers import GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

from gptcli.model.forward import Inputs, forward
from gptcli.source import open_model

PAIRS = {8: 30, 128: 15, 1024: 5}  # counted pairs of runs, by positions


def timed(function: Callable[[], torch.Tensor]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def compare(name: str, ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor], pairs: int) -> None:
    """Prints one line; the runs that give the difference are the ones that are not counted."""
    difference = float((ours() - theirs()).abs().max())
    times = [(timed(ours), timed(theirs)) for _ in range(pairs)]
    own, peer = zip(*times)
    line = {
        "benchmark": name,
        "seconds": round(median(own), 5),
        "peer": "transformers GPT2LMHeadModel, sdpa",
        "peer_seconds": round(median(peer), 5),
        "ratio": round(median(a / b for a, b in times), 3),
        "difference": difference,
    }
    print(json.dumps(line), flush=True)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(2)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name))
        model = open_model(name)
        weights = model.weights(torch.float32, torch.device("cpu"))
        peer = GPT2LMHeadModel.from_pretrained(name, attn_implementation="sdpa").eval()
        for positions, pairs in PAIRS.items():
            ids = torch.randint(VOCABULARY, (1, positions), generator=torch.Generator().manual_seed(0))
            for rows, kept in (("all", 0), ("last", 1)):
                compare(
                    f"forward, T = {positions}, rows = {rows}",
                    lambda ids=ids, rows=rows: forward(Inputs(ids, rows=rows), weights, model.spec),
                    lambda ids=ids, kept=kept: peer(ids, use_cache=False, logits_to_keep=kept).logits,
                    pairs,
                )


if __name__ == "__main__":
    main()
