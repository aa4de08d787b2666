"""Two models' weights side by side: the arithmetic beside numpy's, planted differences, formats that are alike."""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptcli.checkpoint.patterns import unfold
from gptcli.errors import GptcliError
from gptcli.layout import layout
from gptcli.model import differences, likeness
from gptcli.model.differences import Meter, compare, spans
from gptcli.model.held import Held
from gptcli.render.plain import to_json
from gptcli.render.screen import Screen
from gptcli.render.terminal import draw, verdict
from gptcli.report.diff_weights import WeightsDiffReport, weights_report
from gptcli.report.weights_verdict import patterns
from gptcli.source import open_model
from gptcli.spec import Spec, read_spec, to_dict
from tests.command import Stream, gptcli, strict
from tests.converted import convert, exact_toy, to_pairs
from tests.packed_toys import save as save_packed
from tests.test_trained import trained  # noqa: F401 - a fixture

LLAMA = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
SPEC = {
    "name": "toy", "vocab_size": 40, "context_length": 32, "hidden_size": 32, "n_layers": 3,
    "position": {"kind": "rope"}, "norm": {"kind": "rmsnorm"},
    "attention": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8},
    "mlp": {"kind": "dense", "size": 24, "activation": "silu", "gated": True},
    "lm_head": {"tied": False, "bias": False},
}  # fmt: skip


def spec(**changes) -> Spec:
    return read_spec(SPEC | changes)


def drawn(of: Spec, seed: int = 0) -> dict[str, Tensor]:
    """Random weights, norms about 1."""
    draw = torch.Generator().manual_seed(seed)
    return {
        p.name: (p.role == "gain") + 0.2 * torch.randn(p.shape, generator=draw) for p in layout(of) if not p.tied_to
    }


def saved(folder: Path, tensors: dict[str, Tensor], of: Spec | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(of or spec())))
    return folder


def compared(a: Path | str, b: Path | str) -> WeightsDiffReport:
    report = weights_report(open_model(str(a)), open_model(str(b)))
    assert report.status == ("findings" if report.findings else "ok")
    assert ("weights-differ" in {one.code for one in report.findings}) == (report.verdict == "different")
    return report


@pytest.fixture
def pair(tmp_path):
    """Compares the toy's weights with those that a change makes of them."""

    def run(change, of: Spec | None = None, to: Spec | None = None) -> WeightsDiffReport:
        one, other = drawn(of or spec()), drawn(of or spec())
        changed = change(other) or other
        return compared(saved(tmp_path / "a", one, of), saved(tmp_path / "b", changed, to or of))

    return run


def rows(report: WeightsDiffReport, kind: str = "different") -> dict:
    return {tensor.name: tensor for tensor in report.tensors if tensor.kind == kind}


def held(x: Tensor) -> Held:
    return Held(x, str(x.dtype).removeprefix("torch."), 8.0 * x.dtype.itemsize)


# The arithmetic

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (0, 3), (3, 0), (4, 5), (17, 3)])


@st.composite
def couples(draw):
    shape = draw(SHAPES)
    x = draw(arrays.arrays(np.float32, shape, elements=NUMBERS))
    change = draw(st.sampled_from(["all", "some", "none"]))
    y = draw(arrays.arrays(np.float32, shape, elements=NUMBERS))
    kept = draw(arrays.arrays(np.bool_, shape))
    return x, {"all": y, "some": np.where(kept, x, y).astype(np.float32), "none": x.copy()}[change]


