"""`lens`: what every layer would say if the model ended there (the logit lens).

The residual stream after each layer is read as the last one is: by the final norm, which takes the mean and the spread
of the vector that it is given, and by the head. So the last row is the logits.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gptcli.errors import GptcliError
from gptcli.layout import Place
from gptcli.report import Finding, Report, RunReport
from gptcli.report.birth import birth
from gptcli.report.proof import Check, check, differing
from gptcli.report.topk import Candidate, next_tokens, places
from gptcli.run import Run
from gptcli.spec import Spec
from gptcli.tokens import Token
from gptcli.trace import Recorder

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.measure import Best, Leading
    from gptcli.model.weights import Weights

LATEST = 32  # positions that are read unless others are named
BLOCK = 1 << 21  # logits that are held at once
ROWS = 16  # positions that are read together at least: a product of a few rows may be summed in another order


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What a layer would say at one position: its best token. tied: how many ids have that logit."""

    position: int
    id: int
    token: str
    logit: float
    prob: float
    tied: int


@dataclass(frozen=True, kw_only=True)
class LensRow:
    """One layer's cells; path: what was read. layer_index: from 0; None for the embedding."""

    name: str
    layer_index: int | None
    path: str
    cells: list[Cell]


@dataclass(kw_only=True)
class LensReport(RunReport):
    """Rows from the embedding to the last layer; columns are the positions from `first` on.

    named: these were asked for; otherwise they are the latest ones. fills: a token stands for its own position, as a
    model has it that fills in masks; otherwise for the next.
    """

    schema = "gptcli.lens/1"
    n_layers: int
    fills: bool
    named: bool
    first: int
    rows: list[LensRow]
    proof: list[Check]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one layer would say at a position. entropy: of all probabilities; kl: KL(final ‖ layer); both in bits.

    top: the best tokens, and those that were asked for.
    """

    name: str
    layer_index: int | None
    path: str
    entropy: float
    kl: float
    top: list[Candidate]


@dataclass(kw_only=True)
class PositionReport(RunReport):
    """One position, from the embedding to the last layer. k: how many tokens each layer's list reaches."""

    schema = "gptcli.lens.position/1"
    n_layers: int
    fills: bool
    position: int
    token: str
    k: int
    readings: list[Reading]
    proof: list[Check]


@dataclass(frozen=True, kw_only=True)
class LeadingRow:
    """One layer's best tokens, of every position a list."""

    name: str
    layer_index: int | None
    path: str
    top: "list[list[Leading]]"


@dataclass(kw_only=True)
class LeadingReport(Report):
    """Rows from the embedding to the last layer, a list of best tokens for every position. words: their texts."""

    schema = "gptcli.lens.leading/1"
    fills: bool
    words: dict[int, str]
    rows: list[LeadingRow]
    proof: list[Check]


def span(wanted: str | None, width: int, full: bool = False) -> range:
    """The positions that `--position A:B` means (B not among them), as a slice does; the latest ones without it."""
    if wanted is None or wanted == "all":
        return range(0 if full or wanted else max(0, width - LATEST), width)
    ends = re.fullmatch(r"(-?[0-9]{1,18})?:(-?[0-9]{1,18})?", wanted)
    if ends is None:
        raise GptcliError(f"--position {wanted}: not a position or a span", "give 3, -1, or 3:8 (to 7), or all")
    found = range(width)[slice(*(None if end is None else int(end) for end in ends.groups()))]
    if not found:
        raise GptcliError(f"--position {wanted}: beyond the text", f"positions run from 0 to {width - 1}")
    return found


def lens_report(run: Run, position: str | None = None, full: bool = False) -> LensReport:
    """Each layer's best token at each position that is meant. Raises GptcliError for a model without a head."""
    from gptcli.model.measure import best

    lens = _Lens(run, span(position, run.width, full))

    def row(path: str, found: "list[Best]") -> LensRow:
        cells = [Cell(position=at, token=lens.shown(one.id), **one._asdict()) for at, one in zip(lens.chosen, found)]
        return LensRow(**lens.names(path), cells=cells)

    rows = [row(path, found) for path, found in lens.every(best).items()]
    return LensReport(**lens.told(), named=position is not None or full, first=lens.chosen.start, rows=rows)


def leading_report(run: Run, k: int) -> LeadingReport:
    """Each layer's k best tokens at every position. Raises GptcliError for a model without a head."""
    from gptcli.model.measure import leading

    lens = _Lens(run, range(run.width))
    found = lens.every(lambda logits: leading(logits, k))
    rows = [LeadingRow(**lens.names(path), top=top) for path, top in found.items()]
    known = sorted({one.id for row in rows for top in row.top for one in top})
    return LeadingReport(
        fills=run.model.fills,
        words={id_: lens.shown(id_) for id_ in known},
        rows=rows,
        proof=lens.proof(),
        findings=lens.findings(),
    )


