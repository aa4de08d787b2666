"""Dumps: arrays under anyone's names, in any format and layout, are the activations that they were written from."""

import json
import pickle
import shutil
from functools import cache
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from gptcli.diff.dumps import Dumps
from gptcli.errors import GptcliError
from gptcli.names import Names
from gptcli.run import Run
from gptcli.source import open_model
from gptcli.trace import Recorder, points
from tests import test_families_seq2seq as seq2seq
from tests.command import gptcli
from tests.converted import convert, exact_toy, to_pairs
from tests.oracle import in_float64, save_toy
from tests.test_gguf_families import CASES as GGUFS
from tests.test_trace_families import IDS, SOURCE_IDS, TOYS, auto

SAMPLE = ("gpt2", "llama", "qwen3", "gemma2", "gpt_oss", "gpt_neox", "phi3", "opt", "bert", "t5", "bart")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    made = tmp_path_factory.mktemp("toys")

    @cache
    def of(name: str) -> tuple[Run, dict[str, torch.Tensor], torch.nn.Module]:
        """A run in float64, all that it recorded, and the library's model."""
        theirs = save_toy(TOYS[name], made / name, auto=auto(name))
        source = [SOURCE_IDS] if name in seq2seq.CASES else None
        run = Run(open_model(str(made / name)), [IDS], "float64", source=source)
        recorder = Recorder("*")
        run.forward("all", recorder)
        return run, recorder.kept, theirs

    return of


def side(path: Path, run: Run, names: Path | None = None) -> Dumps:
    """Arrays beside a run of their model."""
    return Dumps(path, run.model, run.ids, run.source, names)


def shown(dumps: Dumps) -> dict[str, torch.Tensor]:
    """What a side passes to a probe that wants everything it has."""
    recorder = Recorder(*(path for path, _ in points(dumps.model.spec) if dumps.holds(path)))
    dumps.forward("all", recorder)
    return recorder.kept


def write(folder: Path, arrays: dict[str, torch.Tensor], kind: str = "npy") -> Path:
    folder.mkdir(exist_ok=True)
    plain = {name: x.detach().contiguous().clone() for name, x in arrays.items()}
    if kind == "npy":
        for name, x in plain.items():
            numpy.save(folder / f"{name}.npy", x.numpy())
    elif kind == "npz":
        numpy.savez(folder / "all.npz", **{name: x.numpy() for name, x in plain.items()})
    elif kind == "safetensors":
        save_file(plain, folder / "all.safetensors")
    else:
        torch.save(plain, folder / "all.pt")
    return folder


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "pt"])
def test_our_names_in_every_format(kind, toy, tmp_path):
    run, held, _ = toy("llama")
    dumps = side(write(tmp_path / "x", held, kind), run)
    found = shown(dumps)
    assert list(found) == list(held)  # in order of birth
    assert all(torch.equal(found[path], x) for path, x in held.items())
    assert (dumps.ids, dumps.dtype, dumps.exact()) == ([IDS], torch.float64, None)
    assert dumps.model.notes == [] and dumps.facts().source == f"arrays in {tmp_path / 'x'}"
    if kind != "npy":
        assert list(shown(side(tmp_path / "x" / f"all.{kind}", run))) == list(held)


HEADS = ("BHTD", "BGSD", "BHSD")


def positions_first(path: str, x: torch.Tensor, axes: dict[str, str]) -> torch.Tensor:
    return x.transpose(1, 2) if axes[path] in HEADS else x


def merged(path: str, x: torch.Tensor, axes: dict[str, str]) -> torch.Tensor:
    return x.transpose(1, 2).flatten(-2) if axes[path] in HEADS else x


@pytest.mark.parametrize("batch", [True, False], ids=["batch", "no batch"])
@pytest.mark.parametrize("lay", [positions_first, merged])
@pytest.mark.parametrize("name", SAMPLE)
def test_heads_split_or_merged_with_and_without_texts(name, lay, batch, toy, tmp_path):
    run, held, _ = toy(name)
    axes = dict(points(run.model.spec))
    laid = {path: lay(path, x, axes) for path, x in held.items()}
    found = shown(side(write(tmp_path / "x", laid if batch else {path: x[0] for path, x in laid.items()}), run))
    assert all(torch.equal(found[path], x) for path, x in held.items())


