"""The mean gradient over several global batches, formed before one update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class Window:
    """The global batches since the last update: their total weight, and their mean loss and gradient.

    Every worker holds the same averaged gradients, so what is computed here is the same everywhere. Costs one
    more copy of the gradients from the second batch on.

    Attributes:
        weight: total weight of the batches that counted.
        loss: their mean loss, by weight; nan before the first.
        skipped: why the last batch that did not count was skipped.
        is_finite: whether all losses were finite.
        norm_is_finite: whether all norms that gradients were clipped to were.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self.loss = float("nan")
        self.skipped: str | None = None
        self.is_finite = True
        self.norm_is_finite = True
        self._held: dict[nn.Parameter, Tensor] = {}
        self._has_gradients = False

    def was_dropped(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether the script has taken all gradients away, as `zero_grad` does."""
        return self._has_gradients and all(parameter.grad is None for parameter in parameters)

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put the gradients so far aside: the next batch's take their place and their memory."""
        if not self._held:
            self._held = {p: p.grad.clone() for p in parameters if p.grad is not None}

    def release(self) -> None:
        """Put back what was put aside."""
        for parameter, gradient in self._held.items():
            parameter.grad = gradient
        self._held = {}

    def add(self, parameters: Sequence[nn.Parameter], *, loss: float, weight: float) -> None:
        """Take in the gradients of one more batch, which are in ``.grad``. *In place.*"""
        total = self.weight + weight
        self.loss = loss if not self.weight else self.loss * (self.weight / total) + loss * (weight / total)
        if self.weight:
            for parameter in parameters:
                _mix(parameter, self._held.pop(parameter, None), self.weight / total, weight / total)
            self.release()  # of parameters that were trained before and are not now
        self.weight = total
        self._has_gradients = any(parameter.grad is not None for parameter in parameters)


def _mix(parameter: nn.Parameter, before: Tensor | None, part_before: float, part_now: float) -> None:
    """Make ``.grad`` the weighted mean of what it was and is; a missing gradient counts as zero."""
    now = parameter.grad
    with torch.no_grad():
        if now is not None:
            now = now * part_now
        if before is not None:
            before = before * part_before
            # torch adds a sparse gradient to a dense one, not the other way round.
            now = before if now is None else now + before if before.is_sparse else before + now
    parameter.grad = now
