"""Declared policies for buffers give the same bits on any number of workers."""

from __future__ import annotations

from typing import Any

import pytest

import scenarios_buffers
from unisono.cluster.launch import ForkServer


@pytest.fixture(scope="module")
def alone(fork_server: ForkServer) -> dict[str, Any]:
    """What every scenario gives on one worker."""
    (outcomes,) = fork_server.launch(scenarios_buffers.run_all, 1)
    return outcomes


@pytest.mark.parametrize(
    ("world_size", "assignment"), [(2, "even"), (2, [3, 1]), (3, "even"), (4, [1, 0, 2, 1])], ids=str
)
def test_buffers_with_policies_are_identical_for_any_world_size(
    fork_server: ForkServer, alone: dict[str, Any], world_size: int, assignment: str | list[int]
) -> None:
    outcomes = fork_server.launch(
        scenarios_buffers.run_all, world_size, assignment, flags={"allow_idle": True}
    )
    assert outcomes == [alone] * world_size
