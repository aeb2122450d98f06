from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono
from steps import Line, alone, global_batch, line_loss, line_loss_per_item, plain_gradients
from unisono.errors import MismatchError, UsageError

OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


@pytest.fixture
def run() -> Iterator[unisono.Run]:
    with alone(seed=1) as run:
        yield run


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(count)).to(dtype)


def square_loss(model: nn.Module, micro_batch: Tensor) -> Tensor:
    return model(micro_batch).square().mean()


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("with_weight", [False, True])
def test_one_micro_batch_on_one_worker_is_plain_pytorch_to_the_bit(
    run: unisono.Run, optimizer: str, with_weight: bool
) -> None:
    def loss_fn(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> Any:
        loss = functional.cross_entropy(model(micro_batch[0]), micro_batch[1])
        return (loss, len(micro_batch[1]) * 7) if with_weight else loss

    def build() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    data = [(rows(20)[index], index % 3) for index in range(20)]
    plain, ours = build(), build()
    plain_optimizer = OPTIMIZERS[optimizer](plain)
    replica = run.replicate(ours, OPTIMIZERS[optimizer](ours))
    loader = run.load(data, batch_size=7, micro_batches=1, shuffle=True)
    for _ in range(3):
        for batch in loader:
            ((_, micro_batch),) = batch
            plain_optimizer.zero_grad()
            output = loss_fn(plain, micro_batch)
            loss = output[0] if with_weight else output
            loss.backward()
            plain_optimizer.step()
            assert replica.step(batch, loss_fn) == loss.item()
            assert run.fingerprint(ours) == run.fingerprint(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (3, 3, 2, 2, 2), (5, 0, 1), (7,)], ids=str)
def test_gradients_are_the_tree_sum_scaled_once(
    run: unisono.Run, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    model = network(dtype)
    parts = [rows(size, dtype) for size in sizes]
    replica = run.replicate(model, sgd(model))
    expected = plain_gradients(
        model, parts, square_loss, weights=[float(s) for s in sizes], reference=float(max(sizes))
    )
    replica.backward(global_batch(parts), square_loss)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("micro_batches", [1, 3, 5, 8, 40])
def test_gradients_are_those_of_the_whole_batch(run: unisono.Run, micro_batches: int) -> None:
    model = network(torch.float64)
    whole = rows(37, torch.float64)
    expected = torch.autograd.grad(square_loss(model, whole), list(model.parameters()))
    replica = run.replicate(model, sgd(model))
    (batch,) = run.load(list(whole), batch_size=37, micro_batches=micro_batches)
    loss = replica.backward(batch, square_loss).loss
    assert loss == pytest.approx(square_loss(model, whole).item(), rel=1e-14)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)


def test_returned_weights_are_what_is_averaged_over() -> None:
    with alone() as run:
        model = Line()
        replica = run.replicate(model, sgd(model))
        parts = [torch.tensor(y) for y in ([4.0], [8.0], [0.0] * 3, [2.0] * 5)]
        replica.step(global_batch(parts), line_loss_per_item)
        assert model.w.item() == pytest.approx(2.2, rel=1e-6)


def test_a_micro_batch_of_weight_zero_with_a_loss_of_nan_counts_as_nothing(run: unisono.Run) -> None:
    model = Line()
    replica = run.replicate(model, sgd(model))
    parts = [torch.tensor([[4.0]]), torch.zeros(1, 0), torch.tensor([[8.0]])]
    loss = replica.step(global_batch(parts), line_loss_per_item)
    assert model.w.item() == 6.0
    assert loss == 20.0


def test_a_step_without_weight_changes_nothing_but_is_counted(run: unisono.Run) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    replica = run.replicate(model, torch.optim.Adam(model.parameters()), clip_norm=1.0)

    def loss_fn(model: nn.Module, micro_batch: Tensor) -> tuple[Tensor, float]:
        return model(micro_batch).sum() * math.nan, 0.0

    before = run.fingerprint(model)
    assert math.isnan(replica.step(global_batch([rows(3), rows(4)]), loss_fn))
    assert run.fingerprint(model) == before
    assert not replica.optimizer.state
    assert replica.num_steps == 1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_constant_loss_counts_as_gradient_zero(run: unisono.Run) -> None:
    def loss_fn(model: Any, targets: Tensor) -> Tensor:
        return torch.zeros(1) if targets[0] == 0 else model.loss(targets)

    model = Line()
    replica = run.replicate(model, sgd(model))
    loss = replica.step(global_batch([torch.tensor([4.0, 4.0]), torch.zeros(2)]), loss_fn)
    assert model.w.item() == 2.0
    assert loss == 4.0


