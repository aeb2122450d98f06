"""What schedules have in common that add up the blocks of an assignment along the tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from unisono.grid import Assignment, Block, root


@dataclass(frozen=True)
class OverBlocks:
    """Begins with the blocks of `assignment` and ends with the root of the tree, on all ranks."""

    assignment: Assignment
    exact = True

    @property
    def world_size(self) -> int:
        return self.assignment.world_size

    @cached_property
    def result(self) -> Block:
        return root(self.assignment.num_micro_batches)

    def initial(self, rank: int) -> tuple[Block, ...]:
        return self.assignment.blocks[rank]
