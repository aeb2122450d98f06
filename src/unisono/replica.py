"""One model and its optimizer, trained by all workers together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.events import Event, StepFinished
from unisono.gradients.clipping import clip_by_norm
from unisono.gradients.parameters import TrainedParameters, outside_parameters
from unisono.strategies.base import (
    GlobalBatch,
    LossFunction,
    Operations,
    ReplicaContext,
    StepResult,
    Strategy,
)
from unisono.transport.base import Transport


class Replica:
    """A model that every worker holds a copy of; made by `Run.replicate`.

    `step` is `backward`, `clip` and `update`, for a loop that needs something in between.

    Attributes:
        model, optimizer: as given.
        num_steps: how many global steps were done.
        clip_norm: the largest norm of the gradient in `step`; None doesn't clip.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        number: int,
        strategy: Strategy,
        clip_norm: float | None,
        transport: Transport,
        operations: Operations,
        emit: Callable[[Event], None],
        before_step: Callable[[Replica, GlobalBatch, LossFunction], LossFunction],
        device: torch.device,
        seed: int,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm={clip_norm}: expected a positive number, or None.")
        self.model = model
        self.optimizer = optimizer
        self.num_steps = 0
        self.clip_norm = clip_norm
        self.number = number
        self._operations = operations
        self._emit = emit
        self._before_step = before_step
        self._pending: StepResult | None = None
        self._parameters = TrainedParameters(model, optimizer)
        self._engine = strategy.bind(
            ReplicaContext(
                number=number,
                model=model,
                parameters=self._parameters,
                transport=transport,
                operations=operations,
                device=device,
                seed=seed,
            )
        )

    def step(self, batch: GlobalBatch, loss_fn: LossFunction) -> float:
        """Train on one global batch; return its mean loss, the same on every worker.

        *Collective: every rank calls this, in the same order.*

        Args:
            batch: from `Run.load`.
            loss_fn: ``loss_fn(model, micro_batch)`` returns the mean loss over the micro-batch, or a pair
                ``(mean loss, weight)`` where the mean is over something else than samples, such as tokens.

        Returns:
            The mean loss of the global batch, weighted like the gradient. nan, and nothing is applied, if
            the total weight is 0.
        """
        result = self.backward(batch, loss_fn)
        if self.clip_norm is not None and result.weight:
            self.clip(self.clip_norm)
        self.update()
        return result.loss

    def backward(self, batch: GlobalBatch, loss_fn: LossFunction) -> StepResult:
        """Leave the gradient of the global batch's mean loss in every parameter's ``.grad``. *Collective.*"""
        self._pending = None
        loss_fn = self._before_step(self, batch, loss_fn)
        result = self._engine.backward(batch, loss_fn, step=self.num_steps)
        self._pending = result
        return result

    def clip(self, max_norm: float) -> float:
        """Scale the gradient so that its norm is at most `max_norm`; return the norm it had.

        The norm is that of all parameters together, the same bits on every worker.
        """
        gradients = [p.grad for _, p in self._parameters() if p.grad is not None]
        return clip_by_norm(gradients, max_norm)

    def update(self) -> None:
        """Let the optimizer apply the gradient. Does nothing but count if the step had no weight.

        Raises:
            UsageError: there is no gradient to apply: `backward` was not called since the last update.
        """
        result = self._pending
        if result is None:
            raise UsageError(
                f"step {self.num_steps}: update() without a gradient; call backward(batch, loss_fn) first."
            )
        self._pending = None
        if result.weight:
            self._operations.enter("update", self.num_steps, waits=False)
            self.optimizer.step()
            self._operations.leave()
        self.num_steps += 1
        self._emit(StepFinished(self.number, self.num_steps - 1, loss=result.loss, weight=result.weight))

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer, parameters that only it knows, count of steps and what the strategy keeps."""
        outside = outside_parameters(self.model, self.optimizer)
        return {
            "model": self.model.state_dict(),
            "outside": {name: parameter.detach() for name, parameter in outside},
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "strategy": self._engine.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, written at any world size.

        Raises:
            UsageError: the optimizer has other parameters besides the model's than when the state was taken.
        """
        outside = dict(outside_parameters(self.model, self.optimizer))
        if outside.keys() != state["outside"].keys():
            raise UsageError(
                f"replica {self.number}: the state has {sorted(state['outside'])} besides the model's parameters, "
                f"this optimizer {sorted(outside)}: build the optimizer as it was before loading."
            )
        with torch.no_grad():
            for name, parameter in outside.items():
                parameter.copy_(state["outside"][name])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]
        self._engine.load_state_dict(state["strategy"])

    def close(self) -> None:
        """Take everything off the model that was put on it."""
        self._engine.close()
