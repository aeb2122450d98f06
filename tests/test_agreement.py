"""Decisions, averages, barriers and going first; and calls that don't match."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from steps import alone
from unisono.errors import JobError, UsageError

Launch = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("how", "expected"),
    [("first", 10.0), ("any", True), ("all", True), ("min", 10.0), ("max", 12.0), ("sum", 33.0)],
)
def test_workers_agree(launch: Launch, how: str, expected: object) -> None:
    def work() -> Any:
        with unisono.join() as run:
            return run.agree(10.0 + run.rank, how)

    assert launch(work, 3) == [expected] * 3


def test_the_first_workers_value_may_be_anything_of_json(launch: Launch) -> None:
    def work() -> Any:
        with unisono.join() as run:
            return run.agree({"stop": run.rank == 0, "why": ["loss", None, 0.1 + run.rank]})

    assert launch(work, 2) == [{"stop": True, "why": ["loss", None, 0.1]}] * 2


def test_means_are_weighted_and_of_those_that_count(launch: Launch) -> None:
    def work() -> list[float]:
        with unisono.join() as run:
            values = [1.0, 5.0, math.nan][run.rank]
            weight = [3.0, 1.0, 0.0][run.rank]
            return [run.mean(float(run.rank)), run.mean(values, weight), run.mean(1.0, 0.0)]

    for plain, weighted, empty in launch(work, 3):
        assert (plain, weighted) == (1.0, 2.0)
        assert math.isnan(empty)


def test_what_cannot_be_agreed_on_is_said_before_others_wait() -> None:
    with alone() as run:
        for value, how, words in [
            (1, "most", "expected one of 'first'"),
            ("a", "max", "expected a number or a truth value"),
            ({1, 2}, "first", "set can't be sent"),
        ]:
            with pytest.raises(UsageError, match=words):
                run.agree(value, how)
        with pytest.raises(UsageError, match="weight=-1"):
            run.mean(1.0, -1)


def test_rank_0_prepares_while_the_others_wait_past_any_deadline(launch: Launch, tmp_path: Path) -> None:
    def work(path: str) -> str:
        with unisono.join(step_timeout_s=0.5) as run:
            with run.first():
                if not Path(path).exists():
                    assert run.rank == 0
                    time.sleep(1.5)
                    Path(path).write_text("prepared")
            return Path(path).read_text()

    assert launch(work, 3, str(tmp_path / "data")) == ["prepared"] * 3


def test_an_error_of_the_first_ends_those_who_wait(launch: Launch) -> None:
    def work() -> None:
        with unisono.join() as run, run.first():
            raise ValueError(f"no data on rank {run.rank}")

    with pytest.raises(JobError, match="ValueError: no data on rank 0"):
        launch(work, 3)


def test_an_error_that_the_first_catches_is_one_for_those_who_wait(launch: Launch) -> None:
    def work() -> str:
        with unisono.join() as run:
            try:
                with run.first():
                    if run.is_main:
                        raise ValueError("no data")
            except ValueError:
                return "caught"
            except unisono.TransportError as error:
                return str(error)
        return "nothing"

    words = "rank 0 left `with run.first()` with ValueError('no data'), so what it was to do for rank {} is not done."
    assert launch(work, 3) == ["caught", words.format(1), words.format(2)]


def test_nobody_else_is_there_while_the_first_prepares(launch: Launch) -> None:
    def work() -> None:
        with unisono.join() as run, run.first():
            run.barrier("inside")

    with pytest.raises(JobError, match="barrier 'inside' needs all workers, but the others wait"):
        launch(work, 2)


def mlp_replica(run: unisono.Run) -> tuple[nn.Module, unisono.Replica, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(3, generator=generator) for _ in range(24)]
    return model, replica, run.load(rows, batch_size=8, micro_batches=2)


def loss_fn(model: nn.Module, rows: Any) -> Any:
    return model(rows).square().mean()


def test_one_rank_alone_may_evaluate_save_and_hash(launch: Launch) -> None:
    def work(alone_too: bool) -> list[Any]:
        with unisono.join() as run:
            model, replica, loader = mlp_replica(run)
            outputs = []
            for batch in loader:
                replica.step(batch, loss_fn)
                if run.is_main and alone_too:
                    model.eval()
                    outputs.append(model(torch.ones(5, 3)).sum().isfinite().item())
                    model.train()
                    run.state_dict()
            run.barrier("end")
            return [run.fingerprint(model), all(outputs)]

    ((expected, _),) = launch(work, 1, False)
    assert launch(work, 2, True) == [[expected, True]] * 2


CALLS: dict[str, tuple[str, str]] = {
    "evaluate": ("evaluate", "step 0 of replica 0"),
    "barrier": ("barrier 'end'", "step 0 of replica 0"),
    "other replica": ("step 0 of replica 1", "step 0 of replica 0"),
    "agree": ("agree(how='first')", "step 0 of replica 0"),
    "replicate": ("replicate", "step 0 of replica 0"),
}


@pytest.mark.parametrize("variant", CALLS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_that_do_not_match_are_one_error_on_all_that_says_who_is_where(
    launch: Launch, variant: str, world_size: int
) -> None:
    def work() -> str:
        with unisono.join() as run:
            model, replica, loader = mlp_replica(run)
            other = run.replicate(nn.Linear(3, 1), None) if variant == "other replica" else replica
            batch = next(iter(loader))
            try:
                if run.rank:
                    replica.step(batch, loss_fn)
                elif variant == "evaluate":
                    run.evaluate(model, [torch.ones(3)], lambda m, rows: (1.0, 1))
                elif variant == "barrier":
                    run.barrier("end")
                elif variant == "agree":
                    run.agree(1)
                elif variant == "replicate":
                    run.replicate(nn.Linear(1, 1))
                else:
                    other.step(batch, loss_fn)
            except unisono.MismatchError as error:
                return str(error)
        return "no error"

    messages = launch(work, world_size, flags={"allow_idle": True})
    first, rest = CALLS[variant]
    others = "rank 1" if world_size == 2 else "ranks 1, 2"
    assert f"rank 0 in {first}; {others} in {rest}" in messages[0]
    assert messages == messages[:1] * world_size
