"""`trace --map`: what is drawn is the pattern, pooled as torch pools it, in every number of colours and on any screen.

The right weights are the documents' (golden.json), the ones that the recorder keeps of the same run, or arithmetic by
hand. What a terminal shows is read back from its own output, sign by sign and colour by colour.
"""

import json
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from safetensors.torch import save_file

import gptcli
from gptcli.errors import GptcliError
from gptcli.model import attention as engine
from gptcli.model.init import random_weights
from gptcli.model.patterns import pooled
from gptcli.model.weights import Weights
from gptcli.report.maps import Axis, Scale, axes_of, map_reports
from gptcli.report.patterns import Patterns
from gptcli.run import Run
from gptcli.shipped import configs
from gptcli.source import Model, open_model
from gptcli.tokens import visible
from tests.command import gptcli as run
from tests.toys import shrunk

CATS = json.loads((Path(__file__).parent / "data/golden.json").read_text(encoding="utf-8"))["cats"]
SENTENCE = "The cat sat on the mat because it was tired"
CPU = torch.device("cpu")
SIGNS = ".:-=+*#%@"

TOY = """\
vocab_size: 32
context_length: CONTEXT
hidden_size: 16
n_layers: 2
position: {kind: rope}
norm: {kind: rmsnorm}
attention: {n_heads: 8, n_kv_heads: 2, head_dim: 4MORE}
mlp: {kind: dense, size: 8, activation: relu}
lm_head: {tied: true}
"""
TWO = """\
vocab_size: 3
context_length: 8
hidden_size: 2
n_layers: 1
position: {kind: none}
norm: {kind: none}
attention: {n_heads: 1}
mlp: {kind: none}
lm_head: {tied: true}
"""
SEQ2SEQ = """\
vocab_size: 24
context_length: 64
hidden_size: 8
n_layers: 2
position: {kind: sinusoidal}
norm: {kind: layernorm, placement: post, final: false}
attention: {n_heads: 2}
mlp: {kind: dense, size: 12, activation: relu}
encoder: {n_layers: 1}
lm_head: {tied: true}
"""


