"""Optimizers, precision and losses of many kinds against plain PyTorch in one process, and by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono
from optimizers import OPTIMIZERS
from steps import Line, Part, alone, global_batch, line_loss
from unisono.errors import UsageError
from unisono.events import Event, Notice

Launch = Callable[..., list[Any]]


@pytest.fixture
def run() -> Iterator[unisono.Run]:
    with alone(seed=3) as run:
        yield run


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def parts_of(num_steps: int, *, sizes: tuple[int, ...] = (4, 4)) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(num_steps)
    return [
        [
            (torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator))
            for size in sizes
        ]
        for _ in range(num_steps)
    ]


def batch_of(parts: list[tuple[Tensor, Tensor]]) -> Any:
    return global_batch([Part(part) for part in parts])


def cross_entropy(model: nn.Module, part: Any) -> Tensor:
    return functional.cross_entropy(model(part[0]), part[1])


def plain_loss(model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean over all samples, micro-batch by micro-batch."""
    total = sum(len(part[0]) for part in parts)
    return torch.stack([cross_entropy(model, part) * (len(part[0]) / total) for part in parts]).sum()


def assert_same(ours: nn.Module, plain: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance), name


SEPARATELY = {"SparseAdam"}  # takes no dense gradients


def test_no_optimizer_of_torch_is_left_out() -> None:
    classes = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    names = {kind.__name__ for kind in classes if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}
    assert names == {name.partition(" ")[0] for name in OPTIMIZERS} | SEPARATELY


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_do_what_they_do_in_plain_pytorch(run: unisono.Run, name: str) -> None:
    ours = network()
    plain = copy.deepcopy(ours)
    replica = run.replicate(ours, OPTIMIZERS[name](ours.parameters()))
    optimizer = OPTIMIZERS[name](plain.parameters())
    for parts in parts_of(3, sizes=(5, 3)):

        def closure(parts: Any = parts) -> Tensor:
            optimizer.zero_grad()
            loss = plain_loss(plain, parts)
            loss.backward()
            return loss

        replica.step(batch_of(parts), cross_entropy)
        optimizer.step(closure)
    # Rprop decides by signs, which a last bit may turn where a gradient is almost 0.
    assert_same(ours, plain, tolerance=1e-4 if name in ("Rprop", "LBFGS with line search") else 1e-5)


def test_an_optimizer_that_computes_gradients_itself_needs_a_step_of_its_own(run: unisono.Run) -> None:
    model = network()
    replica = run.replicate(model, torch.optim.LBFGS(model.parameters()))
    replica.backward(batch_of(parts_of(1)[0]), cross_entropy)
    with pytest.raises(UsageError, match=r"LBFGS computes the gradient several times.*replica.step"):
        replica.update()
    with pytest.raises(UsageError, match="can't share a replica"):
        run.replicate(model, [torch.optim.LBFGS(model.parameters()), torch.optim.SGD(model.parameters())])
    with pytest.raises(UsageError, match=r"str is no torch.optim.Optimizer"):
        run.replicate(model, ["SGD"])


def test_sparse_and_dense_tables_train_alike(run: unisono.Run) -> None:
    models = [nn.Embedding(9, 3, padding_idx=0, sparse=is_sparse) for is_sparse in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.5), clip_norm=0.3)
        for step in range(3):
            parts = [torch.tensor([0, 1 + step, 1]), torch.tensor([0, 0, 0]), torch.tensor([5, 1, 8])]
            replica.step(global_batch(parts), lambda m, ids: (m(ids) - 1).square().mean())
    assert torch.allclose(models[0].weight, models[1].weight, atol=1e-6)


def test_rows_of_a_sparse_mean_by_hand(launch: Launch) -> None:
    def work() -> list[Any]:
        with unisono.join() as run:
            model = nn.ModuleList(
                [nn.Embedding(4, 1, padding_idx=0, sparse=True), nn.Embedding(4, 1, sparse=True)]
            )
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
            parts = [torch.tensor([0, 0]), torch.tensor([2, 3])]
            shares = [1, 1] if run.world_size == 2 else [2]
            batch = global_batch(parts, shares=shares, rank=run.rank)
            replica.backward(batch, lambda m, ids: m[0](ids).mean())
            gradient = model[0].weight.grad
            return [
                gradient.is_coalesced(),
                gradient.to_dense().flatten().tolist(),
                model[1].weight.grad is None,
            ]

    for world_size in (1, 2):
        assert launch(work, world_size) == [[True, [0.0, 0.0, 0.25, 0.25], True]] * world_size


