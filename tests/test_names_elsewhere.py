"""Names of activations in other vocabularies: each read both ways, and Hugging Face's against its own modules.

What transformers' modules give, caught by hooks in float64, is what our activation of that name holds.
"""

import json
import re
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch

import gptcli
from gptcli import names
from gptcli.errors import GptcliError
from gptcli.names import Names
from gptcli.source import open_model
from gptcli.trace import LAYER_POINTS, POINTS
from tests import test_families_seq2seq as seq2seq
from tests.command import gptcli as run
from tests.oracle import in_float64, save_toy
from tests.test_trace_families import IDS, SOURCE_IDS, TOYS, auto

VOCABULARIES = ("ours", "transformerlens", "huggingface")
TABLES = {
    "transformerlens": (names.BLOCK_HOOKS, names.STACK_HOOKS, names.ENCODER_HOOKS),
    "huggingface": (names.LAYER_MODULES, names.STACK_MODULES, names.STACK_MODULES),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    made = tmp_path_factory.mktemp("toys")

    @cache
    def of(name: str) -> tuple[Path, torch.nn.Module]:
        return made / name, save_toy(TOYS[name], made / name, auto=auto(name))

    return of


@pytest.mark.parametrize("vocabulary", TABLES)
def test_every_point_has_a_row(vocabulary):
    """A point without a name there says so by an empty row."""
    layer, stack, encoder = TABLES[vocabulary]
    assert set(layer) == set(LAYER_POINTS)
    assert set(stack) >= {path for path in POINTS if "#" not in path and not path.startswith("encoder.")}
    inside = {path.removeprefix("encoder.") for path in POINTS if "#" not in path and path.startswith("encoder.")}
    assert set(encoder) >= inside
    rows = [row for table in (layer, stack, encoder) for rows in table.values() for row in rows]
    assert {row.when for row in rows} <= set(names.CONDITIONS)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", TOYS)
def test_every_name_is_read_both_ways(name, vocabulary, toy):
    """A name means one activation, in that vocabulary, and so does every other name that is understood for it."""
    known = Names(open_model(str(toy(name)[0])), vocabulary)
    said = [other for path in known.paths for other in known.known[path]]
    assert len(said) == len(set(said))
    assert len(said) > len(known.paths) / 3
    for path in known.paths:
        assert known.select("--at", path) == [path]
        for other in known.known[path]:
            assert known.select("--at", other) == [path]


def test_the_bridge_has_every_hook_that_we_name(toy):
    """As a run of TransformerLens' bridge has them, written by tests/benchmarks/watching.py, which compares the numbers
    too: the same axes as ours, though not always in our order. Keys are counted as T there.
    """
    theirs = json.loads((Path(__file__).parent / "data" / "hooks.json").read_text())["gpt2"]
    known = Names(open_model(str(toy("gpt2")[0])), "transformerlens")
    named = [(path, name) for path in known.paths for name in known.known[path]]
    assert len(named) > 3 * 16
    for path, name in named:
        ours = POINTS[re.sub(r"\.\d+\.", ".#.", path)].replace("S", "T").replace("G", "H")
        assert sorted(theirs[re.sub(r"\.\d+\.", ".#.", name)]) == sorted(ours), (path, name)


def test_a_name_that_is_none_names_the_nearest(toy):
    known = Names(open_model(str(toy("gpt2")[0])), "transformerlens")
    with pytest.raises(GptcliError, match=r'blocks.0.attn.hook_qq: no such activation; did you mean "blocks.0.attn'):
        known.select("--at", "blocks.0.attn.hook_qq")


# As TransformerLens' documents list them, for a decoder with learned positions, norms before and a plain MLP.
HOOKS = {
    "layers.1.resid_pre": "blocks.1.hook_resid_pre",
    "layers.1.attn_norm": "blocks.1.ln1.hook_out",
    "layers.1.attn.q": "blocks.1.attn.hook_q",
    "layers.1.attn.k": "blocks.1.attn.hook_k",
    "layers.1.attn.v": "blocks.1.attn.hook_v",
    "layers.1.attn.scores": "blocks.1.attn.hook_attn_scores",
    "layers.1.attn.pattern": "blocks.1.attn.hook_pattern",
    "layers.1.attn.z": "blocks.1.attn.hook_z",
    "layers.1.attn_out": "blocks.1.hook_attn_out",
    "layers.1.resid_mid": "blocks.1.hook_resid_mid",
    "layers.1.mlp_norm": "blocks.1.ln2.hook_out",
    "layers.1.mlp.up": "blocks.1.mlp.hook_pre",
    "layers.1.mlp.act": "blocks.1.mlp.hook_post",
    "layers.1.mlp_out": "blocks.1.hook_mlp_out",
    "layers.1.resid_post": "blocks.1.hook_resid_post",
    "final_norm": "ln_final.hook_out",
    "logits": "unembed.hook_out",
    "embed": None,  # theirs is without positions
}


def test_hooks_of_a_decoder(toy):
    known = Names(open_model(str(toy("gpt2")[0])), "transformerlens")
    assert {path: known.of(path) for path in known.paths if not path.startswith(("layers.0", "layers.2"))} == HOOKS
    assert known.select("--at", "ln_final.hook_normalized") == ["final_norm"]
    assert known.select("--at", "blocks.*.hook_resid_post") == [f"layers.{i}.resid_post" for i in range(3)]


@pytest.mark.parametrize(
    ("name", "path", "hook"),
    [
        ("llama", "embed", "hook_embed"),
        ("llama", "layers.0.mlp.up", "blocks.0.mlp.hook_pre_linear"),
        ("llama", "layers.0.mlp.gate", "blocks.0.mlp.hook_pre"),
        ("llama", "layers.0.attn.q_rot", "blocks.0.attn.hook_rot_q"),
        ("gemma2", "layers.0.attn_out_norm", "blocks.0.hook_attn_out"),
        ("gemma2", "layers.0.attn_out", None),
        ("gemma2", "layers.0.mlp_out_norm", "blocks.0.hook_mlp_out"),
        ("gemma2", "logits", None),  # theirs is before the soft cap
        ("gptj", "layers.0.resid_mid", None),
        ("gpt_oss", "layers.0.attn.sink", None),
        ("bart", "logits", None),  # whose bias is no part of the matrix' module
        ("t5", "encoder.layers.0.attn.pattern", "encoder.0.attn.hook_pattern"),
        ("t5", "layers.0.cross.pattern", "decoder.0.cross_attn.hook_pattern"),
        ("t5", "layers.0.mlp_norm", "decoder.0.ln3.hook_out"),
        ("t5", "encoder.layers.0.mlp_norm", "encoder.0.ln2.hook_out"),
        ("t5", "layers.0.resid_cross", "decoder.0.hook_resid_mid_cross"),
    ],
)
def test_hooks_that_hang_on_the_architecture(name, path, hook, toy):
    name = next(key for key in TOYS if key.split(",")[0] == name)
    known = Names(open_model(str(toy(name)[0])), "transformerlens")
    assert path in known.known
    assert known.of(path) == hook


# What the library calls modules that its files go on calling by an older name.
RENAMED = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("block_sparse_moe", "mlp"),
    ("embed_out", "lm_head"),
)


