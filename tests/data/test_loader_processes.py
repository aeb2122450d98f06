import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch.utils.data import Dataset

from unisono.data.child_watch import death_message
from unisono.data.loader import Loader
from unisono.data.plan import AssignmentPlan
from unisono.errors import LoaderError
from unisono.grid import assign

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Rows(Dataset):
    def __init__(self, read=lambda index: index):
        self._read = read

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return self._read(index)


def make(dataset, *, num_workers=2, rank=0, **options):
    plan = AssignmentPlan(assign(2, [1, 1]))
    return Loader(
        dataset, batch_size=8, micro_batches=2, plan=plan, rank=rank, num_workers=num_workers, **options
    )


def children():
    return multiprocessing.active_children()


def fail_at(row, error):
    def read(index):
        if index == row:
            raise error
        return index

    return Rows(read)


class Picky(Exception):
    """Can be pickled, but not restored."""

    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


def test_an_exception_keeps_its_type_and_the_traceback_of_the_process():
    with pytest.raises(ValueError, match="row 9") as caught:
        list(make(fail_at(9, ValueError("row 9"))))
    assert str(caught.value) == "row 9"
    (note,) = caught.value.__notes__
    assert "raised in loader worker pid" in note
    assert "on rank 0" in note
    assert "in read" in note
    assert "while loading sample 9 of epoch 0, batch 1, micro-batch 0" in note
    assert not children()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Picky(7, "bad"), "Picky: 7: bad"),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration(), "StopIteration was raised while loading"),
    ],
)
def test_exceptions_that_can_not_travel_are_described(error, message):
    with pytest.raises((LoaderError, RuntimeError), match=message):
        list(make(fail_at(9, error)))
    assert not children()


def test_data_that_can_not_travel_is_an_error():
    with pytest.raises(Exception, match="pickle"):
        list(make(Rows(lambda index: lambda: index), collate_fn=list))
    assert not children()


@pytest.mark.parametrize("large", [False, True])
def test_no_process_is_left_after_the_epoch_or_a_break(large):
    loader = make(Rows(lambda index: torch.zeros(100_000 if large else 1)))
    for batch in loader:
        assert len(children()) == 2
        if batch.index == 3:
            break
    # The loop is gone, and its processes with it: nothing is left to the garbage collector.
    assert not children()
    for _ in loader:
        pass
    assert not children()


def kill_and_wait(pid):
    """User code that never comes back to the loader. Returns if nobody interrupts it."""
    os.kill(pid, signal.SIGKILL)
    select.select([], [], [], 10)


def test_a_killed_process_is_named_wherever_the_main_thread_is():
    loop = iter(make(Rows(), rank=1))
    next(loop)
    victim = children()[0].pid
    with pytest.raises(LoaderError, match=f"loader worker pid {victim} killed by signal 9 on rank 1"):
        kill_and_wait(victim)
    del loop
    assert not children()


def test_a_process_killed_while_data_is_waited_for_is_named():
    def read(index):
        if index == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    began = time.monotonic()
    with pytest.raises(LoaderError, match=r"loader worker pid \d+ killed by signal 9 on rank 0"):
        list(make(Rows(read)))
    assert time.monotonic() - began < 5
    assert not children()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_process_that_dies_with_a_lock_of_torchs_keeps_nobody_waiting(persistent):
    def read(index):
        if index == 96:
            frame = sys._getframe()
            while "done_event" not in frame.f_locals:
                frame = frame.f_back
            frame.f_locals["done_event"]._cond.acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    with pytest.raises(LoaderError, match="killed by signal 9"):
        list(make(Rows(read), persistent_workers=persistent))
    assert not children()


def test_a_process_that_exits_is_named():
    def read(index):
        if index == 40:
            os._exit(3)
        return index

    with pytest.raises(LoaderError, match=r"loader worker pid \d+ exited with code 3 on rank 0"):
        list(make(Rows(read)))


def test_deaths_in_two_loaders_are_told_apart():
    first, second = make(Rows(), num_workers=1), make(Rows(), num_workers=1, rank=1)
    one = iter(first)
    next(one)
    before = set(children())
    two = iter(second)
    next(two)
    (victim,) = set(children()) - before
    with pytest.raises(LoaderError, match=f"pid {victim.pid} killed by signal 9 on rank 1"):
        kill_and_wait(victim.pid)
    assert [batch.index for batch in one] == list(range(1, 50))


def test_a_stopped_process_is_late_data_not_a_wait_without_end():
    loop = iter(make(Rows(), num_workers=1, rank=1, timeout_s=0.3))
    next(loop)
    (child,) = children()
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(LoaderError, match=rf"rank 1 waited .* for data: .*{child.pid}.* alive but late"):
        list(loop)
    assert not children()


def test_slow_data_is_waited_for_longer_than_the_interval_between_looks(monkeypatch):
    monkeypatch.setattr("unisono.data.processes.LOOK_EVERY_S", 0.05)
    slow = Rows(lambda index: select.select([], [], [], 0.08 if index % 8 == 0 else 0)[0] or index)
    loop = iter(make(slow, num_workers=1, timeout_s=20))
    assert [next(loop).index for _ in range(4)] == [0, 1, 2, 3]


ORPHANS = """
    import multiprocessing, os, sys, torch
    from unisono.data.loader import Loader
    from unisono.data.plan import AssignmentPlan
    from unisono.grid import assign

    class Slow:
        def __len__(self):
            return 100
        def __getitem__(self, index):
            if index > 8:
                import signal
                signal.pause()
            return torch.zeros(200_000)

    loader = Loader(Slow(), batch_size=4, micro_batches=1, plan=AssignmentPlan(assign(1, [1])), num_workers=2)
    loop = iter(loader)
    for _ in range(2):  # all there are: a kill while torch makes a file and unlinks it would leave that file
        next(loop)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    sys.stdin.read()
"""


def test_processes_and_their_files_are_gone_when_their_parent_is_killed(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ORPHANS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        handles = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    try:
        for handle in handles:
            ended, _, _ = select.select([handle], [], [], 5)
            assert ended
    finally:
        for handle in handles:
            os.close(handle)
    assert list(tmp_path.iterdir()) == []


def test_a_death_by_a_signal_without_a_name_is_described():
    number = signal.SIGRTMIN + 6
    assert f"pid 7 killed by signal {number} on rank 1 (unknown)" in death_message(7, -number, 1)
