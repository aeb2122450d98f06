"""Reading datasets that can only be iterated, as M virtual shards that don't depend on who reads them.

A dataset that can be cut (``shard(num_shards, index)``) is cut into M shards, and micro-batch m of every batch
comes from shard m. Any other is iterated whole by everybody who reads it, who then keeps only his own.

What a reader is asked for says where it begins; a reader that is elsewhere goes there by iterating, under the
same random numbers as if it had been asked for all before. So any reader can take over from any other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from unisono.data.samples import Collate
from unisono.errors import UsageError
from unisono.grid import cut
from unisono.randomness import derive

SeedGenerators = Callable[[int], None]


class StreamTask(NamedTuple):
    """Micro-batches to read of one global batch."""

    epoch: int
    batch: int
    micro_batches: tuple[int, ...]


class Found(NamedTuple):
    """What was read: the number of samples of micro-batches that are now known, and the data of those asked for.

    Empty micro-batches have no data.
    """

    sizes: dict[int, int]
    data: dict[int, Any]


def is_stream(dataset: Any) -> bool:
    """Say whether `dataset` can be iterated, and neither be read by index nor be counted.

    A set is none: its order would differ between workers.
    """
    if isinstance(dataset, IterableDataset):  # inherits a __getitem__ that only raises
        return True
    return (
        hasattr(dataset, "__iter__")
        and not hasattr(dataset, "__getitem__")
        and not hasattr(dataset, "__len__")
    )


def check_stream(dataset: Any) -> None:
    """Raise a `UsageError` if `dataset` can be iterated only once, or is one worker's share of the data."""
    if hasattr(dataset, "__next__"):
        raise UsageError(
            f"a {type(dataset).__name__} can be iterated only once; expected an object of which __iter__() begins "
            f"a new epoch each time, such as a torch IterableDataset."
        )
    # What split_dataset_by_node of Hugging Face notes; everything else would look as if it went well.
    num_readers = getattr(getattr(dataset, "_distributed", None), "world_size", 1)
    if isinstance(num_readers, int) and num_readers > 1:
        raise UsageError(
            f"this {type(dataset).__name__} is the share of one of {num_readers} workers; expected the whole, which "
            f"the run shares out itself. Give the dataset as it was before split_dataset_by_node."
        )


def why_not_cut(dataset: Any, num_shards: int, batch_size: int) -> str | None:
    """Return why micro-batches can't each come from a shard of their own; None if they can."""
    if batch_size < num_shards:
        return f"batch_size={batch_size} leaves micro-batches, and so shards, without samples"
    if not callable(getattr(dataset, "shard", None)):
        return "it has no shard(num_shards, index)"
    for name in ("num_shards", "n_shards"):
        found = getattr(dataset, name, None)
        if isinstance(found, int):
            return (
                None
                if found >= num_shards
                else f"it has {found} shards, fewer than {num_shards} micro-batches"
            )
    return None


class Stream:
    """What both ways to read have in common. Final are `ShardedStream` and `WholeStream`.

    Args:
        dataset: has ``__iter__``; the same on every worker.
        collate_fn: list of samples -> data of a micro-batch; None for torch's `default_collate`.
        batch_size: samples in a full global batch.
        micro_batches: M, parts of a batch.
        seed: of the samples' random numbers; below 2**63.
    """

    def __init__(
        self, dataset: Any, collate_fn: Collate | None, *, batch_size: int, micro_batches: int, seed: int
    ) -> None:
        self._dataset = dataset
        self._collate: Collate = default_collate if collate_fn is None else collate_fn
        self._batch_size = batch_size
        self._micro_batches = micro_batches
        self._seed = seed

    def _collated(
        self, task: StreamTask, micro_batch: int, samples: list[Any], seed_generators: SeedGenerators
    ) -> Any:
        try:
            seed_generators(derive(self._seed, "collate", task.epoch, task.batch, micro_batch))
            return self._collate(samples)
        except Exception as error:
            error.add_note(
                f"while collating epoch {task.epoch}, batch {task.batch}, micro-batch {micro_batch}"
            )
            raise