class Caught(dict):
    """What modules give while the library runs: by module path; an attention's weights by its path.attn_weights."""

    def hang(self, stack: ExitStack, model: torch.nn.Module, wanted: list[str]) -> None:
        modules = dict(model.named_modules())
        for name in wanted:
            path = name.removesuffix(".attn_weights")
            for old, new in RENAMED:
                path = path if path in modules else path.replace(old, new)
            assert path in modules, name
            stack.callback(modules[path].register_forward_hook(self.hook(name)).remove)

    def hook(self, name: str):
        def keep(module, args, given):
            given = given if isinstance(given, tuple) else (given,)
            weights = [x for x in given[1:] if x is not None and x.ndim == 4]  # after a table of biases, where there is
            self[name] = weights[-1] if "attn_weights" in name else given[0]

        return keep


@pytest.mark.parametrize("name", TOYS)
def test_a_module_gives_what_our_activation_of_its_name_holds(name, toy):
    path, theirs = toy(name)
    known = Names(open_model(str(path)), "huggingface")
    named = {ours: other for ours in known.paths if (other := known.of(ours)) is not None}
    caught = Caught()
    source = SOURCE_IDS if name in seq2seq.CASES else None
    told = {"output_attentions": True} | ({} if name in seq2seq.CASES else {"use_cache": False})
    with ExitStack() as stack, in_float64(), torch.no_grad():
        caught.hang(stack, theirs, list(named.values()))
        if source is None:
            theirs(torch.tensor([IDS]), **told)
        else:
            theirs(torch.tensor([source]), decoder_input_ids=torch.tensor([IDS]), **told)
    ours = gptcli.open(path, dtype="float64").activations(IDS, "*", source=source)
    assert {"attn_out", "resid_post", "mlp_out"} <= {ours.rpartition(".")[2] for ours in named}
    for point, module in named.items():
        mine, other = ours[point], caught[module]
        if re.search(r"\.(attn|cross)\.[qkv](_norm)?$", point) and other.shape != mine.shape:
            mine = mine.transpose(1, 2)  # theirs stand side by side, or by position first
        gap = (mine.reshape(-1) - other.reshape(-1)).abs().max()
        assert float(gap) < 1e-9, (point, module, float(gap))


