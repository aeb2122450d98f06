"""Evaluation: every sample once, and the same figures to the bit at any world size.

The dataset is cut into micro-batches of ``batch_size`` in its own order; nothing is padded or left out, and
the last one is as short as it has to be. What a metric gathers from a micro-batch is a *state*; states are
added along the same kind of tree as gradients: first inside the blocks of each worker, then, after one
exchange of these partial results, over the blocks of all workers. So it never matters who ran what.

This file owns the pass over the data and the exchange of states, not the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.collectives.gather import gather_bytes
from unisono.data.batch import move
from unisono.data.processes import LoaderProcesses
from unisono.data.samples import Collate, Samples, Task
from unisono.errors import UsageError
from unisono.grid import Assignment, Block, assign, even_shares, root
from unisono.metrics import Metric, State, decode, encode, merge, named_metrics
from unisono.randomness import derive, keyed
from unisono.transport.base import Transport

NOBODY_ASKS: AbstractContextManager[object] = nullcontext()


def evaluate(
    model: nn.Module,
    dataset: Any,
    metrics: Any,
    *,
    batch_size: int,
    transport: Transport,
    rank: int,
    seed: int = 0,
    device: torch.device | None = None,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    timeout_s: float = 1800.0,
    waiting: AbstractContextManager[object] = NOBODY_ASKS,
) -> Any:
    """Return the figures of `metrics` for `model` on all of `dataset`, the same on every worker.

    *Collective: every rank calls this, in the same order.* *Blocking.* The model runs in evaluation mode
    without gradients; the mode of every submodule and all generators are put back afterwards. Each worker
    sends log2 of its number of micro-batches states at most.

    Args:
        model: the same on every worker.
        dataset: has ``__len__`` and ``__getitem__``.
        metrics: one metric, or a dict of them. A metric is
            a function ``metric(model, micro_batch) -> (value, weight)``: its figure is the mean of the values,
            weighted, in float64 (nan if all weights are 0); or a pair ``(torchmetrics object, predict)`` with
            ``predict(model, micro_batch)`` -> the arguments of the object's ``update``; or a torchmetrics
            object alone, for micro-batches that are pairs (inputs, targets). The object is left as it was.
            Metrics with the same `predict` share one call of it.
        batch_size: samples in a micro-batch, which one worker runs whole.
        transport: this rank's end of the group of all workers.
        rank: this worker.
        seed: of the random numbers of dataset and metrics; each evaluation draws the same ones.
        device: where micro-batches and metrics go.
        collate_fn: list of samples -> micro-batch; None for torch's `default_collate`.
        num_workers: loader processes of this worker; 0 loads in the main process.
        timeout_s: how long to wait for one micro-batch of a loader process.
        waiting: entered while this worker waits for the others' states.

    Returns:
        The figure: a float, or what ``compute()`` of a torchmetrics object returns (one number as a float). For
        a dict of metrics a dict of figures.

    Raises:
        UsageError: something above can't be used, or a metric returned something else.
    """
    named = named_metrics(metrics, device)
    samples = Samples(dataset, collate_fn, derive(seed, "evaluate") >> 1)
    parts = _parts(len(dataset), batch_size, num_workers)
    share = assign(len(parts), even_shares(len(parts), transport.world_size), allow_idle=True)
    tasks = [
        Task(0, 0, number, parts[number].start, list(parts[number])) for number in share.micro_batches(rank)
    ]
    start_processes = partial(
        LoaderProcesses,
        samples,
        tasks,
        num_workers=num_workers,
        rank=rank,
        timeout_s=timeout_s,
        pin_memory=device is not None and device.type == "cuda",
    )
    with (
        _evaluating(model),
        keyed(device) as seed_generators,
        start_processes()
        if num_workers and tasks
        else nullcontext(samples.load(task, seed_generators) for task in tasks) as micro_batches,
    ):
        run = _Pass(model, tuple(named.values()), micro_batches, device, seed, seed_generators)
        own = {block: run.states(block) for block in share.blocks[rank]}
    with waiting:
        states = _merge_all(own, share, run.metrics, transport)
    figures = {
        name: metric.finish(state, len(parts))
        for (name, metric), state in zip(named.items(), states, strict=True)
    }
    return figures if isinstance(metrics, Mapping) else figures[""]


def _parts(num_samples: int, batch_size: int, num_workers: int) -> list[range]:
    """Cut the dataset into micro-batches, in its own order."""
    if batch_size < 1:
        raise UsageError(f"batch_size={batch_size}: expected at least 1 sample in a micro-batch.")
    if num_workers < 0:
        raise UsageError(f"num_workers={num_workers}: expected at least 0.")
    if num_samples < 1:
        raise UsageError("the dataset has 0 samples: there is nothing to evaluate.")
    starts = range(0, num_samples, batch_size)
    return [range(start, min(start + batch_size, num_samples)) for start in starts]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode, without gradients; put the mode of each submodule back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@dataclass(frozen=True)
class _Pass:
    """One worker's way through its micro-batches, which it takes in ascending order."""

    model: nn.Module
    metrics: tuple[Metric, ...]
    micro_batches: Iterator[Any]
    device: torch.device | None
    seed: int
    seed_generators: Callable[[int], None]

    def states(self, block: Block) -> list[State]:
        """Return each metric's state of a block, of which the data comes next."""
        if block.is_leaf:
            return self._measure(block.start)
        left, right = block.halves()
        return merge(self.states(left), self.states(right), self.metrics)

    def _measure(self, micro_batch: int) -> list[State]:
        data = move(next(self.micro_batches), self.device)
        results: dict[int, Any] = {}

        def call(function: Callable[[Any, Any], Any]) -> Any:
            if id(function) not in results:
                self.seed_generators(derive(self.seed, "evaluate", micro_batch))
                results[id(function)] = function(self.model, data)
            return results[id(function)]

        return [metric.measure(call) for metric in self.metrics]


def _merge_all(
    own: Mapping[Block, list[State]], share: Assignment, metrics: Sequence[Metric], transport: Transport
) -> list[State]:
    """Exchange the states of blocks and return those of the whole grid, the same on all ranks."""
    blocks = sorted(block for blocks in share.blocks for block in blocks)
    encoded = {blocks.index(block): encode(states) for block, states in own.items()}
    received = gather_bytes(transport, encoded, len(blocks))
    of_block = {block: decode(data) for block, data in zip(blocks, received, strict=True)}

    def total(block: Block) -> list[State]:
        if block in of_block:
            return of_block[block]
        left, right = block.halves()
        return merge(total(left), total(right), metrics)

    return total(root(share.num_micro_batches))
