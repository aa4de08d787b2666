"""The first number of a forward pass that is not finite: a probe that looks for it, and the weights it came from.

The probe looks at every activation as it passes and keeps none. Of the weights, what was read since the last sound
activation is what the one that is not finite was made of. An infinity that a sublayer takes in (a router's for an
expert that is never to be taken, one behind a ReLU) is none: the residual stream, which forgets nothing, tells.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, zeros_like

from gptcli.model.weights import Weights
from gptcli.trace import Selection, Silent

# Where the residual stream is seen, and what comes out of it.
STREAM = ("embed", "embed_norm", "resid_mid", "resid_cross", "resid_post", "final_norm", "logits")

QKV = ("q", "k", "v")  # whose weights are all read before one of them is seen


class NotFinite(Exception):
    """Where an activation holds NaN or infinity. index: of its first such number, by text and position first.

    read: what it was made of.
    """

    def __init__(self, path: str, axes: str, x: Tensor, read: "dict[str, Read]"):
        super().__init__(path)
        self.path, self.axes, self.shape, self.dtype, self.read = path, axes, x.shape, x.dtype, read
        bad = ~x.isfinite()
        self.count = int(bad.sum())
        turned = axes[1] not in "TS"  # [B, H, T, …]: positions stand behind the heads
        self.index = first_true(bad.transpose(1, 2) if turned else bad)
        if turned:
            self.index[1:3] = self.index[2:0:-1]
        self.value = float(x[tuple(self.index)])


def first_true(x: Tensor) -> list[int]:
    """Where the first True of a tensor stands, row by row; it must hold one."""
    index = []
    while x.ndim > 1:
        index.append(int(x.flatten(1).any(1).nonzero()[0]))
        x = x[index[-1]]
    return [*index, int(x.nonzero()[0])]


class Read(NamedTuple):
    """A weight that was read, and which rows of it (None: all)."""

    tensor: Tensor
    rows: Tensor | None

    @property
    def lasting(self) -> bool:
        """Does it go into more than what is made next? What is read for pairs of positions serves all layers."""
        return self.rows is not None and self.rows.ndim > 2


@dataclass
class Search:
    """What a probe and all that it nests share. points: every activation's axes, by path.

    aside: an attention's scope, and the heads and queries whose softmax weights are looked at too. read: weights read
    since the last sound activation; first: the first activation that is not finite, until the stream forgives it.
    """

    points: dict[str, str]
    aside: tuple[str, Selection] | None = None
    read: dict[str, Read] = field(default_factory=dict)
    first: NotFinite | None = None


class NotedWeights(Weights):
    """Weights that note what is read of them in a search's `read`, by path, in order."""

    def __init__(self, weights: Weights, search: Search):
        super().__init__(weights.tensors, weights.ties, weights.scope)
        self.search = search

    def at(self, scope: str) -> "NotedWeights":
        return NotedWeights(super().at(scope), self.search)

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        self.search.read[self._path(name)] = Read(tensor, None)
        return tensor

    def rows(self, name: str, ids: Tensor) -> Tensor:
        tensor = super().__getitem__(name)
        self.search.read[self._path(name)] = Read(tensor, ids)
        return tensor[ids]


class Watch(Silent):
    """A probe that raises NotFinite where the residual stream is not finite: for the activation that made it so."""

    def __init__(self, search: Search, scope: str = ""):
        self.search, self.scope = search, scope
        self.scores: Tensor | None = None

    def at(self, scope: str) -> "Watch":
        return Watch(self.search, f"{self.scope}{scope}.")

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name == "scores":  # an infinite one that the mask hides does no harm: the softmax weights tell
            self.scores = x
            return x
        sound = bool(x.isfinite().all())
        if not sound and self.search.first is None:
            self.search.first = self._found(name, x)
        if name in STREAM:
            if not sound:
                raise self.search.first
            self.search.first = None
        if sound and name not in (*QKV[:-1], "pattern", "sink"):
            self.search.read = {path: one for path, one in self.search.read.items() if one.lasting}
        return x

    def _found(self, name: str, x: Tensor) -> NotFinite:
        """Softmax weights that are not finite come of scores that aren't, or of a sink."""
        if name == "pattern" and not self.scores.isfinite().all():
            name, x = "scores", self.scores
        path, read = self.scope + name, self.search.read
        if name in QKV:
            read = {weight: one for weight, one in read.items() if weight.startswith(f"{path}.")}
        return NotFinite(path, self.search.points[path], x, dict(read))

    def selection(self, name: str) -> Selection | None:
        aside = self.search.aside
        return aside[1] if aside is not None and self.scope == aside[0] else None


class Culprit(NamedTuple):
    """A number of a weight that is not finite."""

    name: str
    index: list[int]
    value: float


def culprit(read: dict[str, Read], unit: int, text: int, column: int) -> Culprit | None:
    """The first weight that is not finite where it was read; None where all are.

    unit: which number of the output is not finite, which one row of a matrix made; text, column: where it stands, for
    which one row of a table was read.
    """
    for name, (tensor, rows) in read.items():
        chosen = None if rows is None else rows.unique() if rows.ndim > 2 else rows[text % len(rows), column].view(1)
        part = tensor if chosen is None else tensor[chosen]
        bad = ~part.isfinite()
        if not bad.any():
            continue
        axis = 0 if chosen is None else -1
        if unit < part.shape[axis] and bad.select(axis, unit).any():
            mine = zeros_like(bad)
            mine.select(axis, unit).copy_(bad.select(axis, unit))
            bad = mine
        index = first_true(bad)
        value = float(part[tuple(index)])
        return Culprit(name, index if chosen is None else [int(chosen[index[0]]), *index[1:]], value)
    return None
