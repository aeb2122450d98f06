"""What is noted of a step while a script is checked, without a job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from steps import alone, global_batch
from unisono.audit import Audit, AuditSettings
from unisono.events import StepFinished
from unisono.reference_gradient import compare_with_float64

PARTS = [torch.ones(2, 3), torch.ones(2, 3) * 2]


def carried(folder: Path, loss_fn: Callable[[nn.Module, Any], Any]) -> list[int]:
    """Return the forward passes of a step over `PARTS` which gave another loss when they were repeated."""
    audit = Audit(
        AuditSettings(str(folder), repeats_forward=True), rank=0, seed=0, device=torch.device("cpu")
    )
    with alone() as run:
        model = nn.Linear(3, 1)
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        audit.watch([replica])
        batch = global_batch(PARTS)
        loss = replica.step(batch, audit.before_step(replica, batch, loss_fn))
        audit(StepFinished(replica=0, step=0, loss=loss, weight=4.0))
    return json.loads((folder / "rank-0.jsonl").read_text())["carried"]


def test_a_loss_that_draws_numbers_carries_no_state(tmp_path):
    assert carried(tmp_path, lambda model, x: model(x).mean() * torch.rand(()) * numpy.random.rand()) == []


def test_a_loss_that_counts_its_calls_carries_state(tmp_path):
    calls = []

    def loss_fn(model, x):
        calls.append(None)
        return model(x).mean() * len(calls)

    assert carried(tmp_path, loss_fn) == [0, 1]


def test_a_model_that_takes_no_whole_batch_is_compared_over_micro_batches_only():
    def loss_fn(model, x):
        assert len(x) == 2, "made for 2 samples"
        return model(x).square().mean()

    model = nn.Linear(3, 1)
    found = compare_with_float64(model, global_batch(PARTS), loss_fn, seed=0)
    assert found["reason"] is None
    assert found["error"] < 1e-5
    assert found["mixing"] is None
