"""Global batches that are made on the fly: played games, simulations, generated samples.

What is made depends on the run's seed, the number of the batch and the number of the micro-batch, never on
the worker that makes it, as long as the function draws from the global generators only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from unisono.data.batch import Batch, batch_digest
from unisono.data.order import check_batch_size
from unisono.errors import UsageError
from unisono.grid import Assignment, cut
from unisono.randomness import derive, keyed

Make = Callable[..., Any]


class BatchMaker:
    """Makes the batches of a run and counts them.

    Args:
        seed: the run's seed.
        rank: this worker.
        device: where batches go, and whose generator is seeded.

    Attributes:
        count: batches made so far; all there is to restore.
    """

    def __init__(self, *, seed: int, rank: int, device: torch.device) -> None:
        self.count = 0
        self._seed = derive(seed, "made") >> 1
        self._rank = rank
        self._device = device

    def batch(self, make: Make, assignment: Assignment, batch_size: int | None = None) -> Batch:
        """Return the next batch. Its micro-batches are made when they are first read, and kept.

        Args:
            make: ``make(micro_batch)`` -> data; with a `batch_size` ``make(micro_batch, size)``.
            assignment: who makes what.
            batch_size: samples in the global batch; without it every micro-batch counts as one sample.

        Raises:
            UsageError: `make` is no function, or a batch size below 1.
        """
        if not callable(make):
            raise UsageError(
                f"make={make!r}: expected a function from the number of a micro-batch to its data."
            )
        if batch_size is not None:
            check_batch_size(batch_size)
        num_micro_batches = assignment.num_micro_batches
        total = num_micro_batches if batch_size is None else batch_size
        sizes = tuple(map(len, cut(total, num_micro_batches)))
        number, self.count = self.count, self.count + 1
        calls = {
            m: (m,) if batch_size is None else (m, sizes[m])
            for m in assignment.micro_batches(self._rank)
            if sizes[m]
        }
        return Batch(
            epoch=0,
            index=number,
            assignment=assignment,
            rank=self._rank,
            sizes=sizes,
            nominal_weight=total / num_micro_batches,
            data=_Made(make, calls, derive(self._seed, number) >> 1, self._device),
            device=self._device,
            digest=batch_digest(self._seed, 0, number, sizes),
        )


class _Made(Mapping[int, Any]):
    """Micro-batch -> data, each made when it is first looked up, under random numbers of its own."""

    def __init__(
        self, make: Make, calls: Mapping[int, tuple[int, ...]], seed: int, device: torch.device
    ) -> None:
        self._make = make
        self._calls = calls
        self._seed = seed
        self._device = device
        self._made: dict[int, Any] = {}

    def __getitem__(self, micro_batch: int) -> Any:
        if micro_batch not in self._made:
            arguments = self._calls[micro_batch]
            with keyed(self._device) as seed_generators:
                seed_generators(derive(self._seed, micro_batch))
                self._made[micro_batch] = self._make(*arguments)
        return self._made[micro_batch]

    def __iter__(self) -> Iterator[int]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)