def test_a_table_used_densely_too_has_a_dense_gradient(run: unisono.Run) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    parts = [torch.tensor([1, 2]), torch.tensor([3, 3])]
    replica.backward(global_batch(parts), lambda m, ids: m(ids).mean() + (m.weight.mean() if 3 in ids else 0))
    assert not model.weight.grad.is_sparse
    assert model.weight.grad[:, 0].tolist() == pytest.approx([0.05, 0.175, 0.175, 0.3, 0.05])


def test_gradients_are_clipped_per_group_and_by_value(run: unisono.Run) -> None:
    ours = network()
    plain = copy.deepcopy(ours)

    def optimizer(model: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2}], lr=0.1
        )

    replica = run.replicate(ours, optimizer(ours), clip_norm=(0.05, None), clip_value=0.02)
    other = optimizer(plain)
    for parts in parts_of(2):
        replica.step(batch_of(parts), cross_entropy)
        other.zero_grad()
        plain_loss(plain, parts).backward()
        torch.nn.utils.clip_grad_norm_(plain[0].parameters(), 0.05)
        torch.nn.utils.clip_grad_value_(plain.parameters(), 0.02)
        other.step()
    assert_same(ours, plain)
    with pytest.raises(UsageError, match="3 limits, but the optimizers have 2 groups"):
        run.replicate(plain, other, clip_norm=(1.0, 1.0, 1.0))
    with pytest.raises(UsageError, match="clip_value=0"):
        run.replicate(plain, other, clip_value=0)


def test_a_limit_for_each_group_follows_groups_that_are_added(run: unisono.Run) -> None:
    model, extra = network(), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = run.replicate(model, optimizer, clip_norm=[1.0])
    first, second = map(batch_of, parts_of(2))
    replica.step(first, cross_entropy)
    optimizer.add_param_group({"params": [extra]})
    before = run.fingerprint(model)
    with pytest.raises(UsageError, match=r"has 1 limits, but the optimizers have 2 groups"):
        replica.step(second, cross_entropy)
    assert run.fingerprint(model) == before
    replica.clip_norm = [1.0, 0.01]
    replica.step(second, lambda model, part: functional.cross_entropy(model(part[0]) + extra, part[1]))
    assert 0 < extra.norm().item() <= 0.1 * 0.01 * 1.001


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_clipping_comes_after_averaging_and_unscaling(run: unisono.Run, scale: float) -> None:
    model = Line()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    replica = run.replicate(model, optimizer, scaler=scaler, clip_norm=1.0)
    for _ in range(2):
        replica.backward(global_batch([torch.tensor([-3.0]), torch.tensor([1.0])]), line_loss)
    assert model.w.grad.item() == 1.0
    assert replica.clip(1.0) == 1.0
    replica.update()
    assert model.w.item() == pytest.approx(-0.5, rel=1e-5)


@pytest.mark.parametrize(("window", "num_steps", "expected"), [(4, 2, 0.75), (3, 2, 0.75), (8, 1, 0.5)])
def test_a_shorter_last_window_weighs_what_it_has(
    run: unisono.Run, window: int, num_steps: int, expected: float
) -> None:
    model = Line()
    replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for index in range(6):
        replica.backward(global_batch([torch.ones(1), torch.ones(1)]), line_loss)
        if index % window == window - 1 or index == 5:
            replica.update()
    assert (model.w.item(), replica.num_steps) == (pytest.approx(expected), num_steps)


def test_a_window_is_the_mean_over_all_its_samples(run: unisono.Run) -> None:
    model = Line()
    replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for targets in ([1.0, 2.0, 3.0], [math.inf], [10.0], [4.0, 4.0]):
        replica.backward(global_batch([torch.tensor(targets)]), line_loss)
    assert model.w.grad.item() == pytest.approx(-4.0)
    replica.update()
    assert (model.w.item(), replica.skipped) == (pytest.approx(4.0), False)


