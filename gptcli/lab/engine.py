"""What the experiments share: weights by hand, a watched forward pass, and how a line names its numbers."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gptcli.errors import GptcliError
from gptcli.layout import layout
from gptcli.spec import Spec
from gptcli.trace import Recorder, Selection

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Numbers in float64 that differ by less than this, relative to the largest of them, differ by rounding alone.
ROUNDING = 1e-12


def by_hand(spec: Spec, values: Mapping[str, Any]) -> "dict[str, Tensor]":
    """Weights in float64, written as in a config: rows, numbers, `identity`, by pattern of parameter names."""
    import torch

    from gptcli.model.written import written_weights

    return written_weights(layout(spec), values, torch.float64)


def watched(
    spec: Spec, tensors: "Mapping[str, Tensor]", ids: list[int], *wanted: str, queries: slice = slice(None)
) -> "dict[str, Tensor]":
    """The activations that match `wanted`, by path, of one forward pass over one text; its batch axis is taken off.

    queries: of whom scores and softmax weights are wanted. Raises GptcliError for ids that the Spec can't take.
    """
    import torch

    from gptcli.model.forward import Inputs, forward
    from gptcli.model.weights import Weights

    recorder = Recorder(*wanted, select=Selection(queries=queries))
    with torch.inference_mode():
        forward(Inputs(torch.tensor([ids])), Weights.of(layout(spec), tensors), spec, recorder)
    return {path: x[0] for path, x in recorder.kept.items()}


def drawing(seed: int, what: str) -> "torch.Generator":
    """A generator of random numbers for one purpose; purposes of one seed have nothing in common."""
    import torch

    digest = hashlib.sha256(f"{seed} {what}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def listed(words: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def at_most(error: float) -> str:
    """An error as a line says it."""
    return "exactly" if error == 0 else f"to {error:.1e}"


def require(condition: bool, message: str, hint: str, code: str = "lab") -> None:
    """Raises GptcliError unless the condition holds."""
    if not condition:
        raise GptcliError(message, hint, code)
