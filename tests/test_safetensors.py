"""The header of a .safetensors file: what the format's own library reads, and nothing that it would refuse."""

import itertools
import json
import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from gptcli.checkpoint.safetensors import BITS, FLOATS, MAX_HEADER, read_header
from gptcli.errors import GptcliError

# The format's types that torch has too.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64",
    torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip


def framed(header: bytes | str, data: bytes = b"") -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(header)) + header + data


def by_library(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}


def by_us(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (info.dtype, info.shape) for name, info in read_header(path).items()}


def refused(path: Path) -> str:
    with pytest.raises(GptcliError) as caught:
        read_header(path)
    assert "\n" not in caught.value.message
    assert "\x1b" not in caught.value.message and "\0" not in caught.value.message
    assert len(caught.value.message) < len(str(path)) + 400
    return caught.value.message


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "some.safetensors"

    def make(data: bytes) -> Path:
        path.write_bytes(data)
        return path

    return make


# As the library


def same_as_library(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    infos = read_header(path)
    assert by_us(path) == by_library(path)
    assert {name: (info.dtype, info.shape) for name, info in infos.items()} == {
        name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    data = path.read_bytes()
    for name, info in infos.items():
        raw = tensors[name].contiguous().reshape(-1).view(torch.uint8) if tensors[name].numel() else torch.empty(0)
        assert info.file == path
        assert data[info.start : info.end] == bytes(raw.tolist()), name


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("shape", [(3, 4), (), (0,), (2, 0, 3), (1,), (2, 3, 2, 2)], ids=str)
def test_every_type_and_shape(tmp_path, dtype, shape):
    generator = torch.Generator().manual_seed(1)
    one = torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    tensor = one.view(dtype).reshape(shape) if dtype != torch.bool else one[..., 0] > 127
    save_file({"w": tensor}, tmp_path / "one.safetensors")
    same_as_library(tmp_path / "one.safetensors", {"w": tensor})


def test_no_type_that_the_library_knows_is_unknown(write):
    """The library lists its types when it meets another one."""
    entry = {"dtype": "none such", "shape": [8], "data_offsets": [0, 8]}
    with pytest.raises(SafetensorError) as caught:
        by_library(write(framed(json.dumps({"w": entry}), b"\0" * 8)))
    known = set(str(caught.value).split("expected one of ")[1].split(" at line")[0].replace("`", "").split(", "))
    assert known and known <= set(BITS)
    for dtype in known:
        path = write(
            framed(json.dumps({"w": entry | {"dtype": dtype, "data_offsets": [0, BITS[dtype]]}}), b"\0" * BITS[dtype])
        )
        assert by_us(path) == by_library(path) == {"w": (dtype, (8,))}


@pytest.mark.parametrize("count", [0, 1, 2, 17, 200])
def test_many_tensors(tmp_path, count):
    rng = random.Random(count)
    tensors = {}
    for i in range(count):
        shape = [rng.randrange(0, 4) for _ in range(rng.randrange(0, 4))]
        tensors[f"layers.{i}.w"] = torch.zeros(shape, dtype=rng.choice(list(DTYPES)))
    save_file(tensors, tmp_path / "many.safetensors", metadata={"format": "pt", "note": 'é \\ " { \u2028'})
    same_as_library(tmp_path / "many.safetensors", tensors)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


# min_size=1: for an empty table of notes and no tensor, the library 0.8.0 writes a header that it can't read itself.
@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.dictionaries(
        NAMES.filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 3), max_size=4)),
        max_size=12,
    ),
    st.none() | st.dictionaries(NAMES.filter(lambda name: len(name) < 6), st.just("x"), min_size=1, max_size=3),
)
def test_any_names_types_shapes_and_notes(tmp_path_factory, drawn, notes):
    path = tmp_path_factory.mktemp("drawn") / "some.safetensors"
    tensors = {name: torch.ones(shape).to(dtype) for name, (dtype, shape) in drawn.items()}
    path.write_bytes(save(tensors, metadata=notes))
    same_as_library(path, tensors)


