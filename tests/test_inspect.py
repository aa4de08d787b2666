"""`inspect`: the verdict on every kind of fault, by a small file made here, and what a sound file is said to be.

What is right comes from how each file was made: transformers' names and shapes, counts by hand, torch's own arithmetic.
"""

import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from gptcli import shipped
from gptcli.checkpoint.patterns import braced, fold, ranges, unfold
from gptcli.checkpoint.scan import Lay, in_order, opened
from gptcli.families.guess import guess
from gptcli.model import statistics
from gptcli.report.inspect import CODES
from gptcli.report.summary import summary
from gptcli.spec import to_dict
from gptcli.tokens import from_files
from gptcli.tokens.size import size_of
from tests import packed_toys
from tests.command import Ran
from tests.command import gptcli as run
from tests.oracle import save_toy
from tests.test_adapter import lora, written
from tests.toys import gpt2_vocabulary

GPT2 = {"model_type": "gpt2", "vocab_size": 67, "n_positions": 32, "n_embd": 8, "n_layer": 2, "n_head": 2}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
}
# 67·8 + 32·8 + 2·(12·8·8 + 13·8) + 2·8, and 2·67·16 + 3·(2·24·16 + 2·12·16 + 3·24·16 + 2·16) + 16.
GPT2_COUNT, LLAMA_COUNT = 2552, 2 * 67 * 16 + 3 * (2 * 24 * 16 + 2 * 12 * 16 + 3 * 24 * 16 + 2 * 16) + 16
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


