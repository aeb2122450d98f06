"""The life of a job as a state machine: workers fail, end and are told to end. Pure; no processes, no clock.

Every method takes the time and returns the `Action`s to do. The first failure wins: reports are gathered
for a moment, because the failure that comes first is not always the one that explains; then all others end.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, auto

from unisono.cluster.failure import Failure, Kind, choose_primary, describe_failure

GATHER_S = 0.3
# The rest of the grace time is for the end by force, so that a failed job is gone within it.
_GRACE_SHARE = 0.9


class State(Enum):
    """Where a job is."""

    RUNNING = auto()
    GATHERING = auto()
    STOPPING = auto()
    KILLING = auto()
    DONE = auto()


@dataclass(frozen=True)
class TellAll:
    """Tell every worker to stop waiting."""

    reason: str


@dataclass(frozen=True)
class SendSignal:
    """Send a signal to every living worker."""

    number: int


Action = TellAll | SendSignal


class Job:
    """The state of one job.

    Args:
        world_size: number of workers.
        grace_s: time between asking workers to end and killing them.
    """

    def __init__(self, world_size: int, *, grace_s: float) -> None:
        self.state = State.RUNNING
        self.interrupted_by: signal.Signals | None = None
        self.ended: dict[int, int] = {}  # exit code of each worker that ended; minus the signal
        self._world_size = world_size
        self._grace_s = grace_s
        self._failures: list[Failure] = []
        self._deadline: float | None = None
        self._first_failure_at = 0.0

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do, if nothing happens before."""
        return self._deadline

    @property
    def failure(self) -> Failure | None:
        """The failure to show, or None."""
        return choose_primary(self._failures) if self._failures else None

    def blames(self, rank: int) -> bool:
        """Return whether a worker failed before the others were told to end."""
        return any(failure.rank == rank for failure in self._failures)

    @property
    def exit_code(self) -> int:
        """What the launcher exits with: 0, 130 for Ctrl-C, 143 for other signals, else the failure's."""
        if self.interrupted_by is not None:
            return 128 + (signal.SIGINT if self.interrupted_by == signal.SIGINT else signal.SIGTERM)
        return 0 if self.failure is None else self.failure.exit_code

    def report(self, failure: Failure, *, now: float) -> list[Action]:
        """A worker says that it failed."""
        return self._fail(failure, now)

    def exit(self, rank: int, code: int, *, step: int, joined: bool, now: float) -> list[Action]:
        """A worker's process ended with `code`; `joined`: without having left the run."""
        self.ended[rank] = code
        failure = exit_failure(rank, code, step=step, joined=joined)
        if code > 0 and any(known.rank == rank for known in self._failures):
            failure = None  # it said more before it ended
        actions = [] if failure is None else self._fail(failure, now)
        if len(self.ended) == self._world_size:
            self.state, self._deadline = State.DONE, None
        return actions

    def interrupt(self, number: int, *, now: float) -> list[Action]:
        """Someone sent the launcher a signal. If the job is ending already, that is the end at once."""
        if self.state is State.GATHERING and all(f.exit_code == 128 + signal.SIGTERM for f in self._failures):
            self.state, self._failures = State.RUNNING, []  # the signal reached the workers, too, and first
        if self.state in (State.STOPPING, State.GATHERING):
            return self._kill()
        if self.state is not State.RUNNING:
            return []
        self.interrupted_by = signal.Signals(number)
        return self._stop(f"the run was stopped by {self.interrupted_by.name}", now + self._grace_s)

    def tick(self, now: float) -> list[Action]:
        """Do what is due."""
        if self._deadline is None or now < self._deadline:
            return []
        if self.state is State.GATHERING:
            return self._stop_after_failure()
        if self.state is State.STOPPING:
            return self._kill()
        return []

    def _fail(self, failure: Failure, now: float) -> list[Action]:
        if self.state not in (State.RUNNING, State.GATHERING):
            return []  # it was told to end
        if any(known.rank == failure.rank and known.kind <= failure.kind for known in self._failures):
            return []  # said again by another part of the worker
        self._failures.append(failure)
        if self.state is State.RUNNING:
            self.state, self._deadline = State.GATHERING, now + GATHER_S
            self._first_failure_at = now
        # Nothing explains more than this.
        return self._stop_after_failure() if failure.kind == Kind.RAISED else []

    def _stop_after_failure(self) -> list[Action]:
        assert self.failure is not None
        reason = describe_failure(self.failure)
        return self._stop(reason, self._first_failure_at + _GRACE_SHARE * self._grace_s)

    def _stop(self, reason: str, kill_at: float) -> list[Action]:
        self.state, self._deadline = State.STOPPING, kill_at
        return [TellAll(reason), SendSignal(signal.SIGTERM)]

    def _kill(self) -> list[Action]:
        self.state, self._deadline = State.KILLING, None
        return [SendSignal(signal.SIGKILL)]


def exit_failure(rank: int, code: int, *, step: int, joined: bool) -> Failure | None:
    """Return the failure that the end of a process is, or None. Pure.

    Args:
        rank: the worker.
        code: its exit code, or minus the signal that killed it.
        step: its last known step.
        joined: it was in the run when it ended.
    """
    if code < 0:
        summary = f"killed by signal {-code} ({_signal_name(-code)})"
        return Failure(rank, step, Kind.KILLED, summary, exit_code=128 - code)
    if code > 0:
        # Whoever raises SystemExit says so before.
        return Failure(rank, step, Kind.KILLED, f"exited with code {code}, without a word", exit_code=code)
    if joined:
        summary = "ended with exit code 0 in the middle of the run, without leaving it (os._exit?)"
        return Failure(rank, step, Kind.KILLED, summary)
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
