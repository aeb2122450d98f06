"""That all workers start from the same model: compared in structure, sent from rank 0, and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from unisono.collectives.broadcast import broadcast
from unisono.collectives.execute import execute
from unisono.collectives.gather import gather_bytes, gather_rows
from unisono.errors import MismatchError, UsageError
from unisono.fingerprints import digest_of
from unisono.gradients.parameters import Optimizers, named_parameters
from unisono.transport.base import Transport

CHUNK_BYTES = 64 * 2**20


def share_initial_state(
    model: nn.Module,
    optimizers: Optimizers,
    transport: Transport,
    *,
    device: torch.device,
    settings: Sequence[str] = (),
) -> None:
    """Give every worker rank 0's parameters, the optimizers' own too, and buffers, non-persistent ones too.

    *Collective: every rank calls this, in the same order.* Sends a few large messages, not one a parameter.

    Args:
        settings: what else must be the same on all workers, in words.

    Raises:
        UsageError: a parameter is on another device than the run, or has no shape or memory yet.
        MismatchError: workers built different models or optimizers; names the first difference.
    """
    _check_usable(model, optimizers, device)
    check_same([*settings, *describe(model, optimizers)], transport)
    if transport.world_size == 1:
        return
    named = [*named_parameters(model, optimizers), *model.named_buffers()]
    for chunk in _chunks([tensor for _, tensor in named]):
        _broadcast(chunk, transport)
    digest = int.from_bytes(digest_of(named).digest()[:8], "little") >> 1
    differing = _ranks_that_differ(digest, transport)
    if differing:
        raise MismatchError(
            f"ranks {differing} don't hold the weights that rank 0 sent: do two of their tensors share memory?"
        )


def describe(model: nn.Module, optimizers: Optimizers) -> list[str]:
    """Return what must be equal on all workers, a line each, in order."""
    parameters = list(named_parameters(model, optimizers))
    names = {id(parameter): name for name, parameter in parameters}
    lines = []
    for kind, named in (("parameter", parameters), ("buffer", model.named_buffers())):
        for name, tensor in named:
            frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
            layout = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
            lines.append(f"{kind} {name!r} is {tensor.dtype} {list(tensor.shape)}{layout}{frozen}")
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    lines.append(f"the optimizer is {kinds or 'none'}")
    for number, group in enumerate(group for optimizer in optimizers for group in optimizer.param_groups):
        settings = ", ".join(
            f"{key}={value.item() if isinstance(value, Tensor) and value.numel() == 1 else value}"
            for key, value in sorted(group.items())
            if key != "params" and isinstance(value, (int, float, str, bool, tuple, Tensor, type(None)))
        )
        members = [names[id(parameter)] for parameter in group["params"]]
        lines.append(f"optimizer group {number} has {settings}, parameters {', '.join(members)}")
    return lines


def check_same(lines: Sequence[str], transport: Transport) -> None:
    """Raise the same `MismatchError` on every rank unless `lines` are the same everywhere. *Collective.*"""
    text = "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    differing = _ranks_that_differ(digest, transport)
    if not differing:
        return
    texts = gather_bytes(transport, {transport.rank: text}, transport.world_size)
    expected, found = (texts[rank].decode().split("\n") for rank in (0, differing[0]))
    at = next(
        (at for at, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(found)),
    )
    ours, theirs = (some[at] if at < len(some) else "nothing more" for some in (expected, found))
    raise MismatchError(
        f"rank {differing[0]} built something else than rank 0. The first difference: on rank 0 {ours}; on rank "
        f"{differing[0]} {theirs}. Join the run and build model and optimizer the same way on every rank."
    )


def _ranks_that_differ(digest: int, transport: Transport) -> list[int]:
    """Return the ranks whose `digest` is not rank 0's. *Collective.*"""
    table = torch.zeros(transport.world_size, 1, dtype=torch.int64)
    table[transport.rank, 0] = digest
    gather_rows(transport, table)
    digests = table[:, 0].tolist()
    return [rank for rank, other in enumerate(digests) if other != digests[0]]


def _check_usable(model: nn.Module, optimizers: Optimizers, device: torch.device) -> None:
    for name, parameter in named_parameters(model, optimizers):
        if is_lazy(parameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet: run the model on one sample before run.replicate."
            )
        if parameter.is_meta:
            raise UsageError(
                f"parameter {name!r} is on the meta device and has no memory: give the model memory and initial "
                f"values, such as with model.to_empty(device=run.device), before run.replicate."
            )
        if parameter.device.type != device.type or (
            None not in (parameter.device.index, device.index) and parameter.device.index != device.index
        ):
            raise UsageError(
                f"parameter {name!r} is on {parameter.device}, this worker's device is {device}: move the model "
                f"with model.to(run.device) before run.replicate."
            )


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of about `CHUNK_BYTES` in all; a larger one is a group of its own."""
    group: list[Tensor] = []
    group_bytes = 0
    for tensor in tensors:
        group.append(tensor)
        group_bytes += tensor.numel() * tensor.element_size()
        if group_bytes >= CHUNK_BYTES:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group


def _broadcast(tensors: Sequence[Tensor], transport: Transport) -> None:
    """Overwrite `tensors` with rank 0's. *Collective.* *In place.*"""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if not sum(sizes):
        return
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=transport.device)
    pieces = torch.split(whole, sizes)
    root = transport.rank == 0
    with torch.no_grad():
        if root:
            for piece, tensor in zip(pieces, tensors, strict=True):
                piece.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        execute(broadcast(transport.world_size), transport, {"value": whole} if root else {}, out=whole)
        if not root:
            for piece, tensor in zip(pieces, tensors, strict=True):
                # A fresh tensor, because a piece may start at an address its type can't be read from.
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                value.reshape(-1).view(torch.uint8).copy_(piece)
                _overwrite(tensor, value)


def _overwrite(tensor: Tensor, value: Tensor) -> None:
    """Copy `value` to `tensor`, of which several elements may be one in memory (``expand``). In place."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)
