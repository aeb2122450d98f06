"""The key-value table behind the run's store: values and who waits for them. Pure; no sockets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class KeyTable:
    """Values by key, and parked waits that a later `set` answers."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._parked: dict[Hashable, list[str]] = {}

    def set(self, key: str, value: bytes) -> list[tuple[Hashable, list[bytes]]]:
        """Store a value; return the waits this answers, each with the values it asked for."""
        self._values[key] = value
        ready = [who for who, keys in self._parked.items() if key in keys and self.has(keys)]
        return [(who, self._take(self._parked.pop(who))) for who in ready]

    def get(self, keys: Sequence[str], *, who: Hashable) -> list[bytes] | None:
        """Return the values, or park `who` until all keys exist and return None."""
        if self.has(keys):
            return self._take(keys)
        self._parked[who] = list(keys)
        return None

    def forget(self, rank: int) -> None:
        """Drop the waits of a worker: those parked as ``(rank, ticket)``."""
        for who in [w for w in self._parked if isinstance(w, tuple) and w[0] == rank]:
            del self._parked[who]

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return all(key in self._values for key in keys)

    def peek(self, key: str) -> bytes | None:
        """Return a value or None."""
        return self._values.get(key)

    def delete(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return self._values.pop(key, None) is not None

    def keys(self) -> list[str]:
        """Return all keys."""
        return list(self._values)

    def _take(self, keys: Sequence[str]) -> list[bytes]:
        return [self._values[key] for key in keys]
