"""What a started process does to be a worker: take its task, run the program, say how it ended.

Also run as ``python -m unisono.cluster.worker SERVER_PID FD FD FD FD`` for workers that are not forked. It
moves no tensors and does not join the run: the user's program does.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import traceback
from typing import NamedTuple

import cloudpickle
import msgspec

from unisono.cluster import environment
from unisono.cluster.failure import describe_exception
from unisono.cluster.messages import (
    RESULT_LIMIT_BYTES,
    FrameReader,
    FromProcess,
    Raised,
    Returned,
    Task,
    encode,
    frame,
)
from unisono.cluster.process import close_in_child, die_with_parent
from unisono.cluster.program import finish, run_script
from unisono.cluster.termination import Termination
from unisono.errors import UsageError


class Descriptors(NamedTuple):
    """What the launcher hands to a worker."""

    control: int
    task: int
    stdout: int
    stderr: int


def run(descriptors: Descriptors, *, parent_pid: int) -> int:
    """Be a worker until the program ends; return the exit code. The process must end right after."""
    die_with_parent(signal.SIGTERM, parent_pid=parent_pid)
    _redirect(descriptors)
    with (
        socket.socket(fileno=descriptors.task) as channel,
        socket.socket(fileno=descriptors.control) as control,
    ):
        close_in_child(channel)
        close_in_child(control)
        task = _receive_task(channel)
        if task is None:  # the launcher is gone
            return 1
        termination = Termination(task.grace_s)
        termination.install()
        _assume_identity(task, control_fd=descriptors.control, stop_fd=termination.stop_fd)
        return _run_task(task, channel, termination)


def _run_task(task: Task, channel: socket.socket, termination: Termination) -> int:
    """Run the program, then what belongs to its end; report a failure at once. Return the exit code."""
    code, value = 0, b""
    try:
        if task.script is not None:
            run_script(task.script)
        else:
            value = _call(task.function or b"")
    except BaseException as error:
        termination.raise_no_more()
        code = _take_exception(error, task, channel)
    error_at_exit = finish()
    if error_at_exit is not None and code == 0:
        code = 1
        _tell(channel, Raised(describe_exception(error_at_exit, rank=task.rank, step=-1)))
    if code == 0:
        _tell(channel, Returned(value))
    return code


def _call(pickled: bytes) -> bytes:
    function, args = cloudpickle.loads(pickled)
    value = function(*args)
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"{name} returned a {type(value).__name__} that can't be sent back: {error}; "
            "return plain data or tensors"
        ) from error


def _take_exception(error: BaseException, task: Task, channel: socket.socket) -> int:
    """Report an exception of the program and show it where an interpreter would; return the exit code."""
    if isinstance(error, SystemExit):
        failure = describe_exception(error, rank=task.rank, step=-1)
        if failure.exit_code != 0:
            _tell(channel, Raised(failure))
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        return failure.exit_code
    _strip_own_frames(error)
    _tell(channel, Raised(describe_exception(error, rank=task.rank, step=-1)))
    if task.shows_traceback:
        traceback.print_exception(error)
    return 1


def _strip_own_frames(error: BaseException) -> None:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("unisono.cluster."):
        frames = frames.tb_next
    error.__traceback__ = frames or error.__traceback__


def _redirect(descriptors: Descriptors) -> None:
    """Make the given descriptors the standard streams, line by line so that a killed worker's are whole."""
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null, descriptors.stdout, descriptors.stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout = _line_writer(1)
    sys.stderr = _line_writer(2)


def _line_writer(descriptor: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _receive_task(channel: socket.socket) -> Task | None:
    reader = FrameReader(RESULT_LIMIT_BYTES)
    while data := channel.recv(1 << 20):
        for payload in reader.feed(data):
            return msgspec.msgpack.decode(payload, type=Task)
    return None


def _assume_identity(task: Task, *, control_fd: int, stop_fd: int) -> None:
    environment.replace_variables(task.variables)
    environment.announce(
        environment.Environment(
            kind="launcher",
            rank=task.rank,
            world_size=task.world_size,
            local_rank=task.rank,
            local_world_size=task.world_size,
            run_id=task.run_id,
            control_fd=control_fd,
            stop_fd=stop_fd,
        )
    )
    os.chdir(task.directory)
    sys.argv[:] = task.argv
    sys.path[:] = task.path
    if "numpy.random" in sys.modules:  # forked workers would draw the same numbers
        sys.modules["numpy.random"].seed()


def _tell(channel: socket.socket, message: FromProcess) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone, and so will we be
        channel.sendall(frame(encode(message)))


def main(arguments: list[str]) -> int:
    """Be a worker that was spawned, not forked."""
    parent_pid, *descriptors = map(int, arguments)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return run(Descriptors(*descriptors), parent_pid=parent_pid)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
