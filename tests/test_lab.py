"""The experiments of `gptcli lab`: golden figures, what must hold whatever is given, and the commands.

Expectations come from golden.json (double precision, by hand), from arithmetic done here, from torch's own modules.
"""

import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from gptcli import count
from gptcli.cli import lab as commands
from gptcli.cli.main import GROUPS
from gptcli.errors import GptcliError
from gptcli.lab import residual
from gptcli.lab.attention import attention_report
from gptcli.lab.heads import heads_report
from gptcli.lab.norms import norms_report
from gptcli.lab.order import order_report
from gptcli.lab.positions import VECTORS, positions_report
from gptcli.lab.residual import residual_report
from gptcli.lab.routes import routes_report
from gptcli.lab.scaling import scaling_report
from gptcli.layout import layout
from gptcli.report.lab import EXPERIMENTS
from gptcli.run import Run
from gptcli.source import open_model
from tests.command import gptcli, strict

GOLDEN = json.loads((Path(__file__).parent / "data/golden.json").read_text(encoding="utf-8"))
BY_HAND, POSITIONS, SCALING, GPT2 = (
    GOLDEN[name] for name in ("attention-by-hand", "positions", "scaling", "gpt2-small")
)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**70)


def near(expected, within=1e-9):
    """A nested list of numbers, each within so much."""
    if isinstance(expected, list):
        return [near(one, within) for one in expected]
    return pytest.approx(expected, abs=within, rel=0)


# C. Attention in six steps


def attention(text=None, dtype="float64", config="attention-by-hand", layer=0, head=0, both_ways=False):
    model = open_model(config=config)
    ids = model.tokenizer.encode(text or model.config.prompt)
    return attention_report(Run(model, [ids], dtype), layer, head, both_ways)


def matrices(report):
    """Every matrix of the report, by name."""
    return {one.name: one for one in (*report.given, *(one for step in report.steps for one in step.matrices))}


IDENTITY = [[float(i == j) for j in range(4)] for i in range(4)]
BY_NAME = {
    "x": "x",
    "W_Q": "W_Q",
    "W_K": "W_K",
    "Q": "Q",
    "K": "K",
    "V": "V",
    "scores": "scores_raw",
    "scaled": "scores_scaled",
    "weights": "pattern_causal",
    "out": "out_causal",
}


@pytest.mark.parametrize("dtype, within", [("float64", 1e-9), ("float32", 1e-6)])
@pytest.mark.parametrize("name", BY_NAME)
def test_the_six_steps_show_the_document_s_matrices(name, dtype, within):
    shown = matrices(attention(dtype=dtype))[name]
    assert shown.values == near(BY_HAND[BY_NAME[name]], within)
    assert shown.shape == [len(shown.values), len(shown.values[0])]


def test_the_steps_are_six_and_say_what_they_are():
    report = attention()
    assert BY_HAND["W_V"] == "identity" and matrices(report)["W_V"].values == IDENTITY
    assert [step.name for step in report.steps] == ["project", "score", "scale", "mask", "softmax", "weighted sum"]
    assert [step.number for step in report.steps] == [1, 2, 3, 4, 5, 6]
    assert report.n_heads == BY_HAND["heads"] == 1
    infinite = -math.inf
    assert matrices(report)["masked"].values == [[2.0, infinite, infinite], [0.0, 2.0, infinite], [0.5, 0.5, 1.0]]
    assert (report.hidden, report.pairs) == (3, 9)
    # 2 of the document's values at a time, in its words: t2 takes 0.45 of itself and 0.27 of each other.
    assert report.see == "t2 takes 0.4519 of t2, 0.2741 of t0 and 0.2741 of t1; the mask hides 3 of 9 pairs"


def test_both_ways_nothing_is_masked():
    report = attention(both_ways=True)
    found = matrices(report)
    assert found["weights"].values == near(BY_HAND["bidirectional_pattern"])
    assert found["out"].values == near(BY_HAND["bidirectional_out"])
    assert found["masked"].values == found["scaled"].values
    assert (report.hidden, report.pairs) == (0, 9)
    assert "no mask: all 9 pairs count" in report.see and "hides" not in report.see
    assert "sees itself" in attention("t1").see


def test_the_check_is_as_close_as_the_document_says():
    allowed = float(re.search(r"to (\d\S*) in float32", BY_HAND["note"])[1])
    report = attention(dtype="float32")
    assert report.kernel == "the fused kernel" and report.gap <= allowed and not report.findings
    assert attention(dtype="float64").gap <= 1e-15


def test_a_kernel_that_is_off_is_a_finding(monkeypatch):
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention", lambda *a, **options: kernel(*a, **options) + 1e-3
    )
    report = attention(dtype="float32")
    assert report.gap == pytest.approx(1e-3, rel=1e-3)
    assert report.status == "findings" and report.findings[0].code == "proof"


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("head", [0, 1])
def test_of_two_layers_and_heads_the_right_one_is_shown(layer, head):
    gold = GOLDEN["cats"]["layers"][layer]
    report = attention(config="cats", layer=layer, head=head)
    found = matrices(report)
    assert found["x"].values == near(gold["norm1"])
    for name in ("Q", "K", "V"):
        assert found[name].values == near(gold["q = k = v [head][token][dim]"][head])
    for name in ("Q rot", "K rot"):
        assert found[name].values == near(gold["q_rot = k_rot"][head])
    scores = gold["scores (scaled, before mask) [head][query][key]"][head]
    assert found["scaled"].values == near(scores)
    assert found["scores"].values == near([[x * math.sqrt(2) for x in row] for row in scores])
    assert found["weights"].values == near(gold["pattern"][head])
    assert found["out"].values == near(gold["z (head outputs) [head][token][dim]"][head])
    assert (report.layer_index, report.n_layers, report.head, report.n_heads) == (layer, 2, head, 2)
    # Cats, sit, on: the identity, cut into the columns of two heads.
    assert found["W_Q"].values == [row[2 * head : 2 * head + 2] for row in IDENTITY]


def grouped(folder, **attention_fields):
    """A config with two key/value heads for four, random weights and no words."""
    fields = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "bias": True} | attention_fields
    (folder / "grouped.yaml").write_text(
        "vocab_size: 8\ncontext_length: 8\nhidden_size: 16\nn_layers: 1\nposition: none\nnorm: none\nmlp: none\n"
        f"attention: {json.dumps(fields)}\nlm_head: {{tied: true}}\n"
    )
    return open_model(config=str(folder / "grouped.yaml"))