@settings(max_examples=200, deadline=None)
@given(couples(), st.integers(1, 7))
def test_the_numbers_are_those_of_numpy_in_double_precision(couple, each):
    x, y = couple
    meter, flat = Meter(), [torch.from_numpy(one.reshape(-1)) for one in couple]
    for start in range(0, x.size, each):
        meter.add(flat[0][start : start + each], flat[1][start : start + each])
    gap, a, b = meter.gap, x.astype(np.float64), y.astype(np.float64)
    assert gap.changed == np.count_nonzero(a != b) and gap.numbers == x.size and gap.not_finite == (0, 0)
    assert gap.max_abs == np.abs(b - a).max(initial=0)
    if (norm := np.linalg.norm(a)) > 1e-100:
        assert gap.relative == pytest.approx(np.linalg.norm(b - a) / norm, rel=1e-12)
        if np.linalg.norm(b) > 1e-100 and gap.changed:
            expected = np.vdot(a, b) / norm / np.linalg.norm(b)
            assert gap.cosine == pytest.approx(expected, abs=1e-9)
    elif gap.changed and not a.any():
        assert gap.relative is None and gap.cosine is None


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1, 1)])
def test_shapes_that_hold_one_number_or_none(shape):
    meter = Meter()
    meter.add(torch.zeros(shape), torch.ones(shape))
    assert meter.gap.changed == math.prod(shape) and meter.gap.max_abs == (1.0 if math.prod(shape) else 0.0)


@given(st.integers(0, 50), st.integers(1, 40), st.integers(1, 100), st.integers(0, 100))
def test_blocks_hold_every_row_once(rows, width, numbers, first):
    found = [i for span in spans(rows, width, numbers, first) for i in range(span.start, span.stop)]
    assert found == list(range(rows))


def test_what_is_not_finite_counts_apart_and_spoils_no_number():
    nan, inf = math.nan, math.inf
    x, y = torch.tensor([1.0, nan, nan, inf, inf, 3.0]), torch.tensor([1.0, nan, 2.0, inf, -inf, 5.0])
    meter = Meter()
    meter.add(x, y)
    # NaN beside NaN and inf beside inf are no difference; NaN beside 2, inf beside -inf, 3 beside 5 are.
    assert meter.gap[:4] == (2.0, 3, 6, (4, 3)) and meter.gap.relative == pytest.approx(2 / math.sqrt(10))


