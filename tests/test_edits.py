"""`trace --ablate`, `--patch`, `--set`: what an edited run gives, against transformers with hooks that do the same, and
against a layer computed step by step by hand.
"""

import math
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import gptcli
from gptcli import shipped
from gptcli.config import read_config
from gptcli.layout import layout
from gptcli.model import attention
from gptcli.model.forward import Inputs, forward
from gptcli.model.init import random_weights
from gptcli.model.weights import Weights
from gptcli.run import Run
from gptcli.source import open_model
from gptcli.trace import Both, Editor, Recorder, Selection
from tests import test_families_seq2seq as seq2seq
from tests.command import gptcli as run
from tests.oracle import in_float64, save_toy
from tests.test_trace_families import IDS, SOURCE_IDS, TOYS, auto
from tests.toys import fed as inputs_of
from tests.toys import shrunk

CPU = torch.device("cpu")
FED = ("--ids", ",".join(map(str, IDS)))
SOURCE = ("--source-ids", ",".join(map(str, SOURCE_IDS)))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    made = tmp_path_factory.mktemp("toys")

    @cache
    def of(name: str) -> tuple[Path, torch.nn.Module]:
        return made / name, save_toy(TOYS[name], made / name, auto=auto(name))

    return of


def effects(path: Path, *words: str, position: str = "all") -> dict:
    """The report of a run and its edited one, of every candidate after every position, in float64."""
    words = (*words, "--position", position) if position else words
    ran = run("trace", "-m", path, *FED, "--dtype", "f64", "-k", "1000", *words, "--json")
    assert ran.status == 0, ran
    return ran.json


def logits(report: dict, which: str) -> torch.Tensor:
    """[T, V], from the candidates of every position."""
    rows = [sorted(effect["moved"], key=lambda one: one["id"]) for effect in report["effects"]]
    return torch.tensor([[one[f"logit_{which}"] for one in row] for row in rows], dtype=torch.float64)


def hooked(model: torch.nn.Module, module: str, before=None, after=None, source: bool = False) -> torch.Tensor:
    """The library's logits [T, V] with what a module reads, or gives, changed on the way."""
    with ExitStack() as stack, in_float64(), torch.no_grad():
        found = model.get_submodule(module)
        if before is not None:
            stack.callback(found.register_forward_pre_hook(lambda _, args: (before(args[0]), *args[1:])).remove)
        if after is not None:
            stack.callback(found.register_forward_hook(lambda _, __, given: after(given)).remove)
        if source:
            told = {"decoder_input_ids": torch.tensor([IDS]), "use_cache": False}
            return model(torch.tensor([SOURCE_IDS]), **told).logits[0]
        return model(torch.tensor([IDS]), use_cache=False).logits[0]


