"""Training runs whose bits must not depend on who computes what; each returns what must be equal.

A scenario is a function of a run. It is called on every worker of one world after the other.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unisono
from unisono.grid import assign, even_shares

Outcome = list[Any]
Scenario = Callable[[unisono.Run], Outcome]


class Noisy:
    """Rows with labels and with noise from all three libraries, as augmentation would add it."""

    def __init__(self, num_samples: int, *shape: int) -> None:
        generator = torch.Generator().manual_seed(num_samples)
        self.rows = torch.randn(num_samples, *shape, generator=generator)
        self.labels = torch.randint(0, 3, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(()) + float(numpy.random.rand()) + random.random()
        return self.rows[index] + 0.1 * noise, self.labels[index]


def mlp(inputs: int = 6, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, outputs))


def cross_entropy(model: nn.Module, micro_batch: Any) -> Tensor:
    rows, labels = micro_batch
    return functional.cross_entropy(model(rows), labels)


def train(
    run: unisono.Run,
    model: nn.Module,
    loss_fn: Any = cross_entropy,
    *,
    data: Any = None,
    batch_size: int = 16,
    micro_batches: int = 5,
    optimizer: torch.optim.Optimizer | None = None,
    before_batch: Callable[[int], None] = lambda index: None,
    epochs: int = 1,
    **replica_options: Any,
) -> Outcome:
    """Train and return fingerprint, losses, and what the user's own generators give afterwards."""
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.numel()], lr=0.01)
    replica = run.replicate(model, optimizer, **replica_options)
    data = Noisy(61, 6) if data is None else data
    loader = run.load(data, batch_size=batch_size, micro_batches=micro_batches, shuffle=True)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            before_batch(batch.index)
            losses.append(replica.step(batch, loss_fn).hex())
    drawn = [torch.rand(()).item(), float(numpy.random.rand()), random.random()]
    return [run.fingerprint(model), losses, drawn]


def cnn(run: unisono.Run) -> Outcome:
    """Batch norm, dropout, channels_last, clipping, a short last batch; a grid of 3, 5 and 8."""

    def build() -> nn.Sequential:
        body = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten()]
        return nn.Sequential(*body, nn.Linear(64, 3)).to(memory_format=torch.channels_last)

    data = Noisy(61, 2, 6, 6)
    return [
        train(run, build(), data=data, micro_batches=m, clip_norm=0.5, epochs=2 if m == 8 else 1)
        for m in (3, 5, 8)
    ]


def tokens(run: unisono.Run) -> Outcome:
    """Weights returned by the loss function; some are 0 with a loss of nan, and in batch 1 all are."""

    def loss_fn(model: nn.Module, micro_batch: Any) -> tuple[Tensor, int]:
        rows, labels = micro_batch
        kept = labels != 0 if at["batch"] != 1 else labels < 0
        loss = functional.cross_entropy(model(rows)[kept], labels[kept])
        return loss, int(kept.sum())

    at = {"batch": 0}
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {
        "optimizer": optimizer,
        "micro_batches": 8,
        "before_batch": lambda index: at.update(batch=index),
    }
    return train(run, model, loss_fn, epochs=2, **options)


class Branches(nn.Module):
    """Tied and frozen weights, heads that only some samples use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.frozen(self.tied(self.first(rows).relu()))
        head = int(rows.flatten()[0].abs() * 10) % 3
        return self.heads[head](hidden)


def branches(run: unisono.Run) -> Outcome:
    """Parameters used by some micro-batches or none; weight decay must not touch the unused ones."""
    model = Branches()
    unused = model.heads[3].weight.detach().clone()
    outcome = train(run, model, micro_batches=8)
    assert torch.equal(model.heads[3].weight, unused)
    assert model.heads[3].weight.grad is None
    return outcome


def unfreezing(run: unisono.Run) -> Outcome:
    """The trunk is frozen for two steps, trained for one and frozen again; momentum must not move it."""
    model = mlp()
    trunk: list[Tensor] = []

    def before_batch(index: int) -> None:
        model[0].requires_grad_(index == 2)
        trunk.append(model[0].weight.detach().clone())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    outcome = train(run, model, optimizer=optimizer, before_batch=before_batch)
    assert torch.equal(trunk[0], trunk[2])
    assert not torch.equal(trunk[2], trunk[3])
    assert torch.equal(trunk[3], model[0].weight)
    return outcome


class Recomputing(nn.Module):
    """A re-entrant checkpoint of a block used twice, one that is not, dropout in both."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh())
        self.other = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2))
        self.outputs = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.inputs(rows)
        for _ in range(2):
            hidden = checkpoint(self.block, hidden, use_reentrant=True)
        return self.outputs(checkpoint(self.other, hidden, use_reentrant=False))


