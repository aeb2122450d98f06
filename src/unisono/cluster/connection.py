"""A worker's connection to its run: identity, store, where everybody is, and the end of the run.

The same for a worker of `unisono run`, of torchrun, and for one alone. It moves no tensors.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from unisono.cluster.environment import Environment, mark_joined
from unisono.cluster.failure import Failure, describe_exception
from unisono.cluster.position import USER_CODE, Position
from unisono.cluster.watchdog import Board, Watchdog
from unisono.errors import UsageError

LOOPBACK = "127.0.0.1"
STEP_TIMEOUT_S = 1800.0


class Link(Board, Protocol):
    """What connects a worker with the others: a `Board`, a store, and words for the end."""

    @property
    def store(self) -> Store:
        """The store of the run."""

    @property
    def flags(self) -> Mapping[str, Any]:
        """What the command line said."""

    def when_stopped(self, wake: Callable[[], None]) -> None:
        """Call `wake` from any thread when `stop_reason` may have changed, where that can be known."""

    def abort(self, reason: Exception) -> None:
        """Make waits on the store raise `reason`, where that can be done. From any thread."""

    def report(self, failure: Failure) -> None:
        """Tell the others and the launcher that this worker failed."""

    def close(self) -> None:
        """Leave the run in order."""


class Connection:
    """One worker's membership in a run, from `connect` to `close`; a context manager.

    Attributes:
        environment: identity of this worker.
        rank: number of this worker.
        world_size: number of workers.
        step_timeout_s: how long one operation may wait for other workers, or for data.
        address: the local address on which other workers of the run reach this one; loopback on one host.
        store: the run's store, for a rendezvous; None when alone.
        flags: settings given on the command line of `unisono run`, only those given: ``backend``,
            ``step_timeout_s``, ``threads_per_worker``, ``allow_idle``.
    """

    def __init__(self, environment: Environment, link: Link | None, *, step_timeout_s: float | None) -> None:
        self.environment = environment
        self.rank = environment.rank
        self.world_size = environment.world_size
        self.address = _address(environment)
        self.store: Store | None = None if link is None else link.store
        self.flags: dict[str, Any] = {} if link is None else dict(link.flags)
        self._link = link
        self._watchdog: Watchdog | None = None
        self._closed = False
        self._pid = os.getpid()
        self.step_timeout_s = step_timeout_s or float(self.flags.get("step_timeout_s", STEP_TIMEOUT_S))
        if link is not None:
            self._watchdog = Watchdog(
                link, rank=self.rank, timeout_s=self.step_timeout_s, stop_fd=environment.stop_fd
            )
            self._watchdog.on_abort(link.abort)
            link.when_stopped(self._watchdog.wake)
            self._watchdog.start()
        # A script that forgets to close is no failure: the others learn that it left in order.
        atexit.register(self.close)

    def enter(self, operation: str, step: int, *, waits: bool = True) -> None:
        """Note that the main thread now does `operation` of `step`. Its deadline starts. Under 1 us.

        With `waits=False` it has no deadline: it waits for nobody, but runs the user's model or metric.
        """
        if self._watchdog is not None:
            if not waits:
                operation = f"{USER_CODE} ({operation})"
            self._watchdog.position = Position(operation, step, time.monotonic())

    def leave(self) -> None:
        """Note that the main thread is back in user code. Under 1 us."""
        if self._watchdog is not None:
            step = self._watchdog.position.step
            self._watchdog.position = Position(USER_CODE, step, time.monotonic())

    def on_abort(self, callback: Callable[[Exception], None]) -> None:
        """Call `callback(reason)` once, from a background thread, when every wait of this worker must end.

        That is when the launcher stops the run, a worker is known to be lost, this worker got SIGTERM, or the
        operation it is in exceeded the deadline. If that was before, it is called here and now.
        """
        if self._watchdog is not None:
            self._watchdog.on_abort(callback)

    def on_stall(self, callback: Callable[[], Exception | None]) -> None:
        """Ask `callback`, from a background thread, why this worker waits in vain, once it has waited for long.

        What it returns ends the wait like a deadline.
        """
        if self._watchdog is not None:
            self._watchdog.on_stall = callback

    def fail(self, error: BaseException, step: int) -> None:
        """Report that this worker failed with `error` at `step` (-1: before the first). Never raises."""
        if isinstance(error, SystemExit) and not error.code:  # a script may end inside the run
            return
        if self._link is not None and not self._closed:
            self._link.report(describe_exception(error, rank=self.rank, step=step))

    def close(self) -> None:
        """Leave the run in order. Others notice nothing but that this worker is done."""
        if self._closed or os.getpid() != self._pid:  # a forked child does not leave for this worker
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def connect(environment: Environment, step_timeout_s: float | None = None) -> Connection:
    """Join the run that `environment` names.

    Args:
        environment: from `unisono.cluster.environment.detect`.
        step_timeout_s: how long one operation of a step may wait for others; by default what the command line
            says, or half an hour.

    Raises:
        UsageError: `step_timeout_s` is not positive.
        TransportError: the launcher or torchrun's store does not answer.
    """
    return Connection(environment, _link(environment, step_timeout_s), step_timeout_s=step_timeout_s)


def _link(environment: Environment, step_timeout_s: float | None) -> Link | None:
    if step_timeout_s is not None and not step_timeout_s > 0:
        raise UsageError(f"step_timeout_s={step_timeout_s}: expected a positive number of seconds")
    if environment.kind == "launcher":
        from unisono.cluster.client import ControlLink

        link = ControlLink(environment)
        mark_joined()
        return link
    if environment.kind == "torchrun":
        from unisono.cluster.torchrun import TorchrunLink

        return TorchrunLink(environment, step_timeout_s=step_timeout_s or STEP_TIMEOUT_S)
    return None


def _address(environment: Environment) -> str:
    if environment.master_addr is None or environment.local_world_size == environment.world_size:
        return LOOPBACK
    # The address from which the master is reached is one that the other hosts can route to.
    family, _, _, _, target = socket.getaddrinfo(
        environment.master_addr, environment.master_port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
