"""The grid of micro-batches, the summation tree over it, and who owns which part.

A global batch is cut into ``M`` micro-batches, numbered 0 to M-1. One binary tree over these numbers says
in which order their gradients are added. A node of the tree is a `Block`, a contiguous range of
micro-batches; it splits at the largest power of two below its length, so that subtrees are aligned to powers
of two whatever M is::

    M = 6:   [0,6) = [0,4) + [4,6)     [0,4) = [0,2) + [2,4)     [0,2) = [0] + [1]   ...

A worker owns a set of blocks. It forms the sum of each block alone and sends only that, so what is added to
what never depends on how the blocks are spread.

Everything here is pure: no tensors, no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from unisono.errors import UsageError

T = TypeVar("T")


class Block(NamedTuple):
    """A node of the summation tree: micro-batches ``start`` to ``stop - 1``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def is_leaf(self) -> bool:
        return self.size == 1

    def halves(self) -> tuple[Block, Block]:
        """Return the two blocks whose sum this block is. Not defined for a leaf."""
        middle = self.start + (1 << ((self.size - 1).bit_length() - 1))
        return Block(self.start, middle), Block(middle, self.stop)


def root(num_micro_batches: int) -> Block:
    """Return the block of all micro-batches."""
    return Block(0, num_micro_batches)


def parent(block: Block, num_micro_batches: int) -> Block:
    """Return the node of which `block` is one half. Not defined for the root."""
    node = root(num_micro_batches)
    while True:
        left, right = node.halves()
        if block in (left, right):
            return node
        node = left if block.start < left.stop else right


def cut(num_samples: int, num_micro_batches: int) -> tuple[range, ...]:
    """Cut ``num_samples`` positions into contiguous micro-batches whose sizes differ by at most 1.

    Larger ones come first, so that with fewer samples than micro-batches the empty ones are at the end.
    """
    size, larger = divmod(num_samples, num_micro_batches)
    starts = [index * size + min(index, larger) for index in range(num_micro_batches + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def tree_sum(leaves: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Add `leaves` in the order of the tree. The definition that everything else is compared with."""

    def total(block: Block) -> T:
        if block.is_leaf:
            return leaves[block.start]
        left, right = block.halves()
        return add(total(left), total(right))

    return total(root(len(leaves)))


@dataclass(frozen=True)
class Assignment:
    """Which worker owns which blocks of the tree, for one step.

    Args:
        num_micro_batches: M, the size of the grid.
        blocks: for each rank its blocks, in ascending order. Together they cover the grid exactly once.
    """

    num_micro_batches: int
    blocks: tuple[tuple[Block, ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.blocks)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank that owns each micro-batch."""
        owners = [-1] * self.num_micro_batches
        for rank, blocks in enumerate(self.blocks):
            for block in blocks:
                owners[block.start : block.stop] = [rank] * block.size
        return tuple(owners)

    def micro_batches(self, rank: int) -> tuple[int, ...]:
        """Return the micro-batches of one rank, ascending."""
        return tuple(index for block in self.blocks[rank] for index in range(block.start, block.stop))


def even_shares(num_micro_batches: int, world_size: int) -> tuple[int, ...]:
    """Return how many micro-batches each rank gets when all are equally fast."""
    return tuple(len(part) for part in cut(num_micro_batches, world_size))


def scale_shares(num_micro_batches: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Return `shares` scaled so that they add up to the grid, by largest remainder. Pure.

    ``[3, 1]`` over 8 micro-batches is ``(6, 2)``. Needs a positive sum.
    """
    total = sum(shares)
    exact = [divmod(share * num_micro_batches, total) for share in shares]
    counts = [quotient for quotient, _ in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-exact[rank][1], rank))
    for rank in by_remainder[: num_micro_batches - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def assign(num_micro_batches: int, shares: Sequence[int], *, allow_idle: bool = False) -> Assignment:
    """Lay out blocks so that rank r owns ``shares[r]`` micro-batches in as few blocks as possible.

    A share of n is popcount(n) blocks of powers of two. Laid out from the largest to the smallest, each one
    starts at a multiple of its own size, so it is a node of the tree.

    Raises:
        UsageError: a share is negative, the shares don't add up, or a rank is idle without `allow_idle`.
    """
    check_shares(num_micro_batches, shares, allow_idle=allow_idle)
    powers = [
        (1 << bit, rank)
        for rank, share in enumerate(shares)
        for bit in range(share.bit_length())
        if share >> bit & 1
    ]
    blocks: list[list[Block]] = [[] for _ in shares]
    start = 0
    for size, rank in sorted(powers, key=lambda item: (-item[0], item[1])):
        blocks[rank].append(Block(start, start + size))
        start += size
    return Assignment(num_micro_batches, tuple(tuple(_merged(own, num_micro_batches)) for own in blocks))


def check_shares(num_micro_batches: int, shares: Sequence[int], *, allow_idle: bool) -> None:
    """Raise a `UsageError` unless `shares` can be laid out over the grid."""
    if num_micro_batches < 1:
        raise UsageError(f"micro_batches={num_micro_batches}: expected at least 1.")
    if any(share < 0 for share in shares):
        raise UsageError(f"assignment={list(shares)}: a worker can't own a negative number of micro-batches.")
    if sum(shares) != num_micro_batches:
        raise UsageError(
            f"assignment={list(shares)} adds up to {sum(shares)}, expected micro_batches={num_micro_batches}."
        )
    if 0 in shares and not allow_idle:
        raise UsageError(
            f"{len(shares)} workers but only {num_micro_batches} micro-batches, shared out as {list(shares)}: "
            f"some workers would have nothing to do. Set micro_batches={max(len(shares), num_micro_batches)} "
            f"or more with a share for every worker, start fewer workers, or allow it with --allow-idle."
        )


def _merged(blocks: Sequence[Block], num_micro_batches: int) -> Iterator[Block]:
    """Yield `blocks` in ascending order, with two halves of the same node replaced by the node."""
    pending: list[Block] = []
    for block in sorted(blocks):
        pending.append(block)
        while len(pending) > 1 and pending[-1] != root(num_micro_batches):
            node = parent(pending[-1], num_micro_batches)
            if node.halves() != (pending[-2], pending[-1]):
                break
            pending[-2:] = [node]
    yield from pending
