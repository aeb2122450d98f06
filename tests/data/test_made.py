from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

import unisono
from steps import Line, alone, line_loss
from unisono.errors import UsageError


def draws(micro_batch: int, size: int = 3) -> list[Any]:
    return [micro_batch, torch.rand(size).tolist(), float(numpy.random.rand()), random.random()]


def test_each_micro_batch_is_made_once_by_its_owner_under_its_own_random_numbers(launch: Any) -> None:
    def work(assignment: Any = "even") -> list[Any]:
        with unisono.join(assignment=assignment) as run:
            torch.manual_seed(run.rank)
            calls: list[int] = []

            def make(micro_batch: int) -> list[Any]:
                calls.append(micro_batch)
                return draws(micro_batch)

            batches = [run.batch(make, micro_batches=4) for _ in range(2)]
            assert calls == []
            made = [list(batch) for batch in reversed(batches)][::-1]
            assert [list(batch) for batch in batches] == made
            assert len(calls) == sum(map(len, made))
            assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(run.rank))
            return [made, [batch.digest for batch in batches]]

    ((expected, digests),) = launch(work, 1)
    assert [number for number, _ in expected[0]] == [0, 1, 2, 3]
    flat = [data[column] for batch in expected for _, data in batch for column in (2, 3)]
    assert len(set(flat)) == 16
    assert len(set(digests)) == 2
    for world_size, assignment in ((2, "even"), (2, [3, 1]), (3, "even")):
        found = launch(work, world_size, assignment)
        assert [sorted(item for made, _ in found for item in made[at]) for at in (0, 1)] == expected
        assert all(each == digests for _, each in found)


def test_sizes_are_one_each_or_a_cut_of_the_batch_size() -> None:
    with alone() as run:
        batch = run.batch(draws, 4)
        assert (batch.sizes, batch.nominal_weight) == ((1, 1, 1, 1), 1.0)
        batch = run.batch(draws, 4, batch_size=6)
        assert (batch.sizes, batch.nominal_weight) == ((2, 2, 1, 1), 1.5)
        assert [len(data[1]) for _, data in batch] == [2, 2, 1, 1]
        batch = run.batch(draws, micro_batches=4, batch_size=2)
        assert [number for number, _ in batch] == [0, 1]


def test_a_step_on_made_data_gives_the_mean_over_all_samples() -> None:
    with alone() as run:
        model = Line()
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
        rows = torch.tensor([1.0, 5.0, 3.0, 8.0, 2.0, 5.0]).split([2, 2, 1, 1])
        replica.step(run.batch(lambda m, size: rows[m][:size], 4, batch_size=6), line_loss)
        assert model.w.item() == pytest.approx(4.0, rel=1e-6)
        replica.step(run.batch(lambda m: rows[m], 4), line_loss)
        assert model.w.item() == pytest.approx((3.0 + 5.5 + 2.0 + 5.0) / 4, rel=1e-6)


def test_the_count_of_made_batches_is_part_of_the_runs_state() -> None:
    with alone() as run:
        batches = [list(run.batch(draws, 2)) for _ in range(3)]
        state = run.state_dict()
        following = list(run.batch(draws, 2))
    with alone() as run:
        assert list(run.batch(draws, 2)) == batches[0]
        run.load_state_dict(state)
        assert list(run.batch(draws, 2)) == following
    with alone(seed=1) as run:
        assert list(run.batch(draws, 2)) != batches[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "make=3"),
        ((draws, 0), "micro_batches=0"),
        ((draws, 2, 0), "batch_size=0"),
    ],
)
def test_what_can_not_be_made_is_refused(arguments: Any, message: str) -> None:
    with alone() as run:
        with pytest.raises(UsageError, match=message):
            run.batch(*arguments)
        assert run.state_dict()["made"] == 0
