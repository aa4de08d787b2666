"""A model as Python sees it: what the command line does, without the command line."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from gptcli.errors import GptcliError
from gptcli.layout import Param
from gptcli.run import Run, decoder_text
from gptcli.source import Model
from gptcli.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.weights import Weights
    from gptcli.report.attribution import AttributionReport
    from gptcli.report.diff import DiffReport
    from gptcli.report.edits import Request
    from gptcli.report.forward import ForwardReport
    from gptcli.report.heads import By as What
    from gptcli.report.heads import HeadsReport
    from gptcli.report.lens import LensReport, PositionReport
    from gptcli.report.maps import MapReport
    from gptcli.report.params import By, ParamsReport
    from gptcli.report.score import ScoreReport
    from gptcli.report.topk import TopkReport
    from gptcli.report.trace import TraceReport
    from gptcli.report.view import Attending
    from gptcli.tokens import Tokenizer

Text = str | Sequence[int]  # words, or ids


class Opened:
    """An opened model. Where a method takes a text, it takes a list of ids as well; source: what an encoder reads."""

    def __init__(self, model: Model, device: str = "auto", dtype: str = "auto"):
        self.model, self.device, self.dtype = model, device, dtype
        self._requests: tuple[Request, ...] = ()

    def __repr__(self) -> str:
        return f"<gptcli model {self.model.shown}>"

    @property
    def spec(self) -> Spec:
        """The architecture, as frozen data."""
        return self.model.spec

    @property
    def layout(self) -> tuple[Param, ...]:
        """Every weight: name, shape, axes, role, tie."""
        return self.model.layout

    @property
    def tokens(self) -> "Tokenizer":
        """Text to ids and back. Raises GptcliError where the model has no tokenizer."""
        return self.model.tokenizer

    @property
    def notes(self) -> list[str]:
        """What a person should know of how the model was read."""
        return self.model.notes

    @cached_property
    def weights(self) -> "Weights":
        """`m.weights["layers.0.attn.q.weight"]`: a tensor [out, in], read when it is first asked for."""
        return self._run([0]).weights

    def _run(self, text: Text, source: Text | None = None) -> Run:
        run = Run(self.model, **self._read(text, source), dtype_name=self.dtype, device_name=self.device)
        if "weights" in self.__dict__:
            run.weights = self.weights
        else:
            self.__dict__["weights"] = run.weights
        if self._requests:
            from gptcli.report.edits import edits_of

            run.edits = edits_of(run, list(self._requests))
        return run

    def _read(self, text: Text, source: Text | None) -> "dict[str, list[list[int]] | None]":
        """The ids of a text and of its source."""
        if source is not None and isinstance(text, str):
            ids = decoder_text(self.model, text).ids
        else:
            ids = self._ids(text)
        return {"ids": [ids], "source": None if source is None else [self._ids(source)]}

    def _ids(self, text: Text) -> list[int]:
        return self.tokens.encode(text) if isinstance(text, str) else list(text)

    def edited(
        self,
        ablate: str | Sequence[str] = (),
        patch: Mapping[str, str] | None = None,
        set: Mapping[str, float] | None = None,
        ablate_with: Literal["zero", "mean"] = "zero",
    ) -> "Opened":
        """The same model, whose every run is edited: `m.edited(ablate="L0H1").logits(text)`.

        ablate: heads and activations that are zeros, or their mean over positions; patch: activations and the files
        that hold others; set: `{"layers.0.attn.pattern[0,3]": 0}`. They are what --ablate, --patch and --set mean, and
        are added to the edits that this model has. A run raises GptcliError for an edit that touches nothing.
        """
        from gptcli.report.edits import Request

        for name, given in (("patch", patch), ("set", set)):
            if given is not None and not isinstance(given, Mapping):
                raise GptcliError(f"{name}: no mapping from paths", f'give {name}={{"layers.0.mlp_out": …}}', "edit")
        new = copy(self)
        paths = [ablate] if isinstance(ablate, str) else ablate
        asked = [Request("ablate", path, ablate_with) for path in paths]
        asked += [Request("patch", f"{file}:{path}") for path, file in (patch or {}).items()]
        asked += [Request("set", f"{path}={value!r}") for path, value in (set or {}).items()]
        new._requests = (*self._requests, *asked)
        return new

    def logits(self, text: Text, source: Text | None = None) -> "Tensor":
        """Next-token logits after every position: [T, V], float32 (float64 in float64)."""
        return self._run(text, source).forward("all")[0]

    def activations(self, text: Text, *paths: str, source: Text | None = None) -> "dict[str, Tensor]":
        """The activations that match the paths (`layers.0.attn.pattern`, `layers.*.resid_post`), by path, batch first.

        Raises nothing for a pattern that matches none: `gptcli trace --list` names them all.
        """
        from gptcli.model.measure import alone
        from gptcli.trace import Recorder

        recorder, run = Recorder(*paths, note=lambda path, x: alone(x)), self._run(text, source)
        run.forward("all", recorder, head=run.needs_head(recorder.wants))
        return recorder.kept

    def params(self, by: "By" = "component") -> "ParamsReport":
        """The report of `gptcli params`."""
        from gptcli.report.params import params_report

        return params_report(self.model, by, self.dtype, full=False)

    def forward(self, text: Text, k: int = 5, source: Text | None = None) -> "ForwardReport":
        """The report of `gptcli forward`."""
        from gptcli.report.forward import forward_report

        return forward_report(self._run(text, source), k, (), inner=False)[0]

    def topk(
        self,
        text: Text,
        k: int = 10,
        position: int | str = -1,
        temperature: float = 1.0,
        source: Text | None = None,
    ) -> "TopkReport":
        """The report of `gptcli topk`. position: from 0, -1 the last, "all", or "mask" for what is to be filled in."""
        from gptcli.report.topk import topk_report

        return topk_report(self._run(text, source), k, (), str(position), temperature)

    def score(self, text: Text, source: Text | None = None) -> "ScoreReport":
        """The report of `gptcli score`."""
        from gptcli.report.score import score_report

        return score_report(self._run(text, source))

    def trace(
        self,
        text: Text,
        layer: int = 0,
        head: int = 0,
        position: int | str = -1,
        attention: "Attending" = "self",
        source: Text | None = None,
    ) -> "TraceReport":
        """The report of `gptcli trace`. layer and head count from 0, as everywhere in Python."""
        from gptcli.report.trace import trace_report
        from gptcli.report.view import heads_of, layers_of, stack_of

        stack = stack_of(attention, self.spec)
        layers, heads = layers_of(_layer(layer, stack), stack), heads_of(str(head), stack, attention)
        return trace_report(self._run(text, source), layers, heads, str(position), attention)

    def maps(
        self,
        text: Text,
        layer: int | str = "all",
        head: int | str = "all",
        attention: "Attending" = "self",
        source: Text | None = None,
    ) -> "MapReport":
        """The report of `gptcli trace --map`: softmax weights of heads, every one, not pooled. Both count from 0."""
        from gptcli.report.maps import axes_of, map_reports
        from gptcli.report.patterns import Patterns
        from gptcli.report.view import heads_of, layers_of

        patterns = Patterns(self._run(text, source), attention)
        layers = layers_of(_layer(layer, patterns.stack), patterns.stack)
        heads = heads_of(str(head), patterns.stack, attention)
        [report] = map_reports(patterns, layers, heads, [axes_of(patterns, None, None, drop_first=False)])
        return report

    def heads(
        self,
        text: Text,
        by: "What" = "previous",
        attention: Literal["self", "encoder"] = "self",
        source: Text | None = None,
    ) -> "HeadsReport":
        """The report of `gptcli heads`: every head of every layer, ranked by what it does with the text."""
        from gptcli.report.heads import heads_report

        return heads_report(self._run(text, source), by, attending=attention)

    def lens(
        self, text: Text, position: int | str | None = None, k: int = 5, source: Text | None = None
    ) -> "LensReport | PositionReport":
        """The report of `gptcli lens`: of one position with its k best tokens, of a span "3:8", or of "all"."""
        from gptcli.report.lens import lens_report, position_report

        run = self._run(text, source)
        if isinstance(position, int):
            return position_report(run, str(position), k)
        return lens_report(run, position)

    def attribute(
        self, text: Text, *words: str, position: int | str = -1, source: Text | None = None
    ) -> "AttributionReport":
        """The report of `gptcli trace --attribute`: these tokens' logits, split over what they are made of."""
        from gptcli.report.attribution import attribution_report

        return attribution_report(self._run(text, source), list(words), str(position))

    def diff(self, other: "Opened | str", text: Text | None = None, source: Text | None = None) -> "DiffReport":
        """The report of `gptcli diff`: this model beside another, or beside what a path names: a checkpoint, a trace's
        file, someone's dumps. Of a trace, which says what was read, the text is left out. Raises GptcliError.
        """
        from gptcli.diff.sides import Request, Side, open_side, pair
        from gptcli.report.diff import diff_report
        from gptcli.source import open_model

        opened = isinstance(other, Opened)
        if self._requests or (opened and other._requests):
            raise GptcliError(
                "diff of an edited model", "write its run by `gptcli trace -o FILE` and compare that", "edit"
            )
        theirs = Side("model", "", other.model) if opened else open_side(other, open_model)
        dtypes = self.dtype, other.dtype if opened else self.dtype

        def read(model: Model) -> dict:
            if text is None:
                raise GptcliError("no text", "give one, or ids: only a trace says itself what was read")
            return Opened(model)._read(text, source)

        request = Request(read, text is not None, dtypes, self.device)
        a, b, told = pair(Side("model", "", self.model), theirs, request)
        return diff_report(a, b, told=told)


def _layer(layer: int | str, stack: Spec) -> str:
    """A layer as the command line names it: from 0, or from -1 backwards, or all."""
    return layer if isinstance(layer, str) else f"L{layer + stack.n_layers if layer < 0 else layer}"