@pytest.mark.parametrize("head, kv_head", [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_grouped_heads_show_the_keys_that_they_read(head, kv_head, tmp_path):
    model = grouped(tmp_path)
    run = Run(model, [[1, 5, 2]], "float64")
    report = attention_report(run, 0, head, False)
    found = matrices(report)
    assert report.kv_head == kv_head and not report.findings
    x = torch.tensor(found["x"].values, dtype=torch.float64)
    for letter, number in (("q", head), ("k", kv_head), ("v", kv_head)):
        w = run.weights[f"layers.0.attn.{letter}.weight"].T[:, 4 * number : 4 * number + 4]
        assert found[f"W_{letter.upper()}"].values == w.tolist()
        assert found[letter.upper()].values == near((x @ w).tolist())  # random biases are 0
        assert found[letter.upper()].formula.endswith(f"+ b_{letter.upper()}")


def test_a_soft_cap_and_a_window_are_shown_as_they_are(tmp_path):
    model = grouped(tmp_path, softcap=2.0, window=2)
    report = attention_report(Run(model, [[1, 5, 2, 7]], "float64"), 0, 0, False)
    found = matrices(report)
    capped = [[2 * math.tanh(x / 2 / 2) for x in row] for row in found["scores"].values]
    assert found["scaled"].values == near(capped) and found["scaled"].formula == "2·tanh(scores/√4/2)"
    hidden = [[not 0 <= i - j < 2 for j in range(4)] for i in range(4)]
    assert [[x == -math.inf for x in row] for row in found["masked"].values] == hidden
    assert report.hidden == sum(map(sum, hidden)) and "fused" not in report.kernel
    opened = attention_report(Run(model, [[1, 5, 2, 7]], "float64"), 0, 0, True)
    assert opened.hidden == 0 and math.isfinite(min(map(min, matrices(opened)["masked"].values)))


def test_what_is_read_is_normed_where_norms_stand_before(tmp_path):
    for placement in ("pre", "post", "output", "sandwich"):
        text = BASE.replace("norm: none", f"norm: {{kind: rmsnorm, eps: 0.0, placement: {placement}}}")
        (tmp_path / "m.yaml").write_text(text)
        run = Run(open_model(config=str(tmp_path / "m.yaml")), [[1, 2, 3]], "float64")
        report = attention_report(run, 1, 1, False)
        x = matrices(report)["x"]
        inside = "attn_norm" if placement in ("pre", "sandwich") else "resid_pre"
        assert x.path == f"layers.1.{inside}" and not report.findings
        q = torch.tensor(x.values, dtype=torch.float64) @ run.weights["layers.1.attn.q.weight"].T[:, 2:]
        assert matrices(report)["Q"].values == near(q.tolist(), 1e-12)


def test_weights_of_many_numbers_are_left_out():
    model = open_model(config="gpt2-small")
    model.spec = replace(model.spec, n_layers=1, vocab_size=8)
    found = matrices(attention_report(Run(model, [[1, 2]]), 0, 11, False))
    assert found["W_Q"].shape == [768, 64] and found["W_Q"].values is None
    assert len(found["x"].values[0]) == 768 and len(found["out"].values[1]) == 64


# D1. Order


def test_the_document_s_permutation_gives_the_document_s_rows():
    report = order_report([], None, 0, False, "none")
    assert report.words == ["t0", "t1", "t2"] and report.permutation == BY_HAND["permutation"]
    assert report.inputs == BY_HAND["x"]
    assert report.outputs == near(BY_HAND["bidirectional_out"])
    assert report.permuted == near(BY_HAND["bidirectional_out_permuted"])
    assert report.undone == near(BY_HAND["bidirectional_out"]) and report.difference <= 1e-15
    assert "sees no order" in report.see


def test_the_mask_alone_makes_order_count():
    report = order_report([], None, 0, True, "none")
    assert report.outputs == near(BY_HAND["out_causal"])
    # t0 t1 t2 with t2 before them: t2 sees itself alone, so its row is its value (1, 1, 0, 0), 0.2741 from what it was.
    assert report.undone[2] == near([1.0, 1.0, 0.0, 0.0])
    gaps = [max(abs(a - b) for a, b in zip(*rows)) for rows in zip(report.outputs, report.undone)]
    assert report.difference == pytest.approx(max(gaps)) and gaps[report.worst] == max(gaps) > 0.1
    assert f"order counts: with the permutation undone the outputs differ by up to {max(gaps):.4f}" in report.see
    assert f"(at t{report.worst})" in report.see and "causal mask" in report.see


words = st.lists(st.sampled_from(["t0", "t1", "t2", "a", "b"]), min_size=1, max_size=6)


@given(words.flatmap(lambda text: st.tuples(st.just(text), st.permutations(range(len(text))))), seeds)
@few
def test_without_mask_and_positions_any_permutation_only_permutes(case, seed):
    text, permutation = case
    report = order_report(text, ",".join(map(str, permutation)), seed, False, "none")
    assert report.permutation == list(permutation)
    assert report.permuted == near([report.outputs[i] for i in permutation], 1e-12)
    assert report.difference <= 1e-12 and "order counts" not in report.see


@given(st.permutations(range(4)), seeds, st.booleans(), st.sampled_from(["rope", "learned"]))
@few
def test_positions_make_order_count_for_any_words_and_permutation(permutation, seed, causal, position):
    report = order_report(list("abcd"), ",".join(map(str, permutation)), seed, causal, position)
    still = list(permutation) == [0, 1, 2, 3]
    assert (report.difference > 1e-9) == (not still)
    assert ("order counts" in report.see) == (not still) and ("moves nothing" in report.see) == still


def test_a_rotation_moves_scores_and_a_table_moves_inputs():
    plain, rope, learned = (order_report(list("abc"), None, 5, False, how) for how in ("none", "rope", "learned"))
    assert plain.inputs == rope.inputs != learned.inputs and plain.outputs != rope.outputs
    assert "rotation" in rope.see and "a table of positions" in learned.see


def test_words_that_are_alike_hide_the_order():
    report = order_report(["a", "a", "b"], "1,0,2", 0, True, "none")
    assert report.difference == 0 and "order counts" not in report.see and "for these words" in report.see


def test_a_random_permutation_moves_something_and_comes_from_the_seed():
    for size in (2, 3, 7):
        one, again = (order_report(["a"] * size, "random", 3, False, "none").permutation for _ in range(2))
        assert one == again != list(range(size)) and sorted(one) == list(range(size))
    assert len({tuple(order_report(["a"] * 7, "random", s, False, "none").permutation) for s in range(5)}) > 1
    assert order_report(["a"], "random", 0, False, "none").permutation == [0]
    vectors = [order_report(["new", "t1"], None, seed, False, "none").inputs for seed in (0, 0, 1)]
    assert vectors[0] == vectors[1] != vectors[2] and vectors[0][1] == vectors[2][1] == BY_HAND["x"][1]


# D2. Positions


def test_the_document_s_inputs_and_scores():
    report = positions_report([], POSITIONS["rope_degrees_per_position"], 5)
    assert report.vectors == POSITIONS["vectors"] and report.learned_table == POSITIONS["learned_table"]
    texts = {
        "cat chase dog": report.plain,
        "dog chase cat": report.reversed,
        "cat chase dog, shifted by 5": report.shifted,
    }
    for name, text in texts.items():
        assert text.words == name.partition(",")[0].split()
        assert text.rotated == near(POSITIONS["rope_scores"][name])
        assert text.learned == POSITIONS["learned_inputs"].get(name)  # at 5 the table of 4 rows has none
    right, left = report.looks
    assert (right.query, right.key, right.distance) == ("cat", "dog", 2)
    assert right.score == near(POSITIONS["named"]["cat looks at dog two to the right"])
    assert left.distance == -2 and left.score == near(POSITIONS["named"]["cat looks at dog two to the left"])
    assert "cat scores dog 0.27 at 2 to the right and 3.73 at 2 to the left, and the same 5 further on" in report.see
    assert "a table makes cat (3, 0) at 0 and (1, 0) at 2, and has no row for position 7" in report.see
    assert report.moved <= 1e-14


def turned(a, b, radians):
    """a · (b turned by that angle)."""
    (x, y), (cos, sin) = VECTORS[b], (math.cos(radians), math.sin(radians))
    return VECTORS[a][0] * (x * cos - y * sin) + VECTORS[a][1] * (x * sin + y * cos)


texts = st.lists(st.sampled_from(list(VECTORS)), min_size=1, max_size=6)
degrees = st.floats(-360, 360).filter(lambda x: x == 0 or abs(x) > 1e-3)


@given(texts, degrees, st.integers(0, 40))
@few
def test_a_rotated_score_depends_on_the_distance_alone(text, per_place, shift):
    report = positions_report(text, per_place, shift)
    theta = math.radians(per_place)
    expected = [[turned(a, b, (j - i) * theta) for j, b in enumerate(text)] for i, a in enumerate(text)]
    assert report.plain.rotated == near(expected, 1e-9)
    assert report.shifted.rotated == near(report.plain.rotated, 1e-9) and report.moved <= 1e-9
    assert report.shifted.first_position == shift
    backwards = [[turned(a, b, (j - i) * theta) for j, b in enumerate(text[::-1])] for i, a in enumerate(text[::-1])]
    assert report.reversed.rotated == near(backwards, 1e-9)
    fits = len(text) + shift <= 4
    assert (report.shifted.learned is not None) == fits
    if fits:
        table = POSITIONS["learned_table"][shift:]
        assert report.shifted.learned == [[a + b for a, b in zip(VECTORS[word], row)] for word, row in zip(text, table)]


def test_what_positions_say_where_there_is_nothing_to_tell():
    see = {name: positions_report(*rest).see for name, *rest in POSITIONS_SEEN}
    assert "on either side" in see["no turn"] and "on either side" in see["a whole turn"]
    assert "on either side" in see["a palindrome"] and "0.27" not in see["no turn"]
    assert "a lone dog scores itself 5.00" in see["alone"]
    assert "further on" not in see["unshifted"] and "no row" not in see["unshifted"]
    assert "too short for 5 words" in see["long"] and "(2, 1) at 1" in see["by one"]


POSITIONS_SEEN = [
    ("no turn", [], 0.0, 5),
    ("a whole turn", [], 360.0, 5),
    ("a palindrome", ["cat", "chase", "cat"], 30.0, 5),
    ("alone", ["dog"], 30.0, 5),
    ("unshifted", [], 30.0, 0),
    ("long", ["cat"] * 5, 30.0, 0),
    ("by one", [], 30.0, 1),
]


# D3. Scaling


def test_the_document_s_softmax_and_gradients():
    report = scaling_report([4], 100, 0, [10.0, 0.0], 128)
    assert report.raw.weights == near(SCALING["softmax_10_0"])
    assert report.divided.weights == near(SCALING["softmax_10_0_over_sqrt128"])
    assert [report.raw.gradients[0], report.divided.gradients[0]] == near(SCALING["gradient_p1_s1"])
    assert report.divided.scores == near([10 / math.sqrt(128), 0.0]) and report.divided.divisor == math.sqrt(128)
    assert "gives the first 0.99995, gradient 0.00005; divided by √128 0.71, gradient 0.21" in report.see


@pytest.mark.parametrize("scores", SCALING["small"])
def test_the_document_s_small_softmax(scores):
    found = scaling_report([1], 2, 0, [float(x) for x in json.loads(scores)], 1)
    assert found.raw.weights == near(SCALING["small"][scores])
    assert found.divided.weights == found.raw.weights and "divided by √1 or not" in found.see


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=5), st.integers(1, 1000))
@few
def test_a_softmax_s_gradient_is_p_times_1_less_p(scores, dim):
    report = scaling_report([1], 2, 0, scores, dim)
    for found, divisor in ((report.raw, 1), (report.divided, math.sqrt(dim))):
        powers = [math.exp(x / divisor) for x in scores]
        expected = [power / math.fsum(powers) for power in powers]
        assert found.weights == near(expected)
        assert found.gradients == near([p * (1 - p) for p in expected])


