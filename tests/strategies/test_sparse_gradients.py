"""Sparse gradients in a step: found out, mixed with dense ones, and compared with plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unisono
from steps import alone, global_batch
from unisono.reference_gradient import compare_with_float64

Launch = Callable[..., list[Any]]


class Weight(nn.Module):
    """One parameter whose gradient is sparse or dense, as the loss function uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(8.0).view(4, 2) / 8 + 1)

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.w, sparse=True)


@pytest.fixture
def run() -> Iterator[unisono.Run]:
    with alone(seed=5) as run:
        yield run


def replicate(run: unisono.Run, model: nn.Module, **options: Any) -> unisono.Replica:
    return run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("sparse_first", [True, False])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_a_parameter_reached_twice_in_one_backward_may_be_so_in_both_ways(
    run: unisono.Run, sparse_first: bool, num_micro_batches: int
) -> None:
    calls = itertools.count()

    def loss_fn(model: Any, ids: Tensor) -> Tensor:
        next(calls)
        uses = [lambda x: x * model.w.mean(), lambda x: x * model.rows(ids)]
        hidden = torch.ones(2, 2, requires_grad=True)
        for use in uses if sparse_first else uses[::-1]:  # backward reaches them in the opposite order
            hidden = checkpoint(use, hidden, use_reentrant=True)
        return hidden.mean()

    model, plain = Weight(), Weight()
    parts = [torch.tensor([0, 1])] * num_micro_batches
    replica = replicate(run, model)
    for _ in range(2):
        replica.backward(global_batch(parts), loss_fn)
        replica.update()
    assert next(calls) <= 4 * num_micro_batches
    for _ in range(2):
        plain.w.grad = None
        loss_fn(plain, parts[0]).backward()
        with torch.no_grad():
            plain.w.sub_(plain.w.grad, alpha=0.1)
    torch.testing.assert_close(model.w, plain.w)


def test_a_loss_function_that_does_something_else_at_every_call_comes_to_an_end(run: unisono.Run) -> None:
    calls = itertools.count()

    def loss_fn(model: Any, ids: Tensor) -> Tensor:
        return model.w.mean() if next(calls) % 2 else model.rows(ids).mean()

    model = Weight()
    replica = replicate(run, model)
    for _ in range(4):
        replica.step(global_batch([torch.tensor([0, 1])]), loss_fn)
    assert next(calls) <= 12


def test_any_parameter_of_a_module_called_sparse_may_have_a_dense_gradient(run: unisono.Run) -> None:
    class Pruned(nn.Module):
        sparse = True

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.weight = nn.Parameter(torch.ones(3, 2))

    model = Pruned()
    replicate(run, model).step(
        global_batch([torch.ones(1), torch.ones(1)]), lambda m, x: m.scale * m.weight.sum()
    )
    assert model.scale.item() == pytest.approx(0.4)
    assert model.weight[0].tolist() == pytest.approx([0.9, 0.9])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad
