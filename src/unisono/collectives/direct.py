"""Direct exchange: chunk c is summed by rank c and sent to everyone.

Cost per rank, for P ranks, n bytes and b blocks of its own: b (P - 1) + P - 1 messages in two rounds,
b n (P - 1) / P bytes out for the operands and n (P - 1) / P for the result. Works for any assignment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from unisono.collectives.over_blocks import OverBlocks
from unisono.collectives.schedule import Add, Receive, Round, Send, Transfer
from unisono.grid import Assignment, Block


@dataclass(frozen=True)
class Direct(OverBlocks):
    """The schedule of a direct exchange over the blocks of `assignment`."""

    name = "direct"
    in_place = True

    @property
    def num_chunks(self) -> int:
        return self.world_size

    @property
    def num_rounds(self) -> int:
        return 1 if self.world_size == 1 else 2

    def round(self, rank: int, index: int) -> Round:
        # Peers in an order that begins behind oneself: no rank is everybody's first.
        peers = [(rank + distance) % self.world_size for distance in range(1, self.world_size)]
        if index == 0:
            return Round(tuple(self._gather(rank, peers)), self._additions(rank))
        return Round(tuple(self._spread(rank, peers)))

    def _gather(self, rank: int, peers: list[int]) -> Iterator[Transfer]:
        """Give each peer its chunk of my blocks, and take my chunk of theirs."""
        for peer in peers:
            for block in self.initial(rank):
                yield Send(block, peer, peer)
            if self.result not in self.initial(rank):
                for block in self.initial(peer):
                    yield Receive(block, rank, peer)

    def _spread(self, rank: int, peers: list[int]) -> Iterator[Transfer]:
        """Send the sum of my chunk to all, and take the others'. Who had all from the start needs nothing."""
        for peer in peers:
            if self.result not in self.initial(peer):
                yield Send(self.result, rank, peer)
            if self.result not in self.initial(rank):
                yield Receive(self.result, peer, peer)

    def _additions(self, chunk: int) -> tuple[Add, ...]:
        return tuple(Add(left, right, node, chunk) for left, right, node in self._sums)

    @cached_property
    def _sums(self) -> tuple[tuple[Block, Block, Block], ...]:
        """The nodes above all blocks, children before parents: (left, right, node)."""
        given = {block for blocks in self.assignment.blocks for block in blocks}

        def above(node: Block) -> Iterator[tuple[Block, Block, Block]]:
            if node not in given:
                left, right = node.halves()
                yield from above(left)
                yield from above(right)
                yield left, right, node

        return tuple(above(self.result))


def direct(assignment: Assignment) -> Direct:
    """Return the direct exchange for `assignment`, idle ranks included."""
    return Direct(assignment)
