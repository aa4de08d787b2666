"""The header of a .gguf file: what the gguf package writes and reads, and one clear line for everything else."""

import random
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from gptcli.checkpoint.gguf import BY_NAME, KINDS, UNPACKED, Gguf, Values, decimal, numbers_of, read_header
from gptcli.errors import GptcliError
from tests.ggufs import F32, NUMBERS, Writer

W = Writer()


@pytest.fixture
def write(tmp_path):
    def make(data: bytes, name: str = "some.gguf") -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return make


def refused(path: Path) -> str:
    with pytest.raises(GptcliError) as caught:
        read_header(path)
    message = caught.value.message
    assert "\n" not in message and "\x1b" not in message and "\0" not in message and len(message) < 500
    assert caught.value.code in ("corrupt", "incomplete", "file")
    return message


# As the package


def test_types_are_the_package_s():
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert {number: tuple(kind) for number, kind in KINDS.items()} == theirs
    assert set(BY_NAME) >= UNPACKED


SCALARS = {
    "u8": 200, "i8": -100, "u16": 60_000, "i16": -30_000, "u32": 4_000_000_000, "i32": -2_000_000_000, "f32": 0.5,
    "bool": True, "u64": 2**63 + 5, "i64": -(2**62), "f64": 1e-300,
}  # fmt: skip


@pytest.mark.parametrize("endian", [GGUFEndian.LITTLE, GGUFEndian.BIG], ids=["little", "big"])
@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_reads_what_the_package_writes(tmp_path, endian, alignment):
    path = tmp_path / "theirs.gguf"
    writer = GGUFWriter(path, "llama", endianess=endian)
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, value in SCALARS.items():
        writer.add_key_value(f"a.{name}", value, GGUFValueType(NUMBERS[name][0]))
        writer.add_key_value(f"b.{name}", [value] * 3, GGUFValueType.ARRAY, GGUFValueType(NUMBERS[name][0]))
    writer.add_string("c.text", "Grüße, \N{CAT FACE}")
    writer.add_array("c.texts", ["", "a", "▁the", "x" * 5000])
    rng = np.random.default_rng(0)
    arrays = {
        "one.weight": rng.standard_normal((3, 5)).astype(np.float32),
        "two.bias": rng.standard_normal(7).astype(np.float16),
        "cube": rng.standard_normal((2, 3, 4)),
        "whole": np.arange(6, dtype=np.int32).reshape(2, 3),
    }
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.add_tensor("packed", rng.integers(0, 256, (4, 2 * 18), dtype=np.uint8), raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(path)
    for name, value in SCALARS.items():
        assert found.metadata[f"a.{name}"] == value and type(found.metadata[f"a.{name}"]) is type(value)
        assert found.metadata[f"b.{name}"] == [value] * 3
    assert found.metadata["c.text"] == "Grüße, \N{CAT FACE}"
    assert found.metadata["c.texts"] == ["", "a", "▁the", "x" * 5000]
    assert found.metadata["general.architecture"] == "llama"
    prefix = "" if endian == GGUFEndian.LITTLE else "big-endian "
    kinds = dict(zip((*arrays, "packed"), ("F32", "F16", "F64", "I32", "Q4_0")))
    assert {name: info.dtype for name, info in found.infos.items()} == {n: prefix + k for n, k in kinds.items()}
    assert {name: info.shape for name, info in found.infos.items()} == {
        **{name: array.shape for name, array in arrays.items()},
        "packed": (4, 64),
    }
    for tensor in GGUFReader(path).tensors:
        info = found.infos[tensor.name]
        assert (info.start, info.end - info.start) == (tensor.data_offset, tensor.n_bytes)
        assert info.file == path and info.key == tensor.name
        if prefix == "" and tensor.name in arrays:
            assert path.read_bytes()[info.start : info.end] == arrays[tensor.name].tobytes()


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("version", [2, 3])
def test_arrays_within_arrays(write, order, version):
    w = Writer(order)
    keys = [
        w.key("none", "u32[]", []),
        w.key("numbers", "i16[][]", [[1, -2], [], [3]]),
        w.key("texts", "text[][][]", [[["a"], ["b", ""]], [[]]]),
        w.key("after", "bool", False),
    ]
    found = read_header(write(w.file(keys, version=version))).metadata
    assert found["numbers"] == [[1, -2], [], [3]] and found["texts"] == [[["a"], ["b", ""]], [[]]]
    assert found["none"] == [] and found["after"] is False
    assert len(found["numbers"]) == 3 and found["numbers"][2] == [3]


VALUES = st.one_of(
    *(st.tuples(st.just(kind), st.integers(lo, hi)) for kind, lo, hi in (("u8", 0, 255), ("i64", -(2**63), 2**63 - 1))),
    st.tuples(st.just("text"), st.text(st.characters(exclude_categories=["Cs"]), max_size=9)),
    st.tuples(st.just("f64"), st.floats(allow_nan=False)),
    st.tuples(st.just("bool[]"), st.lists(st.booleans(), max_size=5)),
    st.tuples(st.just("text[]"), st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=5)),
    st.tuples(st.just("u16[][]"), st.lists(st.lists(st.integers(0, 65535), max_size=4), max_size=4)),
)


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), VALUES, max_size=8),
    st.sampled_from("<>"),
)
@settings(max_examples=60, deadline=None)
def test_any_metadata_comes_back(tmp_path_factory, table, order):
    w, path = Writer(order), tmp_path_factory.mktemp("any") / "any.gguf"
    path.write_bytes(w.file(w.key(name, *value) for name, value in table.items()))
    assert read_header(path).metadata == {name: value for name, (_, value) in table.items()}


