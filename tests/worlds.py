"""Worlds in one process, a thread for each rank, over any transport: for contract tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import distributed

from unisono.transport.base import CPU, Transport
from unisono.transport.choose import connect_as
from unisono.transport.local import LocalTransport
from unisono.transport.process_group import ProcessGroupTransport
from unisono.transport.shared_memory import SharedMemoryTransport
from unisono.transport.threads import ThreadWorld

WORLD_SIZES = (1, 2, 3, 4, 7, 8)


def on_threads(world_size: int, function: Callable[[Transport], Any], **options: Any) -> list[Any]:
    """Run ``function(transport)`` for every rank of a `ThreadWorld`."""
    return ThreadWorld(world_size, **options).run(function)


def on_mapped_threads(world_size: int, function: Callable[[Transport], Any]) -> list[Any]:
    """The same, where ranks can view each other's buffers."""
    return on_threads(world_size, function, hosts=(tuple(range(world_size)),))


def on_process_groups(
    world_size: int, function: Callable[[Transport], Any], *, backend: str = "gloo"
) -> list[Any]:
    """Run ``function(transport)`` for every rank of a process group, with a group object a thread."""
    make = partial(ProcessGroupTransport, backend=backend, timeout_s=20)
    return _on_real_ones(world_size, function, make)


def on_shared_memory(world_size: int, function: Callable[[Transport], Any]) -> list[Any]:
    """The same over memory that all ranks see."""
    return _on_real_ones(world_size, function, partial(SharedMemoryTransport, timeout_s=20))


def on_two_hosts(world_size: int, function: Callable[[Transport], Any]) -> list[Any]:
    """The same where the lower half of the ranks, and one more of an odd number, is on another host."""

    def make(store: Any, rank: int, size: int) -> Transport:
        word = "near" if 2 * rank < size else "far"
        return connect_as(word, store, rank, size, device=CPU, timeout_s=20, hostname="127.0.0.1")[0]

    return _on_real_ones(world_size, function, make)


def _on_real_ones(
    world_size: int, function: Callable[[Transport], Any], make: Callable[..., Transport]
) -> list[Any]:
    store = distributed.HashStore()
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []
    # Shutting down connections is a matter of the whole process, so all must be connected before one may.
    connected = threading.Barrier(world_size)

    def work(rank: int) -> None:
        try:
            with make(store, rank, world_size) as transport:
                connected.wait()
                results[rank] = function(transport)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def on_plugin(world_size: int, function: Callable[[Transport], Any]) -> list[Any]:
    """The same over a backend that torch knows only by name."""
    with registered_backend("twin"):
        return on_process_groups(world_size, function, backend="twin")


def alone(world_size: int, function: Callable[[Transport], Any]) -> list[Any]:
    """Run ``function(transport)`` on the transport of a run with one worker."""
    assert world_size == 1
    with LocalTransport() as transport:
        return [function(transport)]


@contextmanager
def registered_backend(name: str) -> Iterator[None]:
    """Register gloo with torch under another name, as someone's own backend would be."""
    backend = distributed.Backend
    backend.register_backend(name, _make_twin, devices="cpu")
    default_device = backend.default_device_backend_map["cpu"]
    try:
        yield
    finally:
        backend._plugins.pop(name.upper())
        backend.backend_list.remove(name)
        backend.backend_type_map.pop(name)
        backend.backend_capability.pop(name)
        backend.default_device_backend_map["cpu"] = default_device
        delattr(backend, name.upper())


def _make_twin(store: Any, rank: int, size: int, timeout: Any) -> Any:
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return distributed.ProcessGroupGloo(store, rank, size, options)


TRANSPORTS = {
    "threads": on_threads,
    "mapped": on_mapped_threads,
    "gloo": on_process_groups,
    "shared": on_shared_memory,
    "hosts": on_two_hosts,
    "plugin": on_plugin,
}
