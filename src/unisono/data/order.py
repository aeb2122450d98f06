"""Which samples make up which global batch.

The order is a pure function of the seed, the epoch and the batch: never of ranks, workers, or of what was
read before. A cursor of two integers is therefore all that a resumed run needs.
"""

from __future__ import annotations

import torch

from unisono.errors import UsageError
from unisono.randomness import derive


class Order:
    """The global batches of every epoch, as lists of sample indices.

    Args:
        num_samples: samples in the dataset.
        batch_size: samples in a *global* batch, over all workers.
        shuffle: draw a new permutation for every epoch; else the dataset's own order.
        drop_last: leave out the batch at the end of an epoch that would be short.
        seed: of the permutations; below 2**63.

    Raises:
        UsageError: no samples, ``batch_size < 1``, or `drop_last` would leave no batch at all.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}: expected at least 1 sample in a global batch.")
        if num_samples < 1:
            raise UsageError(f"the dataset has {num_samples} samples: there is nothing to load.")
        full, rest = divmod(num_samples, batch_size)
        self.num_batches = full if drop_last or not rest else full + 1
        if not self.num_batches:
            raise UsageError(
                f"drop_last=True leaves no batch at all: the dataset has {num_samples} samples, "
                f"batch_size={batch_size}. Lower batch_size or set drop_last=False."
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._permuted: tuple[int, torch.Tensor] | None = None

    def indices(self, epoch: int, batch: int) -> list[int]:
        """Return the samples of one global batch, in order. The first call of an epoch draws its permutation.

        The last batch of an epoch has as many samples as are left.
        """
        start = batch * self.batch_size
        stop = min(start + self.batch_size, self.num_samples)
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
