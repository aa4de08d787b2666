"""What is counted, against totals from the published configurations and against torch.nn's own modules."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gptcli import count
from gptcli.config import read_config
from gptcli.layout import layout
from gptcli.shipped import configs
from gptcli.spec import (
    Attention,
    Dense,
    Head,
    LayerNorm,
    Learned,
    NoMLP,
    NoNorm,
    NoPosition,
    RMSNorm,
    Rope,
    Spec,
)

ORACLES = json.loads((Path(__file__).parent / "data/oracles.json").read_text(encoding="utf-8"))


def shipped(name):
    return read_config(configs()[name]).spec


def total(spec):
    return count.total(layout(spec))


def without_biases(spec):
    """nanoGPT's bias=False drops the biases of the linear layers and of the norms."""
    return replace(
        spec,
        norm=replace(spec.norm, bias=False),
        attention=replace(spec.attention, bias=False, o_bias=False),
        mlp=replace(spec.mlp, bias=False),
    )


def tinyllama():
    base = shipped("llama2-7b")
    attention = replace(base.attention, n_kv_heads=4, head_dim=64)
    return replace(base, n_layers=22, hidden_size=2048, attention=attention, mlp=replace(base.mlp, size=5632))


def qwen2():
    """Qwen2.5 7B: q, k and v have biases, o has none."""
    base = shipped("llama2-7b")
    attention = replace(base.attention, n_heads=28, n_kv_heads=4, bias=True, o_bias=False)
    mlp = replace(base.mlp, size=18944)
    return replace(base, vocab_size=152064, n_layers=28, hidden_size=3584, attention=attention, mlp=mlp)


GPT2, LLAMA3, QWEN3 = shipped("gpt2-small"), shipped("llama3-8b"), shipped("qwen3-0.6b")

PARAMETERS = {
    "gpt2": total(GPT2),
    "gpt2-medium": total(shipped("gpt2-medium")),
    "gpt2-large": total(shipped("gpt2-large")),
    "gpt2-xl": total(shipped("gpt2-xl")),
    "gpt2 in its layers only": sum(p.size for p in layout(GPT2) if count.component(p.name) == "layers"),
    "gpt2 untied view": count.untied(layout(GPT2)),
    "gpt2 with vocabulary padded to 50304": total(replace(GPT2, vocab_size=50304)),
    "gpt2 without biases (nanoGPT bias=False)": total(without_biases(GPT2)),
    "llama-2-7b": total(shipped("llama2-7b")),
    "llama-3-8b": total(LLAMA3),
    "llama-3-70b": total(shipped("llama3-70b")),
    "llama-3.1-405b": total(shipped("llama3.1-405b")),
    "llama-3.2-1b": total(shipped("llama3.2-1b")),
    "tinyllama-1.1b": total(tinyllama()),
    "mistral-7b-v0.1": total(shipped("mistral-7b")),
    "qwen2.5-7b": total(qwen2()),
    "qwen3-0.6b": total(QWEN3),
    "gemma-2b": total(shipped("gemma-2b")),
    "gemma-3-270m": total(shipped("gemma3-270m")),
}

KV_CACHE_BYTES = {
    "gpt2, T=1024, fp16": count.kv_cache_bytes(GPT2, 1024, count.ITEM_BYTES["float16"]),
    "llama-3-8b, bf16, one token": count.kv_cache_bytes(LLAMA3, 1, count.ITEM_BYTES["bfloat16"]),
    "llama-3-8b, bf16, T=8192": count.kv_cache_bytes(LLAMA3, 8192, count.ITEM_BYTES["bfloat16"]),
    "qwen3-0.6b, bf16, T=4096": count.kv_cache_bytes(QWEN3, 4096, count.ITEM_BYTES["bfloat16"]),
}

ONE_MATRIX = count.attention_matrix_bytes(GPT2, 1024, count.ITEM_BYTES["float32"])
ATTENTION_MATRIX_BYTES = {
    "gpt2, T=1024, fp32, one layer": ONE_MATRIX,
    "gpt2, T=1024, fp32, all layers": GPT2.n_layers * ONE_MATRIX,
}

FLOPS_FORWARD = {
    "gpt2, T=1024, batch 1, every position through the head, full attention": count.flops_forward(
        GPT2, 1024, masked=False
    ),
    "the same with causal attention": count.flops_forward(GPT2, 1024),
    "the same as full attention with the head on the last position only": count.flops_forward(
        GPT2, 1024, masked=False, head_rows=1
    ),
}

FOUND = {
    "parameters": PARAMETERS,
    "kv_cache_bytes": KV_CACHE_BYTES,
    "attention_matrix_bytes": ATTENTION_MATRIX_BYTES,
    "flops_forward": FLOPS_FORWARD,
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ORACLES if kind != "about" for name in ORACLES[kind]],
)
def test_oracle(kind, name):
    assert FOUND[kind][name] == ORACLES[kind][name]


def test_untied_and_nanogpt_counts_differ_by_one_table():
    """By hand: the head is another [50257, 768]; nanoGPT leaves out the [1024, 768] of positions."""
    params = list(layout(GPT2))
    assert count.untied(params) - count.total(params) == 50257 * 768
    assert count.total(params) - count.without_positions(params) == 1024 * 768
    assert count.total(params) - count.non_embedding(params) == (50257 + 1024) * 768


