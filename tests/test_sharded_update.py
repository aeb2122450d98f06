"""A sharded update gives the bits of a replicated one, and each worker keeps its part of the state only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scenarios_sharded
import unisono
from steps import alone
from unisono.cluster.launch import ForkServer
from unisono.errors import MismatchError, UsageError

Launch = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def replicated(fork_server: ForkServer) -> dict[str, Any]:
    (outcome,) = fork_server.launch(scenarios_sharded.run_all, 1, "even", "replicated")
    return outcome


@pytest.mark.parametrize(
    ("world_size", "assignment"), [(1, "even"), (2, "even"), (2, [3, 1]), (3, "even")], ids=str
)
def test_sharded_updates_have_the_bits_of_replicated_ones(
    fork_server: ForkServer, replicated: dict[str, Any], world_size: int, assignment: str | list[int]
) -> None:
    found = fork_server.launch(scenarios_sharded.run_all, world_size, assignment)
    for outcomes in found:
        for name, expected in replicated.items():
            assert outcomes[name] == expected, name


@pytest.mark.parametrize("backend", ["gloo", "shared_memory"])
def test_each_worker_keeps_its_part_of_the_state(launch: Launch, backend: str) -> None:
    def work() -> list[Any]:
        with unisono.join(backend=backend) as run:
            model = nn.Linear(300, 301)
            optimizer = torch.optim.AdamW(model.parameters())
            replica = run.replicate(model, optimizer, update="sharded")
            batch = run.batch(lambda number: torch.randn(2, 300), micro_batches=3)
            for _ in range(2):
                replica.step(batch, lambda model, rows: model(rows).square().mean())
            held = sum(state["exp_avg"].numel() for state in optimizer.state.values())
            shapes = [list(parameter.shape) for parameter in model.parameters()]
            assert {replica.shares(p) for p in model.parameters()} == {backend == "shared_memory"}
            return [held, shapes, run.fingerprint(model)]

    found = launch(work, 3)
    assert sum(held for held, _, _ in found) == 300 * 301 + 301
    assert all(abs(held - (300 * 301 + 301) / 3) <= 4096 for held, _, _ in found)
    assert {str(rest) for _, *rest in found} == {str([[[301, 300], [301]], found[0][2]])}


def test_what_can_not_be_sharded_is_refused() -> None:
    with alone() as run:
        model = nn.Linear(2, 2)
        with pytest.raises(UsageError, match="LBFGS computes with all parameters at once"):
            run.replicate(model, torch.optim.LBFGS(model.parameters()), update="sharded")
        with pytest.raises(UsageError, match="shares out the state of optimizers"):
            run.replicate(model, update="sharded")
        with pytest.raises(UsageError, match=r"update='zero': expected 'replicated' or 'sharded'"):
            run.replicate(model, torch.optim.SGD(model.parameters()), update="zero")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"share_parameters=True: .* with update='sharded'"):
            run.replicate(model, torch.optim.SGD(model.parameters()), share_parameters=True)


@pytest.mark.parametrize(
    ("backend", "share"), [("gloo", True), ("shared_memory", False), ("shared_memory", True)]
)
def test_sharing_can_be_required_and_refused(launch: Launch, backend: str, share: bool) -> None:
    def work() -> Any:
        with unisono.join(backend=backend) as run:
            model = nn.Linear(30, 30)
            optimizer = torch.optim.AdamW(model.parameters())
            try:
                replica = run.replicate(model, optimizer, update="sharded", share_parameters=share)
            except UsageError as error:
                return str(error)
            return {replica.shares(p) for p in model.parameters()}

    if backend == "gloo":
        assert all("workers have to be on one host" in found for found in launch(work, 2))
    else:
        assert launch(work, 2) == [{share}] * 2


def test_what_one_worker_writes_in_secret_is_found_at_the_update(launch: Launch) -> None:
    def work() -> tuple[str, bool]:
        with unisono.join() as run:
            model = nn.Linear(30, 30)
            replica = run.replicate(model, torch.optim.AdamW(model.parameters()), update="sharded")
            batch = run.batch(lambda number: torch.ones(2, 30), micro_batches=2)
            before = model.weight.detach().clone()
            replica.backward(batch, lambda model, rows: model(rows).square().mean())
            if run.rank == 1:
                model.bias.data.fill_(3.0)
            try:
                replica.update()
            except MismatchError as error:
                return str(error), torch.equal(model.weight, before)
            return "nothing", False

    first, second = launch(work, 2)
    assert [first[1], second[1]] == [True, True], "nothing was applied"
    assert "On this rank: none" in first[0]
    assert "On this rank: bias;" in second[0]
