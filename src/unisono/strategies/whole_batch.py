"""The exact gradient of a loss over the whole global batch, such as a contrastive one, in two passes.

The first pass computes the rows e of all micro-batches without gradients; every worker gets them all, and
computes the loss L(e) and dL/de. The second runs each micro-batch again, with the same random numbers and
buffers, and sends dL/de back through it: that is the gradient of ``sum(e * dL/de)``, which no longer needs
other micro-batches. (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
2021.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.collectives.gather import gather_rows, gather_tensors
from unisono.errors import UsageError
from unisono.transport.base import Transport

Rows = tuple[Tensor, ...]


def rows_of(output: Any, micro_batch: int) -> Rows:
    """Return what `embed` returned as a tuple of tensors.

    Raises:
        UsageError: it is something else, or the tensors have different numbers of rows.
    """
    rows = output if isinstance(output, tuple) else (output,)
    if not rows or not all(isinstance(part, Tensor) and part.dim() for part in rows):
        found = ", ".join(type(part).__name__ for part in rows) or "an empty tuple"
        raise UsageError(
            f"embed returned {found} for micro-batch {micro_batch}; expected a tensor with a row for each sample, or "
            f"a tuple of such tensors."
        )
    if len({len(part) for part in rows}) > 1:
        raise UsageError(
            f"embed returned tensors of {[len(part) for part in rows]} rows for micro-batch {micro_batch}; expected "
            f"one row for each sample in all of them."
        )
    return rows


def gather_rows_of(
    transport: Transport, own: Mapping[int, Rows] | None, sizes: Sequence[int]
) -> dict[int, Rows] | int:
    """Return the rows of all non-empty micro-batches, on every rank. *Collective.* *Blocking.*

    A rank that has to give up passes None; then all get the number of the first that did.
    """
    table = torch.zeros(transport.world_size, len(sizes) + 1, dtype=torch.int64)
    table[transport.rank, -1] = own is None
    for number, rows in (own or {}).items():
        table[transport.rank, number] = len(rows)
    gather_rows(transport, table)
    if own is None or table[:, -1].any():
        return int(table[:, -1].argmax())
    widths = table[:, :-1].sum(0).tolist()
    places = [(number, at) for number, width in enumerate(widths) for at in range(width)]
    parts = {index: own[number][at] for index, (number, at) in enumerate(places) if number in own}
    tensors = gather_tensors(transport, parts, len(places))
    found: dict[int, list[Tensor]] = {}
    for (number, _), tensor in zip(places, tensors, strict=True):
        found.setdefault(number, []).append(tensor)
    return {number: tuple(rows) for number, rows in found.items()}


class WholeBatchLoss:
    """The loss of the second pass, called for each own micro-batch like any other loss function.

    Args:
        embed: as the user gave it.
        loss_fn: ``loss_fn(rows)``: the mean loss of all rows.
        rows: micro-batch -> what the first pass computed for it; all non-empty ones of the grid.
        sizes: number of samples of each micro-batch.
        parameters: those that the loss itself may use, such as a temperature.
        current: returns the number of the micro-batch that is running.

    Attributes:
        loss: the mean loss of the global batch.

    Raises:
        UsageError: the loss is no tensor of one element.
    """

    def __init__(
        self,
        embed: Callable[[nn.Module, Any], Any],
        loss_fn: Callable[..., Any],
        rows: Mapping[int, Rows],
        *,
        sizes: Sequence[int],
        parameters: Sequence[nn.Parameter],
        current: Callable[[], int],
    ) -> None:
        self._embed = embed
        self._current = current
        self._numbers = sorted(rows)
        self._parameters = parameters
        self._share = {number: sizes[number] / sum(sizes) for number in self._numbers}
        leaves = [_leaf([rows[number][at] for number in self._numbers]) for at in range(_width(rows))]
        loss = loss_fn(leaves[0] if len(leaves) == 1 else tuple(leaves))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = (
                f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise UsageError(f"the loss function returned {found} for the whole batch; expected one number.")
        self.loss = float(loss.detach())
        counts = [len(rows[number][0]) for number in self._numbers]
        self._d_rows, self._direct = _differentiate(loss, leaves, counts, self._numbers, parameters)

    def __call__(self, model: nn.Module, micro_batch: Any) -> Tensor:
        """Return what has this micro-batch's part of the gradient, times total samples over its own."""
        number = self._current()
        rows = rows_of(self._embed(model, micro_batch), number)
        share = self._share[number]
        if number == self._numbers[0]:
            for parameter, gradient in zip(self._parameters, self._direct, strict=True):
                if gradient is not None:
                    parameter.grad = gradient / share
        total = torch.zeros((), device=rows[0].device)
        for part, d_part in zip(rows, self._d_rows[number], strict=True):
            if d_part is not None and part.requires_grad:
                total = total + (part.to(d_part.dtype) * d_part).sum()
        return total / share


def _width(rows: Mapping[int, Rows]) -> int:
    widths = {number: len(parts) for number, parts in rows.items()}
    if len(set(widths.values())) > 1:
        raise UsageError(
            f"embed returned {widths} tensors for the micro-batches; expected the same number for all."
        )
    return next(iter(widths.values()))


def _leaf(parts: Sequence[Tensor]) -> Tensor:
    """Return all rows in one tensor to differentiate by; half precision becomes float32."""
    whole = torch.cat(list(parts)).detach()
    if whole.dtype in (torch.float16, torch.bfloat16):
        whole = whole.float()
    return whole.requires_grad_(whole.is_floating_point() or whole.is_complex())


def _differentiate(
    loss: Tensor,
    leaves: Sequence[Tensor],
    counts: Sequence[int],
    numbers: Sequence[int],
    parameters: Sequence[nn.Parameter],
) -> tuple[dict[int, list[Tensor | None]], list[Tensor | None]]:
    """Return the gradient by the rows of each micro-batch, and by `parameters`."""
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * (len(inputs) + len(parameters))
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, [*inputs, *parameters], allow_unused=True)
    by_leaf = iter(gradients[: len(inputs)])
    d_rows: dict[int, list[Tensor | None]] = {number: [] for number in numbers}
    for leaf in leaves:
        whole = next(by_leaf) if leaf.requires_grad else None
        pieces = [None] * len(counts) if whole is None else torch.split(whole, list(counts))
        for number, piece in zip(numbers, pieces, strict=True):
            d_rows[number].append(piece)
    return d_rows, list(gradients[len(inputs) :])
