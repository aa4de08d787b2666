"""The trained sample shows the heads that its page names, by its recorded softmax weights, and tells the next word.

What is right comes from the grammar (which noun "it" means, what may be said of it) and from arithmetic on positions;
the numbers that the page states are measured here again.
"""

import importlib.util
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open

import gptcli
from gptcli import shipped
from gptcli.config import read_config
from gptcli.layout import layout
from gptcli.model.init import random_weights
from tests.command import gptcli as command

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "samples" / "make_pronouns.py"
FOLDER = ROOT / "samples" / "pronouns"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
PERIOD = 24  # words of a random sequence that is said twice


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pronouns", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = script()


@pytest.fixture(scope="module")
def model():
    return gptcli.open("pronouns")


def weights(model, words) -> torch.Tensor:
    """Softmax weights of every head: words → [N, H, T, S]."""
    ids = [make.IDS[word] for word in words]
    found = model.activations(ids, "layers.*.attn.pattern")
    return torch.cat([found[f"layers.{i}.attn.pattern"] for i in range(model.spec.n_layers)])


def told(model, text: str) -> dict[str, float]:
    """The probability of every word after a text."""
    return dict(zip(make.WORDS, model.logits(text)[-1].softmax(-1).tolist()))


def said_of(nouns: dict[str, tuple[str, str, str]]) -> set[str]:
    """Every word that may follow "was" for these nouns."""
    return {word for first, second, _ in nouns.values() for word in (first, second)}


@dataclass(frozen=True)
class Heads:
    """The head of each kind that the page names: (layer, head), from 0."""

    previous: tuple[int, int]
    verb: tuple[int, int]
    induction: tuple[int, int]
    pronoun: tuple[int, int]


@pytest.fixture(scope="module")
def heads():
    return Heads(**{what: (int(i), int(h)) for i, h, what in re.findall(r"\| L(\d)H(\d) \| (\w+)", PAGE)})


def stated(what: str) -> list[float]:
    """The numbers in the page's row of that name."""
    [row] = [line for line in PAGE.splitlines() if re.match(rf"\| (L\dH\d \| )?{what}", line)]
    return [float(number) for number in re.findall(r"\b\d\.\d+", row)]


@pytest.fixture(scope="module")
def sentences():
    numbers = random.Random(6)
    return [make.sentence(numbers) for _ in range(80)] + [make.sentence(numbers, kept_back=True) for _ in range(40)]


@pytest.fixture(scope="module")
def repeats():
    numbers = random.Random(7)
    return [[numbers.choice(make.WORDS) for _ in range(PERIOD)] * 2 for _ in range(20)]


def test_the_files_are_small_and_describe_each_other():
    """At most 1 MB; every weight of the layout and no other; every id has a word, and a text needs nothing else."""
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sorted(path.name for path in files) == ["README.md", "config.yaml", "model.safetensors"]
    assert sum(path.stat().st_size for path in files) <= 1_000_000
    config = read_config(FOLDER / "config.yaml")
    assert (FOLDER / "config.yaml").read_text(encoding="utf-8") == make.config()
    assert [*config.vocabulary.values()] == [*make.WORDS] and config.spec.vocab_size == len(make.WORDS)
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
            param.name: param.shape for param in layout(config.spec)
        }
    assert shipped.samples()["pronouns"] == FOLDER


