"""The transport of a run with one worker: nobody to talk to, so that callers need no special case."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.transport.base import CPU, Finished, Transport, Work


class LocalTransport(Transport):
    """A group of one. Its sums are what they were; any transfer is an error, since there is no peer."""

    rank = 0
    world_size = 1
    survives_lost_peer = True

    def __init__(self, *, device: torch.device = CPU) -> None:
        self.device = device
        self._reason: Exception | None = None

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Work:
        for peer, _ in (*sends, *receives):
            self.check_peer(peer)
        return self._work()

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._work()

    def abort(self, reason: Exception) -> None:
        self._reason = reason

    def close(self) -> None:
        return None

    def _work(self) -> Work:
        return Finished() if self._reason is None else Aborted(self._reason)


class Aborted:
    """Work posted after an abort."""

    def __init__(self, reason: Exception) -> None:
        self._reason = reason

    def wait(self) -> None:
        raise self._reason
