"""Trains the sample `pronouns`: two layers, words as tokens, and heads that can be named. Minutes on one core.

    python samples/make_pronouns.py [FOLDER]

The model is gptcli's own forward pass: pure functions, so torch differentiates them as they stand. Half of what it
reads is the grammar below, half is random words said again and again. The seed is SEED: the same machine makes the same
bytes again; with another processor or another torch the digits differ, and the heads may stand in other places.

The grammar: the verb decides whom "it" means ("sat" the animal, "stayed" the thing), and what follows "it" or "was"
depends on that noun alone. So the next word can be told only by who looks back at the noun. Colours, adverbs and
sentences that begin with the place part the animal from its verb: were they always neighbours, a head could read the
animal off the verb. The MLP is narrow, so that most of the choosing between two nouns falls to attention.
"""

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from gptcli.config import read_config
from gptcli.layout import layout
from gptcli.model.forward import Inputs, forward
from gptcli.model.init import random_weights
from gptcli.model.weights import Weights

HERE = Path(__file__).resolve().parent
SEED = 2023
STEPS, BATCH, LENGTH = 3000, 24, 64
RATE, DECAY, WARM_UP = 3e-3, 0.1, 100

# Each noun: two words after "was", the first twice as often, and a word of its own after "it".
ANIMALS = {
    "cat": ("tired", "sleepy", "purred"),
    "dog": ("sleepy", "hungry", "barked"),
    "bird": ("hungry", "cold", "sang"),
    "fox": ("cold", "sick", "limped"),
    "hen": ("sick", "old", "clucked"),
    "pig": ("old", "lazy", "grunted"),
    "cow": ("lazy", "sad", "mooed"),
    "goat": ("sad", "tired", "bleated"),
}
THINGS = {
    "mat": ("soft", "wet", "itched"),
    "rug": ("wet", "dirty", "slid"),
    "box": ("dirty", "dry", "leaked"),
    "log": ("dry", "hard", "rolled"),
    "table": ("hard", "new", "wobbled"),
    "chair": ("new", "clean", "creaked"),
    "bed": ("clean", "warm", "sagged"),
    "sofa": ("warm", "soft", "squeaked"),
}
OF_ANIMAL = ("sat", "slept", "lay")  # "it" is who did so
OF_THING = ("stayed", "jumped", "hid")  # "it" is where
PLACES = ("on", "under", "beside", "near")
OPENERS = ("Today", "Later", "Once")
ADVERBS = ("often", "quietly", "soon")
COLOURS = ("small", "big", "black", "white", "brown", "grey")
# An animal and a thing at the same place of their lists never stand in one sentence of the training text.
KEPT_BACK = set(zip(ANIMALS, THINGS))

WORDS = (
    *("The", "the", ".", "because", "it", "was", *OF_ANIMAL, *OF_THING, *PLACES),
    *(place.capitalize() for place in PLACES),
    *(*OPENERS, *ADVERBS, *COLOURS, *ANIMALS, *THINGS),
    *dict.fromkeys(word for nouns in (ANIMALS, THINGS) for words in nouns.values() for word in words),
)
IDS = {word: id_ for id_, word in enumerate(WORDS)}

CONFIG = """\
# Two trained layers whose heads have names. Made by samples/make_pronouns.py, which says how.
name: pronouns
vocab_size: {size}
context_length: 64
hidden_size: 64
n_layers: 2
position: {{kind: rope, theta: 10000.0, pairs: halves}}
norm: {{kind: rmsnorm, eps: 1.0e-5, placement: pre}}
attention: {{n_heads: 4, n_kv_heads: 4, head_dim: 16, bias: false}}
mlp: {{kind: dense, size: 32, activation: silu, gated: true, bias: false}}
lm_head: {{tied: false, bias: false}}

vocabulary: {{{words}}}
prompt: The cat sat on the mat because it was
"""


@dataclass(frozen=True)
class Sentence:
    """words; noun: the position of the noun that `it` means; it: the position of `it`; means: who that is."""

    words: tuple[str, ...]
    noun: int
    it: int
    means: str


