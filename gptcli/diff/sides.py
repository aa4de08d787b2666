"""What `diff A B` names: of which kind a side is, and two of them as runs of the same text.

A name says its kind: a file whose metadata is a trace's, arrays without anything that describes a model, else a model.
Where it can't, or means another, the kind stands before it: `model:x`, `trace:x`, `dumps:x`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from gptcli.errors import GptcliError
from gptcli.run import Run
from gptcli.source import Model

if TYPE_CHECKING:
    from gptcli.report.capture import Replay

Kind = Literal["model", "trace", "dumps"]
ARRAYS = (".npy", ".npz")
TENSORS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


@dataclass
class Side:
    """A side as it was named. model: which it is, or is the dumps of; replay: the trace, read."""

    kind: Kind
    name: str
    model: Model | None = None
    replay: "Replay | None" = None

    @property
    def path(self) -> Path:
        return Path(self.name)


def open_side(said: str, opened: Callable[[str], Model]) -> Side:
    """The side that a person names; opened: opens a model by its name. Raises GptcliError."""
    from gptcli.report.capture import Replay

    word, colon, rest = said.partition(":")
    kind, name = (word, rest) if colon and word in get_args(Kind) else (kind_of(said), said)
    try:
        if kind == "trace":
            replay = Replay(Path(name))
            return Side(kind, name, replay.model, replay)
        return Side(kind, name, opened(name) if kind == "model" else None)
    except GptcliError as error:  # no option named it
        message = error.message.removeprefix("--from ").removeprefix("-m ")
        hint = error.hint.replace("describe it by -c CONFIG", "write one there, or name a directory that has it")
        raise GptcliError(message, hint, error.code) from None


@dataclass
class Request:
    """How two sides are run. texts: Run's own arguments for what a model reads, as its tokenizer has it; given: a text
    or ids were given, and not left to the model's prompt; dtypes, of A and B, and device as Run has them; map: names of
    dumps; reference: B is A's directory, run by transformers.
    """

    texts: Callable[[Model], dict[str, Any]]
    given: bool = True
    dtypes: tuple[str, str] = ("auto", "auto")
    device: str = "auto"
    threads: int | None = None
    map: Path | None = None
    reference: bool = False

    def run(self, model: Model, letter: str, texts: dict[str, Any], kind: type[Run] = Run) -> Run:
        return kind(
            model, **texts, dtype_name=self.dtypes["AB".index(letter)], device_name=self.device, threads=self.threads
        )


def pair(a: Side, b: Side, request: Request) -> tuple[Run, Run, list[str]]:
    """Two sides that read the same text, each by its own tokenizer; what a file holds was read already, and decides.

    With them, what a person should know of how they came to it. Raises GptcliError.
    """
    traces = [side.replay for side in (a, b) if side.replay is not None]
    if traces and request.given:
        raise GptcliError(
            f"a text beside the trace {traces[0].file.path}", "it says what was read: leave the text out", "side"
        )
    if a.kind == b.kind == "dumps":
        raise GptcliError("two sides of dumps", "one side must be a model or a trace, which says what they are", "side")
    if request.map is not None and "dumps" not in (a.kind, b.kind):
        raise GptcliError(f"--map {request.map}: neither side is dumps", "leave it out", "side")
    if request.reference:
        from gptcli.diff.reference import Reference

        if a.kind != "model":
            raise GptcliError(f"--reference transformers beside {a.name}", "it runs a checkpoint's directory", "side")

        texts = request.texts(a.model)
        return request.run(a.model, "A", texts), request.run(a.model, "B", texts, Reference), []
    if a.kind == b.kind == "model":
        return _two_models(a.model, b.model, request)
    runs: dict[str, Run] = {letter: side.replay for letter, side in (("A", a), ("B", b)) if side.replay is not None}
    named = {"A": a, "B": b}
    model = next((side.model for side in (a, b) if side.kind == "model"), None) or traces[0].model
    texts = _texts(traces[0]) if traces else request.texts(model) if request.given else {}
    for letter, side in named.items():
        if side.kind == "dumps":
            runs[letter] = _dumps(side, model, texts, request)
            texts = texts or _texts(runs[letter])
    for letter, side in named.items():
        if side.kind == "model":
            runs[letter] = request.run(model, letter, texts)
    _type_of_the_file(runs, request)
    _check(runs)
    return runs["A"], runs["B"], []


def _dumps(side: Side, model: Model, texts: dict[str, Any], request: Request) -> Run:
    """Arrays may say themselves what was read; else it is what the model reads where nothing was given."""
    from gptcli.diff.dumps import Dumps

    try:
        return Dumps(side.path, model, texts.get("ids"), texts.get("source"), request.map)
    except GptcliError as error:
        if texts or error.code != "ids":
            raise
        lacking = error
    try:
        texts = request.texts(model)
    except GptcliError:
        raise lacking from None
    return Dumps(side.path, model, texts["ids"], texts["source"], request.map)


def _two_models(a: Model, b: Model, request: Request) -> tuple[Run, Run, list[str]]:
    texts, told = {}, []
    for letter, model in (("A", a), ("B", b)):
        try:
            if letter == "A" or request.given:
                texts[letter] = request.texts(model)
        except GptcliError as error:
            if error.code != "tokenizer":
                raise
            lacking = error
    if not texts:
        raise lacking
    for letter, other in (("A", "B"), ("B", "A")):
        if letter not in texts:
            texts[letter] = texts[other]
            told += [f"{letter} has no tokenizer, and reads {other}'s ids"] if request.given else []
    runs = {letter: request.run(model, letter, texts[letter]) for letter, model in (("A", a), ("B", b))}
    _check(runs)
    return runs["A"], runs["B"], told


def _check(runs: dict[str, Run]) -> None:
    """Refuses an id that a side's vocabulary lacks, and says which side's."""
    for letter, run in runs.items():
        of_source = [] if run.model.spec.encoder is None else [("encoder's ", run.source, run.model.spec.encoder)]
        for whose, texts, spec in (("", run.ids, run.model.spec), *of_source):
            ids = sorted({id_ for text in texts or () for id_ in text})
            if ids and (ids[0] < 0 or ids[-1] >= spec.vocab_size):
                said = f"id {ids[0] if ids[0] < 0 else ids[-1]} is outside {letter}'s {whose}vocabulary"
                raise GptcliError(said, f"ids run from 0 to {spec.vocab_size - 1}", "vocabulary")


def _texts(run: Run) -> dict[str, Any]:
    """What a run has read, for another."""
    return {"ids": run.ids, "added": run.added, "source": run.source, "segments": run.segments}


def _type_of_the_file(runs: dict[str, Run], request: Request) -> None:
    """A model beside a file runs in the file's type, where no other was asked for."""
    for letter, other in (("A", "B"), ("B", "A")):
        if type(runs[letter]) is Run and request.dtypes["AB".index(letter)] == "auto":
            runs[letter].dtype_name = str(runs[other].dtype).removeprefix("torch.")