def shards(here: Path, number: int, index: bool = True, lost: tuple[int, ...] = ()) -> dict[str, str]:
    """Cuts the directory's weights into shards; those numbered in `lost` (from 1) are not written."""
    tensors, table = load_file(here / WEIGHTS), {}
    for i in range(number):
        name = f"model-{i + 1:05}-of-{number:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::number]}
        table |= dict.fromkeys(part, name)
        if i + 1 not in lost:
            save_file(part, here / name)
    (here / WEIGHTS).unlink()
    if index:
        (here / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return table


def look(*words: object) -> dict:
    """The only checkpoint of a report. Its status and its findings agree with the exit status."""
    ran = run("inspect", *words, "--json")
    report = ran.json
    (one,) = report["checkpoints"]
    assert (one["verdict"] == "whole") == (one["findings"] == []) == (ran.status == 0) == (report["status"] == "ok")
    assert report["schema"] == "gptcli.inspect/1" and report["findings"] == one["findings"]
    assert all(any(finding["code"] in codes for codes in CODES.values()) for finding in one["findings"])
    return one


def codes(one: dict) -> list[str]:
    return list(dict.fromkeys(finding["code"] for finding in one["findings"]))


def line(path: Path, *words: object) -> str:
    """The one line that -q prints."""
    ran = run("inspect", "-q", path, *words)
    assert ran.out.count("\n") == 1 and ran.out[:-1].isprintable() and not ran.err
    assert ran.status == (0 if ran.out.startswith("whole: ") else 1)
    return ran.out[:-1]


# The verdict


def test_a_sound_checkpoint_is_whole(toys):
    said = line(toys(GPT2))
    size = (toys(GPT2) / WEIGHTS).stat().st_size
    assert said == f"whole: {toys(GPT2)} · gpt2 · 2,552 parameters in 28 tensors · {size:,} bytes in 1 file"
    one = look(toys(GPT2))
    assert one["kind"] == "model" and one["format"] == "safetensors" and one["families"] == ["gpt2"]
    assert one["parameters"] == {"total": 2552, "described": 2552, "stored": 2552, "buffers": 0}
    assert one["dtypes"] == [{"dtype": "F64", "tensors": 28, "numbers": 2552, "bytes": 8 * 2552}]
    assert one["prefix"] == "transformer." and one["metadata"] == {"format": ["pt"]}
    assert one["tie"] == {"config": True, "head": "", "same": None, "compared": 0}


def pointer(here: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 548105171\n"
    (here / WEIGHTS).write_text(text)


def page(here: Path) -> None:
    (here / WEIGHTS).write_text("\n<!DOCTYPE html>\n<html><body>404</body></html>")


def cut(here: Path) -> None:
    data = (here / WEIGHTS).read_bytes()
    (here / WEIGHTS).write_bytes(data[:-1000])


def cut_in_header(here: Path) -> None:
    (here / WEIGHTS).write_bytes((here / WEIGHTS).read_bytes()[:100])


def header(**entries: tuple[str, list[int], list[int]]) -> Callable[[Path], None]:
    """Writes a file of just this header, and sixteen bytes."""

    def write(here: Path) -> None:
        fields = ("dtype", "shape", "data_offsets")
        text = json.dumps({name: dict(zip(fields, entry)) for name, entry in entries.items()}).encode()
        (here / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))

    return write


def raw(data: bytes) -> Callable[[Path], None]:
    return lambda here: (here / WEIGHTS).write_bytes(data) and None


def renamed(source: str, target: str) -> Callable[[Path], None]:
    return lambda here: (here / source).rename(here / target) and None


def json_of(name: str, value: object) -> Callable[[Path], None]:
    return lambda here: (here / name).write_text(value if isinstance(value, str) else json.dumps(value)) and None


ENTRY = b'"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'
TWICE = b"{" + ENTRY + b", " + ENTRY + b"}"
SPOILT = {
    "a Git LFS pointer": (pointer, "not a checkpoint", "lfs-pointer", "a Git LFS pointer to 548,105,171 bytes"),
    "what to run for it": (pointer, "not a checkpoint", "lfs-pointer", "`git lfs pull` fetches them"),
    "an HTML page": (page, "not a checkpoint", "html-page", "an HTML page"),
    "an empty file": (raw(b""), "not a checkpoint", "empty-file", "the file is empty"),
    "another file": (raw(b"PK\x03\x04" + bytes(400)), "not a checkpoint", "not-weights", "a PyTorch file"),
    "cut short": (cut, "corrupt", "corrupt", "bytes and the file has"),
    "cut within the header": (cut_in_header, "corrupt", "corrupt", "a header of"),
    "a header of terabytes": (raw(b"\xff\xff\xff\xff\xff\x03\0\0{}"), "corrupt", "corrupt", "4,398,046,511,103"),
    "a hole": (header(a=("F32", [2], [0, 8]), b=("F32", [1], [12, 16])), "corrupt", "corrupt", "'b' begins at byte"),
    "an overlap": (header(a=("F32", [2], [0, 8]), b=("F32", [3], [4, 16])), "corrupt", "corrupt", "'b' begins at byte"),
    "offsets beyond": (header(a=("F32", [8], [0, 32])), "corrupt", "corrupt", "tensors need"),
    "left over bytes": (header(a=("F32", [2], [0, 8])), "corrupt", "corrupt", "tensors need"),
    "a name twice": (
        raw(struct.pack("<Q", len(TWICE)) + TWICE + bytes(16)), "corrupt", "corrupt", "twice",
    ),
    "an index that is none": (json_of(INDEX, "{"), "corrupt", "index", f"{INDEX}"),
    "an index of another shape": (json_of(INDEX, {"weight_map": ["a"]}), "corrupt", "index", "no weight_map"),
    "an index that leads away": (
        json_of(INDEX, {"weight_map": {"a": "../x.safetensors"}}), "corrupt", "index", "no weight_map",
    ),
    "no weights": (lambda here: (here / WEIGHTS).unlink(), "incomplete", "missing-weights", "config.json is here"),
    "a config that is no JSON": (json_of("config.json", '{"a": '), "not what its config says", "config", "line 1"),
    "a config without a size": (
        json_of("config.json", GPT2 | {"n_embd": "many"}), "not what its config says", "config", "n_embd",
    ),
    "a tokenizer that is no JSON": (json_of("tokenizer.json", "{"), "incomplete", "tokenizer", "tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_file_is_said_to_be_so(case, copy):
    spoil, verdict, code, reason = SPOILT[case]
    here = copy(GPT2)
    spoil(here)
    one = look(here)
    assert (one["verdict"], one["findings"][0]["code"]) == (verdict, code)
    assert reason in one["said"] and line(here) == f"{verdict}: {here} · {one['said']}"


def test_a_pointer_says_what_it_points_to_under_any_name(tmp_path):
    for name in ("pytorch_model.bin", "model.safetensors", "some.ckpt", "weights"):
        pointer(tmp_path)
        (tmp_path / WEIGHTS).rename(tmp_path / name)
        assert f"not a checkpoint: {tmp_path / name}" in line(tmp_path / name) and "548,105,171" in line(
            tmp_path / name
        )
        (tmp_path / name).unlink()


def test_bytes_needed_and_present_and_what_is_cut_off(toys, copy):
    """The head comes last: of the file's bytes the final 1,000 are its own."""
    whole = (toys(GPT2) / WEIGHTS).stat().st_size
    here = copy(GPT2)
    cut(here)
    one = look(here)
    assert f"its tensors need {whole:,} bytes and the file has {whole - 1000:,}" in one["said"]
    lost = [finding["path"] for finding in one["findings"] if finding["code"] == "lost-tensor"]
    with (here / WEIGHTS).open("rb") as file:
        table = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        base = file.tell()
    ends = {name: base + entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"}
    names = [name for pattern in lost for name in unfold(pattern, 1 if "{" not in pattern else 2)]
    assert sorted(names) == sorted(name for name, end in ends.items() if end > whole - 1000)
    assert one["parameters"]["total"] == 2552  # what it would hold is known all the same


def test_a_shard_that_the_index_names_is_absent(copy):
    here = copy(LLAMA)
    table = shards(here, 4, lost=(2, 3))
    one = look(here)
    assert one["verdict"] == "incomplete" and one["absent"] == [f"model-0000{i}-of-00004.safetensors" for i in (2, 3)]
    lost = [name for name, shard in table.items() if "-00002-" in shard or "-00003-" in shard]
    of_second = sum("-00002-" in shard for shard in table.values())
    said = f"shard model-00002-of-00004.safetensors is missing, and with it {of_second} of {len(table)} tensors"
    assert said in line(here)
    assert codes(one) == ["missing-shard", "lost-tensor"]
    patterns = [f["path"] for f in one["findings"] if f["code"] == "lost-tensor"]
    assert sorted(name for pattern in patterns for name in expanded(pattern)) == sorted(lost)
    assert one["parameters"]["described"] == LLAMA_COUNT > one["parameters"]["total"]


def expanded(pattern: str) -> list[str]:
    return unfold(pattern, 2 if "{" in pattern else 1)


def test_what_is_lost_is_not_told_twice(copy):
    """Names in wrappers are those of the layout all the same."""
    here = copy(LLAMA, lambda tensors: {f"module.{name}": x for name, x in tensors.items()})
    shards(here, 4, lost=(2,))
    assert codes(look(here)) == ["missing-shard", "lost-tensor"]


def test_a_tensor_that_its_shard_does_not_hold(copy):
    here = copy(LLAMA)
    table = shards(here, 2)
    name = next(name for name, shard in table.items() if "-00002-" in shard)
    tensors = load_file(here / table[name])
    save_file({key: x for key, x in tensors.items() if key != name}, here / table[name])
    one = look(here)
    assert one["verdict"] == "incomplete" and codes(one) == ["lost-tensor"]
    assert f"tensor {name} is not in {table[name]}, where the index puts it" in line(here)


def test_shards_without_an_index(copy):
    here = copy(LLAMA)
    shards(here, 3, index=False)
    one = look(here)
    assert one["verdict"] == "incomplete" and codes(one) == ["missing-index"]
    assert one["parameters"]["total"] == LLAMA_COUNT and len(one["files"]) == 3
    (here / "model-00003-of-00003.safetensors").unlink()
    assert codes(look(here)) == ["missing-shard", "missing-index", "missing-tensor"]


def test_two_full_sets_of_weights(toys, copy):
    """The index is followed, and what it does not name is left over."""
    here = copy(LLAMA)
    shards(here, 2)
    shutil.copy(toys(LLAMA) / WEIGHTS, here)
    one = look(here)
    assert (one["verdict"], codes(one), one["beside"]) == ("ambiguous", ["two-sets"], [WEIGHTS])
    assert "model.safetensors.index.json is read; left over, with 30 of its tensors: model.safetensors" in one["said"]
    other = copy(LLAMA)
    torch.save(load_file(other / WEIGHTS), other / "pytorch_model.bin")
    assert (look(other)["verdict"], look(other)["beside"]) == ("ambiguous", ["pytorch_model.bin"])
    stale = copy(LLAMA)
    shards(stale, 3)
    shutil.copy(toys(LLAMA) / WEIGHTS, stale)
    shards(stale, 5)
    assert look(stale)["beside"] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert codes(look(stale)) == ["two-sets"]


def test_other_weights_beside_are_no_second_set(copy):
    here = copy(LLAMA)
    save_file({"v_head.weight": torch.ones(3)}, here / "value_head.safetensors")
    one = look(here)
    assert one["verdict"] == "whole" and one["beside"] == ["value_head.safetensors"]


def test_a_tensor_in_two_shards(copy):
    here = copy(LLAMA)
    table = shards(here, 2)
    name = "model.norm.weight"
    other = next(shard for shard in set(table.values()) if shard != table[name])
    save_file(load_file(here / other) | {name: torch.zeros(16)}, here / other)
    one = look(here)
    assert (one["verdict"], codes(one)) == ("ambiguous", ["duplicate-tensor"])
    assert f"tensor {name!r} is in" in one["said"] and f"the index means {table[name]}" in one["said"]
    assert one["dtypes"][0]["dtype"] == "F64" and len(one["dtypes"]) == 1  # the one that the index means


def test_shards_that_the_index_puts_elsewhere(copy):
    here = copy(LLAMA)
    table = shards(here, 2)
    name = "model.norm.weight"
    moved = next(shard for shard in set(table.values()) if shard != table[name])
    (here / INDEX).write_text(json.dumps({"weight_map": table | {name: moved}}))
    assert codes(look(here)) == ["index-mismatch"] and f"the index puts it in {moved}" in look(here)["said"]
    del table[name]
    (here / INDEX).write_text(json.dumps({"weight_map": table}))
    assert codes(look(here)) == ["index-mismatch"] and "is not in the index" in look(here)["said"]


def test_several_files_and_nothing_that_says_which(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.ones(2)}, tmp_path / name)
    one = look(tmp_path)
    assert (one["verdict"], codes(one)) == ("ambiguous", ["several-files"]) and "a.safetensors, b.safetensors" in one[
        "said"
    ]
    assert look(tmp_path / "a.safetensors")["verdict"] == "whole"


def test_a_shard_that_is_a_pointer_is_what_is_missing(copy):
    here = copy(LLAMA)
    shards(here, 3)
    shutil.copy(here / "model-00001-of-00003.safetensors", here / "kept")
    pointer(here)
    (here / WEIGHTS).rename(here / "model-00002-of-00003.safetensors")
    one = look(here)
    assert one["verdict"] == "incomplete" and "a Git LFS pointer to 548,105,171 bytes" in one["said"]
    for i in (1, 3):
        shutil.copy(here / "model-00002-of-00003.safetensors", here / f"model-0000{i}-of-00003.safetensors")
    assert look(here)["verdict"] == "not a checkpoint" and codes(look(here)) == ["lfs-pointer", "lost-tensor"]


# Not what its config says


def test_shapes_that_the_config_does_not_make(copy):
    here = copy(LLAMA, intermediate_size=32)
    one = look(here)
    assert one["verdict"] == "not what its config says" and codes(one) == ["shape"]
    up = next(f for f in one["findings"] if "up_proj" in f["path"])
    assert up["path"] == "model.layers.{0-2}.mlp.up_proj.weight"
    assert "3 tensors" in up["message"] and "[24, 16]" in up["message"]
    assert "layers.{0-2}.mlp.up.weight [32, 16]" in up["message"]
    assert len(one["findings"]) == 3  # gate, up and down, each for three layers


def test_missing_misshaped_and_left_over_are_all_named(copy):
    def change(tensors: Tensors) -> Tensors:
        kept = {name: x for name, x in tensors.items() if "post_attention" not in name}
        kept["model.norm.weight"] = torch.ones(15)
        kept["model.layers.1.self_attn.q_proj.weight"] = torch.ones(24, 16, dtype=torch.int32)
        return kept | {"model.layers.0.extra.weight": torch.ones(2), "model.layers.1.extra.weight": torch.ones(2)}

    one = look(copy(LLAMA, change))
    assert one["verdict"] == "incomplete"  # the first in order of weight
    assert {f["code"]: f["path"] for f in one["findings"]} == {
        "missing-tensor": "model.layers.{0-2}.post_attention_layernorm.weight",
        "shape": "model.norm.weight",
        "dtype": "model.layers.1.self_attn.q_proj.weight",
        "left-over-tensor": "model.layers.{0,1}.extra.weight",
    }
    assert [row["kind"] for row in one["tensors"] if "extra" in row["stored"]] == ["left over"]


def test_a_head_beside_a_tie(copy):
    table = "transformer.wte.weight"
    same = look(copy(GPT2, lambda tensors: tensors | {"lm_head.weight": tensors[table].clone()}))
    assert same["verdict"] == "whole" and same["parameters"]["total"] == GPT2_COUNT
    assert same["parameters"]["stored"] == GPT2_COUNT + 67 * 8
    assert same["tie"] == {"config": True, "head": "lm_head.weight", "same": True, "compared": 67 * 8 * 8}

    def other(tensors: Tensors) -> Tensors:
        head = tensors[table].clone()
        head[66, 7] += 1
        return tensors | {"lm_head.weight": head}

    here = copy(GPT2, other)
    one = look(here)
    assert (one["verdict"], codes(one), one["tie"]["same"]) == ("not what its config says", ["tie"], False)
    assert f"lm_head.weight differs from {table}" in line(here)
    assert one["parameters"]["total"] == GPT2_COUNT + 67 * 8


def test_large_heads_are_compared_in_samples(copy):
    """A head of 8.4 MB: 64 samples of 4 KiB of each, and a difference in one of them is found."""
    sizes = {"vocab_size": 65536, "n_embd": 16, "n_layer": 1, "n_positions": 2}
    table = "transformer.wte.weight"
    here = copy(GPT2 | sizes, lambda tensors: tensors | {"lm_head.weight": tensors[table].clone()})
    assert look(here)["tie"] == {"config": True, "head": "lm_head.weight", "same": True, "compared": 64 * 4096}
    for row in (0, 65535):
        tensors = load_file(here / WEIGHTS)
        tensors["lm_head.weight"][row, 5] += 1
        save_file(tensors, here / WEIGHTS)
        assert look(here)["tie"]["same"] is False
        tensors["lm_head.weight"][row, 5] -= 1


def test_an_untied_head_that_is_missing(copy):
    here = copy(LLAMA, lambda tensors: {name: x for name, x in tensors.items() if name != "lm_head.weight"})
    assert line(here).startswith("not what its config says: ") and codes(look(here)) == ["tie"]
    assert "tensor lm_head.weight is missing, and the config does not tie the head" in line(here)


def words_vocabulary(folder: Path, number: int) -> None:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(number)}, unk_token="w0"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))


