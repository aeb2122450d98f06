"""Running a schedule on a transport: what is done is in the one, how bytes move in the other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch import Tensor

from unisono.collectives.copied import CopiedExecution
from unisono.collectives.execution import Call
from unisono.collectives.mapped import MappedExecution, buffer_key
from unisono.collectives.schedule import Schedule
from unisono.collectives.scratch import Scratch
from unisono.errors import UsageError
from unisono.transport.base import Transport

__all__ = ["Scratch", "buffer_key", "execute"]


def execute(
    schedule: Schedule,
    transport: Transport,
    pieces: Mapping[Hashable, Tensor],
    *,
    out: Tensor | None = None,
    key: str | None = None,
    scale: float = 1.0,
    scratch: Scratch | None = None,
) -> Tensor:
    """Run `schedule` and return the flat tensor that holds its result, the same on every rank.

    *Collective: every rank calls this, in the same order.* *Blocking.*

    Args:
        schedule: made for this transport's world.
        transport: this rank's end of the group.
        pieces: for each piece that this rank holds at the start a flat, contiguous tensor; all of one size
            and dtype, the same on all ranks. They are overwritten.
        out: where the result goes; may be one of the pieces. Needed by a rank that holds no piece; else the
            memory of the first piece (or a buffer of the transport's, see `key`) is taken.
        key: names the buffers of this call if the transport maps peers' memory; without it nothing is
            mapped. Pieces that the transport has allocated need no copy.
        scale: what the result is multiplied with, rounded once.
        scratch: memory that is kept between calls.

    Raises:
        UsageError: the pieces are not those with which the schedule begins, or not alike.
        TransportError: bytes could not be moved.
    """
    _check(schedule, transport, pieces, out)
    mapped = key is not None and transport.maps_peers
    if out is None:
        first = next(iter(pieces.values()))
        out = first
        if mapped:
            out = transport.allocate(buffer_key(key or "", schedule.result), first.numel(), first.dtype)
    call = Call(schedule, transport, pieces, out, scale, Scratch() if scratch is None else scratch)
    (MappedExecution(call, key or "") if mapped else CopiedExecution(call)).run()
    return out


def _check(
    schedule: Schedule, transport: Transport, pieces: Mapping[Hashable, Tensor], out: Tensor | None
) -> None:
    """Raise a `UsageError` unless the arguments of `execute` fit together."""
    rank = transport.rank
    if schedule.world_size != transport.world_size:
        raise UsageError(
            f"rank {rank}: a schedule for {schedule.world_size} ranks can't run on {transport.world_size}."
        )
    expected = schedule.initial(rank)
    if len(pieces) != len(expected) or not all(piece in pieces for piece in expected):
        raise UsageError(
            f"rank {rank}: got the pieces {list(pieces)}, but schedule {schedule.name!r} begins with "
            f"{list(expected)} on this rank."
        )
    tensors = [*pieces.values()] if out is None else [*pieces.values(), out]
    if not tensors:
        raise UsageError(f"rank {rank}: holds no piece, so it must say with out= where the result goes.")
    for tensor in tensors:
        same = tensor.shape == tensors[0].shape and tensor.dtype == tensors[0].dtype
        if tensor.dim() != 1 or not tensor.is_contiguous() or not same:
            raise UsageError(
                f"rank {rank}: expected flat, contiguous tensors of one size and dtype, got "
                f"{[(tuple(each.shape), each.dtype) for each in tensors]}."
            )
