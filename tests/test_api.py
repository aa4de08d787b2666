"""The same from Python: a thin layer, and no torch before a number is wanted."""

import json
import subprocess
import sys
from pathlib import Path

import torch

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


def test_errors_are_those_of_the_command_line():
    for ask in (
        lambda: gptcli.open("./nowhere"),
        lambda: gptcli.open().logits("Dogs"),
        lambda: gptcli.open().trace("Cats", 5),
    ):
        try:
            ask()
        except GptcliError as error:
            assert error.message
        else:
            raise AssertionError("no error")