def position_report(run: Run, position: str, k: int, words: tuple[str, ...] = ()) -> PositionReport:
    """Each layer's k best tokens and those that `words` name, at one position. Raises GptcliError."""
    from gptcli.model.measure import divergence, entropy

    at, *others = places(run, 0, position)
    if others:
        raise GptcliError(f"--position {position}: positions {at}, {others[0]} …", f"open one: --position {at}")
    lens = _Lens(run, range(at, at + 1))
    found = lens.every(lambda logits: list(logits.clone()))  # of each layer one row [V]
    [final] = found[lens.paths[-1]]
    readings = []
    for path, [row] in found.items():
        top = next_tokens(run, row, 0, at, k, words).top
        readings.append(Reading(**lens.names(path), entropy=entropy(row), kl=divergence(final, row), top=top))
    token = run.tokens()[0][at].token
    return PositionReport(**lens.told(), position=at, token=token, k=k, readings=readings)


class _Lens:
    """How one text's residual stream is read at the chosen positions, and whether the last row is the logits."""

    def __init__(self, run: Run, chosen: range):
        if run.model.spec.lm_head is None:
            raise GptcliError(f"{run.model.shown} has no head to read its layers by", "trace shows its vectors", "head")
        run.single("lens reads one")
        self.run, self.chosen, self.spec = run, chosen, run.model.spec
        self.paths = stream(self.spec)
        self.differ, self.finite = 0.0, True
        for said, paths in run.edits.made if run.edits else ():
            if any(Place.of(path)[:2] == ("", None) and path not in ("embed", "embed_norm") for path in paths):
                why = "lens reads every layer by the norm and the head as they are"
                raise GptcliError(f"{said}: {why}", "edit what stands before them", "edit")

    def windows(self) -> Iterator[tuple[slice, range]]:
        """Positions that are read together, and those of them that are meant: few enough to hold their logits."""
        width, most = self.run.width, max(ROWS, BLOCK // self.spec.vocab_size // ROWS * ROWS)
        if width <= most:
            yield slice(0, width), self.chosen
            return
        size = min(most, -(-len(self.chosen) // ROWS) * ROWS)
        for start in range(self.chosen.start, self.chosen.stop, size):
            begin = min(start, width - size)
            yield slice(begin, begin + size), range(start, min(start + size, self.chosen.stop))

    def read(self, x: "Tensor") -> "Tensor":
        """The residual stream as the last layer's is read: [1, T, C] → [T, V]."""
        from gptcli.model.ops import norm

        return self.head(norm(x, self.run.weights, "final_norm", self.spec) if self.spec.norm.final else x)

    def head(self, x: "Tensor") -> "Tensor":
        """Final vectors [1, T, C] → logits [T, V]."""
        from gptcli.model.ops import head

        return head(x, self.weights, self.spec)[0]

    @cached_property
    def weights(self) -> "Weights":
        """The run's, with the head at hand where a run would unpack it anew for every layer."""
        w = self.run.weights
        return w.holding("lm_head.weight") if w.passes("lm_head.weight") else w

    def every(self, take: "Callable[[Tensor], list]") -> dict[str, list]:
        """What `take` makes of each layer's logits [rows, V] at the chosen positions, by path; one of a position."""
        import torch

        last = self.paths[-1]

        def row(x: "Tensor", final: "Tensor | None" = None) -> list:
            found = []
            for window, mine in self.windows():
                logits = self.read(x[:, window])
                if final is not None:
                    self.compare(logits, self.head(final[:, window]))
                found += take(logits[mine.start - window.start : mine.stop - window.start])
            return found

        # The last layer's is read once the final vectors are there to compare with.
        recorder = Recorder(*self.paths, note=lambda path, x: x if path == last else row(x))
        with torch.inference_mode():
            final = self.run.forward("all", recorder, head=False)
            return recorder.kept | {last: row(recorder.kept[last], final)}

    def compare(self, mine: "Tensor", run: "Tensor") -> None:
        """The last row's logits beside the run's."""
        self.differ += differing(mine, run)
        self.finite = self.finite and bool(run.isfinite().all())

    def proof(self) -> list[Check]:
        return [check("the last row is the logits, bit for bit", self.differ, 0)]

    def findings(self) -> list[Finding]:
        if not self.finite:
            return [birth(self.run)]
        return [Finding("proof", f"{self.differ:g} logits are not the last row's")] if self.differ else []

    def told(self) -> dict[str, Any]:
        """What a report of it begins with, and what it proves."""
        spec, fills = self.spec, self.run.model.fills
        about = {**self.run.told(), "n_layers": spec.n_layers, "fills": fills}
        return about | {"proof": self.proof(), "findings": self.findings()}

    def names(self, path: str) -> dict:
        """What a row is called."""
        index = Place.of(path).layer
        return {"name": "embed" if index is None else f"layer {index + 1}", "layer_index": index, "path": path}

    def shown(self, id_: int) -> str:
        return Token.of(id_, self.run.labels).token


def stream(spec: Spec) -> list[str]:
    """The residual stream before the first layer and after each, as forward names it."""
    first = "embed_norm" if spec.norm.embedding else "embed"
    return [first, *(f"layers.{i}.resid_post" for i in range(spec.n_layers))]