class ShardedStream(Stream):
    """Reads micro-batch m from shard m; keeps open what it reads from."""

    knows_all_sizes = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._open: dict[int, _Reading] = {}

    def load(self, task: StreamTask, seed_generators: SeedGenerators) -> Found:
        """Return the micro-batches of a task. The caller restores the generators."""
        sizes, data = {}, {}
        for micro_batch in task.micro_batches:
            count = len(cut(self._batch_size, self._micro_batches)[micro_batch])
            start = task.batch * count
            samples = self._reading(task.epoch, micro_batch, start).read(start, count, seed_generators)
            sizes[micro_batch] = len(samples)
            if samples:
                data[micro_batch] = self._collated(task, micro_batch, samples, seed_generators)
        return Found(sizes, data)

    def keep_only(self, micro_batches: tuple[int, ...]) -> None:
        """Close the shards of all other micro-batches."""
        self._open = {m: reading for m, reading in self._open.items() if m in micro_batches}

    def _reading(self, epoch: int, shard: int, start: int) -> _Reading:
        reading = self._open.get(shard)
        if reading is None or reading.epoch != epoch or reading.position > start:
            reading = self._open[shard] = _Reading(self._shard(shard), self._seed, epoch, shard)
        return reading

    def _shard(self, index: int) -> Callable[[int], Any]:
        def begin(epoch: int) -> Any:
            whole = _in_epoch(self._dataset, epoch)
            return _in_epoch(whole.shard(self._micro_batches, index), epoch)

        return begin


class WholeStream(Stream):
    """Iterates everything and keeps the micro-batches asked for; so it knows the sizes of all."""

    knows_all_sizes = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._open: _Reading | None = None

    def load(self, task: StreamTask, seed_generators: SeedGenerators) -> Found:
        """Return the micro-batches of a task. The caller restores the generators."""
        start = task.batch * self._batch_size
        reading = self._open
        if reading is None or reading.epoch != task.epoch or reading.position > start:
            reading = self._open = _Reading(
                lambda epoch: _in_epoch(self._dataset, epoch), self._seed, task.epoch, 0
            )
        samples = reading.read(start, self._batch_size, seed_generators)
        parts = cut(len(samples), self._micro_batches)
        data = {
            m: self._collated(task, m, samples[parts[m].start : parts[m].stop], seed_generators)
            for m in task.micro_batches
            if parts[m]
        }
        return Found({m: len(part) for m, part in enumerate(parts)}, data)

    def keep_only(self, micro_batches: tuple[int, ...]) -> None:
        """Nothing to close: there is one stream."""


class _Reading:
    """One iterable being read, from its beginning."""

    def __init__(self, begin: Callable[[int], Any], seed: int, epoch: int, shard: int) -> None:
        self.epoch = epoch
        self.position = 0
        self._begin = begin
        self._seed = derive(seed, "stream", epoch, shard) >> 1
        self._shard = shard
        self._iterator: Iterator[Any] | None = None
        self._ended = False

    def read(self, start: int, count: int, seed_generators: SeedGenerators) -> list[Any]:
        """Return the samples from `start` on, fewer than `count` at the end. Those before are skipped."""
        samples: list[Any] = []
        with _without_worker_info():
            while self.position < start + count and not self._ended:
                before = self.position
                sample = self._next(seed_generators)
                if before >= start and not self._ended:
                    samples.append(sample)
        return samples

    def _next(self, seed_generators: SeedGenerators) -> Any:
        try:
            if self._iterator is None:
                seed_generators(derive(self._seed, "begin"))
                self._iterator = iter(self._begin(self.epoch))
            seed_generators(derive(self._seed, self.position))
            sample = next(self._iterator)
        except StopIteration:
            self._ended = True
            self._iterator = None
            return None
        except Exception as error:
            error.add_note(f"while reading sample {self.position} of shard {self._shard}, epoch {self.epoch}")
            raise
        self.position += 1
        return sample


def _in_epoch(dataset: Any, epoch: int) -> Any:
    """Return `dataset`, or a copy of it that was told the epoch if it wants to know."""
    if not callable(getattr(dataset, "set_epoch", None)):
        return dataset
    told = copy.copy(dataset)
    told.set_epoch(epoch)
    return told


@contextmanager
def _without_worker_info() -> Iterator[None]:
    """Hide from datasets that this is a loader process: they would share samples out a second time."""
    saved = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = saved
