"""The loader of what can only be iterated: global batches of as many samples as the streams still have.

How large a batch is turns out when it is read. Where micro-batches come from shards, no worker sees those of
the others, so the sizes are exchanged once a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Unpack

import torch
from torch import Tensor

from unisono.data.batch import Batch, batch_digest
from unisono.data.epochs import Cursor, EpochLoader, EpochLoop, Options
from unisono.data.order import check_batch_size
from unisono.data.samples import Collate
from unisono.data.stream import Found, ShardedStream, StreamTask, WholeStream, check_stream, why_not_cut
from unisono.errors import UsageError
from unisono.grid import Assignment
from unisono.randomness import keyed

Exchange = Callable[[Tensor, str], None]


class StreamLoader(EpochLoader):
    """Iterate over global batches of a dataset that can only be iterated; see `EpochLoader`.

    *Collective: every rank calls this, in the same order*, where the dataset offers ``shard(num_shards, index)``
    and has at least `micro_batches` of them: each ``next()`` of a loop then waits for the other workers. An epoch
    ends when all shards have ended; one that ends earlier gives empty micro-batches. Any other dataset is
    iterated whole on every worker.

    A loop that goes on in mid-epoch, and a worker that is given other micro-batches, skip by iterating.

    Args:
        dataset: a new iteration is a new epoch; ``set_epoch(epoch)`` of a copy is called before, if it exists.
        batch_size: samples in a full global batch, over all workers.
        drop_last: leave out what doesn't fill a global batch; of shards, all after the first one has ended.
        collate_fn: list of samples -> data of a micro-batch; None for torch's `default_collate`.
        exchange: called with a table of integers, int64, one row for each micro-batch, of which those of other
            workers are zero, and with what it is for; fills the table in. *Collective.*
        notify: told in one line what the user should know.
        options: see `EpochLoader`.

    Raises:
        UsageError: anything above can't be used; no process was started.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        exchange: Exchange,
        notify: Callable[[str], None] = lambda line: None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        check_stream(dataset)
        check_batch_size(batch_size)
        if collate_fn is not None and not callable(collate_fn):
            raise UsageError(f"collate_fn={collate_fn!r}: expected a function or None.")
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.exchange = exchange
        self.notify = notify
        reason = why_not_cut(dataset, self.micro_batches, batch_size)
        self.source: ShardedStream | WholeStream = (ShardedStream if reason is None else WholeStream)(
            dataset, collate_fn, batch_size=batch_size, micro_batches=self.micro_batches, seed=self.seed
        )
        if reason is not None:
            notify(
                f"{self.name}: {type(dataset).__name__} can't be cut ({reason}), so every worker and every loader "
                f"process iterates all of it and keeps its own."
            )

    def __len__(self) -> int:
        raise TypeError(
            f"loader {self.name!r} reads a stream: its number of batches is not known before its end"
        )

    def _begin(self, cursor: Cursor) -> EpochLoop:
        return _StreamLoop(self, cursor)

    def _facts(self) -> dict[str, int]:
        return {"batch_size": self.batch_size, "micro_batches": self.micro_batches}

    def _check_cursor(self, cursor: Cursor) -> None:
        """Every place may exist."""


