"""The command line. It checks what was asked for, starts it, and prints how it ended."""

from __future__ import annotations

import sys
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.check import Checker
from unisono.cluster.environment import usable_cores
from unisono.cluster.failure import Kind, describe_failure
from unisono.cluster.inbox import Inbox
from unisono.cluster.launch import ForkServer
from unisono.cluster.probe import check_backend, count_accelerators
from unisono.cluster.process import adopt_orphans, kill_orphans
from unisono.cluster.script import script_job
from unisono.cluster.spawner import PRELOAD
from unisono.cluster.spec import JobSpec, Outcome
from unisono.errors import UnisonoError, UsageError

app = typer.Typer(
    name="unisono",
    help="Train with the same weights, bit for bit, on any number of workers.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class OutputMode(StrEnum):
    """Whose output is shown."""

    FIRST = "first"
    ALL = "all"


def main() -> None:
    """Run the command line."""
    try:
        app()
    except UnisonoError as error:
        print(f"unisono: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else getattr(error, "exit_code", 1))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"unisono {version('unisono')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(help="The Python script that every worker runs.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    num_workers: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--num-workers",
            help="Number of workers. By default one per accelerator, else one per core this job may use.",
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Start new interpreters instead of forking.")] = False,
    output: Annotated[
        OutputMode, typer.Option(help="Show rank 0's output, or everybody's with the rank before each line.")
    ] = OutputMode.FIRST,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="Keep hidden output here (rank-1.log ...); by default only failed runs keep it."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="What moves tensors: shared_memory, gloo, nccl or another that torch knows."),
    ] = None,
    step_timeout_s: Annotated[
        float | None, typer.Option(help="How long a worker waits for the others in one operation.")
    ] = None,
    grace_s: Annotated[float, typer.Option(help="Time workers get to end before they are killed.")] = 5.0,
    threads_per_worker: Annotated[
        int | None, typer.Option(help="Intra-op threads of a worker; part of what decides the bits.")
    ] = None,
    allow_idle: Annotated[
        bool, typer.Option("--allow-idle", help="Accept fewer micro-batches than workers.")
    ] = False,
) -> None:
    """Run a training script on several workers of this host."""
    flags = collect_flags(
        backend=backend,
        step_timeout_s=step_timeout_s,
        threads_per_worker=threads_per_worker,
        allow_idle=allow_idle,
    )
    spec = script_job(
        script,
        args or [],
        world_size=default_num_workers() if num_workers is None else num_workers,
        fresh=fresh,
        grace_s=grace_s,
        flags=flags,
        output=output.value,
        output_directory=output_dir,
        inherit=True,
    )
    outcome = execute(spec)
    for line in last_words(outcome):
        print(line, file=sys.stderr)
    raise typer.Exit(outcome.exit_code)


@app.command("check", context_settings={"ignore_unknown_options": True})
def check(
    script: Annotated[Path, typer.Argument(help="The Python script to check.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="Its arguments; those that are also options here after --.")
    ] = None,
    num_workers: Annotated[
        str, typer.Option("-n", "--num-workers", help="World sizes to compare, such as 1,2,3.")
    ] = "1,2,3",
    num_steps: Annotated[
        int | None, typer.Option("--steps", help="Compare only so many first steps; by default all.")
    ] = None,
) -> None:
    """Prove that a script gives the same bits at several world sizes, or say where and why it doesn't."""
    sizes = parse_sizes(num_workers)
    adopt_orphans()
    try:
        with Inbox() as inbox:
            checker = Checker(script, args or [], num_steps=num_steps, say=_say_aside, inbox=inbox)
            verdict = checker.check(sizes)
    finally:
        kill_orphans()
    for line in verdict.lines:
        typer.echo(line)
    raise typer.Exit(0 if verdict.identical else 1)


def parse_sizes(text: str) -> list[int]:
    """Return the world sizes in `text`, numbers separated by commas.

    Raises:
        UsageError: one is no number, or less than 1.
    """
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"-n {text}: expected world sizes separated by commas, such as 1,2,3") from None
    if min(sizes) < 1:
        raise UsageError(f"-n {text}: expected at least 1 worker each")
    return sizes


def _say_aside(line: str) -> None:
    print(f"unisono: {line}", file=sys.stderr)


def collect_flags(
    *,
    backend: str | None,
    step_timeout_s: float | None,
    threads_per_worker: int | None,
    allow_idle: bool,
) -> dict[str, Any]:
    """Check what was given and return it, without what was not.

    Raises:
        UsageError: a value can't be used.
    """
    if backend is not None:
        check_backend(backend)
    if step_timeout_s is not None and not step_timeout_s > 0:
        raise UsageError(f"--step-timeout-s {step_timeout_s}: expected a positive number of seconds")
    if threads_per_worker is not None and threads_per_worker < 1:
        raise UsageError(f"--threads-per-worker {threads_per_worker}: expected at least 1")
    given = {
        "backend": backend,
        "step_timeout_s": step_timeout_s,
        "threads_per_worker": threads_per_worker,
        "allow_idle": allow_idle or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def default_num_workers() -> int:
    """Return one worker per accelerator, else one per core this job may use."""
    return count_accelerators() or usable_cores()


def execute(spec: JobSpec) -> Outcome:
    """Run a job, with this process's signals meant for it."""
    adopt_orphans()  # of a fork server that was killed
    try:
        with Inbox() as inbox, ForkServer(preload=() if spec.fresh else PRELOAD) as server:
            return server.run(spec, inbox=inbox)
    finally:
        kill_orphans()


def last_words(outcome: Outcome) -> list[str]:
    """Return what is said at the end of a job, the most important last; nothing if all went well. Pure."""
    failure = outcome.failure
    if outcome.interrupted_by is not None:
        return [f"unisono: stopped by {outcome.interrupted_by}"]
    if failure is None:
        return []
    lines = [f"unisono: output of another worker: {path}" for path in outcome.logs]
    if failure.traceback:
        lines += [f"unisono: traceback of rank {failure.rank}:", failure.traceback.rstrip()]
    if failure.kind == Kind.CONSEQUENCE and outcome.left_early:
        names = ", ".join(map(str, outcome.left_early))
        lines.append(f"unisono: ended before that without an error: worker {names}")
    return [*lines, f"unisono: {describe_failure(failure)}"]
