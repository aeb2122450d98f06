"""Training loops of many kinds whose bits must not depend on who computes what; each returns what must be equal."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono
from optimizers import OPTIMIZERS
from scenarios import Noisy, Outcome, Scenario, cross_entropy, mlp


def gather_losses(run: unisono.Run, replica: unisono.Replica, loss_fn: Any, **options: Any) -> list[str]:
    data = options.pop("data", None) or Noisy(45, 6)
    loader = run.load(data, **({"batch_size": 16, "micro_batches": 5, "shuffle": True} | options))
    return [replica.step(batch, loss_fn).hex() for batch in loader]


class Words:
    """Pairs of words of a vocabulary of 30 of which only some are used; word 0 is padding."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index % 7, (index * 5) % 11]), torch.tensor(float(index % 3))


class Tables(nn.Module):
    """A table that says that its gradient is sparse, one of which only the call says so, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.said = nn.Embedding(30, 4, padding_idx=0, sparse=True)
        self.found = nn.Parameter(torch.randn(30, 4))
        self.unused = nn.Embedding(5, 4, sparse=True)
        self.head = nn.Linear(8, 1)

    def forward(self, words: Tensor) -> Tensor:
        said = self.said(words[:, 0])
        found = functional.embedding(words[:, 1], self.found, sparse=True)
        return self.head(torch.cat([said, found], dim=1)).squeeze(1)


def words_loss(model: nn.Module, micro_batch: Any) -> Tensor:
    words, targets = micro_batch
    return functional.mse_loss(model(words), targets)


def sparse(run: unisono.Run) -> Outcome:
    outcome: Outcome = []
    for micro_batches in (2, 5, 8):
        for overlap in (False, True):
            model = Tables()
            unused = model.unused.weight.detach().clone()
            tables = [model.said.weight, model.found, model.unused.weight]
            optimizers = [torch.optim.SparseAdam(tables, lr=0.05), torch.optim.AdamW(model.head.parameters())]
            strategy = unisono.Synchronous(overlap=overlap)
            replica = run.replicate(model, optimizers, strategy=strategy, clip_norm=0.5)
            losses = gather_losses(run, replica, words_loss, data=Words(), micro_batches=micro_batches)
            assert torch.equal(model.unused.weight, unused)
            outcome.append([run.fingerprint(model), losses])
    return outcome


def halves(run: unisono.Run) -> Outcome:
    """bfloat16 weights with sums in bfloat16, in float32, and with float32 masters."""
    outcome = []
    options: list[dict[str, Any]] = [
        {},
        {"strategy": unisono.Synchronous(float32_sums=True)},
        {"strategy": unisono.Synchronous(float32_sums=True, overlap=True, bucket_bytes=32)},
        {"master_weights": True, "clip_norm": 0.1},
    ]
    for option in options:
        model = mlp().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
        replica = run.replicate(model, optimizer, **option)

        def loss_fn(model: nn.Module, micro_batch: Any) -> Tensor:
            return functional.cross_entropy(model(micro_batch[0].bfloat16()).float(), micro_batch[1])

        losses = gather_losses(run, replica, loss_fn)
        masters = [p for p in optimizer.param_groups[0]["params"] if p.dtype == torch.float32]
        outcome.append([run.fingerprint(model), losses, [float(p.sum().detach()).hex() for p in masters]])
    return outcome


def lbfgs(run: unisono.Run) -> Outcome:
    outcome = []
    for line_search in (None, "strong_wolfe"):
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn=line_search)
        replica = run.replicate(model, optimizer, clip_norm=10.0)
        outcome.append(
            [gather_losses(run, replica, cross_entropy), run.fingerprint(model), replica.num_steps]
        )
    return outcome


def every_optimizer(run: unisono.Run) -> Outcome:
    outcome: Outcome = []
    for name, make in OPTIMIZERS.items():
        model = mlp()
        replica = run.replicate(model, make(list(model.parameters())), clip_norm=0.5)
        outcome.append([name, gather_losses(run, replica, cross_entropy), run.fingerprint(model)])
        replica.close()
    return outcome


def accumulation(run: unisono.Run) -> Outcome:
    """Windows of three batches, the last of them shorter, some parameters in some batches only."""
    model = nn.ModuleList([mlp(), mlp()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = run.replicate(model, optimizer)
    loader = run.load(Noisy(61, 6), batch_size=8, micro_batches=3, shuffle=True)
    found: list[Any] = []
    for batch in loader:

        def loss_fn(model: Any, micro_batch: Any, which: int = batch.index % 2) -> Tensor:
            return cross_entropy(model[which], micro_batch)

        replica.backward(batch, loss_fn)
        if batch.index % 3 == 2 or batch.index == len(loader) - 1:
            found.append(replica.clip(1.0).hex())
            replica.update()
    assert replica.num_steps == 3
    return [found, run.fingerprint(model)]


def loss_scaling(run: unisono.Run) -> Outcome:
    """float16 autocast: the first scales overflow, then it grows again."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-12, growth_interval=2)
    replica = run.replicate(model, optimizer, scaler=scaler, clip_norm=0.5)

    def loss_fn(model: nn.Module, micro_batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return cross_entropy(model, micro_batch)

    losses, scales = [], []
    for batch in run.load(Noisy(61, 6), batch_size=8, micro_batches=5):
        losses.append(replica.step(batch, loss_fn).hex())
        scales.append((scaler.get_scale(), replica.skipped))
    assert any(skipped for _, skipped in scales)
    assert not scales[-1][1]
    assert scales[-1][0] > min(scale for scale, _ in scales)
    return [losses, scales, run.fingerprint(model)]


def autocast(run: unisono.Run) -> Outcome:
    model = mlp()
    replica = run.replicate(model, torch.optim.AdamW(model.parameters()))

    def loss_fn(model: nn.Module, micro_batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(model, micro_batch)

    return [gather_losses(run, replica, loss_fn), run.fingerprint(model)]


class Encoder(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), norm, nn.Dropout(0.2), nn.Linear(8, 4))
        self.log_scale = nn.Parameter(torch.tensor(0.5))


def embed_views(model: Any, micro_batch: Any) -> tuple[Tensor, Tensor]:
    rows, _ = micro_batch
    views = [model.body(rows + 0.1 * torch.randn_like(rows)) for _ in range(2)]
    return functional.normalize(views[0]), functional.normalize(views[1])


def whole_batch(run: unisono.Run) -> Outcome:
    """InfoNCE over the whole batch with a learned temperature; the last batch has empty micro-batches."""
    outcome = []
    settings = [
        (1, False, nn.BatchNorm1d(8), 32),
        (4, False, nn.BatchNorm1d(8), 32),
        (5, True, nn.LayerNorm(8), 35),
    ]
    for micro_batches, overlap, norm, num_samples in settings:
        model = Encoder(norm)
        strategy = unisono.Synchronous(overlap=overlap, bucket_bytes=64, first_bucket_bytes=64)
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.5), strategy=strategy)

        def loss_fn(views: tuple[Tensor, Tensor], model: Any = model) -> Tensor:
            logits = views[0] @ views[1].T * model.log_scale.exp()
            return functional.cross_entropy(logits, torch.arange(len(logits)))

        before = model.log_scale.item()
        loader = run.load(Noisy(num_samples, 6), batch_size=16, micro_batches=micro_batches)
        losses = [replica.step(batch, loss_fn, embed=embed_views).hex() for batch in loader]
        assert model.log_scale.item() != before
        outcome.append([losses, run.fingerprint(model)])
    return outcome


