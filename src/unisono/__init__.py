"""Data-parallel training with the same weights, bit for bit, on any number of workers.

Names are imported when they are first used, so that the command line starts without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.cluster.launch import launch
    from unisono.data.packed import PackedList
    from unisono.errors import (
        DeadlineError,
        JobError,
        LoaderError,
        MismatchError,
        StepFailedError,
        TransportError,
        UnisonoError,
        UsageError,
        WorkerLostError,
    )
    from unisono.fingerprints import fingerprint
    from unisono.replica import Replica
    from unisono.run import Run, join
    from unisono.strategies import Synchronous

_HOMES = {
    "DeadlineError": "unisono.errors",
    "JobError": "unisono.errors",
    "LoaderError": "unisono.errors",
    "MismatchError": "unisono.errors",
    "PackedList": "unisono.data.packed",
    "Replica": "unisono.replica",
    "Run": "unisono.run",
    "StepFailedError": "unisono.errors",
    "Synchronous": "unisono.strategies",
    "TransportError": "unisono.errors",
    "UnisonoError": "unisono.errors",
    "UsageError": "unisono.errors",
    "WorkerLostError": "unisono.errors",
    "fingerprint": "unisono.fingerprints",
    "join": "unisono.run",
    "launch": "unisono.cluster.launch",
}

__all__ = [
    "DeadlineError",
    "JobError",
    "LoaderError",
    "MismatchError",
    "PackedList",
    "Replica",
    "Run",
    "StepFailedError",
    "Synchronous",
    "TransportError",
    "UnisonoError",
    "UsageError",
    "WorkerLostError",
    "fingerprint",
    "join",
    "launch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