@pytest.mark.parametrize("name", ["SGD", "SparseAdam", "Adagrad"])
def test_one_micro_batch_on_one_worker_has_the_gradient_of_plain_pytorch_to_the_bit(
    run: unisono.Run, name: str
) -> None:
    """Weights too, though plain SGD adds rows one by one where an id is repeated, not their sum."""
    torch.manual_seed(1)
    ours, plain = [nn.Embedding(40, 3, padding_idx=0, sparse=True) for _ in range(2)]
    plain.load_state_dict(ours.state_dict())
    make = getattr(torch.optim, name)
    optimizer = make(list(plain.parameters()), lr=0.1)
    replica = run.replicate(ours, make(list(ours.parameters()), lr=0.1))
    for _ in range(3):
        ids = torch.randperm(40)[:12] if name == "SGD" else torch.randint(0, 40, (60,))
        replica.step(global_batch([ids]), lambda m, ids: m(ids).square().mean())
        optimizer.zero_grad()
        plain(ids).square().mean().backward()
        expected = plain.weight.grad.coalesce()
        optimizer.step()
        assert torch.equal(ours.weight.grad.indices(), expected.indices())
        assert torch.equal(ours.weight.grad.values(), expected.values())
        assert torch.equal(ours.weight, plain.weight)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["SGD", "SparseAdam", "Adagrad"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_batches_of_padding_only_change_nothing(run: unisono.Run, name: str, num_micro_batches: int) -> None:
    model = nn.Embedding(4, 2, padding_idx=0, sparse=True)
    before = model.weight.detach().clone()
    optimizer = getattr(torch.optim, name)(list(model.parameters()), lr=0.1)
    replica = run.replicate(model, optimizer, clip_norm=1.0)
    replica.step(
        global_batch([torch.zeros(2, dtype=torch.int64)] * num_micro_batches), lambda m, ids: m(ids).mean()
    )
    assert torch.equal(model.weight, before)
    assert replica.clip(1.0) == 0.0


def test_micro_batches_of_weight_zero_have_no_rows(run: unisono.Run) -> None:
    model = nn.Embedding(6, 1, sparse=True)
    replica = replicate(run, model)

    def loss_fn(model: nn.Module, ids: Tensor) -> tuple[Tensor, float]:
        return model(ids).mean() * (1.0 if ids.max() > 2 else torch.nan), float((ids > 2).sum())

    replica.backward(global_batch([torch.tensor(ids) for ids in ([0, 1], [3, 4], [5, 0])]), loss_fn)
    assert model.weight.grad.indices().tolist() == [[0, 3, 4, 5]]
    assert model.weight.grad.values().flatten().tolist() == pytest.approx([1 / 6, 1 / 3, 1 / 3, 1 / 6])
    replica.update()
    replica.step(global_batch([torch.tensor([0, 1])]), loss_fn)
    assert replica.skipped


def test_windows_of_several_batches_add_sparse_and_dense_gradients(run: unisono.Run) -> None:
    model, plain = Weight(), Weight()
    replica = replicate(run, model)
    losses = [
        lambda m, ids: m.rows(ids).square().mean(),
        lambda m, ids: m.rows(ids).mean(),
        lambda m, ids: m.w.square().mean(),
        lambda m, ids: m.rows(ids).mean(),
    ]
    ids = torch.tensor([1, 2])
    for number, loss_fn in enumerate(losses):
        replica.backward(global_batch([ids, ids]), loss_fn)
        assert model.w.grad.is_sparse == (number < 2)
        loss_fn(plain, ids).backward()
        mean = plain.w.grad.to_dense() / (number + 1)
        torch.testing.assert_close(model.w.grad.to_dense(), mean)
        assert replica.clip(1e9) == pytest.approx(mean.norm().item())
    replica.update()


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_bags_of_words_are_as_in_plain_pytorch(run: unisono.Run, kind: str) -> None:
    ours, plain = [nn.EmbeddingBag(6, 2, mode=kind, sparse=True) for _ in range(2)]
    plain.load_state_dict(ours.state_dict())
    bags = torch.tensor([[0, 1], [1, 2], [3, 3], [5, 0]])
    replicate(run, ours).backward(global_batch([bags[:3], bags[3:]]), lambda m, x: m(x).square().mean())
    plain(bags).square().mean().backward()
    torch.testing.assert_close(ours.weight.grad.to_dense(), plain.weight.grad.to_dense())


def test_rows_of_a_loss_over_the_whole_batch_are_as_in_plain_pytorch(run: unisono.Run) -> None:
    ours, plain = [nn.Embedding(6, 2, sparse=True) for _ in range(2)]
    plain.load_state_dict(ours.state_dict())
    ids = torch.tensor([0, 1, 1, 4])

    def loss_fn(rows: Tensor) -> Tensor:
        return (rows @ rows.T).square().mean()

    batch = global_batch([ids[:1], ids[1:]])
    replicate(run, ours).backward(batch, loss_fn, embed=lambda m, ids: m(ids))
    loss_fn(plain(ids)).backward()
    assert ours.weight.grad.is_sparse
    torch.testing.assert_close(ours.weight.grad.to_dense(), plain.weight.grad.to_dense())


def test_backward_calls_of_the_loss_function_count(run: unisono.Run) -> None:
    def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
        (model(ids).square().mean() * 0.75).backward()
        return model(ids).square().mean() * 0.25

    ours, plain = [nn.Embedding(6, 2, sparse=True) for _ in range(2)]
    plain.load_state_dict(ours.state_dict())
    ids = torch.tensor([0, 1, 1, 4, 5])
    replicate(run, ours).backward(global_batch([ids[:3], ids[3:]]), loss_fn)
    plain(ids).square().mean().backward()
    torch.testing.assert_close(ours.weight.grad.to_dense(), plain.weight.grad.to_dense())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_is_done_again_once_to_find_out_and_then_planned_right(
    launch: Launch, world_size: int
) -> None:
    def work() -> Any:
        calls = [0] * 3
        with unisono.join(observer=lambda event: None) as run:
            model = Weight()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(3):

                def loss_fn(model: Any, ids: Tensor, step: int = step) -> Tensor:
                    calls[step] += 1
                    return model.rows(ids).square().mean() if 1 in ids else ids.sum() * 0.0

                # Only one worker ever sees a gradient.
                parts = [torch.tensor([0, 0]), torch.tensor([1, 3]), torch.tensor([2])]
                shares = {1: [3], 2: [1, 2], 3: [1, 1, 1]}[run.world_size]
                replica.step(global_batch(parts, shares=shares, rank=run.rank), loss_fn)
            return [shares[run.rank] * 2, shares[run.rank], shares[run.rank]] == calls, model.w.grad.is_sparse

    assert launch(work, world_size) == [(True, True)] * world_size


def test_fast_reduction_is_close_to_the_exact_one(launch: Launch) -> None:
    def work() -> list[Tensor]:
        found = []
        with unisono.join(observer=lambda event: None) as run:
            for reduction in ("exact", "fast"):
                torch.manual_seed(1)
                model = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2))
                strategy = unisono.Synchronous(reduction=reduction)
                replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
                parts = [torch.tensor(ids) for ids in ([0, 1, 1], [8], [1, 2, 8, 3], [4])]
                for _ in range(3):
                    batch = global_batch(parts, shares=[1, 2, 1], rank=run.rank)
                    replica.step(batch, lambda m, ids: m(ids).square().mean())
                found.append(torch.cat([value.flatten() for value in model.state_dict().values()]))
        return found

    results = launch(work, 3)
    for exact, fast in results:
        torch.testing.assert_close(fast, exact, rtol=1e-5, atol=1e-6)
        assert torch.equal(fast, results[0][1])


def test_the_comparison_with_float64_takes_sparse_gradients() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(6, 2, sparse=True), nn.Linear(2, 1))
    batch = global_batch([torch.tensor([0, 1, 1]), torch.tensor([3, 3])])
    found = compare_with_float64(model, batch, lambda m, ids: m(ids).square().mean(), seed=0)
    assert found["reason"] is None
    assert 0 < found["error"] < 1e-5
    assert found["mixing"] < 1e-12
