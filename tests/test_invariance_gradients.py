"""Sparse gradients and sums and masters of 16-bit parameters give the same bits on any number of workers."""

from __future__ import annotations

from typing import Any

import pytest

import scenarios_gradients
from unisono.cluster.launch import ForkServer


@pytest.fixture(scope="module")
def alone(fork_server: ForkServer) -> dict[str, Any]:
    """What every scenario gives on one worker."""
    (outcomes,) = fork_server.launch(scenarios_gradients.run_all, 1)
    return outcomes


@pytest.mark.parametrize(("world_size", "assignment"), [(2, "even"), (2, [3, 1]), (3, "even")], ids=str)
def test_gradients_are_identical_for_any_world_size(
    fork_server: ForkServer, alone: dict[str, Any], world_size: int, assignment: str | list[int]
) -> None:
    found = fork_server.launch(
        scenarios_gradients.run_all, world_size, assignment, flags={"allow_idle": True}
    )
    differing = [
        (rank, name)
        for rank, outcomes in enumerate(found)
        for name, expected in alone.items()
        if outcomes[name] != expected
    ]
    assert not differing