def test_empty_tensors_share_their_offsets_with_what_follows(write):
    """Empty ones may stand first, between and last, and be listed in any order."""
    entries = {
        "last": {"dtype": "F32", "shape": [0, 5], "data_offsets": [12, 12]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        "between": {"dtype": "F64", "shape": [3, 0], "data_offsets": [4, 4]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "first": {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]},
        "between too": {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]},
    }
    for order in itertools.islice(itertools.permutations(entries), 0, 720, 7):
        path = write(framed(json.dumps({name: entries[name] for name in order}), b"\0" * 12))
        assert by_us(path) == by_library(path) and len(by_us(path)) == 6
        assert read_header(path)["b"].end - read_header(path)["b"].start == 8


PLAIN = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})


def entry(**changes) -> str:
    return json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes})


LEGAL = {
    "padded with spaces": PLAIN + " " * 37,
    "other blanks": "\t\r\n" + PLAIN + "\n",
    "no notes": '{"__metadata__": null, ' + PLAIN[1:],
    "empty notes": '{"__metadata__": {}, ' + PLAIN[1:],
    "notes last": PLAIN[:-1] + ', "__metadata__": {"a": "b"}}',
    "fields in another order": '{"a": {"data_offsets": [0, 8], "shape": [2], "dtype": "F32"}}',
    "an escaped name": PLAIN.replace('"a"', '"\\u0061\\ud83d\\ude00"'),
    "a name of NUL and escapes": PLAIN.replace('"a"', '"\\u0000\\u001b[31m\\u007f"'),
    "a name of nothing": PLAIN.replace('"a"', '""'),
    "a long name": PLAIN.replace('"a"', '"' + "n" * 5000 + '"'),
}


@pytest.mark.parametrize("case", LEGAL)
def test_legal_headers(write, case):
    path = write(framed(LEGAL[case], b"\0" * 8))
    assert by_us(path) == by_library(path)
    assert list(by_us(path).values()) == [("F32", (2,))]


def test_names_are_what_the_library_says_they_are(write):
    path = write(framed(LEGAL["a name of NUL and escapes"], b"\0" * 8))
    assert list(by_us(path)) == list(by_library(path)) == ["\0\x1b[31m\x7f"]


# Hostile files


@pytest.fixture(scope="module")
def small() -> bytes:
    """Three tensors, one of them empty, with notes, in some 300 bytes."""
    tensors = {
        "embed": torch.arange(6.0).view(2, 3),
        "h.0": torch.ones(2, dtype=torch.bfloat16),
        "none": torch.zeros(0),
    }
    return save(tensors, metadata={"format": "pt"})


def test_every_truncation_is_refused(write, small):
    for length in range(len(small)):
        path = write(small[:length])
        message = refused(path)
        with pytest.raises((SafetensorError, OSError, ValueError)):
            by_library(path)
        if length >= 8 + int.from_bytes(small[:8], "little"):  # the header is whole
            assert f"its tensors need {len(small):,} bytes and the file has {length:,}" in message


def test_bytes_beyond_the_tensors_are_refused(write, small):
    assert f"need {len(small):,} bytes and the file has {len(small) + 1:,}" in refused(write(small + b"\0"))


def refused_or_as_the_library(path: Path) -> bool:
    """Never another error, never slow, never a header that the library would not accept. Returns whether accepted."""
    begun = time.perf_counter()
    try:
        found = by_us(path)
    except GptcliError as error:
        assert "\n" not in error.message
        return False
    finally:
        assert time.perf_counter() - begun < 2
    assert found == by_library(path)
    return True


def test_random_damage_to_the_header(write, small):
    rng = random.Random(2000)
    length = int.from_bytes(small[:8], "little")
    accepted = 0
    for _ in range(2000):
        damaged = bytearray(small)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            place = rng.randrange(8 + length)
            damaged[place] = rng.choice(
                [rng.randrange(256), damaged[place] ^ (1 << rng.randrange(8)), ord('",:{}[]0-9 '[rng.randrange(11)])]
            )
        accepted += refused_or_as_the_library(write(bytes(damaged)))
    assert 0 < accepted < 1000  # a name or a note may have become another one, most damage is fatal


def test_random_pieces_put_elsewhere(write, small):
    """Cuts, doublings and moves of the header's pieces, its length put right."""
    rng = random.Random(7)
    length = int.from_bytes(small[:8], "little")
    header, data = small[8 : 8 + length], small[8 + length :]
    for _ in range(500):
        a, b = sorted(rng.sample(range(length), 2))
        place = rng.randrange(length)
        damaged = rng.choice(
            [header[:a] + header[b:], header[:b] + header[a:], header[:place] + header[a:b] + header[place:]]
        )
        refused_or_as_the_library(write(framed(damaged, data)))


