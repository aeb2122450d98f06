"""The life of a job, driven without processes or clocks."""

from __future__ import annotations

import signal

import pytest

from unisono.cluster.failure import Failure, Kind
from unisono.cluster.job import GATHER_S, Job, SendSignal, State, TellAll

TERM, KILL = SendSignal(signal.SIGTERM), SendSignal(signal.SIGKILL)


def make_job(world_size=3, grace_s=5.0):
    return Job(world_size, grace_s=grace_s)


def end(job, rank, code=0, *, joined=False, now=0.0):
    return job.exit(rank, code, step=3, joined=joined, now=now)


def raised(rank=2):
    return Failure(rank, 3, Kind.RAISED, "ValueError: row 17", "Traceback ...")


def consequence(rank=0):
    return Failure(rank, 3, Kind.CONSEQUENCE, "WorkerLostError: lost")


def test_a_job_whose_workers_all_return_is_done_with_0():
    job = make_job()
    for rank in (2, 0, 1):
        assert job.state is State.RUNNING
        assert end(job, rank) == []
    assert job.state is State.DONE
    assert job.exit_code == 0
    assert job.failure is None


def test_an_exception_stops_the_others_at_once():
    job = make_job()
    tell, term = job.report(raised(), now=10.0)
    assert tell == TellAll("worker 2 failed at step 3: ValueError: row 17")
    assert term == TERM


def test_who_does_not_end_is_killed_within_the_grace_time():
    job = make_job(grace_s=5.0)
    job.report(raised(), now=10.0)
    assert job.deadline <= 15.0
    assert job.tick(job.deadline - 0.01) == []
    assert job.tick(job.deadline) == [KILL]
    assert job.deadline is None


def test_a_consequence_waits_for_what_explains_it():
    job = make_job()
    assert job.report(consequence(), now=10.0) == []
    assert job.state is State.GATHERING
    assert job.deadline == pytest.approx(10.0 + GATHER_S)
    assert job.report(raised(), now=10.1) != []
    assert job.failure == raised()


def test_a_consequence_that_nothing_explains_stops_the_job_too():
    job = make_job()
    job.report(consequence(), now=10.0)
    assert job.tick(10.0 + GATHER_S)[-1] == TERM
    assert job.failure == consequence()


def test_a_killed_worker_explains_its_peers_errors():
    job = make_job()
    job.report(consequence(), now=10.0)
    end(job, 1, -9, now=10.1)
    job.tick(11.0)
    assert job.failure.summary == "killed by signal 9 (SIGKILL)"
    assert job.exit_code == 137


def test_errors_after_the_order_to_end_count_for_nothing():
    job = make_job()
    job.report(consequence(), now=10.0)
    job.tick(10.0 + GATHER_S)
    assert job.report(raised(1), now=11.0) == []
    assert end(job, 1, -9) == []
    assert job.failure == consequence()


def test_the_exit_of_a_worker_that_reported_adds_nothing():
    job = make_job()
    job.report(consequence(0), now=10.0)
    end(job, 0, 1, now=10.1)
    assert job.failure == consequence(0)


def test_the_same_failure_said_twice_is_one():
    job = make_job()
    job.report(consequence(0), now=10.0)
    job.report(consequence(0), now=10.2)
    assert job.deadline == pytest.approx(10.0 + GATHER_S)


def test_the_failing_workers_exit_code_is_the_jobs():
    job = make_job()
    end(job, 1, 7)
    assert job.exit_code == 7
    assert job.failure.summary == "exited with code 7, without a word; last heard of at step 3"


def test_ending_with_0_in_the_middle_of_the_run_is_a_failure():
    job = make_job()
    end(job, 1, 0, joined=True)
    assert job.exit_code == 1
    assert "in the middle of the run" in job.failure.summary


def test_a_worker_may_end_first():
    job = make_job()
    assert end(job, 0, 0) == []
    assert job.state is State.RUNNING


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_ends_the_job_with_its_code(number, code):
    job = make_job()
    assert job.interrupt(number, now=1.0)[-1] == TERM
    assert job.deadline == 6.0
    for rank in range(3):
        end(job, rank, 143)
    assert job.state is State.DONE
    assert job.exit_code == code
    assert job.failure is None


def test_a_second_signal_kills_at_once():
    job = make_job()
    job.interrupt(signal.SIGINT, now=1.0)
    assert job.interrupt(signal.SIGINT, now=1.1) == [KILL]
    assert job.exit_code == 130


def test_a_signal_while_a_failed_job_ends_kills_and_keeps_the_failure():
    job = make_job()
    job.report(raised(), now=1.0)
    assert job.interrupt(signal.SIGINT, now=1.1) == [KILL]
    assert job.exit_code == 1


def test_workers_that_failed_first_are_blamed_and_no_others():
    job = make_job()
    end(job, 1, 0)
    job.report(raised(), now=1.0)
    end(job, 0, 143)
    assert [job.blames(rank) for rank in range(3)] == [False, False, True]


def test_the_step_of_a_killed_worker_is_where_the_others_waited_for_it():
    job = make_job()
    job.exit(1, -9, step=-1, joined=True, now=0.0)
    job.report(consequence(0), now=0.1)
    assert (job.failure.rank, job.failure.step) == (1, 3)
