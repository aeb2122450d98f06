"""Who updates which part of which parameter. Pure: only sizes come in, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 4096
"""Elements. Parameters are cut at multiples of it: vectorised kernels round the rest of a vector differently, and
norms of gradients are sums over such blocks."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `start` to `stop - 1` of parameter number `index`, in the order in which they lie in memory."""

    index: int
    start: int
    stop: int


def share_out(sizes: Sequence[int], can_cut: Sequence[bool], num_ranks: int) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of each rank: about as many elements for all, in the order of the parameters.

    Args:
        sizes: number of elements of each parameter.
        can_cut: whether a parameter may be cut between ranks; else it has one owner.
        num_ranks: P.
    """
    total = max(sum(sizes), 1)
    parts: list[list[Part]] = [[] for _ in range(num_ranks)]
    offset = 0
    for index, (size, cuts) in enumerate(zip(sizes, can_cut, strict=True)):
        if not cuts:
            owner = min((offset + size // 2) * num_ranks // total, num_ranks - 1)
            parts[owner].append(Part(index, 0, size))
            offset += size
            continue
        start = 0
        for rank in range(num_ranks):
            # Up to where the rank's part of all elements ends, in whole blocks.
            end = -(-total * (rank + 1) // num_ranks)
            stop = min(size, max(start, -(-max(end - offset, 0) // BLOCK) * BLOCK))
            if rank == num_ranks - 1:
                stop = size
            if stop > start:
                parts[rank].append(Part(index, start, stop))
                start = stop
        if size == 0:
            parts[0].append(Part(index, 0, 0))
        offset += size
    return tuple(tuple(each) for each in parts)
