"""Runs the user's program in a worker the way the interpreter would: a script, or a function.

It owns ``__main__``, ``sys.argv`` and what happens at the end of a program; it reports to nobody.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import sys
import threading
import types
from collections.abc import Callable
from typing import Any


def run_script(path: str) -> None:
    """Execute a script as ``__main__``: a real module, so that what it defines can be pickled."""
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec"), module.__dict__)


def finish() -> BaseException | None:
    """Do what the interpreter does at the end: wait for threads, run atexit functions, flush.

    Returns:
        The first exception of an atexit function, or None.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    errors: list[BaseException] = []
    with _unraisable(lambda error: errors.append(error)):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the program, or nobody reads it
            stream.flush()
    return errors[0] if errors else None


@contextlib.contextmanager
def _unraisable(take: Callable[[BaseException], None]) -> Any:
    """Hand exceptions that can't be raised to `take`, then to the hook in force."""
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_value is not None and "atexit" in (unraisable.err_msg or ""):
            take(unraisable.exc_value)
        before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
