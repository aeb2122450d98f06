"""Training runs on data of all kinds whose bits must not depend on who loads what."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, WeightedRandomSampler

import unisono
from scenarios import Noisy, cross_entropy, mlp

Outcome = list[Any]


class Rows(IterableDataset):
    """A stream of noisy rows that can't be cut."""

    def __init__(self, num_rows: int) -> None:
        self.rows = Noisy(num_rows, 6)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return map(self.rows.__getitem__, range(len(self.rows)))


class Files:
    """Noisy rows in files of unequal length, with a shuffle buffer that draws from the global generators."""

    def __init__(self, lengths: Iterable[int], first: int = 0) -> None:
        self.lengths = list(lengths)
        self.num_shards = len(self.lengths)
        self.first = first
        self.rows = Noisy(61, 6)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.lengths[index::num_shards], first=index * 7)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        buffer: list[int] = []
        for row in range(sum(self.lengths)):
            buffer.append(self.first + row)
            if len(buffer) == 3:
                yield self.rows[buffer.pop(random.randrange(3))]
        yield from map(self.rows.__getitem__, buffer)


class Buckets:
    """Batches of unequal size, another number of them in every epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        rows = torch.randperm(61).tolist()
        while rows:
            size = 3 + numpy.random.randint(15)
            yield rows[:size]
            rows = rows[size:]


def train(run: unisono.Run, batches: Callable[[], Iterable[Any]], *, epochs: int = 2) -> Outcome:
    """Train a model with batch norm and dropout; return fingerprint and losses."""
    model = nn.Sequential(nn.BatchNorm1d(6), mlp())
    replica = run.replicate(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for _ in range(epochs):
        for batch in batches():
            losses.append(replica.step(batch, cross_entropy_of_two).hex())
    return [run.fingerprint(model), losses]


def cross_entropy_of_two(model: nn.Module, micro_batch: Any) -> Tensor:
    """Cross entropy that also works for a single row, which batch norm refuses."""
    rows, labels = micro_batch
    return cross_entropy(model, (torch.cat([rows, 2 * rows]), torch.cat([labels, labels])))


def weighted_sampler(run: unisono.Run) -> Outcome:
    torch.manual_seed(run.rank)
    sampler = WeightedRandomSampler(torch.arange(1.0, 62.0), 50, generator=torch.Generator())
    loader = run.load(Noisy(61, 6), batch_size=16, micro_batches=5, sampler=sampler)
    return train(run, lambda: loader)


def buckets(run: unisono.Run) -> Outcome:
    loader = run.load(Noisy(61, 6), batch_sampler=Buckets(), micro_batches=4, num_workers=1)
    return [*train(run, lambda: loader), loader.step]


def stream(run: unisono.Run) -> Outcome:
    loader = run.load(Rows(45), batch_size=16, micro_batches=5, num_workers=2)
    return [*train(run, lambda: loader), loader.step]


def shards(run: unisono.Run) -> Outcome:
    loader = run.load(
        Files([9, 2, 7, 1, 0, 5, 6]), batch_size=11, micro_batches=4, num_workers=2, persistent_workers=True
    )
    return [*train(run, lambda: loader), loader.step]


def made_rows(micro_batch: int, size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 6) + random.random(), torch.randint(0, 3, (size,)) * int(micro_batch > 0)


def made(run: unisono.Run) -> Outcome:
    return train(run, lambda: [run.batch(made_rows, 5), run.batch(made_rows, 5, batch_size=7)], epochs=3)


def packed(run: unisono.Run) -> Outcome:
    noisy = Noisy(61, 6)
    rows = unisono.PackedList(zip(noisy.rows, noisy.labels, strict=True))
    loader = run.load(rows, batch_size=16, micro_batches=5, shuffle=True)
    return train(run, lambda: loader)


SCENARIOS = {
    scenario.__name__: scenario for scenario in (weighted_sampler, buckets, stream, shards, made, packed)
}


def run_all(assignment: str | list[int] = "even") -> dict[str, Outcome]:
    """Run all scenarios, one after the other, as one worker of a run."""
    with unisono.join(seed=4, assignment=assignment) as run:
        return {name: scenario(run) for name, scenario in SCENARIOS.items()}


def resumable(first: int, last: int, state: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """Take part in steps `first` to `last` - 1 over streams, buckets and made batches, from `state`."""
    with unisono.join(seed=2) as run:
        model = mlp()
        replica = run.replicate(model, torch.optim.Adam(model.parameters(), lr=0.01))
        loaders: list[Any] = [
            run.load(Rows(45), batch_size=16, micro_batches=5),
            run.load(Files([9, 2, 7, 1, 0, 5, 6]), batch_size=11, micro_batches=4),
            run.load(Noisy(61, 6), batch_sampler=Buckets(), micro_batches=3),
        ]
        if state is not None:
            run.load_state_dict(state)
        done = first
        for _ in run.epochs(9):
            for batches in zip(*loaders, strict=False):
                for batch in (*batches, run.batch(made_rows, 3)):
                    replica.step(batch, cross_entropy)
                done += 1
                if done == last:
                    return _copied(run.state_dict()), run.fingerprint(model)
    raise AssertionError(f"the run ended after {done} steps, expected {last}")


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_copied(value) for value in state]
    return state.clone() if isinstance(state, Tensor) else state
