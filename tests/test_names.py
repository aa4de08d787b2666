"""One table of parameters, one forward: the names that forward reads are the names that the layout declares."""

import pytest
import torch

from gptcli import shipped
from gptcli.config import read_config
from gptcli.layout import layout
from gptcli.model.forward import forward
from gptcli.model.init import random_weights
from gptcli.model.weights import Weights
from gptcli.trace import POINTS, Recorder, points, shapes
from tests.toys import fed, shrunk

CPU = torch.device("cpu")


class Noted(dict):
    """A mapping that notes which names were read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.read = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("name", shipped.configs())
def test_names_read_are_names_declared(name):
    spec = shrunk(read_config(shipped.configs()[name]).spec)
    params = list(layout(spec))
    tensors = Noted(random_weights(spec, params, 0, torch.float32, CPU))
    forward(fed(spec, torch.arange(9)[None] % spec.vocab_size), Weights.of(params, tensors), spec)
    assert tensors.read == {p.name for p in params if not p.tied_to}
    assert {p.name: p.shape for p in params if not p.tied_to} == {n: tuple(t.shape) for n, t in tensors.items()}


@pytest.mark.parametrize("name", shipped.configs())
def test_recorded_names_are_the_points_in_order_with_their_axes(name):
    spec = shrunk(read_config(shipped.configs()[name]).spec)
    params = list(layout(spec))
    weights = Weights.of(params, random_weights(spec, params, 0, torch.float32, CPU))
    ids = torch.arange(9).view(1, 9).expand(2, 9) % spec.vocab_size
    recorder = Recorder("*")
    forward(fed(spec, ids), weights, spec, recorder)
    declared = {path: (axes, shape) for path, axes, shape in shapes(spec, 2, 9, 11)}
    assert list(recorder.kept) == list(declared) == [path for path, _ in points(spec)]
    for path, tensor in recorder.kept.items():
        axes, shape = declared[path]
        assert tuple(tensor.shape) == shape and len(axes) == len(shape), path
    assert {".".join("#" if part.isdigit() else part for part in path.split(".")) for path in declared} <= set(POINTS)


@pytest.mark.parametrize("rows", ["last", "all"])
@pytest.mark.parametrize("name", shipped.configs())
def test_watching_changes_no_bit(name, rows):
    spec = shrunk(read_config(shipped.configs()[name]).spec)
    params = list(layout(spec))
    weights = Weights.of(params, random_weights(spec, params, 0, torch.float32, CPU))
    inputs = fed(spec, torch.arange(9)[None] % spec.vocab_size, rows)
    silent = forward(inputs, weights, spec)
    watched = forward(inputs, weights, spec, Recorder("*"))
    assert silent.shape == (1, 9 if rows == "all" else 1, spec.vocab_size)
    assert torch.equal(silent, watched)


@pytest.mark.parametrize("name", shipped.configs())
def test_last_row_is_the_last_of_all_rows(name):
    spec = shrunk(read_config(shipped.configs()[name]).spec)
    params = list(layout(spec))
    weights = Weights.of(params, random_weights(spec, params, 0, torch.float64, CPU))
    ids = torch.arange(9)[None] % spec.vocab_size
    everything = forward(fed(spec, ids), weights, spec)
    last = forward(fed(spec, ids, "last"), weights, spec)
    torch.testing.assert_close(last[:, 0], everything[:, -1], rtol=1e-12, atol=1e-12)
