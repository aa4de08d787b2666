"""What a pickle would build, worked out from its opcodes without building it: nothing is imported, nothing called.

A pickle is a program for a stack machine. Here it runs on a machine that knows numbers, texts, lists and tables alone.
A name that the program would import stays a Name; what it would call, create or set up becomes a Call that says so.
The opcodes are a closed set (Python's pickletools describes each), and their number, the objects that they make and
the length of what they hold are bounded: a hostile program ends soon and stays small.
"""

import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_STEPS = 2_500_000  # opcodes: those of some seventy thousand tensors
MAX_RARE = 800_000  # of these, such as take longer
MAX_MEMO = 2_000_000
MAX_OBJECTS = 1_000_000  # lists, tables, tuples and calls
MAX_NAMES = 10_000  # different classes and functions
MAX_MARKS = 1_000  # open brackets
MAX_LINE = 4_096  # bytes, where an opcode's argument ends with its line
MAX_TEXT = 65_536  # bytes of a text; of a longer one nothing but its length is kept
MAX_DIGITS = 40


class Malformed(ValueError):
    """A pickle that can't be, or one beyond the bounds. Says why in one line without control characters."""


class Short(Malformed):
    """The data ends within the pickle."""

    def __init__(self):
        super().__init__("it ends in the middle")


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A class or function that the pickle would import: `torch._utils._rebuild_tensor_v2`."""

    text: str


@dataclass(slots=True, eq=False)
class Call:
    """What the pickle would call or create, and all that it would give to it.

    function: "(…).__call__" where it comes of another call; state: what it would be set up with; items: (key, value) or
    (value,) that would be put in.
    """

    function: Name
    args: tuple = ()
    state: Any = None
    items: list[tuple] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Odd:
    """A table's key that is neither text nor a plain number. No two are one."""

    value: Any


class Set(list):
    """A set's items in the order in which they stand, for nothing is looked up in it."""


