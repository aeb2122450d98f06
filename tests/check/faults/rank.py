"""Fault: the loss depends on who computes it."""

from training import train

weights = []


def remember_rank(run):
    weights.append(1.0 + run.rank)


def by_rank(model, micro_batch):
    x, y = micro_batch
    return weights[0] * (model(x) - y).square().mean()


train(by_rank, prepare=remember_rank)
