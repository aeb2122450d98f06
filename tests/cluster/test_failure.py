"""What failures say of themselves, and which one is shown."""

from __future__ import annotations

import pytest

from unisono.cluster.failure import Failure, Kind, choose_primary, describe_exception, describe_failure
from unisono.errors import DeadlineError, MismatchError, WorkerLostError


def caught(error):
    try:
        raise error
    except BaseException as same:
        return describe_exception(same, rank=2, step=3)


def test_an_exception_of_user_code_explains_most():
    failure = caught(ValueError("row 17"))
    assert failure.kind == Kind.RAISED
    assert failure.summary == "ValueError: row 17"
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert describe_failure(failure) == "worker 2 failed at step 3: ValueError: row 17"


def test_only_the_first_line_of_a_message_is_in_the_summary():
    assert caught(ValueError("row 17\nand more")).summary == "ValueError: row 17"


def test_an_exception_without_words_is_its_name():
    assert caught(KeyboardInterrupt()).summary == "KeyboardInterrupt"


def test_before_the_first_step_none_is_named():
    assert describe_failure(Failure(0, -1, Kind.RAISED, "x")) == "worker 0 failed: x"


def test_a_lost_peer_is_a_consequence():
    assert caught(WorkerLostError("gone")).kind == Kind.CONSEQUENCE


def test_an_error_that_was_caused_by_a_lost_peer_is_a_consequence():
    error = RuntimeError("could not save")
    error.__cause__ = WorkerLostError("gone")
    assert caught(error).kind == Kind.CONSEQUENCE


def test_our_own_errors_that_are_not_about_peers_explain():
    assert caught(MismatchError("other model")).kind == Kind.RAISED


@pytest.mark.parametrize(
    ("code", "exit_code", "summary"),
    [(3, 3, "exited with code 3"), ("no data", 1, "no data"), (143, 143, "ended by SIGTERM")],
)
def test_sys_exit_is_an_exit_without_a_traceback(code, exit_code, summary):
    failure = caught(SystemExit(code))
    assert (failure.kind, failure.exit_code, failure.summary) == (Kind.EXITED, exit_code, summary)
    assert failure.traceback == ""


def test_what_explains_most_wins_over_what_came_first():
    failures = [
        Failure(0, 3, Kind.CONSEQUENCE, "lost rank 2"),
        caught(DeadlineError("waited")),
        Failure(1, 3, Kind.KILLED, "killed by signal 9"),
        Failure(2, 3, Kind.RAISED, "ValueError: row 17"),
    ]
    assert [choose_primary(failures[: n + 1]).rank for n in range(4)] == [0, 2, 1, 2]


def test_nobody_knows_better_where_a_killed_worker_was():
    failure = choose_primary([Failure(0, 2, Kind.KILLED, "killed by signal 9")])
    assert describe_failure(failure) == "worker 0 failed: killed by signal 9; last heard of at step 2"


def test_among_equals_the_first_wins():
    failures = [Failure(2, 3, Kind.RAISED, "a"), Failure(0, 3, Kind.RAISED, "b")]
    assert choose_primary(failures).rank == 2


def test_an_endless_traceback_is_cut_in_the_middle():
    failure = caught(ValueError("x" * 500_000))
    assert len(failure.traceback) < 250_000
    assert "[...]" in failure.traceback
