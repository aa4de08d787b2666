"""The maths, piece by piece, against torch's own modules, transformers' functions, and arithmetic written out here."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gptcli.layout import layout
from gptcli.model.attention import Sight, attention, weigh
from gptcli.model.forward import Inputs, forward
from gptcli.model.ops import embed, head, mlp, norm, rotary, rotate
from gptcli.model.weights import Weights
from gptcli.spec import Spec, read_spec
from gptcli.trace import SILENT, Recorder

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def toy(**changes) -> Spec:
    """A small decoder; a mapping given for a part replaces that part."""
    raw = {
        "vocab_size": 17,
        "context_length": 64,
        "hidden_size": 8,
        "n_layers": 2,
        "position": "none",
        "norm": "none",
        "attention": {"n_heads": 2},
        "mlp": "none",
        "lm_head": {},
    }
    return read_spec(raw | changes)


def drawn(*shape: int, seed: int = 0, dtype=F64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def random_tensors(spec: Spec, dtype=F64, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every weight drawn, gains and biases too, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        p.name: (torch.randn(p.shape, generator=generator, dtype=F64) * 0.5).to(dtype)
        for p in layout(spec)
        if not p.tied_to
    }


def run(spec: Spec, tensors: dict, inputs: Inputs, probe=SILENT) -> torch.Tensor:
    return forward(inputs, Weights.of(list(layout(spec)), tensors), spec, probe)


# Norms


def normed(x, part: dict, weight, bias=None) -> torch.Tensor:
    tensors = {"n.weight": weight} | ({} if bias is None else {"n.bias": bias})
    return norm(x, Weights(tensors), "n", toy(norm=part))


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("eps", [1e-5, 1e-12, 0.3])
def test_layernorm_is_torchs(dtype, eps):
    module = torch.nn.LayerNorm(8, eps=eps, dtype=dtype)
    module.weight.data, module.bias.data = drawn(8, seed=1, dtype=dtype), drawn(8, seed=2, dtype=dtype)
    x = drawn(2, 5, 8, dtype=dtype) * 3 + 1
    part = {"kind": "layernorm", "eps": eps}
    torch.testing.assert_close(normed(x, part, module.weight, module.bias), module(x))
    unbiased = torch.nn.LayerNorm(8, eps=eps, bias=False, dtype=dtype)
    unbiased.weight.data = module.weight.data
    torch.testing.assert_close(normed(x, part | {"bias": False}, module.weight), unbiased(x))


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_rmsnorm_is_torchs(dtype, eps):
    module = torch.nn.RMSNorm(8, eps=eps, dtype=dtype)
    module.weight.data = drawn(8, seed=1, dtype=dtype)
    x = drawn(2, 5, 8, dtype=dtype) * 3 + 1
    torch.testing.assert_close(normed(x, {"kind": "rmsnorm", "eps": eps}, module.weight), module(x))


def test_rmsnorm_with_an_offset_by_arithmetic():
    """x = [3, 4]: mean square 12.5; weights 0.5 and -1 stored less 1 are gains 1.5 and 0."""
    x, weight = torch.tensor([[3.0, 4.0]], dtype=F64), torch.tensor([0.5, -1.0], dtype=F64)
    found = normed(x, {"kind": "rmsnorm", "eps": 0.0, "offset": 1.0}, weight)
    torch.testing.assert_close(found, torch.tensor([[3 / math.sqrt(12.5) * 1.5, 0.0]], dtype=F64))
    torch.testing.assert_close(
        normed(x, {"kind": "rmsnorm", "offset": 1.0}, weight), normed(x, {"kind": "rmsnorm"}, weight + 1)
    )


def test_no_norm_hands_x_back():
    x = drawn(1, 2, 8)
    assert torch.equal(normed(x, {"kind": "none"}, None), x)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("part", [{"kind": "layernorm"}, {"kind": "rmsnorm"}, {"kind": "rmsnorm", "offset": 1.0}])
def test_half_types_norm_in_float32_and_round_once(dtype, part):
    """Sums of 2,048 squares: in half precision they would be wrong in the second digit, or overflow."""
    x = (drawn(4, 2048) * 100).to(dtype)
    weight, bias = drawn(2048, seed=1, dtype=dtype), drawn(2048, seed=2, dtype=dtype)
    h = x.double()
    if part["kind"] == "layernorm":
        exact = F.layer_norm(h, (2048,), weight.double(), bias.double(), 1e-5)
        found = normed(x, part, weight, bias)
    else:
        exact = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + part.get("offset", 0.0))
        found = normed(x, part, weight)
    assert found.dtype == dtype
    half_a_step = torch.finfo(dtype).eps / 2
    assert ((found.double() - exact).abs() <= half_a_step * exact.abs() * 1.001 + 1e-6).all()


@pytest.mark.parametrize("dtype, number", [(BF16, 3.0e4), (F16, 6.0e4), (F16, 0.1)])
def test_a_row_of_one_number_is_normed_to_the_bias(dtype, number):
    """What is taken from its mean is nothing, in half types too."""
    x, bias = torch.full((2, 768), number, dtype=dtype), drawn(768, seed=2, dtype=dtype)
    found = normed(x, {"kind": "layernorm"}, torch.ones(768, dtype=dtype), bias)
    torch.testing.assert_close(found, bias.expand(2, 768), atol=2e-2, rtol=0)


# Rotation


def rope(head_dim: int = 6, **part) -> Spec:
    return toy(attention={"n_heads": 2, "head_dim": head_dim}, position={"kind": "rope"} | part)


def turned(x: torch.Tensor, positions: torch.Tensor, spec: Spec) -> torch.Tensor:
    """x [B, H, T, D] at positions [B, T]."""
    return rotate(x, rotary(spec, positions, x.dtype), spec.position)


@pytest.mark.parametrize("theta", [10000.0, 500.0])
@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_rotation_is_multiplication_by_a_complex_number(pairs, theta):
    x, positions = drawn(2, 3, 41, 6), torch.arange(41)[None]
    a, b = (x[..., :3], x[..., 3:]) if pairs == "halves" else (x[..., 0::2], x[..., 1::2])
    angle = torch.arange(41, dtype=F64)[:, None] * theta ** (-2 * torch.arange(3, dtype=F64) / 6)
    product = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.empty_like(x)
    if pairs == "halves":
        expected[..., :3], expected[..., 3:] = product.real, product.imag
    else:
        expected[..., 0::2], expected[..., 1::2] = product.real, product.imag
    torch.testing.assert_close(turned(x, positions, rope(theta=theta, pairs=pairs)), expected)


def llama_config(theta: float = 10000.0, **scaling):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=12,
        num_attention_heads=2,
        head_dim=6,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": theta} | scaling,
    )


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rotation_is_transformers(dtype):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    q, k, positions = drawn(2, 4, 41, 6, dtype=F32), drawn(2, 2, 41, 6, seed=1, dtype=F32), torch.arange(41)[None]
    q, k = q.to(dtype), k.to(dtype)
    cos, sin = LlamaRotaryEmbedding(llama_config())(q.float(), positions)
    expected = apply_rotary_pos_emb(q.float(), k.float(), cos, sin)
    for ours, theirs in zip((turned(q, positions, rope()), turned(k, positions, rope())), expected):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs.to(dtype), rtol=1e-5 if dtype == F32 else 1e-2, atol=1e-5)


def test_pairs_differ_from_position_1_on():
    x, positions = drawn(1, 1, 20, 6), torch.arange(20)[None]
    halves, neighbours = (turned(x, positions, rope(pairs=pairs)) for pairs in ("halves", "neighbours"))
    assert torch.equal(halves[:, :, 0], x[:, :, 0]) and torch.equal(neighbours[:, :, 0], x[:, :, 0])
    assert ((halves - neighbours)[:, :, 1:].abs().amax(-1) > 0.1).all()
    shuffle = [0, 2, 4, 1, 3, 5]  # the first of each pair, then the second: neighbours laid out as halves
    torch.testing.assert_close(neighbours[..., shuffle], turned(x[..., shuffle], positions, rope(pairs="halves")))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 5000), st.sampled_from(["halves", "neighbours"]))
def test_scores_depend_on_the_distance_alone(query_at, key_at, shift, pairs):
    spec = rope(8, pairs=pairs)
    q, k = drawn(1, 1, 1, 8, seed=query_at), drawn(1, 1, 1, 8, seed=key_at + 1000)

    def score(i, j):
        return (turned(q, torch.tensor([[i]]), spec) * turned(k, torch.tensor([[j]]), spec)).sum()

    torch.testing.assert_close(score(query_at, key_at), score(query_at + shift, key_at + shift), rtol=1e-9, atol=1e-9)


def test_rotation_keeps_lengths():
    x = drawn(1, 2, 41, 6)
    torch.testing.assert_close(turned(x, torch.arange(41)[None], rope()).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_far_position_loses_nothing(dtype):
    """In float32, position 131,071 times a frequency is off by some thousandths of a radian."""
    position, pair = 131_071, torch.arange(32, dtype=F64)
    cos, sin = rotary(rope(64, theta=500000.0), torch.tensor([[position]]), dtype)
    angle = [math.fmod(position * 500000.0 ** (-2 * float(i) / 64), 2 * math.pi) for i in pair]
    assert cos.dtype == sin.dtype == F32
    torch.testing.assert_close(
        cos[0, 0, 0].double(), torch.tensor([math.cos(a) for a in angle], dtype=F64), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        sin[0, 0, 0].double(), torch.tensor([math.sin(a) for a in angle], dtype=F64), rtol=0, atol=1e-6
    )


def test_positions_are_each_texts_own():
    x, positions = drawn(2, 1, 3, 6), torch.tensor([[0, 1, 2], [0, 0, 1]])
    both = turned(x, positions, rope())
    for i in (0, 1):
        torch.testing.assert_close(both[i : i + 1], turned(x[i : i + 1], positions[i : i + 1], rope()))


def test_no_rotation_without_rope():
    assert rotary(toy(), torch.arange(3)[None], F32) is None
    assert rotary(toy(position="learned"), torch.arange(3)[None], F32) is None


def frequencies(spec: Spec) -> torch.Tensor:
    """What a pair turns by from one position to the next: at most 1 radian, so the angle at position 1 tells."""
    cos, sin = rotary(spec, torch.tensor([[1]]), F64)
    return torch.atan2(sin, cos)[0, 0, 0]


def test_unscaled_frequencies():
    torch.testing.assert_close(frequencies(rope()), 10000.0 ** (-torch.arange(0, 6, 2, dtype=F64) / 6))


@pytest.mark.parametrize("theta", [100.0, 10000.0, 500000.0])
@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_linear_scaling_is_transformers(theta, factor):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, attention_factor = ROPE_INIT_FUNCTIONS["linear"](
        llama_config(theta, rope_type="linear", factor=factor), device="cpu"
    )
    assert attention_factor == 1.0
    found = frequencies(rope(theta=theta, scaling={"kind": "linear", "factor": factor}))
    torch.testing.assert_close(found.float(), expected)


@pytest.mark.parametrize("theta", [30.0, 100.0, 10000.0, 500000.0])
@pytest.mark.parametrize("original", [16, 64, 8192])
@pytest.mark.parametrize("factor,low,high", [(8.0, 1.0, 4.0), (32.0, 1.0, 4.0), (2.0, 0.5, 8.0)])
def test_llama3_scaling_is_transformers(theta, original, factor, low, high):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = llama_config(
        theta,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    assert attention_factor == 1.0
    scaling = {
        "kind": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_context": original,
    }
    torch.testing.assert_close(frequencies(rope(theta=theta, scaling=scaling)).float(), expected)


def test_llama3_scaling_by_hand():
    """Waves of 2π, 2π·√10 and 2π·10 positions in an original context of 40π: 20, 6.3 and 2 turns; marks at 1 and 4.

    More than 4 turns keep their frequency, fewer than 1 are divided by 8; 2 turns lie a third of the way from 1 to 4.
    """
    scaling = {"kind": "llama3", "factor": 8.0, "original_context": 126}
    kept = (126 * 0.1 / (2 * math.pi) - 1) / 3
    expected = torch.tensor([1.0, 10**-0.5, 0.1 * (kept + (1 - kept) / 8)], dtype=F64)
    torch.testing.assert_close(frequencies(rope(theta=10**1.5, scaling=scaling)), expected)


def test_golden_positions_by_rotation():
    """Two numbers a word and 30 degrees a position."""
    golden = GOLDEN["positions"]
    words = {word: torch.tensor(v, dtype=F64) for word, v in golden["vectors"].items()}
    part = rope(2).position
    for text, expected in golden["rope_scores"].items():
        sentence, _, shift = text.partition(", shifted by ")
        x = torch.stack([words[word] for word in sentence.split()])[None, None]
        angles = (torch.arange(3, dtype=F64) + int(shift or 0))[None, None, :, None] * math.pi / 6
        q = rotate(x, (angles.cos(), angles.sin()), part)
        scores, _, _ = weigh(q, q, torch.ones(1, 1, 3, 3, dtype=torch.bool), 1.0)
        torch.testing.assert_close(scores[0, 0], torch.tensor(expected, dtype=F64), rtol=1e-9, atol=1e-9)
    order = golden["rope_scores"]
    assert order["cat chase dog"][0][2] == pytest.approx(golden["named"]["cat looks at dog two to the right"])
    assert order["dog chase cat"][2][0] == pytest.approx(golden["named"]["cat looks at dog two to the left"])


def test_golden_positions_by_a_table():
    golden = GOLDEN["positions"]
    names = list(golden["vectors"])
    spec = toy(vocab_size=3, context_length=4, hidden_size=2, position="learned", attention={"n_heads": 1})
    weights = Weights(
        {
            "embed.weight": torch.tensor([golden["vectors"][n] for n in names], dtype=F64),
            "pos_embed.weight": torch.tensor(golden["learned_table"], dtype=F64),
        }
    )
    for text, expected in golden["learned_inputs"].items():
        ids = torch.tensor([[names.index(word) for word in text.split()]])
        found = embed(ids, torch.arange(3)[None], weights, spec)
        assert found[0].tolist() == expected


# Embedding


def test_embedding_scaled_as_gemma_scales_it():
    table = drawn(17, 8)
    ids = torch.tensor([[3, 0, 16]])
    spec = toy(embed_scale=math.sqrt(8))
    found = embed(ids, torch.arange(3)[None], Weights({"embed.weight": table}), spec)
    torch.testing.assert_close(found[0], table[[3, 0, 16]] * math.sqrt(8))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_embedding_scale_is_rounded_to_the_models_type(dtype):
    """√2048 = 45.2548… is 45.25 in bfloat16: what Gemma was trained with."""
    table = drawn(17, 8, dtype=dtype)
    found = embed(
        torch.tensor([[5]]), torch.tensor([[0]]), Weights({"embed.weight": table}), toy(embed_scale=math.sqrt(2048))
    )
    assert found.dtype == dtype
    rounded = float(torch.tensor(math.sqrt(2048), dtype=dtype))
    assert dtype != BF16 or rounded == 45.25
    assert torch.equal(found[0, 0], (table[5].double() * rounded).to(dtype))


def test_scale_comes_before_positions_are_added():
    table, places = drawn(17, 8), drawn(64, 8, seed=1)
    weights = Weights({"embed.weight": table, "pos_embed.weight": places})
    found = embed(torch.tensor([[5, 5]]), torch.tensor([[9, 2]]), weights, toy(embed_scale=3.0, position="learned"))
    torch.testing.assert_close(found[0], table[[5, 5]] * 3 + places[[9, 2]])


# Who sees whom


def seen_by_hand(queries, keys, present, causal: bool, window: int | None) -> torch.Tensor:
    """[B, 1, T, S]: a query sees a key that is a token, not later than itself (causal), and less than `window` away."""
    batch = max(len(queries), len(keys), 1 if present is None else len(present))
    mask = torch.zeros(batch, 1, queries.shape[1], keys.shape[1], dtype=torch.bool)
    for b in range(batch):
        at, of = queries[b % len(queries)].tolist(), keys[b % len(keys)].tolist()
        for t, query in enumerate(at):
            for s, key in enumerate(of):
                token = present is None or bool(present[b, s])
                ordered = not causal or key <= query
                near = window is None or abs(query - key) < window
                mask[b, 0, t, s] = token and ordered and near
    return mask


PADDED = torch.tensor([[True] * 6, [False] * 2 + [True] * 4, [False] * 5 + [True]])
ROWS = {"all": slice(None), "last": slice(-1, None), "last three": slice(-3, None)}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("present", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 9])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_the_kernels_arguments_say_what_the_mask_says(causal, window, present, rows):
    positions = Inputs(torch.zeros(3, 6, dtype=torch.long), present).positions
    part = replace(toy().attention, causal=causal, window=window)
    sight = Sight.of(part, positions, present).at(ROWS[rows])
    by_hand = seen_by_hand(positions[:, ROWS[rows]], positions, present, causal, window)
    assert torch.equal(sight.mask().expand_as(by_hand), by_hand)
    q, k, v = drawn(3, 2, 6, 4)[:, :, ROWS[rows]], drawn(3, 2, 6, 4, seed=1), drawn(3, 2, 6, 4, seed=2)
    by_kernel = F.scaled_dot_product_attention(q, k, v, **sight.for_kernel())
    explicit = (q @ k.mT / 2).masked_fill(~by_hand, -math.inf).softmax(-1) @ v
    seeing = by_hand.any(-1, keepdim=True).expand_as(explicit)
    torch.testing.assert_close(by_kernel[seeing], explicit[seeing])


@pytest.mark.parametrize("causal", [True, False])
def test_one_token_sees_itself(causal):
    sight = Sight.of(replace(toy().attention, causal=causal), torch.tensor([[0]]), None)
    assert sight.mask().tolist() == [[[[True]]]]
    v = drawn(1, 1, 1, 4)
    assert torch.equal(F.scaled_dot_product_attention(v, v, v, **sight.for_kernel()), v)


def test_a_plain_causal_mask_is_never_built():
    """At 32,768 positions it would be a gigabyte."""
    whole = Sight.of(toy().attention, torch.arange(6)[None], None)
    assert whole.for_kernel() == {"is_causal": True}
    assert whole.at(slice(-1, None)).for_kernel() == {}


# Attention


def attend(x, memory, sight: Sight, tensors: dict, spec: Spec, probe=SILENT, turns=None) -> torch.Tensor:
    return attention(x, memory, sight, turns, Weights(tensors), spec, probe)


def attention_tensors(spec: Spec, dtype=F64, seed: int = 0) -> dict[str, torch.Tensor]:
    every = random_tensors(spec, dtype, seed)
    return {n.removeprefix("layers.0.attn."): t for n, t in every.items() if n.startswith("layers.0.attn.")}


def attended_by_hand(x, tensors: dict, spec: Spec, mask: torch.Tensor) -> torch.Tensor:
    """Head by head, in float64; a query that sees nothing reads zeros."""
    a = spec.attention
    w = {name: tensor.double() for name, tensor in tensors.items()}

    def project(name):
        return x.double() @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    q, k, v = (project(name) for name in "qkv")
    scale = a.head_dim**-0.5 if a.scale is None else a.scale
    z = []
    for h in range(a.n_heads):
        g = h // (a.n_heads // a.n_kv_heads)
        qh, kh, vh = (m[..., i * a.head_dim : (i + 1) * a.head_dim] for m, i in ((q, h), (k, g), (v, g)))
        weights = torch.where(mask[:, 0], (qh @ kh.transpose(1, 2) * scale), torch.full((), -1e300, dtype=F64)).softmax(
            -1
        )
        z.append(torch.where(mask[:, 0].any(-1, keepdim=True), weights @ vh, torch.zeros((), dtype=F64)))
    return torch.cat(z, -1) @ w["o.weight"].T + w.get("o.bias", 0.0)


CLOSE = {F64: 1e-12, F32: 1e-5, BF16: 5e-2}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("bias,o_bias", [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_torchs_module(dtype, bias, o_bias, causal):
    part = {"n_heads": 2, "bias": bias, "o_bias": o_bias, "causal": causal}
    spec = toy(attention=part)
    tensors, x = attention_tensors(spec, dtype), drawn(3, 6, 8, seed=5, dtype=dtype)
    module = torch.nn.MultiheadAttention(8, 2, bias=True, batch_first=True, dtype=F64)
    module.in_proj_weight.data = torch.cat([tensors[f"{n}.weight"] for n in "qkv"]).double()
    module.in_proj_bias.data.zero_()
    module.out_proj.bias.data.zero_()
    if bias:
        module.in_proj_bias.data = torch.cat([tensors[f"{n}.bias"] for n in "qkv"]).double()
    module.out_proj.weight.data = tensors["o.weight"].double()
    if o_bias:
        module.out_proj.bias.data = tensors["o.bias"].double()
    hidden = torch.ones(6, 6).triu(1).bool() if causal else None
    expected, _ = module(x.double(), x.double(), x.double(), attn_mask=hidden, need_weights=False)
    found = attend(x, x, Sight.of(spec.attention, torch.arange(6)[None], None), tensors, spec)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    size=st.sampled_from([1, 3, 4, 8]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 10),
    scale=st.none() | st.sampled_from([0.1, 1.0]),
    bias=st.booleans(),
    padding=st.lists(st.integers(0, 8), min_size=3, max_size=3) | st.none(),
    dtype=st.sampled_from([F32, F64, BF16]),
    last=st.booleans(),
)
def test_attention_by_hand(batch, length, groups, share, size, causal, window, scale, bias, padding, dtype, last):
    """Grouped heads, windows, padding on the left, every position's output or only the last one's."""
    part = {"n_heads": groups * share, "n_kv_heads": groups, "head_dim": size}
    part |= {"causal": causal, "window": window, "scale": scale, "bias": bias}
    spec = toy(attention=part)
    tensors, x = attention_tensors(spec, dtype), drawn(batch, length, 8, seed=length, dtype=dtype)
    present = None
    if padding:
        present = torch.tensor([[i >= min(p, length - 1) for i in range(length)] for p in padding[:batch]])
    positions = Inputs(torch.zeros(batch, length, dtype=torch.long), present).positions
    rows = slice(-1, None) if last else slice(None)
    found = attend(x[:, rows], x, Sight.of(spec.attention, positions, present).at(rows), tensors, spec)
    mask = seen_by_hand(positions, positions, present, causal, window).expand(batch, -1, -1, -1)
    expected = attended_by_hand(x, tensors, spec, mask)[:, rows]
    assert found.dtype == dtype and found.shape == expected.shape
    near = expected.abs().max() * CLOSE[dtype] + CLOSE[dtype]
    assert (found.double() - expected).abs().max() <= near


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_a_query_that_sees_nothing_reads_nothing(dtype):
    """Positions in a row and the first two keys padding: what the first two queries may see is not there."""
    spec = toy(attention={"n_heads": 2, "bias": True})
    tensors, x = attention_tensors(spec, dtype), drawn(1, 5, 8, dtype=dtype)
    present = torch.tensor([[False, False, True, True, True]])
    sight = Sight(torch.arange(5)[None], torch.arange(5)[None], present, True, None)
    recorder = Recorder("*")
    found = attend(x, x, sight, tensors, spec, recorder)
    assert recorder.kept["z"][:, :, :2].abs().max() == 0
    assert recorder.kept["pattern"][:, :, :2].abs().max() == 0
    torch.testing.assert_close(found[:, :2], tensors["o.bias"].expand(1, 2, 8))
    expected = attended_by_hand(
        x, tensors, spec, seen_by_hand(torch.arange(5)[None], torch.arange(5)[None], present, True, None)
    )
    torch.testing.assert_close(found.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert all(torch.isfinite(tensor).all() for tensor in recorder.kept.values())


def test_queries_and_memory_may_be_of_different_texts():
    """Keys and values of another length, as an encoder gives them; everyone sees everything."""
    spec = toy(attention={"n_heads": 2, "causal": False})
    tensors, x, memory = attention_tensors(spec), drawn(2, 3, 8), drawn(2, 7, 8, seed=1)
    module = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True, dtype=F64)
    module.in_proj_weight.data = torch.cat([tensors[f"{n}.weight"] for n in "qkv"])
    module.out_proj.weight.data = tensors["o.weight"]
    expected, _ = module(x, memory, memory, need_weights=False)
    sight = Sight(torch.arange(3)[None], torch.arange(7)[None], None, False, None)
    torch.testing.assert_close(attend(x, memory, sight, tensors, spec), expected)


def test_query_heads_share_key_heads_in_blocks():
    """Six query heads on two key/value heads: 0, 1, 2 read 0; 3, 4, 5 read 1 (not 0, 2, 4 and 1, 3, 5)."""
    spec = toy(attention={"n_heads": 6, "n_kv_heads": 2, "head_dim": 4})
    tensors, x = attention_tensors(spec), drawn(1, 5, 8)
    recorder = Recorder("z", "v", "pattern")
    attend(x, x, Sight.of(spec.attention, torch.arange(5)[None], None), tensors, spec, recorder)
    z, v, pattern = (recorder.kept[name] for name in ("z", "v", "pattern"))
    for h in range(6):
        torch.testing.assert_close(z[:, h], pattern[:, h] @ v[:, h // 3])
    assert not torch.allclose(z[:, 1], pattern[:, 1] @ v[:, 1])


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_queries_and_keys_are_normed_head_by_head_before_they_turn(kind):
    spec = toy(
        norm={"kind": kind, "eps": 0.1},
        position={"kind": "rope"},
        attention={"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "qk_norm": "head"},
    )
    tensors, x, positions = attention_tensors(spec), drawn(1, 5, 8), torch.arange(5)[None]
    turns = rotary(spec, positions, F64)
    recorder = Recorder("*")
    attend(x, x, Sight.of(spec.attention, positions, None), tensors, spec, recorder, (turns, turns))
    kept = recorder.kept
    for name in "qk":
        head_by_head = kept[name]
        if kind == "rmsnorm":
            by_torch = F.rms_norm(head_by_head, (6,), tensors[f"{name}_norm.weight"], 0.1)
        else:
            by_torch = F.layer_norm(
                head_by_head, (6,), tensors[f"{name}_norm.weight"], tensors[f"{name}_norm.bias"], 0.1
            )
        torch.testing.assert_close(kept[f"{name}_norm"], by_torch)
        torch.testing.assert_close(kept[f"{name}_rot"], turned(by_torch, positions, spec))
    k = kept["k_rot"].repeat_interleave(2, 1)
    torch.testing.assert_close(kept["scores"], kept["q_rot"] @ k.mT / math.sqrt(6))


# Scores and softmax weights


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_weigh_is_an_explicit_softmax(scale):
    q, k = drawn(2, 3, 4, 5), drawn(2, 3, 6, 5, seed=1)
    mask = drawn(2, 1, 4, 6, seed=2) > -0.3
    mask[1, 0, 2] = False
    scores, pattern, _ = weigh(q, k, mask, scale)
    expected = torch.einsum("bhtd,bhsd->bhts", q, k) * scale
    torch.testing.assert_close(scores, expected)  # before the mask
    weights = expected.exp() * mask
    torch.testing.assert_close(pattern, weights / weights.sum(-1, keepdim=True).clamp(min=1e-300))
    assert pattern[1, :, 2].abs().max() == 0 and torch.isfinite(pattern).all()
    assert (pattern[~mask.expand_as(pattern)] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_weigh_computes_half_types_in_float32(dtype):
    q, k = drawn(1, 1, 3, 64, dtype=dtype) * 4, drawn(1, 1, 3, 64, seed=1, dtype=dtype)
    scores, pattern, _ = weigh(q, k, torch.ones(1, 1, 3, 3, dtype=torch.bool), 0.125)
    assert scores.dtype == pattern.dtype == F32
    exact = q.double() @ k.double().mT * 0.125
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pattern.double(), exact.softmax(-1), rtol=1e-4, atol=1e-6)


def test_a_large_score_does_not_overflow():
    q, k = torch.full((1, 1, 1, 1), 1e4, dtype=F32), torch.tensor([[[[1e4], [1e4 - 0.001]]]], dtype=F32)
    _, pattern, _ = weigh(q, k, torch.ones(1, 1, 1, 2, dtype=torch.bool), 1.0)
    assert torch.isfinite(pattern).all() and float(pattern.sum()) == pytest.approx(1.0)


def softmax_of(scores: list[float], scale: float = 1.0) -> torch.Tensor:
    """The engine's softmax weights of one query of 1 on keys that are the scores."""
    q, k = torch.ones(1, 1, 1, 1, dtype=F64), torch.tensor(scores, dtype=F64)[None, None, :, None]
    return weigh(q, k, torch.ones(1, 1, 1, len(scores), dtype=torch.bool), scale)[1].flatten()


