"""A scoped view over any mapping from a weight's path to its tensor."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from gptcli.layout import Param


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

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """The rows `ids` [...] of a table: [..., C]. Nothing else of the table need be read."""
        path = self._path(name)
        if isinstance(self.tensors, Lazy):
            return self.tensors.rows(path, ids)
        return self.tensors[path][ids]


class Lazy(Mapping[str, Tensor]):
    """Tensors made when they are first read, and kept.

    makers: of the whole tensor, or, given ids, of those rows alone; fleeting: names of which nothing is kept, for they
    take far more room than what they are made of.
    """

    def __init__(self, makers: Mapping[str, Callable[..., Tensor]], fleeting: Container[str] = ()):
        self.makers, self.fleeting, self.made = makers, fleeting, {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self.fleeting:
            return self.makers[name]()
        if name not in self.made:
            self.made[name] = self.makers[name]()
        return self.made[name]

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """The rows `ids` of a table; of a fleeting one nothing else is made."""
        return self.makers[name](ids) if name in self.fleeting else self[name][ids]

    def __contains__(self, name: Any) -> bool:
        return name in self.makers

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)
