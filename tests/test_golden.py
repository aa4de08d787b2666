"""The worked examples, number by number: golden.json (double precision, by hand) against the engine and its reports.

Each entry of the sections below is a test of its own, so an entry that nothing produces fails by name.
"""

import json
import math
import re
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gptcli import count
from gptcli.model.forward import Inputs, forward
from gptcli.model.ops import rotary
from gptcli.report.params import params_report
from gptcli.report.topk import topk_report
from gptcli.report.trace import trace_report
from gptcli.run import Run
from gptcli.source import open_model
from gptcli.tokens import from_files
from gptcli.trace import Recorder
from tests.toys import gpt2_vocabulary

GOLDEN = json.loads((Path(__file__).parent / "data/golden.json").read_text(encoding="utf-8"))
CATS, BY_HAND = GOLDEN["cats"], GOLDEN["attention-by-hand"]
TOLERANCE = {"float32": 1e-6, "float64": 1e-9}
# Remarks that state no value of their own.
PROSE = {"cats/weights/other embedding rows", "attention-by-hand/note", "gpt2-small/kv_note"}


def entries(value, path):
    """(path, value) of everything below; a list of mappings is opened as a mapping is."""
    if isinstance(value, list) and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return [(path, value)]
    return [entry for key, one in value.items() for entry in entries(one, f"{path}/{key}")]


def of_section(*sections):
    return [path for section in sections for path, _ in entries(GOLDEN[section], section) if path not in PROSE]


VALUES = dict(entry for section in GOLDEN for entry in entries(GOLDEN[section], section))


def check(found, path, tolerance=TOLERANCE["float64"]):
    """Numbers within the tolerance (relative where they exceed 1), shapes and words exactly."""
    expected = VALUES[path]
    if isinstance(expected, str | bool):
        assert found == expected and type(found) is type(expected)
        return
    found = torch.as_tensor(found, dtype=torch.float64)
    expected = torch.tensor(expected, dtype=torch.float64)
    assert found.shape == expected.shape
    gap = (found - expected).abs() / expected.abs().clamp(min=1)
    assert float(gap.max()) <= tolerance, f"{path}: {found.tolist()} instead of {expected.tolist()}"


def same(tensors):
    first, *others = tensors
    assert others and all(torch.equal(first, other) for other in others)
    return first


class Example:
    """One worked example, run through the engine in one type with everything recorded."""

    def __init__(self, name, dtype):
        self.model = open_model(config=name)
        self.spec, self.dtype = self.model.spec, dtype
        self.ids = [self.model.tokenizer.encode(self.model.config.prompt)]
        self.weights = self.model.weights(getattr(torch, dtype), torch.device("cpu"))

    def record(self, ids, **attention):
        """Logits and every activation; attention: fields of the Spec's attention to change."""
        recorder = Recorder("*")
        spec = replace(self.spec, attention=replace(self.spec.attention, **attention))
        logits = forward(Inputs(torch.tensor(ids)), self.weights, spec, recorder)
        return logits, recorder.kept

    @cached_property
    def ran(self):
        return self.record(self.ids)

    def at(self, path):
        """A recorded activation of the one text."""
        return self.ran[1][path][0]

    def matrix(self, name):
        """A weight as the documents print it, [in, out], the same in every layer."""
        matrices = [self.weights[f"layers.{i}.{name}.weight"].T for i in range(self.spec.n_layers)]
        return matrices[0] if len(matrices) == 1 else same(matrices)

    def said(self, *names):
        """What matrices and gains are, in a word."""
        found = [self.weights[name] for name in names]
        if all(torch.equal(x, torch.ones_like(x)) for x in found):
            return "ones"
        if all(not x.any() for x in found):
            return "zero"
        size = len(found[0])
        return "identity" if all(torch.equal(x, torch.eye(size, dtype=x.dtype)) for x in found) else "something else"

    @property
    def run(self):
        return Run(self.model, self.ids, self.dtype)


@cache
def example(name, dtype):
    return Example(name, dtype)


both_types = pytest.mark.parametrize("dtype", TOLERANCE)


# The worked example "Cats sit on mats".

