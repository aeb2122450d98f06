"""SyncBatchNorm in a step: one micro-batch a worker, normalized over the rows of all of them.

torch's own needs its default process group and an accelerator, and is a plain batch norm in silence where there
is no group. During the forward passes of a step, and only there, each `torch.nn.SyncBatchNorm` in training mode
computes here instead. Every exchange is a small header (what this rank is about to do, in which layer) and, if
all say the same, a table of float64 with a row for each micro-batch, which is added up in the order of the grid.
So all workers have the same bits, and one that took another branch is an error that says who is where.

A worker without rows (an empty micro-batch, none at all, or a step given up) takes part in whatever the others
do, until they rest: before their backward passes and after them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.collectives.gather import gather_rows
from unisono.errors import MismatchError, UsageError
from unisono.gradients.buffers import Others
from unisono.strategies.base import GlobalBatch
from unisono.strategies.joiner import Joiner


class _Doing(IntEnum):
    """What a rank is about to do, as its header says. 0 has no rows and does what the others do."""

    ABSENT = 0
    FORWARD = 1
    BACKWARD = 2
    REST = 3


_Header = tuple[_Doing, int, int]
"""What, in which layer, in the how-manieth forward call of this pass."""


class SyncBatchNorms:
    """All `torch.nn.SyncBatchNorm` layers of a model, and of `others` that run with it, at work in one replica.

    Cost per layer and pass, forward or backward: two small messages, 24 bytes a rank and 8 (2 C + 1) bytes a
    micro-batch for C channels; and two headers per step. Nothing if the model has no such layer.
    """

    def __init__(self, model: nn.Module, joiner: Joiner, others: Others) -> None:
        models = [("", model), *((place, other) for place, other, _ in others)]
        found = {
            id(module): (place + name, module)
            for place, each in reversed(models)
            for name, module in each.named_modules()
            if _is_synchronized(module)
        }
        named = list(found.values())
        self._names = [name or type(module).__name__ for name, module in named]
        self._layers = [cast(nn.SyncBatchNorm, module) for _, module in named]
        self._plain: list[Callable[..., Tensor]] = [
            partial(self._forward, index) for index in range(len(self._layers))
        ]
        self._hidden: list[Callable[..., Tensor]] = []
        self._joiner = joiner
        self._num_micro_batches = 1
        self._own: int | None = None
        self._step = 0
        self._misfit: str | None = None
        self._num_calls = 0
        self._anchors: dict[int, Tensor] = {}
        self._someone_differentiates = False
        self.exchanges = False
        """Whether layers of this step communicate, so that nothing else may meanwhile. The same on all ranks."""

    def begin(self, batch: GlobalBatch, *, step: int) -> None:
        """Start a step.

        Raises:
            UsageError: a worker has several micro-batches; nothing has run yet.
        """
        assignment = batch.assignment
        self._step = step
        self._num_micro_batches = assignment.num_micro_batches
        rank = self._joiner.transport.rank
        own = [number for number in assignment.micro_batches(rank) if batch.sizes[number]]
        self._own = own[0] if own else None
        self._misfit = None
        counts = [len(assignment.micro_batches(rank)) for rank in range(len(assignment.blocks))]
        if self._layers and max(counts) > 1:
            self._misfit = _misfit(counts, self._num_micro_batches)
        self.exchanges = bool(self._layers) and self._misfit is None and self._num_micro_batches > 1
        for name, layer in zip(self._names, self._layers, strict=True):
            if layer.training and self._misfit is not None:
                raise UsageError(f"step {step}: layer {name!r} {self._misfit}")

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Start a pass, in which the layers' forward is the one of this file."""
        self._num_calls = 0
        self._anchors.clear()
        self._someone_differentiates = False
        before = [layer.__dict__.get("forward") for layer in self._layers]
        for layer, forward in zip(self._layers, self._forwards(), strict=True):
            layer.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer, old in zip(self._layers, before, strict=True):
                if old is None:
                    del layer.forward
                else:
                    layer.forward = old  # type: ignore[method-assign]

    def rest(self, *, differentiates: bool = False) -> None:
        """Meet all others where no layer is at work; until then take part without rows if there are none.

        *Collective: every rank calls this, in the same order.*

        Args:
            differentiates: whether this rank is about to run backward.
        """
        if not self.exchanges:
            return
        while True:
            common = self._meet((_Doing.REST, 0, 0), differentiates=differentiates)
            if common[0] == _Doing.REST:
                return
            self._share(common, None)

    def give_up(self) -> None:
        """Take part in the rest of this step like a rank without rows."""
        self._own = None
        self._anchors.clear()

    def backward_nothing(self) -> None:
        """Run backward for a loss that doesn't count: its rows are in everybody's statistics all the same."""
        anchors = [anchor for _, anchor in sorted(self._anchors.items())]
        if anchors and self._someone_differentiates:
            torch.autograd.backward(anchors, [torch.zeros_like(anchor) for anchor in anchors])
        self._anchors.clear()

    def _forwards(self) -> list[Callable[..., Tensor]]:
        """Return what stands for each layer's forward; always the same objects, or `torch.compile` starts anew."""
        is_compiling = "torch._dynamo" in sys.modules  # importing it takes seconds
        if is_compiling and not self._hidden:
            hide = cast(Any, torch.compiler.disable)
            self._hidden = [hide(forward) for forward in self._plain]
        return self._hidden if is_compiling else self._plain

    def _forward(self, index: int, rows: Tensor) -> Tensor:
        layer = self._layers[index]
        if not layer.training:
            return type(layer).forward(layer, rows)
        if self._misfit is not None:
            raise UsageError(f"step {self._step}: layer {self._names[index]!r} {self._misfit}")
        if not self.exchanges:
            return _BatchNorm.forward(layer, rows)
        layer._check_input_dim(rows)
        if rows.size(1) != layer.num_features:
            raise UsageError(
                f"layer {self._names[index]!r}: found {rows.size(1)} channels in an input of shape "
                f"{list(rows.shape)}, expected {layer.num_features}."
            )
        self._num_calls += 1
        header = (_Doing.FORWARD, index, self._num_calls)
        total = self._exchange(header, _moments(rows.detach()))
        call = _Call(self, index, self._num_calls, float(total[0]))
        mean, squares = total[1:].chunk(2)
        _update_running_statistics(layer, mean, squares, call.num_values)
        statistics = torch.stack([mean, squares / max(call.num_values, 1)]).to(
            rows.device, _working_dtype(rows)
        )
        normalize = cast(Any, _Normalization.apply)
        normalized, anchor = normalize(rows, layer.weight, layer.bias, statistics, layer.eps, call)
        if anchor.requires_grad:
            self._anchors[call.number] = anchor
        return cast(Tensor, normalized)

    def exchange_backward(self, index: int, call: int, sums: Tensor) -> Tensor:
        """Return the total of `sums` over all micro-batches, in backward of a layer's call. *Collective.*"""
        self._anchors.pop(call, None)
        return self._exchange((_Doing.BACKWARD, index, call), sums)

    def _exchange(self, header: _Header, own: Tensor) -> Tensor:
        self._meet(header)
        return self._share(header, own)

    def _meet(self, header: _Header, *, differentiates: bool = False) -> _Header:
        """Return what all ranks that have rows are about to do; rest if there are none. *Collective.*

        Raises:
            MismatchError: they are not about to do the same.
        """
        transport = self._joiner.transport
        table = torch.zeros(transport.world_size, 4, dtype=torch.int64)
        if self._own is not None:
            table[transport.rank] = torch.tensor([*header, differentiates])
        self._joiner.collect(self._describe(header), lambda: gather_rows(transport, table))
        rows = table.tolist()
        if any(row[3] for row in rows):
            self._someone_differentiates = True
        headers = {rank: (_Doing(row[0]), row[1], row[2]) for rank, row in enumerate(rows) if row[0]}
        if len(set(headers.values())) > 1:
            raise MismatchError(self._mismatch(headers))
        return next(iter(headers.values()), (_Doing.REST, 0, 0))

    def _share(self, header: _Header, own: Tensor | None) -> Tensor:
        """Return the total over all micro-batches, float64 on the CPU. *Collective.*

        In forward that is the number of values per channel, their means, and the sums of squares about the mean.
        """
        doing, index, _ = header
        is_forward = doing == _Doing.FORWARD
        num_channels = self._layers[index].num_features
        table = torch.zeros(self._num_micro_batches, 2 * num_channels + is_forward, dtype=torch.float64)
        if own is not None:
            assert self._own is not None
            table[self._own] = own
        transport = self._joiner.transport
        self._joiner.collect(self._describe(header), lambda: gather_rows(transport, table.view(torch.int64)))
        if not is_forward:
            return table.sum(0)
        total = _combine(table)
        if total[0] == 1:
            raise UsageError(
                f"step {self._step}: layer {self._names[index]!r}: the whole global batch has one value per channel, "
                f"expected more than 1 in training."
            )
        return total

    def _describe(self, header: _Header) -> str:
        doing, index, _ = header
        if doing == _Doing.REST:
            return "meeting of all ranks outside of SyncBatchNorm layers"
        return f"{doing.name.lower()} of SyncBatchNorm layer {self._names[index]!r}"

    def _mismatch(self, headers: dict[int, _Header]) -> str:
        places: dict[str, list[str]] = {}
        for rank, (doing, index, call) in headers.items():
            where = "done with its forward or backward pass"
            if doing != _Doing.REST:
                where = f"in {doing.name.lower()} of layer {self._names[index]!r} (call {call} of the pass)"
            places.setdefault(where, []).append(str(rank))
        who = "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(r)}: {where}" for where, r in places.items())
        return (
            f"step {self._step}: workers are at different places of their SyncBatchNorm layers. {who}. All that have "
            f"samples must run the same of these layers in the same order, and their losses must depend on the same: "
            f"take the same branches on every worker and keep all in train or eval mode, or use BatchNorm there."
        )


