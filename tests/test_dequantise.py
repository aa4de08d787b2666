"""What was packed runs: weights equal their formats' definitions, logits equal transformers'."""

import json
from collections.abc import Callable
from math import ceil, prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gptcli.checkpoint.files import find, read_tensors
from gptcli.checkpoint.packed import recognise
from gptcli.checkpoint.safetensors import TensorInfo
from gptcli.model.dequantise import dequantised, four_bits, fp8, mxfp4, whole
from gptcli.model.forward import Inputs, forward
from gptcli.model.load import cut
from gptcli.source import open_model
from tests import packed_toys
from tests.command import gptcli
from tests.oracle import CPU, assert_near, in_float64, save_toy
from tests.packed_toys import FP4, LLAMA, NF4, RUNS, bitsandbytes_4bit, save
from tests.test_families_experts import QWEN3

torch.set_num_threads(1)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def theirs_with(folder: Path, plain: dict[str, Tensor], dtype: torch.dtype) -> torch.nn.Module:
    """The library's model of a directory, with these weights in place of what the directory holds."""
    bare = folder / "bare"
    bare.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (bare / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in plain.items()}, bare / "model.safetensors")
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(bare, dtype=dtype, **options).eval()


def check_logits(folder: Path, plain: dict[str, Tensor]) -> None:
    """The logits of the packed checkpoint are those of the library with the weights that it stands for."""
    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))
    for dtype, allowed in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        if dtype == torch.float64:
            with in_float64(), torch.no_grad():
                expected = theirs_with(folder, plain, dtype)(ids, use_cache=False).logits
        else:
            with torch.no_grad():
                expected = theirs_with(folder, plain, dtype)(ids, use_cache=False).logits
        model = open_model(str(folder))
        assert_near(forward(Inputs(ids), model.weights(dtype, CPU), model.spec), expected, allowed)


# Whole models


@pytest.mark.parametrize("name", RUNS)
def test_logits_equal_those_of_the_weights_that_are_packed(name, tmp_path):
    """The weights were computed from codes and scales before they were packed."""
    toy = save(tmp_path, name)
    check_logits(tmp_path, toy.plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RUNS)
def test_weights_are_the_numbers_that_are_packed(name, dtype, tmp_path):
    """To the last bit: a product of a code and a scale, rounded once."""
    toy = save(tmp_path, name)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(toy.config))
    save_file(toy.plain, plain / "model.safetensors")
    ours = open_model(str(tmp_path)).weights(dtype, CPU).tensors
    expected = open_model(str(plain)).weights(torch.float64, CPU).tensors
    assert set(ours) == set(expected)
    for path, tensor in expected.items():
        rounded = tensor.to(dtype) if dtype == torch.float64 else tensor.float().to(dtype)
        assert ours[path].dtype == dtype and torch.equal(ours[path], rounded), path


def test_mxfp4_equals_the_library_s_own_loading(tmp_path):
    """transformers reads the same directory, unpacks it itself, and gives the same logits."""
    save(tmp_path, "mxfp4")
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    said = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=said, **options
    ).eval()
    assert theirs.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.float32  # unpacked
    ids = torch.arange(24)[None]
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
    model = open_model(str(tmp_path))
    assert_near(forward(Inputs(ids), model.weights(torch.float32, CPU), model.spec), expected, 1e-5)


def test_the_command_runs_and_says_what_it_runs(tmp_path):
    save(tmp_path, "fp8-block")
    ran = gptcli("forward", "--ids", "1,2,3", "-m", tmp_path, "--json")
    assert ran.status == 0 and ran.json["model"]["dtype"] == "bfloat16"
    assert ran.json["model"]["notes"] == [
        "quantised: fp8 with scales (F8_E4M3, blocks of 16 × 32), 14 tensors, 8.06 bits a weight"
    ]
    assert ran.json["model"]["parameters"] == sum(
        tensor.numel() for tensor in save(tmp_path, "fp8-block").plain.values()
    )


def test_a_pickle_runs(tmp_path):
    toy = save(tmp_path, "bnb-nf4-nested")
    (tmp_path / "model.safetensors").unlink()
    torch.save(toy.stored, tmp_path / "pytorch_model.bin")
    check_logits(tmp_path, toy.plain)


# Families that lay matrices out in ways of their own


