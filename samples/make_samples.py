"""Makes the sample checkpoints that stand beside this script, the same bytes every time.

    python samples/make_samples.py [FOLDER]

cats: the worked example's weights as a checkpoint in this project's own names. tiny-gpt2: a GPT-2 of two layers in the
Hugging Face layout (Conv1D matrices lie [in, out]), random weights from a seed, and a small byte-pair vocabulary. It is
not trained: it shows the layout, not the language.
"""

import json
import random
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from gptcli.source import open_model

HERE = Path(__file__).resolve().parent
SEED = 2019
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 320,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
TEXT = """The cat sat on the mat because it was tired. The dog sat on the rug because it was warm. Cats sit on mats, on
chairs, on the stairs and on the cat that sat there before. The cat that the dog saw sat on the other mat."""


def make_cats(folder: Path) -> None:
    """The hand-written weights of configs/cats.yaml, and that config without them."""
    folder.mkdir(parents=True, exist_ok=True)
    model = open_model(config="cats")
    weights = model.weights(torch.float32, torch.device("cpu"))
    save_file({name: weights[name].contiguous() for name in weights.tensors}, folder / "cats.safetensors")
    described, _, _ = model.config.path.read_text(encoding="utf-8").partition("\n# Tables are given by rows")
    lines = [line for line in described.split("\n") if not line.startswith("#")]
    (folder / "config.yaml").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def make_tiny_gpt2(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(SEED)
    c, n, v = CONFIG["n_embd"], CONFIG["n_layer"], CONFIG["vocab_size"]

    def normal(*shape: int, std: float = 0.15, mean: float = 0.0) -> torch.Tensor:
        return torch.tensor([numbers.gauss(mean, std) for _ in range(torch.Size(shape).numel())]).reshape(shape)

    tensors = {"transformer.wte.weight": normal(v, c), "transformer.wpe.weight": normal(CONFIG["n_positions"], c)}
    for i in range(n):
        shapes = {"attn.c_attn": (c, 3 * c), "attn.c_proj": (c, c), "mlp.c_fc": (c, 4 * c), "mlp.c_proj": (4 * c, c)}
        for name, shape in shapes.items():
            tensors[f"transformer.h.{i}.{name}.weight"] = normal(*shape)
            tensors[f"transformer.h.{i}.{name}.bias"] = normal(shape[1], std=0.05)
        for name in ("ln_1", "ln_2"):
            tensors[f"transformer.h.{i}.{name}.weight"] = normal(c, std=0.1, mean=1.0)
            tensors[f"transformer.h.{i}.{name}.bias"] = normal(c, std=0.05)
    tensors["transformer.ln_f.weight"] = normal(c, std=0.1, mean=1.0)
    tensors["transformer.ln_f.bias"] = normal(c, std=0.05)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    vocab, merges = byte_pairs(TEXT, v - 1)
    vocab["<|endoftext|>"] = v - 1
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")


def byte_pairs(text: str, size: int) -> tuple[dict[str, int], list[str]]:
    """GPT-2's kind of vocabulary: the 256 bytes, then the commonest neighbours of the text, one merge after another."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letter = {byte: chr(byte) for byte in shown} | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}
    vocab = {letter[byte]: id_ for id_, byte in enumerate(shown + hidden)}
    words = [
        [letter[byte] for byte in f" {word}".encode()] for word in text.replace(",", " ,").replace(".", " .").split()
    ]
    merges = []
    while len(vocab) < size:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        first, second = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(f"{first} {second}")
        vocab[first + second] = len(vocab)
        words = [merged(word, first, second) for word in words]
    return vocab, merges


def merged(word: list[str], first: str, second: str) -> list[str]:
    out: list[str] = []
    for part in word:
        if out and out[-1] == first and part == second:
            out[-1] = first + second
        else:
            out.append(part)
    return out


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    make_cats(target / "cats")
    make_tiny_gpt2(target / "tiny-gpt2")
