import random
import weakref

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from unisono.data.loader import Loader
from unisono.data.plan import AssignmentPlan
from unisono.errors import UsageError
from unisono.grid import assign, cut, even_shares

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Drawing(Dataset):
    """Samples are their index and what the three generators give."""

    def __init__(self, num_samples):
        self._num_samples = num_samples

    def __len__(self):
        return self._num_samples

    def __getitem__(self, index):
        return index, torch.rand(()).item(), numpy.random.rand(), random.random()


def make(dataset, *, shares=(1,), rank=0, batch_size=8, **options):
    micro_batches = sum(shares)
    plan = AssignmentPlan(assign(micro_batches, shares, allow_idle=True))
    dataset = range(dataset) if isinstance(dataset, int) else dataset
    return Loader(
        dataset, batch_size=batch_size, micro_batches=micro_batches, plan=plan, rank=rank, **options
    )


def workers(dataset, shares, **options):
    return [make(dataset, shares=shares, rank=rank, **options) for rank in range(len(shares))]


def rows(batch):
    """The samples of a worker's part: micro-batch -> list."""
    return {number: data.tolist() if torch.is_tensor(data) else data for number, data in batch}


def global_rows(batches):
    """The samples of a global batch, in order, from what the workers hold of it."""
    held = {}
    for batch in batches:
        assert not held.keys() & rows(batch).keys()
        held.update(rows(batch))
    return [row for number in sorted(held) for row in held[number]]


def epoch_rows(loaders):
    return [row for batches in zip(*loaders, strict=True) for row in global_rows(batches)]


@pytest.mark.parametrize("shares", [(8,), (4, 4), (3, 3, 2), (1, 7), (0, 8, 0), (1,) * 8])
@pytest.mark.parametrize("num_samples", [1, 3, 5, 16, 61])
def test_every_row_is_loaded_once_an_epoch_at_any_world_size(shares, num_samples):
    for drop_last in (False, True):
        if drop_last and num_samples < 8:
            continue
        options = {"shuffle": True, "drop_last": drop_last}
        ours, alone = workers(num_samples, shares, **options), workers(num_samples, (8,), **options)
        for _ in range(2):
            order = epoch_rows(ours)
            assert order == epoch_rows(alone)
            expected = num_samples - num_samples % 8 if drop_last else num_samples
            assert len(set(order)) == len(order) == expected


def test_a_batch_is_cut_evenly_and_says_how():
    for loader in workers(21, (2, 1)):
        batches = list(loader)
        assert [batch.sizes for batch in batches] == [(3, 3, 2), (3, 3, 2), (2, 2, 1)]
        assert [len(batch) for batch in batches] == [8, 8, 5]
        assert [(batch.epoch, batch.index) for batch in batches] == [(0, 0), (0, 1), (0, 2)]
        assert {batch.nominal_weight for batch in batches} == {8 / 3}
        assert len(loader) == 3


def test_the_digest_of_a_batch_is_that_of_its_samples_on_every_worker():
    def digests(shares, **options):
        loaders = workers(24, shares, **options)
        return [
            {batch.digest for batch in batches} for _ in range(2) for batches in zip(*loaders, strict=True)
        ]

    alone = digests((4,), shuffle=True)
    assert digests((2, 1, 1), shuffle=True) == alone
    assert all(len(found) == 1 for found in alone)
    others = [digests((4,)), digests((4,), shuffle=True, seed=1), digests((4,), shuffle=True, name="other")]
    everything = [digest for run in (alone, *others) for found in run for digest in found]
    assert len(set(everything)) == len(everything) == 24
    assert all(0 <= digest < 2**63 for digest in everything)


def test_empty_micro_batches_at_the_end_are_not_loaded():
    first, last = (list(loader) for loader in workers(9, (2, 2), batch_size=8))
    assert rows(first[1]) == {0: [8]}
    assert rows(last[1]) == {}
    assert last[1].sizes == (1, 0, 0, 0)


def test_each_loop_is_a_new_epoch_with_a_new_order_for_every_rank():
    loaders = workers(12, (1, 1), batch_size=4, shuffle=True)
    first_rank, orders = [], []
    for _ in range(3):
        batches = list(zip(*loaders, strict=True))
        first_rank.append(frozenset(row for own, _ in batches for row in global_rows([own])))
        orders.append(tuple(row for batch in batches for row in global_rows(batch)))
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len(set(orders)) == 3
    assert len(set(first_rank)) > 1
    again = workers(12, (1, 1), batch_size=4, shuffle=True)
    assert [tuple(epoch_rows(again)) for _ in range(3)] == orders
    assert epoch_rows(workers(12, (1, 1), batch_size=4, shuffle=True, seed=1)) != list(orders[0])
    assert epoch_rows(workers(12, (1, 1), batch_size=4, shuffle=True, name="other")) != list(orders[0])


