"""N ranks in one process, a thread each: for tests, and for trying what happens when things go wrong.

A message is copied once, from the sender's tensor to the receiver's, by the receiver while it waits; until
then the sender's wait does not return either. So a schedule that only works because messages are buffered, or
that overwrites what it has not finished sending, fails here.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from unisono.errors import DeadlineError, MismatchError, TransportError, WorkerLostError
from unisono.transport.base import Transport, Work, check_contiguous
from unisono.transport.local import Aborted

T = TypeVar("T")


@dataclass(frozen=True)
class Lose:
    """Lose a rank at its operation number `operation` (from 0): it stops there, its peers are told."""

    rank: int
    operation: int


@dataclass(frozen=True)
class Delay:
    """Let a rank post its operation number `operation` later."""

    rank: int
    operation: int
    delay_s: float


@dataclass(frozen=True)
class Drop:
    """Let the messages that a rank sends in its operation number `operation` never arrive."""

    rank: int
    operation: int


Fault = Lose | Delay | Drop


class LostHere(TransportError):
    """Raised in the thread of a rank that a `Lose` fault takes away."""


@dataclass
class _Message:
    """A message on its way."""

    tensor: Tensor
    taken: bool = False

    def is_taken(self) -> bool:
        """Say whether the receiver has copied it."""
        return self.taken


@dataclass
class _Sum:
    """An all-reduce in which some ranks have posted their tensors. `total` once all have."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | None = None
    error: Exception | None = None


