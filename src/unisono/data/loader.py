"""The loader: global batches of one epoch after another, of which this worker loads only its own parts."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from unisono.data.batch import Batch, batch_digest
from unisono.data.order import Order
from unisono.data.processes import LoaderProcesses
from unisono.data.samples import Collate, Samples, Task
from unisono.errors import UsageError
from unisono.grid import Assignment, cut
from unisono.randomness import derive


class Plan(Protocol):
    """Says who owns what at a step."""

    def at(self, step: int) -> Assignment: ...


class Loader:
    """Iterate over global batches; every worker's loop sees the same batches and loads its own micro-batches.

    A ``for`` loop is one epoch. The next loop is the next epoch with a new order, also after a ``break``;
    after `load_state_dict` it goes on where the state was taken. Nothing has to be told to it.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; the same on every worker.
        batch_size: samples in a global batch, over all workers.
        micro_batches: parts that a global batch is cut into; part of the run's definition.
        plan: says who owns which micro-batches at step ``epoch * len(loader) + batch``.
        rank: this worker.
        shuffle: a new order every epoch; else the dataset's own.
        drop_last: leave out the short batch at the end of an epoch.
        num_workers: loader processes of this worker; 0 loads in the main process.
        collate_fn: list of samples -> data of a micro-batch; None for torch's `default_collate`.
        seed: of the order and of the samples' random numbers; below 2**63.
        device: where a batch moves its tensors to when it is iterated.
        prefetch_factor: micro-batches that each loader process works ahead.
        timeout_s: how long to wait for one micro-batch of a loader process.
        name: loaders of different names have different orders and random numbers.

    Raises:
        UsageError: anything above can't be used; no process was started.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        micro_batches: int,
        plan: Plan,
        rank: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        seed: int = 0,
        device: torch.device | None = None,
        prefetch_factor: int = 2,
        timeout_s: float = 1800.0,
        name: str = "train",
    ) -> None:
        for label, value, least in (
            ("micro_batches", micro_batches, 1),
            ("num_workers", num_workers, 0),
            ("prefetch_factor", prefetch_factor, 1),
        ):
            if value < least:
                raise UsageError(f"{label}={value}: expected at least {least}.")
        if not timeout_s > 0:
            raise UsageError(f"timeout_s={timeout_s}: expected more than 0 seconds.")
        own_seed = derive(seed, "loader", name) >> 1
        self._seed = own_seed
        self._samples = Samples(dataset, collate_fn, own_seed)
        self._order = Order(len(dataset), batch_size, shuffle=shuffle, drop_last=drop_last, seed=own_seed)
        self.micro_batches = micro_batches
        self.rank = rank
        self.plan = plan
        self.device = device
        self.name = name
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._timeout_s = timeout_s
        self._epoch = 0
        self._batch = 0
        self._resumed = True
        self._loop: weakref.ref[_Loop] | None = None
        self._check(plan.at(0))

    def __len__(self) -> int:
        """Number of global batches in an epoch."""
        return self._order.num_batches

    @property
    def batch_size(self) -> int:
        """Samples in a full global batch."""
        return self._order.batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was handed out last; before the first of an epoch, that epoch."""
        return self._epoch

    @property
    def step(self) -> int:
        """How many batches were handed out since the start of the run, broken-off epochs counted whole."""
        return self._epoch * len(self) + self._batch

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch, or go on where a loaded state stands. Ends a loop over this loader that is open."""
        self._end_loop()
        if self._batch and not self._resumed:
            self._epoch, self._batch = self._epoch + 1, 0
        self._resumed = False
        loop = _Loop(self, self._epoch, self._batch)
        self._loop = weakref.ref(loop)
        return loop

    def state_dict(self) -> dict[str, int]:
        """Return the cursor: a few integers, the same on every worker.

        ``batch`` counts the batches of ``epoch`` that were handed out, not what was read ahead.
        """
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "num_samples": self._order.num_samples,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at the cursor with the next loop, at any world size. Nothing is read again to get there.

        A state taken after the last batch of an epoch gives a loop without batches, so that what the script
        does at the end of an epoch is done; the loop after it is the next epoch.

        Raises:
            UsageError: the state is of another dataset or batch size, or not a cursor; nothing was changed.
        """
        expected = self.state_dict()
        if state.keys() != expected.keys():
            raise UsageError(
                f"loader {self.name!r}: a state with keys {sorted(state)}, expected {sorted(expected)}."
            )
        for key in ("num_samples", "batch_size"):
            if state[key] != expected[key]:
                raise UsageError(
                    f"loader {self.name!r}: the state was taken with {key}={state[key]}, this loader has "
                    f"{expected[key]}: the rest of the epoch would be other samples. Use the same dataset "
                    f"and global batch size."
                )
        if state["epoch"] < 0 or not 0 <= state["batch"] <= len(self):
            raise UsageError(
                f"loader {self.name!r}: epoch {state['epoch']}, batch {state['batch']} is no place in epochs "
                f"of {len(self)} batches."
            )
        self._end_loop()
        self._epoch, self._batch, self._resumed = state["epoch"], state["batch"], True

    def _end_loop(self) -> None:
        loop = None if self._loop is None else self._loop()
        if loop is not None:
            loop.close()
        self._loop = None

    def _check(self, assignment: Assignment) -> Assignment:
        if assignment.num_micro_batches != self.micro_batches:
            raise UsageError(
                f"loader {self.name!r} cuts a batch into {self.micro_batches} micro-batches, the assignment "
                f"is over {assignment.num_micro_batches}."
            )
        if not 0 <= self.rank < assignment.world_size:
            raise UsageError(
                f"loader {self.name!r} is on rank {self.rank}, the assignment is for "
                f"{assignment.world_size} workers."
            )
        return assignment

    def _cut(self, epoch: int, batch: int) -> _Cut:
        """Return how a batch is cut and what of it is this worker's, by the plan as it stands now."""
        assignment = self._check(self.plan.at(epoch * len(self) + batch))
        indices = self._order.indices(epoch, batch)
        digest = batch_digest(self._seed, epoch, batch, indices)
        parts = cut(len(indices), self.micro_batches)
        position = batch * self.batch_size
        own = {
            number: Task(epoch, batch, number, position + part.start, indices[part.start : part.stop])
            for number in assignment.micro_batches(self.rank)
            if (part := parts[number])
        }
        return _Cut(assignment, tuple(len(part) for part in parts), own, digest)