CATS_IDS = [int(id_) for id_ in CATS["weights"]["lm_head rows"]]
CATS_WORDS = tuple(CATS["vocabulary"][str(id_)] for id_ in CATS_IDS)

# A layer's golden entries, and the activations that each must equal.
POINTS_OF = {
    "resid_pre": ["resid_pre"],
    "norm1": ["attn_norm"],
    "q = k = v [head][token][dim]": ["attn.q", "attn.k", "attn.v"],
    "q_rot = k_rot": ["attn.q_rot", "attn.k_rot"],
    "scores (scaled, before mask) [head][query][key]": ["attn.scores"],
    "pattern": ["attn.pattern"],
    "z (head outputs) [head][token][dim]": ["attn.z"],
    "attn_out": ["attn_out"],
    "resid_mid": ["resid_mid"],
    "norm2": ["mlp_norm"],
    "mlp up": ["mlp.up"],
    "mlp activation": ["mlp.act"],
    "mlp_out": ["mlp_out"],
    "resid_post": ["resid_post"],
}


def cats_config(cats):
    spec, params = cats.spec, cats.model.layout
    _, sin = rotary(spec, torch.tensor([[1]]), torch.float64)  # the sine of one position's turn
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "layers": spec.n_layers,
        "heads": spec.attention.n_heads,
        "head_dim": spec.attention.head_dim,
        "mlp_size": spec.mlp.size,
        "norm": spec.norm.kind,
        "eps": spec.norm.eps,
        "position": f"{spec.position.kind}, frequency {math.asin(sin.item()):g} for the only pair",
        "activation": spec.mlp.activation,
        "bias": any(p.role == "bias" for p in params),
        "tied": any(p.tied_to for p in params),
        "causal": spec.attention.causal,
        "pre_norm": spec.norm.placement == "pre",
    }


def cats_weights(cats):
    w, layers = cats.weights, range(cats.spec.n_layers)
    others = torch.ones(cats.spec.vocab_size, dtype=torch.bool)
    others[CATS_IDS] = False
    rows = {f"embedding rows/{id_}": w["embed.weight"][int(id_)] for id_ in CATS["weights"]["embedding rows"]}
    heads = {f"lm_head rows/{id_}": w["lm_head.weight"][id_] for id_ in CATS_IDS}
    squares = cats.said(*(f"layers.{i}.attn.{letter}.weight" for i in layers for letter in "qkvo"))
    size = "x".join(map(str, w["layers.0.attn.q.weight"].shape))
    return {
        **rows,
        **heads,
        "other lm_head rows": "zero" if not w["lm_head.weight"][others].any() else "not zero",
        "Wq = Wk = Wv = Wo": f"{squares} {size}, both layers",
        "W_up [4,8]": cats.matrix("mlp.up"),
        "W_down [8,4]": cats.matrix("mlp.down"),
        "all norm weights": cats.said(*(p.name for p in cats.model.layout if p.role == "gain")),
    }


def cats_ends(cats):
    """What stands outside the layers, and the lists of next tokens."""
    logits = cats.ran[0]
    before, normed = cats.at("layers.1.resid_post")[-1], cats.at("final_norm")[-1]
    last = topk_report(cats.run, 1, CATS_WORDS, "-1", 1.0).next[0]
    of_id = {candidate.id: candidate for candidate in last.top}
    largest = before.abs().argmax()
    return {
        "input_ids": cats.ids,
        "embedding": cats.at("embed"),
        "final_norm": cats.at("final_norm"),
        "mean square of the last row": before.square().mean(),
        "its root": before[largest] / normed[largest],
        "logits at ids 90,91,92 for each position": logits[0, :, CATS_IDS],
        "logits shape": list(logits.shape),
        "probability of 90,91,92 at the last position": [of_id[id_].prob for id_ in CATS_IDS],
        "top1 id at each position": [n.top[0].id for n in topk_report(cats.run, 1, (), "all", 1.0).next],
        "log-probability of 90 (mats) at the last position": of_id[CATS_IDS[0]].logprob,
    }


