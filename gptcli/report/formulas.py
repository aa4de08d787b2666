"""How each number of a walk comes about, as a person writes it: from the Spec alone, in the project's letters."""

import math
from collections.abc import Iterator

from gptcli.spec import (
    Experts,
    LayerNorm,
    Learned,
    LinearScaling,
    NoMLP,
    NoNorm,
    NoScaling,
    Relative,
    RMSNorm,
    Rope,
    Sinusoidal,
    Spec,
)


def score_formula(spec: Spec) -> str:
    """How a product of query and key becomes a score."""
    a = spec.attention
    scale = a.head_dim**-0.5 if a.scale is None else a.scale
    scaled = "q·k/√D" if math.isclose(scale * a.head_dim**0.5, 1, rel_tol=1e-12) else f"q·k·{scale:g}"
    scaled = scaled if a.softcap is None else f"{a.softcap:g}·tanh({scaled}/{a.softcap:g})"
    return scaled + " + rel_bias[distance]" * isinstance(spec.position, Relative)


def scaled(name: str, spec: Spec) -> str:
    """What a sublayer gives as it is added to the residual stream."""
    return name if spec.residual_scale == 1.0 else f"{spec.residual_scale:g}·{name}"


def formulas(spec: Spec, layer: int, stack: str = "") -> dict[str, str]:
    """How each activation of a layer comes about. W is stored [out, in]; x·W reads xWᵀ.

    spec: this layer's (`spec.at(layer)`); stack: what stands before the paths of its layers.
    """
    found = {"resid_pre": _embedded(spec) if layer == 0 else f"{stack}layers.{layer - 1}.resid_post"}
    found |= dict(_sublayer("attn", "resid_pre", "resid_mid", spec, ""))
    stream = "resid_mid"
    if (encoder := spec.encoder) is not None:
        last = "final_norm" if encoder.norm.final else f"layers.{encoder.n_layers - 1}.resid_post"
        found |= dict(_sublayer("cross", stream, "resid_cross", spec.across, f"encoder.{last}"))
        stream = "resid_cross"
    return found | _mlp_formulas(spec, stream)


def _sublayer(at: str, stream: str, after: str, spec: Spec, memory: str) -> Iterator[tuple[str, str]]:
    """An attention, from the residual stream before it to the one after it."""
    a, placement = spec.attention, spec.norm.placement
    before = placement in ("pre", "sandwich") and a.normed
    b, o_b = "+b" if a.bias else "", "+b" if a.o_bias else ""
    source = f"{at}_norm" if before else stream
    yield f"{at}_norm", _norm_formula(spec.norm)
    yield f"{at}.q", f"{source}·Wq{b}"
    yield f"{at}.k", f"{memory or source}·Wk{b}"
    yield f"{at}.v", f"{memory or source}·Wv{b}"
    for letter in "qk":
        yield from _head_formulas(at, letter, spec)
    yield f"{at}.z", "Σ weight·v"
    yield f"{at}_out", f"merged{' cross.z' * (at == 'cross')}·Wo{o_b}"
    yield from _added(at, stream, after, spec)


def _added(at: str, stream: str, after: str, spec: Spec) -> Iterator[tuple[str, str]]:
    """How what a sublayer gives joins the residual stream."""
    placement, normed = spec.norm.placement, _norm_formula(spec.norm)
    given = scaled(f"{at}_out_norm" if placement in ("output", "sandwich") else f"{at}_out", spec)
    yield f"{at}_out_norm", normed
    if placement == "post":
        yield f"{at}_norm", f"{normed}, x = {stream} + {given}"
    yield after, f"{at}_norm" if placement == "post" else f"{stream} + {given}"


def _embedded(spec: Spec) -> str:
    """What enters the first layer."""
    said = "embed[id]" + "·Wembed_in" * (spec.embed_size is not None)
    said += f" · {spec.embed_scale:g}" if spec.embed_scale != 1 else ""
    said += " + segment_embed[segment]" if spec.n_segments is not None else ""
    if isinstance(spec.position, Learned):
        offset = f" + {spec.position.offset}" if spec.position.offset else ""
        said += f" + pos_embed[position{offset}]"
    if isinstance(spec.position, Sinusoidal):
        said += f" + sin, cos of position·θ^(-2i/C), {spec.position.pairs}, θ = {spec.position.theta:.10g}"
    return f"{_norm_formula(spec.norm)}, x = {said}" if spec.norm.embedding else said


