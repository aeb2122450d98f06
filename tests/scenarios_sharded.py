"""Sharded updates, which must give the bits of replicated ones; each scenario returns what must be equal."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono
from optimizers import OPTIMIZERS
from scenarios import Outcome
from unisono.replica import Update


class Rows:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=generator), index % 5


def network(**options: Any) -> nn.Module:
    """Convolutions in memory order of their own, a matrix that is cut, a scalar and an empty parameter."""
    model = nn.Sequential(
        nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.Flatten(), nn.Linear(40 * 36, 23), nn.Linear(23, 5)
    )
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
    model.register_parameter("unused", nn.Parameter(torch.zeros(5000)))
    return model.to(memory_format=torch.channels_last, **options)


def loss_fn(model: Any, micro_batch: Any) -> Tensor:
    images, labels = micro_batch
    return functional.cross_entropy(model(images) * model.scale + model.nothing.sum(), labels)


def losses(run: unisono.Run, replica: unisono.Replica, loss_fn: Any = loss_fn) -> list[str]:
    loader = run.load(Rows(), batch_size=8, micro_batches=4)
    return [replica.step(batch, loss_fn).hex() for batch in loader]


def optimizers(run: unisono.Run, update: Update) -> Outcome:
    outcome: Outcome = []
    for name, make in OPTIMIZERS.items():
        if "LBFGS" in name:
            continue
        model = network()
        # Muon takes matrices, and Adafactor divides by the number of elements.
        parameters = [p for p in model.parameters() if p.numel() and (name != "Muon" or p.dim() == 2)]
        replica = run.replicate(model, make(parameters), update=update, clip_norm=1.0)
        found = losses(run, replica)
        state = replica.state_dict()["optimizers"][0]["state"]
        outcome.append([name, found, run.fingerprint(model), described(state)])
        replica.close()
    return outcome


def described(state: Any) -> list[Any]:
    """Return the bits of an optimizer's whole state."""
    return [
        [
            index,
            key,
            list(value.shape),
            float(value.double().sum()).hex(),
            float(value.double().square().sum()).hex(),
        ]
        if isinstance(value, Tensor)
        else [index, key, value]
        for index, entries in sorted(state.items())
        for key, value in sorted(entries.items())
    ]


def groups_and_freezing(run: unisono.Run, update: Update) -> Outcome:
    model = network()
    optimizer = torch.optim.AdamW(
        [{"params": list(model[0].parameters())}, {"params": list(model[3].parameters()), "lr": 0.01}],
        weight_decay=0.1,
    )
    replica = run.replicate(model, optimizer, update=update, clip_norm=[0.1, None])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    outcome: Outcome = []
    for step, batch in enumerate(run.load(Rows(), batch_size=4, micro_batches=4)):
        model[0].requires_grad_(step not in (1, 2))
        if step == 3:
            optimizer.add_param_group({"params": [*model[4].parameters(), model.scale]})
            replica.clip_norm = [0.1, None, 0.2]
        outcome.append(replica.step(batch, loss_fn).hex())
        schedule.step()
    return [outcome, run.fingerprint(model), described(replica.state_dict()["optimizers"][0]["state"])]


def windows_and_scaling(run: unisono.Run, update: Update) -> Outcome:
    model = network()
    scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = run.replicate(model, optimizer, update=update, scaler=scaler)
    for step, batch in enumerate(run.load(Rows(), batch_size=4, micro_batches=4)):
        hook = model.scale.register_hook(lambda g, bad=step == 2: g * (torch.inf if bad else 1))
        replica.backward(batch, loss_fn)
        hook.remove()
        if step % 2:
            replica.clip(0.5)
            replica.update()
    return [run.fingerprint(model), replica.num_skipped, scaler.get_scale()]


def masters(run: unisono.Run, update: Update) -> Outcome:
    model = network(dtype=torch.bfloat16)

    def halves(model: Any, micro_batch: Any) -> Tensor:
        return loss_fn(model, (micro_batch[0].bfloat16(), micro_batch[1])).float()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    replica = run.replicate(model, optimizer, update=update, master_weights=True)
    assert all(
        replica.shares(master) == (run.world_size > 1 and update == "sharded")
        for master in optimizer.param_groups[0]["params"]
        if master.numel()
    )
    return [losses(run, replica, halves), run.fingerprint(model)]


