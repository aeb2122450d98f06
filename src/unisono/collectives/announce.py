"""The name of every collective that user code calls, compared before anything else is sent.

Two ranks that call different things would otherwise take each other's bytes for their own, or wait for ever.
With the names in the first message of each call, a mismatch is one error on all ranks that says who is where.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from unisono.collectives.gather import gather_bytes
from unisono.errors import MismatchError, UsageError
from unisono.transport.base import Transport, Work


class Announcer:
    """Compares the names of calls; shared by all who use `transport`, one thread at a time.

    Cost per call: one all-reduce of 8 bytes a rank, which runs while the caller goes on until `check`.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._num_calls = 0
        self._pending: tuple[str, Tensor, Work] | None = None
        self._error: MismatchError | None = None
        self.forbidden: str | None = None
        """Why no collective may be called now, if none may."""

    def check_allowed(self, name: str) -> None:
        """Raise a `UsageError` if other workers can't take part now."""
        if self.forbidden is not None:
            raise UsageError(f"{name} needs all workers, but {self.forbidden}.")

    def post(self, name: str) -> None:
        """Begin the call `name`. *Collective: every rank calls this, in the same order.* Returns at once.

        Raises:
            UsageError: other workers can't take part now.
            MismatchError: a call before failed.
        """
        self.check_allowed(name)
        self.check()
        if self._transport.world_size == 1:
            return
        self._num_calls += 1
        table = torch.zeros(self._transport.world_size, 1, dtype=torch.int64, device=self._transport.device)
        table[self._transport.rank] = _digest(name)
        self._pending = name, table, self._transport.all_reduce(table)

    @property
    def is_pending(self) -> bool:
        """Whether `check` may have to wait."""
        return self._pending is not None

    def check(self) -> None:
        """Wait until all ranks have begun a call, and compare. *Blocking.* Free if that was done.

        Raises:
            MismatchError: they called different things; the same error on every rank, now and from now on.
        """
        if self._error is not None:
            raise self._error
        if self._pending is None:
            return
        name, table, work = self._pending
        self._pending = None
        work.wait()
        digests = table.flatten().tolist()
        if any(digest != digests[0] for digest in digests):
            self._error = self._explain(name)
            raise self._error

    def call(self, name: str) -> None:
        """Do both. *Collective.* *Blocking.*"""
        self.post(name)
        self.check()

    def _explain(self, name: str) -> MismatchError:
        world_size = self._transport.world_size
        names = gather_bytes(self._transport, {self._transport.rank: name.encode()}, world_size)
        ranks: dict[str, list[str]] = {}
        for rank, other in enumerate(names):
            ranks.setdefault(other.decode(), []).append(str(rank))
        places = (f"rank{'s' * (len(who) > 1)} {', '.join(who)} in {where}" for where, who in ranks.items())
        return MismatchError(
            f"collective call {self._num_calls}: {'; '.join(places)}. Every rank must make the same calls in the "
            f"same order. What one rank does alone, under run.is_main, must need no other: forward passes, "
            f"state_dict() and fingerprint() don't."
        )


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
