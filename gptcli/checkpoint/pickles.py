"""What a PyTorch file (.pt, .pth, .bin, .ckpt) holds, listed without unpickling it and without torch.

Two formats. A zip file holds data.pkl, which is the object, and data/0, data/1 …, the bytes of each storage. The older
format is five pickles on end (a magic number, a version, the system, the object, the storages' keys), then for each
storage the count of its numbers in 8 bytes, and the numbers. In both, a tensor is a call that says storage, offset,
shape and strides. What torch's own calls build is listed; any other class or call is a foreign object, and stays text.
"""

import itertools
import re
import struct
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from gptcli.checkpoint import safetensors, zips
from gptcli.checkpoint.opcodes import Call, Machine, Malformed, Name, Odd, Set, Short
from gptcli.checkpoint.rebuild import DTYPES, KNOWN, VALUES, Rebuilder, Storage, Tensor
from gptcli.checkpoint.safetensors import TensorInfo, shown, what_else
from gptcli.data import data
from gptcli.errors import GptcliError

BITS = safetensors.BITS | {word: 8 * size for word, size in DTYPES.values()}  # of one number, by the name of its type
MODELS = ("model", "state_dict", "model_state_dict", "module")  # where training scripts keep the model
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
SCRIPT = ("constants.pkl", "traced_inputs.pkl", "bytecode.pkl", "mobile_debug_handles.pkl")  # what TorchScript adds
# The entries of a zip file that are read: the object, and how PyTorch wrote it.
READ = ("data.pkl", "version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")
MAX_PICKLE = 32 * 2**20  # bytes
MAX_HEAD = 4_096  # bytes before which the older format has said that it is one
MAX_VISITS = 350_000  # names and values; a tensor takes four
MAX_DEPTH = 100
MAX_SETTINGS = 10_000
MAX_ITEMS = 100  # of one list among them
MAX_WORDS = 1_000  # letters of a text among the settings


class Section(NamedTuple):
    """What one of a checkpoint's uppermost keys holds; a storage that several of them share counts for the first."""

    tensors: int
    bytes: int


@data
class Pickled:
    """What a file holds.

    tensors: by dotted path (`model.wte.weight`); start and end are where the data lies: of a view with strides, its
    first number and behind its last. strides: of those tensors alone whose numbers don't stand one after the other, in
    numbers. shared: names that lie in one storage. sections: of the uppermost table, none where that is a state dict.
    settings: whatever holds no tensor, by path, as numbers, texts, lists and tables. opaque: foreign objects, sparse
    and quantised tensors, by path, as text. foreign: the classes and functions that torch's weights-only loader refuses
    to build. model: the tensors of the model's state dict under its own names; keys: those that lead to it; unused:
    what lies beside it. unread: data in a zip that nothing refers to, in bytes.
    """

    file: Path
    form: Literal["zip", "legacy", "torchscript"]
    byte_order: Literal["little", "big"]
    tensors: dict[str, TensorInfo]
    strides: dict[str, tuple[int, ...]]
    shared: list[list[str]]
    sections: dict[str, Section]
    settings: dict[str, Any]
    opaque: dict[str, str]
    foreign: list[str]
    model: dict[str, TensorInfo]
    keys: list[str]
    unused: list[str]
    unread: dict[str, int] = field(default_factory=dict)


