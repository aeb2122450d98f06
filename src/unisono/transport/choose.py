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
from unisono.transport.several_hosts import SeveralHostsTransport
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
    Of several hosts, each with several workers, both are used.

    Args:
        backend: what the user asked for; None chooses.
        device: where tensors are.
        timeout_s: how long to wait for all ranks to come.
        hostname: where gloo listens.

    Raises:
        UsageError: memory can't be shared and was asked for.
        DeadlineError: not all ranks came in time; says who is missing.
    """
    options: dict[str, Any] = {"device": device, "timeout_s": timeout_s, "hostname": hostname}
    if device.type == "cpu" and backend in (None, SHARED_MEMORY):
        return connect_as(_host(), store, rank, world_size, required=backend is not None, **options)
    if backend == SHARED_MEMORY:
        raise UsageError(f"backend={backend!r} moves tensors of CPUs, not of {device}.")
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    group = PrefixStore("group", store)
    return ProcessGroupTransport(group, rank, world_size, backend=backend, **options), None


def connect_as(
    host: str, store: Any, rank: int, world_size: int, *, required: bool = False, **options: Any
) -> tuple[Transport, str | None]:
    """Do what `connect_workers` does for CPUs, on the host of this name.

    Args:
        host: the same word for ranks that can share memory, or why this rank can't.
        required: refuse a process group.
        options: device, time-out and name of this host.
    """
    timeout_s = options["timeout_s"]
    words = meet(PrefixStore("hosts", store), rank, world_size, word=host, timeout_s=timeout_s)
    reason = _why_not(words)
    if required and reason is not None:
        raise UsageError(f"backend={SHARED_MEMORY!r}: {reason}: use gloo.")
    is_able = not any(word.startswith(_UNABLE) for word in words)
    ranks_of: dict[str, list[int]] = {}
    for each, word in enumerate(words):
        ranks_of.setdefault(word, []).append(each)
    hosts = tuple(map(tuple, ranks_of.values()))
    between: Transport | None = None
    if reason is not None:
        between = ProcessGroupTransport(PrefixStore("group", store), rank, world_size, **options)
        if not is_able:
            return between, f"workers talk through gloo and not through shared memory: {reason}"
        if len(hosts) == world_size:
            return between, None
    ranks = ranks_of[host]
    memory = PrefixStore(f"memory{ranks[0]}", store)
    within = SharedMemoryTransport(memory, rank, world_size, ranks=ranks, timeout_s=timeout_s)
    if between is None:
        return within, None
    leaders = None
    if rank == ranks[0]:
        firsts = [ranks[0] for ranks in hosts]
        group = PrefixStore("leaders", store)
        leaders = ProcessGroupTransport(group, firsts.index(rank), len(firsts), **options)
    return SeveralHostsTransport(hosts, within=within, between=between, leaders=leaders), None


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
