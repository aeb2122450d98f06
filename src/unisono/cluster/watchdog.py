"""A thread that watches this worker's main thread: publishes where it is and ends waits that take too long.

It owns the deadline and the list of who must be told when this worker has to stop waiting. How positions
travel is the `Board`'s business.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from unisono.cluster.position import USER_CODE, Position, Sighting, describe_wait, in_user_code
from unisono.errors import DeadlineError, TransportError

HEARTBEAT_S = 1.0
STALL_S = 1.0


class Board(Protocol):
    """Where the workers of a run leave their positions and failures for each other."""

    def publish(self, position: Position) -> None:
        """Leave this worker's position. Called about once a second, and soon after a change."""

    def sightings(self, timeout_s: float) -> list[Sighting]:
        """Return what is known of all workers; an empty list when nothing could be found out in time."""

    def stop_reason(self) -> Exception | None:
        """Return why this worker has to stop waiting, or None."""


class Watchdog:
    """Watches over one worker from `start` to `stop`.

    A wait counts while this process runs: a worker, job or machine that was stopped and goes on later has
    not waited meanwhile.

    Args:
        board: where positions go.
        rank: this worker.
        timeout_s: how long one operation may take.
        stop_fd: becomes readable when this worker was told to end (by SIGTERM).
    """

    def __init__(self, board: Board, *, rank: int, timeout_s: float, stop_fd: int | None = None) -> None:
        self.position = Position(USER_CODE, -1, time.monotonic())
        self.on_stall: Callable[[], Exception | None] = lambda: None
        self._board = board
        self._rank = rank
        self._timeout_s = timeout_s
        self._stop_fd = stop_fd
        self._tick_s = min(max(timeout_s / 10, 0.05), 0.5)
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Exception], None]] = []
        self._reason: Exception | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="unisono-watchdog", daemon=True)
        self._stopping = False
        self._closed = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close its descriptors. Blocking, for less than one tick."""
        if self._stopping:
            return
        self._stopping = True
        self.wake()
        self._thread.join()
        self._board.publish(self.position)  # where it was last, for whoever waits for it later
        with self._lock:
            self._closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)

    def wake(self) -> None:
        """Make the thread look around now. Any thread may call this; after `stop` it does nothing."""
        with self._lock:
            if not self._closed:  # else the descriptor may be somebody else's by now
                os.write(self._wake_write, b"x")

    def on_abort(self, callback: Callable[[Exception], None]) -> None:
        """Call `callback(reason)` once, from the thread, when waits must end; at once if that was before."""
        with self._lock:
            self._callbacks.append(callback)
            reason = self._reason
        if reason is not None:
            callback(reason)

    def _watch(self) -> None:
        seen, waited_s, last = self.position, 0.0, time.monotonic()
        published: Position | None = None
        next_heartbeat = last
        while not self._stopping:
            self._rest()
            now = time.monotonic()
            passed_s, last = now - last, now
            position = self.position
            waited_s = (
                waited_s + min(passed_s, 2 * self._tick_s) if position is seen else now - position.since
            )
            seen = position
            if position is not published or now >= next_heartbeat:
                self._board.publish(position)
                published, next_heartbeat = position, now + HEARTBEAT_S
            if self._reason is None:
                reason = self._board.stop_reason() or self._stalled(position, waited_s)
                self._abort(reason or self._overdue(position, waited_s))

    def _rest(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if self._stop_fd is not None and self._reason is None:
            poll.register(self._stop_fd, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(self._tick_s * 1000)]
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        if self._stop_fd in ready:
            self._abort(TransportError(f"rank {self._rank}: told to end by SIGTERM"))

    def _stalled(self, position: Position, waited_s: float) -> Exception | None:
        """Return why a wait of some time is in vain, if that can be known before its deadline."""
        if in_user_code(position.operation) or waited_s < min(STALL_S, self._timeout_s / 2):
            return None
        try:
            reason = self.on_stall()
        except TransportError:  # the store is gone; whoever waits for it says so
            return None
        return reason if self.position is position else None

    def _overdue(self, position: Position, waited_s: float) -> DeadlineError | None:
        if in_user_code(position.operation) or waited_s < self._timeout_s:
            return None
        sightings = self._board.sightings(min(self._timeout_s, 2.0))
        if self.position is not position:  # it went on meanwhile
            return None
        return DeadlineError(
            describe_wait(self._rank, position=position, waited_s=waited_s, sightings=sightings)
        )

    def _abort(self, reason: Exception | None) -> None:
        if reason is None:
            return
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(reason)