def test_the_spread_grows_as_the_root():
    printed = {
        int(d): float(x) for d, x in re.findall(r"(\d+): ([\d.]+)", SCALING["dot_product_std"].replace("d=", ""))
    }
    assert printed[128] == 11.3137 and len(printed) == 6
    report = scaling_report(list(printed), 4000, 0, [10.0, 0.0], 128)
    for spread in report.spreads:
        assert round(spread.root, 4) == printed[spread.dim]
        # Of 4,000 products the spread is known to 1 / √8000 or little more; five times that.
        assert spread.measured == pytest.approx(spread.root, rel=0.06)
        assert spread.divided == pytest.approx(spread.measured / spread.root, rel=1e-12)
    assert "√d" in report.see and "too few" not in report.see
    other = scaling_report([16], 4000, 1, [10.0, 0.0], 128).spreads[0]
    assert other.measured != report.spreads[1].measured
    assert other == scaling_report([4, 16], 4000, 1, [0.0], 2).spreads[1]


def test_what_scaling_says_where_there_is_nothing_to_see():
    assert "nothing to divide" in scaling_report([1], 4000, 0, [10.0, 0.0], 128).see
    assert "2 pairs are too few" in scaling_report([4, 64, 256], 2, 0, [10.0, 0.0], 128).see
    assert "the first 0.50, divided by √128 or not" in scaling_report([4], 4000, 0, [0.0, 0.0], 128).see


# D4. Norms


