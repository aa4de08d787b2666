"""What a PyTorch file holds, listed without unpickling: names, types, shapes and bytes as torch.load finds them.

The files are torch.save's own, in both formats and every protocol; torch.load is the oracle. Broken files:
test_hostile.py.
"""

import collections
import io
import json
import pickle
import pickletools
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch._weights_only_unpickler import _get_allowed_globals

from gptcli.checkpoint import opcodes
from gptcli.checkpoint.opcodes import Call, Machine, Malformed, Name, Short
from gptcli.checkpoint.pickled import load, read_header
from gptcli.checkpoint.pickles import BITS, Pickled, Section, listed
from gptcli.checkpoint.rebuild import KNOWN, Rebuilder
from gptcli.errors import GptcliError
from tests import hostile
from tests.command import gptcli
from tests.hostile import number, table, text

# torch's types, as the safetensors format calls them, and in its manner those that it lacks.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64",
    torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.complex32: "C32",
    torch.complex64: "C64", torch.complex128: "C128", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
ZIPPED = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


@pytest.fixture
def saved(tmp_path):
    """Saves an object in a new file, and lists it."""

    def save(content: object, zipped: bool = True, name: str = "x.pt", **options: Any) -> Pickled:
        path = tmp_path / name
        torch.save(content, path, _use_new_zipfile_serialization=zipped, **options)
        return listed(path)

    return save


# Any structure


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes, whatever numbers they make."""
    draw = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=draw)
    return raw[..., 0] > 127 if dtype == torch.bool else raw.view(dtype).reshape(shape)


def views(base: torch.Tensor) -> list[torch.Tensor]:
    """Tensors over one storage."""
    return [
        base,
        base[1:],
        base.T,
        base[:, ::2],
        base[0],
        base[:0],
        base[0].expand(3, *base.shape[1:]),
        torch.nn.Parameter(base, requires_grad=False),
        torch.nn.Buffer(base[1:]),
    ]


BASES = st.builds(
    lambda dtype, rows, columns, seed: filled((rows, columns), dtype, seed),
    st.sampled_from(list(DTYPES)), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99),
)  # fmt: skip
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.binary(max_size=6)
KEYS = st.text(max_size=6) | st.integers(-5, 300)


@st.composite
def structures(draw) -> Any:
    """Tables, lists and tuples of tensors and of plain values; tensors may share storages, and tables places."""
    bases = draw(st.lists(BASES, min_size=1, max_size=3))
    tensors = st.builds(lambda base, which: views(base)[which], st.sampled_from(bases), st.integers(0, 8))

    def nested(inner):
        lists = st.lists(inner, max_size=4)
        tables = st.dictionaries(KEYS, inner, max_size=4)
        return lists | lists.map(tuple) | tables | tables.map(collections.OrderedDict)

    return draw(st.recursive(tensors | PLAIN, nested, max_leaves=16))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by its dotted path."""
    if isinstance(value, torch.Tensor):
        yield path or "tensor", value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in pairs:
        yield from flat(inner, f"{path}.{key}" if path else str(key))


def raw(x: torch.Tensor) -> bytes:
    """Its numbers, one after the other."""
    x = x.detach().clone(memory_format=torch.contiguous_format).flatten()
    return bytes(x.view(torch.uint8).tolist()) if x.numel() else b""


def read(held: Pickled, name: str) -> bytes:
    """The tensor's numbers, one after the other, out of the file."""
    info = held.tensors[name]
    with held.file.open("rb") as file:
        file.seek(info.start)
        data = file.read(info.end - info.start)
    if name not in held.strides:
        return data
    size = BITS[info.dtype] // 8

    def rows(shape: tuple[int, ...], strides: tuple[int, ...], at: int) -> bytes:
        if not shape:
            return data[at * size : (at + 1) * size]
        return b"".join(rows(shape[1:], strides[1:], at + i * strides[0]) for i in range(shape[0]))

    return rows(info.shape, held.strides[name], 0)


