"""How long a forward pass takes and where, and how fast this machine multiplies matrices."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from gptcli.layout import Place
from gptcli.model.ops import linear
from gptcli.model.weights import Weights
from gptcli.trace import Silent

# What is born in a stage ends it.
STAGES = {
    "embedding": ("embed",),
    "norms": ("embed_norm", "attn_norm", "attn_out_norm", "cross_norm", "cross_out_norm", "mlp_norm", "mlp_out_norm",
              "final_norm", "attn.q_norm", "attn.k_norm"),
    "queries, keys, values": ("attn.q", "attn.k", "attn.v"),
    "rotation": ("attn.q_rot", "attn.k_rot"),
    "attention": ("attn.z",),
    "attention's output": ("attn_out",),
    "mlp": ("mlp.router", "mlp.up", "mlp.gate", "mlp.act", "mlp_out"),
    "residual adds": ("resid_pre", "resid_mid", "resid_cross", "resid_post"),
    "head": ("lm_head.dense", "lm_head.norm", "embed_out", "logits"),
}  # fmt: skip
STAGE_OF = {name: stage for stage, names in STAGES.items() for name in names}
STAGE_OF |= {name.replace("attn", "cross", 1): stage for name, stage in STAGE_OF.items() if name.startswith("attn")}
SIZES = (512, 1024, 2048)  # rows and columns of the matrices that are multiplied


class Clock(Silent):
    """A probe that gives the time since the last activation to the stage in which the next one is born.

    spent: seconds by stage; wait: what makes a device finish before the time is taken.
    """

    def __init__(self, wait: Callable[[], None], scope: str = "", shared: "Clock | None" = None):
        self.wait, self.scope, self.shared = wait, scope, shared or self
        if shared is None:
            self.spent, self.last = dict.fromkeys(STAGES, 0.0), time.perf_counter()

    def at(self, scope: str) -> "Clock":
        return Clock(self.wait, f"{self.scope}{scope}.", self.shared)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        self.wait()
        clock, now = self.shared, time.perf_counter()
        clock.spent[STAGE_OF[Place.of(self.scope + name).name]] += now - clock.last
        clock.last = now
        return x


def waiting(device: torch.device) -> Callable[[], None]:
    """What makes a device finish what it was given; nothing on a CPU, which has."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


def product_rate(dtype: torch.dtype, device: torch.device, repeat: int) -> float:
    """FLOPs a second (2 × multiply-adds) of the fastest of several square matrix products, the best of so many."""
    best, wait = 0.0, waiting(device)
    with torch.inference_mode():
        for size in SIZES:
            x = torch.ones(size, size, dtype=dtype, device=device)
            w = Weights({"square.weight": x})
            for _ in range(repeat + 1):
                begun = time.perf_counter()
                linear(x, w, "square")
                wait()
                best = max(best, 2 * size**3 / (time.perf_counter() - begun))
    return best


def peak_bytes(device: torch.device) -> int | None:
    """The most memory that this process has held so far, its libraries and the pages of its files too; on CUDA the most
    that was allocated there. None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
