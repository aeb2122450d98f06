import multiprocessing
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from unisono.data.plan import AssignmentPlan
from unisono.data.stream_loader import StreamLoader
from unisono.errors import UsageError
from unisono.grid import assign

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Whole(IterableDataset):
    """Rows 0 to num_rows-1 with what three libraries draw; can't be cut."""

    def __init__(self, num_rows):
        self.num_rows = num_rows
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        shift = random.random()  # of the epoch, drawn when it begins
        for row in range(first, self.num_rows, stride):
            yield row + 1000 * self.epoch, torch.rand(()).item(), numpy.random.rand(), random.random() + shift


class Shards:
    """Rows of several files of unequal length, which are shared out among shards as Hugging Face does it."""

    def __init__(self, files, epoch=0):
        self.files = files
        self.epoch = epoch
        self.num_shards = len(files)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shard(self, num_shards, index):
        return Shards(self.files[index::num_shards])

    def __iter__(self):
        assert get_worker_info() is None
        for file in self.files:
            for row in file:
                yield row + 1000 * self.epoch, torch.rand(()).item(), numpy.random.rand(), random.random()


def numbered(*lengths):
    """Files of so many rows each; row 100 * f + i is row i of file f."""
    return Shards([list(range(100 * file, 100 * file + length)) for file, length in enumerate(lengths)])


class Replayed:
    """Fills tables in as they were when one worker had everything; whole processes are in test_invariance_data."""

    def __init__(self, tables):
        self._tables = iter(tables)

    def __call__(self, table, operation):
        known = next(self._tables)
        own = table != 0
        assert torch.equal(table[own], known[own])
        table.copy_(known)


def alone(table, operation):
    """An exchange of one worker with himself."""


def make(dataset, *, shares=(4,), rank=0, exchange=alone, batch_size=6, **options):
    plan = AssignmentPlan(assign(sum(shares), shares, allow_idle=True))
    return StreamLoader(
        dataset,
        batch_size=batch_size,
        micro_batches=sum(shares),
        plan=plan,
        rank=rank,
        exchange=exchange,
        collate_fn=list,
        **options,
    )


def parts_of(batches):
    """One global batch as the workers hold it: micro-batch -> rows."""
    held = {}
    for batch in batches:
        assert batch.sizes == batches[0].sizes
        assert batch.digest == batches[0].digest
        assert not held.keys() & dict(batch).keys()
        held.update(dict(batch))
    assert {m: len(rows) for m, rows in held.items()} == {m: n for m, n in enumerate(batches[0].sizes) if n}
    return held


def epochs_of(dataset, shares, *, epochs=1, prepare=lambda loader: None, **options):
    """Loop over a loader on each rank, one after the other; return the epochs as lists of global batches."""
    tables = []
    of_ranks = []
    if len(shares) > 1:
        recording = make(
            dataset, shares=(sum(shares),), exchange=lambda table, _: tables.append(table.clone())
        )
        prepare_alone(recording, prepare)
        [list(recording) for _ in range(epochs)]
    for rank in range(len(shares)):
        exchange = Replayed(tables) if tables else alone
        loader = make(dataset, shares=shares, rank=rank, exchange=exchange, **options)
        prepare(loader)
        of_ranks.append([list(loader) for _ in range(epochs)])
        loader.close()
    return [
        [parts_of(batches) for batches in zip(*(each[epoch] for each in of_ranks), strict=True)]
        for epoch in range(epochs)
    ]


def prepare_alone(loader, prepare):
    """Prepare a loader that has everything, whatever `prepare` says of who has what."""
    plan = loader.plan
    prepare(loader)
    loader.plan = plan


def rows(epoch):
    return [row[0] for parts in epoch for m in sorted(parts) for row in parts[m]]


