"""The run of train_contrastive.py in plain PyTorch: one process, no Unisono.

python examples/plain_contrastive.py
"""

import argparse
from collections.abc import Sequence
from itertools import islice

import torch
from torch.utils.data import DataLoader

import contrastive
import images
import settings
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> contrastive.Encoder:
    options = contrastive.parse(arguments)
    train_set, test_set = images.load(None)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = contrastive.Encoder()
    before = contrastive.nearest_label_accuracy(model, train_set, test_set)
    batches = DataLoader(contrastive.Views(train_set), batch_size=options.batch_size, shuffle=True)
    train(model, batches, options)
    after = contrastive.nearest_label_accuracy(model, train_set, test_set)
    print(f"accuracy of the nearest neighbour {before:.3f} -> {after:.3f}")
    return model


def train(
    model: contrastive.Encoder,
    batches: Sequence[contrastive.MicroBatch] | DataLoader,
    options: argparse.Namespace,
) -> None:
    """Train `model` in place; `batches` is gone through once an epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    default = contrastive.DEFAULT_STEPS
    num_epochs, num_steps = settings.count_steps(options, len(batches), default_steps=default)
    with Progress(num_steps, unit="images") as progress:
        for _ in range(num_epochs):
            for batch in islice(batches, num_steps - progress.num_done):
                loss = contrastive.info_nce(model, contrastive.embed(model, batch))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.advance(loss.item(), len(batch[0]))


if __name__ == "__main__":
    main()
