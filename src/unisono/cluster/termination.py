"""How a worker ends when it is told to: SIGTERM raises SystemExit, and a timer kills what does not end.

A main thread that waits inside a library sees no Python signal handler. So a thread of ours reads the
signal too: it makes a descriptor readable, by which the run's connection ends all waits, and kills this
process after the grace time whatever the main thread does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import types
from typing import NoReturn

EXIT_CODE = 128 + signal.SIGTERM


class Termination:
    """Signal handling of one worker, for as long as its process lives.

    Args:
        grace_s: time between SIGTERM and the end by force.

    Attributes:
        stop_fd: becomes readable on SIGTERM.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._signals_read, self._signals_write = os.pipe()
        self.stop_fd, self._stop_write = os.pipe()
        self._asked = False
        self._mask = threading.local()

    def install(self) -> None:
        """Set the handlers and start the thread. From the main thread."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # meant for the launcher, which tells us
        os.set_blocking(self._signals_write, False)
        signal.set_wakeup_fd(self._signals_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._raise)
        os.register_at_fork(
            before=self._hold, after_in_parent=self._release, after_in_child=self._disarm_in_child
        )
        threading.Thread(target=self._watch, name="unisono-termination", daemon=True).start()

    def raise_no_more(self) -> None:
        """From now on let SIGTERM interrupt nothing: the program has failed and says so. The timer still runs."""
        self._asked = True

    def _raise(self, number: int, frame: types.FrameType | None) -> None:
        if not self._asked:  # a second one must not interrupt the clean-up of the first
            self._asked = True
            raise SystemExit(EXIT_CODE)

    def _watch(self) -> NoReturn:
        while signal.SIGTERM not in os.read(self._signals_read, 1):
            pass
        os.write(self._stop_write, b"x")
        select.select([], [], [], self._grace_s)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    def _hold(self) -> None:
        # A signal to a child that still has our handlers would be written where the parent reads.
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _disarm_in_child(self) -> None:
        # A forked child has no thread to read this, and what it writes would look like the worker's signal.
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._raise:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for descriptor in (self._signals_read, self._signals_write, self.stop_fd, self._stop_write):
            os.close(descriptor)
        self._release()
