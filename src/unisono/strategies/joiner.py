"""Joins the partial sums of all workers, one collective after the other in an order that all share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from unisono.collectives.announce import Announcer
from unisono.collectives.choose import choose
from unisono.collectives.execute import Scratch, buffer_key, execute
from unisono.errors import MismatchError, WorkerLostError
from unisono.gradients.buckets import Bucket
from unisono.grid import Assignment
from unisono.strategies.base import Operations
from unisono.transport.base import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from unisono.collectives.schedule import Schedule

T = TypeVar("T")


class Joiner:
    """Runs the collectives of one replica. What is started early runs while the caller goes on.

    A sum that one operation of the transport does (of two workers, or with ``exact=False``) is posted to it
    at once. Other schedules need somebody who carries out their rounds: a thread of its own, which then runs
    all collectives, in the order in which they were asked for.

    Args:
        exact: add along the tree; otherwise use the transport's own all-reduce.
        announcer: compares what the workers call, before their first message of a step is used.
        algorithm: see `unisono.collectives.choose`.
        early: whether `start` will be used.
    """

    def __init__(
        self,
        transport: Transport,
        operations: Operations,
        announcer: Announcer,
        *,
        exact: bool,
        algorithm: str,
        early: bool,
    ) -> None:
        self.transport = transport
        self._announcer = announcer
        self._operations = operations
        self._exact = exact
        self._algorithm = algorithm
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unisono-reduce") if early else None
        self._schedules: dict[Assignment, Schedule] = {}
        self._schedule: Schedule | None = None
        self.assignment: Assignment
        self._scratch = Scratch()
        self._step = 0
        self._posts = False
        self._doing: tuple[str, bool] | None = None
        self._failure: Exception | None = None

    def begin(self, name: str, assignment: Assignment, *, step: int) -> None:
        """Start the call `name`, a step over `assignment`. *Collective.* Returns at once."""
        if assignment not in self._schedules:
            self._schedules = {assignment: choose(assignment, self._algorithm, hosts=self.transport.hosts)}
        self.assignment = assignment
        self._schedule = self._schedules[assignment]
        self._step = step
        is_one_sum = self._schedule.name == "pairs" and self.transport.world_size == 2
        self._posts = not self._exact or (is_one_sum and not self.transport.maps_peers)
        self._announcer.check_allowed(name)
        if self._pool is None or self._posts:
            self._announcer.post(name)
        else:
            self._pool.submit(self._announcer.post, name)

    @contextmanager
    def doing(self, operation: str, *, waits: bool = True) -> Iterator[None]:
        """Say what this worker is doing, for those who wait for it; and whether it waits for them."""
        outer, self._doing = self._doing, (operation, waits)
        self._operations.enter(operation, self._step, waits=waits)
        try:
            yield
        except WorkerLostError as error:
            mismatch = self._announcer.stalled()  # the other may have left because of it
            if mismatch is None:
                raise
            raise mismatch from error
        finally:
            self._doing = outer
            if outer is None:
                self._operations.leave()
            else:
                self._operations.enter(outer[0], self._step, waits=outer[1])

    def collect(self, operation: str, collective: Callable[[], T]) -> T:
        """Run one collective after those started before it, and wait for its result. *Collective.*"""
        with self.doing(operation):
            if self._pool is None or self._posts:
                return self._checked(collective)
            return self._pool.submit(self._checked, collective).result()

    def start(
        self, partials: Mapping[Hashable, Tensor], bucket: Bucket, *, key: str, scale: float
    ) -> Callable[[], Tensor]:
        """Start what `join` does; return what waits for its result, to be called once. *Collective.*"""
        if self._posts:
            if self.transport.device.type == "cpu":  # elsewhere it would wait for the device in mid-backward
                self._meet()
            return self._post(partials, bucket, scale)
        assert self._pool is not None
        join = partial(self.join, partials, bucket, key=key, scale=scale)
        return self._pool.submit(self._checked, join).result

    def join(self, partials: Mapping[Hashable, Tensor], bucket: Bucket, *, key: str, scale: float) -> Tensor:
        """Return the sum of all workers' partial sums of one bucket, times `scale`. *Collective.*

        The result may lie in the memory of a partial sum, or in memory that the next call with `key` reuses.
        """
        if self._posts:
            return self._post(partials, bucket, scale)()
        assert self._schedule is not None
        if self.transport.maps_peers and not (self._schedule.in_place and partials):
            name = buffer_key(key, self._schedule.result)
            out = self.transport.allocate(name, bucket.num_elements, bucket.dtype)
        else:
            out = next(iter(partials.values())) if partials else _zeros(bucket)
        return execute(
            self._schedule,
            self.transport,
            partials,
            out=out,
            key=key,
            scale=scale,
            scratch=self._scratch,
        )

    def _meet(self) -> None:
        """Wait until all workers have begun the step, in the middle of a backward pass."""
        if self._announcer.is_pending:
            with self.doing("start of the step"):
                self._announcer.check()

    def _checked(self, collective: Callable[[], T]) -> T:
        if self._failure is not None:  # of one that nobody has waited for yet: the others are still in it
            raise self._failure
        try:
            self._announcer.check()
            return collective()
        except MismatchError:
            raise
        except Exception as error:
            self._failure = error
            raise

    def blank(self, bucket: Bucket) -> dict[Hashable, Tensor]:
        """Return zeros in the place of this worker's partial sums of one bucket."""
        assert self._schedule is not None
        return {piece: _zeros(bucket) for piece in self._schedule.initial(self.transport.rank)}

    def close(self) -> None:
        """End the thread; harmless if called twice."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _post(
        self, partials: Mapping[Hashable, Tensor], bucket: Bucket, scale: float
    ) -> Callable[[], Tensor]:
        own, *others = partials.values() if partials else [_zeros(bucket)]
        for other in others:
            own.add_(other)
        if self._exact:
            work = self.transport.pair_sum(own, 1 - self.transport.rank)
        else:
            work = self.transport.all_reduce(own)

        def wait() -> Tensor:
            work.wait()
            return own.mul_(scale) if scale != 1.0 else own

        return wait


def _zeros(bucket: Bucket) -> Tensor:
    """Return what a worker without micro-batches contributes."""
    return torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=bucket.device)
