"""What a rank is said to hold, do and send is what a rank holds, does and sends."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptcli.layout import layout
from gptcli.model.forward import Inputs, forward
from gptcli.model.parallel import shared
from gptcli.report.devices import devices_of
from gptcli.shard import local
from gptcli.source import open_model
from gptcli.spec import Spec
from tests.command import gptcli
from tests.test_parallel import SPECS, toy
from tests.toys import fed


class Alone:
    """The first of two ranks, beside which nobody computes: counts what it would send."""

    rank, ranks = 0, 2

    def __init__(self):
        self.sums, self.summed, self.gathered = 0, 0, 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.sums, self.summed = self.sums + 1, self.summed + x.numel()
        return x

    def concat(self, x: torch.Tensor) -> torch.Tensor:
        self.gathered += x.numel()
        return torch.cat([x] * self.ranks, -1)


ALONE = ("gpt2-small", "llama3-8b", "a norm over all heads", "an odd vocabulary", "distances")


@pytest.mark.parametrize("name", ALONE)
def test_a_rank_of_two(name: str):
    """Bytes of the weights that it keeps, products that torch counts, numbers that it hands on (B = 1, T = 6)."""
    spec, rank = SPECS[name], Alone()
    weights, ids = toy(spec)
    own, here = shared(weights, spec, rank), local(spec, 2)
    said = devices_of(spec, 2, 6, 1, 0, "float64", None)
    kept = [own[param.name] for param in layout(spec) if param.role != "table" and param.name in own]
    assert said.share.weights == sum(8 * prod(tensor.shape) for tensor in kept)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        forward(fed(spec, ids), own, here)
    all_rows = 2 * 5 * spec.hidden_size * -(-spec.vocab_size // 2)  # `said` has the head on the last of six
    unmasked = 4 * (36 - 21) * here.attention.n_heads * here.attention.head_dim * spec.n_layers
    assert said.flops == counter.get_total_flops() - all_rows - unmasked
    assert said.sums == rank.sums
    # A ring of R ranks sends 2·(R - 1)/R of what is summed, and each its own part of what is gathered R - 1 times.
    assert said.sent == 2 * 8 * rank.summed / 6 // 2 and said.gathered == 8 * rank.gathered / 6
    assert said.share.bytes == said.share.weights + said.share.cache + said.share.activations


def counted(spec: Spec, longer: int = 0) -> Alone:
    """What the first of two ranks hands on in a pass of six tokens, with so many more in the source than of eight."""
    weights, ids = toy(spec)
    inputs, rank = fed(spec, ids), Alone()
    source = torch.cat((inputs.source.ids, inputs.source.ids[:, :longer]), 1)
    with torch.no_grad():
        forward(replace(inputs, source=Inputs(source)), shared(weights, spec, rank), local(spec, 2))
    return rank


@pytest.mark.parametrize("layers", [1, 2])
def test_what_an_encoder_sends_is_told_of_the_tokens_of_its_source(layers: int):
    """B = 1, T = 6, S = 8: by what a pass hands on, and by what it hands on more for three source tokens more."""
    two = SPECS["transformer-2017-base"]
    spec = replace(two, encoder=replace(two.encoder, n_layers=layers))
    said, rank = devices_of(spec, 2, 6, 1, 8, "float64", None), counted(spec)
    assert said.sums + said.source_sums == rank.sums
    assert 6 * said.sent + 8 * said.source_sent == 2 * 8 * rank.summed // 2
    assert 3 * said.source_sent == 2 * 8 * (counted(spec, 3).summed - rank.summed) // 2 > 0


def test_a_model_of_2017_by_hand():
    """Six layers of 512 each: an encoder's attention and MLP; a decoder's two attentions and MLP. A ring of 4 ranks."""
    words = ("params", "--devices", "4", "--seq-len", "16")
    found = gptcli(*words, "transformer-2017-base", "--json").json["costs"]["devices"]
    assert (found["sums"], found["sent"]) == (18, 2 * 3 * 18 * 512 * 4 // 4)
    assert (found["source_sums"], found["source_sent"]) == (12, 2 * 3 * 12 * 512 * 4 // 4)
    alone = devices_of(SPECS["gpt2-small"], 4, 6, 1, 0, "float32", None)
    assert alone.source_sums is None and alone.source_sent is None
    shown = gptcli(*words, "transformer-2017-base", columns=80, NO_COLOR="1").out
    assert "a token of the text, in 18 sums of partial products\n" in shown
    assert "a token of the source, in 12 sums of the encoder's\n" in shown
    assert "source" not in gptcli(*words, "gpt2-small", columns=80, NO_COLOR="1").out


def test_experts_add_up_one_by_one():
    """Two layers, each: attention, two experts a token, the shared expert."""
    assert devices_of(SPECS["experts"], 2, 6, 1, 0, "float32", None).sums == 2 * (1 + 2 + 1)


def test_a_plan_for_405b_by_hand():
    """126 layers of 2·16384² (q, o) + 2·16384·1024 (k, v) + 3·16384·53248, two norms; the head has 128256 rows."""
    spec, gib = open_model(None, "llama3.1-405b").spec, 2**30
    layer = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248
    found = devices_of(spec, 8, 8192, 1, 0, "bfloat16", 141 * gib)
    norms = (2 * 126 + 1) * 16384
    assert found.share.weights == 2 * (126 * layer // 8 + norms + 128256 * 16384 // 8)
    assert found.share.cache == 2 * 2 * 126 * 8192 * 1024 // 8
    assert (found.sums, found.sent) == (2 * 126, 2 * 7 * 252 * 16384 * 4 // 8)
    assert [(one.ranks, one.fits) for one in found.plan] == [(1, False), (2, False), (4, False), (8, True)]
    sixteen = devices_of(spec, 16, 8192, 1, 0, "bfloat16", 80 * gib)
    assert sixteen.whole == ["layers.#.attn: 8 key/value heads do not divide"] and not any(
        one.fits for one in sixteen.plan
    )
