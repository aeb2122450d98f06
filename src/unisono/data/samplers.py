"""Listing a sampler of the user's, the same on every worker and in every run.

A sampler says what a whole *global* epoch is; workers share out what it yields. So it has to know nothing of
workers, and one that does is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.randomness import derive, keyed


def check_sampler(sampler: Any, argument: str) -> None:
    """Raise a `UsageError` unless `sampler` can be iterated epoch after epoch and knows nothing of workers.

    Args:
        argument: its name, for messages.
    """
    kind = type(sampler).__name__
    if not hasattr(sampler, "__iter__"):
        raise UsageError(f"{argument}: {kind} can't be iterated; expected an object with __iter__().")
    if hasattr(sampler, "__next__"):
        raise UsageError(
            f"{argument}: a {kind} can be iterated only once; expected an object of which __iter__() begins a new "
            f"epoch each time."
        )
    for each in _with_inner(sampler):
        replicas = getattr(each, "num_replicas", 1)
        if isinstance(replicas, int) and replicas > 1:
            raise UsageError(
                f"{argument}: {type(each).__name__} yields the share of one of {replicas} workers; expected the "
                f"whole epoch, which the run shares out itself. Give the plain sampler that a single process "
                f"would use, or shuffle=True."
            )


def epoch_of(sampler: Any, epoch: int, *, seed: int, device: torch.device | None = None) -> list[Any]:
    """Return all that `sampler` yields in an epoch. The global generators are as before afterwards.

    Global generators, and a torch.Generator that is the attribute ``generator`` of the sampler or of the
    sampler inside it (``sampler``), are seeded with a key of the epoch. Others (a numpy Generator of its own)
    must be seeded by the sampler, from the epoch given to its ``set_epoch``.
    """
    key = derive(seed, "sampler", epoch)
    for each in _with_inner(sampler):
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key)
        set_epoch = getattr(each, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    with keyed(device) as seed_generators:
        seed_generators(key)
        yielded = list(sampler)
    if not yielded:
        raise UsageError(
            f"{type(sampler).__name__} yields nothing in epoch {epoch}: there is nothing to load."
        )
    return yielded


def index_of(value: Any, argument: str) -> int:
    """Return `value` as an index. Integers of torch and numpy count too."""
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(
            f"{argument} yielded {value!r} ({type(value).__name__}): expected the index of a sample, an integer."
        ) from None


def _with_inner(sampler: Any) -> Iterator[Any]:
    yield sampler
    inner = getattr(sampler, "sampler", None)
    if inner is not None:
        yield inner
