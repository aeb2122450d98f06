"""Parameters of which the CPU workers of a host have one copy between them.

Every worker maps that copy twice. The view that all write to is used by the update alone, in which each worker
writes its own part. The parameters themselves are a private view: it shows the same memory, but what a script
writes to it stays in pages of its own worker, as if each had a copy. The kernel tells which pages those are. At the
next update the workers compare what was written in this way: what is alike becomes part of the common copy, what is
not is an error. So it makes no difference to a script that its parameters are shared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.allocator import give_back_freed_memory
from unisono.collectives.gather import gather_rows
from unisono.errors import MismatchError, UsageError
from unisono.gradients.changes import first_of, sum_of_bits
from unisono.gradients.layout import flat, is_dense, padded
from unisono.transport.base import Transport
from unisono.transport.memory_files import CommonMemory, can_tell_written_pages, page_bytes

_OWNERS_OF_STORAGE = 2
"""How many hold a tensor's memory, as torch counts, if no other tensor does."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one parameter lies in the common memory.

    Args:
        shared: the parameter as the update writes it.
    """

    start: int
    stop: int
    shared: Tensor


class SharedParameters:
    """The parameters that the workers of this host share, and how they stay the same for all of them.

    Shared are dense CPU tensors whose memory no other tensor uses, of workers that see each other's memory, on a
    system that tells which pages a process has written. All others are left alone.

    Args:
        transport: connects all workers.
        wanted: returns the parameters to share, if they can be; in the same order on all workers.
        is_taken: says whether a parameter is shared already, by others.
        name_of: returns the name of a parameter.
        share: None shares what can be shared, True refuses to leave one alone that is wanted, False shares none.

    Raises:
        UsageError: workers don't see each other's memory, and have to.
    """

    def __init__(
        self,
        transport: Transport,
        wanted: Callable[[], Sequence[nn.Parameter]],
        *,
        is_taken: Callable[[nn.Parameter], bool],
        name_of: Callable[[nn.Parameter], str],
        share: bool | None = None,
    ) -> None:
        self._transport = transport
        self._wanted = wanted
        self._is_taken = is_taken
        self._name_of = name_of
        self._required = share is True
        near = [ranks for ranks in transport.hosts if transport.rank in ranks]
        self._near = near[0] if near else ()
        sees_others = any(len(ranks) > 1 for ranks in transport.hosts)
        self._is_possible = sees_others and share is not False
        self._memory: CommonMemory | None = None
        self._places: dict[nn.Parameter, _Place] = {}
        # Where shared parameters lie in the private view of this worker; None for those that were left alone.
        self._known: dict[nn.Parameter, int | None] = {}
        self._has_strays = False
        if share and transport.world_size > 1 and not sees_others:
            raise UsageError(
                "share_parameters=True: workers have to be on one host, with CPU tensors, and to see each other's "
                "memory; leave it out, which shares where it can be done."
            )

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._places

    def shared(self, parameter: nn.Parameter) -> Tensor | None:
        """Return what the update is to write in place of a parameter, of its shape; None if it is not shared."""
        place = self._places.get(parameter)
        return None if place is None else place.shared

    def place(self) -> None:
        """Share what is wanted and can be shared. *Collective.* *Blocking.* Costs a copy of all of it.

        Raises:
            MismatchError: parameters don't have the same values on all workers.
            UsageError: one can't be shared and has to be.
        """
        if not self._is_possible:
            return
        wanted = list(dict.fromkeys(self._wanted()))
        reasons = [self._reason_not_to_share(parameter) for parameter in wanted]
        table = torch.zeros(self._transport.world_size, 1 + len(wanted), dtype=torch.int64)
        digests = [
            1 + sum_of_bits([parameter]) // 2 if reason is None else 0
            for parameter, reason in zip(wanted, reasons, strict=True)
        ]
        table[self._transport.rank] = torch.tensor([can_tell_written_pages(), *digests])
        gather_rows(self._transport, table)
        self._is_possible = bool(table[:, 0].all())
        able = table[:, 1:].all(0)
        differs = able & (table[:, 1:] != table[0, 1:]).any(0)
        chosen = [p for p, is_able in zip(wanted, able.tolist(), strict=True) if is_able]
        if self._required:
            self._refuse(wanted, reasons, set(chosen))
        if not self._is_possible:
            return
        if differs.any():
            names = [self._name_of(wanted[at]) for at in differs.nonzero().flatten().tolist()]
            raise MismatchError(
                f"{first_of(names)} have other values on some workers than on others, since they were given other "
                f"memory, such as through .data: give them the same on all workers."
            )
        self._move(chosen)
        self._known = {p: p.data_ptr() if p in self._places else None for p in wanted}

    def begin(self) -> None:
        """Start an update, once nobody reads any more. *Collective.* *Blocking.*

        What was written since the last one becomes part of the common copy.

        Raises:
            MismatchError: it is not alike on all workers; names what was written on this one. Nothing was changed.
        """
        if not self._is_possible:
            return
        strays = self._strays()
        table = torch.zeros(self._transport.world_size, 2, dtype=torch.int64)
        table[self._transport.rank] = torch.tensor([self._digest(strays), self._has_moved()])
        gather_rows(self._transport, table)
        digests = table[:, 0].tolist()
        if len(set(digests)) > 1:
            here = first_of(map(self._name_of, strays)) or "none"
            raise MismatchError(
                f"parameters were written between steps, and not alike on all workers. On this rank: {here}; with "
                f"rank 0 agree ranks {[rank for rank, each in enumerate(digests) if each == digests[0]]}. Write "
                f"the same on every worker."
            )
        if table[:, 1].any():
            self.place()
        elif any(digests):
            if self._transport.rank == self._near[0]:
                assert self._memory is not None, "what has strayed lies in memory"
                for place in (self._places[parameter] for parameter in strays):
                    self._memory.shared[place.start : place.stop] = self._memory.own[place.start : place.stop]
            self.meet()

    def end(self) -> None:
        """End an update: all see what all have written. *Collective among the workers of a host.* *Blocking.*"""
        if not self._places:
            return
        self.meet()
        if self._has_strays:
            assert self._memory is not None, "what has strayed lies in memory"
            self._memory.drop_written()

    def meet(self) -> None:
        """Return once all workers of this host have come here. *Blocking.*"""
        signal = torch.empty(0, dtype=torch.uint8)
        signals = [(peer, signal) for peer in self._near if peer != self._transport.rank]
        self._transport.start(signals, signals).wait()

    def close(self) -> None:
        """Share nothing any more; the parameters stay as they are."""
        self._is_possible = False
        self._places, self._known, self._memory = {}, {}, None

    # --- moving in

    def _reason_not_to_share(self, parameter: nn.Parameter) -> str | None:
        if parameter.layout != torch.strided or parameter.device.type != "cpu" or not is_dense(parameter):
            return "it is no dense tensor of a CPU"
        if not parameter.numel():
            return "it is empty"
        if self._is_taken(parameter):
            return "another replica shares it already"
        # Through `detach`, `state_dict` or a view; it would not follow to where the parameter moves.
        if torch._C._storage_Use_Count(parameter.untyped_storage()._cdata) > _OWNERS_OF_STORAGE:
            return "another tensor uses its memory"
        return None

    def _refuse(
        self,
        wanted: Sequence[nn.Parameter],
        reasons: Sequence[str | None],
        chosen: Collection[nn.Parameter],
    ) -> None:
        """Raise a `UsageError` for the first parameter that has to be shared and can't be."""
        if not self._is_possible:
            raise UsageError(
                "share_parameters=True: the system of some worker doesn't tell which memory was written "
                "(/proc/self/pagemap); leave it out, which shares where it can be done."
            )
        for parameter, reason in zip(wanted, reasons, strict=True):
            if parameter not in chosen and parameter.numel():
                raise UsageError(
                    f"share_parameters=True: {self._name_of(parameter)!r} can't be shared: "
                    f"{reason or 'it can be here, but not on all workers'}. Leave it out, which shares what can be."
                )

    def _move(self, chosen: Sequence[nn.Parameter]) -> None:
        """Give parameters memory that all workers of the host share, with the values of the first of them."""
        for parameter in self._places.keys() - set(chosen):
            parameter.data = parameter.data.clone()
        self._places, self._memory, self._has_strays = {}, None, False
        num_bytes = sum(padded(parameter.nbytes) for parameter in chosen)
        if not num_bytes:
            return
        memory = self._transport.common_memory(num_bytes)
        assert memory is not None, "workers that map each other have common memory"
        places, offset = {}, 0
        leads = self._transport.rank == self._near[0]
        own = memory.own.numpy()
        for parameter in chosen:
            data = parameter.data
            start, stop = offset, offset + data.nbytes
            offset += padded(data.nbytes)
            shared = memory.shared[start:stop].view(data.dtype)
            if leads:
                shared.copy_(flat(data))
            # A storage of its own, so that what is saved or copied is the parameter alone.
            private = torch.frombuffer(own, dtype=data.dtype, offset=start, count=data.numel())
            layout = data.shape, data.stride()
            parameter.data = private.as_strided(*layout)
            places[parameter] = _Place(start, stop, shared.as_strided(*layout))
        self.meet()
        self._places, self._memory = places, memory
        give_back_freed_memory()

    # --- what has changed

    def _has_moved(self) -> bool:
        """Whether parameters came, or were given other memory."""
        return any(
            parameter not in self._known or self._known[parameter] not in (None, parameter.data_ptr())
            for parameter in self._wanted()
        )

    def _strays(self) -> list[nn.Parameter]:
        """Return the shared parameters that differ here from the common copy."""
        self._has_strays = False
        if self._memory is None:
            return []
        pages = self._memory.written_pages()
        self._has_strays = bool(pages)
        return list(self._differing(self._memory, pages)) if pages else []

    def _differing(self, memory: CommonMemory, pages: Sequence[int]) -> Iterator[nn.Parameter]:
        for parameter, place in self._places.items():
            at = bisect_left(pages, place.start // page_bytes())
            if at < len(pages) and pages[at] * page_bytes() < place.stop:
                area = slice(place.start, place.stop)
                if not torch.equal(memory.own[area], memory.shared[area]):
                    yield parameter

    def _digest(self, strays: Sequence[nn.Parameter]) -> int:
        """Return a number for which parameters have strayed to what values; 0 for none."""
        if not strays:
            return 0
        assert self._memory is not None, "what has strayed lies in memory"
        numbers = {parameter: number for number, parameter in enumerate(self._places)}
        which = torch.tensor([numbers[parameter] for parameter in strays])
        places = [self._places[parameter] for parameter in strays]
        return 1 + sum_of_bits([which, *(self._memory.own[each.start : each.stop] for each in places)]) // 2
