"""`heads`: what each head does, against a plain loop over patterns of a run of its own, and heads built by hand.

A head that is built to look one token back scores 1 there, and an induction head of two layers all but 1 on a text that
repeats itself: the first layer writes each token's predecessor beside it, the second looks for where the predecessor is
the query's own token (arXiv:2209.11895).
"""

import json
import math
import re

import pytest
import torch
import yaml
from rich.cells import cell_len
from rich.text import Text

import gptcli
from gptcli.model.init import random_weights
from gptcli.model.patterns import measures
from gptcli.model.weights import Weights
from gptcli.report.heads import FIELDS, followers, heads_report, random_twice
from gptcli.run import Run
from gptcli.shipped import configs
from gptcli.source import Model, open_model
from gptcli.tokens import Rule
from tests.command import gptcli as run
from tests.test_maps import Kept
from tests.toys import shrunk

SENTENCE = "The cat sat on the mat because it was tired"
KINDS = ("previous", "first", "self", "entropy", "induction", "distance")
TOY = """\
vocab_size: 32
context_length: 64
hidden_size: 16
n_layers: 2
position: {kind: rope}
norm: {kind: rmsnorm}
attention: {n_heads: 4, n_kv_heads: 2, head_dim: 4, scale: 400.0MORE}
mlp: {kind: dense, size: 8, activation: relu}
lm_head: {tied: true}
"""
IDS = [5, 17, 3, 3, 9, 5, 17, 30, 17, 5, 5, 21]


def by_loop(pattern: list[list[float]], sink: list[float] | None, ids: list[int], seen) -> dict[str, float | None]:
    """The definitions, one query after another. seen(query, key): does the mask let it?"""
    found: dict[str, list[float]] = {name: [] for name in (*KINDS, "bits")}
    for query, weights in enumerate(pattern):
        keys = [key for key in range(len(ids)) if seen(query, key)]
        among = [weights[key] for key in keys] + ([] if sink is None else [sink[query]])
        if len(among) < 2:
            continue
        if query > 0 and query - 1 in keys:
            found["previous"].append(weights[query - 1])
        if query > 0 and 0 in keys:
            found["first"].append(weights[0])
        if query in keys:
            found["self"].append(weights[query])
        earlier = [key for key in range(query) if ids[key] == ids[query]]
        if earlier and earlier[-1] + 1 != query and earlier[-1] + 1 in keys:
            found["induction"].append(weights[earlier[-1] + 1])
        bits = -sum(p * math.log2(p) for p in among if p > 0)
        found["bits"].append(bits)
        found["entropy"].append(bits / math.log2(len(among)))
        total = sum(weights[key] for key in keys)
        found["distance"].append(sum(weights[key] * abs(query - key) for key in keys) / total)
    return {name: math.fsum(xs) / len(xs) if xs else None for name, xs in found.items()}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def made(more: str = "") -> str:
        (tmp_path / "toy.yaml").write_text(TOY.replace("MORE", more))
        return "toy.yaml"

    return made


def ranked(*words: object) -> dict:
    ran = run("heads", *words, "--json")
    assert ran.status == 0, ran.err
    assert ran.json["schema"] == "gptcli.heads/1" and ran.json["status"] == "ok"
    return ran.json


def near(found: dict, right: dict) -> None:
    for kind, number in right.items():
        field = "entropy" if kind == "bits" else FIELDS.get(kind, kind)
        assert found[field] == (None if number is None else pytest.approx(number, rel=1e-5, abs=1e-7)), kind


