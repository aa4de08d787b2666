"""`forward`: what stands at each stage between ids and logits, and the next token."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gptcli.layout import Place
from gptcli.report import RunReport
from gptcli.report.birth import birth
from gptcli.report.topk import Next, next_tokens
from gptcli.run import Run
from gptcli.trace import ON_THE_SIDE, POINTS, Recorder

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One activation. axes: letters; mean, std (population) and max_abs over the whole tensor, padding left out.

    last: the last token's vector of the first text, or in the encoder of its source (of head 0, where there are heads).
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
class ForwardReport(RunReport):
    schema = "gptcli.forward/1"
    stages: list[Stage]
    next: list[Next]


def forward_report(run: Run, k: int, words: tuple[str, ...], inner: bool) -> tuple[ForwardReport, "Tensor"]:
    """The report, and the logits [B, T, V] that it tells of. inner: every stage inside the layers too."""
    inside = [path for path in POINTS if inner and path not in ON_THE_SIDE]
    outer = ["embed", "layers.#.resid_post", "final_norm"]
    wanted = [*outer, *(f"encoder.{path}" for path in outer), "logits", *inside]
    stages: list[Stage] = []
    inputs = run.inputs("all")

    def note(path: str, x: "Tensor") -> None:
        if not stages and run.source:
            stages.append(_ids("source ids", "BS", run.source, run.source_width))
        if path == "embed":
            stages.append(_ids("input ids", "BT", run.ids, run.width))
        read = inputs.source if Place.of(path).stack or ".cross.k" in path or ".cross.v" in path else inputs
        stages.append(_stage(path, x, read.mask))

    logits = run.forward("all", Recorder(*(path.replace("#", "*") for path in wanted), note=note))
    report = ForwardReport(
        **run.told(),
        stages=stages,
        next=[] if run.model.spec.lm_head is None else list(_next(run, logits, k, words)),
        findings=[] if math.isfinite(stages[-1].max_abs) else [birth(run)],
    )
    return report, logits


def _next(run: Run, logits: "Tensor", k: int, words: tuple[str, ...]) -> Iterator[Next]:
    """What comes after each text; of a model that fills in masks, what each mask stands for."""
    for text, ids in enumerate(run.ids):
        masked = run.masked(text) if run.model.fills else []
        for at in masked or [len(ids) - 1]:
            yield next_tokens(run, logits[text, run.column(text, at)], text, at, k, words)


def _ids(name: str, axes: str, texts: list[list[int]], width: int) -> Stage:
    return Stage(name=name, path="", axes=axes, shape=[len(texts), width], last=[texts[0][-1]])


def _stage(path: str, x: "Tensor", mask: "Tensor | None") -> Stage:
    from gptcli.model.measure import statistics

    place = Place.of(path)
    name = place.name if place.layer is None else f"layers.#.{place.name}"
    axes = POINTS[f"{place.stack}.{name}".removeprefix(".")]
    along = x if axes[1] in "TS" else x.transpose(1, 2)  # [B, T, …]
    stats = statistics(along if mask is None else along[mask])
    last = [] if path == "logits" else along[0, -1].reshape(-1, x.shape[-1])[0].tolist()
    return Stage(
        name=_name(place),
        path=path,
        axes=axes,
        shape=list(x.shape),
        last=last,
        **stats._asdict(),
    )


def _name(place: Place) -> str:
    """What a stage is called: `layer 1` for its end, and `L0 mlp.up` (from 0) for what stands inside."""
    if place.layer is None:
        name = {"embed": "embedding", "final_norm": "final norm"}.get(place.name, place.name)
    else:
        name = f"layer {place.layer + 1}" if place.name == "resid_post" else f"L{place.layer} {place.name}"
    return f"{place.stack} {name}".lstrip()
