"""Sums of sparse gradients along the tree; the result is coalesced at every node.

A row that only one of two operands has is taken over, one that both have is their sum, so that a node has the
same bits whoever forms it. Rows that no sample touched are never stored or sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from unisono.grid import Assignment, Block, root

Gathers = Callable[[Mapping[int, Tensor], int], Sequence[Tensor]]


def declared_sparse(model: nn.Module) -> set[int]:
    """Return the ids of parameters whose module says that their gradients are sparse, as nn.Embedding does."""
    return {
        id(parameter)
        for module in model.modules()
        if getattr(module, "sparse", None) is True
        for parameter in module.parameters(recurse=False)
    }


class SparseSums:
    """The partial sums of one parameter over one worker's blocks; see `PartialSums` for the calls."""

    def __init__(self) -> None:
        self._stack: list[tuple[Block, Tensor | None]] = []
        self._merges: dict[int, int] = {}

    def begin(self, merges: dict[int, int]) -> None:
        """Start a step, see `unisono.gradients.partial_sums.count_merges`."""
        self._stack, self._merges = [], merges

    def absorb(self, leaf: int, gradient: Tensor | None) -> None:
        """Add the gradient of one micro-batch; None has no rows."""
        total = None if gradient is None else gradient.coalesce()
        self._stack.append((Block(leaf, leaf + 1), total))
        for _ in range(self._merges[leaf]):
            _, right = self._stack.pop()
            block, left = self._stack.pop()
            self._stack.append((Block(block.start, leaf + 1), _add(left, right)))

    def partials(self) -> dict[Block, Tensor | None]:
        """Return the sum of each own block."""
        return dict(self._stack)


def join_sparse(
    sums: Sequence[SparseSums],
    parameters: Sequence[nn.Parameter],
    assignment: Assignment,
    gather: Gathers | None,
) -> list[Tensor | None]:
    """Return the sum of each parameter over the whole grid. *Collective.*

    Cost: two all-reduces, one of sizes and one of n bytes, where n is what rows and indices of all blocks of all
    workers take together; every worker adds all of them up.

    Args:
        sums: one for each parameter.
        parameters: for their shapes.
        gather: ``gather(parts, num_parts)`` returns all parts, of which each rank has some; None if this
            worker has all.
    """
    blocks = sorted(block for blocks in assignment.blocks for block in blocks)
    own = [each.partials() for each in sums]
    totals: list[dict[Block, Tensor | None]] = own
    if gather is not None:
        parts = {}
        for at, block in enumerate(blocks):
            for which, partial in enumerate(own):
                if block in partial:
                    place = 2 * (at * len(sums) + which)
                    parts[place], parts[place + 1] = _split(partial[block], parameters[which])
        received = gather(parts, 2 * len(blocks) * len(sums))
        totals = [
            {
                block: _unite(*received[2 * (at * len(sums) + which) :][:2], like=parameter)
                for at, block in enumerate(blocks)
            }
            for which, parameter in enumerate(parameters)
        ]
    return [_total(root(assignment.num_micro_batches), of_block) for of_block in totals]


def _total(block: Block, of_block: Mapping[Block, Tensor | None]) -> Tensor | None:
    if block in of_block:
        return of_block[block]
    left, right = block.halves()
    return _add(_total(left, of_block), _total(right, of_block))


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return (left + right).coalesce()


def _split(total: Tensor | None, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    if total is None:
        return torch.empty(0, 0, dtype=torch.int64), torch.empty(0, dtype=parameter.dtype)
    return total.indices(), total.values()


def _unite(indices: Tensor, values: Tensor, *, like: nn.Parameter) -> Tensor | None:
    if not indices.shape[0]:
        return None
    return torch.sparse_coo_tensor(
        indices, values, like.shape, device=like.device, is_coalesced=True, check_invariants=False
    )
