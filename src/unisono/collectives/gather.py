"""Small tables and byte strings of which every worker has a part and all get the whole.

Sums of integers are exact, so the backend's own all-reduce of zeros and one filled part is a gather. Meant
for facts about a step (weights, lengths, hashes), not for gradients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from unisono.errors import MismatchError, UsageError
from unisono.fingerprints import raw_bytes
from unisono.transport.base import Transport


def gather_rows(transport: Transport, table: Tensor) -> None:
    """Fill in the rows of `table` that other ranks have. *In place.* *Blocking.*

    *Collective: every rank calls this, in the same order.*

    Args:
        transport: this rank's end of the group.
        table: int64, contiguous, the same shape on all ranks; a row that another rank has must be zero here,
            and no row may be filled by two.
    """
    if transport.world_size == 1 or not table.numel():
        return
    if table.device == transport.device:
        transport.all_reduce(table).wait()
        return
    moved = table.to(transport.device)
    transport.all_reduce(moved).wait()
    table.copy_(moved)


def gather_bytes(transport: Transport, parts: Mapping[int, bytes], num_parts: int) -> list[bytes]:
    """Return all parts, in order, on every rank. *Blocking.*

    *Collective: every rank calls this, in the same order.*

    Args:
        transport: this rank's end of the group.
        parts: those of the parts 0 to num_parts-1 that this rank has. Each part is on exactly one rank.
        num_parts: how many there are on all ranks.

    Raises:
        UsageError: a part has a number outside the range.
        MismatchError: a part is on no rank, or on several.
    """
    wrong = [number for number in parts if not 0 <= number < num_parts]
    if wrong:
        raise UsageError(f"rank {transport.rank}: parts {wrong} are outside of 0 to {num_parts - 1}.")
    ends = _gather_sizes(transport, parts, num_parts).cumsum(0).tolist()
    if not ends or not ends[-1]:
        return [b""] * num_parts
    whole = torch.zeros(ends[-1], dtype=torch.uint8)
    for number, part in parts.items():
        if part:
            whole[ends[number] - len(part) : ends[number]] = torch.frombuffer(
                bytearray(part), dtype=torch.uint8
            )
    if transport.world_size > 1:
        moved = whole.to(transport.device)
        transport.all_reduce(moved).wait()
        whole = moved.cpu()
    data = whole.numpy().tobytes()
    return [data[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def gather_tensors(transport: Transport, parts: Mapping[int, Tensor], num_parts: int) -> list[Tensor]:
    """Return all parts, in order, on every rank, on the transport's device. *Blocking.*

    *Collective: every rank calls this, in the same order.* See `gather_bytes`; parts may be of any dtype and shape,
    and those that this rank has are returned as they are.
    """
    encoded = {number: _to_bytes(part) for number, part in parts.items()}
    received = gather_bytes(transport, encoded, num_parts)
    return [
        parts[number] if number in parts else _from_bytes(message, transport.device)
        for number, message in enumerate(received)
    ]


def _to_bytes(value: Tensor) -> bytes:
    header = json.dumps([str(value.dtype).removeprefix("torch."), list(value.shape)])
    return header.encode() + b"\n" + bytes(raw_bytes(value))


def _from_bytes(message: bytes, device: torch.device) -> Tensor:
    header, _, content = message.partition(b"\n")
    dtype, shape = json.loads(header)
    value = torch.empty(shape, dtype=getattr(torch, dtype))
    if content:
        value.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return value.to(device)


def _gather_sizes(transport: Transport, parts: Mapping[int, bytes], num_parts: int) -> Tensor:
    """Return the number of bytes of each part, int64 [num_parts]. *Collective.*"""
    table = torch.zeros(num_parts, 2, dtype=torch.int64)
    for number, part in parts.items():
        table[number, 0] = 1
        table[number, 1] = len(part)
    gather_rows(transport, table)
    counts, sizes = table.unbind(1)
    if counts.ne(1).any():
        numbers = counts.ne(1).nonzero().flatten().tolist()
        raise MismatchError(
            f"parts {numbers} of {num_parts} are on {counts[numbers].tolist()} ranks, expected one each: "
            f"the ranks disagree on who has what."
        )
    return sizes
