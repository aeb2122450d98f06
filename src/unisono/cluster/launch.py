"""`launch`: call a function on several workers, from a notebook or a test."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TextIO

import cloudpickle

from unisono.cluster import environment
from unisono.cluster.failure import Failure, describe_failure
from unisono.cluster.inbox import Inbox
from unisono.cluster.launcher import run_job
from unisono.cluster.output import Mode, OutputPlan
from unisono.cluster.spawner import PRELOAD, Spawner
from unisono.cluster.spec import JobSpec, Outcome
from unisono.errors import JobError, UsageError


def launch(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    fresh: bool = False,
    output: Mode = "first",
    grace_s: float = 5.0,
    flags: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on `n` workers and return what each returned, in order of rank. Blocking.

    In `fn`, `unisono.join` finds its place as in a script of ``unisono run``. The workers are forked from
    a clean helper process, never from this one, so it does not matter what runs here: threads, CUDA, a
    notebook.

    `fn` and `args` travel there as copies (cloudpickle). They may capture data, tensors, models, other
    functions, also from a notebook. They may not capture what lives in this process: open files, locks,
    sockets, threads, generators. Changes the workers make to captured objects are not seen here; return them.

    Args:
        fn: what every worker calls.
        n: number of workers.
        args: its arguments.
        fresh: start new interpreters instead of forking (seconds instead of milliseconds).
        output: ``"first"`` shows the output of rank 0, ``"all"`` of all with the rank before each line.
        grace_s: time between asking a worker to end and killing it.
        flags: what ``unisono run`` would have been told: see `Connection.flags`.

    Raises:
        UsageError: `n` < 1, or `fn` can't be sent.
        JobError: a worker failed; the message has its traceback.
    """
    with ForkServer(preload=() if fresh else PRELOAD) as server:
        return server.launch(fn, n, *args, fresh=fresh, output=output, grace_s=grace_s, flags=flags)


class ForkServer:
    """A helper process that has imported what workers need, for many launches; a context manager.

    One launch at a time; others wait.

    Args:
        preload: modules it imports once; every worker has them at once.
        hash_seed: PYTHONHASHSEED of its interpreter; by default what ours was started with.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD, *, hash_seed: int | None = None) -> None:
        self._preload = tuple(preload)
        self._hash_seed = hash_seed
        self._spawner: Spawner | None = None
        self._busy = threading.Lock()

    def __enter__(self) -> ForkServer:
        self._spawner = Spawner(self._preload, hash_seed=self._hash_seed)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._spawner is not None:
            self._spawner.close()
            self._spawner = None

    def launch(
        self,
        fn: Callable[..., Any],
        n: int,
        *args: Any,
        fresh: bool = False,
        output: Mode = "first",
        grace_s: float = 5.0,
        flags: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Do what the function `launch` does."""
        if n < 1:
            raise UsageError(f"launch on {n} workers: expected at least 1")
        spec = JobSpec(
            world_size=n,
            argv=sys.argv,
            path=sys.path,
            variables=environment.variables(),
            function=_pickle(fn, args),
            directory=os.getcwd(),
            fresh=fresh,
            grace_s=grace_s,
            flags=flags or {},
            output=OutputPlan(output),
        )
        outcome = self.run(spec)
        _raise_failure(outcome)
        return [cloudpickle.loads(outcome.values[rank]) for rank in range(n)]

    def run(
        self,
        spec: JobSpec,
        *,
        out: TextIO | None = None,
        err: TextIO | None = None,
        inbox: Inbox | None = None,
    ) -> Outcome:
        """Run a job to its end and return how it ended. Blocking. See `run_job`."""
        if self._spawner is None:
            raise UsageError("this ForkServer is not running: use it in a with statement")
        with self._busy:
            return run_job(spec, self._spawner, out=out, err=err, inbox=inbox)


def _raise_failure(outcome: Outcome) -> None:
    failure = outcome.failure
    if failure is not None:
        raise JobError(job_message(failure), rank=failure.rank, exit_code=outcome.exit_code)
    silent = [rank for rank in outcome.ended if rank not in outcome.values]
    if silent:
        raise JobError(f"worker {silent[0]} ended with exit code 0 before the function returned (os._exit?)")


def job_message(failure: Failure) -> str:
    """Return the worker's traceback and, last, the line that says who failed where. Pure."""
    line = describe_failure(failure)
    return f"{failure.traceback.rstrip()}\n{line}" if failure.traceback else line


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    module = _own_module(fn)
    if module is not None:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps((fn, args)))
    except Exception as error:
        raise UsageError(
            f"{getattr(fn, '__qualname__', fn)!s} can't be sent to the workers: {error}. It captures "
            "something that lives in this process, such as an open file, a lock, a socket or a generator; "
            "create that inside the function instead"
        ) from error
    finally:
        if module is not None:
            cloudpickle.unregister_pickle_by_value(module)


def _own_module(fn: Callable[..., Any]) -> ModuleType | None:
    """Return the module of `fn` if workers may not be able to import it: a test, a script's neighbour.

    Such a function is sent as code; one from an installed package is sent as its name.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or module.__name__.partition(".")[0] == "unisono":
        return None
    installed = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    file = os.path.realpath(getattr(module, "__file__", None) or "")
    return None if file.startswith(tuple(f"{folder}{os.sep}" for folder in installed)) else module
