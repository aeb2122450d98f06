"""Memory that several processes of a host can see: files without a name, which are gone with their last holder."""

from __future__ import annotations

import os
from contextlib import suppress

import torch
from torch import Tensor


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


def map_memory(descriptor: int, num_bytes: int) -> Tensor:
    """Return the bytes of a file, uint8 [num_bytes]; shared with all who map it.

    By torch and not by `mmap`, which would hold a descriptor for each as long as the memory is used.

    Raises:
        OSError: it can't be mapped.
    """
    path = f"/proc/self/fd/{descriptor}"
    try:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).partition("\n")[0]) from error
