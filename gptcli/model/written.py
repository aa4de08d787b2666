"""Weights written by hand in a config: numbers, rows, or a word, for every parameter that a pattern names."""

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gptcli.errors import GptcliError
from gptcli.layout import Param
from gptcli.spec import show

MOST = 1000  # names that one pattern's braces may stand for
WORDS = {"identity": torch.eye, "zeros": torch.zeros, "ones": torch.ones}


def written_weights(params: Iterable[Param], values: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors for every untied parameter of the layout, from patterns such as `layers.*.attn.{q,k}.weight`.

    Raises GptcliError for a parameter left out or named twice, a pattern that names none, and numbers of another shape.
    """
    wanted = {p.name: p for p in params if not p.tied_to}
    tensors: dict[str, Tensor] = {}
    for pattern, value in values.items():
        alternatives = _alternatives(pattern)
        names = [name for name in wanted if any(fnmatchcase(name, one) for one in alternatives)]
        if not names:
            raise _fault(pattern, "names no parameter of this model", f"its parameters: {', '.join(wanted)}")
        for name in names:
            if name in tensors:
                raise _fault(pattern, f"names {name}, which another pattern has given", "name each parameter once")
            tensors[name] = _tensor(value, wanted[name], pattern).to(dtype)
            if not tensors[name].isfinite().all():
                raise _fault(pattern, f"a number that is not finite in {dtype}", "mend the number")
    for name in wanted:
        if name not in tensors:
            raise _fault(name, "missing", "give its numbers, or `zeros`, `ones`, `identity`")
    return tensors


def _fault(pattern: str, message: str, hint: str) -> GptcliError:
    return GptcliError(f"weights.{pattern}: {message}", hint, "weights")


def _alternatives(pattern: str) -> list[str]:
    """`a.{q,k}.b` → `a.q.b`, `a.k.b`."""
    found = [] if pattern.count("{") > 20 else list(islice(_spelled(pattern), MOST + 1))
    if not 0 < len(found) <= MOST:  # twenty pairs of words would make a million
        raise _fault(pattern, f"stands for more than {MOST:,} names", "write fewer braces")
    return found


def _spelled(pattern: str) -> Iterator[str]:
    group = re.search(r"\{([^{}]*)\}", pattern)
    if group is None:
        yield pattern
        return
    for word in group[1].split(","):
        yield from _spelled(pattern[: group.start()] + word.strip() + pattern[group.end() :])


def _tensor(value: Any, param: Param, pattern: str) -> Tensor:
    if isinstance(value, str):
        if value not in WORDS:
            raise _fault(pattern, f"{show(value)} is not one of {', '.join(WORDS)}", "or give numbers")
        square = len(param.shape) == 2 and param.shape[0] == param.shape[1]
        if value == "identity" and not square:
            raise _fault(pattern, f"identity, but {param.name} is {list(param.shape)}", "give its numbers")
        return WORDS[value](*(param.shape[:1] if value == "identity" else param.shape), dtype=torch.float64)
    if isinstance(value, dict):
        return _rows(value, param, pattern)
    # By hand a matrix is [in, out], so that x · W can be followed on paper; Linear keeps [out, in].
    flipped = param.role in ("matrix", "residual")
    wanted = param.shape[::-1] if flipped else param.shape
    numbers = _numbers(value, wanted, pattern)
    return numbers.T if flipped else numbers


def _rows(value: dict, param: Param, pattern: str) -> Tensor:
    """`rows: {12: [...]}` of a [V, C] table or head; the rows left out are zeros."""
    rows = value.get("rows")
    if set(value) != {"rows"} or not isinstance(rows, dict):
        raise _fault(pattern, f"{show(value)} is not rows: {{id: [numbers]}}", "give rows or numbers")
    if param.axes[0] not in ("vocab", "context") or len(param.shape) != 2:
        raise _fault(pattern, f"rows, but {param.name} is no table", "give all its numbers, [in, out]")
    tensor = torch.zeros(param.shape, dtype=torch.float64)
    for id_, row in rows.items():
        if type(id_) is not int or not 0 <= id_ < param.shape[0]:
            raise _fault(pattern, f"row {show(id_)} is not one of 0 to {param.shape[0] - 1}", "mend the row's number")
        tensor[id_] = _numbers(row, param.shape[1:], f"{pattern}.rows.{id_}")
    return tensor


def _numbers(value: Any, shape: tuple[int, ...], pattern: str) -> Tensor:
    def fits(part: Any, sizes: tuple[int, ...]) -> bool:
        if not sizes:
            return type(part) in (int, float)
        return isinstance(part, list) and len(part) == sizes[0] and all(fits(one, sizes[1:]) for one in part)

    if not fits(value, shape):
        order = " (a matrix by hand is [in, out])" if len(shape) == 2 else ""
        raise _fault(pattern, f"{show(value)} is not {list(shape)} numbers{order}", "mend its rows and columns")
    return torch.tensor(value, dtype=torch.float64)
