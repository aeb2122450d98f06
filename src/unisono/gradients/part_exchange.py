"""What the owner of parts of parameters has updated goes to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.gradients.layout import flat, is_dense, padded
from unisono.gradients.shares import Part
from unisono.transport.base import Transport

_Views = tuple[list[Tensor], list[Tensor]]


class PartExchange:
    """Sends every rank's parts to some of the others, packed into one buffer.

    Args:
        transport: connects all ranks.
        name: of the buffers, the same on all ranks.
        shares: the parts of each rank.
        tensor: returns the dense tensor of a parameter's number, whose parts are read here and written there.
        audience: returns the ranks that get an owner's parts.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        shares: Sequence[Sequence[Part]],
        tensor: Callable[[int], Tensor],
        audience: Callable[[int], Sequence[int]],
    ) -> None:
        self._transport = transport
        self._name = name
        self._shares = shares
        self._tensor = tensor
        self._sizes = [sum(padded(self._num_bytes(part)) for part in parts) for parts in shares]
        self._audiences = [audience(owner) if size else () for owner, size in enumerate(self._sizes)]
        self._kept: dict[int, tuple[object, _Views]] = {}

    def run(self, stepped: Sequence[bool]) -> None:
        """Send and receive the parts of those parameters that were stepped. *Collective.* *Blocking.*

        Nobody writes its buffer again before all have come to the next gradient, and so have read it.
        """
        transport, rank = self._transport, self._transport.rank
        sends, receives, arriving = [], [], {}
        signal = torch.empty(0, dtype=torch.uint8, device=transport.device)
        if self._audiences[rank]:
            packed = transport.allocate(self._name, self._sizes[rank], torch.uint8)
            places, parts = self._views(rank, packed, stepped)
            if parts:
                torch._foreach_copy_(places, parts)
            sends = [(peer, signal if transport.maps(peer) else packed) for peer in self._audiences[rank]]
        owners = [owner for owner, audience in enumerate(self._audiences) if rank in audience]
        for owner in owners:
            if transport.maps(owner):
                receives.append((owner, torch.empty_like(signal)))
            else:
                arriving[owner] = torch.empty(self._sizes[owner], dtype=torch.uint8, device=transport.device)
                receives.append((owner, arriving[owner]))
        if sends or receives:
            transport.start(sends, receives).wait()
        for owner in owners:
            buffer = arriving.get(owner)
            if buffer is None:
                buffer = transport.peer_view(owner, self._name)
                assert buffer is not None, "a peer names its buffer before it says that it is filled"
            places, parts = self._views(owner, buffer, stepped)
            if parts:
                torch._foreach_copy_(parts, places)

    def _num_bytes(self, part: Part) -> int:
        return (part.stop - part.start) * self._tensor(part.index).element_size()

    def _views(self, owner: int, buffer: Tensor, stepped: Sequence[bool]) -> _Views:
        """Return where an owner's updated parts lie in its buffer, and in the tensors here.

        Views cost microseconds each, so they are kept as long as nothing has moved.
        """
        addresses = [self._tensor(part.index).data_ptr() for part in self._shares[owner]]
        signature = (buffer.data_ptr(), addresses, stepped)
        kept = self._kept.get(owner)
        if kept is not None and kept[0] == signature:
            return kept[1]
        views = self._new_views(owner, buffer, stepped)
        self._kept[owner] = (signature, views)
        return views

    def _new_views(self, owner: int, buffer: Tensor, stepped: Sequence[bool]) -> _Views:
        places, parts, offset = [], [], 0
        for part in self._shares[owner]:
            num_bytes = self._num_bytes(part)
            if stepped[part.index] and num_bytes:
                tensor = self._tensor(part.index).detach()
                place = buffer[offset : offset + num_bytes].view(tensor.dtype)
                dense = is_dense(tensor)
                places.append(place if dense else place.view(tensor.shape))
                parts.append(flat(tensor)[part.start : part.stop] if dense else tensor)
            offset += padded(num_bytes)
        return places, parts
