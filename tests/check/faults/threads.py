"""Fault: the number of threads follows from the number of workers, and a long sum from it."""

import torch
from training import train


def set_threads(run):
    torch.set_num_threads(run.world_size)


def long_sum(model, micro_batch):
    x, y = micro_batch
    table = torch.sin(torch.arange(2_000_000.0)) * model.head.weight[0, 0]
    return (model(x) - y).square().mean() + 1e-3 * table.sum()


train(long_sum, prepare=set_threads)