def same_as_torch(held: Pickled, content: Any = None) -> None:
    """Whatever was saved, if it is given: torch saves in its older format a few types that it can't load again."""
    loaded = list(flat(torch.load(held.file, weights_only=False) if content is None else content))
    theirs = dict(loaded)
    if len(theirs) == len(loaded):  # else two paths are spelt alike
        assert list(held.tensors) == list(theirs)
        assert {name: (DTYPES[x.dtype], tuple(x.shape)) for name, x in theirs.items()} == {
            name: (info.dtype, info.shape) for name, info in held.tensors.items()
        }
        for name, x in theirs.items():
            assert read(held, name) == raw(x), name
            assert held.tensors[name].file == held.file
            assert (name in held.strides) == (not x.is_contiguous())
            assert held.strides.get(name, x.stride()) == x.stride()
        storages = collections.defaultdict(list)
        for name, x in theirs.items():
            storages[x.untyped_storage()._cdata].append(name)
        sizes = {name: x.untyped_storage().nbytes() for name, x in theirs.items()}
        assert sorted(held.shared) == sorted(s for s in storages.values() if len(s) > 1 and sizes[s[0]])
    assert len(held.tensors) == len(loaded)


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@settings(derandomize=True, deadline=None, max_examples=100)
@given(structures(), st.booleans(), st.integers(2, 5))
def test_any_structure(tmp_path_factory, content, zipped, protocol):
    path = tmp_path_factory.mktemp("drawn") / "some.pt"
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    held = listed(path)
    same_as_torch(held, content)
    if zipped or not {x.dtype for _, x in flat(content)} & set(torch.storage._new_dtypes()):
        same_as_torch(held)
    assert held.form == ("zip" if zipped else "legacy") and held.byte_order == "little"
    assert not held.opaque and not held.unread


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("shape", [(3, 4), (), (0,), (2, 0, 3), (1,), (2, 3, 2, 2)], ids=str)
@ZIPPED
def test_every_type_and_shape(saved, zipped, shape, dtype):
    content = {"w": filled(shape, dtype, 1)}
    held = saved(content, zipped)
    same_as_torch(held, content)
    if zipped or dtype not in torch.storage._new_dtypes():
        same_as_torch(held)
    assert held.tensors["w"].dtype == DTYPES[dtype] and BITS[DTYPES[dtype]] == 8 * dtype.itemsize
    assert not held.foreign


def test_every_type_of_torch_is_listed_or_named():
    types = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
    small = {x for x in types if str(x).removeprefix("torch.").startswith(("q", "bits", "float4")) or x.itemsize == 1}
    assert types - set(DTYPES) <= small  # of less than a byte, packed, or of torch's own quantisation


@ZIPPED
def test_many_tensors(saved, zipped):
    """So many that the pickle has to be read in pieces, and the memo in its long form."""
    content = {f"layers.{i}.{'w' * 60}": torch.full((2,), i) for i in range(9_000)}
    held = saved(content, zipped)
    assert list(held.tensors) == list(content)
    data = held.file.read_bytes()
    found = (struct.unpack("<2q", data[info.start : info.end]) for info in held.tensors.values())
    assert all(pair == (i, i) for i, pair in enumerate(found))


def test_a_file_beyond_32_bits(tmp_path):
    """Its sizes and places need the zip format's longer fields; most of it is a hole on the disk."""
    with FakeTensorMode():
        content = {"a": torch.ones(3), "big": torch.empty(5 * 2**30, dtype=torch.uint8), "z": torch.ones(4)}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(content, tmp_path / "big.pt")
    held = listed(tmp_path / "big.pt")
    theirs = torch.load(tmp_path / "big.pt", mmap=True)
    assert {name: info.shape for name, info in held.tensors.items()} == {k: tuple(x.shape) for k, x in theirs.items()}
    start = theirs["a"].untyped_storage().data_ptr()
    for name, info in held.tensors.items():
        assert info.start - held.tensors["a"].start == theirs[name].untyped_storage().data_ptr() - start
    assert held.tensors["z"].start > 2**32


# What training scripts save


def training() -> dict:
    """Model and optimizer of two matrices [4, 3] and one [3], the head tied; AdamW's two moments and its step each."""
    w, head, bias = torch.ones(4, 3), torch.ones(4, 3), torch.ones(3)
    model = {"wte.weight": w, "h.0.weight": head, "h.0.bias": bias, "lm_head.weight": w}
    moments = {i: {"step": torch.tensor(2.0), "exp_avg": x.clone(), "exp_avg_sq": x.clone()}
               for i, x in enumerate((w, head, bias))}  # fmt: skip
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1, 2]}]
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": groups},
        "model_args": {"n_layer": 1, "bias": True, "dropout": 0.0, "vocab_size": None},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(3.5),
        "config": {"dataset": "shakespeare"},
    }


