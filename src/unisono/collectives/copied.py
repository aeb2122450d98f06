"""Executing a schedule where every piece travels: the normal case."""

from __future__ import annotations

from torch import Tensor

from unisono.collectives.execution import Call, Execution
from unisono.collectives.schedule import Add, Exchange, Receive, Send, Transfer


class CopiedExecution(Execution):
    """Sums are formed in the memory of their operands, if possible where the result is to be in the end."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._next_slot = 0

    def send(self, transfer: Send) -> None:
        self.sends.append((transfer.peer, self.held[transfer.piece, transfer.chunk]))

    def receive(self, transfer: Receive) -> None:
        chunk = transfer.chunk
        tensor = self.out[chunk] if transfer.piece == self.result else self._take(chunk)
        self.receives.append((transfer.peer, tensor))
        self.held[transfer.piece, chunk] = tensor

    def exchange(self, transfer: Exchange) -> None:
        tensor = self.held.pop((transfer.mine, transfer.chunk))
        self.works.append(self.transport.pair_sum(tensor, transfer.peer))
        self.held[transfer.out, transfer.chunk] = tensor

    def arrived(self, transfer: Transfer) -> None:
        if isinstance(transfer, Exchange):
            out, chunk = transfer.out, transfer.chunk
            self.formed(out, chunk, self.held[out, chunk])

    def target(self, add: Add, left: Tensor, right: Tensor) -> Tensor:
        home = self.out[add.chunk]
        return home if add.out == self.result or right is home else left

    def finish(self) -> None:
        self.copy_out()

    def _take(self, chunk: int) -> Tensor:
        start, stop = self.bounds[chunk]
        self._next_slot += 1
        return self.call.scratch.take(self._next_slot, stop - start, like=self.call.out)
