from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.grid import (
    Assignment,
    Block,
    assign,
    cut,
    even_shares,
    parent,
    root,
    scale_shares,
    tree_sum,
)

GRIDS = st.integers(1, 200)
SHARES = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)


def nodes(block: Block) -> list[Block]:
    if block.is_leaf:
        return [block]
    return [block, *(node for half in block.halves() for node in nodes(half))]


@given(GRIDS)
def test_halves_cover_a_block_and_the_left_one_is_the_largest_power_of_two_below_it(m: int) -> None:
    for node in nodes(root(m)):
        if node.is_leaf:
            continue
        left, right = node.halves()
        assert (left.start, left.stop, right.stop) == (node.start, right.start, node.stop)
        assert left.size == 2 ** math.floor(math.log2(node.size - 1 or 1))
        assert left.size >= right.size >= 1


@given(GRIDS)
def test_every_subtree_begins_at_a_multiple_of_its_size_rounded_up_to_a_power_of_two(m: int) -> None:
    for node in nodes(root(m)):
        assert node.start % (1 << (node.size - 1).bit_length()) == 0


@given(GRIDS)
def test_parent_is_the_node_of_which_a_block_is_a_half(m: int) -> None:
    for node in nodes(root(m)):
        for half in () if node.is_leaf else node.halves():
            assert parent(half, m) == node


@given(st.integers(0, 500), GRIDS)
def test_a_cut_has_every_sample_once_with_sizes_that_differ_by_one_at_most(samples: int, m: int) -> None:
    parts = cut(samples, m)
    assert len(parts) == m
    assert [index for part in parts for index in part] == list(range(samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "empty micro-batches come last"


def test_the_tree_of_six_is_four_and_two() -> None:
    assert tree_sum(list("abcdef"), lambda left, right: f"({left}{right})") == "(((ab)(cd))(ef))"


@given(st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=100))
def test_tree_sum_adds_every_leaf_once(leaves: list[int]) -> None:
    assert tree_sum(leaves, lambda left, right: left + right) == sum(leaves)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=64), st.data())
def test_sums_of_own_blocks_join_to_the_same_bits_for_any_shares(
    values: list[float], data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, 9))
    cuts = sorted(
        data.draw(st.lists(st.integers(0, len(values)), min_size=world_size - 1, max_size=world_size - 1))
    )
    shares = [stop - start for start, stop in pairwise([0, *cuts, len(values)])]
    assignment = assign(len(values), shares, allow_idle=True)
    known = {
        block: tree_sum(values[block.start : block.stop], lambda left, right: left + right)
        for blocks in assignment.blocks
        for block in blocks
    }

    def total(block: Block) -> float:
        if block in known:
            return known[block]
        left, right = block.halves()
        return total(left) + total(right)

    assert total(root(len(values))).hex() == tree_sum(values, lambda left, right: left + right).hex()


@given(SHARES)
def test_an_assignment_covers_the_grid_once_with_nodes_of_the_tree(shares: list[int]) -> None:
    m = sum(shares)
    assignment = assign(m, shares, allow_idle=True)
    tree = set(nodes(root(m)))
    assert [len(assignment.micro_batches(rank)) for rank in range(len(shares))] == shares
    assert sorted(n for rank in range(len(shares)) for n in assignment.micro_batches(rank)) == list(range(m))
    for rank, share in enumerate(shares):
        blocks = assignment.blocks[rank]
        assert set(blocks) <= tree
        assert list(blocks) == sorted(blocks)
        assert len(blocks) <= share.bit_count()
        assert all(assignment.owners[number] == rank for number in assignment.micro_batches(rank))


@given(SHARES)
def test_no_worker_owns_both_halves_of_a_node_in_two_blocks(shares: list[int]) -> None:
    m = sum(shares)
    for blocks in assign(m, shares, allow_idle=True).blocks:
        for block in blocks:
            assert block == root(m) or not set(parent(block, m).halves()) <= set(blocks)


@given(GRIDS, st.integers(1, 60))
def test_even_shares_add_up_and_differ_by_one_at_most(m: int, world_size: int) -> None:
    shares = even_shares(m, world_size)
    assert sum(shares) == m
    assert len(shares) == world_size
    assert max(shares) - min(shares) <= 1


@given(GRIDS, SHARES)
def test_scaled_shares_add_up_and_are_within_one_of_the_exact_ones(m: int, shares: list[int]) -> None:
    scaled = scale_shares(m, shares)
    assert sum(scaled) == m
    for share, found in zip(shares, scaled, strict=True):
        assert abs(found - share * m / sum(shares)) < 1
        assert share or not found


def test_three_to_one_over_eight_is_six_and_two() -> None:
    assert scale_shares(8, [3, 1]) == (6, 2)


def test_equal_assignments_are_equal_and_hash_alike() -> None:
    one, other = assign(8, [3, 5]), assign(8, (3, 5))
    assert one == other
    assert hash(one) == hash(other)
    assert one.owners == other.owners
    assert Assignment(8, one.blocks).world_size == 2


@pytest.mark.parametrize(
    ("m", "shares", "words"),
    [
        (0, [0], "micro_batches=0: expected at least 1"),
        (4, [5, -1], "negative"),
        (4, [1, 2], "adds up to 3, expected micro_batches=4"),
        (2, [1, 1, 0], "Set micro_batches=3 or more"),
        (8, [8, 0], "Set micro_batches=8 or more"),
    ],
)
def test_shares_that_cannot_be_laid_out_are_refused(m: int, shares: list[int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        assign(m, shares)
