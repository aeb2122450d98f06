"""torch's `Store` over the control channel: the rendezvous of process groups without a port of its own."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from unisono.cluster.messages import (
    AddToKey,
    AppendToKey,
    CheckKeys,
    CompareSet,
    DeleteKey,
    GetKeys,
    Keys,
    ListKeys,
    Message,
    Number,
    SetKey,
    Values,
)
from unisono.errors import DeadlineError, TransportError

if TYPE_CHECKING:
    from unisono.cluster.client import ControlClient

_ANSWER_TIMEOUT_S = 60.0


class ControlStore(Store):  # type: ignore[misc]
    """The run's store, as torch's process groups want it. Any thread may use it; values are bytes.

    Args:
        client: the connection to the master.
        timeout: how long `get` and `wait` wait for a key.
    """

    def __init__(
        self, client: ControlClient, timeout: datetime.timedelta = datetime.timedelta(minutes=5)
    ) -> None:
        super().__init__()
        self._client = client
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._number(lambda ticket: SetKey(ticket, key, _to_bytes(value)))

    def get(self, key: str) -> bytes:
        return self._values([key], self._timeout)[0]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._values(list(keys), timeout or self._timeout)

    def add(self, key: str, amount: int) -> int:
        return self._number(lambda ticket: AddToKey(ticket, key, int(amount)))

    def append(self, key: str, value: str | bytes) -> None:
        self._number(lambda ticket: AppendToKey(ticket, key, _to_bytes(value)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._number(lambda ticket: CheckKeys(ticket, list(keys))))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        answer = self._ask(lambda ticket: CompareSet(ticket, key, _to_bytes(expected), _to_bytes(desired)))
        assert isinstance(answer, Values)
        return answer.values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._number(lambda ticket: DeleteKey(ticket, key)))

    def list_keys(self) -> list[str]:
        answer = self._ask(ListKeys)
        assert isinstance(answer, Keys)
        return answer.keys

    def num_keys(self) -> int:
        return len(self.list_keys())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._values(list(keys), self._timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> datetime.timedelta:
        return self._timeout

    def clone(self) -> ControlStore:
        return ControlStore(self._client, self._timeout)

    def _values(self, keys: list[str], timeout: datetime.timedelta) -> list[bytes]:
        timeout_s = timeout.total_seconds()
        answer = self._client.ask(lambda ticket: GetKeys(ticket, keys), timeout_s=timeout_s)
        if answer is None:
            raise DeadlineError(
                f"waited {timeout_s:.1f} s for {', '.join(keys)} in the run's store: "
                "a worker has not come to the same point"
            )
        assert isinstance(answer, Values)
        return answer.values

    def _number(self, make_request: Callable[[int], Message]) -> int:
        answer = self._ask(make_request)
        assert isinstance(answer, Number)
        return answer.number

    def _ask(self, make_request: Callable[[int], Message]) -> object:
        answer = self._client.ask(make_request, timeout_s=_ANSWER_TIMEOUT_S)
        if answer is None:
            raise TransportError(f"the launcher did not answer in {_ANSWER_TIMEOUT_S:.0f} s")
        return answer


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
