"""Runs one job: an event loop between the fork server, the workers, the signals and the `Job`'s decisions.

It owns no process and decides nothing: the fork server owns the processes, `Job` decides, `Master` answers
the workers.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import msgspec

from unisono.cluster.channel import Channel
from unisono.cluster.control import Master
from unisono.cluster.failure import Failure, Kind
from unisono.cluster.inbox import Inbox
from unisono.cluster.job import Action, Job, SendSignal, State, TellAll
from unisono.cluster.messages import (
    RESULT_LIMIT_BYTES,
    Exited,
    Failed,
    FromProcess,
    Raised,
    Ready,
    Returned,
    Started,
    Stop,
    Swept,
    Task,
    ToMaster,
)
from unisono.cluster.output import Outputs
from unisono.cluster.spawner import Spawner
from unisono.cluster.spec import JobSpec, Outcome
from unisono.errors import JobError, TransportError

_SWEEP_TIMEOUT_S = 2.0


def run_job(
    spec: JobSpec,
    spawner: Spawner,
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
    inbox: Inbox | None = None,
) -> Outcome:
    """Run a job to its end. Blocking. Nothing of it is left when this returns or raises.

    Args:
        spec: the job.
        spawner: the fork server to use; it must have no other job.
        out: where shown standard output goes, ``sys.stdout`` by default.
        err: where shown standard error goes, ``sys.stderr`` by default.
        inbox: signals meant for the job; None leaves signals alone.

    Raises:
        JobError: the fork server ended.
    """
    outputs = Outputs(spec.output, out=out or sys.stdout, err=err or sys.stderr)
    launcher = Launcher(spec, spawner, outputs=outputs, inbox=inbox)
    try:
        return launcher.run()
    finally:
        launcher.close()


@dataclass
class _Worker:
    control: Channel
    task: Channel


class Launcher:
    """One run of the event loop. Use `run_job`."""

    def __init__(self, spec: JobSpec, spawner: Spawner, *, outputs: Outputs, inbox: Inbox | None) -> None:
        self._spec = spec
        self._spawner = spawner
        self._outputs = outputs
        self._inbox = inbox
        self._job = Job(spec.world_size, grace_s=spec.grace_s)
        self._master = Master(spec.run_id, world_size=spec.world_size, flags=spec.flags)
        self._workers: dict[int, _Worker] = {}
        self._pids: dict[int, int] = {}
        self._values: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._to_master = msgspec.msgpack.Decoder(ToMaster)
        self._from_process = msgspec.msgpack.Decoder(FromProcess)
        self._left_early: list[int] | None = None  # None until the others are told to end
        self._swept: int | None = None

    def run(self) -> Outcome:
        """Run the job to its end."""
        self._selector.register(self._spawner, selectors.EVENT_READ, self._hear_server)
        if self._inbox is not None:
            self._selector.register(self._inbox, selectors.EVENT_READ, self._hear_signal)
        if self._spawner.ready:
            self._start_all()
        while self._job.state is not State.DONE:
            self._turn(self._job.deadline)
            self._do(self._job.tick(time.monotonic()))
        self._sweep()
        job = self._job
        self._outputs.close(failed=job.failure is not None)
        return Outcome(
            job.exit_code,
            job.failure,
            job.ended,
            left_early=self._find_done() if self._left_early is None else self._left_early,
            interrupted_by=None if job.interrupted_by is None else job.interrupted_by.name,
            values=self._values,
            logs=self._outputs.logs,
            killed=self._swept or 0,
        )

    def close(self) -> None:
        """Kill what still runs, and close everything."""
        with contextlib.suppress(JobError):
            if self._workers and self._job.state is not State.DONE:
                self._do([SendSignal(signal.SIGKILL)])
                self._wait(lambda: len(self._job.ended) == len(self._workers), self._spec.grace_s)
                self._sweep()
        self._outputs.close()
        self._selector.close()
        for worker in self._workers.values():
            worker.control.close()
            worker.task.close()

    def _turn(self, deadline: float | None) -> None:
        """Wait until something happens or `deadline`, and deal with it."""
        timeout_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        # What workers said comes before the news that they ended.
        ready = sorted(self._selector.select(timeout_s), key=lambda item: item[0].fileobj is self._spawner)
        for key, events in ready:
            key.data(events)

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done() and time.monotonic() < deadline:
            self._turn(deadline)

    def _sweep(self) -> None:
        self._spawner.sweep()
        self._wait(lambda: self._swept is not None, _SWEEP_TIMEOUT_S)

    # --- what happens

    def _hear_signal(self, events: int) -> None:
        assert self._inbox is not None
        for number in self._inbox.take():
            self._do(self._job.interrupt(number, now=time.monotonic()))
        if self._job.interrupted_by is not None and not self._workers:  # nothing was started yet
            self._job.state = State.DONE

    def _hear_server(self, events: int) -> None:
        match self._spawner.receive():
            case None:
                raise JobError(
                    f"the fork server ended ({self._spawner.describe_end()}); its workers end with it"
                )
            case Ready():
                if self._job.state is State.RUNNING:  # else a signal came first
                    self._start_all()
            case Started(rank=rank, pid=pid):
                self._pids[rank] = pid
            case Exited(rank=rank, pid=pid, code=code):
                if self._pids.get(rank) == pid:  # else it is of a job before this one
                    self._note_exit(rank, code)
            case Swept(killed=killed):
                self._swept = killed

    def _hear_control(self, rank: int, events: int) -> None:
        channel = self._workers[rank].control
        for message in self._receive(channel, self._to_master, rank, events):
            if isinstance(message, Failed):
                self._fail(message.failure)
            for receiver, answer in self._master.handle(rank, message, now=time.monotonic()):
                self._workers[receiver].control.send(answer)
                self._watch(self._workers[receiver].control)

    def _hear_process(self, rank: int, events: int) -> None:
        channel = self._workers[rank].task
        for message in self._receive(channel, self._from_process, rank, events):
            match message:
                case Raised(failure=failure):
                    self._fail(failure)
                case Returned(value=value):
                    self._values[rank] = value

    def _receive(
        self, channel: Channel, decoder: msgspec.msgpack.Decoder[Any], rank: int, events: int
    ) -> Iterator[Any]:
        """Yield the messages of a worker; garbage is its failure."""
        if events & selectors.EVENT_WRITE:
            channel.flush()
        try:
            payloads = channel.receive()
            yield from map(decoder.decode, payloads)
        except (TransportError, msgspec.MsgspecError) as error:
            channel.close()
            self._fail(Failure(rank, -1, Kind.RAISED, f"sent what is no message of ours: {error}"))
        self._watch(channel)

    def _note_exit(self, rank: int, code: int) -> None:
        # What it said before it ended is in the sockets.
        self._hear_control(rank, selectors.EVENT_READ)
        self._hear_process(rank, selectors.EVENT_READ)
        now = time.monotonic()
        step, joined = self._master.step_of(rank), self._master.joined(rank)
        self._master.forget(rank, now=now)
        self._do(self._job.exit(rank, code, step=step, joined=joined, now=now))

    def _fail(self, failure: Failure) -> None:
        if failure.step < 0:
            failure = msgspec.structs.replace(failure, step=self._master.step_of(failure.rank))
        self._do(self._job.report(failure, now=time.monotonic()))

    # --- what is done

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case TellAll(reason=reason):
                    self._left_early = self._find_done()
                    for worker in self._workers.values():
                        worker.control.send(Stop(reason))
                        self._watch(worker.control)
                case SendSignal(number=number):
                    for rank in self._workers:
                        self._spawner.signal(rank, number)

    def _find_done(self) -> list[int]:
        """Return the workers that have left or ended without an error."""
        well = [rank for rank in self._workers if not self._job.blames(rank)]
        return [rank for rank in well if self._master.left(rank) or self._job.ended.get(rank) == 0]

    def _start_all(self) -> None:
        for rank in range(self._spec.world_size):
            self._start(rank)

    def _start(self, rank: int) -> None:
        control, their_control = socket.socketpair()
        task, their_task = socket.socketpair()
        with their_control, their_task, self._outputs.descriptors(rank) as standard:
            descriptors = (their_control.fileno(), their_task.fileno(), *standard)
            folders = (*self._spec.folders, *self._outputs.temporary_folders)
            self._spawner.start(rank, descriptors, fresh=self._spec.fresh, folders=folders)
        worker = _Worker(Channel(control), Channel(task, limit_bytes=RESULT_LIMIT_BYTES))
        self._workers[rank] = worker
        worker.task.send(self._task(rank))
        self._watch(worker.control, lambda events: self._hear_control(rank, events))
        self._watch(worker.task, lambda events: self._hear_process(rank, events))
        for descriptor in self._outputs.readable:
            if descriptor not in self._selector.get_map():
                self._selector.register(
                    descriptor, selectors.EVENT_READ, lambda events, it=descriptor: self._pump(it)
                )

    def _task(self, rank: int) -> Task:
        spec = self._spec
        return Task(
            run_id=spec.run_id,
            rank=rank,
            world_size=spec.world_size,
            grace_s=spec.grace_s,
            argv=list(spec.argv),
            script=spec.script,
            function=spec.function,
            directory=spec.directory,
            path=list(spec.path),
            variables=dict(spec.variables),
            # Shown output ends with the traceback that the launcher prints; once is enough.
            shows_traceback=rank > 0 and spec.output.mode == "first",
        )

    def _watch(self, channel: Channel, react: Callable[[int], None] | None = None) -> None:
        """Wait for what `channel` needs now; `react` when it is new."""
        if react is not None:
            self._selector.register(channel, channel.events, react)
        elif channel.closed:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(channel)
        else:
            key = self._selector.get_key(channel)
            if key.events != channel.events:
                self._selector.modify(channel, channel.events, key.data)

    def _pump(self, descriptor: int) -> None:
        # Unregistered before it is closed: the number may be used again at once.
        key = self._selector.unregister(descriptor)
        if self._outputs.pump(descriptor):
            self._selector.register(descriptor, selectors.EVENT_READ, key.data)
