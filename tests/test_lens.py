"""`lens`: the last row is the logits bit for bit; every row is what the model's own last modules make of that layer.

The oracle of a row is transformers' final norm and head, applied to its hidden states; of entropy and KL divergence,
torch.distributions; of the worked example, arithmetic in Python's own floats.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from torch.distributions import Categorical, kl_divergence

import gptcli
from gptcli import shipped
from gptcli.config import read_config
from gptcli.model import ops
from gptcli.report import lens as lens_module
from gptcli.report.lens import lens_report, position_report, span
from gptcli.run import Run
from gptcli.source import Model, open_model
from tests.command import gptcli as run
from tests.oracle import in_float64, save_toy
from tests.test_trace_families import IDS, SOURCE_IDS, TOYS, auto, fed
from tests.toys import shrunk

SHIPPED = {name: read_config(path).spec for name, path in shipped.configs().items()}
WITH_HEAD = [name for name in TOYS if not name.endswith("no head")]
DTYPES = ("float32", "bfloat16", "float64")


def request(model: Model, dtype: str, ids: list[int] = IDS) -> Run:
    """The ids as a request; where there is an encoder, it reads a source."""
    below = [id_ % model.spec.vocab_size for id_ in ids]
    source = None if model.spec.encoder is None else [[id_ % model.spec.vocab_size for id_ in SOURCE_IDS]]
    return Run(model, [below], dtype, source=source)


def check_last_row(model: Model, dtype: str) -> None:
    """Every logit of the last row, at every position, is the run's, and so are the grid's best."""
    one = request(model, dtype)
    logits = one.forward("all")[0]  # [T, V]
    grid = lens_report(one)
    assert grid.status == "ok" and [check.error for check in grid.proof] == [0]
    assert [row.name for row in grid.rows] == ["embed", *(f"layer {i + 1}" for i in range(model.spec.n_layers))]
    assert [cell.logit for cell in grid.rows[-1].cells] == logits.amax(-1).tolist()
    assert [cell.id for cell in grid.rows[-1].cells] == logits.argmax(-1).tolist()
    for position in (0, len(IDS) - 1):
        opened = position_report(one, str(position), model.spec.vocab_size)
        found = {one.id: one.logit for one in opened.readings[-1].top}
        assert opened.status == "ok" and [found[i] for i in range(len(found))] == logits[position].tolist()
        assert len(found) == model.spec.vocab_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, spec in SHIPPED.items() if spec.lm_head is not None])
def test_the_last_row_is_the_logits_of_every_shipped_architecture(name, dtype):
    check_last_row(Model(spec=shrunk(SHIPPED[name]), source="toy"), dtype)


@pytest.mark.parametrize("name", WITH_HEAD)
def test_the_last_row_is_the_logits_of_every_family(name, toy):
    for dtype in DTYPES:
        check_last_row(open_model(str(toy(name))), dtype)


@pytest.mark.parametrize("name", SHIPPED)
def test_watching_changes_no_bit(name):
    """The run without its head, watched, gives the vectors that the head of the plain run reads."""
    from gptcli.trace import Recorder

    one = request(Model(spec=shrunk(SHIPPED[name]), source="toy"), "float32")
    plain = one.forward("all")
    vectors = one.forward("all", Recorder("embed", "layers.*.resid_post"), head=False)
    again = vectors if one.model.spec.lm_head is None else ops.head(vectors, one.weights, one.model.spec)
    assert torch.equal(again, plain)


# Each layer's row, by the library's own modules


def last_modules(name: str, theirs: torch.nn.Module):
    """What the library does to a layer's output to get logits."""
    if name == "bert":
        return theirs.cls.predictions
    if name in ("bart", "marian"):
        return lambda x: theirs.lm_head(x) + theirs.final_logits_bias
    if name == "t5":
        scale = theirs.config.d_model**-0.5 if theirs.config.tie_word_embeddings else 1.0
        return lambda x: theirs.lm_head(theirs.decoder.final_layer_norm(x) * scale)
    if name == "gpt2":
        return lambda x: theirs.lm_head(theirs.transformer.ln_f(x))
    if name == "gpt_neox":
        return lambda x: theirs.lm_head(theirs.gpt_neox.final_layer_norm(x))
    if name == "gemma2":
        cap = theirs.config.final_logit_softcapping
        return lambda x: cap * torch.tanh(theirs.lm_head(theirs.model.norm(x)) / cap)
    return lambda x: theirs.lm_head(theirs.model.norm(x))


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "gemma2", "olmo2", "mixtral", "bert", "bart", "t5"])
def test_every_row_is_the_library_s_own_norm_and_head_on_its_hidden_states(name, tmp_path):
    """Learned positions, parallel residuals, soft caps, norms after, experts, an encoder alone, a decoder beside one.

    hidden_states has the last layer's already normed where there is a final norm: that row is the logits themselves.
    """
    theirs = save_toy(TOYS[name], tmp_path / "m", auto=auto(name))
    model = open_model(str(tmp_path / "m"))
    two = model.spec.encoder is not None
    words = {"input_ids": torch.tensor([SOURCE_IDS]), "decoder_input_ids": torch.tensor([IDS])}
    words = words if two else {"input_ids": torch.tensor([IDS])}
    with in_float64(), torch.no_grad():
        out = theirs(**words, output_hidden_states=True)
        states = out.decoder_hidden_states if two else out.hidden_states
        read = last_modules(name, theirs)
        rows = [read(x)[0] for x in states[:-1]] + [out.logits[0]]
    one = request(model, "float64")
    grid = lens_report(one)
    assert len(rows) == len(grid.rows) == model.spec.n_layers + 1
    for logits, row in zip(rows, grid.rows):
        probs = logits.softmax(-1)
        assert [cell.id for cell in row.cells] == logits.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor([cell.prob for cell in row.cells]).double(), probs.amax(-1).double())
        logit = torch.tensor([cell.logit for cell in row.cells], dtype=torch.float64)
        torch.testing.assert_close(logit, logits.amax(-1), rtol=1e-9, atol=1e-9)
    final = Categorical(logits=rows[-1][3])
    for logits, reading in zip(rows, position_report(one, "3", model.spec.vocab_size).readings):
        said = Categorical(logits=logits[3])
        assert reading.entropy == pytest.approx(float(said.entropy()) / math.log(2), abs=1e-9)
        assert reading.kl == pytest.approx(float(kl_divergence(final, said)) / math.log(2), abs=1e-9)
        order = logits[3].argsort(descending=True).tolist()
        assert [one.id for one in reading.top] == order and [one.rank for one in reading.top][:3] == [1, 2, 3]
        torch.testing.assert_close(torch.tensor([one.prob for one in reading.top]).double(), said.probs[order].double())