def test_blocks_leave_no_seam(monkeypatch):
    """A matrix of many blocks, the last one smaller: the same as in one."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(103, 17, generator=draw)
    y = x.clone()
    y[50:, 3] += 0.5
    whole = compare(held(x), held(y), x.shape).gap
    monkeypatch.setattr(differences, "NUMBERS", 40)
    monkeypatch.setattr(differences, "AS_THEY_LIE", 100)
    parts = compare(held(x), held(y), x.shape).gap
    assert parts.changed == whole.changed == 53 and parts.max_abs == whole.max_abs
    assert parts.relative == pytest.approx(float((y - x).double().norm() / x.double().norm()), rel=1e-6)
    assert compare(held(y), held(y.clone()), y.shape).gap is None


# What is the same


def test_a_model_beside_itself_is_identical(pair):
    report = pair(lambda tensors: None)
    assert report.verdict == "identical" and report.said == f"identical: 30 tensors, {count(spec()):,} numbers"
    assert all(
        (t.kind, t.max_abs, t.relative, t.cosine, t.changed) == ("identical", 0, 0, 1, 0) for t in report.tensors
    )
    assert not report.only_a and not report.only_b and not report.architecture


def count(of: Spec) -> int:
    return sum(math.prod(p.shape) for p in layout(of))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "phi3", "gpt_neox"])
def test_the_same_weights_in_a_gguf_file_are_identical(kind, tmp_path):
    """Rows in pairs, matrices turned, norms with 1 more, fused and split projections: numbers that float32 holds."""
    config = GGUF[kind] | {"model_type": kind}
    folder = tmp_path / "hf"
    exact_toy(config, folder)
    report = compared(folder, convert(folder, tmp_path / "model.gguf"))
    assert report.verdict == "identical" and len(report.tensors) > 10


COMMON = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GGUF = {
    "llama": LLAMA,
    "gpt2": {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-5},
    "gemma2": COMMON | {
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "sliding_window": 8,
        "max_position_embeddings": 64, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    "phi3": COMMON | {
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0,
        "original_max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "gpt_neox": COMMON | {
        "intermediate_size": 48, "max_position_embeddings": 64, "rotary_pct": 0.5, "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def test_a_wrapper_s_prefix_and_shards_are_no_difference(tmp_path):
    folder, other = tmp_path / "a", tmp_path / "b"
    exact_toy(LLAMA, folder)
    tensors = {f"_orig_mod.{name}": x for name, x in load_file(folder / "model.safetensors").items()}
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    names, index = list(tensors), {}
    for i, some in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{i:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, other / file)
        index |= dict.fromkeys(some, file)
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert compared(folder, other).verdict == "identical"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_the_stored_type_is_named_and_no_difference(dtype, tmp_path):
    """Both ways round, and where the rounded numbers are stored in float32 again."""
    whole, to = drawn(spec()), getattr(torch, dtype)
    half = {name: x.to(to) for name, x in whole.items()}
    a, b = saved(tmp_path / "a", whole), saved(tmp_path / "b", half)
    again = saved(tmp_path / "c", {name: x.float() for name, x in half.items()})
    for one, other, said in (
        (a, b, f"B's weights are A's in {dtype} (rounded)"),
        (b, a, f"A's weights are B's in {dtype} (rounded)"),
        (a, again, f"B's weights are A's in {dtype} (rounded)"),
    ):
        report = compared(one, other)
        assert (report.verdict, report.status, report.said) == ("rounding", "ok", said)
        unit = torch.finfo(to).eps / 2
        assert all(0 < tensor.relative < unit for tensor in report.tensors)
    report = compared(b, again)
    assert report.verdict == "rounding" and report.said.endswith(f"A holds them in {dtype}, B in float32")


def test_what_two_architectures_tell_is_no_difference(pair):
    """Rows of q and k in the other order of pairs where the other Spec turns neighbours; norms less the Spec's 1."""

    def turned(tensors):
        for name, x in tensors.items():
            if name.endswith(("attn.q.weight", "attn.k.weight")):
                tensors[name] = to_pairs(x, len(x) // 8)

    report = pair(turned, to=spec(position={"kind": "rope", "pairs": "neighbours"}))
    said = "layers.{0-2}.attn.{q,k}: rows permuted (rotary halves → neighbours), as the architectures tell"
    assert report.verdict == "rounding" and report.said == said
    assert len(rows(report, "told")) == 6 and report.architecture[0][0] == "positions"

    def less(tensors):
        return {name: x - 1 if "norm" in name else x for name, x in tensors.items()}

    report = pair(less, to=spec(norm={"kind": "rmsnorm", "offset": 1.0}))
    assert report.verdict == "rounding" and set(rows(report, "told")) == {n for n in drawn(spec()) if "norm" in n}


# What differs


def test_one_number_that_differs_is_found_and_told_in_numbers(pair):
    def one(tensors):
        tensors["layers.1.mlp.down.weight"][3, 5] += 0.25

    report = pair(one)
    (found,) = rows(report).values()
    x = drawn(spec())["layers.1.mlp.down.weight"]
    y = x.clone()
    y[3, 5] += 0.25
    apart = float((y.double() - x.double()).abs().max())
    assert found.name == "layers.1.mlp.down.weight" and found.changed == 1 / x.numel()
    assert found.max_abs == apart and found.relative == pytest.approx(apart / float(x.double().norm()), rel=1e-12)
    assert report.said.startswith("only layers.1.mlp.down differs by ") and report.status == "findings"
    (part,) = (part for part in report.parts if part.different)
    assert (part.layer_index, part.part, part.tensors, part.different) == (1, "mlp", 3, 1)
    assert part.changed == 1 / (3 * x.numel()) and part.relative == found.relative


def swap(x: Tensor, order: list[int], size: int, axis: int = 0) -> Tensor:
    """Groups of `size` rows, or columns, in another order."""
    return torch.cat([x.split(size, axis)[i] for i in order], axis)


CHANGES = {
    "rotary": ("attn.q.weight", lambda t, x: to_pairs(x, 4), "rows permuted (rotary halves → neighbours)"),
    "rotary back": (
        "attn.k.weight",
        lambda t, x: x.unflatten(0, (-1, 4, 2)).transpose(1, 2).flatten(0, 2),
        "rows permuted (rotary neighbours → halves)",
    ),
    "transposed": ("attn.o.weight", lambda t, x: x.T, "transposed"),
    "heads": ("attn.q.weight", lambda t, x: swap(x, [2, 0, 1, 3], 8), "heads in the order 2, 0, 1, 3"),
    "kv heads": ("attn.v.weight", lambda t, x: swap(x, [1, 0], 8), "heads in the order 1, 0"),
    "columns": ("attn.o.weight", lambda t, x: swap(x, [3, 2, 1, 0], 8, 1), "heads in the order 3, 2, 1, 0"),
    "swapped": ("mlp.up.weight", lambda t, x: t["layers.1.mlp.gate.weight"], "it holds A's layers.1.mlp.gate.weight"),
    "scaled": ("mlp.down.weight", lambda t, x: x * 0.99, "0.99 times A's"),
    "negative": ("mlp.down.weight", lambda t, x: -x, "-1 times A's"),
    "plus 1": ("mlp_norm.weight", lambda t, x: x + 1, "1 more (a norm's 1 + weight)"),
    "less 1": ("attn_norm.weight", lambda t, x: x - 1, "1 less (a norm's 1 + weight)"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_was_done_to_a_tensor_is_named(name, dtype, tmp_path):
    """In float32 beside float32, and beside bfloat16, where rounding comes on top."""
    of, change, said = CHANGES[name]
    one, other = drawn(spec()), drawn(spec())
    other[f"layers.1.{of}"] = change(one, one[f"layers.1.{of}"])
    other = {name: x.to(getattr(torch, dtype)) for name, x in other.items()}
    report = compared(saved(tmp_path / "a", one), saved(tmp_path / "b", other))
    (found,) = rows(report).values()
    assert (found.name, found.said) == (f"layers.1.{of}", said)
    assert found.left <= (1e-7 if dtype == "float32" else 2**-7)
    assert report.said == f"only layers.1.{of.removesuffix('.weight')} differs: {said}"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("embed", lambda t, x: x.roll(1, 0), "its rows are in another order"),
        ("layers.1.mlp.up", lambda t, x: x.flip(0), "its rows are in another order"),
        ("layers.1.mlp.down", lambda t, x: x.flip(1), "its columns are in another order"),
        ("layers.1.mlp_norm", lambda t, x: x.flip(0), "its numbers are in another order"),
        ("layers.1.attn.q", lambda t, x: t["layers.2.attn.q.weight"], "it holds A's of layer 2"),
        ("layers.1.attn.q", lambda t, x: 0 * x, "zeros throughout"),
    ],
)
def test_numbers_that_stand_elsewhere_or_nowhere(name, change, said, pair):
    def moved(tensors):
        tensors[f"{name}.weight"] = change(dict(tensors), tensors[f"{name}.weight"]).clone()

    assert pair(moved).said == f"only {name} differs: {said}"


@pytest.mark.parametrize("norm", ["head", "each", "whole"])
def test_norms_of_queries_are_permuted_as_their_rows_are(norm, pair):
    of = spec(attention=SPEC["attention"] | {"qk_norm": norm})
    name = "layers.1.attn.q_norm.0.weight" if norm == "each" else "layers.1.attn.q_norm.weight"

    def turned(tensors):
        tensors[name] = to_pairs(tensors[name], len(tensors[name]) // 8)

    (found,) = rows(pair(turned, of)).values()
    assert (found.name, found.said) == (name, "rows permuted (rotary halves → neighbours)")


def test_nothing_is_named_where_every_tensor_is_moved_a_little(pair):
    draw = torch.Generator().manual_seed(3)
    report = pair(lambda tensors: {n: x + 0.01 * torch.randn(x.shape, generator=draw) for n, x in tensors.items()})
    assert len(rows(report)) == 30 and all(not t.said and t.rank is None for t in report.tensors)
    assert report.said.startswith("all 30 tensors differ by ")


def low_rank(shape: tuple[int, int], rank: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape[0], rank, generator=draw) @ torch.randn(rank, shape[1], generator=draw) * 0.05


def test_an_update_of_low_rank_is_recognised(pair):
    def tuned(tensors):
        for i in (1, 2):
            for letter in "qv":
                name = f"layers.{i}.attn.{letter}.weight"
                tensors[name] = tensors[name] + low_rank(tensors[name].shape, 2, i)

    report = pair(tuned)
    assert report.said == "only layers.{1,2}.attn.{q,v} differ: it looks like a rank-2 update"
    assert {tensor.rank for tensor in rows(report).values()} == {2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "rank"), [((24, 90), 3), ((200, 700), 16), ((300, 280), 16), ((320, 500), 64)])
def test_the_rank_is_that_of_the_update(shape, rank, dtype):
    """By a whole decomposition and by the range that random vectors find; a bfloat16 one on top of its rounding."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = (x.float() + 4 * low_rank(shape, rank)).to(dtype)
    gap = compare(held(x), held(y), shape).gap
    found = likeness.rank(held(x), held(y), shape, gap)
    assert found is not None and found.rank == rank
    y = (x.float() + 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(2))).to(dtype)
    assert likeness.rank(held(x), held(y), shape, compare(held(x), held(y), shape).gap) is None


def test_tensors_of_one_model_alone_and_of_another_shape(tmp_path):
    """Four layers beside three, and an embedding with rows of zeros appended."""
    more = spec(n_layers=4, vocab_size=48)
    one, other = drawn(spec()), drawn(more) | drawn(spec())
    for name in ("embed.weight", "lm_head.weight"):
        other[name] = torch.cat((one[name], torch.zeros(8, 32)))
    report = compared(saved(tmp_path / "a", one), saved(tmp_path / "b", other, more))
    assert {lone.name for lone in report.only_b} == {n for n in other if n.startswith("layers.3.")}
    assert not report.only_a and report.verdict == "different"
    assert set(rows(report, "shape")) == {"embed.weight", "lm_head.weight"}
    assert all(t.said == "the first 40 rows are equal, 8 more are zeros" for t in rows(report, "shape").values())
    assert "9 tensors only in B" in report.said and "[40, 32] in A and [48, 32] in B" in report.said
    assert [row[0] for row in report.architecture] == ["layers", "vocabulary"]


def test_a_matrix_of_the_turned_shape_is_recognised():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert likeness.reshaped(held(x), held(x.T), (3, 5), (5, 3)).code == "transposed"
    assert likeness.reshaped(held(x), held(x.T + 1), (3, 5), (5, 3)) is None
    assert likeness.reshaped(held(x), held(x[:2]), (3, 5), (2, 5)).said.startswith("the first 2 rows are equal, 1 more")


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_one_model_ties_and_the_other_holds(equal, tmp_path):
    tied = spec(lm_head={"tied": True, "bias": False})
    one = drawn(tied)
    other = one | {"lm_head.weight": one["embed.weight"] + (0.0 if equal else 0.01)}
    for swapped in (False, True):
        sides = [saved(tmp_path / "a", one, tied), saved(tmp_path / "b", other)]
        report = compared(*sides[:: -1 if swapped else 1])
        a, b = "BA" if swapped else "AB"
        alike = "equals" if equal else "differs from"
        assert report.ties == [f"lm_head.weight is tied to embed.weight in {a} alone; {b}'s {alike} its embed.weight"]
        assert set(rows(report)) == (set() if equal else {"lm_head.weight"})


def test_nan_in_one_side_is_a_finding(pair):
    def spoiled(tensors):
        tensors["layers.2.attn.k.weight"][1, 1] = math.nan

    report = pair(spoiled)
    assert [one.code for one in report.findings] == ["weights-differ", "not-finite"]
    assert report.findings[1].message == "B's layers.2.attn.k.weight holds 1 number not finite"
    (found,) = rows(report).values()
    assert found.not_finite == [0, 1] and found.changed == 1 / 512 and found.max_abs == 0 and found.relative == 0


def test_nan_in_the_same_place_of_both_is_no_difference_and_a_finding(tmp_path):
    tensors = drawn(spec())
    tensors["embed.weight"][0, 0] = math.nan
    report = compared(saved(tmp_path / "a", tensors), saved(tmp_path / "b", tensors))
    assert report.verdict == "identical" and [one.code for one in report.findings] == ["not-finite"] * 2


def test_weights_of_no_file_compare_too(tmp_path):
    """Hand-written ones, and random ones by their seed."""
    assert compared("cats", "cats").verdict == "identical"
    config = tmp_path / "toy.yaml"
    config.write_text(yaml.safe_dump(to_dict(spec())))
    one, other = (open_model(config=str(config), seed=seed) for seed in (0, 1))
    assert weights_report(one, one).verdict == "identical"
    report = weights_report(one, other)
    assert report.verdict == "different"
    assert {name for name in rows(report) if "norm" in name} == set()  # ones whatever the seed


# Quantisation


def packed_file(path: Path, tensors: dict[str, Tensor], types: dict[str, str]) -> tuple[Path, dict[str, Tensor]]:
    """A .gguf file of the toy, some tensors in packed types; and what the gguf package says that these hold."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "block_count": 2,
        "context_length": 32,
        "embedding_length": 64,
        "feed_forward_length": 96,
    }.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(40)
    plain = {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, x in tensors.items():
        stem = OURS[name.split(".", 2)[2].removesuffix(".weight")] if name.startswith("layers") else name
        theirs = f"model.layers.{name.split('.')[1]}.{stem}" if name.startswith("layers") else OUTSIDE[name]
        at = names.get_name(theirs) + ".weight"
        rows = (to_pairs(x, 4) if name.endswith(("attn.q.weight", "attn.k.weight")) else x).numpy()
        if name in types:
            kind = gguf.GGMLQuantizationType[types[name]]
            packed = gguf.quantize(rows, kind)
            writer.add_tensor(at, packed, raw_dtype=kind)
            rows = gguf.dequantize(packed, kind)
        else:
            writer.add_tensor(at, rows)
        back = torch.from_numpy(np.ascontiguousarray(rows))
        if name.endswith(("attn.q.weight", "attn.k.weight")):
            back = back.unflatten(0, (4, -1, 2)).transpose(1, 2).flatten(0, 2)
        plain[name] = back
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, plain


OURS = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
OUTSIDE = {
    "embed.weight": "model.embed_tokens", "final_norm.weight": "model.norm", "lm_head.weight": "lm_head",
}  # fmt: skip
WIDE = spec(
    hidden_size=64, n_layers=2, attention={"n_heads": 4, "n_kv_heads": 4, "head_dim": 16},
    mlp=SPEC["mlp"] | {"size": 96}, name="wide",
)  # fmt: skip


def matrices(of: Spec) -> list[str]:
    return [p.name for p in layout(of) if len(p.shape) == 2]


@pytest.fixture
def quantised(tmp_path):
    """The toy as it was, and with its matrices in Q4_1 but its embedding in Q8_0, and what these are in float32."""
    tensors = drawn(WIDE)
    types = dict.fromkeys(matrices(WIDE), "Q4_1") | {"embed.weight": "Q8_0"}
    path, plain = packed_file(tmp_path / "packed.gguf", tensors, types)
    return saved(tmp_path / "whole", tensors, WIDE), path, plain, tensors


def test_the_error_of_quantisation_by_tensor(quantised):
    """Of a .gguf file beside its original: numpy's figures over what the gguf package dequantises."""
    whole, path, plain, tensors = quantised
    report = compared(whole, path)
    found = rows(report)
    assert set(found) == set(matrices(WIDE)) and report.verdict == "different"
    for name, one in found.items():
        a, b = tensors[name].double().numpy(), plain[name].double().numpy()
        assert one.relative == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-12)
        assert one.max_abs == np.abs(b - a).max() and not one.said and one.rank is None
        kind, bits = ("Q8_0", 8.5) if name == "embed.weight" else ("Q4_1", 5.0)
        assert (one.dtype_a, one.dtype_b, one.bits_a, one.bits_b) == ("float32", kind, 32.0, bits)
    worst = max(found.values(), key=lambda one: one.relative)
    assert worst.name.removesuffix(".weight") in report.said and "float32 against Q4_1" in report.said
    sizes = {p.name: (math.prod(p.shape), p) for p in layout(WIDE)}
    bits = sum(
        n * (32 if len(p.shape) == 1 else 8.5 if name == "embed.weight" else 5) for name, (n, p) in sizes.items()
    )
    assert report.bits_b == pytest.approx(bits / count(WIDE)) and report.bits_a == 32


