"""Clipping by the norm of the whole reduced gradient, the same bits whoever computes which part.

Sums of squares are formed over blocks of 4,096 elements from each parameter's start; the blocks are then
added exactly (Shewchuk's algorithm, `math.fsum`), so that neither their order nor a cut between blocks
matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

NORM_BLOCK = 4096


def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all `gradients` together. Reads each once; of sparse ones what they store."""
    gradients = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    blocks = _sums_of_squares(gradients)
    if not all(map(math.isfinite, blocks)):
        # The square of a finite number may be too large for float32. Rare, so only then a wider type.
        blocks = _sums_of_squares([gradient.to(_wide(gradient)) for gradient in gradients])
    return math.sqrt(math.fsum(blocks)) if all(map(math.isfinite, blocks)) else math.nan


def clip_by_norm(gradients: list[Tensor], max_norm: float) -> float:
    """Scale `gradients` so that their common norm is at most `max_norm`. In place.

    Returns:
        The norm before clipping; nan if any gradient isn't finite, and then nothing is scaled.
    """
    norm = gradient_norm(gradients)
    if norm > max_norm:
        parts = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        torch._foreach_mul_(parts, max_norm / (norm + 1e-6))
    return norm


def clip_by_value(gradients: list[Tensor], limit: float) -> None:
    """Limit every element to `limit` in magnitude, real and imaginary parts each. In place."""
    parts = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    if parts:
        torch._foreach_clamp_min_(parts, -limit)
        torch._foreach_clamp_max_(parts, limit)


def _sums_of_squares(gradients: Iterable[Tensor]) -> list[float]:
    """Return the sums of squares of the blocks of all gradients, in order."""
    sums = [part.double() for gradient in gradients for part in _block_sums(gradient)]
    blocks: list[float] = torch.cat(sums).tolist() if sums else []
    return blocks


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.complex128 if gradient.is_complex() else torch.float64


def _block_sums(gradient: Tensor) -> list[Tensor]:
    """Return the sums of squares of the blocks of one gradient, as 1-D tensors."""
    flat = _flat(gradient)
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    whole = flat.numel() // NORM_BLOCK * NORM_BLOCK
    body = flat[:whole].view(-1, NORM_BLOCK)
    tail = flat[whole:]
    return [body.square().sum(1), tail.square().sum().reshape(1)]


def _flat(gradient: Tensor) -> Tensor:
    """Return the elements in the order in which they lie in memory, without a copy where they are dense."""
    if gradient.is_contiguous():
        return gradient.view(-1)
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    return gradient.permute(order).reshape(-1)
