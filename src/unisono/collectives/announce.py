"""The name of every collective that user code calls, so that calls that don't match are one error everywhere.

Two ranks that call different things would otherwise take each other's bytes for their own, or wait for ever. Calls
are numbered. Those other than steps meet in the run's store, by name, before they send anything. A step, which
has to be fast, sends at once; if it then waits for long, it leaves its name there too, and whoever waits for it
sees that it is elsewhere. Where a run has several replicas, whose steps could be taken for each other, a step's
first message is its name.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from unisono.errors import MismatchError, UsageError
from unisono.transport.base import Transport, Work

_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.0002, 0.01


class Store(Protocol):
    """The part of the run's store that is needed."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


class Announcer:
    """Compares the names of calls; shared by all who use `transport`, one thread at a time, apart from `stalled`.

    Args:
        transport: this rank's end of the group of all workers.
        store: of the run; without it nothing is compared.
    """

    def __init__(self, transport: Transport, store: Store | None = None) -> None:
        self._transport = transport
        self._store = store if transport.world_size > 1 else None
        self._call = (0, "")
        self._left: list[str] = []
        self._pending: tuple[Tensor, Work] | None = None
        self._error: Exception | None = None
        self.compares_steps = False
        """Whether steps could be taken for each other."""
        self.forbidden: str | None = None
        """Why no collective may be called now, if none may."""

    def check_allowed(self, name: str) -> None:
        """Raise a `UsageError` if other workers can't take part now."""
        if self.forbidden is not None:
            raise UsageError(f"{name} needs all workers, but {self.forbidden}.")

    def call(self, name: str) -> None:
        """Begin the call `name`, which is no step; return when all ranks have. *Collective.* *Blocking.*

        Raises:
            UsageError: other workers can't take part now.
            MismatchError: they called something else.
        """
        self.check_allowed(name)
        self.check()
        self._call = self._call[0] + 1, name
        if self._store is None:
            return
        self._leave_name()
        delay_s = _SHORTEST_LOOK_S
        while not self._store.check(self._keys()):
            if self._error is not None:
                raise self._error
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_LOOK_S)
        self._error = self._mismatch()
        if self._error is not None:
            raise self._error

    def post(self, name: str) -> None:
        """Begin a step, `name`. *Collective: every rank calls this, in the same order.* Returns at once."""
        self.check_allowed(name)
        self.check()
        self._call = self._call[0] + 1, name
        if self._store is not None and self.compares_steps:
            world_size = self._transport.world_size
            table = torch.zeros(world_size, 1, dtype=torch.int64, device=self._transport.device)
            table[self._transport.rank] = _digest(name)
            self._pending = table, self._transport.all_reduce(table)

    @property
    def is_pending(self) -> bool:
        """Whether `check` may have to wait."""
        return self._pending is not None

    def check(self) -> None:
        """Wait until all ranks have begun the step, where steps are compared, and compare. *Blocking.*

        Raises:
            MismatchError: they called different things; the same error on every rank, now and from now on.
        """
        if self._error is not None:
            raise self._error
        if self._pending is None:
            return
        table, work = self._pending
        self._pending = None
        work.wait()
        digests = table.flatten().tolist()
        if any(digest != digests[0] for digest in digests):
            self._leave_name()
            while not self._all_left():
                time.sleep(_LONGEST_LOOK_S)
            self._error = self._mismatch()
            assert self._error is not None
            raise self._error

    def stalled(self) -> MismatchError | None:
        """Say whether this worker waits in vain, since others are in another call. From any thread.

        To be called when it has waited for long: it then leaves its name for the others, too.
        """
        if self._store is None or self._error is not None or not self._call[0]:
            return None
        self._leave_name()
        return self._mismatch() if self._all_left() else None

    def stop(self, reason: Exception) -> None:
        """Make a wait in `call` raise `reason`. From any thread."""
        self._error = self._error or reason

    def _leave_name(self) -> None:
        assert self._store is not None
        number, name = self._call
        key = _key(number, self._transport.rank)
        if key in self._left:
            return
        self._left.append(key)
        self._store.set(key, name)
        while len(self._left) > 2:  # all have passed the last but one
            self._store.delete_key(self._left.pop(0))

    def _keys(self) -> list[str]:
        return [_key(self._call[0], rank) for rank in range(self._transport.world_size)]

    def _all_left(self) -> bool:
        return self._store is not None and bool(self._store.check(self._keys()))

    def _mismatch(self) -> MismatchError | None:
        """Return the error that the names of this call are, if they differ."""
        assert self._store is not None
        names = [bytes(self._store.get(key)).decode() for key in self._keys()]
        return None if len(set(names)) == 1 else MismatchError(_describe(self._call[0], names))


def _describe(number: int, names: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(str(rank))
    places = (f"rank{'s' * (len(who) > 1)} {', '.join(who)} in {where}" for where, who in ranks.items())
    return (
        f"collective call {number}: {'; '.join(places)}. Every rank must make the same calls in the same order. What "
        f"one rank does alone, under run.is_main, must need no other: forward passes, state_dict() and "
        f"fingerprint() don't."
    )


def _key(number: int, rank: int) -> str:
    return f"call/{number}/{rank}"


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
