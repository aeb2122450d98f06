"""How the elements of a tensor lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in some order."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda each: each[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order in which they lie in memory. A view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def laid_out_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return `tensor` with its elements in the order in which those of `other` lie in memory."""
    if tensor.stride() == other.stride():
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype).copy_(tensor)


def padded(num_bytes: int, alignment: int = 64) -> int:
    """Return the next multiple of `alignment` bytes. Pure."""
    return -(-num_bytes // alignment) * alignment
