"""What a job is and how it ended: plain data."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.cluster.failure import Failure
from unisono.cluster.output import OutputPlan


@dataclass(frozen=True)
class JobSpec:
    """What a job is.

    Args:
        world_size: number of workers.
        argv: ``sys.argv`` of the workers.
        script: file that every worker runs, or None.
        function: pickled ``(function, args)`` that every worker calls, or None.
        path: ``sys.path`` of the workers.
        variables: environment of the workers.
        directory: working directory of the workers.
        fresh: start new interpreters instead of forking.
        grace_s: time between asking a worker to end and killing it.
        flags: settings of the command line that the script gets through its connection.
        output: where the workers' output goes.
        folders: temporary ones that nobody needs once the job is over; removed if the launcher is killed.
        run_id: name of the run.
    """

    world_size: int
    argv: Sequence[str]
    path: Sequence[str]
    variables: Mapping[str, str]
    script: str | None = None
    function: bytes | None = None
    directory: str = field(default_factory=os.getcwd)
    fresh: bool = False
    grace_s: float = 5.0
    flags: Mapping[str, Any] = field(default_factory=dict)
    output: OutputPlan = field(default_factory=OutputPlan)
    folders: Sequence[str] = ()
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        exit_code: what the launcher should exit with.
        failure: the failure to show, or None.
        ended: exit code of every worker that ended; minus the signal that killed it.
        left_early: workers that were done, without an error, when the others were told to end.
        interrupted_by: name of the signal that stopped the job, or None.
        values: pickled return value of each worker, by rank.
        logs: files with output of workers that was not shown.
        killed: processes that workers left behind and that were killed.
    """

    exit_code: int
    failure: Failure | None
    ended: Mapping[int, int]
    left_early: Sequence[int] = ()
    interrupted_by: str | None = None
    values: Mapping[int, bytes] = field(default_factory=dict)
    logs: Sequence[Path] = ()
    killed: int = 0
