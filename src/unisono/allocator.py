"""How the C library keeps the memory that a step frees.

A step frees all its activations and asks for the same again. By default glibc gives freed memory back to the
kernel above a small threshold, and every step pays for thousands of page faults.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # mallopt(3): what 64-bit systems accept


def keep_freed_memory() -> bool:
    """Make this process keep memory that it frees, for its next step; return whether the C library can.

    The process stays as large as it has ever been. Nothing else changes, no bit of any result.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    accepted = [
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD),
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1),
    ]
    return all(accepted)


def give_back_freed_memory() -> None:
    """Let the kernel have what was freed so far, after something large that won't be needed again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