def test_what_a_person_sees(toy):
    path = toy("llama")[0]
    words = ["trace", "-m", path, "--ids", "5,17,3"]
    shown = run(*words, "--list", "--names", "huggingface").out
    assert re.search(r"^layers.0.attn.q +\[B,H,T,D\] +\[1,\d,3,\d+\]  model.layers.0.self_attn.q_proj$", shown, re.M)
    assert re.search(r"^layers.0.attn.z +\S+ +\S+ +has no name there$", shown, re.M)
    as_json = run(*words, "--list", "--names", "huggingface", "--json").json
    assert as_json["vocabulary"] == "huggingface"
    assert {point["path"]: point["name"] for point in as_json["points"]}["final_norm"] == "model.norm"
    named = run(*words, "--at", "blocks.0.attn.hook_pattern", "--names", "transformerlens", "--json").json
    plain = run(*words, "--at", "layers.0.attn.pattern", "--json").json
    assert named["name"] == "blocks.0.attn.hook_pattern" and named["path"] == plain["path"]
    assert named["values"] == plain["values"]
    shown = run(*words, "--at", "blocks.0.attn.hook_pattern", "--names", "transformerlens").out
    assert "layers.0.attn.pattern = blocks.0.attn.hook_pattern [B,H,T,S]" in shown
    ran = run(*words, "--names", "transformerlens")
    assert ran.status == 2 and "--names transformerlens without --list, --at, -o or an edit" in ran.err
    ran = run(*words, "--at", "blocks.0.attn.hook_pattern")
    assert ran.status == 2 and "no such activation" in ran.err


def test_the_common_words_where_no_checkpoint_has_its_own():
    known = Names(open_model("gpt2-small"), "huggingface")
    assert known.of("layers.11.mlp_out") == "model.layers.11.mlp.down_proj"
    assert known.of("layers.11.resid_post") == "model.layers.11"
    assert known.of("layers.11.attn.pattern") == "model.layers.11.self_attn.attn_weights"
    assert known.of("embed") is None and known.of("logits") == "lm_head"
    known = Names(open_model("transformer-2017-base"), "huggingface")
    assert known.of("encoder.layers.5.attn.k") == "model.encoder.layers.5.self_attn.k_proj"
    assert known.of("layers.5.cross.k") == "model.decoder.layers.5.encoder_attn.k_proj"
