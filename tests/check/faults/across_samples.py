"""Fault: the loss looks at the other samples of the micro-batch."""

from training import Plain, train


def centred(model, micro_batch):
    x, y = micro_batch
    error = model(x) - y
    return (error - error.mean()).square().mean()


train(centred, build=Plain)
