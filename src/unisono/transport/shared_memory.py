"""A transport for CPU tensors of workers on one host, which see each other's memory.

What is small travels inline, over one unix socket for each pair. What is large lies in memory files whose
descriptors travel once; after that a message only says that it is there. A wait blocks in the kernel, for the
peer's next message or for the end of the connection, which comes at once when a peer dies.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.errors import MismatchError, TransportError, WorkerLostError
from unisono.transport.base import Transport, Work, check_contiguous
from unisono.transport.forks import close_in_forked_children
from unisono.transport.local import Aborted
from unisono.transport.memory_files import CommonMemory, Descriptor, map_memory, new_memory
from unisono.transport.pair_sockets import connect_pairs
from unisono.transport.posted_sums import PostedSums

_HEADER = struct.Struct("<BBqq")
"""Kind of packet, channel, and two numbers, according to the kind."""
_INLINE, _FILED, _FILE, _NAME, _DROP, _COMMON = range(6)
"""A message (bytes); a message in a file (bytes); a file to keep (number, bytes); a name for one
(number, bytes; then dtype and name); the end of a file (number); a file that all may write (0, bytes). Files follow
in a packet of their own."""
_MESSAGES, _SUMS = 0, 1
"""Channels, within which packets keep their order."""
_INLINE_BYTES = 32 * 1024
_ALIGNMENT = 64
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


@dataclass(slots=True)
class _Packet:
    """What is sent at one go."""

    parts: list[Any]
    descriptor: Descriptor | None = None
    is_gone: bool = False


@dataclass(slots=True)
class _Receipt:
    """A tensor that a message is expected for."""

    tensor: Tensor
    is_done: bool = False
    error: Exception | None = None


@dataclass(slots=True)
class _Link:
    """One peer.

    Args:
        unsent: packets that the socket did not take yet.
        arrived: for each channel messages that nobody has asked for yet.
        expected: for each channel tensors that were asked for and have not come.
        files: the peer's files, by number.
        names: what lies in them, by name.
        common: what it made for all, and nobody has asked for yet.
        announced: a packet whose descriptor comes next: kind, channel, number, bytes.
        lost: why the peer is gone.
    """

    rank: int
    socket: socket.socket
    unsent: deque[_Packet] = field(default_factory=deque)
    arrived: tuple[deque[Tensor], ...] = field(default_factory=lambda: (deque(), deque()))
    expected: tuple[deque[_Receipt], ...] = field(default_factory=lambda: (deque(), deque()))
    files: dict[int, Tensor] = field(default_factory=dict)
    names: dict[str, Tensor] = field(default_factory=dict)
    common: deque[CommonMemory] = field(default_factory=deque)
    announced: tuple[int, int, int, int] | None = None
    lost: str | None = None


@dataclass(slots=True)
class _Buffer:
    """A buffer of this rank's."""

    number: int
    tensor: Tensor