EMBEDDING = {"Cats": [0.2, -0.1, 0.4, 0.3], "sit": [-0.3, 0.5, 0.1, 0.2], "on": [0.1, 0.2, -0.2, 0.6]}
HEAD = {"mats": [0.2, 0.4, 0.1, 0.3], "chairs": [-0.2, 0.1, 0.4, -0.1]}  # the other 254 rows are zeros


def said(x: list[float]) -> dict[str, float]:
    """Probabilities of mats, chairs and one of the others, by hand: RMS norm, product, softmax."""
    size = math.sqrt(sum(number**2 for number in x) / 4 + 1e-6)
    powers = {word: math.exp(sum(a / size * b for a, b in zip(x, row))) for word, row in HEAD.items()}
    whole = sum(powers.values()) + 254
    return {word: power / whole for word, power in powers.items()} | {"volcano": 1 / whole}


def test_the_worked_example_by_hand():
    """The embedding's row from the config's numbers, the layers' from the document's residual streams."""
    golden = json.loads((Path(__file__).parent / "data/golden.json").read_text(encoding="utf-8"))["cats"]
    streams = [golden["embedding"], *(layer["resid_post"] for layer in golden["layers"])]
    assert streams[0] == list(EMBEDDING.values())
    report = run("lens", "--dtype", "f64", "--json").json
    assert report["schema"] == "gptcli.lens/1" and report["status"] == "ok"
    for row, stream in zip(report["rows"], streams):
        assert [cell["token"] for cell in row["cells"]] == ["mats"] * 3
        for cell, x in zip(row["cells"], stream):
            assert cell["prob"] == pytest.approx(said(x)["mats"], abs=1e-9)
    opened = run("lens", "--dtype", "f64", "--position", "2", "--json").json
    final = said(streams[2][2])
    for reading, stream in zip(opened["readings"], streams):
        p = said(stream[2])
        tops = {one["token"]: one for one in reading["top"] if one["asked"] or one["rank"] == 1}
        assert {word: one["prob"] for word, one in tops.items()} == pytest.approx(p, abs=1e-9)
        assert (tops["mats"]["rank"], tops["volcano"]["tie"], tops["chairs"]["rank"]) == (1, [2, 255], 256)
        numbers = [p["mats"], p["chairs"], *[p["volcano"]] * 254]
        assert reading["entropy"] == pytest.approx(-sum(n * math.log2(n) for n in numbers), abs=1e-9)
        pairs = zip([final["mats"], final["chairs"], *[final["volcano"]] * 254], numbers)
        assert reading["kl"] == pytest.approx(sum(a * math.log2(a / b) for a, b in pairs), abs=1e-9)


