"""One rank's walk through the rounds of a schedule, whatever memory its pieces lie in.

`copied.CopiedExecution` moves every piece over the wire, `mapped.MappedExecution` reads pieces where they lie
in a peer's memory. What both share is here: the loop, the additions, the scaling of the root.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.collectives.schedule import (
    Add,
    Exchange,
    Receive,
    Schedule,
    Send,
    Transfer,
    chunk_bounds,
)
from unisono.collectives.scratch import Scratch
from unisono.transport.base import Transport, Work


@dataclass(frozen=True)
class Call:
    """What one execution is asked to do.

    Args:
        pieces: flat tensors of one size and dtype, one for each piece that this rank holds at the start.
            They may be overwritten.
        out: where the result goes; a flat tensor of the same size and dtype.
        scale: what the result is multiplied with, once, by whoever forms it.
    """

    schedule: Schedule
    transport: Transport
    pieces: Mapping[Hashable, Tensor]
    out: Tensor
    scale: float
    scratch: Scratch


class Execution(ABC):
    """A walk through all rounds. Made for one call and thrown away."""

    def __init__(self, call: Call) -> None:
        schedule = call.schedule
        num_elements = call.out.numel()
        self.call = call
        self.transport = call.transport
        self.result = schedule.result
        self.bounds = [
            chunk_bounds(num_elements, schedule.num_chunks, chunk) for chunk in range(schedule.num_chunks)
        ]
        self.out = self.chunks(call.out)
        self.held: dict[tuple[Hashable, int], Tensor] = {}
        for piece, tensor in call.pieces.items():
            views = self.out if tensor is call.out else self.chunks(tensor)
            self.held.update(((piece, chunk), view) for chunk, view in enumerate(views))
        self.sends: list[tuple[int, Tensor]] = []
        self.receives: list[tuple[int, Tensor]] = []
        self.works: list[Work] = []

    def run(self) -> None:
        """Do all rounds, then see to it that the result is in `out`. *Blocking.*"""
        schedule, rank = self.call.schedule, self.transport.rank
        if self.result in self.call.pieces and self.call.scale != 1.0:
            self.call.pieces[self.result].mul_(self.call.scale)
        for index in range(schedule.num_rounds):
            step = schedule.round(rank, index)
            transfers = [each for each in step.transfers if not self.is_empty(each.chunk)]
            self._post(transfers)
            self._wait()
            for each in transfers:
                self.arrived(each)
            for add in step.adds:
                if not self.is_empty(add.chunk):
                    self._add(add)
        self.finish()

    def chunks(self, flat: Tensor) -> list[Tensor]:
        """Cut a flat tensor into the chunks of the schedule."""
        return [flat] if len(self.bounds) == 1 else [flat[start:stop] for start, stop in self.bounds]

    def is_empty(self, chunk: int) -> bool:
        start, stop = self.bounds[chunk]
        return start == stop

    def formed(self, piece: Hashable, chunk: int, tensor: Tensor) -> None:
        """Note that `tensor` now holds a sum; scale it if it is the root."""
        if piece == self.result and self.call.scale != 1.0:
            tensor.mul_(self.call.scale)
        self.held[piece, chunk] = tensor

    def copy_out(self) -> None:
        """Copy what lies elsewhere to `out`."""
        for chunk, target in enumerate(self.out):
            if not self.is_empty(chunk) and self.held[self.result, chunk] is not target:
                target.copy_(self.held[self.result, chunk])

    def _post(self, transfers: list[Transfer]) -> None:
        for each in transfers:
            if isinstance(each, Send):
                self.send(each)
            elif isinstance(each, Receive):
                self.receive(each)
            else:
                self.exchange(each)

    def _wait(self) -> None:
        if self.sends or self.receives:
            self.works.append(self.transport.start(self.sends, self.receives))
        for work in self.works:
            work.wait()
        self.sends, self.receives, self.works = [], [], []

    def _add(self, add: Add) -> None:
        left = self.held.pop((add.left, add.chunk))
        right = self.held.pop((add.right, add.chunk))
        target = self.target(add, left, right)
        torch.add(left, right, out=target)
        self.formed(add.out, add.chunk, target)

    @abstractmethod
    def send(self, transfer: Send) -> None:
        """Prepare one sending."""

    @abstractmethod
    def receive(self, transfer: Receive) -> None:
        """Prepare one receiving."""

    @abstractmethod
    def exchange(self, transfer: Exchange) -> None:
        """Prepare one exchange."""

    @abstractmethod
    def arrived(self, transfer: Transfer) -> None:
        """Hold what a transfer brought, now that all transfers of the round are finished."""

    @abstractmethod
    def target(self, add: Add, left: Tensor, right: Tensor) -> Tensor:
        """Say where the sum of `left` and `right` goes; it may be either of them."""

    @abstractmethod
    def finish(self) -> None:
        """Put the result into `out`, and leave nothing behind that a later call could disturb."""
