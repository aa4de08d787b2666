"""ggml's packed types, bit for bit as the gguf package unpacks them; and whole files of every type, run."""

import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from gptcli.checkpoint.gguf import BY_NAME, KINDS, UNPACKED, read_header
from gptcli.errors import GptcliError
from gptcli.model.forward import Inputs, forward
from gptcli.model.ggml import AT_ONCE, OWN, dequantised, lying, mapped
from gptcli.model.weights import Lazy
from gptcli.source import open_model
from tests.command import gptcli
from tests.converted import drawn
from tests.ggufs import Writer
from tests.oracle import CPU

# Numbers that a type's scales may be: all of float16's kinds.
HALVES = [0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x2E66]
HALVES = np.array(HALVES, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
# Where a type has its float16s within a block.
PLACES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # fmt: skip


def theirs(rows: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(rows, GGMLQuantizationType[kind])


def assert_same_bits(ours: torch.Tensor, expected: np.ndarray) -> None:
    """Equal in every bit, the sign of a zero too; one NaN is as good as another."""
    ours = ours.numpy()
    assert ours.shape == expected.shape and ours.dtype == expected.dtype == np.float32
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bytes for so many rows of so many blocks."""
    *rows, number = shape
    return np.random.default_rng(seed).integers(0, 256, (*rows, number * BY_NAME[kind].bytes), dtype=np.uint8)


def test_every_type_that_the_package_unpacks_is_unpacked():
    for kind in GGMLQuantizationType:
        form = BY_NAME[kind.name]
        zeros = np.zeros((1, form.bytes), dtype=np.uint8)
        try:
            gguf.dequantize(zeros, kind)
            theirs = kind.name not in ("F32", "F16", "BF16")
        except NotImplementedError:
            theirs = False
        assert (kind.name in UNPACKED) == theirs, kind.name
    assert set(OWN) < UNPACKED


@pytest.mark.parametrize("kind", sorted(UNPACKED))
def test_any_bytes(kind):
    """Random bytes hold all kinds of scales; those of ours get the rare ones too."""
    raw = blocks(kind, (60, 3))
    if kind in PLACES:
        view = raw.reshape(-1, BY_NAME[kind].bytes)
        for i, at in enumerate(PLACES[kind]):
            view[:, at : at + 2] = HALVES[np.arange(len(view)) // (1 if i == 0 else len(HALVES)) % len(HALVES)]
    expected = theirs(raw, kind)
    assert not np.isfinite(expected).all() or kind not in PLACES
    assert_same_bits(dequantised(torch.from_numpy(raw), kind), expected)


@pytest.mark.parametrize("kind", OWN)
def test_every_byte_at_every_place(kind):
    """Blocks that are zeros but for ones as scales, and one byte at one place, which takes all its 256 values."""
    form = BY_NAME[kind]
    raw = np.zeros((form.bytes, 256, form.bytes), dtype=np.uint8)
    for at in PLACES[kind]:
        raw[..., at : at + 2] = (0, 0x3C)
    for at in range(form.bytes):
        raw[at, :, at] = np.arange(256)
    assert_same_bits(dequantised(torch.from_numpy(raw), kind), theirs(raw, kind))


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "MXFP4"])
@pytest.mark.parametrize("shape", [(1,), (2, 1), (3, 2, 2), (2, 0, 1), (AT_ONCE // 256 + 5, 1)], ids=str)
def test_any_shape(kind, shape):
    raw = blocks(kind, shape)
    ours = dequantised(torch.from_numpy(raw), kind)
    assert ours.shape == (*shape[:-1], shape[-1] * BY_NAME[kind].numbers)
    if raw.size:
        assert_same_bits(ours, theirs(raw, kind))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_K", "IQ4_XS"])
def test_other_types_are_rounded_once_from_float32(kind, dtype):
    raw = torch.from_numpy(blocks(kind, (AT_ONCE // 1024, 8)))
    expected = dequantised(raw, kind).to(dtype)
    assert torch.equal(dequantised(raw, kind, dtype).nan_to_num(), expected.nan_to_num())


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_block_by_hand(data):
    """Q4_K and Q6_K by their published layout, a number at a time."""
    d, least = (data.draw(st.floats(-100, 100, width=16)) for _ in range(2))
    packed = data.draw(st.binary(min_size=140, max_size=140))
    block = np.frombuffer(np.array([d, least], np.float16).tobytes() + packed, np.uint8)
    ours = dequantised(torch.from_numpy(block.copy()), "Q4_K").tolist()
    scales = packed[:12]
    for i in data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=9)):
        group = i // 32
        if group < 4:
            scale, minimum = scales[group] & 63, scales[group + 4] & 63
        else:
            scale = scales[group + 4] & 15 | scales[group - 4] >> 6 << 4
            minimum = scales[group + 4] >> 4 | scales[group] >> 6 << 4
        byte = packed[12 + 32 * (group // 2) + i % 32]
        q = byte >> 4 if group % 2 else byte & 15
        expected = np.float32(d) * np.float32(scale) * np.float32(q) - np.float32(least) * np.float32(minimum)
        assert ours[i] == expected


def test_types_that_nobody_unpacks():
    for kind in ("Q8_1", "Q8_K", "Q1_0"):
        with pytest.raises(GptcliError, match=f"type {kind} can't be unpacked"):
            dequantised(torch.zeros(BY_NAME[kind].bytes, dtype=torch.uint8), kind)


# Files


def model_file(path: Path, kind: str, tied: bool = True) -> dict[str, np.ndarray]:
    """A toy of the Llama line with matrices of one type. Returns the numbers that they hold, by the file's names."""
    writer = GGUFWriter(path, "llama")
    hidden, vocab, layers = 256, 64, 2
    writer.add_block_count(layers)
    writer.add_context_length(32)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd": (vocab, hidden)} | ({} if tied else {"output": (vocab, hidden)})
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_{x}": (hidden if x in ("q", "output") else 128, hidden) for x in "q k v output".split()
        }
        shapes |= {f"blk.{i}.ffn_{x}": (512, hidden) for x in ("up", "gate")} | {f"blk.{i}.ffn_down": (hidden, 512)}
    norms = ["output_norm", *(f"blk.{i}.{x}_norm" for i in range(layers) for x in ("attn", "ffn"))]
    held = {}
    for stem, shape in shapes.items():
        name = f"{stem}.weight"
        held[name] = packed_like(writer, name, shape, kind)
    for stem in norms:
        held[f"{stem}.weight"] = drawn(f"{stem}.weight", (hidden,))
        writer.add_tensor(f"{stem}.weight", held[f"{stem}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def packed_like(writer: GGUFWriter, name: str, shape: tuple[int, int], kind: str) -> np.ndarray:
    """Adds a tensor of that type: packed by the package where it can, else of random bytes with small scales."""
    numbers, form = drawn(name, shape), BY_NAME[kind]
    if kind in ("F32", "F16", "F64"):
        array = numbers.astype({"F32": np.float32, "F16": np.float16, "F64": np.float64}[kind])
        writer.add_tensor(name, array)
        return array.astype(np.float32)
    try:
        raw = gguf.quantize(numbers, GGMLQuantizationType[kind])
    except NotImplementedError:
        raw = np.random.default_rng(len(name)).integers(
            0, 256, (shape[0], shape[1] // form.numbers, form.bytes), np.uint8
        )
        for at in PLACES.get(kind, [0]):
            raw[..., at : at + 2] = np.array([0.002], np.float16).view(np.uint8)
        raw = raw.reshape(shape[0], -1)
    writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
    return theirs(raw, kind)


# Two types have their scales in pieces or in eight bits, and random bytes would make them huge.
RUNS = sorted({"F32", "F16", "BF16", "F64"} | UNPACKED - {"IQ1_M", "NVFP4"})


@pytest.mark.parametrize("kind", RUNS)
def test_a_model_of_every_type_runs(kind, tmp_path):
    """As the same model with the unpacked numbers in float32."""
    held = model_file(tmp_path / "packed.gguf", kind)
    writer = GGUFWriter(tmp_path / "plain.gguf", "llama")
    keys = read_header(tmp_path / "packed.gguf").metadata
    for key, value in keys.items():
        if key.startswith("llama."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, numbers in held.items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    packed, plain = (open_model(str(tmp_path / f"{word}.gguf")) for word in ("packed", "plain"))
    assert packed.stored_dtype == {"F16": "float16", "BF16": "bfloat16", "F64": "float64"}.get(kind, "float32")
    assert replace(packed.spec, name="") == replace(plain.spec, name="")
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, expected = (
            forward(Inputs(ids), model.weights(torch.float32, CPU), model.spec) for model in (packed, plain)
        )
    assert expected.isfinite().all() and expected.std() > 1e-3
    assert torch.equal(ours, expected)


def test_rows_of_a_table_are_unpacked_alone(tmp_path, monkeypatch):
    held = model_file(tmp_path / "m.gguf", "Q4_K")
    weights = open_model(str(tmp_path / "m.gguf")).weights(torch.float32, CPU)
    unpacked = []
    monkeypatch.setattr("gptcli.model.load.ggml.dequantised",
                        lambda rows, *rest: unpacked.append(tuple(rows.shape)) or dequantised(rows, *rest))  # fmt: skip
    ids = torch.tensor([[5, 5, 63], [0, 1, 2]])
    rows = weights.rows("embed.weight", ids)
    assert unpacked == [(2, 3, 144)]
    assert torch.equal(rows, torch.from_numpy(held["token_embd.weight"])[ids])
    assert torch.equal(weights["lm_head.weight"], torch.from_numpy(held["token_embd.weight"]))


def test_what_is_unpacked_is_not_kept_and_what_lies_plain_is(tmp_path):
    model_file(tmp_path / "m.gguf", "Q8_0")
    weights = open_model(str(tmp_path / "m.gguf")).weights(torch.float32, CPU)
    assert isinstance(weights.tensors, Lazy)
    assert weights["layers.0.attn.v.weight"] is not weights["layers.0.attn.v.weight"]
    assert weights["final_norm.weight"] is weights["final_norm.weight"]
    assert list(weights.tensors.made) == ["final_norm.weight"]


def test_the_file_is_mapped_and_never_written(tmp_path):
    model_file(tmp_path / "m.gguf", "Q8_0")
    path = tmp_path / "m.gguf"
    before, info = path.read_bytes(), read_header(path).infos["output_norm.weight"]
    path.chmod(0o444)
    data = mapped(path)
    tensor = lying(info, data)
    assert tensor.data_ptr() == data.data_ptr() + info.start
    tensor.zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize("alignment", [1, 2, 8])
def test_tensors_that_lie_askew(tmp_path, alignment):
    """An alignment of 1 lets numbers begin at odd bytes."""
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(alignment)
    writer.add_string("general.name", "x")
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(5).astype(dtype) for name, dtype in
              (("a", np.float32), ("b", np.float16), ("c", np.float64))}  # fmt: skip
    raw = blocks("Q4_0", (3, 1))
    writer.add_tensor("odd", np.arange(3, dtype=np.int8))
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.add_tensor("q", raw, raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    infos, data = read_header(tmp_path / "m.gguf").infos, mapped(tmp_path / "m.gguf")
    for name, array in arrays.items():
        assert lying(infos[name], data).numpy().tobytes() == array.tobytes()
    assert_same_bits(dequantised(lying(infos["q"], data), "Q4_0"), theirs(raw, "Q4_0"))


def test_published_checkpoints_of_4_bit_experts_and_their_files_agree(tmp_path):
    """MXFP4 as transformers unpacks it from a directory's blocks and scales, repacked by the published rule."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    packed = torch.from_numpy(rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(110, 130, (2, 6, 3), dtype=np.uint8))
    expected = convert_moe_packed_tensors(packed, scales, dtype=torch.float32).transpose(1, 2)  # [E, out, in]
    # There, a byte holds two neighbours; here, number i and number i + 16.
    low, high = packed & 15, packed >> 4
    numbers = torch.stack((low, high), -1).flatten(-2)  # [..., 32]
    repacked = torch.cat((scales[..., None], numbers[..., :16] | numbers[..., 16:] << 4), -1).flatten(-2)
    assert torch.equal(dequantised(repacked, "MXFP4"), expected)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4.5), ("Q8_0", 8.5), ("IQ2_XXS", 2.0625), ("F16", 16.0)])
def test_params_tell_what_is_stored_how(tmp_path, kind, bits):
    held = model_file(tmp_path / "m.gguf", kind)
    matrices = sum(array.size for array in held.values() if array.ndim == 2)
    norms = sum(array.size for array in held.values() if array.ndim == 1)
    report = gptcli("params", "-m", tmp_path / "m.gguf", "--json").json
    stored = {row["type"]: row for row in report["types"]}
    size = int(matrices * bits / 8)
    assert stored[kind] == {"type": kind, "tensors": 15, "numbers": matrices, "bits": bits, "bytes": size}
    assert stored["F32"] == {"type": "F32", "tensors": 5, "numbers": norms, "bits": 32.0, "bytes": 4 * norms}
    assert report["types"][-1] == stored["all"] and stored["all"]["numbers"] == report["parameters"]["total"]
    assert (
        report["bytes"]
        == stored["all"]["bytes"]
        == size + 4 * norms
        == sum(row["bytes"] for row in report["rows"] if row["indent"] == 0)
    )
    assert report["bf16_bytes"] == 2 * (matrices + norms) and report["model"]["dtype"] == "as stored"
    rows = gptcli("params", "-m", tmp_path / "m.gguf", "--by", "tensor", "--json").json["rows"]
    assert {row["name"]: row["stored"] for row in rows}["layers.{0-1}.attn.q.weight"] == [kind]
    assert sum(row["bytes"] for row in rows) == report["bytes"]
    as_bf16 = gptcli("params", "-m", tmp_path / "m.gguf", "--dtype", "bf16", "--json").json
    assert as_bf16["bytes"] == as_bf16["bf16_bytes"] and as_bf16["types"] == report["types"]
    lines = gptcli("params", "-m", tmp_path / "m.gguf", columns=80, NO_COLOR="1").out.splitlines()[1:]
    assert lines[0].endswith("MiB (as stored)") and max(map(len, lines)) <= 80
    told = next(line.split() for line in lines if line.startswith(kind))
    assert told[1:4] == ["15", f"{matrices:,}", f"{bits:.2f}"]


@pytest.mark.parametrize("kind", [9, 15, 41, 99])
def test_a_type_that_can_t_be_run_is_listed_and_refused_when_run(tmp_path, kind):
    """Q8_1, Q8_K, Q1_0, and a type that nobody knows: what a file holds can be counted all the same."""
    model_file(tmp_path / "plain.gguf", "F32")
    plain, w, entries, at = read_header(tmp_path / "plain.gguf"), Writer(), [], 0
    types = {int: "u32", float: "f32", str: "text"}
    keys = [w.key(key, types[type(value)], value) for key, value in plain.metadata.items()]
    for name, info in plain.infos.items():
        entries.append(w.entry(name, info.shape[::-1], kind if name == "blk.1.ffn_up.weight" else 0, at))
        at += info.end - info.start
    (tmp_path / "m.gguf").write_bytes(w.file(keys, entries, bytes(at)))
    said = KINDS[kind].name if kind in KINDS else f"type {kind}"
    listed = gptcli("params", "-m", tmp_path / "m.gguf", "--json")
    assert listed.status == 0 and listed.json["parameters"]["total"] == sum(
        math.prod(info.shape) for info in plain.infos.values()
    )
    ran = gptcli("forward", "-m", tmp_path / "m.gguf", "--ids", "1,2")
    expected = f"tensor 'blk.1.ffn_up.weight' is {said}, which holds no weights that can be run"
    assert ran.status == 2 and expected in ran.err and ran.err.count("\n") == 1


def test_big_endian_files_are_listed_and_refused_when_run(tmp_path):
    """Which of a block's bytes are swapped, nobody says."""
    writer = GGUFWriter(tmp_path / "m.gguf", "gpt2", endianess=gguf.GGUFEndian.BIG)
    for add, value in ((writer.add_block_count, 1), (writer.add_context_length, 8), (writer.add_embedding_length, 4),
                       (writer.add_feed_forward_length, 8), (writer.add_head_count, 2)):  # fmt: skip
        add(value)
    writer.add_layer_norm_eps(1e-5)
    shapes = {"token_embd.weight": (9, 4), "position_embd.weight": (8, 4), "blk.0.attn_qkv.weight": (12, 4),
              "blk.0.attn_output.weight": (4, 4), "blk.0.ffn_up.weight": (8, 4),
              "blk.0.ffn_down.weight": (4, 8)}  # fmt: skip
    shapes |= {f"{stem}.bias": shape[:1] for stem, shape in
               ((name.removesuffix(".weight"), shape) for name, shape in shapes.items() if "blk" in name)}  # fmt: skip
    for stem in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        shapes |= {f"{stem}.weight": (4,), f"{stem}.bias": (4,)}
    for name, shape in shapes.items():
        writer.add_tensor(name, drawn(name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gptcli("params", "-m", tmp_path / "m.gguf", "-q").out == f"{sum(map(math.prod, shapes.values()))}\n"
    ran = gptcli("topk", "-m", tmp_path / "m.gguf", "--ids", "1")
    assert ran.status == 2 and "is big-endian F32, which holds no weights that can be run" in ran.err