numbers = st.lists(st.floats(-1e3, 1e3).map(lambda x: round(x, 3)), min_size=2, max_size=9)


@given(numbers, st.floats(1e-8, 1.0), st.data())
@few
def test_the_steps_give_torch_s_own_norms(values, eps, data):
    size = len(values)
    scales = st.lists(st.floats(-2, 2), min_size=size, max_size=size)
    weight, bias = data.draw(scales), data.draw(scales)
    report = norms_report(values, eps, weight, bias)
    x = torch.tensor(values, dtype=torch.float64)
    layer, rms = torch.nn.LayerNorm(size, eps, dtype=torch.float64), torch.nn.RMSNorm(size, eps, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight, dtype=torch.float64))
        layer.bias.copy_(torch.tensor(bias, dtype=torch.float64))
        rms.weight.copy_(torch.tensor(weight, dtype=torch.float64))
        for steps, module in ((report.layernorm, layer), (report.rmsnorm, rms)):
            expected = module(x).tolist()
            # x less its mean loses what the mean has in front of it: 1e-16 of 1e3 over the least divisor, 1e-4.
            assert steps.result == near(expected, 1e-7) and steps.engine == near(expected, 1e-7)
            assert steps.gap == max(abs(a - b) for a, b in zip(steps.result, steps.engine))


def test_layernorm_by_hand():
    """1, 2, 3, 4: mean 2.5, deviations ∓1.5 ∓0.5, variance 1.25; mean of squares 7.5."""
    report = norms_report([1.0, 2.0, 3.0, 4.0], 0.0, [2.0], [0.0, 0.0, 1.0, 0.0])
    layer, rms = report.layernorm, report.rmsnorm
    assert layer.mean == 2.5 and layer.deviations == [-1.5, -0.5, 0.5, 1.5] and layer.mean_square == 1.25
    assert layer.divisor == math.sqrt(1.25) and rms.divisor == math.sqrt(7.5)
    normalised = [x / math.sqrt(1.25) for x in (-1.5, -0.5, 0.5, 1.5)]
    assert layer.normalised == near(normalised)
    assert layer.result == near([2 * x + b for x, b in zip(normalised, (0, 0, 1, 0))])
    assert rms.mean is None and rms.mean_square == 7.5 and rms.deviations == [1.0, 2.0, 3.0, 4.0]
    assert rms.result == near([2 * x / math.sqrt(7.5) for x in (1, 2, 3, 4)])
    assert max(layer.gap, rms.gap) <= 1e-15
    assert report.weight == [2.0] * 4 and "mean 2.5000 and divides by 1.1180" in report.see


def test_the_engine_s_norm_is_what_the_steps_are_compared_with(monkeypatch):
    monkeypatch.setattr("gptcli.model.ops.norm", lambda x, w, name, spec: x)
    report = norms_report([1.0, 2.0, 3.0, 4.0], 0.0, [1.0], [0.0])
    assert report.layernorm.engine == report.rmsnorm.engine == [1.0, 2.0, 3.0, 4.0]
    assert report.layernorm.gap == near(4 - 1.5 / math.sqrt(1.25)) and report.rmsnorm.gap > 2


def test_what_norms_say_where_there_is_nothing_to_see():
    assert "all alike" in norms_report([5.0, 5.0], 1e-5, [1.0], [0.0]).see
    centred = norms_report([-3.0, 1.0, 2.0], 1e-5, [1.0], [0.0])
    assert "the mean is 0 already" in centred.see and centred.layernorm.result == near(centred.rmsnorm.result)
    assert "to a spread of 0.3333" in norms_report([1.0, 2.0, 3.0, 4.0], 10.0, [1.0], [0.0]).see  # √(1.25 / 11.25)


# D5. The residual stream


def streams(placements, layers=6, dim=16, heads=2, tokens=5, norm="layernorm", seed=0, std=None):
    report = residual_report(layers, dim, heads, tokens, norm, list(placements), seed, std)
    return {stream.placement: stream for stream in report.streams}


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@given(seeds, st.sampled_from([None, 0.02, 1.0]))
@settings(max_examples=8, deadline=None)
def test_pre_norm_grows_and_post_norm_stays_at_the_norm_s_scale(norm, seed, std):
    found = streams(("pre", "post", "output", "sandwich"), layers=12, norm=norm, seed=seed, std=std)
    for layer in found["post"].layers:
        # A norm with weights 1 leaves √(v / (v + eps)) of a mean square v, which is 1 up to eps.
        assert 1 - 1e-4 < layer.stream <= 1 + 1e-12
    for placement in ("output", "sandwich"):
        for layer in found[placement].layers:
            # Each correction is normed: 1, but for eps beside an output that is small itself.
            assert layer.attn <= 1 + 1e-12 and layer.mlp <= 1 + 1e-12
            assert std is not None or (layer.attn > 0.99 and layer.mlp > 0.99)
    if std != 0.02:
        # Corrections as large as the stream at first, each at a right angle to it or nearly so: after 24 of them it is
        # about √12 of what it was after 2. Over a thousand seeds the least was 1.48.
        pre = found["pre"].layers
        assert pre[-1].stream > 1.2 * pre[0].stream and pre[-1].mlp_share < 0.8 * pre[0].mlp_share
    first = {placement: stream.start for placement, stream in found.items()}
    assert len(set(first.values())) == 1  # the same rows for every placement


def size(x):
    """The root mean square."""
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_the_sizes_are_those_of_torch_s_own_layers(placement):
    """torch.nn.TransformerEncoderLayer with the experiment's weights, norm_first or not, under a causal mask."""
    layers, dim, heads, tokens = 3, 8, 2, 5
    report = residual_report(layers, dim, heads, tokens, "layernorm", [placement], 7, None)
    spec = residual._spec(layers, dim, heads, tokens, {"kind": "layernorm", "placement": placement})
    w = residual._weights(spec, 7, dim**-0.5)
    x, mask = w["embed.weight"][None], torch.nn.Transformer.generate_square_subsequent_mask(tokens, dtype=torch.float64)
    assert report.streams[0].start == pytest.approx(size(x), rel=1e-12)
    for i, found in enumerate(report.streams[0].layers):
        theirs = torch.nn.TransformerEncoderLayer(
            dim, heads, 4 * dim, 0.0, batch_first=True, norm_first=placement == "pre", dtype=torch.float64
        )
        at = f"layers.{i}"
        joined = torch.cat([w[f"{at}.attn.{letter}.weight"] for letter in "qkv"])
        ours = {
            "self_attn.in_proj_weight": joined,
            "self_attn.out_proj.weight": w[f"{at}.attn.o.weight"],
            "linear1.weight": w[f"{at}.mlp.up.weight"],
            "linear2.weight": w[f"{at}.mlp.down.weight"],
        }
        state = {
            name: ours.get(name, torch.full_like(there, float("norm" in name and "weight" in name)))
            for name, there in theirs.state_dict().items()
        }
        theirs.load_state_dict(state)
        with torch.no_grad():
            y = theirs.train()(x, mask)  # of no dropout; evaluation takes another path
            read = theirs.norm1(x) if placement == "pre" else x
            out = theirs.self_attn(read, read, read, attn_mask=mask, need_weights=False)[0]
            middle = x + out if placement == "pre" else theirs.norm1(x + out)
            inner = theirs.norm2(middle) if placement == "pre" else middle
            added = theirs.linear2(theirs.linear1(inner).relu())
        assert found.stream == pytest.approx(size(y), rel=1e-9)
        assert found.attn == pytest.approx(size(out), rel=1e-9) and found.mlp == pytest.approx(size(added), rel=1e-9)
        assert found.attn_share == pytest.approx(size(out) / size(x), rel=1e-9)
        assert found.mlp_share == pytest.approx(size(added) / size(middle), rel=1e-9)
        x = y