@ZIPPED
def test_a_training_checkpoint(saved, zipped):
    held = saved(training(), zipped)
    assert held.sections == {
        "model": Section(4, 4 * (12 + 12 + 3)),
        "optimizer": Section(9, 4 * (2 * (12 + 12 + 3) + 3)),
        "model_args": Section(0, 0),
        "iter_num": Section(0, 0),
        "best_val_loss": Section(1, 4),
        "config": Section(0, 0),
    }
    assert list(held.model) == ["wte.weight", "h.0.weight", "h.0.bias", "lm_head.weight"]
    assert held.model["h.0.bias"] == held.tensors["model.h.0.bias"] and held.keys == ["model"]
    assert held.unused == ["optimizer", "iter_num", "best_val_loss", "config"]
    assert held.shared == [["model.wte.weight", "model.lm_head.weight"]]
    assert "optimizer.state.2.exp_avg_sq" in held.tensors
    assert held.settings == {
        "optimizer.param_groups": [{"lr": 0.1, "betas": [0.9, 0.95], "params": [0, 1, 2]}],
        "model_args": {"n_layer": 1, "bias": True, "dropout": 0.0, "vocab_size": None},
        "iter_num": 2000,
        "config": {"dataset": "shakespeare"},
    }
    assert not held.opaque and not held.foreign


def test_a_storage_that_two_sections_share_counts_once(saved):
    w = torch.ones(5, 3)
    held = saved({"model": {"w": w}, "ema": {"w": w, "rows": w[1:3], "own": torch.ones(2)}})
    assert held.sections == {"model": Section(1, 60), "ema": Section(3, 8)}
    assert held.shared == [["model.w", "ema.w", "ema.rows"]]


@ZIPPED
def test_a_state_dict_has_no_sections(saved, zipped):
    state = torch.nn.Linear(3, 2).state_dict()
    held = saved(state, zipped)
    assert held.sections == {} and list(held.model) == list(held.tensors) == list(state)
    assert held.keys == [] and held.unused == []


@pytest.mark.parametrize("depth", [("state_dict",), ("model_state_dict",), ("model", "module"), ("module", "model")])
def test_the_state_dict_where_scripts_put_it(saved, depth):
    content: dict = {"a.b": torch.ones(2), "c": torch.ones(3), "step": 4}
    for key in reversed(depth):
        content = {key: content, f"beside {key}": 1}
    held = saved(content)
    assert held.keys == list(depth) and list(held.model) == ["a.b", "c"]
    assert held.unused == [*(f"beside {key}" for key in depth), "step"]
    assert list(load(held.file)) == ["a.b", "c"] == list(read_header(held.file))


@pytest.mark.parametrize("content, names", [([torch.ones(2), {"w": torch.ones(1)}], ["0", "1.w"]),
                                            ((torch.ones(2),), ["0"]), (torch.ones(2), ["tensor"])])  # fmt: skip
def test_tensors_that_stand_in_no_table(saved, content, names):
    held = saved(content)
    assert list(held.tensors) == names and not held.model and not held.sections
    with pytest.raises(GptcliError, match="no state dict with a tensor in it"):
        read_header(held.file)


def test_paths_that_are_spelt_alike_are_told_apart(saved):
    a, b, c = (torch.full((1,), float(i)) for i in range(3))
    held = saved({"a": {"b.c": a}, "a.b": {"c": b}, "a.b.c": c})
    assert list(held.tensors) == ["a.b.c", "a.b.c (2)", "a.b.c (3)"]
    assert [struct.unpack("<f", read(held, name)) for name in held.tensors] == [(0,), (1,), (2,)]


