"""Declared policies for buffers on real workers, against what one process computes by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import unisono
from steps import Line, alone, global_batch, line_loss, line_loss_per_item
from unisono.errors import MismatchError, UsageError

Launch = Callable[..., list[Any]]


class Recorder(Line):
    """Every way in which models keep state: a queue, a counter, an average, a cache, a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(2))
        self.register_buffer("seen", torch.tensor(100))
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("history", torch.zeros(1))
        self.register_buffer("untouched", torch.ones(1))

    def loss(self, targets: Tensor) -> Tensor:
        if targets.numel() and targets[0] != 9:  # some micro-batches change nothing
            self.queue.data.copy_(targets[0].expand(2))
            self.seen += len(targets)
            self.average.lerp_(targets.double().mean(), 0.5)
            self.cache = targets[-1:].clone()
            self.history = torch.cat([self.history, targets])
        return super().loss(targets)


def extended(start: Tensor, values: list[Tensor], weights: list[float]) -> Tensor:
    """Append what every micro-batch appended, and the weights."""
    return torch.cat([start, *(value[len(start) :] for value in values), torch.tensor(weights)])


POLICIES = {"queue": "first", "s*n": "sum", "average": "mean", "cache": "last", "history": extended}
PARTS = [[9.0], [4.0, 5.0], [2.0], [9.0, 9.0], [6.0, 7.0, 8.0]]


def after_two_steps(shares: list[int], loss_fn: Any = line_loss) -> dict[str, Any]:
    with unisono.join() as run:
        model = Recorder()
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), buffers=POLICIES)
        parts = [torch.tensor(part) for part in PARTS]
        for number in range(2):
            some = [part + (number if part[0] != 9 else 0) for part in parts]
            replica.step(global_batch(some, shares=shares, rank=run.rank), loss_fn)
        return {name: buffer.tolist() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("shares", [[5], [2, 3], [3, 0, 2], [1, 4], [0, 5]], ids=str)
def test_every_policy_gives_what_it_says_at_any_world_size(launch: Launch, shares: list[int]) -> None:
    first, second = 4.5 * 2 + 2.0 * 1 + 7.0 * 3, 5.5 * 2 + 3.0 * 1 + 8.0 * 3
    weights = [2.0, 1.0, 3.0]
    expected = {
        "queue": [5.0, 5.0],
        "seen": 100 + 12,
        "average": pytest.approx((first / 6 / 2 + second / 6) / 2),
        "cache": [9.0],
        "history": [0.0, 4.0, 5.0, 2.0, 6.0, 7.0, 8.0, *weights, 5.0, 6.0, 3.0, 7.0, 8.0, 9.0, *weights],
        "untouched": [1.0],
    }
    results = launch(after_two_steps, len(shares), shares)
    assert results == [expected] * len(shares)
    assert len({str(result) for result in results}) == 1


def test_weights_that_the_loss_function_returns_weigh_the_mean(launch: Launch) -> None:
    def work() -> float:
        with unisono.join() as run:
            model = Recorder()
            replica = run.replicate(
                model, torch.optim.SGD(model.parameters(), lr=0.1), buffers={"*": "last", "average": "mean"}
            )
            parts = [torch.tensor([1.0]), torch.tensor([4.0])]
            weight_of = {1.0: 3, 4.0: 1}
            replica.step(
                global_batch(parts, shares=[1, 1], rank=run.rank),
                lambda model, y: (model.loss(y), weight_of[float(y[0])]),
            )
            return float(model.average)

    assert launch(work, 2) == [(0.5 * 3 + 2.0 * 1) / 4] * 2


def test_a_step_without_weight_changes_no_buffer() -> None:
    with alone() as run:
        model = Recorder()
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), buffers=POLICIES)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        replica.step(global_batch([torch.tensor([1.0])] * 2), lambda model, y: (model.loss(y), 0))
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_the_error_for_an_undeclared_buffer_says_how_to_declare_it() -> None:
    with alone() as run:
        model = Recorder()
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = global_batch([torch.tensor([2.0]), torch.tensor([3.0])])
        with pytest.raises(MismatchError, match=r"run.replicate\(..., buffers=\{'queue': 'first'\}\)"):
            replica.step(batch, line_loss_per_item)


def test_a_wrong_declaration_is_an_error_before_work_starts() -> None:
    with alone() as run:
        model = Recorder()
        with pytest.raises(UsageError, match="do you mean 'queue'"):
            run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), buffers={"quue": "first"})


def test_workers_that_declare_other_policies_are_told(launch: Launch) -> None:
    def work() -> str:
        model = Recorder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with unisono.join() as run:
            policy = "first" if run.rank == 0 else "last"
            with pytest.raises(MismatchError) as caught:
                run.replicate(model, optimizer, buffers={"queue": policy})
        return str(caught.value)

    first, second = launch(work, 2)
    assert first == second
    assert "on rank 0 the policy of buffers 'queue' is 'first'; on rank 1 the policy" in first
