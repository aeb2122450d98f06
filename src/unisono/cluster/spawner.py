"""The launcher's end of the fork server: starts it, asks it for workers, hears how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence

import msgspec

from unisono.cluster.environment import variables
from unisono.cluster.messages import FromServer, Message, Ready, Signal, Start, Sweep, encode
from unisono.cluster.process import GROUP_SIGNALS, python_command

PRELOAD = ("torch", "torch._dynamo", "torch.utils.data", "unisono.run")
"""What every training script imports: the first optimizer imports torch._dynamo, for seconds."""

_MESSAGE_BYTES = 4096
_END_TIMEOUT_S = 8.0


class Spawner:
    """A fork server of one's own; a context manager that ends it and everything it started.

    Args:
        preload: modules the server imports before it forks.
        hash_seed: PYTHONHASHSEED of its interpreter; by default what ours was started with.
    """

    def __init__(self, preload: Sequence[str] = (), *, hash_seed: int | None = None) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = (str(theirs.fileno()), str(os.getpid()), *preload)
        with theirs, _blocked():
            self._process = subprocess.Popen(
                python_command("unisono.cluster.forkserver", *arguments),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=None if hash_seed is None else variables() | {"PYTHONHASHSEED": str(hash_seed)},
            )
        self._decoder = msgspec.msgpack.Decoder(FromServer)
        self.ready = False
        self.closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def start(
        self, rank: int, descriptors: Sequence[int], *, fresh: bool, folders: Sequence[str] = ()
    ) -> None:
        """Ask for a worker that gets `descriptors`: control, task, stdout, stderr.

        `folders` are temporary ones that the server removes if this process is killed.
        """
        self._send(Start(rank, fresh, tuple(folders)), descriptors)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a worker; nothing happens if it has ended."""
        self._send(Signal(rank, number))

    def sweep(self) -> None:
        """Ask that whatever ended workers left behind is killed; `Swept` answers."""
        self._send(Sweep())

    def receive(self) -> FromServer | None:
        """Return the next message, waiting for it; None once the server is gone."""
        try:
            data = self._sock.recv(_MESSAGE_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
            return None
        message: FromServer = self._decoder.decode(data)
        self.ready = self.ready or isinstance(message, Ready)
        return message

    def describe_end(self) -> str:
        """Return how the server ended, once it has."""
        code = self._process.wait(timeout=_END_TIMEOUT_S)
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the server, its workers and theirs. Blocking, until they are gone."""
        self._sock.close()
        self.closed = True
        try:
            self._process.wait(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Spawner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # a server that is gone is noticed by `receive`
            socket.send_fds(self._sock, [encode(message)], list(descriptors))


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Keep the signals of a process group from a new process until it has decided to ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