def test_norm_layers_see_their_own_micro_batch_and_statistics_are_weighted(run: unisono.Run) -> None:
    model = nn.BatchNorm1d(1)
    replica = run.replicate(model, sgd(model))
    parts = [torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0], [14.0], [12.0], [12.0]])]
    replica.step(global_batch(parts, nominal=3.0), lambda model, part: model(part).square().mean())
    assert model.running_mean.item() == pytest.approx((2 * 0.1 + 4 * 1.2) / 6)
    assert model.running_var.item() == pytest.approx((2 * 1.1 + 4 * (0.9 + 0.1 * 8 / 3)) / 6)
    assert model.num_batches_tracked.item() == 1


def test_statistics_count_only_micro_batches_that_changed_them(run: unisono.Run) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, part: Tensor) -> Tensor:
            return self.norm(part) if part[0] else part * self.norm.weight

    model = Sometimes()
    replica = run.replicate(model, sgd(model))
    parts = [torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0], [14.0]])]
    replica.step(global_batch(parts), lambda model, part: model(part).square().mean())
    assert model.norm.running_mean.item() == pytest.approx(1.2)


class Queue(nn.Module):
    """Keeps the last micro-batch in a buffer, written in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(5, 1)
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("last", torch.zeros(5))

    def forward(self, part: Tensor) -> Tensor:
        mean = part.mean(0)
        if self.how == "in place":
            self.last.copy_(mean)
        elif self.how == "through .data":
            self.last.data.copy_(mean)
        else:
            self.last = mean
        return self.norm(self.layer(part))


@pytest.mark.parametrize("how", ["in place", "through .data", "assigned"])
def test_a_buffer_that_micro_batches_change_differently_is_named_and_nothing_is_applied(
    run: unisono.Run, how: str
) -> None:
    model = Queue(how)
    replica = run.replicate(model, sgd(model))
    before = run.fingerprint(model)
    with pytest.raises(
        MismatchError, match="step 0: buffer 'last' was changed differently by micro-batches 0 and 1"
    ):
        replica.step(global_batch([rows(3), rows(4)]), square_loss)
    assert run.fingerprint(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert replica.num_steps == 0


def test_one_micro_batch_may_change_any_buffer(run: unisono.Run) -> None:
    model = Queue("in place")
    replica = run.replicate(model, sgd(model))
    replica.step(global_batch([rows(3)]), square_loss)
    assert torch.equal(model.last, rows(3).mean(0))


def test_an_error_in_the_loss_function_leaves_model_and_generators_as_they_were(run: unisono.Run) -> None:
    def loss_fn(model: nn.Module, part: Tensor) -> Tensor:
        if len(part) == 4:
            raise RuntimeError("row 17")
        return square_loss(model, part) * torch.rand(()) * random.random() * numpy.random.rand()

    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    replica = run.replicate(model, sgd(model))
    before = run.fingerprint(model), torch.get_rng_state().tolist(), random.getstate()
    with pytest.raises(RuntimeError, match="row 17"):
        replica.step(global_batch([rows(3), rows(4)]), loss_fn)
    assert (run.fingerprint(model), torch.get_rng_state().tolist(), random.getstate()) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    replica.skip()
    replica.step(global_batch([rows(3), rows(5)]), loss_fn)
    assert (replica.num_steps, replica.num_skipped) == (2, 1)


def test_random_numbers_depend_on_step_and_micro_batch_and_are_put_back(run: unisono.Run) -> None:
    drawn: list[float] = []

    def loss_fn(model: nn.Module, part: Tensor) -> Tensor:
        drawn.extend([torch.rand(()).item(), random.random(), float(numpy.random.rand())])
        return square_loss(model, part)

    model = network()
    replica = run.replicate(model, sgd(model))
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    for _ in range(2):
        replica.step(global_batch([rows(3), rows(4)]), loss_fn)
    assert torch.equal(torch.rand(3), expected)
    assert len(set(drawn)) == len(drawn) == 12


def test_parameters_may_be_converted_replaced_and_added_between_steps(run: unisono.Run) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    optimizer = sgd(model, lr=0.1)
    replica = run.replicate(model, optimizer)
    replica.step(global_batch([rows(3), rows(4)]), square_loss)
    model.double()
    parts = [rows(3, torch.float64), rows(4, torch.float64)]
    replica.step(global_batch(parts), square_loss)
    assert model[1].running_mean.dtype == torch.float64
    assert model[1].running_mean.float().double().ne(model[1].running_mean).any(), "averaged in float64"
    model.append(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double())
    optimizer.add_param_group({"params": model[2].parameters()})
    before = model[2][0].weight.detach().clone()
    replica.step(global_batch(parts), square_loss)
    assert not torch.equal(model[2][0].weight, before)
    assert model[2][1].num_batches_tracked == 1


def test_a_backward_of_the_users_own_between_steps_does_not_leak_into_a_step(run: unisono.Run) -> None:
    model = Line()
    replica = run.replicate(model, sgd(model))
    (model.w * 1000).backward()
    replica.step(global_batch([torch.tensor([4.0])]), line_loss)
    assert model.w.item() == 4.0


@pytest.mark.parametrize("sizes", [(3, 3), (4, 2), (5,)])
def test_backward_calls_inside_the_loss_function_count(run: unisono.Run, sizes: tuple[int, ...]) -> None:
    def loss_fn(model: Any, targets: Tensor) -> Tensor:
        (model.loss(targets) * 0.25).backward()
        (model.loss(targets) * 0.25).backward()
        return model.loss(targets) * 0.5

    model = Line()
    replica = run.replicate(model, sgd(model))
    targets = torch.arange(float(sum(sizes)))
    replica.step(global_batch(list(targets.split(sizes))), loss_fn)
    assert model.w.item() == pytest.approx(targets.mean().item())


def test_a_gradient_penalty_is_averaged_like_any_loss(run: unisono.Run) -> None:
    def loss_fn(model: Any, inputs: Tensor) -> Tensor:
        inputs = inputs.requires_grad_()
        (slope,) = torch.autograd.grad((model.w * inputs.square() / 2).sum(), inputs, create_graph=True)
        return (slope - 1).square().mean()

    model = Line()
    replica = run.replicate(model, sgd(model, lr=0.1))
    replica.step(global_batch([torch.tensor([1.0]), torch.tensor([2.0])]), loss_fn)
    assert model.w.item() == pytest.approx(0.3)


def test_a_model_with_nothing_to_train_is_a_pass_through(run: unisono.Run) -> None:
    model = nn.Linear(5, 1).requires_grad_(False)
    replica = run.replicate(model, sgd(model))
    before = run.fingerprint(model)
    loss = replica.step(global_batch([rows(3), rows(3)]), square_loss)
    assert loss == square_loss(model, rows(3)).item()
    assert run.fingerprint(model) == before


def test_weights_for_some_micro_batches_only_are_refused_and_nothing_is_applied(run: unisono.Run) -> None:
    def loss_fn(model: Any, targets: Tensor) -> Any:
        return line_loss(model, targets) if len(targets) == 1 else line_loss_per_item(model, targets)

    model = Line()
    replica = run.replicate(model, sgd(model))
    with pytest.raises(MismatchError, match=r"micro-batch 1 but only a loss for micro-batch 0"):
        replica.step(global_batch([torch.ones(1), torch.ones(2)]), loss_fn)
    assert model.w.item() == 0.0
    assert model.w.grad is None


def test_a_loss_function_that_begins_to_return_weights_is_still_averaged_right(run: unisono.Run) -> None:
    model = Line()
    replica = run.replicate(model, sgd(model))
    parts = [torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[5.0]])]
    replica.step(global_batch(parts), line_loss)
    assert model.w.item() == 3.0
    replica.step(global_batch(parts), line_loss_per_item)
    assert model.w.item() == pytest.approx(2.0)
    replica.step(global_batch(parts), line_loss)
    assert model.w.item() == pytest.approx(3.0)


def test_what_the_loss_function_returns_is_checked(run: unisono.Run) -> None:
    model = network()
    replica = run.replicate(model, sgd(model))
    with pytest.raises(UsageError, match=r"a tensor of shape \[3, 3\] for micro-batch 0"):
        replica.step(global_batch([rows(3)]), lambda model, part: model(part))
    replica.skip()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reduction": "exakt"}, "reduction='exakt': expected 'exact' or 'fast'"),
        ({"algorithm": "pair"}, "did you mean 'pairs'"),
        ({"overlap": "yes"}, "overlap='yes'"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
        ({"first_bucket_bytes": -1}, "first_bucket_bytes=-1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        unisono.Synchronous(**settings)