class ThreadWorld:
    """What the ranks share: mailboxes, sums, buffers, and who is lost. One lock guards it all.

    Args:
        world_size: how many ranks.
        hosts: the ranks of each host; those of one host can view each other's buffers. Without it none can.
        faults: what goes wrong, and when.
        timeout_s: the deadline of every wait.
    """

    def __init__(
        self,
        world_size: int,
        *,
        hosts: tuple[tuple[int, ...], ...] = (),
        faults: Sequence[Fault] = (),
        timeout_s: float = 30.0,
    ) -> None:
        self.world_size = world_size
        self.hosts = hosts
        self.faults = {(fault.rank, fault.operation): fault for fault in faults}
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.lost: dict[int, str] = {}
        self.mailboxes: defaultdict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self.sums: defaultdict[int, _Sum] = defaultdict(_Sum)
        self.buffers: dict[tuple[int, str], Tensor] = {}
        self.named: dict[tuple[int, str], Tensor] = {}

    def transport(self, rank: int) -> ThreadTransport:
        """Return one rank's end. A rank that was lost is back."""
        with self.changed:
            self.lost.pop(rank, None)
        return ThreadTransport(self, rank)

    def lose(self, rank: int, why: str) -> None:
        """Take a rank away: whoever waits for it, now or later, gets a `WorkerLostError` that says why."""
        with self.changed:
            self.lost.setdefault(rank, why)
            self.changed.notify_all()

    def run(self, function: Callable[[ThreadTransport], T]) -> list[T | None]:
        """Run ``function(transport)`` on a thread for every rank and return the results by rank.

        The result of a rank that a `Lose` fault took away is None. *Blocking.*

        Raises:
            BaseException: the first error of any rank; a rank that failed is lost for the others.
        """
        results: list[T | None] = [None] * self.world_size
        errors: list[BaseException] = []

        def work(transport: ThreadTransport) -> None:
            rank = transport.rank
            try:
                results[rank] = function(transport)
            except LostHere:
                return
            except BaseException as error:
                with self.changed:
                    errors.append(error)
                self.lose(rank, f"it failed with {type(error).__name__}: {error}")
            finally:
                transport.close()

        threads = [
            threading.Thread(target=work, args=(transport,), name=f"rank-{transport.rank}")
            for transport in [self.transport(rank) for rank in range(self.world_size)]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class ThreadTransport(Transport):
    """One rank's end of a `ThreadWorld`."""

    survives_lost_peer = True

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.world_size = world.world_size
        self.hosts = world.hosts
        self._reason: Exception | None = None
        self._num_operations = 0
        self._num_sums = 0

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Work:
        for peer, tensor in (*sends, *receives):
            self.check_peer(peer)
            check_contiguous(tensor)
        fault = self._begin()
        if self._reason is not None:
            return Aborted(self._reason)
        sent = [(peer, _Message(tensor)) for peer, tensor in sends]
        if not isinstance(fault, Drop):
            with self.world.changed:
                for peer, message in sent:
                    self.world.mailboxes[self.rank, peer].append(message)
                self.world.changed.notify_all()
        return _Transfers(self, sent, list(receives))

    def all_reduce(self, tensor: Tensor) -> Work:
        check_contiguous(tensor)
        self._begin()
        if self._reason is not None:
            return Aborted(self._reason)
        world, number = self.world, self._num_sums
        self._num_sums += 1
        with world.changed:
            entry = world.sums[number]
            entry.tensors[self.rank] = tensor
            if len(entry.tensors) == world.world_size:
                _complete(entry)
                del world.sums[number]
                world.changed.notify_all()
        return _SumWork(self, entry, tensor)

    def maps(self, peer: int) -> bool:
        return any(self.rank in ranks and peer in ranks for ranks in self.hosts)

    def allocate(self, key: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        with self.world.changed:
            buffer = self.world.buffers.get((self.rank, key))
            if buffer is None or buffer.numel() != num_elements or buffer.dtype != dtype:
                buffer = super().allocate(key, num_elements, dtype)
                self.world.buffers[self.rank, key] = buffer
            self.world.named[self.rank, key] = buffer
            return buffer

    def publish(self, key: str, tensor: Tensor) -> bool:
        with self.world.changed:
            buffers = self.world.buffers
            is_ours = any(rank == self.rank and each is tensor for (rank, _), each in buffers.items())
            if is_ours:
                self.world.named[self.rank, key] = tensor
            return is_ours and self.maps_peers

    def peer_view(self, peer: int, key: str) -> Tensor | None:
        if not self.maps(peer):
            return None
        with self.world.changed:
            return self.world.named.get((peer, key))

    def abort(self, reason: Exception) -> None:
        with self.world.changed:
            if self._reason is None:
                self._reason = reason
            self.world.changed.notify_all()

    def close(self) -> None:
        self.abort(TransportError(f"rank {self.rank}: the transport is closed."))
        self.world.lose(self.rank, "it closed its end")

    def wait_until(self, is_true: Callable[[], bool], what: str, needed: Sequence[int]) -> None:
        """Wait, holding the world's lock, until `is_true`. `needed` are the ranks that have to do it."""
        world = self.world
        deadline = time.monotonic() + world.timeout_s
        while True:
            if self._reason is not None:
                raise self._reason
            if is_true():
                return
            for peer in needed:
                if peer in world.lost:
                    raise WorkerLostError(
                        f"rank {self.rank}: lost rank {peer} in {what}: {world.lost[peer]}."
                    )
            if not world.changed.wait(deadline - time.monotonic()):
                raise DeadlineError(
                    f"rank {self.rank}: waited {world.timeout_s:g} s for ranks {list(needed)} in {what}."
                )

    def _begin(self) -> Fault | None:
        """Count an operation and let its fault happen."""
        fault = self.world.faults.get((self.rank, self._num_operations))
        self._num_operations += 1
        if isinstance(fault, Lose):
            self.world.lose(self.rank, f"taken away at its operation {fault.operation}")
            raise LostHere(f"rank {self.rank}: taken away at its operation {fault.operation}.")
        if isinstance(fault, Delay):
            with self.world.changed:
                self.world.changed.wait_for(lambda: self._reason is not None, timeout=fault.delay_s)
        return fault


class _Transfers:
    """The messages of one `start`."""

    def __init__(
        self,
        owner: ThreadTransport,
        sent: list[tuple[int, _Message]],
        receives: list[tuple[int, Tensor]],
    ) -> None:
        self._owner = owner
        self._sent = sent
        self._receives = receives

    def wait(self) -> None:
        owner, world = self._owner, self._owner.world
        with world.changed:
            while self._receives:
                peer, tensor = self._receives[0]
                mailbox = world.mailboxes[peer, owner.rank]
                owner.wait_until(partial(bool, mailbox), f"receiving from rank {peer}", [peer])
                _take(mailbox.popleft(), tensor, rank=owner.rank, peer=peer)
                self._receives.pop(0)
                world.changed.notify_all()
            while self._sent:
                peer, message = self._sent[0]
                owner.wait_until(message.is_taken, f"sending to rank {peer}", [peer])
                self._sent.pop(0)


class _SumWork:
    """One rank's part in an all-reduce."""

    def __init__(self, owner: ThreadTransport, entry: _Sum, tensor: Tensor) -> None:
        self._owner = owner
        self._entry: _Sum | None = entry
        self._tensor = tensor

    def wait(self) -> None:
        entry, owner = self._entry, self._owner
        if entry is None:
            return
        with owner.world.changed:
            missing = [rank for rank in range(owner.world_size) if rank not in entry.tensors]
            owner.wait_until(
                lambda: entry.total is not None or entry.error is not None, "an all-reduce", missing
            )
        if entry.error is not None or entry.total is None:
            raise MismatchError(f"rank {owner.rank}: {entry.error}") from entry.error
        self._tensor.copy_(entry.total)
        self._entry = None


def _complete(entry: _Sum) -> None:
    """Add up in the order of ranks, once all are there."""
    tensors = [entry.tensors[rank] for rank in sorted(entry.tensors)]
    if any(each.shape != tensors[0].shape or each.dtype != tensors[0].dtype for each in tensors):
        kinds = [(tuple(each.shape), each.dtype) for each in tensors]
        entry.error = MismatchError(f"the ranks gave tensors of different kinds to an all-reduce: {kinds}.")
        return
    total = tensors[0].clone()
    for each in tensors[1:]:
        total += each
    entry.total = total


def _take(message: _Message, tensor: Tensor, *, rank: int, peer: int) -> None:
    """Copy a message, byte for byte, to where it is received."""
    if message.tensor.nbytes != tensor.nbytes:
        raise MismatchError(
            f"rank {rank}: received {message.tensor.nbytes} bytes from rank {peer}, expected {tensor.nbytes}: "
            f"the ranks disagree on what is sent."
        )
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).copy_(message.tensor.reshape(-1).view(torch.uint8))
    message.taken = True
