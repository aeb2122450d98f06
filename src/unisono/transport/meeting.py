"""The first thing that the workers of a group do: wait for each other, and say who they are."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from unisono.errors import DeadlineError


def meet(store: Any, rank: int, world_size: int, *, word: str = "1", timeout_s: float) -> list[str]:
    """Return the words of all ranks, once all are there. *Collective.* *Blocking.*

    What follows often can't be interrupted, so it should not start before everybody has come.

    Args:
        store: a ``torch.distributed.Store`` that all ranks share, with fresh keys.
        word: what this rank says.
        timeout_s: how long to wait.

    Raises:
        DeadlineError: not all came in time; says who is missing.
    """
    keys = [f"here/{each}" for each in range(world_size)]
    store.set(keys[rank], word)
    others = [key for key in keys if key != keys[rank]]
    if others:
        try:
            store.wait(others, timedelta(seconds=timeout_s))
        except (RuntimeError, DeadlineError) as error:  # torch's own stores and ours
            missing = [each for each, key in enumerate(keys) if not store.check([key])]
            if missing:
                raise DeadlineError(
                    f"rank {rank}: waited {timeout_s:g} s for {world_size} workers to come; missing: ranks {missing}."
                ) from error
    return [word if key == keys[rank] else store.get(key).decode() for key in keys]
