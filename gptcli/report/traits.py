"""An architecture's choices in words, one a name: what a comparison of two sets side by side. Loads no torch.

A choice that an architecture does not make (no window, no cap) has no words: None.
"""

from collections.abc import Iterator, Mapping
from math import sqrt
from typing import Any

from gptcli.report import amount
from gptcli.spec import (
    Attention,
    Dense,
    Experts,
    LayerNorm,
    Learned,
    LongRopeScaling,
    NoMLP,
    NoNorm,
    NoPosition,
    NoScaling,
    Relative,
    Rope,
    Sinusoidal,
    Spec,
    Transform,
)

Traits = dict[str, str | None]

ACTIVATIONS = {"gelu_tanh": "gelu (tanh)", "gelu_sigmoid": "gelu (sigmoid)", "relu_squared": "relu²"}
QK_NORMS = {"head": "of each head, shared weights", "each": "of each head, its own weights", "whole": "of all heads"}
PLACES = {
    "none": None,
    "pre": "before each sublayer",
    "post": "after each sum",
    "output": "after each sublayer",
    "sandwich": "before and after each sublayer",
}
RESIDUALS = {
    "sequential": "attention, then MLP",
    "parallel": "attention beside MLP, a norm each",
    "parallel_shared": "attention beside MLP, one norm",
}


def figure(x: float) -> str:
    """A number as a config states it: 500,000, 1e-05, 0.0625."""
    return f"{x:,.0f}" if x == int(x) and abs(x) < 1e15 else f"{x:.6g}"


def factor(x: float, size: int) -> str:
    """A factor in six digits, named where it is the root of a size or one over that."""
    for said, value in ((f"√{size:,} = ", sqrt(size)), (f"1/√{size:,} = ", 1 / sqrt(size))):
        if abs(x - value) < 1e-6 * value:
            return said + figure(x)
    return figure(x)


def activation(part: Dense | Experts | Transform) -> str:
    return ACTIVATIONS.get(part.activation, part.activation)


def score_scale(part: Attention) -> str:
    """What is done to q·k: `/√D` unless the architecture says otherwise."""
    usual = part.scale is None or abs(part.scale * sqrt(part.head_dim) - 1) < 1e-9
    return "/√D" if usual else "" if part.scale == 1 else f" × {figure(part.scale)}"


def turning(part: Rope) -> str:
    """A rotation in words: its base, the numbers of a head that turn, its scaling."""
    said = [f"θ {figure(part.theta)}"]
    if part.rotary_dim is not None:
        said.append(f"{part.rotary_dim} numbers of a head")
    if not isinstance(part.scaling, NoScaling):
        longer = "" if isinstance(part.scaling, LongRopeScaling) else f" ×{part.scaling.factor:g}"
        said.append(f"scaled ({part.scaling.kind}{longer})")
    if part.pairs == "neighbours":
        said.append("pairs of neighbours")
    if part.direction == "backward":
        said.append("backward")
    return ", ".join(said)


def positions(spec: Spec) -> str:
    """How this architecture tells where a token stands."""
    match spec.position:
        case NoPosition():
            return "none"
        case Learned():
            return f"learned table, {amount(spec.context_length, 'row')}"
        case Sinusoidal():
            return f"sines and cosines, θ {figure(spec.position.theta)}"
        case Relative():
            return f"by distance, {amount(spec.position.buckets, 'bucket')} up to {spec.position.max_distance:,}"
        case Rope():
            return f"rotation {turning(spec.position)}"


def norm(spec: Spec) -> str:
    """The norm's kind, and what it learns."""
    part = spec.norm
    if isinstance(part, NoNorm):
        return "none"
    return ", ".join([NORM_NAMES[part.kind], *norm_details(spec)])


NORM_NAMES = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


def norm_details(spec: Spec) -> list[str]:
    """A norm's ε and what is odd about its weights. Not for an architecture without norms."""
    part = spec.norm
    said = [f"ε {part.eps:g}"]
    if isinstance(part, LayerNorm):
        said.append({(True, True): "scale and shift", (True, False): "scale", (False, True): "shift"}.get(
            (part.weight, part.bias), "no weights"))  # fmt: skip
    elif not part.weight:
        said.append("no weights")
    elif part.offset:
        said.append(f"weights stored less {figure(part.offset)}")
    return said


def norm_place(spec: Spec) -> str | None:
    """Where the norms of this stack stand."""
    part, place = spec.norm, PLACES[spec.norm.placement]
    others = ["after the embedding"] * part.embedding + ["a final one"] * part.final
    return None if place is None else ", ".join([place, *others])


def biases(spec: Spec) -> str:
    """The linear maps of a layer that have a bias."""
    a, mlp = spec.attention, spec.mlp
    found = ["q, k, v"] * a.bias + ["o"] * a.o_bias
    if isinstance(mlp, Dense | Experts):
        found += ["MLP"] * mlp.bias
    if isinstance(mlp, Experts):
        found += ["router"] * mlp.router_bias
    return ", ".join(found) or "none"


