"""Quantised checkpoints: which stored tensors make up a weight, what it was before, and what it takes a number.

Each scheme is told by what stands beside a weight (its sidecars: scales, zero points, tables), so that a file explains
itself without a config; the config's `quantization_config` says what the sidecars can't. Reads headers, and a few bytes
where a format keeps a shape among its data. Scales and zero points are bytes, never parameters.
"""

import json
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from math import ceil, prod
from typing import Any, Literal

from gptcli.checkpoint.safetensors import FLOATS, TensorInfo, shown
from gptcli.data import data
from gptcli.errors import GptcliError

Scheme = Literal["gptq", "awq", "bnb-nf4", "bnb-fp4", "bnb-int8", "fp8", "mxfp4", "ct-pack", "ct-fp4", "ct-int8"]
TITLES: dict[Scheme, str] = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bnb-nf4": "bitsandbytes nf4",
    "bnb-fp4": "bitsandbytes fp4",
    "bnb-int8": "bitsandbytes int8",
    "fp8": "fp8 with scales",
    "mxfp4": "MXFP4",
    "ct-pack": "compressed-tensors pack-quantized",
    "ct-fp4": "compressed-tensors 4-bit floats",
    "ct-int8": "compressed-tensors int-quantized",
}
RUNS: frozenset[Scheme] = frozenset(("fp8", "mxfp4", "bnb-nf4", "bnb-fp4"))  # what forward dequantises
# Words of `quant_method` for what is understood here, and compressed-tensors' words for how weights are stored.
METHODS = "gptq awq auto-round bitsandbytes fp8 fbgemm_fp8 modelopt mxfp4 compressed-tensors".split()
FORMATS = (
    "dense float-quantized int-quantized naive-quantized pack-quantized nvfp4-pack-quantized mxfp4-pack-quantized "
    "mixed-precision"
).split()
FP8 = frozenset(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))
SCALES = frozenset(("F64", "F32", "F16", "BF16", "F8_E8M0", "U8"))  # U8: the exponents of E8M0
# What ends the names of scales of activations and of the cache: they change how a matrix product is rounded, no weight.
ACTIVATIONS = (
    "input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale",
    "input_scale_ub", "input_global_scale", "input_zero_point", "output_zero_point", "k_zero_point", "v_zero_point",
)  # fmt: skip
STATE = ".quant_state.bitsandbytes__"
STATE_LIMIT = 65_536  # bytes of a quantisation state or of a shape: both are a line of text at most


class Upright(TensorInfo):
    """A weight as it would be unpacked, with its matrices [out, in] even where the family keeps them [in, out]."""


class Spare(TensorInfo):
    """A tensor that a format's writers add, whether the model has a place for it or not."""


@data
class Packed:
    """A weight as it was before it was quantised, and the stored tensors that make it up.

    shape: as the model has it, matrices [out, in], stacked experts before; dtype: the type that it dequantises to.
    parts: `numbers`, `scales` and what else its scheme stores, each under its role. bits: of one packed number.
    block: how many neighbours share a scale, as (rows, columns), or as (n,) along the flattened weight. upright: its
    writers turn every matrix to [out, in], even where the family's own files keep theirs [in, out].
    nested: of scales that are quantised themselves, how many share one, and what is added to all.
    """

    scheme: Scheme
    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: dict[str, TensorInfo]
    bits: int
    block: tuple[int, ...]
    upright: bool = False
    nested: tuple[int, float] | None = None

    @property
    def count(self) -> int:
        """Numbers of the weight: what a parameter count counts."""
        return prod(self.shape)

    @property
    def stored(self) -> int:
        """Elements of all the tensors that make it up: what a count of the file's tensors would give."""
        return sum(prod(part.shape) for part in self.parts.values())

    @property
    def bytes(self) -> int:
        """Bytes of all the tensors that make it up."""
        return sum(part.end - part.start for part in self.parts.values())

    @property
    def bits_a_weight(self) -> float:
        """All those bytes, scales and tables included, over its numbers."""
        return 8 * self.bytes / max(self.count, 1)

    @property
    def runs(self) -> bool:
        """Whether forward dequantises it: its scheme is one of RUNS, without a zero point."""
        return self.scheme in RUNS and "zeros" not in self.parts

    @property
    def said(self) -> str:
        """The scheme with its sizes: `GPTQ (4 bits, groups of 128)`."""
        rows, columns = self.block if len(self.block) == 2 else (1, self.block[0])
        along = len(self.block) == 1 or self.scheme == "mxfp4"  # whatever the matrix, blocks of one size
        if along or columns < self.shape[-1]:
            word = "groups" if self.scheme in ("gptq", "awq", "ct-pack") else "blocks"
            shared = f"{word} of {rows} × {columns}" if rows > 1 else f"{word} of {columns}"
        else:
            shared = "one scale a row" if rows == 1 else "one scale a matrix"
        kind = self.parts["numbers"].dtype if self.scheme == "fp8" else f"{self.bits} bits"
        return f"{TITLES[self.scheme]} ({kind}, {shared}{', nested' if self.nested else ''})"