def test_what_residual_says_follows_the_numbers():
    report = residual_report(48, 64, 4, 16, "layernorm", ["pre", "post"], 0, None)
    pre = report.streams[0]
    assert pre.layers[-1].stream > 4 * pre.layers[0].stream and pre.layers[-1].attn_share < 0.2
    grows = f"pre: the stream grows from {pre.layers[0].stream:.2f} to {pre.layers[-1].stream:.2f} over 48 layers"
    assert grows in report.see and "post: the stream stays at 1.00" in report.see
    small = residual_report(4, 16, 2, 4, "layernorm", ["pre"], 0, 0.001)
    assert "pre: the stream stays at" in small.see and "grows" not in small.see
    still = residual_report(4, 16, 2, 4, "layernorm", ["pre", "sandwich"], 0, 0.0)
    assert still.see.count("nothing is added") == 2
    assert {layer.stream for layer in still.streams[0].layers} == {still.streams[0].start}
    assert "one layer leaves" in residual_report(1, 16, 2, 4, "layernorm", ["pre"], 0, None).see
    assert report.drawn == "token rows N(0, 1), matrices N(0, 0.125²), gains 1, biases 0, seed 0"


def test_the_weights_are_drawn_as_the_report_says():
    spec = residual._spec(4, 64, 4, 64, {"kind": "layernorm", "placement": "pre"})
    w = residual._weights(spec, 3, 0.5)
    for name, std in (("embed.weight", 1.0), ("layers.2.attn.o.weight", 0.5), ("layers.0.mlp.up.weight", 0.5)):
        assert float(w[name].std()) == pytest.approx(std, rel=0.05) and abs(float(w[name].mean())) < 0.05 * std
    assert not torch.equal(w["layers.0.attn.q.weight"], w["layers.1.attn.q.weight"])
    assert torch.equal(w["layers.0.attn_norm.weight"], torch.ones(64, dtype=torch.float64))


# D6. Heads


def heads(name="gpt2-small", tokens=None, source_tokens=None, dtype="bf16"):
    return heads_report(open_model(config=name), tokens, source_tokens, dtype)


def test_the_document_s_figures():
    report = heads()
    [group] = report.layers
    many, single = group.many, group.single
    assert report.tokens == 1024 and len(group.layer_indices) == 12
    assert many.map_weights == GPT2["attention_weights_one_layer_T1024"] == 12 * single.map_weights
    assert many.map_bytes == GPT2["bytes_bf16_one_layer"] and report.map_bytes == GPT2["bytes_bf16_all_layers"]
    assert report.maps == GPT2["attention_maps"] == 12 * many.maps
    assert many.o_parameters == GPT2["output_projection_weight"]
    assert many.o_flops_per_token == 2 * 768**2 and single.o_parameters == 0
    # h · T² · d_h = T² · d, of the scores as of the weighted sum.
    assert many.multiplications == single.multiplications == 1024**2 * 768
    # The cache holds K and V, [T, hidden] each per layer, 2 bytes a number.
    assert many.cache_bytes == single.cache_bytes == 2 * 1024 * 768 * 2 and report.cache_bytes == 12 * many.cache_bytes
    for figure in ("12 heads of 64", "25,165,824", "301,989,888", "589,824", "cache as much"):
        assert figure in report.see
    assert {layer.many.map_bytes for layer in heads(dtype="f32").layers} == {2 * GPT2["bytes_bf16_one_layer"]}


@pytest.mark.parametrize(
    "name", ["gpt2-small", "llama3-8b", "gemma-2b", "mistral-7b", "bert-base", "transformer-2017-base"]
)
@pytest.mark.parametrize("masked", [True, False])
def test_the_counts_add_up_to_the_whole_pass(name, masked):
    """FLOPs of the pass are those of its matrices, and 2 × 2 × the multiplications of every layer's pairs."""
    model, tokens, source = open_model(config=name), 100, 40 if name.startswith("transformer") else None
    report = heads_report(model, tokens, source, "bf16")
    field = "seen_multiplications" if masked else "multiplications"
    pairs = sum(len(one.layer_indices) * getattr(one.many, field) for one in report.layers)
    spec = model.spec
    matrices = 0
    for p in layout(spec):
        if p.role in ("matrix", "residual"):
            of_source = p.name.startswith("encoder.") or ".cross.k." in p.name or ".cross.v." in p.name
            matrices += 2 * math.prod(p.shape) * (source if of_source else tokens)
    whole = count.flops_forward(spec, tokens, masked=masked, source=source or 0)
    assert whole == matrices + 4 * pairs
    assert report.cache_bytes == count.kv_cache_bytes(spec, tokens, 2, source=source or 0)
    o = sum(p.size for p in layout(spec) if p.name.endswith((".attn.o.weight", ".cross.o.weight")))
    assert report.o_parameters == o


MIXED = """\
vocab_size: 8
context_length: 64
hidden_size: 8
n_layers: 3
position: none
norm: none
attention: {n_heads: 4, n_kv_heads: 2, head_dim: 2}
variants: [{layers: [0, 2], attention: {window: 4}}]
mlp: none
lm_head: {tied: true}
"""


def test_more_words_take_a_route_than_a_context_that_bounds_nothing(tmp_path):
    config = MIXED.replace("64", "3").replace("position: none", "position: {kind: relative, buckets: 8}")
    (tmp_path / "far.yaml").write_text(config)
    [route] = routes_report(["a", "b", "c", "d"], [], [str(tmp_path / "far.yaml")]).routes
    assert route.route == "decoder-only" and len(route.masks[0].seen) == 4


