"""transformers at toy size as the oracle of a family: the same directory, run by the library and by this project."""

import json
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from gptcli.layout import layout
from gptcli.model.forward import Inputs, forward
from gptcli.source import open_model

CPU = torch.device("cpu")


class Float64(TorchFunctionMode):
    """Turns every float32 that the library asks for into float64, so that a bug can't hide in its rounding."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def lift(value):
            return torch.float64 if value is torch.float32 else value

        kwargs = {key: lift(value) for key, value in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            return args[0].double()
        return function(*map(lift, args), **kwargs)


@contextmanager
def in_float64():
    """The library builds and runs its model in float64, its own casts to float32 lifted."""
    torch.set_default_dtype(torch.float64)
    single, torch.FloatTensor = torch.FloatTensor, torch.DoubleTensor
    try:
        with Float64():
            yield
    finally:
        torch.FloatTensor = single
        torch.set_default_dtype(torch.float32)


def save_toy(config: dict, folder: Path, seed: int = 0, auto: type = AutoModelForCausalLM) -> torch.nn.Module:
    """A model of transformers in float64 with every weight random (norms about 1, biases too), saved as it is.

    So are the buffers that its file holds; tables that the library computes and never trains stay as they are. A head
    that the config doesn't tie has numbers of its own, also where the library ties it until a file holds one.
    auto: the library's class that makes a model of a config, by what its head is for.
    """
    kind = config["model_type"]
    with in_float64():
        settings = AutoConfig.for_model(**deepcopy(config))  # the library writes into a config's tables
        settings._experts_implementation = "eager"
        model = auto.from_config(settings, attn_implementation="eager").double().eval()
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    if config.get("tie_word_embeddings") is False and head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    stored = model.state_dict()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained += [(name, x) for name, x in model.named_buffers() if name in stored and x.is_floating_point()]
    with torch.no_grad():
        for name, parameter in trained:
            gain = ("norm" in name.lower() or ".ln_" in name) and name.endswith("weight")
            around = 1.0 if gain and "gemma" not in kind else 0.0
            parameter.copy_(around + 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    model.save_pretrained(folder)
    # What a person has on disk is the config as it was written, not every default that the library knows.
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": written["architectures"]}))
    return model


class Noted(dict):
    """A mapping that notes which names were read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.read = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


def check_exactly(
    config: dict,
    folder: Path,
    length: int = 24,
    seed: int = 0,
    auto: type = AutoModelForCausalLM,
    told: dict | None = None,
) -> torch.Tensor:
    """Logits equal to 1e-9 of their spread in float64, all rows and the last; names read == names declared.

    told: what the library is given beside the ids. Returns the ids [2, T] that were fed.
    """
    theirs = save_toy(config, folder, seed, auto)
    model = open_model(str(folder))
    assert not model.notes, model.notes
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(0, model.spec.vocab_size, (2, length), generator=generator)
    with in_float64(), torch.no_grad():
        expected = theirs(ids, **(told or {"use_cache": False})).logits
    weights = model.weights(torch.float64, CPU)
    weights.tensors = Noted(weights.tensors)
    assert_near(forward(Inputs(ids), weights, model.spec), expected, 1e-9)
    assert weights.tensors.read == {p.name for p in layout(model.spec) if not p.tied_to}
    assert_near(forward(Inputs(ids, rows="last"), weights, model.spec), expected[:, -1:], 1e-9)
    return ids


def check_family(
    config: dict,
    folder: Path,
    length: int = 24,
    seed: int = 0,
    auto: type = AutoModelForCausalLM,
    told: dict | None = None,
) -> None:
    """check_exactly, and equal to 1e-4 of the spread in float32 to the library as it comes."""
    ids = check_exactly(config, folder, length, seed, auto, told)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = auto.from_pretrained(folder, dtype=torch.float32, **options).eval()
    model = open_model(str(folder))
    with torch.no_grad():
        expected = theirs(ids, **(told or {"use_cache": False})).logits
    assert_near(forward(Inputs(ids), model.weights(torch.float32, CPU), model.spec), expected, 1e-4)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, allowed: float) -> None:
    """The largest difference is within `allowed` of the spread (standard deviation) of the expected logits."""
    spread = float(theirs.std())
    assert spread > 1e-3
    assert ours.shape == theirs.shape
    gap = float((ours - theirs).abs().max()) / spread
    assert gap < allowed, f"{gap:.2e} of the spread in {ours.dtype}, {allowed:.0e} allowed"
