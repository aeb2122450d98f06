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
