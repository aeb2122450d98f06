"""The parameters of a host's workers: one copy that is read by all, and behaves as if each had its own."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.errors import MismatchError, UsageError
from unisono.gradients import shared_parameters
from unisono.gradients.sharded_update import ShardedUpdate
from unisono.transport.base import Transport
from worlds import on_process_groups, on_shared_memory, on_threads, on_two_hosts

SIZES = (3, 4096, 5000, 20_001, 1)
Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


def values(sizes: Sequence[int] = SIZES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def give_gradients(parameters: Sequence[nn.Parameter], step: int) -> None:
    for number, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * step + number)
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


class Trained:
    """Parameters and what steps them, as one rank has them."""

    def __init__(
        self,
        transport: Transport,
        optimizer: torch.optim.Optimizer,
        *,
        frozen: Sequence[nn.Parameter] = (),
        share: bool | None = None,
        taken: Sequence[nn.Parameter] = (),
    ) -> None:
        self.optimizer = optimizer
        self.update = ShardedUpdate(
            lambda: [optimizer],
            transport,
            name="0",
            frozen=lambda: frozen,
            share_parameters=share,
            is_taken=lambda parameter: any(parameter is each for each in taken),
            name_of=lambda parameter: f"parameter {[p is parameter for p in self.parameters].index(True)}",
        )
        self.frozen = frozen
        self.update.share_parameters()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*(p for group in self.optimizer.param_groups for p in group["params"]), *self.frozen]

    @property
    def shared(self) -> list[bool]:
        return [self.update.shares(parameter) for parameter in self.parameters]

    def step(self, number: int) -> None:
        give_gradients([p for group in self.optimizer.param_groups for p in group["params"]], number)
        self.update.step()

    def bits(self) -> list[bytes]:
        return [parameter.detach().numpy().tobytes() for parameter in self.parameters]


def plain(change: Callable[[list[nn.Parameter]], Any] = lambda parameters: None) -> list[bytes]:
    """Return what one process has after two steps with `change` between them."""
    parameters = values()
    optimizer = adam(parameters)
    for step in range(2):
        give_gradients(parameters, step)
        optimizer.step()
        if step == 0:
            change(parameters)
    return [parameter.detach().numpy().tobytes() for parameter in parameters]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("world", [on_shared_memory, on_two_hosts, on_process_groups, on_threads])
def test_all_workers_have_what_one_process_has(world: Any, size: int) -> None:
    def train(transport: Transport) -> tuple[list[bytes], list[bool]]:
        trained = Trained(transport, adam(values()), frozen=values((7, 9000)))
        for step in range(2):
            trained.step(step)
        return trained.bits(), trained.shared

    shares = size > 1 and (world is on_shared_memory or (world is on_two_hosts and size > 2))
    frozen = [each.detach().numpy().tobytes() for each in values((7, 9000))]
    for bits, shared in world(size, train):
        assert bits == plain() + frozen
        assert shared == [shares] * 7


def write(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        parameters[2].mul_(0.5)


def write_in_secret(parameters: list[nn.Parameter]) -> None:
    parameters[1].data[17] = 3.0
    parameters[3].data.clamp_(-0.1, 0.1)


def write_the_same(parameters: list[nn.Parameter]) -> None:
    parameters[1].data.copy_(parameters[1].data.clone())


def give_other_memory(parameters: list[nn.Parameter]) -> None:
    parameters[3].data = parameters[3].data * 2
    parameters[1].data[17] = 3.0


@pytest.mark.parametrize("change", [write, write_in_secret, write_the_same, give_other_memory])
@pytest.mark.parametrize("world", [on_shared_memory, on_two_hosts])
def test_what_all_write_alike_is_as_with_copies(world: Any, change: Callable[..., Any]) -> None:
    def train(transport: Transport) -> tuple[list[bytes], list[bool]]:
        trained = Trained(transport, adam(values()))
        trained.step(0)
        change(trained.parameters)
        trained.step(1)
        return trained.bits(), trained.shared

    for size in (2, 3):
        assert world(size, train) == [(plain(change), [size > 2 or world is on_shared_memory] * 5)] * size


def test_what_one_writes_the_others_do_not_see_and_the_next_update_refuses() -> None:
    def train(transport: Transport) -> tuple[list[bytes], str, list[bytes], list[bytes]]:
        trained = Trained(transport, adam(values()))
        trained.step(0)
        kept = [parameter.detach().clone() for parameter in trained.parameters]
        if transport.rank == 1:
            trained.parameters[2].data[4999] = 7.0
        transport.all_reduce(torch.zeros(1)).wait()  # all look after it was written
        seen = trained.bits()
        with pytest.raises(MismatchError) as caught:
            trained.step(1)
        after = trained.bits()
        trained.parameters[2].data.copy_(kept[2])
        trained.step(1)
        return seen, str(caught.value), after, trained.bits()

    first, second, third = on_shared_memory(3, train)
    assert first[0] == third[0] != second[0]
    assert "not alike on all workers. On this rank: none; with rank 0 agree ranks [0, 2]" in first[1]
    assert "On this rank: parameter 2;" in second[1]
    for seen, _, after, end in (first, second, third):
        assert after == seen, "nothing was applied"
        assert end == plain()


def test_parameters_given_unlike_memory_are_named() -> None:
    def train(transport: Transport) -> str:
        trained = Trained(transport, adam(values()))
        trained.parameters[1].data = torch.full((4096,), float(transport.rank))
        with pytest.raises(MismatchError) as caught:
            trained.step(0)
        return str(caught.value)

    for message in on_shared_memory(2, train):
        assert message.startswith("parameter 1 have other values on some workers than on others")


def test_a_parameter_whose_memory_another_tensor_uses_is_left_alone_or_refused() -> None:
    def train(transport: Transport) -> tuple[list[bool], bool, list[bytes], str]:
        parameters = values()
        alias = parameters[2].detach() if transport.rank == 1 else None
        with pytest.raises(UsageError) as caught:
            Trained(transport, adam(parameters[2:]), share=True)
        trained = Trained(transport, adam(parameters), taken=[parameters[0]])
        for step in range(2):
            trained.step(step)
        follows = alias is None or torch.equal(alias, parameters[2])
        return trained.shared, follows, trained.bits(), str(caught.value)

    expected = "share_parameters=True: 'parameter 0' can't be shared: "
    rest = ". Leave it out, which shares what can be."
    found = [False, True, False, True, True], True, plain()
    here, there = on_shared_memory(2, train)
    assert here == (*found, f"{expected}it can be here, but not on all workers{rest}")
    assert there == (*found, f"{expected}another tensor uses its memory{rest}")


def test_sharing_where_it_can_not_be_had() -> None:
    def demand(transport: Transport) -> str:
        with pytest.raises(UsageError) as caught:
            Trained(transport, adam(values()), share=True)
        return str(caught.value)

    def refuse(transport: Transport) -> list[bool]:
        trained = Trained(transport, adam(values()), share=False)
        trained.step(0)
        return trained.shared

    for message in on_process_groups(2, demand):
        assert "share_parameters=True: workers have to be on one host" in message
    assert on_shared_memory(2, refuse) == [[False] * 5] * 2
    assert on_threads(1, lambda transport: Trained(transport, adam(values()), share=True).shared) == [
        [False] * 5
    ]


def test_a_system_that_does_not_tell_what_was_written_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, True] * 3)
    monkeypatch.setattr(shared_parameters, "can_tell_written_pages", lambda: next(answers))

    def train(transport: Transport) -> tuple[list[bool], list[bytes], str]:
        trained = Trained(transport, adam(values()))
        for step in range(2):
            trained.step(step)
        with pytest.raises(UsageError) as caught:
            Trained(transport, adam(values()), share=True)
        return trained.shared, trained.bits(), str(caught.value)

    for shared, bits, message in on_shared_memory(3, train):
        assert (shared, bits) == ([False] * 5, plain())
        assert "doesn't tell which memory was written" in message


def test_parameters_that_come_later_are_shared_and_memory_goes_with_its_parameters() -> None:
    def mapped() -> int:
        return sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())

    def train(transport: Transport) -> tuple[list[bool], int]:
        parameters = values()
        trained = Trained(transport, adam(parameters))
        for step in range(12):
            trained.step(step)
            if step % 2:
                trained.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(10 + step))]})
            if step == 5:
                before = mapped()
        transport.all_reduce(torch.zeros(1)).wait()
        after = mapped() - before
        transport.all_reduce(torch.zeros(1)).wait()
        trained.step(13)
        return trained.shared, after

    for shared, more in on_shared_memory(2, train):
        assert shared == [True] * 11
        assert more == 0


def test_other_dtypes_and_orders_in_memory() -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.complex64)

    def make() -> list[nn.Parameter]:
        made = [nn.Parameter(torch.ones(40, 130, dtype=dtype)) for dtype in dtypes]
        return [*made, nn.Parameter(torch.ones(4, 3, 20, 30).to(memory_format=torch.channels_last))]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def train(transport: Transport) -> tuple[list[Tensor], list[bool], list[tuple[int, ...]]]:
        trained = Trained(transport, sgd(make()))
        for step in range(2):
            trained.step(step)
        strides = [parameter.stride() for parameter in trained.parameters]
        return [p.detach().clone() for p in trained.parameters], trained.shared, strides

    expected = make()
    optimizer = sgd(expected)
    for step in range(2):
        give_gradients(expected, step)
        optimizer.step()
    for found, shared, strides in on_shared_memory(2, train):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert shared == [True] * 5
        assert strides == [each.stride() for each in expected]


class Replacing(torch.optim.SGD):
    """Gives parameters new memory, as some optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


@pytest.mark.parametrize("world", [on_shared_memory, on_process_groups])
def test_an_optimizer_may_give_parameters_new_memory(world: Any) -> None:
    def train(transport: Transport) -> list[bytes]:
        trained = Trained(transport, Replacing(values(), lr=0.5))
        for step in range(2):
            trained.step(step)
        return trained.bits()

    expected = values()
    optimizer = Replacing(expected, lr=0.5)
    for step in range(2):
        give_gradients(expected, step)
        optimizer.step()
    assert world(2, train) == [[each.detach().numpy().tobytes() for each in expected]] * 2


def test_a_shared_parameter_is_saved_and_copied_alone() -> None:
    def train(transport: Transport) -> tuple[int, bool]:
        trained = Trained(transport, adam(values()))
        file = io.BytesIO()
        torch.save(trained.parameters[0], file)
        copied = copy.deepcopy(trained.parameters[3])
        with torch.no_grad():
            copied.zero_()
        trained.step(0)
        return file.tell(), bool(trained.parameters[3].count_nonzero())

    for num_bytes, is_left in on_shared_memory(2, train):
        assert num_bytes < 4000, "3 elements, and what torch says of them"
        assert is_left