def test_the_order_does_not_depend_on_the_global_generators():
    loaders = []
    for rank in range(3):
        torch.manual_seed(100 + rank)
        loaders.append(make(30, shares=(1, 1, 1), rank=rank, shuffle=True, batch_size=6))
    for _ in range(2):
        assert sorted(epoch_rows(loaders)) == list(range(30))


def test_loading_leaves_the_global_generators_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    for num_workers in (0, 1):
        torch.manual_seed(5)
        list(make(Drawing(9), num_workers=num_workers))
        assert torch.equal(torch.rand(3), expected)


def drawn(shares, num_workers, epochs=2):
    """(epoch, row) -> what the sample drew, over all ranks."""
    loaders = workers(Drawing(21), shares, shuffle=True, num_workers=num_workers, collate_fn=list)
    return {
        (epoch, row[0]): row[1:]
        for epoch in range(epochs)
        for loader in loaders
        for batch in loader
        for _, data in batch
        for row in data
    }


def test_draws_differ_between_all_samples_and_epochs_but_not_between_world_sizes_or_processes():
    alone = drawn((4,), 0)
    assert len(alone) == 42
    for column in range(3):
        assert len({draws[column] for draws in alone.values()}) == 42
    assert drawn((2, 2), 2) == alone
    assert drawn((1, 2, 1), 1) == alone


def test_tensors_are_the_same_from_loader_processes():
    dataset = [(torch.full((3, 4), float(index)), index) for index in range(21)]
    here, there = make(dataset, shares=(2,)), make(dataset, shares=(2,), num_workers=2)
    for ours, theirs in zip(here, there, strict=True):
        for (number, (x, y)), (other, (u, v)) in zip(ours, theirs, strict=True):
            assert number == other
            assert torch.equal(x, u)
            assert torch.equal(y, v)


def test_variable_lengths_are_collated_by_the_given_function():
    dataset = [torch.arange(length) for length in (1, 5, 2, 3)]
    loader = make(dataset, shares=(2,), batch_size=4, collate_fn=torch.nn.utils.rnn.pad_sequence)
    (batch,) = loader
    assert {number: tuple(data.shape) for number, data in batch} == {0: (5, 2), 1: (3, 2)}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop_after", [0, 2, 5])
@pytest.mark.parametrize("shares", [(4,), (2, 2), (1, 2, 1)])
def test_a_resumed_run_gets_the_rest_of_the_rows_in_order(num_workers, stop_after, shares):
    options = {"shuffle": True, "batch_size": 4}
    whole = make(20, shares=(4,), **options)
    expected = [[global_rows([batch]) for batch in whole] for _ in range(3)]

    first = make(20, shares=(2, 2), num_workers=num_workers, **options)
    list(first)
    loop = iter(first)
    for _ in range(stop_after):
        next(loop)
    state = first.state_dict()
    del loop

    resumed = workers(20, shares, num_workers=num_workers, **options)
    for loader in resumed:
        loader.load_state_dict(state)
    for epoch, start in ((1, stop_after), (2, 0)):
        found = [global_rows(batches) for batches in zip(*resumed, strict=True)]
        assert found == expected[epoch][start:]


def test_resuming_reads_no_sample_that_is_not_used():
    read = []

    class Recording(Drawing):
        def __getitem__(self, index):
            read.append(index)
            return index

    loader = make(Recording(1000), shares=(2, 2), batch_size=10)
    loader.load_state_dict(
        {"epoch": 3, "batch": 98, "first_step": 300, "num_samples": 1000, "batch_size": 10}
    )
    assert [batch.index for batch in loader] == [98, 99]
    assert read == [*range(980, 986), *range(990, 996)]


def test_the_state_counts_batches_handed_out_and_not_those_read_ahead():
    loader = make(40, shares=(2,), num_workers=1)
    facts = {"num_samples": 40, "batch_size": 8}
    assert loader.state_dict() == {"epoch": 0, "batch": 0, "first_step": 0, **facts}
    for batch in loader:
        assert loader.state_dict() == {"epoch": 0, "batch": batch.index + 1, "first_step": 0, **facts}
        assert (loader.epoch, loader.step) == (0, batch.index + 1)
    assert loader.state_dict() == {"epoch": 1, "batch": 0, "first_step": 5, **facts}


