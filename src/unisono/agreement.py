"""What workers tell each other in a script of the user's own: decisions, averages, who goes first."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from unisono.collectives.announce import Announcer
from unisono.collectives.gather import gather_bytes
from unisono.errors import TransportError, UsageError
from unisono.transport.base import Transport

_LOOK_EVERY_S = 0.05


class Keys(Protocol):
    """The part of the run's store that `first` needs."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def _first(values: Sequence[Any]) -> Any:
    return values[0]


WAYS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "first": _first,
    "any": any,
    "all": all,
    "min": min,
    "max": max,
    "sum": lambda values: math.fsum(values) if any(isinstance(v, float) for v in values) else sum(values),
}


class Agreement:
    """Small values of every worker, brought together.

    Args:
        transport: this rank's end of the group of all workers.
        announcer: compares the names of calls.
        waiting: ``waiting(operation)`` is entered while this worker waits for the others.
    """

    def __init__(
        self,
        transport: Transport,
        announcer: Announcer,
        waiting: Callable[[str], AbstractContextManager[object]],
    ) -> None:
        self._transport = transport
        self._announcer = announcer
        self._waiting = waiting
        self._num_firsts = 0

    def agree(self, value: Any, how: str) -> Any:
        """Return one value made of every worker's, see `Run.agree`. *Collective.* *Blocking.*"""
        if how not in WAYS:
            raise UsageError(f"agree(how={how!r}): expected one of {', '.join(map(repr, WAYS))}.")
        if how != "first" and not isinstance(value, (bool, int, float)):
            raise UsageError(
                f"rank {self._transport.rank}: agree({value!r}, how={how!r}): expected a number or a truth value; "
                f"of anything else only the first rank's can be taken."
            )
        return WAYS[how](self._gather(value, f"agree(how={how!r})"))

    def mean(self, value: float, weight: float) -> float:
        """Return the weighted mean over workers, see `Run.mean`. *Collective.* *Blocking.*"""
        value, weight = float(value), float(weight)
        if not (weight >= 0 and math.isfinite(weight)):
            raise UsageError(f"mean(weight={weight}): expected a finite number of at least 0.")
        pairs = [(v, w) for v, w in self._gather([value, weight], "mean") if w]
        if not pairs:
            return math.nan
        # fsum refuses what is not finite.
        total = math.fsum if all(math.isfinite(v) for v, _ in pairs) else sum
        return float(total(v * w for v, w in pairs) / math.fsum(w for _, w in pairs))

    def barrier(self, name: str) -> None:
        """Return once every worker is here. *Collective.* *Blocking.*"""
        with self._waiting(f"barrier {name!r}"):
            self._announcer.call(f"barrier {name!r}")

    @contextmanager
    def first(
        self, store: Keys | None, alive: Callable[[], AbstractContextManager[object]]
    ) -> Iterator[None]:
        """Let rank 0 through at once and the others when it is done, see `Run.first`.

        Args:
            store: of the run; None for a worker alone.
            alive: entered while this worker waits, without a deadline.
        """
        self._announcer.call("first")
        if store is None or self._transport.world_size == 1:
            yield
            return
        self._num_firsts += 1
        key = f"first/{self._num_firsts}"
        if self._transport.rank:
            with alive():
                while not store.check([key]):
                    time.sleep(_LOOK_EVERY_S)
            failure = store.get(key).decode()
            if failure:
                # A consequence, so that a job names rank 0's own error if that ends it.
                raise TransportError(
                    f"rank 0 left `with run.first()` with {failure}, so what it was to do for rank "
                    f"{self._transport.rank} is not done."
                )
            yield
            return
        self._announcer.forbidden = "the others wait until `with run.first()` ends on rank 0"
        failure = ""
        try:
            yield
        except BaseException as error:
            failure = repr(error)
            raise
        finally:
            self._announcer.forbidden = None
            store.set(key, failure)

    def _gather(self, value: Any, name: str) -> list[Any]:
        """Return every worker's value, in order of rank."""
        try:
            text = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"rank {self._transport.rank}: {type(value).__name__} can't be sent to other workers: expected "
                f"numbers, strings, None, and lists and dicts of them ({error})."
            ) from error
        with self._waiting(name):
            self._announcer.call(name)
            parts = gather_bytes(
                self._transport, {self._transport.rank: text.encode()}, self._transport.world_size
            )
        return [json.loads(part) for part in parts]
