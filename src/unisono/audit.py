"""What a worker notes down after every step while its script is being checked.

One file of JSON lines a worker. The notes say what `unisono check` needs to compare runs and to guess why
they differ; nothing is decided here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.events import Event, StepFinished
from unisono.fingerprints import named_state, raw_bytes
from unisono.randomness import keyed
from unisono.reference_gradient import compare_with_float64
from unisono.replica import Replica
from unisono.strategies.base import GlobalBatch, LossFunction


@dataclass(frozen=True)
class AuditSettings:
    """What to note, as it comes from the launcher.

    Args:
        folder: where the files go.
        num_steps: after how many steps of all replicas together the script is ended; None lets it run out.
        num_float64_steps: for how many first steps the gradient is compared with float64.
        repeats_forward: run every forward pass twice, to find state that is carried from one to the next.
    """

    folder: str
    num_steps: int | None = None
    num_float64_steps: int = 0
    repeats_forward: bool = False

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> AuditSettings | None:
        """Return the settings that the launcher sent, if any."""
        return cls(**flags["audit"]) if flags.get("audit") else None


class Audit:
    """Notes what happened in each step, for one worker."""

    def __init__(self, settings: AuditSettings, rank: int, seed: int, *, device: torch.device) -> None:
        self._settings = settings
        self._seed = seed
        self._device = device
        self._path = Path(settings.folder) / f"rank-{rank}.jsonl"
        self._replicas: Sequence[Replica] = ()
        self._num_steps = 0
        self._carried: list[int] = []
        self._forwards = 0

    def watch(self, replicas: Sequence[Replica]) -> None:
        """Say which replicas there are; the list may grow."""
        self._replicas = replicas

    def __call__(self, event: Event) -> None:
        """Note a finished step; end the script after the last one wanted."""
        if not isinstance(event, StepFinished):
            return
        model = self._replicas[event.replica].model
        self._write(
            kind="step",
            replica=event.replica,
            step=event.step,
            loss=event.loss.hex(),
            threads=torch.get_num_threads(),
            carried=self._carried,
            state={name: _digest(tensor) for name, tensor in named_state(model)},
        )
        self._carried, self._forwards = [], 0
        self._num_steps += 1
        if self._num_steps == self._settings.num_steps:
            raise SystemExit(0)

    def before_step(self, replica: Replica, batch: GlobalBatch, loss_fn: LossFunction) -> LossFunction:
        """Return what the step is to call instead of `loss_fn`; compare with float64 if it is early enough."""
        if replica.num_steps < self._settings.num_float64_steps:
            with _buffers_kept(self._replicas):  # the loss may run other models than the one that is copied
                comparison = compare_with_float64(
                    replica.model, batch, loss_fn, seed=self._seed, buffers=replica.buffers
                )
            self._write(kind="float64", replica=replica.number, step=replica.num_steps, **comparison)
        return self._repeating(loss_fn) if self._settings.repeats_forward else loss_fn

    def _repeating(self, loss_fn: LossFunction) -> LossFunction:
        """Return a loss function that computes everything twice and notes where the results differ."""

        def twice(model: nn.Module, micro_batch: Any) -> Any:
            with keyed(self._device), _buffers_kept(self._replicas):  # puts all generators back
                first = loss_fn(model, micro_batch)
            second = loss_fn(model, micro_batch)
            losses = [output[0] if isinstance(output, tuple) else output for output in (first, second)]
            if raw_bytes(losses[0]) != raw_bytes(losses[1]):
                self._carried.append(self._forwards)
            self._forwards += 1
            return second

        return twice

    def _write(self, **note: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(raw_bytes(tensor), digest_size=8).hexdigest()


@contextmanager
def _buffers_kept(replicas: Sequence[Replica]) -> Iterator[None]:
    """Put the buffers of all models back to what they were."""
    places = [module._buffers for replica in replicas for module in replica.model.modules()]
    before = [
        (buffers, key, buffer, buffer.detach().clone())
        for buffers in places
        for key, buffer in buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffers, key, buffer, value in before:
                buffer.copy_(value)
                buffers[key] = buffer
