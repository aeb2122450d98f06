"""`launch` and the fork server: functions on real workers."""

from __future__ import annotations

import functools
import os
import signal
import threading
from dataclasses import dataclass

import pytest
import torch

import unisono
from unisono.cluster.connection import connect
from unisono.cluster.environment import detect
from unisono.errors import JobError, UsageError


@dataclass(frozen=True)
class Point:
    x: int


def identity():
    environment = detect()
    return environment.kind, environment.rank, environment.world_size, environment.local_rank


def test_each_worker_gets_its_own_identity(launch):
    assert launch(identity, 3) == [("launcher", rank, 3, rank) for rank in range(3)]


def test_workers_are_not_this_process(launch):
    pids = launch(os.getpid, 2)
    assert len({*pids, os.getpid()}) == 3


def test_arguments_and_results_keep_their_types(launch):
    def double(point, tensor):
        return Point(point.x * 2), tensor * 2

    [(point, tensor)] = launch(double, 1, Point(3), torch.arange(3))
    assert point == Point(6)
    assert torch.equal(tensor, torch.tensor([0, 2, 4]))


def test_large_results_arrive_whole(launch):
    [value] = launch(functools.partial(torch.arange, 5_000_011), 1)
    assert torch.equal(value, torch.arange(5_000_011))


def test_workers_meet_in_the_store(launch):
    def meet():
        with connect(detect()) as connection:
            connection.store.set(f"value/{connection.rank}", str(connection.rank**2))
            total = connection.store.add("total", connection.rank)
            neighbour = (connection.rank + 1) % connection.world_size
            return int(connection.store.get(f"value/{neighbour}")), total

    results = launch(meet, 4)
    assert [value for value, _ in results] == [1, 4, 9, 0]
    assert max(total for _, total in results) == 6


def test_a_process_group_can_be_built_on_the_store(launch):
    def reduce():
        with connect(detect()) as connection:
            options = torch.distributed.ProcessGroupGloo._Options()
            options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            group = torch.distributed.ProcessGroupGloo(
                connection.store, connection.rank, connection.world_size, options
            )
            tensor = torch.tensor([connection.rank])
            group.allreduce([tensor]).wait()
            return tensor.item()

    assert launch(reduce, 3) == [3, 3, 3]


def test_the_first_failing_worker_is_named_with_its_traceback(launch):
    def fail_on_two():
        with connect(detect()) as connection:
            if connection.rank == 2:
                connection.enter("forward", 3)
                raise ValueError("row 17")
            connection.store.get("never")

    with pytest.raises(JobError) as caught:
        launch(fail_on_two, 3)
    lines = str(caught.value).splitlines()
    assert lines[-1] == "worker 2 failed at step 3: ValueError: row 17"
    assert "in fail_on_two" in str(caught.value)
    assert caught.value.rank == 2


def test_a_killed_worker_is_named_with_its_signal(launch):
    def die():
        with connect(detect()) as connection:
            if connection.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            connection.store.get("never")

    with pytest.raises(JobError, match=r"worker 1 failed: killed by signal 9 \(SIGKILL\)") as caught:
        launch(die, 2)
    assert caught.value.exit_code == 137


def test_a_function_that_captures_a_lock_is_refused_before_anything_starts(launch):
    lock = threading.Lock()

    with pytest.raises(UsageError, match=r"can't be sent to the workers.*lock"):
        launch(lambda: lock.acquire(), 2)


def test_a_result_that_cannot_travel_is_named(launch):
    with pytest.raises(JobError, match="returned a lock that can't be sent back"):
        launch(lambda: threading.Lock(), 1)


def test_zero_workers_are_refused(launch):
    with pytest.raises(UsageError, match="launch on 0 workers"):
        launch(identity, 0)


def test_the_helper_is_reusable_after_a_failure(launch):
    with pytest.raises(JobError):
        launch(lambda: 1 / 0, 2)
    assert len(launch(identity, 2)) == 2


def test_fresh_workers_are_new_interpreters(launch):
    def is_new():
        import sys

        return detect().rank, "torch" in sys.modules

    assert launch(is_new, 2, fresh=True) == [(0, False), (1, False)]


def test_launch_needs_no_preparation():
    assert unisono.launch(identity, 1) == [("launcher", 0, 1, 0)]


def test_what_workers_leave_behind_is_killed(launch):
    def leave_a_child():
        import subprocess

        return subprocess.Popen(["sleep", "1000"]).pid

    [pid] = launch(leave_a_child, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_output_of_all_workers_carries_their_rank(launch, capsys):
    launch(lambda: print("hello", detect().rank), 2, output="all")
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] hello 0", "[1] hello 1"]


def test_only_the_first_workers_output_is_shown_by_default(launch, capsys):
    launch(lambda: print("hello", detect().rank), 2)
    assert capsys.readouterr().out == "hello 0\n"


def test_ctrl_c_ends_the_workers_and_the_helper_stays_usable(launch, tmp_path):
    started = tmp_path / "started"

    def wait():
        started.touch()
        signal.pause()

    def interrupt():
        while not started.exists():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        launch(wait, 2)
    interrupting.join()
    assert len(launch(identity, 2)) == 2


def test_joining_twice_is_refused_with_words(launch) -> None:
    def join_twice() -> str:
        import unisono

        with unisono.join():
            pass
        try:
            unisono.join()
        except unisono.UsageError as error:
            return str(error)
        return "joined twice"

    for message in launch(join_twice, 2):
        assert "called twice in this process" in message
