"""The synchronous step on real workers, against values computed by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unisono
from steps import Line, global_batch, line_loss, line_loss_per_item
from unisono.errors import MismatchError

Launch = Callable[..., list[Any]]


def w_after(
    parts: list[Any], shares: list[int], *, loss_fn: Any = line_loss, lr: float = 1.0, **replica_options: Any
) -> float:
    """One step of a `Line` on as many workers as there are shares; its w afterwards. Called on every worker."""
    with unisono.join() as run:
        model = Line()
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=lr), **replica_options)
        batch = global_batch([torch.tensor(part) for part in parts], shares=shares, rank=run.rank)
        replica.step(batch, loss_fn)
        return float(model.w)


def test_token_means_are_over_all_tokens_of_all_workers(launch: Launch) -> None:
    def work() -> float:
        parts = [[4.0], [8.0], [0.0] * 3, [2.0] * 5]
        return w_after(parts, [2, 2], loss_fn=line_loss_per_item)

    assert launch(work, 2) == pytest.approx([2.2] * 2)


def test_a_worker_without_a_single_valid_token_changes_nothing(launch: Launch) -> None:
    def work() -> float:
        parts: list[Any] = [[[]], [[4.0]], [[8.0]], [[0.0] * 3], [[2.0] * 5]]
        return w_after(parts, [1, 2, 2], loss_fn=line_loss_per_item)

    assert launch(work, 3) == pytest.approx([2.2] * 3)


def test_workers_with_different_numbers_of_rows_weigh_by_rows(launch: Launch) -> None:
    assert launch(lambda: w_after([[1.0, 2.0, 3.0], [4.0, 5.0]], [1, 1]), 2) == [3.0, 3.0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_step_does_not_grow_with_the_number_of_workers(launch: Launch, world_size: int) -> None:
    shares = [4 // world_size] * world_size
    result = launch(lambda: w_after([[1.0]] * 4, shares, lr=0.1), world_size)
    assert result == pytest.approx([0.1] * world_size)


def test_gradients_are_clipped_after_they_are_averaged(launch: Launch) -> None:
    parts = [[-3.0], [1.0]]  # gradients 3 and -1: their mean is 1, clipping each first gives 0
    assert launch(lambda: w_after(parts, [1, 1], clip_norm=1.0), 2) == pytest.approx([-1.0] * 2)
    halves = [[-3.0], [-3.0], [1.0], [1.0]]
    assert launch(lambda: w_after(halves, [2, 2], clip_norm=0.5), 2) == pytest.approx([-0.5] * 2, rel=1e-5)


def test_a_loss_from_an_inner_module_or_any_method_is_reduced_all_the_same(launch: Launch) -> None:
    def work() -> list[float]:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Line()

            def predict(self) -> Tensor:
                return self.inner.w * 1

        losses: list[Any] = [
            lambda model, y: model.inner.loss(y),
            lambda model, y: (model.predict() - y).square().mean() / 2,
        ]
        found = []
        with unisono.join() as run:
            for loss_fn in losses:
                model = Outer()
                replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
                replica.step(
                    global_batch([torch.tensor([2.0]), torch.tensor([4.0])], shares=[1, 1], rank=run.rank),
                    loss_fn,
                )
                found.append(float(model.inner.w))
        return found

    assert launch(work, 2) == [[3.0, 3.0]] * 2


def test_unused_parameters_have_no_gradient_and_are_not_decayed(launch: Launch) -> None:
    def work() -> tuple[float, float, bool]:
        with unisono.join() as run:
            model = nn.ModuleDict({"a": Line(), "b": nn.Linear(1, 1, bias=False)})
            nn.init.constant_(model["b"].weight, 5.0)
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1))
            batch = global_batch([torch.tensor([2.0]), torch.tensor([4.0])], shares=[1, 1], rank=run.rank)
            replica.step(batch, lambda model, y: model["a"].loss(y))
            return float(model["a"].w), float(model["b"].weight), model["b"].weight.grad is None

    assert launch(work, 2) == [(3.0, 5.0, True)] * 2


def test_running_statistics_are_one_value_on_every_worker(launch: Launch) -> None:
    def work() -> list[float]:
        with unisono.join() as run:
            model = nn.BatchNorm1d(1)
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
            parts = [torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0], [14.0]])]
            replica.step(
                global_batch(parts, shares=[1, 1], rank=run.rank), lambda model, x: model(x).square().mean()
            )
            return [model.running_mean.item(), model.running_var.item(), model.num_batches_tracked.item()]

    first, second = launch(work, 2)
    assert first == second
    assert first == pytest.approx([0.65, 1.4, 1])


def test_a_changed_buffer_reaches_workers_that_had_no_micro_batch(launch: Launch) -> None:
    def work() -> tuple[list[float], str]:
        class Last(Line):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("last", torch.zeros(1))

            def loss(self, targets: Tensor) -> Tensor:
                self.last = targets.double()
                return super().loss(targets)

        with unisono.join() as run:
            model = Last()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
            replica.step(global_batch([torch.tensor([2.0, 7.0])], shares=[0, 1], rank=run.rank), line_loss)
            return model.last.tolist(), run.fingerprint(model)

    first, second = launch(work, 2)
    assert first == second
    assert first[0] == [2.0, 7.0]


def test_a_buffer_that_workers_change_differently_is_an_error_on_all_of_them(launch: Launch) -> None:
    def work() -> tuple[str, bool]:
        class Last(Line):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("last", torch.zeros(1))

            def loss(self, targets: Tensor) -> Tensor:
                self.last.data.copy_(targets)
                return super().loss(targets)

        with unisono.join() as run:
            model = Last()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
            before = run.fingerprint(model)
            batch = global_batch([torch.tensor([2.0]), torch.tensor([4.0])], shares=[1, 1], rank=run.rank)
            with pytest.raises(MismatchError) as caught:
                replica.step(batch, line_loss)
            untouched = run.fingerprint(model) == before
            # A step that all gave up is over: the next one works.
            same = global_batch([torch.tensor([4.0]), torch.tensor([4.0])], shares=[1, 1], rank=run.rank)
            replica.step(same, line_loss)
            return str(caught.value), untouched and float(model.w) == 4.0

    first, second = launch(work, 2)
    assert first == second
    assert first[1]
    assert "buffer 'last' was changed differently by micro-batches 0 and 1" in first[0]


def test_fast_reduction_is_close_to_the_exact_one(launch: Launch) -> None:
    def work(shares: list[int]) -> list[Tensor]:
        found = []
        with unisono.join() as run:
            for reduction in ("exact", "fast"):
                torch.manual_seed(1)
                model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
                strategy = unisono.Synchronous(reduction=reduction)
                replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
                torch.manual_seed(2)
                parts = [torch.randn(3, 5) for _ in range(5)]
                for _ in range(3):
                    replica.step(
                        global_batch(parts, shares=shares, rank=run.rank),
                        lambda model, x: model(x).square().mean(),
                    )
                found.append(torch.cat([value.flatten() for value in model.state_dict().values()]))
        return found

    for shares in ([5], [2, 3], [3, 0, 2]):
        results = launch(work, len(shares), shares)
        for exact, fast in results:
            torch.testing.assert_close(fast, exact, rtol=1e-5, atol=1e-6)
            assert torch.equal(fast, results[0][1])


def test_a_step_with_a_late_gradient_is_done_again_and_then_nothing_is_sent_early(launch: Launch) -> None:
    def work() -> tuple[list[int], list[float]]:
        calls: list[int] = []
        with unisono.join() as run:
            model = nn.ModuleDict({"in": nn.Linear(1, 4), "block": nn.Linear(4, 4), "out": nn.Linear(4, 1)})
            strategy = unisono.Synchronous(overlap=True, bucket_bytes=1, first_bucket_bytes=1)
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)

            def loss_fn(model: Any, x: Tensor) -> Tensor:
                calls[-1] += 1
                hidden = model["in"](x)
                for _ in range(2 if run.rank == 1 else 1):  # only one worker sees it
                    hidden = checkpoint(model["block"], hidden, use_reentrant=True)
                return model["out"](hidden).square().mean()

            parts = [torch.tensor([[1.0]]), torch.tensor([[2.0]])]
            for _ in range(3):
                calls.append(0)
                replica.step(global_batch(parts, shares=[1, 1], rank=run.rank), loss_fn)
            return calls, [p.sum().item() for p in model.parameters()]

    first, second = launch(work, 2)
    assert first[0] == second[0] == [2, 1, 1]
    assert first[1] == second[1]


def test_all_zero_weights_skip_the_step_on_every_worker(launch: Launch) -> None:
    def work() -> tuple[float, float, int, bool]:
        with unisono.join() as run:
            model = Line()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
            nothing = [torch.zeros(1, 0)] * 3
            loss = replica.step(global_batch(nothing, shares=[2, 1], rank=run.rank), line_loss_per_item)
            ones = [torch.ones(1, 2)] * 3
            replica.step(global_batch(ones, shares=[2, 1], rank=run.rank), line_loss_per_item)
            return math.isnan(loss), float(model.w), replica.num_steps, model.w.grad is not None

    assert launch(work, 2) == [(True, 1.0, 2, True)] * 2


@pytest.mark.parametrize("what", ["sizes", "samples", "parameters", "values", "one worker"])
def test_workers_that_are_at_different_batches_or_train_other_parameters_get_an_error(
    launch: Launch, what: str
) -> None:
    def work(what: str) -> str:
        with unisono.join() as run:
            model = nn.ModuleList([Line(), Line()])
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
            if what == "parameters":
                model[run.rank].requires_grad_(False)
            elif what == "values":  # a layer made anew, differently on every rank
                model[1].w = nn.Parameter(torch.tensor(float(run.rank)))
            elif what == "one worker" and run.rank:
                model[1].w = nn.Parameter(torch.zeros(()))
            parts = [torch.ones(2), torch.ones(2 + run.rank * (what == "sizes"))]
            batch = global_batch(parts, shares=[1, 1], rank=run.rank, nominal=2)
            if what == "samples":
                batch = dataclasses.replace(batch, digest=run.rank)
            with pytest.raises(MismatchError) as caught:
                replica.step(batch, lambda model, y: model[0].loss(y) + model[1].loss(y))
            return str(caught.value)

    first, second = launch(work, 2, what)
    assert first == second
    assert "step 0: rank 1 (micro-batch 1) and rank 0 (micro-batch 0) are not at the same step" in first


def test_a_parameter_replaced_in_the_same_way_on_every_worker_is_trained(launch: Launch) -> None:
    def work() -> tuple[float, str]:
        with unisono.join() as run:
            model = Line()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            replica = run.replicate(model, optimizer)
            for value in (3.0, 5.0):
                model.w = nn.Parameter(torch.tensor(value))
                optimizer.param_groups[0]["params"] = [model.w]
                for number in range(2):
                    parts = [torch.tensor([2.0 + number]), torch.tensor([4.0 + number])]
                    replica.step(global_batch(parts, shares=[1, 1], rank=run.rank), line_loss)
            return float(model.w), run.fingerprint(model)

    first, second = launch(work, 2)
    assert first == second
    assert first[0] == 4.0
