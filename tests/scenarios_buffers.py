"""Training runs with declared policies for buffers, whose bits must not depend on who computes what."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono
from scenarios import Noisy, Outcome, train


class Codebook(nn.Module):
    """A small vector quantizer with everything that real ones keep; its values reach the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", torch.randn(5, 4))
        self.register_buffer("num_seen", torch.tensor(0))
        self.register_buffer("queue", torch.zeros(3, 4))
        self.register_buffer("latest", torch.zeros(4), persistent=False)
        self.register_buffer("center", torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.body(rows)
        chosen = torch.cdist(hidden, self.codes).argmin(1)
        near = hidden + (self.codes[chosen] - hidden).detach()
        memory = (hidden @ self.queue.t()).mean() + self.latest.sum() + self.center.float().mean()
        with torch.no_grad():
            self._remember(hidden, functional.one_hot(chosen, 5).float())
        return self.head(near) + 0.01 * memory

    def _remember(self, hidden: Tensor, chosen: Tensor) -> None:
        self.sizes.add_(chosen.sum(0))
        self.sums.data.add_(chosen.t() @ hidden)
        self.codes.data.lerp_((chosen.t() @ hidden) / (chosen.sum(0)[:, None] + 1), 0.1)
        self.num_seen += len(hidden)
        self.queue = torch.cat([hidden, self.queue])[:3].clone()
        self.latest.copy_(hidden[-1])
        self.center.lerp_(hidden.mean(0).bfloat16(), 0.3)


def heaviest(start: Tensor, values: list[Tensor], weights: list[float]) -> Tensor:
    """Keep the value of the heaviest micro-batch, and a little of the old one."""
    return values[weights.index(max(weights))] * 0.5 + start * 0.5


POLICIES = {"code*": "mean", "s?*s": "sum", "num_seen": "sum", "queue": "first", "latest": "last"}


def mixed_policies(run: unisono.Run) -> Outcome:
    """All policies in one model, a short last batch with empty micro-batches."""
    outcomes = []
    for micro_batches in (3, 5):
        torch.manual_seed(micro_batches)
        model = Codebook()
        outcomes.append(
            train(
                run,
                model,
                data=Noisy(34, 6),
                micro_batches=micro_batches,
                epochs=2,
                buffers={**POLICIES, "center": heaviest},
            )
        )
        outcomes.append([model.latest.tolist(), int(model.num_seen)])
        assert model.num_seen == 68
    return outcomes


def weighted_policies(run: unisono.Run) -> Outcome:
    """Weights from the loss function, some of them 0; policies on a norm layer and on one of the user's own."""

    class RunningMax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(6))

        def forward(self, rows: Tensor) -> Tensor:
            self.largest = torch.maximum(self.largest, rows.detach().abs().amax(0))
            return rows / (self.largest + 1)

    def loss_fn(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        rows, labels = micro_batch
        kept = labels != 0
        return functional.cross_entropy(model(rows)[kept], labels[kept]), int(kept.sum())

    torch.manual_seed(9)
    model = nn.Sequential(RunningMax(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    buffers = {
        "0.largest": lambda start, values, weights: torch.stack(values).amax(0),
        "2.running_var": "last",
    }
    return train(run, model, loss_fn, data=Noisy(64, 6), micro_batches=8, buffers=buffers)


SCENARIOS = (mixed_policies, weighted_policies)


def run_all(assignment: str | list[int] = "even") -> dict[str, Outcome]:
    """Run all scenarios, one after the other, as one worker of a run."""
    with unisono.join(seed=4, assignment=assignment) as run:
        return {scenario.__name__: scenario(run) for scenario in SCENARIOS}