def test_rows_vocab_size_and_tokenizer_are_set_side_by_side(copy):
    more = copy(GPT2)
    words_vocabulary(more, 60)
    one = look(more)
    assert one["verdict"] == "whole"
    assert one["vocabulary"] == {"rows": 67, "config": 67, "tokenizer": 60, "file": "tokenizer.json"}
    assert "the 7 rows beyond are padding" in run("inspect", more).out
    fewer = copy(GPT2)
    words_vocabulary(fewer, 70)
    assert codes(look(fewer)) == ["vocabulary"] and look(fewer)["verdict"] == "not what its config says"
    assert "the tokenizer knows 70 ids and the table has 67 rows: ids from 67 on have none" in line(fewer)
    other = copy(LLAMA, vocab_size=64)
    assert codes(look(other)) == ["vocabulary"] and look(other)["vocabulary"]["rows"] == 67
    assert "67 rows, and vocab_size is 64" in line(other)


# What it is


def test_wrappers_are_taken_off_and_named(copy):
    here = copy(GPT2, lambda tensors: {f"module._orig_mod.{name}": x for name, x in tensors.items()})
    one = look(here)
    assert one["verdict"] == "whole" and one["wrappers"] == ["module", "_orig_mod"]
    assert one["prefix"] == "transformer."
    rows = {row["stored"]: row["name"] for row in one["tensors"]}
    assert rows["module._orig_mod.transformer.wte.weight"] == "embed.weight"
    twice = copy(GPT2, lambda tensors: tensors | {f"module.{name}": x for name, x in tensors.items() if "wte" in name})
    assert codes(look(twice))[0] == "duplicate-tensor"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32])
def test_masks_and_frequencies_are_buffers(dtype, copy):
    def add(tensors: Tensors) -> Tensors:
        mask = torch.tril(torch.ones(32, 32)).to(dtype)[None, None]
        return tensors | {f"transformer.h.{i}.attn.bias": mask for i in (0, 1)}

    one = look(copy(GPT2, add))
    assert one["verdict"] == "whole"
    assert one["parameters"] == {"total": 2552, "described": 2552, "stored": 2552 + 2048, "buffers": 2048}
    (row,) = [row for row in one["tensors"] if row["kind"] == "buffer"]
    assert (row["stored"], row["times"], row["name"]) == ("transformer.h.{0,1}.attn.bias", 2, "")


def test_rows_are_patterns_with_both_names_and_shapes_as_torch_has_them(toys):
    rows = {row["stored"]: row for row in look(toys(GPT2))["tensors"]}
    tensors = load_file(toys(GPT2) / WEIGHTS)
    assert sorted(name for row in rows.values() for name in unfold(row["stored"], row["times"])) == sorted(tensors)
    for row in rows.values():
        for name in unfold(row["stored"], row["times"]):
            assert row["shape"] == list(tensors[name].shape)
    fused = rows["transformer.h.{0,1}.attn.c_attn.weight"]
    assert fused["name"] == "layers.{0,1}.attn.{q,k,v}.weight" and fused["shape"] == [8, 24] and fused["times"] == 2
    assert fused["numbers"] == 2 * 8 * 24 and fused["bytes"] == 8 * 2 * 8 * 24
    assert rows["transformer.ln_f.bias"]["name"] == "final_norm.bias"
    names = [row["name"] for row in rows.values()]
    assert names[:2] == ["embed.weight", "pos_embed.weight"] and names[-1] == "final_norm.bias"


def test_tensors_where_and_filter(toys):
    tensors = load_file(toys(LLAMA) / WEIGHTS)
    rows = look(toys(LLAMA), "--where")["tensors"]
    assert sorted(row["stored"] for row in rows) == sorted(tensors)
    data = (toys(LLAMA) / WEIGHTS).read_bytes()
    for row in rows:
        assert row["file"] == WEIGHTS and row["times"] == 1
        assert data[row["start"] : row["end"]] == tensors[row["stored"]].numpy().tobytes()
    assert [row["stored"] for row in look(toys(LLAMA), "--tensors")["tensors"]] == [row["stored"] for row in rows]
    by_file = look(toys(LLAMA), "--filter", "*.q_proj.*")["tensors"]
    by_us = look(toys(LLAMA), "--filter", "layers.*.attn.q.weight")["tensors"]
    assert [row["stored"] for row in by_file] == ["model.layers.{0-2}.self_attn.q_proj.weight"]
    assert by_file == by_us
    assert look(toys(LLAMA), "--filter", "nothing*")["notes"] == ["no tensor's name fits nothing*"]


def test_layers_that_differ_make_rows_of_their_own(tmp_path):
    config = LLAMA | {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "mlp_only_layers": [1], "decoder_sparse_step": 1,
    }  # fmt: skip
    save_toy(config, tmp_path)
    one = look(tmp_path)
    assert one["verdict"] == "whole"
    rows = {row["name"]: row["times"] for row in one["tensors"]}
    assert rows["layers.1.mlp.up.weight"] == 1 and rows["layers.{0-2}.attn.q.weight"] == 3
    experts = {name: times for name, times in rows.items() if "experts" in name}
    stacked = {"layers.{0,2}.mlp.experts.{0-3}.{up,gate}.weight": 2, "layers.{0,2}.mlp.experts.{0-3}.down.weight": 2}
    each = {f"layers.{{0,2}}.mlp.experts.{{0-3}}.{part}.weight": 8 for part in ("gate", "up", "down")}
    assert experts in (stacked, each)  # as the library saves them


