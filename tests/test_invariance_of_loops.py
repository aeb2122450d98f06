"""Scenarios of many kinds give the same bits on any number of workers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

import scenarios_buffers
import scenarios_gradients
import scenarios_loops
from unisono.cluster.launch import ForkServer

MODULES = (scenarios_buffers, scenarios_gradients, scenarios_loops)
WORLDS: list[tuple[int, str | list[int]]] = [(2, "even"), (2, [3, 1]), (3, "even")]
WITH_IDLE: tuple[int, str | list[int]] = (4, [1, 0, 2, 1])


@pytest.fixture(scope="module")
def alone(fork_server: ForkServer) -> dict[ModuleType, dict[str, Any]]:
    """What every scenario gives on one worker."""
    return {module: fork_server.launch(module.run_all, 1)[0] for module in MODULES}


@pytest.mark.parametrize(
    ("module", "world"),
    [(module, world) for module in MODULES for world in WORLDS] + [(scenarios_buffers, WITH_IDLE)],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else str(value),
)
def test_outcomes_are_identical_for_any_world_size(
    fork_server: ForkServer,
    alone: dict[ModuleType, dict[str, Any]],
    module: ModuleType,
    world: tuple[int, str | list[int]],
) -> None:
    world_size, assignment = world
    found = fork_server.launch(module.run_all, world_size, assignment, flags={"allow_idle": True})
    differing = [
        (rank, name)
        for rank, outcomes in enumerate(found)
        for name, expected in alone[module].items()
        if outcomes[name] != expected
    ]
    assert not differing
    assert [outcomes.keys() for outcomes in found] == [alone[module].keys()] * world_size
