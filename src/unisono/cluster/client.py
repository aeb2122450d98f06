"""The worker's end of the control channel: requests with answers, and what the launcher says unasked."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from unisono.cluster.environment import Environment
from unisono.cluster.failure import Failure
from unisono.cluster.messages import (
    At,
    Failed,
    FrameReader,
    Hello,
    Keys,
    Left,
    Message,
    Number,
    Refused,
    Stop,
    ToWorker,
    Values,
    Welcome,
    Whereabouts,
    WhoIsWhere,
    encode,
    frame,
)
from unisono.cluster.position import Position, Sighting
from unisono.cluster.process import close_in_child
from unisono.cluster.store import ControlStore
from unisono.errors import TransportError, WorkerLostError

_WELCOME_TIMEOUT_S = 30.0

Answer = Values | Number | Keys | Whereabouts


class ControlClient:
    """Requests to the master of the run. Any thread may ask; each waits for its own answer only.

    Args:
        sock: connected stream socket; stays the caller's to close, but for forked children, which close
            their copy.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.flags: dict[str, Any] = {}
        self.stop_reason: Exception | None = None
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[int, Answer | Refused] = {}
        self._awaited: set[int] = set()
        self._last_ticket = 0
        self._welcomed = False
        self._leaving = False
        self._wake: Callable[[], None] | None = None
        self._receiver = threading.Thread(target=self._receive, name="unisono-control", daemon=True)
        close_in_child(sock)

    def join(self, run_id: str, *, rank: int) -> None:
        """Enter the run.

        Raises:
            TransportError: the launcher does not answer.
        """
        self._receiver.start()
        self.send(Hello(run_id, rank, os.getpid()))
        with self._changed:
            if not self._changed.wait_for(lambda: self._welcomed or self.stop_reason, _WELCOME_TIMEOUT_S):
                raise TransportError(
                    f"rank {rank}: the launcher did not answer in {_WELCOME_TIMEOUT_S:.0f} s"
                )
        if not self._welcomed and self.stop_reason is not None:
            raise self.stop_reason

    def when_stopped(self, wake: Callable[[], None]) -> None:
        """Call `wake` when `stop_reason` is set."""
        self._wake = wake
        if self.stop_reason is not None:
            wake()

    def send(self, message: Message) -> None:
        """Send without waiting for an answer.

        Raises:
            WorkerLostError: the launcher is gone.
        """
        try:
            with self._sending:
                self._sock.sendall(frame(encode(message)))
        except OSError as error:
            raise WorkerLostError(f"the launcher is gone: {error}") from error

    def ask(self, make_request: Callable[[int], Message], *, timeout_s: float) -> Answer | None:
        """Send the request that `make_request(ticket)` returns and return its answer. Blocking.

        Returns:
            The answer, or None if there was none in `timeout_s`.

        Raises:
            TransportError: the run was stopped or the launcher refused.
        """
        with self._changed:
            self._last_ticket += 1
            ticket = self._last_ticket
            self._awaited.add(ticket)
        try:
            self.send(make_request(ticket))
            with self._changed:
                self._changed.wait_for(lambda: ticket in self._answers or self.stop_reason, timeout_s)
                answer = self._answers.pop(ticket, None)
        finally:
            with self._changed:
                self._awaited.discard(ticket)
        if isinstance(answer, Refused):
            raise TransportError(answer.reason)
        if answer is None and self.stop_reason is not None:
            raise self.stop_reason
        return answer

    def stop(self, reason: Exception) -> None:
        """Make every pending and future wait for an answer raise `reason`. Any thread may call this."""
        with self._changed:
            if self.stop_reason is None:
                self.stop_reason = reason
            self._changed.notify_all()
        if self._wake is not None:
            self._wake()

    def leave(self) -> None:
        """Leave the run: the thread ends, the socket stays open. Blocking, briefly."""
        self._leaving = True
        with contextlib.suppress(WorkerLostError):
            self.send(Left())
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
        if self._receiver.is_alive():
            self._receiver.join(timeout=5.0)

    def _receive(self) -> None:
        reader = FrameReader()
        error: Exception | None = None
        try:
            while data := self._sock.recv(1 << 16):
                for payload in reader.feed(data):
                    self._take(self._decoder.decode(payload))
        except (OSError, msgspec.MsgspecError, TransportError) as caught:
            error = caught
        if not self._leaving:
            lost = WorkerLostError("the launcher is gone: its control channel closed")
            lost.__cause__ = error
            self.stop(lost)

    def _take(self, message: ToWorker) -> None:
        match message:
            case Welcome(flags=flags):
                with self._changed:
                    self.flags, self._welcomed = flags, True
                    self._changed.notify_all()
            case Stop(reason=reason):
                self.stop(WorkerLostError(reason))
            case Refused(ticket=0, reason=reason):
                self.stop(TransportError(reason))
            case _:
                with self._changed:
                    if message.ticket in self._awaited:
                        self._answers[message.ticket] = message
                        self._changed.notify_all()


class ControlLink:
    """A `Link` over the control channel of `unisono run`."""

    def __init__(self, environment: Environment) -> None:
        if environment.control_fd is None:
            raise TransportError("no control channel: the environment was not made by `unisono run`")
        # A copy, so that this run's end does not close the worker's own descriptor.
        self._sock = socket.socket(fileno=os.dup(environment.control_fd))
        self._client = ControlClient(self._sock)
        self._client.join(environment.run_id, rank=environment.rank)
        self.store = ControlStore(self._client)

    @property
    def flags(self) -> Mapping[str, Any]:
        return self._client.flags

    def publish(self, position: Position) -> None:
        age_s = max(time.monotonic() - position.since, 0.0)
        with contextlib.suppress(WorkerLostError):  # the receiver says so
            self._client.send(At(position.step, position.operation, age_s))

    def sightings(self, timeout_s: float) -> list[Sighting]:
        try:
            answer = self._client.ask(WhoIsWhere, timeout_s=timeout_s)
        except TransportError:
            return []
        return answer.sightings if isinstance(answer, Whereabouts) else []

    def stop_reason(self) -> Exception | None:
        return self._client.stop_reason

    def when_stopped(self, wake: Callable[[], None]) -> None:
        self._client.when_stopped(wake)

    def abort(self, reason: Exception) -> None:
        self._client.stop(reason)

    def report(self, failure: Failure) -> None:
        with contextlib.suppress(WorkerLostError):
            self._client.send(Failed(failure))

    def close(self) -> None:
        self._client.leave()
        self._sock.close()