def sparse(run: unisono.Run, update: Update) -> Outcome:
    model = nn.ModuleList([nn.Embedding(3000, 4, sparse=True), nn.Embedding(3000, 4), nn.Linear(4, 1)])

    def words(model: Any, micro_batch: Any) -> Tensor:
        rows = (micro_batch[0][:, 0, 0] * 100).long().abs() % 3000
        return model[2](model[0](rows) + model[1](rows)).square().mean()

    optimizers = [
        torch.optim.SparseAdam(list(model[0].parameters())),
        torch.optim.Adagrad([*model[1].parameters(), *model[2].parameters()], initial_accumulator_value=0.1),
    ]
    replica = run.replicate(model, optimizers, update=update)
    found = losses(run, replica, words)
    states = replica.state_dict()["optimizers"]
    return [found, run.fingerprint(model), [described(each["state"]) for each in states]]


def resumed(run: unisono.Run, update: Update) -> Outcome:
    """A state that was taken, and given to a replica that starts anew, whichever way that updates."""
    other: Update = "replicated" if update == "sharded" else "sharded"
    model = network()
    first = run.replicate(model, torch.optim.AdamW(model.parameters(), lr=0.01), update=update)
    outcome: Outcome = losses(run, first)
    state = copy.deepcopy(first.state_dict())
    first.close()
    for kind in (update, other):
        model = network()
        again = run.replicate(model, torch.optim.AdamW(model.parameters(), lr=0.5), update=kind)
        again.load_state_dict(copy.deepcopy(state))
        outcome.append(losses(run, again))
        outcome.append(run.fingerprint(model))
        again.close()
    return outcome


def rewritten(run: unisono.Run, update: Update) -> Outcome:
    """What a script may do to parameters between steps, with a frozen part that is thawed later."""
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    replica = run.replicate(model, optimizer, update=update)
    kept = copy.deepcopy(model.state_dict())
    outcome: Outcome = []
    for step, batch in enumerate(run.load(Rows(), batch_size=4, micro_batches=4)):
        outcome.append(replica.step(batch, loss_fn).hex())
        if step == 0:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.05, 0.05)
        elif step == 1:
            model.load_state_dict(kept)
        elif step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})
        elif step == 3:
            model.double().float()
        elif step == 4:
            model[3].weight.data = model[3].weight.data / 2
        check_sharing(run, replica, update)
    return [outcome, run.fingerprint(model), described(replica.state_dict()["optimizers"][0]["state"])]


def check_sharing(run: unisono.Run, replica: unisono.Replica, update: Update) -> None:
    """Check that with a sharded update all parameters are shared, which workers on one host can do."""
    shared = {replica.shares(p) for p in replica.model.parameters() if p.numel()}
    assert shared == {run.world_size > 1 and update == "sharded"}


def two_of_one_model(run: unisono.Run, update: Update) -> Outcome:
    model = network()
    replicas = [
        run.replicate(model, torch.optim.Adam(part.parameters(), lr=0.01), update=update)
        for part in (model[0], model)
    ]
    outcome: Outcome = []
    for step, batch in enumerate(run.load(Rows(), batch_size=4, micro_batches=4)):
        outcome.append(replicas[step % 2].step(batch, loss_fn).hex())
    return [outcome, run.fingerprint(model)]


SCENARIOS = {
    each.__name__: each
    for each in (
        optimizers,
        groups_and_freezing,
        windows_and_scaling,
        masters,
        sparse,
        resumed,
        rewritten,
        two_of_one_model,
    )
}


def run_all(assignment: str | list[int] = "even", update: Update = "sharded") -> dict[str, Outcome]:
    """Run all scenarios, one after the other, as one worker of a run."""
    with unisono.join(seed=4, assignment=assignment, observer=lambda event: None) as run:
        return {name: scenario(run, update) for name, scenario in SCENARIOS.items()}