# A toy, the option, the kind of attention, the library's output projection, and the head of how many dimensions.
HEADS = {
    "gpt2": ("L1H2", "self", "transformer.h.1.attn.c_proj"),
    "llama": ("L0H3", "self", "model.layers.0.self_attn.o_proj"),
    "qwen3": ("L1H0", "self", "model.layers.1.self_attn.o_proj"),
    "gemma2": ("L1H1", "self", "model.layers.1.self_attn.o_proj"),
    "gpt_oss": ("L0H1", "self", "model.layers.0.self_attn.o_proj"),
    "gptj": ("L0H1", "self", "transformer.h.0.attn.out_proj"),
    "marian": ("L1H1", "self", "model.decoder.layers.1.self_attn.out_proj"),
    "bart": ("L0H1", "cross", "model.decoder.layers.0.encoder_attn.out_proj"),
    "t5": ("L1H0", "encoder", "encoder.block.1.layer.0.SelfAttention.o"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_ablated_is_its_slice_before_the_output_projection_set_to_zero(name, toy):
    path, theirs = toy(name)
    head, kind, module = HEADS[name]
    two = name in seq2seq.CASES
    number = int(head[3:])
    spec = open_model(str(path)).spec
    stack = spec.encoder if kind == "encoder" else spec
    size = (stack.cross if kind == "cross" else stack.attention).head_dim

    def before(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[..., number * size : (number + 1) * size] = 0
        return x

    words = ("--ablate", head, "--attention", kind, *(SOURCE if two else ()))
    report = effects(path, *words)
    expected = hooked(theirs, module, before, source=two)
    assert float((logits(report, "with") - expected).abs().max()) < 1e-9 * float(expected.std())
    assert float((logits(report, "without") - expected).abs().max()) > 1e-3 * float(expected.std())
    [touched] = report["touched"]
    part = "cross" if kind == "cross" else "attn"
    assert touched["path"] == f"{'encoder.' if kind == 'encoder' else ''}layers.{head[1]}.{part}.z"
    assert touched["where"] == f"head {number}" and touched["edit"] == f"--ablate {head}"


@pytest.mark.parametrize("position", ["all", "3", "-1"])
def test_an_activation_s_mean_over_positions_stands_in_for_it(position, toy):
    path, theirs = toy("gpt2")

    def after(x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True).expand_as(x)
        at = slice(None) if position == "all" else int(position) % len(IDS)
        x = x.clone()
        x[:, at] = mean[:, at]
        return x

    words = ("--ablate", "layers.1.mlp_out", "--ablate-with", "mean")
    report = effects(path, *words, position=position)
    expected = hooked(theirs, "transformer.h.1.mlp", after=after)
    shown = [effect["position"] for effect in report["effects"]]
    assert shown == (list(range(8)) if position == "all" else sorted({int(position) % 8, 7}))
    assert float((logits(report, "with") - expected[shown]).abs().max()) < 1e-9 * float(expected.std())
    [touched] = report["touched"]
    assert touched["where"] == ("" if position == "all" else f"position {int(position) % 8}")
    assert touched["changed"] == (8 if position == "all" else 1) * theirs.config.n_embd


def test_a_pattern_of_paths_ablates_every_layer_s(toy):
    path, theirs = toy("gpt2")
    with ExitStack() as stack, in_float64(), torch.no_grad():
        for block in theirs.transformer.h:
            stack.callback(block.mlp.register_forward_hook(lambda _, __, given: given * 0).remove)
        expected = theirs(torch.tensor([IDS]), use_cache=False).logits[0]
    report = effects(path, "--ablate", "layers.*.mlp_out")
    assert [touched["path"] for touched in report["touched"]] == [f"layers.{i}.mlp_out" for i in range(3)]
    assert float((logits(report, "with") - expected).abs().max()) < 1e-9 * float(expected.std())


def by_hand(weights: dict, spec, ids: torch.Tensor, scores=None, pattern=None) -> torch.Tensor:
    """Logits [T, V] of one layer and more, by loops over heads; scores(layer, head, x) and pattern(…) change a head's
    [T, T] on the way.
    """
    a, size = spec.attention, spec.attention.head_dim

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.norm.eps).sqrt() * weights[f"{name}.weight"]

    x = weights["embed.weight"][ids]
    mask = torch.full((len(ids), len(ids)), -math.inf, dtype=x.dtype).triu(1)
    for layer in range(spec.n_layers):
        w = {n.removeprefix(f"layers.{layer}."): t for n, t in weights.items() if n.startswith(f"layers.{layer}.")}
        h, out = norm(x, f"layers.{layer}.attn_norm"), []
        for head in range(a.n_heads):
            mine, shared = head * size, head // (a.n_heads // a.n_kv_heads) * size
            q = h @ w["attn.q.weight"][mine : mine + size].T
            k, v = (h @ w[f"attn.{letter}.weight"][shared : shared + size].T for letter in "kv")
            s = q @ k.T / math.sqrt(size)
            s = s if a.softcap is None else a.softcap * torch.tanh(s / a.softcap)
            s = (s if scores is None else scores(layer, head, s)) + mask
            powers = torch.exp(s)
            total = powers.sum(-1, keepdim=True) + (torch.exp(w["attn.sinks"][head]) if a.sinks else 0)
            p = torch.nan_to_num(powers / total)
            out.append((p if pattern is None else pattern(layer, head, p)) @ v)
        x = x + torch.cat(out, -1) @ w["attn.o.weight"].T
        x = x + torch.relu(norm(x, f"layers.{layer}.mlp_norm") @ w["mlp.up.weight"].T) @ w["mlp.down.weight"].T
    return norm(x, "final_norm") @ weights["lm_head.weight"].T


PLAIN = """\
vocab_size: 64
context_length: 16
hidden_size: 12
n_layers: 2
position: none
norm: {kind: rmsnorm}
attention: {n_heads: 4, n_kv_heads: 2, head_dim: 6OTHERS}
mlp: {kind: dense, size: 20, activation: relu}
lm_head: {tied: false}
"""
KINDS = {"plain": "", "capped": ", softcap: 0.5", "sinks": ", sinks: true"}


@pytest.fixture(scope="module", params=KINDS)
def plain(request, tmp_path_factory) -> Path:
    """A model whose weights are large enough for its attention to matter."""
    path = tmp_path_factory.mktemp("plain")
    (path / "config.yaml").write_text(PLAIN.replace("OTHERS", KINDS[request.param]))
    spec = read_config(path / "config.yaml").spec
    generator = torch.Generator().manual_seed(3)
    save_file(
        {p.name: 0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in layout(spec)},
        path / "model.safetensors",
    )
    return path


def change(value: float, *index, layer: int = 0, head: int = 1):
    """What --set does to one head of a layer, by hand."""

    def changed(at: int, of: int, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if (at, of) == (layer, head):
            x[index] = value
        return x

    return changed


@pytest.mark.parametrize(
    ("option", "scores", "pattern"),
    [
        ("layers.0.attn.pattern[1,3]=0", None, change(0, 3)),
        ("layers.0.attn.pattern[1,3,5]=0.75", None, change(0.75, 3, 5)),
        ("layers.1.attn.pattern[2,:,0]=0", None, change(0, slice(None), 0, layer=1, head=2)),
        ("layers.0.attn.scores[1,3,1]=-inf", change(-math.inf, 3, 1), None),
        ("layers.0.attn.scores[1,-1]=-inf", change(-math.inf, -1), None),
        ("layers.0.attn.scores[1,6,2]=2.5", change(2.5, 6, 2), None),
    ],
)
def test_scores_and_weights_that_are_set_against_a_softmax_by_hand(plain, option, scores, pattern):
    model = gptcli.open(plain, dtype="float64")
    weights = {p.name: model.weights[p.name] for p in model.layout}
    ids = torch.tensor(IDS)
    untouched = by_hand(weights, model.spec, ids)
    expected = by_hand(weights, model.spec, ids, scores, pattern)
    report = effects(plain, "--set", option)
    torch.testing.assert_close(logits(report, "without"), untouched, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits(report, "with"), expected, rtol=1e-12, atol=1e-12)
    assert float((expected - untouched).abs().max()) > 1e-4
    layer = option[: option.index(".attn")]
    assert report["explicit"] == ([] if model.spec.attention.softcap else [f"{layer}.attn"])


def test_an_edit_of_both_scores_and_pattern(plain):
    """The weights are made of the scores as they were set, and set themselves then."""
    model = gptcli.open(plain, dtype="float64")
    weights = {p.name: model.weights[p.name] for p in model.layout}
    expected = by_hand(weights, model.spec, torch.tensor(IDS), change(3.0, 6, 2), change(0.25, 6, 0))
    words = ("--set", "layers.0.attn.pattern[1,6,0]=0.25", "--set", "layers.0.attn.scores[1,6,2]=3")
    torch.testing.assert_close(logits(effects(plain, *words), "with"), expected, rtol=1e-12, atol=1e-12)


def test_weights_that_are_edited_are_those_that_a_walk_shows(plain):
    """In every walk of the edited run the keys sum to z, and the proof holds for what an edit leaves alone."""
    words = ["trace", "-m", plain, *FED, "--layer", "all", "--head", "all", "--json"]
    report = run(*words, "--set", "layers.0.attn.pattern[1,7,2]=0.5", "--set", "layers.1.attn.scores[0,7,2]=-inf").json
    assert report["status"] == "ok" and all(check["ok"] for check in report["proof"])
    claims = [check["claim"] for check in report["proof"]]
    assert "layers.0: weights @ v = the z of the step-by-step function" in claims
    assert not any(claim.startswith("layers.0: rows") for claim in claims)
    assert any(claim.startswith("layers.1: rows") for claim in claims)
    walks = {(walk["layer_index"], walk["head"]): walk for walk in report["walks"]}
    assert walks[0, 1]["keys"][2]["weight"] == 0.5 and walks[1, 0]["keys"][2]["weight"] == 0
    assert walks[0, 1]["edited"] == ["attn.pattern: --set layers.0.attn.pattern[1,7,2]=0.5"]
    for walk in walks.values():
        z = next(step for step in walk["after"] if step["label"] == "attn.z")["values"]
        weighted = torch.tensor([key["weighted"] for key in walk["keys"]]).sum(0)
        torch.testing.assert_close(weighted, torch.tensor(z), rtol=1e-5, atol=1e-6)
    ablated = run(*words, "--ablate", "L0H1").json
    assert ablated["status"] == "ok"
    assert not any("layers.0: weights @ v" in check["claim"] for check in ablated["proof"])
    steps = {step["label"]: step for step in ablated["walks"][1]["after"]}
    assert steps["attn.z"]["values"] == [0] * 6
    assert steps["attn.z"]["formula"].endswith(", then --ablate L0H1")
    assert "then" not in steps["attn_out"]["formula"]


# An edit, the step that it is about, and the heads, key/value heads and queries whose numbers it writes.
WRITES = [
    ("--ablate L0H1", "attn.z", lambda head, kv, query: head == 1),
    ("--ablate L0H1 --position 5", "attn.z", lambda head, kv, query: (head, query) == (1, 5)),
    ("--set layers.0.attn.q[2,:,3]=1", "attn.q", lambda head, kv, query: head == 2),
    ("--set layers.0.attn.v[1,6]=1", "attn.v", lambda head, kv, query: (kv, query) == (1, 6)),
    ("--set layers.0.attn_out[6]=1", "attn_out", lambda head, kv, query: query == 6),
    ("--set layers.0.resid_mid=1", "resid_mid", lambda head, kv, query: True),
]


@pytest.mark.parametrize(("words", "label", "writes"), WRITES, ids=[words for words, *_ in WRITES])
def test_a_step_names_an_edit_where_it_wrote_what_is_shown(plain, words, label, writes, tmp_path):
    """In a run and in its file: where its numbers are others than those of the run as it is."""
    said, edit = words.partition(" --position")[0], words.split()
    whole, all_heads = ("trace", "-m", plain, *FED), ("--layer", "1", "--head", "all", "--json")
    walks = []
    for edits in ((), edit):
        file = tmp_path / f"{len(edits)}.safetensors"
        assert run(*whole, *edits, "--at", "*", "-o", file).status == 0
        walks.append(run("trace", "--from", file, "--position", "all", *all_heads).json["walks"])
    named = {}
    for before, walk in zip(*walks):
        at = walk["head"], walk["kv_head"], walk["position"]
        one, other = (next(s for s in w["before"] + w["after"] if s["label"] == label) for w in (before, walk))
        assert (one["values"] != other["values"]) == writes(*at), at
        named[at] = f", then {said}" in other["formula"]
        assert named[at] == writes(*at), at
    assert len(named) == 4 * len(IDS)
    for walk in run(*whole, *edit, *all_heads).json["walks"]:
        step = next(s for s in walk["before"] + walk["after"] if s["label"] == label)
        assert (f", then {said}" in step["formula"]) == named[walk["head"], walk["kv_head"], walk["position"]]


def test_a_walk_names_the_edits_of_what_its_keys_are_shown_by(plain, tmp_path):
    """Other heads' edits are told where all heads stand side by side; other queries' nowhere."""
    words = ("--set", "layers.0.attn.v[1,6]=1", "--set", "layers.0.attn.pattern[1,7,2]=0.5", "--ablate", "L0H3")
    ran = run("trace", "-m", plain, *FED, *words, "--at", "*", "-o", tmp_path / "x.safetensors")
    assert ran.status == 0, ran
    shown = ("--layer", "1", "--head", "all", "--position", "all", "--json")
    v, pattern = "attn.v: --set layers.0.attn.v[1,6]=1", "attn.pattern: --set layers.0.attn.pattern[1,7,2]=0.5"
    for walk in run("trace", "--from", tmp_path / "x.safetensors", *shown).json["walks"]:
        head, kv, query = walk["head"], walk["kv_head"], walk["position"]
        assert walk["edited"] == [v] * (kv == 1) + [pattern] * ((head, query) == (1, 7))
        merged = next(step for step in walk["after"] if step["label"] == "merged")["formula"]
        assert merged == "all heads' z, side by side" + ", then --ablate L0H3" * (head != 3)


@pytest.mark.parametrize("name", shipped.configs())
def test_an_editor_that_edits_one_layer_leaves_the_others_on_the_fused_kernel(name, monkeypatch):
    """Bit for bit: everything before the edited layer, and everything where nothing is edited."""
    spec = shrunk(read_config(shipped.configs()[name]).spec)
    params = list(layout(spec))
    weights = Weights.of(params, random_weights(spec, params, 0, torch.float32, CPU))
    inputs = inputs_of(spec, torch.arange(9)[None] % spec.vocab_size)
    silent = Recorder("*")
    alone = forward(inputs, weights, spec, silent)
    assert torch.equal(forward(inputs, weights, spec), alone)
    assert torch.equal(forward(inputs, weights, spec, Editor({})), alone)
    assert torch.equal(forward(inputs, weights, spec, Both(Editor({}), Recorder("*"))), alone)
    path = f"layers.{spec.n_layers - 1}.attn.pattern"
    calls = []
    honest = attention.fused
    monkeypatch.setattr(attention, "fused", lambda *words: calls.append(1) or honest(*words))
    watched = Recorder("*")
    edited = forward(inputs, weights, spec, Both(Editor({path: [lambda x: x * 1]}), watched))
    attentions = sum(one.endswith(".pattern") for one in silent.kept)
    capped = sum(spec.at(i).attention.softcap is not None for i in range(spec.n_layers))
    assert len(calls) == attentions - 1 - capped + (spec.at(spec.n_layers - 1).attention.softcap is not None)
    for before, x in silent.kept.items():
        if before == path.replace("pattern", "scores"):
            break
        assert torch.equal(watched.kept[before], x), before
    # The weights as they are: step by step, the same but for rounding.
    torch.testing.assert_close(edited, alone, rtol=1e-4, atol=1e-5)


def test_what_a_recorder_sees_of_an_editor():
    """The second probe sees what the first hands back; of scores and weights, the part that it asks for."""
    spec = shrunk(read_config(shipped.configs()["llama3-8b"]).spec)
    params = list(layout(spec))
    weights = Weights.of(params, random_weights(spec, params, 0, torch.float32, CPU))
    inputs = Inputs(torch.arange(9)[None])
    changes = {"layers.0.attn.pattern": [lambda x: x * 0], "layers.1.mlp_out": [torch.zeros_like, lambda x: x + 1]}
    select = Selection(slice(1, 3), slice(4, 5))
    wanted = ("layers.0.attn.pattern", "layers.1.mlp_out", "layers.1.resid_*")
    after, before = Recorder(*wanted, select=select), Recorder(*wanted, select=select)
    forward(inputs, weights, spec, Both(Editor(changes), after))
    forward(inputs, weights, spec, Both(before, Editor(changes)))
    assert after.kept["layers.0.attn.pattern"].shape == (1, 2, 1, 9)
    assert not after.kept["layers.0.attn.pattern"].any()
    assert (after.kept["layers.1.mlp_out"] == 1).all() and before.kept["layers.1.mlp_out"].abs().max() < 1
    summed = after.kept["layers.1.resid_mid"] + 1
    torch.testing.assert_close(after.kept["layers.1.resid_post"], summed)
    each = Recorder("layers.0.attn.pattern", select=Selection(by="head"), note=lambda path, x: seen.append(x.shape))
    seen = []
    forward(inputs, weights, spec, Both(Editor(changes), each))
    assert seen == [(1, 1, 9, 9)] * 4


def test_an_editor_leaves_the_tensor_that_it_was_given(toy):
    """resid_pre of a layer is the same tensor as resid_post of the one before."""
    path, _ = toy("gpt2")
    model = open_model(str(path))
    here, plain = Run(model, [IDS]), Run(model, [IDS])
    from gptcli.report.edits import Request, edits_of

    here.edits = edits_of(here, [Request("set", "layers.1.resid_pre[:,0]=9")])
    edited, alone = Recorder("layers.*"), Recorder("layers.*")
    here.forward("all", edited), plain.forward("all", alone)
    assert torch.equal(edited.kept["layers.0.resid_post"], alone.kept["layers.0.resid_post"])
    assert (edited.kept["layers.1.resid_pre"][..., 0] == 9).all()


# What alone leads from the patched run to the logits, so that they are those of the run it was taken from.
@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("gpt2", "layers.0.resid_post"),
        ("llama", "layers.1.resid_pre"),
        ("gemma2", "embed"),
        ("qwen3_moe", "layers.0.resid_post"),
        ("bert", "layers.0.resid_post"),
        ("gptj", "final_norm"),
    ],
)
def test_a_patch_from_another_run_gives_that_run_s_logits_bit_for_bit(name, point, toy, tmp_path):
    path, _ = toy(name)
    name = tmp_path / "other.safetensors"
    other = [3, 3, 50, 1, 9, 30, 2, 7]
    ran = run("trace", "-m", path, "--ids", ",".join(map(str, other)), "--at", point, "-o", name)
    assert ran.status == 0, ran
    model = gptcli.open(path)
    here = Run(model.model, [IDS])
    from gptcli.report.edits import Request, edits_of

    here.edits = edits_of(here, [Request("patch", f"{name}:{point}")])
    assert torch.equal(here.forward("all")[0], model.logits(other))
    assert not torch.equal(model.logits(IDS), model.logits(other))
    assert here.edits.notes == []


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_a_source_patched_from_another_run(name, toy, tmp_path):
    """The encoder's last vectors are all that a decoder has of its source."""
    path, _ = toy(name)
    last = "encoder.final_norm" if name == "t5" else "encoder.layers.1.resid_post"
    other = [1, 40, 22, 6, 6, 30]
    file = tmp_path / "other.safetensors"
    words = ("--source-ids", ",".join(map(str, other)))
    assert run("trace", "-m", path, *FED, *words, "--at", last, "-o", file).status == 0
    model = gptcli.open(path)
    report = run(
        "trace", "-m", path, *FED, *SOURCE, "--patch", f"{file}:{last}", "--position", "all", "--json", "-k", 999
    )
    expected = model.logits(IDS, source=other)
    got = logits(report.json, "with")
    assert torch.equal(got, expected) and not torch.equal(model.logits(IDS, source=SOURCE_IDS), expected)


def test_patches_of_scores_weights_heads_and_places(toy, tmp_path):
    """From a trace's file, from a file by our names, from an array with and without its batch axis."""
    path, _ = toy("llama")
    model = gptcli.open(path)
    other = [3, 3, 50, 1, 9, 30, 2, 7]
    theirs, ours = model.activations(other, "*"), model.activations(IDS, "*")
    wanted = ("layers.1.attn.pattern", "layers.1.attn.scores", "layers.1.attn.z")
    save_file({point: theirs[point].contiguous() for point in wanted}, tmp_path / "x.safetensors")
    numpy.save(tmp_path / "with.npy", theirs["layers.1.attn.z"].numpy())
    numpy.save(tmp_path / "without.npy", theirs["layers.1.attn.z"][0].double().numpy())

    def edited(point: str, *words: object) -> torch.Tensor:
        ran = run("trace", "-m", path, *FED, *words, "--at", point, "--json")
        assert ran.status == 0, ran
        return torch.tensor(ran.json["values"], dtype=torch.float64)

    for point in ("layers.1.attn.pattern", "layers.1.attn.scores"):
        assert torch.equal(edited(point, "--patch", f"{tmp_path}/x.safetensors:{point}"), theirs[point])
    z = edited("layers.1.attn.z", "--patch", f"{tmp_path}/x.safetensors:layers.1.attn.pattern")
    v = ours["layers.1.attn.v"].repeat_interleave(2, 1)
    torch.testing.assert_close(z, theirs["layers.1.attn.pattern"] @ v)
    for file in ("x.safetensors", "with.npy", "without.npy"):
        whole = edited("layers.1.attn.z", "--patch", f"{tmp_path}/{file}:layers.1.attn.z")
        assert torch.equal(whole, theirs["layers.1.attn.z"])
        head = edited("layers.1.attn.z", "--patch", f"{tmp_path}/{file}:L1H2")
        assert torch.equal(head[:, 2], theirs["layers.1.attn.z"][:, 2])
        assert torch.equal(head[:, [0, 1, 3]], ours["layers.1.attn.z"][:, [0, 1, 3]])
        place = edited("layers.1.attn.z", "--patch", f"{tmp_path}/{file}:L1H2", "--position", "4")
        assert torch.equal(place[:, 2, 4], theirs["layers.1.attn.z"][:, 2, 4])
        place[:, 2, 4] = ours["layers.1.attn.z"][:, 2, 4]
        assert torch.equal(place, ours["layers.1.attn.z"])
    # Everything that a file holds of a pattern.
    assert run("trace", "-m", path, *FED, "--patch", f"{tmp_path}/x.safetensors:*", "--json").status == 0


def test_edits_are_made_in_their_order(toy):
    path, _ = toy("gpt2")
    words = ["trace", "-m", path, *FED, "--at", "layers.0.attn.z", "--json"]
    one, zero, five = ("--set", "L0H0=1"), ("--ablate", "L0H0"), ("--set", "L0H0[2,3]=5")

    def head(*options: tuple[str, str]) -> torch.Tensor:
        return torch.tensor(run(*words, *(word for option in options for word in option)).json["values"])[0, 0]

    assert (head(zero, one) == 1).all()
    assert (head(one, zero) == 0).all()
    mixed = head(zero, one, five)
    assert mixed[2, 3] == 5 and (mixed == 1).sum() == mixed.numel() - 1


def test_an_equals_sign_between_option_and_value_keeps_the_order(toy):
    path, _ = toy("gpt2")
    words = ["trace", "-m", path, *FED, "--at", "layers.0.attn.z", "--json"]
    values = run(*words, "--ablate=L0H0", "--set=L0H0=1").json["values"]
    assert (torch.tensor(values)[0, 0] == 1).all()
    values = run(*words, "--set=L0H0=1", "--ablate=L0H0").json["values"]
    assert (torch.tensor(values)[0, 0] == 0).all()


def test_the_report_s_numbers(toy):
    """KL(without || with), ranks, changes and probabilities, from the two runs' logits by torch's own functions."""
    path, theirs = toy("gpt2")
    report = effects(path, "--ablate", "layers.0.mlp_out")
    assert report["schema"] == "gptcli.edits/1" and report["model"]["edits"] == ["--ablate layers.0.mlp_out"]
    expected = hooked(theirs, "transformer.h.0.mlp", after=lambda x: x * 0)
    untouched = hooked(theirs, "transformer.h.0.mlp")
    for effect in report["effects"]:
        p, q = untouched[effect["position"]], expected[effect["position"]]
        kl = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="sum", log_target=True)
        assert effect["kl_nats"] == pytest.approx(float(kl), rel=1e-9)
        assert effect["kl_bits"] == pytest.approx(float(kl) / math.log(2), rel=1e-9)
        assert effect["largest_change"] == pytest.approx(float((q - p).abs().max()), rel=1e-9)
        assert effect["norm_change"] == pytest.approx(float((q - p).norm()), rel=1e-9)
        before, after = (x.argsort(descending=True).argsort() + 1 for x in (p, q))
        assert [one["rank_without"] for one in effect["moved"]] == list(range(1, len(p) + 1))
        for one in effect["moved"]:
            assert one["rank_without"] == int(before[one["id"]]) and one["rank_with"] == int(after[one["id"]])
            assert one["logit_change"] == pytest.approx(float(q[one["id"]] - p[one["id"]]), abs=1e-9)
            assert one["prob_with"] == pytest.approx(float(q.softmax(-1)[one["id"]]), rel=1e-9)
    [touched] = report["touched"]
    x = gptcli.open(path, dtype="float64").activations(IDS, "layers.0.mlp_out")["layers.0.mlp_out"]
    assert (touched["changed"], touched["size"]) == (x.numel(), x.numel())
    assert touched["largest"] == pytest.approx(float(x.abs().max()))
    assert touched["norm"] == touched["norm_change"] == pytest.approx(float(x.norm()))


