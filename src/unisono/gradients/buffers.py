"""What becomes of a module's buffers in a step that runs forward once for each micro-batch.

Every micro-batch starts from the buffers as they were at the start of the step. Afterwards

- running statistics of norm layers become the mean over the micro-batches that changed them, weighted like
  the loss and added in the order of the tree;
- other persistent buffers may change if they change equally in all micro-batches that change them
  (``num_batches_tracked`` does); if they differ, there is no right value, and that is an error;
- non-persistent buffers are caches, left as they are.

This file knows nothing of communication: it says what changed, and is told what to put in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

COMPARED_BYTES = 2**16


@dataclass
class _Entry:
    """One persistent buffer: where it lives, what it was at the start of the step, and how to tell a change.

    `original` is the tensor itself, `saved` a copy of its value then.
    """

    name: str
    module: nn.Module
    key: str
    averaged: bool
    original: Tensor
    saved: Tensor
    seen_version: int

    @property
    def tensor(self) -> Tensor:
        buffer = self.module._buffers[self.key]
        assert buffer is not None
        return buffer

    @property
    def has_changed(self) -> bool:
        """Whether the buffer is another tensor or was written.

        A version that counts on is a quick sign of it. Batch norm's kernels and writes through ``.data`` don't
        count, so values are compared, which reads both; not those of large tables, which nobody writes so.
        """
        tensor = self.tensor
        if tensor is not self.original or tensor._version != self.seen_version:
            return True
        if not self.averaged and tensor.nbytes > COMPARED_BYTES:
            return False
        return not _is_alike(tensor, self.saved) or not torch.equal(tensor, self.saved)

    def remember(self) -> None:
        """Take what the buffer is now for what it was at the start of the step."""
        self.original = self.tensor
        self.saved = self.original.detach().clone()
        self.seen_version = self.original._version

    def restore(self) -> None:
        """Make the buffer what it was, and the same tensor. What the model put in its place is left alone."""
        if not _is_alike(self.original, self.saved):
            self.original = self.saved.clone()
        elif not torch.equal(self.original, self.saved):
            self.original.copy_(self.saved)
        self.module._buffers[self.key] = self.original
        self.seen_version = self.original._version


@dataclass(frozen=True)
class BufferChanges:
    """What one micro-batch did to the buffers.

    Args:
        averaged: the new value of each averaged buffer, None where it did not change.
        digests: a 63-bit digest of the new value of each other buffer, 0 where it did not change.
    """

    averaged: tuple[Tensor | None, ...]
    digests: tuple[int, ...]


class BufferKeeper:
    """Keeps the persistent buffers of `model` consistent while micro-batches run one after the other."""

    def __init__(self, model: nn.Module) -> None:
        entries = list(_entries(model))
        self._averaged = [entry for entry in entries if entry.averaged]
        self._others = [entry for entry in entries if not entry.averaged]
        self._entries = self._averaged + self._others
        self._changed_values: dict[str, Tensor] = {}

    @property
    def averaged(self) -> list[Tensor]:
        """The running statistics, in a fixed order."""
        return [entry.tensor for entry in self._averaged]

    @property
    def averaged_names(self) -> list[str]:
        return [entry.name for entry in self._averaged]

    @property
    def other_names(self) -> list[str]:
        return [entry.name for entry in self._others]

    def begin(self) -> None:
        """Remember the values at the start of a step; copies only those that changed since the last call."""
        self._changed_values = {}
        for entry in self._entries:
            if entry.has_changed:
                entry.remember()

    def restore(self) -> None:
        """Put back the values of the start of the step."""
        with torch.no_grad():
            for entry in self._entries:
                if entry.has_changed:
                    entry.restore()

    def harvest(self) -> BufferChanges:
        """Say what the micro-batch that just ran changed."""
        averaged = tuple(
            entry.tensor.detach().clone() if entry.has_changed else None for entry in self._averaged
        )
        digests = []
        for entry in self._others:
            if not entry.has_changed:
                digests.append(0)
                continue
            value = entry.tensor.detach()
            digests.append(_digest(value))
            self._changed_values.setdefault(entry.name, value.clone())
        return BufferChanges(averaged, tuple(digests))

    def other(self, index: int) -> Tensor:
        """Return the other buffer number `index` as it is now."""
        return self._others[index].tensor

    def changed_value(self, index: int) -> Tensor | None:
        """Return the value that an own micro-batch gave the other buffer number `index`."""
        return self._changed_values.get(self._others[index].name)

    def put_averaged(self, index: int, value: Tensor) -> None:
        """Set the averaged buffer number `index`. In place."""
        with torch.no_grad():
            self._averaged[index].tensor.copy_(value)

    def put_other(self, index: int, value: Tensor) -> None:
        """Set the other buffer number `index`, whatever its shape was before."""
        entry = self._others[index]
        with torch.no_grad():
            if _is_alike(entry.tensor, value):
                entry.tensor.copy_(value)
            else:
                entry.module._buffers[entry.key] = value.clone()


def _entries(model: nn.Module) -> Iterator[_Entry]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            averaged = isinstance(module, _NormBase) and buffer.is_floating_point()
            name = f"{prefix}.{key}" if prefix else key
            yield _Entry(name, module, key, averaged, buffer, buffer.detach().clone(), buffer._version)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _digest(value: Tensor) -> int:
    """Return a non-zero 63-bit digest of dtype, shape and bytes."""
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(f"{value.dtype}{tuple(value.shape)}".encode(), digest_size=8)
    digest.update(content.tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1 | 1
