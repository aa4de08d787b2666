"""An encoder beside a decoder, and an encoder alone: what is fed, what is shown, what is refused.

The right numbers of the worked example `translate` follow by hand: its decoder asks at position i for source position
i + 1 with a query of 10, a key of 1 and √7 to divide by, so of three words the one asked for weighs
e^(10/√7) / (e^(10/√7) + 2), and the vector gains that much of what it means.
"""

import json
import math

import pytest
import torch

import gptcli
from gptcli import count
from gptcli.config import read_config
from gptcli.errors import GptcliError
from gptcli.layout import Place, layout
from gptcli.model.forward import Inputs, forward
from gptcli.model.init import random_weights
from gptcli.model.weights import Weights
from gptcli.shipped import configs
from gptcli.spec import Spec, SpecError, read_spec
from gptcli.trace import Recorder
from tests.command import gptcli as run

CPU = torch.device("cpu")
ASKED = math.exp(10 / math.sqrt(7))
HEAVY, LIGHT = ASKED / (ASKED + 2), 1 / (ASKED + 2)

FILL = """
vocab_size: 8
context_length: 8
hidden_size: 8
n_layers: 2
n_segments: 2
position: {kind: learned}
norm: {kind: layernorm, placement: post, embedding: true}
attention: {n_heads: 2, causal: false, bias: true}
mlp: {kind: dense, size: 16, activation: gelu, bias: true}
lm_head: {tied: true, bias: true, transform: {activation: gelu}}
vocabulary: {0: "[MASK]", 1: the, 2: cat, 3: sat}
"""

RELATIVE = {
    "vocab_size": 20,
    "context_length": 64,
    "hidden_size": 8,
    "n_layers": 2,
    "position": {"kind": "relative", "buckets": 8, "max_distance": 16},
    "norm": {"kind": "rmsnorm"},
    "attention": {"n_heads": 2, "scale": 1.0},
    "mlp": {"kind": "dense", "size": 12, "activation": "relu"},
    "encoder": {"n_layers": 1},
    "lm_head": {"tied": True},
}


@pytest.fixture
def fill(tmp_path):
    path = tmp_path / "fill.yaml"
    path.write_text(FILL)
    return path


def weights_of(spec: Spec, dtype: torch.dtype = torch.float64) -> Weights:
    params = list(layout(spec))
    return Weights.of(params, random_weights(spec, params, 0, dtype, CPU))


# The worked example.


def test_a_source_and_a_text_run_the_worked_translation():
    report = run("forward", "--source", "the cat sat", "le chat", "--json").json
    assert report["model"]["name"] == "translate"
    assert [token["token"] for token in report["source"][0]] == ["the", "cat", "sat"]
    assert [token["token"] for token in report["tokens"][0]] == ["le", "chat"]
    best = report["next"][0]["top"][0]
    assert (best["token"], best["rank"]) == ("s'assit", 1)
    # Of "sat" it gains HEAVY; of what it wrote itself, "chat", it has -1 and gains LIGHT.
    logits = {one["token"]: one["logit"] for one in report["next"][0]["top"]}
    assert logits["s'assit"] == pytest.approx(HEAVY, abs=1e-6)
    assert logits["le"] == pytest.approx(LIGHT, abs=1e-6)


def test_both_stacks_are_shown_in_order():
    report = run("forward", "-c", "translate", "--json").json
    names = [stage["name"] for stage in report["stages"]]
    assert names == [
        *("source ids", "encoder embedding", "encoder layer 1"),
        *("input ids", "embedding", "layer 1", "logits"),
    ]
    assert [stage["axes"] for stage in report["stages"]] == ["BS", "BSC", "BSC", "BT", "BTC", "BTC", "BTV"]
    assert report["stages"][2]["shape"] == [1, 3, 7] and report["stages"][5]["shape"] == [1, 2, 7]
    assert report["stages"][2]["last"] == [0, 0, 1, 0, 0, 1, 0]  # "sat" at position 2, which nothing changes


def test_the_cross_attention_map_is_rectangular_and_by_hand():
    report = run("trace", "-c", "translate", "--at", "layers.0.cross.pattern", "--json").json
    assert report["axes"] == "BHTS" and report["shape"] == [1, 1, 2, 3]
    expected = [[LIGHT, HEAVY, LIGHT], [LIGHT, LIGHT, HEAVY]]
    torch.testing.assert_close(torch.tensor(report["values"][0][0]), torch.tensor(expected))
    assert [token["token"] for token in report["rows"][0]] == ["le", "chat"]
    assert [token["token"] for token in report["columns"][0]] == ["the", "cat", "sat"]


