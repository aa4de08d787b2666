"""Toy checkpoints in every scheme of quantisation, written from each format's definition.

A packer chooses codes and scales for a weight [out, in], lays them out as the format says, and gives beside what it
stores the weight that they stand for, computed from codes and scales before any of it was packed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.oracle import save_toy

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "swiglu_limit": 0.5,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
    "torch_dtype": "bfloat16",
}
# The sixteen values of NF4 (Dettmers et al. 2023, appendix E), and of bitsandbytes' FP4: a sign and twelfths.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))

Stored = dict[str, Tensor]
Pack = Callable[[str, Tensor], tuple[Stored, Tensor]]


@dataclass(frozen=True)
class Scheme:
    """pack: of a weight's stem (its name without `.weight`) and numbers, what is stored and what that stands for.

    said: the config's quantization_config; config: of the model that is packed.
    """

    pack: Pack
    said: dict
    config: dict


@dataclass(frozen=True)
class Toy:
    """A saved checkpoint. plain: what the model would hold unpacked, in float64, by the names of its library; stored:
    what the file holds; packed: the names of the weights that are packed; config: the model's, without any packing.
    """

    folder: Path
    plain: Stored
    stored: Stored
    packed: list[str]
    config: dict

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.plain.values())

    @property
    def sidecar_bytes(self) -> int:
        """Bytes of all that stands for the packed weights."""
        return sum(tensor.nbytes for name, tensor in self.stored.items() if name not in self.plain) + sum(
            self.stored[name].nbytes for name in self.packed if name in self.stored
        )


def words(codes: Tensor, bits: int) -> Tensor:
    """Each row of codes [n, m] as one string of bits, the first code lowest, in words of 32: [n, m · bits / 32]."""
    rows = []
    for row in codes.tolist():
        whole = sum(code << bits * i for i, code in enumerate(row))
        rows.append([whole >> 32 * i & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)  # the same bits, signed


def grouped(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes [out, in], scales and zero points [out, groups], and what they stand for: (code - zero) · scale."""
    out, into = weight.shape
    parts = weight.reshape(out, into // group, group)
    low, high = parts.amin(-1), parts.amax(-1)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1).long()
    codes = (parts / scales.float()[..., None]).round().long() + zeros[..., None]
    codes = codes.clamp(0, 2**bits - 1)
    dense = (codes - zeros[..., None]).double() * scales.double()[..., None]
    return codes.reshape(out, into), scales, zeros, dense.reshape(out, into)


def gptq(bits: int, group: int, order: bool = False) -> Pack:
    """Along what one output reads; a zero point is stored less one. order: the columns' groups are shuffled."""

    def pack(stem: str, weight: Tensor) -> tuple[Stored, Tensor]:
        into = weight.shape[1]
        size = group if group > 0 else into
        groups = torch.arange(into) // size
        if order:
            groups = groups[torch.randperm(into, generator=torch.Generator().manual_seed(into))]
        by_group = groups.argsort(stable=True)
        codes, scales, zeros, dense = grouped(weight[:, by_group], bits, size)
        back = by_group.argsort()
        return {
            f"{stem}.qweight": words(codes[:, back], bits).T.contiguous(),
            f"{stem}.qzeros": words((zeros - 1).T.contiguous(), bits),
            f"{stem}.scales": scales.T.contiguous(),
            f"{stem}.g_idx": groups.int(),
        }, dense[:, back]

    return pack


def awq(group: int) -> Pack:
    """Eight outputs a word, in the order 0 2 4 6 1 3 5 7."""
    turn = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(codes: Tensor) -> Tensor:
        return words(codes.unflatten(-1, (-1, 8))[..., turn].flatten(-2), 4)

    def pack(stem: str, weight: Tensor) -> tuple[Stored, Tensor]:
        codes, scales, zeros, dense = grouped(weight, 4, group)
        return {
            f"{stem}.qweight": interleaved(codes.T),
            f"{stem}.qzeros": interleaved(zeros.T),
            f"{stem}.scales": scales.T.contiguous(),
        }, dense

    return pack