def test_layers_that_differ_are_counted_each(tmp_path):
    (tmp_path / "mixed.yaml").write_text(MIXED)
    report = heads(str(tmp_path / "mixed.yaml"), tokens=10, dtype="f32")
    windowed, full = report.layers
    assert (windowed.layer_indices, windowed.window) == ([0, 2], 4)
    assert (full.layer_indices, full.window) == ([1], None)
    assert full.many.seen_multiplications == 55 * 8 and windowed.many.seen_multiplications == (1 + 2 + 3 + 4 * 7) * 8
    assert full.many.multiplications == windowed.many.multiplications == 100 * 8
    # K and V of 2 key/value heads of 2 numbers, 4 bytes each; a window keeps 4 positions. One head of 8 would keep 8.
    assert full.many.cache_bytes == 2 * 10 * 4 * 4 and full.single.cache_bytes == 2 * 10 * 8 * 4
    assert windowed.many.cache_bytes == 2 * 4 * 4 * 4
    assert report.cache_bytes == full.many.cache_bytes + 2 * windowed.many.cache_bytes
    assert report.maps == 12 and report.map_weights == 3 * 4 * 100
    assert "in 2 of 3 attentions" in report.see and "cache 0.5 times as much" in report.see


def test_an_encoder_and_a_decoder_have_three_kinds():
    report = heads("transformer-2017-base", tokens=20, source_tokens=10)
    kinds = {one.kind: one for one in report.layers}
    assert list(kinds) == ["encoder", "self", "cross"]
    assert [one.many.map_weights for one in report.layers] == [8 * 10 * 10, 8 * 20 * 20, 8 * 20 * 10]
    # The encoder's keys are read once and not kept; a decoder's own and the source's are.
    assert [one.many.cache_bytes for one in report.layers] == [0, 2 * 20 * 512 * 2, 2 * 10 * 512 * 2]
    assert report.source_tokens == 10 and heads("transformer-2017-base").source_tokens == 512


def test_one_head_has_nothing_to_share_out():
    report = heads("attention-by-hand")
    assert (
        report.tokens == 3 and report.see == "one head a layer, so nothing is shared out: its maps are 18 bytes in all"
    )
    assert report.o_parameters == 0


# F. Routes


def drawn(mask):
    return ["".join(".#"[one] for one in row) for row in mask.seen]


def test_the_three_routes():
    report = routes_report("a b c".split(), "x y".split(), [])
    encoder, decoder, both = report.routes
    assert [route.route for route in report.routes] == ["encoder-only", "decoder-only", "encoder-decoder"]
    assert [drawn(mask) for mask in encoder.masks] == [["###", "###", "###"]]
    assert [drawn(mask) for mask in decoder.masks] == [["#..", "##.", "###"]]
    assert [mask.kind for mask in both.masks] == ["encoder", "self", "cross"]
    assert [drawn(mask) for mask in both.masks] == [["##", "##"], ["#..", "##.", "###"], ["##", "##", "##"]]
    cross = both.masks[2]
    assert (cross.queries, cross.keys, cross.seen_pairs, cross.pairs) == (["a", "b", "c"], ["x", "y"], 6, 6)
    assert cross.layer_indices == list(range(6)) and cross.n_layers == 6
    assert "gpt2-small sees 6 of 9 pairs" in report.see and "bert-base sees 9 of 9 pairs" in report.see
    assert "4 of 4 in its encoder, 6 of 9 in its decoder and 6 of 6 across" in report.see
    assert "masked" in encoder.objective and "next token" in decoder.objective and "source" in both.objective
    assert "segments" in encoder.reads and "source" in both.reads and "segments" not in decoder.reads


BASE = """\
vocab_size: 8
context_length: 16
hidden_size: 4
n_layers: 3
position: none
norm: none
attention: {n_heads: 2}
mlp: none
lm_head: {tied: true}
"""


def route_of(folder, text, **changes):
    lines = dict(line.split(": ", 1) for line in BASE.splitlines()) | changes
    (folder / "any.yaml").write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return routes_report(text.split(), ["x", "y"], [str(folder / "any.yaml")])


def test_a_route_is_read_off_the_structure_and_off_no_name(tmp_path):
    [plain] = route_of(tmp_path, "a b c", name="bert").routes
    assert (plain.name, plain.route) == ("bert", "decoder-only")
    [blind] = route_of(tmp_path, "a b c", lm_head="null", attention="{n_heads: 2, causal: false}").routes
    assert blind.route == "encoder-only" and "no head" in blind.objective and "vector" in blind.gives
    [both] = route_of(tmp_path, "a b c", encoder="{n_layers: 1}").routes
    assert both.route == "encoder-decoder" and [mask.n_layers for mask in both.masks] == [1, 3, 3]


def test_windows_and_layers_that_differ_are_drawn_each(tmp_path):
    changes = {"attention": "{n_heads: 2, window: 2}", "variants": "[{layers: [1], attention: {window: null}}]"}
    [route] = route_of(tmp_path, "a b c d", **changes).routes
    assert [mask.layer_indices for mask in route.masks] == [[0, 2], [1]]
    assert [drawn(mask) for mask in route.masks] == [["#...", "##..", ".##.", "..##"], ["#...", "##..", "###.", "####"]]
    assert route.sees == "a token sees itself and the 1 before it or itself and all before it"
    [narrow] = route_of(tmp_path, "a b c", attention="{n_heads: 2, window: 2, causal: false}").routes
    assert [drawn(mask) for mask in narrow.masks] == [["##.", "###", ".##"]]
    [short] = route_of(tmp_path, "a b", **changes).routes
    assert [mask.layer_indices for mask in short.masks] == [[0, 1, 2]]  # of two words the window hides nothing


def test_what_routes_say_where_there_is_nothing_to_compare():
    alike = routes_report(["a", "b"], [], ["gpt2-small", "llama3-8b"]).see
    assert alike.startswith("both are decoder-only: ") and "3 of 4" in alike
    assert routes_report(["a"], ["x"], []).see == "a token alone sees itself by every route"
    lone = routes_report(["a", "b"], [], ["gpt2-small"]).see
    assert lone == "gpt2-small sees 3 of 4 pairs"


# The commands


EVERY = {
    "lab": ["lab"],
    **{name: ["lab", name] for name in EXPERIMENTS},
    "attention, long": ["lab", "attention", "-m", "tiny-gpt2", "The cat sat on the mat and on the rug"],
    "order, seeded": ["lab", "order", "the", "cat", "sat", "--permutation", "random", "--position", "learned"],
    "residual, full": ["lab", "residual", "--layers", "3", "--dim", "8", "--placement", "pre,post,sandwich", "--full"],
    "heads, grouped": ["lab", "heads", "gemma-2b"],
    "heads, large": ["lab", "heads", "llama3.1-405b", "--tokens", "131072"],
    "heads, both": ["lab", "heads", "transformer-2017-base"],
    "norms, long": ["lab", "norms", "--values", "1,2,3,4,5,6,7,8,9,-10", "--weight", "2", "--bias", "1"],
}
every = pytest.mark.parametrize("words", EVERY.values(), ids=EVERY)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def done(*words, **options):
    ran = gptcli(*words, **options)
    assert (ran.status, ran.err) == (0, ""), ran
    return ran


