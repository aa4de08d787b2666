"""One request to one model: ids in, logits out. What forward, topk, score and trace share."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gptcli import count
from gptcli.errors import GptcliError
from gptcli.report import ModelFacts
from gptcli.shard import local, whole
from gptcli.source import Model, Streaming
from gptcli.spec import Spec
from gptcli.tokens import OWN_RULE, Encoded, Rule, Token
from gptcli.trace import SILENT, Both, Silent, points

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gptcli.model.forward import Inputs
    from gptcli.model.parallel import Group
    from gptcli.model.weights import Rows, Weights
    from gptcli.report.edits import Edits
    from gptcli.tokens import Tokenizer

LOGITS_AT_ONCE = 1 << 24  # numbers: 64 MiB in float32


@dataclass
class Run:
    """A model with the ids to feed it, one list a text. dtype, device and stream as the options name them.

    group: the ranks that run it together, each with its share of the weights; added: which ids the tokenizer's rule put
    there; source: the texts that an encoder reads, with their own marks; segments: which part of its text each id
    belongs to; once: no second pass will read the weights, and where that is left to us (stream `auto`) none stay;
    edits: what is changed on the way; seconds: what the latest forward pass took, the least of `repeat`.
    """

    model: Model
    ids: list[list[int]]
    dtype_name: str = "auto"
    device_name: str = "auto"
    threads: int | None = None
    stream: Streaming = "auto"
    repeat: int = 1
    group: "Group | None" = None
    added: list[list[bool]] | None = None
    source: list[list[int]] | None = None
    source_added: list[list[bool]] | None = None
    segments: list[list[int]] | None = None
    once: bool = False
    edits: "Edits | None" = field(default=None, init=False)
    replayed: ClassVar[bool] = False  # it comes out of a file
    seconds: float = field(default=0.0, init=False)

    def __post_init__(self):
        if not self.ids or not all(self.ids) or not all(self.source or [[0]]):
            raise GptcliError("an empty text holds no token to run", "give a text of at least one token", "empty")

    @property
    def width(self) -> int:
        """T: positions of the longest text, to which the others are padded on the left."""
        return max(map(len, self.ids))

    @property
    def source_width(self) -> int:
        """S: positions of the longest source text; 0 where there is none."""
        return max(map(len, self.source)) if self.source else 0

    @cached_property
    def device(self) -> "torch.device":
        import torch

        from gptcli.model.device import choose_device

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return choose_device(self.device_name)

    @cached_property
    def dtype(self) -> "torch.dtype":
        import torch

        name = count.dtype_name(self.dtype_name, self.model.stored_dtype)
        if name == "float64" and self.device.type == "mps":
            raise GptcliError("--dtype float64: mps has no such type", "--device cpu has", "dtype")
        return getattr(torch, name)

    @cached_property
    def weights(self) -> "Weights":
        if self.group is None:
            passing = self.once and self.repeat == 1 and self.edits is None and self.device.type == "cpu"
            stream = "on" if passing and self.stream == "auto" else self.stream
            return self.model.weights(self.dtype, self.device, stream)
        from gptcli.model.parallel import shared

        return shared(self.model.weights(self.dtype, self.device, "on"), self.model.spec, self.group)

    @property
    def spec(self) -> Spec:
        """The architecture as this process computes it."""
        return self.model.spec if self.group is None else local(self.model.spec, self.group.ranks)

    def inputs(self, rows: Literal["last", "all"]) -> "Inputs":
        """The ids [B, T], padded on the left where texts differ in length, and the source's [B, S]."""
        from gptcli.model.forward import Inputs

        ids, mask = self._padded(self.ids)
        source = None if self.source is None else Inputs(*self._padded(self.source))
        segments = None if self.segments is None else self._padded(self.segments)[0]
        return Inputs(ids, mask=mask, source=source, segments=segments, rows=rows)

    def _padded(self, texts: list[list[int]]) -> "tuple[Tensor, Tensor | None]":
        """One number a token, zeros on the left of shorter texts, and where tokens are; None where all are."""
        import torch

        width = max(map(len, texts))
        numbers = torch.tensor([[0] * (width - len(text)) + text for text in texts], device=self.device)
        if all(len(text) == width for text in texts):
            return numbers, None
        kept = [[False] * (width - len(text)) + [True] * len(text) for text in texts]
        return numbers, torch.tensor(kept, device=self.device)

    def forward(
        self, rows: Literal["last", "all"], probe: Silent = SILENT, head: bool = True, edited: bool = True
    ) -> "Tensor":
        """Logits [B, T, V], or [B, 1, V] for rows=last; without the head, final vectors [B, T, C].

        edited: with the edits, if there are any. Raises GptcliError for ids that the model can't take, and for an edit
        that changes nothing.
        """
        import torch

        from gptcli.model.forward import check, forward

        edits = self.edits if edited else None
        last = rows == "last" and edits is not None  # edits count positions from the first
        with torch.inference_mode():
            inputs, spec = self.inputs("all" if last else rows), self.spec
            check(inputs, spec)
            weights = self.weights
            probe = probe if edits is None else Both(edits.editor, probe)
            spec = spec if head else replace(spec, lm_head=None)
            seconds = []
            before = SILENT if edits is None else edits.editor
            for watching in (*(before,) * (self.repeat - 1), probe):
                begun = time.perf_counter()
                logits = forward(inputs, weights, spec, watching)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                seconds.append(time.perf_counter() - begun)
            self.seconds = min(seconds)
        if edits is not None:
            edits.check()
        return logits[:, -1:] if last else logits

    def logits_in_blocks(self) -> Iterator[tuple[int, "Tensor"]]:
        """Logits of all positions, some at a time: the first one's number, and [B, t, V].

        So a long text under a large vocabulary needs megabytes. Raises GptcliError as forward does.
        """
        import torch

        from gptcli.model.ops import head

        spec, step = self.model.spec, max(1, LOGITS_AT_ONCE // (len(self.ids) * self.model.spec.vocab_size))
        edited = self.edits is not None and self.needs_head(lambda path: False)
        if edited or step >= self.width:
            yield 0, self.forward("all")
            return
        x = self.forward("all", head=False)  # → [B, T, C]
        for first in range(0, self.width, step):
            begun = time.perf_counter()
            with torch.inference_mode():
                logits = head(x[:, first : first + step], self.weights, spec)  # [B, t, C] → [B, t, V]
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds += time.perf_counter() - begun
            yield first, logits

    def exact(self) -> "Run | None":
        """The same request in float64, of the weights as they are stored; None where it can't be run again.

        Each weight is cast when it is read, and not kept. Packed weights are what they are unpacked to in float32.
        """
        import torch

        from gptcli.model.weights import Lazy, Weights

        device = self.device if self.device.type != "mps" else torch.device("cpu")
        wide = self.model.kind == "hand-written" or self.model.stored_dtype == "float64"
        dtype = torch.float64 if wide else torch.float32
        stored = self.weights if self.dtype == dtype else self.model.weights(dtype, self.device)
        kept = stored.tensors.made if stored is not self.weights and isinstance(stored.tensors, Lazy) else {}

        def cast(name: str) -> "Callable[..., Tensor]":
            def make(*rows: "Rows") -> "Tensor":
                tensor = (stored.rows(name, *rows) if rows else stored[name]).to(device, torch.float64)
                kept.clear()
                return tensor

            return make

        found = replace(self, dtype_name="float64", device_name=str(device), repeat=1)
        found.edits = self.edits
        found.weights = Weights(Lazy({name: cast(name) for name in stored.tensors}, stored.tensors), stored.ties)
        return found

    def single(self, what: str) -> None:
        """Raises GptcliError where there are several texts: what was asked for is of one."""
        if len(self.ids) > 1:
            raise GptcliError(f"{len(self.ids)} texts, but {what}", "give one text")

    @property
    def notes(self) -> list[str]:
        """What a person should know of the model, once it has run, and of the edits."""
        ranks = []
        if self.group is not None:
            ranks = [f"{self.group.ranks} ranks, each with its share of the weights"]
            ranks += [f"whole on every rank: {said}" for said in whole(self.model.spec, self.group.ranks)]
        return [*self.model.notes, *ranks, *(self.edits.notes if self.edits else ())]

    def needs_head(self, wants: Callable[[str], bool]) -> bool:
        """Is anything wanted, or edited, that the head makes of the final vectors?"""
        headless = {path for path, _ in points(replace(self.model.spec, lm_head=None))}
        made = [path for path, _ in points(self.model.spec) if path not in headless]
        return any(wants(path) or (self.edits is not None and self.edits.of(path)) for path in made)

    def column(self, text: int, position: int) -> int:
        """Where a text's position stands among the padded ones."""
        return self.width - len(self.ids[text]) + position

    def holds(self, path: str) -> bool:
        """Can this activation be had? Of a run, all that the model has."""
        return True

    @property
    def labels(self) -> "Tokenizer | None":
        """What names the text's ids, if a tokenizer is at hand; beside an encoder, its words may be other ones."""
        labels = self.model.labels
        return labels and labels.target

    def find(self, word: str) -> int:
        """The id that a word means; of a model without a tokenizer, an id itself. Raises GptcliError."""
        try:
            return self.model.tokenizer.target.find(word)
        except GptcliError as error:
            known = error.code == "tokenizer" and re.fullmatch("[0-9]{1,18}", word)
            if not known or int(word) >= self.model.spec.vocab_size:
                raise
        return int(word)

    def masked(self, text: int) -> list[int]:
        """The positions of a text that are to be filled in."""
        mask = self.labels.mask if self.labels else None
        return [i for i, id_ in enumerate(self.ids[text]) if id_ == mask]

    def tokens(self) -> list[list[Token]]:
        """What was fed; the ids that the tokenizer's rule put before the text are marked."""
        return _labelled(self.ids, self.added, self.labels)

    def source_tokens(self) -> list[list[Token]]:
        """What the encoder was fed, where there is one beside the decoder."""
        return _labelled(self.source or [], self.source_added, self.model.labels)

    def told(self) -> dict[str, Any]:
        """What a RunReport begins with."""
        return {"model": self.facts(), "tokens": self.tokens(), "source": self.source_tokens()}

    def facts(self) -> ModelFacts:
        found = self.model.facts(str(self.dtype).removeprefix("torch."), str(self.device))
        return found if self.edits is None else replace(found, edits=self.edits.said)


def decoder_text(model: Model, text: str, rule: Rule = OWN_RULE) -> Encoded:
    """A text that a decoder beside an encoder goes on with: the model's start before it, and no end after it."""
    ids, added = model.tokenizer.target.marked(text, rule)
    while added and added[-1]:
        ids, added = ids[:-1], added[:-1]
    begins = [] if model.start is None or rule.bos is False else [model.start]
    return Encoded([*begins, *ids], [*(True for _ in begins), *added])


def _labelled(texts: list[list[int]], added: list[list[bool]] | None, labels: "Tokenizer | None") -> list[list[Token]]:
    marks = added or [[False] * len(ids) for ids in texts]
    return [[Token.of(id_, labels, mark) for id_, mark in zip(*text)] for text in zip(texts, marks)]


def positions(wanted: str, length: int) -> list[int]:
    """The positions that `--position` means in a text of that length: `all`, or one from 0, or from -1 backwards."""
    if wanted == "all":
        return list(range(length))
    if not re.fullmatch(r"-?[0-9]{1,18}", wanted):
        raise GptcliError(f"--position {wanted}: not a number", "give 0, 1, … or -1 for the last, or all")
    position = int(wanted)
    if not -length <= position < length:
        raise GptcliError(f"--position {wanted}: beyond the text", f"positions run from 0 to {length - 1}")
    return [position % length]