def test_after_a_break_the_next_loop_is_a_new_epoch_and_the_state_is_where_it_stopped():
    loader = make(40)
    for batch in loader:
        if batch.index == 1:
            break
    cursor = {"epoch": 0, "batch": 2, "first_step": 0}
    assert loader.state_dict() == {**cursor, "num_samples": 40, "batch_size": 8}
    assert [(batch.epoch, batch.index) for batch in loader] == [(1, index) for index in range(5)]
    assert loader.step == 7


def test_a_state_of_other_data_is_refused_and_changes_nothing():
    loader = make(40)
    state = loader.state_dict()
    for change, message in (
        ({"num_samples": 41}, "num_samples=41, this loader has 40"),
        ({"batch_size": 4}, "batch_size=4, this loader has 8"),
        ({"batch": 6}, "batch 6 is no place"),
        ({"epoch": -1}, "epoch=-1"),
        ({"rank": 0}, "keys"),
    ):
        with pytest.raises(UsageError, match=message):
            loader.load_state_dict(state | change)
    assert loader.state_dict() == state


def test_a_second_loop_ends_the_first_with_an_error():
    loader = make(40, num_workers=1)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(UsageError, match="one loop at a time"):
        next(first)
    assert next(second).epoch == 1


def test_a_dropped_loop_is_freed_at_once():
    loader = make(40, num_workers=1)
    loop = iter(loader)
    next(loop)
    reference = weakref.ref(loop)
    del loop
    assert reference() is None


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_change_of_the_assignment_holds_at_its_step_even_within_what_was_read_ahead(num_workers):
    num_batches, shares = 9, [(4, 4), (1, 7), (8, 0), (0, 8)]
    alone = [global_rows([batch]) for batch in make(72, shares=(8,), shuffle=True)]
    loaders = workers(72, shares[0], shuffle=True, num_workers=num_workers)
    loops = [iter(loader) for loader in loaders]
    for step in range(num_batches):
        if step % 2:
            changed = assign(8, shares[(step // 2 + 1) % 4], allow_idle=True)
            for loader in loaders:
                loader.plan.change(changed, from_step=step)
        batches = [next(loop) for loop in loops]
        for rank, batch in enumerate(batches):
            assert batch.assignment == loaders[rank].plan.at(step)
            assert tuple(number for number, _ in batch) == batch.assignment.micro_batches(rank)
        assert global_rows(batches) == alone[step]
    for loop in loops:
        with pytest.raises(StopIteration):
            next(loop)


def test_an_idle_worker_does_not_run_ahead_of_the_others():
    idle = make(800, shares=(0, 8), rank=0, num_workers=1)
    loop = iter(idle)
    next(loop)
    assert [task.batch for task in loop._dispatched] == [1, 2]
    idle.plan.change(assign(8, [8, 0], allow_idle=True), from_step=50)
    batches = [next(loop) for _ in range(60)]
    assert [len(rows(batch)) for batch in batches[:49]] == [0] * 49
    assert all(len(rows(batch)) == 8 for batch in batches[49:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"prefetch_factor": 0}, "prefetch_factor=0"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"collate_fn": 3}, "collate_fn=3"),
        ({"dataset": []}, "0 samples"),
        ({"dataset": iter([1])}, "can't be read by index"),
        ({"dataset": range(7), "drop_last": True}, "leaves no batch"),
        ({"rank": 1}, "rank 1, the assignment is for 1 workers"),
        ({"micro_batches": 4}, "4 micro-batches, the assignment is over 2"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options, message):
    arguments = {
        "dataset": range(8),
        "batch_size": 8,
        "micro_batches": 2,
        "plan": AssignmentPlan(assign(2, [2])),
        **options,
    }
    with pytest.raises(UsageError, match=message):
        Loader(arguments.pop("dataset"), **arguments)


def test_a_batch_smaller_than_the_grid_has_empty_parts():
    shares = even_shares(8, 3)
    for batches in zip(*workers(7, shares, batch_size=3), strict=True):
        assert batches[0].sizes == tuple(len(part) for part in cut(len(batches[0]), 8))
        assert len(global_rows(batches)) == len(batches[0])