def test_a_map_in_the_terminal_names_its_keys():
    shown = run("trace", "-c", "translate", "--at", "layers.0.cross.pattern", columns=80, NO_COLOR="1").out.splitlines()
    assert shown[-3].split() == ["0", "the", "1", "cat", "2", "sat"]
    assert shown[-1].split() == ["1", "chat", "0.0218", "0.0218", "0.9563"]


def test_a_walk_across_reads_the_source():
    walk = run("trace", "-c", "translate", "--attention", "cross", "--json").json["walks"][0]
    assert (walk["attention"], walk["path"], walk["causal"]) == ("cross", "layers.0", False)
    assert [(key["token"], key["visible"]) for key in walk["keys"]] == [("the", True), ("cat", True), ("sat", True)]
    assert [key["product"] for key in walk["keys"]] == [0, 0, 10]
    assert walk["keys"][2]["scaled"] == pytest.approx(10 / math.sqrt(7))
    assert [key["weight"] for key in walk["keys"]] == pytest.approx([LIGHT, LIGHT, HEAVY], abs=1e-6)
    assert [step["label"] for step in walk["before"]] == ["resid_mid", "cross.q"]
    assert [step["label"] for step in walk["after"]] == ["cross.z", "merged", "cross_out", "resid_cross", "resid_post"]


@pytest.mark.parametrize(("kind", "keys"), [("self", ["le", "chat"]), ("encoder", ["the", "cat", "sat"])])
def test_each_stack_has_an_attention_of_its_own(kind, keys):
    """Neither says anything here, and both are walked through: a token's score with itself is 2/√7, with others 0."""
    report = run("trace", "-c", "translate", "--attention", kind, "--json").json
    walk = report["walks"][0]
    assert report["status"] == "ok" and [key["token"] for key in walk["keys"]] == keys
    own = math.exp(2 / math.sqrt(7))
    others = len(keys) - 1
    expected = [1 / (own + others)] * others + [own / (own + others)]
    assert [key["weight"] for key in walk["keys"]] == pytest.approx(expected, abs=1e-6)


def test_the_text_alone_scores_its_own_words():
    """P(chat) after "le": its logit is HEAVY beside 0 for four words and LIGHT - 1 for… by hand below."""
    report = run("score", "-c", "translate", "--source", "the cat sat", "le chat", "--json").json
    # After "le" the vector holds LIGHT - 1 of "the", HEAVY of "cat", LIGHT of "sat"; three more words have no row.
    logits = {"le": LIGHT - 1, "chat": HEAVY, "s'assit": LIGHT}
    total = sum(math.exp(x) for x in logits.values()) + 3
    assert report["texts"][0]["sum"] == pytest.approx(math.log(math.exp(HEAVY) / total), abs=1e-6)


def test_python_reads_a_source_too():
    model = gptcli.open("translate")
    shell = run("forward", "-c", "translate", "--json").json
    report = model.forward("le chat", source="the cat sat")
    assert [one.logit for one in report.next[0].top] == [one["logit"] for one in shell["next"][0]["top"]]
    kept = model.activations("le chat", "layers.0.cross.pattern", source="the cat sat")
    assert kept["layers.0.cross.pattern"].shape == (1, 1, 2, 3)
    assert model.trace("le chat", attention="cross", source="the cat sat").status == "ok"
    with pytest.raises(GptcliError, match="no source text"):
        model.logits("le chat")


# What is fed.


def test_several_texts_with_a_source_each_are_as_each_alone():
    words = ("topk", "-c", "translate", "--batch", "-k", "1", "--json")
    both = run(*words, "--source", "the cat sat", "--source", "sat the", "le chat", "le").json
    alone = [
        run(*words, "--source", source, text).json for source, text in (("the cat sat", "le chat"), ("sat the", "le"))
    ]
    assert [one["text"] for one in both["next"]] == [0, 1]
    for found, single in zip(both["next"], alone):
        expected = single["next"][0]["top"][0]
        assert found["top"][0]["id"] == expected["id"]
        assert found["top"][0]["logit"] == pytest.approx(expected["logit"], abs=1e-6)


def test_one_source_serves_several_texts():
    report = run("topk", "-c", "translate", "--batch", "--source", "the cat sat", "le chat", "le", "-k", "1", "--json")
    assert [one["top"][0]["token"] for one in report.json["next"]] == ["s'assit", "chat"]


def test_ids_stand_for_both():
    by_ids = run("topk", "-c", "translate", "--source-ids", "0,1,2", "--ids", "3,4", "--json").json
    by_words = run("topk", "-c", "translate", "--json").json
    assert by_ids["next"] == by_words["next"]


