"""From "this script on so many workers" to a job, checked before any process starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.cluster import environment
from unisono.cluster.output import Mode, OutputPlan
from unisono.cluster.spec import JobSpec
from unisono.errors import UsageError


def script_job(
    script: Path,
    args: Sequence[str],
    *,
    world_size: int,
    fresh: bool = False,
    grace_s: float = 5.0,
    flags: Mapping[str, Any] | None = None,
    output: Mode = "first",
    output_directory: Path | None = None,
    inherit: bool = False,
) -> JobSpec:
    """Return the job that runs ``script args...`` on every worker.

    Args:
        script: a Python file.
        args: its arguments.
        world_size: number of workers.
        fresh: start new interpreters instead of forking.
        grace_s: time between asking a worker to end and killing it.
        flags: what the command line said, for the workers' connections.
        output: whose output is shown.
        output_directory: where the rest of the output is kept; by default a new folder for temporary files,
            which is removed at the end when all went well.
        inherit: rank 0 writes to our own standard streams.

    Raises:
        UsageError: the script is no readable file, or a number is out of range.
    """
    _check(script, world_size=world_size, grace_s=grace_s)
    path = script.absolute()
    return JobSpec(
        world_size=world_size,
        argv=[str(script), *args],
        script=str(path),
        # As `python script` has it: the script's folder in the place of ours.
        path=[str(path.parent.resolve()), *(sys.path if sys.flags.safe_path else sys.path[1:])],
        variables=environment.variables(),
        directory=os.getcwd(),
        fresh=fresh,
        grace_s=grace_s,
        flags=dict(flags or {}),
        output=_output_plan(output, output_directory, inherit=inherit),
    )


def _check(script: Path, *, world_size: int, grace_s: float) -> None:
    if world_size < 1:
        raise UsageError(f"-n {world_size}: expected at least 1 worker")
    if not grace_s > 0:
        raise UsageError(f"grace_s={grace_s}: expected a positive number of seconds")
    if not script.exists():
        raise UsageError(f"{script}: no such file")
    if not script.is_file():
        raise UsageError(f"{script}: not a file; name the Python script to run")
    if not os.access(script, os.R_OK):
        raise UsageError(f"{script}: may not be read by this user")


def _output_plan(mode: Mode, directory: Path | None, *, inherit: bool) -> OutputPlan:
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{directory}: can't be used for output: {error.strerror}") from error
    return OutputPlan(mode, keep=True, directory=directory, inherit=inherit)