class Machine:
    """Runs the pickles in `data`, of which the first begins at byte `at`; the bounds are for all of them together.

    called(name, args) is the value of a call, None for one that is not known; loaded(id) is that of a persistent id.
    names: every class and function that the pickles would import, in order.
    """

    def __init__(
        self,
        data: bytes,
        at: int = 0,
        called: Callable[[Name, tuple], Any] = lambda name, args: None,
        loaded: Callable[[Any], Any] = lambda id_: Name("a value beside the pickle"),
    ):
        self.data, self.at, self.called, self.loaded = data, at, called, loaded
        self.names: dict[str, Name] = {}
        self.objects, self.steps, self.rare = 0, MAX_STEPS, MAX_RARE

    def run(self) -> Any:
        """The next pickle's value; `at` then stands behind it. Raises Malformed, and Short where the data ends.

        The opcodes that a tensor is made of are dealt with here, for there are as many as thirty to each.
        """
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # what lies under each open mark
        self.memo: dict[int, Any] = {}
        data, end, at, stack, memo, below = self.data, len(self.data), self.at, self.stack, self.memo, self.below
        u16, u32 = U16.unpack_from, U32.unpack_from
        try:
            for step in range(self.steps):
                code = data[at]
                at += 1
                if code == BINPUT:
                    memo[data[at]] = stack[-1]
                    at += 1
                elif code == BINGET:
                    stack.append(memo[data[at]])
                    at += 1
                elif code == LONG_BINPUT:
                    (place,) = u32(data, at)
                    if place >= MAX_MEMO:
                        raise Malformed(f"memo {place:,}, where there are up to {MAX_MEMO:,}")
                    memo[place] = stack[-1]
                    at += 4
                elif code == BININT1:
                    stack.append(data[at])
                    at += 1
                elif code == MARK:
                    if len(below) >= MAX_MARKS:
                        raise Malformed(f"more than {MAX_MARKS:,} levels")
                    below.append(stack)
                    stack = []
                elif code == LONG_BINGET:
                    stack.append(memo[u32(data, at)[0]])
                    at += 4
                elif code in (TUPLE, TUPLE1, TUPLE2, TUPLE3):
                    if code == TUPLE:
                        value, stack = tuple(stack), below.pop()
                    else:
                        count = code - TUPLE1 + 1
                        stack[-count]  # there are so many
                        value = tuple(stack[-count:])
                        del stack[-count:]
                    stack.append(self.new(value))
                elif code == BINUNICODE and (size := u32(data, at)[0]) <= MAX_TEXT and at + 4 + size <= end:
                    at += 4 + size
                    stack.append(data[at - size : at].decode("utf-8", "surrogatepass"))
                elif code == BININT2:
                    stack.append(u16(data, at)[0])
                    at += 2
                elif code == STOP:
                    self.at, self.steps = at, self.steps - step - 1
                    return stack.pop()
                elif code in OPERATIONS:
                    self.rare -= 1
                    if self.rare < 0:
                        break
                    self.at, self.stack = at, stack
                    operation, makes = OPERATIONS[code]
                    value = operation(self)
                    at, stack = self.at, self.stack
                    if makes:
                        stack.append(value)
                else:
                    raise Malformed(f"byte {at - 1:,} is {code:#04x}, which is no opcode")
        except IndexError:
            if at >= end:
                raise Short from None
            raise Malformed(f"the opcode before byte {at:,} finds too little on the stack") from None
        except KeyError as error:
            raise Malformed(f"memo {error}, which was never set") from None
        except UnicodeDecodeError:
            raise Malformed("a text that is not UTF-8") from None
        except struct.error:
            raise Short from None
        raise Malformed(f"more than {MAX_STEPS:,} opcodes, or {MAX_RARE:,} of the rarer ones")

    # Arguments of opcodes

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at, self.at + MAX_LINE)
        if end < 0:
            raise Short if len(self.data) - self.at < MAX_LINE else Malformed(f"a line longer than {MAX_LINE:,} bytes")
        begun, self.at = self.at, end + 1
        return self.data[begun:end]

    def text(self) -> str:
        return utf8(self.line())

    def lettered(self, length: struct.Struct, read: Callable[[bytes], Any], kind: str) -> Any:
        """What `read` makes of the bytes that follow, of which `length` says how many."""
        size = self.number(length)
        if size > len(self.data) - self.at:
            raise Short
        if size < 0:
            raise Malformed("a length below nought")
        self.at += size
        if size > MAX_TEXT:
            return self.new(Name(f"{kind} of {size:,} bytes"))
        return read(self.data[self.at - size : self.at])

    def protocol(self) -> None:
        if (version := self.number(U8)) > 5:
            raise Malformed(f"a pickle of protocol {version}")

    def frame(self) -> None:
        """A frame's length stands before it; here all of the data is at hand."""
        if self.number(U64) > len(self.data) - self.at:
            raise Short

    # The stack

    def count(self, objects: int) -> None:
        self.objects += objects
        if self.objects > MAX_OBJECTS:
            raise Malformed(f"more than {MAX_OBJECTS:,} objects")

    def new(self, value: Any) -> Any:
        """An object that counts."""
        self.count(1)
        return value

    def since_mark(self) -> list[Any]:
        """All that was pushed since the last mark, taken off."""
        values, self.stack = self.stack, self.below.pop()
        return values

    def off(self, count: int) -> list[Any]:
        """The last values, taken off."""
        if len(self.stack) < count:
            raise IndexError
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def put(self, place: int) -> None:
        if place >= MAX_MEMO:
            raise Malformed(f"memo {place:,}, where there are up to {MAX_MEMO:,}")
        self.memo[place] = self.stack[-1]

    # Objects

    def name(self, module: Any, name: Any) -> Name:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > 2 * MAX_LINE:
            raise Malformed("a class or function whose name is no text, or too long a one")
        # Python 2 called its builtins so, and protocol 2 writes the old name still.
        text = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if text not in self.names and len(self.names) >= MAX_NAMES:
            raise Malformed(f"more than {MAX_NAMES:,} different classes and functions")
        return self.names.setdefault(text, Name(text))

    def global_(self) -> Name:
        return self.name(self.text(), self.text())

    def registered(self, form: struct.Struct) -> Name:
        """A class or function by its number in a registry of the process that wrote it."""
        return self.name("copyreg", f"extension {self.number(form)}")

    def call(self, function: Any, args: Any, named: Any = None) -> Any:
        """The value of a call; in `named`, arguments by name."""
        if type(args) is not tuple:
            raise Malformed("a call whose arguments are no tuple")
        args = (*args, named) if named else args
        if type(function) is Call:
            function = self.name("(…)", "__call__")
        if type(function) is not Name or function.text not in self.names:
            raise Malformed("a call of what is no function")
        value = self.called(function, args)
        if type(value) in (dict, list, Set, bytes):  # made anew each time, out of what may be a few bytes of the pickle
            self.count(len(value) // 16 if type(value) is bytes else len(value))
        return self.new(Call(function, args) if value is None else value)

    def call_first(self, values: list[Any]) -> Any:
        return self.call(values[0], tuple(values[1:]))

    def extend(self, values: list[Any], kind: type = list) -> None:
        target = self.stack[-1]
        if type(target) is kind:
            target += values
        elif type(target) is Call:
            target.items += [(value,) for value in values]
        else:
            raise Malformed(f"an item for what is no {kind.__name__.lower()}")

    def fill(self, pairs: list[Any], target: Any) -> Any:
        """The target, in which the keys and values stand then."""
        if len(pairs) % 2:
            raise Malformed("a key without a value")
        if type(target) is Call:
            target.items += zip(pairs[::2], pairs[1::2])
        elif type(target) is dict:
            as_table(zip(pairs[::2], pairs[1::2]), target)
        else:
            raise Malformed("a key for what is no table")
        return target

    def set_up(self, state: Any) -> None:
        """Gives an object its state. What tensors and ordered tables are given says nothing of their content."""
        target = self.stack[-1]
        if type(target) is dict and type(state) is not dict:
            raise Malformed("attributes of a table that are none")
        if type(target) is Call:
            target.state = state if target.state is None else (target.state, state)
        elif isinstance(target, Name | list | str | int | float | tuple | bytes | None):
            self.stack[-1] = self.new(Call(self.name("(…)", "__setstate__"), (target,), state))


def as_table(pairs: Iterable, table: dict | None = None) -> dict:
    """The pairs in a table. Raises Malformed where a key stands twice, of which the first would be lost.

    Keys are hashed without recursion, and in no way that a file could make collide: others than plain ones become Odd.
    """
    table = {} if table is None else table
    for key, value in pairs:
        if type(key) not in (str, bool, bytes, type(None)) and not (type(key) is int and abs(key) < 2**62):
            key = Odd(key)
        if key in table:
            raise Malformed(f"the key {ascii(key)[:200]} stands twice in one table")
        table[key] = value
    return table


def utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def latin1(raw: bytes) -> str:
    """A text of Python 2, which says no encoding."""
    return raw.decode("latin-1")


def integer(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def digits(text: str) -> int | bool:
    """A whole number of protocol 0; 00 and 01 are its truths."""
    if text in ("00", "01"):
        return text == "01"
    if text.isdecimal() and len(text) <= MAX_DIGITS:
        return int(text)
    if not re.fullmatch(rf"[+-]?[0-9]{{1,{MAX_DIGITS}}}L?", text):
        raise Malformed(f"{ascii(text)[:50]} is no whole number")
    return int(text.rstrip("L"))


def real(text: str) -> float:
    try:
        return float(text[:MAX_DIGITS])
    except ValueError:
        raise Malformed(f"{ascii(text)[:50]} is no number") from None


U8, U16, U32, U64 = (struct.Struct(f"<{letter}") for letter in "BHIQ")
I32, F64 = struct.Struct("<i"), struct.Struct(">d")
BINPUT, BINGET, LONG_BINPUT, LONG_BINGET, MARK, STOP = b"qhrj(."
BININT1, BININT2, BINUNICODE, TUPLE, TUPLE1, TUPLE2, TUPLE3 = b"KMXt\x85\x86\x87"
# Every other opcode, alike ones together: those that push a value, by what makes it, and those that do something else.
MADE: dict[str, Callable[[Machine], Any]] = {
    # numbers and truths
    "IL": lambda m: digits(m.text()),
    "J": lambda m: m.number(I32),
    "\x8a": lambda m: m.lettered(U8, integer, "a number"),
    "\x8b": lambda m: m.lettered(I32, integer, "a number"),
    "F": lambda m: real(m.text()),
    "G": lambda m: m.number(F64),
    "N": lambda m: None,
    "\x88": lambda m: True,
    "\x89": lambda m: False,
    # texts and bytes
    "S": lambda m: latin1(m.line()[1:-1]),
    "T": lambda m: m.lettered(I32, latin1, "a text"),
    "U": lambda m: m.lettered(U8, latin1, "a text"),
    "V": lambda m: m.line().decode("raw_unicode_escape"),
    "X": lambda m: m.lettered(U32, utf8, "a text"),
    "\x8c": lambda m: m.lettered(U8, utf8, "a text"),
    "\x8d": lambda m: m.lettered(U64, utf8, "a text"),
    "B": lambda m: m.lettered(U32, bytes, "a value"),
    "C": lambda m: m.lettered(U8, bytes, "a value"),
    "\x8e\x96": lambda m: m.lettered(U64, bytes, "a value"),
    "\x97": lambda m: m.new(Name("a value beside the pickle")),
    # lists, sets, tuples, tables
    "]": lambda m: m.new([]),
    "l": lambda m: m.new(m.since_mark()),
    "\x8f": lambda m: m.new(Set()),
    "\x91": lambda m: m.new(Set(m.since_mark())),
    ")": lambda m: (),
    "}": lambda m: m.new({}),
    "d": lambda m: m.fill(m.since_mark(), m.new({})),
    # the stack and the memo
    "2": lambda m: m.stack[-1],
    "g": lambda m: m.memo[digits(m.text())],
    # classes, functions, objects
    "c": Machine.global_,
    "\x93": lambda m: m.name(*m.off(2)),
    "\x82": lambda m: m.registered(U8),
    "\x83": lambda m: m.registered(U16),
    "\x84": lambda m: m.registered(I32),
    "R\x81": lambda m: m.call(*m.off(2)),
    "\x92": lambda m: m.call(*m.off(3)),
    "i": lambda m: m.call(m.global_(), tuple(m.since_mark())),
    "o": lambda m: m.call_first(m.since_mark()),
    "P": lambda m: m.new(m.loaded(m.text())),
    "Q": lambda m: m.new(m.loaded(m.stack.pop())),
}
DONE: dict[str, Callable[[Machine], Any]] = {
    "\x98": lambda m: None,
    "a": lambda m: m.extend(m.off(1)),
    "e": lambda m: m.extend(m.since_mark()),
    "\x90": lambda m: m.extend(m.since_mark(), Set),
    "s": lambda m: m.fill(m.off(2), m.stack[-1]),
    "u": lambda m: m.fill(m.since_mark(), m.stack[-1]),
    "0": lambda m: m.stack.pop() if m.stack else m.since_mark(),
    "1": Machine.since_mark,
    "p": lambda m: m.put(digits(m.text())),
    "\x94": lambda m: m.put(len(m.memo)),
    "b": lambda m: m.set_up(m.stack.pop()),
    "\x80": Machine.protocol,
    "\x95": Machine.frame,
}
# The operation of each, by its byte, and whether it makes a value.
OPERATIONS = {
    ord(code): (operation, table is MADE)
    for table in (MADE, DONE)
    for codes, operation in table.items()
    for code in codes
}
