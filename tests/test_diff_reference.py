"""transformers as a side: what its modules take and give, under our names, is what our own engine computes."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama

from gptcli.diff.lockstep import abreast, common
from gptcli.diff.reference import Reference
from gptcli.errors import GptcliError
from gptcli.layout import Place
from gptcli.run import Run
from gptcli.source import open_model
from gptcli.trace import Recorder, Selection, Silent, points
from tests.command import gptcli
from tests.test_trace_families import IDS, SOURCE_IDS, TOYS, fed

every_toy = pytest.mark.parametrize("name", TOYS)


def sides(path: Path, dtype: str, ids: tuple[int, ...] = tuple(IDS)) -> tuple[Run, Reference]:
    model = open_model(str(path))
    told = {"ids": [list(ids)], "dtype_name": dtype, "source": None if model.spec.encoder is None else [SOURCE_IDS]}
    return Run(model, **told), Reference(model, **told)


def recorded(run: Run) -> dict[str, torch.Tensor]:
    recorder = Recorder("*")
    run.forward("all", recorder)
    return recorder.kept


def gap(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).abs().max() / x.abs().max())


# What the library has no tensor for. Its sums in a row are caught at the norm behind them, unless it has no weights; of
# two branches side by side there is no sum in between.
BESIDE = {"attn.scores", "cross.scores", "attn.sink"}
LACKING = {
    "gpt_neox": {"resid_mid"},
    "gptj": {"resid_mid"},
    "phi": {"resid_mid"},
    "nanochat": {"resid_mid", "attn.q_rot", "attn.k_rot"},
    "gpt_neox, yarn": {"resid_mid"},
    "opt, norms without weights": {"resid_mid", "final_norm"},
    "phi, q and k normed": {"resid_mid"},
    "stablelm, side by side, a norm for each head": {"resid_mid", "attn.q_norm", "attn.k_norm"},
    "nanochat, a scaled rotation": {"resid_mid", "attn.q_rot", "attn.k_rot"},
}


@every_toy
def test_every_activation_is_our_own_in_float64(name, toy):
    run, reference = sides(toy(name), "float64")
    ours, theirs = recorded(run), recorded(reference.exact())
    lacking = {Place.of(path).name for path in ours.keys() - theirs.keys()} - BESIDE
    assert lacking == LACKING.get(name, set())
    order = [path for path, _ in points(run.model.spec)]
    assert (
        list(theirs) == [path for path in order if path in theirs] == [path for path in order if reference.holds(path)]
    )
    for path, x in theirs.items():
        assert x.dtype == torch.float64 and x.shape == ours[path].shape, path
        assert gap(ours[path], x) < 1e-9, path


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_oss", "mixtral", "stablelm", "bert", "t5", "marian"])
def test_in_its_own_type_beside_ours_and_both_in_float64(name, toy):
    """Four runs at once, as a comparison has them; each sees the types that it names, and none another's."""
    run, reference = sides(toy(name), "float32")
    four = [run, reference, run.exact(), reference.exact()]
    far = {}

    def look(path, a, b, exact_a, exact_b):
        assert (a.dtype, b.dtype, exact_a.dtype, exact_b.dtype) == (torch.float32,) * 2 + (torch.float64,) * 2
        assert torch.get_default_dtype() == torch.float32 and exact_a.float().dtype == torch.float32
        far[path] = gap(a, b), gap(exact_a, exact_b)
        return True

    abreast(four, look, common(*four))
    assert set(far) == set(common(run, reference)) and len(far) > 40
    assert max(own for own, _ in far.values()) < 1e-5
    assert max(exact for _, exact in far.values()) < 1e-9


def state(reference: Reference) -> tuple:
    """What a run may change for the whole process, or of the library's model."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in reference.library.modules())
    return torch.get_default_dtype(), torch.FloatTensor, modeling_llama.eager_attention_forward, hooks


def test_without_the_casts_lifted_a_right_model_looks_wrong(toy, monkeypatch):
    """What the library keeps in float32 of a run in float64 (norms, softmax, angles) is far from rounding."""
    monkeypatch.setattr("gptcli.model.lifted.in_float64", nullcontext)
    run, reference = sides(toy("llama"), "float64")
    assert gap(run.forward("all"), reference.forward("all")) > 1e-8


class Stop(Silent):
    """A probe that fails at one activation."""

    def __call__(self, name, x):
        if name == "q_rot":
            raise KeyError(name)
        return x

    def at(self, scope):
        return self


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_everything_is_as_it_was_after_a_run_and_after_a_failure(dtype, toy):
    reference = sides(toy("llama"), dtype)[1]
    before = state(reference)
    assert before[:2] == (torch.float32, torch.FloatTensor) and before[3] == 0
    seen = []

    class Look(Silent):
        def __call__(self, name, x):
            seen.append(state(reference)[:3] == before[:3])
            return x

        def at(self, scope):
            return self

    reference.forward("all", Look())
    assert len(seen) > 40 and all(seen)  # meanwhile too
    assert state(reference) == before
    with pytest.raises(KeyError):
        reference.forward("all", Stop())
    assert state(reference) == before


def test_the_pattern_is_shown_in_the_parts_that_are_asked_for(toy):
    run, reference = sides(toy("llama"), "float64")
    part = Recorder("*.pattern", select=Selection(slice(1, 2), slice(-1, None)))
    reference.forward("all", part)
    assert gap(recorded(run)["layers.1.attn.pattern"][:, 1:2, -1:], part.kept["layers.1.attn.pattern"]) < 1e-9


def test_as_many_heads_as_positions(toy):
    """The library's q_norm may give either first, and its shape doesn't tell: it isn't shown, and all else is right."""
    run, reference = sides(toy("qwen3"), "float64", tuple(IDS[:4]))
    ours, theirs = recorded(run), recorded(reference)
    assert run.model.spec.attention.n_heads == 4
    assert "layers.0.attn.q_norm" not in theirs and {"layers.0.attn.k_norm", "layers.0.attn.q_rot"} <= theirs.keys()
    assert all(gap(ours[path], x) < 1e-9 for path, x in theirs.items())


