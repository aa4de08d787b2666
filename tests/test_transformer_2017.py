"""The encoder-decoder of 2017 at full size equals torch's own layers with the same weights, and counts as by hand.

torch.nn.TransformerEncoder and TransformerDecoder are the oracle: post-norm, without their last norms (which the paper
has none of), and with their attention's biases at zero. What stands around them (table, sinusoids, head) is spelt out.
"""

import json
import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gptcli import count
from gptcli.layout import Place, layout
from gptcli.model.forward import Inputs, forward
from gptcli.model.ops import sinusoids
from gptcli.model.weights import Weights
from gptcli.source import open_model
from gptcli.spec import Sinusoidal
from gptcli.trace import Recorder

GOLDEN = json.loads((Path(__file__).parent / "data/golden.json").read_text(encoding="utf-8"))["transformer-2017-base"]
WHOLE = open_model(config="transformer-2017-base").spec
# A smaller vocabulary: the table is all that it changes.
V, C, N, H, F = 211, 512, 6, 8, 2048
SPEC = replace(WHOLE, vocab_size=V, encoder=replace(WHOLE.encoder, vocab_size=V))
T, S = 13, 17
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12}
each_type = pytest.mark.parametrize("dtype", CLOSE, ids=str)


class Torch(NamedTuple):
    """torch's two stacks and a table of tokens."""

    table: Tensor
    encoder: nn.TransformerEncoder
    decoder: nn.TransformerDecoder


@cache
def theirs(dtype: torch.dtype) -> Torch:
    """As torch starts them, but that norms and biases have random numbers and the attention's biases are zero."""
    torch.manual_seed(0)
    options = {"d_model": C, "nhead": H, "dim_feedforward": F, "dropout": 0.0, "batch_first": True}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), N, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), N, norm=None)
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in [*encoder.named_parameters(), *decoder.named_parameters()]:
            if parameter.ndim == 2:  # each layer is a copy of the first until it has numbers of its own
                nn.init.xavier_uniform_(parameter, generator=made)
            elif "attn" in name:
                parameter.zero_()
            else:
                gain = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                parameter.copy_(gain + 0.1 * torch.randn(parameter.shape, generator=made))
    table = torch.randn(V, C, generator=made) * C**-0.5
    return Torch(table.to(dtype), encoder.to(dtype), decoder.to(dtype))  # in training mode: no path but the plain one


@cache
def ours(dtype: torch.dtype) -> Weights:
    """The same numbers by this project's names."""
    table, encoder, decoder = theirs(dtype)
    tensors = {"embed.weight": table}

    def attention(at: str, norm: str, module: nn.MultiheadAttention, beside: nn.LayerNorm) -> None:
        parts = zip("qkvo", (*module.in_proj_weight.chunk(3), module.out_proj.weight))
        tensors.update({f"{at}.{letter}.weight": matrix for letter, matrix in parts})
        tensors.update({f"{norm}.weight": beside.weight, f"{norm}.bias": beside.bias})

    for stack, layers in (("encoder.", encoder.layers), ("", decoder.layers)):
        for i, layer in enumerate(layers):
            at = f"{stack}layers.{i}"
            attention(f"{at}.attn", f"{at}.attn_norm", layer.self_attn, layer.norm1)
            if not stack:
                attention(f"{at}.cross", f"{at}.cross_norm", layer.multihead_attn, layer.norm2)
            last = layer.norm2 if stack else layer.norm3
            for name, module in (("mlp.up", layer.linear1), ("mlp.down", layer.linear2), ("mlp_norm", last)):
                tensors.update({f"{at}.{name}.weight": module.weight, f"{at}.{name}.bias": module.bias})
    params = list(layout(SPEC))
    assert tensors.keys() == {p.name for p in params if not p.tied_to}
    return Weights.of(params, {name: tensor.detach() for name, tensor in tensors.items()})