def ids_of(length: int, vocabulary: int = 32) -> str:
    drawn = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(length))
    return ",".join(map(str, drawn.tolist()))


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A config in the working directory: eight heads on two, with what is added to its attention."""
    monkeypatch.chdir(tmp_path)

    def made(more: str = "", context: int = 2048) -> Path:
        path = Path("toy.yaml")
        path.write_text(TOY.replace("MORE", more).replace("CONTEXT", str(context)))
        return path

    return made


def mapped(*words: object) -> dict:
    ran = run("trace", "--map", *words, "--json")
    assert ran.status == 0, ran.err
    assert ran.json["schema"] == "gptcli.maps/1" and ran.json["status"] == "ok"
    assert all(check["ok"] for check in ran.json["proof"]) and len(ran.json["proof"]) == 3
    return ran.json


def pattern_of(path: object, ids: str, layer: int, head: int, **named: str) -> torch.Tensor:
    """[T, S], as the recorder keeps it of a run of its own."""
    name = named.pop("name", "layers.#.attn.pattern").replace("#", str(layer))
    opened = gptcli.open(config=str(path))
    source = {"source": list(map(int, named["source"].split(",")))} if named else {}
    return opened.activations(list(map(int, ids.split(","))), name, **source)[name][0, head]


# The weights


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("head", [0, 1])
def test_the_map_of_the_worked_example_is_the_document_s(layer, head):
    [one] = mapped("--layer", layer + 1, "--head", head)["maps"]
    expected = CATS["layers"][layer]["pattern"][head]
    for i, (row, right) in enumerate(zip(one["cells"], expected, strict=True)):
        assert row[: i + 1] == pytest.approx(right[: i + 1], abs=1e-6) and row[i + 1 :] == [None] * (2 - i)
    assert torch.allclose(torch.tensor(one["weights"]), torch.tensor(expected), atol=1e-6)


def test_a_person_reads_the_document_s_weights():
    lines = run("trace", "--map", columns=80, NO_COLOR="1").out.splitlines()
    assert "Layer 1 of 2 (layers.0) · Head 0 of 2 = L0H0" in lines
    assert re.findall(r"0\.\d{4}", next(line for line in lines if line.startswith("2 on"))) == [
        "0.1571",
        "0.5376",
        "0.3053",
    ]
    assert run("trace", "--map", "-q").out.splitlines()[0] == "1.0\t0.0\t0.0"
    assert run("trace", "--at", "L0H0", "--map").out == run("trace", "--map").out


@pytest.mark.parametrize("size", [(7, 7), (12, 5), (5, 12), (1, 1), (64, 64)])
@pytest.mark.parametrize("cell", [(1, 1), (2, 2), (3, 2), (5, 4), (100, 100)])
@pytest.mark.parametrize("causal", [True, False])
def test_pooling_is_torch_s(size, cell, causal):
    x = torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = torch.ones(size, dtype=torch.bool).tril() if causal else torch.ones(size, dtype=torch.bool)
    x, kernel = x * seen, tuple(min(pair) for pair in zip(cell, size))
    options = {"kernel_size": kernel, "stride": kernel, "ceil_mode": True}
    largest, any_seen = pooled(x, seen, *cell, "max")
    mean, same = pooled(x, seen, *cell, "mean")
    assert torch.equal(any_seen, F.max_pool2d(seen.double()[None], **options)[0] > 0) and torch.equal(any_seen, same)
    assert torch.equal(largest, F.max_pool2d(x[None], **options)[0])
    share = F.avg_pool2d(seen.double()[None], **options)[0]
    right = F.avg_pool2d(x[None], **options)[0] / share.clamp(min=1e-30)
    assert torch.allclose(mean, right.masked_fill(share == 0, 0), rtol=1e-12)


@pytest.mark.parametrize("how", ["max", "mean"])
def test_cells_are_the_pattern_pooled(how, toy):
    ids = ids_of(50)
    report = mapped("-c", toy(), "--ids", ids, "--layer", 2, "--head", 5, "--pool", f"6,{how}")
    assert (report["rows"]["pool"], report["columns"]["pool"], report["pooling"]) == (6, 6, how)
    [one] = report["maps"]
    assert (one["layer_index"], one["head"], one["kv_head"], one["n_kv_heads"]) == (1, 5, 1, 2)
    pattern = pattern_of(toy(), ids, 1, 5).double()
    for i, row in enumerate(one["cells"]):
        for j, cell in enumerate(row):
            pairs = [
                float(pattern[query, key])
                for query in range(6 * i, min(6 * i + 6, 50))
                for key in range(6 * j, min(6 * j + 6, 50))
                if key <= query
            ]
            right = None if not pairs else max(pairs) if how == "max" else math.fsum(pairs) / len(pairs)
            assert cell == (None if right is None else pytest.approx(right, rel=1e-6))
    assert len(one["cells"]) == len(one["cells"][0]) == 9


def test_a_window_of_rows_and_columns_is_cut_from_the_whole(toy):
    ids = ids_of(40)
    words = ["-c", toy(), "--ids", ids, "--head", 3]
    pattern = pattern_of(toy(), ids, 0, 3)
    report = mapped(*words, "--rows", "10:30", "--cols", "-35:20")
    [one], rows, columns = report["maps"], report["rows"], report["columns"]
    assert (rows["start"], rows["stop"], columns["start"], columns["stop"]) == (10, 30, 5, 20)
    assert torch.equal(torch.tensor(one["weights"]), pattern[10:30, 5:20])
    assert one["share"] == pytest.approx(float(pattern[10:30, 5:20].double().sum(-1).mean()), rel=1e-9)
    assert one["cells"][0] == [*pattern[10, 5:11].tolist(), *[None] * 9]
    [one] = mapped(*words, "--drop-first")["maps"]
    assert torch.equal(torch.tensor(one["weights"]), pattern[:, 1:])
    assert one["cells"][0] == [None] * 39
    assert one["share"] == pytest.approx(1 - float(pattern[:, 0].double().mean()), rel=1e-6)
    said = run("trace", "--map", *words, "--drop-first").out
    assert f"key 0 is left out: these hold {one['share']:.4f} of the weight" in said


def test_windows_sinks_and_both_ways(toy):
    ids = ids_of(12)
    path = toy(", window: 4, sinks: true")
    [one] = mapped("-c", path, "--ids", ids, "--head", 2)["maps"]
    pattern = pattern_of(path, ids, 0, 2)
    seen = [[0 <= query - key < 4 for key in range(12)] for query in range(12)]
    right = [[x if s else None for x, s in zip(*row)] for row in zip(pattern.tolist(), seen)]
    assert one["cells"] == right and one["window"] == 4
    sink = pattern_of(path, ids, 0, 2, name="layers.#.attn.sink")
    assert one["sink"] == sink.tolist() and 0 < one["share"] == pytest.approx(1 - float(sink.double().mean()), abs=1e-6)
    shown = run("trace", "-c", path, "--ids", ids, "--head", 2, "--map", "--rows", "3:6", "--cols", ":8").out
    assert "a window of 4 keys · the last column is the sink's weight" in shown
    line = next(line for line in shown.splitlines() if line.startswith("3 "))
    assert re.findall(r"[01]\.\d{4}", line) == [f"{x:.4f}" for x in [*pattern[3, :4].tolist(), one["sink"][3]]]
    path = toy(", causal: false")
    [one] = mapped("-c", path, "--ids", ids)["maps"]
    assert one["cells"] == pattern_of(path, ids, 0, 0).tolist() and one["sink"] is None
    assert "blank is hidden" not in run("trace", "-c", path, "--ids", ids, "--map").out
    path = toy(", causal: false, window: 3")
    [one] = mapped("-c", path, "--ids", ids)["maps"]
    hidden = [[x is None for x in row] for row in one["cells"]]
    assert hidden == [[abs(i - j) >= 3 for j in range(12)] for i in range(12)]
    assert "a window of 3 keys to each side" in run("trace", "-c", path, "--ids", ids, "--map").out


def test_the_sink_is_pooled_by_rows(toy):
    ids = ids_of(20)
    path = toy(", sinks: true")
    sink = pattern_of(path, ids, 0, 0, name="layers.#.attn.sink").tolist()
    [one] = mapped("-c", path, "--ids", ids, "--pool", "8")["maps"]
    assert one["sink"] == [max(sink[:8]), max(sink[8:16]), max(sink[16:])]
    [one] = mapped("-c", path, "--ids", ids, "--pool", "8,mean")["maps"]
    right = [math.fsum(part) / len(part) for part in (sink[:8], sink[8:16], sink[16:])]
    assert one["sink"] == pytest.approx(right, rel=1e-6)


@pytest.mark.parametrize("attention, name", [("cross", "layers.1.cross"), ("encoder", "encoder.layers.0.attn")])
def test_an_encoder_and_what_looks_across_to_it(attention, name, tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(SEQ2SEQ)
    ids, source = ids_of(5, 24), ids_of(9, 24)
    words = ["-c", path, "--ids", ids, "--source-ids", source, "--attention", attention]
    report = mapped(*words, "--layer", "-1", "--head", 1)
    pattern = pattern_of(path, ids, 0, 1, name=f"{name}.pattern", source=source)
    assert report["maps"][0]["cells"] == pattern.tolist()
    assert pattern.shape == ((5, 9) if attention == "cross" else (9, 9))
    shown = run("trace", "--map", *words, columns=80).out
    assert {"cross": "Cross attention · ", "encoder": "Encoder · "}[attention] in shown
    assert f"queries 0–{len(pattern) - 1}" in shown and "keys 0–8" in shown


def test_the_grid_of_a_layer_and_of_several(toy):
    words = ["-c", toy(), "--ids", ids_of(10)]
    report = mapped(*words, "--head", "all", "--layer", "all")
    named = [(one["layer_index"], one["head"], one["kv_head"]) for one in report["maps"]]
    assert named == [(layer, head, head // 4) for layer in range(2) for head in range(8)]
    for one in report["maps"]:
        pattern = pattern_of(toy(), ids_of(10), one["layer_index"], one["head"])
        assert torch.equal(torch.tensor(one["weights"]), pattern)
    highest = max(x for one in report["maps"] for row in one["cells"] for x in row if x is not None)
    assert report["scale"] == {"kind": "linear", "low": 0.0, "high": highest}
    lines = run("trace", "--map", *words, "--head", "all", "--layer", "all", columns=80, NO_COLOR="1").out.splitlines()
    titles = [re.findall(r"H\d → kv \d", line) for line in lines if "→" in line]
    assert [one for row in titles for one in row] == [f"H{i} → kv {i // 4}" for i in range(8)] * 2
    assert [line for line in lines if "8 heads" in line][1] == "Layer 2 of 2 (layers.1) · 8 heads"
    assert len({tuple(row) for row in titles}) == len(titles) // 2 and len(titles[0]) > 1
    wide = run("trace", "--map", *words, "--head", "all", columns=200).out
    assert max(len(re.findall(r"H\d →", line)) for line in wide.splitlines()) > len(titles[0])
    one_head = run("trace", "--map", *words, "--head", "3", "--layer", "all").out
    assert "L0H3 → kv 0" in one_head and "L1H3 → kv 0" in one_head and "Head 3 of 2 layers" in one_head


def test_a_head_of_its_own_names_no_key_value_head():
    assert "kv" not in run("trace", "--map", "--head", "all").out + run("trace", "--map").out


# Watching changes nothing, and keeps nothing that nobody asked for


class Kept(Run):
    """A run that keeps what its forward pass gave."""

    def forward(self, rows, probe=None, **options):
        self.came = super().forward(rows, **options) if probe is None else super().forward(rows, probe, **options)
        return self.came


@pytest.mark.parametrize("name", sorted(configs()))
def test_watching_changes_no_bit(name):
    config = open_model(config=name)
    model = Model(spec=shrunk(config.spec), source="toy")
    ids = [[index % model.spec.vocab_size for index in (2, 0, 1, 2, 1, 0)][: model.spec.context_length]]
    made = Kept(model, ids, source=None if model.spec.encoder is None else [[1, 0, 2, 2]])
    made.weights = Weights.of(model.layout, random_weights(model.spec, model.layout, 3, torch.float32, CPU))
    logits, final = Run.forward(made, "all"), Run.forward(made, "all", head=False)
    for attending in ("self",) if model.spec.encoder is None else ("self", "cross", "encoder"):
        patterns = Patterns(made, attending)
        rows, columns = axes_of(patterns, None, None, False)
        layers = list(range(patterns.stack.n_layers))
        heads = list(range(patterns.spec(0).attention.n_heads))
        [report] = map_reports(patterns, layers, heads, [(rows, columns)])
        assert torch.equal(made.came, final)
        assert report.status == "ok" and len(report.maps) == len(layers) * len(heads)
    assert torch.equal(Run.forward(made, "all"), logits)


@pytest.mark.parametrize(
    "words, shapes, times",
    [
        (["--head", "3"], [(1, 1, 512, 1024), (1, 1, 512, 512)], 1),
        (["--head", "all"], [(1, 1, 512, 1024), (1, 1, 512, 512)], 8),
        (["--head", "3", "--rows", "1000:1016"], [(1, 1, 16, 1016)], 1),
        (["--head", "all", "--layer", "all"], [(1, 1, 512, 1024), (1, 1, 512, 512)], 16),
    ],
)
def test_only_the_heads_and_queries_that_are_asked_for_are_computed_one_at_a_time(
    words, shapes, times, toy, monkeypatch
):
    made, weigh = [], engine.weigh

    def noted(*given, **named):
        found = weigh(*given, **named)
        made.append(tuple(found[1].shape))
        return found

    monkeypatch.setattr(engine, "weigh", noted)
    ran = run("trace", "-c", toy(), "--ids", ids_of(1024), "--map", *words, columns=80)
    assert ran.status == 0, ran.err
    assert made == shapes * times  # in blocks of 512 queries, the widest first


def test_nothing_is_kept_of_the_weights(toy, monkeypatch):
    from gptcli.report import patterns as module

    recorders = []

    class Noted(module.Recorder):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            recorders.append(self)

    monkeypatch.setattr(module, "Recorder", Noted)
    run("trace", "-c", toy(), "--ids", ids_of(64), "--map", "--head", "all")
    kept = next(one.kept for one in recorders if one.kept)
    assert set(kept.values()) == {None} and "layers.0.attn.pattern" in kept


def test_a_long_text_is_refused_where_memory_does_not_hold_it(toy):
    words = ["trace", "--map", "-c", toy(), "--ids", ids_of(512)]
    ran = run(*words, "--max-memory", "1MiB")
    held = re.search(r"a map of 512 queries and 512 keys would hold ([\d.]+) MiB", ran.err)
    assert ran.status == 2 and float(held[1]) >= 4 * 4 * 512**2 / 2**20  # scores, masked, weights and their products
    assert run(*words, *re.search(r"--rows \d+:\d+", ran.err)[0].split(), "--max-memory", "1MiB").status == 0


def test_2048_tokens_fit_a_terminal(toy):
    ran = run("trace", "-c", toy(), "--ids", ids_of(2048), "--head", "5", "--map", columns=80, COLORTERM="truecolor")
    assert ran.status == 0, ran.err
    said = re.search(
        r"queries 0–2047 in (\d+) rows of (\d+) · columns: keys 0–2047 in \1 columns of \2", plain(ran.out)
    )
    cells, pool = int(said[1]), int(said[2])
    assert (cells - 1) * pool < 2048 <= cells * pool and 60 <= cells <= 72  # of 80 columns, labels take the rest


# On the screen

SHARP = ", scale: 400.0"  # random weights of this size look at some keys much more than at others
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", ESCAPE.sub("", text))


def lightness(style) -> dict[str, float]:
    """How light the two halves of a sign are: by its colours as the terminal is told them."""
    found = {}
    for half, color in (("ink", style.color), ("ground", style.bgcolor)):
        if color is None or color.is_default:
            continue
        if color.number is not None and color.number < 16:  # the names of sixteen, from dark to light
            found[half] = {4: 0, 12: 1, 6: 2, 14: 3, 15: 4}[color.number]
        else:
            red, green, blue = color.get_truecolor()
            found[half] = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return found


def read_back(out: str, label: int, width: int) -> list[list[float | None]]:
    """A map's cells as lightness, from the blocks and half blocks that a terminal got; None where nothing stands."""
    cells = []
    for line in out.splitlines():
        text = Text.from_ansi(line)
        if "weight" in text.plain or not set(text.plain) & set("▀▄█"):
            continue
        styles = [lightness(text.get_style_at_offset(CONSOLE, i)) for i in range(len(text.plain))]
        upper, lower = [], []
        for sign, at in list(zip(text.plain, styles))[label::width]:
            pair = {
                "▀": (at.get("ink"), at.get("ground")),
                "▄": (None, at.get("ink")),
                "█": (at.get("ink"),) * 2,
                " ": (None, None),
            }[sign]
            upper.append(pair[0])
            lower.append(pair[1])
        cells += [upper] if "█" in text.plain else [upper, lower]
    return cells


