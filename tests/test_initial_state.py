"""Workers start from rank 0's state, or learn in what they differ. Ranks are threads: nothing random is drawn."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono
from unisono.errors import MismatchError, UsageError
from unisono.fingerprints import digest_of, fingerprint
from unisono.initial_state import describe, share_initial_state
from unisono.transport.base import Transport
from unisono.transport.local import LocalTransport
from unisono.transport.threads import ThreadWorld

CPU = torch.device("cpu")


class Everything(nn.Module):
    """Parameters and buffers of every kind, with values that depend on the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for number, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.complex64)):
            value = torch.arange(6.0).view(2, 3).to(dtype) + rank * 100
            self.register_parameter(f"p{number}", nn.Parameter(value))
        self.frozen = nn.Parameter(torch.full((5,), float(rank)), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(float(rank)))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        images = (torch.arange(120.0) * (rank + 1)).view(2, 3, 4, 5)
        self.images = nn.Parameter(images.to(memory_format=torch.channels_last))
        self.tied = self.scalar
        values: list[Any] = [2**53 + 1 + rank, rank == 0, 1e-300 * (rank + 1), 5 + rank]
        dtypes = [torch.int64, torch.bool, torch.float64, torch.uint8]
        for number, (value, dtype) in enumerate(zip(values, dtypes, strict=True)):
            self.register_buffer(f"b{number}", torch.tensor(value, dtype=dtype))
        self.register_buffer("narrow", torch.full((3,), rank + 0.5, dtype=torch.float16))
        self.register_buffer("cache", torch.full((2,), float(rank)), persistent=False)
        self.register_buffer("expanded", torch.tensor([float(rank)]).expand(4))
        self.register_buffer("transposed", (torch.arange(6).view(2, 3) + rank).t())


def share(
    build: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]], world_size: int
) -> list[nn.Module]:
    def work(transport: Transport) -> nn.Module:
        model, optimizer = build(transport.rank)
        share_initial_state(model, [optimizer], transport, device=CPU)
        return model

    return ThreadWorld(world_size).run(work)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def everything_bytes(model: nn.Module) -> bytes:
    return digest_of([*model.named_parameters(), *model.named_buffers()]).digest()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_worker_has_rank_0s_parameters_and_buffers_to_the_bit(world_size: int) -> None:
    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Everything(rank)
        return model, sgd(model)

    models = share(build, world_size)
    expected = everything_bytes(Everything(0))
    assert [everything_bytes(model) for model in models] == [expected] * world_size
    assert models[-1].images.is_contiguous(memory_format=torch.channels_last)
    assert len({fingerprint(model) for model in models}) == 1


def test_large_tensors_travel_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.initial_state.CHUNK_BYTES", 16)
    test_every_worker_has_rank_0s_parameters_and_buffers_to_the_bit(3)


@pytest.mark.skipif("UNISONO_LARGE_TESTS" not in os.environ, reason="needs 18 GiB; set UNISONO_LARGE_TESTS=1")
def test_tensors_of_more_than_2_gib_are_sent_and_summed_whole(launch: Callable[..., list[Any]]) -> None:
    def send() -> list[Any]:
        with unisono.join() as run:
            model = nn.Linear(1, 1)
            model.register_buffer("big", torch.full((2**31 + 16,), run.rank + 1, dtype=torch.uint8))
            run.replicate(model, sgd(model))
            return [int(model.big.min()), int(model.big.max()), model.big[-32:].tolist()]

    def add() -> list[Any]:
        with unisono.join() as run:
            model = nn.ParameterList([torch.ones(2**30 + 8, dtype=torch.bfloat16)])
            replica = run.replicate(model, sgd(model, foreach=False))
            batch = run.batch(lambda micro_batch: micro_batch, micro_batches=2)
            replica.backward(batch, lambda model, number: (model[0][-2:] * (number + 1)).sum())
            assert model[0].grad is not None
            return model[0].grad[-3:].tolist()

    assert launch(send, 2) == [[1, 1, [1] * 32]] * 2
    assert launch(add, 2) == [[0.0, 1.5, 1.5]] * 2


def test_parameters_that_only_the_optimizer_knows_are_sent_too() -> None:
    outside: dict[int, Tensor] = {}

    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        outside[rank] = nn.Parameter(torch.tensor(float(rank + 7)))
        return model, torch.optim.SGD([*model.parameters(), outside[rank]], lr=0.1)

    share(build, 3)
    assert [outside[rank].item() for rank in range(3)] == [7.0] * 3


def test_a_model_without_parameters_is_legal() -> None:
    outside = nn.Parameter(torch.zeros(1))
    share(lambda rank: (nn.ReLU(), torch.optim.SGD([outside], lr=0.1)), 2)


def linear(rank: int, *, inputs: int = 3, **options: Any) -> nn.Module:
    return nn.Linear(inputs, 2, **options)


