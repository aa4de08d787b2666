"""The command line, as a person meets it: exit statuses, streams, files, and what each option means.

Numbers are checked against arithmetic done here, on logits that `forward -o` wrote, or against golden.json.
"""

import json
import math
import os
import re
import shlex
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from rich.cells import cell_len
from safetensors.numpy import load_file, save_file

from gptcli import __version__, shipped
from gptcli.cli import commands
from gptcli.cli.main import COMMANDS, GROUPS
from gptcli.trace import Recorder
from tests.command import gptcli, process, strict

GOLDEN = json.loads((Path(__file__).parent / "data/golden.json").read_text(encoding="utf-8"))["cats"]
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
# One call of every command, on the worked example. `bench` tells times, which differ: test_bench.py.
EVERY = {
    "forward": ["forward"],
    "topk": ["topk"],
    "score": ["score", "Cats sit on mats"],
    "trace": ["trace"],
    "trace --at": ["trace", "--at", "layers.0.attn.pattern"],
    "trace --list": ["trace", "--list"],
    "trace --attribute": ["trace", "--attribute", "mats"],
    "lens": ["lens"],
    "lens --position": ["lens", "--position", "-1"],
    "heads": ["heads"],
    "params": ["params"],
    "diff": ["diff", "cats", "cats", "--dtype-b", "bf16"],
    "draw": ["draw"],
    "draw A B": ["draw", "cats", "gpt2-small"],
    "lab": ["lab"],
    "lab order": ["lab", "order"],
    "inspect": ["inspect", "tiny-gpt2"],
    "tokens": ["tokens"],
    "config": ["config"],
    "list": ["list"],
}
every_command = pytest.mark.parametrize("words", EVERY.values(), ids=EVERY)
# One layer of one head, no norm and no MLP.
SMALL = """\
vocab_size: 4
context_length: 8
hidden_size: 2
n_layers: 1
position: {kind: none}
norm: {kind: none}
attention: {n_heads: 1, n_kv_heads: 1, head_dim: 2}
mlp: {kind: none}
lm_head: {tied: true}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def done(*words, **options):
    """A run that must end well: only time on standard error."""
    ran = gptcli(*words, **options)
    assert ran.status == 0, ran
    assert re.fullmatch(r"([\d,.]+ ms [·-] [\d,]+ tokens? [·-] [\d,]+ tokens/s\n)?", ran.err), ran.err
    return ran


def logits_of(*words) -> numpy.ndarray:
    """[B, T, V] as forward writes them."""
    done("forward", *words, "-o", "logits.npy", "--force")
    return numpy.load("logits.npy")


def softmax(row) -> list[float]:
    powers = [math.exp(float(x) - float(max(row))) for x in row]
    return [power / math.fsum(powers) for power in powers]


# Exit statuses


def test_done_is_0_and_could_not_run_is_2():
    assert gptcli("forward").status == 0
    assert gptcli("forward", "dog").status == 2


def broken_checkpoint(folder: Path) -> None:
    """A model whose embedding holds NaN at id 2 and infinity at id 3."""
    eye = numpy.eye(2, dtype="float32")
    embed = numpy.array([[1, 0], [0, 1], [math.nan, 1], [math.inf, 1]], dtype="float32")
    (folder / "m").mkdir()
    (folder / "m/config.yaml").write_text(SMALL)
    tensors = {f"layers.0.attn.{letter}.weight": eye for letter in "qkvo"} | {"embed.weight": embed}
    save_file(tensors, folder / "m/model.safetensors")


@pytest.mark.parametrize("ids", ["0,2", "0,3"])
@pytest.mark.parametrize("command", ["forward", "topk", "score", "trace"])
def test_numbers_that_are_not_finite_are_findings(command, ids, folder):
    broken_checkpoint(folder)
    ran = gptcli(command, "-m", "m", "--ids", ids)
    assert ran.status == 1
    assert ran.out and "finding " in ran.err and "Traceback" not in ran.err
    as_json = gptcli(command, "-m", "m", "--ids", ids, "--json")
    assert as_json.status == 1 and as_json.json["status"] == "findings"
    assert {finding["code"] for finding in as_json.json["findings"]} == {"not-finite"}
    assert gptcli(command, "-m", "m", "--ids", ids, "-q").status == 1


def raising(error):
    def fail(*_args, **_options):
        raise error

    return fail


def test_a_defect_is_3_in_one_line_and_debug_shows_the_stack(monkeypatch):
    monkeypatch.setattr("gptcli.report.topk.topk_report", raising(ValueError("nobody\nforesaw \x1b[31mthis")))
    ran = gptcli("topk")
    assert (ran.status, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert ran.err[:-1].isprintable() and "ValueError: nobody foresaw \\x1b[31mthis" in ran.err
    assert "a defect of gptcli" in ran.err and "report it" in ran.err and "test_cli.py" in ran.err
    assert "Traceback" in (debug := gptcli("topk", GPTCLI_DEBUG="1")).err and debug.status == 3
    as_json = gptcli("topk", "--json")
    assert as_json.status == 3 and as_json.json["status"] == "error" and as_json.json["error"]["code"] == "defect"


@pytest.mark.parametrize(
    "error, status, says",
    [
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 2, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), 2, "out of memory"),
        (PermissionError(13, "Permission denied", "weights"), 2, "weights: Permission denied"),
    ],
)
def test_what_the_machine_lacks_is_no_defect(error, status, says, monkeypatch):
    monkeypatch.setattr("gptcli.report.topk.topk_report", raising(error))
    ran = gptcli("topk")
    assert (ran.status, ran.out) == (status, "") and says in ran.err and ran.err.count("\n") == bool(says)


# Help


def help_of(*words) -> str:
    ran = gptcli(*words, COLUMNS="80")
    assert ran.status == 0 and ran.err == ""
    text = ESCAPE.sub("", ran.out)
    assert max(map(cell_len, text.splitlines())) <= 80
    return text


def test_gptcli_alone_prints_help_in_groups():
    assert help_of() == help_of("-h") == help_of("--help")
    said = re.findall(r"─ ([A-Z][\w ]+) ─|│ (\w+) ", help_of())
    groups: dict[str, list[str]] = {}
    for group, command in said:
        if group:
            shown = groups.setdefault(group, [])
        elif command:
            shown.append(command)
    wanted: dict[str, list[str]] = {}
    for name, _, group in (*COMMANDS, *GROUPS):
        wanted.setdefault(group, []).append(name)
    assert {group: names for group, names in groups.items() if group != "Options"} == wanted
    assert "generate" not in help_of()


@pytest.mark.parametrize("name, function", [(name, getattr(commands, function)) for name, function, _ in COMMANDS])
def test_help_holds_examples_that_run(name, function):
    examples = re.findall(r"^ +(gptcli .+)$", function.__doc__, re.M)
    assert examples
    text = help_of(name, "--help")
    assert text == help_of(name, "-h")
    for example in examples:
        assert f" {example} " in text
        if "./gpt2" not in example and "&&" not in example:
            assert gptcli(*shlex.split(example)[1:]).status == 0


@pytest.mark.parametrize("words", [["-V"], ["--version"]])
def test_version(words):
    assert done(*words).out == f"gptcli {__version__}\n"


# Naming a model


def name_of(*words, **options) -> tuple[str, str]:
    model = done("params", *words, "--json", **options).json["model"]
    return model["name"], model["source"]


def test_a_config_is_sought_in_the_working_directory_first(folder):
    assert name_of("-c", "gpt2-small") == name_of("-c", "gpt2-small.yaml") == ("gpt2-small", "shipped")
    for name in ("gpt2-small.yaml", "elsewhere.yaml"):
        (folder / name).write_text(SMALL + f"name: of {name}\n")
    assert name_of("-c", "gpt2-small") == name_of("-c", "gpt2-small.yaml") == ("of gpt2-small.yaml", "gpt2-small.yaml")
    assert name_of("-c", "elsewhere")[0] == name_of("-c", "./elsewhere.yaml")[0] == "of elsewhere.yaml"
    assert name_of("-c", "gpt2-medium") == ("gpt2-medium", "shipped")


def test_names_of_what_ships():
    assert name_of() == ("cats", "shipped")
    assert name_of("gpt2-small") == name_of("-m", "gpt2-small") == ("gpt2-small", "shipped")
    assert name_of("tiny-gpt2") == ("tiny-gpt2", "shipped sample")
    assert name_of(shipped.samples()["tiny-gpt2"])[0] == "tiny-gpt2"
    assert name_of(shipped.samples()["tiny-gpt2"] / "model.safetensors")[0] == "tiny-gpt2"


def test_the_environment_serves_when_nothing_is_named():
    assert name_of(GPTCLI_MODEL="tiny-gpt2")[0] == "tiny-gpt2"
    assert name_of(GPTCLI_MODEL="")[0] == "cats"
    assert name_of("-m", "gpt2-small", GPTCLI_MODEL="tiny-gpt2")[0] == "gpt2-small"
    assert name_of("-c", "gpt2-small", GPTCLI_MODEL="tiny-gpt2")[0] == "gpt2-small"
    assert name_of("gpt2-small", GPTCLI_MODEL="tiny-gpt2")[0] == "gpt2-small"
    assert "bark" in gptcli("tokens", "bark").err and gptcli("tokens", "bark", GPTCLI_MODEL="tiny-gpt2").status == 0


def test_random_weights_say_so_and_a_seed_makes_them():
    words = ["forward", "-c", "mini.yaml", "--ids", "1"]
    Path("mini.yaml").write_text(SMALL)
    assert "mini (mini.yaml) RANDOM WEIGHTS (seed 0) · " in done(*words).out
    assert done(*words, "--json").json["model"]["seed"] == 0
    assert done(*words, "--seed", "7", "--json").json["model"] | {"seed": 0} == done(*words, "--json").json["model"]
    assert done(*words, "--seed", "0").out == done(*words).out != done(*words, "--seed", "7").out
    assert done("forward", "--json").json["model"]["seed"] is None and "RANDOM" not in done("forward").out


def test_keys_that_nobody_knows_are_noted_and_never_obeyed_by_the_terminal(folder):
    sample = shipped.samples()["tiny-gpt2"]
    (folder / "m").mkdir()
    for path in sample.iterdir():
        (folder / "m" / path.name).write_bytes(path.read_bytes())
    config = json.loads((sample / "config.json").read_text())
    (folder / "m/config.json").write_text(json.dumps(config | {"warp_\x1b[31mdrive": 9}))
    ran = gptcli("topk", "-m", "m", "cat")
    assert ran.status == 0 and "note: m/config.json: unknown keys, not used: warp_\\x1b[31mdrive\n" in ran.err
    ran = gptcli("topk", "-m", "m", "cat", "--json")
    assert ran.json["model"]["notes"] == ["m/config.json: unknown keys, not used: warp_\x1b[31mdrive"]
    assert ran.out[:-1].isprintable()


# Giving a text


def ids_of(*words, **options) -> list[list[int]]:
    return [[token["id"] for token in text] for text in done("tokens", *words, "--json", **options).json["tokens"]]


def bytes_of(*words, **options) -> list[bytes]:
    texts = done("tokens", "-m", "tiny-gpt2", *words, "--json", **options).json["tokens"]
    return [bytes(byte for token in text for byte in token["bytes"]) for text in texts]


def test_arguments_join_with_one_space():
    assert bytes_of("a", "b  c", "d") == [b"a b  c d"]
    assert ids_of("Cats", "sit", "on") == ids_of("Cats sit on") == [[12, 45, 78]]


def test_the_prompt_serves_when_no_text_is_given():
    assert ids_of() == [[12, 45, 78]]
    assert done("forward").out == done("forward", "Cats sit on").out


def test_standard_input_loses_one_final_newline():
    assert bytes_of("-", stdin=b"a b") == bytes_of("-", stdin=b"a b\n") == bytes_of("-", stdin=b"a b\r\n") == [b"a b"]
    assert bytes_of("-", stdin=b"\na\r\nb \n\n") == [b"\na\r\nb \n"]
    assert bytes_of("-", stdin="é日\n".encode()) == ["é日".encode()]


def test_batch_takes_arguments_or_lines_as_texts():
    assert bytes_of("--batch", "a b", "c") == [b"a b", b"c"]
    assert bytes_of("--batch", "-", stdin=b"a b\nc\r\n") == [b"a b", b"c"]
    assert bytes_of("--batch", "-", stdin="a\u2028b\x0cc\n".encode()) == ["a\u2028b\x0cc".encode()]


def test_a_text_of_a_batch_gives_what_it_gives_alone():
    together = done("topk", "--batch", "Cats sit on", "on", "--json").json["next"]
    for number, text in enumerate(["Cats sit on", "on"]):
        [alone] = done("topk", text, "--json").json["next"]
        assert together[number]["text"] == number and together[number]["position"] == alone["position"]
        for one, other in zip(together[number]["top"], alone["top"], strict=True):
            assert one["id"] == other["id"] and one["logit"] == pytest.approx(other["logit"], abs=1e-6)


def test_ids_in_every_form(folder):
    (folder / "ids.json").write_text("[[12, 45, 78]]\n")
    (folder / "ids.txt").write_text("12\n45\n78\n")
    for form in ("12,45,78", "12, 45, 78", "12 45 78", "[12,45,78]", "[[12, 45, 78]]", "@ids.json", "@ids.txt"):
        assert ids_of("--ids", form) == [[12, 45, 78]]
    assert ids_of("--ids", "[[12], [45, 78]]") == [[12], [45, 78]]
    assert done("forward", "--ids", "12,45,78").out == done("forward").out


def test_decode_prints_the_text_that_ids_stand_for():
    assert done("tokens", "--ids", "[[12, 45, 78], [90]]", "--decode").out == "Cats sit on\nmats\n"
    ids = ",".join(map(str, ids_of("-m", "tiny-gpt2", "The cat, é")[0]))
    words = ["tokens", "-m", "tiny-gpt2", "--ids", ids, "--decode"]
    assert done(*words).out == done(*words, "-q").out == "The cat, é\n"
    assert done(*words, "--json").json["text"] == ["The cat, é"] and done("tokens", "--json").json["text"] is None


# The next token


def test_forward_shows_the_shapes_and_the_document_s_numbers():
    report = done("forward", "--json").json
    assert [stage["shape"] for stage in report["stages"]] == [[1, 3], *[[1, 3, 4]] * 4, [1, 3, 256]]
    assert [stage["path"] for stage in report["stages"]][1:-1] == [
        "embed", "layers.0.resid_post", "layers.1.resid_post", "final_norm",
    ]  # fmt: skip
    assert report["stages"][1]["last"] == pytest.approx(GOLDEN["embedding"][-1])
    for number in (0, 1):
        last = GOLDEN["layers"][number]["resid_post"][-1]
        assert report["stages"][2 + number]["last"] == pytest.approx(last, abs=1e-6)
    [found] = report["next"]
    wanted = dict(zip((90, 91, 92), GOLDEN["logits at ids 90,91,92 for each position"][-1]))
    for one in found["top"]:
        assert one["logit"] == pytest.approx(wanted.get(one["id"], 0.0), abs=1e-6)


def test_stages_opens_the_layers():
    paths = [stage["path"] for stage in done("forward", "--stages", "--json").json["stages"]]
    listed = [point["path"] for point in done("trace", "--list", "--json").json["points"]]
    assert set(listed) - set(paths) == {f"layers.{i}.attn.{name}" for i in (0, 1) for name in ("scores", "pattern")}


def test_ties_fold_into_one_row_and_asked_words_keep_theirs():
    rows = done("topk").out.splitlines()[-3:]
    assert [" ".join(row.split()[:3]) for row in rows] == ["1 90 mats", "2–255 92 volcano", "256 91 chairs"]
    assert rows[1].endswith("  254 ids tie")
    # 254 of the 256 rows of the head are zeros, so that many logits are 0; the first ids stand for them all.
    [found] = done("topk", "-k", "4", "--json").json["next"]
    assert [one["id"] for one in found["top"]] == [90, 0, 1, 2, 92, 91]
    assert [one["rank"] for one in found["top"]] == [1, 2, 3, 4, 92, 256]  # 90 and 91 don't tie
    assert [one["tie"] for one in found["top"]] == [None, *[[2, 255]] * 4, None]
    assert [one["asked"] for one in found["top"]] == [False, False, False, False, True, True]
    assert len(done("topk", "-k", "1000", "--json").json["next"][0]["top"]) == 256


def test_token_adds_a_row():
    ran = done("topk", "-m", "tiny-gpt2", "The cat", "-k", "2", "--token", "mat", "--token", "the", "--json")
    row = logits_of("-m", "tiny-gpt2", "The cat")[0, -1]
    top = ran.json["next"][0]["top"]
    assert {one["token"] for one in top if one["asked"]} == {"mat", "␣the"}  # `the` is a token after a space alone
    assert len(top) == 4 and [one["rank"] for one in top] == sorted(one["rank"] for one in top)
    for one in top:
        assert one["rank"] == 1 + int((row > row[one["id"]]).sum())
        assert one["logit"] == pytest.approx(float(row[one["id"]]), abs=1e-5)


@pytest.mark.parametrize("option", ["-k", "--top-k"])
def test_top_k_is_that_many(option):
    row = logits_of("-m", "tiny-gpt2", "The cat")[0, -1]
    best = numpy.argsort(-row, kind="stable")[:3].tolist()
    for command in ("topk", "forward"):
        [found] = done(command, "-m", "tiny-gpt2", "The cat", option, "3", "--json").json["next"]
        assert [one["id"] for one in found["top"]] == best


def test_position_all_is_every_position():
    logits = logits_of("--batch", "Cats sit on", "sit on")
    found = done("topk", "--batch", "Cats sit on", "sit on", "--position", "all", "--json").json["next"]
    assert [(one["text"], one["position"]) for one in found] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    for one in found:
        column = one["position"] + (1 if one["text"] else 0)  # the shorter text is padded on the left
        assert one["top"][0]["logit"] == pytest.approx(float(logits[one["text"], column].max()), abs=1e-6)
    for position, same in (("0", 0), ("-1", 2), ("-3", 0)):
        [other] = done("topk", "--position", position, "--json").json["next"]
        assert other["position"] == same


def test_temperature_divides_the_logits_before_the_softmax():
    words = ["topk", "-m", "tiny-gpt2", "The cat", "-k", "320", "--json"]
    plain = done(*words).json["next"][0]["top"]
    logits = dict(sorted((one["id"], one["logit"]) for one in plain))
    assert list(logits) == list(range(320))
    assert list(logits.values()) == pytest.approx(logits_of("-m", "tiny-gpt2", "The cat")[0, -1].tolist(), abs=1e-5)
    for temperature in (0.25, 1.0, 3.0):
        ran = done(*words, "--temperature", temperature)
        probabilities = softmax([logit / temperature for logit in logits.values()])
        assert ran.json["temperature"] == temperature
        for one, same in zip(ran.json["next"][0]["top"], plain, strict=True):
            assert (one["id"], one["rank"], one["logit"]) == (same["id"], same["rank"], same["logit"])
            assert one["prob"] == pytest.approx(probabilities[one["id"]], rel=1e-9)
            assert one["logprob"] == pytest.approx(math.log(probabilities[one["id"]]), rel=1e-9)


# Scores


def test_score_is_each_token_under_the_logits_before_it():
    text = "The cat sat on the mat"
    logits = logits_of("-m", "tiny-gpt2", text)[0]
    [found] = done("score", "-m", "tiny-gpt2", text, "--json").json["texts"]
    first, *others = found["tokens"]
    assert (first["logprob"], first["rank"], first["bits"]) == (None, None, None)
    wanted = []
    for position, one in enumerate(others):
        row = logits[position]
        wanted.append(math.log(softmax(row)[one["id"]]))
        assert one["position"] == position + 1
        assert one["logprob"] == pytest.approx(wanted[-1], rel=1e-9)
        assert one["bits"] == pytest.approx(-wanted[-1] / math.log(2), rel=1e-9)
        assert one["rank"] == 1 + sum(x > row[one["id"]] for x in row)  # no two logits of this sample are equal
    total = math.fsum(wanted)
    assert found["scored"] == len(wanted) == 5
    assert found["sum"] == pytest.approx(total, rel=1e-9)
    assert found["mean"] == pytest.approx(total / 5, rel=1e-9)
    assert found["perplexity"] == pytest.approx(math.exp(-total / 5), rel=1e-9)
    assert found["bits"] == pytest.approx(-total / math.log(2), rel=1e-9)


def test_score_of_the_worked_example():
    [found] = done("score", "Cats sit on mats", "--json").json["texts"]
    assert found["tokens"][3]["logprob"] == pytest.approx(
        GOLDEN["log-probability of 90 (mats) at the last position"], abs=1e-6
    )
    assert found["tokens"][3]["rank"] == 1
    # Behind `mats` (and, there, `chairs`), `sit` 45 and `on` 78 stand in the order of ids among those of logit 0.
    assert [one["rank"] for one in found["tokens"][1:3]] == [2 + 46, 2 + 79]


# Traces


@pytest.mark.parametrize(
    "words, pairs",
    [
        ([], [(0, 0)]),
        (["--layer", "1", "--head", "0"], [(0, 0)]),
        (["--layer", "2"], [(1, 0)]),
        (["--layer", "L0"], [(0, 0)]),
        (["--layer", "l1", "--head", "h1"], [(1, 1)]),
        (["--layer", "-1"], [(1, 0)]),
        (["--layer", "-2", "--head", "-1"], [(0, 1)]),
        (["--layer", "all"], [(0, 0), (1, 0)]),
        (["--head", "all"], [(0, 0), (0, 1)]),
        (["--layer", "all", "--head", "all"], [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (["--at", "L0H1"], [(0, 1)]),
        (["--at", "l1h0"], [(1, 0)]),
    ],
)
def test_layers_count_from_1_and_heads_from_0(words, pairs):
    walks = done("trace", *words, "--json").json["walks"]
    assert [(walk["layer_index"], walk["head"]) for walk in walks] == pairs
    assert all(walk["path"] == f"layers.{walk['layer_index']}" for walk in walks)
    title = r"^Layer (\d) of 2 \(layers\.(\d)\) · Head (\d) of 2 = L(\d)H(\d) · query"
    titles = re.findall(title, done("trace", *words).out, re.M)
    assert titles == [(str(i + 1), str(i), str(h), str(i), str(h)) for i, h in pairs]


def test_the_short_name_of_a_head_is_its_layer_and_head():
    assert done("trace", "--at", "L0H1").out == done("trace", "--layer", "1", "--head", "1").out
    assert done("trace", "--at", "L1H0", "--position", "0").out == done("trace", "--layer", "2", "--position", "0").out


def keys_of(value) -> set[str]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return {*(value if isinstance(value, dict) else [])}.union(*map(keys_of, inside))


def test_json_never_says_a_bare_layer():
    for words in EVERY.values():
        assert "layer" not in keys_of(done(*words, "--json").json)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_trace_holds_the_document_s_numbers(layer, head, position):
    gold = GOLDEN["layers"][layer]
    [walk] = done("trace", "--at", f"L{layer}H{head}", "--position", position, "--json").json["walks"]
    steps = {step["label"]: step["values"] for step in walk["before"] + walk["after"]}
    for label, name in (
        ("resid_pre", "resid_pre"), ("attn_norm", "norm1"), ("attn_out", "attn_out"), ("resid_mid", "resid_mid"),
        ("mlp_norm", "norm2"), ("mlp.up", "mlp up"), ("mlp.act", "mlp activation"), ("mlp_out", "mlp_out"),
        ("resid_post", "resid_post"),
    ):  # fmt: skip
        assert steps[label] == pytest.approx(gold[name][position], abs=1e-5)
    for label, name in (("attn.q", "q = k = v"), ("attn.q_rot", "q_rot = k_rot"), ("attn.z", "z")):
        [values] = [value for key, value in gold.items() if key.startswith(name)]
        assert steps[label] == pytest.approx(values[head][position], abs=1e-5)
    scores = gold["scores (scaled, before mask) [head][query][key]"][head][position]
    assert [key["scaled"] for key in walk["keys"]] == pytest.approx(scores, abs=1e-5)
    assert [key["weight"] for key in walk["keys"]] == pytest.approx(gold["pattern"][head][position], abs=1e-6)
    assert [key["visible"] for key in walk["keys"]] == [key <= position for key in range(3)]


def test_at_prints_one_activation_whole():
    report = done("trace", "--at", "layers.1.attn.pattern", "--json").json
    assert report["shape"] == [1, 2, 3, 3] and report["axes"] == "BHTS"
    for head in (0, 1):
        for query in range(3):
            wanted = GOLDEN["layers"][1]["pattern"][head][query]
            assert report["values"][0][head][query] == pytest.approx(wanted, abs=1e-6)
    assert report["mean"] == pytest.approx(1 / 3)  # six rows of three weights that sum to 1


FUSED, SUMS, MASKED = "weights @ v = the fused kernel's z", "rows of weights sum to 1", "masked weights are 0"
ATTENTION, MLP = "resid_pre + attn_out = resid_mid", "resid_mid + mlp_out = resid_post"
BITS = "logits have the same bits unwatched"


def failed(ran) -> set[str]:
    return {check["claim"] for check in ran.json["proof"] if not check["ok"]}


def test_the_proof_makes_these_claims_and_they_hold():
    report = done("trace", "--json").json
    assert [check["claim"] for check in report["proof"]] == [FUSED, SUMS, MASKED, ATTENTION, MLP, BITS]
    assert failed(done("trace", "--json")) == set() and "proof ok" in done("trace").out


def spread(pattern, mask):
    """Every visible key weighs the same: rows still sum to 1, hidden keys still weigh 0."""
    return (mask / mask.sum(-1, keepdim=True)).to(pattern.dtype).expand_as(pattern)


@pytest.mark.parametrize(
    "change, claims",
    [
        (spread, {FUSED}),
        (lambda pattern, mask: pattern * 1.001, {FUSED, SUMS}),
        (lambda pattern, mask: pattern.masked_fill(~mask, 1e-9), {MASKED}),
        (lambda pattern, mask: pattern.roll(1, -1), {FUSED, MASKED}),
        (lambda pattern, mask: pattern * math.nan, {FUSED, SUMS, MASKED}),
    ],
    ids=["other weights", "larger weights", "hidden keys seen", "keys shifted", "NaN"],
)
def test_wrong_weights_fail_the_proof(change, claims, monkeypatch):
    from gptcli.model import attention

    honest = attention.weigh

    def weigh(q, k, mask, *others):
        scores, pattern, sink = honest(q, k, mask, *others)
        return scores, change(pattern, mask), sink

    monkeypatch.setattr(attention, "weigh", weigh)
    ran = gptcli("trace", "--json")
    assert ran.status == 1 and failed(ran) == claims
    assert [finding["code"] for finding in ran.json["findings"]] == ["proof"] * len(claims)
    ran = gptcli("trace")
    assert ran.status == 1 and "proof FAILED" in ran.out and "proof ok" not in ran.out
    assert all(f"finding proof: {claim}" in ran.err for claim in claims)
    assert all(claim in gptcli("trace", "-q").out for claim in claims)


@pytest.mark.parametrize("name, claim", [("attn_out", ATTENTION), ("mlp_out", MLP)])
def test_a_sum_that_does_not_add_up_fails_the_proof(name, claim, monkeypatch):
    honest = Recorder.__call__

    def note(self, path, x):
        honest(self, path, x + 1e-6 if path == name else x)
        return x

    monkeypatch.setattr(Recorder, "__call__", note)
    ran = gptcli("trace", "--json")
    assert ran.status == 1 and failed(ran) == {claim}


def test_a_probe_that_changes_the_run_fails_the_proof(monkeypatch):
    honest = Recorder.__call__

    def meddle(self, path, x):
        return honest(self, path, x) + (1e-6 if path == "resid_pre" else 0)

    monkeypatch.setattr(Recorder, "__call__", meddle)
    ran = gptcli("trace", "--layer", "2", "--json")
    assert ran.status == 1 and BITS in failed(ran)


def test_the_proof_is_as_strict_as_its_tolerance(monkeypatch):
    monkeypatch.setattr("gptcli.report.trace.TOLERANCE", {"float32": 0.0})
    assert failed(gptcli("trace", "--json")) == {FUSED}


# Streams


@every_command
def test_json_is_one_strict_object_with_schema_and_status_first(words):
    ran = done(*words, "--json")
    assert list(ran.json)[:2] == ["schema", "status"]
    assert re.fullmatch(r"gptcli(\.\w+)+/1", ran.json["schema"]) and ran.json["status"] == "ok"
    assert ran.json["findings"] == [] and ran.out[:-1].isprintable()


def test_every_command_is_tried():
    assert {"bench", *(words[0] for words in EVERY.values())} == {name for name, _, _ in (*COMMANDS, *GROUPS)}


def test_quiet_prints_the_values_alone():
    assert done("forward", "-q").out == "90\tmats\n"
    assert done("topk", "-k", "1", "-q").out == "90\tmats\n92\tvolcano\n91\tchairs\n"
    assert done("params", "gpt2-small", "--quiet").out == "124439808\n"
    assert done("tokens", "-q").out == "12 45 78\n"
    assert done("trace", "-q").out == "ok\n"
    [scored] = done("score", "Cats sit on mats", "--json").json["texts"]
    assert float(done("score", "-q", "Cats sit on mats").out) == scored["sum"]
    names = [*shipped.configs(), *shipped.samples()]
    assert done("list", "-q").out.split() == names
    for words in EVERY.values():
        assert gptcli(*words, "-q").err == ""


def test_config_prints_the_file_to_edit(folder):
    path = shipped.configs()["cats"]
    assert done("config", "cats").out == path.read_text(encoding="utf-8") == done("config", "-q").out
    odd = "# a tab:\there\n" + SMALL + 'prompt: "a\tb  "\n'
    (folder / "odd.yaml").write_text(odd)
    assert done("config", "-c", "odd").out == odd
    written = done("config", "tiny-gpt2").out
    (folder / "written.yaml").write_text(written)
    same = [done("params", "-q", *words).out for words in (["tiny-gpt2"], ["-c", "written"])]
    assert same[0] == same[1]


@every_command
def test_a_pipe_gets_no_colour_and_the_same_bytes_every_time(words):
    first = done(*words)
    assert "\x1b" not in first.out and "ms" not in re.findall(r"\w+", first.out)
    assert first.out == done(*words).out
    assert all(line == line.rstrip() for line in first.out.splitlines())


def test_two_processes_print_the_same_bytes():
    words = ["trace", "-m", "tiny-gpt2", "The cat", "--layer", "all", "--head", "all"]
    one, other = process(*words), process(*words)
    assert one.status == 0 and one.out == other.out == done(*words).out
    assert re.fullmatch(r"[\d,.]+ ms · 2 tokens · [\d,]+ tokens/s\n", one.err)


@every_command
def test_colour_where_a_terminal_or_a_person_asks_for_it(words):
    plain = done(*words, columns=200, NO_COLOR="1").out
    assert "\x1b" not in plain
    assert done(*words, "--color", "never", columns=200).out == plain == done(*words, columns=200, TERM="dumb").out
    assert ESCAPE.sub("", done(*words, columns=200).out) == plain
    always = done(*words, "--color", "always", NO_COLOR="1").out
    assert ESCAPE.sub("", always) == done(*words).out
    assert words == ["config"] or ("\x1b[" in always and "\x1b[" in done(*words, columns=200).out)


def test_nothing_is_cut_in_a_pipe():
    tokens = ["Cats"] * 16
    assert all(len(line) > 100 for line in done("tokens", *tokens, "--json").out.splitlines())
    for one in done("list", "--json").json["shipped"]:
        assert any(one["name"] in line and one["about"] in line for line in done("list").out.splitlines())


@every_command
def test_a_terminal_that_knows_ascii_alone_gets_look_alikes(words):
    shown = done(*words, encoding="ascii").out
    assert shown.isascii() and "?" not in shown and "\\u" not in shown
    assert strict(done(*words, "--json", encoding="ascii").out) == done(*words, "--json").json
    assert gptcli("trace", "--position", "x", encoding="ascii").status == 2


def test_ascii_of_the_signs_in_a_trace():
    shown = done("trace", encoding="ascii").out
    assert "x/sqrt(mean(x^2)+eps)-w" in shown and "position-theta^(-2i/D)" in shown
    assert "2-255" in done("topk", encoding="ascii").out and "#######" in done("topk", encoding="ascii").out


@pytest.mark.parametrize("words", [["trace"], ["--help"], ["trace", "--help"], ["trace", "--layer", "0"]], ids=" ".join)
def test_a_process_in_ascii(words):
    ran = process(*words, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert ran.status == (2 if "0" in words else 0)
    assert (ran.out + ran.err).isascii() and "\\u" not in ran.out + ran.err


AT_80 = [
    *(words for words in EVERY.values() if words != ["config"]),  # a file's own lines stay as they are
    ["forward", "--stages"],
    ["trace", "-c", "attention-by-hand"],
    ["trace", "--layer", "all", "--head", "all"],
    ["params", "gpt2-small"],
    ["params", "gpt2-small", "--by", "tensor"],
    ["params", "llama3.1-405b"],
    ["params", "llama3.1-405b", "--by", "layer"],
    ["forward", "-m", "tiny-gpt2", "The cat sat on the mat"],
    ["forward", "-m", "tiny-gpt2", "--stages", "The cat sat on the mat"],
    ["forward", "-m", "tiny-gpt2", *["The cat sat on the mat."] * 5],
    ["topk", "-m", "tiny-gpt2", "--position", "all", "The cat sat on the mat"],
    ["score", "-m", "tiny-gpt2", "The cat sat on the mat"],
    ["trace", "-m", "tiny-gpt2", "The cat sat on the mat"],
    ["params", "tiny-gpt2"],
    ["params", "tiny-gpt2", "--by", "tensor"],
    ["inspect", "tiny-gpt2"],
    ["inspect", "tiny-gpt2", "--stats"],
]


@pytest.mark.parametrize("words", AT_80, ids=" ".join)
def test_80_columns_suffice(words):
    too_long = [line for line in done(*words, columns=80, NO_COLOR="1").out.splitlines() if cell_len(line) > 80]
    assert not too_long


def test_the_layout_of_interface():
    """The worked example, as its description prints it."""
    assert done("forward", columns=80, NO_COLOR="1").out == FORWARD


FORWARD = """\
cats (shipped, hand-written weights) · 2,324 parameters · float32 · cpu
tokens  0 Cats 12   1 sit 45   2 on 78
stage      shape               mean    std    max  last token (on)
input ids  [B,T]   [1,3]                           78
embedding  [B,T,C] [1,3,4]   0.1667 0.2593 0.6000   0.1000 0.2000 -0.2000 0.6000
layer 1    [B,T,C] [1,3,4]   1.6489 1.4752 4.0226  -0.0551 2.0614 -0.1897 4.0226
layer 2    [B,T,C] [1,3,4]   3.2450 2.7049 7.4768  -0.0134 4.1119 -0.1371 7.4768
final norm [B,T,C] [1,3,4]   0.7686 0.6397 1.7522  -0.0031 0.9637 -0.0321 1.7522
logits     [B,T,V] [1,3,256] 0.0041 0.0562 0.9684  next token:
 rank  id  token      logit    prob  log-prob
    1  90  mats      0.9073  0.0096   -4.6433  ████████████