@dataclass(frozen=True)
class _Call:
    """One forward call of a layer, as its backward needs it; `num_values` per channel on all workers."""

    norms: SyncBatchNorms
    index: int
    number: int
    num_values: float


class _Normalization(torch.autograd.Function):
    """Normalizes with given statistics, and differentiates as they depend on the rows of all workers.

    The second result is an anchor from which backward can be run for rows that no loss depends on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Tensor,
        eps: float,
        call: _Call,
    ) -> tuple[Tensor, Tensor]:
        mean, var = statistics
        ctx.call = call
        ctx.save_for_backward(rows, weight, mean, torch.rsqrt(var + eps))
        scale, shift = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        return torch.batch_norm(rows, scale, shift, mean, var, False, 0.0, eps, False), rows.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, mean, inverse_std = ctx.saved_tensors
        shape = _channel_shape(rows)
        dims = _other_dims(rows)
        gradient = gradient.to(mean.dtype)
        centered = rows.to(mean.dtype) - mean.view(shape)
        sum_gradient, sum_product = gradient.sum(dims), (gradient * centered).sum(dims)
        by_rows = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            call: _Call = ctx.call
            sums = torch.cat([sum_gradient, sum_product]).double().cpu()
            means = call.norms.exchange_backward(call.index, call.number, sums) / max(call.num_values, 1)
            mean_gradient, mean_product = means.to(mean.device, mean.dtype).chunk(2)
            slope = (mean_product * inverse_std.square()).view(shape)
            scale = inverse_std if weight is None else inverse_std * weight.to(mean.dtype)
            by_rows = (gradient - mean_gradient.view(shape) - centered * slope) * scale.view(shape)
            by_rows = by_rows.to(rows.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            by_weight = (sum_product * inverse_std).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            by_bias = sum_gradient
        return by_rows, by_weight, by_bias, None, None, None


def _is_synchronized(module: nn.Module) -> bool:
    """Return whether `module` is torch's own; what others have made of it knows what it does."""
    return isinstance(module, nn.SyncBatchNorm) and type(module).forward is nn.SyncBatchNorm.forward