CONSOLE = Console(force_terminal=True, color_system="truecolor")
TERMINALS = {
    "truecolor": {"COLORTERM": "truecolor"},
    "256": {"COLORTERM": "", "TERM": "xterm-256color"},
    "16": {"COLORTERM": "", "TERM": "xterm"},
}


@pytest.mark.parametrize("length, width", [(20, 2), (44, 1)])
@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("terminal", TERMINALS)
def test_the_lighter_the_heavier(length, width, scale, terminal, toy):
    """Read back from the screen: the same cells are blank, and of any two the lighter has no smaller weight."""
    words = ["-c", toy(SHARP), "--ids", ids_of(length), "--head", "1", "--scale", scale]
    [one] = mapped(*words)["maps"]
    shown = run("trace", "--map", *words, columns=80, **TERMINALS[terminal]).out
    first = next(line for line in shown.splitlines() if set(line) & set("▀█") and "weight" not in line)
    label = next(i for i, sign in enumerate(Text.from_ansi(first).plain) if sign in "▀█")
    light = read_back(shown, label, width)
    cells = one["weights"]
    pairs = []
    for i, row in enumerate(cells):
        for j, weight in enumerate(row):
            there = light[i][j] if j < len(light[i]) else None
            assert (there is None) == (j > i)
            pairs += [] if there is None else [(weight, there)]
    pairs.sort()
    shades = [shade for _, shade in pairs]
    assert shades == sorted(shades) and len(set(shades)) >= (3 if terminal == "16" else 6)


