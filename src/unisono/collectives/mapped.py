"""Executing a schedule where peers' memory can be read in place.

A piece that a peer must see lies in this rank's buffer of the name `buffer_key(key, piece)`. Sending is a
signal of 0 bytes that says "it is there now"; receiving gives a view of the peer's buffer, from which sums
are formed directly. Every piece formed has a buffer of its own, since a peer may still be reading the
operands, unless the schedule works in place. At the end each reader signals each owner that it is through, so
that no buffer is written again while someone reads it. Peers that can't be mapped (on another host) are sent
the bytes.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from unisono.collectives.execution import Call, Execution
from unisono.collectives.schedule import Add, Exchange, Receive, Send, Transfer
from unisono.errors import TransportError


def buffer_key(key: str, piece: Hashable) -> str:
    """Return under which name `piece` is looked for in a rank's memory."""
    return f"{key}/{piece}"


class MappedExecution(Execution):
    """Nothing travels but signals, except to peers that can't be mapped.

    Args:
        call: what to do.
        key: names the buffers. Two executions that run one after the other may share it.
    """

    def __init__(self, call: Call, key: str) -> None:
        super().__init__(call)
        self._key = key
        self._buffers: dict[Hashable, list[Tensor]] = {}
        self._visible: set[tuple[Hashable, int]] = set()
        self._views: dict[tuple[int, Hashable], list[Tensor]] = {}
        self._readers: set[int] = set()
        self._owners: set[int] = set()
        # Sums of others than the result are then seen by nobody, and those of the result lie in a piece.
        self._in_place = call.schedule.in_place and any(each is call.out for each in call.pieces.values())
        self._signal = torch.empty(0, dtype=torch.uint8, device=call.out.device)
        self._next_slot = 0

    def send(self, transfer: Send) -> None:
        tensor = self.held[transfer.piece, transfer.chunk]
        if self.transport.maps(transfer.peer):
            self._publish(transfer.piece, transfer.chunk)
            self._readers.add(transfer.peer)
            tensor = self._signal
        self.sends.append((transfer.peer, tensor))

    def receive(self, transfer: Receive) -> None:
        if self.transport.maps(transfer.peer):
            self.receives.append((transfer.peer, self._signal))
            return
        start, stop = self.bounds[transfer.chunk]
        if transfer.piece == self.result:
            tensor = self._buffer(transfer.piece)[transfer.chunk]
            self._visible.add((transfer.piece, transfer.chunk))
        else:
            self._next_slot += 1
            tensor = self.call.scratch.take(self._next_slot, stop - start, like=self.call.out)
        self.receives.append((transfer.peer, tensor))
        self.held[transfer.piece, transfer.chunk] = tensor

    def exchange(self, transfer: Exchange) -> None:
        self.send(Send(transfer.mine, transfer.chunk, transfer.peer))
        self.receive(Receive(transfer.theirs, transfer.chunk, transfer.peer))

    def arrived(self, transfer: Transfer) -> None:
        if isinstance(transfer, Send):
            return
        if isinstance(transfer, Receive):
            self._look(transfer.piece, transfer.chunk, transfer.peer)
            return
        chunk = transfer.chunk
        self._look(transfer.theirs, chunk, transfer.peer)
        self._add(Add(transfer.mine, transfer.theirs, transfer.out, chunk))

    def target(self, add: Add, left: Tensor, right: Tensor) -> Tensor:
        if self._in_place and add.out != self.result:
            self._next_slot += 1
            return self.call.scratch.take(self._next_slot, left.numel(), like=left)
        self._visible.add((add.out, add.chunk))
        return self._buffer(add.out)[add.chunk]

    def finish(self) -> None:
        self.copy_out()
        self.sends = [(peer, self._signal) for peer in sorted(self._owners)]
        self.receives = [(peer, self._signal) for peer in sorted(self._readers)]
        self._wait()

    def _look(self, piece: Hashable, chunk: int, peer: int) -> None:
        """Hold the peer's own memory, unless its bytes were sent."""
        if not self.transport.maps(peer):
            return
        views = self._views.get((peer, piece))
        if views is None:
            flat = self.transport.peer_view(peer, buffer_key(self._key, piece))
            if flat is None:
                raise TransportError(
                    f"rank {self.transport.rank}: rank {peer} said that {piece} is in its buffer "
                    f"{buffer_key(self._key, piece)!r}, but there is none: expected one that can be mapped."
                )
            views = self._views[peer, piece] = self.chunks(flat)
        self._owners.add(peer)
        self.held[piece, chunk] = views[chunk]

    def _publish(self, piece: Hashable, chunk: int) -> None:
        """See to it that a held piece lies where peers look for it."""
        if (piece, chunk) not in self._visible:
            whole = self.call.pieces.get(piece)
            if whole is not None and self.transport.publish(buffer_key(self._key, piece), whole):
                self._visible.update((piece, each) for each in range(len(self.bounds)))
                return
            self._visible.add((piece, chunk))
            held, shared = self.held[piece, chunk], self._buffer(piece)[chunk]
            if held.data_ptr() != shared.data_ptr():
                self.held[piece, chunk] = shared.copy_(held)

    def _buffer(self, piece: Hashable) -> list[Tensor]:
        """Return the chunks of this rank's buffer for `piece`."""
        chunks = self._buffers.get(piece)
        if chunks is None:
            out = self.call.out
            name = buffer_key(self._key, piece)
            if self._in_place and piece == self.result and self.transport.publish(name, out):
                self._buffers[piece] = self.out
                return self.out
            flat = self.transport.allocate(name, out.numel(), out.dtype)
            is_out = piece == self.result and flat.data_ptr() == out.data_ptr()
            chunks = self._buffers[piece] = self.out if is_out else self.chunks(flat)
        return chunks
