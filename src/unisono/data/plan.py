"""Which assignment holds at which step, as a record of decisions.

Whoever balances the load or loses a worker records a change here; loaders and strategies only ask. Pure.
"""

from __future__ import annotations

from bisect import bisect_right

from unisono.errors import UsageError
from unisono.grid import Assignment


class AssignmentPlan:
    """Answers who owns which micro-batches at any step.

    Every worker must record the same changes with the same steps. A loader has handed work to its processes
    some steps ahead; a change that comes into force later than that costs nothing, an earlier one makes it
    load the micro-batches that moved in the main process.

    Args:
        assignment: what holds from step 0 on.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._steps = [0]
        self._assignments = [assignment]

    @property
    def changes(self) -> tuple[tuple[int, Assignment], ...]:
        """The record: from which step on which assignment holds, in ascending order of steps."""
        return tuple(zip(self._steps, self._assignments, strict=True))

    def at(self, step: int) -> Assignment:
        """Return the assignment of one step. O(log changes)."""
        if step < 0:
            raise UsageError(f"step={step}: expected 0 or more.")
        return self._assignments[bisect_right(self._steps, step) - 1]

    def change(self, assignment: Assignment, from_step: int) -> None:
        """Let `assignment` hold from a step on. Changes recorded for that step or later are replaced.

        Raises:
            UsageError: a negative step, or another number of micro-batches, which belongs to the run.
        """
        expected = self._assignments[0].num_micro_batches
        if assignment.num_micro_batches != expected:
            raise UsageError(
                f"an assignment of {assignment.num_micro_batches} micro-batches in a plan over {expected}: "
                f"the number of micro-batches is fixed for a run."
            )
        if from_step < 0:
            raise UsageError(f"from_step={from_step}: expected 0 or more.")
        while self._steps and self._steps[-1] >= from_step:
            self._steps.pop()
            self._assignments.pop()
        self._steps.append(from_step)
        self._assignments.append(assignment)
