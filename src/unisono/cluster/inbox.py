"""The signals that are meant for a job, as something an event loop can wait for."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any


class Inbox:
    """Signals as something an event loop can wait for, while in its context; the main thread only."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for descriptor in (self._read, self._write):
            os.set_blocking(descriptor, False)
        self._before: dict[int, Any] = {}

    def fileno(self) -> int:
        return self._read

    def take(self) -> list[int]:
        """Return the signals that have arrived."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._read, 64) if number in self._NUMBERS]
        return []

    def __enter__(self) -> Inbox:
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._NUMBERS:
            if signal.getsignal(number) == signal.SIG_IGN:  # nohup, or a shell's background job
                continue
            self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read)
        os.close(self._write)
