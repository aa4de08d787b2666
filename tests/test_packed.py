"""Quantised checkpoints are recognised by their sidecars, counted as if unpacked, and run or refused by name."""

import json
import random
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gptcli import count
from gptcli.checkpoint.files import find, read_tensors, unwrapped
from gptcli.checkpoint.packed import RUNS as DEQUANTISED
from gptcli.checkpoint.packed import Packing, recognise
from gptcli.checkpoint.safetensors import BITS, TensorInfo
from gptcli.errors import GptcliError
from gptcli.source import open_model
from tests.command import gptcli
from tests.packed_toys import RUNS, SCHEMES, bitsandbytes_4bit, fp8, gptq, save
from tests.test_safetensors import DTYPES

torch.set_num_threads(1)

# What the toys' files say of themselves, without a config and with it.
SAID = {
    "gptq": "GPTQ (4 bits, groups of 32)",
    "gptq-3bit": "GPTQ (3 bits, groups of 32)",
    "gptq-8bit-order": "GPTQ (8 bits, groups of 16)",
    "gptq-rows": "GPTQ (4 bits, one scale a row)",
    "awq": "AWQ (4 bits, groups of 32)",
    "awq-gemv": "AWQ (4 bits, groups of 32)",
    "bnb-nf4": "bitsandbytes nf4 (4 bits, blocks of 64)",
    "bnb-nf4-nested": "bitsandbytes nf4 (4 bits, blocks of 64, nested)",
    "bnb-nf4-storage": "bitsandbytes nf4 (4 bits, blocks of 32)",
    "bnb-fp4": "bitsandbytes fp4 (4 bits, blocks of 64)",
    "bnb-int8": "bitsandbytes int8 (8 bits, one scale a row)",
    "fp8-tensor": "fp8 with scales (F8_E4M3, one scale a matrix)",
    "fp8-row": "fp8 with scales (F8_E4M3, one scale a row)",
    "fp8-line": "fp8 with scales (F8_E4M3, one scale a row)",
    "fp8-block": "fp8 with scales (F8_E4M3, blocks of 16 × 32)",
    "fp8-ragged": "fp8 with scales (F8_E4M3, blocks of 40 × 24)",
    "fp8-powers": "fp8 with scales (F8_E4M3, blocks of 32 × 32)",
    "mxfp4": "MXFP4 (4 bits, blocks of 32)",
    "ct-pack": "compressed-tensors pack-quantized (4 bits, groups of 32)",
    "ct-pack-8bit": "compressed-tensors pack-quantized (8 bits, one scale a row)",
    "ct-pack-zeros": "compressed-tensors pack-quantized (4 bits, groups of 32)",
    "ct-int8": "compressed-tensors int-quantized (8 bits, one scale a row)",
    "ct-fp8": "fp8 with scales (F8_E4M3, one scale a row)",
    "ct-nvfp4": "compressed-tensors 4-bit floats (4 bits, blocks of 16)",
}
# What a file alone can't tell: blocks that don't cut a matrix evenly, and groups that padding hides.
TOLD_ONLY = ("fp8-ragged", "awq-gemv")


def packing_of(folder: Path, config: dict | None = None) -> Packing:
    """What is packed in a directory, the config read from it unless another is given."""
    infos, _ = unwrapped(read_tensors(find(folder)))
    if config is None:
        config = json.loads((folder / "config.json").read_text())
    packing = recognise(infos, config)
    assert packing is not None
    return packing


TOLD = [(name, told_so) for name in SCHEMES for told_so in (True, False) if told_so or name not in TOLD_ONLY]


