"""The shipped architectures beyond GPT-2, at toy size, against transformers: the same weights, the same logits.

Each Spec is a shipped config with its sizes replaced; each transformers config is written out here from the model's
published config.json, sizes replaced alike. Heads are wider than hidden size / heads, and share key/value heads.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from gptcli import shipped
from gptcli.config import read_config
from gptcli.layout import layout
from gptcli.model.forward import Inputs, forward
from gptcli.model.weights import Weights
from gptcli.spec import Attention, Llama3Scaling, NoScaling, Rope, Spec

VOCAB, HIDDEN, LAYERS, HEADS, HEAD_DIM, MLP, T = 97, 32, 3, 4, 12, 52, 24
TOY = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Published:
    """transformers' names of the config and the model, what the model's config.json says, and its key/value heads."""

    config: str
    model: str
    says: dict[str, Any]
    kv_heads: int = 2


def default_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def llama(theta: float | None = None, scaled: float | None = None, tied: bool = False, kv_heads: int = 2) -> Published:
    says = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False}
    says["tie_word_embeddings"] = tied
    says["rope_parameters"] = llama3_rope(scaled) if scaled else default_rope(theta)
    return Published("LlamaConfig", "LlamaForCausalLM", says, kv_heads)


PUBLISHED = {
    "llama2-7b": llama(10000.0, kv_heads=HEADS),
    "llama3-8b": llama(500000.0),
    "llama3-70b": llama(500000.0),
    "llama3.1-405b": llama(scaled=8.0),
    "llama3.2-1b": llama(scaled=32.0, tied=True),
    "mistral-7b": Published(
        "MistralConfig",
        "MistralForCausalLM",
        {
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "sliding_window": 7,  # 4,096 at full size: smaller than T here
            "tie_word_embeddings": False,
            "rope_parameters": default_rope(10000.0),
        },
    ),
    "qwen3-0.6b": Published(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "rope_parameters": default_rope(1000000.0),
        },
    ),
    "gemma-2b": Published(
        "GemmaConfig",
        "GemmaForCausalLM",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": default_rope(10000.0),
        },
        kv_heads=1,
    ),
}

# transformers' names of our weights.
NAMES = {
    "embed": "model.embed_tokens",
    "layers.#.attn_norm": "model.layers.#.input_layernorm",
    "layers.#.attn.q": "model.layers.#.self_attn.q_proj",
    "layers.#.attn.k": "model.layers.#.self_attn.k_proj",
    "layers.#.attn.v": "model.layers.#.self_attn.v_proj",
    "layers.#.attn.q_norm": "model.layers.#.self_attn.q_norm",
    "layers.#.attn.k_norm": "model.layers.#.self_attn.k_norm",
    "layers.#.attn.o": "model.layers.#.self_attn.o_proj",
    "layers.#.mlp_norm": "model.layers.#.post_attention_layernorm",
    "layers.#.mlp.up": "model.layers.#.mlp.up_proj",
    "layers.#.mlp.gate": "model.layers.#.mlp.gate_proj",
    "layers.#.mlp.down": "model.layers.#.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}


def shrunk(name: str) -> Spec:
    """A shipped config at this file's sizes; every other word of it stays."""
    spec = read_config(shipped.configs()[name]).spec
    a: Attention = replace(
        spec.attention,
        n_heads=HEADS,
        n_kv_heads=PUBLISHED[name].kv_heads,
        head_dim=HEAD_DIM,
        window=7 if spec.attention.window else None,
    )
    scaled = spec.embed_scale != 1.0
    return replace(
        spec,
        vocab_size=VOCAB,
        context_length=64,
        hidden_size=HIDDEN,
        n_layers=LAYERS,
        embed_scale=math.sqrt(HIDDEN) if scaled else 1.0,
        attention=a,
        mlp=replace(spec.mlp, size=MLP),
    )


def oracle(name: str, **changes):
    """transformers' model with every weight drawn, norms too: at their start norms are ones, and tell nothing."""
    import transformers

    published = PUBLISHED[name]
    says = TOY | {"num_key_value_heads": published.kv_heads} | published.says | changes
    torch.manual_seed(0)
    model = getattr(transformers, published.model)(getattr(transformers, published.config)(**says)).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.4, generator=generator)
    return model


