"""The contract of a transport: one rank's end of a group of workers that can send each other tensors.

A transport moves bytes and adds nothing of its own, apart from the backend's all-reduce. Which bytes go where
and in which order they are added is decided by schedules (`unisono.collectives`); how long a wait may take is
decided by whoever calls `abort`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from unisono.errors import UsageError
from unisono.transport.memory_files import CommonMemory

CPU = torch.device("cpu")


class Work(Protocol):
    """Something posted that will be finished later."""

    def wait(self) -> None:
        """Return once it is finished; on an accelerator, once the current stream is ordered after it.

        *Blocking.*

        Raises:
            TransportError: the bytes could not be moved.
            Exception: the reason that was given to `Transport.abort`.
        """


class Finished:
    """Work that was finished when it was posted."""

    def wait(self) -> None:
        return None


class Transport(ABC):
    """One rank's end of a group. Used by one thread at a time, apart from `abort`. A context manager.

    Between one ordered pair of ranks messages match in the order in which they were posted, and the sizes of
    a message and of the tensor that receives it must be equal. Tensors are contiguous, of any dtype and any
    size; 0 bytes are legal and serve as a signal. A tensor that was posted must be left alone until its work
    was waited for.
    """

    rank: int
    world_size: int
    device: torch.device = CPU
    """Where tensors must be."""
    survives_lost_peer: bool = False
    """Whether those who are left can go on with this very group after a peer was lost."""
    hosts: tuple[tuple[int, ...], ...] = ()
    """The ranks of each host if those of one host map each other; else nothing. The same on all ranks."""

    @property
    def maps_peers(self) -> bool:
        """Whether `maps` is true for some of the group."""
        return bool(self.hosts)

    @property
    def is_on_one_host(self) -> bool:
        """Whether `maps` is true for any two ranks of the group."""
        return len(self.hosts) == 1

    @abstractmethod
    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Work:
        """Post all transfers of one round together: (peer, tensor) each. Returns at once."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Work:
        """Add up `tensor` over all ranks, in the backend's own order; integers are exact.

        *Collective: every rank calls this, in the same order.* *In place*, final once waited for.
        """

    def pair_sum(self, tensor: Tensor, peer: int) -> Work:
        """Add the peer's tensor to this one. Both ranks end with the same bits, those of one addition.

        Called by both ranks, in the same order. *In place*, final once waited for.
        """
        received = torch.empty_like(tensor)
        return _Addition(self.start([(peer, tensor)], [(peer, received)]), tensor, received)

    def maps(self, peer: int) -> bool:
        """Say whether this rank and `peer` can view each other's buffers. The same answer on both ranks."""
        return False

    def allocate(self, key: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat buffer, zero when new, which peers may be able to view under `key`.

        Where peers are mapped the same key, size and dtype give the same buffer again; another size or dtype
        replaces it.
        """
        return torch.zeros(num_elements, dtype=dtype, device=self.device)

    def publish(self, key: str, tensor: Tensor) -> bool:
        """Let peers view `tensor` under `key` too, if it is a buffer that was allocated here; say whether it is.

        Until another one is published or allocated under `key`.
        """
        return False

    def peer_view(self, peer: int, key: str) -> Tensor | None:
        """Return the buffer that `peer` allocated or published under `key`, or None if it can't be mapped.

        To be read only after a message from the peer that says so, and never to be written.
        """
        return None

    def common_memory(self, num_bytes: int) -> CommonMemory | None:
        """Return new memory of zeros that all ranks of this host read and write; None if there can't be any.

        *Collective among the ranks of a host.* *Blocking.* `num_bytes` is at least 1, the same on all.
        """
        return None

    @abstractmethod
    def abort(self, reason: Exception) -> None:
        """Make every pending and future wait of this rank raise `reason`. Callable from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Never waits for peers; may be called again."""

    def check_peer(self, peer: int) -> None:
        """Raise a `UsageError` unless `peer` is another rank of this group."""
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise UsageError(
                f"rank {self.rank}: there is no peer {peer}: expected another rank of 0 to "
                f"{self.world_size - 1}."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_contiguous(tensor: Tensor) -> None:
    """Raise a `UsageError` unless a tensor's bytes can be moved as they lie in memory."""
    if not tensor.is_contiguous():
        raise UsageError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous and can't be moved.")


class _Addition:
    """An exchange followed by one addition, which `wait` does, once."""

    def __init__(self, exchange: Work, tensor: Tensor, received: Tensor) -> None:
        self._exchange = exchange
        self._tensor = tensor
        self._received: Tensor | None = received

    def wait(self) -> None:
        self._exchange.wait()
        if self._received is not None:
            self._tensor.add_(self._received)
            self._received = None