DIFFERENCES: dict[str, tuple[Callable[[int], tuple[nn.Module, torch.optim.Optimizer]], str]] = {
    "shape": (
        lambda rank: (model := linear(rank, inputs=3 + (rank == 2)), sgd(model)),
        r"rank 2 built something else than rank 0. The first difference: on rank 0 parameter 'weight' is "
        r"torch.float32 \[2, 3\]; on rank 2 parameter 'weight' is torch.float32 \[2, 4\]",
    ),
    "dtype": (
        lambda rank: (model := linear(rank).to(torch.float64 if rank == 2 else torch.float32), sgd(model)),
        r"torch.float32 \[2, 3\]; on rank 2 parameter 'weight' is torch.float64",
    ),
    "missing": (
        lambda rank: (model := linear(rank, bias=rank != 2), sgd(model)),
        r"on rank 0 parameter 'bias' is .*; on rank 2 the optimizer is SGD",
    ),
    "frozen": (
        lambda rank: (model := linear(rank).requires_grad_(rank != 2), sgd(model)),
        r"on rank 2 parameter 'weight' is torch.float32 \[2, 3\], frozen",
    ),
    "layout": (
        lambda rank: (
            model := nn.Conv2d(2, 2, 2).to(
                memory_format=torch.channels_last if rank == 2 else torch.contiguous_format
            ),
            sgd(model),
        ),
        r"on rank 2 parameter 'weight' is torch.float32 \[2, 2, 2, 2\], strides \[8, 1, 4, 2\]",
    ),
    "buffer": (
        lambda rank: (model := nn.BatchNorm1d(2, track_running_stats=rank != 2), sgd(model)),
        r"on rank 0 buffer 'running_mean' is .*; on rank 2 the optimizer",
    ),
    "optimizer": (
        lambda rank: (
            model := linear(rank),
            (torch.optim.Adam(model.parameters()) if rank == 2 else sgd(model)),
        ),
        r"on rank 0 the optimizer is SGD; on rank 2 the optimizer is Adam",
    ),
    "setting": (
        lambda rank: (model := linear(rank), sgd(model, momentum=0.9 if rank == 2 else 0.0)),
        r"momentum=0.0.*on rank 2 optimizer group 0 has .*momentum=0.9",
    ),
    "group": (
        lambda rank: (
            model := linear(rank),
            torch.optim.SGD([model.weight] if rank == 2 else [*model.parameters()], lr=0.1),
        ),
        r"parameters weight, bias; on rank 2 .*parameters weight\. Join",
    ),
    "more": (
        lambda rank: (
            model := linear(rank),
            torch.optim.SGD([{"params": [p]} for p in model.parameters()][: 2 if rank != 2 else 1], lr=0.1),
        ),
        r"on rank 0 optimizer group 1 .*; on rank 2 nothing more",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_workers_that_built_something_else_are_told_the_first_difference_on_every_rank(what: str) -> None:
    build, words = DIFFERENCES[what]
    messages = []

    def work(transport: Transport) -> None:
        model, optimizer = build(transport.rank)
        with pytest.raises(MismatchError, match=words) as caught:
            share_initial_state(model, [optimizer], transport, device=CPU)
        messages.append(str(caught.value))

    ThreadWorld(3).run(work)
    assert len(messages) == 3
    assert len(set(messages)) == 1


def test_the_description_has_a_line_for_everything_that_must_be_equal() -> None:
    model = nn.BatchNorm1d(2)
    lines = describe(model, [sgd(model, weight_decay=0.5)])
    assert lines[0] == "parameter 'weight' is torch.float32 [2]"
    assert lines[2:5] == [
        "buffer 'running_mean' is torch.float32 [2]",
        "buffer 'running_var' is torch.float32 [2]",
        "buffer 'num_batches_tracked' is torch.int64 []",
    ]
    assert lines[5] == "the optimizer is SGD"
    assert "weight_decay=0.5" in lines[6]
    assert lines[6].endswith("parameters weight, bias")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device and has no memory"),
        (lambda: nn.LazyLinear(2), "'weight' has no shape yet: run the model on one sample"),
    ],
    ids=["meta", "lazy"],
)
def test_parameters_without_memory_are_refused(build: Callable[[], nn.Module], words: str) -> None:
    model = build()
    with pytest.raises(UsageError, match=words):
        share_initial_state(model, [sgd(model)], LocalTransport(), device=CPU)


def test_parameters_on_another_device_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(
        UsageError, match=r"'weight' is on cpu, this worker's device is cuda:0.*model.to\(run.device\)"
    ):
        share_initial_state(model, [sgd(model)], LocalTransport(), device=torch.device("cuda", 0))


def test_tensors_that_overlap_in_memory_are_found() -> None:
    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        storage = torch.arange(4.0) + rank
        model = nn.Module()
        model.register_parameter("a", nn.Parameter(storage[:3] if rank else storage[:3].clone()))
        model.register_parameter("b", nn.Parameter(storage[1:]))
        with torch.no_grad():
            model.b.add_(10.0)
        return model, sgd(model)

    with pytest.raises(MismatchError, match="share memory"):
        share(build, 2)


def test_settings_of_the_run_must_be_the_same() -> None:
    def work(transport: Transport) -> None:
        model = nn.Linear(2, 2)
        settings = [f"the run's seed is {transport.rank}"]
        share_initial_state(model, [sgd(model)], transport, device=CPU, settings=settings)

    with pytest.raises(MismatchError, match="on rank 0 the run's seed is 0; on rank 1 the run's seed is 1"):
        ThreadWorld(2).run(work)
