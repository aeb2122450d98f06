"""No fault: BatchNorm, dropout, and a loss that is a mean over something else than samples."""

from training import train


def weighted(model, micro_batch):
    x, y = micro_batch
    kept = x[:, 0] > -1
    return (model(x) - y)[kept].square().mean(), int(kept.sum())


train(weighted)
