"""What the kernel does for us when a parent dies: signals, orphans. Linux; does nothing elsewhere.

Everything acts on this process only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Collection
from pathlib import Path

GROUP_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""What a terminal or a batch system sends to a job's whole process group; only the launcher acts on it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signal_number: int, *, parent_pid: int) -> None:
    """Let the kernel send `signal_number` to this process when the thread that forked it ends.

    If the parent ended before, the signal is sent here and now.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a new interpreter with the flags of this one.

    The current folder stays off the path: a file of the user's there must not stand in for a library.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    safe_path = [] if "-P" in flags else ["-P"]
    return [sys.executable, *flags, *safe_path, "-m", module, *arguments]


def children(pid: int) -> list[int]:
    """Return the process ids of the living and dead, unreaped children of `pid`."""
    if not sys.platform.startswith("linux"):
        return []
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(entry) == pid:
            found.append(int(entry.name))
    return found


def kill_orphans(keep: Collection[int] = ()) -> int:
    """Kill and reap all children of this process but `keep`, and theirs as they come up; return how many."""
    killed = 0
    while orphans := [pid for pid in children(os.getpid()) if pid not in keep]:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            os.waitpid(pid, 0)
        killed += len(orphans)
    return killed


def close_in_child(sock: socket.socket) -> None:
    """Close `sock` in every process that this one forks: a child must not keep a connection alive."""
    reference = weakref.ref(sock)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    os.register_at_fork(after_in_child=close)


def _parent(entry: Path) -> int:
    with contextlib.suppress(OSError):
        # The name in parentheses may contain anything; the fields after the last one are plain.
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        return int(fields[1])
    return -1


def _prctl(option: int, value: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")
