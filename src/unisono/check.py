"""Runs a user's script at several world sizes and proves, or refutes, that it gives the same bits.

Every run is a job of its own, in interpreters of its own, with another seed of Python's string hashes. If two
runs differ, further runs with one worker find out why. What is concluded from the notes is `diagnosis`' part.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from unisono.cluster.inbox import Inbox
from unisono.cluster.launch import ForkServer
from unisono.cluster.script import script_job
from unisono.diagnosis import (
    Cause,
    Difference,
    Notes,
    Verdict,
    carries_state,
    first_difference,
    threads_differ,
    verdict_of_agreement,
    verdict_of_difference,
    verdict_of_failure,
)
from unisono.errors import JobError, UsageError

NUM_FLOAT64_STEPS = 3

Say = Callable[[str], None]


class Checker:
    """Checks one script with one list of arguments.

    Args:
        script: the Python file.
        args: its arguments.
        num_steps: how many steps of each run are compared; None compares whole runs.
        say: is told what is being done.
        inbox: where signals to this process arrive.
    """

    def __init__(
        self,
        script: Path,
        args: Sequence[str],
        *,
        num_steps: int | None,
        say: Say,
        inbox: Inbox | None = None,
    ) -> None:
        if num_steps is not None and num_steps < 1:
            raise UsageError(f"--steps {num_steps}: expected at least 1")
        self._script = script
        self._args = args
        self._num_steps = num_steps
        self._say = say
        self._inbox = inbox

    def check(self, world_sizes: Sequence[int]) -> Verdict:
        """Compare runs at `world_sizes`, and one with a single worker. Blocking.

        Raises:
            UsageError: the script can't be run, or does no step.
            JobError: a signal stopped a run.
        """
        sizes = sorted({1, *world_sizes})
        for size in sizes:
            script_job(self._script, self._args, world_size=size)  # checks all before anything starts
        runs: list[Notes] = []
        for number, size in enumerate(sizes):
            notes = self._run(size, hash_seed=number + 1, num_float64_steps=0 if runs else NUM_FLOAT64_STEPS)
            if notes.failure is not None:
                return verdict_of_failure(notes)
            if not notes.ranks or not notes.ranks[0]:
                raise UsageError(f"{self._script}: did no step of a replica, so there is nothing to compare.")
            runs.append(notes)
            difference = first_difference(runs[0], notes)
            if difference is not None:
                return verdict_of_difference(difference, self._find_cause(difference, runs[0], notes))
        return verdict_of_agreement(runs)

    def _find_cause(self, difference: Difference, one: Notes, other: Notes) -> Cause:
        """Rule out one cause after the other, with further runs on one worker."""
        if threads_differ(one, other):
            return Cause.THREADS
        if difference.within:
            return Cause.RANKS
        if self._differs(one, hash_seed=one.hash_seed):
            return Cause.RANDOM
        if self._differs(one, hash_seed=other.hash_seed):
            return Cause.HASHING
        if difference.step < 0:
            return Cause.LENGTH
        if carries_state(self._run(1, hash_seed=one.hash_seed, repeats_forward=True)):
            return Cause.CARRIED
        return Cause.WORLD

    def _differs(self, one: Notes, *, hash_seed: int) -> bool:
        again = self._run(1, hash_seed=hash_seed)
        return again.failure is not None or first_difference(one, again) is not None

    def _run(
        self, world_size: int, *, hash_seed: int, num_float64_steps: int = 0, repeats_forward: bool = False
    ) -> Notes:
        how = ", every forward pass twice" if repeats_forward else ""
        self._say(f"running with {world_size} worker{'s' if world_size > 1 else ''}{how} ...")
        with tempfile.TemporaryDirectory(prefix="unisono-check-") as folder:
            audit = {
                "folder": folder,
                "num_steps": self._num_steps,
                "num_float64_steps": num_float64_steps,
                "repeats_forward": repeats_forward,
            }
            spec = script_job(self._script, self._args, world_size=world_size, flags={"audit": audit})
            spec = dataclasses.replace(spec, folders=(folder,))
            with ForkServer(hash_seed=hash_seed) as server:
                outcome = server.run(spec, out=io.StringIO(), err=io.StringIO(), inbox=self._inbox)
            if outcome.interrupted_by is not None:
                raise JobError(f"stopped by {outcome.interrupted_by}", exit_code=outcome.exit_code)
            notes = [_read(Path(folder) / f"rank-{rank}.jsonl") for rank in range(world_size)]
        return Notes(
            world_size=world_size,
            hash_seed=hash_seed,
            ranks=[[note for note in rank if note["kind"] == "step"] for rank in notes],
            comparisons=[note for note in notes[0] if note["kind"] == "float64"],
            failure=outcome.failure,
        )


def _read(path: Path) -> list[dict[str, object]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