@pytest.mark.parametrize("length, columns", [(20, 80), (30, 80), (60, 200)])
def test_signs_stand_for_weights_where_there_is_no_colour(length, columns, toy):
    words = ["-c", toy(SHARP), "--ids", ids_of(length), "--head", "1", "--scale", "log"]
    [one] = mapped(*words)["maps"]
    out = run("trace", "--map", *words, columns=columns, NO_COLOR="1").out
    lines = [line for line in out.splitlines() if re.match(r" *\d+ \S+ +[.:\-=+*#%@]", line)]
    assert "\x1b" not in out and len(lines) == length
    start = lines[0].index("@@")
    pairs = []
    for i, line in enumerate(lines):
        signs = line[start:]
        assert len(signs) == 2 * (i + 1) and signs[::2] == signs[1::2]
        pairs += [(weight, SIGNS.index(sign)) for weight, sign in zip(one["weights"][i], signs[::2])]
    order = [sign for _, sign in sorted(pairs)]
    assert order == sorted(order) and len(set(order)) > 4


@pytest.mark.parametrize("length", [1, 2, 3, 9, 12, 13, 20, 31, 40, 41, 55, 56, 64, 100, 129, 500])
@pytest.mark.parametrize("head", ["0", "all"])
@pytest.mark.parametrize("columns", [60, 80, 133])
@pytest.mark.parametrize("color", [{"NO_COLOR": "1"}, {"COLORTERM": "truecolor"}])
def test_no_line_is_wider_than_the_terminal(length, head, columns, color, toy):
    words = ["trace", "-c", toy(", sinks: true" if length % 2 else ""), "--ids", ids_of(length), "--head", head]
    for encoding in ("utf-8", "ascii"):
        out = run(*words, "--map", columns=columns, encoding=encoding, **color).out
        lines = [Text.from_ansi(line).plain for line in out.splitlines()]
        assert lines and max(map(cell_len, lines)) <= columns, max(lines, key=cell_len)
        assert encoding == "utf-8" or "".join(lines).isascii()


