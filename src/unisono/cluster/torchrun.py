"""The connection of a worker that torchrun started: everything over torchrun's own store.

The store has no authentication, and only its host can be told by closed connections that a worker is gone; so
a lost worker ends the run here. torchrun itself ends the other workers.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from unisono.cluster.environment import Environment
from unisono.cluster.failure import Failure, describe_failure
from unisono.cluster.patient_store import PatientStore
from unisono.cluster.position import Position, Sighting
from unisono.errors import TransportError, WorkerLostError

_FAILED = "failed"
_SILENT_S = 10.0
_POLL_S = 0.05
_CONNECT_TIMEOUT = datetime.timedelta(seconds=60)


class _Note(msgspec.Struct, frozen=True):
    """What a worker leaves about itself; times are of the host's clock, good enough for messages."""

    pid: int
    step: int
    operation: str
    since: float
    heard_at: float
    left: bool = False


class TorchrunLink:
    """A `Link` over torchrun's store.

    Args:
        environment: as torchrun set it.
        step_timeout_s: how long `get` waits for a key of another worker.

    Raises:
        TransportError: the store does not answer.
    """

    def __init__(self, environment: Environment, *, step_timeout_s: float) -> None:
        self._rank = environment.rank
        self._world_size = environment.world_size
        self.flags: Mapping[str, Any] = {}
        self._serves = environment.rank == 0 and not environment.agent_hosts_store
        server = _connect(environment, serve=self._serves)
        prefix = f"unisono/{environment.run_id}"
        timeout = datetime.timedelta(seconds=step_timeout_s)
        self._patient = PatientStore(PrefixStore(f"{prefix}/run", server), timeout)
        # Both threads use one connection: nobody blocks on it, since waiting is asking again.
        self._notes: Store = PrefixStore(f"{prefix}/notes", server)
        self._last = Position("", -1, 0.0)
        self._lost: Exception | None = None

    @property
    def store(self) -> Store:
        return self._patient

    def publish(self, position: Position) -> None:
        self._last = position
        self._leave_note(left=False)

    def sightings(self, timeout_s: float) -> list[Sighting]:
        try:
            return [self._read(rank) for rank in range(self._world_size)]
        except RuntimeError as error:
            self._lose(error)
            return []

    def stop_reason(self) -> Exception | None:
        try:
            if self._lost is None and self._notes.check([_FAILED]):
                failure = msgspec.json.decode(self._notes.get(_FAILED), type=Failure)
                if failure.rank != self._rank:
                    return WorkerLostError(describe_failure(failure))
        except RuntimeError as error:
            self._lose(error)
        return self._lost

    def when_stopped(self, wake: Callable[[], None]) -> None:
        """Nothing here tells us; `stop_reason` asks."""

    def abort(self, reason: Exception) -> None:
        self._patient.abort(reason)

    def report(self, failure: Failure) -> None:
        with contextlib.suppress(RuntimeError):
            self._notes.compare_set(_FAILED, "", msgspec.json.encode(failure).decode())

    def close(self) -> None:
        self._leave_note(left=True)
        while self._serves and self._is_needed():  # the store ends with this process
            time.sleep(_POLL_S)

    def _leave_note(self, *, left: bool) -> None:
        position = self._last
        now = time.time()
        since = now - max(time.monotonic() - position.since, 0.0)
        note = _Note(os.getpid(), position.step, position.operation, since, now, left)
        try:
            self._notes.set(str(self._rank), msgspec.json.encode(note).decode())
        except RuntimeError as error:
            self._lose(error)

    def _is_needed(self) -> bool:
        """Return whether others still use the store: nobody failed, and someone who was heard of goes on."""
        others = [s for s in self.sightings(0.0) if s.rank != self._rank]
        going_on = any(not s.ended and s.heartbeat_age_s < _SILENT_S for s in others)
        return going_on and self.stop_reason() is None

    def _read(self, rank: int) -> Sighting:
        if not self._notes.check([str(rank)]):
            return Sighting(rank)
        note = msgspec.json.decode(self._notes.get(str(rank)), type=_Note)
        now = time.time()
        return Sighting(
            rank, note.pid, note.step, note.operation, now - note.since, now - note.heard_at, note.left
        )

    def _lose(self, error: RuntimeError) -> None:
        if self._lost is None:
            self._lost = WorkerLostError(
                "torchrun's store is gone: its agent or the worker that served it ended"
            )
            self._lost.__cause__ = error


def _connect(environment: Environment, *, serve: bool) -> TCPStore:
    assert environment.master_addr is not None
    assert environment.master_port is not None
    try:
        return TCPStore(
            host_name=environment.master_addr,
            port=environment.master_port,
            world_size=None,
            is_master=serve,
            timeout=_CONNECT_TIMEOUT,
        )
    except RuntimeError as error:
        raise TransportError(
            f"rank {environment.rank}: no store at {environment.master_addr}:{environment.master_port} "
            f"(MASTER_ADDR, MASTER_PORT): {str(error).splitlines()[0]}"
        ) from error
