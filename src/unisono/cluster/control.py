"""The master of a run: keeps the store and where every worker is, and answers the workers. No sockets.

`Master.handle` takes a message of a worker and returns the messages to send. What a failure means for the
job is the launcher's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.cluster.messages import (
    AddToKey,
    AppendToKey,
    At,
    CheckKeys,
    CompareSet,
    DeleteKey,
    Failed,
    GetKeys,
    Hello,
    Keys,
    Left,
    ListKeys,
    Number,
    Refused,
    SetKey,
    ToMaster,
    ToWorker,
    Values,
    Welcome,
    Whereabouts,
    WhoIsWhere,
)
from unisono.cluster.position import USER_CODE, Sighting
from unisono.cluster.table import KeyTable

Outgoing = list[tuple[int, ToWorker]]


@dataclass
class _Member:
    pid: int
    heard_at: float
    step: int = -1
    operation: str = USER_CODE
    there_since: float = 0.0
    left: bool = False


class Master:
    """The state of one run that all its workers share.

    Args:
        run_id: name of the run; a worker of another one is refused.
        world_size: number of workers.
        flags: settings of the command line, given to every worker.
    """

    def __init__(self, run_id: str, *, world_size: int, flags: Mapping[str, Any]) -> None:
        self._run_id = run_id
        self._world_size = world_size
        self._flags = dict(flags)
        self._table = KeyTable()
        self._members: dict[int, _Member] = {}

    def handle(self, rank: int, message: ToMaster, *, now: float) -> Outgoing:
        """Take one message of a worker; return what to send to whom."""
        member = self._members.get(rank)
        if member is not None:
            member.heard_at = now
        match message:
            case Hello(run_id=run_id, pid=pid):
                return self._welcome(rank, run_id, pid, now)
            case At(step=step, operation=operation, age_s=age_s) if member is not None:
                member.step, member.operation, member.there_since = step, operation, now - age_s
            case Left() if member is not None:
                member.left = True
                member.there_since = now
            case At() | Left() | Failed():
                pass
            case WhoIsWhere(ticket=ticket):
                return [(rank, Whereabouts(ticket, self.sightings(now)))]
            case _:
                return self._answer(rank, message)
        return []

    def sightings(self, now: float) -> list[Sighting]:
        """Return what is known of every worker."""
        return [self._sighting(rank, now) for rank in range(self._world_size)]

    def joined(self, rank: int) -> bool:
        """Return whether a worker has joined and not left."""
        member = self._members.get(rank)
        return member is not None and not member.left

    def left(self, rank: int) -> bool:
        """Return whether a worker has joined and left in order, or its process is gone."""
        return rank in self._members and self._members[rank].left

    def step_of(self, rank: int) -> int:
        """Return the last known step of a worker, -1 before the first."""
        member = self._members.get(rank)
        return -1 if member is None else member.step

    def forget(self, rank: int, *, now: float) -> None:
        """Note that a worker's process is gone."""
        self._table.forget(rank)
        if rank in self._members and not self._members[rank].left:
            self._members[rank].left = True
            self._members[rank].there_since = now

    def _welcome(self, rank: int, run_id: str, pid: int, now: float) -> Outgoing:
        if run_id != self._run_id:
            return [(rank, Refused(0, f"this is run {self._run_id}, not {run_id}"))]
        self._members[rank] = _Member(pid, heard_at=now, there_since=now)
        return [(rank, Welcome(self._flags))]

    def _sighting(self, rank: int, now: float) -> Sighting:
        member = self._members.get(rank)
        if member is None:
            return Sighting(rank)
        return Sighting(
            rank,
            member.pid,
            member.step,
            member.operation,
            max(now - member.there_since, 0.0),
            max(now - member.heard_at, 0.0),
            member.left,
        )

    def _answer(self, rank: int, request: ToMaster) -> Outgoing:
        match request:
            case SetKey(ticket=ticket, key=key, value=value):
                return [(rank, Number(ticket, 1)), *self._set(key, value)]
            case GetKeys(ticket=ticket, keys=keys):
                values = self._table.get(keys, who=(rank, ticket))
                return [] if values is None else [(rank, Values(ticket, values))]
            case CheckKeys(ticket=ticket, keys=keys):
                return [(rank, Number(ticket, int(self._table.has(keys))))]
            case AddToKey(ticket=ticket, key=key, amount=amount):
                return self._add(rank, ticket, key, amount)
            case AppendToKey(ticket=ticket, key=key, value=value):
                return [(rank, Number(ticket, 1)), *self._set(key, (self._table.peek(key) or b"") + value)]
            case CompareSet(ticket=ticket, key=key, expected=expected, desired=desired):
                return self._compare_set(rank, ticket, key, expected, desired)
            case DeleteKey(ticket=ticket, key=key):
                return [(rank, Number(ticket, int(self._table.delete(key))))]
            case ListKeys(ticket=ticket):
                return [(rank, Keys(ticket, self._table.keys()))]
        raise AssertionError(f"not a request: {request!r}")

    def _add(self, rank: int, ticket: int, key: str, amount: int) -> Outgoing:
        old = self._table.peek(key) or b"0"
        try:
            total = int(old) + amount
        except ValueError:
            return [(rank, Refused(ticket, f"add: the value of key {key!r} is not a number"))]
        return [(rank, Number(ticket, total)), *self._set(key, str(total).encode())]

    def _compare_set(self, rank: int, ticket: int, key: str, expected: bytes, desired: bytes) -> Outgoing:
        # torch's contract: set if the old value is the expected one, or there is none and none is expected.
        old = self._table.peek(key)
        if (old is None and not expected) or old == expected:
            return [(rank, Values(ticket, [desired])), *self._set(key, desired)]
        return [(rank, Values(ticket, [expected if old is None else old]))]

    def _set(self, key: str, value: bytes) -> Outgoing:
        answered = self._table.set(key, value)
        return [(who[0], Values(who[1], values)) for who, values in answered if isinstance(who, tuple)]