WORDS = ["猫", "🙂", "sat", "internationalisation", "$x$", "[/INST]", "e\u0301", "\x1b[31m", "座った", "ﬁ"]
STRANGE = """\
vocab_size: 16
context_length: 64
hidden_size: 8
n_layers: 1
position: {kind: learned}
norm: {kind: layernorm}
attention: {n_heads: 2, head_dim: 4}
mlp: {kind: none}
lm_head: {tied: true}
vocabulary:
"""


@pytest.fixture
def strange(tmp_path):
    words = "".join(f"  {i}: {json.dumps(word, ensure_ascii=False)}\n" for i, word in enumerate(WORDS))
    (tmp_path / "strange.yaml").write_text(STRANGE + words, encoding="utf-8")
    return ["-c", tmp_path / "strange.yaml", "--ids", ",".join(map(str, range(len(WORDS))))]


@pytest.mark.parametrize("color", [{"NO_COLOR": "1"}, {"COLORTERM": "truecolor"}])
@pytest.mark.parametrize("columns", [80, 200])
def test_strange_tokens_stand_on_both_axes_and_shift_nothing(strange, color, columns):
    out = run("trace", *strange, "--map", columns=columns, **color).out
    lines = [Text.from_ansi(line).plain for line in out.splitlines()]
    rows = [line for line in lines if re.match(r"\d \S", line)]
    assert len(rows) == len(WORDS)
    starts = set()
    for i, (line, word) in enumerate(zip(rows, WORDS)):
        label = f"{i} {visible(word.encode())}"
        assert line.startswith(label if cell_len(label) <= 12 else f"{label[:11]}…")
        cells = line[len(label) :] if cell_len(label) <= 12 else line[12:]
        starts.add(cell_len(line) - cell_len(cells.lstrip()))
    assert len(starts) == 1  # wide and narrow letters alike end where the map begins
    above = lines[: lines.index(rows[0])]
    for word in ("猫", "🙂", "i"):
        assert any(word in line for line in above[2:])
    assert "\x1b[31m" not in ESCAPE.sub("", out) and "\\x1b[31m"[:8] in "\n".join(rows)


def rows_of(out: str) -> list[list[str]]:
    """[position, token, …] of every row of a map without colour."""
    return [line.split() for line in out.splitlines() if re.match(r" *\d+ \S+ +[.:\-=+*#%@]", line)]


def test_bytes_newlines_and_tabs_read_without_doubt():
    ran = run("trace", "-m", "tiny-gpt2", "--map", "a\tb\n🙂猫", columns=80, NO_COLOR="1")
    escaped = [f"\\x{byte:02x}" for byte in "🙂猫".encode()]
    labels = ["a", r"\t", "b", r"\n", *escaped]  # its 320 tokens hold neither sign whole
    assert [row[:2] for row in rows_of(ran.out)] == [[str(i), label] for i, label in enumerate(labels)]
    above = ran.out.splitlines()[2:]
    above = above[: next(i for i, line in enumerate(above) if line.startswith(" 0"))]
    start = next(line for line in ran.out.splitlines() if line.startswith(" 0 a")).index("@")
    columns = ["".join(line[start + 2 * i : start + 2 * i + 1] for line in above).strip() for i in range(len(labels))]
    assert columns == [f"{i}{label}" for i, label in enumerate(labels)]


