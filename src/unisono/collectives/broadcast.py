"""Broadcast of one piece from one rank to all, along a binomial tree.

Cost for P ranks and n bytes: ceil(log2 P) rounds; the source sends n bytes in each of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from unisono.collectives.schedule import Receive, Round, Send
from unisono.errors import UsageError


@dataclass(frozen=True)
class Broadcast:
    """The schedule of a broadcast from rank `source`. The number of holders doubles with each round."""

    world_size: int
    source: int = 0
    piece: Hashable = "value"
    name = "broadcast"
    exact = True
    in_place = False
    num_chunks = 1

    @property
    def num_rounds(self) -> int:
        return (self.world_size - 1).bit_length()

    @property
    def result(self) -> Hashable:
        return self.piece

    def initial(self, rank: int) -> tuple[Hashable, ...]:
        return (self.piece,) if rank == self.source else ()

    def round(self, rank: int, index: int) -> Round:
        holders = 1 << index
        position = (rank - self.source) % self.world_size
        if position < holders:
            if position + holders >= self.world_size:
                return Round()
            return Round((Send(self.piece, 0, self._rank(position + holders)),))
        if position < 2 * holders:
            return Round((Receive(self.piece, 0, self._rank(position - holders)),))
        return Round()

    def _rank(self, position: int) -> int:
        return (position + self.source) % self.world_size


def broadcast(world_size: int, *, source: int = 0, piece: Hashable = "value") -> Broadcast:
    """Return the schedule that gives every rank the piece which rank `source` holds.

    Raises:
        UsageError: `source` is not a rank.
    """
    if not 0 <= source < world_size:
        raise UsageError(f"source={source}: expected a rank of 0 to {world_size - 1}.")
    return Broadcast(world_size, source, piece)