def test_settings_are_cut_where_no_one_would_read_on(saved):
    content = {"losses": list(range(20_000)), "text": "x" * 5_000, "big": 10**30, "deep": [[[[[[[[[[1]]]]]]]]]],
               "device": torch.device("cuda:1"), "type": torch.bfloat16, "nan": float("nan")}  # fmt: skip
    held = saved(content).settings
    assert held["losses"][:3] == [0, 1, 2] and held["losses"][-1] == "…" and len(held["losses"]) == 101
    assert held["text"].startswith("xxx") and held["text"].endswith("…") and len(held["text"]) <= 1_000
    assert held["big"] == "a number of 100 bits" and held["type"] == "torch.bfloat16"
    assert held["device"] == "torch.device('cuda', 1)" and held["nan"] != held["nan"]
    json.dumps(held)


# What is no plain tensor


class Tagged(torch.Tensor):
    """A subclass that torch pickles by its name."""


def tagged() -> torch.Tensor:
    x = torch.ones(2, 3).as_subclass(Tagged)
    x.scale = torch.ones(4)
    return x


@ZIPPED
def test_whole_modules_are_listed_as_their_state_dict(saved, zipped):
    """A class is foreign, and its attributes are in the file: what lies in them is listed by its state dict's names."""
    inner = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.ModuleList([torch.nn.Linear(3, 1)])
    )
    held = saved({"model": inner, "epoch": 3}, zipped)
    assert list(held.model) == list(inner.state_dict())
    for name, x in inner.state_dict().items():
        assert read(held, f"model.{name}") == raw(x)
    assert held.opaque == {"model": "torch.nn.modules.container.Sequential()"}
    assert "torch.nn.modules.linear.Linear" in held.foreign and "torch.nn.modules.batchnorm.BatchNorm1d" in held.foreign
    assert held.unused == ["epoch"]
    alone = saved(inner, zipped, "alone.pt")
    assert list(alone.model) == list(alone.tensors) == list(inner.state_dict())
    with pytest.raises(GptcliError, match=r"Python object torch\.nn\.modules\.container\.Sequential"):
        read_header(alone.file)


OPAQUE = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "a sparse tensor [3, 3]", 3 * 4 + 6 * 8),
    "sparse rows": (
        lambda: torch.sparse_csr_tensor([0, 1, 2], [2, 0], [1.0, 2.0], (2, 3)), "a sparse tensor [2, 3]", 2 * 4 + 5 * 8
    ),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8), "a quantised tensor [2, 4]", 8
    ),
    "meta": (lambda: torch.ones(2, 3, device="meta"), "a tensor without data [2, 3]", 0),
    "conjugated": (lambda: torch.ones(2, dtype=torch.complex64).conj(), "to be conjugated or negated, [2]", 16),
    "a type of four bits": (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "another type", 2),
    "a path": (lambda: Path("a/b"), f"pathlib.{type(Path()).__name__}('a', 'b')", 0),
    "a storage": (lambda: torch.ones(3).untyped_storage(), "storage of 12 bytes", 12),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", OPAQUE)
@ZIPPED
def test_what_is_no_plain_tensor_stays_a_text(saved, zipped, kind):
    make, says, size = OPAQUE[kind]
    held = saved({"x": {"odd": make(), "w": torch.ones(1)}}, zipped)
    assert list(held.tensors) == ["x.w"] and held.sections == {"x": Section(1, size + 4)}
    assert says in held.opaque["x.odd"]


def test_a_class_alone_is_a_setting_that_is_foreign(saved):
    held = saved({"x": {"odd": io.BytesIO, "w": torch.ones(1)}})
    assert held.settings == {"x.odd": "_io.BytesIO"} and held.foreign == ["_io.BytesIO"] and not held.opaque


def test_numbers_of_numpy_stay_a_text(saved):
    numpy = pytest.importorskip("numpy")
    held = saved({"loss": numpy.float64(2.5), "array": numpy.arange(3)})
    assert set(held.opaque) == {"loss", "array"} and all("multiarray" in said for said in held.opaque.values())
    assert any("scalar" in name for name in held.foreign)


@ZIPPED
def test_a_tensor_of_a_subclass_is_listed_with_what_it_carries(saved, zipped):
    """torch rebuilds it through the plain tensor; whether its class is known is another matter."""
    held = saved({"w": tagged()}, zipped)
    assert {name: info.shape for name, info in held.tensors.items()} == {"w": (2, 3), "w.scale": (4,)}
    assert read(held, "w") == raw(torch.ones(2, 3))
    assert held.foreign == [f"{__name__}.Tagged"]
    x = torch.ones(3)
    x.note = "kept"
    held = saved({"w": x}, zipped, "plain.pt")
    assert list(held.tensors) == ["w"] and not held.foreign


