"""The main promise: the same bits on any number of workers, whoever owns which micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

import scenarios
from unisono.cluster.launch import ForkServer

IDLE = {"allow_idle": True}
ALL = len(scenarios.SCENARIOS)


@pytest.fixture(scope="module")
def alone(fork_server: ForkServer) -> dict[str, Any]:
    """What every scenario gives on one worker."""
    (outcomes,) = fork_server.launch(scenarios.run_first, 1)
    return outcomes


@pytest.mark.parametrize(
    ("world_size", "assignment", "num_scenarios"),
    [(2, "even", ALL), (3, "even", ALL), (5, "even", 6), (8, "even", 4), (2, [3, 1], ALL), (3, [1, 0, 4], 6)],
    ids=str,
)
def test_weights_are_identical_for_any_world_size(
    fork_server: ForkServer,
    alone: dict[str, Any],
    world_size: int,
    assignment: str | list[int],
    num_scenarios: int,
) -> None:
    outcomes = fork_server.launch(scenarios.run_first, world_size, num_scenarios, assignment, flags=IDLE)
    expected = list(alone.items())[:num_scenarios]
    differing = [
        (rank, name)
        for rank, found in enumerate(outcomes)
        for name, value in expected
        if found[name] != value
    ]
    assert not differing


def test_a_run_resumed_in_mid_epoch_at_another_world_size_ends_with_the_same_bits(
    fork_server: ForkServer,
) -> None:
    ((_, uninterrupted),) = fork_server.launch(scenarios.resumable, 1, 0, 11)
    first = fork_server.launch(scenarios.resumable, 2, 0, 6)
    second = fork_server.launch(scenarios.resumable, 3, 6, 8, first[1][0])  # ends with an epoch
    third = fork_server.launch(scenarios.resumable, 1, 8, 11, second[2][0])
    assert [fingerprint for _, fingerprint in third] == [uninterrupted]


def test_no_two_scenarios_give_the_same(alone: dict[str, Any]) -> None:
    assert len({str(outcome) for outcome in alone.values()}) == ALL
