"""The reference weight: what keeps the loss of a micro-batch of ordinary size at its ordinary magnitude.

Weights are numbers of samples, known beforehand, or what the loss function returns (tokens). For samples the
reference is the nominal size of a micro-batch; for returned weights a power of two near the mean of the
previous step, kept in the state, and at the first step near the weight of micro-batch 0, sent by its owner.
With a single micro-batch it is that micro-batch's own weight, so that nothing is scaled at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import add
from typing import Any

import torch
from torch import Tensor

from unisono.errors import UsageError
from unisono.grid import tree_sum
from unisono.strategies.base import GlobalBatch
from unisono.strategies.step_table import bits_float, float_bits


def nearest_power_of_two(value: float) -> float:
    """Return the power of two nearest to `value`; 1 for 0. Pure."""
    if value == 0:
        return 1.0
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - 1 if mantissa < 0.75 else exponent)


def unpack_loss(output: Any, micro_batch: int) -> tuple[Tensor, float | None]:
    """Return the loss and the weight, None where the loss function returned a loss alone.

    Raises:
        UsageError: it returned something else, with what was found.
    """
    loss, weight = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss).__name__)
        )
        raise UsageError(
            f"the loss function returned {found} for micro-batch {micro_batch}; expected the mean loss, a tensor "
            f"with one element, or a pair (mean loss, weight)."
        )
    if weight is None:
        return loss, None
    weight = float(weight)
    if not (weight >= 0 and math.isfinite(weight)):
        raise UsageError(
            f"the loss function returned the weight {weight} for micro-batch {micro_batch}; expected a finite "
            f"number of at least 0."
        )
    return loss, weight


class WeightReference:
    """Chooses the reference weight of each step, the same on every worker."""

    def __init__(self) -> None:
        self._returned: bool | None = None
        self._reference: float | None = None

    @property
    def is_agreed(self) -> bool:
        """Whether the workers know what kind of weights they have."""
        return self._returned is not None

    @property
    def known_beforehand(self) -> bool:
        """Whether weights are numbers of samples."""
        return self._returned is False

    def message(self, given: float | None) -> Tensor:
        """Return what the owner of micro-batch 0 tells the others, int64 [1, 2]; zeros say that it can't tell."""
        return torch.tensor([[1 if given is None else 2, float_bits(given or 0.0)]], dtype=torch.int64)

    def agree(self, message: Tensor) -> None:
        """Take over what the owner of micro-batch 0 said."""
        kind, bits = message[0].tolist()
        if not kind:
            return
        self._returned = kind == 2
        self._reference = nearest_power_of_two(bits_float(bits)) if self._returned else None

    def of(self, batch: GlobalBatch, weights: Mapping[int, float] | Sequence[float]) -> float:
        """Return the reference weight of this step; `weights` needs the entry 0 if the grid has one cell."""
        if batch.assignment.num_micro_batches == 1:
            return weights[0] or 1.0
        if self._reference is None:
            return batch.nominal_weight
        return self._reference

    def factor_beforehand(self, batch: GlobalBatch) -> float:
        """Return reference / total weight if that is known before the step, else 1."""
        if not self.known_beforehand:
            return 1.0
        weights = [float(size) for size in batch.sizes]
        total = tree_sum(weights, add)
        return self.of(batch, weights) / total if total else 1.0

    def advance(self, total: float, num_micro_batches: int) -> None:
        """After a step: take the reference of the next one from the mean weight of this one."""
        if self._returned and total:
            self._reference = nearest_power_of_two(total / num_micro_batches)

    def state_dict(self) -> dict[str, Any]:
        return {"returned": self._returned, "reference": self._reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._returned, self._reference = state["returned"], state["reference"]
