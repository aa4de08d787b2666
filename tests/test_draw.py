"""`draw`: every box, arrow and word against the layout, against a forward pass that really ran, and against facts known
by hand; every picture closed, within its width, and without one thing lying on another.
"""

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from gptcli import count, shipped
from gptcli.families import FAMILIES
from gptcli.families.record import resolve
from gptcli.layout import layout
from gptcli.model.forward import forward
from gptcli.model.init import random_weights
from gptcli.model.weights import Weights
from gptcli.render.mermaid import quoted, to_mermaid
from gptcli.render.screen import Screen
from gptcli.render.svg import to_svg
from gptcli.render.terminal import draw, verdict
from gptcli.report.draw import Box, DrawReport, Edge, Figure, draw_report, kinds_of_layers, numbered
from gptcli.source import Model, open_model
from gptcli.spec import Spec, SpecError, read_spec
from gptcli.trace import Recorder, points
from tests.command import Stream, gptcli, process
from tests.test_imports import HEAVY
from tests.test_trace_families import TOYS
from tests.toys import fed, shrunk

RAW = {
    "name": "toy",
    "vocab_size": 11,
    "context_length": 16,
    "hidden_size": 8,
    "n_layers": 2,
    "position": "none",
    "norm": {"kind": "layernorm"},
    "attention": {"n_heads": 2, "head_dim": 6},
    "mlp": {"kind": "dense", "size": 5, "activation": "relu"},
    "lm_head": {"tied": True},
}
ROPE, GATED = {"kind": "rope"}, {"kind": "dense", "size": 5, "activation": "silu", "gated": True}
EXPERTS = {"kind": "experts", "n_experts": 4, "top_k": 2, "size": 3, "activation": "silu"}
# What no shipped config and no family has, or not together.
RARE = {
    "nothing but attention": {"norm": "none", "mlp": "none"},
    "a scaled residual, norms of outputs": {"norm": {"kind": "rmsnorm", "placement": "output"}, "residual_scale": 0.22},
    "one norm or none for two": {
        "residual": "parallel_shared",
        "attention": RAW["attention"] | {"normed": False},
    },
    "distances, one layer without a mask": {"position": {"kind": "relative", "buckets": 8, "max_distance": 20}},
    "rows of their own size, segments, sines": {
        "embed_size": 3,
        "embed_scale": 8**0.5,
        "n_segments": 2,
        "position": {"kind": "sinusoidal"},
        "lm_head": {"tied": True, "bias": True, "scale": 0.5, "softcap": 9.0, "transform": {"activation": "gelu"}},
    },
    "experts of all sorts": {"mlp": EXPERTS | {"shared_size": 7, "limit": 7.0, "bias": True, "router_bias": True}},
    "sinks, a cap, normed heads, windows": {
        "position": ROPE | {"rotary_dim": 4, "pairs": "neighbours", "direction": "backward"},
        "attention": RAW["attention"]
        | {"n_kv_heads": 1, "sinks": True, "softcap": 5.0, "qk_norm": "each", "qk_norm_place": "after", "window": 3},
    },
    "an encoder of another size with its own table": {
        "norm": {"kind": "layernorm", "placement": "sandwich"},
        "encoder": {"n_layers": 1, "hidden_size": 10, "vocab_size": 7, "position": "learned"},
        "encoder_embed": "own",
    },
    "layers that all differ": {
        "n_layers": 6,
        "variants": [{"layers": [i], "attention": {"scale": 1 / (i + 2)}} for i in range(1, 6)],
    },
    "layers of three kinds": {
        "n_layers": 8,
        "position": ROPE,
        "variants": [
            {"layers": [0], "mlp": GATED},
            {"layers": [3, 7], "mlp": EXPERTS, "position": "none", "attention": {"window": None, "n_heads": 4}},
        ],
    },
    "no head": {"lm_head": None, "attention": RAW["attention"] | {"causal": False}},
}


def made(**changes) -> Model:
    return Model(spec=read_spec(RAW | changes), source="made")


def family(name: str) -> Model:
    config = TOYS[name]
    return Model(spec=resolve(config, FAMILIES[config["model_type"]], name, "config.json").spec, source="toy")


MODELS = {
    **{name: (lambda name=name: open_model(name)) for name in shipped.configs()},
    **{f"family {name}": (lambda name=name: family(name)) for name in TOYS},
    **{name: (lambda name=name: made(**RARE[name])) for name in RARE},
}
every_model = pytest.mark.parametrize("name", MODELS)
every_config = pytest.mark.parametrize("name", shipped.configs())


@cache
def model_of(name: str) -> Model:
    return MODELS[name]()


def figure_of(model: Model, full: bool = False) -> Figure:
    [figure] = draw_report([model], full).figures
    return figure


def inside(box: Box) -> list[Box]:
    return [one for branch in box.branches for one in branch]


def leaves(several: list[Box]) -> list[Box]:
    return [leaf for box in several for leaf in ([box] if not box.branches else leaves(inside(box)))]


def all_boxes(several: list[Box]) -> list[Box]:
    return [one for box in several for one in (box, *all_boxes(inside(box)))]


def box_of(figure: Figure, id_: str) -> Box:
    [box] = [box for box in all_boxes(figure.stacks) if box.id == id_]
    return box


# Parameters


def counted(several: list[Box]) -> int:
    """By the boxes that hold no other, so many times as they and what holds them stand there."""
    return sum(box.times * (counted(inside(box)) if box.branches else box.parameters) for box in several)


def check_parameters(model: Model, full: bool) -> None:
    figure = figure_of(model, full)
    assert counted(figure.stacks) == sum(stack.parameters for stack in figure.stacks) == count.total(model.layout)
    for box in all_boxes(figure.stacks):
        if box.branches:
            assert box.parameters == counted(inside(box)), box.id


@pytest.mark.parametrize("full", [False, True])
@every_model
def test_the_boxes_count_what_the_model_counts(name, full):
    check_parameters(model_of(name), full)


@every_model
def test_every_weight_of_what_is_opened_lies_in_one_box(name):
    """Of experts, the first stands for all; of layers that are alike, the first."""
    model = model_of(name)
    drawn = figure_of(model, full=True).stacks
    held = [(w.name, tuple(w.shape)) for box in leaves(drawn) for w in box.weights]
    opened = [re.escape(box.id) for box in all_boxes(drawn) if box.kind == "layer"]
    for weight in layout(model.spec):
        inside = re.search(r"^(encoder\.)?layers\.\d+", weight.name)
        first = not re.search(r"\.experts\.[1-9]", weight.name)
        wanted = first and (inside is None or any(re.fullmatch(one, inside[0]) for one in opened))
        assert held.count((weight.name, weight.shape)) == wanted, weight.name
    assert len(held) == len(set(held))