# Long texts


def long_model(vocab_size: int, length: int) -> Model:
    spec = shrunk(SHIPPED["llama3-8b"])
    return Model(spec=replace(spec, vocab_size=vocab_size, context_length=length), source="toy")


def test_of_a_long_text_a_block_of_positions_is_read_at_a_time(monkeypatch):
    """1,024 positions of 128,000 tokens would be 524 MB of logits; 2 million, which are 8 MB, are held at most."""
    one = Run(long_model(128_000, 1024), [[id_ % 64 for id_ in range(1024)]])
    held, plain = [], ops.head

    def noted(x, w, spec, *more):
        logits = plain(x, w, spec, *more)
        held.append(logits.numel())
        return logits

    monkeypatch.setattr(ops, "head", noted)
    latest = lens_report(one)
    assert latest.status == "ok" and latest.first == 992 and not latest.named
    assert [len(row.cells) for row in latest.rows] == [32] * 3
    some = lens_report(one, "500:570")
    assert [cell.position for cell in some.rows[0].cells] == list(range(500, 570))
    assert position_report(one, "7", 3, ()).status == "ok"
    assert held and max(held) <= 1 << 21


def test_blocks_say_what_one_block_says(monkeypatch):
    one = Run(long_model(64, 300), [torch.randint(64, (300,), generator=torch.Generator().manual_seed(1)).tolist()])
    whole = lens_report(one, "all")
    logits = one.forward("all")[0]
    assert [cell.logit for cell in whole.rows[-1].cells] == logits.amax(-1).tolist()
    monkeypatch.setattr(lens_module, "BLOCK", 64 * 48)
    rows, plain = [], ops.head
    monkeypatch.setattr(ops, "head", lambda x, *given: rows.append(x.shape[1]) or plain(x, *given))
    parts, opened = lens_report(one, "all"), position_report(one, "299", 1)
    assert parts.status == opened.status == "ok"
    assert set(rows) == {48, 16}  # never a few, whose product a kernel may sum in another order
    for a, b in zip(whole.rows, parts.rows):
        assert [cell.position for cell in b.cells] == list(range(300))
        assert [cell.id for cell in a.cells] == [cell.id for cell in b.cells]
        assert [cell.logit for cell in b.cells] == pytest.approx([cell.logit for cell in a.cells], abs=1e-5)
    assert opened.readings[1].top[0].id == whole.rows[1].cells[-1].id


@pytest.mark.parametrize(
    "wanted, width, positions",
    [
        (None, 5, [0, 1, 2, 3, 4]),
        (None, 40, list(range(8, 40))),
        ("all", 40, list(range(40))),
        ("2:4", 5, [2, 3]),
        ("-2:", 5, [3, 4]),
        (":2", 5, [0, 1]),
        (":", 3, [0, 1, 2]),
        ("3:99", 5, [3, 4]),
    ],
)
def test_spans_are_slices(wanted, width, positions):
    assert list(span(wanted, width)) == positions


def test_full_means_all_positions():
    assert list(span(None, 40, full=True)) == list(range(40))


# What a person sees

TINY = ["lens", "-m", "tiny-gpt2", "The cat sat on the mat"]


def grid_of(out: str) -> list[str]:
    """The grid's lines: the header and the rows."""
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("layer "))
    return [line for line in lines[first - 1 :] if line.startswith((" ", "layer ", "embed"))]


def test_a_pipe_shows_every_position_and_the_last_layer_on_top():
    out = run(*TINY).out
    header, *rows = grid_of(out)
    assert re.split(r" {2,}", header.strip()) == ["0 The", "1 ␣cat", "2 ␣sat", "3 ␣on", "4 ␣the", "5 ␣mat"]
    assert [row.split("  ")[0].strip() for row in rows] == ["layer 2", "layer 1", "embed"]
    report = run(*TINY, "--json").json
    for line, row in zip(rows, report["rows"][::-1]):
        for cell in row["cells"]:
            assert re.search(rf"{re.escape(cell['token'])} +{cell['prob']:.4f}", line)
    assert "what comes next" in out and "positions" not in out