def test_the_scaler_decides_as_in_plain_pytorch(run: unisono.Run) -> None:
    ours = network()
    plain = copy.deepcopy(ours)
    options: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}
    scaler, other = (torch.amp.GradScaler("cpu", **options) for _ in range(2))
    replica = run.replicate(ours, torch.optim.SGD(ours.parameters(), lr=0.1), scaler=scaler)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    huge = torch.tensor(3e38)
    scales = []
    for step, parts in enumerate(parts_of(6)):
        factor = huge if step == 3 else torch.tensor(1.0)
        replica.step(batch_of(parts), lambda m, part, f=factor: cross_entropy(m, part) * f)
        optimizer.zero_grad()
        other.scale(plain_loss(plain, parts) * factor).backward()
        other.step(optimizer)
        other.update()
        scales.append((scaler.get_scale(), other.get_scale()))
    assert [one for one, _ in scales] == [expected for _, expected in scales]
    assert scales[3] < scales[2]
    assert (replica.num_steps, replica.num_skipped) == (6, 1)
    assert_same(ours, plain)


def test_float32_masters_take_up_small_updates(run: unisono.Run) -> None:
    def train(**options: Any) -> nn.Parameter:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1e-3), **options)
        for _ in range(100):
            replica.step(global_batch([torch.ones(1, 1).bfloat16()]), lambda m, x: -m(x).mean())
        return model.weight

    assert train(master_weights=True).item() == pytest.approx(1.1, abs=4e-3)  # a bfloat16 in the end
    assert train().item() == 1.0


def test_sixteen_bits_without_masters_are_worth_a_word() -> None:
    events: list[Event] = []
    with unisono.join(observer=events.append) as run:
        model = nn.Linear(1, 1).bfloat16()
        run.replicate(model, torch.optim.SGD(model.parameters()))
        run.replicate(model, torch.optim.SGD(model.parameters()), master_weights=True)
    (notice,) = [e.message for e in events if isinstance(e, Notice) and "bfloat16" in e.message]
    assert "master_weights=True" in notice


def test_sums_of_sixteen_bits_may_be_of_thirty_two(launch: Launch) -> None:
    def work(float32_sums: bool) -> float:
        with unisono.join() as run:
            model = nn.Linear(1, 1, bias=False).bfloat16()
            strategy = unisono.Synchronous(float32_sums=float32_sums)
            replica = run.replicate(model, strategy=strategy, master_weights=float32_sums)
            parts = [torch.full((1, 1), value).bfloat16() for value in (256.0, 1.0, 1.0, 1.0)]
            shares = [4 // run.world_size] * run.world_size
            replica.backward(global_batch(parts, shares=shares, rank=run.rank), lambda m, x: m(x).mean())
            return float(model.weight.grad)

    for world_size in (1, 4):
        assert launch(work, world_size, True) == [64.75] * world_size
        assert launch(work, world_size, False) == [64.5] * world_size


def test_masters_resume_to_the_bit() -> None:
    def train(run: unisono.Run, state: Any, batches: range) -> Any:
        torch.manual_seed(1)
        model = network().bfloat16()
        replica = run.replicate(model, torch.optim.Adam(model.parameters(), lr=1e-4), master_weights=True)
        if state is not None:
            replica.load_state_dict(state)
        for index in batches:
            rows = torch.full((2, 4), float(index)).bfloat16()
            replica.step(global_batch([rows]), lambda m, x: m(x).square().mean())
        return copy.deepcopy(replica.state_dict()), run.fingerprint(model)

    with alone() as run:
        _, whole = train(run, None, range(6))
        state, _ = train(run, None, range(3))
        assert train(run, state, range(3, 6))[1] == whole


def test_what_a_script_does_to_a_parameter_reaches_its_master(run: unisono.Run) -> None:
    model = Line().bfloat16()
    replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.0), master_weights=True)
    with torch.no_grad():
        model.w.fill_(3.0)
    replica.step(global_batch([torch.ones(1).bfloat16()]), line_loss)
    assert model.w.item() == 3.0


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.temperature = nn.Parameter(torch.tensor(0.7))


