"""Loader processes: they load a stream of micro-batches ahead of the worker that needs them.

The processes, queues and pinned memory are those of torch's `DataLoader`; one of its "samples" is a whole
micro-batch here, so that it is loaded and collated in one process and comes back in order. This file adds
what a job needs: children that can't outlive their parent, deaths and delays that are named, and exceptions
that keep their type and traceback.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import multiprocessing.connection
import os
import pickle
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch.utils.data import DataLoader

from unisono.data.child_watch import Children, watch
from unisono.data.parcel import pack, unpack
from unisono.errors import LoaderError
from unisono.randomness import seed_all

PR_SET_PDEATHSIG = 1
LOOK_EVERY_S = 5.0


class Source(Protocol):
    """What loads tasks; a copy of it is in every process. What a task is, is between it and who yields tasks."""

    def load(self, task: Any, seed_generators: Callable[[int], None]) -> Any: ...


class LoaderProcesses:
    """Yield what `source` loads for each of `tasks`, in their order.

    Tasks are drawn on the caller's thread, ``num_workers * prefetch_factor`` ahead of what was yielded. They go
    to the processes in turn: task k to process k modulo `num_workers`.

    Args:
        source: what to load from.
        tasks: one piece of work each, a micro-batch for example.
        num_workers: processes, forked here; at least 1.
        rank: this worker, for messages.
        prefetch_factor: tasks that each process works ahead.
        timeout_s: how long to wait for one task.
        pin_memory: put tensors into page-locked memory, for copies to an accelerator.
        persistent: the processes outlive their tasks; `restart` gives them others.
    """

    def __init__(
        self,
        source: Source,
        tasks: Iterable[Any],
        *,
        num_workers: int,
        rank: int,
        prefetch_factor: int = 2,
        timeout_s: float = 1800.0,
        pin_memory: bool = False,
        persistent: bool = False,
    ) -> None:
        self.num_workers = num_workers
        self._rank = rank
        self._timeout_s = timeout_s
        self._look_every_s = min(LOOK_EVERY_S, timeout_s)
        self._pid = os.getpid()
        self._tasks = _Tasks(tasks)
        loader: DataLoader[Any] = DataLoader(
            _InChild(source, by_value=not pin_memory),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._tasks,
            num_workers=num_workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            timeout=self._look_every_s,
            worker_init_fn=functools.partial(_prepare_child, os.getpid()),
            multiprocessing_context="fork",
            # Its own: torch would draw a seed from the global generator and so change the user's numbers.
            generator=torch.Generator(),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent,
        )
        iterator: Any = iter(loader)
        self._loader = loader if persistent else None
        self._iterator = iterator
        self._children = Children(iterator._workers, rank=rank)
        iterator._workers_done_event = _Done(iterator._workers_done_event, self._children)
        watch(self._children)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the data of the next task. *Blocking.*

        Raises:
            LoaderError: a process died, or was late.
            Exception: what the dataset or the collation raised; the process's traceback as a note.
        """
        began = time.monotonic()
        while True:
            asked = time.monotonic()
            try:
                data = next(self._iterator)
            except (RuntimeError, OSError, EOFError) as error:
                self._explain(error, began, asked)
                continue
            if isinstance(data, Failure):
                raise data.restore(self._rank)
            return unpack(data)

    def restart(self, tasks: Iterable[Any]) -> bool:
        """Give persistent processes other tasks, after they have done those that they were given. *Blocking.*

        Returns:
            False if they did not come to an end within a few seconds; they can only be closed then.

        Raises:
            LoaderError: a process died.
        """
        assert self._loader is not None
        self._tasks.tasks = tasks
        try:
            iter(self._loader)  # torch's own way: it throws away what is left, and begins anew
        except (RuntimeError, OSError, EOFError) as error:
            death = self._children.death()
            self.close(kill=True)
            if isinstance(error, LoaderError):
                raise
            if death is not None:
                raise LoaderError(death) from error
            return False
        except BaseException:
            self.close(kill=True)
            raise
        return True

    def _explain(self, error: Exception, began: float, asked: float) -> None:
        """Raise the right error for one of torch's; return if it was only time to look for deaths."""
        if isinstance(error, LoaderError):
            raise error
        death = self._children.death()
        if death is not None:
            raise LoaderError(death) from error
        now = time.monotonic()
        if now - asked < self._look_every_s:
            raise error
        if now - began >= self._timeout_s:
            raise LoaderError(
                f"rank {self._rank} waited {now - began:.1f} s for data: its loader workers (pids "
                f"{self._children.pids}) are alive but late. See whether one is stopped or the dataset "
                f"hangs; for slow data raise the timeout (step_timeout_s) or num_workers."
            ) from error

    def close(self, *, kill: bool = False) -> None:
        """End the processes and wait until they are gone; with `kill` in the middle of a sample."""
        iterator, self._iterator, self._loader = self._iterator, None, None
        if iterator is None or os.getpid() != self._pid:
            return
        self._children.closing = True
        if kill or self._children.death() is not None:
            self._children.end()
        # Not left to the garbage collector: a traceback that is being handled keeps the iterator alive.
        iterator._shutdown_workers()
        self._children.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(kill=kind is not None)

    def __del__(self) -> None:
        if getattr(self, "_iterator", None) is not None and not sys.is_finalizing():
            self.close()


