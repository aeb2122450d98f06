"""Reading one micro-batch: its samples in order, each under its own random numbers, then collated.

The same code runs in the main process and in loader processes. What a sample's augmentation draws depends on
the seed, the epoch, the sample's position in it and its index, never on the process that loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset, default_collate

from unisono.data.packed import PackedList
from unisono.errors import UsageError
from unisono.randomness import derive, keyed

Collate = Callable[[list[Any]], Any]


class Task(NamedTuple):
    """One micro-batch to load. Without indices there is nothing to load."""

    epoch: int
    batch: int
    micro_batch: int
    position: int  # of the first sample, in the epoch's order
    indices: list[int]


class Samples:
    """A dataset and its collation, read under keyed random numbers.

    Samples are read one by one with ``dataset[index]``, also when the dataset could return many at once, so
    that every sample has random numbers of its own. Costs about 15 us a sample on top of the dataset's own
    time; data that lies in memory (tensors, lists) draws nothing and is read without.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        collate_fn: list of samples -> data of a micro-batch; None for torch's `default_collate`.
        seed: of this dataset's random numbers; below 2**63.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None, seed: int) -> None:
        check_dataset(dataset)
        if collate_fn is not None and not callable(collate_fn):
            raise UsageError(
                f"collate_fn={collate_fn!r}: expected a function from a list of samples to a batch, or None."
            )
        self.dataset = dataset
        self._collate: Collate = default_collate if collate_fn is None else collate_fn
        self._seed = seed
        self._keyed = not draws_nothing(dataset)
        self._keyed_collate = collate_fn is not None

    def load(self, task: Task, seed_generators: Callable[[int], None]) -> Any:
        """Return the collated data of one micro-batch, None if it is empty. The caller restores the generators.

        Raises:
            Exception: whatever the dataset or the collation raises, with a note on what was being loaded.
        """
        if not task.indices:
            return None
        try:
            return self._collated(task, self._read(task, seed_generators), seed_generators)
        except StopIteration as error:
            # It would end the loop over the loader in silence.
            raise RuntimeError(f"StopIteration was raised while loading {describe(task)}") from error

    def load_here(self, tasks: Sequence[Task], device: torch.device | None) -> dict[int, Any]:
        """Return micro-batch -> data, loaded in this process; the generators are as before afterwards."""
        if not tasks:
            return {}
        if not (self._keyed or self._keyed_collate):
            return {task.micro_batch: self.load(task, _no_seeds) for task in tasks}
        # Putting the generators back costs more than 70 us, hence once for all of them.
        with keyed(device) as seed_generators:
            return {task.micro_batch: self.load(task, seed_generators) for task in tasks}

    def _read(self, task: Task, seed_generators: Callable[[int], None]) -> list[Any]:
        dataset, epoch = self.dataset, task.epoch
        if not self._keyed:
            return [dataset[index] for index in task.indices]
        samples = []
        for position, index in enumerate(task.indices, task.position):
            seed_generators(derive(self._seed, "sample", epoch, position, index))
            try:
                samples.append(dataset[index])
            except Exception as error:
                error.add_note(f"while loading sample {index} of {describe(task)}")
                raise
        return samples

    def _collated(self, task: Task, samples: list[Any], seed_generators: Callable[[int], None]) -> Any:
        try:
            if self._keyed_collate:
                seed_generators(derive(self._seed, "collate", task.epoch, task.position))
            return self._collate(samples)
        except Exception as error:
            error.add_note(f"while collating {describe(task)}")
            raise


def _no_seeds(key: int) -> None:
    return None


def describe(task: Task) -> str:
    return f"epoch {task.epoch}, batch {task.batch}, micro-batch {task.micro_batch}"


def check_dataset(dataset: Any) -> None:
    """Raise a `UsageError` unless samples can be counted and read by index."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{kind} can't be read by index: expected a dataset with __getitem__(index) and __len__(). "
            f"Store the samples so that each can be read by its number."
        )
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{kind} has no length: expected a dataset with __len__() and __getitem__(index). Add __len__."
        )


def draws_nothing(dataset: Any) -> bool:
    """Say whether reading a sample surely runs no code of the user, hence draws no random numbers."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, torch.Tensor, PackedList, list, tuple, range)
