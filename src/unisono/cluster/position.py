"""Where a worker is, and the words for "who is missing". Pure; opens nothing.

A worker's main thread is either in user code or in an operation of a step (``"reduce of bucket 2"``). What
others know of it is a `Sighting`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

USER_CODE = "user code"
STALE_AFTER_S = 3.0  # three heartbeats


def in_user_code(operation: str) -> bool:
    """Whether `operation` is the script's own or the model's work, which may take any time."""
    return operation.startswith(USER_CODE)


class Position(NamedTuple):
    """Where the main thread of this worker is, and since when (``time.monotonic()``)."""

    operation: str
    step: int
    since: float


class Sighting(NamedTuple):
    """What is known of a worker: where it was last seen, how long it had been there, and how fresh that is.

    Args:
        rank: the worker.
        pid: its process, 0 if it has not joined the run.
        step: step of its last known position, -1 before the first.
        operation: what it was doing.
        age_s: time since it got there.
        heartbeat_age_s: time since it was last heard of.
        ended: it has left the run.
    """

    rank: int
    pid: int = 0
    step: int = -1
    operation: str = "not joined"
    age_s: float = 0.0
    heartbeat_age_s: float = 0.0
    ended: bool = False


def find_missing(rank: int, *, step: int, sightings: Iterable[Sighting]) -> list[Sighting]:
    """Return the workers that `rank`, which waits at `step`, is likely to wait for, the likeliest kind only.

    Workers that are gone come first, then silent ones, then those in user code, then those behind.
    """
    others = [s for s in sightings if s.rank != rank]
    kinds = (
        [s for s in others if s.ended or s.pid == 0],
        [s for s in others if s.heartbeat_age_s > STALE_AFTER_S],
        [s for s in others if in_user_code(s.operation)],
        [s for s in others if s.step < step],
    )
    return next((kind for kind in kinds if kind), [])


def describe_wait(rank: int, *, position: Position, waited_s: float, sightings: Collection[Sighting]) -> str:
    """Return one sentence: who waited, how long, where, and for whom."""
    where = f"rank {rank} waited {waited_s:.1f} s {_place(position.step, position.operation)}"
    missing = find_missing(rank, step=position.step, sightings=sightings)
    if missing:
        return f"{where} for {'; and for '.join(describe(s) for s in missing)}"
    if not sightings:
        return f"{where}; where the other workers are could not be found out"
    return f"{where}, and so did all others: they wait for each other, or a connection between them is stuck"


def describe(sighting: Sighting) -> str:
    """Return who a worker is and where it was last seen."""
    if sighting.pid == 0:
        return f"rank {sighting.rank}, which has not joined the run"
    name = f"rank {sighting.rank} (pid {sighting.pid})"
    place = _place(sighting.step, sighting.operation)
    if sighting.ended:
        return f"{name}, which left the run {sighting.age_s:.1f} s ago, last seen {place}"
    text = f"{name}: last seen {place}, {max(sighting.age_s, sighting.heartbeat_age_s):.1f} s ago"
    if sighting.heartbeat_age_s > STALE_AFTER_S:
        text += f", no heartbeat for {sighting.heartbeat_age_s:.1f} s (stopped?)"
    return text


def _place(step: int, operation: str) -> str:
    return f"at step {step} in {operation}" if step >= 0 else f"before the first step in {operation}"