@pytest.mark.parametrize(
    "more, seen",
    [
        ("", lambda query, key: key <= query),
        (", window: 3", lambda query, key: 0 <= query - key < 3),
        (", sinks: true", lambda query, key: key <= query),
        (", window: 2, sinks: true", lambda query, key: 0 <= query - key < 2),
        (", causal: false", lambda query, key: True),
        (", causal: false, window: 3", lambda query, key: abs(query - key) < 3),
        (", window: 1", lambda query, key: query == key),
    ],
)
def test_every_number_is_the_definition_s(more, seen, toy):
    report = ranked("-c", toy(more), "--ids", ",".join(map(str, IDS)))
    kept = gptcli.open(config=toy(more)).activations(IDS, "layers.*.attn.pattern", "layers.*.attn.sink")
    assert {(one["layer_index"], one["head"]) for one in report["heads"]} == {
        (i, j) for i in range(2) for j in range(4)
    }
    for one in report["heads"]:
        at = f"{one['path']}.attn"
        pattern = kept[f"{at}.pattern"][0, one["head"]].double().tolist()
        sink = kept[f"{at}.sink"][0, one["head"]].double().tolist() if "sinks" in more else None
        near(one, by_loop(pattern, sink, IDS, seen))
        assert (one["kv_head"], one["n_kv_heads"], one["n_heads"]) == (one["head"] // 2, 2, 4)


def test_an_encoder_s_own_attention(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two = TOY.replace("MORE", "") + "encoder: {n_layers: 1}\n"
    (tmp_path / "two.yaml").write_text(two.replace("{kind: rope}", "{kind: sinusoidal}"))
    words = ["-c", "two.yaml", "--ids", "1,2,3", "--source-ids", ",".join(map(str, IDS))]
    report = ranked(*words, "--attention", "encoder")
    kept = gptcli.open(config="two.yaml").activations([1, 2, 3], "encoder.*.pattern", source=IDS)
    assert len(report["heads"]) == 4 and report["n_layers"] == 1
    for one in report["heads"]:
        pattern = kept["encoder.layers.0.attn.pattern"][0, one["head"]].double().tolist()
        near(one, by_loop(pattern, None, IDS, lambda query, key: True))
    assert "Encoder · 4 heads of 1 layers" in run("heads", *words, "--attention", "encoder").out
    assert len(ranked(*words)["heads"]) == 8


# Heads built by hand


def shifted(length: int, back: int) -> torch.Tensor:
    """Every query looks so many tokens back; those that can't, at the first."""
    pattern = torch.zeros(length, length)
    for query in range(length):
        pattern[query, max(query - back, 0)] = 1
    return pattern


CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()
NONE = torch.full((8,), -1)


def test_patterns_by_hand():
    found = measures(shifted(8, 1), None, CAUSAL, NONE)
    assert (found.previous, found.itself, found.entropy, found.distance) == (1, 0, 0, 1)
    assert found.first == pytest.approx(1 / 7) and math.isnan(found.induction)
    found = measures(shifted(8, 8), None, CAUSAL, NONE)
    assert (found.first, found.distance, found.entropy_share) == (1, sum(range(1, 8)) / 7, 0)
    found = measures(shifted(8, 0), None, CAUSAL, NONE)
    assert (found.itself, found.previous, found.first, found.distance) == (1, 0, 0, 0)
    even = CAUSAL / CAUSAL.sum(-1, keepdim=True)
    found = measures(even, None, CAUSAL, NONE)
    assert found.entropy_share == pytest.approx(1, abs=1e-7)
    assert found.entropy == pytest.approx(sum(math.log2(n) for n in range(2, 9)) / 7, rel=1e-6)
    assert found.distance == pytest.approx(sum((n - 1) / 2 for n in range(2, 9)) / 7, rel=1e-6)
    after = torch.tensor([-1, -1, -1, -1, 1, 2, 3, 4])
    repeated = torch.zeros(8, 8)
    repeated[torch.arange(4), 0] = 1
    repeated[torch.arange(4, 8), after[4:]] = 1
    assert measures(repeated, None, CAUSAL, after).induction == 1


def test_a_sink_is_a_choice_and_takes_part_in_the_entropy():
    """One key and a sink, half and half: one bit of one, and all that goes to keys goes to the query itself."""
    found = measures(0.5 * torch.eye(4), torch.full((4,), 0.5), torch.eye(4, dtype=torch.bool), NONE[:4])
    assert (found.itself, found.entropy, found.entropy_share, found.distance) == (0.5, 1, 1, 0)
    alone = measures(torch.eye(4), None, torch.eye(4, dtype=torch.bool), NONE[:4])
    assert all(math.isnan(number) for number in alone)


def test_followers_by_hand():
    """Ids a b a a c b: what followed the latest earlier one; a token beside itself has no other to look at."""
    assert followers([1, 2, 1, 1, 3, 2]) == [-1, -1, 1, -1, -1, 2]
    assert followers([7, 7, 7]) == [-1, -1, -1]
    assert followers([4, 5, 6, 4, 5, 6, 4]) == [-1, -1, -1, 1, 2, 3, 4]


WORDS = 8  # of the vocabulary
PLACES = 16


def one_hot(rows: int, width: int, at: int, by: float = 1.0, shift: int = 0) -> list[list[float]]:
    """Row i holds `by` at column at + i + shift, where that lies within `at` and the rows."""
    return [
        [by if column == at + row + shift and 0 <= row + shift < rows else 0.0 for column in range(width)]
        for row in range(rows)
    ]


def circuit() -> dict:
    """Two layers of one head on a stream of three slots: the token, its position, the token before it.

    Layer 0: a position's query is the key of the one before it; the value is the token, written to the third slot.
    Layer 1: the token's query is the key of the third slot. Nothing stands before position 0, which looks at itself:
    its third slot holds its own token, so that one later query of that token halves its weight.
    """
    size = WORDS + PLACES + WORDS
    token, place, before = 0, WORDS, WORDS + PLACES
    zero = [[0.0] * size for _ in range(size)]

    def matrix(of: int, rows: int, to: int, by: float = 1.0, shift: int = 0) -> list[list[float]]:
        """[in, out]: the slot `of` read into the slot `to`."""
        return [*zero[:of], *one_hot(rows, size, to, by, shift), *zero[of + rows :]]

    strong = 100 * math.sqrt(size)
    weights = {
        "embed.weight": {"rows": dict(enumerate(one_hot(WORDS, size, token)))},
        "pos_embed.weight": {"rows": dict(enumerate(one_hot(PLACES, size, place)))},
        "layers.0.attn.q.weight": matrix(place, PLACES, place, strong, shift=-1),
        "layers.0.attn.k.weight": matrix(place, PLACES, place),
        "layers.0.attn.v.weight": matrix(token, WORDS, token),
        "layers.0.attn.o.weight": matrix(token, WORDS, before),
        "layers.1.attn.q.weight": matrix(token, WORDS, before, strong),
        "layers.1.attn.k.weight": matrix(before, WORDS, before),
        "layers.1.attn.v.weight": matrix(token, WORDS, token),
        "layers.1.attn.o.weight": matrix(token, WORDS, token),
    }
    return {
        "name": "circuit",
        "vocab_size": WORDS,
        "context_length": PLACES,
        "hidden_size": size,
        "n_layers": 2,
        "position": {"kind": "learned"},
        "norm": {"kind": "none"},
        "attention": {"n_heads": 1, "head_dim": size},
        "mlp": {"kind": "none"},
        "lm_head": {"tied": True},
        "vocabulary": dict(enumerate("a b c d e f g h".split())),
        "weights": weights,
    }


@pytest.fixture
def induction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "circuit.yaml").write_text(yaml.safe_dump(circuit()))
    return ["-c", "circuit.yaml"]


def test_a_head_built_to_look_back_and_one_built_for_induction_score_1(induction):
    report = ranked(*induction, "a", "d", "c", "b", "h", "a", "d", "c", "b", "h")
    heads = {one["layer_index"]: one for one in report["heads"]}
    assert heads[0]["previous"] == pytest.approx(1, abs=1e-6) and heads[0]["distance"] == pytest.approx(1, abs=1e-6)
    assert heads[0]["entropy"] == pytest.approx(0, abs=1e-6)
    assert heads[1]["induction"] == pytest.approx((0.5 + 4) / 5, abs=1e-6)
    assert heads[1]["previous"] < 0.3 and heads[0]["induction"] < 0.01
    best = {one["kind"]: (one["layer_index"], one["head"]) for one in report["best"]}
    assert best["previous"] == (0, 0) and best["induction"] == (1, 0) and report["recurring"] == 5


def test_random_tokens_twice_find_the_induction_head(induction):
    """Eight words, drawn without one coming twice, and again: 16 tokens, of which each of the last 8 came before."""
    report = ranked(*induction, "--repeat", "8", "--by", "induction", "--seed", "3")
    ids = [token["id"] for token in report["tokens"][0]]
    assert ids[:8] == ids[8:] and sorted(ids[:8]) == list(range(8))
    assert (report["repeated"], report["seed"], report["recurring"]) == (8, 3, 8)
    assert report["heads"][0]["layer_index"] == 1
    assert report["heads"][0]["induction"] == pytest.approx((0.5 + 7) / 8, abs=1e-6)
    again = ranked(*induction, "--repeat", "8", "--by", "induction", "--seed", "3")
    assert again == report
    other = ranked(*induction, "--repeat", "8", "--seed", "4")
    assert [token["id"] for token in other["tokens"][0]] != ids
    shown = run("heads", *induction, "--repeat", "8", "--by", "induction").out
    assert "8 random tokens (seed 0), twice" in shown
    assert re.search(r"^induction +L1H0 +0\.9375$", shown, re.M)
    assert re.search(r"^previous token +L0H0 +1\.0000$", shown, re.M)


def test_random_tokens_stand_between_the_tokenizer_s_own_marks(tmp_path):
    """A tokenizer that begins a text with <s> and ends it with </s>, as its file's template says."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, "d": 5}
    made = Tokenizer(models.WordLevel(words))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.yaml").write_text(TOY.replace("MORE", "").replace("vocab_size: 32", "vocab_size: 6"))
    spec = open_model(config=str(tmp_path / "config.yaml")).spec
    model = Model(spec=spec, source="toy", directory=tmp_path)
    drawn = random_twice(model, 3, 0)
    assert drawn.ids[0] == 0 and drawn.ids[-1] == 1 and len(drawn.ids) == 8 and drawn.ids[1:4] == drawn.ids[4:7]
    assert drawn.added == [True, *[False] * 6, True]
    assert len(random_twice(model, 3, 0, Rule(bos=False)).ids) == 6


# The ranking


@pytest.mark.parametrize("by", KINDS)
def test_heads_come_in_the_order_of_what_ranks_them(by):
    words = ["-m", "tiny-gpt2", f"{SENTENCE} {SENTENCE}"]
    report = ranked(*words, "--by", by)
    field = {"self": "itself", "entropy": "entropy_share"}.get(by, by)
    numbers = [one[field] for one in report["heads"]]
    assert numbers == sorted(numbers, reverse=True) and len(numbers) == 8 and report["by"] == by
    first = report["heads"][0]
    [best] = [one for one in report["best"] if one["kind"] == by]
    assert (best["layer_index"], best["head"], best["value"]) == (first["layer_index"], first["head"], numbers[0])
    [sharpest] = [one for one in report["best"] if one["kind"] == "sharpest"]
    assert sharpest["value"] == min(one["entropy_share"] for one in report["heads"])
    lines = run("heads", *words, "--by", by, "-q", "--top", 3).out.splitlines()
    named = [(f"L{one['layer_index']}H{one['head']}", one[field]) for one in report["heads"][:3]]
    assert [(line.split("\t")[0], float(line.split("\t")[1])) for line in lines] == named


def test_what_a_person_sees():
    words = ["heads", "-m", "tiny-gpt2", SENTENCE]
    report = ranked(*words[1:])
    out = run(*words, columns=80, NO_COLOR="1").out
    assert "8 heads of 2 layers" in out and "no token comes again; --repeat N makes a text" in out
    rows = re.findall(r"^(L\dH\d) +(\d\.\d{4}) +(\d\.\d{4}) +(\d\.\d{4}) +– +(\d\.\d{4})", out, re.M)
    right = [
        (
            f"L{one['layer_index']}H{one['head']}",
            *(f"{one[name]:.4f}" for name in ("previous", "first", "itself", "entropy")),
        )
        for one in report["heads"]
    ]
    assert rows == right
    bars = [len(re.findall("█", line)) for line in out.splitlines() if re.match(r"L\dH\d ", line)]
    assert bars == sorted(bars, reverse=True) and bars[0] > bars[-1] > 0
    assert "proof ok" in out and "more: --top" not in out
    assert "5 more: --top 8" in run(*words, "--top", 3).out
    assert len(re.findall(r"^L\dH\d ", run(*words, "--top", 3, "--full").out, re.M)) == 8


def test_grouped_heads_name_their_key_value_head(toy):
    out = run("heads", "-c", toy(), "--ids", ",".join(map(str, IDS)), columns=80, NO_COLOR="1").out
    rows = re.findall(r"^L\dH(\d) +(\d) ", out, re.M)
    assert len(rows) == 8 and all(int(kv) == int(head) // 2 for head, kv in rows)
    assert " kv " not in run("heads", "-m", "tiny-gpt2", SENTENCE, columns=80).out


@pytest.mark.parametrize("columns", [50, 64, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("by", ["previous", "distance"])
def test_no_line_is_wider_than_the_terminal(columns, encoding, by, toy):
    ids = ",".join(map(str, IDS * 4))
    for color in ({"NO_COLOR": "1"}, {"COLORTERM": "truecolor"}):
        out = run("heads", "-c", toy(), "--ids", ids, "--by", by, columns=columns, encoding=encoding, **color).out
        lines = [Text.from_ansi(line).plain for line in out.splitlines()]
        assert max(map(cell_len, lines)) <= columns, max(lines, key=cell_len)
        assert encoding == "utf-8" or out.isascii()


def test_strange_tokens_are_shown_as_everywhere():
    out = run("heads", "-m", "tiny-gpt2", "a\tb\n🙂", NO_COLOR="1").out
    assert r"\t" in out and r"\n" in out and r"\xf0" in out and "\t" not in out


# Watching


@pytest.mark.parametrize("name", sorted(configs()))
def test_watching_changes_no_bit(name):
    config = open_model(config=name)
    model = Model(spec=shrunk(config.spec), source="toy")
    ids = [[index % model.spec.vocab_size for index in (2, 0, 1, 2, 1, 0)][: model.spec.context_length]]
    made = Kept(model, ids, source=None if model.spec.encoder is None else [[1, 0, 2, 2]])
    made.weights = Weights.of(
        model.layout, random_weights(model.spec, model.layout, 3, torch.float32, torch.device("cpu"))
    )
    final, logits = Run.forward(made, "all", head=False), Run.forward(made, "all")
    for attending in ("self",) if model.spec.encoder is None else ("self", "encoder"):
        report = heads_report(made, attending=attending)
        assert torch.equal(made.came, final) and report.status == "ok"
        assert all(check.ok for check in report.proof) and len(report.proof) == 3
    assert torch.equal(Run.forward(made, "all"), logits)


def test_one_head_s_weights_are_held_at_a_time(toy, monkeypatch):
    from gptcli.model import attention as engine

    made, weigh = [], engine.weigh

    def noted(*given, **named):
        found = weigh(*given, **named)
        made.append(tuple(found[1].shape))
        return found

    monkeypatch.setattr(engine, "weigh", noted)
    ranked("-c", toy(), "--ids", ",".join(map(str, IDS)))
    assert made == [(1, 1, 12, 12)] * 8


# What makes no sense


@pytest.mark.parametrize(
    "words, said",
    [
        (["--repeat", "4", "Cats"], "--repeat and a text"),
        (["--repeat", "4", "--ids", "12,45"], "--repeat and --ids"),
        (["--repeat", "4", "--batch"], "--repeat and --batch"),
        (["--repeat", "7"], "--repeat 7: the vocabulary has 6 tokens; give 6 or fewer"),
        (["-m", "tiny-gpt2", "--repeat", "200"], "--repeat 200: twice as many are more than the context of"),
        (["-c", "translate", "--repeat", "2"], "--repeat: this model reads a source beside its text"),
        (["--ids", "12"], "one token has only itself to look at"),
        (["--by", "most"], "--by"),
        (["--attention", "encoder"], "--attention encoder: this model is one stack"),
        (["--batch", "Cats", "sit"], "2 texts, but heads are looked at in one"),
        (["-o", "x.png"], "-o x.png: this command writes .json"),
    ],
)
def test_mistakes_are_one_line(words, said):
    ran = run("heads", *words)
    assert ran.status == 2 and ran.out == "" and ran.err.count("\n") == 1
    assert said in ran.err


def test_more_is_repeated_than_a_context_that_bounds_nothing(tmp_path):
    """Distances tell positions, and all far ones share a bucket."""
    for kind, status in (("{kind: rope}", 2), ("{kind: relative, buckets: 8, max_distance: 10}", 0)):
        config = TOY.replace("{kind: rope}", kind).replace("MORE", "")
        (tmp_path / "toy.yaml").write_text(config.replace("context_length: 64", "context_length: 8"))
        ran = run("heads", "-c", tmp_path / "toy.yaml", "--repeat", "10", "--json")
        assert ran.status == status, ran
    assert [len(text) for text in ran.json["tokens"]] == [20]


def test_the_definitions_stand_in_the_help():
    shown = " ".join(run("heads", "--help").out.split())
    for said in ("the token before", "token 0", "latest earlier occurrence", "two keys or more", "in positions"):
        assert said in shown, said


def test_json_is_whole_and_a_file_holds_the_same(tmp_path):
    path = tmp_path / "x.json"
    report = ranked("-m", "tiny-gpt2", SENTENCE, "-o", path)
    assert json.loads(path.read_text()) == report and len(report["heads"]) == 8
    assert report["best"][0]["kind"] == "previous" and report["heads"][0]["induction"] is None
