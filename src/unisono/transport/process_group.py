"""A transport over torch's process groups: gloo on CPUs, NCCL on NVIDIA GPUs, any other backend by name.

It makes its groups itself and leaves torch's global default group alone. The groups' own time-outs are so
long that they never strike; deadlines belong to whoever calls `ProcessGroupTransport.abort`.

gloo's traffic is not encrypted.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from unisono.errors import TransportError, WorkerLostError
from unisono.transport.backends import Member, check_backend, gloo_device, make_group
from unisono.transport.base import CPU, Transport, Work
from unisono.transport.forks import close_in_forked_children
from unisono.transport.local import Aborted
from unisono.transport.meeting import meet
from unisono.transport.sockets import Sockets

_EXACT = frozenset({torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64})
"""Where a backend's sum over two ranks has the very bits of torch's addition."""
_SUMS = _EXACT | {torch.float16, torch.bfloat16}
"""What every backend can add up."""
_SMALL_BYTES = 128 * 1024
"""Up to here exchange and add is faster than gloo's all-reduce over two ranks (0.15 against 0.4 ms)."""
_HANDSHAKE_TAG = 1 << 30


class ProcessGroupTransport(Transport):
    """One rank's end of a process group, and of groups of two with the peers that `pair_sum` was called for.

    Once a peer was lost, the whole group is dropped: all connections are closed, so that every other peer
    learns of it at once, and all that follows raises the same error.

    Args:
        store: a ``torch.distributed.Store`` that all ranks share. Its keys must be fresh: use a
            ``PrefixStore`` of a new name for every new group.
        rank: this worker.
        world_size: how many there are.
        backend: "gloo", "nccl" or a name that is registered with torch.
        device: where tensors are.
        timeout_s: how long to wait for all ranks to come.
        hostname: a name or address of this host, where gloo listens.
        interface: a network interface, instead of `hostname`.

    Raises:
        UsageError: the backend is unknown, or gloo can't listen there.
        DeadlineError: not all ranks came in time; says who is missing.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        backend: str = "gloo",
        device: torch.device = CPU,
        timeout_s: float = 300.0,
        hostname: str = "127.0.0.1",
        interface: str | None = None,
    ) -> None:
        check_backend(backend)
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.backend = backend
        self._store = store
        self._reason: Exception | None = None
        self._lost: WorkerLostError | None = None
        self._num_pending = 0
        self._blank = torch.zeros(1, dtype=torch.uint8, device=device)
        self._sockets = Sockets()
        self._pairs: dict[int, Any] = {}
        meet(store, rank, world_size, timeout_s=timeout_s)  # making a group can't be interrupted
        with self._sockets.watch():
            self._gloo = gloo_device(hostname, interface) if backend == "gloo" else None
            self._group = self._make_group("all", rank, world_size)
        close_in_forked_children(self)
        # A rank that leaves at once must not break connections that others are still making.
        self.all_reduce(torch.zeros(1, dtype=torch.int64, device=device)).wait()

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Work:
        return self._post(lambda: self._transfer(sends, receives))

    def all_reduce(self, tensor: Tensor) -> Work:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if real.dtype not in _SUMS:
            return self._sum_by_exchange(real)
        if self.backend == "gloo" and self.world_size == 2 and real.nbytes <= _SMALL_BYTES:
            return super().pair_sum(real, 1 - self.rank)  # one message each way instead of two
        return self._post(lambda: [("an all-reduce", self._group.allreduce([real]))])

    def pair_sum(self, tensor: Tensor, peer: int) -> Work:
        if tensor.is_complex():
            return self.pair_sum(torch.view_as_real(tensor), peer)
        if tensor.dtype not in _EXACT or (self.backend == "gloo" and tensor.nbytes <= _SMALL_BYTES):
            return super().pair_sum(tensor, peer)
        group = self._group if self.world_size == 2 else self._pair(peer)
        return self._post(lambda: [(f"a sum with rank {peer}", group.allreduce([tensor]))])

    def abort(self, reason: Exception) -> None:
        if self._reason is None:
            self._reason = reason
        self._interrupt()

    def close(self) -> None:
        if self._group is None:
            return
        if self._num_pending:
            # The groups would wait for work that may never finish.
            self._interrupt()
        if self._reason is None:
            self._reason = TransportError(f"rank {self.rank}: the transport is closed.")
        self._sockets.forget()
        self._pairs.clear()
        self._group = self._gloo = None

    def _post(self, post: Callable[[], list[tuple[str, Any]]]) -> Work:
        """Post operations and return their work. `post` gives (what for people, the backend's work) each."""
        if self._reason is not None:
            return Aborted(self._reason)
        if self._lost is not None:
            return Aborted(self._lost)
        try:
            works = post()
            self._num_pending += 1
            return _Posted(self, works)
        except RuntimeError as error:
            return Aborted(self._failure("an operation that was being posted", error))

    def _transfer(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> list[tuple[str, Any]]:
        for peer, _ in (*sends, *receives):
            self.check_peer(peer)
        if self.backend != "gloo":
            return self._transfer_coalesced(sends, receives)
        group = self._group
        # The tag says the size: gloo would cut off a message of another size, or end the process.
        return [
            (f"receiving {tensor.nbytes} bytes from rank {peer}", group.recv([tensor], peer, _tag(tensor)))
            for peer, tensor in receives
        ] + [
            (f"sending {tensor.nbytes} bytes to rank {peer}", group.send([tensor], peer, _tag(tensor)))
            for peer, tensor in sends
        ]

    def _transfer_coalesced(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> list[tuple[str, Any]]:
        """Post a round as one operation if the backend can; one by one it could wait in a circle."""
        group = self._group
        coalesces = bool(getattr(group, "supports_coalescing", False))
        if coalesces:
            group._start_coalescing()
        works = [group.recv([self._as_bytes(tensor)], peer, 0) for peer, tensor in receives]
        works += [group.send([self._as_bytes(tensor)], peer, 0) for peer, tensor in sends]
        if coalesces:
            works = [group._end_coalescing()] if works else []
        peers = sorted({peer for peer, _ in (*sends, *receives)})
        return [(f"an exchange with ranks {peers}", work) for work in works]

    def _as_bytes(self, tensor: Tensor) -> Tensor:
        """Return the same memory as bytes; one byte for a signal, since not every backend sends nothing.

        That byte is the transport's own, so that it is there as long as an accelerator may write it.
        """
        return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else self._blank

    def _sum_by_exchange(self, tensor: Tensor) -> Work:
        """Add up what the backend can't: everybody sends all to all, and adds in the order of ranks."""
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        parts = {peer: torch.empty_like(tensor) for peer in peers}
        exchange = self.start([(peer, tensor) for peer in peers], list(parts.items()))
        return _SumInOrder(exchange, tensor, parts, self.rank)

    def _pair(self, peer: int) -> Any:
        """Return the group of two with `peer`; made at the first call, which waits for the peer's."""
        group = self._pairs.get(peer)
        if group is not None:
            return group
        self.check_peer(peer)
        signal = torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.backend == "gloo":
            # Making a group can't be interrupted, this can.
            self._post(lambda: self._shake_hands(peer, signal)).wait()
        low, high = sorted((self.rank, peer))
        with self._sockets.watch():
            group = self._make_group(f"pair/{low}-{high}", int(self.rank == high), 2)
        if self._reason is not None:
            self._interrupt()
        self._pairs[peer] = group
        return group

    def _shake_hands(self, peer: int, signal: Tensor) -> list[tuple[str, Any]]:
        return [
            (f"connecting to rank {peer}", self._group.recv([signal], peer, _HANDSHAKE_TAG)),
            (f"connecting to rank {peer}", self._group.send([signal], peer, _HANDSHAKE_TAG)),
        ]

    def _make_group(self, name: str, rank: int, size: int) -> Any:
        member = Member(PrefixStore(f"{name}/", self._store), rank, size, name)
        try:
            return make_group(member, backend=self.backend, device=self.device, gloo=self._gloo)
        except RuntimeError as error:
            raise self._failure(f"the connecting of group {name!r}", error) from error

    def _interrupt(self) -> None:
        """Make all waits return now."""
        if self.backend == "gloo":
            self._sockets.shut_down()
            return
        for group in (self._group, *self._pairs.values()):
            if hasattr(group, "abort"):
                group.abort()

    def _failure(self, what: str, error: RuntimeError) -> Exception:
        """Return what to raise after the backend failed in `what`."""
        if self._reason is not None:
            return self._reason
        if self._lost is None:
            self._lost = WorkerLostError(
                f"rank {self.rank}: lost the connection to another worker during {what}: "
                f"{_first_words(error)}."
            )
            self._lost.__cause__ = error
            self._interrupt()
        return self._lost

    def _finished(self) -> None:
        self._num_pending -= 1

    def leave_to_parent(self) -> None:
        """In a forked child: keep nothing of the connections open, and never run the groups' destructors.

        The destructors would wait for threads that exist only in the parent.
        """
        self._sockets.close_in_child()
        self._reason = TransportError(f"rank {self.rank}: a forked child can't use its parent's transport.")
        self._num_pending = 0
        for each in (self._group, self._gloo, *self._pairs.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _first_words(error: RuntimeError) -> str:
    """Return what the backend says has happened, without where in its source and what to do about it."""
    line = re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0])
    return line.partition("This is typically")[0].strip().rstrip(".")


class _Posted:
    """Operations of a process group that were posted together."""

    def __init__(self, owner: ProcessGroupTransport, works: list[tuple[str, Any]]) -> None:
        self._owner = owner
        self._works: list[tuple[str, Any]] | None = works

    def wait(self) -> None:
        owner = self._owner
        if self._works is None:
            return
        if owner._reason is not None:
            raise owner._reason
        for what, work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise owner._failure(what, error) from error
        self._works = None
        owner._finished()


class _SumInOrder:
    """An exchange of everybody with everybody, followed by additions in the order of ranks."""

    def __init__(self, exchange: Work, tensor: Tensor, parts: dict[int, Tensor], rank: int) -> None:
        self._exchange = exchange
        self._tensor = tensor
        self._parts = parts
        self._rank = rank

    def wait(self) -> None:
        self._exchange.wait()
        if not self._parts:
            return
        parts = {**self._parts, self._rank: self._tensor.clone()}
        self._tensor.copy_(parts[0])
        for rank in range(1, len(parts)):
            self._tensor.add_(parts[rank])
        self._parts = {}


def _tag(tensor: Tensor) -> int:
    return tensor.nbytes % _HANDSHAKE_TAG
