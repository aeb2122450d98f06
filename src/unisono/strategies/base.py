"""The seam between a replica and its strategy.

A strategy is a frozen dataclass; bound to a replica it becomes an engine, which turns one global batch into
averaged gradients. The replica keeps the model, the optimizer and the count of steps; the run keeps the
transport. Neither the strategy nor the engine starts processes or reads the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unisono.collectives.announce import Announcer
from unisono.gradients.buffer_policies import Declared
from unisono.gradients.buffers import Others
from unisono.grid import Assignment
from unisono.transport.base import Transport

LossFunction = Callable[..., Any]
"""``loss_fn(model, micro_batch)`` -> mean loss, or (mean loss, weight); with `Embed`, ``loss_fn(rows)``."""
Embed = Callable[[nn.Module, Any], "Tensor | tuple[Tensor, ...]"]


class GlobalBatch(Protocol):
    """One global batch as a worker sees it; iterating yields its own micro-batches, ascending, with numbers.

    Attributes:
        assignment: who owns which micro-batch in this step.
        sizes: number of samples of every micro-batch of the grid, own or not.
        nominal_weight: number of samples of a micro-batch of a full batch, a fraction where M does not divide it.
        digest: 63 bits that stand for which samples these are, all of them; the same on all ranks.
    """

    @property
    def assignment(self) -> Assignment: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def nominal_weight(self) -> float: ...
    @property
    def digest(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[int, Any]]: ...


class Operations(Protocol):
    """Is told what this worker is doing, so that others can say on whom they wait."""

    def enter(self, operation: str, step: int, *, waits: bool = True) -> None: ...
    def leave(self) -> None: ...


@dataclass(frozen=True)
class ReplicaContext:
    """What an engine works with.

    Args:
        number: the replica's number in its run; part of the key of its random numbers.
        parameters: names and parameters to be trained now, in an order that all workers share. Called at the
            start of every step, so parameters may be frozen, unfrozen, added or replaced between steps.
        announcer: compares the names of calls; shared by all that use `transport`.
        seed: the run's seed.
        float32_gradients: add up gradients of 16-bit parameters in float32, and leave them so.
        buffers: the user's policies for buffers, by names or patterns.
        frozen: names and parameters that are not trained now, and that must stay the same on all workers.
        others: returns the models of the run's other replicas, which a loss function may run too, each with a prefix
            for the names of its buffers and their policies.
    """

    number: int
    model: nn.Module
    parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]]
    transport: Transport
    announcer: Announcer
    operations: Operations
    device: torch.device
    seed: int
    float32_gradients: bool = False
    buffers: Declared = field(default_factory=dict)
    frozen: Callable[[], Iterable[tuple[str, nn.Parameter]]] = tuple
    others: Callable[[], Others] = tuple


@dataclass(frozen=True)
class StepResult:
    """What `Engine.backward` found out about a global batch; the same on every worker.

    Args:
        loss: mean loss of the global batch, weighted like the gradient; nan if it is skipped.
        weight: total weight; 0 if it is skipped.
        skipped: why there is no gradient and the step must not be applied, in words; None if there is one.
        is_finite: whether all losses were finite numbers.
    """

    loss: float
    weight: float
    skipped: str | None = None
    is_finite: bool = True


class Engine(Protocol):
    """A strategy at work on one replica."""

    def backward(
        self,
        batch: GlobalBatch,
        loss_fn: LossFunction,
        *,
        step: int,
        loss_scale: float = 1.0,
        embed: Embed | None = None,
        state: int = 0,
    ) -> StepResult:
        """Leave the gradient of the global batch's mean loss in every parameter's ``.grad``.

        Collective: every rank calls this, in the same order. Losses are multiplied by `loss_scale` before
        their backward pass, and gradients divided by it after they were added up. `state` stands for what else must
        be the same on all ranks.
        """
        ...

    def skip(self) -> None:
        """Give up the step that is running, from within its loss function."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether the last `backward` raised in the middle of a step that others are in."""
        ...

    def abandon(self) -> StepResult:
        """Take part in the rest of a step that failed on this worker, so that all skip it. Collective."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Strategy(Protocol):
    """Hyper-parameters of a way to couple workers."""

    def bind(self, context: ReplicaContext) -> Engine:
        """Return an engine for one replica. Raises `UsageError` for impossible settings."""
        ...
