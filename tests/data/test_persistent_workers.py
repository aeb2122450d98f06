import multiprocessing
import os
import signal
import time

import pytest

from steps import alone
from unisono.data.loader import Loader
from unisono.data.plan import AssignmentPlan
from unisono.errors import LoaderError
from unisono.grid import assign

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Rows:
    """Samples are their index and the process that read them."""

    def __init__(self, fail=frozenset()):
        self._fail = fail

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index in self._fail:
            raise ValueError(f"row {index}")
        return index, os.getpid()


def make(dataset=None, **options):
    plan = AssignmentPlan(assign(2, [2]))
    options = {"num_workers": 2, "persistent_workers": True, "shuffle": True, "collate_fn": list, **options}
    return Loader(Rows() if dataset is None else dataset, batch_size=8, micro_batches=2, plan=plan, **options)


def read(loop):
    """The indices of the batches of a loop, and the processes that read them."""
    found = [row for batch in loop for _, data in batch for row in data]
    return [index for index, _ in found], {pid for _, pid in found}


def read_pids(loader):
    return {process.pid for process in loader._kept._children.processes}


def test_processes_live_on_over_epochs_and_the_order_is_as_without():
    loader, fresh = make(), make(persistent_workers=False)
    epochs = [read(loader) for _ in range(3)]
    assert len({frozenset(pids) for _, pids in epochs}) == 1
    assert len(read_pids(loader)) == 2
    assert [order for order, _ in epochs] == [read(fresh)[0] for _ in range(3)]
    loader.close()
    assert not multiprocessing.active_children()


def test_processes_live_on_after_a_break_and_a_loaded_state():
    loader, other = make(), make(num_workers=0, persistent_workers=False)
    for loop in (iter(loader), iter(other)):
        next(loop)
    pids, state = read_pids(loader), loader.state_dict()
    assert state == other.state_dict()
    assert read(loader)[0] == read(other)[0]
    for each in (loader, other):
        each.load_state_dict(state)
    assert read(loader)[0] == read(other)[0]
    assert read_pids(loader) == pids
    loader.close()
    loader.close()
    assert not multiprocessing.active_children()


def test_an_error_ends_them_and_the_next_loop_starts_others():
    loader = make(Rows({39}), shuffle=False)
    with pytest.raises(ValueError, match="row 39"):
        read(loader)
    assert not multiprocessing.active_children()
    loop = iter(loader)
    assert len(multiprocessing.active_children()) == 2
    next(loop)
    loader.close()
    assert not multiprocessing.active_children()


def kill_and_read(pid, loader):
    """The error comes as soon as the death is known."""
    os.kill(pid, signal.SIGKILL)
    read(loader)


def test_one_that_died_between_epochs_is_named():
    loader = make()
    read(loader)
    victim = next(iter(read_pids(loader)))
    with pytest.raises(LoaderError, match=f"pid {victim} killed by signal 9"):
        kill_and_read(victim, loader)
    loader.close()
    assert not multiprocessing.active_children()


def test_the_end_of_the_run_ends_them():
    with alone() as run:
        loader = run.load(Rows(), batch_size=8, num_workers=1, persistent_workers=True, collate_fn=list)
        read(loader)
        assert len(multiprocessing.active_children()) == 1
        next(iter(loader))
    assert not multiprocessing.active_children()


class Hanging(Rows):
    """Reads nothing but the first rows."""

    def __getitem__(self, index):
        if index >= 8:
            signal.pause()
        return super().__getitem__(index)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_run_that_fails_waits_for_no_sample(persistent_workers):
    began = time.monotonic()
    with pytest.raises(KeyError):
        fail_in_mid_epoch(persistent_workers)
    assert not multiprocessing.active_children()
    assert time.monotonic() - began < 3


def fail_in_mid_epoch(persistent_workers):
    with alone() as run:
        options = {"num_workers": 1, "persistent_workers": persistent_workers, "collate_fn": list}
        loop = iter(run.load(Hanging(), batch_size=8, micro_batches=1, **options))
        next(loop)
        raise KeyError
