"""Another library's model in float64, whatever it asks for by itself: its own casts to narrower floats are lifted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class _Lifted(TorchFunctionMode):
    """Turns every narrower float type that a call names into float64."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in CASTS:
            return args[0].double()
        kwargs = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return function(*map(_wide, args), **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


@contextmanager
def in_float64() -> Iterator[None]:
    """What is built and run within is float64 throughout. On leaving, everything is as it was.

    Types by default belong to the whole process: other threads must not compute meanwhile.
    """
    default, single = torch.get_default_dtype(), torch.FloatTensor
    torch.set_default_dtype(torch.float64)
    torch.FloatTensor = torch.DoubleTensor
    try:
        with _Lifted():
            yield
    finally:
        torch.FloatTensor = single
        torch.set_default_dtype(default)
