"""What becomes of a module's buffers in a step that runs forward once for each micro-batch.

Every micro-batch starts from the buffers as they were at the start of the step. Afterwards

- buffers for which the user declared a policy follow it, whether persistent or not;
- running statistics of torch's norm layers become the mean over the micro-batches that changed them, weighted
  like the loss and added in the order of the tree, as if ``"mean"`` were declared;
- other persistent buffers may change if they change equally in all micro-batches that change them
  (``num_batches_tracked`` does); if they differ, there is no right value, and that is an error;
- other non-persistent buffers are caches, left as they are.

This file knows nothing of communication: it says what changed, and is told what to put in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unisono.errors import UsageError
from unisono.gradients.buffer_policies import BufferPolicy, Declared, combine, policies_of

AGREE = "agree"
"""The rule for what nothing is declared about."""
COMPARED_BYTES = 2**16


@dataclass
class _Entry:
    """One buffer: where it lives, what it was at the start of the step, and how to tell a change.

    `original` is the tensor itself, `saved` a copy of its value then.
    """

    name: str
    module: nn.Module
    key: str
    policy: BufferPolicy
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
        count, so values are compared, which reads both; not those of large tables, which nobody writes so
        without declaring a policy.
        """
        tensor = self.tensor
        if tensor is not self.original or tensor._version != self.seen_version:
            return True
        if self.policy == AGREE and tensor.nbytes > COMPARED_BYTES:
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
        digests: for each other buffer 0 where it did not change; else a 63-bit digest of the new value where all
            must agree, and 1 where a policy is declared.
    """

    averaged: tuple[Tensor | None, ...]
    digests: tuple[int, ...]


Others = Sequence[tuple[str, nn.Module, Declared]]


class BufferKeeper:
    """Keeps the buffers of `model` consistent while micro-batches run one after the other.

    Args:
        declared: the user's policies by names or patterns; what matches nothing is ignored here.
        others: models that a loss function may run too, with a prefix for names of their buffers, and the policies
            declared for them.
    """

    def __init__(self, model: nn.Module, declared: Declared | None = None, others: Others = ()) -> None:
        found: dict[int, _Entry] = {}
        for place, each, policies in (("", model, declared or {}), *others):
            for entry in _entries(each, policies_of(each, policies)):
                entry.name = place + entry.name
                found.setdefault(id(entry.original), entry)
        entries = list(found.values())
        self._averaged = [entry for entry in entries if entry.policy == "mean"]
        self._others = [entry for entry in entries if entry.policy != "mean"]
        self._entries = self._averaged + self._others
        self._put: list[_Entry] = []
        self._values: list[dict[int, Tensor]] = [{} for _ in self._others]

    @property
    def averaged(self) -> list[Tensor]:
        """Running statistics and others that are averaged, in a fixed order."""
        return [entry.tensor for entry in self._averaged]

    @property
    def averaged_names(self) -> list[str]:
        return [entry.name for entry in self._averaged]

    @property
    def other_names(self) -> list[str]:
        return [entry.name for entry in self._others]

    def begin(self) -> dict[str, Tensor]:
        """Remember the values at the start of a step; copies only those that changed since the last call.

        Returns:
            Those that something else than a step has written since, by name.
        """
        self.forget_values()
        written: dict[str, Tensor] = {}
        for entry in self._entries:
            if entry.has_changed:
                entry.remember()
                written[entry.name] = entry.saved
        return written

    def settle(self) -> None:
        """Take what the step has put in place for how buffers should be found at the start of the next one."""
        for entry in self._put:
            entry.remember()
        self._put = []

    def forget_values(self) -> None:
        """Drop what micro-batches gave buffers so far."""
        for values in self._values:
            values.clear()

    def restore(self) -> None:
        """Put back the values of the start of the step."""
        with torch.no_grad():
            for entry in self._entries:
                if entry.has_changed:
                    entry.restore()

    def harvest(self, micro_batch: int = 0) -> BufferChanges:
        """Say what `micro_batch`, which just ran, changed. Own micro-batches come in ascending order.

        Raises:
            UsageError: a buffer that is to be averaged has another shape, dtype or device than before.
        """
        averaged = tuple(_new_value(entry) if entry.has_changed else None for entry in self._averaged)
        digests = []
        for entry, values in zip(self._others, self._values, strict=True):
            if not entry.has_changed:
                digests.append(0)
                continue
            value = entry.tensor.detach()
            digests.append(_digest(value) if entry.policy == AGREE else 1)
            if entry.policy == "last":
                values.clear()
            elif entry.policy in (AGREE, "first") and values:
                continue
            values[micro_batch] = value.clone()
        return BufferChanges(averaged, tuple(digests))

    def policy(self, index: int) -> BufferPolicy:
        """Return the policy of the other buffer number `index`."""
        return self._others[index].policy

    def needed(self, index: int, changers: Sequence[int]) -> list[int]:
        """Return those of the micro-batches that changed the other buffer number `index` whose values decide."""
        policy = self._others[index].policy
        if policy in (AGREE, "first"):
            return [min(changers)]
        return [max(changers)] if policy == "last" else sorted(changers)

    def values(self, index: int) -> Mapping[int, Tensor]:
        """Return the deciding values that own micro-batches gave the other buffer number `index`."""
        return self._values[index]

    def decide(self, index: int, values: Mapping[int, Tensor], weights: Sequence[float]) -> Tensor:
        """Return the value of the other buffer number `index` after the step, by its policy.

        To be called once the values of the start of the step are in place again.

        Args:
            values: of the micro-batches that `needed` named.
            weights: of all micro-batches.
        """
        entry = self._others[index]
        placed = {number: value.to(entry.tensor.device) for number, value in values.items()}
        if entry.policy in (AGREE, "first", "last"):
            (value,) = placed.values()
            return value
        with torch.no_grad():
            return combine(entry.name, entry.policy, entry.tensor.detach(), placed, weights)

    def put_averaged(self, index: int, value: Tensor) -> None:
        """Set the averaged buffer number `index`. In place."""
        entry = self._averaged[index]
        with torch.no_grad():
            entry.tensor.copy_(value)
        self._put.append(entry)

    def put_other(self, index: int, value: Tensor) -> None:
        """Set the other buffer number `index`, whatever its shape was before."""
        entry = self._others[index]
        with torch.no_grad():
            if _is_alike(entry.tensor, value):
                entry.tensor.copy_(value)
            else:
                entry.module._buffers[entry.key] = value.clone()
        self._put.append(entry)


def _entries(model: nn.Module, declared: Mapping[int, BufferPolicy]) -> Iterator[_Entry]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen:
                continue
            if id(buffer) not in declared and key in module._non_persistent_buffers_set:
                continue
            seen.add(id(buffer))
            # Those of SyncBatchNorm are over all workers already.
            own = isinstance(module, _NormBase) and not isinstance(module, nn.SyncBatchNorm)
            is_statistic = own and buffer.is_floating_point()
            policy = declared.get(id(buffer), "mean" if is_statistic else AGREE)
            name = f"{prefix}.{key}" if prefix else key
            yield _Entry(name, module, key, policy, buffer, buffer.detach().clone(), buffer._version)


def _new_value(entry: _Entry) -> Tensor:
    value = entry.tensor.detach()
    if not _is_alike(value, entry.saved):
        raise UsageError(
            f"a micro-batch made buffer {entry.name!r} {value.dtype} {list(value.shape)} on {value.device}, it was "
            f"{entry.saved.dtype} {list(entry.saved.shape)} on {entry.saved.device}: 'mean' needs a buffer that "
            f"stays as it is; declare 'first', 'last' or a function for it."
        )
    return value.clone()


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _digest(value: Tensor) -> int:
    """Return a non-zero 63-bit digest of dtype, shape and bytes."""
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(f"{value.dtype}{tuple(value.shape)}".encode(), digest_size=8)
    digest.update(content.tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1 | 1
