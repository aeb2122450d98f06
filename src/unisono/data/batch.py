"""A global batch as one worker sees it: how all of it is cut, and the data of the worker's own parts."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from unisono.grid import Assignment


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """One global batch. Iterating yields ``(micro_batch, data)`` of this worker's non-empty parts, ascending.

    It can be iterated any number of times: a step that has to be done again finds its data.

    Args:
        epoch: the epoch it belongs to.
        index: its number within the epoch.
        assignment: who owns which micro-batch in this step.
        rank: this worker.
        sizes: samples in each micro-batch of the whole global batch; 0 for empty ones.
        nominal_weight: samples in a micro-batch of a full batch (batch_size / M; may be a fraction).
        data: micro-batch number -> its collated data on the host, for this worker's non-empty micro-batches.
        device: where iterating moves tensors to, one micro-batch at a time; None leaves them.
        digest: 63 bits that stand for which samples of which epoch the whole global batch has; the same on
            every worker.
    """

    epoch: int
    index: int
    assignment: Assignment
    rank: int
    sizes: tuple[int, ...]
    nominal_weight: float
    data: Mapping[int, Any]
    device: torch.device | None = None
    digest: int = 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for micro_batch in sorted(self.data):
            yield micro_batch, move(self.data[micro_batch], self.device)

    def __len__(self) -> int:
        """Number of samples of the global batch, over all workers."""
        return sum(self.sizes)

    def __repr__(self) -> str:
        return (
            f"Batch(epoch={self.epoch}, index={self.index}, {len(self)} samples in {len(self.sizes)} "
            f"micro-batches, rank {self.rank} holds {sorted(self.data)})"
        )


def batch_digest(seed: int, epoch: int, batch: int, numbers: Iterable[int]) -> int:
    """Return 63 bits that stand for a global batch: where it comes from and which samples it has. Pure.

    Some 8 us for 256 samples.

    Args:
        seed: of the loader; with the other numbers it decides what augmentation draws.
        numbers: indices of the samples in their order, below 2**63; or their counts, where they have no index.
    """
    message = array("q", (seed, epoch, batch))
    message.extend(numbers)
    return int.from_bytes(hashlib.blake2b(message.tobytes(), digest_size=8).digest(), "little") >> 1


def move(data: Any, device: torch.device | None) -> Any:
    """Return `data` with every tensor in it on `device`. For the CPU or None it is returned as it is.

    Looks into tuples, lists, dicts, namedtuples, dataclasses and objects with a ``to`` method of their own
    (torch's PackedSequence, BatchEncoding of transformers). Copies from pinned memory don't block.
    """
    if device is None or device.type == "cpu":
        return data
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if callable(getattr(data, "to", None)):
        return data.to(device)
    if isinstance(data, Mapping):
        moved = {key: move(value, device) for key, value in data.items()}
        return moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move(value, device) for value in data))
    if type(data) in (list, tuple):
        return type(data)(move(value, device) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = [field.name for field in dataclasses.fields(data) if field.init]
        return dataclasses.replace(data, **{name: move(getattr(data, name), device) for name in fields})
    return data
