"""What scripts do within a step or around it that would make workers differ: it works, or it is an error.

Each case runs on 1, 2 and 3 workers and must end alike on all of them, with the same bits or the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono
from kinds_of_models import Forward, cross_entropy, mlp
from steps import Line, Part, alone, global_batch, line_loss
from test_kinds_of_models import parts
from unisono.gradients.changes import sum_of_bits
from unisono.grid import cut

Launch = Callable[..., list[Any]]
WORLD_SIZES = (1, 2, 3)
Case = Callable[[unisono.Run], Any]


def train(
    run: unisono.Run,
    model: nn.Module,
    loss_fn: Any = cross_entropy,
    *,
    optimizer: Any = None,
    after: Callable[[], None] = lambda: None,
    **settings: Any,
) -> list[Any]:
    """Take three steps; `after` is called once the replica is there."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    replica = run.replicate(model, optimizer, strategy=unisono.Synchronous(**settings))
    after()
    shares = [len(c) for c in cut(4, run.world_size)]
    losses = [
        replica.step(global_batch(parts(step), shares=shares, rank=run.rank), loss_fn).hex()
        for step in range(3)
    ]
    return [losses, run.fingerprint(model)]


def outcomes(launch: Launch, case: Case) -> list[Any]:
    """Return what `case` gave, or the error it raised, on every rank of every world size."""

    def work() -> Any:
        with unisono.join(seed=2, observer=lambda event: None) as run:
            try:
                return case(run)
            except unisono.UnisonoError as error:
                result = f"{type(error).__name__}: {error}"
            if run._replicas[-1]._failure is not None:  # it happened in the middle of a step
                run._replicas[-1].skip()
            return result

    return [outcome for world_size in WORLD_SIZES for outcome in launch(work, world_size)]


def unfreezes(run: unisono.Run) -> Any:
    model = mlp()
    model[0].requires_grad_(False)

    def loss_fn(model: Any, micro_batch: Any) -> Tensor:
        model[0].requires_grad_(True)
        return cross_entropy(model, micro_batch)

    return train(run, model, loss_fn)


def adds_a_layer(run: unisono.Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: Any, micro_batch: Any) -> Tensor:
        if len(model) == 3:
            model.append(nn.Linear(3, 3))
            optimizer.add_param_group({"params": list(model[3].parameters())})
        return cross_entropy(model, micro_batch)

    return train(run, model, loss_fn, optimizer=optimizer)


def steps_in_backward(run: unisono.Run) -> Any:
    model = mlp()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def hook(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)
    return train(run, model)


def steps_in_the_loss(run: unisono.Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: Any, micro_batch: Any) -> Tensor:
        cross_entropy(model, micro_batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.zeros(())

    return train(run, model, loss_fn, optimizer=optimizer)


def writes_what_it_sees(run: unisono.Run) -> Any:
    model = mlp()
    model.register_parameter("codes", nn.Parameter(torch.zeros(3), requires_grad=False))

    def loss_fn(model: Any, micro_batch: Any) -> Tensor:
        with torch.no_grad():
            model.codes.add_(micro_batch[0].mean())
        return cross_entropy(model, micro_batch)

    return train(run, model, loss_fn)


def decays_in_forward(run: unisono.Run) -> Any:
    def loss_fn(model: Any, micro_batch: Any) -> Tensor:
        with torch.no_grad():
            model[0].weight.mul_(0.9)
        return cross_entropy(model, micro_batch)

    return train(run, mlp(), loss_fn)


def limits_rows_of_a_table(run: unisono.Run) -> Any:
    table = nn.Embedding(90, 3, max_norm=0.5)
    model = Forward(lambda m, rows: m.table((rows.abs() * 30).long().clamp(max=89)).mean(1), table=table)
    return train(run, model)


def without_gradients(run: unisono.Run) -> Any:
    with torch.no_grad():
        return train(run, mlp())


def in_inference_mode(run: unisono.Run) -> Any:
    model = mlp()
    with torch.inference_mode():
        return train(run, model)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (unfreezes, "step 0: 0.weight, 0.bias came to be trained in the middle of the step"),
        (adds_a_layer, "step 0: 3.weight, 3.bias came to be trained in the middle of the step"),
        (steps_in_backward, "trained parameter 3 [3]: a hook took its gradient away"),
        (steps_in_the_loss, "the loss function wrote 0.weight, 0.bias, 2.weight and others, and not alike"),
        (writes_what_it_sees, "the loss function wrote codes, and not alike in all micro-batches"),
        (decays_in_forward, "the loss function wrote 0.weight, and not alike in all micro-batches"),
        (limits_rows_of_a_table, "the loss function wrote table.weight, and not alike"),
        (without_gradients, "step 0: gradients are switched off, by torch.no_grad()"),
        (in_inference_mode, "step 0: gradients are switched off"),
    ],
)
def test_what_would_make_workers_differ_is_an_error_on_all(launch: Launch, case: Case, words: str) -> None:
    found = set(map(str, outcomes(launch, case)))
    assert len(found) == 1
    assert words in found.pop()


