"""Says which loader process died, where torch only says that one did.

torch raises a bare RuntimeError from its SIGCHLD handler, wherever the main thread happens to be: in the
user's loss function as likely as in the loader. `ChildWatch` sits on top of that handler and turns the error
into one that names the process, the signal and the worker.
"""

from __future__ import annotations

import multiprocessing.process
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from unisono.errors import LoaderError


class Children:
    """The loader processes of one loop. `closing` says that their deaths are meant.

    Args:
        processes: started by this process.
        rank: this worker, for messages.
    """

    def __init__(self, processes: Sequence[multiprocessing.process.BaseProcess], *, rank: int) -> None:
        self.processes = tuple(processes)
        self.rank = rank
        self.closing = False

    @property
    def pids(self) -> str:
        return ", ".join(str(process.pid) for process in self.processes)

    def death(self) -> str | None:
        """Return what happened to the first process that is dead, or None. A system call for each."""
        for process in self.processes:
            if process.exitcode is not None:
                return death_message(process.pid, process.exitcode, self.rank)
        return None

    def end(self) -> None:
        """Kill those that are left and wait until they are gone."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()


def death_message(pid: int | None, exit_code: int, rank: int) -> str:
    """Describe the end of a loader process for the user."""
    if exit_code >= 0:
        return f"loader worker pid {pid} exited with code {exit_code} on rank {rank}."
    number = -exit_code
    hints: dict[int, str] = {
        signal.SIGKILL: "the system may be out of memory: lower num_workers or prefetch_factor.",
        signal.SIGBUS: "shared memory may be full: lower num_workers, or make /dev/shm larger.",
    }
    hint = hints.get(number, "see whether the dataset's native code crashed.")
    name = next((each.name for each in signal.Signals if each == number), "unknown")
    return f"loader worker pid {pid} killed by signal {number} on rank {rank} ({name}): {hint}"


class ChildWatch:
    """The SIGCHLD handler on top of the one that was there. It rephrases that one's errors."""

    def __init__(self, previous: Callable[[int, FrameType | None], Any] | int | None) -> None:
        self._previous = previous
        self._watched: weakref.WeakSet[Children] = weakref.WeakSet()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not callable(self._previous):
            return
        try:
            self._previous(number, frame)
        except RuntimeError as error:
            dead = [(children, message) for children in list(self._watched) if (message := children.death())]
            for children, message in dead:
                if not children.closing:
                    raise LoaderError(message) from error
            if not dead:
                raise

    def add(self, children: Children) -> None:
        self._watched.add(children)


def watch(children: Children) -> None:
    """Have deaths among `children` reported at once. Without effect off the main thread, as torch's own."""
    handler = signal.getsignal(signal.SIGCHLD)
    if not isinstance(handler, ChildWatch):
        if threading.current_thread() is not threading.main_thread():
            return
        handler = ChildWatch(handler)
        signal.signal(signal.SIGCHLD, handler)
    handler.add(children)
