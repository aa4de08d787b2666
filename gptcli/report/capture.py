"""A trace as a file: activations written as they are born, and shown again as if the model had run.

The file is a .safetensors one: activations under their names, the batch axis kept, and in its metadata (texts, all of
them) what they are:

schema  gptcli.activations/1        gptcli  the version that wrote it
model   name, source, type and device of the run (JSON)     spec  the architecture (JSON)
digest  of the weights              axes    letters of every activation (JSON)
ids, source_ids  of each text, and of each source (JSON)    tokens, source  the same with their texts (JSON)
segments  each token's part, or null (JSON)                 edited  what was changed on the way, and where (JSON)

Where distances tell positions, the table of their biases stands among the activations under its weight's name: a walk
needs it to tell the bias of each key.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gptcli import __version__, cost
from gptcli.checkpoint.safetensors import FLOATS, read_header
from gptcli.count import ITEM_BYTES
from gptcli.errors import GptcliError
from gptcli.names import Names
from gptcli.report import Finding, ModelFacts, RunReport
from gptcli.report.edits import At, Edited
from gptcli.report.proof import findings as run_findings
from gptcli.report.view import Attending, at_head, heads_of, layer_path, layers_of
from gptcli.run import Run
from gptcli.source import Model
from gptcli.spec import Relative, read_spec, to_dict
from gptcli.tokens import Token
from gptcli.trace import BESIDE, SILENT, Recorder, Silent, points

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.weights import Weights

SCHEMA = "gptcli.activations/1"
SAMPLE = 16  # numbers of each weight that the digest reads


@dataclass(frozen=True, kw_only=True)
class Captured:
    """An activation in the file. name: what the asked vocabulary calls it, where it does; bytes: of its numbers."""

    path: str
    name: str | None
    axes: str
    shape: list[int]
    dtype: str
    bytes: int


@dataclass(kw_only=True)
class CaptureReport(RunReport):
    """held_bytes: what writing held at most beside the run itself; written_bytes: of the whole file."""

    schema = "gptcli.capture/1"
    file: str
    digest: str
    held_bytes: int
    written_bytes: int
    activations: list[Captured]


def size_of(run: Run) -> cost.Size:
    """The sizes of a run, to count what it costs."""
    dtype = str(run.dtype).removeprefix("torch.")
    return cost.Size(run.model.spec, len(run.ids), run.width, run.source_width, dtype)


def digest(run: Run) -> str:
    """What tells these weights from others: SHA-256 over the name, the shape and some evenly spaced numbers of each, in
    the type of the run; of random weights, over names, shapes and the seed.
    """
    import numpy  # whose unravel_index is that of torch without the 500 modules that torch's brings in

    found = hashlib.sha256()
    for param in run.model.layout:
        found.update(f"{param.name} {list(param.shape)} {param.tied_to}\n".encode())
        if run.model.kind == "random" or param.tied_to:
            continue
        tensor = run.weights[param.name]
        at = numpy.linspace(0, tensor.numel() - 1, min(SAMPLE, tensor.numel())).astype("int64")
        numbers = tensor[numpy.unravel_index(at, tensor.shape)].cpu().double()
        found.update(numbers.numpy().astype("<f8").tobytes())
    if run.model.kind == "random":
        found.update(f"seed {run.model.seed} {run.dtype}".encode())
    return f"sha256:{found.hexdigest()}"


def notes_of(run: Run, paths: list[str]) -> dict[str, str]:
    """The metadata of a file of these activations: texts, JSON where they are more than a word."""
    axes = dict(points(run.model.spec))
    told = {
        "model": asdict(run.facts()),
        "spec": to_dict(run.model.spec),
        "axes": {path: axes[path] for path in paths},
        "tokens": [[asdict(token) for token in text] for text in run.tokens()],
        "source": [[asdict(token) for token in text] for text in run.source_tokens()],
        "ids": run.ids,
        "source_ids": run.source or [],
        "segments": run.segments,
        "edited": [] if run.edits is None else run.edits.made,
    }
    plain = {"schema": SCHEMA, "gptcli": __version__, "digest": digest(run)}
    return plain | {name: json.dumps(value, allow_nan=False) for name, value in told.items()}


def stream(run: Run, paths: list[str], draft: Path) -> list[Finding]:
    """Runs the model once and writes these activations to the file, each when it is born; what the run found."""
    from gptcli.model.stream import Stream, header

    wanted, size = set(paths), size_of(run)
    tensors = {path: (size.dtype_of(path), shape) for path, _, shape in size.points() if path in wanted}
    tables = dict(_bias_tables(run))
    tensors |= {name: (str(table.dtype).removeprefix("torch."), tuple(table.shape)) for name, table in tables.items()}
    begin, slots = header(tensors, notes_of(run, [path for path in tensors if path in wanted]))
    with draft.open("wb") as file:
        file.write(begin)
        probe = Stream(file, slots)
        for name, table in tables.items():
            probe.write(name, table)
        x = run.forward("all", probe, head=run.needs_head(wanted.__contains__))
        probe.check()
    return run_findings(run, (), x)


def array(run: Run, path: str) -> tuple[Any, list[Finding]]:
    """One activation as an array of numpy, which knows no bfloat16: float32 stands for it; and what the run found."""
    import torch

    recorder = Recorder(path)
    final = run.forward("all", recorder, head=run.needs_head(recorder.wants))
    x = recorder.kept[path].cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).contiguous().numpy(), run_findings(run, (), final)


def _bias_tables(run: Run) -> Iterator[tuple[str, "Tensor"]]:
    for stack, at in ((run.model.spec.encoder, "encoder."), (run.model.spec, "")):
        if stack is not None and isinstance(stack.position, Relative):
            yield f"{at}rel_bias.weight", run.weights[f"{at}rel_bias.weight"]


def chosen(run: Run, names: Names, at: list[str], layers: list[int], attending: Attending) -> list[str]:
    """The activations that go into a file: those that --at names, else everything of the layers that are looked at.

    Raises GptcliError for a name that means none.
    """
    found = {path for wanted in at for path in _named(run, names, wanted)}
    layered = () if at else tuple(f"{layer_path(attending, layer)}." for layer in layers)
    return [path for path, _ in points(run.model.spec) if path in found or path.startswith(layered)]


def _named(run: Run, names: Names, wanted: str) -> list[str]:
    """`L0H1` is the layer that it stands in: a file holds all of an activation's heads."""
    if (place := at_head(wanted)) is None:
        return names.select("--at", wanted)
    [layer] = layers_of(f"L{place[0]}", run.model.spec)
    heads_of(f"H{place[1]}", run.model.spec)
    return names.select("--at", f"layers.{layer}.*")


