"""Which torch process-group backends there are, and how a group of each is made.

Groups are made directly, never through ``init_process_group``: no global state, as many as wanted, and each
can be thrown away alone. torch is imported only when needed, so that names can be checked early.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = "shared_memory"
"""Not a process group, but chosen by name among them."""
LONG = timedelta(hours=24)
"""The groups' own time-out. One that strikes breaks the group for good: deadlines are enforced elsewhere."""


@dataclass(frozen=True)
class Member:
    """One rank's place in a group that is to be made.

    Args:
        store: a ``torch.distributed.Store`` in which nobody else uses this group's keys.
        rank: in the group.
        size: of the group.
        name: of the group; backends that keep a registry want one.
    """

    store: Any
    rank: int
    size: int
    name: str


def available_backends() -> tuple[str, ...]:
    """Return the names of all backends that can be asked for here: our own, built into torch, registered with it."""
    from torch import distributed

    built_in = [("gloo", distributed.is_gloo_available), ("nccl", distributed.is_nccl_available)]
    names = [name for name, is_available in built_in if is_available()]
    return (SHARED_MEMORY, *names, *sorted(name.lower() for name in distributed.Backend._plugins))


def check_backend(backend: str) -> None:
    """Raise a `UsageError` that names the nearest known one unless `backend` can be used here."""
    available = available_backends()
    if backend in available:
        return
    known = sorted({*available, "gloo", "nccl"})
    nearest = get_close_matches(backend, known, n=1, cutoff=0.0)[0]
    unknown = f"is unknown; did you mean {nearest!r}?"
    raise UsageError(
        f"backend={backend!r} {'is not part of this build of torch.' if backend in known else unknown} "
        f"Available: {', '.join(available)}. A backend of your own must be registered with "
        f"torch.distributed.Backend.register_backend before the run is joined."
    )


def gloo_device(hostname: str, interface: str | None) -> Any:
    """Return a gloo device: one listening socket and one thread, to be shared by a rank's groups.

    Raises:
        UsageError: nothing can listen there.
    """
    from torch.distributed import ProcessGroupGloo

    try:
        if interface is not None:
            return ProcessGroupGloo.create_device(interface=interface)
        return ProcessGroupGloo.create_device(hostname=hostname)
    except (RuntimeError, ValueError) as error:
        where = f"interface={interface!r}" if interface is not None else f"hostname={hostname!r}"
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise UsageError(
            f"{where}: gloo can't listen there ({str(error).splitlines()[0]}). "
            f"Interfaces of this host: {names}."
        ) from error


def make_group(member: Member, *, backend: str, device: torch.device, gloo: Any) -> Any:
    """Make a backend object for one rank. *Collective. Blocking.*

    Args:
        member: this rank's place.
        backend: one of `available_backends`.
        device: where tensors will be.
        gloo: the `gloo_device`, for that backend; else None.
    """
    if backend == "gloo":
        return _make_gloo(member, gloo)
    if backend == "nccl":
        return _make_nccl(member, device)
    return _make_plugin(member, backend)


def _make_gloo(member: Member, gloo: Any) -> Any:
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [gloo]
    options._timeout = LONG
    options._threads = 2
    return ProcessGroupGloo(member.store, member.rank, member.size, options)


def _make_nccl(member: Member, device: torch.device) -> Any:
    import torch
    from torch import distributed

    options: Any = distributed.ProcessGroupNCCL.Options()
    options._timeout = LONG
    options.group_name = member.name
    with torch.cuda.device(device):
        return distributed.ProcessGroupNCCL(member.store, member.rank, member.size, options)


def _make_plugin(member: Member, backend: str) -> Any:
    from torch import distributed

    plugin = distributed.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(member.store, member.rank, member.size, LONG)
    options: Any = distributed._DistributedBackendOptions()  # type: ignore[attr-defined]
    options.store = member.store
    options.group_rank = member.rank
    options.group_size = member.size
    options.timeout = LONG
    options.group_id = member.name
    options.global_ranks_in_group = []
    return plugin.creator_fn(options, None)
