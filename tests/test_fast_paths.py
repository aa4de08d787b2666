"""Every fast path against the plain one: the same numbers, the same bits watched or not, no more work than is asked."""

import ctypes
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gptcli.cli import main
from gptcli.config import read_config
from gptcli.errors import GptcliError
from gptcli.layout import layout
from gptcli.model import attention, kernels
from gptcli.model.attention import Sight, fused, in_blocks, weigh
from gptcli.model.forward import Inputs, forward
from gptcli.model.init import random_weights
from gptcli.model.ops import head, linears, route
from gptcli.model.weights import Weights
from gptcli.shipped import configs
from gptcli.spec import Experts, Spec
from gptcli.trace import Recorder
from tests.oracle import Noted
from tests.toys import fed, shrunk

CPU = torch.device("cpu")


def shipped(name: str) -> Spec:
    return read_config(configs()[name]).spec


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| beside |expected|, by their lengths."""
    return float((found.double() - expected).norm() / expected.norm())


class Watched(TorchDispatchMode):
    """Notes each operator that runs, and how many numbers the largest result holds."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.names.add(func.name())
        self.largest = max(self.largest, made.numel() if isinstance(made, torch.Tensor) else 0)
        return made


@pytest.fixture(params=["plain", "onednn"])
def kernel(request, monkeypatch):
    """Both choices for products; where this torch has not the operator, the second falls back to the first."""
    with chosen(request.param, monkeypatch):
        yield request.param


@contextmanager
def chosen(word: str | None, monkeypatch, maker: str = ""):
    monkeypatch.setattr(kernels, "vendor", lambda: maker)
    monkeypatch.delenv("GPTCLI_LINEAR", raising=False)
    if word is not None:
        monkeypatch.setenv("GPTCLI_LINEAR", word)
    kernels.by_onednn.cache_clear()
    yield
    kernels.by_onednn.cache_clear()


def product_by(x, weight, bias=None) -> tuple[torch.Tensor, bool]:
    """The product, and whether oneDNN's operator gave it."""
    with torch.inference_mode(), Watched() as watched:
        y = kernels.product(x, weight, bias)
    return y, "mkldnn::_linear_pointwise" in watched.names


# Products