def test_parameters_by_hand():
    """GPT-2 small: a layer of 7,087,872, two thirds in its MLP (768·3,072 twice, and biases)."""
    figure = figure_of(open_model("gpt2-small"))
    assert box_of(figure, "layers.0").parameters == 7_087_872 and box_of(figure, "layers.0").times == 12
    assert box_of(figure, "layers.0.mlp").parameters == 2 * 768 * 3072 + 3072 + 768
    assert box_of(figure, "embed").parameters == 50257 * 768 and box_of(figure, "lm_head").parameters == 0
    assert box_of(figure, "lm_head").tied_to == "embed"
    experts = figure_of(made(mlp=EXPERTS))
    assert box_of(experts, "layers.0.mlp.experts").times == 4
    assert box_of(experts, "layers.0.mlp.experts").parameters == 3 * 8 * 3


# Arrows


B, T, S = 2, 9, 11  # what tests.toys.fed gives a decoder of nine tokens


def recorded(spec: Spec) -> dict[str, tuple[int, ...]]:
    """The shape of every activation of a forward pass."""
    params = list(layout(spec))
    weights = Weights.of(params, random_weights(spec, params, 0, torch.float32, torch.device("cpu")))
    recorder = Recorder("*", note=lambda path, x: tuple(x.shape))
    ids = torch.arange(T).expand(B, T) % min(spec.vocab_size, spec.encoder.vocab_size if spec.encoder else 10**9)
    forward(fed(spec, ids), weights, spec, recorder)
    return recorder.kept


def check_shapes(spec: Spec) -> None:
    """Every arrow carries what the forward pass made, and everything that it made stands on an arrow."""
    model = Model(spec=spec, source="toy")
    figure, real, axes = figure_of(model, full=True), recorded(spec), dict(points(spec))
    carried = {edge.carries.path: edge.carries for edge in figure.edges if edge.carries is not None}
    sizes = {"B": B, "T": T, "S": S}
    for path, flow in carried.items():
        assert len(flow.axes) == len(flow.shape)
        if path:
            assert tuple(sizes.get(size, size) for size in flow.shape) == real[path], path
            own = (
                axes[path].replace("S", "T")
                if not path.startswith("encoder.") and ".cross." not in path
                else axes[path]
            )
            assert "".join(flow.axes).replace("S", "T") == own.replace("S", "T"), path
    assert all(tuple(edge.carries.shape) for edge in figure.edges if edge.kind != "tie")
    opened = [box.id for box in all_boxes(figure.stacks) if box.kind == "layer"]
    shown = [path for path in real if "layers." not in path or any(path.startswith(f"{one}.") for one in opened)]
    missing = {re.sub(r"^(encoder\.)?layers\.\d+\.", "", path) for path in shown if path not in carried}
    # One tensor under two names stands on the arrow once: what enters a layer is what left the one before.
    twice = {"resid_pre"} | ({"attn_norm", "cross_norm", "mlp_norm"} if spec.norm.placement == "post" else set())
    twice |= {"resid_mid"} if spec.residual != "sequential" else set()
    kinds = [*kinds_of_layers(spec), *(kinds_of_layers(spec.encoder) if spec.encoder else ())]
    twice |= {"resid_post"} if any(kind.mlp.kind == "none" for kind in kinds) else set()
    missing -= {"attn.sink", "cross.sink"}  # a share of the softmax that is led nowhere
    # Without a head, what comes out last is led nowhere either.
    missing -= {"final_norm"} if spec.lm_head is None else set()
    assert missing <= twice, missing - twice


@every_config
def test_shapes_are_those_of_a_forward_pass(name):
    check_shapes(shrunk(model_of(name).spec))


@pytest.mark.parametrize("name", [*(f"family {name}" for name in TOYS), *RARE])
def test_shapes_are_those_of_a_toy_s_forward_pass(name):
    check_shapes(model_of(name).spec)


@every_model
def test_the_arrows_lead_from_the_ids_through_every_box(name):
    figure = figure_of(model_of(name))
    check_graph(figure)


def check_graph(figure: Figure) -> None:
    ends = {leaf.id: leaf for leaf in leaves(figure.stacks)}
    assert len(ends) == len(leaves(figure.stacks)) and len({b.id for b in all_boxes(figure.stacks)}) == len(
        all_boxes(figure.stacks)
    )
    flows = [edge for edge in figure.edges if edge.kind != "tie"]
    assert {edge.source for edge in figure.edges} | {edge.target for edge in figure.edges} == set(ends)
    for leaf in ends.values():
        arriving = [edge for edge in flows if edge.target == leaf.id]
        leaving = [edge for edge in flows if edge.source == leaf.id]
        assert bool(arriving) == (leaf.kind not in ("input", "aside")), leaf.id
        assert bool(leaving) == (leaf.kind != "output"), leaf.id
        assert (leaf.kind == "add") == ([edge.kind for edge in arriving].count("residual") == 1), leaf.id
        assert all(edge.carries == ends[edge.source].gives for edge in arriving)
    order = list(ends)
    assert all(order.index(edge.source) < order.index(edge.target) for edge in flows if edge.kind != "bias")


def test_the_residual_path_passes_the_sublayer_that_reads_the_same():
    for name in MODELS:
        figure = figure_of(model_of(name))
        for past in (box for box in all_boxes(figure.stacks) if box.kind == "residual"):
            stem = past.id.removesuffix(".residual")
            sums = (f"{stem}_add", f"{stem}.mlp_add")
            [add] = [edge for edge in figure.edges if edge.kind == "residual" and edge.target in sums]
            within_it = {leaf.id for leaf in leaves([past])}
            arriving = (edge for edge in figure.edges if edge.target in within_it and edge.kind == "data")
            entered = {edge.source for edge in arriving if edge.source not in within_it}
            assert entered == {add.source} and add.source not in within_it, name


def edges_of(figure: Figure, inside: str = "layers.0.") -> set[str]:
    """`q>scores`; the residual path `x~add`, an encoder's vectors `x=k`."""
    signs = {"data": ">", "residual": "~", "memory": "=", "bias": "+"}
    found = set()
    for edge in figure.edges:
        if edge.kind != "tie":
            found.add(f"{edge.source}{signs[edge.kind]}{edge.target}".replace(inside, ""))
    return found


ATTENTION = {"attn.q>attn.scores", "attn.k>attn.scores", "attn.scores>attn.pattern", "attn.pattern>attn.z",
             "attn.v>attn.z", "attn.z>attn.o"}  # fmt: skip
MLP = {"mlp.up>mlp.act", "mlp.act>mlp.down"}