@pytest.mark.parametrize("vocabulary", ["transformerlens", "huggingface"])
@pytest.mark.parametrize("name", SAMPLE)
def test_other_vocabularies(name, vocabulary, toy, tmp_path):
    """TransformerLens' hooks hold positions before heads; modules of transformers give heads side by side."""
    run, held, _ = toy(name)
    axes, lay = dict(points(run.model.spec)), positions_first if vocabulary == "transformerlens" else merged
    names = Names(run.model, vocabulary)
    arrays = {theirs: lay(path, held[path], axes) for path in held if (theirs := names.of(path))}
    found = shown(side(write(tmp_path / "x", arrays), run))
    assert len(found) == len(arrays) > 20
    assert all(torch.equal(x, held[path]) for path, x in found.items())


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "opt", "bert", "t5", "opt, rows of their own size"])
def test_the_tuples_that_the_library_gives(name, toy, tmp_path):
    """As torch.save writes them: hidden_states, the last after a final norm, and attentions."""
    run, held, theirs = toy(name)
    ids = torch.tensor([IDS])
    told = (
        {"input_ids": ids} if run.source is None else {"input_ids": torch.tensor(run.source), "decoder_input_ids": ids}
    )
    with in_float64(), torch.no_grad():
        given = theirs(**told, use_cache=False, output_hidden_states=True, output_attentions=True)
    words = ("hidden_states", "attentions", "logits")
    plain = {word: value for word, value in given.items() if word.endswith(words)}
    torch.save(plain, tmp_path / "given.pt")
    found = shown(side(tmp_path / "given.pt", run))
    spec = run.model.spec
    last = (
        "embed_out"
        if spec.embed_size
        else "final_norm"
        if spec.norm.final
        else f"layers.{spec.n_layers - 1}.resid_post"
    )
    assert {last, "layers.0.resid_pre", "layers.0.attn.pattern", "logits"} <= found.keys()
    assert len(found) == sum(len(value) if isinstance(value, tuple) else 1 for value in plain.values())
    for path, x in found.items():
        assert float((x - held[path]).abs().max() / held[path].abs().max()) < 1e-9, path


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "phi3"])
def test_fused_projections_by_their_module_s_name(name, toy, tmp_path):
    """What the library's one module gives, caught by a hook, is q, k and v."""
    run, held, theirs = toy(name)
    fused = ("attn.c_attn", "query_key_value", "qkv_proj", "gate_up_proj")
    caught: dict[str, torch.Tensor] = {}
    for path, module in theirs.named_modules():
        if path.endswith(fused):
            module.register_forward_hook(lambda m, args, given, path=path: caught.update({path: given}))
    with in_float64(), torch.no_grad():
        theirs(torch.tensor([IDS]), use_cache=False)
    found = shown(side(write(tmp_path / "x", caught), run))
    letters = {f"layers.{i}.attn.{letter}" for i in range(3) for letter in "qkv"}
    assert letters <= found.keys() and len(found) == len(letters) + (6 if name == "phi3" else 0)
    for path, x in found.items():
        assert float((x - held[path]).abs().max()) < 1e-9, path