def kind_of(said: str) -> Kind:
    """What a path holds; a name that is no path is a model's. Raises GptcliError where that can't be told."""
    path = Path(said)
    if path.is_dir():
        return _kind_of_directory(path)
    if not path.is_file():
        return "model"
    if path.suffix == ".safetensors" and _is_trace(path):
        return "trace"
    arrays = path.suffix in ARRAYS or (path.suffix in TENSORS and not _holds_weights(path))
    return "dumps" if arrays else "model"


def _kind_of_directory(path: Path) -> Kind:
    files = [file for file in path.iterdir() if file.is_file()]
    described = any(file.suffix == ".gguf" or file.name in ("config.json", "config.yaml") for file in files)
    arrays = any(file.suffix in (*ARRAYS, *TENSORS) for file in files)
    weights = any(file.suffix in TENSORS and _holds_weights(file) for file in files)
    if described and arrays and not weights and not any(file.suffix == ".gguf" for file in files):
        said = f"{path}: arrays beside a model's description, and no weights"
        raise GptcliError(said, f"write model:{path} or dumps:{path}", "side")
    return "dumps" if arrays and not described and not weights else "model"


def _is_trace(path: Path) -> bool:
    from gptcli.checkpoint.safetensors import read
    from gptcli.report.capture import SCHEMA

    return read(path).notes.get("schema") == SCHEMA


def _holds_weights(path: Path) -> bool:
    """Is a tensor of the file called a weight, as one of every model's is, and no activation?"""
    if path.suffix == ".safetensors":
        from gptcli.checkpoint.safetensors import read_header

        names = read_header(path)
    else:
        from gptcli.checkpoint.pickles import listed

        names = listed(path).tensors
    return any(name.endswith("weight") for name in names)
