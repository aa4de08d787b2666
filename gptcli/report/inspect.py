"""`inspect`: what a checkpoint is, whether it is whole, and what is in it. Loads no weights to say so, and no torch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gptcli.checkpoint.scan import Statistics, Step
from gptcli.data import data, entry, mutable
from gptcli.errors import GptcliError
from gptcli.report import Finding, Report
from gptcli.report.inspect_config import ConfigValue
from gptcli.report.inspect_tensors import TensorRow

Verdict = Literal["not a checkpoint", "corrupt", "unsafe", "incomplete", "ambiguous", "not what its config says",
                  "not finite", "whole"]  # fmt: skip
# The verdict that each finding's code makes; of several findings the first in this order speaks.
CODES: dict[Verdict, list[str]] = {
    "not a checkpoint": "empty-file lfs-pointer html-page not-weights no-weights".split(),
    "corrupt": "corrupt index".split(),
    "unsafe": ["foreign-object"],
    "incomplete": """missing-weights missing-shard missing-index missing-tensor missing-part lost-tensor
        tokenizer""".split(),
    "ambiguous": "several-files two-sets duplicate-tensor index-mismatch".split(),
    "not what its config says": """config tie vocabulary shape dtype left-over-tensor packing adapter
        unknown-key""".split(),
    "not finite": ["nan", "inf"],
    "whole": [],
}


@entry
class FileRow:
    """A file of weights, its bytes and how many of the model's tensors are in it."""

    name: str
    format: str
    bytes: int
    tensors: int


@entry
class DtypeRow:
    """What is stored in one type. numbers: elements as they are stored."""

    dtype: str
    tensors: int
    numbers: int
    bytes: int


@entry
class Counts:
    """total: distinct parameters in the files, what is packed counted as it was before; described: as many as the
    config says, None where it says nothing; stored: elements of all tensors; buffers: elements that are no parameters.
    """

    total: int
    described: int | None
    stored: int
    buffers: int


@entry
class Tie:
    """config: whether it ties the head to the embedding, None where no config says; head: the stored tensor, if any.

    same: whether the two hold the same bytes (None: not compared); compared: how many bytes of each were.
    """

    config: bool | None
    head: str
    same: bool | None = None
    compared: int = 0


@entry
class Vocabulary:
    """rows of the embedding in the file, the config's vocab_size, and the ids that the tokenizer in `file` knows."""

    rows: int | None
    config: int | None
    tokenizer: int | None
    file: str


@entry
class SectionRow:
    """A key of a training checkpoint."""

    name: str
    tensors: int
    bytes: int


@entry
class Quantised:
    """method: the config's word, empty where it has none; schemes: in words, with how many weights each packs.

    numbers: of the packed weights, as they were; stored: elements of all tensors that make them up; sidecars: how many
    tensors stand beside the packed numbers, by what they are.
    """

    method: str
    schemes: dict[str, int]
    numbers: int
    stored: int
    bytes: int
    bits_a_weight: float
    sidecars: dict[str, int]


@data
class StatisticsRow(Statistics):
    """A tensor's statistics, by the file's own name and the project's; of a packed one, those of what it stands for."""

    stored: str
    name: str


@entry
class Digests:
    """Hexadecimal digits, of the model and of each tensor by the file's own name (see checkpoint/scan.py).

    model is None where some of its tensors are not to be had.
    """

    algorithm: str
    model: str | None
    tensors: dict[str, str]


@mutable
class Inspected:
    """One checkpoint.

    verdict and said: the line that sums up the findings. kind: a `model`, a `training` checkpoint, an `adapter`, or
    `nothing` that could be read. config: what describes it, empty where nothing does; families: its own, or all whose
    names fit; summary: the architecture in phrases. beside: weights in the directory that are not read; leftovers: what
    a trainer keeps there. shared: names that lie in one storage. opaque: objects of a pickle that are not built, by
    path. idle, checked, unknown: keys of the config that change nothing, that were compared with the one value that is
    implemented, and that nobody knows.
    """

    source: str
    verdict: Verdict = "whole"
    said: str = ""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kind: Literal["model", "training", "adapter", "nothing"] = "nothing"
    format: str = ""
    files: list[FileRow] = field(default_factory=list)
    index: str = ""
    absent: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    config: str = ""
    families: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    spec: dict[str, Any] | None = None
    parameters: Counts | None = None
    dtypes: list[DtypeRow] = field(default_factory=list)
    wrappers: list[str] = field(default_factory=list)
    prefix: str = ""
    tie: Tie | None = None
    vocabulary: Vocabulary | None = None
    metadata: dict[str, list[str]] = field(default_factory=dict)
    sections: list[SectionRow] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    shared: list[list[str]] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    quantised: Quantised | None = None
    adapter: Any = None
    tensors: list[TensorRow] = field(default_factory=list)
    values: list[ConfigValue] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    statistics: list[StatisticsRow] | None = None
    digests: Digests | None = None


@entry
class Unopened:
    """A path that could not be opened, and why."""

    source: str
    code: str
    message: str
    hint: str


@mutable
class InspectReport(Report):
    """checkpoints: in the order given. each: whether tensors are one a row; where: with file and bytes; fits: the
    pattern that chose them.
    """

    schema = "gptcli.inspect/1"
    tells_findings = True
    checkpoints: list[Inspected]
    unopened: list[Unopened]
    each: bool = False
    where: bool = False
    fits: str | None = None

    @property
    def status(self) -> Literal["ok", "findings", "error"]:
        return "error" if self.unopened else super().status


class Wanted(NamedTuple):
    """What is asked of the tensors.

    each: one a row; where: and its place in the files; fits: only those with a name that fits a shell's pattern. stats,
    spectral, digests: what needs their bytes. progress: of work that reads many, as a context that gives a step.
    """

    each: bool = False
    where: bool = False
    fits: str | None = None
    stats: bool = False
    spectral: bool = False
    digests: bool = False
    progress: Callable[[str, int], AbstractContextManager[Step]] = lambda what, size: nullcontext(lambda read: None)


DEFAULT = Wanted()


def inspect_report(
    sources: Sequence[str],
    find: Callable[[str], Path] = Path,
    config: str | None = None,
    wanted: Wanted = DEFAULT,
    strict: bool = False,
) -> InspectReport:
    """Looks at every source. Raises GptcliError where the only one can't be opened.

    find: where a source lies; config: describes the weights in place of what stands beside them; strict: keys that
    nobody knows are findings.
    """
    from gptcli.report.inspect_path import Inspection

    checkpoints, unopened = [], []
    for source in sources:
        try:
            checkpoints.append(Inspection(source, find(source), config, wanted, strict).done())
            continue
        except GptcliError as error:
            refused = error
        except OSError as error:
            said = f"{error.filename or source}: {error.strerror}"
            refused = GptcliError(said, "give a path that can be read", "file")
        if len(sources) == 1:
            raise refused
        unopened.append(Unopened(source, refused.code, refused.message, refused.hint))
    findings = [finding for one in checkpoints for finding in one.findings]
    return InspectReport(
        findings=findings,
        checkpoints=checkpoints,
        unopened=unopened,
        each=wanted.each or wanted.where,
        where=wanted.where,
        fits=wanted.fits,
    )