def capture_report(
    run: Run, paths: list[str], names: Names, file: Path, findings: Sequence[Finding] = ()
) -> CaptureReport:
    """What was written to a file. findings: what the run that was written found."""
    size, found = size_of(run), []
    for path, axes, shape in size.points():
        if path in paths:
            name, dtype = names.of(path), size.dtype_of(path)
            held = prod(shape) * ITEM_BYTES[dtype]
            found.append(Captured(path=path, name=name, axes=axes, shape=list(shape), dtype=dtype, bytes=held))
    return CaptureReport(
        **run.told(),
        file=str(file),
        digest=digest(run),
        held_bytes=cost.arrayed(size, paths[0]) if file.suffix == ".npy" else cost.streamed(size, paths.__contains__),
        written_bytes=file.stat().st_size,
        activations=found,
        findings=list(findings),
    )


class Tensors:
    """The tensors of a .safetensors or .npy file by name, each read when it is asked for.

    infos: what its header says of each; notes: its metadata; unnamed: it is one array without a name, which any name
    gives. Raises GptcliError for what is no such file; said: the option, for its message.
    """

    def __init__(self, path: Path, said: str):
        if path.suffix not in (".safetensors", ".npy"):
            raise GptcliError(f"{said}: {path} is no .safetensors or .npy file", "give one", "file")
        if not path.exists():
            raise GptcliError(f"{said}: {path}: no such file", "`gptcli trace -o FILE` writes one", "file")
        self.path, self.said, self.unnamed = path, said, path.suffix == ".npy"
        self.infos, self.notes = {}, {}
        if not self.unnamed:
            from gptcli.model.load import opened

            try:
                self.infos, self.file = read_header(path), opened(path)
            except GptcliError as error:
                raise GptcliError(f"{said}: {error.message}", error.hint, error.code) from None
            self.notes = self.file.metadata() or {}

    def __contains__(self, name: str) -> bool:
        return name in self.infos

    def __getitem__(self, name: str) -> "Tensor":
        if self.unnamed:
            return self._array()
        if self.infos[name].dtype not in FLOATS:
            dtype = self.infos[name].dtype
            raise GptcliError(f"{self.said}: {name} is {dtype}, not numbers that a model computes with")
        return self.file.get_tensor(name)

    def _array(self) -> "Tensor":
        import numpy
        import torch

        try:
            found = numpy.load(self.path, mmap_mode="r", allow_pickle=False)
            if found.dtype.kind not in "fiu":
                raise ValueError(f"its numbers are {found.dtype}")
            return torch.from_numpy(numpy.array(found))
        except (OSError, ValueError, EOFError, TypeError) as error:
            with_what = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise GptcliError(f"{self.said}: {self.path}: {with_what}", "give a .npy file of numbers", "file") from None

    def shown(self) -> str:
        """What it holds, in a few words."""
        names = list(self.infos)
        return f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}" if names else "nothing"

    def of_others(self, run: Run) -> bool:
        """Does it hold a trace of other weights than the run's? A digest is of the type that a run had."""
        alike = f'"dtype": "{str(run.dtype).removeprefix("torch.")}"' in self.notes.get("model", "")
        return "digest" in self.notes and alike and self.notes["digest"] != digest(run)


