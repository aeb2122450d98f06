import pickle
from pathlib import Path

import pytest
import torch

import unisono
from steps import alone
from unisono.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ITEMS = ["", "a", {"key": [1, 2]}, torch.arange(3), None, ("x", 2.5)]


def test_a_packed_list_reads_like_the_list():
    packed = unisono.PackedList(iter(ITEMS))
    assert len(packed) == len(ITEMS)
    for index in range(-len(ITEMS), len(ITEMS)):
        assert str(packed[index]) == str(ITEMS[index])
    assert packed[1:5:3] == [ITEMS[1], ITEMS[4]]
    assert packed[::-1][0] == ("x", 2.5)
    assert str(list(packed)) == str(ITEMS)
    assert "a" in packed
    assert list(unisono.PackedList([])) == []
    assert str(list(pickle.loads(pickle.dumps(packed)))) == str(ITEMS)


@pytest.mark.parametrize("index", [6, -7])
def test_an_index_outside_is_an_index_error(index):
    with pytest.raises(IndexError, match=f"index {index} of a PackedList of 6 items"):
        unisono.PackedList(ITEMS)[index]


def test_an_item_that_can_not_be_pickled_is_named():
    with pytest.raises(UsageError, match=r"item 2 of a PackedList \(function\) can't be pickled"):
        unisono.PackedList([1, 2, lambda: 3])


def private_bytes(pid):
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Private_Clean", "Private_Dirty"))


def growth(dataset):
    """How much the private memory of two loader processes grows over an epoch."""
    with alone() as run:
        loader = run.load(
            dataset,
            batch_size=2_000,
            micro_batches=1,
            num_workers=2,
            persistent_workers=True,
            shuffle=True,
            collate_fn=len,
        )
        loop = iter(loader)
        pids = [process.pid for process in loop._processes._children.processes]
        next(loop)
        before = sum(map(private_bytes, pids))
        assert sum(size for batch in loop for _, size in batch) == len(dataset) - 2_000
        return sum(map(private_bytes, pids)) - before


def test_loader_processes_do_not_copy_a_packed_list():
    items = [f"sentence number {index} of many" for index in range(300_000)]
    plain = growth(items)
    assert growth(unisono.PackedList(items)) < 4e6 < 20e6 < plain
