"""The watchdog with a board of the test's: no processes, real threads."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import contextmanager

import pytest

from unisono.cluster.position import USER_CODE, Position, Sighting
from unisono.cluster.watchdog import Watchdog
from unisono.errors import DeadlineError, TransportError, WorkerLostError


class FakeBoard:
    def __init__(self):
        self.published = []
        self.reason = None
        self.known = []
        self.heard = threading.Event()

    def publish(self, position):
        self.published.append(position)
        self.heard.set()

    def sightings(self, timeout_s):
        return self.known

    def stop_reason(self):
        return self.reason


@contextmanager
def watched(board, *, timeout_s=30.0, stop_fd=None):
    watchdog = Watchdog(board, rank=0, timeout_s=timeout_s, stop_fd=stop_fd)
    aborted = threading.Event()
    reasons = []
    watchdog.on_abort(lambda reason: (reasons.append(reason), aborted.set()))
    watchdog.start()
    try:
        yield watchdog, aborted, reasons
    finally:
        watchdog.stop()


def at(operation, step=5):
    return Position(operation, step, time.monotonic())


def test_a_new_position_is_published_soon():
    board = FakeBoard()
    with watched(board) as (watchdog, _, _):
        watchdog.position = position = at("reduce")
        while position not in board.published:
            assert board.heard.wait(5)
            board.heard.clear()


def test_the_last_position_is_published_at_the_end():
    board = FakeBoard()
    with watched(board) as (watchdog, _, _):
        board.heard.wait(5)
        watchdog.position = position = at("reduce")
    assert board.published[-1] == position


def test_waking_an_ended_watchdog_writes_to_nobody():
    with watched(FakeBoard()) as (watchdog, _, _):
        pass
    reused = [os.pipe() for _ in range(4)]
    try:
        watchdog.wake()
        assert not select.select([read for read, _ in reused], [], [], 0)[0]
    finally:
        for descriptor in (end for pair in reused for end in pair):
            os.close(descriptor)


def test_a_wait_over_the_deadline_is_aborted_with_the_name_of_who_is_missing():
    board = FakeBoard()
    board.known = [Sighting(1, 4242, 4, USER_CODE, 5.2, 0.1)]
    with watched(board, timeout_s=0.2) as (watchdog, aborted, reasons):
        watchdog.position = at("reduce of bucket 2")
        assert aborted.wait(5)
    [reason] = reasons
    assert isinstance(reason, DeadlineError)
    assert "at step 5 in reduce of bucket 2 for rank 1 (pid 4242): last seen at step 4" in str(reason)


def test_user_code_has_no_deadline():
    board = FakeBoard()
    with watched(board, timeout_s=0.1) as (watchdog, aborted, _):
        watchdog.position = at(USER_CODE)
        assert not aborted.wait(0.5)


def test_progress_resets_the_deadline():
    board = FakeBoard()
    with watched(board, timeout_s=0.5) as (watchdog, aborted, _):
        for step in range(10):
            watchdog.position = at("reduce", step)
            assert not aborted.wait(0.1)


def test_the_launchers_word_aborts_at_once():
    board = FakeBoard()
    with watched(board) as (watchdog, aborted, reasons):
        board.reason = WorkerLostError("worker 2 failed")
        watchdog.wake()
        assert aborted.wait(5)
    assert reasons == [board.reason]


def test_a_callback_that_comes_late_is_called_at_once():
    board = FakeBoard()
    with watched(board) as (watchdog, aborted, _):
        board.reason = WorkerLostError("worker 2 failed")
        watchdog.wake()
        assert aborted.wait(5)
        late = []
        watchdog.on_abort(late.append)
        assert late == [board.reason]


def test_the_order_to_end_aborts_at_once():
    read, write = os.pipe()
    try:
        with watched(FakeBoard(), stop_fd=read) as (_, aborted, reasons):
            os.write(write, b"x")
            assert aborted.wait(5)
        assert isinstance(reasons[0], TransportError)
        assert "SIGTERM" in str(reasons[0])
    finally:
        os.close(read)
        os.close(write)


def test_entering_an_operation_is_cheap(launch):
    def measure():
        from unisono.cluster.connection import connect
        from unisono.cluster.environment import detect

        with connect(detect()) as connection:
            times = []
            for _ in range(5):
                start = time.perf_counter()
                for step in range(1000):
                    connection.enter("reduce", step)
                    connection.leave()
                times.append(time.perf_counter() - start)
        return min(times) / 1000

    assert launch(measure, 1)[0] < 10e-6


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_a_deadline_that_is_no_time_is_refused(timeout_s):
    from unisono.cluster.connection import connect
    from unisono.cluster.environment import Environment
    from unisono.errors import UsageError

    with pytest.raises(UsageError, match="step_timeout_s"):
        connect(Environment(), timeout_s)
