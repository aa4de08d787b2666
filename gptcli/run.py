"""One request to one model: ids in, logits out. What forward, topk, score and trace share."""

import re
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from gptcli import count
from gptcli.errors import GptcliError
from gptcli.report import ModelFacts
from gptcli.source import Model
from gptcli.tokens import Token
from gptcli.trace import SILENT, Silent

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gptcli.model.forward import Inputs
    from gptcli.model.weights import Weights


@dataclass
class Run:
    """A model with the ids to feed it, one list a text. dtype and device as --dtype and --device name them.

    added: which ids the tokenizer's rule put there; seconds: what the latest forward pass took.
    """

    model: Model
    ids: list[list[int]]
    dtype_name: str = "auto"
    device_name: str = "auto"
    threads: int | None = None
    added: list[list[bool]] | None = None
    seconds: float = field(default=0.0, init=False)

    def __post_init__(self):
        if not self.ids or not all(self.ids):
            raise GptcliError("an empty text holds no token to run", "give a text of at least one token", "empty")

    @property
    def width(self) -> int:
        """T: positions of the longest text, to which the others are padded on the left."""
        return max(map(len, self.ids))

    @cached_property
    def device(self) -> "torch.device":
        import torch

        from gptcli.model.device import choose_device

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return choose_device(self.device_name)

    @cached_property
    def dtype(self) -> "torch.dtype":
        import torch

        name = count.dtype_name(self.dtype_name, self.model.stored_dtype)
        if name == "float64" and self.device.type == "mps":
            raise GptcliError("--dtype float64: mps has no such type", "--device cpu has", "dtype")
        return getattr(torch, name)

    @cached_property
    def weights(self) -> "Weights":
        return self.model.weights(self.dtype, self.device)

    def inputs(self, rows: Literal["last", "all"]) -> "Inputs":
        """The ids [B, T], padded on the left where texts differ in length."""
        import torch

        from gptcli.model.forward import Inputs

        padded = [[0] * (self.width - len(ids)) + ids for ids in self.ids]
        mask = None
        if any(len(ids) < self.width for ids in self.ids):
            kept = [[False] * (self.width - len(ids)) + [True] * len(ids) for ids in self.ids]
            mask = torch.tensor(kept, device=self.device)
        return Inputs(torch.tensor(padded, device=self.device), mask=mask, rows=rows)

    def forward(self, rows: Literal["last", "all"], probe: Silent = SILENT) -> "Tensor":
        """Logits [B, T, V], or [B, 1, V] for rows=last. Raises GptcliError for ids that the model can't take."""
        import torch

        from gptcli.model.forward import check, forward

        with torch.inference_mode():
            inputs = self.inputs(rows)
            check(inputs, self.model.spec)
            weights = self.weights
            begun = time.perf_counter()
            logits = forward(inputs, weights, self.model.spec, probe)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds = time.perf_counter() - begun
        return logits

    def column(self, text: int, position: int) -> int:
        """Where a text's position stands among the padded ones."""
        return self.width - len(self.ids[text]) + position

    def tokens(self) -> list[list[Token]]:
        """What was fed; the ids that the tokenizer's rule put before the text are marked."""
        marks = self.added or [[False] * len(ids) for ids in self.ids]
        labels = self.model.labels
        return [
            [Token.of(id_, labels, mark) for id_, mark in zip(ids, marks_of)] for ids, marks_of in zip(self.ids, marks)
        ]

    def facts(self) -> ModelFacts:
        return self.model.facts(str(self.dtype).removeprefix("torch."), str(self.device))


def positions(wanted: str, length: int) -> list[int]:
    """The positions that `--position` means in a text of that length: `all`, or one from 0, or from -1 backwards."""
    if wanted == "all":
        return list(range(length))
    if not re.fullmatch(r"-?[0-9]{1,18}", wanted):
        raise GptcliError(f"--position {wanted}: not a number", "give 0, 1, … or -1 for the last, or all")
    position = int(wanted)
    if not -length <= position < length:
        raise GptcliError(f"--position {wanted}: beyond the text", f"positions run from 0 to {length - 1}")
    return [position % length]
