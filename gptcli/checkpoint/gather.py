"""All that a path holds, and all that is wrong with it: files, tensors, what else a training script put there.

Where loading a model stops at the first fault, this goes on and notes it. Reads headers only.
"""

import re
from collections import Counter
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gptcli.checkpoint import safetensors
from gptcli.checkpoint.files import PICKLES, READERS, UNREAD, Files, indexed, look, read_json, unwrapped
from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.checkpoint.scan import Lay
from gptcli.data import data, mutable
from gptcli.errors import GptcliError

if TYPE_CHECKING:
    from gptcli.checkpoint.gguf import Gguf
    from gptcli.checkpoint.pickles import Pickled

SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")  # model-00001-of-00003.safetensors
STEP = re.compile(r"model_\d+\.pt")  # one step of a training run; the others are not this model
# What trainers keep beside the weights: optimizer, schedule, random numbers, settings.
LEFTOVER = re.compile(
    r"(optimizer|scheduler|scaler|rng_state.*|training_args|trainer_state|optim_\d+.*|.*_optim_states|random_states.*)"
    r"\.(bin|pt|pth|pkl|json|safetensors)"
)
MANY = 0.5  # of a file's tensors: if so many are in the checkpoint too, it is a set of the same weights


class Fault(NamedTuple):
    """Something wrong. code: a stable word; said: what it is; place: the file or the tensor."""

    code: str
    said: str
    place: str


@data
class Held:
    """A file of weights that could be read. form: `safetensors`, or a PyTorch file's `zip`, `legacy`, `torchscript`."""

    path: Path
    form: str
    bytes: int
    tensors: int