def test_a_window_bounds_the_cache_and_the_pairs():
    """By hand: 5 tokens, a window of 3: 3 are kept, and the queries see 1 + 2 + 3 + 3 + 3 keys."""
    spec = replace(GPT2, attention=replace(GPT2.attention, window=3))
    assert count.kv_cache_bytes(spec, 5, 1) == count.kv_cache_bytes(GPT2, 3, 1)
    assert count.visible_pairs(spec.attention, 5) == 12
    assert count.visible_pairs(spec.attention, 2) == 3
    assert count.visible_pairs(replace(GPT2.attention, causal=False), 5) == 25


def test_flops_of_the_toy_by_hand():
    """cats, T=3: two layers of 4·4·4 + 2·4·8 a token, 6 causal pairs of 2·2 numbers twice, a head of 4·256 a token."""
    spec = shipped("cats")
    matrices, pairs, head = 2 * (4 * 4 * 4 + 2 * 4 * 8), 2 * 6 * 2 * 4, 4 * 256
    assert count.flops_forward(spec, 3) == 2 * (3 * matrices + pairs + 3 * head)
    assert count.flops_forward(spec, 3, batch=5, head_rows=1) == 5 * 2 * (3 * matrices + pairs + head)


# The layout against torch's own modules.


class Reference(nn.Module):
    """The same architecture out of torch.nn's modules, which count themselves. No forward pass."""

    def __init__(self, spec):
        super().__init__()
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)
        if isinstance(spec.position, Learned):
            self.positions = nn.Embedding(spec.context_length, spec.hidden_size)
        self.layers = nn.ModuleList(self.layer(spec) for _ in range(spec.n_layers))
        if spec.norm.final:
            self.final = self.norm(spec, spec.hidden_size)
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=spec.lm_head.bias)
        if spec.lm_head.tied:
            self.head.weight = self.embed.weight

    def norm(self, spec, size):
        if isinstance(spec.norm, LayerNorm):
            return nn.LayerNorm(size, bias=spec.norm.bias)
        return nn.RMSNorm(size)

    def layer(self, spec):
        a, mlp, hidden = spec.attention, spec.mlp, spec.hidden_size
        parts = [
            nn.Linear(hidden, a.n_heads * a.head_dim, bias=a.bias),
            nn.Linear(hidden, a.n_kv_heads * a.head_dim, bias=a.bias),
            nn.Linear(hidden, a.n_kv_heads * a.head_dim, bias=a.bias),
            nn.Linear(a.n_heads * a.head_dim, hidden, bias=a.o_bias),
        ]
        if a.qk_norm == "head":
            parts += [self.norm(spec, a.head_dim), self.norm(spec, a.head_dim)]
        if isinstance(mlp, Dense):
            parts += [nn.Linear(hidden, mlp.size, bias=mlp.bias) for _ in range(1 + mlp.gated)]
            parts += [nn.Linear(mlp.size, hidden, bias=mlp.bias)]
        if not isinstance(spec.norm, NoNorm):
            parts += [self.norm(spec, hidden) for _ in range(1 + isinstance(mlp, Dense))]
        return nn.ModuleList(parts)


@st.composite
def specs(draw):
    size, yes = st.integers(1, 12), st.booleans()
    placement = st.sampled_from(["pre", "post"])
    norm = draw(
        st.one_of(
            st.just(NoNorm()),
            st.builds(LayerNorm, bias=yes, placement=placement, final=yes),
            st.builds(RMSNorm, placement=placement, final=yes),
        )
    )
    kv_heads = draw(st.integers(1, 4))
    attention = Attention(
        n_heads=kv_heads * draw(st.integers(1, 3)),
        n_kv_heads=kv_heads,
        head_dim=2 * draw(size),
        bias=draw(yes),
        o_bias=draw(yes),
        qk_norm="none" if isinstance(norm, NoNorm) else draw(st.sampled_from(["none", "head"])),
    )
    dense = st.builds(Dense, size=size, activation=st.just("silu"), gated=yes, bias=yes)
    return Spec(
        vocab_size=draw(size),
        context_length=draw(size),
        hidden_size=draw(size),
        n_layers=draw(st.integers(1, 3)),
        position=draw(st.sampled_from([NoPosition(), Learned(), Rope()])),
        norm=norm,
        attention=attention,
        mlp=draw(st.one_of(st.just(NoMLP()), dense)),
        lm_head=draw(st.builds(Head, tied=yes, bias=yes)),
    )


@given(specs())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_layout_holds_what_torch_modules_of_the_same_architecture_hold(spec):
    with torch.device("meta"):
        reference = Reference(spec)
    params = list(layout(spec))
    assert len({p.name for p in params}) == len(params)
    own = list(reference.parameters())  # a shared weight is listed once
    assert count.total(params) == sum(p.numel() for p in own)
    assert Counter(p.shape for p in params if not p.tied_to) == Counter(tuple(p.shape) for p in own)
    tied = reference.embed.weight.numel() if spec.lm_head.tied else 0
    assert count.untied(params) == count.total(params) + tied
