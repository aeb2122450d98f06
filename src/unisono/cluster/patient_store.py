"""A store whose waits can be ended from another thread: torch's own block until their time-out."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from unisono.errors import DeadlineError

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


class PatientStore(Store):  # type: ignore[misc]
    """Another store, asked again and again instead of waited for. Any thread may use it.

    Args:
        store: where the values are.
        timeout: how long `get` and `wait` wait for a key.
    """

    def __init__(self, store: Store, timeout: datetime.timedelta) -> None:
        super().__init__()
        self._store = store
        self._timeout = timeout
        self._reason: Exception | None = None
        self._aborted = threading.Event()

    def abort(self, reason: Exception) -> None:
        """Make every pending and future wait raise `reason`."""
        self._reason = reason
        self._aborted.set()

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        timeout_s = (timeout or self._timeout).total_seconds()
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while not self._store.check(list(keys)):
            if self._aborted.wait(pause_s):
                assert self._reason is not None
                raise self._reason
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"waited {timeout_s:.1f} s for {', '.join(keys)} in the run's store: "
                    "a worker has not come to the same point"
                )

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> datetime.timedelta:
        return self._timeout
