"""What every worker must know about every micro-batch of a step, in one small table of integers.

One row for each micro-batch, filled by its owner and zero elsewhere, so that adding the tables of all workers
(integers, hence exact in any order) gives the whole to everyone. All decisions of a step are pure functions
of it, and so are the same everywhere: total weight, loss, which parameters have a gradient, which buffers
changed, whether the step has to be done again.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from operator import add

import torch
from torch import Tensor

from unisono.errors import MismatchError
from unisono.grid import tree_sum

WORD_BITS = 62
_RAN, _GAVE_WEIGHT, _FIRED_LATE, _GIVEN_UP = 1, 2, 4, 8
_HEADER = 4


@dataclass(frozen=True)
class TableShape:
    """Sizes that all workers share; they fix the number of columns."""

    num_micro_batches: int
    num_parameters: int
    num_averaged: int
    num_others: int

    @property
    def columns(self) -> int:
        return _HEADER + 2 * _words(self.num_parameters) + _words(self.num_averaged) + self.num_others


@dataclass(frozen=True)
class Row:
    """One micro-batch as its owner saw it.

    Args:
        weight: number of samples, or the weight that the loss function returned.
        loss: mean loss over the micro-batch.
        gave_weight: whether the loss function returned a weight.
        fired_late: whether a gradient came after its bucket had been sent.
        present: for each parameter whether it has a gradient.
        sparse: for each parameter whether it has one that is sparse.
        averaged: for each averaged buffer whether it changed.
        digests: for each other buffer a digest of its new value, 0 where it did not change.
        signature: 63 bits that stand for what all workers must agree on.
        given_up: whether its owner asked that the step is skipped.
    """

    weight: float
    loss: float
    gave_weight: bool
    fired_late: bool
    present: Sequence[bool]
    sparse: Sequence[bool]
    averaged: Sequence[bool]
    digests: Sequence[int]
    signature: int
    given_up: bool = False

    @classmethod
    def of_given_up(cls, shape: TableShape, signature: int) -> Row:
        """Return the row of a micro-batch that was not computed to its end."""
        return cls(
            weight=0.0,
            loss=nan,
            gave_weight=False,
            fired_late=False,
            present=[False] * shape.num_parameters,
            sparse=[False] * shape.num_parameters,
            averaged=[False] * shape.num_averaged,
            digests=[0] * shape.num_others,
            signature=signature,
            given_up=True,
        )


def new_table(shape: TableShape) -> Tensor:
    """Return an empty table, int64 [micro-batches, columns]."""
    return torch.zeros(shape.num_micro_batches, shape.columns, dtype=torch.int64)


def write_row(table: Tensor, index: int, row: Row) -> None:
    """Fill row `index`. In place."""
    flags = _RAN | row.gave_weight * _GAVE_WEIGHT | row.fired_late * _FIRED_LATE | row.given_up * _GIVEN_UP
    cells = [flags, float_bits(row.weight), float_bits(row.loss), row.signature]
    cells += _pack(row.present) + _pack(row.sparse) + _pack(row.averaged) + list(row.digests)
    table[index] = torch.tensor(cells, dtype=torch.int64)


class StepTable:
    """The whole table, read after it was shared."""

    def __init__(self, table: Tensor, shape: TableShape) -> None:
        rows = table.tolist()
        self._rows: list[list[int]] = rows
        self._shape = shape
        self.weights = [bits_float(row[1]) if row[0] & _RAN else 0.0 for row in rows]
        self.weight = tree_sum(self.weights, add)

    @property
    def loss(self) -> float:
        """Weighted mean loss of the global batch; micro-batches of weight 0 count as nothing."""
        if self.weight == 0:
            return nan
        parts = [
            weight * bits_float(row[2]) if weight else 0.0
            for weight, row in zip(self.weights, self._rows, strict=True)
        ]
        return tree_sum(parts, add) / self.weight

    @property
    def fired_late(self) -> bool:
        return any(row[0] & _FIRED_LATE for row in self._rows)

    @property
    def is_finite(self) -> bool:
        """Whether all losses that count are finite numbers."""
        return self._not_finite() is None

    def reason_to_skip(self, owners: Sequence[int]) -> str | None:
        """Return why the step must not be applied, in words, or None."""
        for index, row in enumerate(self._rows):
            if row[0] & _GIVEN_UP:
                return f"rank {owners[index]} gave it up in micro-batch {index}"
        odd = self._not_finite()
        if odd is not None:
            loss = bits_float(self._rows[odd][2])
            return f"the loss of micro-batch {odd} (rank {owners[odd]}) is {loss}"
        return None if self.weight else "its total weight is 0"

    def _not_finite(self) -> int | None:
        pairs = enumerate(zip(self.weights, self._rows, strict=True))
        return next((at for at, (weight, row) in pairs if weight and not isfinite(bits_float(row[2]))), None)

    def check_signatures_agree(self, owners: Sequence[int], *, step: int) -> None:
        """Raise a `MismatchError` unless all micro-batches were computed for the same step of the same run."""
        ran = [(index, row[3]) for index, row in enumerate(self._rows) if row[0] & _RAN]
        for index, signature in ran:
            if signature != ran[0][1]:
                raise MismatchError(
                    f"step {step}: rank {owners[index]} (micro-batch {index}) and rank {owners[ran[0][0]]} "
                    f"(micro-batch {ran[0][0]}) are not at the same step of the same run: their global batches "
                    f"have other sizes or samples, or they train other parameters, or from other values. Load the "
                    f"same data with the same settings on every rank, and freeze or replace the same parameters "
                    f"in the same way."
                )

    def check_weights_agree(self) -> None:
        """Raise a `MismatchError` if the loss function returned a weight for some micro-batches only."""
        ran = [(index, bool(row[0] & _GAVE_WEIGHT)) for index, row in enumerate(self._rows) if row[0] & _RAN]
        odd = [index for index, gave in ran if gave != ran[0][1]]
        if odd:
            with_weight = odd[0] if not ran[0][1] else ran[0][0]
            without = ran[0][0] if not ran[0][1] else odd[0]
            raise MismatchError(
                f"the loss function returned (loss, weight) for micro-batch {with_weight} but only a loss for "
                f"micro-batch {without}: it must return the same kind for all."
            )

    def present(self) -> list[bool]:
        """For each parameter, whether any micro-batch has a gradient for it."""
        first = _HEADER
        union = self._union(first, _words(self._shape.num_parameters))
        return _unpack(union, self._shape.num_parameters)

    def wrongly_planned(self, sparse: Collection[int]) -> dict[int, bool]:
        """Return, for each parameter that is not what was planned for, whether its gradients are sparse.

        They are if they are so in all micro-batches that have one.

        Args:
            sparse: the parameters that are planned to be.
        """
        count = self._shape.num_parameters
        words = _words(count)
        thin = self._union(_HEADER + words, words)
        if not sparse and not any(thin):
            return {}
        full = [0] * words
        for row in self._rows:
            for word in range(words):
                full[word] |= row[_HEADER + word] & ~row[_HEADER + words + word]
        found = {}
        for index, (is_thin, is_full) in enumerate(
            zip(_unpack(thin, count), _unpack(full, count), strict=True)
        ):
            if (is_thin or is_full) and (index in sparse) == is_full:
                found[index] = not is_full
        return found

    def averaged_weights(self) -> list[float]:
        """For each averaged buffer, the total weight of the micro-batches that changed it."""
        first = _HEADER + 2 * _words(self._shape.num_parameters)
        count = self._shape.num_averaged
        changed = [_unpack(row[first : first + _words(count)], count) for row in self._rows]
        return [
            tree_sum([w if row[index] else 0.0 for w, row in zip(self.weights, changed, strict=True)], add)
            for index in range(count)
        ]

    def changers(self, index: int) -> dict[int, list[int]]:
        """Return, for the other buffer number `index`, the micro-batches that gave it each new value."""
        column = self._shape.columns - self._shape.num_others + index
        values: dict[int, list[int]] = {}
        for number, row in enumerate(self._rows):
            if row[column]:
                values.setdefault(row[column], []).append(number)
        return values

    def _union(self, first: int, words: int) -> list[int]:
        union = [0] * words
        for row in self._rows:
            for word in range(words):
                union[word] |= row[first + word]
        return union


def float_bits(value: float) -> int:
    """Return the bits of a double as a signed 64-bit integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def bits_float(bits: int) -> float:
    """Return the double that has these bits."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


def _words(count: int) -> int:
    return -(-count // WORD_BITS)


def _pack(flags: Sequence[bool]) -> list[int]:
    starts = range(0, len(flags), WORD_BITS)
    return [sum(1 << bit for bit, flag in enumerate(flags[at : at + WORD_BITS]) if flag) for at in starts]


def _unpack(words: Sequence[int], count: int) -> list[bool]:
    return [bool(words[index // WORD_BITS] >> index % WORD_BITS & 1) for index in range(count)]
