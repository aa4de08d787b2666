"""Pages of mapped files, given back to the system once they have been read."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

Span = tuple[int, int]  # an address, and the one behind its last byte

DONTNEED = 4  # MADV_DONTNEED of Linux: a file's page is read again when it is looked at again


def span(tensor: Tensor) -> Span:
    """Where a contiguous tensor lies in memory."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def mapped(file: Path) -> list[Span]:
    """Where this process has a file mapped. Nowhere but on Linux."""
    if not sys.platform.startswith("linux"):
        return []
    found, name = [], os.fsencode(file.resolve())  # bytes: a name need not be text
    for line in Path("/proc/self/maps").read_bytes().split(b"\n"):
        where, *_, path = line.split(maxsplit=5) if line else (b"", b"")
        if path == name:
            low, high = where.split(b"-")
            found.append((int(low, 16), int(high, 16)))
    return found


def give_back(at: Span, file: Iterable[Span]) -> None:
    """Lets go of the whole pages there, where they lie in what `mapped` gave; what is no file's is left as it is.

    A page that somebody looks at again is read from the file again: what was written into it is gone.
    """
    start, end = -(-at[0] // mmap.PAGESIZE) * mmap.PAGESIZE, at[1] // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and any(low <= start and end <= high for low, high in file):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), DONTNEED)