@mutable
class Gathered:
    """What is in a directory, or in one file.

    chosen: the files of weights, held: those that could be read. infos: the model's tensors, by their names without
    wrappers. index: its name; absent: shards that it names and that are not there; lost: why tensors are not to be had,
    by their own names: the index names them and no readable file holds them, or their file is too short. beside:
    weights that are not read; leftovers: what a trainer keeps there. metadata: what the safetensors files say of
    themselves, a key with several values once a value. lays: of tensors whose numbers don't lie in order, by their own
    names. pickled: the first PyTorch file, listed; described: the header of a file that describes itself; foreign: what
    torch's weights-only loader would refuse, by file.
    """

    path: Path
    directory: Path
    chosen: tuple[Path, ...] = ()
    held: list[Held] = field(default_factory=list)
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    index: str = ""
    absent: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    metadata: dict[str, list[str]] = field(default_factory=dict)
    lays: dict[str, Lay] = field(default_factory=dict)
    pickled: "Pickled | None" = None
    described: "Gguf | None" = None
    foreign: dict[str, list[str]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def fault(self, code: str, said: str, place: str | Path) -> None:
        self.faults.append(Fault(code, said, str(place)))

    def hold(self, path: Path, form: str, tensors: int) -> None:
        self.held.append(Held(path=path, form=form, bytes=path.stat().st_size, tensors=tensors))

    @property
    def weights(self) -> Path | None:
        """The first file of weights, read or not."""
        return self.held[0].path if self.held else next(iter(self.chosen), None)


def gather(path: Path) -> Gathered:
    """What a path holds. Raises GptcliError where it can't be opened, or is in a format that can't be read."""
    is_directory = path.is_dir()
    found = Gathered(path=path, directory=path if is_directory else path.parent)
    files = _of_directory(found) if is_directory else _of_file(found)
    found.chosen, found.absent = files.weights, list(files.absent)
    infos = _tensors(found, files)
    try:
        found.infos, found.wrappers = unwrapped(infos)
    except GptcliError as error:
        found.fault("duplicate-tensor", error.message, "")
        found.infos = infos
    _look_beside(found, files)
    return found


# Which files


def _of_file(found: Gathered) -> Files:
    path = found.path
    if path.name.endswith(".index.json"):
        return _by_index(found, path)
    if path.name.lower().endswith(UNREAD):
        raise GptcliError(f"{path}: {path.suffix} files can't be read", f"these can: {', '.join(READERS)}", "format")
    if path.suffix in (".yaml", ".yml", ".json"):
        found.fault("no-weights", "a file of settings, without weights", path.name)
        return Files(())
    return Files((path,))


def _of_directory(found: Gathered) -> Files:
    directory = found.path
    names = {entry.name for entry in directory.iterdir()}
    index = next(
        (f"{n}.index.json" for n in ("model.safetensors", "pytorch_model.bin") if f"{n}.index.json" in names), ""
    )
    if index:
        return _by_index(found, directory / index)
    files = look(directory)
    if not files.weights and not files.beside and any(Path(name).suffix == ".gguf" for name in names):
        from gptcli.checkpoint import gguf

        return Files((gguf.find(directory),))
    leftovers = tuple(name for name in files.beside if LEFTOVER.fullmatch(name))
    candidates = [name for name in files.beside if name not in leftovers]
    if files.weights and not LEFTOVER.fullmatch(files.weights[0].name):
        return files
    if len(candidates) == 1:
        return Files((directory / candidates[0],), beside=leftovers)
    sets = {(m[1], m[3], m[4]) for m in map(SHARD.fullmatch, candidates) if m}
    if len(sets) == 1 and all(map(SHARD.fullmatch, candidates)):
        return _without_index(found, candidates, leftovers)
    if candidates:
        shown = ", ".join(candidates[:3]) + " …" * (len(candidates) > 3)
        found.fault("several-files", f"nothing says which weights are meant: {shown}", directory.name)
        return Files((), beside=files.beside)
    unread = sorted(name for name in names if name.lower().endswith(UNREAD))
    if unread:
        raise GptcliError(f"{directory}: {unread[0]} can't be read", f"these can: {', '.join(READERS)}", "format")
    settings = [name for name in ("config.json", "config.yaml", "tokenizer.json") if name in names]
    here = f"{settings[0]} is here, and no weights" if settings else "no weights in this directory"
    found.fault("missing-weights" if settings else "no-weights", here, directory.name)
    return Files((), beside=files.beside)


def _by_index(found: Gathered, index: Path) -> Files:
    found.index = index.name
    try:
        files = indexed(index)
    except GptcliError as error:
        found.fault("index", _without(error.message, found.directory), index.name)
        names = sorted(p.name for p in found.directory.iterdir() if SHARD.fullmatch(p.name) and p.suffix in READERS)
        return Files(tuple(found.directory / name for name in names))
    shards = Counter((files.index or {}).values())
    for name in files.absent:
        of = f"{shards[name]} of {shards.total()} tensors"
        found.fault("missing-shard", f"shard {name} is missing, and with it {of}", name)
    return files


def _without_index(found: Gathered, names: list[str], leftovers: tuple[str, ...]) -> Files:
    """Shards that number themselves, and no index that says which tensor is where."""
    first = SHARD.fullmatch(names[0])
    stem, total, suffix = first[1], int(first[3]), first[4]
    index = f"{stem}{suffix}.index.json"
    found.fault("missing-index", f"{index} is missing, which says what is in each of {total} shards", index)
    wanted = [f"{stem}-{i:05}-of-{total:05}{suffix}" for i in range(1, min(total, 10_000) + 1)]
    absent = tuple(name for name in wanted if name not in names)
    for name in absent:
        found.fault("missing-shard", f"shard {name} is missing", name)
    return Files(tuple(found.directory / name for name in names), None, leftovers, absent)


# What is in them


def _tensors(found: Gathered, files: Files) -> dict[str, TensorInfo]:
    """Every tensor by its own name. A file that can't be read, and files that disagree, are noted."""
    infos: dict[str, TensorInfo] = {}
    index = files.index or {}
    unread = set(files.absent)
    for path in files.weights:
        try:
            tensors = _read(found, path)
        except GptcliError as error:
            if error.code in ("file", "format"):
                raise
            code, said = _told(error, path)
            found.fault(code, said, path.name)
            if not isinstance(error, safetensors.CutShort):
                unread.add(path.name)
                continue
            tensors = _cut_short(found, path, error)
        for name, info in tensors.items():
            if name in infos:
                _twice(found, name, infos, info, index)
            else:
                infos[name] = info
    for name, shard in index.items():
        if shard in unread:
            found.lost[name] = f"lost with {shard}"
        elif name not in infos:
            found.lost[name] = f"not in {shard}, where the index puts it"
        elif infos[name].file.name != shard:
            said = f"tensor {name!r} is in {infos[name].file.name}, and the index puts it in {shard}"
            found.fault("index-mismatch", said, name)
    for name in infos if index else ():
        if name not in index:
            found.fault("index-mismatch", f"tensor {name!r} of {infos[name].file.name} is not in the index", name)
    return infos


def _twice(found: Gathered, name: str, infos: dict[str, TensorInfo], info: TensorInfo, index: dict[str, str]) -> None:
    first = infos[name].file.name
    chosen = f": the index means {index[name]}" if name in index else ""
    found.fault("duplicate-tensor", f"tensor {name!r} is in {first} and in {info.file.name}{chosen}", name)
    if index.get(name) == info.file.name:
        infos[name] = info


def _read(found: Gathered, path: Path) -> dict[str, TensorInfo]:
    """The model's tensors in one file."""
    if path.suffix in PICKLES or (path.suffix not in READERS and _is_pickle(path)):
        from gptcli.checkpoint.pickles import listed

        pickled = listed(path)
        found.pickled = found.pickled or pickled
        tensors, form = pickled.model, pickled.form
        found.lays |= _lays(pickled)
        if pickled.foreign:
            found.foreign[path.name] = pickled.foreign
    elif path.suffix == ".gguf":
        return _of_gguf(found, path)
    else:
        tensors, form = _noted(found, safetensors.read(path)), "safetensors"
    found.hold(path, form, len(tensors))
    return tensors


def _of_gguf(found: Gathered, path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file that describes itself, and of its parts; short values of its metadata."""
    from gptcli.checkpoint import gguf

    header = found.described = gguf.read_header(path)
    for part in header.files:
        found.hold(part, "gguf", sum(info.file == part for info in header.infos.values()))
    for key, value in header.metadata.items():
        if isinstance(value, (bool, int, float, str)):
            found.metadata[key] = [str(value)]
    return header.infos


def _lays(pickled: "Pickled") -> dict[str, Lay]:
    """How the numbers of those tensors lie that are no plain run of little-endian numbers."""
    from gptcli.checkpoint.pickles import BITS

    lays, big = {}, pickled.byte_order == "big"
    for name, info in pickled.model.items():
        strides = pickled.strides.get(".".join([*pickled.keys, name]), ())
        if strides or big:
            lays[name] = Lay(strides, big, BITS[info.dtype])
    return lays


def _noted(found: Gathered, header: safetensors.Header) -> dict[str, TensorInfo]:
    """The header's tensors; what the file says of itself goes to the metadata."""
    for key, value in header.notes.items():
        values = found.metadata.setdefault(key, [])
        if value not in values:
            values.append(value)
    return header.tensors


def _cut_short(found: Gathered, path: Path, error: safetensors.CutShort) -> dict[str, TensorInfo]:
    """The tensors of a file that ends too early: what they are is known, though not all are there."""
    size, tensors = path.stat().st_size, _noted(found, error.header)
    found.lost |= {name: f"cut off in {path.name}" for name, info in tensors.items() if info.end > size}
    found.hold(path, "safetensors", len(tensors))
    return tensors


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith((b"PK\x03\x04", b"\x80"))


def _told(error: GptcliError, path: Path) -> tuple[str, str]:
    """What is wrong with a file that can't be read: a code, and a line without the file's name."""
    with path.open("rb") as file:
        beginning = file.read(512)
    said = _without(error.message, path.parent).removeprefix(f"{path.name}: ")
    if not beginning:
        return "empty-file", "the file is empty"
    if beginning.startswith(b"version https://git-lfs"):
        size = re.search(rb"\nsize (\d{1,18})", beginning)
        points = f" to {int(size[1]):,} bytes" if size else ""
        return "lfs-pointer", f"a Git LFS pointer{points}, not the weights; `git lfs pull` fetches them"
    if beginning.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "html-page", f"{said}; fetch the file itself"
    return ("not-weights" if error.code == "not-a-checkpoint" else "corrupt"), said


def _without(message: str, directory: Path) -> str:
    return message.removeprefix(f"{directory}/")


# What stands beside them


def _look_beside(found: Gathered, files: Files) -> None:
    """Other weights in the directory: a trainer's leftovers, a second set of the same weights, or something else."""
    if found.path.is_dir():
        names = [p.name for p in found.path.iterdir() if LEFTOVER.fullmatch(p.name)]
        found.leftovers = sorted({*names, *(name for name in files.beside if LEFTOVER.fullmatch(name))})
    chosen = files.weights[0].name if files.weights else ""
    seconds: dict[str, int] = {}
    for name in files.beside:
        if name in found.leftovers:
            continue
        found.beside.append(name)
        if found.infos and not (STEP.fullmatch(name) and STEP.fullmatch(chosen)):
            same = _in_common(found, name)
            seconds |= {name: same} if same else {}
    if seconds:
        shown = ", ".join(list(seconds)[:3]) + " …" * (len(seconds) > 3)
        read = found.index or chosen
        said = f"two sets of weights: {read} is read; left over, with {sum(seconds.values())} of its tensors: {shown}"
        found.fault("two-sets", said, next(iter(seconds)))


def _in_common(found: Gathered, name: str) -> int:
    """How many of the checkpoint's tensors another file holds too; 0 where that is but a part of what it holds."""
    aside = Gathered(path=found.path, directory=found.directory)
    try:
        tensors, _ = unwrapped(_read(aside, found.directory / name))
    except (GptcliError, OSError):
        return 0
    same = sum(other in found.infos for other in tensors)
    return same if same > MANY * len(tensors) else 0


def settings_in(gathered: Gathered) -> dict[str, Any]:
    """nanoGPT's model_args, where the file has them."""
    settings = gathered.pickled.settings.get("model_args") if gathered.pickled else None
    return settings if isinstance(settings, dict) else {}


def meta_of(path: Path) -> dict[str, Any] | None:
    """nanochat's settings, in meta_000100.json beside model_000100.pt."""
    meta = path.with_name(path.name.replace("model_", "meta_", 1)).with_suffix(".json")
    settings = read_json(meta).get("model_config") if meta.is_file() and meta != path else None
    return settings if isinstance(settings, dict) else None
