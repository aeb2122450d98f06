"""Which parameters a model and its optimizer have between them, and what they are called."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def named_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the model's parameters, then those that only the optimizer knows; each once, frozen ones too."""
    yield from model.named_parameters()
    yield from outside_parameters(model, optimizer)


class TrainedParameters:
    """What is trained now: parameters of model and optimizer that are not frozen.

    Called at every step, since scripts freeze, add and replace parameters in mid-run. Looking at all of them
    takes a fifth of the time of naming them, so names are asked for only when something has changed.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        # The parameters themselves, not their ids: an id can come back with another parameter.
        self._seen: list[nn.Parameter] = []
        self._named: list[tuple[str, nn.Parameter]] = []

    def __call__(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters, in an order that all workers share."""
        now = [parameter for parameter in self._all() if parameter.requires_grad]
        if len(now) != len(self._seen) or any(a is not b for a, b in zip(now, self._seen, strict=True)):
            named = named_parameters(self._model, self._optimizer)
            self._named = [item for item in named if item[1].requires_grad]
            self._seen = now
        return self._named

    def _all(self) -> Iterator[nn.Parameter]:
        yield from _walk(self._model)
        for group in self._optimizer.param_groups:
            yield from group["params"]


def _walk(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of `module` and all below it; shared ones several times."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child)


def outside_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what the optimizer updates but the model does not hold, such as a temperature used in the loss."""
    seen = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"optimizer group {number}, parameter {index}", parameter
