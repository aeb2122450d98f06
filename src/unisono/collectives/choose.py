"""Which schedule sums the gradients of a step."""

from __future__ import annotations

from difflib import get_close_matches

from unisono.collectives.direct import direct
from unisono.collectives.hierarchical import hierarchical
from unisono.collectives.pairs import can_pair, pairs
from unisono.collectives.schedule import Schedule
from unisono.errors import UsageError
from unisono.grid import Assignment

ALGORITHMS = ("auto", "direct", "pairs", "hierarchical")
Hosts = tuple[tuple[int, ...], ...]


def check_algorithm(algorithm: str) -> None:
    """Raise a `UsageError` that names the nearest known one unless `algorithm` is known. *Pure.*"""
    if algorithm not in ALGORITHMS:
        nearest = get_close_matches(algorithm, ALGORITHMS, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"algorithm={algorithm!r} is unknown; did you mean {nearest!r}? Known: {', '.join(ALGORITHMS)}."
        )


def choose(assignment: Assignment, algorithm: str = "auto", *, hosts: Hosts = ()) -> Schedule:
    """Return the schedule that sums over `assignment`. *Pure.* All give the same bits.

    "auto" takes pairs where the shares allow it, since a sum over two ranks is a backend's own all-reduce,
    and direct exchange elsewhere. Where ranks of a host read each other's memory it takes direct exchange on one
    host, so that each element is added up once and not by both, and hierarchical exchange on several.

    Args:
        hosts: the ranks of each host if they read each other's memory; empty otherwise.

    Raises:
        UsageError: the algorithm is unknown, or can't do this assignment.
    """
    check_algorithm(algorithm)
    if algorithm == "pairs" or (algorithm == "auto" and not hosts and can_pair(assignment)):
        return pairs(assignment)
    if algorithm == "hierarchical" or (algorithm == "auto" and len(hosts) > 1):
        return hierarchical(assignment, hosts or tuple((rank,) for rank in range(assignment.world_size)))
    return direct(assignment)
