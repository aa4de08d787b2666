"""The residual stream's size over the layers of a deep model, by where its norms stand."""

from typing import TYPE_CHECKING, Literal

from gptcli.lab.engine import drawing, require, watched
from gptcli.layout import layout
from gptcli.report.lab import LayerSize, Placement, ResidualReport, Stream
from gptcli.spec import Spec, read_spec

if TYPE_CHECKING:
    from torch import Tensor

NEAR = 0.1  # a stream that changes by less stays as it is
NOTED = ("resid_pre", "attn_out", "attn_out_norm", "resid_mid", "mlp_out", "mlp_out_norm", "resid_post")


def residual_report(
    layers: int,
    dim: int,
    heads: int,
    tokens: int,
    norm: Literal["layernorm", "rmsnorm"],
    placements: list[Placement],
    seed: int,
    std: float | None,
) -> ResidualReport:
    """Root mean squares in float64, of one text of so many different tokens. std None: 1/√dim.

    Every placement has the same weights: token rows N(0, 1), matrices N(0, std²), gains 1, biases 0. Raises
    GptcliError.
    """
    require(dim % heads == 0, f"--heads {heads}: does not divide --dim {dim}", "give a divisor of it")
    std = dim**-0.5 if std is None else std
    require(0 <= std <= 1000, f"--std {std:g}: not a number from 0 to 1000", "1/√dim keeps sizes as they are")
    streams = []
    for placement in placements:
        spec = _spec(layers, dim, heads, tokens, {"kind": norm, "placement": placement})
        streams.append(_stream(spec, placement, list(range(tokens)), _weights(spec, seed, std)))
    return ResidualReport(
        n_layers=layers,
        hidden_size=dim,
        n_heads=heads,
        mlp_size=4 * dim,
        norm=norm,
        tokens=tokens,
        seed=seed,
        std=std,
        drawn=f"token rows N(0, 1), matrices N(0, {std:.4g}²), gains 1, biases 0, seed {seed}",
        streams=streams,
        see="; ".join(_see(stream) for stream in streams),
    )


def _spec(layers: int, dim: int, heads: int, tokens: int, norm: dict[str, str]) -> Spec:
    return read_spec(
        {
            "vocab_size": tokens,
            "context_length": tokens,
            "hidden_size": dim,
            "n_layers": layers,
            "position": "none",
            "norm": norm,
            "attention": {"n_heads": heads},
            "mlp": {"kind": "dense", "size": 4 * dim, "activation": "relu"},
            "lm_head": None,
        }
    )


def _weights(spec: Spec, seed: int, std: float) -> "dict[str, Tensor]":
    """Each drawn by its name, so that every placement gets the same matrices."""
    import torch

    from gptcli.model.device import check_room

    params = list(layout(spec))
    check_room(8 * sum(p.size for p in params), torch.device("cpu"), f"{spec.n_layers} layers in float64")
    sizes = {"table": 1.0, "matrix": std, "residual": std}
    return {
        p.name: torch.randn(p.shape, generator=drawing(seed, p.name), dtype=torch.float64) * sizes[p.role]
        if p.role in sizes
        else torch.full(p.shape, float(p.role == "gain"), dtype=torch.float64)
        for p in params
    }


def _stream(spec: Spec, placement: Placement, ids: list[int], tensors: "dict[str, Tensor]") -> Stream:
    kept = watched(spec, tensors, ids, "embed", *(f"layers.*.{name}" for name in NOTED))
    sizes = {path: _size(x) for path, x in kept.items()}
    layers = []
    for i in range(spec.n_layers):
        of = {name: sizes.get(f"layers.{i}.{name}") for name in NOTED}
        attn, mlp = of["attn_out_norm"] or of["attn_out"], of["mlp_out_norm"] or of["mlp_out"]
        shares = attn / of["resid_pre"], mlp / of["resid_mid"]
        layers.append(
            LayerSize(
                layer_index=i, stream=of["resid_post"], attn=attn, mlp=mlp, attn_share=shares[0], mlp_share=shares[1]
            )
        )
    return Stream(placement=placement, start=sizes["embed"], layers=layers)


def _size(x: "Tensor") -> float:
    """The root mean square over all positions and dimensions."""
    from gptcli.model.measure import statistics

    stats = statistics(x)
    return (stats.mean**2 + stats.std**2) ** 0.5


def _see(stream: Stream) -> str:
    """How the stream moves from the first layer to the last, and what a layer's corrections are of it, on average."""
    sizes = [layer.stream for layer in stream.layers]
    shares = [f"{(layer.attn_share + layer.mlp_share) / 2:.2f}" for layer in stream.layers]
    if not any(layer.attn or layer.mlp for layer in stream.layers):
        return f"{stream.placement}: nothing is added, and the stream stays at {sizes[-1]:.2f}"
    if len(sizes) == 1:
        return f"{stream.placement}: one layer leaves {sizes[0]:.2f}, corrections are {shares[0]} of the stream"
    if max(sizes) <= (1 + NEAR) * min(sizes):
        moves = f"stays at {sizes[-1]:.2f}"
    else:
        verb = "grows" if sizes[-1] > sizes[0] else "shrinks"
        moves = f"{verb} from {sizes[0]:.2f} to {sizes[-1]:.2f} over {len(sizes)} layers"
    return f"{stream.placement}: the stream {moves}, corrections go from {shares[0]} of it to {shares[-1]}"
