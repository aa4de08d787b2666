"""The entries of a zip file, as PyTorch writes it: where each one's bytes lie.

Nothing is unpacked, for what PyTorch wants to read again it does not compress. The directory at the end is compared
with the header before each entry and with the file's size, and a file in which they disagree is refused: programs that
read one or the other would see different content. Format: PKWARE, APPNOTE.TXT, sections 4.3 and 4.5.
"""

import struct
from typing import BinaryIO, NamedTuple

MAX_ENTRIES = 200_000
MAX_DIRECTORY = 32 * 2**20  # bytes
MAX_NAME = 1_024
LOCAL, CENTRAL, DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
END, END64, LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
MAX32 = 2**32 - 1
ENCRYPTED, STREAMED = 1, 8  # bits of an entry's flags; streamed: its sizes stand behind it, not before
FOLDER = 16  # a bit of its attributes


class BadZip(ValueError):
    """Why a zip file can't be what PyTorch wrote, in one line."""


class CutShort(BadZip):
    """The directory that ends a zip file is not there."""


class Entry(NamedTuple):
    """Where an entry's bytes lie, the CRC-32 of its content (0: none was computed), and whether it is compressed."""

    start: int
    end: int
    crc: int
    compressed: bool


class _Listed(NamedTuple):
    """An entry as the directory describes it; header: where its own header begins."""

    name: bytes
    flags: int
    method: int
    crc: int
    size: int
    packed: int
    header: int


def entries(file: BinaryIO, size: int) -> dict[str, Entry]:
    """Every entry by its name, in the order of the directory. Raises BadZip, and CutShort for one without an end."""
    found: dict[str, Entry] = {}
    spans = []
    start, length, count = _directory(file, size)
    for listed in _central(file, start, length, count):
        name = _name(listed.name)
        if name in found:
            raise BadZip(f"two entries are called {name!r}")
        found[name], end = _local(file, listed, name, start)
        spans.append((listed.header, end, name))
    reached, before = 0, ""
    if spans and min(spans)[0]:
        raise BadZip(f"{min(spans)[0]:,} bytes stand before its first entry")
    for begun, end, name in sorted(spans):
        if begun < reached:
            raise BadZip(f"the entries {before!r} and {name!r} overlap")
        reached, before = end, name
    return found