2–255  92  volcano   0.0000  0.0039   -5.5506  █████  254 ids tie
  256  91  chairs   -0.0911  0.0035   -5.6417  ████
"""


def test_digits_and_full():
    assert "0.9073" in done("topk").out and "0.907294" in done("topk", "--digits", "6").out
    assert "0.91 " in done("topk", "--digits", "2").out and "0.907" not in done("topk", "--digits", "2").out
    words = ["forward", "-m", "tiny-gpt2", "The cat"]
    last = done(*words, "--json").json["stages"][1]["last"]
    assert len(last) == 32 and "…" in done(*words).out
    row = next(line for line in done(*words, "--full").out.splitlines() if line.startswith("embedding"))
    assert [float(word) for word in row.split()[-32:]] == pytest.approx(last, abs=1e-4)
    assert "…" not in done("trace", "-m", "tiny-gpt2", "The cat", "--full").out


def test_a_long_text_lists_the_heaviest_keys():
    words = ["trace", "-m", "tiny-gpt2", "--ids", ",".join(map(str, range(40)))]
    shown = done(*words).out
    assert "… 24 keys more" in shown and "keys more" not in done(*words, "--full").out
    [walk] = done(*words, "--json").json["walks"]
    weights = [key["weight"] for key in walk["keys"]]
    heaviest = sorted(range(40), key=lambda i: -weights[i])[:16]
    positions = re.findall(r"^(\d+) \S+ +[\d.]+ +-?[\d.]+ +-?[\d.]+ +0 ", shown, re.M)
    assert [int(position) for position in positions] == sorted(heaviest)


def test_names_with_escape_sequences_never_reach_the_terminal(folder):
    named = 'name: "evil\\e[31m\\a"\nvocabulary: {0: a, 1: "\\e[2J"}\n'
    (folder / "\x1b]0;title\x07.yaml").write_text(SMALL + named)
    for command in ("forward", "topk", "trace", "params", "tokens"):
        text = ["--ids", "0,1"] if command != "params" else []
        for options in ({}, {"columns": 80}):
            ran = gptcli(command, "-c", "\x1b]0;title\x07.yaml", *text, **options)
            assert ran.status == 0
            assert ESCAPE.sub("", ran.out).replace("\n", "").isprintable() and ran.err.replace("\n", "").isprintable()
            assert "[2J" not in ESCAPE.sub("", ran.out).replace("\\x1b[2J", "")
        assert gptcli(command, "-c", "\x1b]0;title\x07.yaml", *text, "--json").out[:-1].isprintable()


def test_markup_in_a_token_is_text(folder):
    words = "vocabulary: {0: '[/INST]', 1: '[bold]', 2: ':smile:', 3: '[red]x[/red]'}\n"
    (folder / "mine.yaml").write_text(SMALL + words)
    shown = done("forward", "-c", "mine.yaml", "--ids", "0,1,2,3", "--color", "always").out
    for word in ("[/INST]", "[bold]", ":smile:", "[red]x[/red]"):
        assert word in shown


# Files


@pytest.mark.parametrize(
    "dtype, kind", [("f32", "float32"), ("float64", "float64"), ("bf16", "float32"), ("f16", "float32")]
)
def test_logits_as_files(dtype, kind):
    words = ["forward", "--batch", "Cats sit on", "on", "--dtype", dtype]
    ran = done(*words, "-o", "x.safetensors", "-o", "x.npy", "-o", "x.json", "--json")
    tensors = load_file("x.safetensors")
    assert {name: (t.shape, str(t.dtype)) for name, t in tensors.items()} == {
        "logits": ((2, 3, 256), kind), "ids": ((2, 3), "int64"),
    }  # fmt: skip
    assert tensors["ids"].tolist() == [[12, 45, 78], [0, 0, 78]]
    assert numpy.array_equal(numpy.load("x.npy"), tensors["logits"]) and numpy.load("x.npy").dtype == kind
    assert Path("x.json").read_text(encoding="utf-8") == ran.out
    golden = GOLDEN["logits at ids 90,91,92 for each position"]
    tolerance = {"f32": 1e-6, "float64": 1e-9}.get(dtype, 5e-2)
    assert tensors["logits"][0, :, 90:93] == pytest.approx(numpy.array(golden), abs=tolerance)


@every_command
def test_every_command_writes_its_json(words):
    ran = done(*words, "-o", "x.json")
    assert strict(Path("x.json").read_text(encoding="utf-8")) == done(*words, "--json").json
    assert ran.out == done(*words).out


def test_what_is_there_is_kept_without_force():
    Path("x.json").write_text("kept")
    assert gptcli("params", "-o", "x.json").status == 2 and Path("x.json").read_text() == "kept"
    done("params", "-o", "x.json", "--force")
    assert strict(Path("x.json").read_text())["status"] == "ok"


@pytest.mark.parametrize("suffix, function", [(".npy", "numpy.save"), (".safetensors", "safetensors.torch.save_file")])
def test_a_file_appears_whole_or_not_at_all(suffix, function, monkeypatch, folder):
    def fill_the_disk(*given, **_options):
        target = next(one for one in given if hasattr(one, "write") or isinstance(one, Path))
        target.write(b"half") if hasattr(target, "write") else target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    path = folder / f"x{suffix}"
    path.write_bytes(b"old")
    monkeypatch.setattr(function, fill_the_disk)
    ran = gptcli("forward", "-o", path, "--force")
    assert (ran.status, ran.out) == (2, "") and "No space left on device" in ran.err
    assert [one.name for one in folder.iterdir()] == [path.name] and path.read_bytes() == b"old"


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_written_files_have_ordinary_permissions(umask, mode):
    before = os.umask(umask)
    try:
        done("forward", "-o", "x.safetensors", "-o", "x.npy", "-o", "x.json")
    finally:
        os.umask(before)
    for suffix in ("safetensors", "npy", "json"):
        assert stat.S_IMODE(Path(f"x.{suffix}").stat().st_mode) == mode


# Processes


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["-h"], ["forward", "dog", "--json"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_error(words):
    writer = subprocess.Popen([sys.executable, "-m", "gptcli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    writer.stdout.close()
    said = writer.stderr.read().decode()
    assert writer.wait(60) == (2 if "dog" in words else 0)
    assert said.count("gptcli:") == said.count("\n") == ("dog" in words)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's full device")
def test_a_full_disk_is_one_line():
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run([sys.executable, "-m", "gptcli", "list"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 2 and ran.stderr == "gptcli: No space left on device\n"


def test_streams_that_are_closed():
    closed = "{0} -m gptcli list >&- && {0} -m gptcli topk -q <&- && {0} -m gptcli -V 2>&-"
    ran = subprocess.run(closed.format(sys.executable), shell=True, capture_output=True, text=True)  # noqa: S602
    assert ran.returncode == 0 and ran.stderr == ""
    assert ran.stdout.startswith("90\tmats\n") and ran.stdout.endswith(f"gptcli {__version__}\n")


def test_in_a_real_terminal_of_80_columns():
    """Colours, the terminal's own width, and the time on the other stream."""
    pty, termios, fcntl = (pytest.importorskip(name) for name in ("pty", "termios", "fcntl"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "GPTCLI_MODEL")}
    command = [sys.executable, "-m", "gptcli", "trace", "-c", "attention-by-hand"]
    ran = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=kept | {"TERM": "xterm"})
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # how a terminal says that nobody is left to write to it
        pass
    os.close(ours)
    assert ran.wait(60) == 0 and b"tokens/s" in ran.stderr.read()
    lines = shown.decode().replace("\r\n", "\n").splitlines()
    assert any("\x1b[" in line for line in lines)
    assert "\n".join(ESCAPE.sub("", line) for line in lines) + "\n" == done(*command[3:], columns=80, NO_COLOR="1").out
    assert max(cell_len(ESCAPE.sub("", line)) for line in lines) <= 80
