"""Pages of mapped files, given back to the system once they have been read."""

import ctypes
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

Span = tuple[int, int]  # an address, and the one behind its last byte

DONTNEED = 4  # MADV_DONTNEED of Linux: a file's page is read again when it is looked at again


def span(tensor: Tensor) -> Span:
    """Where a contiguous tensor lies in memory."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def give_back(spans: Iterable[Span]) -> None:
    """Lets go of whole pages within the spans where they belong to a mapped file; what is no file's is left as it is.

    A page that somebody looks at again is read from the file again: what was written into it is gone. Does nothing but
    on Linux.
    """
    spans = list(spans)
    if not spans or not sys.platform.startswith("linux"):
        return
    files, advise = _mapped_files(), ctypes.CDLL(None).madvise
    for start, end in spans:
        start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and any(low <= start and end <= high for low, high in files):
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), DONTNEED)


def _mapped_files() -> list[Span]:
    """Where this process has files mapped."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, _, _, inode, *_ = line.split()
        if inode != "0":
            low, high = where.split("-")
            found.append((int(low, 16), int(high, 16)))
    return found
