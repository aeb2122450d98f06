"""Notices parameters that the script wrote, between steps or in one, so that workers can compare what they wrote."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn

from unisono.errors import MismatchError
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


class Written:
    """What the loss function has written into parameters since this was made.

    A projection, such as a clamp, leaves the same values in every micro-batch. What doesn't would depend on which
    micro-batches ran on the same worker.
    """

    def __init__(self, named: Named) -> None:
        self._named = list(named)
        self._versions = [parameter._version for _, parameter in self._named]

    def sign(self, signature: int) -> int:
        """Return `signature`, which all micro-batches share, mixed with what was written so far. Pure."""
        written = self._find().values()
        return signature ^ ((sum_of_bits(written) + 1) & (2**63 - 1)) if written else signature

    def explain(self, *, step: int, cause: MismatchError) -> None:
        """Raise the error that micro-batches have not written alike, if that may be why they differ."""
        written = self._find()
        if written:
            raise MismatchError(
                f"step {step}: the loss function wrote {first_of(written)}, and not alike in all micro-batches, so "
                f"the result would depend on which of them a worker has. Write parameters between steps, or keep "
                f"what changes in forward in a buffer (nn.Embedding: without max_norm)."
            ) from cause

    def _find(self) -> dict[str, nn.Parameter]:
        now = [parameter._version for _, parameter in self._named]
        if now == self._versions:
            return {}
        pairs = zip(self._named, self._versions, now, strict=True)
        return {name: parameter for (name, parameter), before, after in pairs if before != after}


def sum_of_bits(tensors: Iterable[Tensor]) -> int:
    """Return a number below 2^63 that differs where values do, for all practical purposes; 0 of nothing.

    Reads each once. Sums of 32-bit words, each times a number of 64 bits drawn for its place: with less regular ones
    than these, words that all change alike, as by a sign or from 0 to 1, may cancel out.
    """
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        end = flat.numel() // 4 * 4
        for words in torch.split(flat[:end].view(torch.int32), _WORDS_AT_ONCE):
            factors = _factors(words.device)
            whole = len(words) // len(factors) * len(factors)
            rest = words[whole:]
            sums = (words[:whole].view(-1, len(factors)) * factors).sum(1).tolist()
            for each in (*sums, int((rest * factors[: len(rest)]).sum())):
                total = (total * _ODD + each + 1) % 2**64
        total = (total * _ODD + int.from_bytes(bytes(flat[end:].tolist()), "little") + 1) % 2**64
    return total >> 1


_ODD = 0x9E3779B97F4A7C15
_WORDS_AT_ONCE = 2**20


@cache
def _factors(device: torch.device) -> Tensor:
    """Return 2^16 odd numbers, drawn once and for all."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (2**16,), generator=generator, dtype=torch.int64)
    return (drawn | 1).to(device)


def first_of(names: Iterable[str]) -> str:
    """Return the first few names, for a message. Pure."""
    names = list(names)
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