@pytest.mark.parametrize("name, told_so", TOLD)
def test_a_scheme_is_told_by_what_stands_beside_a_weight(name, told_so, tmp_path):
    toy = save(tmp_path, name, told_so)
    packing = packing_of(tmp_path)
    assert list(packing.schemes) == [SAID[name]]
    assert packing.method == (SCHEMES[name].said["quant_method"] if told_so else "")
    assert set(packing.weights) == set(toy.packed) and not packing.ignored
    for weight in toy.packed:
        found, plain = packing.weights[weight], toy.plain[weight]
        turned = name == "mxfp4"  # blocks are [E, out, in / 32, 16], the library's own tensor [E, in, out]
        assert found.shape == tuple((plain.mT if turned else plain).shape)
        assert found.count == plain.numel()
        assert found.dtype == ("F16" if name in ("bnb-nf4", "bnb-fp4") else "BF16")
    sizes = [tensor for one, tensor in toy.stored.items() if one in packing.taken]
    assert packing.count == sum(toy.plain[weight].numel() for weight in toy.packed)
    assert packing.bytes == toy.sidecar_bytes == sum(tensor.nbytes for tensor in sizes)
    assert packing.stored == sum(tensor.numel() for tensor in sizes)
    assert packing.bits_a_weight == 8 * packing.bytes / packing.count


@pytest.mark.parametrize("name", SCHEMES)
def test_params_counts_what_the_unquantised_model_has(name, tmp_path):
    """Every count of `params`: total, layers, non-embedding; the same of the packed and of the plain checkpoint."""
    toy = save(tmp_path, name)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({one: tensor.bfloat16() for one, tensor in toy.plain.items()}, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(toy.config))
    packed, whole = (gptcli("params", path, "--json", "--dtype", "bf16") for path in (tmp_path, plain))
    assert packed.status == whole.status == 0
    counts, expected = packed.json["parameters"], whole.json["parameters"]
    assert {**counts, "stored": None} == {**expected, "stored": None}
    assert counts["total"] == toy.parameters
    assert packed.json["rows"] == whole.json["rows"]
    (note,) = packed.json["model"]["notes"]
    assert note.startswith(f"quantised: {SAID[name]}, ") and note.endswith(" bits a weight")


def test_params_of_a_quantised_checkpoint_loads_no_torch(tmp_path):
    save(tmp_path, "bnb-nf4-nested")
    code = (
        "import sys\n"
        "from gptcli.cli.main import main\n"
        f"sys.argv = ['gptcli', 'params', {str(tmp_path)!r}]\n"
        "print(main(), {'torch', 'numpy', 'safetensors'} & set(sys.modules), file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stderr.splitlines()[-1] == "0 set()" and "bitsandbytes nf4" in ran.stdout + ran.stderr


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in RUNS])
def test_forward_refuses_by_name_what_it_does_not_dequantise(name, tmp_path):
    save(tmp_path, name)
    ran = gptcli("forward", "--ids", "1,2,3", "-m", tmp_path)
    assert ran.status == 2 and not ran.out
    (line,) = [line for line in ran.err.splitlines() if "counted but not dequantised" in line]
    assert SAID[name].rpartition(" (")[0] in line
    assert "nf4" in line and "MXFP4" in line and "fp8" in line  # what can run


def test_fp8_with_zero_points_is_counted_and_refused(tmp_path):
    toy = save(tmp_path, "ct-fp8")
    stem = toy.packed[0].removesuffix("weight")
    zeros = {f"{stem}weight_zero_point": torch.zeros(toy.plain[toy.packed[0]].shape[0], 1).to(torch.float8_e4m3fn)}
    save_file(toy.stored | zeros, tmp_path / "model.safetensors")
    assert count.total(open_model(str(tmp_path)).layout) == toy.parameters
    ran = gptcli("forward", "--ids", "1,2,3", "-m", tmp_path)
    assert ran.status == 2 and "with zero points" in ran.err


# Bits a weight, by hand, at the sizes that people have


def infos_of(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorInfo]:
    """Tensors that a header might list, one after the other; no file is behind them."""
    infos, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * BITS[dtype] // 8
        infos[name] = TensorInfo(dtype, shape, Path("x.safetensors"), at, at + size, name)
        at += size
    return infos


