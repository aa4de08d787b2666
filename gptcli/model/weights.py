"""A scoped view over any mapping from a weight's path to its tensor."""

import itertools
from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from gptcli.layout import Param

Rows = Tensor | slice  # of a table: by ids, or a run of them
EVERY_ROW = slice(None)


class Weights:
    """`w.at("layers.0")["attn.q.weight"]` reads `layers.0.attn.q.weight`.

    Ties are resolved here: a tied name reads its partner's tensor, so forward always asks for `lm_head.weight`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ties: Mapping[str, str] | None = None, scope: str = ""):
        self.tensors, self.ties, self.scope = tensors, ties or {}, scope

    @classmethod
    def of(cls, params: Iterable[Param], tensors: Mapping[str, Tensor]) -> "Weights":
        """The weights of a layout. A tied weight that has data of its own (a file's contradicting head) reads that."""
        return cls(tensors, {p.name: p.tied_to for p in params if p.tied_to and p.name not in tensors})

    def at(self, scope: str) -> "Weights":
        return Weights(self.tensors, self.ties, f"{self.scope}{scope}.")

    def _path(self, name: str) -> str:
        path = self.scope + name
        return self.ties.get(path, path)

    def __contains__(self, name: str) -> bool:
        return self._path(name) in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self._path(name)]

    def get(self, name: str) -> Tensor | None:
        """The tensor, or None where the layout has none (a bias, most often)."""
        return self[name] if name in self else None

    def joined(self, name: str, x: Tensor) -> Tensor:
        """What a matrix's product is as a whole: x, where one place holds all of the matrix."""
        return x

    def rows(self, name: str, rows: Rows) -> Tensor:
        """Rows of a table: by ids [...], [..., C]; by a slice, [n, C]. Nothing else of the table need be read."""
        path = self._path(name)
        return self.tensors.rows(path, rows) if isinstance(self.tensors, Lazy) else self.tensors[path][rows]

    def holding(self, name: str) -> "Weights":
        """The same, with one tensor made once and kept, for who reads it often."""
        path = self._path(name)
        return Weights(ChainMap({path: self.tensors[path]}, self.tensors), self.ties, self.scope)

    def passes(self, name: str) -> bool:
        """Is nothing of this tensor kept?"""
        return isinstance(self.tensors, Lazy) and self._path(name) in self.tensors.fleeting

    def blocks(self, name: str, size: int) -> Iterator[Tensor]:
        """A table [V, C] from its first row to its last, at most `size` rows at a time."""
        for start in itertools.count(0, size):
            block = self.rows(name, slice(start, start + size))
            if not len(block):
                return
            yield block


class Lazy(Mapping[str, Tensor]):
    """Tensors made when they are first read, and kept.

    makers: of the whole tensor, or, given rows, of those alone; fleeting: names of which nothing is kept, for they take
    far more room than what they are made of.
    """

    def __init__(self, makers: Mapping[str, Callable[..., Tensor]], fleeting: Container[str] = ()):
        self.makers, self.fleeting, self.made = makers, fleeting, {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self.fleeting:
            return self.makers[name]()
        if name not in self.made:
            self.made[name] = self.makers[name]()
        return self.made[name]

    def rows(self, name: str, rows: Rows) -> Tensor:
        """Rows of a table; of a fleeting one nothing else is made."""
        return self.makers[name](rows) if name in self.fleeting else self[name][rows]

    def __contains__(self, name: Any) -> bool:
        return name in self.makers

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)
