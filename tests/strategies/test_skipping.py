"""Steps that are given up: on all workers or on none, whoever has the reason."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono
from steps import Line, alone, global_batch, line_loss
from unisono.errors import JobError, StepFailedError, UsageError
from unisono.events import Event, Notice, StepFinished

Launch = Callable[..., list[Any]]
OVERLAPS = (True, False)


def line(run: unisono.Run, *, lr: float = 1.0, **options: Any) -> unisono.Replica:
    model = Line()
    return run.replicate(model, torch.optim.SGD(model.parameters(), lr=lr), **options)


def pair(run: unisono.Run) -> Any:
    """The targets 2 and 4, one for each of two workers, or both for one."""
    shares = [1, 1] if run.world_size == 2 else [2]
    return global_batch([torch.tensor([2.0]), torch.tensor([4.0])], shares=shares, rank=run.rank)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_error_caught_on_one_worker_skips_the_step_on_all(
    launch: Launch, world_size: int, overlap: bool
) -> None:
    def work() -> list[Any]:
        with unisono.join() as run:
            replica = line(run, lr=0.5, strategy=unisono.Synchronous(overlap=overlap, bucket_bytes=1))
            seen = []
            for step in range(4):

                def loss_fn(model: Any, targets: Tensor, step: int = step) -> Tensor:
                    if step == 1 and 4.0 in targets:
                        raise MemoryError
                    return line_loss(model, targets)

                try:
                    replica.step(pair(run), loss_fn)
                except MemoryError:
                    replica.skip()
                seen.append(replica.model.w.item())
            return [*seen, replica.num_steps, replica.num_skipped]

    assert launch(work, world_size) == [[1.5, 1.5, 2.25, 2.625, 4, 1]] * world_size


def test_an_error_in_the_middle_of_backward_leaves_nothing_behind(launch: Launch) -> None:
    def work() -> tuple[str, list[float]]:
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, rows: Tensor, fails: bool) -> Tensor:
                ctx.fails = fails
                return rows.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Any:
                if ctx.fails:
                    raise MemoryError
                return gradient, None

        with unisono.join() as run:
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            strategy = unisono.Synchronous(overlap=True, bucket_bytes=1, first_bucket_bytes=1)
            replica = run.replicate(model, optimizer, strategy=strategy)
            losses = []
            for step in range(4):
                parts = [torch.randn(3, 3) + number + step for number in range(2)]
                batch = global_batch(parts, shares=[1, 1], rank=run.rank)

                def loss_fn(model: Any, rows: Tensor, step: int = step) -> Tensor:
                    hidden = Fails.apply(model[1](model[0](rows)), step in (0, 2) and run.rank == 1)
                    return model[2](hidden).square().mean()

                try:
                    losses.append(replica.step(batch, loss_fn))
                except MemoryError:
                    replica.skip()
            return run.fingerprint(model), losses

    (first, losses), (second, other) = launch(work, 2)
    assert first == second
    assert [loss for loss in losses if not math.isnan(loss)] == other
    assert len(other) == 2


def test_an_error_that_is_caught_but_not_given_up_is_loud(launch: Launch) -> None:
    def work() -> None:
        def loss_fn(model: Any, targets: Tensor) -> Tensor:
            if run.rank == 1:
                raise MemoryError
            return line_loss(model, targets)

        with unisono.join() as run:
            replica = line(run)
            for _ in range(2):
                with suppress(MemoryError):
                    replica.step(pair(run), loss_fn)

    with pytest.raises(
        JobError, match=r"rank.*1|worker 1 failed at step 0: StepFailedError: step 0 failed on this"
    ) as caught:
        launch(work, 2)
    assert "replica.skip()" in str(caught.value)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, OSError, KeyError])
def test_no_usual_clause_catches_that_a_step_was_not_given_up(error: type[Exception]) -> None:
    def fails(model: Any, targets: Tensor) -> Tensor:
        raise error("of the user's own")

    with alone() as run:
        replica = line(run)
        with pytest.raises(error):
            replica.step(pair(run), fails)
        with pytest.raises(StepFailedError, match=r"of the user's own.*replica.skip\(\)") as caught:
            replica.step(pair(run), fails)
        assert not isinstance(caught.value, error)
        replica.skip()


def test_a_run_does_not_end_well_with_a_step_that_was_not_given_up(launch: Launch) -> None:
    def work() -> None:
        def loss_fn(model: Any, targets: Tensor) -> Tensor:
            if run.rank == run.world_size - 1:
                raise ValueError("of the user's own")
            return line_loss(model, targets)

        with unisono.join() as run, suppress(ValueError):
            line(run).step(pair(run), loss_fn)

    for world_size in (1, 2):
        words = (
            f"worker {world_size - 1} failed at step 0: StepFailedError: step 0 failed on this worker with"
        )
        with pytest.raises(JobError, match=words):
            launch(work, world_size)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_loss_that_is_not_finite_on_one_worker_skips_the_step_on_all(launch: Launch, overlap: bool) -> None:
    def work() -> list[Any]:
        events: list[Event] = []
        with unisono.join(observer=events.append) as run:
            model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
            strategy = unisono.Synchronous(overlap=overlap)
            replica = run.replicate(model, torch.optim.Adam(model.parameters()), strategy=strategy)
            losses = []
            for step in range(6):
                parts = [torch.randn(2, 3) for _ in range(4)]
                batch = global_batch(parts, shares=[1] * 4, rank=run.rank)
                poison = math.nan if step == 2 and run.rank == 3 else 1.0
                losses.append(replica.step(batch, lambda m, rows, p=poison: m(rows).square().mean() * p))
        finite = all(parameter.isfinite().all() for parameter in model.parameters())
        notices = [event.message for event in events if isinstance(event, Notice)]
        steps = [event.skipped for event in events if isinstance(event, StepFinished)]
        return [
            run.fingerprint(model),
            [loss.hex() for loss in losses],
            replica.num_skipped,
            finite,
            notices,
            steps,
        ]

    found = launch(work, 4)
    assert found[1:] == found[:1] * 3
    _, losses, num_skipped, finite, notices, steps = found[0]
    assert (losses[2], num_skipped, finite) == ("nan", 1, True)
    assert notices == ["step 2: a global batch was skipped: the loss of micro-batch 3 (rank 3) is nan"]
    assert [step is None for step in steps] == [True, True, False, True, True, True]


def test_a_loss_function_gives_the_step_up(launch: Launch) -> None:
    def work() -> list[Any]:
        def loss_fn(model: Any, targets: Tensor) -> Tensor | None:
            if 4.0 in targets and replica.num_steps == 0:
                replica.skip()
                return None
            return line_loss(model, targets)

        with unisono.join() as run:
            replica = line(run)
            first = replica.step(pair(run), loss_fn)
            skipped = replica.skipped
            second = replica.step(pair(run), loss_fn)
            return [math.isnan(first), skipped, second, replica.skipped, replica.model.w.item()]

    for world_size in (1, 2):
        assert launch(work, world_size) == [[True, True, 5.0, False, 3.0]] * world_size


def test_buffers_of_a_skipped_step_are_as_before() -> None:
    with alone() as run:
        model = nn.BatchNorm1d(2)
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = run.fingerprint(model)
        replica.step(global_batch([torch.ones(2, 2)]), lambda m, rows: m(rows).sum() * math.inf)
        assert run.fingerprint(model) == before
        assert model.weight.grad is None


def test_without_skip_a_loss_function_must_return_a_loss() -> None:
    with alone() as run:
        replica = line(run)
        with pytest.raises(UsageError, match="returned 'NoneType'"):
            replica.step(global_batch([torch.ones(1)]), lambda m, targets: None)
        replica.skip()


def test_a_gradient_norm_that_is_not_finite_skips_the_update() -> None:
    with alone() as run:
        replica = line(run, clip_norm=1.0)
        replica.step(global_batch([torch.ones(1)]), lambda m, targets: (m.w * 1e-45).sqrt().sum())
        assert (replica.model.w.item(), replica.skipped, replica.num_steps) == (0.0, True, 1)


def small_lbfgs(run: unisono.Run, **options: Any) -> unisono.Replica:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    return run.replicate(model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4), **options)


def targets(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return global_batch([torch.randn(4, 2, generator=generator) for _ in range(2)])


def distance(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows).squeeze(1) - rows.sum(1)).square().mean()


class Bad:
    """Makes a loss, a gradient or a forward pass go wrong at the given calls."""

    def __init__(self, kind: str, calls: set[int]) -> None:
        self.kind, self.calls, self.count = kind, calls, 0

    def __call__(self, model: nn.Module, rows: Tensor) -> Tensor:
        loss = distance(model, rows)
        self.count += 1
        if self.count not in self.calls:
            return loss
        if self.kind == "error":
            raise MemoryError
        if self.kind == "gradient":
            loss.register_hook(lambda gradient: gradient * math.inf)
            return loss
        return loss * math.nan


def calm_outcome(scaler: Any) -> str:
    with alone() as run:
        replica = small_lbfgs(run, clip_norm=None if scaler else 100.0, scaler=scaler)
        for step in (0, 2):
            replica.step(targets(step), distance)
        return run.fingerprint(replica.model)


@pytest.mark.parametrize("kind", ["loss", "gradient", "overflow", "error"])
@pytest.mark.parametrize("call", [1, 2, 6])
def test_a_step_of_several_evaluations_is_applied_whole_or_not_at_all(kind: str, call: int) -> None:
    """Two micro-batches: the first, second and third evaluation go wrong."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if kind == "overflow" else None
    calm = calm_outcome(copy.deepcopy(scaler))
    with alone() as run:
        replica = small_lbfgs(run, clip_norm=None if scaler else 100.0, scaler=scaler)
        replica.step(targets(0), distance)
        before = run.fingerprint(replica.model)
        with suppress(MemoryError):
            replica.step(targets(1), Bad("gradient" if scaler else kind, {call}))
        if kind == "error":
            replica.skip()
        assert (replica.skipped, replica.num_steps, replica.num_skipped) == (True, 2, 1)
        assert run.fingerprint(replica.model) == before
        if scaler is not None:
            assert scaler.get_scale() == 4.0
        replica.step(targets(2), distance)
        assert not replica.skipped
        assert run.fingerprint(replica.model) == calm, "the optimizer's history is as before too"


def test_a_norm_that_was_not_finite_counts_for_the_whole_window() -> None:
    with alone() as run:
        replica = line(run)
        hook = replica.model.w.register_hook(lambda gradient: gradient * math.inf)
        replica.backward(pair(run), line_loss)
        assert not math.isfinite(replica.clip(1.0))
        hook.remove()
        replica.backward(pair(run), line_loss)
        replica.update()
        assert replica.skipped
        assert replica.model.w.item() == 0.0
        replica.step(pair(run), line_loss)
        assert not replica.skipped


def test_loading_a_state_forgets_the_window_that_was_open() -> None:
    with alone() as run:
        replica = line(run)
        state = copy.deepcopy(replica.state_dict())
        replica.backward(pair(run), line_loss)
        replica.load_state_dict(state)
        with pytest.raises(UsageError, match=r"update\(\) without a gradient"):
            replica.update()
        replica.backward(global_batch([torch.tensor([1.0])]), line_loss)
        assert replica.model.w.grad.item() == -1.0