def awq_gemv(group: int) -> Pack:
    """What one output reads, eight numbers a word; as many words of zero points as a kernel of that form asks for."""

    def pack(stem: str, weight: Tensor) -> tuple[Stored, Tensor]:
        codes, scales, zeros, dense = grouped(weight, 4, group)
        padding = -scales.shape[1] % 8
        return {
            f"{stem}.qweight": words(codes, 4),
            f"{stem}.qzeros": words(torch.nn.functional.pad(zeros, (0, padding)), 4),
            f"{stem}.scales": torch.nn.functional.pad(scales, (0, padding)),
        }, dense

    return pack


def bitsandbytes_4bit(
    kind: str, block: int, nested: int = 0, dtype: str = "float16", storage: torch.dtype = torch.uint8
) -> Pack:
    """Indices into sixteen values, along the flattened weight. nested: how many scales share one, as bytes."""
    table = torch.tensor({"nf4": NF4, "fp4": FP4}[kind], dtype=torch.float32)

    def pack(stem: str, weight: Tensor) -> tuple[Stored, Tensor]:
        flat = weight.float().flatten()
        blocks = list(flat.split(block))
        scales = torch.stack([one.abs().max() for one in blocks])
        stored: Stored = {f"{stem}.weight.quant_map": table.clone()}
        state = {"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": list(weight.shape)}
        if nested:
            offset = scales.mean().item()
            values = torch.linspace(-1, 1, 256)
            outer = torch.stack([(one - offset).abs().max() for one in scales.split(nested)])
            each = outer.repeat_interleave(nested)[: len(scales)]
            bytes_ = ((scales - offset) / each)[:, None].sub(values).abs().argmin(1)
            stored |= {
                f"{stem}.weight.absmax": bytes_.to(torch.uint8),
                f"{stem}.weight.nested_absmax": outer,
                f"{stem}.weight.nested_quant_map": values,
            }
            state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
            scales = torch.stack([values[int(b)] * outer[i // nested] + offset for i, b in enumerate(bytes_)])
        else:
            stored[f"{stem}.weight.absmax"] = scales
        codes, dense = [], []
        for one, scale in zip(blocks, scales):
            nearest = (one / scale)[:, None].sub(table).abs().argmin(1).tolist()
            codes += nearest
            dense += [table[code] * scale for code in nearest]
        codes += [0] * (len(codes) % 2)
        pairs = [codes[i] << 4 | codes[i + 1] for i in range(0, len(codes), 2)]
        raw = torch.tensor(pairs, dtype=torch.uint8)
        stored[f"{stem}.weight"] = raw.view(storage)[:, None].contiguous()
        text = json.dumps(state).encode()
        stored[f"{stem}.weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        rounded = torch.stack(dense).view(weight.shape).to(getattr(torch, dtype))
        return stored, rounded.double()

    return pack


def bitsandbytes_8bit(stem: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """Whole numbers of which 127 stands for the largest of a row."""
    largest = weight.abs().amax(1).float()
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    form = torch.tensor(0, dtype=torch.uint8)  # rows as they are
    stored = {f"{stem}.weight": codes, f"{stem}.SCB": largest, f"{stem}.weight_format": form}
    return stored, codes.double() * largest.double()[:, None] / 127


def fp8(
    block: tuple[int, int] | None,
    name: str = "weight_scale_inv",
    scale_dtype: torch.dtype = torch.float32,
    shape: str = "grid",
) -> Pack:
    """8-bit floats times a scale. block: its rows and columns (-1: all); None: one scale for all. shape: of the scales,
    a `grid` [rows, columns], a `line` [rows], or a `number`.
    """

    def pack(stem: str, weight: Tensor) -> tuple[Stored, Tensor]:
        out, into = weight.shape
        rows, columns = block or (-1, -1)
        rows, columns = (out if rows < 0 else rows), (into if columns < 0 else columns)
        grid = torch.empty(-(-out // rows), -(-into // columns))
        codes = torch.empty(out, into, dtype=torch.float8_e4m3fn)
        dense = torch.empty(out, into, dtype=torch.float64)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale = weight[at].abs().max().float() / 448  # the largest number of E4M3
                scale = scale.log2().ceil().exp2() if scale_dtype == torch.float8_e8m0fnu else scale.to(scale_dtype)
                grid[i, j] = scale
                codes[at] = (weight[at] / scale.double()).to(torch.float8_e4m3fn)
                dense[at] = codes[at].double() * scale.double()
        scales = {"grid": grid, "line": grid.flatten(), "number": grid.flatten()[0]}[shape].to(scale_dtype)
        return {f"{stem}.weight": codes, f"{stem}.{name}": scales}, dense

    return pack


def mxfp4(stem: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """4-bit floats in blocks of 32 along the last axis, two a byte, the first low; a power of two for each block."""
    values = [sign * value for sign in (1, -1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
    table = torch.tensor(values, dtype=torch.float64)
    parts = weight.double().unflatten(-1, (-1, 32))  # [..., G, 32]
    power = (parts.abs().amax(-1) / 6).clamp(min=2.0**-20).log2().ceil()
    codes = (parts / power.exp2()[..., None])[..., None].sub(table).abs().argmin(-1)  # [..., G, 32]
    dense = (table[codes] * power.exp2()[..., None]).flatten(-2)
    blocks = (codes[..., 1::2] << 4 | codes[..., 0::2]).to(torch.uint8)  # [..., G, 16]
    return {f"{stem}_blocks": blocks, f"{stem}_scales": (power + 127).to(torch.uint8)}, dense


def pack_quantized(bits: int, group: int, zeros: bool = False) -> Pack:
    """compressed-tensors: codes as they are without a sign, along the columns; zero points packed along the rows."""

    def pack(stem: str, weight: Tensor) -> tuple[Stored, Tensor]:
        out, into = weight.shape
        size = group if group > 0 else into
        parts = weight.double().reshape(out, into // size, size)
        scales = (parts.abs().amax(-1) / (2 ** (bits - 1) - 1)).bfloat16()
        middle = 2 ** (bits - 1)
        codes = (parts / scales.double()[..., None]).round().clamp(-middle, middle - 1).long()
        stored = {
            f"{stem}.weight_packed": words(codes.reshape(out, into) + middle, bits),
            f"{stem}.weight_scale": scales,
            f"{stem}.weight_shape": torch.tensor([out, into]),
        }
        if zeros:
            stored[f"{stem}.weight_zero_point"] = words(torch.full((into // size, out), middle), bits).T.contiguous()
        return stored, (codes * scales.double()[..., None]).reshape(out, into)

    return pack


def int_quantized(stem: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """compressed-tensors: whole numbers and a scale for each row."""
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.double()).round().clamp(-128, 127).to(torch.int8)
    return {f"{stem}.weight": codes, f"{stem}.weight_scale": scales}, codes.double() * scales.double()


def nvfp4(stem: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """compressed-tensors' 4-bit floats: a scale in fp8 for each 16, and one number that all scales are divided by."""
    table = torch.tensor([s * v for s in (1, -1) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]).double()
    parts = weight.double().unflatten(-1, (-1, 16))
    all_ = (448 * 6 / weight.abs().max()).float()
    scales = (parts.abs().amax(-1) / 6 * all_).to(torch.float8_e4m3fn)
    codes = (parts / (scales.double() / all_)[..., None])[..., None].sub(table).abs().argmin(-1)
    packed = (codes[..., 1::2] << 4 | codes[..., 0::2]).flatten(-2).to(torch.uint8)
    stored = {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scales}
    return stored | {f"{stem}.weight_global_scale": all_[None]}, (
        table[codes] * (scales.double() / all_)[..., None]
    ).flatten(-2)


def told(method: str, **more: object) -> dict:
    return {"quant_method": method, **more}


def compressed(form: str, bits: int, **weights: object) -> dict:
    group = {"weights": {"num_bits": bits, **weights}, "targets": ["Linear"]}
    return told("compressed-tensors", format=form, config_groups={"group_0": group}, ignore=["lm_head"])


BNB_4BIT = told("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
SCHEMES = {
    "gptq": Scheme(gptq(4, 32), told("gptq", bits=4, group_size=32), LLAMA),
    "gptq-3bit": Scheme(gptq(3, 32), told("gptq", bits=3, group_size=32), LLAMA),
    "gptq-8bit-order": Scheme(gptq(8, 16, order=True), told("gptq", bits=8, group_size=16, desc_act=True), LLAMA),
    "gptq-rows": Scheme(gptq(4, -1), told("gptq", bits=4, group_size=-1), LLAMA),
    "awq": Scheme(awq(32), told("awq", bits=4, group_size=32, version="gemm"), LLAMA),
    "awq-gemv": Scheme(awq_gemv(32), told("awq", bits=4, group_size=32, version="gemv"), LLAMA),
    "bnb-nf4": Scheme(bitsandbytes_4bit("nf4", 64), BNB_4BIT, LLAMA),
    "bnb-nf4-nested": Scheme(bitsandbytes_4bit("nf4", 64, nested=8, dtype="bfloat16"), BNB_4BIT, LLAMA),
    "bnb-nf4-storage": Scheme(bitsandbytes_4bit("nf4", 32, dtype="bfloat16", storage=torch.bfloat16), BNB_4BIT, LLAMA),
    "bnb-fp4": Scheme(bitsandbytes_4bit("fp4", 64), BNB_4BIT, LLAMA),
    "bnb-int8": Scheme(bitsandbytes_8bit, told("bitsandbytes", load_in_8bit=True), LLAMA),
    "fp8-tensor": Scheme(fp8(None, "weight_scale", shape="number"), told("fp8", activation_scheme="static"), LLAMA),
    "fp8-row": Scheme(fp8((1, -1), "weight_scale"), told("fbgemm_fp8"), LLAMA),
    "fp8-line": Scheme(fp8((1, -1), "weight_scale", torch.bfloat16, "line"), told("fp8"), LLAMA),
    "fp8-block": Scheme(fp8((16, 32)), told("fp8", weight_block_size=[16, 32]), LLAMA),
    "fp8-ragged": Scheme(fp8((40, 24)), told("fp8", weight_block_size=[40, 24]), LLAMA),
    "fp8-powers": Scheme(
        fp8((32, 32), scale_dtype=torch.float8_e8m0fnu),
        told("fp8", weight_block_size=[32, 32], scale_fmt="ue8m0"),
        LLAMA,
    ),
    "mxfp4": Scheme(mxfp4, told("mxfp4", modules_to_not_convert=["lm_head"]), GPT_OSS),
    "ct-pack": Scheme(pack_quantized(4, 32), compressed("pack-quantized", 4, group_size=32), LLAMA),
    "ct-pack-8bit": Scheme(pack_quantized(8, -1), compressed("pack-quantized", 8), LLAMA),
    "ct-pack-zeros": Scheme(pack_quantized(4, 32, zeros=True), compressed("pack-quantized", 4, group_size=32), LLAMA),
    "ct-int8": Scheme(int_quantized, compressed("int-quantized", 8, type="int"), LLAMA),
    "ct-fp8": Scheme(fp8((1, -1), "weight_scale"), compressed("float-quantized", 8, type="float"), LLAMA),
    "ct-nvfp4": Scheme(nvfp4, compressed("nvfp4-pack-quantized", 4, type="float"), LLAMA),
}
RUNS = [name for name in SCHEMES if name.startswith(("fp8", "mxfp4", "bnb-nf4", "bnb-fp4", "ct-fp8"))]


def save(folder: Path, name: str, told_so: bool = True, seed: int = 0) -> Toy:
    """A toy checkpoint in one of the SCHEMES: config.json and model.safetensors. told_so: the config says so."""
    scheme = SCHEMES[name]
    model = save_toy(scheme.config, folder, seed)
    plain = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    plain = {name: tensor.bfloat16().double() for name, tensor in plain.items()}
    stored, packed = {name: tensor.bfloat16() for name, tensor in plain.items()}, []
    for name in list(plain):
        expert = name.endswith(("gate_up_proj", "down_proj"))
        if expert:  # [E, in, out] in the library, [E, out, in] in blocks
            parts, dense = scheme.pack(name, plain[name].mT)
            dense = dense.mT
        elif "layers" in name and name.endswith("proj.weight") and scheme.pack is not mxfp4:
            parts, dense = scheme.pack(name.removesuffix(".weight"), plain[name])
        else:
            continue
        plain[name] = dense.contiguous()
        del stored[name]
        stored |= parts
        packed.append(name)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    more = {"quantization_config": scheme.said} if told_so else {}
    (folder / "config.json").write_text(json.dumps(scheme.config | more))
    return Toy(folder, plain, stored, packed, scheme.config)