class _StreamLoop(EpochLoop):
    """One loop over a stream."""

    def __init__(self, loader: StreamLoader, cursor: Cursor) -> None:
        super().__init__(loader, cursor)
        self._loader = loader
        # What is being read ahead: decided anew when other micro-batches become this worker's.
        self._own: tuple[int, ...] | None = None

    def _load(self) -> Batch | None:
        loader, cursor = self._loader, self._cursor
        assignment = loader.assignment(cursor.step)
        self._turn_to(assignment.micro_batches(loader.rank))
        found = self._read()
        sizes = self._sizes(found)
        if not sum(sizes) or (loader.drop_last and sum(sizes) < loader.batch_size):
            self._end(sizes)
            return None
        return self._batch(assignment, sizes, found)

    def _batch(self, assignment: Assignment, sizes: tuple[int, ...], found: Found) -> Batch:
        loader, (epoch, batch, _) = self._loader, self._cursor
        return Batch(
            epoch=epoch,
            index=batch,
            assignment=assignment,
            rank=loader.rank,
            sizes=sizes,
            nominal_weight=loader.batch_size / loader.micro_batches,
            data=found.data,
            device=loader.device,
            digest=batch_digest(loader.seed, epoch, batch, sizes),
        )

    def _turn_to(self, own: tuple[int, ...]) -> None:
        """Read these micro-batches from the cursor on, if it isn't them that are being read."""
        loader = self._loader
        if own == self._own:
            return
        self._own = own
        loader.source.keep_only(own)
        processes, self._processes = self._processes, None
        if processes is not None:
            loader.release(processes)
        per_batch = len(own) if isinstance(loader.source, ShardedStream) else None
        num_workers = _num_processes(loader.num_workers, per_batch)
        if num_workers:
            tasks = _tasks(self._cursor, own, one_by_one=per_batch is not None)
            self._processes = loader.start(loader.source, tasks, num_workers)

    def _read(self) -> Found:
        """Return what this worker finds of the batch at the cursor."""
        loader, (epoch, batch, _), own = self._loader, self._cursor, self._own
        assert own is not None
        if self._processes is None:
            with keyed(loader.device) as seed_generators:
                return loader.source.load(StreamTask(epoch, batch, own), seed_generators)
        if loader.source.knows_all_sizes:
            whole: Found = next(self._processes)
            return whole
        found = Found({}, {})
        for _ in own:
            sizes, data = next(self._processes)
            found.sizes.update(sizes)
            found.data.update(data)
        return found

    def _sizes(self, found: Found) -> tuple[int, ...]:
        """Return the number of samples of every micro-batch. *Collective* if no worker knows them all."""
        loader = self._loader
        if loader.source.knows_all_sizes:
            return tuple(found.sizes.values())
        table = torch.zeros(loader.micro_batches, 1, dtype=torch.int64)
        for micro_batch, size in found.sizes.items():
            table[micro_batch] = size
        loader.exchange(table, f"exchange of sizes of batch {self._cursor.batch} of {loader.name}")
        return tuple(table.flatten().tolist())

    def _end(self, rest: tuple[int, ...]) -> None:
        """Say what an epoch leaves out; refuse one of nothing. The same on every worker."""
        loader, (epoch, batch, _) = self._loader, self._cursor
        if not batch:
            raise UsageError(
                f"loader {loader.name!r}: epoch {epoch} has no batch: the stream gave {sum(rest)} samples, with "
                f"batch_size={loader.batch_size} and drop_last={loader.drop_last}."
            )
        if sum(rest):
            loader.notify(
                f"{loader.name}: epoch {epoch} ends after {batch} batches, the next one would have been short "
                f"(samples of each micro-batch: {list(rest)}); what is left is dropped (drop_last=True)."
            )


def _num_processes(wanted: int, per_batch: int | None) -> int:
    """Return how many loader processes to start.

    Tasks go to processes in turn. With `per_batch` shards, one task each in every batch, a shard stays with one
    process if their number is a multiple of that of the processes.
    """
    if per_batch is None:
        return wanted
    return max((n for n in range(1, wanted + 1) if per_batch and per_batch % n == 0), default=0)


def _tasks(cursor: Cursor, own: tuple[int, ...], *, one_by_one: bool) -> Iterator[StreamTask]:
    """Yield what is to be read from `cursor` on; without end, for nobody knows it."""
    for batch in count(cursor.batch):
        if one_by_one:
            yield from (StreamTask(cursor.epoch, batch, (micro_batch,)) for micro_batch in own)
        else:
            yield StreamTask(cursor.epoch, batch, own)
