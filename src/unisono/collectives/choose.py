"""Which schedule sums the gradients of a step."""

from __future__ import annotations

from difflib import get_close_matches

from unisono.collectives.direct import direct
from unisono.collectives.pairs import can_pair, pairs
from unisono.collectives.schedule import Schedule
from unisono.errors import UsageError
from unisono.grid import Assignment

ALGORITHMS = ("auto", "direct", "pairs")


def check_algorithm(algorithm: str) -> None:
    """Raise a `UsageError` that names the nearest known one unless `algorithm` is known. *Pure.*"""
    if algorithm not in ALGORITHMS:
        nearest = get_close_matches(algorithm, ALGORITHMS, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"algorithm={algorithm!r} is unknown; did you mean {nearest!r}? Known: {', '.join(ALGORITHMS)}."
        )


def choose(assignment: Assignment, algorithm: str = "auto", *, maps_peers: bool = False) -> Schedule:
    """Return the schedule that sums over `assignment`. *Pure.* All give the same bits.

    "auto" takes pairs where the shares allow it, since a sum over two ranks is a backend's own all-reduce,
    and direct exchange elsewhere; also where ranks read each other's memory (`maps_peers`), since there each
    element is then added up once and not by both.

    Raises:
        UsageError: the algorithm is unknown, or can't do this assignment.
    """
    check_algorithm(algorithm)
    if algorithm == "pairs" or (algorithm == "auto" and not maps_peers and can_pair(assignment)):
        return pairs(assignment)
    return direct(assignment)