def test_a_quantised_file_beside_its_dequantised_copy(quantised, tmp_path):
    """The same; with one tensor quantised anew, that one is named; in bfloat16, rounded."""
    _, path, plain, _ = quantised
    report = compared(path, saved(tmp_path / "plain", plain, WIDE))
    assert report.verdict == "rounding" and not rows(report, "rounded")
    assert report.said.endswith("A holds them in Q8_0, Q4_1, B in float32")
    kind, name = gguf.GGMLQuantizationType.Q4_0, "layers.1.mlp.down.weight"
    anew = torch.from_numpy(gguf.dequantize(gguf.quantize(plain[name].numpy(), kind), kind))
    report = compared(path, saved(tmp_path / "anew", plain | {name: anew}, WIDE))
    assert set(rows(report)) == {name} and report.said.startswith("only layers.1.mlp.down differs by ")
    report = compared(path, saved(tmp_path / "half", {n: x.bfloat16() for n, x in plain.items()}, WIDE))
    assert report.said == "B's weights are A's in bfloat16 (rounded)" and report.status == "ok"


def test_permuted_rows_show_through_quantisation(quantised, tmp_path):
    _, path, _, tensors = quantised
    name = "layers.0.attn.q.weight"
    turned = saved(tmp_path / "turned", tensors | {name: to_pairs(tensors[name], 4)}, WIDE)
    found = rows(compared(path, turned))[name]
    assert found.said == "rows permuted (rotary halves → neighbours)" and 0.01 < found.left < 0.1 < found.relative