N, GROUPS, WIDE = 4096, 32, 8192  # 4096 × 4096, groups of 128; 8192 × 4096
BY_HAND = {
    # 4 bits; a scale of 16 and a zero point of 4 for each 128; a group's number of 32 for each of 4096 columns
    "gptq": (
        {
            "a.qweight": ("I32", (N // 8, N)),
            "a.qzeros": ("I32", (GROUPS, N // 8)),
            "a.scales": ("F16", (GROUPS, N)),
            "a.g_idx": ("I32", (N,)),
        },
        4 + 20 / 128 + 32 / N,
        (N, N),
    ),
    # The same without numbers of groups, outputs packed: out is not in, so that nothing is taken for another.
    "awq": (
        {
            "a.qweight": ("I32", (N, WIDE // 8)),
            "a.qzeros": ("I32", (GROUPS, WIDE // 8)),
            "a.scales": ("F16", (GROUPS, WIDE)),
        },
        4 + 20 / 128,
        (WIDE, N),
    ),
    "awq gemv": (
        {"a.qweight": ("I32", (WIDE, N // 8)), "a.qzeros": ("I32", (WIDE, 4)), "a.scales": ("F16", (WIDE, 32))},
        4 + 20 / 128,
        (WIDE, N),
    ),
    "int8": ({"a.weight": ("I8", (N, N)), "a.SCB": ("F32", (N,)), "a.weight_format": ("U8", ())}, None, (N, N)),
    # a scale of 32 bits for each 128 × 128
    "fp8": (
        {"a.weight": ("F8_E4M3", (WIDE, N)), "a.weight_scale_inv": ("F32", (64, 32))},
        8 + 32 / 128**2,
        (WIDE, N),
    ),
    # 9 × 4000 rows are no whole number of blocks: 71 × 128 is more
    "fp8, last block short": (
        {"a.weight": ("F8_E4M3", (9000, N)), "a.weight_scale_inv": ("F32", (71, 32))},
        8 + 32 * 71 * 32 / (9000 * N),
        (9000, N),
    ),
    # 8 bits for each 32
    "mxfp4": (
        {"a_blocks": ("U8", (8, 5760, 90, 16)), "a_scales": ("U8", (8, 5760, 90))},
        4.25,
        (8, 5760, 2880),
    ),
    "nvfp4": (
        {
            "a.weight_packed": ("U8", (N, N // 2)),
            "a.weight_scale": ("F8_E4M3", (N, N // 16)),
            "a.weight_global_scale": ("F32", (1,)),
        },
        4.5 + 32 / N**2,
        (N, N),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bits_a_weight_by_hand(name):
    tensors, bits, shape = BY_HAND[name]
    packing = recognise(infos_of(tensors))
    (found,) = packing.weights.values()
    assert found.shape == shape and found.count == prod(shape) and found.dtype == "BF16"
    bits = 8 + 32 / N + 8 / N**2 if bits is None else bits
    assert found.bits_a_weight == packing.bits_a_weight == pytest.approx(bits, rel=1e-12)
    assert found.stored == sum(prod(one) for _, one in tensors.values())


def test_bits_of_nf4_by_hand(tmp_path):
    """4 bits and 32 for each 64; with nested scales 8 for each 64 and 32 for each 64 × 256, and two tables."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    for nested, more in ((0, 0.5), (256, 8 / 64 + 32 / (64 * 256) + 256 * 32 / weight.numel())):
        stored, _ = bitsandbytes_4bit("nf4", 64, nested)("a", weight)
        save_file(stored, tmp_path / "model.safetensors")
        state = next(tensor.numel() for name, tensor in stored.items() if "quant_state" in name)
        (found,) = packing_of(tmp_path, {}).weights.values()
        assert found.shape == (64, 512)
        expected = 4 + more + (16 * 32 + 8 * state) / weight.numel()
        assert found.bits_a_weight == pytest.approx(expected, rel=1e-12)


# What a checkpoint's own words decide


def test_the_type_that_a_weight_dequantises_to():
    """The config's word; without one that of the tensors that are not packed; bitsandbytes' own state before both."""
    tensors = BY_HAND["fp8"][0]
    plain = {"embed.weight": ("F16", (N, N)), "norm.weight": ("F32", (N,))}

    def dtype(config: dict | None, more: dict | None = None) -> str:
        return recognise(infos_of(tensors | (more or {})), config).weights["a.weight"].dtype

    assert dtype({"torch_dtype": "float16"}) == "F16"
    assert dtype({"dtype": "bfloat16"}, plain) == "BF16"
    assert dtype(None, plain) == "F16"
    assert dtype({"torch_dtype": None}, {"norm.weight": ("F32", (N,))}) == "F32"
    assert dtype(None) == "BF16"


def test_a_file_of_halves_without_sidecars_is_not_packed():
    assert recognise(infos_of({"a.weight": ("F16", (8, 8)), "a.bias": ("F32", (8,))})) is None
    assert recognise(infos_of({"a.weight": ("F8_E4M3", (8, 8))}), {"torch_dtype": "float16"}) is None


def test_scales_of_activations_and_of_the_cache_are_ignored_and_named(tmp_path):
    toy = save(tmp_path, "fp8-tensor")
    one = torch.tensor(0.5)
    more = {f"{name}_scale".replace("weight_scale", "input_scale"): one.clone() for name in toy.packed}
    more |= {f"model.layers.{layer}.self_attn.{letter}_scale": one.clone() for layer in (0, 1) for letter in "kv"}
    save_file(toy.stored | more, tmp_path / "model.safetensors")
    model = open_model(str(tmp_path))
    assert count.total(model.layout) == toy.parameters
    assert set(model.checkpoint.packing.ignored) == set(more)
    assert model.checkpoint.packing.bytes == toy.sidecar_bytes


def test_biases_that_gptq_s_writers_add_are_no_parameters(tmp_path):
    """A bias beside every matrix, of a model that has none: unused. One that the model reads is read."""
    toy = save(tmp_path, "gptq")
    more = {name.replace("weight", "bias"): torch.zeros(toy.plain[name].shape[0]).half() for name in toy.packed}
    save_file(toy.stored | more, tmp_path / "model.safetensors")
    model = open_model(str(tmp_path))
    assert count.total(model.layout) == toy.parameters
    assert set(model.checkpoint.binding.unused) == set(more)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    model = open_model(str(tmp_path))
    read = {name for name in more if "self_attn" in name}
    assert set(model.checkpoint.binding.unused) == set(more) - read
    assert count.total(model.layout) == toy.parameters + sum(more[name].numel() for name in read)


def test_parts_in_several_shards_and_under_wrappers(tmp_path):
    """What makes up a weight may lie in two files, under a wrapper's prefix."""
    toy = save(tmp_path, "awq")
    (tmp_path / "model.safetensors").unlink()
    names = [f"module.{name}" for name in toy.stored]
    homes = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(names))}
    for file in set(homes.values()):
        held = {name: toy.stored[name.removeprefix("module.")] for name in names if homes[name] == file}
        save_file(held, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    packing = packing_of(tmp_path)
    assert {len({part.file for part in found.parts.values()}) for found in packing.weights.values()} == {2}
    assert packing.bytes == toy.sidecar_bytes
    assert count.total(open_model(str(tmp_path)).layout) == toy.parameters


@pytest.mark.parametrize("name", ["bnb-nf4-nested", "gptq", "fp8-block"])
def test_a_pickle_is_read_as_a_safetensors_file_is(name, tmp_path):
    toy = save(tmp_path, name)
    (tmp_path / "model.safetensors").unlink()
    torch.save(toy.stored, tmp_path / "pytorch_model.bin")
    packing = packing_of(tmp_path)
    assert list(packing.schemes) == [SAID[name]] and packing.count == sum(toy.plain[n].numel() for n in toy.packed)
    assert count.total(open_model(str(tmp_path)).layout) == toy.parameters


# What is refused


NEEDED = {
    "gptq": ["qweight", "qzeros", "scales"],
    "awq": ["qweight", "qzeros", "scales"],
    "bnb-nf4-nested": [
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_quant_map",
        "weight.quant_state.bitsandbytes__nf4",
    ],
    "bnb-int8": ["weight"],
    "ct-pack": ["weight_scale", "weight_shape"],
}


def test_faults_are_gathered_where_a_list_is_given(tmp_path):
    """Every broken weight has its fault, and the others are found."""
    toy = save(tmp_path, "gptq")
    stems = [name.removesuffix("weight") for name in toy.packed]
    more = {f"{stems[0]}scales": torch.zeros(3, 3).half()}
    kept = {name: tensor for name, tensor in (toy.stored | more).items() if name != f"{stems[4]}qzeros"}
    save_file(kept, tmp_path / "model.safetensors")
    infos, _ = unwrapped(read_tensors(find(tmp_path)))
    faults: list[GptcliError] = []
    packing = recognise(infos, None, faults)
    assert recognise({name: info for name, info in infos.items() if name.endswith("qweight")}, None, []) is None
    assert set(packing.weights) == set(toy.packed) - {toy.packed[0], toy.packed[4]}
    assert sorted(fault.code for fault in faults) == ["corrupt", "incomplete"]
    assert any(stems[0] in fault.message for fault in faults) and any(stems[4] in fault.message for fault in faults)


@pytest.mark.parametrize("name, part", [(name, part) for name, parts in NEEDED.items() for part in parts])
def test_a_weight_without_one_of_its_parts_is_incomplete(name, part, tmp_path):
    toy = save(tmp_path, name)
    lost = toy.packed[3].removesuffix("weight") + part
    save_file({one: tensor for one, tensor in toy.stored.items() if one != lost}, tmp_path / "model.safetensors")
    with pytest.raises(GptcliError, match="missing") as caught:
        open_model(str(tmp_path))
    assert repr(lost) in caught.value.message and caught.value.code == "incomplete"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-block", "ct-fp8"])
def test_fp8_that_lost_its_scale_is_incomplete(name, tmp_path):
    """A missing scale is an error, not one."""
    toy = save(tmp_path, name)
    lost = next(one for one in toy.stored if "scale" in one)
    save_file({one: tensor for one, tensor in toy.stored.items() if one != lost}, tmp_path / "model.safetensors")
    with pytest.raises(GptcliError, match="is F8_E4M3 and no scale stands beside it") as caught:
        open_model(str(tmp_path))
    assert caught.value.code == "incomplete"


def test_blocks_without_scales_are_incomplete(tmp_path):
    toy = save(tmp_path, "mxfp4")
    kept = {one: tensor for one, tensor in toy.stored.items() if one != f"{toy.packed[0]}_scales"}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(GptcliError, match=r"_scales' is missing, and .* is MXFP4"):
        open_model(str(tmp_path))


MISSHAPED = {
    "gptq": {"a.qzeros": ("I32", (GROUPS, N // 8 - 1))},
    "gptq ": {"a.qweight": ("I32", (N // 8, N - 8))},
    "gptq  ": {"a.g_idx": ("I32", (N - 1,))},
    "gptq   ": {"a.scales": ("F16", (0, N)), "a.qzeros": ("I32", (0, N // 8))},
    "awq": {"a.qweight": ("I32", (N, WIDE // 8 + 1))},
    "int8": {"a.SCB": ("F32", (N + 1,))},
    "int8 ": {"a.weight": ("I8", (N, N, 1))},
    "fp8": {"a.weight_scale_inv": ("F32", (63, 32))},
    "fp8 ": {"a.weight_scale_inv": ("F32", (64, 0))},
    "fp8  ": {"a.weight_scale_inv": ("I32", (64, 32))},
    "fp8   ": {"a.weight": ("F8_E4M3", (WIDE,))},
    "mxfp4": {"a_scales": ("U8", (8, 5760, 89))},
    "mxfp4 ": {"a_blocks": ("U8", (8, 5760, 90, 15))},
    "nvfp4": {"a.weight_scale": ("F8_E4M3", (N, N // 16 - 1))},
}


@pytest.mark.parametrize("name", MISSHAPED)
def test_parts_that_do_not_fit_each_other_are_corrupt(name):
    tensors = BY_HAND[name.strip()][0] | MISSHAPED[name]
    with pytest.raises(GptcliError, match=r"^x\.safetensors: tensor 'a") as caught:
        recognise(infos_of(tensors))
    assert caught.value.code == "corrupt" and "\n" not in str(caught.value)


GOOD = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [8, 64]}
BAD_STATES = {
    "not JSON": b"{",
    "no table": b"[1]",
    "deep": b"[" * 3000,
    "not UTF-8": b"\xff\xfe\x00",
    "no shape": json.dumps(GOOD | {"shape": None}).encode(),
    "an empty shape": json.dumps(GOOD | {"shape": []}).encode(),
    "a shape of words": json.dumps(GOOD | {"shape": ["8", 64]}).encode(),
    "a negative shape": json.dumps(GOOD | {"shape": [-8, -64]}).encode(),
    "another shape": json.dumps(GOOD | {"shape": [8, 65]}).encode(),
    "a shape beyond reason": json.dumps(GOOD | {"shape": [2**62, 2**62]}).encode(),
    "no block": json.dumps(GOOD | {"blocksize": 0}).encode(),
    "another block": json.dumps(GOOD | {"blocksize": 32}).encode(),
    "another type": json.dumps(GOOD | {"dtype": "int8"}).encode(),
    "a type that is no word": json.dumps(GOOD | {"dtype": ["float16"]}).encode(),
    "too long": json.dumps(GOOD).encode().ljust(70_000),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_makes_no_sense_is_corrupt(name, tmp_path):
    stored, _ = bitsandbytes_4bit("nf4", 64)("a", torch.ones(8, 64))
    stored["a.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(BAD_STATES[name]), dtype=torch.uint8)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(GptcliError, match=r"tensor 'a\.weight") as caught:
        packing_of(tmp_path, {})
    assert caught.value.code == "corrupt" and len(caught.value.message) < 400


@pytest.mark.parametrize("name", SCHEMES)
def test_headers_that_lie_are_refused_in_one_line(name, tmp_path):
    """Shapes, types and parts at random: a packing whose counts agree with its parts, or one error."""
    toy = save(tmp_path, name)
    infos, _ = unwrapped(read_tensors(find(tmp_path)))
    config, chance = json.loads((tmp_path / "config.json").read_text()), random.Random(0)
    parts = sorted(one for one in toy.stored if one.startswith("model.layers"))
    for _ in range(300):
        changed = dict(infos)
        for one in chance.sample(parts, chance.randint(1, 3)):
            info = changed[one]
            kind = chance.choice(["lost", "type", "shape", "size"])
            if kind == "lost":
                del changed[one]
            elif kind == "type":
                changed[one] = info._replace(dtype=chance.choice(sorted(BITS)))
            elif kind == "shape":
                shape = chance.choice([(), (0,), (1,), (2**40,), (64, 64), info.shape[::-1], (*info.shape, 1)])
                changed[one] = info._replace(shape=shape)
            else:
                shape = tuple(max(size + chance.randint(-1, 1), 0) for size in info.shape)
                changed[one] = info._replace(shape=shape)
        try:
            packing = recognise(changed, chance.choice([config, None]))
        except GptcliError as error:
            assert "\n" not in str(error) and error.code in ("corrupt", "incomplete")
            continue
        for found in packing.weights.values() if packing else ():
            assert found.count == prod(found.shape) and found.said and found.bits > 0


UNKNOWN = {
    "quant_method 'hqq' is not implemented": {"quantization_config": {"quant_method": "hqq"}},
    "quant_method 'aqlm' is not implemented": {"text_config": {"quantization_config": {"quant_method": "aqlm"}}},
    "format 'marlin-24' is not implemented": {
        "quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}
    },
    "quantization_config: not a table": {"quantization_config": "gptq"},
}


@pytest.mark.parametrize("message", UNKNOWN)
def test_unknown_schemes_are_refused_by_name(message, tmp_path):
    toy = save(tmp_path, "fp8-row")
    (tmp_path / "config.json").write_text(json.dumps(toy.config | UNKNOWN[message]))
    ran = gptcli("params", tmp_path)
    assert ran.status == 2 and not ran.out and message in ran.err


def test_a_config_that_tells_of_packing_where_there_is_none_is_noted(tmp_path):
    toy = save(tmp_path, "gptq")
    save_file({name: tensor.bfloat16() for name, tensor in toy.plain.items()}, tmp_path / "model.safetensors")
    (note,) = open_model(str(tmp_path)).notes
    assert note == "the config's quant_method is gptq, and no weight is packed"


@pytest.mark.parametrize("name", ["gptq", "awq", "ct-pack"])
def test_a_weight_that_is_there_packed_and_plain_is_corrupt(name, tmp_path):
    toy = save(tmp_path, name)
    twice = toy.packed[2]
    save_file(toy.stored | {twice: toy.plain[twice].bfloat16()}, tmp_path / "model.safetensors")
    with pytest.raises(GptcliError, match="is there twice") as caught:
        open_model(str(tmp_path))
    assert repr(twice) in caught.value.message and caught.value.code == "corrupt"


@pytest.mark.parametrize("pack", [gptq(4, 32), fp8((1, -1))], ids=["gptq", "fp8"])
def test_sidecars_beside_a_model_that_has_no_such_weight_are_named(pack, tmp_path):
    """A packed matrix that no parameter reads is left over as any tensor is."""
    toy = save(tmp_path, "fp8-row")
    stored, _ = pack("model.layers.7.mlp.up_proj", torch.randn(96, 64))
    save_file(toy.stored | stored, tmp_path / "model.safetensors")
    with pytest.raises(GptcliError, match=r"'model\.layers\.7\.mlp\.up_proj\.weight' is left over"):
        open_model(str(tmp_path))


def test_what_runs_is_what_the_toys_say_runs():
    assert {name for name in SAID if any(SAID[name].startswith(word) for word in ("fp8", "MXFP4", "bitsandbytes nf4"))}
    assert frozenset(("fp8", "mxfp4", "bnb-nf4", "bnb-fp4")) == DEQUANTISED
    assert set(RUNS) == {name for name in SCHEMES if SAID[name].startswith(("fp8", "MXFP4"))} | {
        name for name in SCHEMES if name.startswith(("bnb-nf4", "bnb-fp4"))
    }


def test_the_toys_store_what_their_formats_store(tmp_path):
    """The types of stored tensors, from the formats' definitions, so that a toy can't drift with what reads it."""
    expected = {
        "gptq": {".qweight": "I32", ".qzeros": "I32", ".scales": "F16", ".g_idx": "I32"},
        "bnb-nf4-nested": {".weight": "U8", ".absmax": "U8", ".nested_absmax": "F32", ".quant_map": "F32"},
        "bnb-int8": {".weight": "I8", ".SCB": "F32", ".weight_format": "U8"},
        "fp8-powers": {".weight": "F8_E4M3", ".weight_scale_inv": "F8_E8M0"},
        "mxfp4": {"_blocks": "U8", "_scales": "U8"},
        "ct-pack": {".weight_packed": "I32", ".weight_scale": "BF16", ".weight_shape": "I64"},
        "ct-int8": {".weight": "I8", ".weight_scale": "BF16"},
    }
    for name, kinds in expected.items():
        toy = save(tmp_path, name)
        stems = [weight.removesuffix(".weight") for weight in toy.packed]
        for ending, dtype in kinds.items():
            held = [t for one, t in toy.stored.items() if one.endswith(ending) and one.startswith(tuple(stems))]
            assert held and {DTYPES[tensor.dtype] for tensor in held} == {dtype}, (name, ending)
