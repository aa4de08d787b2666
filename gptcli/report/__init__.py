"""What each command found, as plain data, and how it finds it. No rich here, and no torch at module level."""

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Literal

from gptcli.data import data, entry, mutable

if TYPE_CHECKING:
    from gptcli.tokens import Token


@entry
class Finding:
    """Something wrong with what was looked at. code is stable; path names the place."""

    code: str
    message: str
    path: str = ""


@data
class ModelFacts:
    """Which model, and how it ran. seed is None unless the weights are random; parameters are distinct numbers; edits:
    what was changed on the way, as it was asked for.
    """

    name: str
    source: str
    weights: Literal["checkpoint", "hand-written", "random"]
    seed: int | None
    parameters: int
    dtype: str
    device: str | None = None
    notes: list[str] = field(default_factory=list)
    edits: list[str] = field(default_factory=list)


def amount(number: int, one: str) -> str:
    """`1 head`, `1,024 heads`."""
    return f"{number:,} {one}{'s' * (number != 1)}"


@mutable
class Report:
    """The base of every report: JSON is its fields, whole, after `schema` and `status`."""

    schema: ClassVar[str]
    tells_findings: ClassVar[bool] = False  # its drawing and its verdict name them: they need no lines of their own
    findings: list[Finding] = field(default_factory=list)

    @property
    def status(self) -> Literal["ok", "findings", "error"]:
        return "findings" if self.findings else "ok"


@mutable
class RunReport(Report):
    """A report of one run begins with the model, the texts that were fed, and what an encoder read (`Run.told`)."""

    model: ModelFacts
    tokens: "list[list[Token]]"
    source: "list[list[Token]]"