def test_a_narrow_terminal_keeps_the_latest_and_says_so():
    out = run(*TINY, columns=60, NO_COLOR="1").out
    header, *rows = grid_of(out)
    assert "5 ␣mat" in header and "0 The" not in header
    assert re.search(r"positions [123]–5 of 0–5; --full shows all", out)
    assert all(cell_len(line) <= 60 for line in [header, *rows])
    full = run(*TINY, "--full", columns=60, NO_COLOR="1").out
    titles = re.findall(r"[0-5] ␣?(?:The|cat|sat|on|the|mat)\b", "".join(x for x in grid_of(full) if x[0] == " "))
    assert [title[0] for title in titles] == list("012345") and "positions" not in full


def test_a_named_span_is_shown_whole():
    header, *_ = grid_of(run(*TINY, "--position", "1:3").out)
    assert header.split() == ["1", "␣cat", "2", "␣sat"]
    report = run(*TINY, "--position", "1:3", "--json").json
    assert report["first"] == 1 and [len(row["cells"]) for row in report["rows"]] == [2, 2, 2]


def test_probability_is_a_shade_and_a_number_that_stands_without_colour():
    plain = run(*TINY, columns=120).out
    assert "\x1b[" in plain
    bare = run(*TINY, columns=120, NO_COLOR="1").out
    assert "\x1b[" not in bare and re.search(r"␣the 0\.2415", bare)
    vivid = run(*TINY, "--color", "always", COLORTERM="truecolor", TERM="xterm-256color").out
    grounds = {
        re.search(r"\x1b\[([\d;]*)m␣the 0.2415", vivid)[1],
        re.search(r"\x1b\[([\d;]*)mV       0.0473", vivid)[1],
    }
    assert len(grounds) == 2


def test_every_sign_has_a_look_alike_in_ascii():
    for words in (TINY, [*TINY, "--position", "2"], ["lens"], ["lens", "--position", "0"]):
        out = run(*words, encoding="ascii").out
        assert "\\u" not in out and "\\x2" not in out


def test_words_of_double_width_stand_in_their_columns(tmp_path):
    """CJK and emoji take two columns of a terminal each."""
    config = """\
vocab_size: 4
context_length: 8
hidden_size: 4
n_layers: 1
position: {kind: none}
norm: {kind: none}
attention: {n_heads: 1, bias: false}
mlp: {kind: none}
lm_head: {tied: true}
vocabulary: {0: 猫, 1: a, 2: 🙂, 3: "x\\u200by"}
"""
    (tmp_path / "wide.yaml").write_text(config, encoding="utf-8")
    out = run("lens", "-c", tmp_path / "wide.yaml", "猫 a 🙂 a", columns=100, NO_COLOR="1").out
    header, *rows = grid_of(out)
    assert len({cell_len(row) for row in rows}) == 1
    starts = [cell_len(header[: header.index(f"{i} ")]) for i in range(4)]
    for row in rows:
        for start in starts:
            before = 0
            for i, letter in enumerate(row):  # a column begins where its title begins
                if before == start:
                    assert letter != " " and row[i - 1] == " "
                    break
                before += cell_len(letter)
            else:
                raise AssertionError(row)
    shown = run("lens", "-c", tmp_path / "wide.yaml", "--ids", "3,3").out
    assert "\u200b" not in shown and r"x\u{200b}y" in shown


def test_one_position_opened_in_a_terminal():
    words = [*TINY, "--position", "2", "--token", " cat", "-k", "3"]
    report = run(*words, "--json").json
    assert report["schema"] == "gptcli.lens.position/1" and report["position"] == 2 and report["k"] == 3
    out = run(*words).out
    assert "position 2 ␣sat · each layer's guess of what comes next · entropy and KL(final||layer) in bits" in out
    lines = [line for line in out.splitlines() if line.startswith(("layer ", "embed"))]
    assert len(lines) == 3
    for line, reading in zip(lines, report["readings"][::-1]):
        [cat] = [one for one in reading["top"] if one["asked"]]
        assert f"{reading['entropy']:.4f}" in line and f"{reading['kl']:.4f}" in line
        assert re.search(rf" {cat['rank']} +{cat['prob']:.4f}  ", line)
        for one in reading["top"]:
            assert one["rank"] > 3 or f"{one['prob']:.4f}" in line
    narrow = run(*words, columns=60).out.splitlines()
    assert sum(line.startswith("layer 2") or "layer 2 " in line for line in narrow) == 2
    assert all(cell_len(re.sub(r"\x1b\[[\d;]*m", "", line)) <= 60 for line in narrow)