def recomputing(run: unisono.Run, micro_batches: int = 3) -> Outcome:
    """Gradients that arrive several times in one backward pass; early reduction must do the step again."""
    outcomes = []
    for overlap in (True, False):
        strategy = unisono.Synchronous(bucket_bytes=64, first_bucket_bytes=64, overlap=overlap)
        outcomes.append(train(run, Recomputing(), strategy=strategy, micro_batches=micro_batches))
    return outcomes


def two_backward_calls(run: unisono.Run, micro_batches: int = 5) -> Outcome:
    """A loss function that calls backward itself for a part of its loss."""

    def loss_fn(model: nn.Module, micro_batch: Any) -> Tensor:
        cross_entropy(model, micro_batch).backward()
        return model(micro_batch[0]).square().mean()

    return train(run, mlp(), loss_fn, data=Noisy(29, 6), batch_size=29, micro_batches=micro_batches)


class Mixed(nn.Module):
    """Parameters of many dtypes, of no dimension and of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(6, 7, dtype=torch.float64))
        self.brain = nn.Parameter(torch.randn(7, 5, dtype=torch.bfloat16))
        self.narrow = nn.Parameter(torch.randn(5, 5, dtype=torch.float16) / 4)
        self.wave = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 3))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = (rows.double() @ self.wide).bfloat16() @ self.brain
        waves = (hidden.half() @ self.narrow).float() @ self.wave.real + self.wave.imag.sum(0)
        return waves * self.scale + self.empty.sum(0)


def mixed_dtypes(run: unisono.Run) -> Outcome:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outcome = train(run, model, optimizer=optimizer, micro_batches=5, clip_norm=1.0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return outcome


def underflow(run: unisono.Run, micro_batches: int = 8) -> Outcome:
    """Gradients among the subnormal numbers, where even a product with a power of two is rounded."""

    def loss_fn(model: nn.Module, micro_batch: Any) -> Tensor:
        return model(micro_batch[0] * 2.0**-70).mean() * 2.0**-75

    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**120)
    return train(run, model, loss_fn, optimizer=optimizer, batch_size=16, micro_batches=micro_batches)


def two_cells(run: unisono.Run) -> Outcome:
    """A grid of 2, where gradients are scaled as they are moved, unless they come in pieces."""
    return [scenario(run, 2) for scenario in (underflow, recomputing, two_backward_calls)]


class Counting(nn.Module):
    """Buffers that change in the same way whatever the data, one of them in shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("silent", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("growing", torch.zeros(0, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        self.silent.data.add_(0.5)
        self.growing = torch.cat([self.growing, torch.ones(1, dtype=torch.bfloat16)])
        self.cache = rows.sum().detach()
        return self.layers(rows) * self.calls


def buffers(run: unisono.Run) -> Outcome:
    model = Counting()
    outcome = train(run, model, micro_batches=3)
    assert (model.calls, len(model.growing)) == (4, 4)
    assert model.silent.tolist() == [2.0] * 3
    return outcome


def outside_parameters(run: unisono.Run) -> Outcome:
    """A temperature that only the optimizer knows, which every rank starts differently."""
    temperature = nn.Parameter(torch.tensor(1.0 + run.rank))

    def loss_fn(model: nn.Module, micro_batch: Any) -> Tensor:
        return functional.cross_entropy(model(micro_batch[0]) * temperature, micro_batch[1])

    model = mlp()
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    return [*train(run, model, loss_fn, optimizer=optimizer), temperature.item().hex()]


def empty_micro_batches(run: unisono.Run) -> Outcome:
    """Batches of 5 in a grid of 8, the last one of 2; with and without returned weights."""

    def with_weight(model: nn.Module, micro_batch: Any) -> tuple[Tensor, int]:
        return cross_entropy(model, micro_batch), len(micro_batch[1])

    options: dict[str, Any] = {"data": Noisy(12, 6), "batch_size": 5, "micro_batches": 8, "epochs": 2}
    return [train(run, mlp(), cross_entropy, **options), train(run, mlp(), with_weight, **options)]


def changing_assignment(run: unisono.Run) -> Outcome:
    """Everything moves to the last worker for one step, then the shares are turned round."""
    model = mlp()
    replica = run.replicate(model, torch.optim.Adam(model.parameters()))
    loader = run.load(Noisy(61, 6), batch_size=10, micro_batches=8, shuffle=True)
    shares = even_shares(8, run.world_size)
    everything = [0] * (run.world_size - 1) + [8]
    loader.plan.change(assign(8, everything, allow_idle=True), 2)
    loader.plan.change(assign(8, shares[::-1], allow_idle=True), 3)
    losses = [replica.step(batch, cross_entropy).hex() for batch in loader]
    return [run.fingerprint(model), losses]


def two_replicas(run: unisono.Run) -> Outcome:
    """A generator and a discriminator, each with an optimizer of its own; the loss of one uses both."""
    both = nn.ModuleDict({"g": mlp(6, 6), "d": mlp(6, 1)})
    replicas = {
        name: run.replicate(part, torch.optim.Adam(part.parameters(), lr=0.01)) for name, part in both.items()
    }
    loader = run.load(Noisy(40, 6), batch_size=16, micro_batches=5)

    def d_loss(model: nn.Module, micro_batch: Any) -> Tensor:
        with torch.no_grad():
            fake = both["g"](torch.randn_like(micro_batch[0]))
        return (model(fake) - model(micro_batch[0])).mean()

    def g_loss(model: nn.Module, micro_batch: Any) -> Tensor:
        return -both["d"](model(torch.randn_like(micro_batch[0]))).mean()

    losses = []
    for batch in loader:
        losses.append(replicas["d"].step(batch, d_loss).hex())
        losses.append(replicas["g"].step(batch, g_loss).hex())
    return [run.fingerprint(both), losses]


def settings(run: unisono.Run) -> Outcome:
    """Ways to move bytes, all of which give one result."""
    strategies = [
        unisono.Synchronous(),
        unisono.Synchronous(algorithm="direct", overlap=False),
        unisono.Synchronous(algorithm="direct", overlap=True, bucket_bytes=100, first_bucket_bytes=1),
        unisono.Synchronous(overlap=True, bucket_bytes=1, first_bucket_bytes=1),
        unisono.Synchronous(overlap=False, bucket_bytes=1000),
    ]
    outcomes = []
    for strategy in strategies:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(
                    torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * (number + 1) / 4
                )
        data = [(row, label) for row, label in zip(*fixed_rows(), strict=True)]
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
        losses = [
            replica.step(batch, cross_entropy).hex()
            for _ in range(2)
            for batch in run.load(data, batch_size=24, micro_batches=8)
        ]
        outcomes.append([run.fingerprint(model), losses])
    assert all(outcome == outcomes[0] for outcome in outcomes), outcomes
    return outcomes[0]


def fixed_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(48, 6, generator=generator).double(), torch.randint(0, 3, (48,), generator=generator)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        cnn,
        tokens,
        empty_micro_batches,
        changing_assignment,
        two_cells,
        recomputing,
        buffers,
        branches,
        unfreezing,
        two_backward_calls,
        mixed_dtypes,
        underflow,
        outside_parameters,
        two_replicas,
        settings,
    )
}


def run_first(num_scenarios: int | None = None, assignment: str | list[int] = "even") -> dict[str, Outcome]:
    """Run the first scenarios, one after the other, as one worker of a run."""
    chosen = list(SCENARIOS.items())[:num_scenarios]
    with unisono.join(seed=4, assignment=assignment) as run:
        return {name: scenario(run) for name, scenario in chosen}


def resumable(first: int, last: int, state: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """Train over batches `first` to `last` - 1 of three epochs of 4, from `state`; return state and fingerprint."""
    with unisono.join(seed=2) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        run.register("schedule", schedule)
        replica = run.replicate(model, optimizer)
        loader = run.load(Noisy(55, 6), batch_size=16, micro_batches=3, shuffle=True)
        if state is not None:
            run.load_state_dict(state)
        done = first
        for _ in run.epochs(3):
            for batch in loader:
                replica.step(batch, weighted_cross_entropy)
                done += 1
                if done == last:
                    return copy.deepcopy(run.state_dict()), run.fingerprint(model)
            schedule.step()
    raise AssertionError(f"the run ended after {done} batches, expected {last}")


def weighted_cross_entropy(model: nn.Module, micro_batch: Any) -> tuple[Tensor, Tensor]:
    return cross_entropy(model, micro_batch), micro_batch[1].sum() + 1