@pytest.mark.parametrize(
    "changes, expected",
    {
        "before": (
            {},
            {"embed>attn_norm", *(f"attn_norm>attn.{x}" for x in "qkv"), "attn.o>attn_add", "embed~attn_add"}
            | {"attn_add>mlp_norm", "mlp_norm>mlp.up", "mlp.down>mlp_add", "attn_add~mlp_add", "mlp_add>final_norm"}
            | {"final_norm>lm_head"},
        ),
        "after the sum": (
            {"norm": {"kind": "layernorm", "placement": "post"}},
            {*(f"embed>attn.{x}" for x in "qkv"), "attn.o>attn_add", "embed~attn_add", "attn_add>attn_norm"}
            | {"attn_norm>mlp.up", "mlp.down>mlp_add", "attn_norm~mlp_add", "mlp_add>mlp_norm", "mlp_norm>lm_head"},
        ),
        "on both sides": (
            {"norm": {"kind": "rmsnorm", "placement": "sandwich"}},
            {"embed>attn_norm", *(f"attn_norm>attn.{x}" for x in "qkv"), "attn.o>attn_out_norm"}
            | {"attn_out_norm>attn_add", "embed~attn_add", "attn_add>mlp_norm", "mlp_norm>mlp.up"}
            | {"mlp.down>mlp_out_norm", "mlp_out_norm>mlp_add", "attn_add~mlp_add", "mlp_add>final_norm"}
            | {"final_norm>lm_head"},
        ),
        "side by side, two norms": (
            {"residual": "parallel"},
            {"embed>attn_norm", "embed>mlp_norm", *(f"attn_norm>attn.{x}" for x in "qkv"), "attn.o>mlp_add"}
            | {"mlp_norm>mlp.up", "mlp.down>mlp_add", "embed~mlp_add", "mlp_add>final_norm", "final_norm>lm_head"},
        ),
        "side by side, one norm": (
            {"residual": "parallel_shared"},
            {"embed>attn_norm", *(f"attn_norm>attn.{x}" for x in "qkv"), "attn.o>mlp_add", "attn_norm>mlp.up"}
            | {"mlp.down>mlp_add", "embed~mlp_add", "mlp_add>final_norm", "final_norm>lm_head"},
        ),
    }.values(),
)  # fmt: skip
def test_one_layer_s_arrows_by_hand(changes, expected):
    figure = figure_of(made(n_layers=1, **changes))
    assert edges_of(figure) == expected | ATTENTION | MLP | {"ids>embed", "lm_head>logits"}


def test_an_encoder_s_vectors_are_read_by_keys_and_values_alone():
    figure = figure_of(open_model("transformer-2017-base"))
    memory = [(e.source, e.target, e.carries.axes, e.carries.shape) for e in figure.edges if e.kind == "memory"]
    vectors = (["B", "S", "C"], ["B", "S", 512])
    assert memory == [("encoder.layers.0.mlp_norm", f"layers.0.cross.{x}", *vectors) for x in "kv"]
    shapes = {x: box_of(figure, f"layers.0.cross.{x}").gives.shape for x in ("q", "k", "scores", "z")}
    assert shapes == {
        "q": ["B", 8, "T", 64],
        "k": ["B", 8, "S", 64],
        "scores": ["B", 8, "T", "S"],
        "z": ["B", 8, "T", 64],
    }
    assert box_of(figure, "encoder.layers.0.attn.scores").gives.shape == ["B", 8, "S", "S"]
    ties = {(edge.source, edge.target) for edge in figure.edges if edge.kind == "tie"}
    assert ties == {("embed", "lm_head"), ("embed", "encoder.embed")}


def test_rotations_norms_and_gates_stand_on_the_way():
    q = {"attention": RAW["attention"] | {"qk_norm": "head"}, "position": ROPE, "mlp": GATED}
    found = edges_of(figure_of(made(n_layers=1, **q)))
    assert {"attn.q>attn.q_norm", "attn.q_norm>attn.q_rot", "attn.q_rot>attn.scores", "attn.k_rot>attn.scores"} <= found
    assert {"mlp_norm>mlp.gate", "mlp_norm>mlp.up", "mlp.gate>mlp.act", "mlp.up>mlp.act"} <= found
    q["attention"] = q["attention"] | {"qk_norm_place": "after"}
    assert {"attn.q>attn.q_rot", "attn.q_rot>attn.q_norm"} <= edges_of(figure_of(made(n_layers=1, **q)))
    found = edges_of(figure_of(made(n_layers=1, mlp=EXPERTS | {"shared_size": 7})))
    assert {"mlp_norm>mlp.router", "mlp_norm>mlp.experts", "mlp.router>mlp.experts", "mlp_norm>mlp.shared"} <= found
    assert {"mlp.experts>mlp.sum", "mlp.shared>mlp.sum", "mlp.sum>mlp_add"} <= found
    found = edges_of(figure_of(made(n_layers=1, position={"kind": "relative", "buckets": 8, "max_distance": 20})))
    assert "rel_bias+attn.scores" in found


# Layers that differ


@pytest.mark.parametrize(
    "layers, said",
    [
        ([0], "1"),
        ([0, 1, 2], "1–3"),
        ([1, 3], "2, 4"),
        ([0, 1, 3, 4, 6], "1–2, 4–5, 7"),
        ([1, 3, 5, 7, 9, 25], "2, 4, 6 … 26"),
        ([0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 14, 16], "1–5, 7–11, 13 … 17"),
    ],
)
def test_layers_as_a_person_counts_them(layers, said):
    assert numbered(layers) == said


def layer_boxes(model: Model, full: bool = False) -> list[tuple[str, str, int, list[int]]]:
    boxes = all_boxes(figure_of(model, full).stacks)
    return [(box.kind, box.title, box.times, box.layers) for box in boxes if box.kind in ("layer", "folded")]


def test_the_commonest_kind_of_layer_is_opened_and_the_others_say_what_differs():
    model = made(**RARE["layers of three kinds"])
    assert layer_boxes(model) == [
        ("folded", "layer 1 of 8", 1, [0]),
        ("layer", "layers 2–3, 5–7 of 8", 5, [1, 2, 4, 5, 6]),
        ("folded", "layers 4, 8 of 8", 2, [3, 7]),
    ]
    first, last = (box for box in all_boxes(figure_of(model).stacks) if box.kind == "folded")
    assert first.lines == ["gated MLP: yes", "activation: silu"]
    assert "MLP: 4 experts, 2 for each token" in last.lines and "positions: none" in last.lines
    assert "heads: 4 of 6" in last.lines and not any("window" in line for line in last.lines)
    assert [kind for kind, *_ in layer_boxes(model, full=True)] == ["layer"] * 3
    assert layer_boxes(made()) == [("layer", "layer × 2", 2, [0, 1])]
    assert layer_boxes(made(n_layers=1)) == [("layer", "layer 1", 1, [0])]


def test_many_layers_of_a_kind_each_fold_into_one_box():
    [opened, folded] = layer_boxes(made(**RARE["layers that all differ"]))
    assert opened == ("layer", "layer 1 of 6", 1, [0])
    assert folded == ("folded", "layers 2–6 of 6", 5, [1, 2, 3, 4, 5])
    [box] = [box for box in all_boxes(figure_of(made(**RARE["layers that all differ"])).stacks) if box.kind == "folded"]
    assert box.lines == ["each its own scores: q·k × 0.333333 … q·k × 0.142857"]


@every_model
def test_every_layer_stands_in_one_box(name):
    model = model_of(name)
    for stack, spec in zip(reversed(figure_of(model).stacks), (model.spec, model.spec.encoder)):
        layers = [layer for box in all_boxes([stack]) for layer in box.layers]
        assert sorted(layers) == list(range(spec.n_layers))


# Words


