"""Memory that several processes of a host can see: files without a name, which are gone with their last holder."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

_PAGEMAP = "/proc/self/pagemap"
_ENTRY_BYTES = 8
_PRESENT_OR_SWAPPED, _OF_A_FILE = 3 << 62, 1 << 61
_DROP_PAGES = 4  # MADV_DONTNEED


class Descriptor:
    """A file descriptor that is closed once nobody needs it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.number)


def new_memory(num_bytes: int) -> tuple[Descriptor, Tensor]:
    """Return a new file of zeros and its bytes, uint8 [num_bytes], `num_bytes` at least 1.

    The tensor keeps the memory alive, here; the descriptor is for handing it on.

    Raises:
        OSError: the system gives no such file.
    """
    descriptor = Descriptor(os.memfd_create("unisono", os.MFD_CLOEXEC))
    os.ftruncate(descriptor.number, num_bytes)
    return descriptor, map_memory(descriptor.number, num_bytes)


def map_memory(descriptor: int, num_bytes: int, *, shared: bool = True) -> Tensor:
    """Return the bytes of a file, uint8 [num_bytes].

    By torch and not by `mmap`, which would hold a descriptor for each as long as the memory is used.

    Args:
        shared: whether all who map it see what is written here; else only this process does.

    Raises:
        OSError: it can't be mapped.
    """
    path = f"/proc/self/fd/{descriptor}"
    try:
        return torch.from_file(path, shared=shared, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).partition("\n")[0]) from error


class CommonMemory:
    """Memory of all workers of a host, as one of them sees it, twice.

    Attributes:
        shared: uint8. What is written here all see.
        own: uint8, of the same size. Shows what is in `shared`, but for pages that this process has written to
            through `own`: those are copies, which nobody else sees and which follow no more until `drop_written`.

    Raises:
        OSError: it can't be mapped.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.shared = map_memory(descriptor, num_bytes)
        self.own = map_memory(descriptor, num_bytes, shared=False)

    def written_pages(self) -> list[int]:
        """Return the numbers of the pages of `own` that were written to. Costs 10 us a MB."""
        num_pages = -(-self.own.numel() // page_bytes())
        entries = bytearray(num_pages * _ENTRY_BYTES)
        with open(_PAGEMAP, "rb", buffering=0) as table:
            offset = self.own.data_ptr() // page_bytes() * _ENTRY_BYTES
            if os.preadv(table.fileno(), [entries], offset) != len(entries):
                raise OSError(f"{_PAGEMAP} has no entries for memory that is mapped")
        states = torch.frombuffer(entries, dtype=torch.int64)
        is_copy = ((states & _signed(_PRESENT_OR_SWAPPED)) != 0) & ((states & _OF_A_FILE) == 0)
        return is_copy.nonzero().flatten().tolist() if is_copy.any() else []

    def drop_written(self) -> None:
        """Let `own` show all of `shared` again."""
        libc = ctypes.CDLL(None, use_errno=True)
        address, size = ctypes.c_void_p(self.own.data_ptr()), ctypes.c_size_t(self.own.numel())
        if libc.madvise(address, size, _DROP_PAGES) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"madvise: {os.strerror(number)}")


@cache
def can_tell_written_pages() -> bool:
    """Say whether this system can give a `CommonMemory` and tells which of its pages were written. Tries it."""
    if sys.platform != "linux":
        return False
    try:
        descriptor, _ = new_memory(2 * page_bytes())
        memory = CommonMemory(descriptor.number, 2 * page_bytes())
        memory.shared[0] = memory.shared[-1] = 1
        seen = int(memory.own[0])
        memory.own[-1] = 2
        found = memory.written_pages()
        memory.drop_written()
        return [seen, found, int(memory.own[-1])] == [1, [1], 1] and not memory.written_pages()
    except OSError:
        return False


@cache
def page_bytes() -> int:
    """Return the size of a page of memory."""
    return os.sysconf("SC_PAGE_SIZE")


def _signed(bits: int) -> int:
    """Return 64 bits as int64 has them. Pure."""
    return bits - (1 << 64) if bits >= 1 << 63 else bits
