"""What a comparison of weights comes to, in one line: which tensors differ, by what, and what it looks like."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Literal

from gptcli.checkpoint.patterns import braced, fold, split

if TYPE_CHECKING:
    from gptcli.report.diff_weights import Lone, TensorGap

Verdict = Literal["identical", "rounding", "different"]
SAME = ("identical", "stored", "rounded", "told")  # kinds of tensors that don't differ
MOST_PATTERNS = 3  # named in one line


def verdict_of(tensors: "Sequence[TensorGap]", only_a: "list[Lone]", only_b: "list[Lone]") -> tuple[Verdict, str]:
    """What it comes to, and that in one line. tensors: of both models; only_a, only_b: those of one alone."""
    off = [tensor for tensor in tensors if tensor.kind not in SAME]
    alone = [f"{_amount(len(only))} only in {letter} ({_listed(one.name for one in only)})"
             for letter, only in (("A", only_a), ("B", only_b)) if only]  # fmt: skip
    if not tensors:
        return "different", "; ".join(["no tensor is in both", *alone])
    if not off and not alone:
        return ("identical" if all(t.kind == "identical" for t in tensors) else "rounding"), _same(tensors)
    if not off:
        return "different", "; ".join([*alone, "the rest is the same"])
    groups: dict[str, list[TensorGap]] = {}
    for tensor in off:
        groups.setdefault(_cause(tensor), []).append(tensor)
    if len(groups) > MOST_PATTERNS:
        said = [f"{len(off)} of {_amount(len(tensors))} differ{_how_far(off)}"]
    else:
        said = [_differ(cause, group, len(tensors)) for cause, group in groups.items()]
    if len(off) < len(tensors) and len(groups) == 1 and not said[0][0].isdigit():
        said[0] = f"only {said[0]}"
    return "different", "; ".join([*said, *alone])


def _amount(tensors: int) -> str:
    return f"{tensors} tensor{'s' * (tensors != 1)}"


def _cause(tensor: "TensorGap") -> str:
    """What groups tensors that differ alike."""
    if tensor.kind == "shape":
        return f"{tensor.shape_a} in A and {tensor.shape_b} in B{f': {tensor.said}' * bool(tensor.said)}"
    update = tensor.rank is not None and (tensor.changed or 0) > 0.5  # one number that differs is of rank 1, too
    return tensor.said or ("update" if update else "")


def _differ(cause: str, group: "list[TensorGap]", tensors: int) -> str:
    """What differs, and how, of tensors that differ alike."""
    names = patterns(tensor.name for tensor in group)
    several = len(group) > 1
    if len(group) == tensors:
        what = f"all {_amount(tensors)}"
    else:
        what = ", ".join(names) if len(names) <= MOST_PATTERNS else f"{len(group)} of {_amount(tensors)}"
    if group[0].kind == "shape":
        return f"{what} {'are' if several else 'is'} {cause}"
    if cause == "update":
        ranks = sorted({tensor.rank for tensor in group})
        many = f"rank-{ranks[0]}" if len(ranks) == 1 else f"rank-{ranks[0]} to rank-{ranks[-1]}"
        return f"{what} differ{'' if several else 's'}: it looks like a {many} update"
    return f"{what} differ{'' if several else 's'}{f': {cause}' if cause else _how_far(group)}"


def _how_far(group: "Sequence[TensorGap]") -> str:
    worst = max(group, key=lambda tensor: tensor.relative or 0.0)
    if not worst.relative:
        return ""
    where = f" at most ({patterns([worst.name])[0]})" if len(group) > 1 else ""
    types = dict.fromkeys([worst.dtype_a, worst.dtype_b])
    against = f", {' against '.join(types)}" if len(types) > 1 else ""
    return f" by {worst.relative:.3g} of A's norm{where}{against}"


def _same(tensors: "Sequence[TensorGap]") -> str:
    """Of tensors none of which differs: in what they are not identical."""
    groups: dict[str, list[TensorGap]] = {}
    for tensor in tensors:
        if tensor.kind in ("rounded", "told"):
            groups.setdefault(tensor.said, []).append(tensor)
    if not groups:
        numbers = f"{_amount(len(tensors))}, {sum(prod(t.shape_a) for t in tensors):,} numbers"
        moved = [tensor for tensor in tensors if tensor.kind == "stored"]
        if not moved:
            return f"identical: {numbers}"
        a, b = (", ".join(dict.fromkeys(words)) for words in zip(*((t.dtype_a, t.dtype_b) for t in moved)))
        return f"the same numbers ({numbers}): A holds them in {a}, B in {b}"
    said = []
    for cause, group in groups.items():
        if group[0].kind == "told":
            said.append(f"{_listed(t.name for t in group)}: {cause}, as the architectures tell")
        else:
            what = "weights" if len(groups) == 1 else _listed(t.name for t in group)
            said.append(f"{'B' if cause[0] == 'A' else 'A'}'s {what} are {cause} (rounded)")
    return "; ".join(said)


def _listed(names: Iterable[str]) -> str:
    found = patterns(names)
    more = f" and {len(found) - MOST_PATTERNS} more" if len(found) > MOST_PATTERNS else ""
    return ", ".join(found[:MOST_PATTERNS]) + more


def patterns(names: Iterable[str]) -> list[str]:
    """Patterns that stand for just these names, words folded too, `.weight` left out: `layers.{20-27}.attn.{q,v}`."""
    groups: dict[tuple, list[str]] = {}
    for pattern in fold(name.removesuffix(".weight") for name in names):
        numbers = tuple(split(name)[1] for name in pattern.names)
        template = split(pattern.names[0])[0]
        groups.setdefault((template.rpartition(".")[0], numbers), []).extend(pattern.names)
    found = ([braced(group)] if braced(group) else [one.text for one in fold(group)] for group in groups.values())
    return [text for texts in found for text in texts]
