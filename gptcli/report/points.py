"""`trace --list` and `--at`: the names of all activations, or one of them whole."""

from dataclasses import dataclass

from gptcli.layout import Place
from gptcli.names import Names, Vocabulary
from gptcli.report import ModelFacts, Report, RunReport
from gptcli.report.birth import birth
from gptcli.run import Run
from gptcli.tokens import Token
from gptcli.trace import Recorder, points, shapes


@dataclass(frozen=True)
class PointFacts:
    """name: what the asked vocabulary calls the activation, where it has a name for it."""

    path: str
    axes: str
    shape: list[int]
    name: str | None


@dataclass(kw_only=True)
class PointsReport(Report):
    schema = "gptcli.points/1"
    model: ModelFacts
    tokens: list[list[Token]]
    vocabulary: Vocabulary
    points: list[PointFacts]


@dataclass(kw_only=True)
class ActivationReport(RunReport):
    """One activation, whole: values nest as its shape says. name: what the asked vocabulary calls it.

    rows: the tokens that its positions stand for, of each text; columns: its keys, where the last axis counts those.
    """

    schema = "gptcli.activation/1"
    rows: list[list[Token]]
    columns: list[list[Token]] | None
    path: str
    name: str | None
    axes: str
    shape: list[int]
    values: list
    mean: float
    std: float
    max_abs: float


def points_report(run: Run, names: Names) -> PointsReport:
    """Every activation that this model has (or a trace's file holds), with its shape for these ids."""
    every = shapes(run.model.spec, len(run.ids), run.width, run.source_width)
    found = [PointFacts(path, axes, list(shape), names.of(path)) for path, axes, shape in every if run.holds(path)]
    return PointsReport(model=run.facts(), tokens=run.tokens(), vocabulary=names.vocabulary, points=found)


def activation_report(run: Run, path: str, names: Names) -> ActivationReport:
    """One activation of the run, by our path."""
    from gptcli.model.measure import statistics

    axes = dict(points(run.model.spec))
    recorder = Recorder(path)
    logits = run.forward("all", recorder)
    x = recorder.kept[path]
    place, tokens, source = Place.of(path), run.tokens(), run.source_tokens()
    across = place.name.startswith("cross.")
    keys = source if across or place.stack else tokens
    return ActivationReport(
        **run.told(),
        rows=keys if place.stack or "S" in axes[path][:-1] else tokens,
        columns=keys if axes[path].endswith("S") else None,
        path=path,
        name=names.of(path),
        axes=axes[path],
        shape=list(x.shape),
        values=x.tolist(),
        **statistics(x)._asdict(),
        findings=[] if (logits if logits.numel() else x).isfinite().all() else [birth(run)],
    )
