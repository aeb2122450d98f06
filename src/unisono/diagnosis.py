"""Comparing what runs of one script noted, and naming the likely cause of a difference. Pure.

Owns the words of `unisono check`; starts nothing and reads no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from unisono.cluster.failure import Failure, describe_failure

Note = Mapping[str, Any]

MIXING_LIMIT = 1e-6
"""float64 over parts and over the whole differ by rounding, about 1e-15; by far more if samples are mixed."""


class Cause(StrEnum):
    """Why two runs of one script may differ."""

    RANDOM = (
        "random numbers that don't come from the run's seed: a generator of the script's own, the time, or "
        "os.urandom. Two runs with one worker differ as well"
    )
    HASHING = (
        "iteration order: a set or a hash decides an order. Two runs with one worker and different "
        "PYTHONHASHSEED differ as well"
    )
    THREADS = "the thread count: another number of intra-op threads adds in another order"
    RANKS = (
        "the model is changed outside of the step on some workers only: code that depends on the rank, or state "
        "that was loaded or drawn differently"
    )
    CARRIED = (
        "state is carried from one micro-batch to the next outside of buffers (an attribute, a global): a second "
        "forward pass with the same random numbers gives another loss"
    )
    WORLD = "code in the loss function, the model or the loop that depends on the rank or on the world size"
    OPERATION = "a non-deterministic operation"
    BUFFER = "a buffer that is changed in forward, differently by different micro-batches"
    LENGTH = "the runs don't do the same number of steps"


@dataclass(frozen=True)
class Notes:
    """What one run left.

    Args:
        world_size: its number of workers.
        hash_seed: its PYTHONHASHSEED.
        ranks: for each rank its notes of steps, in order.
        comparisons: its comparisons of gradients with float64.
        failure: how it failed, or None.
    """

    world_size: int
    hash_seed: int
    ranks: Sequence[Sequence[Note]]
    comparisons: Sequence[Note] = ()
    failure: Failure | None = None

    @property
    def name(self) -> str:
        return f"{self.world_size} worker{'s' if self.world_size > 1 else ''}"


@dataclass(frozen=True)
class Difference:
    """The first place where two runs, or two ranks of one run, differ.

    Args:
        step, replica: where; -1 if one of them is shorter.
        tensor: name of the first parameter or buffer that differs; empty if only the loss does.
        between: what was compared, for people.
        within: whether both are ranks of one run.
    """

    step: int
    replica: int
    tensor: str
    between: str
    within: bool

    def __str__(self) -> str:
        if self.step < 0:
            return f"different numbers of steps: {self.between}"
        what = self.tensor or "the loss"
        replica = f" of replica {self.replica}" if self.replica else ""
        return f"the first difference is after step {self.step}: {what}{replica}, between {self.between}"


@dataclass(frozen=True)
class Verdict:
    """What a check found: identical, or a difference and its likely cause.

    Args:
        lines: for people, the most important first.
        identical: whether all runs agree to the bit.
        cause: the likely cause if they don't.
    """

    lines: Sequence[str]
    identical: bool
    cause: Cause | None = None


def first_difference(one: Notes, other: Notes) -> Difference | None:
    """Return where the runs differ first: within `other`, then between rank 0 of both."""
    for rank in range(1, len(other.ranks)):
        between = f"ranks 0 and {rank} of the run with {other.name}"
        found = _compare(other.ranks[0], other.ranks[rank], between, within=True)
        if found is not None:
            return found
    between = f"the runs with {one.name} and with {other.name}"
    return _compare(one.ranks[0], other.ranks[0], between, within=False)


def threads_differ(one: Notes, other: Notes) -> bool:
    """Whether the workers of both runs had different numbers of intra-op threads."""
    counts = {note["threads"] for notes in (one, other) for rank in notes.ranks for note in rank}
    return len(counts) > 1


def carries_state(notes: Notes) -> bool:
    """Whether a repeated forward pass ever gave another loss."""
    return any(note["carried"] for rank in notes.ranks for note in rank)


def cause_of_failure(failure: Failure) -> Cause | None:
    """Return the cause that a failed run itself names, or None: then the script is broken in its own way."""
    if "does not have a deterministic implementation" in failure.traceback:
        return Cause.OPERATION
    if "MismatchError" in failure.summary and "buffer" in failure.summary:
        return Cause.BUFFER
    return None


def verdict_of_failure(notes: Notes) -> Verdict:
    """Return what to say about a run that failed."""
    assert notes.failure is not None
    cause = cause_of_failure(notes.failure)
    what = describe_failure(notes.failure)
    if cause is None:
        return Verdict([notes.failure.traceback.rstrip(), f"the run with {notes.name} failed: {what}"], False)
    return Verdict([f"the run with {notes.name} stopped: {what}", f"likely cause: {cause}"], False, cause)


def verdict_of_difference(difference: Difference, cause: Cause) -> Verdict:
    """Return what to say about runs that differ."""
    return Verdict([str(difference), f"likely cause: {cause}"], False, cause)


def verdict_of_agreement(runs: Sequence[Notes]) -> Verdict:
    """Return what to say about runs that agree, with what is known of the gradient's precision."""
    sizes = ", ".join(str(notes.world_size) for notes in runs)
    steps = len(runs[0].ranks[0])
    lines = [f"identical: {steps} steps on {sizes} workers"]
    lines += list(_precision(runs[0].comparisons))
    mixing = max((note["mixing"] or 0.0 for note in runs[0].comparisons), default=0.0)
    if mixing > MIXING_LIMIT:
        lines.append(
            f"remark: an operation across samples: the gradient over the whole batch at once differs from the mean "
            f"over micro-batches by {mixing:.1e}. The result depends on micro_batches, not on the workers."
        )
    return Verdict(lines, True)


def _precision(comparisons: Sequence[Note]) -> Iterator[str]:
    compared = [note for note in comparisons if note["error"] is not None]
    if compared:
        worst = max(compared, key=lambda note: float(note["error"]))
        yield (
            f"gradient against float64, dropout off: largest relative error {worst['error']:.1e} "
            f"({worst['parameter']}, step {worst['step']})"
        )
    elif comparisons:
        yield f"gradient not compared with float64: {comparisons[0]['reason']}"


def _compare(one: Sequence[Note], other: Sequence[Note], between: str, *, within: bool) -> Difference | None:
    for left, right in zip(one, other, strict=False):
        place = (left["step"], left["replica"])
        if place != (right["step"], right["replica"]):
            return Difference(*place, "the order of steps", between, within)
        names = [*left["state"], *(name for name in right["state"] if name not in left["state"])]
        for name in names:
            if left["state"].get(name) != right["state"].get(name):
                return Difference(*place, name, between, within)
        if left["loss"] != right["loss"]:
            return Difference(*place, "", between, within)
    if len(one) != len(other):
        return Difference(-1, 0, "", f"{between}: {len(one)} and {len(other)}", within)
    return None