def test_the_best_of_either_run_are_listed():
    """`cats` presets two words; `chairs` comes second where head 1 of layer 1 is silent, and was last."""
    report = run("trace", "--ablate", "L0H1", "-k", "2", "--json").json
    [effect] = report["effects"]
    moved = {one["token"]: one for one in effect["moved"] if one["token"]}
    assert moved["chairs"]["rank_without"] == 256 and moved["chairs"]["rank_with"] == 2
    assert moved["mats"]["rank_without"] == moved["mats"]["rank_with"] == 1
    assert moved["volcano"]["tie_without"] == [2, 255] and moved["volcano"]["tie_with"] == [3, 256]
    assert report["walks"] == [] and report["proof"] == []


@pytest.mark.parametrize("columns", [None, 80])
def test_what_a_person_sees(columns, tmp_path):
    ran = run("trace", "--ablate", "L0H1", columns=columns, NO_COLOR="1")
    assert ran.status == 0
    assert "EDITED --ablate L0H1" in ran.out and "KL(without || with) 0.0001 nats = 0.0002 bits" in ran.out
    assert "2–255  → 3–256  92  volcano   0.0000  → 0.0000" in ran.out
    assert "  256  → 2      91  chairs   -0.0911  → 0.1351  +0.2262" in ran.out
    assert all(columns is None or len(line) <= columns for line in ran.out.splitlines())
    assert "step by step" not in ran.out
    long = ["trace", "--set", "layers.1.attn.pattern[0,1]=0", "--ablate", "layers.*.mlp_out"]
    ran = run(*long, columns=columns, NO_COLOR="1")
    assert all(columns is None or len(line) <= columns for line in ran.out.splitlines())
    assert "computed step by step, to go on with what was set: layers.1.attn\n" in ran.out
    assert run(*long, encoding="ascii").out.isascii()
    assert run("trace", "--ablate", "L0H1", "-q").out.startswith("2\t0.000")


