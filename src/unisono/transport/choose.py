"""Which transport connects the workers of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from unisono.errors import UsageError
from unisono.transport.backends import SHARED_MEMORY
from unisono.transport.base import Transport
from unisono.transport.meeting import meet
from unisono.transport.pair_sockets import host_identity
from unisono.transport.process_group import ProcessGroupTransport
from unisono.transport.shared_memory import SharedMemoryTransport

_UNABLE = "unable: "


def connect_workers(
    store: Any,
    rank: int,
    world_size: int,
    *,
    backend: str | None,
    device: torch.device,
    timeout_s: float,
    hostname: str,
) -> tuple[Transport, str | None]:
    """Return this rank's end of the group of all workers, and what the user should know about it.

    *Collective.* *Blocking.* CPU workers of one host share memory; all others use a process group of torch's.

    Args:
        backend: what the user asked for; None chooses.
        device: where tensors are.
        timeout_s: how long to wait for all ranks to come.
        hostname: where gloo listens.

    Raises:
        UsageError: memory can't be shared and was asked for.
        DeadlineError: not all ranks came in time; says who is missing.
    """
    notice = None
    if device.type == "cpu" and backend in (None, SHARED_MEMORY):
        words = meet(PrefixStore("hosts", store), rank, world_size, word=_host(), timeout_s=timeout_s)
        reason = _why_not(words)
        if reason is None:
            pairs = PrefixStore("memory", store)
            return SharedMemoryTransport(pairs, rank, world_size, timeout_s=timeout_s), None
        if backend == SHARED_MEMORY:
            raise UsageError(f"backend={backend!r}: {reason}: use gloo.")
        if any(word.startswith(_UNABLE) for word in words):
            notice = f"workers talk through gloo and not through shared memory: {reason}"
    elif backend == SHARED_MEMORY:
        raise UsageError(f"backend={backend!r} moves tensors of CPUs, not of {device}.")
    transport = ProcessGroupTransport(
        PrefixStore("group", store),
        rank,
        world_size,
        backend=backend or ("nccl" if device.type == "cuda" else "gloo"),
        device=device,
        timeout_s=timeout_s,
        hostname=hostname,
    )
    return transport, notice


def _host() -> str:
    try:
        return host_identity()
    except OSError as error:
        return f"{_UNABLE}{error}"


def _why_not(words: list[str]) -> str | None:
    """Return why these workers can't share memory, the same on all of them."""
    for rank, word in enumerate(words):
        if word.startswith(_UNABLE):
            return f"rank {rank} can't share any ({word.removeprefix(_UNABLE)})"
    others = [rank for rank, word in enumerate(words) if word != words[0]]
    return f"rank {others[0]} is not on the host of rank 0" if others else None
