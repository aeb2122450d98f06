"""Models of many kinds: the same bits on any workers, and what plain PyTorch computes in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono
from kinds_of_models import KINDS, Loss, cross_entropy, mlp, old_weight_norm, spectral_norm
from steps import Line, Part, alone, global_batch
from unisono.cluster.launch import ForkServer
from unisono.grid import cut
from unisono.replica import Update

Launch = Callable[..., list[Any]]
NUM_STEPS = 3
SIZES = tuple(len(part) for part in cut(13, 4))


def parts(step: int) -> list[Part]:
    generator = torch.Generator().manual_seed(step)
    return [
        Part((torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)))
        for size in SIZES
    ]


def train_all(assignment: Any = "even", update: Update = "replicated") -> dict[str, list[str]]:
    """Train every kind for some steps on this worker of a run; return fingerprints and losses."""
    outcomes = {}
    with unisono.join(seed=2, assignment=assignment, observer=lambda event: None) as run:
        shares = (
            list(assignment) if assignment != "even" else [len(c) for c in cut(len(SIZES), run.world_size)]
        )
        for name, (build, loss_fn) in KINDS.items():
            model = build()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            replica = run.replicate(model, optimizer, update=update)
            losses = [
                replica.step(global_batch(parts(step), shares=shares, rank=run.rank), loss_fn).hex()
                for step in range(NUM_STEPS)
            ]
            outcomes[name] = [run.fingerprint(model), *losses]
    return outcomes


def test_every_kind_is_the_same_on_any_workers(fork_server: ForkServer) -> None:
    (expected,) = fork_server.launch(train_all, 1)
    worlds = [(2, "even"), (2, [1, 3]), (3, "even"), (2, "even", "sharded"), (3, [1, 2, 1], "sharded")]
    for arguments in worlds:
        for rank, found in enumerate(fork_server.launch(train_all, *arguments)):
            differing = [name for name in KINDS if found[name] != expected[name]]
            assert not differing, (arguments, rank)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_what_plain_pytorch_computes(name: str) -> None:
    build, loss_fn = KINDS[name]
    torch.manual_seed(5)
    ours = build()
    torch.manual_seed(5)
    plain = build()
    with alone() as run:
        replica = run.replicate(
            ours, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        )
        for step in range(NUM_STEPS):
            replica.step(global_batch(parts(step)), loss_fn)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for step in range(NUM_STEPS):
            plain_step(plain, optimizer, parts(step), loss_fn)
    for (key, one), (_, other) in zip(ours.state_dict().items(), plain.state_dict().items(), strict=True):
        assert torch.allclose(one, other, rtol=2e-5, atol=2e-6), key


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Part], loss_fn: Loss) -> None:
    """One step over the micro-batches one after the other, as a single process would do it."""
    sums: dict[nn.Parameter, Tensor] = {}
    total = 0.0
    for part in batch:
        optimizer.zero_grad()
        output = loss_fn(model, part)
        loss, weight = output if isinstance(output, tuple) else (output, len(part))
        if not weight:
            continue
        total += weight
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                sums[parameter] = sums.get(parameter, 0) + parameter.grad * weight
    for parameter in model.parameters():
        parameter.grad = sums[parameter] / total if parameter in sums else None
    optimizer.step()


@pytest.mark.parametrize("build", [old_weight_norm, spectral_norm])
def test_normalised_weights_train(launch: Launch, build: Callable[[], nn.Module]) -> None:
    def work() -> str:
        with unisono.join() as run, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the older one is deprecated, and in use
            model = build()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
            shares = [2] * 2 if run.world_size == 2 else [4]
            for step in range(3):
                replica.step(global_batch(parts(step), shares=shares, rank=run.rank), cross_entropy)
            return run.fingerprint(model)

    (expected,) = launch(work, 1)
    assert launch(work, 2) == [expected] * 2


def test_a_compiled_loss_function_is_a_loss_function() -> None:
    with alone() as run:
        model = mlp()
        other = copy.deepcopy(model)
        for each, loss_fn in (
            (model, cross_entropy),
            (other, torch.compile(cross_entropy, backend="aot_eager")),
        ):
            replica = run.replicate(each, torch.optim.SGD(each.parameters(), lr=0.1))
            for step in range(2):
                replica.step(global_batch(parts(step)), loss_fn)
    assert torch.allclose(model[0].weight, other[0].weight, atol=1e-6)


def test_hooks_see_each_micro_batch_and_not_the_sum() -> None:
    with alone() as run:
        model = mlp()
        seen: list[float] = []
        model[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.abs().sum().item()))
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        replica.backward(global_batch(parts(0)), cross_entropy)
        expected = []
        for part in parts(0):
            (gradient,) = torch.autograd.grad(cross_entropy(model, part), model[2].bias)
            expected.append(gradient.abs().sum().item() * len(part) / max(SIZES))
    assert seen == pytest.approx(expected, rel=1e-5)


def test_a_frozen_trunk_is_left_alone_and_trained_while_it_is_not(launch: Launch) -> None:
    def work() -> list[Any]:
        with unisono.join() as run:
            model = mlp()
            plain = copy.deepcopy(model)
            options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), **options))
            optimizer = torch.optim.SGD(plain.parameters(), **options)
            shares = [len(c) for c in cut(4, run.world_size)]
            trunks = []
            for step in range(8):
                for each in (model, plain):
                    each[0].requires_grad_(3 <= step < 6)
                trunks.append(model[0].weight.detach().clone())
                replica.step(global_batch(parts(step), shares=shares, rank=run.rank), cross_entropy)
                plain_step(plain, optimizer, parts(step), cross_entropy)
            still = [torch.equal(trunks[a], trunks[b]) for a, b in ((0, 3), (3, 4), (6, 7))]
            alike = all(
                torch.allclose(a, b, atol=1e-5)
                for a, b in zip(model.parameters(), plain.parameters(), strict=True)
            )
            return [still, alike, run.fingerprint(model)]

    (expected,) = launch(work, 1)
    assert expected[:2] == [[True, False, True], True]
    assert launch(work, 2) == [expected] * 2


def test_frozen_layers_cost_no_traffic(launch: Launch) -> None:
    def work() -> list[int]:
        with unisono.join(backend="gloo") as run:
            model = nn.Sequential(nn.Linear(6, 1000), nn.Linear(1000, 3))
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
            transport = run._transport
            sent: list[int] = []

            start = transport.start

            def counting(sends: Any, receives: Any) -> Any:
                sent.append(sum(tensor.nbytes for _, tensor in sends))
                return start(sends, receives)

            transport.start = counting  # type: ignore[method-assign]
            found = []
            for step in range(6):
                model[0].requires_grad_(step < 2 or step >= 4)
                sent.clear()
                replica.step(global_batch(parts(step), shares=[2, 2], rank=run.rank), cross_entropy)
                found.append(sum(sent))
            return found

    trunk, head = 4 * (6 * 1000 + 1000), 4 * (1000 * 3 + 3)
    for found in launch(work, 2):
        assert all(trunk + head <= found[step] < trunk + head + 500 for step in (0, 1, 4, 5)), found
        assert all(head <= found[step] < head + 500 for step in (2, 3)), found


def test_parameters_that_a_rank_changes_its_own_way_are_found(launch: Launch) -> None:
    def work() -> str:
        with unisono.join() as run:
            model = mlp()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
            replica.step(global_batch(parts(0), shares=[2, 2], rank=run.rank), cross_entropy)
            torch.manual_seed(run.rank)
            model[2] = nn.Linear(7, 3)
            try:
                replica.step(global_batch(parts(1), shares=[2, 2], rank=run.rank), cross_entropy)
            except unisono.MismatchError as error:
                return str(error)
        return "no error"

    first, second = launch(work, 2)
    assert first == second
    assert "from other values" in first


@pytest.mark.parametrize("seeds", [(0, 1), (7, 7)], ids=["each its own", "all the same"])
def test_parameters_written_in_place_are_compared(launch: Launch, seeds: tuple[int, int]) -> None:
    def work() -> str:
        with unisono.join() as run:
            model = mlp()
            replica = run.replicate(model, torch.optim.Adam(model.parameters(), lr=0.1))
            replica.step(global_batch(parts(0), shares=[2, 2], rank=run.rank), cross_entropy)
            torch.manual_seed(seeds[run.rank])
            model[2].reset_parameters()
            try:
                for step in (1, 2):
                    replica.step(global_batch(parts(step), shares=[2, 2], rank=run.rank), cross_entropy)
            except unisono.MismatchError as error:
                return str(error)
            return run.fingerprint(model)

    first, second = launch(work, 2)
    assert first == second
    assert ("2.weight, 2.bias were written between steps" in first) == (seeds[0] != seeds[1])


def test_a_sum_over_the_batch_is_its_mean_times_its_size(launch: Launch) -> None:
    def work() -> float:
        with unisono.join() as run:
            model = Line()
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01))
            values = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])]
            shares = [2 // run.world_size] * run.world_size
            batch = global_batch(values, shares=shares, rank=run.rank)
            replica.step(batch, lambda m, targets: m.loss(targets) * len(batch))
            return model.w.item()

    for world_size in (1, 2):
        assert launch(work, world_size) == pytest.approx([0.15] * world_size)


def test_a_parameter_of_many_small_buckets_and_an_odd_size(launch: Launch) -> None:
    def work() -> str:
        with unisono.join() as run:
            model = nn.ParameterList([nn.Parameter(torch.ones(10_007)), nn.Parameter(torch.ones(3))])
            strategy = unisono.Synchronous(bucket_bytes=1000, first_bucket_bytes=1000)
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
            rows = [torch.arange(10_007.0) * scale for scale in (1.0, 2.0, 4.0)]
            shares = [len(c) for c in cut(3, run.world_size)]
            batch = global_batch([row[None] for row in rows], shares=shares, rank=run.rank)
            replica.step(batch, lambda m, x: (m[0] * x).sum() + m[1].sum())
            expected = 1 - 0.1 * torch.arange(10_007.0) * 7 / 3
            assert torch.allclose(model[0], expected, rtol=1e-6)
            return run.fingerprint(model)

    (expected,) = launch(work, 1)
    for world_size in (2, 3):
        assert launch(work, world_size) == [expected] * world_size


@pytest.mark.parametrize("build", [lambda: nn.Linear(6, 3).requires_grad_(False), nn.ReLU])
def test_a_module_with_nothing_to_train_sends_nothing_but_its_state(launch: Launch, build: Any) -> None:
    def work() -> list[Any]:
        with unisono.join() as run:
            torch.manual_seed(run.rank)
            model = build()
            replica = run.replicate(model)
            loss = replica.step(
                global_batch(parts(0), shares=[2, 2], rank=run.rank), lambda m, part: m(part[0]).mean()
            )
            hooks = [p for p in model.parameters() if p._post_accumulate_grad_hooks]
            return [run.fingerprint(model), loss.hex(), hooks]

    first, second = launch(work, 2)
    assert first == second
    assert first[2] == []


def test_tensors_of_every_dtype_start_as_on_rank_0(launch: Launch) -> None:
    def work() -> list[Any]:
        with unisono.join() as run:
            values: list[Tensor] = [
                torch.tensor([2**53 + 1]),
                torch.tensor([True, False]),
                torch.tensor([200], dtype=torch.uint8),
                torch.tensor([0.1], dtype=torch.float16),
                torch.tensor([0.1], dtype=torch.bfloat16),
                torch.tensor(1e-300, dtype=torch.float64),
                torch.zeros(0),
                torch.tensor([-3], dtype=torch.int8),
                torch.tensor([1 + 2j]),
            ]
            model = nn.Module()
            for index, value in enumerate(values):
                start = value if run.rank == 0 else torch.zeros_like(value)
                model.register_buffer(f"b{index}", start, persistent=index % 2 == 0)
            model.frozen = nn.Parameter(torch.full((2,), float(run.rank)), requires_grad=False)
            run.replicate(model)
            same = [torch.equal(getattr(model, f"b{index}"), value) for index, value in enumerate(values)]
            return [*same, model.frozen.tolist()]

    assert launch(work, 2) == [[True] * 9 + [[0.0, 0.0]]] * 2