def gan_in_one_module(run: unisono.Run) -> Outcome:
    """Two replicas over one model, an optimizer each; neither moves what is the other's."""
    both = nn.ModuleDict({"g": mlp(6, 6), "d": mlp(6, 1)})
    trainers = {
        name: run.replicate(both, torch.optim.Adam(both[name].parameters(), lr=0.01)) for name in both
    }

    def d_loss(model: Any, micro_batch: Any) -> Tensor:
        fake = model["g"](torch.randn_like(micro_batch[0]))
        return (model["d"](fake) - model["d"](micro_batch[0])).mean()

    def g_loss(model: Any, micro_batch: Any) -> Tensor:
        return -model["d"](model["g"](torch.randn_like(micro_batch[0]))).mean()

    losses = []
    for batch in run.load(Noisy(40, 6), batch_size=16, micro_batches=5):
        before = run.fingerprint(both["g"])
        losses.append(trainers["d"].step(batch, d_loss).hex())
        assert run.fingerprint(both["g"]) == before
        before = run.fingerprint(both["d"])
        losses.append(trainers["g"].step(batch, g_loss).hex())
        assert run.fingerprint(both["d"]) == before
    return [losses, run.fingerprint(both)]


def schedule_and_averages(run: unisono.Run) -> Outcome:
    """A schedule per step, a moving average and a target network, clipping for each group and by value."""
    model, target = mlp(), mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    replica = run.replicate(model, optimizer, clip_norm=(0.1, None), clip_value=0.05)

    def loss_fn(model: nn.Module, micro_batch: Any) -> Tensor:
        with torch.no_grad():
            goal = target(micro_batch[0])
        return cross_entropy(model, micro_batch) + functional.mse_loss(model(micro_batch[0]), goal)

    losses = []
    for batch in run.load(Noisy(61, 6), batch_size=8, micro_batches=5):
        losses.append(replica.step(batch, loss_fn).hex())
        schedule.step()
        average.update_parameters(model)
        if batch.index % 3 == 2:
            target.load_state_dict(model.state_dict())
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [0.1 / 16, 0.05 / 16]
    return [losses, rates, run.fingerprint(model), run.fingerprint(average.module)]


