"""The operations that act on each position by itself. C hidden size, F MLP size, V vocabulary, D head size (R of
it rotated), P the size of a token's row where it is not C, E experts.

float32 and float64 compute in themselves; half types compute norms, rotation and logits in float32.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gptcli.memory import HEAD_BLOCK
from gptcli.model.kernels import product, side_by_side
from gptcli.model.weights import Weights
from gptcli.spec import (
    Dense,
    DynamicScaling,
    Experts,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoNorm,
    NoScaling,
    Relative,
    Rope,
    Sinusoidal,
    Spec,
    YarnScaling,
)
from gptcli.trace import SILENT, Silent

ACTIVATIONS = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "tanh": torch.tanh,
}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sensitive sums are taken: float32 for half types, the type itself otherwise."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ (+ bias [out]) → [..., out]."""
    return w.joined(name, product(x, w[f"{name}.weight"], w.get(f"{name}.bias")))


def linears(x: Tensor, w: Weights, *names: str) -> list[Tensor]:
    """Several linears of one x [..., in] → [..., out] each: one product where a stored tensor has them side by side."""
    weights, biases = [w[f"{name}.weight"] for name in names], [w.get(f"{name}.bias") for name in names]
    whole, biased = side_by_side(weights), sum(bias is not None for bias in biases)
    if whole is None or biased not in (0, len(names)):
        return [linear(x, w, name) for name in names]
    parts = product(x, whole, torch.cat(biases) if biased else None).split([len(weight) for weight in weights], -1)
    return [w.joined(name, part) for name, part in zip(names, parts)]


def norm(x: Tensor, w: Weights, name: str, spec: Spec) -> Tensor:
    """The model's norm over the last axis, shape kept. LayerNorm: arXiv:1607.06450; RMSNorm: arXiv:1910.07467."""
    part = spec.norm
    if isinstance(part, NoNorm):
        return x
    weight, bias = w.get(f"{name}.weight"), w.get(f"{name}.bias")
    h = x.to(wide(x.dtype))  # the kernel's own sums of half types lose digits where a row is nearly constant
    if isinstance(part, LayerNorm):
        weight, bias = (p if p is None else p.to(h.dtype) for p in (weight, bias))
        return F.layer_norm(h, h.shape[-1:], weight, bias, part.eps).to(x.dtype)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + part.eps)
    return (h if weight is None else h * (part.offset + weight.to(h.dtype))).to(x.dtype)


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap): x where it is small, never beyond ±cap (arXiv:2408.00118)."""
    return x if cap is None else (x / cap).tanh_().mul_(cap)


def embed(ids: Tensor, positions: Tensor, w: Weights, spec: Spec, segments: Tensor | None = None) -> Tensor:
    """Token rows, scaled, plus what tells positions and segments: ids, positions, segments [B, T] → [B, T, C].

    segments None: all are the first.
    """
    x = w.rows("embed.weight", ids)  # [B, T] → [B, T, C], or [B, T, P] where rows have a size of their own
    x = linear(x, w, "embed_in") if "embed_in.weight" in w else x  # [B, T, P] → [B, T, C]
    if spec.embed_scale != 1.0:
        x = x * torch.tensor(spec.embed_scale, dtype=x.dtype)
    if "segment_embed.weight" in w:
        x = x + w.rows("segment_embed.weight", torch.zeros_like(ids) if segments is None else segments)
    if isinstance(spec.position, Learned):
        x = x + w.rows("pos_embed.weight", positions + spec.position.offset)
    if isinstance(spec.position, Sinusoidal):
        x = x + sinusoids(positions, x.shape[-1], spec.position).to(x.dtype)
    return x


def sinusoids(positions: Tensor, size: int, part: Sinusoidal) -> Tensor:
    """sin and cos of position · theta^(-2i/C): positions [B, T] → [B, T, C], in float64 (arXiv:1706.03762)."""
    frequencies = part.theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = positions.cpu().double()[..., None] * frequencies  # [B, T] → [B, T, C/2]
    waves = angles.sin(), angles.cos()
    joined = torch.cat(waves, -1) if part.pairs == "halves" else torch.stack(waves, -1).flatten(-2)  # → [B, T, C]
    return joined.to(positions.device)


def distance_scores(distances: Tensor, causal: bool, w: Weights, part: Relative) -> Tensor:
    """What a key's position less a query's adds to each head's score: [B, T, S] → [B, H, T, S] (arXiv:1910.10683)."""
    buckets, base = part.buckets, 0
    if not causal:
        buckets //= 2
        base = (distances > 0) * buckets  # keys to the right have the upper half
        distances = -distances.abs()
    ago = (-distances).clamp(min=0)
    near = buckets // 2  # so many have a bucket each; the rest share theirs, the wider the farther
    far = torch.log(ago.float().clamp(min=1) / near) / math.log(part.max_distance / near) * (buckets - near)
    bucket = torch.where(ago < near, ago, (near + far.long()).clamp(max=buckets - 1))
    return w.rows("rel_bias.weight", base + bucket).permute(0, 3, 1, 2)  # [B, T, S] → [B, T, S, H] → [B, H, T, S]


