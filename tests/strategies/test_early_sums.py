"""Sums that are sent while backward still runs, on a transport that notes what was waited for.

Ranks are threads; the loss functions draw no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steps import global_batch, line_loss_per_item, plain_gradients
from unisono.collectives.announce import Announcer
from unisono.errors import WorkerLostError
from unisono.strategies import Synchronous
from unisono.strategies.base import ReplicaContext
from unisono.strategies.synchronous import SynchronousEngine
from unisono.transport.base import Transport, Work
from unisono.transport.threads import ThreadWorld


class NotingWork:
    def __init__(self, work: Work) -> None:
        self.work = work
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        self.work.wait()


class Noting(Transport):
    """Another transport that keeps the works it gave out."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self.inner = inner
        self.works: list[NotingWork] = []

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Work:
        return self.note(self.inner.start(sends, receives))

    def all_reduce(self, tensor: Tensor) -> Work:
        return self.note(self.inner.all_reduce(tensor))

    def pair_sum(self, tensor: Tensor, peer: int) -> Work:
        return self.note(self.inner.pair_sum(tensor, peer))

    def note(self, work: Work) -> Work:
        self.works.append(NotingWork(work))
        return self.works[-1]

    def abort(self, reason: Exception) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self.inner.close()


class Quiet:
    """Operations of which nobody wants to know."""

    def enter(self, operation: str, step: int, *, waits: bool = True) -> None:
        return None

    def leave(self) -> None:
        return None


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.block = nn.Linear(1, 1)
        nn.init.constant_(self.block.weight, 0.5)
        nn.init.constant_(self.block.bias, 0.25)

    def loss(self, targets: Tensor) -> Tensor:
        return (self.w - targets).square().mean() / 2


def engine_on(transport: Transport, model: nn.Module, **settings: Any) -> SynchronousEngine:
    context = ReplicaContext(
        number=0,
        model=model,
        parameters=lambda: list(model.named_parameters()),
        transport=transport,
        announcer=Announcer(transport),
        operations=Quiet(),
        device=torch.device("cpu"),
        seed=0,
    )
    return Synchronous(overlap=True, bucket_bytes=1, first_bucket_bytes=1, **settings).bind(context)


def on_engines(
    world_size: int, work: Callable[[SynchronousEngine, Scalars, int], Any], **settings: Any
) -> list[tuple[Any, list[int]]]:
    """Run `work` on an engine per rank; return its results and how often each transfer was waited for."""

    def on_rank(inner: Transport) -> tuple[Any, list[int]]:
        transport, model = Noting(inner), Scalars()
        engine = engine_on(transport, model, **settings)
        try:
            result = work(engine, model, transport.rank)
        finally:
            engine.close()
        return result, [noted.num_waits for noted in transport.works]

    return ThreadWorld(world_size).run(on_rank)


def late(model: Any, targets: Tensor) -> Tensor:
    hidden = targets + model.w
    for _ in range(2):
        hidden = checkpoint(model.block, hidden, use_reentrant=True)
    return hidden.square().mean()


@pytest.mark.parametrize("settings", [{}, {"reduction": "fast"}, {"algorithm": "direct"}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_that_turn_out_unwanted_are_waited_for_before_their_memory_is_used_again(
    world_size: int, settings: dict[str, Any]
) -> None:
    parts = [torch.full((2, 1), float(number)) for number in range(world_size)]
    nothing = [torch.zeros(1, 0) for _ in range(world_size)]

    def work(engine: SynchronousEngine, model: Scalars, rank: int) -> float:
        shares = [1] * world_size
        engine.backward(global_batch(nothing, shares=shares, rank=rank), line_loss_per_item, step=0)
        unused = engine.backward(global_batch(parts, shares=shares, rank=rank), line_loss_per_item, step=1)
        assert unused.weight == 2 * world_size
        assert model.block.weight.grad is None
        return engine.backward(
            global_batch(parts, shares=shares, rank=rank), lambda model, y: (late(model, y), len(y)), step=2
        ).loss

    results = on_engines(world_size, work, **settings)
    assert len({loss for loss, _ in results}) == 1
    for _, num_waits in results:
        assert set(num_waits) == {1}, num_waits


@pytest.mark.parametrize("shares", [[1, 1], [2, 1], [3, 0], [1, 1, 1], [0, 2, 1]], ids=str)
def test_a_late_gradient_gives_the_same_gradient_as_one_process(shares: list[int]) -> None:
    model = Scalars()
    parts = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]]), torch.tensor([[4.0], [0.5]])][: sum(shares)]
    sizes = [float(len(part)) for part in parts]
    expected = plain_gradients(model, parts, late, weights=sizes, reference=2.0)

    def work(engine: SynchronousEngine, model: Scalars, rank: int) -> list[Tensor]:
        gradients = []
        for step in range(2):
            engine.backward(global_batch(parts, shares=shares, rank=rank), late, step=step)
            gradients = [
                parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
            ]
        return gradients

    for gradients, _ in on_engines(len(shares), work):
        assert all(torch.equal(found, wanted) for found, wanted in zip(gradients, expected, strict=True))


class Failing(Noting):
    """A transport that can't send the first sum."""

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Work:
        raise RuntimeError("no memory for messages")


def test_a_sum_that_could_not_be_sent_is_an_error_before_anybody_is_waited_for() -> None:
    """Others are still in that sum: who went on to the next collective would wait for them, and they for it."""
    parts = [torch.full((2, 1), float(number)) for number in range(3)]

    def on_rank(inner: Transport) -> str:
        model = Scalars()
        engine = engine_on(Failing(inner) if inner.rank == 0 else inner, model, algorithm="direct")
        try:
            engine.backward(
                global_batch(parts, shares=[1] * 3, rank=inner.rank, nominal=2.0),
                lambda model, y: model.loss(y),
                step=0,
            )
        except (RuntimeError, WorkerLostError) as error:
            return str(error)
        finally:
            engine.close()
        return "no error"

    assert ThreadWorld(3).run(on_rank)[0] == "no memory for messages"