def test_a_model_that_fills_in_and_one_without_a_head(toy):
    report = run("trace", "-m", toy("bert, no head")[0], *FED, "--ablate", "L0H1", "--json").json
    [effect] = report["effects"]
    assert effect["kl_nats"] is None and effect["moved"] == [] and effect["norm_change"] > 0
    assert "final vector: |x|" in run("trace", "-m", toy("bert, no head")[0], *FED, "--ablate", "L0H1").out
    report = run("trace", "-m", toy("bert")[0], *FED, "--ablate", "L0H1", "--json").json
    assert report["effects"][0]["fills"] and report["effects"][0]["kl_nats"] > 0


def test_other_views_of_an_edited_run_say_so(toy):
    path, _ = toy("gpt2")
    words = ["trace", "-m", path, *FED, "--ablate", "L0H1"]
    ran = run(*words, "--at", "layers.0.attn.z", "--json")
    assert ran.json["model"]["edits"] == ["--ablate L0H1"] and not any(map(any, ran.json["values"][0][1]))
    assert "EDITED --ablate L0H1" in run(*words, "--at", "layers.0.attn.z").out
    assert "EDITED --ablate L0H1" in run(*words, "--map").out
    assert run("trace", "-m", path, *FED, "--json").json["model"]["edits"] == []