def test_objects_that_know_each_other_are_listed_once(saved):
    one, two = Knot("one"), Knot("two")
    one.other, two.other = two, one
    one.itself = [one]
    held = saved({"a": one, "b": one})
    assert sorted(held.tensors) == ["a.other.w", "a.w"]
    assert list(held.opaque) == ["a", "a.other"]


class Knot:
    def __init__(self, name: str):
        self.name, self.w = name, torch.ones(2)


def test_tables_that_hold_themselves_end(saved):
    held: dict = {"w": torch.ones(1), "inner": []}
    held["self"] = held
    held["inner"].append(held["inner"])
    listing = saved(held)
    assert list(listing.tensors) == ["w"]


# Files that no one writes any more, by hand


def test_a_view_of_a_storage_in_the_older_format(tmp_path):
    """PyTorch 0.2 wrote these: three numbers, from the second on, of a storage of eight."""
    code = hostile.tensor(count=8, shape=(3,), strides=(1,), legacy=True).replace(b"NtQ", number(("v", 1, 3)) + b"tQ")
    path = tmp_path / "old.pt"
    path.write_bytes(hostile.torch_legacy(table(("w", code)), data=struct.pack("<q8f", 8, *range(8))))
    same_as_torch(listed(path))
    assert struct.unpack("<3f", read(listed(path), "w")) == (1, 2, 3)


def test_the_first_call_that_built_tensors(tmp_path):
    code = (
        hostile.tensor()
        .replace(b"_rebuild_tensor_v2", b"_rebuild_tensor")
        .replace(b"\x89ccollections\nOrderedDict\n)RtR", b"tR")
    )
    path = tmp_path / "old.pt"
    path.write_bytes(hostile.torch_zip(table(("w", code)), data=struct.pack("<8f", *range(8))))
    same_as_torch(listed(path))


@pytest.mark.parametrize("kind", ["torch.cuda\nFloatStorage", "torch\nFloatStorage"])
def test_storages_of_another_device(tmp_path, kind):
    path = tmp_path / "gpu.pt"
    path.write_bytes(hostile.torch_zip(table(("w", hostile.tensor(kind=kind))), data=struct.pack("<8f", *range(8))))
    held = listed(path)
    assert (held.tensors["w"].dtype, held.tensors["w"].shape) == ("F32", (4, 2)) and not held.foreign


def test_numbers_the_other_way_round(tmp_path):
    path, code = tmp_path / "big.pt", table(("w", hostile.tensor()))
    path.write_bytes(hostile.torch_zip(code, hostile.Entry("m/byteorder", b"big"), data=struct.pack(">8f", *range(8))))
    held = listed(path)
    assert held.byte_order == "big" and struct.unpack(">8f", read(held, "w")) == tuple(range(8))
    assert torch.load(path)["w"].flatten().tolist() == list(range(8))
    system = number({"protocol_version": 1001, "little_endian": False, "type_sizes": {}})
    data = struct.pack(">q8f", 8, *range(8))
    path.write_bytes(hostile.torch_legacy(table(("w", hostile.tensor(legacy=True))), system=system, data=data))
    assert listed(path).byte_order == "big"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_of_torch(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.arange(6.0).view(2, 3))

        def forward(self, x):
            return x @ self.w

    torch.jit.trace(Net(), torch.ones(1, 2)).save(tmp_path / "script.pt")
    held = listed(tmp_path / "script.pt")
    assert held.form == "torchscript" and {name: info.shape for name, info in held.tensors.items()} == {"w": (2, 3)}
    assert held.foreign and struct.unpack("<6f", read(held, "w")) == tuple(range(6))
    with pytest.raises(GptcliError, match="a TorchScript archive"):
        read_header(held.file)


def test_data_that_nothing_refers_to(tmp_path):
    path, code = tmp_path / "more.pt", table(("w", hostile.tensor()))
    path.write_bytes(hostile.torch_zip(code, hostile.Entry("m/data/7", bytes(12))))
    assert listed(path).unread == {"7": 12}


