"""Runs with sparse gradients and parameters of 16 bits whose bits must not depend on who computes what."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono
from scenarios import Noisy, Outcome, Scenario, mlp

MICRO_BATCHES = (1, 2, 5, 8)


class Texts:
    """Bags of words of a vocabulary of 50, some of them repeated and many never used; word 0 is padding."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.tensor([0, index % 7, (index * index) % 23, (index * 3) % 11])
        return words, torch.tensor(float(index % 3))


class Reader(nn.Module):
    """Tables that say they are sparse, one of which only calls say so, one whose use changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 3, mode="mean", sparse=True)
        self.padded = nn.Embedding(50, 3, padding_idx=0, sparse=True)
        self.found = nn.Parameter(torch.randn(50, 3))
        self.both = nn.Parameter(torch.randn(50, 3))
        self.head = nn.Linear(12, 1)

    def forward(self, words: Tensor, *, densely: bool = False) -> Tensor:
        found = functional.embedding(words, self.found, sparse=True).sum(1)
        both = functional.embedding(words, self.both, sparse=not densely).sum(1)
        rows = torch.cat([self.bag(words), self.padded(words).sum(1), found, both], dim=1)
        predicted: Tensor = self.head(rows.to(self.head.weight.dtype)).squeeze(1)
        return predicted.float()


def texts_loss(model: nn.Module, micro_batch: Any) -> Tensor:
    words, targets = micro_batch
    return functional.mse_loss(model(words), targets)


def batches(run: unisono.Run, micro_batches: int, data: Any = None) -> Any:
    """Three global batches, the last of which is short: with 8 micro-batches some of its are empty."""
    data = Texts() if data is None else data
    return run.load(data, batch_size=20, micro_batches=micro_batches, shuffle=True)


def sparse_tables(run: unisono.Run) -> Outcome:
    """Any optimizer that takes them, clipped; the kind of one gradient differs between steps and micro-batches."""
    outcome: Outcome = []
    for micro_batches in MICRO_BATCHES:
        model = Reader()
        optimizers = [
            torch.optim.SparseAdam([model.padded.weight, model.found], lr=0.05),
            torch.optim.SGD([model.bag.weight, model.both, *model.head.parameters()], lr=0.05),
        ]
        strategy = unisono.Synchronous(overlap=micro_batches % 2 == 0, bucket_bytes=64, first_bucket_bytes=64)
        replica = run.replicate(model, optimizers, strategy=strategy, clip_norm=0.3)
        losses, kinds = [], []
        for batch in batches(run, micro_batches):

            def loss_fn(model: Any, micro_batch: Any, index: int = batch.index) -> Tensor:
                words, targets = micro_batch
                densely = index == 1 and bool((words[:, 1] == 3).any())
                return functional.mse_loss(model(words, densely=densely), targets)

            losses.append(replica.step(batch, loss_fn).hex())
            kinds.append(model.both.grad.is_sparse)
        assert kinds == [True, False, True]
        outcome.append([run.fingerprint(model), losses])
    return outcome


def sparse_windows(run: unisono.Run) -> Outcome:
    """Accumulated over batches, weighted, some micro-batches of weight 0 with a loss of nan; one batch skipped."""

    def loss_fn(model: nn.Module, micro_batch: Any) -> tuple[Tensor, int]:
        words, targets = micro_batch
        kept = words[:, 1] > 2
        return functional.mse_loss(model(words[kept]), targets[kept]), int(kept.sum())

    outcome: Outcome = []
    for micro_batches in MICRO_BATCHES:
        model = Reader()
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.05))
        norms = []
        for batch in batches(run, micro_batches):
            factor = math.nan if batch.index == 1 else 1.0

            def scaled(model: nn.Module, micro_batch: Any, factor: float = factor) -> tuple[Tensor, int]:
                loss, weight = loss_fn(model, micro_batch)
                return loss * factor, weight

            replica.backward(batch, scaled)
            norms.append(replica.clip(0.5).hex())
        replica.update()
        assert not replica.skipped
        outcome.append([run.fingerprint(model), norms])
    return outcome


def sixteen_bits(run: unisono.Run) -> Outcome:
    """Dense and sparse gradients of bfloat16, added up in float32 and rounded once, or kept for masters."""
    outcome: Outcome = []
    options: list[dict[str, Any]] = [
        {"strategy": unisono.Synchronous(float32_sums=True, overlap=True, bucket_bytes=64)},
        {"strategy": unisono.Synchronous(float32_sums=True, algorithm="direct")},
        {"master_weights": True, "clip_norm": 0.2},
    ]
    for micro_batches in MICRO_BATCHES:
        for option in options:
            model = Reader().bfloat16()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            replica = run.replicate(model, optimizer, **option)
            losses = [replica.step(batch, texts_loss).hex() for batch in batches(run, micro_batches)]
            held = [float(p.detach().double().sum()).hex() for p in optimizer.param_groups[0]["params"]]
            outcome.append([run.fingerprint(model), losses, held])
    return outcome


def masters(run: unisono.Run) -> Outcome:
    """AdamW on masters of both kinds of 16 bits; weights replaced, written by the script, and resumed."""
    outcome: Outcome = []
    for dtype in (torch.bfloat16, torch.float16):

        def loss_fn(model: nn.Module, micro_batch: Any, dtype: torch.dtype = dtype) -> Tensor:
            return functional.cross_entropy(model(micro_batch[0].to(dtype)).float(), micro_batch[1])

        model = mlp().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        replica = run.replicate(model, optimizer, master_weights=True, clip_norm=(0.5,))
        losses = []
        for batch in batches(run, 5, Noisy(90, 6)):
            if batch.index == 1:
                model[3] = nn.Linear(9, 3).to(dtype)
            if batch.index == 2:
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
            if batch.index == 3:
                replica.load_state_dict(replica.state_dict())
            losses.append(replica.step(batch, loss_fn).hex())
        held = optimizer.param_groups[0]["params"]
        assert all(master.dtype == torch.float32 for master in held)
        outcome.append([losses, run.fingerprint(model), run.fingerprint(nn.ParameterList(held))])
    return outcome


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario for scenario in (sparse_tables, sparse_windows, sixteen_bits, masters)
}


def run_all(assignment: str | list[int] = "even") -> dict[str, Outcome]:
    """Run all scenarios, one after the other, as one worker of a run."""
    with unisono.join(seed=6, assignment=assignment, observer=lambda event: None) as run:
        return {name: scenario(run) for name, scenario in SCENARIOS.items()}