def sentence(numbers: random.Random, kept_back: bool = False) -> Sentence:
    """One sentence of the grammar, to its full stop; kept_back: with a pair that the training text never has."""
    while True:
        animal, thing = numbers.choice([*ANIMALS]), numbers.choice([*THINGS])
        if ((animal, thing) in KEPT_BACK) == kept_back:
            break
    verb, place = numbers.choice(OF_ANIMAL + OF_THING), numbers.choice(PLACES)
    means = animal if verb in OF_ANIMAL else thing
    who = [*(numbers.choice(COLOURS) for _ in range(numbers.random() < 0.3)), animal]
    where = [*(numbers.choice(COLOURS) for _ in range(numbers.random() < 0.3)), thing]
    if numbers.random() < 0.4:
        words = [place.capitalize(), "the", *where, verb, "the", *who]
    else:
        start = ["The"] if numbers.random() < 0.6 else [numbers.choice(OPENERS), "the"]
        how = [*(numbers.choice(ADVERBS) for _ in range(numbers.random() < 0.5))]
        words = [*start, *who, *how, verb, place, "the", *where]
    noun = words.index(means)
    words += ["because", "it"]
    it = len(words) - 1
    first, second, does = (ANIMALS | THINGS)[means]
    words += [does] if numbers.random() < 0.5 else ["was", numbers.choice((first, first, second))]
    return Sentence((*words, "."), noun, it, means)


def grammar(numbers: random.Random) -> list[int]:
    """Sentences one after another, as many as fit and the beginning of one more: LENGTH + 1 ids."""
    words: list[str] = []
    while len(words) <= LENGTH:
        words += sentence(numbers).words
    return [IDS[word] for word in words[: LENGTH + 1]]


def repeated(numbers: random.Random) -> tuple[list[int], int]:
    """Random words, said again until LENGTH + 1 ids are full, and how many there are before they come again."""
    period = numbers.randint(4, LENGTH // 2)
    words = [numbers.randrange(len(WORDS)) for _ in range(period)]
    return (words * (LENGTH // period + 1))[: LENGTH + 1], period


def batches(numbers: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """ids [B, T], the ids that follow [B, T], and which of those can be told at all [B, T]."""
    while True:
        rows = [(grammar(numbers), 1) if i % 2 else repeated(numbers) for i in range(BATCH)]
        ids = torch.tensor([row for row, _ in rows])
        told = torch.arange(1, LENGTH + 1) >= torch.tensor([[start] for _, start in rows])
        yield ids[:, :-1], ids[:, 1:], told


def config() -> str:
    words = ", ".join(f'{id_}: "{word}"' if word == "." else f"{id_}: {word}" for id_, word in enumerate(WORDS))
    return CONFIG.format(size=len(WORDS), words=words)


def train(folder: Path, steps: int = STEPS) -> None:
    """Writes config.yaml and model.safetensors into the folder, and tells the loss on standard error."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config(), encoding="utf-8")
    spec = read_config(folder / "config.yaml").spec
    params = tuple(layout(spec))
    drawn = random_weights(spec, params, SEED, torch.float32, torch.device("cpu"))
    tensors = {name: drawn[name].requires_grad_() for name in drawn}
    weights = Weights.of(params, tensors)
    groups = [
        {"params": [x for x in tensors.values() if x.dim() > 1], "weight_decay": DECAY},
        {"params": [x for x in tensors.values() if x.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98))
    start = time.perf_counter()
    for step, (ids, following, told) in zip(range(steps), batches(random.Random(SEED))):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(step / WARM_UP, 1.0, 2 * (1 - step / steps))
        logits = forward(Inputs(ids), weights, spec)  # [B, T] → [B, T, V]
        losses = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none").view_as(told)
        loss = (losses * told).sum() / told.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            by_kind = [(losses * told)[kind::2].sum() / told[kind::2].sum() for kind in (1, 0)]
            said = "grammar {:.3f} repeats {:.3f}".format(*by_kind)
            print(f"step {step} {said} {time.perf_counter() - start:.0f} s", file=sys.stderr)
    save_file({name: x.detach().contiguous() for name, x in tensors.items()}, folder / "model.safetensors")


if __name__ == "__main__":
    train(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "pronouns")