class _Cut(NamedTuple):
    """A global batch before it is loaded."""

    assignment: Assignment
    sizes: tuple[int, ...]
    own: dict[int, Task]  # micro-batch -> task; non-empty ones, ascending
    digest: int


class _Loop(Iterator[Batch]):
    """One loop over a loader, from a cursor to the end of the epoch. Owns the loader processes."""

    def __init__(self, loader: Loader, epoch: int, batch: int) -> None:
        self._loader = loader
        self._epoch = epoch
        self._batch = batch
        self._ended = False
        # What the processes were given, in order, and have not yet handed back.
        self._dispatched: deque[Task] = deque()
        self._processes = self._start() if loader._num_workers and batch < len(loader) else None

    def _start(self) -> LoaderProcesses:
        loader = self._loader
        return LoaderProcesses(
            loader._samples,
            _dispatch(loader, self._epoch, self._batch, self._dispatched),
            num_workers=loader._num_workers,
            rank=loader.rank,
            prefetch_factor=loader._prefetch_factor,
            timeout_s=loader._timeout_s,
            pin_memory=loader.device is not None and loader.device.type == "cuda",
        )

    def __next__(self) -> Batch:
        loader = self._loader
        if self._batch == len(loader) and not self._ended:
            self.close()
            loader._epoch, loader._batch = self._epoch + 1, 0
        if self._ended:
            self._check_not_replaced()
            raise StopIteration
        try:
            batch = self._load()
        except BaseException:
            self.close(kill=True)
            raise
        self._batch += 1
        loader._epoch, loader._batch = self._epoch, self._batch
        return batch

    def _check_not_replaced(self) -> None:
        if self._batch < len(self._loader):
            raise UsageError(
                f"this loop over loader {self._loader.name!r} was ended at batch {self._batch}, by an error, "
                f"by load_state_dict, or by another loop over the same loader: one loop at a time."
            )

    def _load(self) -> Batch:
        loader = self._loader
        assignment, sizes, own, digest = loader._cut(self._epoch, self._batch)
        data = self._collect() if self._processes is not None else {}
        # Those that moved here after the processes had been given this batch; without processes, all.
        missing = [task for number, task in own.items() if number not in data]
        data.update(loader._samples.load_here(missing, loader.device))
        return Batch(
            epoch=self._epoch,
            index=self._batch,
            assignment=assignment,
            rank=loader.rank,
            sizes=sizes,
            nominal_weight=loader.batch_size / loader.micro_batches,
            data={number: data[number] for number in own},
            device=loader.device,
            digest=digest,
        )

    def _collect(self) -> dict[int, Any]:
        """Take from the processes what they were given of this batch, wanted or not."""
        assert self._processes is not None
        data = {}
        while self._dispatched and self._dispatched[0].batch == self._batch:
            data[self._dispatched.popleft().micro_batch] = next(self._processes)
        return data

    def close(self, *, kill: bool = False) -> None:
        """End the loop and its processes."""
        self._ended = True
        if self._processes is not None:
            self._processes.close(kill=kill)


def _dispatch(loader: Loader, epoch: int, first: int, dispatched: deque[Task]) -> Iterator[Task]:
    """Yield this worker's tasks from batch `first` on, and note them in `dispatched`.

    A function of its own, not a method of the loop: the loop must not be part of a reference cycle, so that
    a ``break`` ends the processes at once. A batch of which nothing is this worker's yields an empty task,
    which keeps the processes from running ahead through the whole epoch.
    """
    for batch in range(first, len(loader)):
        own = loader._cut(epoch, batch).own
        for task in own.values() or (Task(epoch, batch, -1, 0, []),):
            dispatched.append(task)
            yield task