ERRORS = [
    (("--ablate", "L0H0", "--ablate", "L0H0"), "--ablate L0H0: touches nothing: layers.0.attn.z has these values"),
    (("--set", "L0H0=0", "--ablate", "L0H0"), "--ablate L0H0: touches nothing"),
    (("--set", "layers.0.attn.pattern[0,0,0]=1"), "touches nothing"),  # the first token sees itself alone
    (("--ablate", "L0H9"), "L0 has 4 heads, counted from 0; give H0 to H3"),
    (("--ablate", "L3H0"), "3 layers, counted from 0; give L0 to L2"),
    (("--ablate", "layers.0.mlp"), "--ablate layers.0.mlp: no such activation"),
    (("--ablate", ""), "no such activation"),
    (("--ablate", "L0H0", "--position", "8"), "--position 8: beyond the text"),
    (("--ablate", "L0H0", "--attention", "cross"), "this model is one stack"),
    (("--ablate", "layers.0.attn.scores", "--ablate-with", "mean"), "layers.0.attn.scores has no mean"),
    (("--ablate-with", "mean"), "--ablate-with without an edit"),
    (("--token", "a"), "--token without an edit"),
    (("-k", "3"), "-k without an edit"),
    (("--ablate-with", "mean", "--set", "L0H0=0"), "--ablate-with mean without --ablate"),
    (("--set", "layers.0.attn.pattern[0,8]=0"), "T '8', but layers.0.attn.pattern is [H,T,S] = [4, 8, 8]; give 0 to 7"),
    (("--set", "layers.0.attn.pattern[0,0,0,0]=0"), "4 numbers, but layers.0.attn.pattern is [H,T,S]"),
    (("--set", "layers.0.attn.pattern[a]=0"), "H 'a', but"),
    (("--set", "layers.0.attn.pattern[]=0"), "H '', but"),
    (("--set", "embed[0]"), "not PATH[index]=value"),
    (("--set", "embed[0]="), "not PATH[index]=value"),
    (("--set", "embed[0]=x"), "'x' is not a number"),
    (("--set", "embed[0]=nan"), "'nan' is not a number"),
    (("--patch", "embed"), "--patch embed: not FILE:PATH"),
    (("--patch", "none.safetensors:embed"), "none.safetensors: no such file"),
    (("--patch", "{here}/note.txt:embed"), "no .safetensors or .npy file"),
    (("--patch", "{here}/short.npy:embed"), "[3, 5], but embed is [1, 8, "),
    (("--patch", "{here}/words.npy:embed"), "words.npy: "),
    (("--patch", "{here}/cut.npy:embed"), "cut.npy: "),
    (("--patch", "{here}/cut.safetensors:embed"), "cut.safetensors: "),
    (("--patch", "{here}/other.safetensors:embed"), "holds no embed; it holds logits"),
    (("--patch", "{here}/whole.safetensors:logits"), "logits is I64"),
    (("--patch", "{here}/short.npy:layers.*.attn_out"), "one array for 3 activations"),
    (("--ablate", "L0H0", "--list"), "--list and --ablate"),
    (("--ablate", "L0H0", "--at", "embed", "--layer", "2"), "--at and --layer"),
]


