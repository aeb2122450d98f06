"""The main promise for data of all kinds, and the reported cases about data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import scenarios_data
import unisono
from scenarios import Noisy, cross_entropy
from steps import Line, line_loss, plain_gradients
from steps import alone as run_alone
from unisono.cluster.launch import ForkServer
from unisono.errors import MismatchError, UsageError

IDLE = {"allow_idle": True}


@pytest.fixture(scope="module")
def alone(fork_server: ForkServer) -> dict[str, Any]:
    (outcomes,) = fork_server.launch(scenarios_data.run_all, 1)
    return outcomes


@pytest.mark.parametrize(("world_size", "assignment"), [(2, "even"), (2, [3, 1]), (3, "even")], ids=str)
def test_weights_are_identical_for_any_world_size(
    fork_server: ForkServer, alone: dict[str, Any], world_size: int, assignment: Any
) -> None:
    for outcomes in fork_server.launch(scenarios_data.run_all, world_size, assignment, flags=IDLE):
        assert outcomes == alone


def test_no_two_scenarios_give_the_same(alone: dict[str, Any]) -> None:
    assert len({str(outcome) for outcome in alone.values()}) == len(scenarios_data.SCENARIOS)


def test_a_run_resumed_in_mid_epoch_at_another_world_size_ends_with_the_same_bits(
    fork_server: ForkServer,
) -> None:
    ((_, uninterrupted),) = fork_server.launch(scenarios_data.resumable, 1, 0, 7)
    first = fork_server.launch(scenarios_data.resumable, 2, 0, 2)
    second = fork_server.launch(scenarios_data.resumable, 3, 2, 5, first[1][0])
    third = fork_server.launch(scenarios_data.resumable, 1, 5, 7, second[2][0])
    assert [fingerprint for _, fingerprint in third] == [uninterrupted]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", ["buckets", "stream", "shards", "made"])
def test_gradients_are_those_of_plain_pytorch_over_the_same_micro_batches(kind: str) -> None:
    with run_alone(seed=1) as run:
        loaders: dict[str, Any] = {
            "buckets": lambda: run.load(
                Noisy(61, 6), batch_sampler=scenarios_data.Buckets(), micro_batches=4
            ),
            "stream": lambda: run.load(scenarios_data.Rows(27), batch_size=10, micro_batches=4),
            "shards": lambda: run.load(scenarios_data.Files([3, 9, 1, 4]), batch_size=10, micro_batches=4),
            "made": lambda: [run.batch(scenarios_data.made_rows, 4, batch_size=10) for _ in range(3)],
        }
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.0))
        batches = list(loaders[kind]())
        for batch in batches:
            parts = dict(batch)
            expected = plain_gradients(
                model,
                [parts.get(number) for number in range(4)],
                cross_entropy,
                weights=batch.sizes,
                reference=batch.nominal_weight,
            )
            replica.backward(batch, cross_entropy)
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                assert torch.equal(parameter.grad, gradient)
            replica.update()
        assert len(batches) >= 3


class Targets:
    """Shard r yields the target r + 1 so many times."""

    def __init__(self, counts: list[int], value: float = 0.0) -> None:
        self.counts = counts
        self.num_shards = len(counts)
        self.value = value

    def shard(self, num_shards: int, index: int) -> Targets:
        return Targets(self.counts[index::num_shards], value=index + 1.0)

    def __iter__(self) -> Iterator[float]:
        for count in self.counts:
            yield from [self.value] * count


@pytest.mark.parametrize(("drop_last", "expected"), [(False, [2.5, 2.5, 3.0, 3.0]), (True, [2.5, 2.5])])
def test_an_epoch_of_unequal_shards_ends_everywhere_and_counts_what_is_there(
    launch: Any, drop_last: bool, expected: list[float]
) -> None:
    def work(drop_last: bool) -> tuple[list[float], list[str]]:
        notices: list[str] = []
        observer = lambda event: notices.append(event.message) if hasattr(event, "message") else None  # noqa: E731
        with unisono.join(observer=observer) as run:
            model = Line()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
            loader = run.load(Targets([2, 2, 4, 2]), batch_size=4, micro_batches=4, drop_last=drop_last)
            values = []
            for batch in loader:
                replica.step(batch, line_loss)
                values.append(model.w.item())
            return values, notices

    results = launch(work, 4, drop_last)
    assert [values for values, _ in results] == [expected] * 4
    lines = [line for _, notices in results for line in notices]
    assert len(lines) == drop_last
    assert all("epoch 0 ends after 2 batches" in line for line in lines)


class Forty(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


@pytest.mark.parametrize("kind", ["whole", "shards"])
def test_every_row_of_a_stream_comes_once_over_workers_and_loader_processes(launch: Any, kind: str) -> None:
    def work(kind: str) -> list[tuple[int, list[int]]]:
        with unisono.join() as run:
            dataset: Any = Forty() if kind == "whole" else Targets([3, 9, 1, 5, 7])
            loader = run.load(dataset, batch_size=6, micro_batches=4, num_workers=2)
            return [
                (len(batch), [int(value) for _, rows in batch for value in rows])
                for _ in range(2)
                for batch in loader
            ]

    first, second = launch(work, 2, kind)
    assert [size for size, _ in first] == [size for size, _ in second]
    found = sorted(row for _, rows in first + second for row in rows)
    whole = list(range(40)) if kind == "whole" else [1] * 10 + [2] * 9 + [3] * 1 + [4] * 5
    assert found == sorted(whole * 2)


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 5.0), (True, 2.0)])
def test_a_dataset_smaller_than_ranks_times_batch_is_trained_and_evaluated_whole(
    launch: Any, drop_last: bool, expected: float
) -> None:
    def work(drop_last: bool) -> tuple[int, float, float]:
        with unisono.join() as run:
            rows = torch.tensor([1.0, 3.0, 5.0])
            model = Line()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
            steps = 0
            for batch in run.load(rows, batch_size=2, micro_batches=4, drop_last=drop_last):
                replica.step(batch, line_loss)
                steps += 1
            mean = run.evaluate(model, rows, lambda model, y: (y.mean(), len(y)), batch_size=2)
            with pytest.raises(UsageError, match="leaves no batch"):
                run.load(rows, batch_size=4, micro_batches=4, drop_last=True)
            return steps, model.w.item(), mean

    assert launch(work, 4, drop_last) == [(1 if drop_last else 2, expected, 3.0)] * 4


def test_random_numbers_differ_between_samples_and_micro_batches_and_initial_weights_do_not(
    launch: Any,
) -> None:
    class Drawing:
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> list[float]:
            return [torch.rand(()).item(), float(numpy.random.rand()), random.random()]

    def work() -> tuple[str, list[list[float]], list[str]]:
        with unisono.join(seed=3) as run:
            model = nn.Linear(64, 1)
            initial = run.fingerprint(model)
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.0))
            loader = run.load(Drawing(), batch_size=8, micro_batches=4, num_workers=2, collate_fn=list)
            drawn: list[list[float]] = []
            masks: list[str] = []

            def loss_fn(model: nn.Module, micro_batch: list[list[float]]) -> Tensor:
                drawn.extend(micro_batch)
                kept = nn.functional.dropout(torch.ones(64), 0.5)
                masks.append("".join(map(str, kept.int().tolist())))
                return model(kept).sum()

            for _ in range(2):
                for batch in loader:
                    replica.step(batch, loss_fn)
            return initial, drawn, masks

    results = launch(work, 2)
    assert results[0][0] == results[1][0]
    drawn = [row for _, rows, _ in results for row in rows]
    assert len(drawn) == 48
    assert all(len({row[column] for row in drawn}) == 48 for column in range(3))
    assert len({mask for *_, masks in results for mask in masks}) == 24
    assert launch(work, 2) == results


def test_workers_whose_datasets_are_in_another_order_get_an_error(launch: Any) -> None:
    def work() -> str:
        with unisono.join() as run:
            model = Line()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
            sampler = [0, 1, 2, 3] if run.rank else [3, 2, 1, 0]
            (batch,) = run.load(torch.arange(4.0), batch_size=4, micro_batches=2, sampler=sampler)
            with pytest.raises(MismatchError) as caught:
                replica.step(batch, line_loss)
            return str(caught.value)

    first, second = launch(work, 2)
    assert first == second
    assert "other sizes or samples" in first
