"""Makes broken and malicious checkpoint files, of each format, out of a small sound model.

A format's files are bytes. Sound ones are written by the format's own library; what no library would write is put
together here, byte by byte.
"""

import io
import json
import os
import pickle
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from safetensors.torch import save

# A model of four ids, two numbers wide, whose checkpoint is six matrices.
CONFIG = """\
vocab_size: 4
context_length: 8
hidden_size: 2
n_layers: 1
position: {kind: none}
norm: {kind: none}
attention: {n_heads: 1, n_kv_heads: 1, head_dim: 2}
mlp: {kind: none}
lm_head: {tied: false}
"""
SHAPES = {"embed": (4, 2), **{f"layers.0.attn.{letter}": (2, 2) for letter in "qkvo"}, "lm_head": (4, 2)}
ESCAPES = "\x1b[31m\x07\x9b2J\u202e\0"  # colour, bell, a C1 control, a turn of the writing's direction, NUL


def state() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(4)
    return {f"{stem}.weight": torch.randn(shape, generator=draw) for stem, shape in SHAPES.items()}


def by_torch(content: object, zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def sound() -> dict[str, bytes]:
    """The model as each format keeps it, by the format's name."""
    training = {"model": state(), "optimizer": {"lr": 0.1}, "iter_num": 7}
    return {"safetensors": save(state()), "zip": by_torch(training, True), "legacy": by_torch(training, False)}


SUFFIXES = {"safetensors": ".safetensors", "zip": ".pt", "legacy": ".bin"}


# Damage


def truncations(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Every length below the file's own."""
    for length in range(len(whole)):
        yield f"cut at {length}", whole[:length]


def flips(whole: bytes, number: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """One to four bytes changed at random: a bit turned, another byte, or a sign that means something in a header."""
    rng = random.Random(seed)
    signs = b'",:{}[]0-9 .(}tRbqhKXPK\x80\xff\x00\x01\x7f'
    for i in range(number):
        damaged = bytearray(whole)
        places = [rng.randrange(len(whole)) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
        for place in places:
            damaged[place] = rng.choice(
                (rng.randrange(256), damaged[place] ^ (1 << rng.randrange(8)), signs[rng.randrange(len(signs))])
            )
        yield f"flip {i} of seed {seed} at {places}", bytes(damaged)


# safetensors


def framed(header: bytes | str | dict, data: bytes = b"") -> bytes:
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + data


def entry(start: int, stop: int, shape: list | None = None, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


def safetensors_faults() -> dict[str, tuple[bytes, str]]:
    """What is wrong, the file, and words that must be said of it."""
    one, rest = json.dumps(entry(0, 8)), bytes(8)
    return {
        "nothing": (b"", "the file is empty"),
        "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        "a page": (b"<!DOCTYPE html><html><body>not found</body></html>", "an HTML page"),
        "a hole": (framed({"a": entry(0, 8), "b": entry(12, 16)}, bytes(16)), "'b' begins at byte"),
        "an overlap": (framed({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "'b' begins at byte"),
        "a key twice": (framed(f'{{"a":{one},"a":{one}}}', rest), "'a' stands twice"),
        "a key twice, once escaped": (framed(f'{{"a":{one},"\\u0061":{one}}}', rest), "'a' stands twice"),
        "beyond the end": (framed({"a": entry(0, 2**40)}, rest), "bytes and the file has"),
        "offsets below nought": (framed({"a": entry(-8, 0)}, rest), "-8 is not a whole number"),
        "offsets at 2^63": (framed({"a": entry(2**63, 2**63 + 8)}, rest), "is not a whole number"),
        "offsets just below 2^63": (framed({"a": entry(2**63 - 9, 2**63 - 1)}, rest), "'a' begins at byte"),
        "a shape of 2^63": (framed({"a": entry(0, 8, [2**63])}, rest), "is not a whole number"),
        "a shape whose product wraps to 2": (framed({"a": entry(0, 8, [2**33, 2**32])}, rest), "too large"),
        "a header of 2^63": (struct.pack("<Q", 2**63) + b"{}", f"a header of {2**63:,} bytes"),
        "a header of 2^64 - 1": (struct.pack("<Q", 2**64 - 1) + b"{}", "a header of"),
        "lists in lists": (framed("[" * 50_000), "can't be read"),
        "tables in tables": (framed('{"a":' * 50_000), "can't be read"),
        "a shape in a shape": (framed({"a": entry(0, 8) | {"shape": [[[2]]]}}, rest), "the shape is not a list"),
        "NUL as a blank": (framed(f'{{"a":{one}}}\0', rest), "can't be read"),
        "an unknown type of escapes": (framed({"a": entry(0, 8, dtype=ESCAPES)}, rest), "is unknown"),
        "a hole after a name of escapes": (framed({ESCAPES: entry(4, 8)}, rest), "begins at byte"),
        "a name of escapes twice": (framed(f"{{{json.dumps(ESCAPES)}:{one},{json.dumps(ESCAPES)}:{one}}}"), "twice"),
    }


# Pickles, by hand


def number(value: object) -> bytes:
    """The opcodes that push a number, a text, a tuple: what Python's own pickle writes between its first and last."""
    return pickle.dumps(value, 2)[2:-1]


def text(value: str) -> bytes:
    """Without a place in the memo."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def tensor(
    key: object = "0",
    count: object = 8,
    shape: object = (4, 2),
    strides: object = (2, 1),
    offset: object = 0,
    kind: str = "torch\nFloatStorage",
    legacy: bool = False,
) -> bytes:
    """The opcodes that build a tensor over a storage."""
    pushed = text(key) if isinstance(key, str) else number(key)
    id_ = b"(" + text("storage") + f"c{kind}\n".encode() + pushed + text("cpu") + number(count) + b"N" * legacy + b"tQ"
    place = number(offset) + number(shape) + number(strides)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + id_ + place + b"\x89ccollections\nOrderedDict\n)RtR"


def table(*pairs: tuple[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(name) + code for name, code in pairs) + b"u"


def program(code: bytes) -> bytes:
    return b"\x80\x02" + code + b"."


# Zip files, by hand


@dataclass
class Entry:
    """An entry of a zip file. local and central: what its two descriptions say other than the truth."""

    name: bytes | str
    data: bytes = b""
    method: int = 0
    flags: int = 0
    local: dict = field(default_factory=dict)
    central: dict = field(default_factory=dict)
    extra: bytes = b""


def zipped(entries: list[Entry], before: bytes = b"", between: bytes = b"", **end: int) -> bytes:
    """A zip file. end: what the record at its end says other than the truth: count, length, start."""
    file, directory = bytearray(before), bytearray()
    for one in entries:
        name = one.name.encode() if isinstance(one.name, str) else one.name
        packed = zlib.compressobj(9, zlib.DEFLATED, -15) if one.method == 8 else None
        data = packed.compress(one.data) + packed.flush() if packed else one.data
        true = {"size": len(one.data), "packed": len(data), "crc": zlib.crc32(one.data), "name": name}
        said = true | one.local
        local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, one.flags, one.method, 0, 0, said["crc"], said["packed"],
                            said["size"], len(said["name"]), 0)  # fmt: skip
        listed = true | {"header": len(file)} | one.central
        directory += struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 0, 0, one.flags, one.method, 0, 0, listed["crc"],
                                 listed["packed"], listed["size"], len(listed["name"]), len(one.extra), 0, 0, 0, 0,
                                 listed["header"]) + listed["name"] + one.extra  # fmt: skip
        file += local + said["name"] + data + between
    said = {"count": len(entries), "length": len(directory), "start": len(file)} | end
    tail = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, said["count"], said["count"], said["length"], said["start"], 0)
    return bytes(file + directory) + tail


def torch_zip(code: bytes, *more: Entry, data: bytes = bytes(32), root: str = "m", **options) -> bytes:
    """What PyTorch would write: the pickle, one storage of eight numbers, the version."""
    entries = [
        Entry(f"{root}/data.pkl", program(code)),
        Entry(f"{root}/data/0", data),
        Entry(f"{root}/version", b"3\n"),
    ]
    return zipped([*entries, *more], **options)


MAGIC = number(0x1950A86A20F9469CFC6C)


def torch_legacy(
    code: bytes,
    magic: bytes = MAGIC,
    version: bytes = number(1001),
    system: bytes = number({"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}),
    keys: bytes = b"](" + text("0") + b"e",
    data: bytes = struct.pack("<q", 8) + bytes(32),
) -> bytes:
    """What PyTorch wrote before it wrote zip files: five pickles, and one storage of eight numbers behind its count."""
    return b"".join(map(program, (magic, version, system, code, keys))) + data


def pickle_faults(legacy: bool) -> dict[str, tuple[bytes, str]]:
    """Faults of the object's pickle: its opcodes, and words that must be said of it."""

    def one(*args, **options) -> bytes:
        return table(("w", tensor(*args, legacy=legacy, **options)))

    good = one()
    none = "too little on the stack"
    return {
        "an offset beyond its storage": (one(offset=1), "'w' needs 36 bytes of its storage, which has 32"),
        "a shape beyond its storage": (one(shape=(5, 2)), "'w' needs 40 bytes"),
        "strides beyond its storage": (one(strides=(200, 1)), "'w' needs"),
        "an offset below nought": (one(offset=-1), "without a storage, or an offset"),
        "an offset of 2^63": (one(offset=2**63), "without a storage, or an offset"),
        "an offset just below 2^63": (one(offset=2**63 - 1), "'w' needs"),
        "a size below nought": (one(shape=(-4, -2)), "not whole numbers"),
        "a size of 2^63": (one(shape=(2**63, 2)), "not whole numbers"),
        "a size of 2^2000": (one(shape=(2**2000, 2)), "not whole numbers"),
        "sizes whose product wraps to 8": (one(shape=(2**61 + 1, 8), strides=(8, 1)), "'w' needs"),
        "strides below nought": (one(strides=(-2, 1)), "not whole numbers"),
        "a stride too few": (one(strides=(1,)), "2 axes with 1 strides"),
        "sizes that are fractions": (one(shape=(4.0, 2)), "not whole numbers"),
        "sizes that are truths": (one(shape=(True, 2)), "not whole numbers"),
        "a shape that is a text": (one(shape="42"), "not whole numbers"),
        "a thousand axes": (one(shape=(1,) * 1000, strides=(1,) * 1000), "not whole numbers"),
        "a storage below nought": (one(count=-8), "key, device or size is none"),
        "a storage of 2^63": (one(count=2**63), "key, device or size is none"),
        "a storage that is called by a number": (one(key=0), "key, device or size is none"),
        "a storage of an unknown type": (one(kind="torch\nStrangeStorage"), "a storage of the type torch.Strange"),
        "a storage of another module": (one(kind="os\nFloatStorage"), "a storage of the type os.FloatStorage"),
        "a storage of a type of escapes": (one(kind="torch\nQ\x1b[31m\x07Storage"), "a storage of the type torch.Q"),
        "two sizes of one storage": (
            table(("w", tensor(legacy=legacy)), ("v", tensor(count=4, shape=(2, 2), legacy=legacy))), "in another"
        ),
        "a tensor without a storage": (table(("w", b"ctorch._utils\n_rebuild_tensor\n(NK\0))tR")), "without a storage"),
        "a tensor of too few values": (table(("w", b"ctorch._utils\n_rebuild_tensor_v2\n)R")), "with 0 values"),
        "a key twice": (table(("w", tensor(legacy=legacy)), ("w", b"N")), "the key 'w' stands twice"),
        "a key of escapes twice": (table((ESCAPES, b"N"), (ESCAPES, b"N")), "stands twice"),
        "a key without a value": (b"}(" + text("w") + b"u", "a key without a value"),
        "a key for a list": (b"]" + text("w") + b"Ns", "a key for what is no table"),
        "an item for a number": (b"K\x01Na", "an item for what is no list"),
        "arguments that are no tuple": (b"cos\nsystem\n]R", "whose arguments are no tuple"),
        "no value": (b"", ""),
        "a tuple of nothing": (b"\x86", none),
        "a mark that was never set": (b"Nt", none),
        "what was popped twice": (b"N00", none),
        "a memo that was never set": (b"h\x07", "memo 7, which was never set"),
        "a memo far off": (b"Nr\xff\xff\xff\xff0N", "memo 4,294,967,295"),
        "an unknown opcode": (b"\xfe", "0xfe, which is no opcode"),
        "a later protocol": (b"\x80\x09N", "protocol 9"),
        "a text of 2^63 bytes": (b"\x8d" + struct.pack("<Q", 2**63), ""),
        "a text below nought": (b"T" + struct.pack("<i", -1), "a length below nought"),
        "a frame of 2^63 bytes": (b"\x95" + struct.pack("<Q", 2**63) + good, ""),
        "a text that is not UTF-8": (b"X\x01\0\0\0\xff", "not UTF-8"),
        "a number that is none": (b"Iseven\n", "is no whole number"),
        "a number of ten thousand digits": (b"L" + b"9" * 10_000 + b"L\n", "a line longer than"),
        "lists in lists": (b"]" * 1_000 + b"a" * 999, "nested deeper"),
        "tuples in tuples": (b")" + b"\x85" * 5_000, "nested deeper"),
        "tables in tables": (b"}" + b"K\0}" * 5_000 + b"s" * 5_000, "nested deeper"),
        "calls in calls": (b"ca\nb\n" * 5_000 + b")R" + b"\x85R" * 4_999, "nested deeper"),
        "states in states": (b"ca\nb\n)R" * 5_000 + b"b" * 4_999, "nested deeper"),
        "items in items": (b"ca\nb\n)R" * 5_000 + b"a" * 4_999, "nested deeper"),
        "a tensor of a tensor of a tensor": (b"ctorch._tensor\n_rebuild_from_type_v2\n(" * 900 + b"N)NtR" * 900, ""),
        "marks in marks": (b"(" * 5_000, "levels"),
        "a table of ten tables of ten tables …": (doubled(10, 10), "values under names"),
        "a persistent id that is no tuple": (b"K\x01Q", "persistent id"),
        "a persistent id in protocol 0": (b"P('storage', 0)\n", "persistent id"),
    }  # fmt: skip


def doubled(depth: int, width: int) -> bytes:
    """A table of `width` names for one table of `width` names for one …: a few bytes that unfold to width ** depth."""
    code = b"Nq\0"
    for level in range(depth):
        code = code + b"0}(" + b"".join(text(f"{level}.{i}") + b"h\0" for i in range(width)) + b"uq\0"
    return code


def zip_faults() -> dict[str, tuple[bytes, str]]:
    """What is wrong with a zip file, the file, and words that must be said of it."""
    good = table(("w", tensor()))
    name, pickled = "m/data.pkl", program(good)
    storage, version = Entry("m/data/0", bytes(32)), Entry("m/version", b"3\n")

    def lying(**lies: dict) -> bytes:
        """The storage's descriptions changed."""
        return zipped([Entry(name, pickled), Entry("m/data/0", bytes(32), **lies), version])

    def beside(*others: str) -> bytes:
        return torch_zip(good, *(Entry(other, pickled) for other in others))

    wide = struct.pack("<2HQ", 1, 8, 2**63)
    cut = torch_zip(good)
    two = zipped([Entry(name, pickled), storage]) + zipped([Entry(name, program(table(("v", b"N")))), storage])
    return {
        "a directory that is cut off": (cut[:-30], "cut short"),
        "a directory that begins elsewhere": (torch_zip(good, start=7), "directory should end at byte"),
        "a directory that begins at 2^32 - 2": (torch_zip(good, start=2**32 - 2), "directory should end at byte"),
        "a directory of another length": (torch_zip(good, length=9), "directory should end at byte"),
        "a directory of fewer entries": (torch_zip(good, count=2), "more than its 2 entries"),
        "a directory of more entries": (torch_zip(good, count=9), "entry 3 of its directory"),
        "a directory of 65,535 entries": (torch_zip(good, count=65_535), "entry 3 of its directory"),
        "bytes behind the end": (cut + b"1234", "cut short"),
        "bytes before the beginning": (torch_zip(good, before=b"PK\x03\x04" + bytes(90_000)), "before its first entry"),
        "a zip file behind a zip file": (two, "directory should end at byte"),
        "a size that the directory makes larger": (lying(central={"size": 36, "packed": 36}), "'m/data/0'"),
        "a size that the directory makes smaller": (lying(central={"size": 16, "packed": 16}), "'m/data/0'"),
        "a size that the directory makes 2^32 - 2": (
            lying(central={"size": 2**32 - 2, "packed": 2**32 - 2}), "'m/data/0' needs 4,294,967,294 bytes"
        ),
        "a size of 2^63": (
            zipped([Entry(name, pickled), Entry("m/data/0", bytes(32), central={"size": 2**32 - 1, "packed": 2**32 - 1},
                                                extra=struct.pack("<2H2Q", 1, 16, 2**63, 2**63))]), "needs 9,223,372"
        ),
        "an entry at 2^63": (
            zipped([Entry(name, pickled, central={"header": 2**32 - 1}, extra=wide), storage]), "no entry begins at"
        ),
        "a size of 64 bits that is not there": (lying(central={"size": 2**32 - 1}), "of its directory is malformed"),
        "a size before the content that differs": (lying(local={"size": 16, "packed": 16}), "before its content"),
        "a name before the content that differs": (lying(local={"name": b"m/data/1"}), "otherwise in the directory"),
        "a checksum before the content that differs": (lying(local={"crc": 1}), "before its content"),
        "sizes that should stand behind the content": (lying(flags=8), "not what stands behind its content"),
        "an entry in another": (
            zipped([Entry(name, pickled), storage, Entry("m/data/0 ", bytes(32), central={"header": 0})]), "otherwise"
        ),
        "entries that overlap": (
            zipped([Entry(name, pickled + zipped([Entry("m/data/0", bytes(32))])[:70]),
                    Entry("m/data/0", b"", central={"header": 40 + len(pickled), "size": 32, "packed": 32,
                                                    "crc": zlib.crc32(bytes(32))})]), "overlap"
        ),
        "an entry in the directory": (lying(central={"header": 60_000}), "no entry begins at byte 60,000"),
        "an entry twice": (torch_zip(good, storage), "two entries are called 'm/data/0'"),
        "a pickle twice": (torch_zip(good, Entry(name, pickled)), "two entries are called 'm/data.pkl'"),
        "a compressed pickle": (
            zipped([Entry(name, pickled, method=8), storage]), "'m/data.pkl' in it is compressed"
        ),
        "a compressed storage": (zipped([Entry(name, pickled), Entry("m/data/0", bytes(32), method=8)]), "compressed"),
        "a bomb of 100 MB": (
            zipped([Entry(name, b"N" * 100_000_000, method=8), storage]), "is compressed"
        ),
        "an unknown compression": (lying(method=99), "is compressed"),
        "an encrypted entry": (lying(flags=1), "is encrypted"),
        "no pickle": (zipped([storage, version]), "a zip file without data.pkl"),
        "NumPy's arrays": (zipped([Entry("w.npy", b"\x93NUMPY")]), "an .npz file"),
        "no entry": (zipped([]), ""),
        "two pickles of two roots": (beside("n/data.pkl"), "it holds 'n/data.pkl'"),
        "an extra pickle": (beside("m/more.pkl"), "it holds 'm/more.pkl'"),
        "an extra pickle in capitals": (beside("m/MORE.PKL"), "it holds 'm/MORE.PKL'"),
        "a way out": (beside("../evil"), "'../evil'"),
        "a way out from within": (beside("m/../../evil"), "'m/../../evil'"),
        "a way from the root": (beside("/etc/evil"), "'/etc/evil'"),
        "another system's way": (beside("m\\..\\evil"), "an entry's name is none"),
        "a name of nothing": (beside(""), "an entry's name is none"),
        "a name of escapes": (beside(ESCAPES), "an entry's name is none"),
        "a name of escapes without NUL": (beside(ESCAPES[:-1]), "which PyTorch did not put there"),
        "a name that is not UTF-8": (torch_zip(good, Entry(b"m/\xff")), "not UTF-8"),
        "a name of 60,000 letters": (beside("m/" + "n" * 60_000), "an entry's name is none"),
        "no data for a tensor": (zipped([Entry(name, pickled), version]), "data of tensor 'w' is not in it: 32 bytes"),
        "too little data for a tensor": (torch_zip(good, data=bytes(28)), "should be 32 bytes, and 28 are there"),
        "too much data for a tensor": (torch_zip(good, data=bytes(36)), "should be 32 bytes, and 36 are there"),
        "a pickle of another checksum": (
            zipped([Entry(name, pickled, central={"crc": 5}, local={"crc": 5}), storage]), "its checksum differs"
        ),
        "a byte order that is none": (torch_zip(good, Entry("m/byteorder", b"mi\x1b[31mddle")), "its byte order or"),
        "a version that is none": (
            zipped([Entry(name, pickled), storage, Entry("m/version", b"x\x1b[31m")]), "or its version is none"
        ),
        "bytes behind the pickle": (
            zipped([Entry(name, pickled + program(b"cos\nsystem\n")), storage]), "bytes stand behind the end of the pic"
        ),
        "a pickle without its end": (zipped([Entry(name, pickled[:-1]), storage]), "ends in the middle"),
        "an empty pickle": (zipped([Entry(name), storage]), "ends in the middle"),
    } | {what: (torch_zip(code), says) for what, (code, says) in pickle_faults(legacy=False).items()}  # fmt: skip


def legacy_faults() -> dict[str, tuple[bytes, str]]:
    """What is wrong with a file of the older format, the file, and words that must be said of it."""
    good = table(("w", tensor(legacy=True)))

    def view(*place: object) -> bytes:
        code = tensor(legacy=True)
        return table(("w", code.replace(b"NtQ", number(place) + b"tQ")))

    return {
        "a pickle of something else": (program(number({"w": [1, 2]})), "a pickle, but not of PyTorch"),
        "a pickle alone": (program(good), "a pickle, but not of PyTorch"),
        "nothing but a protocol": (b"\x80", "cut short at 1 bytes"),
        "a file that ends in a pickle": (torch_legacy(good)[:100], "cut short at 100 bytes"),
        "another version": (torch_legacy(good, version=number(1002)), "its version is none"),
        "a version that is a truth": (torch_legacy(good, version=b"\x88"), "its version is none"),
        "a system that is a list": (torch_legacy(good, system=b"]"), "its byte order is none"),
        "a system without a byte order": (torch_legacy(good, system=b"}"), "its byte order is none"),
        "no key for a storage": (torch_legacy(good, keys=b"]"), "its storages are not those"),
        "a key of no storage": (torch_legacy(good, keys=b"](" + text("0") + text("1") + b"e"), "its storages are not"),
        "a key twice": (torch_legacy(good, keys=b"](" + text("0") + text("0") + b"e"), "its storages are not those"),
        "keys that are no texts": (torch_legacy(good, keys=b"](K\0e"), "its storages are not those"),
        "keys that are a text": (torch_legacy(good, keys=text("0")), "its storages are not those"),
        "data cut short": (torch_legacy(good)[:-5], "bytes and the file has"),
        "data and more": (torch_legacy(good) + b"12345", "bytes and the file has"),
        "a count that differs": (torch_legacy(good, data=struct.pack("<q", 7) + bytes(32)), "has 7 numbers"),
        "a count below nought": (torch_legacy(good, data=struct.pack("<q", -8) + bytes(32)), "numbers, and its"),
        "a view beyond its storage": (torch_legacy(view("v", 4, 5)), "reaches beyond it"),
        "a view below nought": (torch_legacy(view("v", -4, 8)), "says no place"),
        "a view at 2^63": (torch_legacy(view("v", 2**63, 8)), "says no place"),
        "a view of too little": (torch_legacy(view("v", 4, 4)), "'w' needs 32 bytes of its storage, which has 16"),
    } | {
        what: (torch_legacy(code) if b"storage" in code else torch_legacy(code, keys=b"]", data=b""), says)
        for what, (code, says) in pickle_faults(legacy=True).items()
    }  # fmt: skip


def faults() -> dict[str, dict[str, tuple[bytes, str]]]:
    """By format: what is wrong, the file, and words that must be said of it."""
    return {"safetensors": safetensors_faults(), "zip": zip_faults(), "legacy": legacy_faults()}


# Code that would run


class Made:
    """Makes a folder when an object of it is created, or given its state."""

    def __new__(cls, path: str = "", *, named: str = ""):
        if path or named:
            os.mkdir(path or named)  # noqa: PTH102 - what such code would call
        return super().__new__(cls)

    def __setstate__(self, path: str):
        os.mkdir(path)  # noqa: PTH102


def traps(mark: str) -> dict[str, bytes]:
    """Opcodes that make something called `mark` when they are unpickled, by the way in which they do."""
    touch, path, made = text(f"touch {mark}"), text(mark), b"ctests.hostile\nMade\n"
    system = b"cos\nsystem\n"
    script = text(f"__import__('os').mkdir({mark!r})")
    return {
        "REDUCE": system + touch + b"\x85R",
        "REDUCE of a name on the stack": text("os") + text("system") + b"\x93" + touch + b"\x85R",
        "REDUCE of eval": b"cbuiltins\neval\n" + script + b"\x85R",
        "REDUCE of eval as Python 2 calls it": b"c__builtin__\neval\n" + script + b"\x85R",
        "REDUCE of getattr": b"cbuiltins\ngetattr\ncbuiltins\n__import__\n" + text("os") + b"\x85R" + text("mkdir")
        + b"\x86R" + path + b"\x85R",
        "INST": b"(" + touch + b"ios\nsystem\n",
        "OBJ": b"(" + system + touch + b"o",
        "NEWOBJ": made + path + b"\x85\x81",
        "NEWOBJ_EX": made + b")}" + text("named") + path + b"s\x92",
        "BUILD": made + b")\x81" + path + b"b",
        "in the arguments of a known call": b"ccollections\nOrderedDict\n](" + text("k") + system + touch
        + b"\x85R\x86e\x85R",
        "a tensor of a type": b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\ncos\n_exit\n" + touch
        + b"\x85}tR",
        "a key": b"}" + system + touch + b"\x85RNs",
        "popped": system + touch + b"\x85R0N",
        "in a memo": system + touch + b"\x85Rq\x070N",
    }  # fmt: skip


def trapped(code: bytes) -> dict[str, tuple[str, bytes]]:
    """Files with that code in every place where a pickle stands: the format, and the file."""
    good, old = table(("w", tensor())), tensor(legacy=True)
    beside = b"}(" + text("w") + tensor() + text("trap") + code + b"u"
    keys = b"](" + text("0") + b"e"
    return {
        "beside a tensor": ("zip", torch_zip(beside)),
        "instead of tensors": ("zip", torch_zip(code)),
        "in a second pickle": ("zip", torch_zip(good, Entry("m/evil.pkl", program(code)))),
        "in a second pickle of the same name": ("zip", torch_zip(good, Entry("m/data.pkl", program(code)))),
        "beside a tensor, older": ("legacy", torch_legacy(b"}(" + text("w") + old + text("trap") + code + b"u")),
        "in the magic number": ("legacy", torch_legacy(table(("w", old)), magic=code)),
        "before the magic number": ("legacy", torch_legacy(table(("w", old)), magic=code + b"0" + MAGIC)),
        "before the version": ("legacy", torch_legacy(table(("w", old)), version=code + b"0" + number(1001))),
        "in the system": ("legacy", torch_legacy(table(("w", old)), system=code)),
        "before the keys": ("legacy", torch_legacy(table(("w", old)), keys=code + b"0" + keys)),
        "a pickle alone": ("legacy", program(code)),
        "a pickle alone, later": ("legacy", b"\x80\x04" + code + b"."),
    }


# What is large


def header_of(tensors: int) -> bytes:
    entries = (f'"{i:06}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(tensors))
    return framed("{" + ",".join(entries) + "}")


def blob(size: int) -> bytes:
    """The opcode that pushes so many bytes, all zero."""
    return b"B" + struct.pack("<I", size) + bytes(size)


MOST = 2_400_000
IDLE = b"N0" * 390_000
# Files of millions of bytes that would take the memory or the time of a careless reader: the format, and the file.
ENORMOUS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a header of 90 MB of blanks": ("safetensors", lambda: framed("{" + " " * 90_000_000 + "}")),
    "a header of one name with a letter of four bytes": (
        "safetensors", lambda: framed(f'{{"\U0001f600{"n" * 24_000_000}":1}}')
    ),
    "a header of empty lists": ("safetensors", lambda: framed('{"a":[' + "[]," * 8_000_000 + "0]}")),
    "a header of 59,000 tensors": ("safetensors", lambda: header_of(59_000)),
    "a header of 61,000 tensors": ("safetensors", lambda: header_of(61_000)),
    "a shape of a million axes": ("safetensors", lambda: framed({"a": entry(0, 4, [1] * 1_000_000)}, bytes(4))),
    "texts": ("zip", lambda: torch_zip(b"X\2\0\0\0ab" * MOST)),
    "texts with a letter of four bytes": (
        "zip", lambda: torch_zip((b"X\xff\xff\0\0\xf0\x9f\x98\x80" + b"n" * 65_531) * 500)
    ),
    "tables": ("zip", lambda: torch_zip(b"}" * MOST)),
    "lists in a list": ("zip", lambda: torch_zip(b"](" + b"]" * MOST + b"e")),
    "memos": ("zip", lambda: torch_zip(b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(2_000_000)))),
    "calls": ("zip", lambda: torch_zip(b"ca\nb\nq\0" + b"h\0)R" * 800_000)),
    "keys": (
        "zip", lambda: torch_zip(b"}(" + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(700_000)) + b"u")
    ),
    "bytes made of one text": (
        "zip", lambda: torch_zip(b"c_codecs\nencode\nq\0X\0\xff\0\0" + b"n" * 0xFF00 + text("latin1") + b"\x86q\1]("
                                 + b"h\0h\1R" * 700_000 + b"e")
    ),
    "tensors under a million names": (
        "zip", lambda: torch_zip(table(("w", tensor() + b"q\7"), ("v", b"](" + b"h\7" * 1_000_000 + b"e")))
    ),
    "tensors under long names": (
        "zip", lambda: torch_zip(table(("w", tensor() + b"q\7"), ("n" * 60_000, b"](" + b"h\7" * 1_000_000 + b"e")))
    ),
    "entries": ("zip", lambda: zipped([Entry(f"m/data/{i}") for i in range(60_000)])),
    "a pickle of 40 MB": ("zip", lambda: torch_zip(blob(40_000_000))),
    "an older pickle of 40 MB": ("legacy", lambda: torch_legacy(blob(40_000_000))),
    "older tables": ("legacy", lambda: torch_legacy(b"}" * MOST)),
    "an older file of long pickles": (
        "legacy", lambda: torch_legacy(IDLE + b"N", system=IDLE + b"}", keys=IDLE + b"]")
    ),
    "settings under long names": (
        "zip", lambda: torch_zip(table(("n" * 60_000, b"](" + tensor() + b"N" * 1_000_000 + b"e")))
    ),
    "one state of many objects": (
        "zip", lambda: torch_zip(b"ca\nb\nq\0}(" + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(300_000))
                                 + b"uq\1](" + b"h\0)Rh\1b" * 150_000 + b"e")
    ),
}  # fmt: skip
