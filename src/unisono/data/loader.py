"""The loader of what is read by index: global batches, of which this worker loads only its own parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Unpack

from unisono.data.batch import Batch, batch_digest
from unisono.data.epochs import Cursor, EpochLoader, EpochLoop, Options
from unisono.data.order import Selection
from unisono.data.samples import Collate, Samples, Task
from unisono.errors import UsageError
from unisono.grid import Assignment, cut


class Loader(EpochLoader):
    """Iterate over global batches of a dataset that is read by index; see `EpochLoader`.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; the same on every worker.
        batch_size: samples in a global batch, over all workers; left out with a `batch_sampler`.
        shuffle: a new order every epoch; else the dataset's own.
        drop_last: leave out the short batch at the end of an epoch.
        sampler: yields the indices of an epoch, for all workers; see `unisono.data.samplers`.
        batch_sampler: yields lists of indices, the global batches of an epoch.
        collate_fn: list of samples -> data of a micro-batch; None for torch's `default_collate`.
        options: see `EpochLoader`.

    Raises:
        UsageError: anything above can't be used; no process was started.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        collate_fn: Collate | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.samples = Samples(dataset, collate_fn, self.seed)
        selection = Selection(batch_size, shuffle, drop_last, sampler, batch_sampler)
        self.order = selection.order(len(dataset), seed=self.seed, device=self.device)

    def __len__(self) -> int:
        """Number of global batches in the current epoch."""
        return self.order.num_batches(self.epoch)

    @property
    def batch_size(self) -> int | None:
        """Samples in a full global batch; None where a batch sampler says."""
        return self.order.batch_size

    def _begin(self, cursor: Cursor) -> EpochLoop:
        num_batches = self.order.num_batches(cursor.epoch)
        self._check_batch(cursor, num_batches)
        return _Loop(self, cursor, num_batches)

    def _facts(self) -> dict[str, int]:
        return {"num_samples": self.order.num_samples, "batch_size": self.batch_size or 0}

    def _check_cursor(self, cursor: Cursor) -> None:
        # A sampler may depend on what is only restored after this loader; its epochs are checked when begun.
        if not self.order.varies:
            self._check_batch(cursor, self.order.num_batches(cursor.epoch))

    def _check_batch(self, cursor: Cursor, num_batches: int) -> None:
        if cursor.batch > num_batches:
            raise UsageError(
                f"loader {self.name!r}: epoch {cursor.epoch}, batch {cursor.batch} is no place in an epoch of "
                f"{num_batches} batches."
            )

    def cut(self, cursor: Cursor) -> _Cut:
        """Return how a batch is cut and what of it is this worker's, by the plan as it stands now."""
        epoch, batch, _ = cursor
        assignment = self.assignment(cursor.step)
        indices = self.order.indices(epoch, batch)
        parts = cut(len(indices), self.micro_batches)
        position = self.order.position(epoch, batch)
        own = {
            number: Task(epoch, batch, number, position + part.start, indices[part.start : part.stop])
            for number in assignment.micro_batches(self.rank)
            if (part := parts[number])
        }
        digest = batch_digest(self.seed, epoch, batch, indices)
        return _Cut(assignment, tuple(len(part) for part in parts), own, digest)


class _Cut(NamedTuple):
    """A global batch before it is loaded."""

    assignment: Assignment
    sizes: tuple[int, ...]
    own: dict[int, Task]  # micro-batch -> task; non-empty ones, ascending
    digest: int


class _Loop(EpochLoop):
    """One loop over a loader."""

    def __init__(self, loader: Loader, cursor: Cursor, num_batches: int) -> None:
        super().__init__(loader, cursor)
        self._loader = loader
        self._num_batches = num_batches
        # What the processes were given, in order, and have not yet handed back.
        self._dispatched: deque[Task] = deque()
        if loader.num_workers and cursor.batch < num_batches:
            tasks = _dispatch(loader, cursor, num_batches, self._dispatched)
            self._processes = loader.start(loader.samples, tasks, loader.num_workers)

    def _load(self) -> Batch | None:
        loader, cursor = self._loader, self._cursor
        if cursor.batch == self._num_batches:
            return None
        assignment, sizes, own, digest = loader.cut(cursor)
        data = self._collect() if self._processes is not None else {}
        # Those that moved here after the processes had been given this batch; without processes, all.
        missing = [task for number, task in own.items() if number not in data]
        data.update(loader.samples.load_here(missing, loader.device))
        return Batch(
            epoch=cursor.epoch,
            index=cursor.batch,
            assignment=assignment,
            rank=loader.rank,
            sizes=sizes,
            nominal_weight=(loader.batch_size or sum(sizes)) / loader.micro_batches,
            data={number: data[number] for number in own},
            device=loader.device,
            digest=digest,
        )

    def _collect(self) -> dict[int, Any]:
        """Take from the processes what they were given of this batch, wanted or not."""
        assert self._processes is not None
        data = {}
        while self._dispatched and self._dispatched[0].batch == self._cursor.batch:
            data[self._dispatched.popleft().micro_batch] = next(self._processes)
        return data


def _dispatch(loader: Loader, cursor: Cursor, num_batches: int, dispatched: deque[Task]) -> Iterator[Task]:
    """Yield this worker's tasks from `cursor` to the end of the epoch, and note them in `dispatched`.

    A function of its own, not a method of the loop: the loop must not be part of a reference cycle, so that
    a ``break`` ends the processes at once. A batch of which nothing is this worker's yields an empty task,
    which keeps the processes from running ahead through the whole epoch.
    """
    while cursor.batch < num_batches:
        own = loader.cut(cursor).own
        for task in own.values() or (Task(cursor.epoch, cursor.batch, -1, 0, []),):
            dispatched.append(task)
            yield task
        cursor = cursor.after_batch()
