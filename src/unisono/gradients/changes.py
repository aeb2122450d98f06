"""Notices parameters that the script wrote between steps, so that workers can compare what they wrote."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from unisono.gradients.parameters import Named


class Changes:
    """Remembers how parameters were left, by their version counters, which are free to read.

    The same script counts alike on every rank. Writes through ``.data`` don't count.
    """

    def __init__(self) -> None:
        self._left: dict[nn.Parameter, int] = {}

    def remember(self, named: Named) -> None:
        """Take parameters as they are now for how they should be found."""
        self._left = {parameter: parameter._version for _, parameter in named}

    def find(self, named: Named) -> dict[str, nn.Parameter]:
        """Return those that were written since, by name; new ones are not among them."""
        return {
            name: parameter
            for name, parameter in named
            if self._left.get(parameter, parameter._version) != parameter._version
        }


def sum_of_bits(parameters: Iterable[Tensor]) -> int:
    """Return a number that differs where values do, for all practical purposes. Reads each once."""
    total = 0
    for index, parameter in enumerate(parameters):
        flat = parameter.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        words = flat.numel() // 4 * 4
        total += (index + 1) * int(flat[:words].view(torch.int32).sum(dtype=torch.int64))
        total += int(flat[words:].sum(dtype=torch.int64))
    return total