def ggml_llama(run: Run, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What llama.cpp's graph of a Llama names, fastest axis last: rows of q and k are in pairs, keys fill a cache."""
    a, arrays = run.model.spec.attention, {}
    for i in range(run.model.spec.n_layers):
        of = {name.removeprefix(f"layers.{i}."): x[0] for name, x in held.items() if name.startswith(f"layers.{i}.")}
        w = run.weights.at(f"layers.{i}.attn")
        for letter, heads in (("q", a.n_heads), ("k", a.n_kv_heads)):
            rows = torch.arange(heads * a.head_dim)[:, None]
            turned = of[f"attn.{letter}_rot"].transpose(0, 1).flatten(1)  # [T, H·D]
            arrays[f"{letter.upper()}cur-{i}"] = to_pairs(turned.T, heads).T.unflatten(-1, (heads, -1))
            assert len(to_pairs(rows, heads)) == len(w[f"{letter}.weight"])
        arrays |= {
            f"Vcur-{i}": of["attn.v"].transpose(0, 1),
            f"kq_soft_max-{i}": torch.nn.functional.pad(of["attn.pattern"], (0, 32 - len(IDS))),
            f"kqv-{i}": of["attn.z"],
            f"attn_norm-{i}": of["attn_norm"],
            f"attn_out-{i}": of["attn_out"],
            f"ffn_inp-{i}": of["resid_mid"],
            f"ffn_norm-{i}": of["mlp_norm"],
            f"ffn_up-{i}": of["mlp.up"],
            f"ffn_gate-{i}": of["mlp.gate"],
            f"ffn_swiglu-{i}": of["mlp.act"],
            f"ffn_out-{i}": of["mlp_out"],
            f"l_out-{i}": of["resid_post"],
        }
    return arrays | {
        "inp_embd": held["embed"][0],
        "result_norm": held["final_norm"][0],
        "result_output": held["logits"][0, -1:],  # its graph goes on with the last position alone
    }


@pytest.mark.parametrize("flipped", [False, True], ids=["[T, H, D]", "[D, H, T]"])
def test_the_names_of_llama_cpp(flipped, toy, tmp_path):
    run, held, _ = toy("llama")
    arrays = ggml_llama(run, held)
    if flipped:
        arrays = {name: x.permute(*reversed(range(x.ndim))) for name, x in arrays.items() if "soft_max" not in name}
    found = shown(side(write(tmp_path / "x", arrays), run))
    assert len(found) == len(arrays)
    assert {"layers.0.attn.q_rot", "layers.2.attn.k_rot"} <= found.keys() and "layers.0.attn.q" not in found
    assert torch.equal(found.pop("logits"), held["logits"][:, -1:])
    assert all(torch.equal(x, held[path]) for path, x in found.items())


def test_before_the_rotation_the_same_name_has_heads_side_by_side(toy, tmp_path):
    run, held, _ = toy("llama")
    w = run.weights.at("layers.1.attn")
    # The projection of a file whose rows are in pairs.
    q = held["layers.1.attn_norm"][0] @ to_pairs(w["q.weight"], run.model.spec.attention.n_heads).T
    found = shown(side(write(tmp_path / "x", {"Qcur-1": q}), run))
    assert list(found) == ["layers.1.attn.q"]
    assert float((found["layers.1.attn.q"] - held["layers.1.attn.q"]).abs().max()) < 1e-12


def test_names_of_llama_cpp_where_nothing_turns(toy, tmp_path):
    run, held, _ = toy("gpt2")
    q, up = held["layers.0.attn.q"][0].transpose(0, 1), held["layers.0.mlp.up"][0]
    arrays = {"Qcur-0": q, "ffn_up_b-0": up, "ffn_up-0": up, "kq-0": held["layers.0.attn.scores"][0]}
    arrays |= {
        "inpL": held["embed"][0],
        "inp_embd": held["embed"][0],
        "kqv_out-0": merged("z", held["layers.0.attn.z"], {"z": "BHTD"})[0],
    }
    dumps = side(write(tmp_path / "x", arrays), run)
    assert list(shown(dumps)) == ["embed", "layers.0.attn.q", "layers.0.attn.z", "layers.0.mlp.up"]
    # Before the bias, before the positions, and on either side of the scale.
    assert dumps.model.notes == [f"{tmp_path / 'x'}: arrays whose names mean nothing here: ffn_up-0, inp_embd, kq-0"]


@pytest.mark.parametrize(("name", "pairs"), [("llama", True), ("qwen2", False)])
def test_beside_a_gguf_file_its_own_rows_tell_the_order(name, pairs, tmp_path):
    folder = tmp_path / "toy"
    exact_toy(GGUFS[name], folder)
    run, recorder = Run(open_model(str(convert(folder, tmp_path / "x.gguf"))), [IDS], "float64"), Recorder("*")
    run.forward("all", recorder)
    x = recorder.kept["layers.0.attn.q_rot"]
    flat = x[0].transpose(0, 1).flatten(1)
    q = to_pairs(flat.T, run.model.spec.attention.n_heads).T if pairs else flat
    found = shown(side(write(tmp_path / "d", {"Qcur-0": q.unflatten(-1, (x.shape[1], -1))}), run))
    assert list(found) == ["layers.0.attn.q_rot"] and torch.equal(found["layers.0.attn.q_rot"], x)


@pytest.mark.parametrize("name", TOYS)
def test_a_name_of_llama_cpp_means_one_activation_but_before_and_after_a_rotation(name, toy):
    run = toy(name)[0]
    known = Names(run.model, "ggml")
    meant: dict[str, list[str]] = {}
    for path, names in known.known.items():
        for other in names:
            meant.setdefault(other, []).append(path)
    assert (meant == {}) == (run.source is not None)
    for other, paths in meant.items():
        assert known.select("--at", other) == paths
        assert len(paths) == 1 or (other[1:5] == "cur-" and paths[1] == f"{paths[0]}_rot"), other


def short(run: Run, length: int) -> tuple[Run, dict[str, torch.Tensor]]:
    """A run of fewer tokens, and what it recorded."""
    run, recorder = Run(run.model, [IDS[:length]], "float64"), Recorder("*")
    run.forward("all", recorder)
    return run, recorder.kept


def test_as_many_heads_as_positions_fit_in_two_ways(toy, tmp_path):
    run, held = short(toy("llama")[0], 4)
    q, path = held["layers.0.attn.q"], "layers.0.attn.q"
    assert q.shape[1] == q.shape[2] == 4
    write(tmp_path / "x", {path: q})
    with pytest.raises(
        GptcliError, match=r"\[1, 4, 4, 10\] fits layers.0.attn.q in two ways: \[B,H,T,D\] and \[B,T,H,D\]"
    ):
        side(tmp_path / "x", run)
    # Merged, or in the axes that a vocabulary has, or with a word from --map, it is clear.
    assert torch.equal(shown(side(write(tmp_path / "m", {path: q.transpose(1, 2).flatten(2)}), run))[path], q)
    hook = {"blocks.0.attn.hook_q": q.transpose(1, 2)}
    assert torch.equal(shown(side(write(tmp_path / "t", hook), run))[path], q)
    v, z = held["layers.0.attn.v"][0].transpose(0, 1), held["layers.0.attn.z"][0]
    found = shown(side(write(tmp_path / "g", {"Vcur-0": v, "kqv-0": z}), run))
    assert torch.equal(found["layers.0.attn.v"][0], v.transpose(0, 1)) and torch.equal(found["layers.0.attn.z"][0], z)
    (tmp_path / "names.yaml").write_text("layers.{i}.attn.q: layers.{i}.attn.q[T, H, D]\n")
    assert torch.equal(shown(side(tmp_path / "x", run, tmp_path / "names.yaml"))[path], q.transpose(1, 2))


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_map_names_what_no_vocabulary_does(suffix, toy, tmp_path):
    run, held, _ = toy("llama")
    arrays = {f"h{i}_q": held[f"layers.{i}.attn.q"].transpose(1, 2)[0] for i in range(3)} | {
        "final": held["final_norm"]
    }
    table = {"h{i}_q": "layers.{i}.attn.q", "final": "final_norm"}
    file = tmp_path / f"names.{suffix}"
    file.write_text(json.dumps(table) if suffix == "json" else "".join(f"{a}: {b}\n" for a, b in table.items()))
    found = shown(side(write(tmp_path / "x", arrays), run, file))
    assert list(found) == [*(f"layers.{i}.attn.q" for i in range(3)), "final_norm"]
    assert all(torch.equal(x, held[path]) for path, x in found.items())


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("h{i}: layers.{i}.attn.qq", r"layers.{i}.attn.qq: no such activation; did you mean \"layers.0.attn.q\""),
        ("h{i}: layers.{i}.attn.q[T,H]", r"no such activation; its axes are \[B,H,T,D\]"),
        ("H{i}: layers.{i}.attn.q", "no array is called H{i}"),
        ("- h0", "no mapping of their names to our paths"),
        ("h0: 3", "no mapping of their names to our paths"),
        ("h0: [", "names.yaml, line 2, column 1"),
    ],
)
def test_what_a_map_says_wrong(table, said, toy, tmp_path):
    run, held, _ = toy("llama")
    (tmp_path / "names.yaml").write_text(table)
    with pytest.raises(GptcliError, match=said):
        side(write(tmp_path / "x", {"h0": held["layers.0.attn.q"]}), run, tmp_path / "names.yaml")


