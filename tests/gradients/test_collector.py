from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unisono.gradients.buckets import plan_buckets
from unisono.gradients.collector import GradientCollector
from unisono.gradients.partial_sums import count_merges
from unisono.grid import root


class Chain(nn.Module):
    """Three scalar weights; by default y = a x + b x, and c is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.tensor(value)) for value in (1.0, 2.0, 3.0))


def collector_of(model: nn.Module, *, bucket_bytes: int = 1) -> GradientCollector:
    parameters = list(model.parameters())
    buckets = plan_buckets(parameters, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    return GradientCollector(parameters, buckets)


def totals(collector: GradientCollector, model: nn.Module) -> list[float | None]:
    """Publish what the collector has and return each parameter's gradient."""
    present = [True] * len(list(model.parameters()))
    for number in range(len(present)):
        (total,) = collector.partials(number).values()
        collector.publish(number, total, present=present)
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def test_gradients_of_micro_batches_are_summed() -> None:
    model = Chain()
    collector = collector_of(model)
    collector.begin_step(count_merges([root(3)], 3))
    for leaf in range(3):
        collector.begin_leaf(leaf)
        (model.a * (leaf + 1) + model.b * 10).backward()
        assert collector.end_leaf() == [True, True, False]
        assert all(p.grad is None for p in model.parameters())
    assert totals(collector, model) == [6.0, 30.0, 0.0]
    collector.close()


@pytest.mark.parametrize("leaf", [0, 1])
def test_several_backward_calls_in_one_micro_batch_add_up(leaf: int) -> None:
    model = Chain()
    collector = collector_of(model)
    collector.begin_step(count_merges([root(2)], 2))
    for number in range(2):
        collector.begin_leaf(number)
        if number == leaf:
            (model.a * 1).backward()
            (model.a * 2 + model.b).backward()
            (model.a * 4).backward()
        collector.end_leaf()
    assert not collector.fired_late
    assert totals(collector, model)[:2] == [7.0, 1.0]
    collector.close()


def test_complete_buckets_are_reported_once_and_in_the_order_of_backward() -> None:
    model = Chain()
    collector = collector_of(model)
    told: list[int] = []
    collector.begin_step(count_merges([root(1)], 1))
    collector.begin_leaf(0, on_complete=told.append)
    (checkpoint(lambda x: x * model.a, model.b * 1, use_reentrant=True)).backward()
    assert told == [2, 1], "buckets are planned from the last parameter: bucket 2 is a"
    collector.end_leaf()
    assert told == [2, 1, 0]
    collector.close()


def test_a_gradient_after_its_bucket_was_reported_is_called_late() -> None:
    model = Chain()
    collector = collector_of(model)
    collector.begin_step(count_merges([root(1)], 1))
    collector.begin_leaf(0, on_complete=lambda number: None)
    model.a.backward()
    assert not collector.fired_late
    model.a.backward()
    assert collector.fired_late
    collector.end_leaf()
    collector.begin_step(count_merges([root(1)], 1))
    assert not collector.fired_late
    collector.close()


def test_a_backward_of_the_users_own_between_steps_is_left_alone() -> None:
    model = Chain()
    collector = collector_of(model)
    (model.a * 5).backward()
    assert model.a.grad == torch.tensor(5.0)
    collector.clear()
    assert model.a.grad is None
    collector.close()


def test_what_the_loss_function_left_in_grad_is_scaled_and_counted() -> None:
    model = Chain()
    collector = collector_of(model)
    collector.begin_step(count_merges([root(1)], 1))
    (model.a * 3 + model.c).backward()
    collector.multiply(2.0)
    collector.begin_leaf(0)
    (model.a * 10).backward()
    assert collector.end_leaf() == [True, False, True]
    assert totals(collector, model) == [16.0, 0.0, 2.0]
    collector.close()


def test_the_order_in_which_gradients_become_ready_is_noted() -> None:
    model = Chain()
    collector = collector_of(model)
    collector.begin_step(count_merges([root(1)], 1))
    collector.begin_leaf(0)
    model.b.backward()
    model.a.backward()
    collector.end_leaf()
    assert collector.ready_order is not None
    assert list(collector.ready_order) == [1, 0]
    collector.close()


def test_gradients_are_published_with_the_layout_of_their_parameters() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    collector = collector_of(model)
    collector.begin_step(count_merges([root(2)], 2))
    images = torch.randn(2, 3, 4, 4)
    for leaf in range(2):
        collector.begin_leaf(leaf)
        model(images[leaf]).square().sum().backward()
        collector.end_leaf()
    totals_(collector, model)
    weight = model.weight.grad
    assert weight is not None
    assert weight.stride() == model.weight.stride()
    (expected,) = torch.autograd.grad(sum(model(image).square().sum() for image in images), model.weight)
    torch.testing.assert_close(weight, expected)
    collector.close()


def totals_(collector: GradientCollector, model: nn.Module) -> None:
    for number in range(len(list(model.parameters()))):
        (total,) = collector.partials(number).values()
        collector.publish(number, total, present=[True] * 2)


def test_hooks_are_gone_after_close() -> None:
    model = Chain()
    collector = collector_of(model)
    collector.close()
    collector.close()
    collector.begin_step({0: 0})
    collector.begin_leaf(0)
    model.a.backward()
    assert isinstance(model.a.grad, Tensor)
    assert collector.ready_order == {}
