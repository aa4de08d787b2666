"""An architecture in one line, as phrases: `12 layers of 768`, `12 heads of 64`, `gelu_tanh MLP 3072` …"""

from collections.abc import Iterator

from gptcli.checkpoint.patterns import ranges
from gptcli.spec import (
    Attention,
    Dense,
    Experts,
    Learned,
    NoMLP,
    NoNorm,
    NoPosition,
    NoScaling,
    Relative,
    RMSNorm,
    Rope,
    Sinusoidal,
    Spec,
)


def summary(spec: Spec) -> list[str]:
    """The phrases, in the order in which a text goes through the model."""
    phrases = [phrase for phrase in _phrases(spec) if phrase]
    if spec.encoder is not None:
        encoder = spec.encoder
        phrases.insert(1, f"an encoder of {encoder.n_layers} layers of {encoder.hidden_size}")
    return phrases


def _phrases(spec: Spec) -> Iterator[str]:
    yield f"{spec.n_layers} layer{'s' * (spec.n_layers != 1)} of {spec.hidden_size}"
    yield heads(spec.attention)
    yield from _windows(spec)
    yield _mlp(spec.mlp)
    dense = [i for v in spec.variants if v.mlp is not None and type(v.mlp) is not type(spec.mlp) for i in v.layers]
    yield f"dense MLPs in layers {{{ranges(sorted(dense))}}}" if dense else ""
    yield _positions(spec)
    yield _norms(spec)
    yield spec.residual.replace("parallel_shared", "parallel, one norm") if spec.residual != "sequential" else ""
    yield f"vocabulary {spec.vocab_size:,}" + (f" in rows of {spec.embed_size}" if spec.embed_size else "")
    yield "no head" if spec.lm_head is None else "tied head" if spec.lm_head.tied else "head of its own"


def heads(attention: Attention) -> str:
    """The heads of one attention: `32 heads of 128, 8 for keys and values`."""
    a = attention
    shared = f", {a.n_kv_heads} for keys and values" if a.n_kv_heads != a.n_heads else ""
    both_ways = "" if a.causal else ", seeing both ways"
    return f"{a.n_heads} head{'s' * (a.n_heads != 1)} of {a.head_dim}{shared}{both_ways}"


def _windows(spec: Spec) -> Iterator[str]:
    """The windows and how many layers see each."""
    seen: dict[int, int] = {}
    for i in range(spec.n_layers if spec.variants else 1):
        window = spec.at(i).attention.window
        if window is not None:
            seen[window] = seen.get(window, 0) + 1
    for window, layers in seen.items():
        some = f" in {layers} of {spec.n_layers} layers" if spec.variants and layers < spec.n_layers else ""
        yield f"a window of {window:,}{some}"


def _mlp(mlp: NoMLP | Dense | Experts) -> str:
    if isinstance(mlp, NoMLP):
        return "no MLP"
    if isinstance(mlp, Dense):
        return f"{'gated ' * mlp.gated}{mlp.activation} MLP {mlp.size}"
    shared = f" and one of {mlp.shared_size} for all" if mlp.shared_size else ""
    return f"{mlp.n_experts} gated {mlp.activation} experts of {mlp.size}, {mlp.top_k} a token{shared}"


def _positions(spec: Spec) -> str:
    position, context = spec.position, f"context {spec.context_length:,}"
    if isinstance(position, NoPosition):
        return f"no positions, {context}"
    if isinstance(position, Learned):
        return f"learned positions {spec.context_length:,}"
    if isinstance(position, Sinusoidal):
        return f"sinusoidal positions, {context}"
    if isinstance(position, Relative):
        return f"relative positions in {position.buckets} buckets, {context}"
    return f"{_rotation(position)}, {context}"


def _rotation(rope: Rope) -> str:
    part = f" of {rope.rotary_dim} numbers" if rope.rotary_dim else ""
    scaled = "" if isinstance(rope.scaling, NoScaling) else f" ({rope.scaling.kind})"
    return f"rotation{part}, θ {rope.theta:,.10g}{scaled}"


def _norms(spec: Spec) -> str:
    if isinstance(spec.norm, NoNorm):
        return "no norms"
    kind = "RMSNorm" if isinstance(spec.norm, RMSNorm) else "LayerNorm"
    places = {"pre": "before", "post": "after the sum of", "output": "after", "sandwich": "before and after"}
    queries = ", and on q and k" if spec.attention.qk_norm != "none" else ""
    return f"{kind} {places[spec.norm.placement]} each sublayer{queries}"