def packed_family(
    folder: Path, config: dict, pack: packed_toys.Pack, said: dict, wanted: Callable[[str], bool]
) -> dict[str, Tensor]:
    """A toy of any family with some of its matrices packed. Returns the weights that it stands for, by their names."""
    save_toy(config, folder)
    plain = load_file(folder / "model.safetensors")
    stored = dict(plain)
    for name in filter(wanted, plain):
        turned = config["model_type"] == "gpt2"  # [in, out]; what packs it turns it first
        parts, dense = pack(name.removesuffix(".weight"), plain[name].T.contiguous() if turned else plain[name])
        plain[name] = dense.T.contiguous() if turned else dense
        del stored[name]
        stored |= parts
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return plain


GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
PHI3 = LLAMA | {"model_type": "phi3", "pad_token_id": 0}
PHI3.pop("head_dim")
NF4_SAID = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def linear(name: str) -> bool:
    words = ("c_attn", "c_proj", "c_fc", "query_key_value", "dense", "proj")
    return name.endswith(".weight") and any(word in name for word in words)


@pytest.mark.parametrize("config", [GPT2, NEOX, PHI3], ids=lambda config: config["model_type"])
def test_nf4_of_any_layout(config, tmp_path):
    """Matrices that the family keeps [in, out] are turned before they are packed; fused ones are cut after."""
    pack = bitsandbytes_4bit("nf4", 64, dtype="float32")
    check_logits(tmp_path, packed_family(tmp_path, config, pack, NF4_SAID, linear))


@pytest.mark.parametrize("config", [NEOX, PHI3], ids=lambda config: config["model_type"])
def test_fp8_of_fused_matrices(config, tmp_path):
    """Blocks that lie across the parts of a fused matrix, and rows that take turns by head."""
    said = {"quant_method": "fp8", "weight_block_size": [24, 16]}
    check_logits(tmp_path, packed_family(tmp_path, config, packed_toys.fp8((24, 16)), said, linear))


