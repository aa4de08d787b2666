"""`forward`: what stands at each stage between ids and logits, and the next token."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gptcli.report import Finding, ModelFacts, Report
from gptcli.report.topk import Next, next_tokens
from gptcli.run import Run
from gptcli.tokens import Token
from gptcli.trace import ON_THE_SIDE, POINTS, Recorder

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One activation. axes: letters; mean, std (population) and max_abs over the whole tensor, padding left out.

    last: the last token's vector of the first text (of head 0, where there are heads).
    """

    name: str
    path: str
    axes: str
    shape: list[int]
    mean: float | None = None
    std: float | None = None
    max_abs: float | None = None
    last: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class ForwardReport(Report):
    schema = "gptcli.forward/1"
    model: ModelFacts
    tokens: list[list[Token]]
    stages: list[Stage]
    next: list[Next]


def forward_report(run: Run, k: int, words: tuple[str, ...], inner: bool) -> tuple[ForwardReport, "Tensor"]:
    """The report, and the logits [B, T, V] that it tells of. inner: every stage inside the layers too."""
    inside = [path for path in POINTS if inner and path not in ON_THE_SIDE]
    wanted = ["embed", "layers.#.resid_post", "final_norm", "logits", *inside]
    stages: list[Stage] = []
    mask = run.inputs("all").mask

    def note(path: str, x: "Tensor") -> None:
        stages.append(_stage(path, x, mask))

    logits = run.forward("all", Recorder(*(path.replace("#", "*") for path in wanted), note=note))
    ids = Stage(name="input ids", path="", axes="BT", shape=[len(run.ids), run.width], last=[run.ids[0][-1]])
    report = ForwardReport(
        model=run.facts(),
        tokens=run.tokens(),
        stages=[ids, *stages],
        next=[next_tokens(run, logits[t, -1], t, len(run.ids[t]) - 1, k, words) for t in range(len(run.ids))],
        findings=[
            Finding("not-finite", f"{stage.path} holds NaN or infinity", stage.path)
            for stage in stages
            if stage.max_abs != stage.max_abs or stage.max_abs == float("inf")
        ][:1],
    )
    return report, logits


def _stage(path: str, x: "Tensor", mask: "Tensor | None") -> Stage:
    from gptcli.model.measure import statistics

    axes = POINTS[_point(path)]
    along = x if axes[1] in "TS" else x.transpose(1, 2)  # [B, T, …]
    stats = statistics(along if mask is None else along[mask])
    last = [] if path == "logits" else along[0, -1].reshape(-1, x.shape[-1])[0].tolist()
    return Stage(
        name=_name(path),
        path=path,
        axes=axes,
        shape=list(x.shape),
        last=last,
        **stats._asdict(),
    )


def _point(path: str) -> str:
    parts = path.split(".")
    return ".".join([parts[0], "#", *parts[2:]]) if parts[0] == "layers" else path


def _name(path: str) -> str:
    """What a stage is called: `layer 1` for its end, ` mlp.up` for what stands inside."""
    parts = path.split(".")
    if parts[0] != "layers":
        return {"embed": "embedding", "final_norm": "final norm"}.get(path, path)
    inside = ".".join(parts[2:])
    return f"layer {int(parts[1]) + 1}" if inside == "resid_post" else f" {inside}"
