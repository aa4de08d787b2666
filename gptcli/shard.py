"""Which part of a model each of several ranks holds (tensor parallel, arXiv:1909.08053): arithmetic over the layout.

Heads, key/value heads, an MLP's width and the head's vocabulary are shared out; everything else every rank has whole.
What is split so that each rank has a part of every sum is added up once its product is there: two sums a layer, the
same on every rank. Rows of the embedding are read where they lie.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from gptcli.layout import Param, Place, layout
from gptcli.spec import Attention, Dense, Experts, Spec

HEADS = ("heads", "kv_heads", "head")


def splits(part: Attention, ranks: int) -> bool:
    """Can the heads be shared out? Not where they don't divide, or where one norm spans them all."""
    return part.n_heads % ranks == 0 and part.n_kv_heads % ranks == 0 and part.qk_norm != "whole"


def local(spec: Spec, ranks: int) -> Spec:
    """The architecture as one rank computes it: with its share of the heads and of the MLP's width."""
    return replace(
        spec,
        attention=_heads(spec.attention, ranks),
        cross=spec.cross and _heads(spec.cross, ranks),
        mlp=_width(spec.mlp, ranks),
        encoder=spec.encoder and local(spec.encoder, ranks),
        variants=tuple(
            replace(
                variant,
                attention=variant.attention and _heads(variant.attention, ranks),
                mlp=variant.mlp and _width(variant.mlp, ranks),
            )
            for variant in spec.variants
        ),
    )


def _heads(part: Attention, ranks: int) -> Attention:
    if not splits(part, ranks):
        return part
    return replace(part, n_heads=part.n_heads // ranks, n_kv_heads=part.n_kv_heads // ranks)


def _width(part, ranks: int):
    sizes = {}
    if isinstance(part, (Dense, Experts)) and part.size % ranks == 0:
        sizes["size"] = part.size // ranks
    if isinstance(part, Experts) and part.shared_size is not None and part.shared_size % ranks == 0:
        sizes["shared_size"] = part.shared_size // ranks
    return replace(part, **sizes)


def axis(param: Param, spec: Spec, ranks: int) -> int | None:
    """The dimension of a weight that is shared out; None where every rank has it whole."""
    place = Place.of(param.name)
    if place.name.startswith("lm_head.") and param.axes[0] == "vocab":
        return 0
    here = place.spec(spec)
    part = here.cross if place.name.startswith("cross.") else here.attention
    for i, (counted, size) in enumerate(zip(param.axes, param.shape)):
        if (counted in HEADS and splits(part, ranks)) or (counted == "mlp" and size % ranks == 0):
            return i
    return None


def called(param: Param, spec: Spec, ranks: int, rank: int) -> str | None:
    """What a rank calls a weight that it has whole: the norm of one head goes by the head's number on this rank. None
    for another rank's head, and for a table, which is read where it lies.
    """
    each = re.fullmatch(r"(.*\.([qk])_norm)\.(\d+)\.weight", param.name)
    if each is None or not splits(part := Place.of(param.name).spec(spec).attention, ranks):
        return None if param.role == "table" else param.name
    own = span(part.n_heads if each[2] == "q" else part.n_kv_heads, ranks, rank)
    index = int(each[3])
    return f"{each[1]}.{index - own.start}.weight" if own.start <= index < own.stop else None


def span(size: int, ranks: int, rank: int) -> slice:
    """A rank's part of a dimension: as many as the others have, but for what is left at the end."""
    step = -(-size // ranks)
    return slice(min(rank * step, size), min((rank + 1) * step, size))


def summed(spec: Spec, ranks: int) -> Iterator[str]:
    """The matrices whose products are parts of a sum, by path without `.weight`."""
    for param in layout(spec):
        if param.role == "residual" and axis(param, spec, ranks) == 1:
            yield param.name.removesuffix(".weight")


def whole(spec: Spec, ranks: int) -> list[str]:
    """What could have been shared out and is not, and why, in a person's words."""
    found = {}
    for at, stack in (("encoder.", spec.encoder), ("", spec)):
        for i in range(stack.n_layers if stack else 0):
            here = stack.at(i)
            for name, part in (("attn", here.attention), ("cross", here.cross)):
                if part is not None and not splits(part, ranks):
                    found.setdefault(f"{at}layers.#.{name}: {_why(part, ranks)}", None)
            for size in {getattr(here.mlp, "size", 0), getattr(here.mlp, "shared_size", 0) or 0}:
                if size % ranks:
                    found.setdefault(f"{at}layers.#.mlp: its width of {size:,} does not divide", None)
    return list(found)


def _why(part: Attention, ranks: int) -> str:
    if part.n_heads % ranks:
        return f"{part.n_heads} heads do not divide"
    if part.n_kv_heads % ranks:
        return f"{part.n_kv_heads} key/value heads do not divide"
    return "one norm spans all of its heads"