def test_fp8_of_experts_in_one_tensor(tmp_path):
    """All experts of a layer stacked, with a grid of scales each; and one by one."""
    config = QWEN3 | {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    said = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    one_by_one, stacked = tmp_path / "one", tmp_path / "stacked"
    pack = packed_toys.fp8((16, 16))
    plain = packed_family(one_by_one, config, pack, said, lambda name: ".experts." in name)
    check_logits(one_by_one, plain)
    stored = load_file(one_by_one / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"

        def all_of(letters: tuple[str, ...], leaf: str, at: str = at) -> Tensor:
            return torch.stack(
                [torch.cat([stored[f"{at}.{i}.{one}_proj.{leaf}"] for one in letters]) for i in range(4)]
            )

        for name, letters in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            kept[f"{at}.{name}"] = all_of(letters, "weight")
            kept[f"{at}.{name}_scale_inv"] = all_of(letters, "weight_scale_inv")
    stacked.mkdir()
    save_file(kept, stacked / "model.safetensors")
    (stacked / "config.json").write_text((one_by_one / "config.json").read_text())
    ours, others = (open_model(str(folder)).weights(torch.float64, CPU).tensors for folder in (one_by_one, stacked))
    assert set(ours) == set(others) and all(torch.equal(ours[name], others[name]) for name in ours)


# Formats, one by one


BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp4_equals_the_library_s_for_every_byte_and_scale(dtype):
    """All pairs of numbers, each with all powers of two that the library's own way can hold."""
    blocks = BYTES.view(1, 1, 16, 16).repeat(1, 200, 1, 1)  # [E, out, G, 16]
    scales = torch.arange(28, 228, dtype=torch.uint8).view(1, 200, 1).repeat(1, 1, 16)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT
    assert torch.equal(mxfp4(blocks, scales, torch.float32).to(dtype), expected)
    assert expected.unique().numel() == 2 * (203 + 202) + 1  # powers of two, thrice such, and zero


def test_mxfp4_by_hand():
    """The low half is the first number; 0 1 … 7 are 0 ½ 1 1½ 2 3 4 6, 8 … 15 the same below zero; 127 is 1."""
    block = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = torch.tensor((values + [-v for v in values]) * 2, dtype=torch.float64)
    for byte, factor in ((127, 1.0), (128, 2.0), (120, 2.0**-7), (0, 2.0**-127), (254, 2.0**127)):
        found = mxfp4(block[None], torch.tensor([byte], dtype=torch.uint8), torch.float64)
        assert torch.equal(found, expected * factor)
    assert mxfp4(block[None], torch.tensor([255], dtype=torch.uint8), torch.float64).isnan().all()


def test_nf4_by_hand():
    """Sixteen codes in a block of 16 whose largest value is 2: the published numbers, doubled; the high half is the
    first number. The next block is shorter.
    """
    table = torch.tensor(NF4)
    numbers = torch.tensor([0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF, 0xF0, 0x70], dtype=torch.uint8)
    found = four_bits(numbers, torch.tensor([2.0, 0.5]), table, 16, 19)
    expected = [
        -2.0, -1.3923856019973755, -1.0501461029052734, -0.7898349761962891, -0.5688828, -0.36954686, -0.18210007, 0.0,
        0.1591606, 0.3218604, 0.4922246, 0.6758304, 0.8814197, 1.125234, 1.4459137, 2.0, 0.5, -0.5, 0.0,
    ]  # fmt: skip
    assert found.dtype == torch.float32 and torch.allclose(found, torch.tensor(expected), rtol=1e-6, atol=0)


def test_the_tables_of_four_bits_are_the_published_ones():
    """NF4 is made of quantiles of the normal distribution, with 0 and ±1 in it (Dettmers et al. 2023, appendix E)."""
    from statistics import NormalDist

    edge = 0.9677083
    above = [NormalDist().inv_cdf(edge + (0.5 - edge) * i / 8) for i in range(8)]
    below = [-NormalDist().inv_cdf(edge + (0.5 - edge) * i / 7) for i in range(7)]
    quantiles = torch.tensor(sorted([*above, *below, 0.0]))
    assert torch.allclose(torch.tensor(NF4), quantiles / quantiles.max(), atol=1e-6)
    assert [round(value, 4) for value in FP4[:8]] == [0, 0.0052, 0.6667, 1, 0.3333, 0.5, 0.1667, 0.25]
    assert [-value for value in FP4[8:]] == list(FP4[:8])


def test_nested_scales_by_hand(tmp_path):
    """Two blocks of 64, whose scales are 0.25 and -0.5 of 8, plus 10: 12 and 6. The codes 15 and 0 are 1 and -1."""
    table = torch.zeros(256)
    table[3], table[200] = 0.25, -0.5
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 64], "nested_blocksize": 256}
    state |= {"nested_offset": 10.0, "nested_dtype": "float32"}
    save_file(
        {
            "a.weight": torch.full((64, 1), 0xF0, dtype=torch.uint8),
            "a.weight.absmax": torch.tensor([3, 200], dtype=torch.uint8),
            "a.weight.quant_map": torch.tensor(NF4),
            "a.weight.nested_absmax": torch.tensor([8.0]),
            "a.weight.nested_quant_map": table,
            "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        },
        tmp_path / "model.safetensors",
    )
    expected = torch.tensor([[12.0, -12.0] * 32, [6.0, -6.0] * 32])
    assert torch.equal(whole_of(tmp_path, "a.weight", torch.float32), expected)


def whole_of(folder: Path, name: str, dtype: torch.dtype) -> Tensor:
    """A packed weight of a file, all of it."""
    packed = recognise(read_tensors(find(folder))).weights[name]
    stored = load_file(folder / "model.safetensors")
    return whole(packed, lambda role: stored[packed.parts[role].key], dtype)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 200])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_any_length(kind, count, tmp_path):
    """An odd count leaves half a byte over; a last block may be short."""
    weight = torch.randn(count, 1, generator=torch.Generator().manual_seed(count))
    stored, dense = bitsandbytes_4bit(kind, 64, dtype="float32")("a", weight)
    save_file(stored, tmp_path / "model.safetensors")
    assert torch.equal(whole_of(tmp_path, "a.weight", torch.float64), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", ["F32", "E8M0", "bytes", "one"])
def test_fp8_equals_the_library_s(scale, dtype):
    """Every 8-bit number, in blocks of 32 × 16, with scales of each kind that the library reads."""
    numbers = BYTES.view(torch.float8_e4m3fn).repeat(24).view(64, 96)
    numbers = torch.where(numbers.float().isnan(), 0.0, numbers.float()).to(torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(2, 6, generator=generator) * 0.01 + 0.001
    block = (32, 16)
    if scale == "one":
        scales, block = scales[:1, :1], (64, 96)
    elif scale != "F32":
        scales = torch.randint(100, 150, (2, 6), generator=generator).to(torch.uint8)
        scales = scales if scale == "bytes" else scales.view(torch.float8_e8m0fnu)
    expected = Fp8Dequantize(None)._dequantize_one(numbers, scales, dtype)
    assert torch.equal(fp8(numbers, scales, block, torch.float32).to(dtype), expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    stack=st.lists(st.integers(1, 3), max_size=1),
    out=st.integers(1, 9),
    into=st.integers(1, 9),
    rows=st.integers(1, 10),
    columns=st.integers(1, 10),
    e5m2=st.booleans(),
)
def test_fp8_of_any_blocks(stack, out, into, rows, columns, e5m2):
    """A number times the scale of the block that it lies in, by a plain loop."""
    generator = torch.Generator().manual_seed(prod((out, into, rows, columns)))
    kind = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    numbers = torch.randn(*stack, out, into, generator=generator).to(kind)
    scales = torch.rand(*stack, ceil(out / rows), ceil(into / columns), generator=generator)
    found = fp8(numbers, scales, (rows, columns), torch.float64)
    flat, grids = numbers.double().view(-1, out, into), scales.double().view(-1, *scales.shape[-2:])
    for one, grid, ours in zip(flat, grids, found.view(-1, out, into)):
        for i in range(out):
            for j in range(into):
                assert ours[i, j] == one[i, j] * grid[i // rows, j // columns]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 4), (3, 4, 1), (3, 1, 6), (3, 2, 3), (3, 1, 1)])
def test_scales_of_stacked_experts_of_any_shape(shape, tmp_path):
    """One for all, one an expert, one a row, one a column, a grid each: [E, out, in] of 3, 4, 6."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, 4, 6, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=generator) + 0.5
    save_file({"gate_up_proj": numbers, "gate_up_proj_scale_inv": scales}, tmp_path / "model.safetensors")
    wide = scales.double()
    wide = wide.reshape((1,) * 3) if wide.numel() == 1 else wide.reshape(*shape, *[1] * (3 - len(shape)))
    for axis, size in enumerate((3, 4, 6)):
        if wide.shape[axis] > 1:
            wide = wide.repeat_interleave(size // wide.shape[axis], axis)
    expected = numbers.double() * wide
    assert torch.equal(whole_of(tmp_path, "gate_up_proj", torch.float64), expected)


# What is read, and what is kept


@pytest.mark.parametrize("name", RUNS)
def test_a_parameter_has_memory_of_its_own(name, tmp_path):
    """No view holds on to a whole that was unpacked for it."""
    save(tmp_path, name)
    model = open_model(str(tmp_path))
    packed = model.checkpoint.packing.weights
    tensors = model.weights(torch.float32, CPU).tensors
    for path, bound in model.checkpoint.binding.bounds.items():
        if bound.stored in packed:
            tensor = tensors[path]
            assert tensor.untyped_storage().nbytes() == tensor.numel() * 4, path
            assert tensor.is_contiguous(), path


@pytest.mark.parametrize("name", ["mxfp4", "fp8-block"])
def test_only_what_a_parameter_needs_is_unpacked(name, tmp_path, monkeypatch):
    """Of stacked experts one, of its interleaved rows half: as many numbers are unpacked as the parameter has."""
    save(tmp_path, name)
    model = open_model(str(tmp_path))
    made = []

    def watched(function):
        def call(numbers, *rest):
            found = function(numbers, *rest)
            made.append(found.numel())
            return found

        return call

    monkeypatch.setattr("gptcli.model.dequantise.mxfp4", watched(mxfp4))
    monkeypatch.setattr("gptcli.model.dequantise.fp8", watched(fp8))
    path = "layers.1.mlp.experts.2.gate.weight" if name == "mxfp4" else "layers.1.mlp.up.weight"
    tensor = model.weights(torch.float32, CPU)[path]
    assert made == [tensor.numel()]


def test_a_matrix_that_is_stored_turned_is_unpacked_before_it_is_turned():
    """fp8 in a family whose files keep [in, out]: rows of scales are columns of the parameter."""
    from gptcli.checkpoint.bind import Bound
    from gptcli.checkpoint.packed import Packed

    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(6, 8, generator=generator).to(torch.float8_e4m3fn)  # [in, out], of two fused parts
    scales = torch.rand(3, 2, generator=generator)
    info = TensorInfo("F8_E4M3", (6, 8), Path("x"), 0, 48, "a")
    packed = Packed(scheme="fp8", name="a", shape=(6, 8), dtype="F32", parts={"numbers": info}, bits=8, block=(2, 4))
    bound = Bound("a", None, True, "blocks", 4, 8, 1, 2, 1)
    stored = {"numbers": numbers, "scales": scales}
    found = dequantised(packed, bound, stored.__getitem__, cut, torch.float64)
    expected = numbers.double() * scales.double().repeat_interleave(2, 0).repeat_interleave(4, 1)
    assert torch.equal(found, expected.T[4:8])
    assert found.untyped_storage().nbytes() == found.numel() * 8