def mlp(x: Tensor, w: Weights, part: Dense | Experts, probe: Silent) -> Tensor:
    """[B, T, C] → [B, T, C], each position by itself."""
    return experts(x, w, part, probe) if isinstance(part, Experts) else dense(x, w, part, probe)


def dense(x: Tensor, w: Weights, part: Dense, probe: Silent = SILENT) -> Tensor:
    """down(act(up(x))), or gated: down(act(gate(x)) · up(x)). [..., C] → [..., C]."""
    up = probe("up", linear(x, w, "up"))  # [..., C] → [..., F]
    act = ACTIVATIONS[part.activation]
    hidden = act(probe("gate", linear(x, w, "gate"))) * up if part.gated else act(up)
    return linear(probe("act", hidden), w, "down")  # [..., F] → [..., C]


def experts(x: Tensor, w: Weights, part: Experts, probe: Silent) -> Tensor:
    """Each token's top_k experts, weighed; an expert runs once, on the tokens that took it. [B, T, C] → [B, T, C]."""
    tokens = x.flatten(0, 1)  # [B, T, C] → [n, C]
    weights, taken = route(probe("router", linear(x, w, "router")).flatten(0, 1), part)  # [n, E] → two of [n, k]
    out = torch.zeros_like(tokens, dtype=weights.dtype)
    for expert in taken.unique().tolist():
        token, choice = (taken == expert).nonzero(as_tuple=True)
        given = one_expert(tokens[token], w.at(f"experts.{expert}"), part)
        out.index_add_(0, token, given.to(out.dtype) * weights[token, choice, None])
    out = out.to(x.dtype)
    if part.shared_size is not None:
        out = out + shared_expert(tokens, w, part)
    return out.view_as(x)  # [n, C] → [B, T, C]


def route(preferences: Tensor, part: Experts) -> tuple[Tensor, Tensor]:
    """The weights of the experts that each token takes, and which they are: [n, E] → two of [n, k]."""
    weights, taken = preferences.to(wide(preferences.dtype)).softmax(-1).topk(part.top_k)
    return (weights / weights.sum(-1, keepdim=True) if part.normalized else weights), taken


def shared_expert(x: Tensor, w: Weights, part: Experts) -> Tensor:
    """The expert that every token takes, weighed by a sigmoid of its own. [n, C] → [n, C]."""
    return linear(x, w, "shared_router").sigmoid() * one_expert(x, w.at("shared"), part)


def one_expert(x: Tensor, w: Weights, part: Experts) -> Tensor:
    """One expert: down(act(gate(x)) · up(x)), within the limit where there is one. [n, C] → [n, C]."""
    up, gate = linear(x, w, "up"), linear(x, w, "gate")  # [n, C] → [n, F]
    if part.limit is not None:
        up, gate = up.clamp(-part.limit, part.limit) + 1, gate.clamp(max=part.limit)
    return linear(ACTIVATIONS[part.activation](gate) * up, w, "down")  # [n, F] → [n, C]


def head(x: Tensor, w: Weights, spec: Spec, probe: Silent = SILENT) -> Tensor:
    """Logits over the vocabulary: [B, T, C] → [B, T, V], float32 for half types."""
    part = spec.lm_head
    if part.transform is not None:
        x = probe("lm_head.dense", linear(x, w, "lm_head.dense"))
        x = probe("lm_head.norm", norm(ACTIVATIONS[part.transform.activation](x), w, "lm_head.norm", spec))
    if "embed_out.weight" in w:  # token rows have a size of their own
        x = probe("embed_out", linear(x, w, "embed_out"))  # [B, T, C] → [B, T, P]
    logits = w.joined("lm_head", logits_of(x, w, spec.vocab_size))
    return softcap(logits if part.scale == 1.0 else logits.mul_(part.scale), part.softcap)


