"""The sound part of the scripts in this folder: a small regression, trained for some steps."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono


class Net(nn.Module):
    """Two layers with BatchNorm and dropout: float32 [batch, 6] -> [batch]."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


class Plain(nn.Module):
    """Two layers in which samples don't meet."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


def mean_squared_error(model, micro_batch):
    x, y = micro_batch
    return (model(x) - y).square().mean()


def train(
    loss_fn=mean_squared_error, *, build=Net, prepare=lambda run: None, order=lambda: range(6), num_steps=4
):
    """Train; `order` says in which order the columns of the data are put, `prepare` runs before the model."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 6, generator=generator)
    y = x.sum(1)
    with unisono.join(seed=0) as run:
        prepare(run)
        model = build()
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.05))
        data = run.load(TensorDataset(x[:, list(order())], y), batch_size=16, micro_batches=4, shuffle=True)
        num_done = 0
        while num_done < num_steps:
            for batch in data:
                replica.step(batch, loss_fn)
                num_done += 1
                if num_done == num_steps:
                    break
        fingerprint = run.fingerprint(model)
        if run.is_main:
            print(f"fingerprint {fingerprint}")
