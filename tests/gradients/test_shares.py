"""Who updates which part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.gradients.shares import BLOCK, Part, share_out

SIZES = st.integers(0, 3) | st.integers(0, 30_000) | st.integers(0, 20).map(lambda n: n * BLOCK)


@given(parameters=st.lists(st.tuples(SIZES, st.booleans()), max_size=8), num_ranks=st.integers(1, 7))
def test_every_element_has_one_owner_and_cuts_lie_between_blocks(parameters, num_ranks):
    sizes, can_cut = [size for size, _ in parameters], [cuts for _, cuts in parameters]
    shares = share_out(sizes, can_cut, num_ranks)
    assert len(shares) == num_ranks
    for index, size in enumerate(sizes):
        parts = [part for each in shares for part in each if part.index == index]
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == size
        assert all(part.start < part.stop for part in parts) or size == 0
        assert all(part.start % BLOCK == 0 for part in parts)
        assert can_cut[index] or len(parts) == 1


@given(sizes=st.lists(SIZES, min_size=1, max_size=8), num_ranks=st.integers(1, 7))
def test_shares_differ_by_a_block_at_most_where_all_can_be_cut(sizes, num_ranks):
    owned = [
        sum(part.stop - part.start for part in each)
        for each in share_out(sizes, [True] * len(sizes), num_ranks)
    ]
    assert max(owned) - sum(sizes) / num_ranks <= BLOCK


def test_parts_by_hand():
    assert share_out([3 * BLOCK, 10], [True, True], 2) == (
        (Part(0, 0, 2 * BLOCK),),
        (Part(0, 2 * BLOCK, 3 * BLOCK), Part(1, 0, 10)),
    )
    assert share_out([3 * BLOCK, 10], [False, True], 2) == ((Part(0, 0, 3 * BLOCK),), (Part(1, 0, 10),))
    assert share_out([], [], 2) == ((), ())
