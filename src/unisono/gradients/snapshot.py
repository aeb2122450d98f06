"""What a step has to put back if it is skipped after parts of it were applied."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Snapshot:
    """Buffers, parameters and optimizer state as they are now. Costs a copy of each."""

    def __init__(
        self, model: nn.Module, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self._buffers = [
            (module, key, buffer)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        tensors: list[Tensor] = [*parameters, *(buffer for _, _, buffer in self._buffers)]
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._optimizer = optimizer
        # Not of the whole dictionary: its keys are the parameters themselves.
        self._state = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}

    def restore(self) -> None:
        """Put all of it back. *In place.*"""
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
        for module, key, buffer in self._buffers:
            module._buffers[key] = buffer
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
