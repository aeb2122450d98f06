"""One unix socket for every pair of workers on a host, which carries messages, descriptors and the news of a death.

Each worker listens under a random abstract name that it publishes, with a secret, in the run's store; those of
higher rank connect to it. Abstract names belong to a network namespace, so whoever can't see a name is not
on this host.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from unisono.errors import DeadlineError, TransportError

_SECRET_BYTES = 16
_RANK_BYTES = 4
_BUFFER_BYTES = 2**20
"""What is asked for; the system may give less."""


def host_identity() -> str:
    """Return what is the same for all processes that can reach each other in this way, and for no others.

    Raises:
        OSError: this system lacks what is needed: Linux, abstract sockets, files in memory. Says what.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        raise OSError(f"{sys.platform} has no memory files whose descriptors could be passed")
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    os.close(os.memfd_create("unisono", os.MFD_CLOEXEC))
    with _listener():
        # The name of the host too: machines that were started from one image of memory have all else in common.
        return f"{boot}/{namespace}/{os.uname().nodename}"


@dataclass(frozen=True)
class _Address:
    """Where a worker listens, and what a caller must know."""

    name: bytes
    secret: bytes

    def encode(self) -> str:
        return f"{self.name.hex()} {self.secret.hex()}"

    @classmethod
    def decode(cls, text: bytes) -> _Address:
        name, secret = text.decode().split(" ")
        return cls(bytes.fromhex(name), bytes.fromhex(secret))


def connect_pairs(
    store: Any, rank: int, ranks: Sequence[int], *, timeout_s: float
) -> dict[int, socket.socket]:
    """Return a connected, blocking seqpacket socket to every other of `ranks`, all on this host.

    *Collective: every one of `ranks` calls this.* *Blocking.*

    Args:
        store: where addresses are exchanged; its keys must be fresh.
        rank: this worker, one of `ranks`.
        timeout_s: how long to wait for the others.

    Raises:
        DeadlineError: some did not come in time; says who.
        TransportError: a worker is gone before it was connected.
    """
    sockets: dict[int, socket.socket] = {}
    try:
        with _listener() as listener:
            own = _Address(listener.getsockname(), secrets.token_bytes(_SECRET_BYTES))
            store.set(f"pairs/{rank}", own.encode())
            for peer in ranks:
                if peer < rank:
                    sockets[peer] = _call(_Address.decode(store.get(f"pairs/{peer}")), rank, peer)
            missing = {peer for peer in ranks if peer > rank}
            sockets.update(_answer(listener, own.secret, missing, rank=rank, timeout_s=timeout_s))
    except BaseException:
        for each in sockets.values():
            each.close()
        raise
    for each in sockets.values():
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            each.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return sockets


@contextmanager
def _listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0unisono-" + secrets.token_hex(16).encode())
        listener.listen(socket.SOMAXCONN)
        yield listener


def _call(address: _Address, rank: int, peer: int) -> socket.socket:
    called = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        called.connect(address.name)
        called.send(address.secret + rank.to_bytes(_RANK_BYTES, "little"))
    except OSError as error:
        called.close()
        raise TransportError(f"rank {rank}: rank {peer}, on this host, is gone: {error}.") from error
    return called


def _answer(
    listener: socket.socket, secret: bytes, missing: set[int], *, rank: int, timeout_s: float
) -> dict[int, socket.socket]:
    """Take the calls of all who are `missing`; whoever doesn't know the secret is hung up on."""
    answered: dict[int, socket.socket] = {}
    strangers: dict[int, socket.socket] = {}
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    try:
        while missing:
            ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                raise DeadlineError(
                    f"rank {rank}: waited {timeout_s:g} s for the workers on this host to connect; missing: ranks "
                    f"{sorted(missing)}."
                )
            for descriptor, _ in ready:
                if descriptor == listener.fileno():
                    caller, _ = listener.accept()
                    strangers[caller.fileno()] = caller
                    poller.register(caller, select.POLLIN)
                    continue
                poller.unregister(descriptor)
                caller = strangers.pop(descriptor)
                peer = _introduced(caller, secret)
                if peer in missing:
                    missing.remove(peer)
                    answered[peer] = caller
                else:
                    caller.close()
    except BaseException:
        for each in answered.values():
            each.close()
        raise
    finally:
        for each in strangers.values():
            each.close()
    return answered


def _introduced(caller: socket.socket, secret: bytes) -> int | None:
    """Return the rank of a caller that knows the secret."""
    with suppress(OSError):
        hello = caller.recv(_SECRET_BYTES + _RANK_BYTES + 1)
        known = len(hello) == _SECRET_BYTES + _RANK_BYTES
        if known and secrets.compare_digest(hello[:_SECRET_BYTES], secret):
            return int.from_bytes(hello[_SECRET_BYTES:], "little")
    return None