HOSTILE = {
    # offsets
    "a hole": ({"a": ("F32", [2], [0, 8]), "b": ("F32", [1], [12, 16])}, 16, "'b' begins at byte"),
    "a hole before the first": ({"a": ("F32", [2], [4, 12])}, 12, "'a' begins at byte"),
    "an overlap": ({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [4, 12])}, 12, "'b' begins at byte"),
    "the same bytes twice": ({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [0, 8])}, 8, "begins at byte"),
    "an empty one inside another": ({"a": ("F32", [2], [0, 8]), "b": ("F32", [0], [4, 4])}, 8, "'b' begins at byte"),
    "an empty one beyond the end": ({"a": ("F32", [2], [0, 8]), "b": ("F32", [0], [16, 16])}, 8, "'b' begins at byte"),
    "reversed": ({"a": ("F32", [2], [8, 0])}, 8, "entry for 'a' is malformed"),
    "reversed and empty": ({"a": ("F32", [0], [8, 0])}, 8, "entry for 'a' is malformed"),
    "negative": ({"a": ("F32", [2], [-8, 0])}, 8, "-8 is not a whole number from 0"),
    "beyond the end": ({"a": ("F32", [200], [0, 800])}, 8, "need "),
    "at 2^63": ({"a": ("F32", [2], [2**63 - 8, 2**63])}, 8, f"{2**63} is not a whole number from 0"),
    "below 2^63": ({"a": ("F32", [2], [2**63 - 9, 2**63 - 1])}, 8, "'a' begins at byte"),
    "at 2^64": ({"a": ("F32", [2], [2**64, 2**64 + 8])}, 8, "is not a whole number"),
    "three offsets": ({"a": ("F32", [2], [0, 8, 8])}, 8, "entry for 'a' is malformed"),
    "one offset": ({"a": ("F32", [2], [0])}, 8, "entry for 'a' is malformed"),
    "no offsets": ({"a": ("F32", [2], None)}, 8, "entry for 'a' is malformed"),
    "offsets of text": ({"a": ("F32", [2], ["0", "8"])}, 8, "entry for 'a' is malformed"),
    "an offset that is a truth": ({"a": ("F32", [2], [False, 8])}, 8, "entry for 'a' is malformed"),
    "fractions": ({"a": ("F32", [2], [0, 8.0])}, 8, "8.0 is not a whole number"),
    # shapes
    "too few bytes": ({"a": ("F32", [3], [0, 8])}, 8, "8 bytes for 3 numbers of 32 bits"),
    "too many bytes": ({"a": ("F32", [1], [0, 8])}, 8, "8 bytes for 1 numbers of 32 bits"),
    "half a byte": ({"a": ("F4", [3], [0, 1])}, 1, "entry for 'a' is malformed"),
    "a shape that overflows": ({"a": ("F32", [2**62, 2**62, 0], [0, 0])}, 0, "entry for 'a' is malformed"),
    "a shape that overflows to nothing": ({"a": ("F32", [2**32, 2**32], [0, 0])}, 0, "entry for 'a' is malformed"),
    "a negative size": ({"a": ("F32", [-2], [0, 8])}, 8, "-2 is not a whole number"),
    "two negative sizes": ({"a": ("F32", [-1, -2], [0, 8])}, 8, "-1 is not a whole number"),
    "a shape of truth": ({"a": ("F32", [True, 2], [0, 8])}, 8, "entry for 'a' is malformed"),
    "a shape that is a number": ({"a": ("F32", 2, [0, 8])}, 8, "entry for 'a' is malformed"),
    "a shape in a shape": ({"a": ("F32", [[2]], [0, 8])}, 8, "entry for 'a' is malformed"),
    "no shape": ({"a": ("F32", None, [0, 8])}, 8, "entry for 'a' is malformed"),
    # types
    "an unknown type": ({"a": ("F128", [2], [0, 8])}, 8, "the type 'F128' is unknown"),
    "a type in small letters": ({"a": ("f32", [2], [0, 8])}, 8, "the type 'f32' is unknown"),
    "a type that is a list": ({"a": (["F32"], [2], [0, 8])}, 8, "entry for 'a' is malformed"),
    "a type that is a table": ({"a": ({"F32": 1}, [2], [0, 8])}, 8, "entry for 'a' is malformed"),
    "a type that is a number": ({"a": (32, [2], [0, 8])}, 8, "entry for 'a' is malformed"),
    "no type": ({"a": (None, [2], [0, 8])}, 8, "entry for 'a' is malformed"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_entries_that_can_not_be(write, case):
    entries, size, reason = HOSTILE[case]
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        for name, (dtype, shape, offsets) in entries.items()
    }
    path = write(framed(json.dumps(header), b"\0" * size))
    assert reason in refused(path)
    with pytest.raises(SafetensorError):
        by_library(path)