@pytest.mark.parametrize(
    ("stored", "shown"),
    [(1e-5, "1e-05"), (0.1, "0.1"), (10_000.0, "10000.0"), (1 / 3, "0.33333334"), (1.1902381, "1.1902381"),
     (3.4028234663852886e38, "3.4028235e+38"), (1e-45, "1e-45"), (0.0, "0.0"), (-2.5, "-2.5"),
     (float("inf"), "inf"), (float("nan"), "nan")],
)  # fmt: skip
def test_a_float32_is_the_shortest_number_that_it_is_nearest_to(write, stored, shown):
    value = read_header(write(W.file([W.key("x", "f32", stored)]))).metadata["x"]
    assert repr(value) == shown
    assert value != value or struct.pack("<f", value) == struct.pack("<f", stored)


@given(st.floats(width=32))
@settings(deadline=None)
def test_no_float32_is_changed(value):
    short = decimal(value)
    assert value != value or struct.pack("<f", short) == struct.pack("<f", value)
    assert len(repr(short)) <= len(repr(value))


def test_vocabularies_are_not_decoded_before_they_are_asked_for(write):
    words = [f"word{i}" for i in range(262_144)]
    path = write(W.file([W.key("tokenizer.ggml.tokens", "text[]", words), W.key("a", "u8", 1)]))
    begun = time.process_time()
    tokens = read_header(path).metadata["tokenizer.ggml.tokens"]
    assert time.process_time() - begun < 1  # 0.06 s where nothing else runs
    assert isinstance(tokens, Values) and tokens.made is None and len(tokens) == 262_144
    assert tokens[-1] == "word262143" and tokens.made == words
    assert repr(tokens).startswith("['word0', 'word1'") and len(repr(tokens)) < 120


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_without_anything(write, version):
    assert read_header(write(W.file(version=version))) == Gguf(metadata={}, infos={}, files=(write(W.file()),))