def on_the_side(held: "dict[str, Tensor]", probe: Silent) -> None:
    """Shows a probe what is computed on the side in a run (BESIDE), in the parts that it asks for."""
    wanted = next(filter(None, map(probe.selection, BESIDE)), None)
    if wanted is None or not held:
        return
    for part in wanted.parts(*next(iter(held.values())).shape[1:3]):
        for name, x in held.items():
            probe(name, x[:, part.heads, part.queries])


class Replay(Run):
    """A run that comes out of a trace's file: activations pass a probe as they passed when they were written.

    Raises GptcliError for a file that is none, or is not whole, or contradicts itself.
    """

    replayed = True

    def __init__(self, path: Path):
        self.said = f"--from {path}"
        self.file = Tensors(path, self.said)
        notes = self.file.notes
        if notes.get("schema") != SCHEMA:
            why = f"no trace's file (its metadata names no {SCHEMA})"
            raise GptcliError(f"{self.said}: {why}", "`gptcli trace -o FILE` writes one", "file")
        try:
            self._facts = _facts(json.loads(notes["model"]), path)
            spec = read_spec(json.loads(notes["spec"]))
            texts, source = (_texts(json.loads(notes[name])) for name in ("tokens", "source"))
            segments, made = (json.loads(notes[name]) for name in ("segments", "edited"))
            model = Model(spec=spec, source=self._facts.source)
            ids, read = (json.loads(notes[name]) for name in ("ids", "source_ids"))
            for told, numbers in ((texts, ids), (source, read)):
                if [[token.id for token in text] for text in told] != numbers:
                    raise ValueError("the tokens are not those of the ids")
            super().__init__(model, ids, self._facts.dtype, "cpu", source=read or None, segments=segments)
            self._tokens, self._source = texts, source
            self.edits = Edited([(said, _places(told)) for said, told in made]) if made else None
            self._check()
        except GptcliError as error:
            raise GptcliError(f"{self.said}: its metadata: {error.message}", "write it again", "file") from None
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'empty'}"
            raise GptcliError(f"{self.said}: its metadata can't be read ({why})", "write it again", "file") from None

    def _check(self) -> None:
        """Every tensor is an activation of the architecture, in the shape that the tokens give it."""
        size = size_of(self)
        known = {path: shape for path, _, shape in size.points()}
        for name, info in self.file.infos.items():
            if name.endswith("rel_bias.weight"):
                continue
            if name not in known:
                raise ValueError(f"{name} is no activation of that architecture")
            if info.shape != known[name]:
                raise ValueError(f"{name} is {list(info.shape)}, and its tokens make it {list(known[name])}")
            if FLOATS.get(info.dtype) != size.dtype_of(name):
                raise ValueError(f"{name} is {info.dtype} in a run of {size.dtype}")

    @cached_property
    def weights(self) -> "Weights":
        """What a walk reads of them: the tables of biases."""
        from gptcli.model.weights import Weights

        return Weights({name: self.file[name] for name in self.file.infos if name.endswith("rel_bias.weight")})

    def holds(self, path: str) -> bool:
        return path in self.file

    def whole_layers(self, stack: str) -> list[int]:
        """The layers (from 0) of a stack (`encoder.` or empty) of which the file holds everything."""
        spec = self.model.spec.encoder if stack else self.model.spec
        paths = [path for path, _ in points(self.model.spec)]
        mine = {i: [path for path in paths if path.startswith(f"{stack}layers.{i}.")] for i in range(spec.n_layers)}
        return [i for i, held in mine.items() if all(map(self.holds, held))]

    def forward(self, rows: Literal["last", "all"], probe: Silent = SILENT, head: bool = True) -> "Tensor":
        """The logits [B, T, V] that the file holds; an empty tensor where it holds none.

        Raises GptcliError for an activation that a recorder wants and the file lacks.
        """
        import torch

        anything = not isinstance(probe, Recorder)  # nobody knows what such a probe looks at
        lacking = [path for path, _ in points(self.model.spec) if not self.holds(path)]
        lacking = [] if anything else [path for path in lacking if probe.wants(path)]
        if lacking:
            raise GptcliError(f"{self.said}: it holds no {lacking[0]}", "--list says what it holds", "path")
        for path, _ in points(self.model.spec):
            scope, _, name = path.rpartition(".")
            here = probe.at(scope) if scope else probe
            if name == BESIDE[0]:
                on_the_side({n: self.file[f"{scope}.{n}"] for n in BESIDE if self.holds(f"{scope}.{n}")}, here)
            elif name not in BESIDE and self.holds(path) and (anything or here.wants(name)):
                here(name, self.file[path])
        return self.file["logits"] if self.holds("logits") else torch.empty(0)

    def exact(self) -> None:
        """What a file holds can't be run again."""

    def tokens(self) -> list[list[Token]]:
        return self._tokens

    def source_tokens(self) -> list[list[Token]]:
        return self._source

    def facts(self) -> ModelFacts:
        return self._facts


def _facts(told: dict[str, Any], path: Path) -> ModelFacts:
    """What the file says of the model, in a title that says where it comes from."""
    known = {field.name for field in fields(ModelFacts)}
    facts = ModelFacts(**{name: value for name, value in told.items() if name in known})
    for name, kind in (("name", str), ("source", str), ("parameters", int), ("dtype", str), ("edits", list)):
        if not isinstance(getattr(facts, name), kind):
            raise TypeError(f"model.{name} is not {kind.__name__}")
    told = {name: getattr(facts, name) for name in known}
    return ModelFacts(**told | {"source": f"from the file {path.name}, traced from {facts.source}"})


def _places(told: dict[str, list[int | None]] | list[str]) -> dict[str, At]:
    """Where an edit touches each activation; a file that only names them means all of them."""
    return {path: tuple(told[path]) if isinstance(told, dict) else () for path in told}


def _texts(told: list[list[dict]]) -> list[list[Token]]:
    texts = [[Token(**token) for token in text] for text in told]
    for token in (token for text in texts for token in text):
        if type(token.id) is not int or not isinstance(token.token, str):
            raise TypeError("a token is no id with a text")
    return texts