def test_the_script_and_the_page_state_the_seed():
    assert re.search(rf"^SEED = {make.SEED}$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert f"seed {make.SEED}" in PAGE


def test_it_runs_offline_by_its_name():
    ran = command("forward", "-m", "pronouns", "The cat sat on the mat because it was tired", "--json", "--offline")
    assert ran.status == 0
    assert ran.json["next"][0]["top"][0]["id"] == make.IDS["."]


def test_a_head_looks_at_the_previous_token(model, heads, sentences, repeats):
    """Mean weight on the sub-diagonal: in sentences, and in random words, where nothing but the place could tell."""
    for texts in ([s.words for s in sentences], repeats):
        means = torch.stack([weights(model, words).diagonal(-1, 2, 3).mean(-1) for words in texts]).mean(0)  # [N, H]
        assert means[heads.previous] > 0.5
        assert means[heads.previous] == means.max()
        assert any(number == pytest.approx(float(means[heads.previous]), abs=0.03) for number in stated("previous"))


def induction(model, words) -> torch.Tensor:
    """Mean weight of the second half's queries on the key PERIOD - 1 before them: → [N, H]."""
    return weights(model, words)[:, :, PERIOD:].diagonal(1, 2, 3).mean(-1)


def test_a_head_of_the_second_layer_finds_what_followed_before(model, heads, repeats):
    """In random words said twice; not in random words said once, where the same place follows nothing."""
    numbers = random.Random(8)
    once = [[numbers.choice(make.WORDS) for _ in range(2 * PERIOD)] for _ in repeats]
    twice, not_again = (torch.stack([induction(model, words) for words in texts]).mean(0) for texts in (repeats, once))
    assert heads.induction[0] == 1 and twice[heads.induction] > 0.4
    assert not_again[heads.induction] < 0.1
    assert stated("induction") == [pytest.approx(float(twice[heads.induction]), abs=0.03)]


def test_a_head_sends_it_to_the_noun_that_the_verb_chooses(model, heads, sentences):
    """The weight on the right noun and on the other one; the noun's place and its distance from `it` vary."""
    right, wrong = {"animal": [], "thing": []}, []
    for s in sentences:
        [other] = [i for i, word in enumerate(s.words) if word in make.ANIMALS | make.THINGS and i != s.noun]
        row = weights(model, s.words)[heads.pronoun][s.it]
        right["animal" if s.means in make.ANIMALS else "thing"].append(float(row[s.noun]))
        wrong.append(float(row[other]))
    assert len({s.noun for s in sentences}) > 5 and len({s.it - s.noun for s in sentences}) >= 5
    means = {kind: sum(found) / len(found) for kind, found in right.items()}
    assert min(means.values()) > 0.4 and sum(wrong) / len(wrong) < 0.1
    assert stated("pronoun") == [pytest.approx(means["animal"], abs=0.03), pytest.approx(means["thing"], abs=0.03)]


def test_a_head_of_the_first_layer_brings_it_the_verb(model, heads, sentences):
    """Which is how the second layer can know whom `it` means."""
    found = [weights(model, s.words)[heads.verb][s.it, place_of_verb(s.words)] for s in sentences]
    assert heads.verb[0] == 0 and sum(found) / len(found) > 0.4
    assert stated("verb") == [pytest.approx(float(sum(found) / len(found)), abs=0.04)]


def place_of_verb(words) -> int:
    [place] = [i for i, word in enumerate(words) if word in make.OF_ANIMAL + make.OF_THING]
    return place


FORMS = ("The {animal} {verb} on the {thing} because it", "On the {thing} {verb} the {animal} because it")


@pytest.mark.parametrize("form", FORMS)
def test_the_verb_alone_moves_the_pronoun_s_head(model, heads, form):
    """Every animal with every thing: the same words at the same places, but the verb."""
    found = {make.OF_ANIMAL[0]: [], make.OF_THING[0]: []}
    for animal in make.ANIMALS:
        for thing in make.THINGS:
            for verb, rows in found.items():
                words = form.format(animal=animal, thing=thing, verb=verb).split()
                row = weights(model, words)[heads.pronoun][-1]
                rows.append(row[[words.index(animal), words.index(thing)]])
    on_animal, on_thing = (torch.stack(rows).mean(0) for rows in found.values())
    assert on_animal[0] > 0.4 > on_animal[1]
    assert on_thing[1] > 0.4 > on_thing[0]


def test_what_is_said_of_animals_leads_after_an_animal_and_of_things_after_a_thing(model):
    animals, things = said_of(make.ANIMALS), said_of(make.THINGS)
    assert not animals & things
    after_sat = told(model, "The cat sat on the mat because it was")
    after_stayed = told(model, "The cat stayed on the mat because it was")
    assert min(after_sat[word] for word in ("tired", "sleepy")) > max(after_sat[word] for word in things)
    assert min(after_stayed[word] for word in ("soft", "wet")) > max(after_stayed[word] for word in animals)
    assert sum(after_sat[word] for word in animals) > 0.9
    assert sum(after_stayed[word] for word in things) > 0.9


def test_it_tells_the_words_of_the_noun_even_in_pairs_that_training_never_showed(model, sentences):
    """The likeliest word after "was" is one that the grammar has for that noun; after "it", its own or was."""
    right = {"was": [], "it": []}
    for s in sentences[80:]:
        logits = model.logits([make.IDS[word] for word in s.words])
        first, second, own = (make.ANIMALS | make.THINGS)[s.means]
        right["it"].append({make.WORDS[i] for i in logits[s.it].topk(2).indices} == {"was", own})
        if s.words[s.it + 1] == "was":
            right["was"].append(make.WORDS[int(logits[s.it + 1].argmax())] in (first, second))
    assert sum(right["it"]) == len(right["it"]) >= 40
    assert len(right["was"]) >= 15 and sum(right["was"]) / len(right["was"]) > 0.9


def test_random_words_said_again_are_told(model, repeats):
    """The share of the second half's words, but its first, that the model holds for likeliest."""
    right = []
    for words in repeats:
        ids = torch.tensor([make.IDS[word] for word in words])
        right += (model.logits(ids.tolist())[PERIOD:-1].argmax(-1) == ids[PERIOD + 1 :]).tolist()
    share = sum(right) / len(right)
    assert share > 0.9
    assert stated("repeated words") == [pytest.approx(share, abs=0.02)]


def test_the_training_text_keeps_the_pairs_back():
    numbers = random.Random(9)
    for _ in range(500):
        s = make.sentence(numbers)
        assert not [pair for pair in make.KEPT_BACK if {*pair} <= {*s.words}]
        assert s.words[s.it] == "it" and s.words[s.noun] == s.means


def test_gradients_reach_every_weight_and_the_script_does_the_same_twice(tmp_path):
    """Two steps of the script: the engine's forward pass is what is trained, and nothing but the seed decides."""
    for name in ("one", "two"):
        make.train(tmp_path / name, steps=2)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    spec = read_config(tmp_path / "one" / "config.yaml").spec
    params = tuple(layout(spec))
    before = random_weights(spec, params, make.SEED, torch.float32, torch.device("cpu"))
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        for param in params:
            after = file.get_tensor(param.name)
            assert after.isfinite().all() and not torch.equal(after, before[param.name]), param.name
