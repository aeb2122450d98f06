"""The loss scale of float16: torch's `GradScaler`, told of one decision that all workers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class LossScale:
    """A `torch.amp.GradScaler` that keeps its own rules and gradients that are unscaled when the user sees them.

    The engine multiplies losses by `value` and divides the averaged gradients by it. Since these are the same
    on every worker, so is whether they are finite. The scaler hears of it through its public face: by a
    parameter of its own whose gradient is 0 or infinite.

    Args:
        scaler: enabled or not; None scales nothing.
        device: where the scaler keeps its numbers.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, device: torch.device) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self._scaler is not None:
            self._scaler.scale(torch.zeros(1, device=device))  # makes it fetch its first scale
            self._probe = nn.Parameter(torch.zeros(1, device=device))
            self._optimizer = torch.optim.SGD([self._probe], lr=0.0)
            self._value = self._scaler.get_scale()

    @property
    def is_active(self) -> bool:
        return self._scaler is not None

    @property
    def value(self) -> float:
        """What losses are to be multiplied by now."""
        return 1.0 if self._scaler is None else self._value

    def update(self, *, is_finite: bool) -> None:
        """After a step: grow or back off, by the scaler's own rules."""
        if self._scaler is None:
            return
        self._probe.grad = torch.full_like(self._probe, 0.0 if is_finite else float("inf"))
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()
        self._value = self._scaler.get_scale()

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if self._scaler is not None and state is not None:
            self._scaler.load_state_dict(state)
            self._value = self._scaler.get_scale()


def are_finite(gradients: Iterable[Tensor]) -> bool:
    """Return whether no element is infinite or nan. Reads each once."""
    dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    dense = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in dense]
    dense = [gradient for gradient in dense if gradient.numel()]
    if not dense:
        return True
    largest = torch._foreach_norm(dense, float("inf"))
    return bool(torch.stack([one.double() for one in largest]).isfinite().all())
