"""The run of train_images.py in plain PyTorch: one process, no Unisono.

    python examples/plain_images.py

Same model, data, schedule and command line; a batch isn't cut, so --micro-batches has no effect.
"""

import argparse
from collections.abc import Sequence
from itertools import islice

import torch
from torch.utils.data import DataLoader

import cnn
import images
import settings
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> cnn.CNN:
    options = cnn.parse(arguments)
    train_set, test_set = images.load(options.data)

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = cnn.CNN(train_set.size, dropout=options.dropout)
    train(model, DataLoader(train_set, batch_size=options.batch_size, shuffle=True), test_set, options)
    return model


def train(
    model: cnn.CNN,
    batches: Sequence[cnn.MicroBatch] | DataLoader,
    test_set: images.Images,
    options: argparse.Namespace,
) -> None:
    """Train `model` in place; `batches` is gone through once an epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    num_epochs, num_steps = settings.count_steps(options, len(batches), default_steps=cnn.DEFAULT_STEPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, settings.warmup_then_cosine(num_steps))

    with Progress(num_steps, unit="images") as progress:
        for epoch in range(num_epochs):
            for batch in islice(batches, num_steps - progress.num_done):
                loss = cnn.loss_fn(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                progress.advance(loss.item(), len(batch[0]))
            print(f"epoch {epoch + 1:2}  test accuracy {evaluate(model, test_set):.4f}", flush=True)


@torch.no_grad()
def evaluate(model: cnn.CNN, dataset: images.Images) -> float:
    """Return the part of `dataset` that `model` recognises."""
    model.eval()
    figures = [cnn.accuracy(model, batch) for batch in DataLoader(dataset, batch_size=256)]
    model.train()
    return sum(part.item() * weight for part, weight in figures) / sum(weight for _, weight in figures)


if __name__ == "__main__":
    main()