def text_of(report: DrawReport, columns: int | None, encoding: str = "utf-8", color: str = "never") -> str:
    stream = Stream(encoding, "strict", terminal=columns is not None)
    screen = Screen(stream, color)
    screen.width = columns
    draw(report, screen)
    screen.show()
    return stream.text


@pytest.mark.parametrize(
    "name, said",
    [
        ("gpt2-small", ["50,257 rows of 768", "1,024 rows of 768", "12 heads of 64 · causal · bias", "layer × 12"]),
        ("gpt2-small", ["12 × 7,087,872 = 85,054,464 (85.05M)", "768 → 3,072 → 768 · gelu (tanh) · bias", "0 new"]),
        ("gpt2-small", ["[B,T,C] = [B,T,768]", "[B,H,T,D] = [B,12,T,64]", "[B,H,T,S] = [B,12,T,T]", "[B,T]\n"]),
        ("gpt2-small", ["[B,T,V] = [B,T,50257]", "LayerNorm · ε 1e-05 · scale and shift", "38,597,376 (38.60M)"]),
        ("llama3-8b", ["32 heads read 8 key/value heads of 128 · causal · rotation θ 500,000", "[B,8,T,128]"]),
        ("llama3-8b", ["4,096 → 14,336 → 4,096 · silu · gated · no bias", "RMSNorm · ε 1e-05", "218,112,000"]),
        ("llama3.1-405b", ["rotation θ 500,000, scaled (llama3 ×8)", "layer × 126", "16,384 → 53,248 → 16,384"]),
        ("gemma-2b", ["8 heads read 1 key/value head of 256", "× √2,048 = 45.2548", "weights stored less 1"]),
        ("mistral-7b", ["window 4,096"]),
        ("qwen3-0.6b", ["q and k normed", "q rotated"]),
        ("bert-base", ["12 heads of 64 · sees both ways · bias", "segment table", "head transform", "30,522 new"]),
        ("attention-by-hand", ["1 head of 4 · causal · no bias", "layer 1 "]),
        ("transformer-2017-base", ["sines and cosines", "reads the encoder", "the decoder's table"]),
        ("transformer-2017-base", ["[B,S,C] = [B,S,512]", "[B,8,T,S]", "[B,8,S,S]", "target ids", "source ids"]),
        ("family opt, rows of their own size", ["[B,T,P] = [B,T,10]", "to the hidden size · 10 → 24"]),
        ("family gpt_oss", ["2 of 4 experts for each token", "a sink for each head", "clamped at 0.5", "4 × 1,504"]),
        ("family gemma2", ["scores capped at 2", "capped at 3", "layers 1, 3 of 3", "layer 2 of 3 · window: none"]),
        ("experts of all sorts", ["a shared expert of 7", "router: softmax, best 2, scaled to sum 1"]),
        ("one norm or none for two", ["reads the stream unnormed"]),
        ("a scaled residual, norms of outputs", ["[B,T,C] = [B,T,8]  × 0.22 before the sum"]),
        ("distances, one layer without a mask", ["8 buckets × 2 heads", "+ by distance"]),
        ("no head", ["final vectors"]),
    ],
)  # fmt: skip
def test_boxes_say_what_a_person_needs(name, said):
    shown = text_of(draw_report([model_of(name)]), 80)
    for words in said:
        assert words in shown, words


def test_quiet_prints_the_chain_of_stages():
    ran = gptcli("draw", "gpt2-small", "-q")
    layer = "12 × (LayerNorm → attention → ⊕ → LayerNorm → MLP → ⊕)"
    assert ran.out == f"ids → token table → + position table → {layer} → final LayerNorm → lm_head → logits\n"
    side = verdict(draw_report([made(residual="parallel", norm={"kind": "rmsnorm"})]))
    assert "2 × (RMSNorm → attention | RMSNorm → MLP → ⊕)" in side
    two = verdict(draw_report([open_model("transformer-2017-base")]))
    assert two.startswith("encoder: source ids → ") and " | decoder: target ids → " in two


# The drawing in a terminal


class Signs:
    """How a box's sides look: in Unicode, and where nothing but ASCII is known."""

    def __init__(self, ascii_alone: bool):
        self.top_left, self.top_right = ("+", "+") if ascii_alone else ("┌", "┐")
        self.bottom_left, self.bottom_right = ("+", "+") if ascii_alone else ("└", "┘")
        self.flat = "-+v" if ascii_alone else "─┬▼┴"
        self.upright = "|+" if ascii_alone else "│┼"


def closed_boxes(lines: list[str], signs: Signs) -> int:
    """How many rectangles there are; each upper left corner must have its three others and both sides."""

    def at(row: int, column: int) -> str:
        return lines[row][column] if 0 <= row < len(lines) and column < len(lines[row]) else " "

    found = 0
    for row, line in enumerate(lines):
        for column, sign in enumerate(line):
            if sign != signs.top_left or at(row, column + 1) not in signs.flat:
                continue
            below = row + 1
            while at(below, column) in signs.upright and not (
                at(below, column) == signs.bottom_left and at(below, column + 1) in signs.flat
            ):
                below += 1
            if signs.top_left == "+" and (at(below, column) != "+" or at(below - 1, column) not in "|+v"):
                continue  # a line that turns or forks looks like a corner in ASCII
            if signs.top_left == "+" and at(row + 1, column) not in "|+":
                continue
            assert at(below, column) == signs.bottom_left, (row, column)
            right = column + 1
            while at(below, right) in signs.flat and not (
                at(below, right) == signs.bottom_right and at(below, right + 1) not in signs.flat
            ):
                right += 1
            if signs.top_left == "+" and at(row, right) != "+":
                continue
            assert (at(below, right), at(row, right)) == (signs.bottom_right, signs.top_right), (row, column)
            assert all(at(r, right) in signs.upright for r in range(row + 1, below)), (row, column)
            found += 1
    return found


def drawn_boxes(figure: Figure) -> int:
    """Frames and boxes that a terminal draws: it closes every attention and every MLP."""

    def of(several: list[Box]) -> int:
        total = 0
        for box in several:
            if box.kind in ("split", "residual", "layer", "stack"):
                total += (box.kind == "layer") + of(inside(box))
            else:
                total += box.kind not in ("input", "output", "add")
        return total

    return of(figure.stacks)


def check_rails(lines: list[str]) -> None:
    """Every residual path that leaves comes back, beside a ⊕."""
    for row, line in enumerate(lines):
        for column in (i for i, sign in enumerate(line) if sign == "╮"):
            below = next(r for r in range(row + 1, len(lines)) if lines[r][column : column + 1] != "│")
            if lines[below][column] == "╯":
                back = lines[below][:column].rstrip("─┴")
                assert back.endswith("⊕◄"), (row, column)
    assert sum(line.count("⊕◄") for line in lines) == sum(line.count("⊕") for line in lines)