@pytest.mark.parametrize("shape", [(97,), (1, 97), (1, 1, 97)])
def test_a_lone_array_of_logits_of_the_last_position(shape, toy, tmp_path):
    run, held, _ = toy("gpt2")
    numpy.save(tmp_path / "logits.npy", held["logits"][0, -1].reshape(shape).numpy())
    found = shown(side(tmp_path / "logits.npy", run))
    assert list(found) == ["logits"] and torch.equal(found["logits"], held["logits"][:, -1:])


def test_a_wrong_shape_is_told_with_the_right_one(toy, tmp_path):
    run, held, _ = toy("gpt2")
    write(tmp_path / "x", {"layers.1.resid_post": held["layers.1.resid_post"][:, 1:]})
    with pytest.raises(GptcliError, match=r"is \[1, 7, 24\], but layers.1.resid_post is \[B,T,C\] \[1, 8, 24\]"):
        side(tmp_path / "x", run)


def test_names_that_mean_nothing_are_listed(toy, tmp_path):
    run, held, _ = toy("gpt2")
    arrays = {f"tmp{i}": held["logits"] for i in range(7)} | {
        "logits": held["logits"],
        "unembed.hook_out": held["logits"],
    }
    dumps = side(write(tmp_path / "x", arrays), run)
    more = "arrays whose names mean nothing here: tmp0, tmp1, tmp2, tmp3, tmp4 and 3 more"
    assert dumps.facts().notes == [f"{tmp_path / 'x'}: {more}"] and run.model.notes == []
    (tmp_path / "x" / "logits.npy").unlink()
    (tmp_path / "x" / "unembed.hook_out.npy").unlink()
    with pytest.raises(GptcliError, match=r"mean nothing here: tmp0, .* and 2 more; say what they are by --map"):
        side(tmp_path / "x", run)


