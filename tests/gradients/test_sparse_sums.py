from __future__ import annotations

from functools import partial
from operator import add

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from unisono.collectives.gather import gather_tensors
from unisono.gradients.partial_sums import count_merges
from unisono.gradients.sparse_sums import SparseSums, declared_sparse, join_sparse
from unisono.grid import Assignment, assign, tree_sum
from unisono.transport.base import Transport
from worlds import on_threads

ROWS = 7


def rows_of(indices: list[int], seed: int = 0) -> Tensor:
    """Return a sparse gradient with a random row for each index, not coalesced."""
    values = torch.randn(len(indices), 2, generator=torch.Generator().manual_seed(seed))
    return torch.sparse_coo_tensor(
        torch.tensor([indices], dtype=torch.int64), values, (ROWS, 2), check_invariants=False
    )


def sums_over(leaves: list[Tensor | None], assignment: Assignment, rank: int) -> SparseSums:
    sums = SparseSums()
    sums.begin(count_merges(assignment.blocks[rank], assignment.num_micro_batches))
    for leaf in assignment.micro_batches(rank):
        sums.absorb(leaf, leaves[leaf])
    return sums


def joined(leaves: list[list[Tensor | None]], shares: list[int]) -> list[list[Tensor | None]]:
    """Return, for each rank, the total of each parameter; `leaves` has a list for each parameter."""
    assignment = assign(len(leaves[0]), shares, allow_idle=True)
    parameters = [nn.Parameter(torch.zeros(ROWS, 2)) for _ in leaves]

    def work(transport: Transport) -> list[Tensor | None]:
        sums = [sums_over(each, assignment, transport.rank) for each in leaves]
        gather = partial(gather_tensors, transport) if len(shares) > 1 else None
        return join_sparse(sums, parameters, assignment, gather)

    return on_threads(len(shares), work)


@given(st.lists(st.lists(st.integers(0, ROWS - 1), max_size=5), min_size=1, max_size=9))
def test_the_sum_on_one_worker_is_the_tree_sum_of_dense_gradients(leaves: list[list[int]]) -> None:
    gradients = [rows_of(indices, seed) for seed, indices in enumerate(leaves)]
    ((total,),) = joined([gradients], [len(leaves)])
    assert total.is_coalesced()
    expected = tree_sum([gradient.coalesce().to_dense() for gradient in gradients], add)
    assert torch.equal(total.to_dense(), expected)
    assert total.indices().flatten().tolist() == sorted({index for indices in leaves for index in indices})


@pytest.mark.parametrize("shares", [[3, 2], [2, 3], [1, 0, 4], [2, 2, 1], [1, 1, 1, 1, 1]], ids=str)
def test_the_sum_has_the_same_bits_whoever_adds(shares: list[int]) -> None:
    used = [[0, 0], [2, 3, 2, 6], [], [2], [6, 0, 1, 5]]
    first: list[Tensor | None] = [rows_of(indices, seed) for seed, indices in enumerate(used)]
    second: list[Tensor | None] = [None, rows_of([3], 9), None, None, rows_of([3], 11)]
    third: list[Tensor | None] = [None, None, rows_of([]), None, None]
    ((*alone,),) = joined([first, second, third], [5])
    assert alone[2]._nnz() == 0
    for totals in joined([first, second, third], shares):
        for total, expected in zip(totals, alone, strict=True):
            assert total.is_coalesced()
            assert torch.equal(total.indices(), expected.indices())
            assert torch.equal(total.values(), expected.values())


def test_a_parameter_without_any_gradient_has_no_total() -> None:
    assert joined([[None, None, None]], [3]) == [[None]]
    assert joined([[None, None, None]], [1, 2]) == [[None], [None]]


def test_a_second_step_starts_from_nothing() -> None:
    assignment = assign(1, [1])
    sums = sums_over([rows_of([1])], assignment, 0)
    sums.begin(count_merges(assignment.blocks[0], 1))
    sums.absorb(0, rows_of([2]))
    (total,) = sums.partials().values()
    assert total.indices().tolist() == [[2]]


def test_modules_say_which_of_their_own_parameters_are_sparse() -> None:
    tables = nn.ModuleList(
        [nn.Embedding(2, 1, sparse=True), nn.Embedding(2, 1), nn.EmbeddingBag(2, 1, sparse=True)]
    )
    assert declared_sparse(nn.Sequential(tables, nn.Linear(1, 1))) == {
        id(tables[0].weight),
        id(tables[2].weight),
    }