def test_packed_bytes_are_compared_as_they_lie(quantised, monkeypatch):
    """The same packed types in both: nothing is unpacked."""
    _, path, _, _ = quantised
    monkeypatch.setattr("gptcli.model.ggml.unpack", None)
    assert compared(path, path).verdict == "identical"


@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-row", "mxfp4", "bnb-nf4"])
def test_other_packed_formats_beside_what_they_stand_for(scheme, tmp_path):
    """What the format's definition says that the packed weights are, in float64: equal but for rounding to float32."""
    toy = save_packed(tmp_path / "packed", scheme)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(toy.config))
    save_file({name: x.float().contiguous() for name, x in toy.plain.items()}, plain / "model.safetensors")
    report = compared(tmp_path / "packed", plain)
    assert report.bits_a < report.bits_b == 32 and all((t.relative or 0) < 1e-6 for t in report.tensors)
    assert any(tensor.bits_a < 16 for tensor in report.tensors)


def test_a_format_that_is_not_dequantised_is_refused(tmp_path):
    save_packed(tmp_path / "packed", "gptq")
    with pytest.raises(GptcliError, match=r"GPTQ .* counted but not dequantised"):
        compared(tmp_path / "packed", tmp_path / "packed")


def test_a_trained_model_in_q4_1_beside_its_dequantised_copy(trained, tmp_path):  # noqa: F811
    """SmolLM2: the same; with one tensor quantised anew the table names it."""
    path = trained("smollm2")
    model = open_model(str(path))
    weights = model.weights(torch.float32, torch.device("cpu")).tensors
    plain = {name: weights[name] for name in weights}
    report = compared(path, saved(tmp_path / "plain", plain, model.spec))
    assert report.verdict == "rounding" and report.status == "ok" and {t.changed for t in report.tensors} == {0}
    kind, name = gguf.GGMLQuantizationType.Q4_0, "layers.7.mlp.down.weight"
    plain[name] = torch.from_numpy(gguf.dequantize(gguf.quantize(plain[name].numpy(), kind), kind))
    report = compared(path, saved(tmp_path / "anew", plain, model.spec))
    assert set(rows(report)) == {name} and 0.05 < rows(report)[name].relative < 0.2
    assert report.said.startswith("only layers.7.mlp.down differs by ")