def check_terminal(model: Model, columns: int, encoding: str) -> None:
    report = draw_report([model])
    shown = text_of(report, columns, encoding)
    lines = shown.splitlines()
    assert max(map(cell_len, lines)) <= columns
    assert all(line == line.rstrip() for line in lines)
    if encoding == "ascii":
        assert shown.isascii() and "\\u" not in shown and "\\x" not in shown
    assert closed_boxes(lines, Signs(encoding == "ascii")) == drawn_boxes(report.figures[0])
    if encoding != "ascii":
        check_rails(lines)
        adds = sum(box.kind == "add" for box in all_boxes(report.figures[0].stacks))
        assert shown.count("⊕") == adds
        across = sum(box.kind == "cross" for box in all_boxes(report.figures[0].stacks))
        assert shown.count("►") == (across if columns >= 80 else 0)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("columns", [60, 80, 120])
@every_model
def test_within_the_terminal_and_closed(name, columns, encoding):
    check_terminal(model_of(name), columns, encoding)


@every_config
def test_a_pipe_gets_80_columns(name):
    piped = gptcli("draw", name)
    assert piped.out == gptcli("draw", name, columns=80, NO_COLOR="1").out and piped.err == ""
    assert gptcli("draw", name, encoding="cp1252").out == gptcli("draw", name, encoding="ascii").out


def test_two_columns_from_80_on_and_one_below():
    report = draw_report([open_model("transformer-2017-base")])
    side = text_of(report, 80).splitlines()
    assert any("source ids" in line and "target ids" in line for line in side)
    stacked = text_of(report, 79).splitlines()
    assert not any("source ids" in line and "target ids" in line for line in stacked)
    order = [
        next(i for i, line in enumerate(stacked) if words in line) for words in ("source ids", "to each", "target")
    ]
    assert order == sorted(order)


def test_a_wide_terminal_shows_what_a_box_holds():
    report = draw_report([open_model("llama3.1-405b")])
    assert "W[16384,16384]" in text_of(report, 120) and "W[16384,16384]" not in text_of(report, 60)
    assert "[B,H,T,D] = [B,128,T,128]" in text_of(report, 80)


def test_the_residual_path_has_a_colour_of_its_own():
    shown = text_of(draw_report([made()]), 80, color="always")
    assert "\x1b[33m⊕◄" in shown and shown.count("\x1b[33m╮") == 0  # the corner is part of the line that ends in it
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == text_of(draw_report([made()]), 80)


# Two models


def rows_of(*names: str) -> dict[str, list[str | None]]:
    report = gptcli("draw", *names, "--json").json
    for row in report["rows"]:
        assert row["same"] == (row["values"][0] == row["values"][1])
    return {row["name"]: row["values"] for row in report["rows"]}


def test_two_decoders_by_hand():
    """GPT-2 (2019) and Llama 3 (2024), as their papers and configs describe them."""
    rows = rows_of("gpt2-small", "llama3-8b")
    assert rows["stacks"] == ["decoder", "decoder"] and rows["sight"] == ["causal", "causal"]
    assert rows["layers"] == ["12", "32"] and rows["hidden size"] == ["768", "4,096"]
    assert rows["norm"][0].startswith("LayerNorm") and rows["norm"][1].startswith("RMSNorm")
    assert rows["norm place"] == ["before each sublayer, a final one"] * 2
    assert rows["positions"] == ["learned table, 1,024 rows", "rotation θ 500,000"]
    assert rows["heads"] == ["12 of 64", "32 of 128"]
    assert rows["key/value heads"] == ["one for each head", "8, each for 4 heads"]
    assert rows["gated MLP"] == ["no", "yes"] and rows["MLP size"] == ["3,072", "14,336"]
    assert rows["activation"] == ["gelu (tanh)", "silu"]
    assert rows["biases"] == ["q, k, v, o, MLP", "none"]
    assert rows["head"] == ["tied to the token table", "a matrix of its own"]
    assert rows["vocabulary"] == ["50,257", "128,256"] and rows["context"] == ["1,024", "8,192"]
    assert rows["parameters"] == ["124,439,808", "8,030,261,248"]
    assert rows["in the layers"] == ["85,054,464", f"{32 * 218_112_000:,}"]
    assert not {"window", "sinks", "segments", "score cap", "embedding scale"} & set(rows)


def test_an_encoder_and_a_decoder_by_hand():
    """BERT (2018) and GPT-2 (2019): alike in size, not in what they see nor in where their norms stand."""
    rows = rows_of("bert-base", "gpt2-small")
    assert rows["stacks"] == ["encoder", "decoder"] and rows["sight"] == ["both ways", "causal"]
    assert rows["norm place"] == ["after each sum, after the embedding", "before each sublayer, a final one"]
    assert rows["heads"] == ["12 of 64"] * 2 and rows["MLP size"] == ["3,072"] * 2
    assert rows["segments"] == ["2", None] and rows["context"] == ["512", "1,024"]
    assert rows["activation"] == ["gelu", "gelu (tanh)"] and rows["biases"] == ["q, k, v, o, MLP"] * 2
    assert rows["head"] == ["tied to the token table"] * 2 and rows["head bias"] == ["yes", None]
    assert rows["in the layers"] == ["85,054,464"] * 2
    quiet = gptcli("draw", "bert-base", "gpt2-small", "-q").out.split("\n")[:-1]
    assert quiet == [name for name, (one, other) in rows.items() if one != other]
    assert {"stacks", "sight", "norm place", "segments"} <= set(quiet) and "heads" not in quiet


def test_what_only_some_layers_have_is_counted():
    windows = [{"layers": [0, 2, 3], "attention": {"window": 4}}]
    report = draw_report([made(n_layers=4, variants=windows), made(n_layers=4)])
    [row] = [row for row in report.rows if row.name == "window"]
    assert row.values == ["4 in 3 layers; none in 1 layer", None] and not row.same
    other = draw_report([open_model("transformer-2017-base"), open_model("gpt2-small")])
    told = {row.name: row.values for row in other.rows}
    assert told["stacks"] == ["encoder and decoder", "decoder"] and told["cross attention"] == ["8 heads of 64", None]
    assert told["embedding scale"] == ["× √512 = 22.6274", None] and told["encoder"] == ["6 layers of 512", None]


def test_boxes_that_differ_are_marked_and_sizes_are_not():
    one, other = draw_report([open_model("gpt2-small"), open_model("llama3-8b")]).figures
    assert {"pos_embed", "layers.0.attn", "layers.0.attn_norm", "layers.0.mlp", "final_norm", "lm_head"} <= set(
        one.differing
    )
    assert {"layers.0.attn.q_rot", "layers.0.mlp.gate"} <= set(other.differing)
    assert not {"ids", "embed", "layers.0", "layers.0.attn.z", "logits"} & {*one.differing, *other.differing}
    for pair in (("llama3-8b", "llama3-70b"), ("cats", "cats")):
        assert [figure.differing for figure in draw_report([*map(open_model, pair)]).figures] == [[], []]
    moved = draw_report([made(), made(norm={"kind": "layernorm", "placement": "post", "final": True})]).figures
    assert "layers.0.attn_norm" in moved[0].differing and "layers.0.attn.q" not in moved[0].differing