def test_tokens_that_are_the_same_have_positions_of_their_own():
    out = run("trace", "-m", "tiny-gpt2", "--map", " the the the the", columns=80, NO_COLOR="1").out
    assert [row[:2] for row in rows_of(out)] == [[str(i), "␣the"] for i in range(4)]


def test_what_is_pooled_or_cut_is_said(toy):
    words = ["trace", "-c", toy(), "--ids", ids_of(512), "--map"]
    said = plain(run(*words, columns=80, COLORTERM="truecolor").out)
    cells = re.search(r"queries 0–511 in (\d+) rows of (\d+)", said)
    assert math.ceil(512 / int(cells[2])) == int(cells[1]) and "a cell shows the largest weight of its pairs" in said
    assert "the mean weight" in plain(run(*words, "--pool", "mean", columns=80).out)
    said = plain(run(*words, "--rows", "100:120", "--cols", "90:120", columns=80).out)
    assert "queries 100–119 of 0–511" in said and "keys 90–119 of 0–511" in said and "other keys are left out" in said
    assert "a cell shows" not in said
    said = plain(run(*words, "--pool", "64", columns=80).out)
    assert "queries 0–511 in 8 rows of 64" in said and "keys 0–511 in 8 columns of 64" in said


def test_the_legend_says_the_scale_s_ends(toy):
    words = ["trace", "-c", toy(), "--ids", ids_of(9), "--map", "--rows", "3:", "--digits", "5"]
    high = max(x for row in mapped(*words[1:5], "--rows", "3:")["maps"][0]["cells"] for x in row if x is not None)
    assert f"weight 0.00000 {SIGNS} {high:.5f} linear" in run(*words).out
    low = f"{high / 1e4:.5f}" if high >= 0.05 else f"{high / 1e4:.4e}"
    assert f"weight {low} or less {SIGNS} {high:.5f} logarithmic" in run(*words, "--scale", "log").out


def test_a_scale_s_places_by_hand():
    linear, log = Scale(kind="linear", low=0.0, high=0.5), Scale(kind="log", low=1e-4, high=1.0)
    assert [linear.place(x) for x in (0.0, 0.125, 0.25, 0.5, 0.9)] == [0, 0.25, 0.5, 1, 1]
    assert [log.place(x) for x in (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1.0)] == pytest.approx([0, 0, 0, 0.25, 0.5, 1])
    assert Scale(kind="linear", low=0.0, high=0.0).place(0.0) == 0


def test_an_axis_by_hand():
    axis = Axis(of="text", length=20, start=3, stop=14, pool=4)
    assert axis.cells == 3 and [list(axis.span(i)) for i in range(3)] == [[3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13]]
    assert axis.fitted(5).pool == 3 and axis.fitted(11).pool == 1 and axis.fitted(1).pool == 11


# What makes no sense


@pytest.mark.parametrize(
    "words, said",
    [
        (["--map", "--position", "1"], "--map and --position"),
        (["--map", "--list"], "--map and --list"),
        (["--map", "--at", "layers.0.attn.pattern"], "--map and --at"),
        (["--rows", "0:2"], "--rows without --map"),
        (["--drop-first"], "--drop-first without --map"),
        (["--scale", "log"], "--scale without --map"),
        (["-o", "x.png"], "-o x.png without --map"),
        (["--map", "--rows", "5"], "--rows 5: not A:B"),
        (["--map", "--rows", "2:2"], "--rows 2:2: not in the text"),
        (["--map", "--cols", "0:4"], "--cols 0:4: not in the text; its positions are 0:3"),
        (["--map", "--cols", "1:", "--drop-first"], "--cols 1: and --drop-first"),
        (["--map", "--ids", "12", "--drop-first"], "--drop-first: key 0 is the only one"),
        (["--map", "--pool", "0"], "--pool 0: not a number, max or mean"),
        (["--map", "--pool", "most"], "--pool most: not a number, max or mean"),
        (["--map", "--head", "2"], "--head 2: this model has 2 heads"),
        (["--map", "--layer", "0"], "--layer 0: layers count from 1"),
        (["--map", "--attention", "cross"], "--attention cross: this model is one stack"),
        (["--map", "--batch", "Cats", "sit"], "2 texts, but heads are looked at in one"),
    ],
)
def test_mistakes_are_one_line(words, said):
    ran = run("trace", *words)
    assert ran.status == 2 and ran.out == "" and ran.err.count("\n") == 1
    assert said in ran.err


