"""Dataclasses that cost little to declare.

The standard decorator writes and compiles up to six methods for each class, which takes half a millisecond: for the
classes of one command, longer than the command. Here the standard decorator notes the fields alone, so that all that
belongs to a dataclass (`fields`, `replace`, inheritance in both directions) holds, and the methods are shared.
"""

from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from typing import Any, dataclass_transform


@dataclass_transform(kw_only_default=True, frozen_default=True)
def data(cls: type) -> type:
    """A decorator as `dataclass(frozen=True, kw_only=True)`."""
    return _declared(cls, __init__=_by_name, __setattr__=_refuse, __delattr__=_refuse, __hash__=_hash)


@dataclass_transform(frozen_default=True)
def entry(cls: type) -> type:
    """A decorator as `dataclass(frozen=True)`."""
    return _declared(cls, __init__=_by_place, __setattr__=_refuse, __delattr__=_refuse, __hash__=_hash)


@dataclass_transform()
def mutable(cls: type) -> type:
    """A decorator as `dataclass`; fields with and without a default may follow in any order."""
    return _declared(cls, __init__=_by_place, __hash__=None)


def _declared(cls: type, **methods: Any) -> type:
    cls.__doc__ = cls.__doc__ or cls.__name__  # the standard decorator would make one of the signature, slowly
    cls = dataclass(cls, init=False, repr=False, eq=False, kw_only=True)  # for standard ones that inherit
    for name, method in {"__repr__": _repr, "__eq__": _eq, **methods}.items():
        setattr(cls, name, method)
    every = fields(cls)
    cls._names = tuple(field.name for field in every)
    cls._defaults = {field.name: field.default for field in every if field.default is not MISSING}
    cls._makers = {field.name: field.default_factory for field in every if field.default_factory is not MISSING}
    return cls


def _by_name(self: Any, **given: Any) -> None:
    held = self._defaults | {name: make() for name, make in self._makers.items() if name not in given} | given
    if len(held) != len(self._names) or not all(name in held for name in self._names):
        wrong = ", ".join(held.keys() ^ {*self._names})
        raise TypeError(f"{type(self).__name__}: fields that are missing or unknown: {wrong}")
    self.__dict__.update(held)
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _by_place(self: Any, *values: Any, **named: Any) -> None:
    _by_name(self, **dict(zip(self._names, values, strict=len(values) > len(self._names))), **named)


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name in self._names)


def _repr(self: Any) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{n}={v!r}' for n, v in zip(self._names, _values(self)))})"


def _eq(self: Any, other: Any) -> bool:
    return _values(self) == _values(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _refuse(self: Any, name: str, *value: Any) -> None:
    raise FrozenInstanceError(f"cannot assign to or delete field {name!r}")