class SharedMemoryTransport(Transport):
    """One rank's end of a group of workers on one host.

    A peer that is lost is an error only for who waits for it.

    Args:
        store: a ``torch.distributed.Store`` that all ranks share, with fresh keys.
        rank: this worker.
        world_size: how many there are.
        ranks: those that are on this host, if not all; it connects only them.
        timeout_s: how long to wait for all ranks to come.

    Raises:
        DeadlineError: not all ranks came in time; says who is missing.
        TransportError: a rank is gone already.
    """

    survives_lost_peer = True

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.ranks = tuple(range(world_size) if ranks is None else ranks)
        self.hosts = (self.ranks,)
        self._reason: Exception | None = None
        sockets = connect_pairs(store, rank, self.ranks, timeout_s=timeout_s)
        self._links = {peer: _Link(peer, sockets[peer]) for peer in sorted(sockets)}
        self._by_descriptor = {link.socket.fileno(): link for link in self._links.values()}
        self._num_unsent = 0
        self._bytes = bytearray(_HEADER.size + _INLINE_BYTES)
        self._payload = torch.frombuffer(self._bytes, dtype=torch.uint8)[_HEADER.size :]
        self._buffers: dict[str, _Buffer] = {}
        self._by_address: dict[int, _Buffer] = {}
        self._named: dict[str, int] = {}
        self._num_files = 0
        self._sums = PostedSums(self._sum)
        self._num_sums = 0
        self._sum_bytes = 1
        close_in_forked_children(self)

    # --- the contract

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Work:
        for peer, tensor in (*sends, *receives):
            self.check_peer(peer)
            check_contiguous(tensor)
        if self._reason is not None:
            return Aborted(self._reason)
        return self._exchange(_MESSAGES, sends, receives)

    def all_reduce(self, tensor: Tensor) -> Work:
        check_contiguous(tensor)
        if self._reason is not None:
            return Aborted(self._reason)
        return self._sums.post(tensor)

    def maps(self, peer: int) -> bool:
        return peer in self._links

    def allocate(self, key: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is not None:
            if buffer.tensor.numel() == num_elements and buffer.tensor.dtype == dtype:
                self._name(key, buffer)
                return buffer.tensor
            self._drop(buffer)
        num_bytes = num_elements * dtype.itemsize
        number, self._num_files = self._num_files, self._num_files + 1
        descriptor, memory = new_memory(max(num_bytes, 1))
        self._tell_all([_HEADER.pack(_FILE, 0, number, memory.numel())])
        self._tell_all([b"\0"], descriptor)
        buffer = self._buffers[key] = _Buffer(number, memory[:num_bytes].view(dtype))
        self._by_address[memory.data_ptr()] = buffer
        self._name(key, buffer)
        return buffer.tensor

    def publish(self, key: str, tensor: Tensor) -> bool:
        buffer = self._by_address.get(tensor.data_ptr())
        if buffer is None or buffer.tensor.numel() != tensor.numel():
            return False
        self._name(key, buffer)
        return True

    def peer_view(self, peer: int, key: str) -> Tensor | None:
        return self._links[peer].names.get(key)

    def common_memory(self, num_bytes: int) -> CommonMemory:
        signal, leader = torch.empty(0), self.ranks[0]
        if self.rank != leader:
            self.start([], [(leader, signal)]).wait()
            return self._links[leader].common.popleft()
        descriptor, _ = new_memory(num_bytes)
        self._tell_all([_HEADER.pack(_COMMON, 0, 0, num_bytes)])
        self._tell_all([b"\0"], descriptor)
        self.start([(peer, signal) for peer in self._links], []).wait()
        return CommonMemory(descriptor.number, num_bytes)

    def abort(self, reason: Exception) -> None:
        if self._reason is None:
            self._reason = reason
        for link in self._links.values():
            with suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort(TransportError(f"rank {self.rank}: the transport is closed."))
        for link in self._links.values():
            link.socket.close()
            link.files.clear()
            link.names.clear()
        self._buffers.clear()
        self._by_address.clear()

    # --- buffers

    def _name(self, key: str, buffer: _Buffer) -> None:
        """Tell the peers, if they don't know, that `key` is the name of `buffer`."""
        if self._named.get(key) == buffer.number:
            return
        self._named[key] = buffer.number
        dtype = str(buffer.tensor.dtype).removeprefix("torch.")
        header = _HEADER.pack(_NAME, 0, buffer.number, buffer.tensor.nbytes)
        self._tell_all([header, f"{dtype} {key}".encode()])

    def _drop(self, buffer: _Buffer) -> None:
        self._named = {key: number for key, number in self._named.items() if number != buffer.number}
        self._by_address = {at: each for at, each in self._by_address.items() if each is not buffer}
        self._tell_all([_HEADER.pack(_DROP, 0, buffer.number, 0)])

    def _tell_all(self, parts: list[Any], descriptor: Descriptor | None = None) -> None:
        for link in self._links.values():
            self._push(link, _Packet(parts, descriptor))

    # --- sending

    def _exchange(
        self, channel: int, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> _Transfers:
        expected = [(self._links[peer], _Receipt(tensor)) for peer, tensor in receives]
        for link, receipt in expected:
            self._expect(link, channel, receipt)
        return _Transfers(self, [self._send(channel, *each) for each in sends], expected)

    def _send(self, channel: int, peer: int, tensor: Tensor) -> tuple[_Link, _Packet]:
        link = self._links[peer]
        num_bytes = tensor.nbytes
        if num_bytes <= _INLINE_BYTES:
            parts: list[Any] = [_HEADER.pack(_INLINE, channel, num_bytes, 0)]
            if num_bytes:
                parts.append(_bytes_of(tensor).numpy())
            packet = _Packet(parts)
            self._push(link, packet)
            return link, packet
        descriptor, memory = new_memory(num_bytes)
        memory.copy_(_bytes_of(tensor))
        self._push(link, _Packet([_HEADER.pack(_FILED, channel, num_bytes, 0)]))
        packet = _Packet([b"\0"], descriptor)
        self._push(link, packet)
        return link, packet

    def _push(self, link: _Link, packet: _Packet) -> None:
        """Send a packet now, or as soon as the socket takes it."""
        if not link.unsent and self._try(link, packet):
            return
        link.unsent.append(packet)
        self._num_unsent += 1

    def _try(self, link: _Link, packet: _Packet) -> bool:
        """Return whether nothing is left to do for a packet."""
        if link.lost is None:
            try:
                if packet.descriptor is None:
                    link.socket.sendmsg(packet.parts, (), _FLAGS)
                else:
                    socket.send_fds(link.socket, packet.parts, [packet.descriptor.number], _FLAGS)
            except BlockingIOError:
                return False
            except OSError as error:
                # What the peer sent before it left can still be read.
                if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                    raise
        packet.is_gone = True
        return True

    def _flush(self, link: _Link) -> None:
        while link.unsent and self._try(link, link.unsent[0]):
            link.unsent.popleft()
            self._num_unsent -= 1

    # --- receiving

    def _expect(self, link: _Link, channel: int, receipt: _Receipt) -> None:
        if link.arrived[channel] and not link.expected[channel]:
            self._deliver(link, receipt, link.arrived[channel].popleft())
        else:
            link.expected[channel].append(receipt)

    def _deliver(self, link: _Link, receipt: _Receipt, content: Tensor) -> None:
        receipt.is_done = True
        if content.numel() != receipt.tensor.nbytes:
            receipt.error = MismatchError(
                f"rank {self.rank}: received {content.numel()} bytes from rank {link.rank}, expected "
                f"{receipt.tensor.nbytes}: the ranks disagree on what is sent."
            )
        elif content.numel():
            _bytes_of(receipt.tensor).copy_(content)

    def progress(self, link: _Link) -> None:
        """Wait until something came from a peer, or something went that could not go before. *Blocking.*"""
        if self._reason is not None:
            raise self._reason
        if not self._num_unsent:
            if link.lost is not None:
                raise WorkerLostError(f"rank {self.rank}: lost rank {link.rank}: {link.lost}.")
            self._read(link)
            return
        poller = select.poll()
        for each in self._links.values():
            if each.lost is None:
                poller.register(each.socket, select.POLLIN | (select.POLLOUT if each.unsent else 0))
        if link.lost is not None and not link.unsent:
            raise WorkerLostError(f"rank {self.rank}: lost rank {link.rank}: {link.lost}.")
        for descriptor, event in poller.poll():
            each = self._by_descriptor[descriptor]
            if event & select.POLLOUT:
                self._flush(each)
            if event & ~select.POLLOUT:
                self._read(each)

    def _read(self, link: _Link) -> None:
        """Take one packet from a peer. *Blocking.*"""
        try:
            if link.announced is not None:
                self._read_file(link, link.announced)
                return
            length = link.socket.recv_into(self._bytes)
        except ConnectionResetError:  # it left without reading all; what it sent comes next
            return
        except OSError:
            length = 0
        if self._reason is not None:
            raise self._reason
        if not length:
            self._lose(link)
            return
        kind, channel, first, second = _HEADER.unpack_from(self._bytes)
        if kind == _INLINE:
            self._take(link, channel, self._payload[:first], is_lent=True)
        elif kind == _FILED:
            link.announced = (kind, channel, 0, first)
        elif kind in (_FILE, _COMMON):
            link.announced = (kind, channel, first, second)
        elif kind == _NAME:
            dtype, _, name = bytes(self._bytes[_HEADER.size : length]).decode().partition(" ")
            link.names[name] = link.files[first][:second].view(getattr(torch, dtype))
        else:
            link.files.pop(first, None)

    def _read_file(self, link: _Link, announced: tuple[int, int, int, int]) -> None:
        kind, channel, number, num_bytes = announced
        data, descriptors, _, _ = socket.recv_fds(link.socket, 1, 1)
        if not data:
            self._lose(link)
            return
        link.announced = None
        try:
            if not descriptors:
                raise OSError("no descriptor came")
            if kind == _COMMON:
                link.common.append(CommonMemory(descriptors[0], num_bytes))
                return
            memory = map_memory(descriptors[0], num_bytes)
        except OSError as error:
            raise TransportError(
                f"rank {self.rank}: memory of rank {link.rank} can't be mapped ({error}): raise the limits of open "
                f"files (ulimit -n) and of memory."
            ) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if kind == _FILE:
            link.files[number] = memory
        else:
            self._take(link, channel, memory, is_lent=False)

    def _take(self, link: _Link, channel: int, content: Tensor, *, is_lent: bool) -> None:
        if link.expected[channel]:
            self._deliver(link, link.expected[channel].popleft(), content)
        else:
            link.arrived[channel].append(content.clone() if is_lent else content)

    def _lose(self, link: _Link) -> None:
        link.lost = "its connection closed"
        self._num_unsent -= len(link.unsent)
        link.unsent.clear()

    # --- sums

    def _sum(self, tensor: Tensor) -> None:
        if tensor.nbytes <= _INLINE_BYTES:
            self._sum_small(tensor)
        else:
            self._sum_large(tensor)

    def _sum_small(self, tensor: Tensor) -> None:
        """Everybody sends all to all, and adds in the order of ranks."""
        parts = {peer: torch.empty_like(tensor) for peer in self._links}
        sends = [(peer, tensor) for peer in self._links]
        self._exchange(_SUMS, sends, list(parts.items())).wait()
        if len(parts) == 1:
            tensor.add_(*parts.values())
        elif parts:
            parts[self.rank] = tensor.clone()
            first, *others = self.ranks
            tensor.copy_(parts[first])
            for rank in others:
                tensor.add_(parts[rank])

    def _sum_large(self, tensor: Tensor) -> None:
        """Each rank sums its part in its own memory, where the others read it.

        There are two buffers, in turn: who is in the next sum has read all of this one.
        """
        slot = f"#sum{self._num_sums % 2}"
        self._num_sums += 1
        self._sum_bytes = max(self._sum_bytes, 1 << (tensor.nbytes - 1).bit_length())
        whole = self.allocate(slot, self._sum_bytes, torch.uint8)
        flat = tensor.reshape(-1)
        mine = whole[: tensor.nbytes].view(tensor.dtype).copy_(flat)
        self._meet()
        views = {}
        for peer in self._links:
            view = self.peer_view(peer, slot)
            assert view is not None, "a rank comes to a sum after it named its buffer"
            views[peer] = view[: tensor.nbytes].view(tensor.dtype)
        own = self._part(flat, self.rank)
        for view in views.values():
            mine[own].add_(view[own])
        self._meet()
        flat[own].copy_(mine[own])
        for peer, view in views.items():
            part = self._part(flat, peer)
            flat[part].copy_(view[part])

    def _part(self, flat: Tensor, rank: int) -> slice:
        size = -(-flat.numel() // (len(self.ranks) * _ALIGNMENT)) * _ALIGNMENT
        place = self.ranks.index(rank)
        return slice(place * size, (place + 1) * size)

    def _meet(self) -> None:
        signal = self._payload[:0]
        signals = [(peer, signal) for peer in self._links]
        self._exchange(_SUMS, signals, signals).wait()

    def leave_to_parent(self) -> None:
        """In a forked child: hold no connection open, without ending any."""
        self._reason = TransportError(f"rank {self.rank}: a forked child can't use its parent's transport.")
        for link in self._links.values():
            link.socket.close()


class _Transfers:
    """The messages of one `start`."""

    def __init__(
        self,
        owner: SharedMemoryTransport,
        sent: list[tuple[_Link, _Packet]],
        expected: list[tuple[_Link, _Receipt]],
    ) -> None:
        self._owner = owner
        self._sent = sent
        self._expected = expected

    def wait(self) -> None:
        for link, receipt in self._expected:
            while not receipt.is_done:
                self._owner.progress(link)
            if receipt.error is not None:
                raise receipt.error
        for link, packet in self._sent:
            while not packet.is_gone:
                self._owner.progress(link)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
