"""The operations that act on each position by itself. C hidden size, F MLP size, V vocabulary, D head size.

float32 and float64 compute in themselves; half types compute norms, rotation and logits in float32.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gptcli.model.weights import Weights
from gptcli.spec import Dense, LayerNorm, Learned, LinearScaling, Llama3Scaling, NoNorm, NoScaling, Rope, Spec
from gptcli.trace import Silent

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sensitive sums are taken: float32 for half types, the type itself otherwise."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ (+ bias [out]) → [..., out]."""
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def norm(x: Tensor, w: Weights, name: str, spec: Spec) -> Tensor:
    """The model's norm over the last axis, shape kept. LayerNorm: arXiv:1607.06450; RMSNorm: arXiv:1910.07467."""
    part = spec.norm
    if isinstance(part, NoNorm):
        return x
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    h = x.to(wide(x.dtype))
    if isinstance(part, LayerNorm):
        bias = bias if bias is None else bias.to(h.dtype)
        return F.layer_norm(h, weight.shape, weight.to(h.dtype), bias, part.eps).to(x.dtype)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + part.eps)
    return (h * (part.offset + weight.to(h.dtype))).to(x.dtype)


def embed(ids: Tensor, positions: Tensor, w: Weights, spec: Spec) -> Tensor:
    """Token rows, scaled, plus position rows where they are learned: ids, positions [B, T] → [B, T, C]."""
    x = w.rows("embed.weight", ids)  # [B, T] → [B, T, C]
    if spec.embed_scale != 1.0:
        x = x * torch.tensor(spec.embed_scale, dtype=x.dtype)
    if isinstance(spec.position, Learned):
        x = x + w.rows("pos_embed.weight", positions)
    return x


def mlp(x: Tensor, w: Weights, part: Dense, probe: Silent) -> Tensor:
    """down(act(up(x))), or gated: down(act(gate(x)) · up(x)). [B, T, C] → [B, T, C]."""
    up = probe("up", linear(x, w, "up"))  # [B, T, C] → [B, T, F]
    act = ACTIVATIONS[part.activation]
    hidden = act(probe("gate", linear(x, w, "gate"))) * up if part.gated else act(up)
    return linear(probe("act", hidden), w, "down")  # [B, T, F] → [B, T, C]


def head(x: Tensor, w: Weights) -> Tensor:
    """Logits over the vocabulary: [B, T, C] → [B, T, V], float32 for half types."""
    weight, bias = w["lm_head.weight"], w.get("lm_head.bias")
    dtype = wide(x.dtype)
    if dtype == x.dtype:
        return F.linear(x, weight, bias)
    # A block of rows at a time, so that a large vocabulary is never held twice.
    x = x.to(dtype)
    logits = torch.cat([F.linear(x, rows.to(dtype)) for rows in weight.split(8192)], dim=-1)
    return logits if bias is None else logits + bias.to(dtype)


def rotary(spec: Spec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """cos and sin of every pair's angle at every position: [B, T] → two of [B, 1, T, D/2]; None without rotation.

    Angles are taken in float64, so that a far position loses nothing.
    """
    if not isinstance(spec.position, Rope):
        return None
    pair = torch.arange(0, spec.attention.head_dim, 2, dtype=torch.float64)
    frequencies = _scaled(spec.position.theta ** -(pair / spec.attention.head_dim), spec.position.scaling)
    angles = positions.cpu().double()[:, None, :, None] * frequencies  # [B, T] → [B, 1, T, D/2]
    cos, sin = angles.cos().to(wide(dtype)), angles.sin().to(wide(dtype))
    return cos.to(positions.device), sin.to(positions.device)


def _scaled(frequencies: Tensor, scaling: NoScaling | LinearScaling | Llama3Scaling) -> Tensor:
    """Rotary frequencies [D/2] for a context longer than the one trained on."""
    if isinstance(scaling, NoScaling):
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    # How far each wavelength lies between the low (0) and the high (1) mark of turns in the original context.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor], part: Rope) -> Tensor:
    """Each pair of a head turned by its angle: x [B, H, T, D], cos and sin [B, 1, T, D/2]. arXiv:2104.09864."""
    cos, sin = rotation
    h = x.to(cos.dtype)
    a, b = h.chunk(2, -1) if part.pairs == "halves" else (h[..., 0::2], h[..., 1::2])
    turned = a * cos - b * sin, a * sin + b * cos
    joined = torch.cat(turned, -1) if part.pairs == "halves" else torch.stack(turned, -1).flatten(-2)
    return joined.to(x.dtype)