def help_of(*words):
    text = ESCAPE.sub("", done(*words, columns=80).out)
    assert max(map(cell_len, text.splitlines())) <= 80
    return text


def test_the_list_is_complete():
    listed = done("lab", "--json").json
    assert listed["schema"] == "gptcli.lab/1"
    assert [one["name"] for one in listed["experiments"]] == list(EXPERIMENTS) == done("lab", "-q").out.split()
    app = commands.group(None, {})
    assert [one.name for one in app.registered_commands] == list(EXPERIMENTS)
    assert all(
        re.search(rf"gptcli lab {one['name']} .*{re.escape(one['about'])}", done("lab").out)
        for one in listed["experiments"]
    )
    assert re.findall(r"│ ([a-z]+) ", help_of("lab", "-h")) == list(EXPERIMENTS)
    assert ("lab", "lab", "Learn") in GROUPS and re.search(r"─ Learn ─(?s:.)*│ lab ", help_of("--help"))


def test_only_what_is_called_is_built():
    assert [one.name for one in commands.group("norms", {}).registered_commands] == ["norms"]


@pytest.mark.parametrize("name", ["lab", *EXPERIMENTS])
def test_help_holds_examples_that_run(name):
    examples = re.findall(r"^ +(gptcli .+)$", getattr(commands, name).__doc__, re.M)
    words = ["lab"] if name == "lab" else ["lab", name]
    text = " ".join(help_of(*words, "--help").split())
    assert len(examples) == 2 and help_of(*words, "-h") == help_of(*words, "--help")
    for example in examples:
        assert example in text
        done(*shlex.split(example)[1:])


@every
def test_json_is_strict_and_ends_in_what_to_see(words):
    found = done(*words, "--json").json
    assert list(found)[:2] == ["schema", "status"] and found["status"] == "ok" and found["findings"] == []
    if len(words) > 1:
        assert found["schema"] == f"gptcli.lab.{words[1]}/1"
        assert found["see"] and "\n" not in found["see"] and "nan" not in found["see"]
        shown = " ".join(done(*words).out.splitlines()[-1].split())
        assert shown == f"see: {found['see']}" and done(*words, "-q").out == found["see"] + "\n"
    done(*words, "-o", "x.json")
    assert strict(Path("x.json").read_text(encoding="utf-8")) == found
    assert "layer" not in keys_of(found)


def keys_of(value):
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return {*(value if isinstance(value, dict) else [])}.union(*map(keys_of, inside))


def test_what_a_mask_hides_is_null_in_json():
    masked = done("lab", "attention", "--json").json["steps"][3]["matrices"][0]["values"]
    assert masked == [[2.0, None, None], [0.0, 2.0, None], [0.5, 0.5, 1.0]]


@every
def test_a_pipe_gets_no_colour_and_the_same_bytes_every_time(words):
    out = done(*words).out
    assert "\x1b" not in out and out == done(*words).out
    assert all(line == line.rstrip() for line in out.splitlines())


@every
def test_colour_says_nothing_that_the_plain_text_does_not(words):
    plain = done(*words, columns=100, NO_COLOR="1").out
    coloured = done(*words, columns=100).out
    assert (
        "\x1b[" in coloured and ESCAPE.sub("", coloured) == plain == done(*words, "--color", "never", columns=100).out
    )


@every
def test_80_columns_suffice(words):
    lines = done(*words, columns=80, NO_COLOR="1").out.splitlines()
    assert [line for line in lines if cell_len(line) > 80] == []


@every
def test_a_terminal_that_knows_ascii_alone_gets_look_alikes(words):
    shown = done(*words, encoding="ascii", columns=80, NO_COLOR="1").out
    assert shown.isascii() and "?" not in shown and "\\u" not in shown and "\\x" not in shown
    assert strict(done(*words, "--json", encoding="ascii").out) == done(*words, "--json").json


def test_the_curves_can_be_told_apart_without_colour():
    words = ["lab", "residual", "--layers", "5", "--dim", "8", "--placement", "pre,post"]
    for encoding, signs in (("utf-8", "●○"), ("ascii", "*o")):
        shown = done(*words, columns=80, NO_COLOR="1", encoding=encoding).out
        chart = [line for line in shown.splitlines() if re.search(r"[│┤|]", line)]
        assert all(sum(sign in line for line in chart) >= 1 for sign in signs)
        assert re.search(r"1 +5 layers", shown) and f"{signs[0]} pre   {signs[1]} post" in shown
        assert re.search(rf"{re.escape(signs[1])} post 1\.0000$", shown, re.M)  # the number at its curve's end
        values = [float(line.split()[0]) for line in chart if re.match(r" *\d", line)]
        sizes = [one["stream"] for s in done(*words, "--json").json["streams"] for one in s["layers"]]
        assert values[-1] == 0 and values[0] == pytest.approx(max(sizes), abs=1e-4)  # the axis begins at 0


def test_a_curve_stands_as_high_as_its_numbers():
    words = ["lab", "residual", "--layers", "6", "--dim", "8", "--placement", "pre,post"]
    lines = done(*words).out.splitlines()
    rows = [re.split("[│┤]", line)[1] for line in lines if re.search("[│┤]", line)][::-1]  # from 0 upwards
    streams = done(*words, "--json").json["streams"]
    top = max(one["stream"] for stream in streams for one in stream["layers"])
    width = 60  # in a pipe
    assert len(rows) == 13
    for stream, sign in zip(streams, "●○"):
        for i, one in enumerate(stream["layers"]):
            column = round(i * (width - 1) / 5)
            assert rows[round(12 * one["stream"] / top)].ljust(width)[column] == sign
    assert sum(row[:width].count(sign) for row in rows for sign in "●○") == 2 * width  # one sign a column, each


def test_the_masks_are_drawn_with_the_words_given():
    shown = done("lab", "routes", "I like tea", "--source", "j'aime cela", "--configs", "transformer-2017-base").out
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "0 j'aime █ █ 0 I █ · · 0 I █ █" in rows
    assert "1 cela █ █ 1 like █ █ · 1 like █ █" in rows and "2 tea █ █ █ 2 tea █ █" in rows