def test_logits_of_the_last_position(toy):
    reference = sides(toy("gpt2"), "float32")[1]
    everything, last = reference.forward("all"), reference.forward("last")
    assert last.shape == (1, 1, 97) and torch.equal(last, everything[:, -1:])
    assert "run by transformers 5" in reference.facts().source and reference.facts().dtype == "float32"


def test_several_texts_of_one_length(toy):
    model = open_model(str(toy("llama")))
    ids = [IDS, IDS[::-1]]
    ours, theirs = recorded(Run(model, ids, "float64")), recorded(Reference(model, ids, "float64"))
    assert theirs["logits"].shape == (2, 8, 97)
    assert all(gap(ours[path], x) < 1e-9 for path, x in theirs.items())
    with pytest.raises(GptcliError, match="texts of different lengths; give one at a time"):
        Reference(model, [IDS, IDS[1:]], "float64")


def test_segments_reach_the_library(toy):
    model, parts = open_model(str(toy("bert"))), [[0, 0, 0, 1, 1, 1, 1, 1]]
    ours = recorded(Run(model, [IDS], "float64", segments=parts))
    theirs = recorded(Reference(model, [IDS], "float64", segments=parts))
    plain = recorded(Reference(model, [IDS], "float64"))
    assert gap(ours["embed"], theirs["embed"]) < 1e-9 < gap(ours["embed"], plain["embed"])
    assert gap(ours["logits"], theirs["logits"]) < 1e-9


def test_what_it_can_not_run_is_said(toy, monkeypatch, tmp_path):
    with pytest.raises(GptcliError, match=r"gpt2-small \(shipped\) is no directory with weights and a config.json"):
        Reference(open_model("gpt2-small"), [IDS])
    with pytest.raises(GptcliError, match="is no directory with weights"):
        Reference(open_model(str(toy("gpt2") / "model.safetensors")), [IDS])
    # A wrapper's prefix, which the library doesn't take off: it would run random weights.
    (tmp_path / "config.json").write_text((toy("llama") / "config.json").read_text())
    tensors = load_file(toy("llama") / "model.safetensors")
    wrapped = {f"_orig_mod.{name}": x for name, x in tensors.items()}
    save_file(wrapped, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(GptcliError, match=r"it misses \S+\.weight in"):
        Reference(open_model(str(tmp_path)), [IDS]).forward("all")
    monkeypatch.setattr("gptcli.diff.reference.find_spec", lambda name: None)
    with pytest.raises(GptcliError, match="it is not installed; pip install transformers"):
        Reference(open_model(str(toy("gpt2"))), [IDS])


def test_code_beside_the_weights_is_not_run(toy, tmp_path):
    """A directory may name classes of its own, in a file beside the weights."""
    tensors, source = load_file(toy("gpt2") / "model.safetensors"), toy("gpt2") / "config.json"
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(source.read_text()) | {"auto_map": own}))
    (tmp_path / "own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = Reference(open_model(str(tmp_path)), [IDS], "float64")
    run = Run(reference.model, [IDS], "float64")
    assert gap(run.forward("all"), reference.forward("all")) < 1e-9
    assert not (tmp_path / "ran").exists()


@every_toy
def test_every_family_is_the_same_for_the_command(name, toy):
    """In float32, whose rounding both sides' float64 tells from a bug: the library's casts would look like one."""
    ran = gptcli("diff", toy(name), "--reference", "transformers", *fed(name), "--dtype", "f32", "--json")
    assert ran.status == 0, ran.err
    assert ran.json["verdict"] in ("identical", "rounding"), ran.json["parted"]
    compared = {one["path"] for one in ran.json["activations"]}
    assert compared >= {"layers.0.resid_pre", "layers.0.attn.v", "layers.0.attn.z", "layers.0.mlp_out"}
    assert ("logits" in compared) == (not name.endswith("no head"))
    assert "run by transformers" in ran.json["b"]["source"]