def test_golden_softmax():
    golden = GOLDEN["scaling"]
    assert softmax_of([10, 0]).tolist() == pytest.approx(golden["softmax_10_0"], rel=1e-6)
    assert softmax_of([10, 0], 128**-0.5).tolist() == pytest.approx(golden["softmax_10_0_over_sqrt128"], rel=1e-8)
    for scores, expected in golden["small"].items():
        assert softmax_of(json.loads(scores)).tolist() == pytest.approx(expected, rel=1e-7, abs=1e-10)


def test_golden_gradient_through_the_softmax():
    """With scores 10 and 0 hardly anything comes back through the first weight; divided by √128, it does."""
    for scale, expected in zip((1.0, 128**-0.5), GOLDEN["scaling"]["gradient_p1_s1"]):
        q, k = torch.ones(1, 1, 1, 1, dtype=F64), torch.tensor([[[[10.0], [0.0]]]], dtype=F64, requires_grad=True)
        _, pattern, _ = weigh(q, k, torch.ones(1, 1, 1, 2, dtype=torch.bool), scale)
        (gradient,) = torch.autograd.grad(pattern[0, 0, 0, 0], k)  # by the key: the scale times that by the score
        assert float(gradient[0, 0, 0, 0]) / scale == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("size", [4, 16, 64, 128, 256, 1024])
