"""Which kernel multiplies by a matrix: chosen here alone, by the processor and the shapes, never by the machine's load.

GPTCLI_LINEAR=plain|onednn overrides. Every kernel computes in the type that it is given: float32 stays IEEE float32.
"""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gptcli.errors import GptcliError

FEW = 8  # with fewer rows, and a weight of no more numbers than LARGE, calling oneDNN takes longer than it spares
LARGE = 1 << 20
MANY = 256  # with so many rows, a copy of a weight that lies with gaps pays: oneDNN has no fast kernel for gaps


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ (+ bias [out]) → [..., out]. Raises GptcliError for a choice that isn't there."""
    fits = x.dtype == torch.float32 and x.device.type == "cpu" and pays(x.numel() // x.shape[-1], weight)
    differentiated = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not by_onednn() or not fits or differentiated:
        return F.linear(x, weight, bias)
    weight = weight.T.contiguous().T if lies(weight) == "gaps" else weight
    bias = None if bias is None else bias.contiguous()  # the operator doesn't look at its stride
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")


def side_by_side(weights: Sequence[Tensor]) -> Tensor | None:
    """One matrix whose rows are these matrices', where they are views that follow one another; else None."""
    first, rows, size = weights[0], 0, weights[0].element_size()
    for weight in weights:
        follows = weight.data_ptr() == first.data_ptr() + rows * first.stride(0) * size
        if not follows or (weight.stride(), weight.shape[1]) != (first.stride(), first.shape[1]):
            return None
        rows += len(weight)
    last = first.storage_offset() + (rows - 1) * first.stride(0) + (first.shape[1] - 1) * first.stride(1)
    if last * size >= first.untyped_storage().nbytes():  # the others only happen to lie there
        return None
    return first.as_strided((rows, first.shape[1]), first.stride())


def pays(rows: int, weight: Tensor) -> bool:
    """Is oneDNN's the faster kernel for so many rows of x? For one row it is slow where a weight lies by columns."""
    match lies(weight):
        case "gaps":
            return rows >= MANY
        case "columns" if rows == 1:
            return False
    return rows >= FEW or weight.numel() > LARGE


def lies(weight: Tensor) -> Literal["rows", "columns", "gaps"]:
    """What of a weight [out, in] follows without gaps in memory."""
    return "rows" if weight.is_contiguous() else "columns" if weight.T.is_contiguous() else "gaps"


@cache
def by_onednn() -> bool:
    """Is oneDNN asked for float32? By default on AMD, where MKL, which torch asks itself, takes a slower path."""
    wanted = os.environ.get("GPTCLI_LINEAR") or ("onednn" if vendor() == "AuthenticAMD" else "plain")
    if wanted not in ("plain", "onednn"):
        raise GptcliError(f"GPTCLI_LINEAR={wanted}: no such kernel", "plain or onednn", "kernel")
    return wanted == "onednn" and is_known()


def is_known() -> bool:
    """Has this torch the operator, with the arguments that are given here? It is none of torch's public ones."""
    found = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return found is not None and torch.backends.mkldnn.is_available() and len(found.default._schema.arguments) == 6


def vendor() -> str:
    """The processor's maker, as /proc/cpuinfo has it; empty where the system does not say."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return ""
