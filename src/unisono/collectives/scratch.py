"""Memory that outlives a call, so that steps in their stride allocate nothing."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Flat tensors numbered by slot, which grow to the largest size ever asked for and are never cleared.

    One object serves one call at a time; what it lent is overwritten by the next call.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def take(self, slot: int, num_elements: int, *, like: Tensor) -> Tensor:
        """Return `num_elements` of undefined content, of the dtype and on the device of `like`."""
        key = (slot, like.dtype, like.device)
        flat = self._slots.get(key)
        if flat is None or flat.numel() < num_elements:
            flat = self._slots[key] = torch.empty(num_elements, dtype=like.dtype, device=like.device)
        return flat[:num_elements]

    @property
    def num_bytes(self) -> int:
        """How much memory is held."""
        return sum(flat.numel() * flat.element_size() for flat in self._slots.values())