def _directory(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """Where the directory begins, how long it is, and how many entries it has."""
    tail = _read(file, max(0, size - 2**16 - 22), min(size, 2**16 + 22))
    at = len(tail)
    while (at := tail.rfind(END, 0, at)) >= 0:
        if at + 22 <= len(tail) and at + 22 + int.from_bytes(tail[at + 20 : at + 22], "little") == len(tail):
            break
    else:
        raise CutShort("the directory at its end is missing")
    end = size - len(tail) + at
    disk, first_disk, here, count, length, start, _ = struct.unpack_from("<4x4H2IH", tail, at)
    if disk or first_disk or here != count:
        raise BadZip("it is one of several disks")
    locator = _read(file, end - 20, 20) if end >= 20 else b""
    if locator.startswith(LOCATOR64):
        at64 = struct.unpack_from("<4xIQI", locator)[1]
        record = _read(file, at64, 56) if at64 + 56 <= end - 20 else b""
        if not record.startswith(END64) or at64 + 12 + int.from_bytes(record[4:12], "little") != end - 20:
            raise BadZip("the end of its directory is not where it should be")
        numbers, (locator_disk, disks) = struct.unpack_from("<16xIIQ", record), struct.unpack("<4xI8xI", locator)
        wide = struct.unpack_from("<32xQQQ", record)
        if numbers != (0, 0, wide[0]) or (locator_disk, disks) != (0, 1):
            raise BadZip("it is one of several disks")
        for small, large, most in ((count, wide[0], 2**16 - 1), (length, wide[1], MAX32), (start, wide[2], MAX32)):
            if small not in (large, most):
                raise BadZip(f"its directory is described twice, as {small:,} and as {large:,}")
        (count, length, start), end = wide, at64
    if start + length != end:
        raise BadZip(f"its directory should end at byte {end:,}, and ends at {start + length:,}")
    if count > MAX_ENTRIES or length > MAX_DIRECTORY:
        raise BadZip(f"a directory of {count:,} entries in {length:,} bytes")
    return start, length, count


def _central(file: BinaryIO, start: int, length: int, count: int) -> list[_Listed]:
    """The directory's entries."""
    data, at, found = _read(file, start, length), 0, []
    for _ in range(count):
        if data[at : at + 4] != CENTRAL or at + 46 > length:
            raise BadZip(f"entry {len(found):,} of its directory is malformed")
        flags, method, crc, packed, size, name, extra, comment, disk, attributes, header = struct.unpack_from(
            "<8x2H4x3I4H2x2I", data, at
        )
        named = at + 46 + name
        wide = _wide(data[named : named + extra], (size, packed, header))
        at = named + extra + comment
        if at > length or wide is None or disk:
            raise BadZip(f"entry {len(found):,} of its directory is malformed")
        size, packed, header = wide
        shown = ascii(data[named - name : named][:80])[1:]
        if flags & ENCRYPTED or attributes & FOLDER:
            raise BadZip(f"the entry {shown} is {'encrypted' if flags & ENCRYPTED else 'a folder'}")
        if not method and packed != size:
            raise BadZip(f"the size of the entry {shown} is {size:,} and {packed:,}")
        found.append(_Listed(data[named - name : named], flags, method, crc, size, packed, header))
    if at != length:
        raise BadZip(f"its directory has {length - at:,} bytes more than its {count:,} entries take")
    return found


def _wide(extra: bytes, values: tuple[int, ...]) -> tuple[int, ...] | None:
    """The values, those that don't fit 32 bits taken from the field for 64; None where it lacks one."""
    if MAX32 not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            large = [int.from_bytes(field[i : i + 8], "little") for i in range(0, len(field) - 7, 8)][::-1]
            needed = values.count(MAX32)
            return tuple(large.pop() if v == MAX32 else v for v in values) if len(large) >= needed else None
        at += 4 + length
    return None


def _local(file: BinaryIO, listed: _Listed, name: str, end: int) -> tuple[Entry, int]:
    """The entry as its own header describes it, and where what belongs to it ends."""
    head = _read(file, listed.header, 30 + len(listed.name)) if listed.header + 30 <= end else b""
    if head[:4] != LOCAL or len(head) < 30:
        raise BadZip(f"no entry begins at byte {listed.header:,}, where {name!r} should")
    flags, method, crc, packed, size, name_length, extra = struct.unpack_from("<6x2H4x3I2H", head)
    start = listed.header + 30 + name_length + extra
    entry = Entry(start, start + listed.packed, listed.crc, bool(method))
    if head[30:] != listed.name or name_length != len(listed.name) or (method, flags) != (listed.method, listed.flags):
        raise BadZip(f"{name!r} is described otherwise in the directory and before its content")
    if entry.end > end:
        raise BadZip(f"{name!r} needs {listed.packed:,} bytes and {max(end - start, 0):,} are there")
    true, told = (listed.size, listed.packed), (size, packed)
    if not flags & STREAMED:
        wide = _wide(_read(file, start - extra, extra), told) if MAX32 in told else told
        if wide != true or crc != listed.crc:
            raise BadZip(f"the size of {name!r} is {listed.size:,} in the directory and {size:,} before its content")
        return entry, entry.end
    if told not in (true, (0, 0), (MAX32, MAX32)):
        raise BadZip(f"the size of {name!r} is {listed.size:,} in the directory and {size:,} before its content")
    behind = _read(file, entry.end, min(24, end - entry.end))
    for form, length in (("<4xIII", 16), ("<4xIQQ", 24)):
        whole = behind[:4] == DESCRIPTOR and len(behind) >= length
        if whole and struct.unpack_from(form, behind) == (listed.crc, listed.packed, listed.size):
            return entry, entry.end + length
    raise BadZip(f"the size of {name!r} is {listed.size:,} in the directory, and not what stands behind its content")


def _name(raw: bytes) -> str:
    """An entry's name, one that can't leave the folder that a program may unpack it to."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise BadZip(f"an entry's name is not UTF-8: {raw[:80]!a}") from None
    parts = name.split("/")
    if not name or len(name) > MAX_NAME or "\\" in name or "\0" in name or ".." in parts or parts[0] in ("", "."):
        raise BadZip(f"an entry's name is none that PyTorch gives: {name[:200]!r}")
    return name


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    """Bytes of the file; fewer where it has grown shorter meanwhile, which what reads them then finds."""
    file.seek(start)
    return file.read(size)
