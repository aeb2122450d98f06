"""Fault: an operation whose result depends on the order in which its parts happen to run."""

import torch
from training import train


def scattered(model, micro_batch):
    x, y = micro_batch
    output = model(x)
    target = torch.zeros_like(y).put_(torch.arange(len(y)), y)
    return (output - target).square().mean()


train(scattered)