def test_a_table_at_80_columns_and_the_drawings_before_it_from_120_on():
    names = ("gpt2-small", "llama3-8b")
    narrow, wide = (gptcli("draw", *names, columns=columns, NO_COLOR="1").out for columns in (80, 120))
    assert "┌" not in narrow and max(map(cell_len, narrow.splitlines())) <= 80
    assert max(map(cell_len, wide.splitlines())) <= 120 and wide.count("⊕◄") == 4
    table, below = ([re.sub(r" +", " ", line.strip()) for line in text.splitlines()] for text in (narrow, wide))
    assert "≠ gated MLP no yes" in table and "sight causal causal" in table
    assert {"≠ gated MLP no yes", "sight causal causal"} <= set(below)
    differing = gptcli("draw", *names, "-q").out.count("\n")
    assert sum(line.startswith("≠ ") for line in table) == differing and f"{differing} of 21 rows differ (≠)" in table
    coloured = gptcli("draw", *names, "--color", "always").out
    assert re.search(r"\x1b\[2m *sight", coloured) and not re.search(r"\x1b\[2m *gated", coloured)


@pytest.mark.parametrize("columns", [60, 80, 120, 160])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(
    "pair", [("bert-base", "gpt2-small"), ("transformer-2017-base", "llama3.1-405b"), ("cats", "cats")]
)
def test_two_models_within_the_terminal(pair, columns, encoding):
    report = draw_report([*map(open_model, pair)])
    lines = text_of(report, columns, encoding).splitlines()
    assert max(map(cell_len, lines)) <= columns
    closed = closed_boxes(lines, Signs(encoding == "ascii"))
    assert closed == (sum(map(drawn_boxes, report.figures)) if columns >= 120 else 0)


# SVG


SPACE = "{http://www.w3.org/2000/svg}"
NARROW, BROAD = set("iljI.,:;|!'·()[]/ ft-r"), set("mwMW@%→…")


def measured(element: ET.Element) -> float:
    """The width that a text takes at most: of a monospaced font 0.63 of its size a sign; else by the sign, and a tenth
    more where it is bold.
    """
    said, size = element.text or "", float(element.get("font-size"))
    if "mono" in element.get("font-family"):
        return 0.63 * size * len(said)
    each = (0.42 if c in NARROW else 1.0 if c in BROAD else 0.66 if c.islower() or c.isdigit() else 0.86 for c in said)
    return size * sum(each) * (1.1 if element.get("font-weight") else 1)


def rectangle(element: ET.Element) -> tuple[float, float, float, float]:
    x, y, w, h = (float(element.get(name, 0)) for name in ("x", "y", "width", "height"))
    return x, y, x + w, y + h


def span(element: ET.Element) -> tuple[float, float, float, float]:
    """The rectangle of a text, by its anchor and its size; one that is turned stands upright."""
    x, y, w, size = float(element.get("x")), float(element.get("y")), measured(element), float(element.get("font-size"))
    left = x - {"start": 0, "middle": w / 2, "end": w}[element.get("text-anchor")]
    if element.get("transform"):
        return x - 0.8 * size, y - w / 2, x + 0.2 * size, y + w / 2
    return left, y - 0.8 * size, left + w, y + 0.2 * size


def meet(one: tuple, other: tuple, by: float = 0.5) -> bool:
    return min(one[2], other[2]) - max(one[0], other[0]) > by and min(one[3], other[3]) - max(one[1], other[1]) > by


def within(inner: tuple, outer: tuple, by: float = 0.01) -> bool:
    return all(outer[i] - by <= inner[i] for i in (0, 1)) and all(inner[i] <= outer[i] + by for i in (2, 3))


def check_svg(text: str) -> ET.Element:
    root = ET.fromstring(text)  # noqa: S314 - our own
    assert root.tag == f"{SPACE}svg" and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    kinds: dict[str, list[ET.Element]] = {}
    for element in root.iter():
        kinds.setdefault(element.get("class", ""), []).append(element)
    paper = rectangle(kinds["paper"][0])
    apart = [rectangle(one) for one in (*kinds["box"], *kinds.get("chip", ()))]
    assert not [(a, b) for a, b in combinations(apart, 2) if meet(a, b)]
    sums = [(float(c.get("cx")) - 10, float(c.get("cy")) - 10, float(c.get("cx")) + 10, float(c.get("cy")) + 10)
            for c in kinds.get("sum", ())]  # fmt: skip
    assert not [(a, b) for a in sums for b in apart if meet(a, b)]
    holders = [rectangle(one) for kind in ("frame", "panel") for one in kinds.get(kind, ())]
    assert not [(a, b) for a, b in combinations(holders, 2) if meet(a, b)]
    assert all(within(one, paper) for one in (*apart, *holders, *sums))
    assert all(within(a, b) or not meet(a, b) for a in apart for b in holders)
    for element in kinds["in"]:
        said = span(element)
        x, y = (said[0] + said[2]) / 2, (said[1] + said[3]) / 2
        around = [one for one in (*apart, *holders) if one[0] <= x <= one[2] and one[1] <= y <= one[3]]
        smallest = min(around, key=lambda one: (one[2] - one[0]) * (one[3] - one[1]))
        assert within(said, smallest), element.text
    texts = [(element.text, span(element)) for element in root.iter(f"{SPACE}text")]
    assert not [(a, b) for (a, one), (b, other) in combinations(texts, 2) if meet(one, other)]
    outside = [span(e) for kind in ("rail", "heading", "legend", "beside") for e in kinds.get(kind, ())]
    assert not [(a, b) for a in outside for b in apart if meet(a, b)]
    assert all(within(one, paper) for one in outside)
    boxes = [rectangle(one) for one in kinds["box"]]
    for wire in kinds.get("wire", ()):
        for (x0, y0), (x1, y1) in segments(wire.get("d")):
            line = (min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1))
            for box in boxes:
                shrunken = (box[0] + 0.5, box[1] + 0.5, box[2] - 0.5, box[3] - 0.5)
                crosses = (
                    line[0] < shrunken[2] and line[2] > shrunken[0] and line[1] < shrunken[3] and line[3] > shrunken[1]
                )
                assert not crosses, (wire.get("d"), box)
    return root


def segments(d: str) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """A path's pieces, from point to point; of a rounded corner, through the corner itself."""
    pairs = [tuple(map(float, pair)) for pair in re.findall(r"(-?[\d.e+-]+) (-?[\d.e+-]+)", d)]
    found = list(pairwise(pairs))
    assert all(x0 == x1 or y0 == y1 for (x0, y0), (x1, y1) in found), d  # upright or level
    return found


def check_svg_of(model: Model, full: bool = False) -> None:
    report = draw_report([model], full)
    root = check_svg(to_svg(report))
    said = Counter(element.text for element in root.iter(f"{SPACE}text"))
    boxes = all_boxes(report.figures[0].stacks)
    adds = sum(box.kind == "add" for box in boxes)
    assert len([e for e in root.iter() if e.get("class") == "sum"]) == adds
    assert len([e for e in root.iter() if e.get("class") == "wire" and e.get("stroke") == "#e8590c"]) == adds
    assert len([e for e in root.iter() if e.get("class") == "frame"]) == sum(box.kind == "layer" for box in boxes)
    shown = " ".join(filter(None, said))
    for leaf in leaves(report.figures[0].stacks):
        words = leaf.title.split() if leaf.kind != "add" else []
        assert all(word in shown for word in words), leaf.title


