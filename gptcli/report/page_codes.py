"""Numbers of a page as they are or as codes of 8 or 16 bits."""

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

FINE = 65_534  # steps of a code of 16 bits; the code after the last is no number


class Plane(NamedTuple):
    """Numbers, as they are (f32) or as codes: low + step · code, squared where root; the code `none` is no number."""

    kind: Literal["f32", "u16", "u8"]
    data: bytes
    low: float = 0.0
    step: float = 1.0
    root: bool = False
    none: int | None = None


def fine(x: "Tensor", exact: bool) -> "ndarray":
    """Weights as they are, or as codes of 16 bits in steps of their root."""
    import numpy

    x = x.detach().cpu().float()
    if exact:
        return x.numpy()
    return codes(x.clamp(0, 1).sqrt(), 0.0, 1 / FINE, FINE).numpy().astype(numpy.uint16)


def codes(x: "Tensor", low: float, step: float, levels: int) -> "Tensor":
    """Numbers as codes 0 … levels; what is not finite is the one after."""
    return ((x - low) / step).nan_to_num(0, 0, 0).round().int().masked_fill(~x.isfinite(), levels + 1)


def recoded(x: "ndarray", levels: int) -> bytes:
    """Codes of 16 bits in fewer steps, a byte each; the largest byte is no number."""
    import numpy

    found = numpy.rint(x.astype(numpy.float32) * (levels / FINE)).astype(numpy.uint8)
    found[x > FINE] = 255
    return found.tobytes()


def roots(x: "ndarray", levels: int | None) -> Plane:
    """Weights or a sink's as the page holds them. levels: of 8 bits; None: of 16."""
    if x.dtype.kind == "f":
        return Plane("f32", x.tobytes())
    if levels is None:
        return Plane("u16", x.tobytes(), step=1 / FINE, root=True, none=FINE + 1)
    return Plane("u8", recoded(x, levels), step=1 / levels, root=True, none=255)


def even(x: "Tensor", levels: int | None) -> Plane:
    """Scores as they are, or in even steps from the lowest to the highest."""
    import numpy

    x = x.detach().cpu().float()
    finite = x[x.isfinite()]
    if levels is None or not finite.numel():
        return Plane("f32", x.numpy().tobytes())
    low, high = float(finite.min()), float(finite.max())
    step = (high - low) / levels or 1.0
    kind, kept = ("u16", numpy.uint16) if levels == FINE else ("u8", numpy.uint8)
    return Plane(kind, codes(x, low, step, levels).numpy().astype(kept).tobytes(), low, step, none=levels + 1)