@dataclass(frozen=True)
class Failure:
    """An exception on its way from a loader process: itself, if it can be pickled, and its traceback."""

    error: Exception | None
    summary: str
    text: str
    pid: int

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(error)).rstrip()
        error.__notes__ = []  # they are in the text
        return cls(_portable(error), f"{type(error).__qualname__}: {error}", text, os.getpid())

    def restore(self, rank: int) -> Exception:
        error = LoaderError(self.summary) if self.error is None else self.error
        error.add_note(f"raised in loader worker pid {self.pid} on rank {rank}:\n\n{self.text}")
        return error


def _portable(error: BaseException) -> Exception | None:
    """Return `error` if it survives pickling and is safe to raise out of an iterator."""
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        return None
    try:
        restored = pickle.loads(pickle.dumps(error))
    except Exception:  # any class may fail in any way here, and the text says it all
        return None
    return error if type(restored) is type(error) else None


class _Done:
    """torch's event by which processes learn that they may end, as this process uses it.

    A process that is killed may hold its lock, for which torch would wait for ever.
    """

    def __init__(self, event: Any, children: Children) -> None:
        self._event = event
        self._children = children
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._children.death() is None:
            self._event.set()


class _Tasks:
    """An iterable of tasks that can be exchanged for another one."""

    def __init__(self, tasks: Iterable[Any]) -> None:
        self.tasks = tasks

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tasks)


class _InChild:
    """The dataset that torch's loop reads in a loader process: a task in, a micro-batch out."""

    def __init__(self, source: Source, *, by_value: bool) -> None:
        self._source = source
        self._by_value = by_value

    def __getitem__(self, task: Any) -> Any:
        try:
            data = self._source.load(task, seed_all)
            # Not if torch is to pin it: that happens on the way.
            return pack(data) if self._by_value else data
        except (Exception, SystemExit) as error:
            return Failure.of(error)


def _unchanged(data: Any) -> Any:
    return data


def _address_without_file(family: str) -> str:
    return f"\0unisono-loader-{os.getpid()}-{secrets.token_hex(8)}"


def _prepare_child(parent: int, worker: int) -> None:
    """Make a loader process end with its parent, and leave signals for the job to the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have gone before that took effect.
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Inherited: a signal that reaches this process must not wake up the parent.
    signal.set_wakeup_fd(-1)
    if sys.platform == "linux":
        # A large tensor's descriptor is fetched from a socket of this process: one without a name in the file
        # system, so that a kill leaves nothing behind.
        multiprocessing.connection.arbitrary_address = _address_without_file  # type: ignore[attr-defined]
    # What was inherited is left alone by the collector, so that its pages stay shared.
    gc.freeze()