@pytest.mark.parametrize("full", [False, True])
@every_model
def test_an_svg_is_well_formed_and_nothing_lies_on_anything(name, full):
    check_svg_of(model_of(name), full)


@pytest.mark.parametrize("pair", [("gpt2-small", "llama3-8b"), ("bert-base", "transformer-2017-base")])
def test_two_models_side_by_side_as_svg(pair):
    report = draw_report([*map(open_model, pair)])
    root = check_svg(to_svg(report))
    headings = [element.text for element in root.iter(f"{SPACE}text") if element.get("font-size") == "20"]
    assert headings == list(pair)
    marked = [e.text for e in root.iter(f"{SPACE}text") if (e.text or "").startswith("≠ ")]
    assert len(marked) == sum(len(figure.differing) for figure in report.figures)


def test_an_svg_tells_the_shape_on_every_arrow():
    """GPT-2 small: ids, five arrows of the stream before and after the layers, four a sublayer, those of the panels."""
    root = ET.fromstring(to_svg(draw_report([open_model("gpt2-small")])))  # noqa: S314 - our own
    chips = Counter(e.text for e in root.iter(f"{SPACE}text") if e.get("text-anchor") == "middle")
    assert chips["[B,T]"] == chips["[B,T,V] = [B,T,50257]"] == 1
    # embed → positions → layers; norm, sublayer and sum of each of two; layers → final norm → head
    assert chips["[B,T,C] = [B,T,768]"] == 2 + 2 * 3 + 2
    assert chips["[B,12,T,64]"] == 4 and chips["[B,12,T,T]"] == 2 and chips["[B,T,3072]"] == 2
    assert chips["[B,T,768]"] == 2 + 4  # beside both residual paths; into and out of both panels


NAMES = ["<b>&\"'</b>", "a\x1b[31mb\x00\x07c", "name]] --> x; end", "#quot; `code` {x} |y|", "名前 模型", "x" * 300]


@pytest.mark.parametrize("name", NAMES)
def test_names_can_break_no_file_and_no_terminal(name):
    report = draw_report([Model(spec=replace(made().spec, name=name), source="made"), made()])
    root = check_svg(to_svg(report))
    shown = "".join(filter(None, (element.text for element in root.iter())))
    assert name in shown or not name.isprintable()
    check_mermaid(report)
    for columns in (60, 80, 130):
        text = text_of(report, columns)
        assert text.replace("\n", "").isprintable()
        assert max(map(cell_len, text.splitlines())) <= max(columns, 112) or name.startswith("xxx")


# Mermaid


NODE = re.compile(r'^(\w+)(\(\["|\(\("|\[")(.*)("\]\)|"\)\)|"\]):::(\w+)$')
SUBGRAPH = re.compile(r'^subgraph (\w+)\["(.*)"\]$')
EDGE = re.compile(r'^(\w+) (-->|-\.->|==>|-\.-)(?:\|"(.*)"\|)? (\w+)$')


def plain(label: str) -> str:
    """A label as it is shown."""
    assert not re.search(r'["`{}|;\\]', re.sub(r"#\d+;", "", label)), label
    assert not re.search(r"<(?!br/>)|(?<!<br/)>", label), label
    return re.sub(r"#(\d+);", lambda code: chr(int(code[1])), label.replace("<br/>", "\n"))


def check_mermaid(report: DrawReport) -> None:
    lines = to_mermaid(report).splitlines()
    title = next(i for i, line in enumerate(lines) if line == "---" and i)
    assert lines[0] == "---" and title == 2 and json.loads(lines[1].removeprefix("title: "))
    assert lines[3] == "flowchart TB"
    nodes, holders, edges, depth, classes, used = set(), set(), [], 0, set(), set()
    for line in (line.strip() for line in lines[4:]):
        if found := SUBGRAPH.match(line):
            depth += 1
            assert found[1] not in holders | nodes and plain(found[2])
            holders.add(found[1])
        elif line == "end":
            depth -= 1
            assert depth >= 0
        elif found := NODE.match(line):
            assert found[1] not in holders | nodes and plain(found[3])
            assert {'(["': '"])', '(("': '"))', '["': '"]'}[found[2]] == found[4]
            nodes.add(found[1])
            used.add(found[5])
        elif found := EDGE.match(line):
            edges.append((found[1], found[2], plain(found[3] or ""), found[4]))
        elif line.startswith("classDef "):
            classes.add(line.split()[1])
        elif line.startswith("class "):
            _, names, style = line.split(" ")
            assert set(names.split(",")) <= holders | nodes
            used.add(style)
        elif line.startswith("linkStyle "):
            which = [int(number) for number in line.split()[1].split(",")]
            assert {edges[number][1] for number in which} in ({"-.->"}, {"==>"})
        else:
            assert line == "direction TB", line
    assert depth == 0 and used <= classes
    assert {end for one, _, _, other in edges for end in (one, other)} <= nodes
    wanted: list[Edge] = [edge for figure in report.figures for edge in figure.edges]
    assert len(edges) == len(wanted)
    for (_, arrow, label, _), edge in zip(edges, wanted):
        assert (arrow == "-.->") == (edge.kind in ("residual", "bias")) and (arrow == "==>") == (edge.kind == "memory")
        sizes = f"[{','.join(map(str, edge.carries.shape))}]" if edge.carries else "tied"
        assert label == sizes or label.endswith(f" = {sizes}")
    kept = [
        box for figure in report.figures for box in all_boxes(figure.stacks) if box.kind not in ("split", "residual")
    ]
    assert len(nodes) == sum(not box.branches for box in kept)


@every_model
def test_a_flowchart_is_balanced_and_every_end_defined(name):
    check_mermaid(draw_report([model_of(name)]))
    check_mermaid(draw_report([model_of(name), model_of("cats")]))


def test_a_label_is_quoted():
    assert quoted(['a "b" <c>', "d#e"]) == '"a #34;b#34; #60;c#62;<br/>d#35;e"'


# Files, names, what is loaded


def test_files_by_their_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = gptcli("draw", "cats", "-o", "x.svg", "-o", "x.mmd", "-o", "x.json")
    assert (ran.status, ran.err) == (0, "") and ran.out == gptcli("draw", "cats").out
    report = draw_report([open_model("cats")])
    assert (tmp_path / "x.svg").read_text(encoding="utf-8") == to_svg(report)
    assert (tmp_path / "x.mmd").read_text(encoding="utf-8") == to_mermaid(report)
    assert json.loads((tmp_path / "x.json").read_text()) == gptcli("draw", "cats", "--json").json
    for words in (["-o", "x.svg"], ["-o", "x.png"], ["-o", "none/x.svg"]):
        refused = gptcli("draw", "cats", *words)
        assert refused.status == 2 and refused.out == "" and refused.err.count("\n") == 1