@pytest.mark.parametrize("overlap", [False, True])
def test_hooks_added_after_the_replica_change_each_gradient(launch: Launch, overlap: bool) -> None:
    def case(run: unisono.Run) -> Any:
        model = mlp()

        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        def add_hooks() -> None:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(halve)

        return train(run, model, after=add_hooks, overlap=overlap)

    def before(run: unisono.Run) -> Any:
        model = mlp()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
        return train(run, model)

    assert {str(found) for found in outcomes(launch, case)} == {str(outcomes(launch, before)[0])}


def test_frozen_parameters_that_a_rank_writes_its_own_way_are_found(launch: Launch) -> None:
    def work(differs: bool) -> Any:
        with unisono.join() as run:
            model = mlp()
            model[0].requires_grad_(False)

            def write() -> None:
                with torch.no_grad():
                    model[0].bias.add_(run.rank if differs else 1)

            try:
                return train(run, model, after=write)
            except unisono.MismatchError as error:
                return str(error)

    assert all("0.bias were written between steps" in message for message in launch(work, 2, True))
    first, second = launch(work, 2, False)
    assert first == second
    assert launch(work, 1, False) == [first]


@pytest.mark.parametrize("trains", [False, True])
def test_buffers_that_a_rank_writes_between_steps_are_found(launch: Launch, trains: bool) -> None:
    """By the script, or by a forward pass in training mode that only one rank takes."""

    def work(differs: bool) -> Any:
        with unisono.join() as run:
            norm = nn.BatchNorm1d(6)
            model = nn.Sequential(norm, nn.Linear(6, 3))

            def write() -> None:
                if trains:
                    model(torch.ones(4, 6)) if run.is_main or not differs else None
                else:
                    norm.running_mean.add_(run.rank if differs else 1)  # type: ignore[union-attr]

            try:
                return train(run, model, after=write)
            except unisono.MismatchError as error:
                return str(error)

    messages = launch(work, 2, True)
    assert all("not at the same step of the same run" in message for message in messages), messages
    assert any("0.running_mean" in message and "written between steps" in message for message in messages)
    first, second = launch(work, 2, False)
    assert first == second
    assert launch(work, 1, False) == [first]


@pytest.mark.parametrize("masters", [False, True])
def test_gradients_that_the_script_drops_are_not_averaged_in(masters: bool) -> None:
    """As a sharpness-aware step does it: the gradient counts that was taken at the moved weights."""
    with alone() as run:
        model = Line().bfloat16() if masters else Line()
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0), master_weights=masters)
        kind = model.w.dtype
        batch = global_batch([torch.tensor([1.0]).to(kind), torch.tensor([3.0]).to(kind)])
        replica.backward(batch, line_loss)
        assert model.w.grad.item() == -2.0
        with torch.no_grad():
            model.w += 0.5
        model.zero_grad()
        replica.backward(batch, line_loss)
        assert model.w.grad.item() == -1.5
        with torch.no_grad():
            model.w -= 0.5
        replica.update()
        assert (model.w.item(), replica.num_steps) == (1.5, 1)


def test_a_batch_without_any_gradient_is_not_taken_for_one_that_was_dropped() -> None:
    with alone() as run:
        model = Line()
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
        batch = global_batch([torch.tensor([2.0])])
        replica.backward(batch, lambda model, targets: torch.zeros(()))
        replica.backward(batch, line_loss)
        assert model.w.grad.item() == -1.0


def test_the_same_bits_in_another_order_are_other_bits() -> None:
    values = torch.tensor([1.0, 0.0, 0.0, 2.0, 0.5])
    for other in (values.flip(0), values.roll(1), values[:4]):
        assert sum_of_bits([values]) != sum_of_bits([other])
    for size in (1, 512, 4096, 2**21 + 5):
        alike = [torch.full((size,), value) for value in (0.0, 1.0, -1.0, 2.0)]
        assert len({sum_of_bits([each]) for each in alike}) == 4
    assert sum_of_bits([values, values.flip(0)]) != sum_of_bits([values.flip(0), values])
    assert sum_of_bits([values]) == sum_of_bits([values.clone()])


def test_compiled_functions_are_chosen_by_shape_alone() -> None:
    """By default a second shape is compiled for all shapes that are to come, and only the first has its own."""
    import torch._dynamo

    compiled: list[list[bool]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        compiled.append([isinstance(each, torch.SymInt) for each in inputs])
        return graph.forward

    config = torch._dynamo.config
    before = (config.automatic_dynamic_shapes, config.recompile_limit, config.accumulated_recompile_limit)
    with alone() as run:
        model = mlp()
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss_fn = torch.compile(cross_entropy, backend=backend)
        for size in range(2, before[1] + 4):
            one = (torch.randn(size, 6), torch.zeros(size, dtype=torch.int64))
            replica.step(global_batch([Part(one)]), loss_fn)
    assert len(compiled) == before[1] + 2, "one for each size"
    assert not any(map(any, compiled))
    after = (config.automatic_dynamic_shapes, config.recompile_limit, config.accumulated_recompile_limit)
    assert after == before
