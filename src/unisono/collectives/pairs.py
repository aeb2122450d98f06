"""Pairs: in each round two ranks that own the two halves of a node form it together.

Cost per rank, for P = 2^k ranks and n bytes: k rounds, each a sum over two ranks of all n bytes, which a
backend's own all-reduce does with n bytes out and n in. Needs one block a rank, all at the same depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from unisono.collectives.over_blocks import OverBlocks
from unisono.collectives.schedule import Exchange, Round
from unisono.errors import UsageError
from unisono.grid import Assignment, Block, root


@dataclass(frozen=True)
class Pairs(OverBlocks):
    """The schedule that joins siblings, from the blocks of `assignment` up to the root."""

    name = "pairs"
    in_place = False
    num_chunks = 1

    @property
    def num_rounds(self) -> int:
        return self.world_size.bit_length() - 1

    def round(self, rank: int, index: int) -> Round:
        position = self._order.index(rank)
        peer = self._order[position ^ (1 << index)]
        node = self._node(position >> (index + 1), index + 1)
        left, right = node.halves()
        mine, theirs = (right, left) if position >> index & 1 else (left, right)
        return Round((Exchange(mine, theirs, node, 0, peer),))

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """The ranks from left to right."""
        return tuple(sorted(range(self.world_size), key=lambda rank: self.initial(rank)[0].start))

    def _node(self, position: int, height: int) -> Block:
        """Return the node `height` levels above the blocks; `position` counts the nodes of that level."""
        first = self._order[position << height]
        last = self._order[(position + 1 << height) - 1]
        return Block(self.initial(first)[0].start, self.initial(last)[0].stop)


def can_pair(assignment: Assignment) -> bool:
    """Say whether every rank owns exactly one block and all of them are one level of the tree. *Pure.*"""
    if any(len(blocks) != 1 for blocks in assignment.blocks):
        return False
    level = [root(assignment.num_micro_batches)]
    while len(level) < assignment.world_size and not any(node.is_leaf for node in level):
        level = [half for node in level for half in node.halves()]
    return set(level) == {blocks[0] for blocks in assignment.blocks}


def pairs(assignment: Assignment) -> Pairs:
    """Return the schedule of pairs for `assignment`.

    Raises:
        UsageError: the assignment is not one block a rank, all at the same depth of the tree.
    """
    if not can_pair(assignment):
        shares = [len(assignment.micro_batches(rank)) for rank in range(assignment.world_size)]
        raise UsageError(
            f"algorithm='pairs' needs 2, 4, 8, ... workers whose shares are the nodes of one level of the "
            f"tree over {assignment.num_micro_batches} micro-batches; the shares are {shares}. "
            f"Use algorithm='auto' or 'direct', which take any shares."
        )
    return Pairs(assignment)
