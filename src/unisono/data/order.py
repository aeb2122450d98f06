"""Which samples make up which global batch.

An order is a function of the seed, the epoch and the batch: never of ranks, workers, or of what was read
before. A cursor of three integers is therefore all that a resumed run needs.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unisono.data.samplers import check_sampler, epoch_of, index_of
from unisono.errors import UsageError
from unisono.randomness import derive

MISSING_BATCH_SIZE = "batch_size is missing: expected the samples in one global batch, over all workers."


class Order(Protocol):
    """The global batches of every epoch, as lists of sample indices.

    Attributes:
        num_samples: samples in the dataset.
        batch_size: samples in a full *global* batch, over all workers; None where every batch has its own size.
        varies: whether another epoch may have another number of batches.
    """

    num_samples: int
    batch_size: int | None
    varies: bool

    def num_batches(self, epoch: int) -> int: ...
    def position(self, epoch: int, batch: int) -> int:
        """Return how many samples come before a batch in its epoch."""
        ...

    def indices(self, epoch: int, batch: int) -> list[int]:
        """Return the samples of one global batch, in order."""
        ...


@dataclass(frozen=True)
class Selection:
    """What the user said about which samples make up a batch; names and meanings are those of `Loader`."""

    batch_size: int | None = None
    shuffle: bool = False
    drop_last: bool = False
    sampler: Any = None
    batch_sampler: Any = None

    def order(self, num_samples: int, *, seed: int = 0, device: torch.device | None = None) -> Order:
        """Return the order of a dataset of so many samples.

        Raises:
            UsageError: arguments contradict each other, or leave open what a batch is.
        """
        self._check()
        if self.batch_size is None:
            return BatchSampledOrder(self.batch_sampler, num_samples, seed=seed, device=device)
        if self.sampler is not None:
            return SampledOrder(self.sampler, num_samples, self.batch_size, seed=seed, device=device)
        return PermutedOrder(
            num_samples, self.batch_size, shuffle=self.shuffle, drop_last=self.drop_last, seed=seed
        )

    def _check(self) -> None:
        given = [name for name in ("sampler", "batch_sampler") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError("sampler and batch_sampler were given: expected one of them.")
        for name in ("shuffle", "drop_last"):
            if given and getattr(self, name):
                raise UsageError(f"{name}=True with a {given[0]}: what it yields decides; leave {name} out.")
        if self.batch_sampler is not None and self.batch_size is not None:
            raise UsageError(
                f"batch_size={self.batch_size} with a batch_sampler, whose lists are the global batches: leave "
                f"batch_size out."
            )
        if self.batch_sampler is None and self.batch_size is None:
            raise UsageError(MISSING_BATCH_SIZE)


class PermutedOrder:
    """All samples of a dataset, in its own order or in a new permutation for every epoch.

    Args:
        num_samples: samples in the dataset.
        batch_size: samples in a *global* batch, over all workers.
        shuffle: draw a new permutation for every epoch; else the dataset's own order.
        drop_last: leave out the batch at the end of an epoch that would be short.
        seed: of the permutations; below 2**63.

    Raises:
        UsageError: no samples, ``batch_size < 1``, or `drop_last` would leave no batch at all.
    """

    varies = False

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        check_batch_size(batch_size)
        if num_samples < 1:
            raise UsageError(f"the dataset has {num_samples} samples: there is nothing to load.")
        full, rest = divmod(num_samples, batch_size)
        self._num_batches = full if drop_last or not rest else full + 1
        if not self._num_batches:
            raise UsageError(
                f"drop_last=True leaves no batch at all: the dataset has {num_samples} samples, "
                f"batch_size={batch_size}. Lower batch_size or set drop_last=False."
            )
        self.num_samples = num_samples
        self.batch_size: int | None = batch_size
        self._size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._permuted: tuple[int, torch.Tensor] | None = None

    def num_batches(self, epoch: int) -> int:
        return self._num_batches

    def position(self, epoch: int, batch: int) -> int:
        return batch * self._size

    def indices(self, epoch: int, batch: int) -> list[int]:
        """Return the samples of one global batch, in order. The first call of an epoch draws its permutation.

        The last batch of an epoch has as many samples as are left.
        """
        start = batch * self._size
        stop = min(start + self._size, self.num_samples)
        if not self._shuffle:
            return list(range(start, stop))
        indices: list[int] = self._permutation(epoch)[start:stop].tolist()
        return indices

    def _permutation(self, epoch: int) -> torch.Tensor:
        # Only the latest epoch is kept: 8 bytes a sample.
        if self._permuted is None or self._permuted[0] != epoch:
            generator = torch.Generator().manual_seed(derive(self._seed, "order", epoch))
            self._permuted = (epoch, torch.randperm(self.num_samples, generator=generator))
        return self._permuted[1]


class SampledOrder:
    """What a sampler of the user's yields, cut into batches of one size; the last one of an epoch may be short.

    Args:
        sampler: yields the indices of an epoch each time it is iterated.
        num_samples: samples in the dataset.
        batch_size: samples in a *global* batch, over all workers.
        seed: of the random numbers under which the sampler is listed; below 2**63.
        device: whose generator is seeded for that too.

    Raises:
        UsageError: the sampler or the batch size can't be used.
    """

    varies = True

    def __init__(
        self,
        sampler: Any,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        check_batch_size(batch_size)
        check_sampler(sampler, "sampler")
        self.num_samples = num_samples
        self.batch_size: int | None = batch_size
        self._size = batch_size
        self._sampler = sampler
        self._seed = seed
        self._device = device
        self._listed: tuple[int, array[int]] | None = None  # the latest epoch only: 8 bytes an index

    def num_batches(self, epoch: int) -> int:
        return -(-len(self._epoch(epoch)) // self._size)

    def position(self, epoch: int, batch: int) -> int:
        return batch * self._size

    def indices(self, epoch: int, batch: int) -> list[int]:
        start = batch * self._size
        return self._epoch(epoch)[start : start + self._size].tolist()

    def _epoch(self, epoch: int) -> array[int]:
        if self._listed is None or self._listed[0] != epoch:
            yielded = epoch_of(self._sampler, epoch, seed=self._seed, device=self._device)
            self._listed = (epoch, array("q", (index_of(index, "sampler") for index in yielded)))
        return self._listed[1]


class BatchSampledOrder:
    """The global batches that a batch sampler of the user's yields, each of a size of its own.

    Args:
        batch_sampler: yields lists of indices, the batches of an epoch, each time it is iterated.
        num_samples: samples in the dataset.
        seed: of the random numbers under which it is listed; below 2**63.
        device: whose generator is seeded for that too.

    Raises:
        UsageError: the batch sampler can't be used.
    """

    varies = True
    batch_size: int | None = None

    def __init__(
        self, batch_sampler: Any, num_samples: int, *, seed: int = 0, device: torch.device | None = None
    ) -> None:
        check_sampler(batch_sampler, "batch_sampler")
        self.num_samples = num_samples
        self._batch_sampler = batch_sampler
        self._seed = seed
        self._device = device
        # Of the latest epoch: its number, its indices, and where in them each batch begins.
        self._listed: tuple[int, array[int], list[int]] | None = None

    def num_batches(self, epoch: int) -> int:
        return len(self._epoch(epoch)[1]) - 1

    def position(self, epoch: int, batch: int) -> int:
        return self._epoch(epoch)[1][batch]

    def indices(self, epoch: int, batch: int) -> list[int]:
        indices, starts = self._epoch(epoch)
        return indices[starts[batch] : starts[batch + 1]].tolist()

    def _epoch(self, epoch: int) -> tuple[array[int], list[int]]:
        if self._listed is None or self._listed[0] != epoch:
            yielded = epoch_of(self._batch_sampler, epoch, seed=self._seed, device=self._device)
            indices, starts = array("q"), [0]
            for number, item in enumerate(yielded):
                indices.extend(_batch_of(item, number))
                starts.append(len(indices))
            self._listed = (epoch, indices, starts)
        return self._listed[1:]


def _batch_of(item: Any, number: int) -> list[int]:
    try:
        indices = list(item)
    except TypeError:
        raise UsageError(
            f"batch_sampler yielded {item!r} as batch {number}: expected a list of indices, a global batch. "
            f"What yields single indices is a sampler: give it as sampler=, with a batch_size."
        ) from None
    if not indices:
        raise UsageError(f"batch_sampler yielded no index as batch {number}: expected at least one.")
    return [index_of(index, "batch_sampler") for index in indices]


def check_batch_size(batch_size: int) -> None:
    """Raise a `UsageError` unless a global batch has at least one sample."""
    if batch_size < 1:
        raise UsageError(f"batch_size={batch_size}: expected at least 1 sample in a global batch.")