def test_lone_weights_are_told_by_their_names_and_shapes(toys, tmp_path):
    shutil.copy(toys(GPT2) / WEIGHTS, tmp_path / "lone.safetensors")
    one = look(tmp_path / "lone.safetensors")
    assert one["verdict"] == "whole" and one["config"] == "" and one["families"] == ["gpt2"] and one["spec"] is None
    assert line(tmp_path / "lone.safetensors").endswith("no config")
    told = {value["path"]: value["value"] for value in one["values"]}
    assert told == {
        "vocab_size": 67, "hidden_size": 8, "n_layers": 2, "context_length": 32, "mlp.size": 32, "mlp.gated": False,
    }  # fmt: skip
    assert all(value["origin"] == "shape" and len(value["keys"]) == 1 for value in one["values"])
    rows = {row["stored"]: row["name"] for row in one["tensors"]}
    assert rows["transformer.h.{0,1}.attn.c_attn.weight"] == "layers.{0,1}.attn.{q,k,v}.weight"
    described = look(tmp_path / "lone.safetensors", "-c", toys(GPT2) / "config.json")
    assert described["verdict"] == "whole" and described["parameters"]["described"] == GPT2_COUNT
    wrong = look(tmp_path / "lone.safetensors", "-c", "gpt2-small")
    assert wrong["verdict"] == "incomplete" and "missing-tensor" in codes(wrong)


