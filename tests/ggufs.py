"""A small writer of .gguf files, byte by byte, that writes faults as readily as sound files."""

import struct
from collections.abc import Iterable
from typing import Any

# Types of values by name, and the struct module's letters for them.
NUMBERS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
TEXT, ARRAY = 8, 9
F32 = 0


def number_of(kind: str) -> int:
    """What stands in a file for a type."""
    return ARRAY if kind.endswith("[]") else TEXT if kind == "text" else NUMBERS[kind][0]


class Writer:
    """order: "<" or ">", of all numbers."""

    def __init__(self, order: str = "<"):
        self.order = order

    def number(self, letter: str, value: Any) -> bytes:
        return struct.pack(self.order + letter, value)

    def text(self, value: str | bytes) -> bytes:
        raw = value.encode() if isinstance(value, str) else value
        return self.number("Q", len(raw)) + raw

    def typed(self, kind: str, value: Any) -> tuple[int, bytes]:
        """A value's type and bytes; a kind such as `u32[]` or `text[][]` is an array."""
        if kind.endswith("[]"):
            inner = b"".join(self.typed(kind[:-2], one)[1] for one in value)
            return ARRAY, self.number("I", number_of(kind[:-2])) + self.number("Q", len(value)) + inner
        if kind == "text":
            return TEXT, self.text(value)
        number, letter = NUMBERS[kind]
        return number, self.number(letter, value)

    def key(self, name: str | bytes, kind: str, value: Any) -> bytes:
        number, raw = self.typed(kind, value)
        return self.text(name) + self.number("I", number) + raw

    def entry(self, name: str | bytes, sizes: Iterable[int], kind: int, offset: int) -> bytes:
        """A line of the table of tensors; sizes: the first moves fastest."""
        sizes = list(sizes)
        head = self.text(name) + self.number("I", len(sizes)) + b"".join(self.number("Q", size) for size in sizes)
        return head + self.number("I", kind) + self.number("Q", offset)

    def file(
        self,
        keys: Iterable[bytes] = (),
        entries: Iterable[bytes] = (),
        data: bytes = b"",
        *,
        version: int = 3,
        counts: tuple[int, int] | None = None,
        alignment: int = 32,
        magic: bytes = b"GGUF",
    ) -> bytes:
        """counts: of tensors and keys, where they are to lie."""
        keys, entries = list(keys), list(entries)
        tensors, number = counts or (len(entries), len(keys))
        head = magic + self.number("I", version) + self.number("Q", tensors) + self.number("Q", number)
        head += b"".join(keys) + b"".join(entries)
        return head + bytes(-len(head) % alignment) + data