@pytest.mark.parametrize(
    ("words", "says"), ERRORS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_what_is_refused_in_one_line(words, says, toy, tmp_path):
    path, _ = toy("gpt2")
    (tmp_path / "note.txt").write_text("no tensors")
    numpy.save(tmp_path / "short.npy", numpy.zeros((3, 5), "float32"))
    numpy.save(tmp_path / "words.npy", numpy.array(["a", "b"]))
    whole = (tmp_path / "short.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-7])
    save_file({"logits": torch.zeros(1, 8, 3)}, tmp_path / "other.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "other.safetensors").read_bytes()[:-7])
    save_file({"logits": torch.zeros(1, 8, 97, dtype=torch.int64)}, tmp_path / "whole.safetensors")
    ran = run("trace", "-m", path, *FED, *(word.replace("{here}", str(tmp_path)) for word in words))
    assert ran.status == 2 and ran.out == ""
    assert ran.err.count("\n") == 1 and ran.err.startswith("gptcli: ") and says in ran.err, ran.err


def test_a_text_among_several_is_not_edited(toy):
    ran = run("trace", "-m", toy("gpt2")[0], "--ids", "[[1,2],[3,4]]", "--ablate", "L0H0")
    assert ran.status == 2 and "2 texts, but edits are made in one" in ran.err


def test_a_sink_s_share_is_read_by_nothing(toy):
    path, _ = toy("gpt_oss")
    ran = run("trace", "-m", path, *FED, "--ablate", "layers.0.attn.sink")
    assert ran.status == 2 and "nothing reads layers.0.attn.sink" in ran.err
    report = run("trace", "-m", path, *FED, "--ablate", "layers.0.attn.*", "--json").json
    assert "layers.0.attn.sink" not in [touched["path"] for touched in report["touched"]]


def test_a_patch_from_other_weights_is_noted(toy, tmp_path):
    path, _ = toy("gpt2")
    save_toy(TOYS["gpt2"], tmp_path / "twin", seed=5, auto=auto("gpt2"))
    file = tmp_path / "twin.safetensors"
    assert run("trace", "-m", tmp_path / "twin", *FED, "--at", "embed", "-o", file).status == 0
    ran = run("trace", "-m", path, *FED, "--patch", f"{file}:embed")
    assert ran.status == 0 and f"note: {file} was traced from other weights than these" in ran.err
    # Of another type of the run, a digest says nothing.
    ran = run("trace", "-m", path, *FED, "--patch", f"{file}:embed", "--dtype", "f32")
    assert "other weights" not in ran.err


def test_positions_of_a_source_are_not_those_of_the_text(toy):
    words = ["trace", "-m", toy("marian")[0], "--ids", "1,2,3", *SOURCE, "--json"]
    report = run(*words, "--ablate", "encoder.layers.0.mlp_out", "--position", "5").json
    assert [effect["position"] for effect in report["effects"]] == [2]
    assert report["touched"][0]["where"] == "position 5"
    ran = run(*words, "--ablate", "layers.0.mlp_out", "--position", "5")
    assert ran.status == 2 and "positions run from 0 to 2" in ran.err


def test_a_short_run_of_the_last_row_is_edited_as_the_whole(toy):
    model = open_model(str(toy("gpt2")[0]))
    from gptcli.report.edits import Request, edits_of

    here = Run(model, [IDS])
    here.edits = edits_of(here, [Request("set", "layers.2.attn_out[2]=1")])
    assert torch.equal(here.forward("last"), here.forward("all")[:, -1:])


@pytest.fixture(scope="module")
def ablated(toy):
    """A checkpoint, and the library's logits [T, V] of it without and with L1H2's z set to zero."""
    path, theirs = toy("gpt2")

    def before(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[..., 2 * 6 : 3 * 6] = 0
        return x

    assert open_model(str(path)).spec.attention.head_dim == 6
    module = "transformer.h.1.attn.c_proj"
    return path, hooked(theirs, module, lambda x: x), hooked(theirs, module, before)


def edited(command: str, path: Path, *words: object) -> dict:
    """The report of a command whose run lacks L1H2, in float64."""
    ran = run(command, "-m", path, *FED, "--dtype", "f64", "--ablate", "L1H2", *words, "--json")
    assert ran.status == 0, ran
    assert ran.json["model"]["edits"] == ["--ablate L1H2"]
    return ran.json


def test_topk_of_an_edited_run_has_the_ranks_without_it(ablated):
    path, without, with_ = ablated
    top = edited("topk", path, "-k", "1000")["next"][0]["top"]
    ids = [one["id"] for one in top]
    assert ids == with_[-1].argsort(descending=True).tolist()
    assert [one["rank_without"] for one in top] == [int((without[-1] > without[-1, id_]).sum()) + 1 for id_ in ids]
    for name, logits_ in (("prob", with_), ("prob_without", without)):
        probs = torch.tensor([one[name] for one in top], dtype=torch.float64)
        torch.testing.assert_close(probs, logits_[-1].softmax(-1)[ids], rtol=1e-9, atol=0)
    shown = run("topk", "-m", path, *FED, "--ablate", "L1H2").out
    assert "EDITED --ablate L1H2" in shown and "rank was  prob was" in shown
    assert "rank was" not in run("topk", "-m", path, *FED).out


def test_other_commands_tell_of_the_edited_run(ablated):
    path, _, with_ = ablated
    best = edited("forward", path)["next"][0]["top"][0]
    assert best["id"] == int(with_[-1].argmax()) and abs(best["logit"] - float(with_[-1].max())) < 1e-9
    [text] = edited("score", path)["texts"]
    logprobs = with_[:-1].log_softmax(-1)[range(len(IDS) - 1), IDS[1:]]
    assert abs(text["sum"] - float(logprobs.sum())) < 1e-9
    cells = edited("lens", path)["rows"][-1]["cells"]
    assert [one["id"] for one in cells] == with_.argmax(-1).tolist()
    reading = edited("lens", path, "--position", "3", "-k", "1")["readings"][-1]
    assert abs(reading["top"][0]["logit"] - float(with_[3].max())) < 1e-9 and reading["kl"] == 0


def test_heads_are_ranked_by_the_weights_that_stand_there(toy):
    """Of a head whose weights are all set to a quarter, each measure is a quarter."""
    path, _ = toy("gpt2")
    ran = run("heads", "-m", path, *FED, "--set", "layers.1.attn.pattern[2]=0.25", "--json")
    assert ran.status == 0, ran
    [one] = [one for one in ran.json["heads"] if (one["layer_index"], one["head"]) == (1, 2)]
    assert (one["previous"], one["first"], one["itself"]) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("command", ["topk", "forward", "lens", "score", "heads"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "layers.0.attn.pattern[0,0,0]=1"), "touches nothing"),
        (("--ablate", "L9H0"), "this model has 3 layers"),
        (("--ablate-with", "mean"), "--ablate-with without an edit"),
        (("--ablate", "L0H0", "--batch"), "2 texts, but edits are made in one"),
    ],
)
def test_an_edit_that_does_nothing_is_refused_everywhere(command, words, said, toy):
    path, _ = toy("gpt2")
    fed = ("--ids", "[[1,2],[3,4]]") if "--batch" in words else FED
    ran = run(command, "-m", path, *fed, *words)
    assert ran.status == 2 and said in ran.err, ran


def test_lens_reads_by_the_norm_and_the_head_as_they_are(toy):
    path, _ = toy("gpt2")
    ran = run("lens", "-m", path, *FED, "--set", "final_norm=0")
    assert ran.status == 2 and "--set final_norm=0: lens reads every layer by the norm and the head" in ran.err
