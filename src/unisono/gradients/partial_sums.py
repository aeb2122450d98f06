"""Sums of own micro-batches' gradients, formed in the order of the tree while the step runs.

For one bucket, a worker goes through its micro-batches in ascending order. As in a binary counter, a finished
sum is added to its left neighbour in the tree as soon as both exist, so that a block of n micro-batches
needs floor(log2 n) + 1 buffers at most, the gradients of the running micro-batch included.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from unisono.gradients.buckets import Bucket
from unisono.grid import Block, parent, root

Allocate = Callable[[int, int, torch.dtype], Tensor]


def count_merges(blocks: Iterable[Block], num_micro_batches: int) -> dict[int, int]:
    """Return, for each own micro-batch, how many additions finishing it makes possible. Pure."""
    merges = {}
    for block in blocks:
        for leaf in range(block.start, block.stop):
            node, count = Block(leaf, leaf + 1), 0
            while node not in (block, root(num_micro_batches)):
                above = parent(node, num_micro_batches)
                if above.halves()[1] != node:
                    break
                node, count = above, count + 1
            merges[leaf] = count
    return merges


class Flat:
    """A bucket's buffer together with the views of its slots, which cost a microsecond each to make."""

    def __init__(self, bucket: Bucket, tensor: Tensor) -> None:
        self.tensor = tensor
        self.views = [slot.view(tensor) for slot in bucket.slots]


class PartialSums:
    """The partial sums of one bucket over one worker's blocks.

    Call `begin`, then `absorb` once for each own micro-batch in ascending order, then read `partials`. Buffers
    are kept from step to step: a second step allocates nothing.

    Args:
        allocate: ``allocate(number, num_elements, dtype)`` returns buffer number `number`, flat, zero when new.
    """

    def __init__(self, bucket: Bucket, allocate: Allocate | None = None) -> None:
        self.bucket = bucket
        self._allocate = allocate
        self._num_buffers = 0
        self._free: list[Flat] = []
        self._stack: list[tuple[Block, Flat]] = []
        self._others: dict[int, Flat] = {}
        self._merges: dict[int, int] = {}
        self._opened: Flat | None = None
        self._scale = 1.0

    def begin(self, merges: dict[int, int], *, scale: float = 1.0) -> None:
        """Start a step in which `merges` (see `count_merges`) says what each own micro-batch completes.

        Every gradient is multiplied by `scale` before anything is added to it.
        """
        self._scale = scale
        self._free += [flat for _, flat in self._stack]
        self._stack, self._merges = [], merges

    def streams(self, leaf: int) -> bool:
        """Whether gradients of `leaf` may go to memory of their own as they come, before all are there."""
        return self._merges[leaf] == 0

    def open(self) -> list[Tensor]:
        """Return views, one for each slot, of where a micro-batch that streams will go.

        Gradients that are written there before `absorb` need not be copied any more.
        """
        if self._opened is None:
            self._opened = self._take()
        return self._opened.views

    def absorb(self, leaf: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Add the gradients of one micro-batch; None counts as +0.0 everywhere.

        Args:
            leaf: the micro-batch.
            gradients: one for each slot of the bucket, of the slot's shape; may be views that `open` returned,
                and then are scaled already. Others may be overwritten.

        Returns:
            Views, one for each slot, of the buffer that now holds the sum this micro-batch went into.
        """
        merges = self._merges[leaf]
        if merges == 0:
            flat = self._opened or self._take()
            self._opened = None
            self._fill(flat, gradients, self._scale)
            self._stack.append((Block(leaf, leaf + 1), flat))
            return flat.views
        block, flat = self._stack[-1]
        self._add(flat, gradients, self._scale)
        self._stack[-1] = (Block(block.start, leaf + 1), flat)
        for _ in range(merges - 1):
            _, right = self._stack.pop()
            left_block, left = self._stack[-1]
            left.tensor.add_(right.tensor)
            self._free.append(right)
            self._stack[-1] = (Block(left_block.start, leaf + 1), left)
        return self._stack[-1][1].views

    def partials(self) -> dict[Hashable, Tensor]:
        """Return the sum of each own block, a flat tensor of the bucket's size."""
        return {block: flat.tensor for block, flat in self._stack}

    def views_of(self, tensor: Tensor) -> list[Tensor]:
        """Return the slots of `tensor`, a flat tensor of this bucket. Free for a tensor seen before."""
        for _, flat in self._stack:
            if flat.tensor is tensor:
                return flat.views
        address = tensor.data_ptr()
        if address not in self._others:
            self._others = {address: Flat(self.bucket, tensor)}
        return self._others[address].views

    def _take(self) -> Flat:
        if self._free:
            return self._free.pop()
        # Zeros, because the gaps between slots are summed and sent like everything else.
        bucket = self.bucket
        if self._allocate is None:
            return Flat(bucket, torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=bucket.device))
        number, self._num_buffers = self._num_buffers, self._num_buffers + 1
        return Flat(bucket, self._allocate(number, bucket.num_elements, bucket.dtype))

    @staticmethod
    def _fill(flat: Flat, gradients: Sequence[Tensor | None], scale: float) -> None:
        views, present = [], []
        for view, gradient in zip(flat.views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                views.append(view)
                present.append(gradient)
        if present and scale != 1.0:
            torch._foreach_mul_(present, scale)
        if present:
            torch._foreach_copy_(views, present)

    @staticmethod
    def _add(flat: Flat, gradients: Sequence[Tensor | None], scale: float) -> None:
        views, present = [], []
        for view, gradient in zip(flat.views, gradients, strict=True):
            if gradient is None:
                view.add_(0.0)  # turns -0.0 into +0.0, as adding a leaf of zeros does
            else:
                views.append(view)
                present.append(gradient)
        if present and scale != 1.0:
            # Not while adding: a fused product is rounded differently where it is subnormal.
            torch._foreach_mul_(present, scale)
        if present:
            torch._foreach_add_(views, present)
