"""Random weights, the same for the same seed whatever is read first."""

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gptcli.layout import Param
from gptcli.model.weights import Lazy
from gptcli.spec import RMSNorm, Spec

STD = 0.02  # GPT-2's


def random_weights(spec: Spec, params: Iterable[Param], seed: int, dtype: torch.dtype, device: torch.device) -> Lazy:
    """GPT-2's initialisation: N(0, 0.02²), by √(2N) less where a product joins the residual stream; gains 1, biases 0.

    Each tensor is drawn on the CPU when it is first read, from a generator seeded by (seed, its name).
    """
    offset = spec.norm.offset if isinstance(spec.norm, RMSNorm) else 0.0

    def draw(param: Param) -> Callable[[], Tensor]:
        def make() -> Tensor:
            if param.role in ("gain", "bias"):
                tensor = torch.full(param.shape, 1.0 - offset if param.role == "gain" else 0.0)
            else:
                digest = hashlib.sha256(f"{seed} {param.name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                std = STD / (2 * spec.n_layers) ** 0.5 if param.role == "residual" else STD
                tensor = torch.empty(param.shape).normal_(0.0, std, generator=generator)
            return tensor.to(device, dtype)

        return make

    return Lazy({p.name: draw(p) for p in params if not p.tied_to})
