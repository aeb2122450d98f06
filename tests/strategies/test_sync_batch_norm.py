"""SyncBatchNorm on real workers, against BatchNorm over all rows in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unisono
from steps import alone, global_batch
from unisono.errors import MismatchError, UsageError

Launch = Callable[..., list[Any]]
Build = Callable[[], nn.Module]
Outcome = dict[str, Tensor]


def curved(output: Tensor, rows: Tensor) -> Tensor:
    """A mean loss whose gradient differs from row to row."""
    per_row = ((output - 0.3) ** 3 + output * rows.detach().sin().sum().to(output.dtype)).flatten(1).mean(1)
    return per_row.mean()


def seen_by(
    run: unisono.Run, build: Build, parts: list[Tensor], shares: list[int] | None = None, **options: Any
) -> Outcome:
    """Return what one step leaves on a worker: buffers, gradients, and those of its own rows."""
    seen: Outcome = {}

    def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
        seen["rows"] = rows.clone(memory_format=torch.preserve_format).requires_grad_()
        seen["output"] = model(seen["rows"])
        return curved(seen["output"], rows)

    model = build()
    replica = run.replicate(model, **options)
    batch = global_batch(parts, shares=shares or [1] * run.world_size, rank=run.rank)
    replica.backward(batch, loss_fn)
    outcome = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outcome |= {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    if seen:
        scale = batch.nominal_weight / sum(batch.sizes)
        outcome |= {"input": seen["rows"].grad * scale, "output": seen["output"].detach()}
    assert all("forward" not in module.__dict__ for module in model.modules())
    return outcome


def on_workers(
    launch: Launch, build: Build, parts: list[Tensor], shares: list[int] | None = None, **options: Any
) -> list[Outcome]:
    def work() -> Outcome:
        with unisono.join() as run:
            return seen_by(run, build, parts, shares, **options)

    return launch(work, len(shares or parts))


def in_one_process(build: Build, parts: list[Tensor]) -> Outcome:
    model = build()
    rows = torch.cat(parts).requires_grad_()
    output = model(rows)
    sizes = [len(part) for part in parts]
    losses = [
        curved(own, part) * len(part)
        for own, part in zip(output.split(sizes), rows.split(sizes), strict=True)
        if len(part)
    ]
    (torch.stack(losses).sum() / sum(sizes)).backward()
    outcome = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outcome |= {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    return {**outcome, "input": rows.grad, "output": output.detach()}


def assert_as_one_process(results: list[Outcome], expected: Outcome, **tolerance: float) -> None:
    for name in expected:
        if name in ("input", "output"):
            found = torch.cat([result[name] for result in results if name in result])
            torch.testing.assert_close(found, expected[name], **tolerance)
        else:
            assert all(torch.equal(result[name], results[0][name]) for result in results), name
            torch.testing.assert_close(results[0][name], expected[name], **tolerance)


def weighted(norm: nn.Module) -> nn.Module:
    """Give a layer weights that are not 1 and 0, and float64."""
    with torch.no_grad():
        for parameter, value in zip(norm.parameters(), (0.5, -2.0), strict=False):
            parameter.copy_(torch.arange(parameter.numel()) * 0.3 + value)
    return norm.double()


def test_unequal_rows_are_one_batch(launch: Launch) -> None:
    parts = [torch.tensor([[0.0]]), torch.tensor([[3.0], [6.0], [9.0]])]
    results = on_workers(launch, lambda: nn.SyncBatchNorm(1, momentum=1.0), parts)
    for result in results:
        assert result["running_mean"].item() == 4.5
        assert result["running_var"].item() == 15
        assert result["num_batches_tracked"].item() == 1
    assert_as_one_process(results, in_one_process(lambda: nn.BatchNorm1d(1, momentum=1.0), parts))


def test_one_row_a_rank_is_legal(launch: Launch) -> None:
    parts = list(torch.randn(4, 3, dtype=torch.float64).split(1))
    results = on_workers(launch, lambda: weighted(nn.SyncBatchNorm(3)), parts)
    assert_as_one_process(results, in_one_process(lambda: weighted(nn.BatchNorm1d(3)), parts))


def kinds_of_layers_and_inputs() -> list[tuple[Any, list[Tensor], dict[str, Any]]]:
    generator = torch.Generator().manual_seed(2)
    flat = torch.randn(7, 3, dtype=torch.float64, generator=generator) * 3 + 100
    image = torch.randn(7, 3, 2, 4, dtype=torch.float64, generator=generator)
    channels_last = image.to(memory_format=torch.channels_last)
    transposed = flat.t().contiguous().t()
    return [
        (nn.BatchNorm1d, list(flat.split([2, 5])), {}),
        (nn.BatchNorm1d, list(transposed.split([2, 5])), {}),
        (nn.BatchNorm1d, list(flat[:, :, None].expand(7, 3, 4).split([2, 5])), {}),
        (nn.BatchNorm2d, list(image.split([6, 1])), {"affine": False}),
        (nn.BatchNorm2d, list(channels_last.split([3, 4])), {"track_running_stats": False}),
        (nn.BatchNorm2d, list(image.transpose(2, 3).split([3, 4])), {"momentum": None}),
        (nn.BatchNorm3d, list(image[..., None].split([3, 4])), {"eps": 0.1, "momentum": 0.7}),
    ]


def test_every_kind_of_layer_and_input_is_as_in_one_process(launch: Launch) -> None:
    def work() -> list[Outcome]:
        with unisono.join() as run:
            return [
                seen_by(run, lambda options=options: weighted(nn.SyncBatchNorm(3, **options)), parts)
                for _, parts, options in kinds_of_layers_and_inputs()
            ]

    found = launch(work, 2)
    for number, (kind, parts, options) in enumerate(kinds_of_layers_and_inputs()):

        def plain(kind: Any = kind, options: Any = options) -> nn.Module:
            return weighted(kind(3, **options))

        assert_as_one_process([results[number] for results in found], in_one_process(plain, parts))


def test_a_converted_model_inside_a_wrapper_is_found(launch: Launch) -> None:
    def build(convert: bool) -> nn.Module:
        torch.manual_seed(3)
        body = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 2))
        model = nn.Sequential(nn.Sequential(body, nn.BatchNorm2d(2)), nn.Flatten()).double()
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if convert else model

    parts = list(torch.randn(5, 3, 4, 4, dtype=torch.float64).split([2, 1, 2]))
    results = on_workers(launch, lambda: build(True), parts)
    assert_as_one_process(results, in_one_process(lambda: build(False), parts))


@pytest.mark.parametrize("shares", [[1, 1], [1, 1, 0], [0, 1, 1]], ids=str)
def test_workers_without_rows_take_part(launch: Launch, shares: list[int]) -> None:
    parts = [torch.tensor([[1.0], [3.0]], dtype=torch.float64), torch.zeros(0, 1, dtype=torch.float64)]

    def build(kind: Any) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(kind(1, momentum=1.0), nn.Linear(1, 2), kind(2)).double()

    results = on_workers(launch, lambda: build(nn.SyncBatchNorm), parts, shares)
    for result in results:
        assert result["0.running_mean"].item() == 2
        assert result["0.running_var"].item() / 2 == 1  # biased
    assert_as_one_process(results, in_one_process(lambda: build(nn.BatchNorm1d), parts))


def test_an_idle_worker_and_settings_of_the_reduction_change_no_bit(launch: Launch) -> None:
    def work(shares: list[int], **settings: Any) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.SyncBatchNorm(5), nn.Tanh(), nn.Linear(5, 1))
        data = [torch.randn(2, 3), torch.randn(3, 3)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with unisono.join() as run:
            replica = run.replicate(model, optimizer, strategy=unisono.Synchronous(**settings))
            losses = [
                replica.step(
                    global_batch([part + step for part in data], shares=shares, rank=run.rank),
                    lambda model, rows: curved(model(rows), rows),
                )
                for step in range(3)
            ]
            return [run.fingerprint(model), losses]

    found = launch(lambda: work([1, 1]), 2)
    found += launch(lambda: work([1, 0, 1]), 3)
    found += launch(lambda: work([1, 1], overlap=True, algorithm="direct"), 2)
    found += launch(lambda: work([0, 1, 1], overlap=True, algorithm="direct", bucket_bytes=1), 3)
    assert all(one == found[0] for one in found)


def test_a_worker_that_skips_a_layer_is_named_on_all(launch: Launch) -> None:
    def work() -> tuple[str, int]:
        model = nn.ModuleDict({"norm": nn.SyncBatchNorm(2), "head": nn.Linear(2, 1)})
        with unisono.join() as run:

            def loss_fn(model: Any, rows: Tensor) -> Tensor:
                skips = replica.num_steps == 2 and run.rank == 1
                return model["head"](rows if skips else model["norm"](rows)).square().mean()

            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
            parts = [torch.randn(3, 2), torch.randn(2, 2)]
            batch = global_batch(parts, shares=[1, 1], rank=run.rank)
            replica.step(batch, loss_fn)
            replica.step(batch, loss_fn)
            with pytest.raises(MismatchError) as caught:
                replica.step(batch, loss_fn)
            return str(caught.value), replica.num_steps

    first, second = launch(work, 2)
    assert first == second
    assert first[1] == 2
    assert (
        "rank 0: in forward of layer 'norm' (call 1 of the pass); rank 1: done with its forward" in first[0]
    )


def test_a_loss_that_depends_on_a_layer_on_one_worker_only_is_a_mismatch(launch: Launch) -> None:
    def work() -> str:
        model = nn.SyncBatchNorm(2)
        with unisono.join() as run:

            def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
                output = model(rows.requires_grad_())
                return (output if run.rank == 0 else rows).square().mean()

            replica = run.replicate(model)
            batch = global_batch([torch.randn(3, 2), torch.randn(2, 2)], shares=[1, 1], rank=run.rank)
            with pytest.raises(MismatchError) as caught:
                replica.backward(batch, loss_fn)
            return str(caught.value)

    first, second = launch(work, 2)
    assert first == second
    assert "rank 0: in backward of layer 'SyncBatchNorm'" in first


def test_rows_of_weight_0_are_in_the_statistics_and_get_their_gradient(launch: Launch) -> None:
    def build(kind: Any) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(2, 3), kind(3), nn.Tanh(), kind(3), nn.Linear(3, 1)).double()

    torch.manual_seed(4)
    parts = list(torch.randn(5, 2, dtype=torch.float64).split([2, 3]))

    def work() -> list[Tensor]:
        model = build(nn.SyncBatchNorm)
        with unisono.join() as run:
            replica = run.replicate(model)
            replica.backward(
                global_batch(parts, shares=[1, 1], rank=run.rank),
                lambda model, rows: (
                    model(rows).square().mean() * (1 if len(rows) == 2 else torch.nan),
                    2 if len(rows) == 2 else 0,
                ),
            )
            return [p.grad for p in model.parameters()]

    plain = build(nn.BatchNorm1d)
    plain(torch.cat(parts))[:2].square().mean().backward()
    for found in launch(work, 2):
        for gradient, parameter in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_parameters_have_no_gradient_where_no_loss_has_one(launch: Launch) -> None:
    def work() -> list[bool]:
        model = nn.SyncBatchNorm(2)
        with unisono.join() as run:
            replica = run.replicate(model)
            batch = global_batch([torch.randn(3, 2), torch.randn(2, 2)], shares=[1, 1], rank=run.rank)
            replica.backward(batch, lambda model, rows: model(rows).sum().detach())
            return [p.grad is None for p in model.parameters()]

    assert launch(work, 2) == [[True, True]] * 2


class Recomputed(nn.Module):
    """A block with two norms inside a checkpoint; its input needs a gradient, as re-entrant ones ask."""

    def __init__(self, kind: Any, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(2, 3)
        self.block = nn.Sequential(kind(3, momentum=0.0), nn.Tanh(), nn.Linear(3, 3), kind(3, momentum=0.0))
        self.use_reentrant = use_reentrant

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        if self.use_reentrant is None:
            return self.block(hidden)
        return checkpoint(self.block, hidden, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=str)
def test_recomputed_layers_exchange_again(launch: Launch, use_reentrant: bool) -> None:
    parts = [*torch.randn(5, 2, dtype=torch.float64).split([2, 3]), torch.zeros(0, 2, dtype=torch.float64)]
    results = on_workers(launch, lambda: Recomputed(nn.SyncBatchNorm, use_reentrant).double(), parts)
    expected = in_one_process(lambda: Recomputed(nn.BatchNorm1d, None).double(), parts)
    counts = [f"block.{layer}.num_batches_tracked" for layer in (0, 3)]
    # As with BatchNorm, a forward pass that is done again counts again.
    assert all(1 <= int(result[name]) <= 2 for result in results for name in counts)
    for outcome in (*results, expected):
        for name in counts:
            outcome.pop(name, None)
    assert_as_one_process(results, expected)


def test_a_pass_that_is_done_again_gives_the_same(launch: Launch) -> None:
    def work() -> list[Tensor]:
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3), nn.Linear(3, 1)).double()
        calls = []

        def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
            calls.append(len(rows))
            hidden = model(rows)
            hidden.abs().mean().backward(
                retain_graph=True
            )  # its gradients come twice: the pass is done again
            return hidden.square().mean()

        with unisono.join() as run:
            replica = run.replicate(model)
            parts = [torch.linspace(-1, 1, 8).double().reshape(4, 2)[part] for part in ([0, 1], [2, 3])]
            replica.backward(global_batch(parts, shares=[1, 1], rank=run.rank), loss_fn)
            return [p.grad for p in model.parameters()], len(calls), model[1].num_batches_tracked.item()

    torch.manual_seed(6)
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    output = plain(torch.linspace(-1, 1, 8).double().reshape(4, 2))
    (output.square().mean() + output.abs().mean()).backward()
    for gradients, _, count in launch(work, 2):
        assert count == 1
        for gradient, parameter in zip(gradients, plain.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_evaluation_never_communicates(launch: Launch) -> None:
    def work() -> list[float]:
        model = nn.SyncBatchNorm(1)
        with unisono.join() as run:
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
            batch = global_batch([torch.ones(2, 1), torch.zeros(1, 1)], shares=[1, 1], rank=run.rank)
            replica.step(batch, lambda model, rows: model(rows).square().mean())
            if run.is_main:
                model.eval()
                model(torch.ones(3, 1))
                model.train()
            # A layer that is not in training mode is used as it is in the step too.
            model.eval()
            replica.step(batch, lambda model, rows: model(rows).square().mean())
            return [model.running_mean.item(), model.num_batches_tracked.item()]

    assert launch(work, 2) == [[pytest.approx(0.1 * 2 / 3), 1]] * 2


def test_several_micro_batches_on_a_worker_are_an_error_before_any_runs() -> None:
    calls = []
    with alone() as run:
        model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = global_batch([torch.randn(2, 2)] * 8)
        message = r"step 0: layer '1' is a SyncBatchNorm, .* rank 0 has 8 of 8 micro-batches .*: use micro_batches=1"
        with pytest.raises(UsageError, match=message):
            replica.step(batch, lambda model, rows: calls.append(rows))
        assert not calls
        model.eval()  # then it is an ordinary layer
        replica.step(batch, lambda model, rows: model(rows).square().mean())
        with pytest.raises(UsageError, match="step 1: layer '1' is a SyncBatchNorm"):
            replica.step(batch, lambda model, rows: model.train()(rows).square().mean())
        replica.skip()


def test_one_micro_batch_on_one_worker_is_batch_norm_to_the_bit() -> None:
    rows = torch.randn(4, 3)

    def build(kind: Any) -> nn.Module:
        return nn.Sequential(kind(3), nn.Flatten())

    with alone() as run:
        found = seen_by(run, lambda: build(nn.SyncBatchNorm), [rows])
        expected = in_one_process(lambda: build(nn.BatchNorm1d), [rows])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_one_value_a_channel_on_all_workers_together_is_an_error(launch: Launch) -> None:
    def work() -> str:
        model = nn.SyncBatchNorm(2)
        with unisono.join() as run:
            replica = run.replicate(model)
            batch = global_batch([torch.ones(1, 2), torch.ones(0, 2)], shares=[1, 1], rank=run.rank)
            with pytest.raises(UsageError) as caught:
                replica.backward(batch, lambda model, rows: model(rows).sum())
            replica.skip()
            return str(caught.value)

    first, second = launch(work, 2)
    assert first == second
    assert "the whole global batch has one value per channel" in first


def test_a_worker_that_gives_a_step_up_keeps_nobody_waiting(launch: Launch) -> None:
    def work() -> list[Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.SyncBatchNorm(2), nn.Linear(2, 2), nn.SyncBatchNorm(2))
        with unisono.join(observer=lambda event: None) as run:
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
            before = run.fingerprint(model)
            batch = global_batch([torch.randn(3, 2), torch.randn(2, 2)], shares=[1, 1], rank=run.rank)

            def loss_fn(model: Any, rows: Tensor) -> Tensor | None:
                if run.rank == 0:
                    return model(rows).square().mean()
                model[0](rows)
                if replica.num_steps:
                    raise RuntimeError("out of memory")
                replica.skip()
                return None

            replica.step(batch, loss_fn)
            try:
                replica.step(batch, loss_fn)
            except RuntimeError:
                replica.skip()
            assert run.fingerprint(model) == before
            loss = replica.step(batch, lambda model, rows: model(rows).square().mean())
            return [replica.num_skipped, loss > 0, run.fingerprint(model)]

    first, second = launch(work, 2)
    assert first == second
    assert first[:2] == [2, True]


def test_a_loss_over_the_whole_batch_sees_rows_that_all_were_normalized_with(launch: Launch) -> None:
    def build(kind: Any) -> nn.Module:
        torch.manual_seed(8)
        return nn.Sequential(nn.Linear(2, 3), kind(3), nn.Linear(3, 2)).double()

    def contrast(rows: Tensor) -> Tensor:
        return (rows @ rows.t()).logsumexp(1).mean()

    torch.manual_seed(9)
    parts = [*torch.randn(5, 2, dtype=torch.float64).split([2, 3]), torch.zeros(0, 2, dtype=torch.float64)]

    def work() -> list[Tensor]:
        model = build(nn.SyncBatchNorm)
        with unisono.join() as run:
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
            batch = global_batch(parts, shares=[1, 1, 1], rank=run.rank)
            replica.step(batch, contrast, embed=lambda model, rows: model(rows))
            return [*model.parameters(), *model.buffers()]

    plain = build(nn.BatchNorm1d)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    contrast(plain(torch.cat(parts))).backward()
    optimizer.step()
    for found in launch(work, 3):
        for one, expected in zip(found, [*plain.parameters(), *plain.buffers()], strict=True):
            torch.testing.assert_close(one, expected)


def test_half_precision_is_computed_in_float32(launch: Launch) -> None:
    torch.manual_seed(10)
    parts = list((torch.randn(6, 3) + 5).bfloat16().split([2, 4]))
    for dtype in (torch.float32, torch.bfloat16):
        results = on_workers(launch, lambda dtype=dtype: nn.SyncBatchNorm(3).to(dtype), parts)
        expected = in_one_process(lambda: nn.BatchNorm1d(3), [part.float() for part in parts])
        rounded = {name: value.to(results[0][name].dtype) for name, value in expected.items()}
        assert_as_one_process(results, rounded, rtol=0.05, atol=0.05)


def test_a_layer_that_gets_no_rows_on_some_or_all_workers(launch: Launch) -> None:
    """As a head over detected regions does."""

    def work(limit: float) -> list[Any]:
        torch.manual_seed(12)
        model = nn.Sequential(nn.Linear(1, 2), nn.SyncBatchNorm(2)).double()
        parts = [torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[5.0], [6.0], [7.0]]).double()]
        with unisono.join() as run:
            replica = run.replicate(model)
            batch = global_batch(parts, shares=[1, 1], rank=run.rank)
            replica.backward(
                batch, lambda model, rows: model(rows[rows[:, 0] > limit]).square().sum() / len(rows)
            )
            return [*(p.grad for p in model.parameters()), *model.buffers()]

    torch.manual_seed(12)
    plain = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).double()
    (plain(torch.tensor([[5.0], [6.0], [7.0]]).double()).square().sum() / 5).backward()
    expected = [*(p.grad for p in plain.parameters()), *plain.buffers()]
    for found in launch(lambda: work(4.0), 2):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    for found in launch(lambda: work(9.0), 2):
        assert not any(gradient.any() for gradient in found[:4])
        assert [buffer.tolist() for buffer in found[4:]] == [[0, 0], [1, 1], 0]


class Straight(nn.Module):
    """No loop, in which `torch.compile` gives up at the first break."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first, self.norm, self.last = nn.Linear(2, 3), nn.SyncBatchNorm(3), nn.Linear(3, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.norm(self.first(rows)))


def test_a_compiled_model_breaks_its_graph_at_the_layer_and_compiles_once(launch: Launch) -> None:
    def work(compiles: bool) -> tuple[str, int]:
        from torch._dynamo.utils import counters

        model = Straight()
        used = torch.compile(model, backend="eager") if compiles else model
        parts = [torch.randn(3, 2), torch.randn(2, 2)]
        with unisono.join() as run:
            replica = run.replicate(used, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(10):
                batch = global_batch(parts, shares=[1, 1], rank=run.rank)
                replica.step(batch, lambda model, rows: model(rows).square().mean())
            return run.fingerprint(model), counters["stats"]["unique_graphs"]

    ((plain, _), _) = launch(lambda: work(False), 2)
    assert launch(lambda: work(True), 2) == [(plain, 2)] * 2