@data
class Packing:
    """The packed weights of a checkpoint, by the name under which the model would have them unpacked.

    method: the config's quant_method, empty where it says none. ignored: scales of activations and of the cache.
    spare: biases that GPTQ's writers add to every matrix, whether the model has one or not.
    """

    method: str
    weights: dict[str, Packed]
    ignored: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    taken: frozenset[str] = field(default_factory=frozenset)

    @property
    def count(self) -> int:
        """Numbers of all packed weights."""
        return sum(packed.count for packed in self.weights.values())

    @property
    def stored(self) -> int:
        """Elements of all the tensors that make them up."""
        return sum(packed.stored for packed in self.weights.values())

    @property
    def bytes(self) -> int:
        """Bytes of all the tensors that make them up."""
        return sum(packed.bytes for packed in self.weights.values())

    @property
    def bits_a_weight(self) -> float:
        """All their bytes, scales and tables included, over their numbers."""
        return 8 * self.bytes / max(self.count, 1)

    @property
    def schemes(self) -> dict[str, int]:
        """How many weights each scheme packs, by the scheme in words."""
        return dict(Counter(packed.said for packed in self.weights.values()).most_common())

    @property
    def said(self) -> str:
        """One line: the schemes, how many weights, bits a weight."""
        schemes = list(self.schemes)
        more = f" and {len(schemes) - 1} more" if len(schemes) > 1 else ""
        tensors = f"{len(self.weights)} tensor{'s' * (len(self.weights) > 1)}"
        return f"{schemes[0]}{more}, {tensors}, {self.bits_a_weight:.2f} bits a weight"

    def logical(self, infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors as they would be unpacked: packed ones by name, shape and type of the weight, sidecars gone.

        file, start, end and key stay those of the packed numbers.
        """
        found = {name: info for name, info in infos.items() if name not in self.taken}
        for name, packed in self.weights.items():
            info = packed.parts["numbers"]._replace(dtype=packed.dtype, shape=packed.shape)
            found[name] = Upright(*info) if packed.upright else info
        return found | {name: Spare(*infos[name]) for name in self.spare}

    def refuse_to_run(self, where: str) -> None:
        """Raises GptcliError where a weight is packed in a way that forward does not dequantise."""
        packed = next((packed for packed in self.weights.values() if not packed.runs), None)
        if packed is not None:
            others = ", ".join(title for scheme, title in TITLES.items() if scheme in RUNS)
            zeros = ", with zero points" if packed.scheme in RUNS else ""
            said = f"{where}: {shown(packed.name)} is {packed.said}{zeros}, which is counted but not dequantised"
            raise GptcliError(said, f"what can run: {others}; or take the model as it was before", "packed")


def recognise(
    infos: Mapping[str, TensorInfo], config: Mapping[str, Any] | None = None, faults: list[GptcliError] | None = None
) -> Packing | None:
    """What is packed among the tensors of a checkpoint; None where nothing is.

    infos: by names without wrappers; config: the whole table of its config.json, where there is one. Raises
    GptcliError: `incomplete` for a weight that lacks a part, `corrupt` where parts don't fit each other, `packed` for a
    quant_method that is not known. The first two are gathered where a list of faults is given, and those weights left
    out.
    """
    words, method = _quantization_config(config or {}), told_method(config or {})
    _check_known(method, words)
    finder = _Finder(infos, method, words)
    stems = finder.stems()
    if not stems:
        return None
    finder.dtype = _computed_in(infos, config or {})
    weights: dict[str, Packed] = {}
    gathered: list[GptcliError] = [] if faults is None else faults
    for stem, (make, mate) in stems.items():
        finder.mate = mate
        try:
            packed = make(finder, stem)
            if packed.name in weights or (packed.name in infos and packed.name not in finder.taken):
                raise finder.fault(mate, f"{shown(packed.name)} is there twice, and {shown(mate)} is one of the two")
            weights[packed.name] = packed
        except GptcliError as error:
            gathered.append(error)
    left = [name for name in infos if name not in finder.taken]
    ignored = tuple(name for name in left if _last(name) in ACTIVATIONS or name.endswith("_activation_scale"))
    taken = frozenset((*finder.taken, *ignored))
    scaled = any(packed.scheme == "fp8" for packed in weights.values())
    for bare in left if scaled else ():
        if infos[bare].dtype in FP8 and bare not in taken:
            said = f"tensor {shown(bare)} is {infos[bare].dtype} and no scale stands beside it"
            gathered.append(finder.fault(bare, said, "incomplete"))
    if faults is None and gathered:
        raise gathered[0]
    if not weights:
        return None
    whole = [packed.name.removesuffix("weight") for packed in weights.values() if packed.scheme in ("gptq", "awq")]
    spare = tuple(f"{stem}bias" for stem in whole if f"{stem}bias" in infos)
    return Packing(method=method, weights=weights, ignored=ignored, spare=spare, taken=taken)


def told_method(config: Mapping[str, Any]) -> str:
    """The quant_method of a config.json, empty where it tells none."""
    words = _quantization_config(config)
    return str(words.get("quant_method") or ("compressed-tensors" if "config_groups" in words else ""))


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config's table about quantisation, wherever it stands; empty where there is none."""
    inner = [value for value in config.values() if isinstance(value, dict)]
    found = (table.get(key) for table in (config, *inner) for key in ("quantization_config", "compression_config"))
    words = next((value for value in found if value is not None), {})
    if not isinstance(words, dict):
        raise GptcliError("quantization_config: not a table of settings", "mend the config", "config")
    return words


def _check_known(method: str, words: Mapping[str, Any]) -> None:
    if method and method not in METHODS:
        said = f"quantization_config: quant_method {method[:40]!r} is not implemented"
        raise GptcliError(said, f"known: {', '.join(METHODS)}", "packed")
    layout = words.get("format")
    if method == "compressed-tensors" and layout is not None and layout not in FORMATS:
        said = f"quantization_config: format {str(layout)[:40]!r} is not implemented"
        raise GptcliError(said, f"known: {', '.join(FORMATS)}", "packed")


def _computed_in(infos: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> str:
    """The type that the model computes in: the config's word, else that of most bytes that are no sidecar's."""
    letters = {word: letter for letter, word in FLOATS.items()}
    said = str(config.get("torch_dtype") or config.get("dtype")).removeprefix("torch.")
    if said in letters:
        return letters[said]
    total: Counter[str] = Counter()
    for name, info in infos.items():
        if info.dtype in FLOATS and not any(word in _last(name) for word in ("scale", "absmax", "map", "SCB", "zero")):
            total[info.dtype] += info.end - info.start
    return total.most_common(1)[0][0] if total else "BF16"


def _sizes(shape: Sequence[int]) -> str:
    """A shape, no longer than a line should be."""
    text = str(list(shape[:9]))
    return text if len(text) < 80 and len(shape) < 10 else f"{text[:79]} …"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


class _Finder:
    """The tensors of a checkpoint, asked for by name.

    dtype: what the model computes in; taken: the names that were asked for; mate: the tensor that tells of the packed
    weight that is being read.
    """

    dtype = ""

    def __init__(self, infos: Mapping[str, TensorInfo], method: str, words: Mapping[str, Any]):
        self.infos, self.method, self.words = infos, method, words
        self.taken: set[str] = set()
        self.mate = ""

    def stems(self) -> "dict[str, tuple[_Make, str]]":
        """What comes before the ending of a packed weight's tensors, what reads it, and a tensor that tells of it."""
        found: dict[str, tuple[_Make, str]] = {}
        endings = tuple(ENDINGS)
        for name, info in self.infos.items():
            if name.endswith(endings):
                ending = next(one for one in endings if name.endswith(one))
                found[name.removesuffix(ending)] = ENDINGS[ending], name
            elif info.dtype in FP8 and _scale_of(name, self.infos):
                found[name] = _fp8, name
            elif info.dtype == "I8" and f"{name}_scale" in self.infos:
                found[name] = _ct_int8, name
            elif info.dtype == "U8" and name.endswith("_blocks"):
                found[name.removesuffix("_blocks")] = _mxfp4, name
        return found

    def fault(self, name: str, said: str, code: str = "corrupt") -> GptcliError:
        return GptcliError(f"{self.infos[name].file}: {said}", "fetch or write the checkpoint again", code)

    def check(self, holds: bool, name: str, said: str) -> None:
        if not holds:
            info = self.infos[name]
            raise self.fault(name, f"tensor {shown(name)} is {info.dtype} {_sizes(info.shape)}, {said}")

    def part(self, name: str, title: str, dtypes: Collection[str], axes: int | None = None) -> TensorInfo:
        """A tensor that a packed weight can't do without."""
        if name not in self.infos:
            said = f"tensor {shown(name)} is missing, and {shown(self.mate)} is {title}, which needs it"
            raise self.fault(self.mate, said, "incomplete")
        info = self.infos[name]
        self.check(info.dtype in dtypes, name, f"where {title} has {' or '.join(sorted(dtypes))}")
        self.check(axes is None or len(info.shape) == axes, name, f"where {title} has {axes} axes")
        return self.beside(it=name)["it"]

    def beside(self, **names: str) -> dict[str, TensorInfo]:
        """Of tensors that a packed weight may have, by role, those that are there."""
        there = {role: name for role, name in names.items() if name in self.infos}
        self.taken.update(there.values())
        return {role: self.infos[name] for role, name in there.items()}

    def blocks(self, scale: str, shape: tuple[int, ...], said: Any = None) -> tuple[int, int]:
        """How much of a weight shares a number of that scale."""
        found = _blocks(shape, self.infos[scale].shape, said)
        self.check(found is not None, scale, f"which fits no weight of {_sizes(shape)}")
        return found

    def numbers(self, name: str) -> list[int]:
        """The whole numbers of a small tensor."""
        info = self.infos[name]
        size, formats = info.end - info.start, {"U8": "B", "I32": "i", "I64": "q"}
        self.check(info.dtype in formats and size <= STATE_LIMIT, name, "which is no state of a weight")
        with info.file.open("rb") as file:
            file.seek(info.start)
            data = file.read(size)
        count = prod(info.shape)
        if len(data) != struct.calcsize(f"<{count}{formats[info.dtype]}"):
            raise self.fault(name, f"tensor {shown(name)} ends before its {count:,} numbers do", "incomplete")
        return list(struct.unpack(f"<{count}{formats[info.dtype]}", data))

    def state(self, name: str) -> dict[str, Any]:
        """The table that bitsandbytes keeps as JSON in a tensor of bytes."""
        try:
            said = json.loads(bytes(self.numbers(name)))
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise self.fault(name, f"tensor {shown(name)} holds no table of a weight's state")
        return said

    def packed(
        self,
        scheme: Scheme,
        name: str,
        shape: tuple[int, ...],
        parts: dict[str, TensorInfo],
        bits: int,
        block: tuple[int, ...],
        **more: Any,
    ) -> Packed:
        more = {"dtype": self.dtype} | more
        return Packed(scheme=scheme, name=name, shape=shape, parts=parts, bits=bits, block=block, **more)


def _qweight(f: _Finder, stem: str) -> Packed:
    """GPTQ or AWQ: whole numbers of `bits` bits in words of 32, a scale and a zero point for each group of a row.

    GPTQ packs what one output reads, qweight [in · bits / 32, out]; AWQ packs outputs, [in, out · bits / 32], or in its
    `gemv` form [out, in · bits / 32]. scales are [groups, out], in that form [out, groups and padding], and the zeros
    lie as the scales do, packed: the two tell the bits, and the shapes which of the three it is.
    """
    qweight = f.part(f"{stem}.qweight", "GPTQ or AWQ", ("I32",), 2)
    scales = f.part(f"{stem}.scales", "GPTQ or AWQ", FLOATS, 2)
    qzeros = f.part(f"{stem}.qzeros", "GPTQ or AWQ", ("I32",), 2)
    rows, columns = qweight.shape
    bits = 32 * qzeros.shape[1] // max(scales.shape[1], 1)
    fits = bits in range(1, 17) and qzeros.shape == (scales.shape[0], scales.shape[1] * bits // 32)
    f.check(fits, f"{stem}.qzeros", f"which packs no zero point for each of scales {_sizes(scales.shape)}")
    parts = {"numbers": qweight, "scales": scales, "zeros": qzeros} | f.beside(g_idx=f"{stem}.g_idx")
    said = _natural(f.words.get("group_size"))
    if rows == scales.shape[0] and f.method not in ("gptq", "auto-round"):
        scheme, shape = "awq", (rows, columns * 32 // bits)
        groups = ceil(shape[1] / said) if said else scales.shape[1]
    elif columns == scales.shape[1]:
        scheme, shape, groups = "gptq", (columns, rows * 32 // bits), scales.shape[0]
    else:
        f.check(columns * 32 // bits == scales.shape[1], f"{stem}.qweight", f"for scales {_sizes(scales.shape)}")
        scheme, shape, groups = "awq", (scales.shape[1], rows), scales.shape[0]
    f.check(0 < groups <= max(shape[1], 1), f"{stem}.scales", f"for a weight of {_sizes(shape)}")
    if "g_idx" in parts:
        f.check(parts["g_idx"].shape == shape[1:], f"{stem}.g_idx", f"for a weight of {_sizes(shape)}")
    group = said if said and ceil(shape[1] / said) == groups else ceil(shape[1] / groups)
    return f.packed(scheme, f"{stem}.weight", shape, parts, bits, (1, group), upright=True)


def _natural(value: Any) -> int:
    """A config's number from 1 on; 0 for anything else (-1 stands for all)."""
    return value if type(value) is int and value > 0 else 0


def _bnb_4bit(f: _Finder, stem: str) -> Packed:
    """bitsandbytes' 4 bits: indices into a table of 16 values, two a byte, and a largest value for each block.

    Shape, block and type stand in a state: JSON, in a tensor of bytes. Nested scales are bytes themselves: indices into
    a table of 256, with a scale for each block of them and an offset for all (Dettmers et al. 2023, QLoRA).
    """
    kind, title = ("fp4" if f"{stem}{STATE}fp4" in f.infos else "nf4"), "bitsandbytes 4 bits"
    state = f.part(f"{stem}{STATE}{kind}", title, ("U8",), 1)
    # The bytes may be stored as numbers of another type, which sharding libraries ask for.
    numbers = f.part(stem, title, ("U8", *FLOATS))
    said = f.state(f"{stem}{STATE}{kind}")
    letters = {word: letter for letter, word in FLOATS.items()}
    shape, block, dtype = said.get("shape"), _natural(said.get("blocksize")), said.get("dtype")
    known = isinstance(shape, list) and len(shape) > 0 and all(_natural(size) for size in shape)
    known = known and block > 0 and isinstance(dtype, str) and dtype in letters
    f.check(known, f"{stem}{STATE}{kind}", "and tells no shape, block and type")
    nested = f"{stem}.nested_absmax" in f.infos
    scales = f.part(f"{stem}.absmax", title, ("U8",) if nested else ("F32",), 1)
    table = f.part(f"{stem}.quant_map", title, ("F32",), 1)
    parts = {"numbers": numbers, "scales": scales, "quant_map": table, "state": state}
    count, blocks = prod(shape), ceil(prod(shape) / block)
    f.check(numbers.end - numbers.start == ceil(count / 2), stem, f"and its state tells a shape of {_sizes(shape)}")
    f.check(scales.shape == (blocks,), f"{stem}.absmax", f"for {blocks:,} blocks of {block}")
    f.check(table.shape == (16,), f"{stem}.quant_map", "where 4 bits index 16 values")
    inner = None
    if nested:
        outer, offset = _natural(said.get("nested_blocksize")), said.get("nested_offset")
        known = outer > 0 and type(offset) in (int, float)
        f.check(known, f"{stem}{STATE}{kind}", "and tells no block and offset of the nested scales")
        parts["nested_scales"] = f.part(f"{stem}.nested_absmax", title, ("F32",), 1)
        parts["nested_quant_map"] = f.part(f"{stem}.nested_quant_map", title, ("F32",), 1)
        fits = parts["nested_scales"].shape == (ceil(blocks / outer),)
        f.check(fits, f"{stem}.nested_absmax", f"for {blocks:,} scales in blocks of {outer}")
        f.check(parts["nested_quant_map"].shape == (256,), f"{stem}.nested_quant_map", "where 8 bits index 256 values")
        inner = (outer, float(offset))
    scheme = "bnb-nf4" if kind == "nf4" else "bnb-fp4"
    more = {"upright": True, "nested": inner, "dtype": letters[dtype]}
    return f.packed(scheme, stem, tuple(shape), parts, 4, (block,), **more)


def _bnb_int8(f: _Finder, stem: str) -> Packed:
    """bitsandbytes' 8 bits: whole numbers up to 127 and the largest value of each row (Dettmers et al. 2022)."""
    title = "bitsandbytes 8 bits"
    numbers = f.part(f"{stem}.weight", title, ("I8",), 2)
    scales = f.part(f"{stem}.SCB", title, ("F32", "F16", "BF16"), 1)
    f.check(scales.shape == numbers.shape[:1], f"{stem}.SCB", f"for a weight of {_sizes(numbers.shape)}")
    parts = {"numbers": numbers, "scales": scales} | f.beside(format=f"{stem}.weight_format")
    return f.packed("bnb-int8", f"{stem}.weight", numbers.shape, parts, 8, (1, numbers.shape[1]), upright=True)


def _scale_of(name: str, infos: Mapping[str, TensorInfo]) -> str:
    """The name of the scale beside a weight in fp8, empty where there is none. Its numbers are multiplied by it,
    whether or not the name calls it inverse.
    """
    stem = name.removesuffix("weight")
    names = (f"{name}_scale_inv", f"{name}_scale", f"{stem}scale", f"{stem}qscale_weight")
    return next((one for one in names if one in infos and one != name), "")


def _fp8(f: _Finder, name: str) -> Packed:
    """8-bit floats times a scale for the tensor, for each row, or for each block (128 × 128, most often)."""
    numbers = f.part(name, "fp8", FP8)
    f.check(len(numbers.shape) > 1, name, "which is no matrix")
    scale = _scale_of(name, f.infos)
    scales = f.part(scale, "fp8 with scales", SCALES)
    block = f.blocks(scale, numbers.shape, f.words.get("weight_block_size"))
    stem = name.removesuffix("weight")
    parts = {"numbers": numbers, "scales": scales} | f.beside(zeros=f"{stem}weight_zero_point")
    return f.packed("fp8", name, numbers.shape, parts, 8, block)


def _blocks(shape: tuple[int, ...], scales: tuple[int, ...], said: Any) -> tuple[int, int] | None:
    """The rows and columns of a matrix that share a scale, None where the scales fit no such thing."""
    rows, columns = shape[-2:]
    if prod(scales) == 1 or scales == shape[:-2]:
        return rows, columns
    if scales == shape[:-1]:
        return 1, columns
    if len(scales) < 2 or len(scales) != len(shape) or scales[:-2] != shape[:-2]:
        return None
    wanted = said if isinstance(said, list) and len(said) == 2 else (None, None)
    row, column = (_block(*one) for one in zip((rows, columns), scales[-2:], wanted))
    return (row, column) if row and column else None


def _block(size: int, parts: int, said: Any) -> int:
    """How long the blocks are that cut `size` into `parts`, the last one being shorter where need be; 0: none are."""
    usual = 128 if size > 128 else 0
    fits = (block for block in (_natural(said), usual) if block and ceil(size / block) == parts)
    return next(fits, size // parts if parts and size % parts == 0 else 0)


def _mxfp4(f: _Finder, stem: str) -> Packed:
    """4-bit floats (E2M1), two a byte, in blocks of 32 along the columns, each with a power of two (E8M0).

    blocks [..., out, in / 32, 16] and scales [..., out, in / 32]: OCP Microscaling Formats 1.0.
    """
    blocks = f.part(f"{stem}_blocks", "MXFP4", ("U8",))
    scales = f.part(f"{stem}_scales", "MXFP4", ("U8", "F8_E8M0"))
    f.check(len(blocks.shape) > 2 and blocks.shape[-1] == 16, f"{stem}_blocks", "where a block is 16 bytes")
    f.check(scales.shape == blocks.shape[:-1], f"{stem}_scales", f"for blocks of {_sizes(blocks.shape)}")
    shape = (*blocks.shape[:-2], blocks.shape[-2] * 32)
    return f.packed("mxfp4", stem, shape, {"numbers": blocks, "scales": scales}, 4, (1, 32), upright=True)


def _ct_packed(f: _Finder, stem: str) -> Packed:
    """compressed-tensors in words: whole numbers packed along the columns, [out, ⌈in · bits / 32⌉], shape beside; or
    4-bit floats, two a byte, [out, in / 2], with a scale for each 16 or 32 and, for 16, one more for the tensor.
    """
    title = "compressed-tensors"
    numbers = f.part(f"{stem}.weight_packed", title, ("I32", "U8"), 2)
    scales = f.part(f"{stem}.weight_scale", title, SCALES | FP8)
    parts = {"numbers": numbers, "scales": scales} | f.beside(
        zeros=f"{stem}.weight_zero_point",
        g_idx=f"{stem}.weight_g_idx",
        shape=f"{stem}.weight_shape",
        global_scale=f"{stem}.weight_global_scale",
    )
    rows, columns = numbers.shape
    if numbers.dtype == "U8":
        shape, bits, scheme = (rows, columns * 2), 4, "ct-fp4"
    else:
        f.part(f"{stem}.weight_shape", title, ("I64", "I32"), 1)
        said = f.numbers(f"{stem}.weight_shape")
        held = [
            b
            for b in (8, 4, 2, 1, 7, 6, 5, 3)
            if len(said) == 2 and columns in (ceil(said[1] / (32 // b)), ceil(said[1] * b / 32))
        ]
        told = [b for b in _told_bits(f.words) if b in held]
        fits = len(said) == 2 and said[0] == rows and said[1] > 0 and held
        f.check(bool(fits), f"{stem}.weight_packed", f"and weight_shape tells {_sizes(said)}")
        shape, bits, scheme = (rows, said[1]), (told or held)[0], "ct-pack"
    return f.packed(scheme, f"{stem}.weight", shape, parts, bits, f.blocks(f"{stem}.weight_scale", shape))


def _told_bits(words: Mapping[str, Any]) -> list[int]:
    """The bits of weights that compressed-tensors' groups tell, each once."""
    groups = words.get("config_groups")
    tables = groups.values() if isinstance(groups, dict) else ()
    weights = [table.get("weights") for table in tables if isinstance(table, dict)]
    return list(dict.fromkeys(_natural(one.get("num_bits")) for one in weights if isinstance(one, dict)))


def _ct_int8(f: _Finder, name: str) -> Packed:
    """compressed-tensors' 8 bits: whole numbers, one a byte, and scales as fp8 has them."""
    numbers = f.part(name, "compressed-tensors", ("I8",), 2)
    scales = f.part(f"{name}_scale", "compressed-tensors", SCALES)
    parts = {"numbers": numbers, "scales": scales} | f.beside(zeros=f"{name}_zero_point", g_idx=f"{name}_g_idx")
    return f.packed("ct-int8", name, numbers.shape, parts, 8, f.blocks(f"{name}_scale", numbers.shape))


# What ends the names of the tensors that only a packed weight has.
_Make = Callable[[_Finder, str], Packed]
ENDINGS: dict[str, _Make] = {
    ".qweight": _qweight,
    ".qzeros": _qweight,
    f"{STATE}nf4": _bnb_4bit,
    f"{STATE}fp4": _bnb_4bit,
    ".absmax": _bnb_4bit,
    ".SCB": _bnb_int8,
    ".weight_packed": _ct_packed,
}
