"""The same from Python: a thin layer, and no torch before a number is wanted."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import gptcli
from gptcli.errors import GptcliError

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())


def test_opening_loads_no_torch():
    code = (
        "import sys, gptcli; m = gptcli.open(); m.spec, m.layout, m.tokens.encode('Cats sit'), m.params();"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_worked_example():
    m, cats = gptcli.open(), GOLDEN["cats"]
    assert m.spec.hidden_size == 4 and len(m.layout) == 19
    assert m.tokens.encode("Cats sit on") == [12, 45, 78]
    expected = torch.tensor(cats["logits at ids 90,91,92 for each position"])
    torch.testing.assert_close(m.logits("Cats sit on")[:, 90:93], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(m.logits([12, 45, 78])[:, 90:93], expected, rtol=0, atol=1e-6)
    pattern = m.activations("Cats sit on", "layers.0.attn.pattern")["layers.0.attn.pattern"]
    torch.testing.assert_close(pattern[0], torch.tensor(cats["layers"][0]["pattern"]), rtol=0, atol=1e-6)
    assert m.weights["layers.0.mlp.up.weight"].shape == (8, 4)


def test_an_activation_that_is_kept_keeps_nothing_else():
    """Queries, keys and values may come out of one product: who keeps the values has their bytes, and no others."""
    found = gptcli.open("tiny-gpt2").activations("The cat sat", "*.attn.v", "*.attn.z", "*.resid_post")
    assert len(found) == 6
    for path, x in found.items():
        assert x.untyped_storage().nbytes() == x.nbytes, path


def test_reports_are_those_of_the_commands():
    m = gptcli.open("tiny-gpt2", dtype="f64")
    assert m.params().parameters.total == 37_760
    best = m.topk("The cat", k=3).next[0].top
    assert [one.id for one in best] == m.logits("The cat")[-1].topk(3).indices.tolist()
    assert m.forward("The cat").next[0].top[0].id == best[0].id
    assert m.score("The cat sat").texts[0].scored == 2
    walk = m.trace("The cat", layer=1, head=2).walks[0]
    assert (walk.layer_index, walk.head, walk.position) == (1, 2, 1)
    assert m.trace("The cat").status == "ok"


def test_a_map_is_the_pattern():
    m = gptcli.open(dtype="f64")
    found = m.activations("Cats sit on", "layers.*.attn.pattern")
    report = m.maps("Cats sit on")
    assert [(one.layer_index, one.head) for one in report.maps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for one in report.maps:
        pattern = found[f"layers.{one.layer_index}.attn.pattern"][0, one.head]
        assert [[x or 0.0 for x in row] for row in one.cells] == pattern.tolist()
    [one] = m.maps("Cats sit on", layer=1, head=0).maps
    assert (one.layer_index, one.head, one.cells) == (1, 0, report.maps[2].cells)


def test_weights_without_scores_and_a_stream_without_a_head_have_the_same_bits():
    m = gptcli.open("tiny-gpt2")
    every = m.activations("The cat sat on the mat", "*")
    alone = m.activations("The cat sat on the mat", "*.pattern", "*.resid_post", "final_norm")
    assert len(alone) == 2 * m.spec.n_layers + 1 and "logits" in every
    assert all(torch.equal(x, every[path]) for path, x in alone.items())


def test_a_layer_may_be_counted_from_the_end():
    m = gptcli.open()
    assert m.trace("Cats sit on", -1) == m.trace("Cats sit on", 1) != m.trace("Cats sit on", -2)
    assert m.maps("Cats sit on", layer=-2, head=0) == m.maps("Cats sit on", layer=0, head=0)


def test_heads_are_ranked():
    m = gptcli.open(dtype="f64")
    pattern = m.activations("Cats sit on", "layers.1.attn.pattern")["layers.1.attn.pattern"][0, 1]
    report = m.heads("Cats sit on", by="self")
    best = report.heads[0]
    assert (best.layer_index, best.head) == (1, 1)
    assert abs(best.itself - float((pattern[1, 1] + pattern[2, 2]) / 2)) < 1e-12


def test_an_edited_model(tmp_path):
    """Zeros for all that a layer adds to the stream leave the other layer alone; what is set stands there."""
    m = gptcli.open(dtype="f64")
    bare = m.edited(ablate=["layers.0.attn_out", "layers.0.mlp_out"])
    kept = bare.activations("Cats sit on", "embed", "layers.0.resid_post")
    assert torch.equal(kept["embed"], kept["layers.0.resid_post"])
    assert bare.topk("Cats sit on").model.edits == ["--ablate layers.0.attn_out", "--ablate layers.0.mlp_out"]
    # A head without weights on the first key goes on without them.
    both = {"layers.0.attn.pattern[1,2,0]": 0, "logits[2,7]": 9.5}
    kept = m.edited(set=both).activations("Cats sit on", "layers.0.attn.*", "logits")
    plain = m.activations("Cats sit on", "layers.0.attn.*")
    lost = plain["layers.0.attn.pattern"][0, 1, 2, 0] * plain["layers.0.attn.v"][0, 1, 0]
    moved = plain["layers.0.attn.z"][0, 1, 2] - kept["layers.0.attn.z"][0, 1, 2]
    torch.testing.assert_close(moved, lost, rtol=0, atol=1e-12)
    assert kept["logits"][0, 2, 7] == 9.5
    file = tmp_path / "z.safetensors"
    save_file({"layers.1.mlp_out": torch.zeros(1, 3, 4, dtype=torch.float64)}, file)
    patched = m.edited(patch={"layers.1.mlp_out": str(file)})
    assert torch.equal(patched.logits("Cats sit on"), m.edited(ablate="layers.1.mlp_out").logits("Cats sit on"))
    assert not torch.equal(patched.logits("Cats sit on"), m.logits("Cats sit on"))
    twice = m.edited(ablate="L0H0", ablate_with="mean").edited(ablate="L1H0")
    z = twice.activations("Cats sit on", "*.z")
    mean = m.activations("Cats sit on", "layers.0.attn.z")["layers.0.attn.z"][0, 0].mean(0)
    torch.testing.assert_close(z["layers.0.attn.z"][0, 0], mean.expand(3, 2), rtol=0, atol=1e-12)
    assert not z["layers.1.attn.z"][0, 0].any()
    assert len(twice.topk("Cats sit on").model.edits) == 2 and m.topk("Cats sit on").model.edits == []


def test_errors_are_those_of_the_command_line():
    for ask in (
        lambda: gptcli.open("./nowhere"),
        lambda: gptcli.open().logits("Dogs"),
        lambda: gptcli.open().trace("Cats", 5),
        lambda: gptcli.open().maps("Cats", layer=2),
        lambda: gptcli.open().trace("Cats", -3),
        lambda: gptcli.open().edited(ablate="L0H0").diff("cats", "Cats"),
        lambda: gptcli.open().diff(gptcli.open().edited(ablate="L0H0"), "Cats"),
        lambda: gptcli.open().edited(set=["layers.0.mlp_out=0"]),
        lambda: gptcli.open().edited(ablate="L0H9").logits("Cats"),
        lambda: gptcli.open().edited(set={"layers.0.attn.pattern[0,0,0]": 1.0}).logits("Cats"),
    ):
        try:
            ask()
        except GptcliError as error:
            assert error.message
        else:
            raise AssertionError("no error")
