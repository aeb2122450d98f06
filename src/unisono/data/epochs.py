"""Epoch after epoch of global batches: what all loaders share.

A loader has a cursor and at most one loop, which moves it. This file owns the cursor, its state, the rule of
one loop at a time, and the loader processes that outlive a loop. What a batch consists of is the matter of
`loader` and `stream_loader`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Required, TypedDict

import torch

from unisono.data.batch import Batch
from unisono.data.processes import LoaderProcesses, Source
from unisono.errors import UsageError
from unisono.grid import Assignment
from unisono.randomness import derive


class Plan(Protocol):
    """Says who owns what at a step."""

    def at(self, step: int) -> Assignment: ...


class Cursor(NamedTuple):
    """A place in a run: so many batches of an epoch were handed out, and so many in all epochs before it."""

    epoch: int = 0
    batch: int = 0
    first_step: int = 0

    @property
    def step(self) -> int:
        return self.first_step + self.batch

    def after_batch(self) -> Cursor:
        return self._replace(batch=self.batch + 1)

    def after_epoch(self) -> Cursor:
        return Cursor(self.epoch + 1, 0, self.step)


class Options(TypedDict, total=False):
    """What every loader can be told; see `EpochLoader`."""

    micro_batches: Required[int]
    plan: Required[Plan]
    rank: int
    num_workers: int
    persistent_workers: bool
    seed: int
    device: torch.device | None
    prefetch_factor: int
    timeout_s: float
    name: str


class EpochLoader(ABC):
    """Iterate over global batches; every worker's loop sees the same batches and loads its own micro-batches.

    A ``for`` loop is one epoch. The next loop is the next epoch with a new order, also after a ``break``;
    after `load_state_dict` it goes on where the state was taken. Nothing has to be told to it.

    Args:
        micro_batches: parts that a global batch is cut into; part of the run's definition.
        plan: says who owns which micro-batches at each `step`.
        rank: this worker.
        num_workers: loader processes of this worker; 0 loads in the main process.
        persistent_workers: keep them from epoch to epoch, until `close`.
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
        *,
        micro_batches: int,
        plan: Plan,
        rank: int = 0,
        num_workers: int = 0,
        persistent_workers: bool = False,
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
        if persistent_workers and not num_workers:
            raise UsageError("persistent_workers=True with num_workers=0: there is no process to keep.")
        self.micro_batches = micro_batches
        self.rank = rank
        self.plan = plan
        self.device = device
        self.name = name
        self.num_workers = num_workers
        self.seed = derive(seed, "loader", name) >> 1
        self._persistent = persistent_workers
        self._prefetch_factor = prefetch_factor
        self._timeout_s = timeout_s
        self._cursor = Cursor()
        self._resumed = True
        self._loop: weakref.ref[EpochLoop] | None = None
        self._kept: LoaderProcesses | None = None
        self.assignment(0)

    @abstractmethod
    def _begin(self, cursor: Cursor) -> EpochLoop:
        """Return a loop from `cursor` to the end of its epoch."""

    @abstractmethod
    def _facts(self) -> dict[str, int]:
        """Return what must be the same where a state is taken and where it is loaded."""

    @abstractmethod
    def _check_cursor(self, cursor: Cursor) -> None:
        """Raise a `UsageError` if `cursor` is no place in the epochs of this loader, as far as is known."""

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was handed out last; before the first of an epoch, that epoch."""
        return self._cursor.epoch

    @property
    def step(self) -> int:
        """How many batches were handed out since the start of the run, in all epochs."""
        return self._cursor.step

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch, or go on where a loaded state stands. Ends a loop over this loader that is open."""
        self._end_loop()
        if self._cursor.batch and not self._resumed:
            self._cursor = self._cursor.after_epoch()
        self._resumed = False
        loop = self._begin(self._cursor)
        self._loop = weakref.ref(loop)
        return loop

    def state_dict(self) -> dict[str, int]:
        """Return the cursor: a few integers, the same on every worker.

        ``batch`` counts the batches of ``epoch`` that were handed out, not what was read ahead.
        """
        return {**self._cursor._asdict(), **self._facts()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at the cursor with the next loop, at any world size.

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
        for key, fact in self._facts().items():
            if state[key] != fact:
                raise UsageError(
                    f"loader {self.name!r}: the state was taken with {key}={state[key]}, this loader has "
                    f"{fact}: the rest of the epoch would be other samples. Use the same dataset "
                    f"and global batch size."
                )
        cursor = Cursor(**{field: state[field] for field in Cursor._fields})
        if min(cursor) < 0:
            raise UsageError(f"loader {self.name!r}: {cursor} is no place in a run.")
        self._check_cursor(cursor)
        self._end_loop()
        self._cursor, self._resumed = cursor, True

    def close(self, *, kill: bool = False) -> None:
        """End an open loop and all loader processes, with `kill` in the middle of a sample; harmless if repeated."""
        self._end_loop(kill=kill)
        if self._kept is not None:
            self._kept.close(kill=kill)
            self._kept = None

    def assignment(self, step: int) -> Assignment:
        """Return who owns what at a step, by the plan as it stands now.

        Raises:
            UsageError: the assignment does not fit this loader.
        """
        assignment = self.plan.at(step)
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

    def start(self, source: Source, tasks: Iterable[Any], num_workers: int) -> LoaderProcesses:
        """Return processes at work on `tasks`: the kept ones if there are any, as many as wanted."""
        kept, self._kept = self._kept, None
        if kept is not None:
            if kept.num_workers == num_workers and kept.restart(tasks):
                self._kept = kept
                return kept
            kept.close(kill=True)
        processes = LoaderProcesses(
            source,
            tasks,
            num_workers=num_workers,
            rank=self.rank,
            prefetch_factor=self._prefetch_factor,
            timeout_s=self._timeout_s,
            pin_memory=self.device is not None and self.device.type == "cuda",
            persistent=self._persistent,
        )
        if self._persistent:
            self._kept = processes
        return processes

    def release(self, processes: LoaderProcesses, *, kill: bool = False) -> None:
        """Take back what `start` returned: end it, or keep it for the next loop."""
        if kill or not self._persistent:
            processes.close(kill=kill)
            self._kept = None

    def moved(self, cursor: Cursor) -> None:
        """Note where the loop has come to."""
        self._cursor = cursor

    def _end_loop(self, *, kill: bool = False) -> None:
        loop = None if self._loop is None else self._loop()
        if loop is not None:
            loop.close(kill=kill)
        self._loop = None


class EpochLoop(Iterator[Batch], ABC):
    """One loop over a loader, from a cursor to the end of the epoch. Owns what it reads with."""

    def __init__(self, loader: EpochLoader, cursor: Cursor) -> None:
        self._moves = loader
        self._cursor = cursor
        self._processes: LoaderProcesses | None = None
        self._ended = False
        self._at_end = False

    @abstractmethod
    def _load(self) -> Batch | None:
        """Return the batch at the cursor, or None at the end of the epoch."""

    def __next__(self) -> Batch:
        if self._ended:
            self._check_not_replaced()
            raise StopIteration
        try:
            batch = self._load()
        except BaseException:
            self.close(kill=True)
            raise
        if batch is None:
            self.close()
            self._at_end = True
            self._moves.moved(self._cursor.after_epoch())
            raise StopIteration
        self._cursor = self._cursor.after_batch()
        self._moves.moved(self._cursor)
        return batch

    def close(self, *, kill: bool = False) -> None:
        """End the loop and its processes."""
        self._ended = True
        processes, self._processes = self._processes, None
        if processes is not None:
            self._moves.release(processes, kill=kill)

    def _check_not_replaced(self) -> None:
        if not self._at_end:
            raise UsageError(
                f"this loop over loader {self._moves.name!r} was ended at batch {self._cursor.batch}, by an "
                f"error, by load_state_dict, or by another loop over the same loader: one loop at a time."
            )