@cache
def cats_found(dtype):
    cats = example("cats", dtype)
    found = {f"config/{key}": value for key, value in cats_config(cats).items()}
    found |= {f"vocabulary/{id_}": word for id_, word in cats.model.config.vocabulary.items()}
    found |= {f"weights/{key}": value for key, value in cats_weights(cats).items()}
    found |= cats_ends(cats)
    for i in range(cats.spec.n_layers):
        for key, points in POINTS_OF.items():
            tensors = [cats.at(f"layers.{i}.{point}") for point in points]
            found[f"layers/{i}/{key}"] = tensors[0] if len(points) == 1 else same(tensors)
    return {f"cats/{key}": value for key, value in found.items()}


@both_types
@pytest.mark.parametrize("path", of_section("cats"))
def test_cats(path, dtype):
    check(cats_found(dtype)[path], path, TOLERANCE[dtype])


def test_cats_embedding_rows_that_the_document_leaves_out_are_zeros():
    table = example("cats", "float64").weights["embed.weight"]
    given = {int(id_) for id_ in CATS["weights"]["embedding rows"]}
    assert set(table.any(-1).nonzero().flatten().tolist()) == given


# Attention by hand.


@cache
def by_hand_found(dtype):
    hand = example("attention-by-hand", dtype)
    order = BY_HAND["permutation"]
    _, both = hand.record(hand.ids, causal=False)
    _, permuted = hand.record([[hand.ids[0][i] for i in order]], causal=False)
    plain_rows, permuted_rows = both["layers.0.attn_out"][0], permuted["layers.0.attn_out"][0]
    nearest = [int((plain_rows - row).abs().amax(-1).argmin()) for row in permuted_rows]
    found = {
        "x": hand.at("embed"),
        "W_Q": hand.matrix("attn.q"),
        "W_K": hand.matrix("attn.k"),
        "W_V": hand.said("layers.0.attn.v.weight"),
        "heads": hand.spec.attention.n_heads,
        "Q": hand.at("layers.0.attn.q")[0],
        "K": hand.at("layers.0.attn.k")[0],
        "V": hand.at("layers.0.attn.v")[0],
        "scores_raw": [[key.product for key in walk.keys] for walk in trace_report(hand.run, [0], [0], "all").walks],
        "scores_scaled": hand.at("layers.0.attn.scores")[0],
        "pattern_causal": hand.at("layers.0.attn.pattern")[0],
        "out_causal": hand.at("layers.0.attn_out"),
        "bidirectional_pattern": both["layers.0.attn.pattern"][0, 0],
        "bidirectional_out": plain_rows,
        "permutation": nearest,
        "bidirectional_out_permuted": permuted_rows,
    }
    return {f"attention-by-hand/{key}": value for key, value in found.items()}


@both_types
@pytest.mark.parametrize("path", of_section("attention-by-hand"))
def test_attention_by_hand(path, dtype):
    check(by_hand_found(dtype)[path], path, TOLERANCE[dtype])


def test_attention_by_hand_equals_the_fused_kernel_as_closely_as_the_document_says():
    allowed = float(re.search(r"to (\d\S*) in float32", BY_HAND["note"])[1])
    q, k, v = (torch.tensor(BY_HAND[name])[None, None] for name in "QKV")
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]
    hand = example("attention-by-hand", "float32")
    assert float((hand.at("layers.0.attn_out") - fused).abs().max()) <= allowed
    weighed = hand.at("layers.0.attn.pattern")[0] @ hand.at("layers.0.attn.v")[0]
    assert float((weighed - fused).abs().max()) <= allowed


# GPT-2 small, and two sizes of Llama 3.


def rows_of(name):
    """The params report of a shipped config, and its rows by name (`layers` for the folded run of layers)."""
    model = open_model(config=name)
    report = params_report(model, "component", "auto", full=False)
    return model, report.parameters, {row.name.partition(" ")[0]: row for row in report.rows}