WEIGHTS = {
    "rows": lambda: drawn(40, 32),
    "columns": lambda: drawn(32, 40).T,
    "columns of a fused one": lambda: drawn(32, 120).T[40:80],
    "every other row": lambda: drawn(80, 32)[::2],
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 8, 255, 256])
@pytest.mark.parametrize("lie", WEIGHTS)
def test_a_product_is_the_same_by_every_kernel(kernel, lie, rows, bias):
    """To float32's rounding of a sum over 32: against the sum in float64."""
    x, weight, bias = drawn(1, rows, 32, seed=1), WEIGHTS[lie](), drawn(80, seed=2)[::2] if bias else None
    y, fast = product_by(x, weight, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert y.shape == (1, rows, 40) and y.dtype == torch.float32 and error(y, expected) < 3e-7
    dense = lie in ("rows", "columns")
    assert fast == (kernel == "onednn" and kernels.is_known() and rows >= (8 if dense else 256))


@pytest.mark.parametrize("columns", [True, False])
def test_matrices_that_lie_side_by_side_are_one(kernel, columns):
    """As GPT-2's q, k and v do, [in, out] (columns), and as others' do in one stored tensor of rows."""
    stored = drawn(32, 60).T if columns else drawn(60, 32)
    parts = stored.split([30, 12, 18])
    whole = kernels.side_by_side(parts)
    assert whole.data_ptr() == stored.data_ptr() and torch.equal(whole, stored)
    assert kernels.side_by_side(parts[1:]).equal(stored[30:])
    x, bias = drawn(2, 9, 32, seed=1), drawn(60, seed=2)
    tensors = {f"{n}.weight": part for n, part in zip("qkv", parts)}
    tensors |= {f"{n}.bias": part for n, part in zip("qkv", bias.split([30, 12, 18]))}
    exact = x.double() @ stored.double().T + bias.double()
    for found, expected in zip(linears(x, Weights(tensors), *"qkv"), exact.split([30, 12, 18], -1)):
        assert error(found, expected) < 3e-7
    del tensors["k.bias"]
    without = exact.split([30, 12, 18], -1)[1] - bias[30:42].double()
    assert error(linears(x, Weights(tensors), *"qkv")[1], without) < 3e-7


def test_matrices_that_only_happen_to_follow_are_not_one():
    room = bytearray(4 * 24)
    a, b = (torch.frombuffer(room, dtype=torch.float32, count=12, offset=at).view(3, 4) for at in (0, 48))
    assert b.data_ptr() == a.data_ptr() + 48 and kernels.side_by_side([a, b]) is None
    stored = drawn(9, 4)
    for parts in ([stored[:3], stored[6:]], [stored[3:6], stored[:3]], [stored[:3], stored[3:6, :2]]):
        assert kernels.side_by_side(parts) is None


LARGE = {
    "rows": lambda: drawn(1100, 1000),
    "columns": lambda: drawn(1000, 1100).T,
    "columns of a fused one": lambda: drawn(1000, 2200).T[1100:],
}


@pytest.mark.parametrize("rows, of", [(1, {"rows"}), (2, {"rows", "columns"}), (7, {"rows", "columns"})])
@pytest.mark.parametrize("lie", LARGE)
def test_few_rows_of_a_large_weight(kernel, lie, rows, of):
    """oneDNN from the first row on, but for one row of a weight that lies by columns."""
    x, weight = drawn(1, rows, 1000, seed=1), LARGE[lie]()
    y, fast = product_by(x, weight)
    assert error(y, x.double() @ weight.double().T) < 1e-6
    assert fast == (kernel == "onednn" and kernels.is_known() and lie in of)


def test_inputs_that_lie_in_any_way_give_the_same(kernel):
    x, weight = drawn(2, 32, 16, seed=1).mT, drawn(40, 32)  # [2, 16, 32], its last axis not the dense one
    assert error(product_by(x, weight)[0], x.double() @ weight.double().T) < 3e-7
    x = drawn(2, 16, 32, seed=1)[:, 3:14]
    assert error(product_by(x, weight)[0], x.double() @ weight.double().T) < 3e-7


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_go_torch_s_own_way(monkeypatch, dtype):
    with chosen("onednn", monkeypatch):
        assert not product_by(drawn(16, 32).to(dtype), drawn(40, 32).to(dtype))[1]


def test_a_gradient_is_kept(kernel):
    x, weight = drawn(16, 32).requires_grad_(), drawn(40, 32)
    (given,) = torch.autograd.grad(kernels.product(x, weight).sum(), x)
    torch.testing.assert_close(given, weight.sum(0).expand(16, 32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "word,maker,fast",
    [
        (None, "AuthenticAMD", True),
        (None, "GenuineIntel", False),
        (None, "", False),
        ("plain", "AuthenticAMD", False),
        ("onednn", "GenuineIntel", True),
    ],
)
def test_the_processor_chooses_unless_the_environment_does(monkeypatch, word, maker, fast):
    with chosen(word, monkeypatch, maker):
        assert kernels.by_onednn() == (fast and kernels.is_known())
    monkeypatch.setattr(kernels, "is_known", lambda: False)  # a torch without the operator
    with chosen(word, monkeypatch, maker):
        assert not product_by(drawn(16, 32), drawn(40, 32))[1]


def test_a_kernel_that_nobody_knows_is_refused(monkeypatch):
    with chosen("mkl", monkeypatch), pytest.raises(GptcliError, match="GPTCLI_LINEAR=mkl: no such kernel"):
        kernels.by_onednn()


def test_the_processor_s_maker_is_read(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nvendor_id\t: GenuineIntel\nvendor_id\t: Other\n")
    for file, maker in (("cpuinfo", "GenuineIntel"), ("absent", "")):
        monkeypatch.setattr(kernels, "Path", lambda _, file=file: tmp_path / file)
        assert kernels.vendor() == maker


# The whole forward pass


def weights_of(spec, dtype=torch.float32, seed: int = 0) -> Weights:
    params = list(layout(spec))
    return Weights.of(params, dict(random_weights(spec, params, seed, dtype, CPU)))


@pytest.mark.parametrize("blocks", [3, 128])
@pytest.mark.parametrize("name", configs())
def test_every_architecture_has_one_result(kernel, name, blocks, monkeypatch):
    """By each kernel, with queries in blocks or not, padded or not: float32's logits are float64's, all rows and the
    last; and watching all changes no bit.
    """
    monkeypatch.setattr(attention, "QUERY_BLOCK", blocks)
    spec = shrunk(shipped(name))
    w, exact = weights_of(spec), weights_of(spec)
    exact.tensors = {path: x.double() for path, x in exact.tensors.items()}
    ids = torch.arange(26).view(2, 13) * 7 % spec.vocab_size
    left = torch.tensor([[False] * 4 + [True] * 9, [True] * 13])
    with torch.inference_mode():
        for mask in (None, left):
            for rows in ("all", "last"):
                inputs = replace(fed(spec, ids, rows), mask=mask)
                found, expected = forward(inputs, w, spec), forward(inputs, exact, spec)
                if mask is not None and rows == "all":
                    found, expected = found[left], expected[left]
                assert error(found, expected) < 1e-5
                recorder = Recorder("*")
                watched = forward(inputs, w, spec, recorder)
                assert torch.equal(watched if mask is None or rows == "last" else watched[left], found)


def test_float32_is_float64_to_2e_6_at_a_full_context(kernel):
    """Two layers as wide as GPT-2 small's, 1024 positions: relative error, and the ten best in the same order."""
    spec = replace(shipped("gpt2-small"), n_layers=2, vocab_size=512)
    w, exact = weights_of(spec), weights_of(spec)
    exact.tensors = {path: x.double() for path, x in exact.tensors.items()}
    inputs = Inputs(torch.arange(1024)[None] * 37 % 512, rows="last")
    with torch.inference_mode():
        found, expected = forward(inputs, w, spec), forward(inputs, exact, spec)
    assert error(found, expected) < 2e-6
    assert found[0, 0].topk(10).indices.tolist() == expected[0, 0].topk(10).indices.tolist()


# Attention in blocks of queries


@pytest.mark.parametrize("has", ["nothing", "sinks", "bias"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 30])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_give_what_all_queries_give_at_once(monkeypatch, causal, window, padded, has):
    """Against softmax weights of the whole, in float64."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    mask = torch.tensor([[False] * 5 + [True] * 9, [True] * 14]) if padded else None
    positions = Inputs(torch.zeros(2, 14), mask).positions
    draw = lambda *shape, seed: drawn(*shape, seed=seed, dtype=torch.float64)  # noqa: E731
    q, k, v = draw(2, 4, 14, 6, seed=1), draw(2, 2, 14, 6, seed=2), draw(2, 2, 14, 6, seed=3)
    sinks = draw(4, seed=4) if has == "sinks" else None
    bias = draw(1, 4, 14, 14, seed=5) if has == "bias" else None
    sight = Sight(positions, positions, mask, causal, window, bias)
    found = fused(q, k, v, sight, 0.4, sinks)
    pattern = weigh(q, k.repeat_interleave(2, 1), sight.mask(), 0.4, sinks, None, bias).pattern
    torch.testing.assert_close(found, pattern @ v.repeat_interleave(2, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("of_scores", [True, False])
@pytest.mark.parametrize("has", ["nothing", "sinks", "bias", "cap", "NaN"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 30])
@pytest.mark.parametrize("causal", [True, False])
def test_scores_and_weights_in_blocks_are_those_of_all_queries_at_once(
    monkeypatch, causal, window, padded, has, of_scores
):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    monkeypatch.setattr(attention, "FEW_HEADS", 0)
    mask = torch.tensor([[False] * 5 + [True] * 9, [True] * 14]) if padded else None
    positions = Inputs(torch.zeros(2, 14), mask).positions
    q, k = drawn(2, 3, 14, 6, seed=1, dtype=torch.float64), drawn(2, 3, 14, 6, seed=2, dtype=torch.float64)
    if has == "NaN":
        q[0, 1, 7, 0] = torch.nan  # one query of one head
    sinks = drawn(3, seed=4, dtype=torch.float64) if has == "sinks" else None
    bias = drawn(1, 3, 14, 14, seed=5, dtype=torch.float64) if has == "bias" else None
    cap = 0.5 if has == "cap" else None
    sight = Sight(positions, positions, mask, causal, window, bias)
    found = in_blocks(q, k, sight, 0.4, sinks, cap, of_scores)
    whole = weigh(q, k, sight.mask(), 0.4, sinks, cap, bias)
    assert (found.scores is None) != of_scores
    for mine, other in zip(found, whole):
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-15, equal_nan=True)
    assert whole.pattern[0, 1, 7].isnan().all() == (has == "NaN")
    assert (found.sink is None) == (sinks is None)


@pytest.mark.parametrize("present", [None, torch.tensor([[False] * 300 + [True] * 724])])
@pytest.mark.parametrize("sinks", [None, torch.zeros(1)])
def test_a_window_costs_its_width(sinks, present):
    """Keys looked at: at most block + window - 1 a query; and no tensor is as large as a mask of all pairs."""
    tokens, window, block = 1024, 50, attention.QUERY_BLOCK
    sight = Sight(Inputs(torch.zeros(1, tokens), present).positions, *[None] * 2, True, window)
    sight.keys, sight.present = sight.queries, present
    if present is None:
        widths = [columns.stop - columns.start for _, columns in sight.blocks(block)]
        assert widths == [block] + [block + window - 1] * (tokens // block - 1)
    q = drawn(1, 1, tokens, 4)
    with torch.inference_mode(), Watched() as watched:
        fused(q, q, q, sight, 1.0, sinks)
    most = tokens if present is None else 300 + block  # padding has one place: the first block of tokens sees it all
    assert watched.largest <= max(block * most, q.numel() + tokens)


def test_masks_are_made_of_bytes():
    """A mask of 512 × 512 takes a byte a pair, and so does what is compared on the way."""
    sight = Sight(torch.arange(512)[None], torch.arange(512)[None], None, True, 100)
    with torch.profiler.profile(profile_memory=True) as watched:
        sight.mask()
    taken = [event.nbytes() for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(taken) == 512 * 512 and sum(n for n in taken if n > 0) <= 2.1 * 512 * 512


# Head, experts, process


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 20])
def test_half_types_heads_are_float32_s(kernel, rows, bias):
    """Of a vocabulary that no block divides: the products of the same half numbers, in float64."""
    spec = replace(shipped("gpt2-small"), vocab_size=1300, hidden_size=24)
    spec = replace(spec, lm_head=replace(spec.lm_head, tied=False, bias=bias))
    x, weight, shift = drawn(1, rows, 24).bfloat16(), drawn(1300, 24, seed=1).bfloat16(), drawn(1300, seed=2).bfloat16()
    w = Weights({"lm_head.weight": weight} | ({"lm_head.bias": shift} if bias else {}))
    logits = head(x, w, spec)
    assert logits.dtype == torch.float32
    assert error(logits, x.double() @ weight.double().T + (shift.double() if bias else 0)) < 1e-6


def test_only_experts_that_a_token_took_are_read():
    part = Experts(n_experts=16, top_k=2, size=8, activation="silu")
    spec = replace(shrunk(shipped("llama3-8b")), mlp=part)
    w, recorder = weights_of(spec), Recorder("layers.*.mlp.router")
    w.tensors = Noted(w.tensors)
    forward(Inputs(torch.tensor([[3, 1]])), w, spec, recorder)
    for layer in range(2):
        router = recorder.kept[f"layers.{layer}.mlp.router"].flatten(0, 1)
        taken = set(route(router, part)[1].flatten().tolist())
        read = {name.split(".")[4] for name in w.tensors.read if name.startswith(f"layers.{layer}.mlp.experts.")}
        assert read == {str(expert) for expert in taken} and 2 <= len(read) <= 4


def test_the_console_entry_alone_tunes_the_allocator(monkeypatch):
    """glibc is told twice; another C library, or another system, is left alone."""
    told = []

    class Glibc:
        gnu_get_libc_version = None

        def mallopt(self, what, value):
            told.append((what, value))

    for platform, library, expected in (("linux", Glibc(), 2), ("linux", object(), 0), ("darwin", Glibc(), 0)):
        told.clear()
        monkeypatch.setattr(main.sys, "platform", platform)
        monkeypatch.setattr(ctypes, "CDLL", lambda _, library=library: library)
        main.keep_memory()
        assert len(told) == expected and all(value == 1 << 30 for _, value in told)
