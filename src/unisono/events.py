"""What happens in a run, as frozen records, and the observer that is told.

Library code tells an observer; only the command line and observers print.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Notice:
    """Something the user should read once, in one line."""

    message: str


@dataclass(frozen=True)
class StepFinished:
    """A global step was done.

    Args:
        replica: number of the replica, in the order of `Run.replicate` calls.
        step: number of the step, from 0.
        loss: the mean loss of the global batch, weighted like the gradient.
        weight: the total weight of the global batch (samples, or what the loss function returned).
        skipped: why it was not applied, in words; None if it was.
    """

    replica: int
    step: int
    loss: float
    weight: float
    skipped: str | None = None


Event = Notice | StepFinished


class Observer(Protocol):
    """Is told what happens, on the thread where it happens; must return quickly."""

    def __call__(self, event: Event) -> None: ...