@pytest.fixture(scope="module")
def gpt2_found(tmp_path_factory):
    model, totals, rows = rows_of("gpt2-small")
    spec, layers = model.spec, model.spec.n_layers
    tokenizer = from_files(gpt2_vocabulary(tmp_path_factory.mktemp("gpt2")))
    length = spec.context_length
    found = {f"tokens_of/{text}": tokenizer.encode(text) for text in GOLDEN["gpt2-small"]["tokens_of"]}
    found |= {
        "embedding": rows["embed"].parameters,
        "position": rows["pos_embed"].parameters,
        "attention_per_layer": rows["attention"].each,
        "output_projection_weight": next(p.size for p in model.layout if p.name == "layers.0.attn.o.weight"),
        "mlp_per_layer": rows["mlp"].each,
        "norms_per_layer": rows["norms"].each,
        "layer": rows["layers"].each,
        "layers_total": totals.layers,
        "final_norm": rows["final_norm"].parameters,
        "total": totals.total,
        "nanogpt_without_positions": totals.nanogpt,
        "mlp_share_of_layer": rows["mlp"].each / rows["layers"].each,
        "attention_weights_one_layer_T1024": count.attention_matrix_bytes(spec, length, 1),
        "bytes_bf16_one_layer": count.attention_matrix_bytes(spec, length, count.ITEM_BYTES["bfloat16"]),
        "bytes_bf16_all_layers": layers * count.attention_matrix_bytes(spec, length, count.ITEM_BYTES["bfloat16"]),
        "residual_corrections": sum(p.role == "residual" for p in model.layout),
        "attention_maps": layers * spec.attention.n_heads,
    }
    assert length == 1024 and sum(row.parameters for row in rows.values() if not row.indent) == totals.total
    return {f"gpt2-small/{key}": value for key, value in found.items()}


def check_figure(found, path):
    """Counts and ids exactly; a share to the six decimals that golden.json gives."""
    check(found, path, 5e-7 if "share" in path else 0)


@pytest.mark.parametrize("path", of_section("gpt2-small"))
def test_gpt2_small(path, gpt2_found):
    check_figure(gpt2_found[path], path)


def test_gpt2_cache_holds_keys_and_values_whatever_the_number_of_heads():
    """golden.json's kv_note: [T, hidden] each of K and V a layer."""
    spec = open_model(config="gpt2-small").spec
    halves = replace(spec.attention, n_heads=24, n_kv_heads=24, head_dim=32)
    expected = 2 * spec.n_layers * 7 * spec.hidden_size
    assert count.kv_cache_bytes(spec, 7, 1) == expected
    assert count.kv_cache_bytes(replace(spec, attention=halves), 7, 1) == expected


@pytest.mark.parametrize("path", of_section("llama3-8b", "llama3-70b"))
def test_llama3(path):
    name, key = path.split("/")
    _, totals, rows = rows_of(name)
    tables = rows["embed"].parameters + rows["lm_head"].parameters
    found = {
        "layer": rows["layers"].each,
        "attention": rows["attention"].each,
        "mlp": rows["mlp"].each,
        "mlp_share_of_layer": rows["mlp"].each / rows["layers"].each,
        "total": totals.total,
        "one_embedding_table_share": rows["embed"].share,
        "both_tables_share": tables / totals.total,
    }
    check_figure(found[key], path)


def test_llama3_shares_of_the_tables_as_the_document_prints_them():
    """The note gives, in this order: both tables of the 8B model, one table of the 70B model, both of it."""
    printed = re.findall(r"([\d.]+) %", GOLDEN["llama3-note"])
    _, small, of_small = rows_of("llama3-8b")
    _, large, of_large = rows_of("llama3-70b")
    shares = [
        (of_small["embed"].parameters + of_small["lm_head"].parameters) / small.total,
        of_large["embed"].share,
        (of_large["embed"].parameters + of_large["lm_head"].parameters) / large.total,
    ]
    assert [f"{100 * share:.{len(p.partition('.')[2])}f}" for share, p in zip(shares, printed)] == printed


def test_nothing_is_produced_that_golden_does_not_state(gpt2_found):
    """So the tables above can't keep an entry that is never compared."""
    for found, section in ((cats_found("float64"), "cats"), (by_hand_found("float64"), "attention-by-hand")):
        assert set(found) == set(of_section(section))
    assert set(gpt2_found) == set(of_section("gpt2-small"))