def _norm_formula(norm: NoNorm | LayerNorm | RMSNorm, weight: str = "w", bias: bool = True) -> str:
    """bias: does this one have the bias that the model's norms have?"""
    if isinstance(norm, LayerNorm):
        return "(x-mean(x))/√(var(x)+ε)" + f"·{weight}" * norm.weight + "+b" * (norm.bias and bias)
    if isinstance(norm, RMSNorm):
        gain = "" if not norm.weight else f"·({norm.offset:g}+{weight})" if norm.offset else f"·{weight}"
        return f"x/√(mean(x²)+ε){gain}"
    return ""


def _head_formulas(at: str, letter: str, spec: Spec) -> Iterator[tuple[str, str]]:
    """How q or k is normed and turned, in the layer's order."""
    a, found, x = spec.attention, {}, letter

    def norm() -> None:
        nonlocal x
        own = {"head": f"x = {x}", "each": f"x = {x}, w of this head", "whole": f"x = all heads' {x}, side by side"}
        said = _norm_formula(spec.norm, bias=a.qk_norm != "each")
        found[f"{at}.{letter}_norm"], x = f"{said}, {own[a.qk_norm]}", f"{letter}_norm"

    if a.qk_norm != "none" and a.qk_norm_place == "before":
        norm()
    if isinstance(spec.position, Rope):
        found[f"{at}.{letter}_rot"], x = _turned(x, spec.position, a.head_dim), f"{letter}_rot"
    if a.qk_norm != "none" and a.qk_norm_place == "after":
        norm()
    yield from found.items()


def _turned(x: str, rope: Rope, head_dim: int) -> str:
    """The rotation with its base; where it is scaled, by what, and what that multiplies the vector by."""
    from gptcli.model.ops import frequencies

    size = rope.rotary_dim or head_dim
    letter, of = ("D", "") if size == head_dim else ("R", f", R = {size}")
    angle, scaling = f"θ^(-2i/{letter})", rope.scaling
    if isinstance(scaling, LinearScaling):
        angle = f"{angle}/{scaling.factor:g}"
    elif not isinstance(scaling, NoScaling):
        angle = f"{scaling.kind}({angle})"
    _, factor = frequencies(rope, size, 1)
    times = "" if factor == 1 else f"{factor:.5g}·"
    sign = "-" * (rope.direction == "backward")
    return f"{times}{x} turned by {sign}position·{angle}, {rope.pairs}{of}, θ = {rope.theta:.10g}"


def _mlp_formulas(spec: Spec, stream: str) -> dict[str, str]:
    """stream: what the MLP's output joins, and what it reads, unless it stands beside the attention."""
    mlp, before = spec.mlp, spec.norm.placement in ("pre", "sandwich")
    if isinstance(mlp, NoMLP):
        return {"resid_post": stream}
    read = stream if spec.residual == "sequential" else "resid_pre"
    source = "attn_norm" if spec.residual == "parallel_shared" else "mlp_norm" if before else read
    # Side by side with the attention it reads what stands further up.
    found = {"mlp_norm": _norm_formula(spec.norm) + f", x = {read}" * (spec.residual == "parallel")}
    found |= dict(_added("mlp", stream, "resid_post", spec))
    b, act = "+b" * mlp.bias, mlp.activation
    if isinstance(mlp, Experts):
        return found | {
            "mlp.router": f"{source}·Wrouter{'+b' * mlp.router_bias}",
            "mlp_out": _experts_formula(mlp, source),
        }
    return found | {
        "mlp.up": f"{source}·Wup{b}",
        "mlp.gate": f"{source}·Wgate{b}",
        "mlp.act": f"{act}(mlp.gate)·mlp.up" if mlp.gated else f"{act}(mlp.up)",
        "mlp_out": f"mlp.act·Wdown{b}",
    }


def _experts_formula(mlp: Experts, source: str) -> str:
    b, limit = "+b" * mlp.bias, f"{mlp.limit:g}" if mlp.limit is not None else ""
    gate, up = f"x·Wgate{b}", f"x·Wup{b}"
    gate, up = (f"min({gate}, {limit})", f"clamp({up}, -{limit}, {limit}) + 1") if limit else (gate, up)
    to_one = " scaled to sum to 1" if mlp.normalized else ""
    shared = " + sigmoid(x·Wshared_router)·shared expert" if mlp.shared_size is not None else ""
    return (
        f"Σ p·expert over the top {mlp.top_k} of {mlp.n_experts}, p = softmax(mlp.router){to_one}{shared}; "
        f"an expert: {mlp.activation}({gate})·({up})·Wdown{b}, x = {source}"
    )
