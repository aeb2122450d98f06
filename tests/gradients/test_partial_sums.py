from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unisono.gradients.buckets import Bucket, plan_buckets
from unisono.gradients.partial_sums import PartialSums, count_merges
from unisono.grid import Assignment, Block, assign, root, tree_sum

SIZES = (5, 1, 40)


def bucket_of(dtype: torch.dtype = torch.float32) -> Bucket:
    tensors = [torch.zeros(size, dtype=dtype) for size in SIZES]
    (bucket,) = plan_buckets(tensors, order=range(len(SIZES)), bucket_bytes=10**6, first_bucket_bytes=10**6)
    return bucket


def gradients_of(leaf: int, dtype: torch.dtype = torch.float32, exponent: int = 0) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(leaf)
    drawn = [torch.randn(size, generator=generator).mul(2.0**exponent).to(dtype) for size in SIZES]
    return [None if (leaf + at) % 4 == 0 else gradient for at, gradient in enumerate(drawn)]


def expected_total(leaves: Sequence[list[Tensor | None]], dtype: torch.dtype) -> list[Tensor]:
    filled = [
        [torch.zeros(size, dtype=dtype) if g is None else g for g, size in zip(leaf, SIZES, strict=True)]
        for leaf in leaves
    ]
    return [tree_sum([leaf[at] for leaf in filled], torch.add) for at in range(len(SIZES))]


def joined(assignment: Assignment, bucket: Bucket, leaves: Sequence[list[Tensor | None]]) -> list[Tensor]:
    """Sum every worker's own blocks with `PartialSums`, then those of all workers along the tree."""
    known: dict[Any, Tensor] = {}
    for rank in range(assignment.world_size):
        sums = PartialSums(bucket)
        sums.begin(count_merges(assignment.blocks[rank], len(leaves)))
        for leaf in assignment.micro_batches(rank):
            sums.absorb(leaf, leaves[leaf])
        known |= sums.partials()

    def total(block: Block) -> Tensor:
        if block in known:
            return known[block]
        left, right = block.halves()
        return total(left) + total(right)

    flat = total(root(len(leaves)))
    return [slot.view(flat) for slot in bucket.slots]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    # With -148 most numbers are subnormal: a product that is fused with an addition would round differently.
    st.sampled_from([0, -148]),
)
def test_sums_equal_the_tree_to_the_bit_for_any_shares(
    shares: list[int], dtype: torch.dtype, exponent: int
) -> None:
    leaves = [gradients_of(leaf, dtype, exponent) for leaf in range(sum(shares))]
    found = joined(assign(len(leaves), shares, allow_idle=True), bucket_of(dtype), leaves)
    for total, expected in zip(found, expected_total(leaves, dtype), strict=True):
        assert torch.equal(total, expected)


@given(st.integers(1, 40))
def test_one_block_of_n_needs_no_more_than_log2_n_buffers(m: int) -> None:
    sums = PartialSums(bucket_of())
    merges = count_merges([root(m)], m)
    sums.begin(merges)
    most = 0
    for leaf in range(m):
        sums.absorb(leaf, gradients_of(leaf))
        most = max(most, len(sums._stack))
    assert most <= max(1, m.bit_length())
    assert list(sums.partials()) == [root(m)]


def test_a_missing_gradient_is_plus_zero_whichever_side_of_an_addition_it_is_on() -> None:
    minus = [torch.full((size,), -0.0) for size in SIZES]
    nothing = [None] * len(SIZES)
    for leaves in ([minus, nothing], [nothing, minus]):
        for shares in ([2], [1, 1]):
            for total in joined(assign(2, shares), bucket_of(), leaves):
                assert not total.signbit().any()


def test_minus_zero_of_the_only_micro_batch_stays() -> None:
    (first, *_) = joined(assign(1, [1]), bucket_of(), [[torch.full((size,), -0.0) for size in SIZES]])
    assert first.signbit().all()


def test_a_second_step_uses_the_memory_of_the_first() -> None:
    sums = PartialSums(bucket_of())
    addresses = []
    for _ in range(3):
        sums.begin(count_merges([root(5)], 5))
        for leaf in range(5):
            sums.absorb(leaf, gradients_of(leaf))
        addresses.append(
            {flat.tensor.data_ptr() for flat in [*sums._free, *(flat for _, flat in sums._stack)]}
        )
    assert addresses[0] == addresses[1] == addresses[2]


def test_gaps_between_slots_stay_zero() -> None:
    sums = PartialSums(bucket_of())
    for _ in range(2):
        sums.begin(count_merges([root(3)], 3))
        for leaf in range(3):
            sums.absorb(leaf, [torch.full((size,), torch.inf) for size in SIZES])
        (total,) = sums.partials().values()
        assert total.isinf().sum() == sum(SIZES)
        assert total[total.isfinite()].eq(0).all()


def test_merges_of_a_block_count_the_nodes_that_end_at_each_micro_batch() -> None:
    assert count_merges([root(6)], 6) == {0: 0, 1: 1, 2: 0, 3: 2, 4: 0, 5: 2}
    assert count_merges([Block(4, 6), Block(3, 4)], 6) == {3: 0, 4: 0, 5: 1}