def logits_of(x: Tensor, w: Weights, vocab_size: int) -> Tensor:
    """x [B, T, C] · weight [V, C]ᵀ (+ bias [V]) → [B, T, V], in float32 for half types.

    A weight that is turned into float32 for this alone, or isn't kept, is read a block of rows at a time.
    """
    dtype, bias = wide(x.dtype), w.get("lm_head.bias")
    if dtype == x.dtype and not w.passes("lm_head.weight"):
        return product(x, w["lm_head.weight"], bias)
    x, logits, size = x.to(dtype), x.new_empty(*x.shape[:-1], vocab_size, dtype=dtype), 0
    for rows in w.blocks("lm_head.weight", HEAD_BLOCK):
        logits[..., size : size + len(rows)] = product(x, rows.to(dtype))
        size += len(rows)
    logits = logits[..., :size]  # of a share of the vocabulary, fewer
    return logits if bias is None else logits.add_(bias)


def rotary(spec: Spec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """cos and sin of every pair's angle at every position: [B, T] → two of [B, 1, T, R/2]; None without rotation.

    Angles are taken in float64, so that a far position loses nothing. Each text has the frequencies of its own length.
    """
    part = spec.position
    if not isinstance(part, Rope):
        return None
    size = part.rotary_dim or spec.attention.head_dim
    found = [frequencies(part, size, int(length)) for length in positions.amax(-1) + 1]
    per_text = torch.stack([f for f, _ in found])[:, None, None]  # [B, 1, 1, R/2]
    angles = positions.cpu().double()[:, None, :, None] * per_text  # [B, T] → [B, 1, T, R/2]
    factor = found[0][1] if part.direction == "forward" else -found[0][1]
    cos, sin = (angles.cos() * found[0][1]).to(wide(dtype)), (angles.sin() * factor).to(wide(dtype))
    return cos.to(positions.device), sin.to(positions.device)


def frequencies(part: Rope, size: int, length: int) -> tuple[Tensor, float]:
    """Radians a position for every pair in a text of that length [R/2], in float64, and the factor of cos and sin."""
    pair = torch.arange(0, size, 2, dtype=torch.float64) / size
    plain, scaling = part.theta**-pair, part.scaling
    match scaling:
        case NoScaling():
            return plain, 1.0
        case LinearScaling():
            return plain / scaling.factor, 1.0
        case DynamicScaling():
            longer = max(length / scaling.original_context, 1.0)
            base = part.theta * (scaling.factor * longer - (scaling.factor - 1)) ** (size / (size - 2))
            return base**-pair, 1.0
        case Llama3Scaling():
            # How far each pair's turns in the original context lie between the low (0) and the high (1) mark.
            turns = scaling.original_context * plain / (2 * math.pi)
            span = scaling.high_freq_factor - scaling.low_freq_factor
            kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
            return kept * plain + (1 - kept) * plain / scaling.factor, 1.0
        case YarnScaling():
            kept = 1 - _ramp(scaling, part.theta, size)
            factor = scaling.attention_factor
            factor = (0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0) if factor is None else factor
            return kept * plain + (1 - kept) * plain / scaling.factor, factor
        case LongRopeScaling():
            long = length > scaling.original_context
            divisors = torch.tensor(scaling.long_factors if long else scaling.short_factors, dtype=torch.float64)
            return plain / divisors, scaling.attention_factor


def _ramp(scaling: YarnScaling, theta: float, size: int) -> Tensor:
    """0 for pairs of more than beta_fast turns in the original context, 1 below beta_slow: [R/2]. Section 3.2."""

    def pair_of(turns: float) -> float:
        return size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high = high + 0.001 if low == high else high
    return ((torch.arange(size // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor], part: Rope) -> Tensor:
    """Each pair turned by its angle, the rest of a head kept: x [B, H, T, D], cos and sin [B, 1, T, R/2]."""
    cos, sin = rotation
    size = 2 * cos.shape[-1]
    h, rest = x[..., :size].to(cos.dtype), x[..., size:]
    a, b = h.chunk(2, -1) if part.pairs == "halves" else (h[..., 0::2], h[..., 1::2])
    turned = a * cos - b * sin, a * sin + b * cos
    joined = torch.cat(turned, -1) if part.pairs == "halves" else torch.stack(turned, -1).flatten(-2)
    joined = joined.to(x.dtype)
    return torch.cat((joined, rest), -1) if rest.shape[-1] else joined
