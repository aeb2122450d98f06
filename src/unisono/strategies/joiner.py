"""Joins the partial sums of all workers, one collective after the other in an order that all share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from unisono.collectives.choose import choose
from unisono.collectives.execute import Scratch, execute
from unisono.gradients.buckets import Bucket
from unisono.grid import Assignment
from unisono.strategies.base import Operations
from unisono.transport.base import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from unisono.collectives.schedule import Schedule

T = TypeVar("T")


class Joiner:
    """Runs collectives of one replica. With `background` they run on a thread of their own, in order.

    Args:
        exact: add along the tree; otherwise use the transport's own all-reduce.
        algorithm: see `unisono.collectives.choose`.
    """

    def __init__(
        self, transport: Transport, operations: Operations, *, exact: bool, algorithm: str, background: bool
    ) -> None:
        self.transport = transport
        self._operations = operations
        self._exact = exact
        self._algorithm = algorithm
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unisono-reduce") if background else None
        self._schedules: dict[Assignment, Schedule] = {}
        self._schedule: Schedule | None = None
        self._scratch = Scratch()
        self._step = 0

    def begin(self, assignment: Assignment, *, step: int) -> None:
        """Start a step over `assignment`."""
        if assignment not in self._schedules:
            self._schedules = {assignment: choose(assignment, self._algorithm)}
        self._schedule = self._schedules[assignment]
        self._step = step

    @contextmanager
    def doing(self, operation: str, *, waits: bool = True) -> Iterator[None]:
        """Say what this worker is doing, for those who wait for it; and whether it waits for them."""
        self._operations.enter(operation, self._step, waits=waits)
        try:
            yield
        finally:
            self._operations.leave()

    def collect(self, operation: str, collective: Callable[[], T]) -> T:
        """Run one collective after those submitted before it, and wait for its result. *Collective.*"""
        with self.doing(operation):
            return collective() if self._pool is None else self._pool.submit(collective).result()

    def submit(self, collective: Callable[[], T]) -> Future[T]:
        """Queue one collective. Only in the background."""
        assert self._pool is not None
        return self._pool.submit(collective)

    def join(self, partials: Mapping[Hashable, Tensor], bucket: Bucket, *, key: str, scale: float) -> Tensor:
        """Return the sum of all workers' partial sums of one bucket, times `scale`. *Collective.*

        The result may lie in the memory of a partial sum, or in memory that the next call with `key` reuses.
        """
        assert self._schedule is not None
        parts = list(partials.values())
        if not parts:  # an idle worker
            parts = [torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=bucket.device)]
        if self._exact:
            return execute(
                self._schedule,
                self.transport,
                partials,
                out=parts[0],
                key=key,
                scale=scale,
                scratch=self._scratch,
            )
        for part in parts[1:]:
            parts[0].add_(part)
        self.transport.all_reduce(parts[0]).wait()
        return parts[0].mul_(scale) if scale != 1.0 else parts[0]

    def close(self) -> None:
        """End the thread; harmless if called twice."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
