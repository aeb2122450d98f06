"""Sparse gradients in a step: found out, mixed with dense ones, and compared with plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unisono
from steps import alone, global_batch

Launch = Callable[..., list[Any]]


class Weight(nn.Module):
    """One parameter whose gradient is sparse or dense, as the loss function uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(8.0).view(4, 2) / 8 + 1)

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.w, sparse=True)


@pytest.fixture
def run() -> Iterator[unisono.Run]:
    with alone(seed=5) as run:
        yield run


def replicate(run: unisono.Run, model: nn.Module, **options: Any) -> unisono.Replica:
    return run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("sparse_first", [True, False])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_a_parameter_reached_twice_in_one_backward_may_be_so_in_both_ways(
    run: unisono.Run, sparse_first: bool, num_micro_batches: int
) -> None:
    calls = itertools.count()

    def loss_fn(model: Any, ids: Tensor) -> Tensor:
        next(calls)
        uses = [lambda x: x * model.w.mean(), lambda x: x * model.rows(ids)]
        hidden = torch.ones(2, 2, requires_grad=True)
        for use in uses if sparse_first else uses[::-1]:  # backward reaches them in the opposite order
            hidden = checkpoint(use, hidden, use_reentrant=True)
        return hidden.mean()

    model, plain = Weight(), Weight()
    parts = [torch.tensor([0, 1])] * num_micro_batches
    replica = replicate(run, model)
    for _ in range(2):
        replica.backward(global_batch(parts), loss_fn)
        replica.update()
    assert next(calls) <= 4 * num_micro_batches
    for _ in range(2):
        plain.w.grad = None
        loss_fn(plain, parts[0]).backward()
        with torch.no_grad():
            plain.w.sub_(plain.w.grad, alpha=0.1)
    torch.testing.assert_close(model.w, plain.w)


def test_a_loss_function_that_does_something_else_at_every_call_comes_to_an_end(run: unisono.Run) -> None:
    calls = itertools.count()

    def loss_fn(model: Any, ids: Tensor) -> Tensor:
        return model.w.mean() if next(calls) % 2 else model.rows(ids).mean()

    model = Weight()
    replica = replicate(run, model)
    for _ in range(4):
        replica.step(global_batch([torch.tensor([0, 1])]), loss_fn)
    assert next(calls) <= 12


def test_any_parameter_of_a_module_called_sparse_may_have_a_dense_gradient(run: unisono.Run) -> None:
    class Pruned(nn.Module):
        sparse = True

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.weight = nn.Parameter(torch.ones(3, 2))

    model = Pruned()
    replicate(run, model).step(
        global_batch([torch.ones(1), torch.ones(1)]), lambda m, x: m.scale * m.weight.sum()
    )
    assert model.scale.item() == pytest.approx(0.4)
    assert model.weight[0].tolist() == pytest.approx([0.9, 0.9])