@pytest.mark.parametrize("name", ["blocks.0.attn.hook_attn_scores", "layers.0.attn.scores"])
@pytest.mark.parametrize("hides", [float("-inf"), -1e9, -1e4])
def test_scores_that_a_mask_has_hidden_are_not_compared(name, hides, toy, tmp_path):
    """What a causal mask lets through is, and so is a score that theirs hides and ours does not."""
    run, held, _ = toy("gpt2")
    scores, mask = held["layers.0.attn.scores"], torch.ones(len(IDS), len(IDS), dtype=torch.bool).triu(1)
    words = ["diff", run.model.directory, tmp_path / "x", "--dtype", "f64", "--ids", ",".join(map(str, IDS)), "--json"]
    write(tmp_path / "x", {name: scores.masked_fill(mask, hides)})
    ran = gptcli(*words)
    assert ran.status == 0 and ran.json["verdict"] in ("identical", "rounding")
    mask[5, 2] = True
    write(tmp_path / "x", {name: scores.masked_fill(mask, hides)})
    worst = gptcli(*words).json["parted"]["worst"]
    assert (worst["position"], worst["key"]) == (5, 2)


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_ids_among_the_arrays_say_what_was_read(name, toy, tmp_path):
    """As transformers calls them: an encoder's are input_ids, its decoder's decoder_input_ids."""
    run, held, _ = toy(name)
    arrays = {"logits": held["logits"], "input_ids" if run.source is None else "decoder_input_ids": torch.tensor([IDS])}
    arrays |= {} if run.source is None else {"input_ids": torch.tensor(SOURCE_IDS)}
    write(tmp_path / "x", arrays, "safetensors")
    for dumps in (Dumps(tmp_path / "x", run.model), Dumps(tmp_path / "x", run.model, [[1, 2]], run.source and [[5]])):
        assert (dumps.ids, dumps.source) == (run.ids, run.source)
    assert torch.equal(shown(dumps)["logits"], held["logits"])
    save_file({"logits": held["logits"], "ids": torch.ones(8)}, tmp_path / "x" / "all.safetensors")
    with pytest.raises(GptcliError, match=r"ids: float32 \[8\] is no list of ids"):
        side(tmp_path / "x", run)
    save_file({"logits": held["logits"]}, tmp_path / "x" / "all.safetensors")
    with pytest.raises(GptcliError, match="no array among them says what was read") as caught:
        Dumps(tmp_path / "x", run.model)
    assert caught.value.code == "ids"