HEADERS = {
    "nothing": "",
    "blanks": "    ",
    "not JSON": "dtype: F32",
    "an open brace": "{",
    "a list": "[]",
    "text": '"a"',
    "a number": "12",
    "null": "null",
    "NaN": "NaN",
    "an entry that is NaN": '{"a": NaN}',
    "an offset that is NaN": PLAIN.replace("[0, 8]", "[NaN, 8]"),
    "an offset that is infinite": PLAIN.replace("[0, 8]", "[0, Infinity]"),
    "minus nought": PLAIN.replace("[0, 8]", "[-0, 8]"),
    "an exponent": PLAIN.replace("[0, 8]", "[0, 8e0]"),
    "a leading zero": PLAIN.replace("[0, 8]", "[00, 8]"),
    "a whole number of 10,000 digits": PLAIN.replace("[0, 8]", f"[0, {'9' * 10_000}]"),
    "an entry that is a list": '{"a": []}',
    "an entry that is null": '{"a": null}',
    "an entry that is text": '{"a": "F32"}',
    "an entry of nothing": '{"a": {}}',
    "a doubled field": PLAIN.replace('"dtype"', '"dtype": "F32", "dtype"'),
    "notes that are a number": '{"__metadata__": 5, ' + PLAIN[1:],
    "notes that are a list": '{"__metadata__": [], ' + PLAIN[1:],
    "a note that is a number": '{"__metadata__": {"a": 1}, ' + PLAIN[1:],
    "a note that is null": '{"__metadata__": {"a": null}, ' + PLAIN[1:],
    "half a character in a name": PLAIN.replace('"a"', '"\\ud800"'),
    "half a character in a note": '{"__metadata__": {"a": "\\udc00"}, ' + PLAIN[1:],
    "half a character in bytes": PLAIN.encode().replace(b'"a"', b'"\xed\xa0\x80"'),
    "Latin-1": PLAIN.encode().replace(b'"a"', b'"\xe9"'),
    "UTF-16": PLAIN.encode("utf-16-le"),
    "UTF-32": PLAIN.encode("utf-32-be"),
    "a byte order mark": "\ufeff" + PLAIN,
    "padded with NUL": PLAIN + "\0" * 8,
    "two documents": PLAIN + PLAIN,
    "a raw tab in a name": PLAIN.replace('"a"', '"a\t"'),
    "a comma too many": PLAIN[:-1] + ",}",
    "single quotes": PLAIN.replace('"', "'"),
    "a comment": PLAIN + "// no",
    "lists in lists": "[" * 100_000,
    "lists in lists, closed": "[" * 5000 + "]" * 5000,
    "tables in tables": '{"a":' * 100_000,
    "a deep entry": '{"a": ' + "[" * 900 + "]" * 900 + "}",
    "a deep type": PLAIN.replace('"F32"', "[" * 900 + "]" * 900),
    "a deep field more": PLAIN.replace("}}", ', "more": ' + "[" * 200 + "]" * 200 + "}}"),
    "a deep note": '{"__metadata__": {"a": ' + "[" * 900 + "]" * 900 + "}, " + PLAIN[1:],
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_can_not_be_read(write, case):
    path = write(framed(HEADERS[case], b"\0" * 8))
    begun = time.perf_counter()
    refused(path)
    assert time.perf_counter() - begun < 2
    with pytest.raises(SafetensorError):
        by_library(path)


def test_a_name_given_twice_is_refused(write):
    """The library takes the last one; which of the two was meant, nobody can say."""
    one = '"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    assert "'a' stands twice" in refused(write(framed("{" + one + "," + one + "}", b"\0" * 8)))
    assert "'a' stands twice" in refused(write(framed("{" + one + ',"\\u0061"' + one[3:] + "}", b"\0" * 8)))
    notes = '"__metadata__": {"n": "1"}'
    assert "'__metadata__' stands twice" in refused(
        write(framed("{" + notes + "," + notes + "," + one + "}", b"\0" * 8))
    )


def test_fields_that_the_format_does_not_name_are_refused(write):
    assert "entry for 'a' is malformed" in refused(write(framed(entry(scale=2), b"\0" * 8)))


@pytest.mark.parametrize("name", ["\0", "\x1b[2J\x1b]0;owned\x07", "a\nb", "\u202egnp", "x" * 100_000, "'", "\x9b31m"])
def test_names_are_shown_without_what_a_terminal_would_obey(write, name):
    for changes in ({"shape": [3]}, {"data_offsets": [8, 16]}):
        header = entry(**changes).replace('"a"', json.dumps(name))
        message = refused(write(framed(header, b"\0" * 16)))
        assert message.isprintable()
    twice = json.dumps(name) + ': {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    assert refused(write(framed("{" + twice + "," + twice + "}", b"\0" * 8))).isprintable()


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 2**40, MAX_HEADER + 1, 9])
def test_a_header_longer_than_the_file(write, length):
    path = write(struct.pack("<Q", length) + b"\0" * 8)
    tracemalloc.start()
    message = refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"a header of {length:,} bytes in a file of 16" in message
    assert peak < 1_000_000


