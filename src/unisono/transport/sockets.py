"""The internet sockets that a library opened on our behalf, found by looking before and after.

gloo offers no way to interrupt a wait. Shutting its connections down from outside does: every waiter returns
at once with an error. Listening sockets must not be touched that way, since gloo would end the process.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_FOLDER = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


@dataclass(frozen=True)
class _Socket:
    """A descriptor and the identity of what it meant when it was found; numbers are used again."""

    descriptor: int
    inode: int
    is_connected: bool

    def is_unchanged(self) -> bool:
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False


class Sockets:
    """Those sockets that appeared while `watch` was open."""

    def __init__(self) -> None:
        self._found: tuple[_Socket, ...] = ()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take over the sockets which appear meanwhile. They don't outlive an ``exec``."""
        before = set(_internet_sockets())
        yield
        new = tuple(each for each in _internet_sockets() if each not in before)
        for each in new:
            with suppress(OSError):
                os.set_inheritable(each.descriptor, False)
        self._found += new

    def shut_down(self) -> None:
        """End all connections, in both directions, for this process and its peers. Harmless if repeated."""
        for each in self._found:
            if each.is_connected and each.is_unchanged():
                with suppress(OSError), socket.socket(fileno=os.dup(each.descriptor)) as duplicate:
                    duplicate.shutdown(socket.SHUT_RDWR)

    def close_in_child(self) -> None:
        """Close this process's descriptors of them, in a forked child, where the connections live on.

        Without it the peers would not be told when the parent dies, as long as the child lives.
        """
        for each in self._found:
            if each.is_unchanged():
                with suppress(OSError):
                    os.close(each.descriptor)
        self._found = ()

    def forget(self) -> None:
        """Take no more interest in them: whoever opened them closes them."""
        self._found = ()


def _internet_sockets() -> Iterator[_Socket]:
    for name in os.listdir(_FOLDER):
        with suppress(OSError):
            descriptor = int(name)
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                    yield _Socket(descriptor, status.st_ino, _is_connected(duplicate))


def _is_connected(candidate: socket.socket) -> bool:
    try:
        candidate.getpeername()
    except OSError:
        return False
    return True