def test_digits_and_full():
    assert "0.45186" in done("lab", "attention", "--digits", "5").out
    assert "0.4519" in done("lab", "attention").out
    words = ["lab", "residual", "--layers", "20", "--dim", "8"]
    assert len(re.findall(r"^ +\d+( +\d\S+){5}$", done(*words, "--full").out, re.M)) == 40
    assert not re.findall(r"^ +\d+( +\d\S+){5}$", done(*words).out, re.M)
    long = ["lab", "order", *"abcdefghijklmnop"]
    assert "…" in done(*long).out and done(*long, "--full").out.count("(was") == 16


def test_the_environment_s_model_serves_where_a_model_is_asked(folder):
    assert done("lab", "attention", "t0", "--json").json["model"]["name"] == "attention-by-hand"
    found = done("lab", "attention", "the", "--json", GPTCLI_MODEL="tiny-gpt2").json
    assert found["model"]["name"] == "tiny-gpt2"
    assert done("lab", "heads", "--json").json["model"]["name"] == "gpt2-small"
    assert done("lab", "heads", "--json", GPTCLI_MODEL="llama3-8b").json["model"]["name"] == "llama3-8b"
    assert done("lab", "heads", "-c", "cats", "--json").json["model"]["name"] == "cats"


def test_a_model_that_holds_nan_is_a_finding(folder):
    text = BASE.replace("n_layers: 3", "n_layers: 1") + "vocabulary: {0: a, 1: b}\nprompt: a b\n"
    text += "weights:\n  embed.weight: ones\n  layers.0.attn.q.weight: ones\n  layers.0.attn.{k,v,o}.weight: identity\n"
    (folder / "sound.yaml").write_text(text)
    done("lab", "attention", "-c", "sound")
    # Scores of 4·1e200² are beyond float64: infinity less infinity is no number.
    (folder / "broken.yaml").write_text(
        text.replace("embed.weight: ones", "embed.weight: {rows: {0: [1e200, 1e200, 1e200, 1e200]}}")
    )
    ran = gptcli("lab", "attention", "-c", "broken", "a", "--dtype", "f64")
    assert ran.status == 1 and "finding proof" in ran.err and "Traceback" not in ran.err
    assert gptcli("lab", "attention", "-c", "broken", "a", "--dtype", "f64", "--json").json["gap"] is None


WRONG = {
    "lab ordr": "Did you mean 'order'",
    "lab --json order": "write it after: gptcli lab order --json",
    "lab order --degrees 30": "No such option",
    "lab norms --seed 1": "No such option",
    "lab positions --causal": "No such option",
    "lab heads --layer 1": "No such option",
    "lab routes -m cats": "No such option",
    "lab order --permutation 0,0,1": "not each of 0 to 2 once",
    "lab order --permutation 1,2,3": "not each of 0 to 2 once",
    "lab order --permutation 2,0": "not each of 0 to 2 once",
    "lab order --permutation -1,0,1": "not each of 0 to 2 once",
    "lab order ' '": "the text is empty",
    "lab order --position sine": "'sine' is not one of",
    "lab positions cat bird": "the words are cat, chase, dog",
    "lab positions cat Dog": 'did you mean "dog"?',
    "lab positions --degrees nan": "--degrees nan",
    "lab positions --degrees 361": "--degrees 361",
    "lab positions --shift -1": "--shift",
    "lab scaling --dim 0": "--dim 0",
    "lab scaling --dim 4,x": "not numbers",
    "lab scaling --dim 2.5": "not whole numbers",
    "lab scaling --samples 1": "--samples",
    "lab scaling --samples 1000000 --dim 100,1000": "2,200,000,000 random numbers",
    "lab scaling --scores inf,0": "not numbers",
    "lab scaling --divide-dim 0": "--divide-dim",
    "lab norms --values ''": "not numbers",
    "lab norms --values 1,2 --weight 1,2,3": "3 numbers for 2 values",
    "lab norms --values 1,2 --bias 1,2,3": "--bias: 3 numbers",
    "lab norms --values 2,2 --eps 0": "nothing to divide by",
    "lab norms --values 0,0 --eps 0": "nothing to divide by",
    "lab norms --values 1e200,1": "1e+200 is beyond",
    "lab norms --eps -1": "--eps -1",
    "lab norms --eps nan": "--eps nan",
    "lab residual --heads 3": "--heads 3: does not divide --dim 64",
    "lab residual --placement pre,pre": "each once",
    "lab residual --placement before": "pre, post, output, sandwich",
    "lab residual --std -1": "--std -1",
    "lab residual --std nan": "--std nan",
    "lab residual --layers 1000 --dim 4096": "GiB are needed",
    "lab heads --tokens 1025": "more than the context of 1,024",
    "lab heads --tokens 0": "--tokens",
    "lab heads --dtype f8": "no such type",
    "lab heads --source-tokens 3": "no encoder",
    "lab heads transformer-2017-base --source-tokens 513": "--source-tokens 513: more than the context of 512",
    "lab routes --configs nope": "no config 'nope'",
    "lab routes --configs a,,b": "an empty name",
    "lab routes a b c d --configs attention-by-hand": "4 words are more than its context",
    "lab attention dog": "the vocabulary has t0, t1, t2",
    "lab attention --layer 0": "layers count from 1",
    "lab attention --layer all": "name one layer",
    "lab attention --head 1": "--head 1",
    "lab attention t0 t1 --batch": "2 texts",
    "lab norms -o x.png": "this command writes .json",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_is_one_line(line):
    words = shlex.split(line)
    ran = gptcli(*words)
    assert (ran.status, ran.err.count("\n")) == (2, 1) and (ran.out == "" or "--json" in words)
    assert WRONG[line] in ran.err and ran.err.startswith("gptcli: ") and "; " in ran.err
    as_json = gptcli(*words, "--json")
    assert (
        as_json.status == 2
        and as_json.json["status"] == "error"
        and WRONG[line] in "; ".join(as_json.json["error"].values())
    )


def test_too_many_words_are_refused():
    for report in (
        lambda: positions_report(["cat"] * 65, 30.0, 0),
        lambda: routes_report(["a"] * 61, [], []),
        lambda: order_report(["a"] * 1001, None, 0, False, "none"),
        lambda: scaling_report([4], 10, 0, [0.0] * 65, 4),
        lambda: routes_report([], [], ["cats"] * 7),
    ):
        with pytest.raises(GptcliError):
            report()


@pytest.mark.parametrize("words", [["lab"], ["lab", "--json"], ["lab", "heads"], ["lab", "--help"]], ids=" ".join)
def test_the_list_and_heads_load_no_torch(words):
    code = (
        "import sys\n"
        "from gptcli.cli.main import main\n"
        f"sys.argv = ['gptcli', *{words!r}]\n"
        "status = main()\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)), status, file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout and ran.stderr == "[] 0\n"
