"""The fork server: a process that imports once and then starts, reaps and signals workers.

Run as ``python -m unisono.cluster.forkserver FD PARENT_PID MODULE...``; `FD` is its socket to the launcher.
It has one thread and computes nothing, so that forking it is safe and quick. It owns the workers' lives: who
ended and how is known from `waitpid`, whatever a worker's own children hold open. When the launcher ends, for
whatever reason, so do the workers and then this process; of a launcher that was killed it also removes the
temporary folders.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time

import msgspec

from unisono.cluster import worker
from unisono.cluster.messages import (
    Exited,
    FromServer,
    Ready,
    Signal,
    Start,
    Started,
    Sweep,
    Swept,
    ToServer,
    encode,
)
from unisono.cluster.process import GROUP_SIGNALS, adopt_orphans, kill_orphans, python_command

NUM_DESCRIPTORS = 4
_MESSAGE_BYTES = 4096
_LOOK_AROUND_S = 0.5
_GRACE_S = 5.0


class ForkServer:
    """The server's side of the conversation with the launcher.

    Args:
        sock: seqpacket socket to the launcher; a message a packet.
        parent_pid: the launcher.
    """

    def __init__(self, sock: socket.socket, *, parent_pid: int) -> None:
        self._sock = sock
        self._parent_pid = parent_pid
        self._decoder = msgspec.msgpack.Decoder(ToServer)
        self._ranks: dict[int, int] = {}  # of living workers, by process id
        self._folders: set[str] = set()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def serve(self) -> None:
        """Serve until the launcher ends or closes its end. Blocking."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        self._tell(Ready())
        while os.getppid() == self._parent_pid:
            ready = [descriptor for descriptor, _ in poll.poll(_LOOK_AROUND_S * 1000)]
            self._reap()
            if self._sock.fileno() in ready and not self._obey():
                break
        self._end()

    def _obey(self) -> bool:
        """Do what one message says; return False when there are no more."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, _MESSAGE_BYTES, NUM_DESCRIPTORS)
        except ConnectionError:
            return False
        if not data:
            return False
        match self._decoder.decode(data):
            case Start(rank=rank, fresh=fresh, folders=folders):
                self._folders.update(folders)
                self._start(rank, descriptors, fresh=fresh)
            case Signal(rank=rank, signal=number):
                self._signal(number, rank=rank)
            case Sweep():
                self._tell(Swept(kill_orphans(keep=self._ranks)))
        return True

    def _start(self, rank: int, descriptors: list[int], *, fresh: bool) -> None:
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(descriptors, server_pid=server_pid, fresh=fresh)
        for descriptor in descriptors:
            os.close(descriptor)
        self._ranks[pid] = rank
        self._tell(Started(rank, pid))

    def _become_worker(self, descriptors: list[int], *, server_pid: int, fresh: bool) -> None:
        """Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            self._sock.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            if fresh:
                _spawn(descriptors, server_pid=server_pid)
            code = worker.run(worker.Descriptors(*descriptors), parent_pid=server_pid)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _signal(self, number: int, *, rank: int) -> None:
        # A child that was not yet reaped keeps its process id, so this can't hit a stranger.
        for pid, owner in self._ranks.items():
            if owner == rank:
                os.kill(pid, number)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                self._tell(Exited(rank, pid, os.waitstatus_to_exitcode(status)))

    def _end(self) -> None:
        """End the workers politely, then by force, then whatever they leave."""
        for pid in self._ranks:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while self._ranks and (left_s := deadline - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
            self._reap()
        self._ranks.clear()
        kill_orphans()
        if os.getppid() != self._parent_pid:  # nobody else is left who would
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _tell(self, message: FromServer) -> None:
        with contextlib.suppress(OSError):  # a launcher that is gone is noticed by `serve`
            self._sock.send(encode(message))


def _spawn(descriptors: list[int], *, server_pid: int) -> None:
    """Become a new interpreter that runs the worker. Never returns."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)
    arguments = [str(server_pid), *(str(descriptor) for descriptor in descriptors)]
    command = python_command("unisono.cluster.worker", *arguments)
    os.execv(command[0], command)


def main(arguments: list[str]) -> None:
    """Run the fork server."""
    descriptor, parent_pid, *modules = arguments
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the launcher decides what they mean
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # it kept them from us until now
    adopt_orphans()
    for name in modules:
        importlib.import_module(name)
    ForkServer(socket.socket(fileno=int(descriptor)), parent_pid=int(parent_pid)).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
