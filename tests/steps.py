"""Global batches made by hand, and the obvious computation that a step is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

import unisono
from unisono.data.batch import Batch
from unisono.grid import assign, tree_sum


def global_batch(
    parts: Sequence[Any], *, shares: Sequence[int] | None = None, rank: int = 0, nominal: float | None = None
) -> Batch:
    """Return a batch of the given micro-batches; ``len`` of one is its number of samples."""
    shares = [len(parts)] if shares is None else shares
    assignment = assign(len(parts), shares, allow_idle=True)
    sizes = tuple(map(len, parts))
    return Batch(
        epoch=0,
        index=0,
        assignment=assignment,
        rank=rank,
        sizes=sizes,
        nominal_weight=max(sizes) if nominal is None else nominal,
        data={number: parts[number] for number in assignment.micro_batches(rank) if sizes[number]},
    )


@contextmanager
def alone(**options: Any) -> Iterator[unisono.Run]:
    """A run of one worker, in this process, that prints nothing."""
    with unisono.join(observer=lambda event: None, **options) as run:
        yield run


def plain_gradients(
    model: nn.Module,
    parts: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    weights: Sequence[float],
    reference: float,
) -> list[Tensor]:
    """Return the gradient of the weighted mean loss by the formula of the design, in this process."""
    leaves = []
    for part, weight in zip(parts, weights, strict=True):
        factor = weight / reference
        model.zero_grad(set_to_none=True)
        if weight:
            loss = loss_fn(model, part)
            (loss if factor == 1 else loss * factor).backward()
        leaves.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    scale = reference / tree_sum(list(weights), add)
    return [tree_sum([leaf[at] for leaf in leaves], torch.add) * scale for at in range(len(leaves[0]))]


class Part(tuple[Tensor, Tensor]):
    """Inputs and targets of a micro-batch; its length is its number of samples."""

    def __len__(self) -> int:
        return len(self[0])


class Line(nn.Module):
    """One weight w, which starts at 0; the loss for targets y is the mean of (w - y)^2 / 2.

    With SGD of learning rate 1, w is the mean of all y after one step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def loss(self, targets: Tensor) -> Tensor:
        return (self.w - targets).square().mean() / 2


def line_loss(model: Any, targets: Tensor) -> Tensor:
    return model.loss(targets)


def line_loss_per_item(model: Any, targets: Tensor) -> tuple[Tensor, int]:
    """The same where items, not samples, are counted; nan where there are none."""
    return model.loss(targets), len(targets.flatten())