DATASETS = {
    "whole": lambda: Whole(40),
    "shards": lambda: numbered(9, 2, 7, 1, 0, 5),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_every_row_comes_once_an_epoch_and_the_same_on_any_workers_and_processes(kind):
    expected = epochs_of(DATASETS[kind](), (4,), epochs=2)
    found = rows(expected[0])
    assert len(set(found)) == len(found) == {"whole": 40, "shards": 24}[kind]
    assert sorted(row + 1000 for row in found) == sorted(rows(expected[1]))
    drawn = [
        row[column]
        for epoch in expected
        for parts in epoch
        for m in parts
        for row in parts[m]
        for column in (1, 2, 3)
    ]
    assert len(set(drawn)) == len(drawn)
    for shares, options in (
        ((2, 2), {}),
        ((1, 0, 3), {}),
        ((4,), {"num_workers": 3}),
        ((4,), {"num_workers": 2, "persistent_workers": True}),
    ):
        assert epochs_of(DATASETS[kind](), shares, epochs=2, **options) == expected
    assert not multiprocessing.active_children()


def test_what_can_not_be_cut_is_cut_as_a_list_would_be():
    loader = make(Whole(20), batch_size=8)
    batches = list(loader)
    assert [batch.sizes for batch in batches] == [(2, 2, 2, 2), (2, 2, 2, 2), (1, 1, 1, 1)]
    assert rows([parts_of([batch]) for batch in batches]) == list(range(20))
    assert {batch.nominal_weight for batch in batches} == {2.0}
    assert [batch.sizes for batch in make(Whole(20), batch_size=8, drop_last=True)] == [(2, 2, 2, 2)] * 2


def test_micro_batch_m_comes_from_shard_m_and_is_empty_once_that_has_ended():
    batches = list(make(numbered(2, 2, 4, 2), batch_size=4))
    assert [batch.sizes for batch in batches] == [(1, 1, 1, 1), (1, 1, 1, 1), (0, 0, 1, 0), (0, 0, 1, 0)]
    batches = list(make(numbered(3, 0, 4, 2), batch_size=6))
    assert [batch.sizes for batch in batches] == [(2, 0, 1, 1), (1, 0, 1, 1), (0, 0, 1, 0), (0, 0, 1, 0)]
    assert [row[0] for row in dict(batches[1])[2]] == [201]


def test_with_drop_last_an_epoch_of_shards_ends_with_the_first_that_ends_and_says_so():
    notices = []
    batches = list(make(numbered(2, 2, 4, 2), batch_size=4, drop_last=True, notify=notices.append))
    assert [batch.sizes for batch in batches] == [(1, 1, 1, 1)] * 2
    (line,) = notices
    assert "epoch 0 ends after 2 batches" in line
    assert "[0, 0, 1, 0]" in line


def test_who_iterates_everything_is_told_so_once():
    for dataset, batch_size, reason in (
        (Whole(9), 6, "it has no shard"),
        (numbered(2, 2), 6, "it has 2 shards, fewer than 4 micro-batches"),
        (numbered(2, 2, 2, 2), 3, "batch_size=3 leaves"),
    ):
        notices = []
        loader = make(dataset, batch_size=batch_size, notify=notices.append)
        assert rows([parts_of([batch]) for batch in loader]) == [row[0] for row in dataset]
        list(loader)
        assert len(notices) == 1
        assert reason in notices[0]
    notices = []
    make(numbered(1, 1, 1, 1), notify=notices.append)
    assert notices == []


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize(("shares", "num_workers"), [((4,), 0), ((4,), 2), ((1, 3), 0)])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_loaded_state_goes_on_in_mid_epoch_with_the_same_draws(kind, shares, num_workers, batch):
    expected = epochs_of(DATASETS[kind](), (4,), epochs=3)
    first = make(DATASETS[kind]())
    list(first)
    loop = iter(first)
    for _ in range(batch):
        next(loop)
    state = first.state_dict()
    resumed = epochs_of(
        DATASETS[kind](),
        shares,
        epochs=2,
        num_workers=num_workers,
        prepare=lambda loader: loader.load_state_dict(state),
    )
    assert resumed == [expected[1][batch:], expected[2]]


def test_a_state_after_the_last_batch_gives_a_loop_without_batches():
    loader = make(Whole(12))
    loop = iter(loader)
    next(loop), next(loop)
    state = loader.state_dict()
    again = make(Whole(12))
    again.load_state_dict(state)
    assert list(again) == []
    assert [(batch.epoch, batch.index) for batch in again] == [(1, 0), (1, 1)]
    assert again.step == 4


def test_a_state_of_another_cut_is_refused():
    state = make(Whole(12)).state_dict()
    with pytest.raises(UsageError, match="batch_size=6, this loader has 4"):
        make(Whole(12), batch_size=4).load_state_dict(state)
    with pytest.raises(UsageError, match="micro_batches=4, this loader has 2"):
        make(Whole(12), shares=(2,)).load_state_dict(state)


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_moved_micro_batch_is_read_on_by_its_new_owner(kind, num_workers):
    (expected,) = epochs_of(DATASETS[kind](), (4,))
    shares = [(4, 0), (2, 2), (0, 4), (1, 3)]
    plan = AssignmentPlan(assign(4, shares[0], allow_idle=True))
    for step, changed in enumerate(shares):
        plan.change(assign(4, changed, allow_idle=True), from_step=step)

    def prepare(loader):
        loader.plan = plan

    assert epochs_of(DATASETS[kind](), (2, 2), prepare=prepare, num_workers=num_workers) == [expected]
    assert not multiprocessing.active_children()


def test_a_shard_stays_in_one_process():
    class Counting(Shards):
        """Says at each row how often its shard was begun anywhere."""

        def shard(self, num_shards, index):
            return Counting(self.files[index::num_shards])

        def __iter__(self):
            with begun.get_lock():
                begun.value += 1
            yield from super().__iter__()

    begun = multiprocessing.Value("i", 0)
    loader = make(Counting(numbered(*[6] * 6).files), shares=(6,), num_workers=4)
    loop = iter(loader)
    next(loop)
    assert len(multiprocessing.active_children()) == 3
    assert len([*loop]) == 5
    assert begun.value == 6


def test_a_break_ends_the_processes_and_the_next_loop_is_the_next_epoch():
    loader = make(Whole(40), num_workers=2)
    for batch in loader:
        if batch.index == 1:
            break
    assert not multiprocessing.active_children()
    assert [(batch.epoch, batch.index) for batch in loader] == [(1, index) for index in range(7)]
    assert loader.step == 2 + 7


def test_the_global_generators_and_the_dataset_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    dataset = Whole(20)
    torch.manual_seed(5)
    list(make(dataset)), list(make(dataset, num_workers=1))
    assert torch.rand(3).tolist() == expected
    assert dataset.epoch == 0


def test_a_stream_has_no_length():
    with pytest.raises(TypeError, match="not known before its end"):
        len(make(Whole(3)))


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Whole(0), {}),
        (Whole(5), {"drop_last": True}),
        (numbered(0, 0, 0, 0), {}),
        (numbered(9, 9, 9, 0), {"drop_last": True}),
    ],
)
def test_an_epoch_of_nothing_is_an_error(dataset, options):
    with pytest.raises(UsageError, match="epoch 0 has no batch"):
        list(make(dataset, **options))


def test_the_share_of_one_worker_is_refused():
    class Split(Whole):
        _distributed = SimpleNamespace(rank=0, world_size=2)

    with pytest.raises(UsageError, match="share of one of 2 workers"):
        make(Split(9))


class Failing(Whole):
    def __iter__(self):
        yield from range(7)
        raise ValueError("row 7")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_stream_keeps_its_type_and_says_where(num_workers):
    with pytest.raises(ValueError, match="row 7") as caught:
        list(make(Failing(0), num_workers=num_workers))
    assert "while reading sample 7 of shard 0, epoch 0" in "".join(caught.value.__notes__)
    assert not multiprocessing.active_children()