def replaced_parameters(run: unisono.Run) -> Outcome:
    """A bigger head, another dtype and a new optimizer, in mid-run."""
    model = mlp()
    replica = run.replicate(model, torch.optim.Adam(model.parameters(), lr=0.01))
    losses = []
    for batch in run.load(Noisy(61, 6), batch_size=8, micro_batches=5):
        if batch.index == 2:
            model[3] = nn.Linear(9, 5)
        if batch.index == 4:
            model.double().float()
        if batch.index == 5:
            replica.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if batch.index == 6:
            model.append(nn.Linear(5, 3))
            replica.optimizer.add_param_group({"params": model[4].parameters()})
        losses.append(replica.step(batch, cross_entropy).hex())
    return [losses, run.fingerprint(model)]


def skipped(run: unisono.Run) -> Outcome:
    """Losses that are not finite, and steps that a loss function gives up, with and without early sums."""
    outcome = []
    for overlap in (True, False):
        model = mlp()
        strategy = unisono.Synchronous(overlap=overlap, bucket_bytes=64, first_bucket_bytes=64)
        replica = run.replicate(model, torch.optim.Adam(model.parameters()), strategy=strategy)

        def loss_fn(model: nn.Module, micro_batch: Any, replica: unisono.Replica = replica) -> Tensor | None:
            first = float(micro_batch[0][0, 0])
            if replica.num_steps in (0, 3) and first > 0.5:
                replica.skip()
                return None
            return cross_entropy(model, micro_batch) * (math.nan if first < -1.5 else 1.0)

        losses = gather_losses(run, replica, loss_fn, batch_size=6, micro_batches=5)
        outcome.append([losses, run.fingerprint(model), replica.num_steps, replica.num_skipped])
    assert 0 < outcome[0][3] < outcome[0][2]
    return outcome


def own_update(run: unisono.Run) -> Outcome:
    """A model without an optimizer, whose gradients the script reads and applies itself."""
    model = mlp()
    replica = run.replicate(model)
    for batch in run.load(Noisy(40, 6), batch_size=16, micro_batches=5):
        replica.backward(batch, cross_entropy)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
        replica.update()
    nothing = run.replicate(nn.ReLU())
    nothing.step(batch, lambda module, micro_batch: module(micro_batch[0]).mean())
    return [run.fingerprint(model), nothing.num_steps]


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        sparse,
        halves,
        lbfgs,
        every_optimizer,
        accumulation,
        loss_scaling,
        autocast,
        whole_batch,
        gan_in_one_module,
        schedule_and_averages,
        replaced_parameters,
        skipped,
        own_update,
    )
}


def run_all(assignment: str | list[int] = "even") -> dict[str, Outcome]:
    """Run all scenarios, one after the other, as one worker of a run."""
    with unisono.join(seed=4, assignment=assignment, observer=lambda event: None) as run:
        return {name: scenario(run) for name, scenario in SCENARIOS.items()}