@cache
def by_hand() -> Tensor:
    """Section 3.5 of the paper, number by number: [n, C] in float64."""
    rows = [[0.0] * C for _ in range(60)]
    for position, row in enumerate(rows):
        for i in range(C // 2):
            angle = position / 10000 ** (2 * i / C)
            row[2 * i], row[2 * i + 1] = math.sin(angle), math.cos(angle)
    return torch.tensor(rows, dtype=torch.float64)


def embedded(ids: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Section 3.4: rows of the table times √512, plus the sinusoids. [B, T] → [B, T, C]."""
    return theirs(dtype).table[ids] * math.sqrt(512) + by_hand()[positions].to(dtype)


def texts(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, V, (2, T), generator=generator), torch.randint(0, V, (2, S), generator=generator)


def causal(dtype: torch.dtype) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(T, dtype=dtype)


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype
    return float((a - b).abs().max())


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@each_type
def test_logits_and_both_stacks_are_torch_s(dtype):
    ids, source = texts()
    table, encoder, decoder = theirs(dtype)
    memory = encoder(embedded(source, torch.arange(S)[None], dtype))
    final = decoder(embedded(ids, torch.arange(T)[None], dtype), memory, tgt_mask=causal(dtype))
    recorder = Recorder("*")
    logits = forward(Inputs(ids, source=Inputs(source)), ours(dtype), SPEC, recorder)
    assert gap(recorder.kept["encoder.layers.5.resid_post"], memory) < CLOSE[dtype]
    assert gap(recorder.kept["layers.5.resid_post"], final) < CLOSE[dtype]
    assert gap(logits, final @ table.T) < CLOSE[dtype]
    assert float(logits.std()) > 0.5  # the numbers compared are of the size of one
    last = forward(Inputs(ids, source=Inputs(source), rows="last"), ours(dtype), SPEC)
    assert gap(last, (final @ table.T)[:, -1:]) < CLOSE[dtype]


@each_type
def test_every_layer_and_all_three_attentions_are_torch_s(dtype):
    """Sublayer by sublayer: each layer of ours is given what ours gave before it."""
    ids, source = texts(1)
    _, encoder, decoder = theirs(dtype)
    recorder = Recorder("*")
    forward(Inputs(ids, source=Inputs(source)), ours(dtype), SPEC, recorder)
    x, near = recorder.kept, CLOSE[dtype]
    memory = x["encoder.layers.5.resid_post"]
    assert gap(x["encoder.embed"], embedded(source, torch.arange(S)[None], dtype)) < near
    assert gap(x["embed"], embedded(ids, torch.arange(T)[None], dtype)) < near
    weights = {"need_weights": True, "average_attn_weights": False}
    for i in range(N):
        layer, at = encoder.layers[i], f"encoder.layers.{i}"
        h = x[f"{at}.resid_pre"]
        out, pattern = layer.self_attn(h, h, h, **weights)
        assert gap(x[f"{at}.attn.pattern"], pattern) < near and gap(x[f"{at}.attn_out"], out) < near
        assert gap(x[f"{at}.resid_post"], layer(h)) < near
        layer, at = decoder.layers[i], f"layers.{i}"
        h = x[f"{at}.resid_pre"]
        out, pattern = layer.self_attn(h, h, h, attn_mask=causal(dtype), **weights)
        assert gap(x[f"{at}.attn.pattern"], pattern) < near and gap(x[f"{at}.attn_out"], out) < near
        r = layer.norm1(h + out)
        out, pattern = layer.multihead_attn(r, memory, memory, **weights)
        assert gap(x[f"{at}.cross.pattern"], pattern) < near and gap(x[f"{at}.cross_out"], out) < near
        assert pattern.shape == (2, H, T, S)
        assert gap(x[f"{at}.resid_cross"], layer.norm2(r + out)) < near
        assert gap(x[f"{at}.resid_post"], layer(h, memory, tgt_mask=causal(dtype))) < near


def test_sinusoids_are_the_paper_s():
    positions = torch.arange(60)[None]
    assert gap(sinusoids(positions, C, Sinusoidal())[0], by_hand()) < 1e-12
    # PE(pos + k) is a rotation of PE(pos), the same for every pos: why the paper chose it.
    pairs = by_hand().view(60, C // 2, 2)
    turned = torch.view_as_complex(pairs.contiguous())  # sin + i·cos
    ratio = turned[7:] / turned[:-7]
    assert gap(torch.view_as_real(ratio), torch.view_as_real(ratio[:1].expand_as(ratio))) < 1e-10
    assert (SPEC.position, SPEC.encoder.position) == (Sinusoidal(), Sinusoidal())
    assert SPEC.embed_scale == SPEC.encoder.embed_scale == pytest.approx(math.sqrt(512), abs=1e-14)


def test_who_may_see_whom():
    """The decoder looks back alone, the encoder both ways, and every position of the decoder sees the whole source."""
    dtype = torch.float64
    ids, source = texts(2)

    def run(ids: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        recorder = Recorder("encoder.layers.5.resid_post")
        logits = forward(Inputs(ids, source=Inputs(source)), ours(dtype), SPEC, recorder)
        return logits, recorder.kept["encoder.layers.5.resid_post"]

    logits, memory = run(ids, source)
    other = ids.clone()
    other[:, 8] = (other[:, 8] + 1) % V
    moved = (run(other, source)[0] - logits).abs().amax((0, 2))
    assert moved[:8].max() == 0 and moved[8:].min() > 1e-3
    assert torch.equal(run(other, source)[1], memory)  # the encoder has not heard of the decoder's text
    for changed in (0, S - 1):
        other = source.clone()
        other[:, changed] = (other[:, changed] + 1) % V
        elsewhere, heard = run(ids, other)
        assert (heard - memory).abs().amax((0, 2)).min() > 1e-3
        assert (elsewhere - logits).abs().amax((0, 2)).min() > 1e-5


@each_type
def test_a_source_s_padding_is_torch_s_padding_mask(dtype):
    """Padding stands left here; torch is told which keys are none, and gets the positions that a text alone has."""
    ids, source = texts(3)
    mask = torch.ones_like(source, dtype=torch.bool)
    mask[1, :6] = False
    positions = torch.stack((torch.arange(S), (torch.arange(S) - 6).clamp(min=0)))
    table, encoder, decoder = theirs(dtype)
    hidden = ~mask
    memory = encoder(embedded(source, positions, dtype), src_key_padding_mask=hidden)
    told = {"tgt_mask": causal(dtype).isinf(), "memory_key_padding_mask": hidden}
    expected = decoder(embedded(ids, torch.arange(T)[None], dtype), memory, **told) @ table.T
    recorder = Recorder("*")
    logits = forward(Inputs(ids, source=Inputs(source, mask=mask)), ours(dtype), SPEC, recorder)
    assert gap(recorder.kept["encoder.layers.5.resid_post"][mask], memory[mask]) < CLOSE[dtype]
    assert gap(logits, expected) < CLOSE[dtype]
    assert recorder.kept["layers.0.cross.pattern"][1, :, :, :6].max() == 0
    alone = forward(Inputs(ids[1:], source=Inputs(source[1:, 6:])), ours(dtype), SPEC)
    assert gap(logits[1:], alone) < CLOSE[dtype]
    unhidden = forward(Inputs(ids, source=Inputs(source)), ours(dtype), SPEC)
    assert gap(unhidden[:1], logits[:1]) < CLOSE[dtype] and gap(unhidden[1:], logits[1:]) > 1e-3


# Counts


def sums() -> dict[tuple[str, int | None], dict[str, int]]:
    """Numbers by stack and layer, and in it by part: `attn`, `attn_norm`, `mlp`…"""
    found: dict[tuple[str, int | None], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for param in layout(WHOLE):
        place = Place.of(param.name)
        found[place.stack, place.layer][place.name.partition(".")[0]] += param.size
    return found


def test_a_layer_counts_as_by_hand():
    assert (GOLDEN["layers"], GOLDEN["hidden_size"], GOLDEN["heads"], GOLDEN["mlp_size"]) == (N, C, H, F)
    assert GOLDEN["attention_without_bias"] == 4 * C * C and GOLDEN["ffn_with_bias"] == 2 * C * F + F + C
    found = sums()
    for i in range(N):
        encoder, decoder = found["encoder", i], found["", i]
        assert encoder["attn"] == decoder["attn"] == decoder["cross"] == GOLDEN["attention_without_bias"]
        assert encoder["mlp"] == decoder["mlp"] == GOLDEN["ffn_with_bias"]
        assert sum(encoder.values()) == GOLDEN["encoder_layer_without_attention_bias"]
        assert sum(decoder.values()) == GOLDEN["decoder_layer_without_attention_bias"]
    assert set(found) == {("", None), *((stack, i) for stack in ("", "encoder") for i in range(N)), ("encoder", None)}
    # One table of 37,000 rows serves both stacks and the head.
    assert found["", None] == {"embed": 37_000 * C, "lm_head": 0} and sum(found["encoder", None].values()) == 0
    assert count.total(layout(WHOLE)) == 37_000 * C + N * (3_150_336 + 4_199_936) == 63_045_632


def test_torch_s_transformer_has_the_attention_s_biases_and_two_norms_more():
    with torch.device("meta"):
        whole = nn.Transformer(C, H, N, N, F, batch_first=True)
    layers = sum(sum(parts.values()) for (_, layer), parts in sums().items() if layer is not None)
    biases = (
        3 * N * (3 * C + C)
    )  # of q, k, v and of the output: one attention in an encoder's layer, two in a decoder's
    norms = 2 * (C + C)  # a gain and a shift after each stack
    assert sum(p.numel() for p in whole.parameters()) == layers + biases + norms == 44_140_544
