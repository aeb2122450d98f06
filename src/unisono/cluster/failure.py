"""What a worker says when it fails, and which of several failures is the one to show. Pure."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from unisono.errors import DeadlineError, TransportError

_TEXT_LIMIT = 200_000


class Kind(IntEnum):
    """How much a failure explains; the smallest explains most."""

    RAISED = 0  # an exception of user code, or of ours that is not about others
    KILLED = 1  # a signal, or an exit without a word
    EXITED = 2  # sys.exit(code)
    DEADLINE = 3  # waited for others in vain
    CONSEQUENCE = 4  # others were gone


class Failure(msgspec.Struct, frozen=True):
    """How a worker failed.

    Args:
        rank: the worker.
        step: its step, -1 before the first.
        kind: a `Kind`.
        summary: one line: ``ValueError: row 17``.
        traceback: text for people, may be empty.
        exit_code: what a process that fails like this exits with.
    """

    rank: int
    step: int
    kind: int
    summary: str
    traceback: str = ""
    exit_code: int = 1


def describe_exception(error: BaseException, *, rank: int, step: int) -> Failure:
    """Return the failure that an exception is."""
    if isinstance(error, SystemExit):
        return _describe_exit(error.code, rank=rank, step=step)
    text = "".join(traceback.format_exception(error))
    if len(text) > _TEXT_LIMIT:  # the head names the place in user code, the tail the error
        text = f"{text[: _TEXT_LIMIT // 2]}\n  [...]\n{text[-_TEXT_LIMIT // 2 :]}"
    return Failure(rank, step, _kind(error), _summarize(error), text)


def choose_primary(failures: Sequence[Failure]) -> Failure:
    """Return the failure to show: the one that explains most; among equals the first that was reported.

    A worker that was killed could not say at which step; those that waited for it could. Without them there is
    only where it was last heard of, up to a second before.
    """
    primary = min(failures, key=lambda failure: failure.kind)
    if primary.kind != Kind.KILLED:
        return primary
    waited_at = [failure.step for failure in failures if failure.kind == Kind.CONSEQUENCE]
    if waited_at:
        return msgspec.structs.replace(primary, step=max(primary.step, *waited_at))
    if primary.step < 0:
        return primary
    summary = f"{primary.summary}; last heard of at step {primary.step}"
    return msgspec.structs.replace(primary, step=-1, summary=summary)


def describe_failure(failure: Failure) -> str:
    """Return one line: ``worker 2 failed at step 3: ValueError: row 17``."""
    place = f" at step {failure.step}" if failure.step >= 0 else ""
    return f"worker {failure.rank} failed{place}: {failure.summary}"


def _describe_exit(code: object, *, rank: int, step: int) -> Failure:
    number = code & 0xFF if isinstance(code, int) else int(code is not None)
    summary = f"exited with code {code}" if isinstance(code, int) else str(code)
    if number == 128 + signal.SIGTERM:
        summary = "ended by SIGTERM"
    return Failure(rank, step, Kind.EXITED, summary, exit_code=number)


def _summarize(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {lines[0]}" if lines else name


def _kind(error: BaseException) -> Kind:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DeadlineError):
            return Kind.DEADLINE
        if isinstance(cause, TransportError):
            return Kind.CONSEQUENCE
        cause = cause.__cause__
    return Kind.RAISED