REFUSED = [
    (("forward", "--source", "x", "-m", "tiny-gpt2", "a"), "has no encoder to read it"),
    (("forward", "-c", "transformer-2017-base", "--ids", "1"), "no source text"),
    (("forward", "-c", "translate", "--source", "the", "--source-ids", "1", "le"), "--source and --source-ids"),
    (("forward", "-c", "translate", "--source", "the", "--source", "cat", "le"), "2 source texts for one text"),
    (("forward", "-c", "translate", "--batch", "--source", "the", "--source", "cat", "le"), "2 source texts for 1"),
    (("forward", "-c", "translate", "--source", "", "le"), "source text is empty"),
    (
        ("forward", "-c", "translate", "--source", "the the the the the", "le"),
        "source: 5 tokens are more than the context",
    ),
    (("forward", "-c", "translate", "--source-ids", "9", "le"), "source: id 9 is outside the vocabulary"),
    (("forward", "-c", "translate", "--chat", "le"), "--chat beside a source text"),
    (("trace", "--attention", "cross"), "this model is one stack"),
    (("trace", "--attention", "encoder"), "this model is one stack"),
    (("trace", "-c", "translate", "--attention", "cross", "--at", "layers.0.cross.z"), "--at and --attention"),
    (("forward", "--segments", "0,0,0"), "doesn't tell any apart"),
    (("forward", "--segments", "0,0"), "not one number for each of 3 tokens"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_fit_is_refused_in_one_line(words, said):
    ran = run(*words)
    assert ran.status == 2 and ran.out == ""
    assert ran.err.count("\n") == 1 and said in ran.err


# An encoder alone.


def test_topk_fills_in_the_mask(fill):
    report = run("topk", "-c", fill, "the [MASK] sat [MASK]", "-k", "3", "--json").json
    assert [(one["position"], one["fills"]) for one in report["next"]] == [(1, True), (3, True)]
    spec = read_config(fill).spec
    logits = forward(Inputs(torch.tensor([[1, 0, 3, 0]])), weights_of(spec, torch.float32), spec)[0]
    for one in report["next"]:
        assert [top["id"] for top in one["top"]] == logits[one["position"]].topk(3).indices.tolist()


def test_filling_in_looks_to_both_sides(fill):
    """The word right of the mask changes what it stands for."""
    left = run("topk", "-c", fill, "the [MASK] sat", "--json").json["next"][0]["top"]
    right = run("topk", "-c", fill, "the [MASK] cat", "--json").json["next"][0]["top"]
    assert [one["logit"] for one in left] != [one["logit"] for one in right]


def test_without_a_mask_topk_says_so(fill):
    ran = run("topk", "-c", fill, "the cat sat")
    assert ran.status == 2 and "the text has no [MASK] to fill in" in ran.err
    assert run("topk", "-c", fill, "the cat sat", "--position", "-1", "-q").status == 0


def test_a_model_that_sees_both_ways_scores_no_text(fill):
    ran = run("score", "-c", fill, "the cat")
    assert ran.status == 2 and "sees both ways" in ran.err


def test_segments_are_told_apart(fill):
    """The second segment's row is added to the embedding of its tokens, and to no other."""
    spec = read_config(fill).spec
    weights, ids = weights_of(spec), torch.tensor([[1, 2, 3]])
    plain, told = Recorder("embed"), Recorder("embed")
    forward(Inputs(ids), weights, spec, plain)
    forward(Inputs(ids, segments=torch.tensor([[0, 1, 1]])), weights, spec, told)
    rows = weights["segment_embed.weight"]
    gained = told.kept["embed"][0] - plain.kept["embed"][0]
    torch.testing.assert_close(gained, torch.stack((0 * rows[0], rows[1] - rows[0], rows[1] - rows[0])))
    report = run("forward", "-c", fill, "the cat sat", "--segments", "0,1,1", "--json", "--dtype", "f64").json
    assert report["stages"][1]["last"] == pytest.approx(told.kept["embed"][0, -1].tolist(), abs=1e-7)
    assert "one from 0 to 1" in run("forward", "-c", fill, "the cat sat", "--segments", "0,1,2").err


def test_a_model_without_a_head_shows_its_final_vectors(tmp_path):
    path = tmp_path / "reads.yaml"
    path.write_text(FILL.replace("lm_head: {tied: true, bias: true, transform: {activation: gelu}}", "lm_head: null"))
    report = run("forward", "-c", path, "the cat", "--json").json
    assert report["stages"][-1]["name"] == "layer 2" and report["next"] == []
    assert run("forward", "-c", path, "the cat").status == 0
    ran = run("topk", "-c", path, "the [MASK]")
    assert ran.status == 2 and "has no head" in ran.err
    spec = read_config(path).spec
    assert not any(param.name.startswith("lm_head") for param in layout(spec))


# The parts of the Spec.


def test_relative_positions_add_a_bias_for_each_distance():
    """What a score has beyond q·k is the table's row of its distance: by hand, 4 near buckets of 8 are one each."""
    spec = read_spec(RELATIVE)
    weights = weights_of(spec)
    recorder = Recorder("layers.0.attn.*")
    forward(Inputs(torch.arange(5)[None], source=Inputs(torch.arange(3)[None])), weights, spec, recorder)
    q, k = recorder.kept["layers.0.attn.q"], recorder.kept["layers.0.attn.k"]
    table = weights["rel_bias.weight"]  # [8, 2]
    for ago in range(4):  # 4, the first of those that share, is the first beyond
        bias = (recorder.kept["layers.0.attn.scores"] - q @ k.mT)[0, :, 4, 4 - ago]
        torch.testing.assert_close(bias, table[ago])


def test_params_split_the_two_stacks():
    """golden.json: an encoder layer of 3,150,336 and a decoder layer of 4,199,936, six of each, and one table."""
    report = run("params", "transformer-2017-base", "--json").json
    rows = {row["name"]: row for row in report["rows"] if row["indent"] == 0}
    assert rows["encoder"]["parameters"] == 6 * 3_150_336
    assert rows["decoder"]["parameters"] == 6 * 4_199_936 + 37_000 * 512
    inside = [(row["name"], row["each"]) for row in report["rows"] if row["indent"] == 1 and "layers" in row["name"]]
    assert inside == [("layers 1–6", 3_150_336), ("layers 1–6", 4_199_936)]
    assert report["parameters"]["total"] == sum(row["parameters"] for row in rows.values())


def test_costs_of_a_source_by_hand():
    """One layer each of 7 numbers, one head: four 7x7 products a token and, across, two for text and two for source."""
    spec = read_config(configs()["translate"]).spec
    t, s, m = 2, 3, 7 * 7
    encoder = 2 * (s * 4 * m) + 2 * 2 * s * s * 7
    decoder = 2 * (t * 4 * m) + 2 * 2 * (t * (t + 1) // 2) * 7
    across = 2 * (t * 2 * m + s * 2 * m) + 2 * 2 * t * s * 7
    assert count.flops_forward(spec, t, source=s) == encoder + decoder + across + 2 * t * 6 * 7
    assert count.kv_cache_bytes(spec, t, 4, source=s) == 2 * 4 * (t + s) * 7


def test_paths_say_where_they_stand():
    assert Place.of("encoder.layers.3.attn.q") == Place("encoder", 3, "attn.q")
    assert Place.of("layers.11.cross.k.weight") == Place("", 11, "cross.k.weight")
    assert Place.of("encoder.final_norm") == Place("encoder", None, "final_norm")
    assert Place.of("lm_head.dense") == Place("", None, "lm_head.dense")


def test_an_encoder_says_only_what_differs():
    raw = RELATIVE | {"encoder": {"n_layers": 3, "attention": {"n_heads": 4}, "mlp": {"size": 5}}}
    spec = read_spec(raw)
    encoder = spec.encoder
    assert (encoder.n_layers, encoder.attention.n_heads, encoder.attention.head_dim) == (3, 4, 2)
    assert (encoder.attention.causal, encoder.attention.scale) == (False, 1.0)
    assert (encoder.mlp.size, encoder.mlp.activation) == (5, "relu")
    assert encoder.lm_head is None and encoder.norm.final
    assert (spec.cross.causal, spec.cross.n_heads) == (False, 2)


FAULTS = {
    "an encoder in an encoder": ({"encoder": {"encoder": {}}}, "encoder: it has no encoder and no lm_head itself"),
    "a head in an encoder": ({"encoder": {"lm_head": {}}}, "encoder: it has no encoder"),
    "a table of another size": ({"encoder": {"vocab_size": 21}}, "encoder.vocab_size: 21 is not 20"),
    "a mask across": ({"cross": {"causal": True}}, "cross: no mask and no window"),
    "cross attention alone": (
        {"encoder": None, "cross": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 4}},
        "come together",
    ),
    "odd sines": ({"hidden_size": 9, "attention": {"n_heads": 3}, "position": "sinusoidal"}, "hidden_size: 9 is odd"),
    "buckets that don't halve": ({"position": {"kind": "relative", "buckets": 6}}, "buckets: 6 is not a multiple of 4"),
    "nothing far": ({"position": {"kind": "relative", "max_distance": 16}}, "max_distance: 16 is within"),
}


@pytest.mark.parametrize(("change", "said"), FAULTS.values(), ids=FAULTS)
def test_a_spec_of_two_stacks_that_can_t_be(change, said):
    with pytest.raises(SpecError, match=said.replace(".", r"\.")):
        read_spec(RELATIVE | change)


def test_a_config_of_two_stacks_survives_its_own_yaml(tmp_path):
    """`config` prints every value; read again it is the same architecture."""
    for name in ("transformer-2017-base", "bert-base", "translate"):
        spec = json.loads(run("config", name, "--json").out)["spec"]
        assert read_spec(spec) == read_config(configs()[name]).spec