def theirs(model, inputs: Inputs) -> torch.Tensor:
    mask = None if inputs.mask is None else inputs.mask.long()
    positions = inputs.positions.expand_as(inputs.ids)
    with torch.inference_mode():
        return model(inputs.ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def ours(model, spec: Spec, inputs: Inputs) -> torch.Tensor:
    state = model.state_dict()
    params = list(layout(spec))
    tensors = {}
    for p in params:
        if p.tied_to:
            continue
        stem, leaf = p.name.rsplit(".", 1)
        layer = stem.split(".")[1] if stem.startswith("layers.") else ""
        stored = NAMES[stem.replace(f".{layer}.", ".#.", 1) if layer else stem].replace("#", layer) + f".{leaf}"
        tensors[p.name] = state.pop(stored)
        assert tuple(tensors[p.name].shape) == p.shape, p.name
    if spec.lm_head.tied:
        assert torch.equal(state.pop("lm_head.weight"), tensors["embed.weight"])
    assert not state  # nothing of transformers' model is left unread
    with torch.inference_mode():
        return forward(inputs, Weights.of(params, tensors), spec)


IDS = torch.randint(1, VOCAB, (2, T), generator=torch.Generator().manual_seed(2))


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in standard deviations of the logits."""
    return float((found.double() - expected.double()).abs().max() / expected.double().std())


def test_every_shipped_architecture_has_an_oracle():
    """GPT-2's is a test of its own; the worked examples carry their weights and their numbers."""
    others = {n for n, path in shipped.configs().items() if not n.startswith("gpt2") and not read_config(path).weights}
    assert set(PUBLISHED) <= others


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_are_transformers(name):
    model = oracle(name)
    found, expected = ours(model, shrunk(name), Inputs(IDS)), theirs(model, Inputs(IDS))
    assert found.shape == expected.shape == (2, T, VOCAB)
    assert off(found, expected) < 1e-4


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_of_padded_texts_are_transformers(name):
    model = oracle(name)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[1, :9] = False
    inputs = Inputs(IDS.masked_fill(~mask, 0), mask)
    found, expected = ours(model, shrunk(name), inputs), theirs(model, inputs)
    assert off(found[mask], expected[mask]) < 1e-4


def test_rotary_scaling_within_reach():
    """At full size, scaling touches waves longer than 2,048 positions; an original context of 64 shows it at T = 24."""
    says = {**llama3_rope(8.0), "rope_theta": 100.0, "original_max_position_embeddings": 64}
    model = oracle("llama3.1-405b", rope_parameters=says)
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)
    spec = replace(shrunk("llama3.1-405b"), position=Rope(theta=100.0, scaling=scaling))
    expected = theirs(model, Inputs(IDS))
    assert off(ours(model, spec, Inputs(IDS)), expected) < 1e-4
    unscaled = replace(spec, position=replace(spec.position, scaling=NoScaling()))
    assert off(ours(model, unscaled, Inputs(IDS)), expected) > 0.1


def altered(name: str, **changes) -> Spec:
    """The shrunk Spec with fields changed: `position__pairs` is position.pairs."""
    spec = shrunk(name)
    for path, value in changes.items():
        part, _, field = path.partition("__")
        spec = replace(spec, **{part: replace(getattr(spec, part), **{field: value}) if field else value})
    return spec


@pytest.mark.parametrize(
    "name,changes",
    [
        ("llama2-7b", {"position__pairs": "neighbours"}),
        ("llama3-8b", {"position__theta": 10000.0}),
        ("llama3-8b", {"mlp__activation": "gelu_tanh"}),
        ("llama3-8b", {"attention__scale": (HIDDEN / HEADS) ** -0.5}),
        ("mistral-7b", {"attention__window": None}),
        ("mistral-7b", {"attention__window": 6}),
        ("mistral-7b", {"attention__window": 8}),
        ("gemma-2b", {"norm__offset": 0.0}),
        ("gemma-2b", {"embed_scale": 1.0}),
        ("gemma-2b", {"mlp__activation": "silu"}),
    ],
    ids=str,
)
def test_the_oracle_notices_a_wrong_choice(name, changes):
    """Each choice shows in the logits at these sizes, so that agreement above means something."""
    model = oracle(name)
    assert off(ours(model, altered(name, **changes), Inputs(IDS)), theirs(model, Inputs(IDS))) > 1e-2


def test_the_oracle_notices_the_norms_of_queries_and_keys():
    model = oracle("qwen3-0.6b")
    expected = theirs(model, Inputs(IDS))
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.data.fill_(1.0)
    assert off(ours(model, shrunk("qwen3-0.6b"), Inputs(IDS)), expected) > 1e-2