def test_a_loss_over_the_whole_batch_is_that_of_one_process(run: unisono.Run) -> None:
    ours = Tower()
    plain = copy.deepcopy(ours)
    replica = run.replicate(ours, torch.optim.SGD(ours.parameters(), lr=0.3))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)

    def info_nce(model: Tower, rows: Tensor) -> Tensor:
        rows = functional.normalize(rows)
        similarity = rows @ rows.roll(1, 0).T * model.temperature.exp()
        return functional.cross_entropy(similarity, torch.arange(len(rows)))

    for parts in parts_of(3, sizes=(5, 3, 4)):
        loss = replica.step(
            batch_of(parts), lambda rows: info_nce(ours, rows), embed=lambda m, part: m.body(part[0])
        )
        optimizer.zero_grad()
        expected = info_nce(plain, plain.body(torch.cat([part[0] for part in parts])))
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_same(ours, plain)


@pytest.mark.parametrize(
    ("embed", "loss_fn", "words"),
    [
        (lambda m, part: 1, None, "embed returned int for micro-batch 0"),
        (lambda m, part: (), None, "an empty tuple"),
        (lambda m, part: (part[0], part[0][1:]), None, r"tensors of \[4, 3\] rows"),
        (lambda m, part: m.body(part[0]), lambda rows: rows, "for the whole batch; expected one number"),
    ],
)
def test_what_embed_returns_is_checked(run: unisono.Run, embed: Any, loss_fn: Any, words: str) -> None:
    model = Tower()
    replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.3))
    with pytest.raises(UsageError, match=words):
        replica.step(batch_of(parts_of(1)[0]), loss_fn, embed=embed)
    replica.skip()


@pytest.mark.parametrize("where", ["embed", "loss"])
def test_a_whole_batch_step_that_fails_on_one_worker_is_skipped_on_all(launch: Launch, where: str) -> None:
    def work() -> list[Any]:
        with unisono.join() as run:
            model = Tower()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.3))

            def fail(here: str) -> None:
                if here == where and replica.num_steps == 1 and run.rank == 1:
                    raise MemoryError

            def embed(model: Any, rows: Tensor) -> Tensor:
                fail("embed")
                return model.body(rows)

            def loss_fn(rows: Tensor) -> Tensor:
                fail("loss")
                return rows.square().mean()

            for _ in range(3):
                parts = [torch.randn(3, 4) for _ in range(2)]
                try:
                    replica.step(global_batch(parts, shares=[1, 1], rank=run.rank), loss_fn, embed=embed)
                except MemoryError:
                    replica.skip()
            return [run.fingerprint(model), replica.num_steps, replica.num_skipped]

    first, second = launch(work, 2)
    assert first == second
    assert first[1:] == [3, 1]


def test_second_order_gradients_are_averaged(launch: Launch) -> None:
    def penalty(model: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad((model.w * x.square() / 2).sum(), x, create_graph=True)
        return (slope - 1).square().mean()

    def work() -> float:
        with unisono.join() as run:
            model = Line()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
            shares = [1, 1] if run.world_size == 2 else [2]
            batch = global_batch([torch.tensor([1.0]), torch.tensor([2.0])], shares=shares, rank=run.rank)
            replica.step(batch, penalty)
            return model.w.item()

    for world_size in (1, 2):
        assert launch(work, world_size) == pytest.approx([0.3] * world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_schedule_advances_by_global_steps(launch: Launch, world_size: int) -> None:
    def work() -> list[float]:
        with unisono.join() as run:
            model = Line()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.1)
            replica = run.replicate(model, optimizer)
            rates = []
            for _ in range(20):
                for _ in range(2):
                    shares = [2 // run.world_size] * run.world_size
                    replica.backward(
                        global_batch([torch.ones(1)] * 2, shares=shares, rank=run.rank), line_loss
                    )
                replica.update()
                schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
            return [rates[0], rates[18], rates[19]]

    assert launch(work, world_size) == [[1.0, 1.0, pytest.approx(0.1)]] * world_size


def test_a_parameter_in_no_group_is_named_when_it_comes_up() -> None:
    events: list[Event] = []
    with unisono.join(observer=events.append) as run:
        model = network()
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        (parts,) = parts_of(1)
        replica.step(batch_of(parts), cross_entropy)
        model.append(nn.Linear(3, 3))
        for _ in range(2):
            replica.step(batch_of(parts), cross_entropy)
        assert model[3].weight.grad is None
    words = [event.message for event in events if isinstance(event, Notice) and "no group" in event.message]
    assert [word.split("'")[1] for word in words] == ["3.weight", "3.bias"]
