"""Where each parameter's gradient lies in a few flat buffers, the buckets.

Layouts are pure data. Which bucket a parameter is in changes no bit of the result, since reduction is
elementwise; it decides how early communication can start and how many messages a step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Slot:
    """One tensor's place in a bucket: `index` into the list of tensors, `offset` in elements."""

    index: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """Return this slot of `flat`, shaped and laid out in memory like the tensor itself."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class Bucket:
    """A flat buffer for several tensors of one dtype on one device."""

    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    num_elements: int


def plan_buckets(
    tensors: Sequence[Tensor],
    *,
    order: Iterable[int] | None = None,
    bucket_bytes: int,
    first_bucket_bytes: int,
    float32_sums: bool = False,
) -> tuple[Bucket, ...]:
    """Distribute `tensors` over buckets, in `order` (last to first by default, as backward reaches them).

    With `float32_sums` those of 16 bits lie in buckets of float32.

    A bucket is closed when it has reached its size; each dtype and device fills buckets of its own, and the
    first bucket of each is small so that communication can start early. Pure.
    """
    indices = reversed(range(len(tensors))) if order is None else order
    open_slots: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    buckets: list[Bucket] = []

    def close(key: tuple[torch.dtype, torch.device]) -> None:
        buckets.append(Bucket(*key, tuple(open_slots.pop(key)), sizes.pop(key)))
        limits[key] = bucket_bytes

    for index in indices:
        tensor = tensors[index]
        key = (sum_dtype(tensor, float32_sums=float32_sums), tensor.device)
        item_bytes = key[0].itemsize
        offset = sizes.get(key, 0)
        open_slots.setdefault(key, []).append(Slot(index, offset, tensor.shape, _dense_stride(tensor)))
        align = max(1, ALIGNMENT_BYTES // item_bytes)
        sizes[key] = -(-(offset + tensor.numel()) // align) * align
        if sizes[key] * item_bytes >= limits.get(key, first_bucket_bytes):
            close(key)
    for key in list(open_slots):
        close(key)
    return tuple(buckets)


def sum_dtype(tensor: Tensor, *, float32_sums: bool) -> torch.dtype:
    """Return the dtype in which gradients of `tensor` are added up."""
    return torch.float32 if float32_sums and tensor.dtype in HALVES else tensor.dtype


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if its elements fill memory without gaps, else contiguous ones."""
    return torch.empty_like(tensor, device="meta").stride()
