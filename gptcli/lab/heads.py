"""Heads: the same multiplications as one head of their width, a map of weights for each. Arithmetic, no torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from gptcli import count
from gptcli.data import entry
from gptcli.lab.engine import require
from gptcli.layout import layout
from gptcli.report.lab import Cost, HeadsOfLayers, HeadsReport
from gptcli.source import Model
from gptcli.spec import Attention, Spec


def heads_report(model: Model, tokens: int | None, source_tokens: int | None, dtype: str) -> HeadsReport:
    """What a model's heads cost for T tokens (None: 1,024, or the whole context where that is shorter).

    source_tokens: S of an encoder's text (None: as many as tokens). Raises GptcliError.
    """
    spec, name = model.spec, count.dtype_name(dtype, model.stored_dtype)
    tokens = _fitting("--tokens", tokens, spec)
    require(spec.encoder is not None or source_tokens is None, "--source-tokens: no encoder reads them", "leave it out")
    if spec.encoder is not None:
        source_tokens = _fitting("--source-tokens", source_tokens, spec.encoder)
    groups: dict[tuple, list[_Part]] = {}
    for part in _parts(spec, tokens, source_tokens):
        groups.setdefault((part.kind, part.spec.attention), []).append(part)
    layers = [_group(parts, count.ITEM_BYTES[name]) for parts in groups.values()]
    costs = [(one.many, len(one.layer_indices)) for one in layers]

    def whole(field: str) -> int:
        return sum(getattr(cost, field) * times for cost, times in costs)

    return HeadsReport(
        model=model.facts(name),
        tokens=tokens,
        source_tokens=source_tokens,
        layers=layers,
        maps=whole("maps"),
        map_weights=whole("map_weights"),
        map_bytes=whole("map_bytes"),
        o_parameters=whole("o_parameters"),
        cache_bytes=whole("cache_bytes"),
        see=_see(layers, whole("map_bytes")),
    )


def _fitting(option: str, wanted: int | None, stack: Spec) -> int:
    context = stack.context_length
    if wanted is None:
        return min(1024, context)
    too_many = f"{option} {wanted:,}: more than the context of {context:,}"
    require(wanted <= stack.most_tokens, too_many, "take fewer", "context")
    return wanted


@entry
class _Part:
    """One attention of one layer: the layer as a Spec of its own, whose `attention` this is."""

    kind: Literal["self", "cross", "encoder"]
    layer: int
    spec: Spec
    queries: int
    keys: int


def _parts(spec: Spec, tokens: int, source: int | None) -> Iterator[_Part]:
    if spec.encoder is not None:
        for i in range(spec.encoder.n_layers):
            yield _Part("encoder", i, _alone(spec.encoder.at(i)), source, source)
    for i in range(spec.n_layers):
        yield _Part("self", i, _alone(spec.at(i)), tokens, tokens)
    if spec.encoder is not None:
        for i in range(spec.n_layers):
            yield _Part("cross", i, _alone(spec.at(i).across), tokens, source)


def _alone(spec: Spec) -> Spec:
    """A layer's Spec as a model of this one layer."""
    return replace(spec, n_layers=1, variants=(), encoder=None, cross=None)


def _group(parts: list[_Part], item_bytes: int) -> HeadsOfLayers:
    part = parts[0]
    a = part.spec.attention
    single = replace(a, n_heads=1, n_kv_heads=1, head_dim=a.n_heads * a.head_dim)
    return HeadsOfLayers(
        kind=part.kind,
        layer_indices=[one.layer for one in parts],
        kv_heads=a.n_kv_heads,
        window=a.window,
        causal=a.causal,
        queries=part.queries,
        keys=part.keys,
        many=_cost(part, a, item_bytes),
        single=_cost(part, single, item_bytes),
    )


def _cost(part: _Part, a: Attention, item_bytes: int) -> Cost:
    spec, pairs = replace(part.spec, attention=a), part.queries * part.keys
    square = part.kind != "cross"
    seen = count.visible_pairs(a, part.queries) if square else pairs
    maps = count.attention_matrix_bytes(spec, part.queries, 1) if square else a.n_heads * pairs
    # A lone head's output projection is one matrix with its value projection.
    o = next(p for p in layout(spec) if p.name == "layers.0.attn.o.weight").size if a.n_heads > 1 else 0
    return Cost(
        heads=a.n_heads,
        head_dim=a.head_dim,
        multiplications=pairs * a.n_heads * a.head_dim,
        seen_multiplications=seen * a.n_heads * a.head_dim,
        o_parameters=o,
        o_flops_per_token=2 * o,
        maps=a.n_heads,
        map_weights=maps,
        map_bytes=maps * item_bytes,
        cache_bytes=0 if part.kind == "encoder" else count.kv_cache_bytes(spec, part.keys, item_bytes),
    )


def _see(layers: list[HeadsOfLayers], all_bytes: int) -> str:
    """Of the most common kind of attention with more than one head."""
    several = [group for group in layers if group.many.heads > 1]
    if not several:
        return f"one head a layer, so nothing is shared out: its maps are {all_bytes:,} bytes in all"
    most = max(several, key=lambda group: (len(group.layer_indices), group.kind == "self"))
    many, single, number = most.many, most.single, sum(len(group.layer_indices) for group in layers)
    of = f" (in {len(most.layer_indices)} of {number} attentions)" if len(layers) > 1 else ""
    cached = "cache as much" if many.cache_bytes == single.cache_bytes else f"cache {_share(many, single)} as much"
    kept = f"{many.maps} maps a layer ({many.map_bytes:,} bytes, {all_bytes:,} in all)"
    return (
        f"{many.heads} heads of {many.head_dim}{of} multiply as often as one of {single.head_dim} and {cached}, "
        f"but keep {kept} and W_O ({many.o_parameters:,} parameters)"
    )


def _share(many: Cost, single: Cost) -> str:
    return f"{many.cache_bytes / single.cache_bytes:.3g} times"