# What a person sees


def shown(report: WeightsDiffReport, columns: int | None = 80, encoding: str = "utf-8", full: bool = False) -> str:
    stream = Stream(encoding, "strict", terminal=columns is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns or 80))
        screen = Screen(stream, "never", full=full)
    draw(report, screen)
    screen.show()
    return stream.text


@pytest.fixture
def fine_tuned(pair):
    def tuned(tensors):
        for i in range(3):
            name = f"layers.{i}.mlp.down.weight"
            tensors[name] = tensors[name] + 0.01 * (i + 1) * tensors[name].flip(0)
        tensors["layers.0.attn.o.weight"] = tensors["layers.0.attn.o.weight"].T

    return pair(tuned)


def test_the_verdict_stands_first_then_tensors_then_layers(fine_tuned):
    text = shown(fine_tuned)
    lines = text.splitlines()
    assert [lines[0], lines[1].strip()] == fine_tuned.said.split("; ")  # too long for one line
    assert "" not in lines and [line for line in lines if len(line) > 80] == []
    (row,) = (line.split() for line in lines if line.startswith("layers.{0-2}.mlp.down"))
    found = rows(fine_tuned)
    ends = [f"{found[f'layers.{i}.mlp.down.weight'].relative:.3g}" for i in (0, 2)]
    assert row[1:5] == ["float32", ends[0], "…", ends[1]]
    assert "different: transposed" in lines and "26 of 30 tensors are identical" in lines
    by_layer = {
        line.split()[0]: line.split()[1:] for line in lines if line.startswith("layers.") and len(line.split()) == 4
    }
    assert by_layer["layers.1"][0::2] == ["=", f"{found['layers.1.mlp.down.weight'].relative:.3g}"]


