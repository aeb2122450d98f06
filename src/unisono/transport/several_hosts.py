"""A transport for CPU workers on several hosts: shared memory within a host, a process group between hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.errors import TransportError
from unisono.transport.base import Transport, Work
from unisono.transport.local import Aborted
from unisono.transport.memory_files import CommonMemory
from unisono.transport.posted_sums import PostedSums


class SeveralHostsTransport(Transport):
    """One rank's end of a group on several hosts.

    Args:
        hosts: the ranks of each host.
        within: connects the ranks of this rank's host.
        between: connects all ranks.
        leaders: connects the first rank of each host; None on others.
    """

    def __init__(
        self,
        hosts: tuple[tuple[int, ...], ...],
        *,
        within: Transport,
        between: Transport,
        leaders: Transport | None,
    ) -> None:
        self.hosts = hosts
        self.rank = between.rank
        self.world_size = between.world_size
        self._within = within
        self._between = between
        self._leaders = leaders
        (self._near,) = (ranks for ranks in hosts if self.rank in ranks)
        self._sums = PostedSums(self._sum)
        self._reason: Exception | None = None

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Work:
        for peer, _ in (*sends, *receives):
            self.check_peer(peer)
        near_sends, far_sends = self._divide(sends)
        near_receives, far_receives = self._divide(receives)
        works = []
        if far_sends or far_receives:
            works.append(self._between.start(far_sends, far_receives))
        if near_sends or near_receives or not works:
            works.append(self._within.start(near_sends, near_receives))
        return works[0] if len(works) == 1 else _Both(works)

    def all_reduce(self, tensor: Tensor) -> Work:
        if self._reason is not None:
            return Aborted(self._reason)
        return self._sums.post(tensor)

    def maps(self, peer: int) -> bool:
        return peer in self._near and peer != self.rank

    def allocate(self, key: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        return self._within.allocate(key, num_elements, dtype)

    def publish(self, key: str, tensor: Tensor) -> bool:
        return self._within.publish(key, tensor)

    def peer_view(self, peer: int, key: str) -> Tensor | None:
        return self._within.peer_view(peer, key) if self.maps(peer) else None

    def common_memory(self, num_bytes: int) -> CommonMemory | None:
        return self._within.common_memory(num_bytes)

    def abort(self, reason: Exception) -> None:
        if self._reason is None:
            self._reason = reason
        for each in self._all():
            each.abort(reason)

    def close(self) -> None:
        if self._reason is None:
            self._reason = TransportError(f"rank {self.rank}: the transport is closed.")
        for each in self._all():
            each.close()

    def _sum(self, tensor: Tensor) -> None:
        """Add up on the host, then among the first of each host, who tell the others of theirs."""
        self._within.all_reduce(tensor).wait()
        if self._leaders is not None:
            self._leaders.all_reduce(tensor).wait()
            self._within.start([(peer, tensor) for peer in self._near[1:]], []).wait()
        else:
            self._within.start([], [(self._near[0], tensor)]).wait()

    def _divide(
        self, transfers: Sequence[tuple[int, Tensor]]
    ) -> tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
        """Return those with ranks of this host, and those with others."""
        near = [each for each in transfers if each[0] in self._near]
        return near, [each for each in transfers if each[0] not in self._near]

    def _all(self) -> list[Transport]:
        return [each for each in (self._within, self._leaders, self._between) if each is not None]


class _Both:
    """Transfers within the host and to others."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