# What it is instead

INSTEAD = {
    "nothing": (b"", "the file is empty"),
    "an LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n", "a Git LFS pointer"),
    "a page": (b"<!DOCTYPE html><html></html>", "an HTML page"),
    "a refusal": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "an XML document"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(32), "a GGUF file under another name"),
    "safetensors": (hostile.save({"w": torch.ones(1)}), "a safetensors file under another name"),
    "NumPy": (b"\x93NUMPY\x01\0", "an array of NumPy"),
    "HDF5": (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    "gzip": (b"\x1f\x8b\x08\0", "a gzip archive"),
    "tar": (b"x" * 257 + b"ustar" + bytes(250), "a tar archive"),
    "text": (b"hello", "neither a zip file nor a pickle"),
    "a zip file": (hostile.zipped([hostile.Entry("a.txt", b"a")]), "a zip file without data.pkl"),
    "a pickle": (pickle.dumps({"a": 1}, 4), "a pickle, but not of PyTorch (table of 1)"),
    "a pickle of NumPy": (pickle.dumps(collections.Counter("a"), 4), "a pickle, but not of PyTorch"),
}  # fmt: skip


@pytest.mark.parametrize("case", INSTEAD)
def test_what_a_file_is_instead(tmp_path, case):
    data, says = INSTEAD[case]
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(GptcliError) as caught:
        listed(tmp_path / "x.bin")
    assert says in caught.value.message and caught.value.code == "not-a-checkpoint"


@ZIPPED
def test_a_download_cut_short_says_the_bytes_needed_and_present(tmp_path, zipped):
    whole = hostile.by_torch({"w": torch.ones(1000)}, zipped)
    (tmp_path / "x.pt").write_bytes(whole[:3000])
    with pytest.raises(GptcliError, match=r"tensors need [45],\d\d\d bytes.* and the file has 3,000"):
        listed(tmp_path / "x.pt")


def test_what_is_no_regular_file(tmp_path):
    for path, says in ((tmp_path, "not a regular file"), (tmp_path / "none.pt", "No such file")):
        with pytest.raises(GptcliError, match=says):
            listed(path)


def test_a_file_that_was_written_over_is_listed_anew(saved):
    assert list(saved({"a": torch.ones(1)}).tensors) == ["a"]
    assert list(saved({"b": torch.ones(1), "c": torch.ones(2)}).tensors) == ["b", "c"]


# The machine

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(JSON, st.integers(0, 5))
def test_plain_values_are_what_pickle_makes_of_them(value, protocol):
    data = pickle.dumps(value, protocol)
    machine = Machine(b"before" + data + b"behind", 6)
    assert machine.run() == value == pickle.loads(data)  # noqa: S301
    assert machine.at == 6 + len(data) and not machine.names


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.sets(st.integers()), st.binary(), st.tuples(st.integers(), st.text()), st.integers(2, 5))
def test_sets_bytes_and_tuples(numbers, some, pair, protocol):
    data = pickle.dumps([numbers, frozenset(numbers), some, pair], protocol)
    made = Machine(data, 0, Rebuilder().called).run()
    assert set(made[0]) == set(made[1]) == numbers and made[2:] == [some, pair]
    assert Machine(pickle.dumps(bytearray(some), 5)).run() == some


@pytest.mark.parametrize("op", pickletools.opcodes, ids=lambda op: op.name)
def test_every_opcode_is_known(op):
    """Alone, none of them has what it needs on the stack or behind it; that is another complaint."""
    try:
        Machine(op.code.encode("latin-1")).run()
    except Malformed as error:
        assert "no opcode" not in str(error)


def test_no_other_byte_is_an_opcode():
    for code in set(range(256)) - {ord(op.code) for op in pickletools.opcodes}:
        with pytest.raises(Malformed, match="which is no opcode"):
            Machine(bytes([code])).run()