def test_every_tensor_stands_alone_when_all_is_wanted(fine_tuned):
    lines = shown(fine_tuned, full=True).splitlines()
    for i in range(3):
        assert any(line.startswith(f"layers.{i}.mlp.down ") for line in lines)


@pytest.mark.parametrize("columns", [60, 80, 200, None])
def test_ascii_and_every_width(columns, fine_tuned):
    text = shown(fine_tuned, columns, "ascii")
    assert text.isascii() and "\\" not in text
    assert ("cosine" in text) == (columns != 60)


def test_json_and_the_verdict_alone(fine_tuned):
    found = strict(to_json(fine_tuned) + "\n")
    assert found["schema"] == "gptcli.diff.weights/1" and found["status"] == "findings"
    assert found["said"] == verdict(fine_tuned) and found["verdict"] == "different"
    assert len(found["tensors"]) == 30 and set(found["tensors"][0]) >= {"name", "relative", "cosine", "changed", "rank"}
    assert [part["part"] for part in found["parts"]][:4] == ["embed", "norms", "attention", "mlp"]


def test_on_the_command_line(tmp_path):
    one, other = drawn(spec()), drawn(spec())
    other["layers.1.attn.v.weight"] = other["layers.1.attn.v.weight"] * 0.5
    a, b = saved(tmp_path / "a", one), saved(tmp_path / "b", other)
    ran = gptcli("diff", a, b, "--weights", "-q")
    assert (ran.status, ran.out, ran.err) == (1, "only layers.1.attn.v differs: 0.5 times A's\n", "")
    ran = gptcli("diff", a, a, "--weights", "--json")
    assert ran.status == 0 and ran.json["verdict"] == "identical"


NAMES = [p.name for p in layout(spec())]


@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_patterns_stand_for_just_their_names(names):
    found = [name for pattern in patterns(n for n in NAMES if n in names) for name in every(pattern)]
    assert sorted(found) == sorted(name.removesuffix(".weight") for name in names)


def every(pattern: str) -> list[str]:
    return unfold(pattern, 2 if "{" in pattern else 1)
