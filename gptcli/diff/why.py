"""Why two sides part, of what is known of both: numbers that are not finite, quantised weights, named causes."""

import math
import re
from dataclasses import replace

from gptcli.diff.causes import Cause, explain
from gptcli.diff.rounding import Comparison
from gptcli.report.birth import birth
from gptcli.report.capture import Replay
from gptcli.run import Run


def causes_of(found: Comparison) -> list[Cause]:
    """What closes the gap where they part, the plainest first, or that nothing known does; empty where no gap is a bug.

    Of numbers that are not finite, on one side or on both, where they come from.
    """
    if found.parted is None:
        lost = next((path for path in found.lost if not path.endswith(".scores")), None)  # there a mask may be infinite
        return [_born(lost, *side) for side in (("A", found.a), ("B", found.b))] if lost else []
    if found.seen[found.parted].lost:
        return _not_finite(found)
    if not found.bug:
        return []
    letters, ours, b = ("AB", found.wide[0], found.b) if found.wide[0] else ("BA", found.wide[1], found.a)
    order = [path for path in found.axes if path in found.seen]
    agreed = order[order.index(found.parted) - 1] if order[0] != found.parted else None
    spec = b.model.spec if type(b) in (Run, Replay) else None
    weights, model = (found.wide[1].weights, b.model) if type(b) is Run else (None, None)
    causes = explain(ours, found.parted, found.theirs, found.close, spec, weights, model, agreed, found.reads)
    quantised = packed(found)
    if quantised is not None:  # that weights aren't the other's then goes without saying
        causes = [quantised, *(cause for cause in causes if cause.code != "weight")]
    if not causes:
        said = "none of the known slips closes the gap"
        causes = [Cause("unknown", said, f"look at how {found.parted} is computed in B", [])]
    return [_called(cause, letters) for cause in causes]


def _called(cause: Cause, letters: str) -> Cause:
    """letters: what the side that was run again, and the other, are called."""
    said, mend = (
        re.sub(r"\b[AB]\b", lambda one: letters["AB".index(one[0])], text) for text in (cause.said, cause.mend)
    )
    return replace(cause, said=said, mend=mend)


def _not_finite(found: Comparison) -> list[Cause]:
    """Where each side that is not finite became so, if it ran here; else where that stands first."""
    gap = found.seen[found.parted]
    sides = (("A", found.a, gap.a), ("B", found.b, gap.b))
    return [_born(found.parted, letter, run) for letter, run, value in sides if not math.isfinite(value)]


def _born(path: str, letter: str, run: Run) -> Cause:
    """path: where a side that didn't run here holds such a number first."""
    if type(run) is not Run:
        said = f"in {letter}, NaN or infinity stands first in {path}"
        return Cause("not-finite", said, f"look at how {path} is computed in {letter}", [])
    born = birth(run)
    held = getattr(born, "weight", None)
    mend = f"{held} in {letter}'s file" if held else "a type that holds larger numbers, such as --dtype f32"
    return Cause(born.code, f"in {letter}, {born.message}", mend, [])


def packed(found: Comparison) -> Cause | None:
    """Where the weights of one side are quantised and the other's aren't, or otherwise. Of a file nobody knows."""
    from gptcli.checkpoint.gguf import UNPACKED

    if not all(found.wide):
        return None
    said = []
    for side in (found.a, found.b):
        held = side.model.checkpoint
        types = {held.infos[bound.stored].dtype for bound in held.binding.bounds.values()} if held else set()
        said.append(", ".join([held.packing.said] if held and held.packing else sorted(types & UNPACKED)))
    if said[0] == said[1]:
        return None
    how = (f"{letter}'s weights are {f'quantised ({one})' if one else 'not'}" for letter, one in zip("AB", said))
    return Cause("quantised", " and ".join(how), "--weights tells what that costs, tensor by tensor", [])