def layer_traits(spec: Spec) -> Traits:
    """The choices of one layer (`spec.at(i)`)."""
    a, mlp = spec.attention, spec.mlp
    group = a.n_heads // a.n_kv_heads
    shared = "one for each head" if group == 1 else f"{a.n_kv_heads:,}, each for {group} heads"
    return {
        "positions": positions(spec),
        "heads": f"{a.n_heads:,} of {a.head_dim}",
        "key/value heads": shared,
        "sight": "causal" if a.causal else "both ways",
        "window": None if a.window is None else f"{a.window:,}" + " each way" * (not a.causal),
        "q/k norm": None if a.qk_norm == "none" else f"{QK_NORMS[a.qk_norm]}, {a.qk_norm_place} the rotation",
        "attention reads": None if a.normed else "the stream as it is, no norm",
        "scores": f"q·k{score_scale(a)}",
        "score cap": None if a.softcap is None else figure(a.softcap),
        "sinks": "one for each head" if a.sinks else None,
        **_mlp_traits(mlp),
        "biases": biases(spec),
    }


def _mlp_traits(mlp: NoMLP | Dense | Experts) -> Traits:
    names = ("MLP", "MLP size", "gated MLP", "activation", "expert choice", "shared expert", "clamp")
    found: Traits = dict.fromkeys(names)
    if isinstance(mlp, NoMLP):
        return found | {"MLP": "none"}
    found |= {"MLP size": f"{mlp.size:,}", "activation": activation(mlp)}
    if isinstance(mlp, Dense):
        return found | {"MLP": "dense", "gated MLP": "yes" if mlp.gated else "no"}
    return found | {
        "MLP": f"{amount(mlp.n_experts, 'expert')}, {mlp.top_k} for each token",
        "gated MLP": "yes",
        "expert choice": "softmax" + ", scaled to sum to 1" * mlp.normalized,
        "shared expert": None if mlp.shared_size is None else f"of size {mlp.shared_size:,}",
        "clamp": None if mlp.limit is None else f"at {figure(mlp.limit)}",
    }


def traits(spec: Spec, kinds: Mapping[Spec, int]) -> Traits:
    """All choices of an architecture. kinds: its layers that differ, each as a Spec, and how many are of it."""
    head, encoder = spec.lm_head, spec.encoder
    stacks = "decoder" if spec.attention.causal else "encoder"
    found: Traits = {
        "stacks": stacks if encoder is None else "encoder and decoder",
        "layers": f"{spec.n_layers:,}",
        "hidden size": f"{spec.hidden_size:,}",
        "context": f"{spec.context_length:,}",
        "vocabulary": f"{spec.vocab_size:,}",
        "token rows": None if spec.embed_size is None else f"of {spec.embed_size:,}, by a matrix to the hidden size",
        "segments": None if spec.n_segments is None else f"{spec.n_segments:,}",
        "embedding scale": None if spec.embed_scale == 1 else f"× {factor(spec.embed_scale, spec.hidden_size)}",
        "norm": norm(spec),
        "norm place": norm_place(spec),
        "residual": None if any(isinstance(one.mlp, NoMLP) for one in kinds) else RESIDUALS[spec.residual],
        "residual scale": None if spec.residual_scale == 1 else f"× {figure(spec.residual_scale)}",
    }
    of_layers = {layer: layer_traits(layer) for layer in kinds}
    for name in next(iter(of_layers.values())):
        found[name] = _over_layers({layer: said[name] for layer, said in of_layers.items()}, kinds)
    if encoder is not None:
        found["cross attention"] = f"{spec.cross.n_heads:,} heads of {spec.cross.head_dim}"
        found["encoder"] = f"{amount(encoder.n_layers, 'layer')} of {encoder.hidden_size:,}"
        found["encoder's table"] = "the decoder's" if spec.encoder_embed == "shared" else "its own"
    return found | dict(_head_traits(head, spec))


def _head_traits(head: Any, spec: Spec) -> Iterator[tuple[str, str | None]]:
    if head is None:
        yield "head", "none: final vectors come out"
        return
    yield "head", "tied to the token table" if head.tied else "a matrix of its own"
    yield "head bias", "yes" if head.bias else None
    yield "head transform", f"a matrix, {activation(head.transform)}, a norm" if head.transform else None
    yield "logit scale", None if head.scale == 1 else f"× {factor(head.scale, spec.hidden_size)}"
    yield "logit cap", None if head.softcap is None else figure(head.softcap)


def _over_layers(said: Mapping[Spec, str | None], kinds: Mapping[Spec, int]) -> str | None:
    """What all layers say; where they differ, how many say what."""
    times: dict[str | None, int] = {}
    for layer, words in said.items():
        times[words] = times.get(words, 0) + kinds[layer]
    if len(times) == 1:
        return next(iter(times))
    told = [f"{words or 'none'} in {amount(n, 'layer')}" for words, n in sorted(times.items(), key=lambda t: -t[1])]
    return "; ".join([*told[:2], f"{len(told) - 2} more"] if len(told) > 3 else told)