def test_cells_that_a_terminal_does_not_hold(toy):
    words = ["trace", "-c", toy(), "--ids", ids_of(300), "--map", "--pool"]
    ran = run(*words, "2", columns=80)
    assert ran.status == 2 and "--pool 2: 150 columns are more than this terminal's 80 hold" in ran.err
    fits = re.search(r"--pool (\d+) fits", ran.err)[1]
    assert run(*words, fits, columns=80).status == 0
    assert run(*words, "2").status == 0  # a pipe holds a line of any length
    assert run(*words, "2", "-q", columns=80).status == 0


def test_nan_is_seen_and_said(tmp_path):
    eye = torch.eye(2)
    embed = torch.tensor([[1.0, 0.0], [0.0, 1.0], [math.nan, 1.0]])
    (tmp_path / "config.yaml").write_text(TWO)
    save_file(
        {f"layers.0.attn.{letter}.weight": eye.clone() for letter in "qkvo"} | {"embed.weight": embed},
        tmp_path / "model.safetensors",
    )
    words = ["trace", "-m", tmp_path, "--ids", "0,1,2", "--map"]
    ran = run(*words)
    assert ran.status == 1 and "finding not-finite: NaN is born in embed, token 2" in ran.err
    rows = [line for line in ran.out.splitlines() if re.match(r"\d \d", line)]
    assert ["?" in row for row in rows] == [False, False, True]
    assert "proof FAILED" in ran.out
    [one] = run(*words, "--json").json["maps"]
    assert one["cells"][2] == [None] * 3 and None not in one["cells"][1][:2]
    assert run(*words, "-o", tmp_path / "x.png").status == 1


# Pictures


def picture(tmp_path, *words: object, name: str = "map.png") -> Path:
    path = tmp_path / name
    ran = run("trace", "--map", *words, "-o", path, "-q", "--force")
    assert ran.status == 0, ran.err
    return path


def test_a_picture_is_the_same_from_run_to_run(tmp_path):
    """In processes of their own, where sets and dicts would come in other orders."""
    code = "import sys; from gptcli.cli.main import main; sys.exit(main())"
    for name in ("map.png", "map.svg"):
        found = []
        for seed in ("1", "2"):
            path = tmp_path / f"{seed}-{name}"
            words = ["trace", "-m", "tiny-gpt2", SENTENCE, "--map", "-q", "-o", str(path)]
            environment = os.environ | {"PYTHONHASHSEED": seed}
            subprocess.run([sys.executable, "-c", code, *words], check=True, env=environment, capture_output=True)
            found.append(path.read_bytes())
        assert found[0] == found[1] and len(found[0]) > 5000


def test_a_png_s_upper_triangle_is_blank_and_its_cells_are_darker_the_heavier(tmp_path):
    """Cells are found in the picture by their own colours: 11 by 11 squares of one size."""
    path = picture(tmp_path, "-m", "tiny-gpt2", SENTENCE)
    [one] = mapped("-m", "tiny-gpt2", SENTENCE)["maps"]
    image = Image.open(path).convert("RGB")
    assert image.info == {} or "Date" not in str(image.info)
    width, height = image.size
    darkest = (8, 48, 107)  # the scale's end, at the first row's only cell
    spots = [(x, y) for y in range(height) for x in range(width) if image.getpixel((x, y)) == darkest]
    rows = {}
    for x, y in spots:
        rows.setdefault(y, []).append(x)
    top, left = min(rows), min(rows[min(rows)])
    size = sum(x < left + 200 for x in rows[top])
    shades = []
    for i in range(11):
        for j in range(11):
            # Off the middle, where the number stands.
            spot = image.getpixel((left + round((j + 0.1) * size), top + round((i + 0.1) * size)))
            if j > i:
                assert spot == (255, 255, 255), (i, j)
            else:
                shades.append((one["cells"][i][j], -sum(spot)))
    order = [dark for _, dark in sorted(shades)]
    assert len(set(order)) > 20
    assert all(a <= b + 3 for a, b in pairwise(order))  # neighbours may round to one shade


def test_an_svg_is_whole_and_tells_no_date(tmp_path):
    from xml.etree import ElementTree

    path = picture(tmp_path, "-m", "tiny-gpt2", SENTENCE, name="map.svg")
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(text)  # noqa: S314 - our own
    assert (
        "date" not in text.lower() and "Matplotlib v" not in text and "20" + "2" not in re.sub(r"[\d.]{7,}", "", text)
    )


def test_pictures_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(b"mine")
    ran = run("trace", "--map", "-o", path)
    assert ran.status == 2 and "the file is there" in ran.err and path.read_bytes() == b"mine"
    assert run("trace", "--map", "-o", tmp_path / "no/x.png").status == 2
    assert run("trace", "--map", "-o", path, "-o", tmp_path / "x.json", "--force").status == 0
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "x.json").read_text())["schema"] == "gptcli.maps/1"


def drawn(*words: object):
    """The matplotlib figure of a map, and its report."""
    from gptcli.render import pictures

    model = open_model(config=str(words[0]))
    ids = [list(map(int, str(words[1]).split(",")))]
    patterns = Patterns(Run(model, ids))
    rows, columns = axes_of(patterns, None, None, False)
    layers, heads = words[2], words[3]
    [report] = map_reports(patterns, layers, heads, [(rows, columns)], **(words[4] if len(words) > 4 else {}))
    return (pictures._grid if len(report.maps) > 1 else pictures._large)(report), report