def _misfit(counts: Sequence[int], num_micro_batches: int) -> str:
    rank = counts.index(max(counts))
    return (
        f"is a SyncBatchNorm, which needs the rows of the whole global batch at one time, but rank {rank} has "
        f"{counts[rank]} of {num_micro_batches} micro-batches and runs them one after the other: use "
        f"micro_batches={len(counts)} with an even assignment, one for each worker; or BatchNorm, which sees one "
        f"micro-batch and gives the same bits on any number of workers, with its running statistics averaged."
    )


def _working_dtype(rows: Tensor) -> torch.dtype:
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def _channel_shape(rows: Tensor) -> list[int]:
    return [1, -1] + [1] * (rows.dim() - 2)


def _other_dims(rows: Tensor) -> list[int]:
    return [0, *range(2, rows.dim())]


def _moments(rows: Tensor) -> Tensor:
    """Return count, means, and sums of squares about them, of each channel; float64 [2 C + 1] on the CPU."""
    count = rows.numel() // rows.size(1)
    if not count:
        return torch.zeros(2 * rows.size(1) + 1, dtype=torch.float64)
    var, mean = torch.var_mean(rows.to(_working_dtype(rows)), _other_dims(rows), correction=0)
    moments = torch.cat([mean, var]).double().cpu()
    moments[rows.size(1) :] *= count
    return torch.cat([torch.tensor([count], dtype=torch.float64), moments])


def _combine(table: Tensor) -> Tensor:
    """Return the moments of all rows together from those of each micro-batch, float64 [M, 2 C + 1]. Pure."""
    counts = table[:, :1]
    means, squares = table[:, 1:].chunk(2, dim=1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    total = (squares + counts * (means - mean).square()).sum(0)
    return torch.cat([count, mean, total])


def _update_running_statistics(
    layer: nn.SyncBatchNorm, mean: Tensor, squares: Tensor, num_values: float
) -> None:
    if not layer.track_running_stats or not num_values:
        return
    assert layer.num_batches_tracked is not None
    with torch.no_grad():
        layer.num_batches_tracked.add_(1)
        momentum = layer.momentum
        if momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
        for running, new in ((layer.running_mean, mean), (layer.running_var, squares / (num_values - 1))):
            assert running is not None
            running.mul_(1 - momentum).add_(new.to(running.device, running.dtype), alpha=momentum)
