"""The same directory, run by the transformers library: what its modules take and give, under our names.

Hooks on modules see all that stands between them, and the library's own eager attention what it is given. Modules are
found by the checkpoint's names. Where the library computes in another order than POINTS has it, what is born early
waits for what stands before it. The library is no dependency: without it there is an error that says how to get it.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from gptcli.diff.births import EAGER, Births, Tap
from gptcli.errors import GptcliError
from gptcli.layout import Place
from gptcli.names import CONDITIONS, module_of
from gptcli.report import ModelFacts
from gptcli.report.capture import size_of
from gptcli.run import Run
from gptcli.spec import Experts, Rope, Spec
from gptcli.trace import SILENT, Silent

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

# What the library calls modules of which files have kept an older name.
MOVED = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("block_sparse_moe", "mlp"),
    ("embed_out", "lm_head"),
)


def _stack_rows(spec: Spec) -> dict[str, list[tuple[str, str]]]:
    """By our name outside of layers: side, and the weight whose module it is; the most direct first."""
    first = ("in", "layers.0:whole")
    head = ["lm_head.dense", "embed_out", "lm_head"]
    plain = [("out", "embed")] if CONDITIONS["plain embedding"](spec) else []
    return {
        "embed": [("in", "embed_norm"), *plain] if spec.norm.embedding else [first],
        "embed_norm": [("out", "embed_norm"), first],
        "final_norm": [("out", "final_norm"), *(("in", stem) for stem in head)],
        **{name: [("out", name)] for name in ("lm_head.dense", "lm_head.norm", "embed_out")},
    }


def _layer_rows(spec: Spec) -> dict[str, list[tuple[str, str]]]:
    """The same by our name within a layer."""
    before = spec.norm.placement in ("pre", "sandwich")
    experts = isinstance(spec.mlp, Experts)
    mlp = "mlp.router" if experts else "mlp.up"
    # What reads the sum that the attention leaves, and what reads the sum before the MLP.
    second = ("in", "mlp_norm" if before else mlp)
    first = second if spec.encoder is None else ("in", "cross_norm" if before else "cross.q")
    rows = {
        "resid_pre": [("in", "attn.o:whole")],
        "attn_norm": [("out", "attn_norm"), ("in", "attn.q") if before else first],
        "resid_mid": [first] if spec.residual == "sequential" else [],
        "cross_norm": [("out", "cross_norm"), ("in", "cross.q") if before else second],
        "resid_cross": [second],
        "mlp_norm": [("out", "mlp_norm"), ("in", mlp) if before else ("out", "attn.o:whole")],
        "mlp.act": [("in", "mlp.down")],
        "mlp_out": [("out", "mlp.router:around" if experts else "mlp.down")],
        "resid_post": [("out", "attn.o:whole")],
    }
    for at in ("attn", "cross"):
        rows |= {f"{at}.z": [("in", f"{at}.o")], f"{at}_out": [("out", f"{at}.o")]}
        rows[f"{at}.pattern"] = [("weights", f"{at}.q:inside")]
    return rows | _attended(spec)


def _attended(spec: Spec) -> dict[str, list[tuple[str, str]]]:
    """What the attention is given: q and k as the last step before it leaves them."""
    a = spec.attention
    steps = ["norm"] * (a.qk_norm != "none")
    steps.insert(len(steps) if a.qk_norm_place == "before" else 0, "rot" if isinstance(spec.position, Rope) else "")
    last = [step for step in steps if step][-1:]
    return {
        f"attn.{letter}_{step}": [(side, "attn.q:inside")]
        for step in last
        for letter, side in (("q", "query"), ("k", "key"))
    }


@dataclass
class Reference(Run):
    """A run by the transformers library. Takes what a Run takes, of a checkpoint's directory.

    Raises GptcliError where there is no directory or no library, for texts of different lengths, and for a directory
    that the library doesn't read.
    """

    def __post_init__(self):
        super().__post_init__()
        if find_spec("transformers") is None:
            raise GptcliError("--reference transformers: it is not installed", "pip install transformers", "reference")
        directory = self.model.directory
        whole = self.model.checkpoint is not None and self.model.checkpoint.path.is_dir() and self.model.gguf is None
        if not whole or not (directory / "config.json").is_file():
            said = f"--reference transformers: {self.model.shown} is no directory with weights and a config.json"
            raise GptcliError(said, "it runs what its library can open", "reference")
        if any(len({len(text) for text in texts}) > 1 for texts in (self.ids, self.source or [])):
            raise GptcliError("--reference transformers: texts of different lengths", "give one at a time", "reference")

    @cached_property
    def library(self) -> "Module":
        """The library's model, its attention written out, in the type and on the device of the run."""
        import transformers

        options = {"attn_implementation": "eager", "dtype": self.dtype, "output_loading_info": True}
        options |= {"experts_implementation": "eager"} if self._has_experts() else {}
        faults = []
        for kind in self._classes():
            try:
                with self.typed(), _quiet(transformers.logging):
                    model, found = getattr(transformers, kind).from_pretrained(
                        self.model.directory, local_files_only=True, trust_remote_code=False, **options
                    )
                break
            except Exception as error:  # the library fails in many ways
                faults.append(error)
        else:
            said = (str(faults[0]).splitlines() or [type(faults[0]).__name__])[0][:80]
            raise GptcliError(f"--reference transformers: it refuses {self.model.directory} ({said})", "", "reference")
        if lacking := sorted(found["missing_keys"]):
            said = f"--reference transformers: it misses {lacking[0]} in {self.model.directory}"
            raise GptcliError(said, "compare with a directory that the library wrote", "reference")
        return model.eval().to(self.device)

    def _classes(self) -> list[str]:
        """The library's class for a model with our head; of one that sees both ways, the likelier first."""
        spec = self.model.spec
        if spec.lm_head is None:
            return ["AutoModel"]
        if spec.encoder is not None:
            return ["AutoModelForSeq2SeqLM"]
        return ["AutoModelForMaskedLM"] * self.model.fills + ["AutoModelForCausalLM"]

    def _has_experts(self) -> bool:
        spec = self.model.spec
        return any(isinstance(spec.at(i).mlp, Experts) for i in range(spec.n_layers))

    def typed(self) -> AbstractContextManager[None]:
        """In float64 without the library's casts."""
        from gptcli.model.lifted import in_float64

        return in_float64() if str(self.dtype) == "torch.float64" else nullcontext()

    @cached_property
    def taps(self) -> dict[str, Tap]:
        """Where each activation that the library has is read, in order of birth; all but the logits, which it gives."""
        found = {}
        for path, _, shape in size_of(self).points():
            place = Place.of(path)
            spec = place.spec(self.model.spec)
            rows = (_stack_rows if place.layer is None else _layer_rows)(spec)
            taps = (self._tap(side, stem, place) for side, stem in rows.get(place.name, [("out", place.name)]))
            tap = next(filter(None, taps), None)
            # Of a norm in each head nothing tells whether heads or positions stand first, if they are as many.
            blurred = tap and tap.side == "out" and place.name.endswith(("q_norm", "k_norm")) and shape[1] == shape[2]
            if tap is not None and not blurred:
                found[path] = tap
        return found

    def _tap(self, side: str, stem: str, place: Place) -> Tap | None:
        stem, _, where = stem.partition(":")
        if stem == "layers.0":
            place, stem = place._replace(layer=0), "attn.o"
        at = f"{place.stack}." * bool(place.stack) + ("" if place.layer is None else f"layers.{place.layer}.")
        bound = self.model.checkpoint.binding.bounds.get(f"{at}{stem}.weight")
        if bound is None:
            return None
        module = self._present(module_of(bound.stored, where or "own", place.layer))
        if module is None or (side in ("query", "key") and not self._tells(module)):
            return None
        return Tap(module, side, bound if side == "out" and not where and bound.parts > 1 else None)

    def _present(self, path: str) -> str | None:
        """What the library calls a module of the file; None where it has none."""
        prefix = self.library.base_model_prefix + "."
        ways = [path, *(path.replace(old, new) for old, new in MOVED), prefix + path, path.removeprefix(prefix)]
        return next((way for way in ways if way in self.modules), None)

    @cached_property
    def modules(self) -> "dict[str, Module]":
        return dict(self.library.named_modules())

    def _tells(self, module: str) -> bool:
        """Is its attention, written out, a function that can be listened to?"""
        return hasattr(sys.modules[type(self.modules[module]).__module__], EAGER)

    def holds(self, path: str) -> bool:
        return path in self.taps or (path == "logits" and self.model.spec.lm_head is not None)

    def exact(self) -> "Reference":
        """The same in float64, the library's own casts to float32 lifted. It holds a whole copy of its weights."""
        return replace(self, dtype_name="float64", device_name="cpu" if self.device.type == "mps" else self.device_name)

    def forward(self, rows: Literal["last", "all"], probe: Silent = SILENT) -> "Tensor":
        """Logits [B, T, V], or [B, 1, V] for rows=last; an empty tensor without a head. Shows the probe what it has."""
        import torch

        if self.edits is not None:
            raise GptcliError("--reference transformers: edits are for a model of ours", "leave them out", "reference")
        births = Births(self, probe)
        ids = torch.tensor(self.ids, device=self.device)
        told = {"input_ids": ids, "use_cache": False}
        if self.source is not None:
            told |= {"input_ids": torch.tensor(self.source, device=self.device), "decoder_input_ids": ids}
        if self.segments is not None:
            told["token_type_ids"] = torch.tensor(self.segments, device=self.device)
        with torch.inference_mode(), births.listening():
            given = self.library(**told)
            if headed := self.model.spec.lm_head is not None:
                births.note("logits", given.logits)
        births.finish()
        if not headed:
            return torch.empty(0)
        return given.logits[:, -1:] if rows == "last" else given.logits

    def facts(self) -> ModelFacts:
        import transformers

        facts = super().facts()
        return replace(facts, source=f"{facts.source}, run by transformers {transformers.__version__}")


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """The library's warnings and bars kept from the terminal meanwhile."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