MASKED = """\
vocab_size: 4
context_length: 8
hidden_size: 4
n_layers: 1
position: {kind: learned}
norm: {kind: layernorm}
attention: {n_heads: 1, causal: false}
mlp: {kind: none}
lm_head: {tied: true}
vocabulary: {0: a, 1: b, 2: c, 3: "[MASK]"}
"""


def test_an_encoder_alone_says_what_stands_there_and_opens_its_mask(tmp_path):
    (tmp_path / "masked.yaml").write_text(MASKED)
    words = ["lens", "-c", tmp_path / "masked.yaml"]
    assert "each layer's best guess of what stands there" in run(*words, "a [MASK] c").out
    opened = run(*words, "a [MASK] c", "--position", "mask")
    assert "position 1 [MASK] · each layer's guess of what stands there" in opened.out
    assert "no [MASK] to fill in" in run(*words, "a b", "--position", "mask").err
    several = run(*words, "[MASK] b [MASK]", "--position", "mask")
    assert several.status == 2 and "positions 0, 2" in several.err


def test_a_model_without_a_tokenizer_takes_ids_for_words(toy):
    report = run("lens", "-m", toy("llama"), *fed("llama"), "--position", "-1", "--token", "7", "--json").json
    assert all(7 in [one["id"] for one in reading["top"]] for reading in report["readings"])
    ran = run("lens", "-m", toy("llama"), *fed("llama"), "--position", "-1", "--token", "700000")
    assert ran.status == 2 and "no tokenizer" in ran.err


def test_files_and_the_verdict(tmp_path):
    ran = run(*TINY, "-o", tmp_path / "lens.json", "-q")
    report = json.loads((tmp_path / "lens.json").read_text())
    assert ran.out.splitlines() == [f"{cell['id']}\t{cell['token']}" for cell in report["rows"][-1]["cells"]]
    opened = run(*TINY, "--position", "0", "-q").out.splitlines()
    assert [line.split("\t")[0] for line in opened] == ["layer 2", "layer 1", "embed"]
    assert run(*TINY, "-o", tmp_path / "lens.png").status == 2


@pytest.mark.parametrize(
    "words, told",
    [
        (["--token", "mat"], "--token without --position"),
        (["-k", "3"], "-k without --position"),
        (["--position", "1:3", "-k", "3"], "-k and --position 1:3"),
        (["--position", "9"], "--position 9: beyond the text"),
        (["--position", "9:"], "--position 9:: beyond the text"),
        (["--position", "x"], "--position x: not a position or a span"),
        (["--position", "0", "--token", "dogs"], "'dogs' is not one token"),
        (["--batch"], "2 texts, but lens reads one"),
    ],
)
def test_what_makes_no_sense_is_refused(words, told):
    text = ["The", "cat"] if "--batch" in words else ["The cat"]
    ran = run("lens", "-m", "tiny-gpt2", *text, *words)
    assert ran.status == 2 and told in ran.err and ran.err.count("\n") == 1


def test_a_model_without_a_head_is_refused(toy):
    ran = run("lens", "-m", toy("bert, no head"), *fed("bert, no head"))
    assert ran.status == 2 and "has no head to read its layers by" in ran.err


def test_a_source_is_read_beside_the_text():
    report = run("lens", "--source", "the cat sat", "le chat", "--json").json
    assert [token["token"] for token in report["source"][0]] == ["the", "cat", "sat"]
    assert [cell["token"] for cell in report["rows"][-1]["cells"]] == ["chat", "s'assit"]
    assert report["rows"][0]["cells"][1]["tied"] == 5
    assert "×5" in run("lens", "--source", "the cat sat", "le chat").out
    ran = run("lens", "-c", "translate", "--source", "the cat", "--source", "the cat")
    assert ran.status == 2


def test_norm_embedded_models_begin_after_that_norm(toy):
    spec = gptcli.open(toy("bert")).spec
    assert spec.norm.embedding
    report = run("lens", "-m", toy("bert"), *fed("bert"), "--json").json
    assert [row["path"] for row in report["rows"]][:2] == ["embed_norm", "layers.0.resid_post"]


def test_the_same_from_python():
    model = gptcli.open("tiny-gpt2")
    text = TINY[-1]
    assert [row.cells[-1].prob for row in model.lens(text).rows] == [
        row["cells"][-1]["prob"] for row in run(*TINY, "--json").json["rows"]
    ]
    assert model.lens(text, "1:3").first == 1
    assert model.lens(text, -1, k=2).readings[0].top[1].rank == 2