def listed(path: Path) -> Pickled:
    """What a file holds, listed once. Raises GptcliError that says what it is instead, or where it is broken."""
    try:
        state = path.stat()
        return _listed(path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise GptcliError(f"{path}: {error.strerror}", "give a readable file", "file") from None


class _Broken(ValueError):
    """What is wrong with a PyTorch file."""

    code = "corrupt"


class _Other(_Broken):
    """What a file is that is none."""

    code = "not-a-checkpoint"


@lru_cache(maxsize=256)
def _listed(path: Path, changed: int, size: int) -> Pickled:
    """changed and size tell a file from one that was written over it."""
    if not path.is_file():  # a pipe would wait for a writer
        raise GptcliError(f"{path}: not a regular file", "give a readable file", "file")
    try:
        with path.open("rb") as file:
            return _read(path, file, size)
    except _Broken as error:
        said, code = error, error.code
    except (Malformed, zips.BadZip, struct.error) as error:
        why = "it has grown shorter meanwhile" if isinstance(error, struct.error) else error
        said, code = f"not a PyTorch file that can be read ({why})", "corrupt"
    raise GptcliError(f"{path}: {said}", "fetch or write the file again", code)


def _read(path: Path, file: BinaryIO, size: int) -> Pickled:
    """In the format that its first bytes tell. Raises _Other for a file of another kind."""
    beginning = file.read(512)
    if beginning.startswith(zips.LOCAL):
        return _zipped(path, file, size)
    if beginning.startswith(b"\x80"):
        return _legacy(path, file, size)
    if beginning[8:9] == b"{" and int.from_bytes(beginning[:8], "little") <= size - 8:
        raise _Other("a safetensors file under another name")
    other = what_else(beginning, "not a PyTorch file: neither a zip file nor a pickle")
    raise _Other(other if beginning else "the file is empty")


# The two formats


def _zipped(path: Path, file: BinaryIO, size: int) -> Pickled:
    try:
        entries = zips.entries(file, size)
    except zips.CutShort:
        raise _cut_short(file, size) from None
    root = _root(list(entries))
    inside = {name.removeprefix(root): entry for name, entry in entries.items()}
    packed = [name for name, entry in inside.items() if entry.compressed and not name.startswith("code/")]
    if packed:
        raise _Broken(f"{shown(root + packed[0])} in it is compressed, which PyTorch never does")
    read = {name: _content(file, root + name, inside[name]) for name in READ if name in inside}
    data, order, version = read["data.pkl"], read.get("byteorder", b"little"), read.get("version", b"3")
    if order not in (b"little", b"big") or not version.strip().isdigit():
        raise _Broken(f"its byte order or its version is none: {order[:20]!a}, {version[:20]!a}")
    builder = Rebuilder()
    machine = Machine(data, 0, builder.called, builder.loaded)
    value = machine.run()
    if machine.at != len(data):
        raise _Broken(f"{len(data) - machine.at:,} bytes stand behind the end of the pickle in it")
    storages = {name.removeprefix("data/"): entry for name, entry in inside.items() if name.startswith("data/")}
    spans = {key: (entry.start, entry.end) for key, entry in storages.items()}
    form = "torchscript" if SCRIPT[0] in inside else "zip"
    return _Lister(machine, builder, spans, path).listing(value, form, order.decode())


def _root(names: list[str]) -> str:
    """Of a zip file with one pickle, how all its names begin. Raises _Other for another kind of zip file, else _Broken.

    A program that looks at one pickle and another that loads the other would disagree on what the file holds.
    """
    found = [name for name in names if re.fullmatch(r"[^/]+/data\.pkl", name)]
    if not found:
        arrays = bool(names) and all(name.endswith(".npy") for name in names)
        raise _Other(f"{'an .npz file of NumPy' if arrays else 'a zip file without data.pkl'}, not a PyTorch file")
    root = found[0].removesuffix("data.pkl")
    known = [found[0], *(root + name for name in SCRIPT if root + SCRIPT[0] in names)]
    for name in names:
        if not name.startswith(root) or (re.search(r"\.(pkl|pickle)$", name, re.IGNORECASE) and name not in known):
            raise _Broken(f"beside {shown(found[0])} it holds {shown(name)}, which PyTorch did not put there")
    return root


def _content(file: BinaryIO, name: str, entry: zips.Entry) -> bytes:
    """An entry's bytes, which agree with its checksum."""
    if entry.end - entry.start > MAX_PICKLE:
        raise Malformed(f"{entry.end - entry.start:,} bytes without the tensors; up to {MAX_PICKLE:,} are read")
    file.seek(entry.start)
    data = file.read(entry.end - entry.start)
    if entry.crc not in (0, zlib.crc32(data)):  # 0: none was computed
        raise _Broken(f"{shown(name)} in it is damaged: its checksum differs")
    return data


def _cut_short(file: BinaryIO, size: int) -> _Broken:
    """What can be said of a zip file without its end: PyTorch puts data.pkl first, which tells how much must follow."""
    file.seek(0)
    data = file.read(MAX_PICKLE)
    name, extra = struct.unpack_from("<26x2H", data) if len(data) >= 30 else (0, 0)
    builder, needed = Rebuilder(), 0
    machine = Machine(data, 30 + name + extra, builder.called, builder.loaded)
    if data[30 : 30 + name].endswith(b"/data.pkl"):
        with suppress(Malformed):
            machine.run()
            needed = machine.at + sum(size for size, _ in builder.storages.values())
    if needed > size:
        return _Broken(f"cut short: its tensors need {needed:,} bytes and more, and the file has {size:,}")
    return _Broken(f"a PyTorch file, or another zip file, cut short at {size:,} bytes: its end is missing")


def _legacy(path: Path, file: BinaryIO, size: int) -> Pickled:
    """How long the pickles are is known when they have been read: at first few bytes are taken, then more."""
    for most in (2**20, 2**23, MAX_PICKLE):
        file.seek(0)
        data = file.read(most)
        try:
            return _five_pickles(path, file, size, data)
        except Short:
            if len(data) == size:
                raise _Broken(f"not a PyTorch file that can be read, or one cut short at {size:,} bytes") from None
    raise Malformed(f"{MAX_PICKLE:,} bytes hold no more than its pickles")


def _five_pickles(path: Path, file: BinaryIO, size: int, data: bytes) -> Pickled:
    builder = Rebuilder()
    machine = Machine(data, _introduced(data), builder.called, builder.loaded)
    system, value, keys = machine.run(), machine.run(), machine.run()
    if type(system) is not dict or type(system.get("little_endian")) is not bool:
        raise Malformed("its byte order is none")
    if type(keys) is not list or {*map(type, keys)} - {str} or sorted(keys) != sorted(builder.storages):
        raise Malformed("its storages are not those that its tensors need")
    spans, at = {}, machine.at
    for key in keys:
        spans[key] = (at + 8, at + 8 + builder.storages[key][0])
        at = spans[key][1]
    if at != size:
        raise _Broken(f"its tensors need {at:,} bytes and the file has {size:,}")
    order = "little" if system["little_endian"] else "big"
    for key, (start, _) in spans.items():
        file.seek(start - 8)
        count, (held, itemsize) = int.from_bytes(file.read(8), order), builder.storages[key]
        if count * itemsize != held:
            raise _Broken(f"storage {shown(key)} has {count:,} numbers, and its tensors say {held // itemsize:,}")
    return _Lister(machine, builder, spans, path).listing(value, "legacy", order)


def _introduced(data: bytes) -> int:
    """Where the third pickle begins, if the first two are those of PyTorch. Raises _Other if the first is not."""
    head = data[:MAX_HEAD]
    machine, magic = Machine(head), None
    with suppress(Short):
        magic = machine.run()
    if magic is None and len(data) == len(head):
        raise Short
    if magic != MAGIC:
        raise _Other(f"a pickle, but not of PyTorch{'' if magic is None else f' ({text_of(magic)})'}")
    if machine.run() != VERSION or machine.names:
        raise Malformed("its version is none")
    return machine.at


# The object


class _Lister:
    """Walks over what a Machine made of the object, and gives a path to all that a person would ask for.

    spans: where each storage's bytes lie in the file.
    """

    def __init__(self, machine: Machine, builder: Rebuilder, spans: dict[str, tuple[int, int]], path: Path):
        self.machine, self.builder, self.spans, self.path = machine, builder, spans, path
        self.tensors: dict[str, Tensor] = {}
        self.settings: dict[str, Any] = {}
        self.opaque: dict[str, str] = {}
        self.met: set[str] = set()  # the storages that were met, and the bytes of them all
        self.bytes = 0
        self.repeats: Counter[str] = Counter()
        self.inside: set[int] = set()  # the containers that are being walked over, and every object met
        self.within = ""  # a module or another foreign object
        self.visits, self.settings_left = 0, MAX_SETTINGS

    def listing(self, value: Any, form: str, byte_order: str) -> Pickled:
        """The listing of all that the value holds; form and byte_order: of the file."""
        sections, storages = self.uppermost(value), self.builder.storages
        infos = {name: self.info(tensor, f"tensor {shown(name)}") for name, tensor in self.tensors.items()}
        named = {id(tensor) for tensor in self.tensors.values()}
        for tensor in self.builder.tensors:
            if id(tensor) not in named:  # no path leads to it, and torch would build it all the same
                self.info(tensor, "a tensor without a name")
        for key in storages:
            self.span(key, f"storage {shown(key)}")
        keys, names, unused = self.model(value)
        infos |= {path: infos[path]._replace(key=name) for name, path in names.items()}
        groups: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            groups.setdefault(tensor.storage.key, []).append(name)
        return Pickled(
            file=self.path,
            form=form,
            byte_order=byte_order,
            tensors=infos,
            strides={name: tensor.strides for name, tensor in self.tensors.items() if not tensor.contiguous},
            shared=[names for key, names in groups.items() if len(names) > 1 and storages[key][0]],
            sections=sections,
            settings=self.settings,
            opaque=self.opaque,
            foreign=[text for text in self.machine.names if text not in KNOWN],
            model={name: infos[path] for name, path in names.items()},
            keys=keys,
            unused=unused,
            unread={key: end - start for key, (start, end) in self.spans.items() if key not in storages},
        )

    def span(self, key: str, whose: str) -> int:
        """Where a storage begins in the file. Raises _Broken where the file has less or more of it than is needed."""
        size, _ = self.builder.storages[key]
        if key not in self.spans:
            raise _Broken(f"the data of {whose} is not in it: {size:,} bytes are missing")
        start, end = self.spans[key]
        if end - start != size:
            raise _Broken(f"the data of {whose} should be {size:,} bytes, and {end - start:,} are there")
        return start

    def info(self, tensor: Tensor, whose: str) -> TensorInfo:
        storage, begun, size = tensor.storage, tensor.offset * tensor.itemsize, tensor.span
        start = self.span(storage.key, whose) + storage.start
        if size and begun + size > storage.size:
            raise _Broken(f"{whose} needs {begun + size:,} bytes of its storage, which has {storage.size:,}")
        start += min(begun, storage.size)
        return TensorInfo(tensor.dtype, tensor.shape, self.path, start, start + size)

    def model(self, value: Any) -> tuple[list[str], dict[str, str], list[str]]:
        """The keys that lead to the model's state dict, its names and the paths they have here, what lies beside."""
        keys, unused = [], []
        held = value if type(value) is dict else {}
        while len(keys) < 3 and (inner := next((n for n in MODELS if type(held.get(n)) in (dict, Call)), None)):
            unused += [text_of_key(key) for key in held if key not in (inner, "model_args")]
            keys.append(inner)
            value = held[inner]
            held = value if type(value) is dict else {}
        path = ".".join(keys)
        if type(value) is Call:
            start = f"{path}." if path else ""
            return keys, {name.removeprefix(start): name for name in self.tensors if name.startswith(start)}, unused
        names = {text_of_key(key): joined(path, key) for key, child in held.items() if type(child) is Tensor}
        unused += [text_of_key(key) for key, child in held.items() if type(child) is not Tensor and child is not None]
        return keys, names, unused

    def uppermost(self, value: Any) -> dict[str, Section]:
        """Walks over everything, by section where the uppermost table has sections."""
        if type(value) is not dict:
            if not self.walk(value, "", 0):
                self.settle(value, "value")
            return {}
        self.inside.add(id(value))
        sections, flat = {}, True
        for key, child in value.items():
            path, tensors, before = joined("", key), len(self.tensors), self.bytes
            if not self.walk(child, path, 1):
                self.settle(child, path)
            sections[path] = Section(len(self.tensors) - tensors, self.bytes - before)
            flat = flat and (type(child) is Tensor or len(self.tensors) == tensors)
        return {} if flat else sections

    def walk(self, value: Any, path: str, depth: int) -> bool:
        """Lists what lies under a path. Returns whether that was more than plain values, which the caller settles."""
        kind = type(value)
        self.spend(1 + len(path) // 64, depth)
        if kind is Tensor:
            self.tensor(value, path, depth)
        elif kind is Storage:
            self.meet(value, depth)
            self.note(value, path)
        elif kind is Call and value.function.text not in VALUES:  # these stand for plain values, such as a device
            self.object(value, path, depth)
        elif kind in HOLDERS and id(value) not in self.inside:
            return self.container(value, path, depth)
        else:
            return False
        return True

    def container(self, value: Any, path: str, depth: int) -> bool:
        self.spend(len(value) // 16)
        self.inside.add(id(value))
        plain, listed = [], False
        for key, child in value.items() if type(value) is dict else enumerate(value):
            if type(child) in PLAIN or not self.walk(child, joined(path, key), depth + 1):
                plain.append((key, child))
            else:
                listed = True
        self.inside.discard(id(value))
        for key, child in plain if listed else ():
            self.settle(child, joined(path, key))
        return listed

    def settle(self, value: Any, path: str) -> None:
        self.spend(1 + len(path) // 64)
        self.settings[path] = self.plain(value)

    def tensor(self, tensor: Tensor, path: str, depth: int) -> None:
        self.spend(1)
        path = name = path or "tensor"
        while name in self.tensors:  # `a.b` in a table, and `b` in a table `a`
            self.spend(1)
            self.repeats[path] += 1
            name = f"{path} ({self.repeats[path] + 1})"
        self.tensors[name] = tensor
        self.meet(tensor, depth)
        if type(tensor.state) is dict:
            self.walk(tensor.state, name, depth + 1)

    def object(self, call: Call, path: str, depth: int) -> None:
        """A foreign object: named once, the tensors in its attributes and items under paths of their own.

        A module's parameters, buffers and modules are named as its state dict would name them. An object within another
        is named where it holds tensors, and is no part of a module.
        """
        if id(call) in self.inside:
            return
        self.inside.add(id(call))  # for good: an object that many know is listed where it was met first
        attributes: dict[Any, Any] = {}
        states = call.state if type(call.state) is tuple else (call.state,)
        for i, state in enumerate(states):
            self.spend(len(state) // 16 if type(state) is dict else 1)
            attributes |= state if type(state) is dict else {i: state}  # by name, be they in slots or not
        parts = [attributes.pop(name) for name in MODULE if type(attributes.get(name)) is dict]
        outer, self.within = self.within, "module" if len(parts) == len(MODULE) else "object"
        if not outer:
            self.note(call, path)
        before = len(self.tensors)
        if call.function.text.startswith("torch._utils."):
            self.meet(call.args, depth)
        else:
            self.walk(call.args, path, depth + 1)
        for part in (*parts, attributes):
            for key, value in part.items():
                self.walk(value, joined(path, key), depth + 1)
        for i, (*key, value) in enumerate(call.items):
            self.walk(value, joined(path, key[0] if key else i), depth + 1)
        if outer and len(self.tensors) > before and (outer, self.within) != ("module", "module"):
            self.note(call, path)
        self.within = outer

    def meet(self, value: Any, depth: int) -> None:
        """Counts the storages of what is listed, and of a tensor that is not: a sparse or a quantised one."""
        self.spend(1, depth)
        if type(value) is Storage and value.key not in self.met:
            self.met.add(value.key)
            self.bytes += self.builder.storages[value.key][0]
        elif type(value) is Tensor:
            self.meet(value.storage, depth)
        elif type(value) in (tuple, Call):
            for part in value if type(value) is tuple else value.args:
                self.meet(part, depth + 1)

    def note(self, value: Any, path: str) -> None:
        self.spend(3)
        self.opaque[path or "value"] = text_of(value)

    def spend(self, visits: int, depth: int = 0) -> None:
        self.visits += visits
        if self.visits > MAX_VISITS:
            raise Malformed(f"more than {MAX_VISITS:,} values under names")
        if depth > MAX_DEPTH:
            raise Malformed(f"nested deeper than {MAX_DEPTH} levels")

    def plain(self, value: Any, depth: int = 0) -> Any:
        """A setting as JSON could hold it, cut off with … where it is longer than a person would read."""
        kind = type(value)
        if kind is str:
            return cut(value, MAX_WORDS)
        if kind not in HOLDERS:
            exact = kind in (bool, float, type(None)) or (kind is int and abs(value) < 2**63)
            return value if exact else text_of(value, MAX_WORDS)
        room = min(self.settings_left, MAX_SETTINGS if kind is dict else MAX_ITEMS) if depth < 8 else 0
        whole = len(value) <= room
        self.settings_left -= min(len(value), room)
        if kind is dict:
            pairs = itertools.islice(value.items(), room)
            table = {text_of_key(key): self.plain(child, depth + 1) for key, child in pairs}
            return table if whole else table | {"…": f"{len(value):,} in all"}
        return [self.plain(child, depth + 1) for child in value[:room]] + ([] if whole else ["…"])


# Texts

HOLDERS = {dict, list, Set, tuple}
PLAIN = frozenset((str, int, float, bool, bytes, type(None), Name))
MODULE = ("_parameters", "_buffers", "_modules")
UNLISTED = {
    "qtensor": "a quantised tensor",
    "meta_tensor_no_storage": "a tensor without data",
    "sparse_tensor": "a sparse tensor",
} | dict.fromkeys(
    ("tensor_v2", "tensor_v3"), "a tensor of another type, or one whose numbers are to be conjugated or negated,"
)


def text_of_key(key: Any) -> str:
    return key if type(key) is str else text_of(key.value if type(key) is Odd else key)


def joined(path: str, key: Any) -> str:
    return f"{path}.{text_of_key(key)}" if path else text_of_key(key)


def text_of(value: Any, most: int = 60) -> str:
    """A value in one short text: a foreign object as the call that would make it, its arguments where they are few."""
    kind = type(value)
    if kind is Name:
        return cut(value.text, 200)
    if kind is Tensor:
        return f"tensor {value.dtype} {list(value.shape)}"
    if kind is Storage:
        return f"storage of {value.size:,} bytes"
    if kind in HOLDERS and kind is not tuple:
        return f"{'table' if kind is dict else kind.__name__.lower()} of {len(value):,}"
    if kind is tuple:
        inside = ", ".join(text_of(part) for part in value) if len(value) <= 4 and is_short(value) else "…"
        return f"({inside})"
    if kind is Call:
        return tensor_in_words(value) or cut(value.function.text, 200) + text_of(value.args)
    if kind is int and abs(value) >= 2**63:
        return f"a number of {value.bit_length():,} bits"
    return cut(repr(value[: most + 1] if kind in (str, bytes) else value), most)


def tensor_in_words(call: Call) -> str:
    """What a call of torch that builds no listed tensor would build."""
    kind = UNLISTED.get(call.function.text.removeprefix("torch._utils._rebuild_"))
    shapes = [part for part in call.args if type(part) is tuple]
    if kind == "a sparse tensor":
        shapes = [part for parts in shapes[:1] for part in parts if type(part) is tuple]
    return f"{kind} {list(shapes[0])}" if kind and shapes and is_short(shapes[0]) else ""


def is_short(values: tuple) -> bool:
    return len(values) <= 8 and all(
        type(value) in PLAIN or (type(value) is Call and not value.args) for value in values
    )


def cut(letters: str, most: int) -> str:
    return letters if len(letters) <= most else letters[: most - 1] + "…"