def test_calls_stay_calls():
    """Every way of making an object: a name, its arguments, its state, its items."""
    ways = {
        "REDUCE": b"cos\nsystem\n" + text("a") + b"\x85R",
        "INST": b"(" + text("a") + b"ios\nsystem\n",
        "OBJ": b"(cos\nsystem\n" + text("a") + b"o",
        "NEWOBJ": b"cos\nsystem\n" + text("a") + b"\x85\x81",
        "NEWOBJ_EX": b"cos\nsystem\n" + text("a") + b"\x85}\x92",
        "STACK_GLOBAL": text("os") + text("system") + b"\x93" + text("a") + b"\x85R",
    }
    for way, code in ways.items():
        machine = Machine(code + b"}" + text("k") + b"Nsb(" + text("i") + b"K\x01uN" + b"a.")
        made = machine.run()
        assert type(made) is Call and type(made.function) is Name, way
        assert (made.function.text, made.args, made.state) == ("os.system", ("a",), {"k": None}), way
        assert made.items == [("i", 1), (None,)] and list(machine.names) == ["os.system"], way


def test_a_pickle_that_goes_on_is_told_from_a_broken_one():
    whole = pickle.dumps({"a": [1, 2.5, "b" * 300]}, 2)
    for length in range(len(whole)):
        with pytest.raises(Short):
            Machine(whole[:length]).run()


def test_known_names_are_those_that_torch_allows():
    """What a later version adds should be added here; what an earlier one lacks, it lacks altogether."""
    allowed = set(_get_allowed_globals())
    assert allowed <= KNOWN and {"torch.Size", "collections.OrderedDict", "torch.float8_e5m2"} <= allowed
    assert all(not hasattr(torch, name.removeprefix("torch.")) for name in KNOWN - allowed)


def test_bounds_leave_room_for_real_checkpoints(saved):
    """Opcodes, visits and objects of a checkpoint with an optimizer, by the tensor: room for sixty thousand of them."""
    model = {f"h.{i}.weight": torch.nn.Parameter(torch.ones(1, 1)) for i in range(300)}
    state = {
        i: {"step": torch.ones(()), "exp_avg": torch.ones(1, 1), "exp_avg_sq": torch.ones(1, 1)} for i in range(300)
    }
    held = saved({"model": model, "optimizer": {"state": state}})
    data = ZipFile(held.file).read("x/data.pkl")
    steps = sum(1 for _ in pickletools.genops(data)) / 1200
    assert steps * 60_000 < opcodes.MAX_STEPS and len(data) / 1200 * 60_000 < 2**25


# Without torch


@ZIPPED
def test_headers_need_no_torch(tmp_path, zipped):
    (tmp_path / "mini.yaml").write_text(hostile.CONFIG)
    (tmp_path / "x.pt").write_bytes(hostile.by_torch({"model": hostile.state()}, zipped))
    script = (
        "import sys\nfrom gptcli.cli.main import main\n"
        "sys.argv = ['gptcli', *sys.argv[1:]]\nstatus = main()\n"
        "print(status, sorted({'torch', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
    )
    for words in (["params", "x.pt", "-c", "mini.yaml"], ["inspect", "x.pt"]):
        ran = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=tmp_path)
        assert ran.stdout and ran.stderr.splitlines()[-1] == "0 []", ran


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_every_suffix(tmp_path, suffix):
    (tmp_path / "mini.yaml").write_text(hostile.CONFIG)
    (tmp_path / f"x{suffix}").write_bytes(hostile.by_torch({"state_dict": hostile.state(), "epoch": 3}, True))
    ran = gptcli("forward", "-m", tmp_path / f"x{suffix}", "-c", tmp_path / "mini.yaml", "--ids", "1,2", "--json")
    assert ran.status == 0 and ran.json["model"]["parameters"] == 32
    assert "is a training checkpoint: epoch not used" in ran.err


def test_a_later_protocol_is_counted_and_not_run(tmp_path):
    """torch's weights-only loader reads protocol 2; the listing reads all."""
    (tmp_path / "mini.yaml").write_text(hostile.CONFIG)
    torch.save(hostile.state(), tmp_path / "x.pt", pickle_protocol=4)
    assert gptcli("params", tmp_path / "x.pt", "-c", tmp_path / "mini.yaml", "-q").out == "32\n"
    ran = gptcli("forward", "-m", tmp_path / "x.pt", "-c", tmp_path / "mini.yaml", "--ids", "1")
    assert ran.status == 2 and "torch's weights-only loader refuses it" in ran.err
