"""The calls by which a pickle of PyTorch builds tensors, as descriptions: storage, type, offset, shape, strides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gptcli.checkpoint.opcodes import Malformed, Name, Set, as_table

# torch's types: the word for each in the safetensors format (C32 and C128 in its manner, for it lacks them), and bytes.
DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1), "bool": ("BOOL", 1),
    "complex32": ("C32", 4), "complex64": ("C64", 8), "complex128": ("C128", 16),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1), "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}  # fmt: skip
# The type of a storage's numbers and the bytes of one, by its class; quantised ones have no type that is listed.
STORAGES = {
    f"torch.{module}{name}Storage": found
    for module in ("", "cuda.", "storage.")
    for name, found in {
        "Double": DTYPES["float64"], "Float": DTYPES["float32"], "Half": DTYPES["float16"],
        "BFloat16": DTYPES["bfloat16"], "Long": DTYPES["int64"], "Int": DTYPES["int32"], "Short": DTYPES["int16"],
        "Char": DTYPES["int8"], "Byte": DTYPES["uint8"], "Bool": DTYPES["bool"], "Untyped": DTYPES["uint8"],
        "ComplexFloat": DTYPES["complex64"], "ComplexDouble": DTYPES["complex128"],
        "QInt8": (None, 1), "QUInt8": (None, 1), "QInt32": (None, 4), "QUInt4x2": (None, 1), "QUInt2x4": (None, 1),
    }.items()
}  # fmt: skip
NUMBERS = "BFloat16 Byte Char Double Float Half Int Long Short".split()
REBUILT = """tensor tensor_v2 tensor_v3 parameter parameter_with_state qtensor sparse_tensor nested_tensor
    meta_tensor_no_storage wrapper_subclass device_tensor_from_cpu_tensor device_tensor_from_numpy""".split()
SMALL_TYPES = """bits8 bits16 bits1x8 bits2x4 bits4x2 float4_e2m1fn_x2 qint8 qint32 quint8 quint2x4 quint4x2""".split()
SCHEMES = "tensor_affine tensor_symmetric channel_affine channel_symmetric channel_affine_float_qparams".split()
# What torch's weights-only loader takes as a word, and the classes and functions that it builds by; its own lists.
WORDS = frozenset((
    *(f"torch.{name}" for name in (*DTYPES, *SMALL_TYPES)),
    *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *(f"torch.per_{name}" for name in SCHEMES),
    *(name for name in STORAGES if not name.startswith(("torch.cuda.Q", "torch.storage.")) and "Untyped" not in name),
))  # fmt: skip
KNOWN = WORDS | frozenset((
    "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set", "collections.Counter",
    "collections.OrderedDict", "torch.Size", "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout", "torch.storage.TypedStorage", "torch.storage.UntypedStorage",
    "torch._tensor._rebuild_from_type_v2", "torch.BoolTensor", "torch.cuda.BoolTensor",
    *(f"torch._utils._rebuild_{name}" for name in REBUILT),
    *(f"torch.{module}{name}Tensor" for module in ("", "cuda.", "sparse.", "cuda.sparse.") for name in NUMBERS),
))  # fmt: skip
VALUES = frozenset(("torch.device", "torch.serialization._get_layout", "builtins.complex", "builtins.bytearray"))
MAX_AXES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Bytes start to start + size of the storage `key`, as numbers of a type (None: of one that is not listed)."""

    key: str
    start: int
    size: int
    dtype: str | None
    itemsize: int


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor over a storage; offset and strides in numbers. state: attributes that a subclass adds."""

    storage: Storage
    dtype: str
    itemsize: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    state: Any = None

    @property
    def numel(self) -> int:
        number = 1
        for size in self.shape:
            number *= size
        return number

    @property
    def span(self) -> int:
        """Bytes from its first number to behind its last."""
        if 0 in self.shape:
            return 0
        return (1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))) * self.itemsize

    @property
    def contiguous(self) -> bool:
        """Do its numbers stand one after the other, the last axis first?"""
        step = 1
        for size, stride in zip(self.shape[::-1], self.strides[::-1]):
            if size > 1 and stride != step:
                return 0 in self.shape
            step *= size
        return True


class Rebuilder:
    """What a Machine is told of torch. Keeps the storages that were named, by key: (bytes, bytes of a number)."""

    def __init__(self):
        self.storages: dict[str, tuple[int, int]] = {}
        self.tensors: list[Tensor] = []

    def loaded(self, id_: Any) -> Any:
        """A persistent id: ("storage", class, key, device, count), in the older format also a view into it or None.

        The older format names the class of a whole module so too: ("module", class, file, source).
        """
        kind = id_[0] if type(id_) is tuple and id_ else None
        if kind == "module" and len(id_) == 4 and type(id_[1]) is Name:
            return id_[1]
        if kind != "storage" or len(id_) not in (5, 6) or type(id_[1]) is not Name:
            raise Malformed(f"a persistent id that is none of PyTorch's ({type(id_).__name__})")
        _, class_, key, device, count, *view = id_
        if class_.text not in STORAGES:
            raise Malformed(f"a storage of the type {ascii(class_.text)[1:-1][:80]}")
        dtype, itemsize = STORAGES[class_.text]
        if type(key) is not str or type(device) is not str or not natural(count):
            raise Malformed("a storage whose key, device or size is none")
        size = count * itemsize
        if self.storages.setdefault(key, (size, itemsize))[0] != size:
            raise Malformed(
                f"storage {ascii(key)[:80]} has {self.storages[key][0]:,} bytes in one place, {size:,} in another"
            )
        start = 0
        if view and view[0] is not None:
            if type(view[0]) is not tuple or len(view[0]) != 3 or not all(map(natural, view[0][1:])):
                raise Malformed("a view of a storage that says no place")
            start, length = (number * itemsize for number in view[0][1:])
            if start + length > size:
                raise Malformed(f"a view of storage {ascii(key)[:80]} that reaches beyond it")
            size = length
        return Storage(key, start, size, dtype, itemsize)

    def called(self, function: Name, args: tuple) -> Any:
        """The value of a call of torch or of a plain container; None for any other."""
        if function.text in WORDS:
            raise Malformed(f"a call of {function.text}, which is no function")
        if function.text not in _CALLS:
            return None
        least, most, build = _CALLS[function.text]
        if not least <= len(args) <= most:
            raise Malformed(f"a call of {function.text} with {len(args)} values")
        return build(self, *args)

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, dtype: Any = None) -> Tensor | None:
        """Raises Malformed for one that can't be; None where its type is not listed."""
        if type(storage) is not Storage or not natural(offset):
            raise Malformed("a tensor without a storage, or an offset")
        for numbers in (shape, strides):
            if type(numbers) is not tuple or len(numbers) > MAX_AXES or not all(map(natural, numbers)):
                raise Malformed("a tensor whose shape or strides are not whole numbers from 0 on")
        if len(shape) != len(strides):
            raise Malformed(f"a tensor of {len(shape)} axes with {len(strides)} strides")
        word, itemsize = storage.dtype, storage.itemsize
        if dtype is not None:
            name = dtype.text.removeprefix("torch.") if type(dtype) is Name else ""
            word, itemsize = DTYPES.get(name, (None, 0))
        if word is None:
            return None
        made = Tensor(storage, word, itemsize, offset, shape, strides)
        self.tensors.append(made)
        return made


def natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _v1(builder: Rebuilder, storage: Any, offset: Any, shape: Any, strides: Any) -> Tensor | None:
    return builder.tensor(storage, offset, shape, strides)


def _v2(builder: Rebuilder, *args: Any) -> Tensor | None:
    """Also whether it requires a gradient, its hooks, and marks of a view whose numbers are conjugated or negated."""
    _checked(args[4], args[5], *args[6:])
    return None if args[6:] and args[6] else builder.tensor(*args[:4])


def _v3(builder: Rebuilder, *args: Any) -> Tensor | None:
    """The type before the marks."""
    _checked(args[4], args[5], *args[7:])
    if type(args[6]) is not Name:
        raise Malformed("a tensor without a type")
    return None if args[7:] and args[7] else builder.tensor(*args[:4], args[6])


def _parameter(builder: Rebuilder, data: Any, gradient: Any, hooks: Any, state: Any = None) -> Tensor | None:
    _checked(gradient, hooks)
    if type(data) is not Tensor:
        return None
    data.state = state if state is not None else data.state
    return data


def _checked(gradient: Any, *tables: Any) -> None:
    if type(gradient) is not bool or not all(type(one) in (dict, type(None)) for one in tables):
        raise Malformed("a tensor whose hooks or marks are none")


def _of_type(builder: Rebuilder, function: Any, class_: Any, args: Any, state: Any) -> Tensor | None:
    """A tensor of a subclass, or one with attributes. Looked through where a known function builds the tensor."""
    if type(function) is not Name or function.text not in _TENSORS or type(args) is not tuple:
        return None
    tensor = builder.called(function, args)
    if tensor is not None:
        tensor.state = state
    return tensor


def _table(builder: Rebuilder, content: Any = None) -> dict | None:
    """A table from nothing, from another table, or from pairs."""
    if content is None or type(content) is dict:
        return {} if content is None else content
    if type(content) is not list or not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in content):
        return None
    return as_table(content)


def _list(builder: Rebuilder, content: Any = None) -> list | None:
    return [] if content is None else content if type(content) is list else None


def _set(builder: Rebuilder, content: Any = None) -> Set | None:
    return Set() if content is None else Set(content) if type(content) is list else None


def _tuple(builder: Rebuilder, content: Any = ()) -> tuple | None:
    return content if type(content) is tuple else None


def _encoded(builder: Rebuilder, letters: Any, encoding: Any = "utf-8") -> bytes | None:
    """How protocol 2 writes bytes."""
    if type(letters) is not str or encoding not in ("latin1", "latin-1"):
        return None
    try:
        return letters.encode("latin-1")
    except UnicodeEncodeError:
        raise Malformed("bytes in letters beyond Latin-1") from None


# How many values each takes, and what it makes of them.
_TENSORS: dict[str, tuple[int, int, Callable[..., Tensor | None]]] = {
    "torch._utils._rebuild_tensor": (4, 4, _v1),
    "torch._utils._rebuild_tensor_v2": (6, 7, _v2),
    "torch._utils._rebuild_tensor_v3": (7, 8, _v3),
    "torch._utils._rebuild_parameter": (3, 3, _parameter),
    "torch._utils._rebuild_parameter_with_state": (4, 4, _parameter),
}
_CALLS: dict[str, tuple[int, int, Callable[..., Any]]] = _TENSORS | {
    "torch._tensor._rebuild_from_type": (4, 4, _of_type),
    "torch._tensor._rebuild_from_type_v2": (4, 4, _of_type),
    "torch.Size": (0, 1, _tuple),
    "collections.OrderedDict": (0, 1, _table),
    "collections.Counter": (0, 1, _table),
    "collections.defaultdict": (0, 2, lambda builder, *args: _table(builder, *args[1:])),
    "builtins.dict": (0, 1, _table),
    "builtins.list": (0, 1, _list),
    "builtins.set": (0, 1, _set),
    "builtins.frozenset": (0, 1, _set),
    "builtins.tuple": (0, 1, _tuple),
    "builtins.bytes": (0, 1, lambda builder, *args: None if args else b""),
    "_codecs.encode": (1, 2, _encoded),
}