def test_scores_of_random_vectors_spread_by_the_root_of_their_size(size):
    """q, k ~ N(0, 1): standard deviation √d before the division by √d, 1 after it."""
    q, k = drawn(1, 1, 200, size, seed=size), drawn(1, 1, 200, size, seed=size + 1)
    mask = torch.ones(1, 1, 200, 200, dtype=torch.bool)
    assert float(weigh(q, k, mask, 1.0)[0].std()) == pytest.approx(math.sqrt(size), rel=0.05)
    assert float(weigh(q, k, mask, size**-0.5)[0].std()) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("window", [None, 3])
def test_shown_weights_give_what_the_kernel_gave(dtype, window):
    """pattern @ v == z, for every head, grouped ones too."""
    spec = toy(attention={"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "window": window}, position={"kind": "rope"})
    tensors = random_tensors(spec, dtype)
    recorder = Recorder("*")
    run(spec, tensors, Inputs(torch.arange(9)[None]), recorder)
    for i in (0, 1):
        pattern, v, z = (recorder.kept[f"layers.{i}.attn.{name}"] for name in ("pattern", "v", "z"))
        torch.testing.assert_close(pattern @ v.repeat_interleave(2, 1), z)
        torch.testing.assert_close(pattern.sum(-1), torch.ones(1, 4, 9, dtype=dtype))


# MLP and head

ACTS = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
}
XS = [-6.0, -3.0, -1.5, -1.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 1.0, 1.5, 3.0, 6.0]


@pytest.mark.parametrize("activation", ACTS)
def test_activations_by_their_formulas(activation):
    one = {"up.weight": torch.eye(1, dtype=F64), "down.weight": torch.eye(1, dtype=F64)}
    part = toy(mlp={"kind": "dense", "size": 1, "activation": activation}).mlp
    found = mlp(torch.tensor(XS, dtype=F64)[:, None], Weights(one), part, SILENT).flatten()
    torch.testing.assert_close(
        found, torch.tensor([ACTS[activation](x) for x in XS], dtype=F64), rtol=1e-12, atol=1e-15
    )


def test_the_two_gelus_differ_in_the_fourth_digit():
    values = [ACTS["gelu"](x) - ACTS["gelu_tanh"](x) for x in XS]
    assert 1e-4 < max(map(abs, values)) < 1e-3  # so the test above tells them apart


@pytest.mark.parametrize("activation", ACTS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_gated_mlp_lets_the_activated_gate_multiply_up(activation, bias):
    spec = toy(mlp={"kind": "dense", "size": 5, "activation": activation, "gated": True, "bias": bias})
    every = random_tensors(spec)
    w = {n.removeprefix("layers.0.mlp."): t for n, t in every.items() if n.startswith("layers.0.mlp.")}
    x = drawn(2, 3, 8)

    def linear(h, name):
        return h @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    gate = linear(x, "gate").apply_(ACTS[activation])
    expected = linear(gate * linear(x, "up"), "down")
    torch.testing.assert_close(mlp(x, Weights(w), spec.mlp, SILENT), expected)
    plain = toy(mlp={"kind": "dense", "size": 5, "activation": activation, "bias": bias}).mlp
    expected = linear(linear(x, "up").apply_(ACTS[activation]), "down")
    torch.testing.assert_close(mlp(x, Weights(w), plain, SILENT), expected)


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
@pytest.mark.parametrize("vocabulary", [1, 100, 8192, 8193, 20_000])
@pytest.mark.parametrize("bias", [False, True])
def test_head(dtype, vocabulary, bias):
    """Half types give float32, as accurate as float32 is: the products of halves are exact, their sums nearly so."""
    x, weight = drawn(2, 3, 64, dtype=dtype), drawn(vocabulary, 64, seed=1, dtype=dtype)
    tensors = {"lm_head.weight": weight}
    if bias:
        tensors["lm_head.bias"] = drawn(vocabulary, seed=2, dtype=dtype)
    logits = head(x, Weights(tensors), toy(vocab_size=vocabulary))
    assert logits.shape == (2, 3, vocabulary)
    assert logits.dtype == (F64 if dtype == F64 else F32)
    exact = x.double() @ weight.double().T + (tensors["lm_head.bias"].double() if bias else 0.0)
    near = 1e-12 if dtype == F64 else 1e-4
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=near)


# Layers


def layered_by_hand(spec: Spec, tensors: dict, ids: list[int], placement: str) -> torch.Tensor:
    """The whole decoder in float64, its norms before a sublayer or after its sum."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    mask = seen_by_hand(torch.arange(len(ids))[None], torch.arange(len(ids))[None], None, True, None)

    def normed(x, name):
        return F.layer_norm(x, (8,), w[f"{name}.weight"], w[f"{name}.bias"], spec.norm.eps)

    def fed(x, at):
        up = x @ w[f"{at}.up.weight"].T + w[f"{at}.up.bias"]
        return up.clamp(min=0) @ w[f"{at}.down.weight"].T + w[f"{at}.down.bias"]

    x = w["embed.weight"][ids][None] + w["pos_embed.weight"][: len(ids)]
    for i in range(spec.n_layers):
        at = f"layers.{i}"
        part = {n.removeprefix(f"{at}.attn."): t for n, t in w.items() if n.startswith(f"{at}.attn.")}
        if placement == "pre":
            x = x + attended_by_hand(normed(x, f"{at}.attn_norm"), part, spec, mask)
            x = x + fed(normed(x, f"{at}.mlp_norm"), f"{at}.mlp")
        else:
            x = normed(x + attended_by_hand(x, part, spec, mask), f"{at}.attn_norm")
            x = normed(x + fed(x, f"{at}.mlp"), f"{at}.mlp_norm")
    if "final_norm.weight" in w:
        x = normed(x, "final_norm")
    return x @ w["lm_head.weight"].T


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("final", [True, False])
def test_layers_by_explicit_arithmetic(placement, final):
    spec = toy(
        position="learned",
        norm={"kind": "layernorm", "eps": 0.01, "placement": placement, "final": final},
        attention={"n_heads": 2, "bias": True},
        mlp={"kind": "dense", "size": 5, "activation": "relu", "bias": True},
    )
    tensors = random_tensors(spec)
    assert ("final_norm.weight" in tensors) == final
    found = run(spec, tensors, Inputs(torch.tensor([[4, 0, 16, 4, 9]])))
    torch.testing.assert_close(found, layered_by_hand(spec, tensors, [4, 0, 16, 4, 9], placement))


def test_an_offset_and_a_scale_in_a_whole_model():
    """A model with offset 1 and scaled embeddings is one without, its gains plus 1 and its table multiplied."""
    part = {"kind": "rmsnorm", "eps": 1e-6, "offset": 1.0}
    spec = toy(norm=part, embed_scale=math.sqrt(8), mlp={"kind": "dense", "size": 5, "activation": "gelu_tanh"})
    tensors = random_tensors(spec)
    plain = {n: t + 1 if "norm" in n else t * math.sqrt(8) if n == "embed.weight" else t for n, t in tensors.items()}
    inputs = Inputs(torch.tensor([[4, 0, 16]]))
    expected = run(replace(spec, embed_scale=1.0, norm=replace(spec.norm, offset=0.0)), plain, inputs)
    torch.testing.assert_close(run(spec, tensors, inputs), expected)


def test_the_residual_stream_is_a_sum():
    spec = toy(norm="rmsnorm", mlp={"kind": "dense", "size": 5, "activation": "relu"})
    recorder = Recorder("*")
    run(spec, random_tensors(spec), Inputs(torch.tensor([[4, 0, 16]])), recorder)
    kept = recorder.kept
    assert torch.equal(kept["layers.0.resid_pre"], kept["embed"])
    assert torch.equal(kept["layers.1.resid_pre"], kept["layers.0.resid_post"])
    for i in (0, 1):
        at = f"layers.{i}"
        torch.testing.assert_close(kept[f"{at}.resid_mid"], kept[f"{at}.resid_pre"] + kept[f"{at}.attn_out"])
        torch.testing.assert_close(kept[f"{at}.resid_post"], kept[f"{at}.resid_mid"] + kept[f"{at}.mlp_out"])


# A whole request

KINDS = {
    "learned": {"position": "learned"},
    "rope": {"position": {"kind": "rope", "pairs": "neighbours"}},
    "none": {},
    "window": {"position": {"kind": "rope"}, "attention": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "window": 3}},
    "post": {"position": "learned", "norm": {"kind": "layernorm", "placement": "post"}},
    "grouped": {"attention": {"n_heads": 4, "n_kv_heads": 1, "head_dim": 6, "bias": True}, "norm": "rmsnorm"},
}
TEXTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [8], [16, 0, 2, 8]]


def padded(texts: list[list[int]], filler: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, texts))
    ids = torch.tensor([[filler] * (width - len(text)) + text for text in texts])
    return ids, torch.tensor([[False] * (width - len(text)) + [True] * len(text) for text in texts])


def dense(**changes) -> Spec:
    return toy(mlp={"kind": "dense", "size": 12, "activation": "gelu"}, **changes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype,near", [(F64, 1e-12), (F32, 1e-5)])
def test_a_padded_text_gives_what_it_gives_alone(kind, dtype, near):
    spec = dense(**KINDS[kind])
    tensors = random_tensors(spec, dtype)
    ids, mask = padded(TEXTS)
    together = run(spec, tensors, Inputs(ids, mask))
    assert torch.isfinite(together).all()
    for row, text in zip(together, TEXTS):
        alone = run(spec, tensors, Inputs(torch.tensor([text])))[0]
        torch.testing.assert_close(row[-len(text) :], alone, rtol=near, atol=near * float(alone.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_padding_changes_nothing(kind):
    spec = dense(**KINDS[kind])
    tensors = random_tensors(spec)
    (ids, mask), (other, _) = padded(TEXTS), padded(TEXTS, filler=13)
    first, second = run(spec, tensors, Inputs(ids, mask)), run(spec, tensors, Inputs(other, mask))
    assert torch.equal(first[mask], second[mask])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype,near", [(F64, 1e-12), (F32, 1e-5), (BF16, 5e-2)])
def test_the_last_rows_are_the_last_of_all_rows(kind, dtype, near):
    spec = dense(**KINDS[kind])
    tensors = random_tensors(spec, dtype)
    ids, mask = padded(TEXTS)
    for inputs in (Inputs(ids, mask), Inputs(ids), Inputs(ids[:1, :1])):
        everything = run(spec, tensors, replace(inputs, rows="all"))
        last = run(spec, tensors, replace(inputs, rows="last"))
        assert last.shape == (len(inputs.ids), 1, 17)
        torch.testing.assert_close(last, everything[:, -1:], rtol=near, atol=near * float(everything.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_model_sees_nothing_that_comes_later(kind):
    spec = dense(**KINDS[kind])
    tensors = random_tensors(spec)
    whole = run(spec, tensors, Inputs(torch.tensor([[3, 1, 4, 1, 5, 9, 2]])))
    for length in range(1, 7):
        part = run(spec, tensors, Inputs(torch.tensor([[3, 1, 4, 1, 5, 9, 2][:length]])))
        torch.testing.assert_close(part, whole[:, :length])


def test_a_window_hides_what_lies_further_back():
    """Two layers of a window of 3: position 6 sees back to position 2, and not to position 1."""
    spec = dense(**KINDS["window"])
    tensors = random_tensors(spec)

    def last(second: int, third: int) -> torch.Tensor:
        return run(spec, tensors, Inputs(torch.tensor([[3, second, third, 1, 5, 9, 2]])))[0, -1]

    assert torch.equal(last(1, 4), last(13, 4))
    assert not torch.allclose(last(1, 4), last(1, 13))


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_near_and_logits_are_float32(kind):
    spec = dense(**KINDS[kind])
    tensors = random_tensors(spec, BF16)
    inputs = Inputs(torch.tensor([TEXTS[0]]))
    half = run(spec, tensors, inputs)
    exact = run(spec, {name: tensor.double() for name, tensor in tensors.items()}, inputs)
    assert half.dtype == F32
    assert (half.double() - exact).abs().max() < 0.1 * exact.std()