def test_json_is_the_whole_tree():
    found = gptcli("draw", "gpt2-small", "--json").json
    assert list(found)[:2] == ["schema", "status"] and found["schema"] == "gptcli.draw/1" and found["rows"] == []
    [figure] = found["figures"]
    assert figure["model"]["parameters"] == 124_439_808 and figure["letters"]["C"] == 768
    [stack] = figure["stacks"]
    [inside] = stack["branches"]
    assert [box["title"] for box in inside][:3] == ["ids", "token table", "+ position table"]
    edge = next(edge for edge in figure["edges"] if edge["kind"] == "residual")
    assert edge["carries"] == {"path": "embed", "axes": ["B", "T", "C"], "shape": ["B", "T", 768]}


def name_of(*words, **env) -> list[str]:
    return [figure["model"]["name"] for figure in gptcli("draw", *words, "--json", **env).json["figures"]]


def test_naming_a_model(tmp_path, monkeypatch):
    assert name_of() == ["cats"] and name_of("gpt2-small") == name_of("gpt2-small.yaml") == ["gpt2-small"]
    assert name_of("-m", "bert-base") == name_of("-c", "bert-base") == ["bert-base"]
    assert name_of(GPTCLI_MODEL="gemma-2b") == ["gemma-2b"] and name_of("cats", GPTCLI_MODEL="gemma-2b") == ["cats"]
    assert name_of("tiny-gpt2", "cats") == ["tiny-gpt2", "cats"]
    (tmp_path / "mine.yaml").write_text(json.dumps(RAW))
    monkeypatch.chdir(tmp_path)
    assert name_of("mine.yaml") == ["toy"]
    for words in (["nosuch"], ["cats", "nosuch"], ["cats", "-m", "gemma-2b"], ["cats", ""], ["a", "b", "c"]):
        ran = gptcli("draw", *words, "--offline")
        assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), words


def test_of_a_name_on_the_hub_the_config_is_enough(tmp_path):
    """A cache that holds the config.json of org/tiny, and no weights."""
    at, commit = tmp_path / "hub" / "models--org--tiny", "0123456789abcdef0123456789abcdef01234567"
    (at / "snapshots" / commit).mkdir(parents=True)
    (at / "refs").mkdir()
    (at / "refs" / "main").write_text(commit)
    shutil.copy(shipped.samples()["tiny-gpt2"] / "config.json", at / "snapshots" / commit)
    ran = process("draw", "org/tiny", "tiny-gpt2", "--offline", "--json", HF_HOME=str(tmp_path))
    one, other = ran.json["figures"]
    assert ran.status == 0 and one["model"]["source"] == "Hub, main at 0123456"
    assert (one["stacks"], one["edges"], one["differing"]) == (other["stacks"], other["edges"], [])


@pytest.mark.parametrize("words", [["llama3.1-405b"], ["gpt2-small", "llama3.1-405b"]], ids=" ".join)
def test_drawing_loads_nothing_heavy(words, tmp_path):
    files = [word for suffix in ("svg", "mmd", "json") for word in ("-o", str(tmp_path / f"x.{suffix}"))]
    code = (
        "import sys\n"
        "from gptcli.cli.main import main\n"
        f"sys.argv = ['gptcli', 'draw', *{words!r}, *{files!r}]\n"
        "status = main()\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)), status, file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout and ran.stderr == "[] 0\n"
    assert len(list(tmp_path.iterdir())) == 3


# Any architecture


def option(*several):
    return st.sampled_from(several)


@st.composite
def architectures(draw_one) -> Spec:
    """Small ones, of every part that there is, in any combination that can be."""
    norms = [{"kind": "none"}] + [
        {"kind": kind, "placement": place, "embedding": embedding} | more
        for kind in ("layernorm", "rmsnorm")
        for place in ("pre", "post", "output", "sandwich")
        for embedding in (False, True)
        for more in ({}, {"weight": False})
    ]
    relative = {"kind": "relative", "buckets": 8, "max_distance": 9}
    attention = {
        "n_heads": 4,
        "head_dim": draw_one(option(2, 6)),
        "n_kv_heads": draw_one(option(1, 2, 4)),
        "bias": draw_one(st.booleans()),
        "causal": draw_one(st.booleans()),
        "qk_norm": draw_one(option("none", "none", "head", "each", "whole")),
        "qk_norm_place": draw_one(option("before", "after")),
        "normed": draw_one(option(True, True, False)),
        "window": draw_one(option(None, 3)),
        "softcap": draw_one(option(None, None, 2.5)),
        "scale": draw_one(option(None, 1.0, 0.3)),
        "sinks": draw_one(option(False, False, True)),
    }
    mlps = ["none", {"kind": "dense", "size": 5, "activation": "relu_squared", "bias": True}, GATED, EXPERTS,
            EXPERTS | {"shared_size": 4, "limit": 3.0, "bias": True, "normalized": False}]  # fmt: skip
    position = draw_one(option("none", "learned", {"kind": "sinusoidal"}, relative, ROPE, ROPE | {"rotary_dim": 2}))
    raw = RAW | {
        "n_layers": draw_one(st.integers(1, 7)),
        "embed_size": draw_one(option(None, 3)),
        "embed_scale": draw_one(option(1.0, 8**0.5, 3.0)),
        "n_segments": draw_one(option(None, 2)),
        "position": position,
        "norm": draw_one(option(*norms)),
        "attention": attention,
        "mlp": draw_one(option(*mlps)),
        "residual": draw_one(option("sequential", "parallel", "parallel_shared")),
        "residual_scale": draw_one(option(1.0, 0.5)),
        "lm_head": draw_one(
            option(None, {}, {"tied": True, "bias": True, "softcap": 3.0}, {"transform": {"activation": "tanh"}})
        ),
    }
    if draw_one(st.booleans()):
        layers = draw_one(st.sets(st.integers(0, raw["n_layers"] - 1), min_size=1))
        raw["variants"] = [{"layers": sorted(layers), "mlp": draw_one(option(*mlps)), "attention": {"window": 5}}]
    if draw_one(st.booleans()):
        raw["encoder"] = {"n_layers": draw_one(st.integers(1, 3))}
        raw["encoder_embed"] = draw_one(option("shared", "own"))
        raw["cross"] = {"window": None, "causal": False, "normed": True}
    return read_spec(raw)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_architecture_is_drawn_whole(data):
    try:
        spec = data.draw(architectures())
    except SpecError:
        return  # a combination that can't be
    model = Model(spec=spec, source="drawn")
    check_parameters(model, full=False)
    check_graph(figure_of(model))
    check_shapes(spec)
    for columns, encoding in ((60, "utf-8"), (80, "ascii"), (80, "utf-8"), (130, "utf-8")):
        check_terminal(model, columns, encoding)
    check_svg_of(model)
    check_mermaid(draw_report([model]))


def test_an_encoder_that_ends_beside_the_cross_attention_leads_straight_into_it():
    """In the worked example both stand on one row; the line must not turn there."""
    shown = gptcli("draw", "translate", columns=80, NO_COLOR="1").out
    [line] = [line for line in shown.splitlines() if "►" in line]
    assert re.search(r"╰─+┼►", line), line