def test_a_picture_names_the_tokens_of_both_axes_and_the_head(strange):
    figure, report = drawn(strange[1], strange[3], [0], [1])
    axes, bar = figure.axes
    for axis in (axes.xaxis, axes.yaxis):
        labels = [label.get_text() for label in axis.get_ticklabels()]
        assert [label.partition(" ")[0] for label in labels] == [str(i) for i in range(len(WORDS))]
        assert labels[2] == "2 sat" and labels[3] == "3 international…" and labels[7].startswith("7 \\x1b[31m")
        assert labels[0] in ("0 猫", "0 \\u{732b}")  # as a font has it
    assert "Layer 1 of 1 (layers.0) · Head 1 of 2 = L0H1" in figure.get_suptitle()
    assert "RANDOM WEIGHTS (seed 0)" in figure.get_suptitle() and bar.get_ylabel() == "weight"
    matrix = axes.images[0].get_array()
    for i, row in enumerate(report.maps[0].cells):
        for j, x in enumerate(row):
            assert matrix.mask[i, j] if x is None else matrix[i, j] == x


def test_letters_that_no_font_has_are_escaped(monkeypatch):
    from gptcli.render import pictures

    monkeypatch.setattr(
        pictures, "fonts", lambda: [("DejaVu Sans", frozenset(map(ord, "cat "))), ("Other", frozenset())]
    )
    assert pictures.lettered("cat 猫🙂") == "cat \\u{732b}\\u{1f642}"
    monkeypatch.setattr(pictures, "fonts", lambda: [("DejaVu Sans", frozenset()), ("CJK", frozenset([0x732B]))])
    assert pictures.lettered("猫a") == "猫\\u{61}"


def test_an_escaped_token_is_cut_between_letters_and_a_position_stays_on_the_left(monkeypatch):
    from gptcli.render import pictures
    from gptcli.tokens import Token

    monkeypatch.setattr(pictures, "fonts", lambda: [("DejaVu Sans", frozenset(range(0x700)))])
    tokens = [Token(i, text, None) for i, text in enumerate(["猫坐在垫子上", "sat", "سلام"])]
    cells, names = pictures._ticks(Axis(of="text", length=3, start=0, stop=3), tokens, 48, 14)
    assert cells == [0, 1, 2]
    assert names == ["0 \\u{732b}\\u{5750}\\u{5728}…", "1 sat", "\u200e2 سلام"]


def test_a_dollar_is_a_dollar_and_no_warning_comes(strange, tmp_path, recwarn):
    picture(tmp_path, *strange)
    picture(tmp_path, *strange, "--head", "all", "--scale", "log", name="map.svg")
    assert [
        str(one.message) for one in recwarn.list if "gptcli" in str(one.filename) or "Glyph" in str(one.message)
    ] == []


def test_a_grid_has_a_map_a_head_and_a_row_a_layer(toy):
    figure, _ = drawn(toy(), ids_of(10), [0, 1], list(range(8)))
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == [f"L{layer}H{head} → kv {head // 4}" for layer in range(2) for head in range(8)]
    figure, _ = drawn(toy(), ids_of(10), [1], list(range(8)))
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == [f"H{i} → kv {i // 4}" for i in range(8)]
    assert "Layer 2 of 2 (layers.1) · 8 heads" in figure.get_suptitle()


def test_a_sink_stands_beside_the_keys_in_a_picture(toy):
    figure, report = drawn(toy(", sinks: true"), ids_of(10), [0], [0], {"kind": "log"})
    matrix = figure.axes[0].images[0].get_array()
    assert matrix.shape == (10, 12) and matrix.mask[:, 10].all()
    assert matrix[:, 11].tolist() == pytest.approx(report.maps[0].sink)
    assert figure.axes[0].xaxis.get_ticklabels()[-1].get_text() == "sink"


def test_too_many_maps_for_a_picture(tmp_path):
    big = TOY.replace("MORE", "").replace("CONTEXT", "16").replace("n_layers: 2", "n_layers: 200")
    (tmp_path / "big.yaml").write_text(big)
    words = ["trace", "-c", tmp_path / "big.yaml", "--ids", "1,2,3", "--map", "--layer", "all", "--head", "all"]
    ran = run(*words, "-o", tmp_path / "x.png")
    assert ran.status == 2 and "1,600 maps are more than a picture holds (1,024)" in ran.err


def test_matplotlib_s_own_settings_are_left_as_they_were(tmp_path):
    code = (
        "import sys, matplotlib\n"
        "from gptcli.cli.main import main\n"
        "matplotlib.rcParams['font.size'] = 31\n"
        f"sys.argv = ['gptcli', 'trace', '--map', '-q', '-o', {str(tmp_path / 'x.svg')!r}]\n"
        "main()\n"
        "print('matplotlib.pyplot' in sys.modules, *map(matplotlib.rcParams.get, ('font.size', 'svg.hashsalt')))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.endswith("False 31.0 None\n")


def test_python_may_ask_too():
    patterns = Patterns(Run(open_model("cats"), [[12, 45, 78]]))
    with pytest.raises(GptcliError, match="--rows 9:"):
        axes_of(patterns, "9:", None, False)