def test_names_alone_tell_one_layout_from_another(toys):
    """A head's size is told where queries have a norm of it, and matrices [in, out] are told from [out, in]."""
    qwen = load_file(toys(LLAMA | {"model_type": "qwen3"}) / WEIGHTS)
    found = guess(infos_of(qwen))
    assert "qwen3" in found.families and "llama" not in found.families
    values = {value.path: value.value for value in found.values}
    assert (values["attention.n_heads"], values["attention.n_kv_heads"], values["attention.head_dim"]) == (4, 2, 6)
    assert values["lm_head.tied"] is False and values["mlp.gated"] is True and values["n_layers"] == 3
    gpt2 = load_file(toys(GPT2) / WEIGHTS)
    ends = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    turned = {name: x.T.contiguous() if name.endswith(ends) else x for name, x in gpt2.items()}
    assert guess(infos_of(gpt2)).families[0] == "gpt2" and guess(infos_of(turned)).families[0] == "nanogpt-checkpoint"
    assert guess(infos_of({"some.thing": torch.ones(2), "other": torch.ones(1)})) is None
    opt = {"model_type": "opt", "vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "ffn_dim": 8, "max_position_embeddings": 20, "word_embed_proj_dim": 16}  # fmt: skip
    values = {value.path: value.value for value in guess(infos_of(load_file(toys(opt) / WEIGHTS))).values}
    assert values["context_length"] == 20  # its table has two rows more


def infos_of(tensors: Tensors) -> dict:
    from gptcli.checkpoint.safetensors import TensorInfo

    return {name: TensorInfo("F32", tuple(x.shape), Path("x"), 0, 0) for name, x in tensors.items()}


@pytest.mark.parametrize(
    "changes", [{"model_type": "mamba"}, {"rope_scaling": {"rope_type": "sparkle", "factor": 2.0}}]
)
def test_a_config_that_is_not_understood_says_nothing_of_the_files(changes, copy):
    here = copy(LLAMA, **changes)
    one = look(here)
    assert (
        one["verdict"] == "whole" and one["spec"] is None and line(here).endswith("no config that gptcli understands")
    )
    assert any("not implemented" in note for note in one["notes"])


def test_one_line_of_the_architecture():
    """Each phrase by the published sizes of a model that ships as a config."""
    from gptcli.config import read_config

    said = {name: " · ".join(summary(read_config(path).spec)) for name, path in shipped.configs().items()}
    assert said["gpt2-small"] == (
        "12 layers of 768 · 12 heads of 64 · gelu_tanh MLP 3072 · learned positions 1,024 · "
        "LayerNorm before each sublayer · vocabulary 50,257 · tied head"
    )
    assert said["mistral-7b"] == (
        "32 layers of 4096 · 32 heads of 128, 8 for keys and values · a window of 4,096 · gated silu MLP 14336 · "
        "rotation, θ 10,000, context 32,768 · RMSNorm before each sublayer · vocabulary 32,000 · head of its own"
    )
    assert "rotation, θ 500,000 (llama3), context 131,072" in said["llama3.1-405b"]
    assert "an encoder of 6 layers of 512" in said["transformer-2017-base"]
    assert "12 heads of 64, seeing both ways" in said["bert-base"]


def test_sizes_of_tokenizers_are_those_of_the_tokenizers(tmp_path):
    gpt2_vocabulary(tmp_path)
    assert size_of(tmp_path).ids == from_files(tmp_path).size == 50257
    sample = shipped.samples()["tiny-gpt2"]
    assert size_of(sample).ids == from_files(sample).size == 320
    words_vocabulary(tmp_path, 77)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    assert size_of(tmp_path).ids == from_files(tmp_path).size == 79
    assert size_of(tmp_path / "nowhere") is None


def test_the_size_of_a_sentencepiece_vocabulary(tmp_path):
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    lines = [f"cats sit on mats number {i} with {'a' * (i % 7)} b" for i in range(60)]
    (tmp_path / "text").write_text("\n".join(lines))
    SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=38, minloglevel=2
    )
    held = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")).get_piece_size()
    assert size_of(tmp_path).ids == held == 38
    added = {str(38 + i): {"content": f"<{i}>", "special": True} for i in range(3)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    assert size_of(tmp_path).ids == from_files(tmp_path).size == 41
    (tmp_path / "tokenizer.model").write_bytes((tmp_path / "tokenizer.model").read_bytes()[:-3])
    with pytest.raises(Exception, match="not a model of sentencepiece"):
        size_of(tmp_path)


# Pickles, training checkpoints, adapters, packed weights


@pytest.mark.parametrize("legacy", [False, True])
def test_pickles_are_listed_as_safetensors_are(legacy, toys, copy):
    here = copy(LLAMA)
    torch.save(load_file(here / WEIGHTS), here / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    (here / WEIGHTS).unlink()
    one, other = look(here), look(toys(LLAMA))
    assert one["verdict"] == "whole" and one["parameters"] == other["parameters"]
    assert one["format"] == ("PyTorch (before zip files)" if legacy else "PyTorch (zip)")
    for key in ("stored", "name", "times", "shape", "dtype"):
        assert sorted(str(row[key]) for row in one["tensors"]) == sorted(str(row[key]) for row in other["tensors"])


class Runs:
    """An object whose unpickling would make a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_in_a_pickle_is_run(tmp_path, copy):
    here = copy(GPT2)
    torch.save({"model": load_file(here / WEIGHTS), "made by": Runs(tmp_path / "ran")}, here / "pytorch_model.bin")
    (here / WEIGHTS).unlink()
    one = look(here)
    assert (one["verdict"], codes(one)) == ("unsafe", ["foreign-object"]) and "nothing was run" in one["said"]
    assert one["parameters"]["total"] == GPT2_COUNT and one["opaque"]
    run("inspect", here, "--stats", "--hash")
    assert not (tmp_path / "ran").exists()


def test_foreign_objects_in_any_shard(copy, tmp_path):
    here = copy(LLAMA)
    table = shards(here, 2)
    for i, name in enumerate(sorted(set(table.values()))):
        held = load_file(here / name)
        (here / name).unlink()
        more = {"made by": Runs(tmp_path / "ran")} if i else {}
        torch.save(held | more, here / name.replace("safetensors", "bin"))
    (here / INDEX).unlink()
    table = {key: shard.replace("safetensors", "bin") for key, shard in table.items()}
    (here / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    one = look(here)
    assert codes(one) == ["foreign-object"] and one["findings"][0]["path"] == "model-00002-of-00002.bin"
    assert not (tmp_path / "ran").exists()


def nanogpt(tmp_path: Path, toys: Callable) -> Path:
    tensors = load_file(toys(GPT2) / WEIGHTS)
    ends = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    model = {name: x.T.contiguous() if name.endswith(ends) else x for name, x in tensors.items()}
    model |= {"lm_head.weight": model["transformer.wte.weight"]}
    args = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 32, "vocab_size": 67, "bias": True, "dropout": 0.0}
    state = {i: {"exp_avg": torch.zeros(9), "exp_avg_sq": torch.zeros(9), "step": torch.tensor(3.0)} for i in range(2)}
    held = {"model": model, "optimizer": {"state": state, "param_groups": [{"lr": 1e-3}]}, "model_args": args}
    torch.save(held | {"iter_num": 2000, "best_val_loss": 1.5}, tmp_path / "ckpt.pt")
    return tmp_path / "ckpt.pt"


def test_the_sections_of_a_training_checkpoint(tmp_path, toys):
    one = look(nanogpt(tmp_path, toys))
    assert one["verdict"] == "whole" and one["kind"] == "training" and one["families"] == ["nanogpt-checkpoint"]
    sections = {section["name"]: (section["tensors"], section["bytes"]) for section in one["sections"]}
    # A tied head is in the same bytes as the table; two moments of 9 float32 and a step, twice.
    assert sections["model"] == (29, 8 * GPT2_COUNT) and sections["optimizer"] == (6, 2 * (2 * 9 * 4 + 4))
    assert (one["settings"]["iter_num"], one["settings"]["best_val_loss"]) == (2000, 1.5)
    assert one["shared"] == [["model.transformer.wte.weight", "model.lm_head.weight"]]
    assert one["parameters"]["total"] == GPT2_COUNT and one["tie"]["same"] is True
    assert one["config"] == "model_args in ckpt.pt"


def test_a_step_of_a_run_with_its_settings_beside_it(tmp_path):
    """As nanochat writes it: model_000010.pt beside meta_000010.json, and earlier steps, which are other models."""
    shapes = {f"transformer.h.0.attn.c_{letter}.weight": (8, 8) for letter in ("q", "k", "v", "proj")}
    shapes |= {"transformer.wte.weight": (20, 8), "lm_head.weight": (20, 8)}
    shapes |= {"transformer.h.0.mlp.c_fc.weight": (32, 8), "transformer.h.0.mlp.c_proj.weight": (8, 32)}
    for step in ("000005", "000010"):
        tensors = {f"_orig_mod.{name}": torch.ones(shape) for name, shape in shapes.items()}
        torch.save(tensors, tmp_path / f"model_{step}.pt")
    config = {"sequence_len": 16, "vocab_size": 20, "n_layer": 1, "n_head": 2, "n_kv_head": 2, "n_embd": 8}
    (tmp_path / "meta_000010.json").write_text(json.dumps({"model_config": config, "step": 10}))
    one = look(tmp_path)
    assert one["verdict"] == "whole" and one["families"] == ["nanochat-checkpoint"]
    assert one["config"] == "meta_000010.json" and one["files"][0]["name"] == "model_000010.pt"
    assert one["parameters"]["total"] == 2 * 20 * 8 + 4 * 64 + 2 * 32 * 8 and one["wrappers"] == ["_orig_mod"]


def test_a_trainer_s_leftovers_are_no_second_set(copy):
    here = copy(LLAMA)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"state": torch.ones(3)}, here / name)
    (here / "trainer_state.json").write_text("{}")
    one = look(here)
    assert one["verdict"] == "whole" and one["beside"] == []
    assert one["leftovers"] == [
        "optimizer.pt",
        "rng_state.pth",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
    ]


def test_an_adapter_says_rank_alpha_targets_and_base(tmp_path):
    (tmp_path / "lora").mkdir()
    here = written(tmp_path / "lora")
    one = look(here)
    assert one["verdict"] == "whole" and one["kind"] == "adapter"
    found = one["adapter"]
    assert (found["rank"], found["alpha"]) == (8, 16) and sorted(found["targets"]) == ["down_proj", "q_proj"]
    assert found["base"] in line(here)
    shown = run("inspect", here, columns=80).out
    assert "layers {0-2} self_attn.q_proj [64, 64] rank 8, times 2" in shown
    (tmp_path / "broken").mkdir()
    tensors = {name: x for name, x in lora().items() if "layers.0.self_attn.q_proj.lora_B" not in name}
    assert codes(look(written(tmp_path / "broken", tensors))) == ["missing-part"]
    (here / "adapter_model.safetensors").write_bytes(b"")
    assert look(here)["verdict"] == "not a checkpoint"


@pytest.mark.parametrize("scheme", ["gptq", "awq", "bnb-nf4-nested", "bnb-int8", "fp8-block", "mxfp4", "ct-pack"])
def test_packed_weights_are_counted_as_they_were(scheme, tmp_path):
    toy = packed_toys.save(tmp_path, scheme)
    one = look(tmp_path)
    assert one["verdict"] == "whole"
    total = sum(x.numel() for x in toy.plain.values())
    stored = sum(x.numel() for x in toy.stored.values())
    assert one["parameters"]["total"] == one["parameters"]["described"] == total
    assert one["parameters"]["stored"] == stored
    packed = {name: x for name, x in toy.plain.items() if name in toy.packed}
    q = one["quantised"]
    assert q["numbers"] == sum(x.numel() for x in packed.values()) and sum(q["schemes"].values()) == len(packed)
    assert q["bits_a_weight"] == pytest.approx(8 * q["bytes"] / q["numbers"], abs=1e-4)
    beside = set(toy.stored) - set(toy.plain)
    assert q["bytes"] == sum(toy.stored[name].nbytes for name in beside | (set(toy.packed) & set(toy.stored)))
    rows = [row for row in one["tensors"] if row["kind"] == "packed"]
    assert sum(row["times"] for row in rows) == len(packed) and all(row["name"] and row["logical"] for row in rows)
    assert not [row for row in one["tensors"] if row["kind"] in ("left over", "tensor")]


def test_a_packed_weight_that_lacks_a_part(tmp_path):
    toy = packed_toys.save(tmp_path, "gptq")
    lost = next(name for name in toy.stored if name.endswith(".scales"))
    save_file({name: x.contiguous() for name, x in toy.stored.items() if name != lost}, tmp_path / WEIGHTS)
    one = look(tmp_path)
    assert one["verdict"] == "incomplete" and codes(one)[0] == "missing-part" and lost in one["said"]


# The config, value by value


def values(one: dict) -> dict[str, tuple[Any, str, list[str]]]:
    return {value["path"]: (value["value"], value["origin"], value["keys"]) for value in one["values"]}


def test_each_value_and_where_it_comes_from(copy):
    found = values(
        look(copy(GPT2, layer_norm_epsilon=None, hidden_size=8, n_embd=..., resid_pdrop=0.1, add_cross_attention=False))
    )
    assert found["hidden_size"] == (8, "config", ["hidden_size"])  # the file's word for n_embd
    assert found["vocab_size"] == (67, "config", ["vocab_size"])
    assert found["context_length"] == (32, "config", ["n_positions"])
    assert found["norm.eps"] == (1e-5, "default", ["layer_norm_epsilon"])  # null is absent
    assert found["mlp.size"] == (32, "derived", ["hidden_size"])
    assert found["attention.head_dim"] == (4, "derived", ["hidden_size", "n_head"])
    assert found["mlp.activation"] == ("gelu_tanh", "default", ["activation_function"])
    assert found["attention.bias"] == (True, "family", [])
    one = look(copy(GPT2, resid_pdrop=0.1, add_cross_attention=False, sparkle=3))
    assert one["idle"] == ["model_type", "resid_pdrop"] and one["checked"] == ["add_cross_attention"]
    assert one["unknown"] == ["sparkle"] and one["verdict"] == "whole"
    strict = copy(GPT2, sparkle=3)
    assert codes(look(strict, "--strict")) == ["unknown-key"] and "sparkle" in line(strict, "--strict")


def test_rotation_and_windows_tell_their_keys(copy):
    scaled = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    found = values(look(copy(LLAMA, **scaled)))
    assert found["position.theta"] == (500.0, "config", ["rope_scaling", "rope_theta"])
    assert found["position.scaling.factor"][0] == 2.0
    plain = values(look(copy(LLAMA)))
    assert plain["position.theta"][:2] == (10_000.0, "default")  # its head_dim says nothing of the rotation
    assert plain["attention.head_dim"] == (6, "config", ["head_dim"])
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    stretched = values(look(copy(LLAMA, rope_scaling=yarn)))
    assert stretched["context_length"] == (128, "derived", ["rope_scaling"])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite", "olmo2"])
def test_values_are_those_of_the_spec(kind, toys):
    one = look(
        toys(LLAMA | {"model_type": kind, "pad_token_id": 0} | ({"sliding_window": 8} if "gemma" in kind else {}))
    )
    for path, (value, _, _) in values(one).items():
        inner: Any = one["spec"]
        for part in path.split("."):
            inner = inner[int(part)] if part.isdecimal() else inner[part]
        assert inner == value, path
    told = {path for path, value in leaves(one["spec"]) if value not in (None, [])}
    assert told - {"name", "tokenizer", "encoder_embed", "variants"} <= set(values(one))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}".lstrip("."))
    else:
        yield path, value


def test_a_yaml_config_says_what_it_says(tmp_path, toys):
    shutil.copy(toys(GPT2) / WEIGHTS, tmp_path)
    (tmp_path / "config.yaml").write_text(
        "{vocab_size: 67, context_length: 32, hidden_size: 8, n_layers: 2, position: {kind: learned}, "
        "norm: {kind: layernorm}, attention: {n_heads: 2, bias: true}, "
        "mlp: {kind: dense, size: 32, activation: gelu_tanh, bias: true}, lm_head: {tied: true}}"
    )
    one = look(tmp_path)
    assert one["verdict"] == "whole" and one["families"] == ["gpt2"] and one["config"] == "config.yaml"
    found = values(one)
    assert found["mlp.size"] == (32, "config", ["mlp.size"]) and found["norm.eps"] == (1e-5, "default", [])
    assert found["attention.head_dim"] == (4, "derived", ["hidden_size", "attention.n_heads"])


# Statistics


def stats(path: Path, *words: object) -> dict[str, dict]:
    return {
        one["stored"]: one
        for one in run("inspect", path, "--stats", *words, "--json").json["checkpoints"][0]["statistics"]
    }


def check(found: dict, tensor: torch.Tensor) -> None:
    """Against torch in double precision, over the whole tensor at once."""
    x = tensor.double().flatten()
    finite = x[x.isfinite()]
    assert found["numbers"] == x.numel()
    assert found["nan"] == int(x.isnan().sum()) and found["inf"] == int(x.isinf().sum())
    if len(finite) == 0:
        assert found["mean"] is found["std"] is found["min"] is found["max"] is None
    else:
        scale = max(float(finite.abs().max()), 1e-300)
        assert found["mean"] == pytest.approx(float(finite.mean()), rel=1e-12, abs=1e-14 * scale)
        std = float(((finite - finite.mean()) ** 2).mean().sqrt())
        assert found["std"] == pytest.approx(std, rel=1e-9, abs=1e-12 * scale)
        assert (found["min"], found["max"]) == (float(finite.min()), float(finite.max()))
    assert found["zeros"] == int((x == 0).sum())
    rows = tensor.double().reshape(-1, tensor.shape[-1]) if tensor.dim() and tensor.numel() else torch.empty(0, 1)
    assert found["rows"] == len(rows)
    assert found["equal_rows"] == int((rows == rows[:, :1]).all(1).sum())
    assert found["zero_rows"] == int((rows == 0).all(1).sum())


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers of any type; some are 0, some rows are all alike."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    x[x.abs() < 0.3] = 0
    if len(shape) > 1 and shape[0] > 3:
        x[1], x[2] = 0, 2
    if dtype == torch.bool:
        return x > 0
    if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu):
        x = x.abs()
    return x.round().to(dtype) if not dtype.is_floating_point else x.to(dtype)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_of_every_type(dtype, tmp_path):
    tensors = {
        "wide": drawn(dtype, 9, 7),
        "long": drawn(dtype, 50),
        "cube": drawn(dtype, 5, 3, 4),
        "one": drawn(dtype, 1),
    }
    tensors |= {"none": drawn(dtype, 3, 0), "number": drawn(dtype, 1)[0].clone()}
    save_file(tensors, tmp_path / "some.safetensors")
    found = stats(tmp_path / "some.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        check(found[name], tensor)


SPECIAL = {
    "minus zero": [-0.0, 0.0, 1.0, -0.0],
    "tiny": [1e-42, -1e-42, 1e-45, 0.0],
    "huge": [3e38, -3e38, 3e38, 1.0],
    "alike": [0.1] * 9,
    "nearly alike": [1.0, 1.0 + 2**-23, 1.0, 1.0 - 2**-24],
    "far from 0": [1e6 + i for i in range(20)],
    "all NaN": [math.nan] * 3,
    "all infinite": [math.inf, -math.inf, math.inf],
    "some of both": [1.0, math.nan, -math.inf, 2.0, math.nan, math.inf, 0.0],
}


@pytest.mark.parametrize("block", [1 << 18, 4, 1])
@pytest.mark.parametrize("case", SPECIAL)
def test_statistics_of_awkward_numbers_in_blocks_of_any_size(case, block, tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "NUMBERS", block)
    row = torch.tensor(SPECIAL[case])
    tensors = {"line": row, "rows": torch.stack([row, row.flip(0), torch.zeros_like(row), torch.ones_like(row)])}
    tensors["column"] = row[:, None].clone()
    save_file(tensors, tmp_path / "some.safetensors")
    found = stats(tmp_path / "some.safetensors")
    for name, tensor in tensors.items():
        check(found[name], tensor)


@pytest.mark.parametrize("block", [8, 100, 4096])
def test_blocks_join_to_the_whole(block, tmp_path, monkeypatch):
    """Rows of 300 numbers: blocks are parts of a row, one row, or many."""
    monkeypatch.setattr(statistics, "NUMBERS", block)
    x = drawn(torch.float32, 30, 300)
    x[4] = 0
    x[5] = 1
    x[6, 299], x[7, 0], x[8] = math.nan, math.inf, 5
    save_file({"x": x, "y": 1 + 1e-4 * drawn(torch.float32, 40, 300, seed=1)}, tmp_path / "some.safetensors")
    found = stats(tmp_path / "some.safetensors")
    check(found["x"], x)
    check(found["y"], load_file(tmp_path / "some.safetensors")["y"])
    assert found["x"]["first_nan"] == [6, 299] and found["x"]["first_inf"] == [7, 0]


def test_nan_and_inf_are_findings_with_their_place(copy):
    def spoil(tensors: Tensors) -> Tensors:
        tensors["transformer.h.1.mlp.c_fc.weight"][3, 5] = math.nan
        tensors["transformer.h.1.mlp.c_fc.weight"][7, 1] = math.nan
        tensors["transformer.wpe.weight"][2, 1] = math.inf
        return tensors

    here = copy(GPT2, spoil)
    assert run("inspect", here).status == 0  # only who reads the numbers can know
    ran = run("inspect", here, "--stats", "-q")
    assert ran.status == 1
    assert ran.out == (
        f"not finite: {here} · tensor transformer.h.1.mlp.c_fc.weight holds 2 NaN, the first at [3, 5] (and 1 more)\n"
    )
    one = look(here, "--stats")
    assert codes(one) == ["nan", "inf"] and one["findings"][1]["path"] == "transformer.wpe.weight"
    assert run("inspect", here, "--stats", "--filter", "*ln_*").status == 0


def test_statistics_of_pickles_and_of_strided_tensors(tmp_path):
    x, y = drawn(torch.float32, 12, 10), drawn(torch.bfloat16, 40)
    torch.save({"turned": x.T, "every other": y[::2], "plain": x, "rows": x[2:5, 1:4]}, tmp_path / "some.bin")
    found = stats(tmp_path / "some.bin")
    for name, tensor in {"turned": x.T, "every other": y[::2], "plain": x, "rows": x[2:5, 1:4]}.items():
        check(found[name], tensor.contiguous())


@pytest.mark.parametrize("scheme", ["bnb-nf4-nested", "fp8-block", "fp8-row", "mxfp4"])
def test_packed_weights_are_dequantised_first(scheme, tmp_path):
    toy = packed_toys.save(tmp_path, scheme)
    found = stats(tmp_path)
    for name in toy.packed:
        plain = toy.plain[name]
        assert found[name]["numbers"] == plain.numel()
        assert found[name]["mean"] == pytest.approx(float(plain.mean()), abs=1e-6)
        assert found[name]["std"] == pytest.approx(float(plain.std(correction=0)), rel=1e-5)
    assert set(found) == set(toy.plain)


def test_what_can_not_be_dequantised_is_said(tmp_path):
    toy = packed_toys.save(tmp_path, "gptq")
    one = look(tmp_path, "--stats")
    assert any("GPTQ" in note and "not dequantised" in note for note in one["notes"])
    assert not {row["stored"] for row in one["statistics"]} & {name for name in toy.stored if name.endswith("qweight")}


def test_the_spectral_norm_is_near_and_never_above(tmp_path):
    first, second = (
        torch.linalg.qr(drawn(torch.float64, 40, 40))[0],
        torch.linalg.qr(drawn(torch.float64, 30, 30, seed=2))[0],
    )
    spread = torch.tensor([5.0, 3.0, *[0.5] * 28], dtype=torch.float64)
    tensors = {"gap": first[:, :30] @ torch.diag(spread) @ second, "random": drawn(torch.float64, 50, 20)}
    tensors |= {"zeros": torch.zeros(4, 3, dtype=torch.float64), "line": drawn(torch.float64, 5)}
    save_file(tensors, tmp_path / "some.safetensors")
    found = stats(tmp_path / "some.safetensors", "--spectral")
    assert found["gap"]["spectral"] == pytest.approx(5, rel=1e-4)
    true = float(torch.linalg.svdvals(tensors["random"])[0])
    assert 0.95 * true < found["random"]["spectral"] <= true * (1 + 1e-12)
    assert found["zeros"]["spectral"] == 0 and found["line"]["spectral"] is None
    assert stats(tmp_path / "some.safetensors")["gap"]["spectral"] is None
    assert found == stats(tmp_path / "some.safetensors", "--spectral")
    ran = run("inspect", tmp_path / "some.safetensors", "--spectral")
    assert ran.status == 2 and "--spectral without --stats" in ran.err


def test_a_large_file_never_stays_in_memory_as_a_whole(tmp_path):
    """Of 600 MiB that are read, no more than some tens are the process's at any time."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [150, 2**20], "data_offsets": [0, 600 * 2**20]}}).encode()
    with (tmp_path / "some.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 600 * 2**20)
    code = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from gptcli.checkpoint.safetensors import read_header\n"
        "from gptcli.checkpoint.scan import digest\n"
        "from gptcli.model.statistics import statistics_of\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "infos, before = read_header(Path(sys.argv[1])), peak()\n"
        "((name, found),) = statistics_of(infos, {}, {}, False, lambda read: None)\n"
        "digest(infos, {}, lambda read: None)\n"
        "print(found.zeros, found.zero_rows, peak() - before)\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "some.safetensors")]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    zeros, rows, grown = map(int, ran.stdout.split())
    assert (zeros, rows) == (150 * 2**20, 150) and grown < 150


def test_a_view_that_repeats_its_numbers_without_end_is_not_read(tmp_path):
    """Two numbers on disk, a million million by the shape."""
    torch.save(
        {"long": torch.ones(2).as_strided((10**6, 10**6), (0, 0)), "short": torch.ones(3)}, tmp_path / "some.bin"
    )
    one = look(tmp_path / "some.bin", "--stats", "--hash")
    assert [row["stored"] for row in one["statistics"]] == ["short"] and list(one["digests"]["tensors"]) == ["short"]
    assert any("not read: long" in note for note in one["notes"])


# Digests


def digests(path: Path, *words: object) -> dict:
    return run("inspect", path, "--hash", *words, "--json").json["checkpoints"][0]["digests"]


def test_what_is_digested(tmp_path):
    """A tensor: SHA-256 of type, shape and bytes; the model: of names (their length before them) and those."""
    tensors = {"b": drawn(torch.float32, 3, 5), "a.é": drawn(torch.bfloat16, 4), "c": torch.tensor(7)}
    save_file(tensors, tmp_path / "some.safetensors")
    found = digests(tmp_path / "some.safetensors")
    words = {"b": b"F32 3x5\n", "a.é": b"BF16 4\n", "c": b"I64 \n"}
    each = {
        name: hashlib.sha256(words[name] + x.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, x in tensors.items()
    }
    whole = hashlib.sha256()
    for name in ("a.é", "b", "c"):
        word = name.encode()
        whole.update(struct.pack("<Q", len(word)) + word + each[name].digest())
    assert found["algorithm"] == "sha256" and found["model"] == whole.hexdigest()
    assert found["tensors"] == {name: one.hexdigest() for name, one in each.items()}


def test_digests_know_no_sharding_order_or_format(toys, copy, tmp_path):
    plain = digests(toys(LLAMA))
    tensors = load_file(toys(LLAMA) / WEIGHTS)
    cut_up = copy(LLAMA)
    shards(cut_up, 3)
    turned = copy(LLAMA)
    save_file(dict(reversed(tensors.items())), turned / WEIGHTS)
    pickled = copy(LLAMA)
    torch.save(tensors, pickled / "pytorch_model.bin")
    (pickled / WEIGHTS).unlink()
    legacy = copy(LLAMA)
    torch.save(tensors, legacy / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (legacy / WEIGHTS).unlink()
    strided = copy(LLAMA)
    views = {
        name: x.T.contiguous().T if x.dim() == 2 else torch.stack([x, x], -1)[..., 0] for name, x in tensors.items()
    }
    torch.save(views, strided / "pytorch_model.bin")
    (strided / WEIGHTS).unlink()
    wrapped = copy(LLAMA, lambda t: {f"module.{name}": x for name, x in t.items()})
    for here in (cut_up, turned, pickled, legacy, strided, wrapped):
        found = digests(here)
        assert found["model"] == plain["model"]
        names = {name.removeprefix("module."): one for name, one in found["tensors"].items()}
        assert names == plain["tensors"]
    changed = copy(LLAMA, lambda t: t | {"model.norm.weight": t["model.norm.weight"] + 1e-9})
    found = digests(changed)
    assert found["model"] != plain["model"]
    assert [name for name in tensors if found["tensors"][name] != plain["tensors"][name]] == ["model.norm.weight"]


def test_no_digest_of_a_model_that_is_not_all_there(copy):
    here = copy(LLAMA)
    shards(here, 3, lost=(2,))
    found = digests(here)
    assert found["model"] is None and 0 < len(found["tensors"]) < 30
    assert "none of the model" in run("inspect", here, "--hash").out
    assert set(digests(copy(LLAMA), "--filter", "*norm*")["tensors"]) == {
        *(f"model.layers.{i}.{word}_layernorm.weight" for i in range(3) for word in ("input", "post_attention")),
        "model.norm.weight",
    }


@pytest.mark.parametrize("dtype, word", [(torch.float32, "F32"), (torch.float16, "F16"), (torch.complex64, "C64")])
def test_numbers_with_the_high_byte_first_are_turned_round(dtype, word, tmp_path):
    from gptcli.checkpoint.safetensors import TensorInfo

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    little = x.numpy().tobytes()
    (tmp_path / "some").write_bytes(x.numpy().astype(x.numpy().dtype.newbyteorder(">")).tobytes())
    info = TensorInfo(word, (3, 4), tmp_path / "some", 0, len(little))
    with opened() as read:
        assert b"".join(in_order(info, Lay(big=True, bits=8 * dtype.itemsize), read)) == little


# Patterns of names

PARTS = st.one_of(
    st.integers(0, 12).map(str), st.sampled_from(["h", "w", "00", "01", "{}", "{0-1}", "a{", "٣", "", "9" * 30])
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.lists(st.lists(PARTS, min_size=1, max_size=5).map(".".join), unique=True, max_size=40))
def test_folding_loses_no_name_and_adds_none(names):
    patterns = fold(names)
    found = [name for pattern in patterns for name in unfold(pattern.text, len(pattern.names))]
    assert sorted(found) == sorted(names)
    assert [pattern.names for pattern in patterns] == [unfold(p.text, len(p.names)) for p in patterns]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1))
def test_a_full_product_is_one_pattern(pairs):
    rows, columns = {i for i, _ in pairs}, {j for _, j in pairs}
    names = [f"layers.{i}.experts.{j}.up" for i in rows for j in columns]
    assert len(fold(names)) == 1 and braced(names) == (fold(names)[0].text)
    assert (braced([f"layers.{i}.experts.{j}.up" for i, j in pairs]) != "") == (len(pairs) == len(rows) * len(columns))


def test_ranges_are_exact():
    assert [ranges(x) for x in ([3], [0, 1], [0, 1, 2], [0, 1, 2, 5, 7, 8], [])] == ["3", "0,1", "0-2", "0-2,5,7,8", ""]
    assert [p.text for p in fold(["h.0.w", "h.1.w", "h.2.w", "h.4.w", "x"])] == ["h.{0-2,4}.w", "x"]


def test_a_name_of_a_thousand_numbers_is_a_name():
    name = ".".join(["1"] * 3000)
    assert [p.text for p in fold([name, name + ".2"])] == [name, name + ".2"]


# The command


def test_several_paths_and_the_highest_status(toys, copy, tmp_path):
    broken = copy(GPT2)
    cut(broken)
    good, absent = toys(GPT2), tmp_path / "nowhere"
    ran = run("inspect", "-q", good, broken)
    assert ran.status == 1 and [line.split(":")[0] for line in ran.out.splitlines()] == ["whole", "corrupt"]
    ran = run("inspect", "-q", absent, good, broken)
    assert ran.status == 2 and ran.out.splitlines()[-1] == f"not opened: {absent}: no such file or directory"
    report = run("inspect", absent, good, "--json").json
    assert report["status"] == "error" and len(report["checkpoints"]) == 1 and report["unopened"][0]["code"] == "file"
    assert run("inspect", good, toys(LLAMA)).out.count("whole: ") == 2


def test_what_can_not_be_opened_is_exit_2(tmp_path, toys, monkeypatch):
    def refused(*words: object) -> str:
        ran = run("inspect", *words)
        assert ran.status == 2 and not ran.out and ran.err.count("\n") == 1 and "Traceback" not in ran.err
        return ran.err

    assert "no such file or directory" in refused(tmp_path / "nowhere.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a regular file" in refused(tmp_path / "pipe.safetensors")
    (tmp_path / "some.npz").write_bytes(b"PK" + bytes(20))
    assert "can't be read" in refused(tmp_path / "some.npz")
    assert "File name too long" in refused(tmp_path / ("n" * 300))
    assert "nothing to inspect" in refused()
    assert "name all of them without -m" in refused(toys(GPT2), "-m", toys(LLAMA))
    assert "no config 'nothing-such'" in refused(toys(GPT2), "-c", "nothing-such")
    error = run("inspect", tmp_path / "nowhere", "--json").json
    assert error["status"] == "error" and error["error"]["code"] == "file"

    def forbidden(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", forbidden)
    assert "Permission denied" in refused(toys(GPT2))


def test_samples_m_and_the_environment(toys):
    assert "whole: tiny-gpt2 · gpt2 · 37,760 parameters" in run("inspect", "-q", "tiny-gpt2").out
    assert run("inspect", "-q", "-m", toys(GPT2)).out == run("inspect", "-q", toys(GPT2)).out
    assert "tiny-gpt2" in run("inspect", "-q", GPTCLI_MODEL="tiny-gpt2").out
    assert str(toys(GPT2)) in run("inspect", "-q", toys(GPT2), GPTCLI_MODEL="tiny-gpt2").out
    assert run("inspect", "-q", "gpt2-small").out.startswith("not a checkpoint: gpt2-small · ")


def test_an_index_names_its_directory_s_shards(copy):
    here = copy(LLAMA)
    shards(here, 2)
    assert look(here / INDEX)["verdict"] == "whole" and len(look(here / INDEX)["files"]) == 2


HOSTILE = "\x1b[31mh\x07.{i}\u202e.w\x00\n"


def test_names_from_files_reach_no_terminal_as_they_are(tmp_path, copy):
    def spoil(tensors: Tensors) -> Tensors:
        return tensors | {HOSTILE.replace("{i}", str(i)): torch.full((2,), math.nan) for i in range(2)}

    here = copy(GPT2, spoil, **{"\x1b]0;x\x07": 1, "architectures": ["\x1b[2J"]})
    save_file(load_file(here / WEIGHTS), here / WEIGHTS, metadata={"\x1b[1m": "\x1b[5m", "format": "pt"})
    words_vocabulary(here, 60)
    renamed_dir = here.parent / "\x1b[7mdir"
    here.rename(renamed_dir)
    for options in ([], ["--full"], ["--where"], ["--stats"], ["--hash"], ["-q"], ["--tensors", "--filter", "*w*"]):
        for columns in (80, None):
            ran: Ran = run("inspect", renamed_dir, *options, columns=columns, NO_COLOR="1")
            assert all(one.isprintable() for one in (ran.out + ran.err).split("\n")), options
    assert run("inspect", renamed_dir, "--json").out[:-1].isprintable()
    assert look(renamed_dir)["unknown"] == ["\x1b]0;x\x07"]


SHOWN = [[], ["--tensors"], ["--where"], ["--stats"], ["--hash"], ["--full"]]


@pytest.mark.parametrize("options", SHOWN, ids=" ".join)
def test_the_look_at_80_columns(options):
    """Only a name, or a digest and a name, may need more than 80 columns, and a terminal wraps those."""
    ran = run("inspect", "tiny-gpt2", *options, columns=80, NO_COLOR="1")
    assert ran.status == 0 and ran.out.startswith("whole: tiny-gpt2 · gpt2 · 37,760 parameters in 28 tensors")
    long = [text for text in ran.out.splitlines() if cell_len(text) > 80]
    assert not long or options == ["--hash"]
    assert "\x1b" not in ran.out
    wide = run("inspect", "tiny-gpt2", *options)
    assert all(one in " ".join(wide.out.split()) for one in ("153,640 bytes", "320 ids in vocab.json"))
    ascii_ = run("inspect", "tiny-gpt2", *options, encoding="ascii")
    assert ascii_.status == 0 and ascii_.out.isascii()


def test_colour_says_whole_or_not(copy):
    assert "\x1b[1;32mwhole:" in run("inspect", "tiny-gpt2", "--color", "always").out
    here = copy(GPT2)
    cut(here)
    assert "\x1b[1;31mcorrupt:" in run("inspect", here, "--color", "always").out


def test_many_findings_are_shown_in_part_and_told_whole(copy):
    def spoil(tensors: Tensors) -> Tensors:
        return tensors | {f"other{'x' * i}.weight": torch.ones(1) for i in range(30)}

    here = copy(GPT2, spoil)
    assert len(look(here)["findings"]) == 30 and "(and 29 more)" in line(here)
    assert "10 more: --full or --json shows all" in run("inspect", here).out
    assert run("inspect", here, "--full").out.count("left-over-tensor") == 30


def test_a_report_is_written_to_a_file(tmp_path):
    assert run("inspect", "tiny-gpt2", "-o", tmp_path / "report.json").status == 0
    assert json.loads((tmp_path / "report.json").read_text())["checkpoints"][0]["verdict"] == "whole"


HEAVY = "torch numpy transformers safetensors tiktoken tokenizers huggingface_hub sentencepiece yaml".split()


@pytest.mark.parametrize("json_", [True, False], ids=["json", "table"])
@pytest.mark.parametrize("kind", ["safetensors", "pickle", "packed", "adapter", "hash"])
def test_saying_what_a_checkpoint_is_loads_nothing_heavy(kind, json_, copy, tmp_path):
    """Neither torch nor what else takes long to load; and rich only where a table is drawn."""
    here = copy(GPT2)
    if kind == "pickle":
        torch.save(load_file(here / WEIGHTS), here / "pytorch_model.bin")
        (here / WEIGHTS).unlink()
    if kind in ("packed", "adapter"):
        here = tmp_path / kind
        here.mkdir()
        packed_toys.save(here, "gptq") if kind == "packed" else written(here)
    words = ["inspect", str(here), *(["--json"] if json_ else []), *(["--hash"] if kind == "hash" else [])]
    code = (
        "import sys\n"
        "from gptcli.cli.main import main\n"
        f"sys.argv = ['gptcli', *{words!r}]\n"
        "status = main()\n"
        f"print(sorted({[*HEAVY, *(['rich'] if json_ else [])]!r} & sys.modules.keys()), status, file=sys.stderr)\n"
    )
    code = code.replace("sorted([", "sorted({").replace("] & sys", "} & sys")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout and ran.stderr == "[] 0\n"


def test_the_spec_in_json_is_the_config_in_yaml(toys):
    from gptcli.source import open_model

    assert look(toys(LLAMA))["spec"] == json.loads(json.dumps(to_dict(open_model(str(toys(LLAMA))).spec)))