def test_short_vectors_are_read_without_torch(write):
    data = np.array([1.5, -2.0], dtype=np.float32).tobytes().ljust(32, b"\0") + np.float16([0.5]).tobytes()
    path = write(W.file([], [W.entry("a", [2], F32, 0), W.entry("b", [1], 1, 32), W.entry("c", [32], 2, 64)],
                        data.ljust(64, b"\0") + bytes(18)))  # fmt: skip
    infos = read_header(path).infos
    assert numbers_of(infos["a"]) == [1.5, -2.0] and numbers_of(infos["b"]) == [0.5]
    with pytest.raises(GptcliError, match=r"'c' is \[32\] of Q4_0, not a short vector"):
        numbers_of(infos["c"])


# Split files


def split(folder: Path, parts: int = 3, names: int = 7) -> list[Path]:
    """A model in several files, written by the package."""
    writer = GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=-(-names // parts))
    writer.add_context_length(5)
    for i in range(names):
        writer.add_tensor(f"t.{i}", np.full((2, 3), i, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("named", [0, 1, 2])
def test_a_split_model_opens_as_one(tmp_path, named):
    paths = split(tmp_path)
    assert [p.name for p in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    found = read_header(paths[named])
    assert list(found.infos) == [f"t.{i}" for i in range(7)] and found.files == tuple(paths)
    assert found.metadata["llama.context_length"] == 5
    for i, info in enumerate(found.infos.values()):
        assert info.file == paths[i // 3] and numbers_of(info) == [i] * 6


def test_parts_that_are_missing_are_named(tmp_path):
    paths = split(tmp_path)
    paths[1].unlink()
    assert "1 of its 3 parts are missing (m-00002-of-00003.gguf)" in refused(paths[0])
    lone = tmp_path / "m-00002-of-99999.gguf"
    lone.write_bytes(W.file())
    begun = time.monotonic()
    assert "99998 of its 99999 parts are missing (m-00001-of-99999.gguf, m-00003" in refused(lone)
    assert time.monotonic() - begun < 10


def test_parts_that_are_not_one_model(tmp_path):
    paths = split(tmp_path)
    second = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    assert "says that it is part 2 (from 0) of 3" in refused(paths[0])
    paths[1].write_bytes(second.replace(b"t.4", b"t.0"))
    assert "tensor 't.0' is in m-00001-of-00003.gguf and in m-00002-of-00003.gguf" in refused(paths[0])
    count = b"split.tensors.count" + struct.pack("<Ii", 5, 7)
    paths[1].write_bytes(second)
    paths[0].write_bytes(paths[0].read_bytes().replace(count, count[:-4] + struct.pack("<i", 9)))
    assert "9 tensors are promised and the parts hold 7" in refused(paths[2])


def test_names_that_number_no_part(tmp_path):
    paths = split(tmp_path)
    other = tmp_path / "x.gguf"
    other.write_bytes(paths[0].read_bytes())
    assert "one of 3 parts, which its name does not number" in refused(other)
    for name in ("m-00004-of-00003.gguf", "m-00000-of-00003.gguf"):
        paths[0].rename(tmp_path / name)
        assert "numbers no part of 3" in refused(tmp_path / name)
        (tmp_path / name).rename(paths[0])


# Faults


ENTRY = W.entry("t", [4], F32, 0)
KEY = W.key("k", "u32", 7)
BAD = {
    "nothing": (b"", "the file is empty"),
    "magic alone": (b"GGUF", "4 bytes are too few"),
    "no magic": (b"GGUG" + bytes(40), "not a GGUF file: it does not begin with GGUF"),
    "a page": (b"<!DOCTYPE html><html>", "an HTML page, not weights"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "of old": (b"tjgg" + bytes(40), "a file of GGML's formats before GGUF"),
    "version 1": (W.file(version=1), "GGUF version 1, which counted in 32 bits and is not read (2 and 3 are)"),
    "version 4": (W.file(version=4), "GGUF version 4 is not known"),
    "version 1, big": (Writer(">").file(version=1), "GGUF version 1, which counted"),
    "version 0": (W.file(version=0), "GGUF version 0 is not known"),
    "keys beyond": (W.file([KEY], counts=(0, 2**60)), "1,152,921,504,606,846,976 keys are promised, and "),
    "tensors beyond": (W.file([], [ENTRY], counts=(2**63, 0)), "9,223,372,036,854,775,808 tensors are promised"),
    "one key more": (W.file([KEY], counts=(0, 2), alignment=1), "keys are promised"),
    "a key's length": (W.file([struct.pack("<Q", 2**40) + b"k" * 20]), "key 1 of 1: a text of 1,099,511,627"),
    "a text's length": (
        W.file([W.text("k") + struct.pack("<IQ", 8, 2**62)], alignment=64),
        "key 'k': a text of 4,611,686,018,427,387,904 bytes, and",
    ),
    "an array's length": (
        W.file([W.text("k") + struct.pack("<IIQ", 9, 4, 2**61)], alignment=64),
        "2,305,843,009,213,693,952 values of key 'k' are promised",
    ),
    "texts beyond": (
        W.file([W.text("k") + struct.pack("<IIQ", 9, 8, 2**61)], alignment=64),
        "2,305,843,009,213,693,952 texts of key 'k' are promised",
    ),
    "a text in an array": (
        W.file([W.text("k") + struct.pack("<IIQQ", 9, 8, 2, 2**63) + bytes(8)]),
        "key 'k': cut short within its 2 texts",
    ),
    "a text just beyond": (
        W.file([W.text("k") + struct.pack("<IIQQ", 9, 8, 1, 5)], alignment=1),
        "key 'k': cut short within its 1 texts",
    ),
    "arrays beyond": (
        W.file([W.text("k") + struct.pack("<IIQ", 9, 9, 2**61)], alignment=64),
        "arrays of key 'k' are promised",
    ),
    "too deep": (
        W.file([W.text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000]),
        "key 'k': arrays nested more than 4 deep",
    ),
    "a value's type": (W.file([W.text("k") + struct.pack("<I", 13)]), "key 'k' is of the unknown type 13"),
    "an array's type": (W.file([W.text("k") + struct.pack("<IIQ", 9, 99, 1)], alignment=64), "array of the unknown"),
    "a key twice": (W.file([KEY, KEY]), "key 'k' stands twice"),
    "a key in no UTF-8": (W.file([W.key(b"\xff\xfe", "u8", 1)]), "the name of key 1 of 1 is not UTF-8"),
    "alignment of 0": (W.file([W.key("general.alignment", "u32", 0)]), "general.alignment: 0 is not a power of two"),
    "alignment of 48": (W.file([W.key("general.alignment", "u32", 48)]), "general.alignment: 48 is not a power of two"),
    "alignment as text": (W.file([W.key("general.alignment", "text", "x" * 99)]), "xxxxxxxxxxxxxxxxxxxx is not"),
    "alignment of 2^31": (
        W.file([W.key("general.alignment", "u32", 2**31)], [ENTRY], bytes(64)),
        "tensor 't' ends at byte 2,147,483,664",
    ),
    "a tensor twice": (W.file([], [ENTRY, ENTRY], bytes(64)), "tensor 't' stands twice"),
    "five sizes": (W.file([], [W.entry("t", [1] * 5, F32, 0)], bytes(64)), "tensor 't' has 5 dimensions, and 4"),
    "many sizes": (W.file([], [W.entry("t", [], F32, 0)[:9] + b"\xff" * 30]), "has 4,294,967,295 dimensions"),
    "too large": (W.file([], [W.entry("t", [2**32, 2**31], F32, 0)]), "'t' is too large for any file: 4294967296 ×"),
    "beyond the file": (W.file([], [W.entry("t", [40], F32, 0)], bytes(64)), "cut short: tensor 't' ends at byte"),
    "an offset beyond": (W.file([], [W.entry("t", [4], F32, 2**40)], bytes(64)), "tensor 't' ends at byte 1,099,"),
    "a row of 40": (W.file([], [W.entry("t", [40, 2], 2, 0)]), "a row of 40 does not divide into Q4_0's blocks of 32"),
    "a number packed": (W.file([], [W.entry("t", [], 2, 0)]), "a row of 1 does not divide into Q4_0's blocks of 32"),
    "unaligned": (
        W.file([], [W.entry("t", [4], F32, 4)], bytes(64)),
        "tensor 't' begins at 4, which is no multiple of 32",
    ),
    "in one another": (
        W.file([], [W.entry("a", [9], F32, 0), W.entry("b", [4], F32, 32)], bytes(64)),
        "'b' begins at byte 128, and 'a' ends at 132",
    ),
    "the same place": (
        W.file([], [W.entry("a", [4], F32, 0), W.entry("b", [4], F32, 0)], bytes(64)),
        "'b' begins at byte 96, and 'a' ends at 112",
    ),
    "a tensor in no UTF-8": (W.file([], [W.entry(b"\xff", [4], F32, 0)], bytes(64)), "tensor 1 of 1 is not UTF-8"),
    "a name of a page": (
        W.file([], [W.entry("\x1b[2J" + "x" * 5000, [40], F32, 0)], bytes(64)),
        "tensor '\\x1b[2Jxxx",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_faults_are_told(write, case):
    data, expected = BAD[case]
    assert expected in refused(write(data))


def sound() -> bytes:
    keys = [W.key("a", "u32", 7), W.key("b", "text[]", ["x", "yz"]), W.key("c", "i16[][]", [[1], [2, 3]])]
    entries = [W.entry("t", [4, 2], F32, 0), W.entry("u", [32], 2, 32)]
    return W.file(keys, entries, bytes(32 + 18))


def test_every_file_that_is_cut_short_is_refused(write):
    data = sound()
    read_header(write(data))
    for length in range(len(data)):
        refused(write(data[:length]))


def test_no_bytes_do_harm(write):
    """Single bytes changed, and lengths put to extremes: read or refused, in no time, and never anything else."""
    data, rng, begun = sound(), random.Random(0), time.process_time()
    for _ in range(1500):
        changed = bytearray(data)
        at = rng.randrange(4, len(data))
        if rng.random() < 0.5:
            changed[at] = rng.randrange(256)
        else:
            changed[at : at + 8] = struct.pack("<Q", rng.choice((2**64 - 1, 2**63, 2**32, 2**31 - 1, len(data), 0)))
        path = write(bytes(changed[: len(data)]))
        try:
            found = read_header(path)
        except GptcliError:
            continue
        for value in found.metadata.values():
            repr(value)
        assert all(0 <= info.start <= info.end <= len(data) for info in found.infos.values())
    assert time.process_time() - begun < 20


@pytest.mark.parametrize("number", [4, 5, 31, 33, 36, 42, 2**32 - 1])
def test_a_type_that_nobody_knows_is_listed(write, number):
    entries = [W.entry("a", [4], F32, 0), W.entry("b", [7, 3], number, 32), W.entry("c", [4], F32, 96)]
    infos = read_header(write(W.file([], entries, bytes(112)))).infos
    assert infos["b"].dtype == f"type {number}" and infos["b"].shape == (3, 7)
    assert infos["b"].end == infos["c"].start == infos["b"].start + 64
    last = [W.entry("a", [4], F32, 0), W.entry("b", [7], number, 32)]
    path = write(W.file([], last, bytes(70)))
    assert read_header(path).infos["b"].end == path.stat().st_size


def test_texts_that_are_no_utf_8_are_no_reason_to_fail(write):
    found = read_header(write(W.file([W.key("k", "text", b"a\xffb"), W.key("l", "text[]", [b"\xc3", b"ok"])])))
    assert found.metadata["k"] == "a\N{REPLACEMENT CHARACTER}b" and found.metadata["l"][1] == "ok"


def test_places_that_are_no_file(tmp_path):
    assert "not a regular file" in refused(tmp_path)
    assert "No such file" in refused(tmp_path / "none.gguf")