def test_half_types_come_as_they_are(toy, tmp_path):
    run, held, _ = toy("gpt2")
    torch.save({"logits": held["logits"].float(), "embed": held["embed"].bfloat16(), "step": 3}, tmp_path / "x.pt")
    dumps = side(tmp_path / "x.pt", run)
    found = shown(dumps)
    assert (dumps.dtype, found["embed"].dtype, found["logits"].dtype) == (torch.float32, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("computed", "saved"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64"), ("float32", "float32")],
)
def test_arrays_are_of_the_type_that_holds_their_numbers(computed, saved, toy, tmp_path):
    """numpy has no bfloat16; and logits are float32 in many codes."""
    model = toy("llama")[0].model
    run, recorder = Run(model, [IDS], computed), Recorder("*")
    run.forward("all", recorder)
    arrays = {path: x.to(getattr(torch, saved)) for path, x in recorder.kept.items()}
    arrays["logits"] = arrays["logits"] * 1.0001
    assert side(write(tmp_path / "x", arrays), run).dtype == getattr(torch, computed)
    arrays["logits"] = arrays["logits"] / 1.0001
    write(tmp_path / "x", arrays | {"input_ids": torch.tensor(IDS)})
    ran = gptcli("diff", model.directory, tmp_path / "x", "--json")
    assert ran.status == 0 and ran.json["a"]["dtype"] == computed


def test_a_padded_vocabulary_is_compared_in_what_both_have(toy, tmp_path):
    """Of 97 ids padding may make 128, and not 64."""
    run, held, _ = toy("llama")
    dumps = side(write(tmp_path / "x", {"logits": torch.nn.functional.pad(held["logits"], (0, 31))}), run)
    assert torch.equal(shown(dumps)["logits"], held["logits"])
    assert dumps.model.notes == [f"{tmp_path / 'x'}: 128 ids in logits and 97 in the model: the first 97 are compared"]
    with pytest.raises(GptcliError, match=r"logits is \[B,T,V\]"):
        side(write(tmp_path / "y", {"logits": held["logits"][..., :64]}), run)


@pytest.mark.filterwarnings("ignore")  # torch's own, of kinds that are new or old
def test_tensors_without_plain_numbers_are_refused(toy, tmp_path):
    run, held, _ = toy("gpt2")
    odd = {
        "sparse": held["logits"].to_sparse(),
        "meta": held["logits"].to("meta"),
        "nested": torch.nested.nested_tensor([held["logits"][0]]),
        "quantised": torch.quantize_per_tensor(held["logits"].float(), 0.1, 0, torch.qint8),
    }
    for name, x in odd.items():
        torch.save({"logits": x}, tmp_path / f"{name}.pt")
        with pytest.raises(
            GptcliError, match=r"\.pt: (logits is sparse, nested|torch's weights-only loader refuses|it holds)"
        ):
            side(tmp_path / f"{name}.pt", run)


def test_which_texts_they_are_of_must_be_clear(toy, tmp_path):
    """One line each: which end is padded, ids that are none, of a file, of the other side, and of neither."""
    run, held, _ = toy("gpt2")
    logits, words = {"logits": held["logits"]}, ["diff", run.model.directory, tmp_path / "x"]
    for arrays, more, said in (
        ({"logits": torch.zeros(2, 3, 97)}, ["--ids", "[[1,2,3],[4,5]]"], "texts of different lengths"),
        (logits | {"ids": torch.tensor([IDS]), "attention_mask": torch.tensor([[1] * 7 + [0]])}, [], "attention_mask"),
        (logits | {"ids": torch.ones(8)}, [], "x: ids: float32 [8] is no list of ids"),
        (logits | {"ids": torch.tensor([*IDS[1:], 97])}, [], "x: ids: id 97 is outside the vocabulary"),
        (logits | {"ids": torch.tensor(IDS)}, ["--ids", "1,2,3,4,5,6,7,8"], "A and B are of other texts"),
        (logits, [], "x: no array among them says what was read"),
    ):
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        write(tmp_path / "x", arrays)
        ran = gptcli(*words, *more)
        assert ran.status == 2 and said in ran.err and ran.err.count("\n") == 1, ran.err


def test_modules_whose_output_is_that_of_their_last(toy, tmp_path):
    run, held, _ = toy("llama")
    arrays = {"model.layers.0.self_attn": held["layers.0.attn_out"], "model.layers.0.mlp": held["layers.0.mlp_out"]}
    found = shown(side(write(tmp_path / "x", arrays), run))
    assert list(found) == ["layers.0.attn_out", "layers.0.mlp_out"]


def test_beside_a_trace_they_are_no_random_weights(toy, tmp_path):
    run, held, _ = toy("llama")
    ran = gptcli(
        "trace",
        "-m",
        run.model.directory,
        "--ids",
        ",".join(map(str, IDS)),
        "--at",
        "*",
        "-o",
        tmp_path / "t.safetensors",
    )
    assert ran.status == 0
    write(tmp_path / "x", {"logits": held["logits"].float()})
    found = gptcli("diff", tmp_path / "t.safetensors", tmp_path / "x", "--json").json
    assert (found["b"]["weights"], found["b"]["seed"]) == ("checkpoint", None)


class Trap:
    """What a pickle may ask its loader to call."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_no_file_runs_code(toy, tmp_path):
    run = toy("gpt2")[0]
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"logits": Trap(tmp_path / "sprung")}))
    torch.save({"logits": Trap(tmp_path / "sprung")}, tmp_path / "y.pt")
    numpy.save(tmp_path / "logits.npy", numpy.array([Trap(tmp_path / "sprung")]), allow_pickle=True)
    numpy.savez(tmp_path / "z.npz", logits=numpy.array([Trap(tmp_path / "sprung")]))
    for name, said in (
        ("x.pt", "x.pt"),
        ("y.pt", "refuses to build"),
        ("logits.npy", "Python objects"),
        ("z.npz", "Python objects"),
    ):
        with pytest.raises(GptcliError, match=said):
            side(tmp_path / name, run)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("logits.npy", b"", "no whole .npy file"),
        ("logits.npy", b"\x93NUMPY\x01\x00", "no whole .npy file"),
        ("logits.npy", b"1, 2, 3", "no whole .npy file"),
        ("x.npz", b"PK\x03\x04", "no whole .npz file"),
        ("x.safetensors", b"\x10\x00", "safetensors"),
        ("x.pt", b"hello", "x.pt"),
        ("x.txt", b"1 2 3", "no array in it"),
    ],
)
def test_a_file_that_is_none_is_one_line(name, data, said, toy, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(GptcliError, match=said) as caught:
        side(tmp_path, toy("gpt2")[0])
    assert "\n" not in str(caught.value)


def test_other_arrays_that_are_refused(toy, tmp_path):
    run, held, _ = toy("gpt2")
    with pytest.raises(GptcliError, match="logits is int64, not numbers"):
        side(write(tmp_path / "i", {"logits": held["logits"].long()}), run)
    write(tmp_path / "t", {"logits": held["logits"]}, "npz")
    with pytest.raises(GptcliError, match="two arrays are called logits"):
        side(write(tmp_path / "t", {"logits": held["logits"]}), run)
    numpy.save(tmp_path / "logits.npy", numpy.array(["a"]))
    with pytest.raises(GptcliError, match="the numbers of logits are <U1"):
        side(tmp_path / "logits.npy", run)
    with pytest.raises(GptcliError, match="no such file"):
        side(tmp_path / "none", run)
    big = held["logits"].numpy().astype(">f8")
    numpy.save(tmp_path / "logits.npy", big)
    assert torch.equal(shown(side(tmp_path / "logits.npy", run))["logits"], held["logits"])


def test_dumps_as_a_side_of_the_command(toy, tmp_path):
    """Of a port that is right, of one that errs from one layer on, and with its names told."""
    run, held, _ = toy("llama")
    words = ["diff", run.model.directory, tmp_path / "x", "--ids", ",".join(map(str, IDS)), "--json"]
    arrays = {f"l{i}": held[f"layers.{i}.resid_post"][0] for i in range(3)} | {"logits": held["logits"][0]}
    (tmp_path / "names.yaml").write_text("l{i}: layers.{i}.resid_post\n")
    write(tmp_path / "x", arrays)
    ran = gptcli(*words, "--map", tmp_path / "names.yaml")
    assert (ran.status, ran.json["verdict"]) == (0, "identical")
    assert [one["path"] for one in ran.json["activations"]] == [*(f"layers.{i}.resid_post" for i in range(3)), "logits"]
    ran = gptcli(*words)
    assert ran.status == 0 and f"{tmp_path / 'x'}: arrays whose names mean nothing here: l0, l1, l2" in ran.err
    write(tmp_path / "x", {name: x * 1.01 if name in ("l1", "l2") else x for name, x in arrays.items()})
    ran = gptcli(*words, "--map", tmp_path / "names.yaml")
    assert (ran.status, ran.json["parted"]["path"]) == (1, "layers.1.resid_post")
    write(tmp_path / "x", {"ids": torch.tensor(IDS)})
    ran = gptcli("diff", run.model.directory, tmp_path / "x", "--map", tmp_path / "names.yaml", "--json")
    assert (ran.status, ran.json["parted"]["path"]) == (1, "layers.1.resid_post")


def test_logits_of_the_last_position_alone_are_compared_there(tmp_path):
    """Half added to the logit of id 7 at the last of six positions, and nothing known of the others."""
    save_toy(TOYS["llama"], tmp_path / "model")
    ids = [5, 17, 3, 60, 22, 9]
    logits = Run(open_model(str(tmp_path / "model")), [ids], "float32").forward("all")[0, -1].numpy()
    words = ["diff", tmp_path / "model", tmp_path / "logits.npy", "--ids", ",".join(map(str, ids)), "--json"]
    numpy.save(tmp_path / "logits.npy", logits)
    assert gptcli(*words).status == 0
    logits[7] += 0.5
    numpy.save(tmp_path / "logits.npy", logits)
    done = gptcli(*words)
    worst = done.json["parted"]["worst"]
    assert done.status == 1 and (worst["position"], worst["id"], worst["channel"]) == (5, 9, 7)
    assert worst["b"] - worst["a"] == pytest.approx(0.5, abs=1e-4)
    found = done.json["logits"]
    p, q = (torch.tensor(x).double().log_softmax(-1) for x in (logits - 0.5 * numpy.eye(len(logits))[7], logits))
    assert (found["position"], found["positions"]) == (5, 1)
    assert found["kl_nats_max"] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3)
