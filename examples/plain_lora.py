"""The run of train_lora.py in plain PyTorch: one process, no Unisono.

python examples/plain_lora.py
"""

import argparse
from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader

import images
import lora
import settings
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> nn.Sequential:
    options = lora.parse(arguments)
    train_set, test_set = images.load(None)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = lora.classifier()
    train(model, DataLoader(train_set, batch_size=options.batch_size, shuffle=True), options)
    upright, before = evaluate(model, test_set), evaluate(model, lora.turned(test_set))
    lora.adapt(model)
    train(model, DataLoader(lora.turned(train_set), batch_size=options.batch_size, shuffle=True), options)
    print(f"upright digits, before fine-tuning: accuracy {upright:.3f}")
    print(f"digits on their side: {before:.3f} -> {evaluate(model, lora.turned(test_set)):.3f}")
    return model


def train(
    model: nn.Sequential, batches: Sequence[lora.MicroBatch] | DataLoader, options: argparse.Namespace
) -> None:
    """Train in place what isn't frozen; `batches` is gone through once an epoch."""
    optimizer = torch.optim.AdamW(lora.trained(model), lr=options.lr)
    num_epochs, num_steps = settings.count_steps(options, len(batches), default_steps=lora.DEFAULT_STEPS)
    with Progress(num_steps, unit="images") as progress:
        for _ in range(num_epochs):
            for batch in islice(batches, num_steps - progress.num_done):
                loss = lora.loss_fn(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.advance(loss.item(), len(batch[0]))


@torch.no_grad()
def evaluate(model: nn.Module, dataset: images.Images) -> float:
    """Return the part of `dataset` that `model` recognises."""
    figures = [lora.accuracy(model, batch) for batch in DataLoader(dataset, batch_size=256)]
    return sum(part.item() * weight for part, weight in figures) / sum(weight for _, weight in figures)


if __name__ == "__main__":
    main()
