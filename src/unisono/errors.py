"""Every exception that Unisono raises.

    UnisonoError
    ├── UsageError           what the user asked for can't be done; raised before work starts
    ├── MismatchError        the workers were built or called differently
    ├── TransportError       bytes could not be moved
    │   ├── WorkerLostError  a peer is gone: its connection closed
    │   └── DeadlineError    a wait took longer than its deadline; says on whom it waited
    ├── StepFailedError      a step failed on this worker, and the script has not given it up
    ├── LoaderError          a loader process of this worker died or was late with its data
    └── JobError             a job started by the launcher failed; carries the first failing worker

This file owns the tree and nothing else; messages are written where the error is found.
"""


class UnisonoError(Exception):
    """Root of all errors raised by this package."""


class UsageError(UnisonoError, ValueError):
    """What was asked for can't be done. Raised before any work starts; nothing was changed."""


class MismatchError(UnisonoError):
    """Workers disagree about the model, the order of calls or the settings."""


class TransportError(UnisonoError):
    """Bytes could not be moved between workers."""


class WorkerLostError(TransportError):
    """A peer is gone: it ended, was killed, or its connection broke."""


class DeadlineError(TransportError, TimeoutError):
    """A wait took longer than its deadline."""


class StepFailedError(UnisonoError):
    """A step failed on this worker, others wait for it, and the script went on without `Replica.skip`."""


class LoaderError(UnisonoError):
    """A loader process of this worker died, or was late with its data."""


class JobError(UnisonoError):
    """A job failed. The message names the first failing worker, its step and its error.

    Args:
        message: what happened, for people.
        rank: the first failing worker, or None when the job was stopped from outside.
        exit_code: what the launcher should exit with; never 0.
    """

    def __init__(self, message: str, *, rank: int | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
