"""Parameters of 16 bits: sums in float32, and float32 masters, against plain PyTorch and by hand."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono
from steps import Line, alone, global_batch, line_loss
from unisono.errors import UsageError

Launch = Callable[..., list[Any]]
OPTIMIZERS = [
    each
    for each in vars(torch.optim).values()
    if inspect.isclass(each)
    and issubclass(each, torch.optim.Optimizer)
    and each not in (torch.optim.Optimizer, torch.optim.SparseAdam)
]
FLOAT32_SUMS = unisono.Synchronous(float32_sums=True, bucket_bytes=1, first_bucket_bytes=1)


@pytest.fixture
def run() -> Iterator[unisono.Run]:
    with alone(seed=5) as run:
        yield run


def half_line() -> Line:
    return Line().bfloat16()


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def targets(*values: float) -> Any:
    return global_batch([torch.tensor([value]) for value in values])


def square_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).float().square().mean()


def members(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Plain:
    """What masters are, written down for one process: float32 weights beside a bfloat16 model."""

    def __init__(self, model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model = model
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
        self.optimizer = make(self.masters)

    def step(self, parts: list[Tensor]) -> None:
        def closure() -> float:
            self.round()
            leaves, losses = [], []
            for part in parts:
                loss = square_loss(self.model, part)
                losses.append(loss.item())
                leaves.append(torch.autograd.grad(loss, list(self.model.parameters())))
            for master, *gradients in zip(self.masters, *leaves, strict=True):
                master.grad = sum(gradient.float() for gradient in gradients) / len(parts)
            return sum(losses) / len(losses)

        if type(self.optimizer) is torch.optim.LBFGS:
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
        self.round()

    def round(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_updates_masters_as_in_plain_pytorch(run: unisono.Run, kind: Any) -> None:
    torch.manual_seed(1)
    ours = nn.Linear(4, 4, bias=False).bfloat16()  # a matrix: Muon takes nothing else
    plain = _Plain(copy.deepcopy(ours), lambda parameters: kind(parameters, lr=1e-3))
    optimizer = kind(ours.parameters(), lr=1e-3)
    replica = run.replicate(ours, optimizer, master_weights=True)
    for step in range(4):
        parts = [torch.randn(2, 4).bfloat16() + step for _ in range(2)]
        replica.step(global_batch(parts), square_loss)
        plain.step(parts)
    (master,) = members(optimizer)
    assert torch.equal(master, plain.masters[0])
    assert torch.equal(ours.weight, plain.model.weight)
    assert not torch.equal(master, ours.weight.float())


@pytest.mark.parametrize("form", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_forms_of_an_update_take_masters(run: unisono.Run, form: dict[str, bool]) -> None:
    ours = nn.Linear(3, 2).bfloat16()
    plain = _Plain(copy.deepcopy(ours), lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **form))
    replica = run.replicate(ours, torch.optim.AdamW(ours.parameters(), lr=1e-3, **form), master_weights=True)
    for _ in range(3):
        parts = [torch.randn(2, 3).bfloat16() for _ in range(2)]
        replica.step(global_batch(parts), square_loss)
        plain.step(parts)
    assert run.fingerprint(ours) == run.fingerprint(plain.model)


def test_the_master_holds_what_the_parameter_rounds(run: unisono.Run) -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = sgd(model, lr=1e-3)
    replica = run.replicate(model, optimizer, master_weights=True)
    for _ in range(100):
        replica.step(global_batch([torch.ones(1, 1).bfloat16()]), lambda m, x: -m(x).mean())
    (master,) = members(optimizer)
    assert master.item() == pytest.approx(1.1, abs=1e-5)
    assert model.weight.item() == master.bfloat16().item()


def test_an_optimizer_that_has_stepped_with_sixteen_bits_gets_no_masters(run: unisono.Run) -> None:
    model = half_line()
    optimizer = torch.optim.Adam(model.parameters())
    line_loss(model, torch.ones(1)).backward()
    optimizer.step()
    with pytest.raises(UsageError, match=r"Adam has state of a torch.bfloat16 parameter already"):
        run.replicate(model, optimizer, master_weights=True)


@pytest.mark.parametrize("master_weights", [True, False])
def test_an_optimizer_with_masters_of_another_replica_is_refused(
    run: unisono.Run, master_weights: bool
) -> None:
    model = half_line()
    optimizer = sgd(model)
    run.replicate(model, optimizer, master_weights=True)
    with pytest.raises(UsageError, match=r"replica 1: the optimizer holds float32 masters of replica 0"):
        run.replicate(model, optimizer, master_weights=master_weights)


def test_a_replaced_parameter_gets_a_master_of_its_own(run: unisono.Run) -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replica = run.replicate(model, optimizer, master_weights=True)
    rows = torch.ones(2, 2).bfloat16()
    replica.step(global_batch([rows, rows]), square_loss)
    for _ in range(2):
        model.weight = nn.Parameter(torch.ones(2, 2).bfloat16())
        replica.step(global_batch([rows, rows]), square_loss)
        assert [p.dtype for p in members(optimizer)] == [torch.float32] * 2
        assert members(optimizer)[0].flatten().tolist() == pytest.approx([0.999] * 4, abs=2e-5)
        assert len(optimizer.state) == 2


def test_the_gradient_that_the_script_gives_a_parameter_is_the_one_applied(run: unisono.Run) -> None:
    model = half_line()
    replica = run.replicate(model, sgd(model), master_weights=True)
    replica.backward(targets(4.0), line_loss)
    assert model.w.grad.dtype == torch.float32
    model.w.grad = model.w.grad * 0.5
    replica.update()
    assert model.w.item() == 2.0


def test_clipping_the_members_of_a_group_clips_what_is_applied(run: unisono.Run) -> None:
    model = half_line()
    optimizer = sgd(model)
    replica = run.replicate(model, optimizer, master_weights=True)
    replica.backward(targets(4.0), line_loss)
    model.w.grad = model.w.grad * 2
    assert replica.clip(3.0, members(optimizer)) == 8.0
    replica.update()
    assert model.w.item() == 3.0


def test_frozen_parameters_have_masters_once_they_are_thawed(run: unisono.Run) -> None:
    model = nn.ModuleList([Line(), Line()]).bfloat16()
    model[1].requires_grad_(False)
    replica = run.replicate(model, sgd(model), master_weights=True)
    for expected in ([4.0, 0.0], [4.0, 4.0]):
        replica.step(targets(4.0), lambda m, y: m[0].loss(y) + m[1].loss(y))
        assert [line.w.item() for line in model] == expected
        model.requires_grad_(True)


def test_a_model_that_became_wider_than_its_masters_is_refused(run: unisono.Run) -> None:
    model = half_line()
    replica = run.replicate(model, sgd(model), master_weights=True)
    model.double()
    with pytest.raises(UsageError, match=r"with a float32 master became torch.float64"):
        replica.step(targets(4.0), line_loss)


@pytest.mark.parametrize(
    "options", [{"strategy": FLOAT32_SUMS}, {"master_weights": True}], ids=["sums", "masters"]
)
def test_a_skipped_batch_of_a_window_leaves_the_others_gradient(run: unisono.Run, options: Any) -> None:
    def loss_fn(model: Any, y: Tensor) -> Tensor:
        return line_loss(model, y) * (math.nan if y.item() > 100 else 1.0)

    model = half_line()
    replica = run.replicate(model, sgd(model), **options)
    replica.backward(targets(4.0), loss_fn)
    replica.backward(targets(800.0, 9.0), loss_fn)
    replica.update()
    assert model.w.item() == 4.0


@pytest.mark.parametrize(
    "options", [{"strategy": FLOAT32_SUMS}, {"master_weights": True}], ids=["sums", "masters"]
)
def test_batches_of_a_window_may_reach_different_parameters(run: unisono.Run, options: Any) -> None:
    model = nn.ModuleList([Line(), Line()]).bfloat16()
    replica = run.replicate(model, sgd(model), **options)
    for which in range(2):
        replica.backward(targets(4.0), lambda m, y, which=which: m[which].loss(y))
    replica.update()
    assert [line.w.item() for line in model] == [2.0, 2.0]


def test_a_backward_of_the_users_own_gives_gradients_of_the_parameters_dtype(run: unisono.Run) -> None:
    model = half_line()
    replica = run.replicate(model, sgd(model), strategy=FLOAT32_SUMS)
    for loss_fn in (line_loss, lambda m, y: line_loss(m, y) * math.nan, lambda m, y: y.mean()):
        replica.step(targets(4.0), loss_fn)
        model.w.grad = None
        line_loss(model, torch.ones(1)).backward()
        assert model.w.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("world_size", [1, 4])
def test_sparse_gradients_are_summed_in_float32_and_rounded_once(launch: Launch, world_size: int) -> None:
    def work() -> list[Any]:
        found = []
        with unisono.join(observer=lambda event: None) as run:
            for options in (
                {},
                {"strategy": unisono.Synchronous(float32_sums=True)},
                {"master_weights": True},
            ):
                model = nn.Embedding(3, 1, sparse=True).bfloat16()
                replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)
                ids = [torch.tensor([1] * count) for count in (256, 1, 1, 1)]
                shares = [4 // run.world_size] * run.world_size
                batch = global_batch(ids, shares=shares, rank=run.rank)
                replica.backward(batch, lambda m, ids: (m(ids).float().sum(), 1.0))
                gradient = model.weight.grad
                assert gradient.is_coalesced()
                found.append([str(gradient.dtype), gradient.to_dense().flatten().tolist()])
        return found

    expected = [
        ["torch.bfloat16", [0.0, 64.5, 0.0]],
        ["torch.bfloat16", [0.0, 65.0, 0.0]],  # 64.75 has two neighbours, the even one is taken
        ["torch.float32", [0.0, 64.75, 0.0]],
    ]
    assert launch(work, world_size) == [expected] * world_size


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad
def test_masters_of_sparse_tables_are_those_of_a_dense_one(run: unisono.Run) -> None:
    torch.manual_seed(0)
    tables = [nn.Embedding(9, 3, sparse=is_sparse).bfloat16() for is_sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        replica = run.replicate(table, torch.optim.Adagrad(table.parameters(), lr=1e-3), master_weights=True)
        for step in range(4):
            parts = [torch.tensor([1 + step, 1]), torch.tensor([5, 8])]
            replica.step(global_batch(parts), square_loss)
    assert torch.equal(tables[0].weight, tables[1].weight)