def test_a_header_longer_than_the_format_allows(tmp_path):
    """A file with a hole: 200 MB long, nothing on the disk."""
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER + 1))
        file.truncate(2 * MAX_HEADER)
    tracemalloc.start()
    assert "a header of 100,000,001 bytes" in refused(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    with pytest.raises(SafetensorError):
        by_library(path)


@pytest.mark.parametrize(
    "sizes", [[2**62] * 200_000, [2] * 200_000, [1] * 200_000 + [3], [0] + [2**62] * 200_000], ids=["62", "2", "1", "0"]
)
def test_a_shape_of_very_many_dimensions_takes_no_time(write, sizes):
    """Multiplied out, the first would be a number of twelve million digits."""
    refused_or_as_the_library(write(framed(entry(shape=sizes), b"\0" * 8)))


def test_many_entries_of_which_the_last_stands_twice(write):
    entries = [f'"{i}": {{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}' for i in range(40_000)]
    begun = time.perf_counter()
    assert "'39999' stands twice" in refused(write(framed("{" + ",".join([*entries, entries[-1]]) + "}")))
    assert time.perf_counter() - begun < 2


# What the file is instead

INSTEAD = {
    "an LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n",
        "Git LFS pointer",
    ),
    "HTML": (b"<!DOCTYPE html>\n<html><body>404</body></html>", "HTML page"),
    "HTML after blanks": (b"\n  <html lang='en'>", "HTML page"),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + b"\0" * 32, "GGUF file"),
    "a zip of torch": (b"PK\x03\x04\x00\x00\x08\x08\x00\x00" + b"\0" * 64, "PyTorch file"),
    "a pickle of torch": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "PyTorch file"),
    "nothing": (b"", "the file is empty"),
    "seven bytes": (b"1234567", "7 bytes are too few"),
    "text": (b"hello, this is no checkpoint", "a header of"),
    "JSON": (b'{"error": "not found"}', "a header of"),
    "zeros": (b"\0" * 64, "header can't be read"),
}


@pytest.mark.parametrize("case", INSTEAD)
def test_what_the_file_is_instead(write, case):
    data, what = INSTEAD[case]
    assert what in refused(write(data))


def test_a_file_that_is_not_there(tmp_path):
    assert "No such file or directory" in refused(tmp_path / "none.safetensors")


def test_a_directory_and_a_pipe_are_no_files(tmp_path):
    assert "not a regular file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a regular file" in refused(tmp_path / "pipe.safetensors")  # and does not wait for a writer


def test_an_empty_table_holds_no_tensors(write):
    path = write(framed("{}"))
    assert read_header(path) == by_library(path) == {}


def test_types_that_hold_weights_are_torchs_by_name():
    assert {getattr(torch, name): code for code, name in FLOATS.items()} == {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
    }
