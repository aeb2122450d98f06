"""The run of train_gan.py in plain PyTorch: one process, no Unisono.

python examples/plain_gan.py
"""

import argparse
from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader

import gan
import settings
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> nn.ModuleDict:
    options = gan.parse(arguments)
    digits = gan.Digits()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    both = nn.ModuleDict({"generator": gan.generator(), "discriminator": gan.discriminator()})
    before = gan.gap(both["generator"], digits.pixels)
    train(both, DataLoader(digits, batch_size=options.batch_size, shuffle=True), options)
    after = gan.gap(both["generator"], digits.pixels)
    print(f"gap between generated and real digits {before:.3f} -> {after:.3f}")
    return both


def train(
    both: nn.ModuleDict, batches: Sequence[gan.MicroBatch] | DataLoader, options: argparse.Namespace
) -> None:
    """Train both networks in place; `batches` is gone through once an epoch."""
    generator, discriminator = both["generator"], both["discriminator"]
    makes, judges = gan.optimizer(generator, options), gan.optimizer(discriminator, options)
    num_epochs, num_steps = settings.count_steps(options, len(batches), default_steps=gan.DEFAULT_STEPS)
    with Progress(num_steps, unit="images") as progress:
        for _ in range(num_epochs):
            for batch in islice(batches, num_steps - progress.num_done):
                judges.zero_grad()
                gan.discriminator_loss(discriminator, generator, batch).backward()
                judges.step()
                makes.zero_grad()
                loss = gan.generator_loss(generator, discriminator, batch)
                loss.backward()
                makes.step()
                progress.advance(loss.item(), len(batch[0]))


if __name__ == "__main__":
    main()
