"""All-reduces that were posted and are done when somebody waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from unisono.transport.base import Work


class PostedSums:
    """Does all-reduces in the order in which they were posted, whichever is waited for first.

    Args:
        add: adds up a tensor over all ranks. *Collective. In place. Blocking.*
    """

    def __init__(self, add: Callable[[Tensor], None]) -> None:
        self._add = add
        self._waiting: deque[_Sum] = deque()

    def post(self, tensor: Tensor) -> Work:
        """Return work that is done when it, or a later one, is waited for."""
        work = _Sum(self, tensor)
        self._waiting.append(work)
        return work

    def run(self, last: _Sum) -> None:
        """Do all up to `last`. *Collective.* *Blocking.*"""
        while not last.is_done:
            work = self._waiting[0]
            self._add(work.tensor)
            work.is_done = True
            self._waiting.popleft()


class _Sum:
    """One all-reduce."""

    def __init__(self, queue: PostedSums, tensor: Tensor) -> None:
        self._queue = queue
        self.tensor = tensor
        self.is_done = False

    def wait(self) -> None:
        if not self.is_done:
            self._queue.run(self)
