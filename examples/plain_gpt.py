"""The run of train_gpt.py in plain PyTorch: one process, no Unisono.

    python examples/plain_gpt.py

Same model, data, schedule and command line; a batch isn't cut, so --micro-batches has no effect.
"""

import argparse
from collections.abc import Sequence
from itertools import islice

import torch
from torch.utils.data import DataLoader

import gpt
import settings
import text
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> gpt.GPT:
    options = gpt.parse(arguments)
    train_set, validation_set, frequency_bits = gpt.load_text(options)

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = gpt.build(options)
    train(model, DataLoader(train_set, batch_size=options.batch_size, shuffle=True), options)

    print(f"validation       {evaluate(model, validation_set):.3f} bits per byte")
    print(f"byte frequencies {frequency_bits:.3f} bits per byte")
    return model


def train(
    model: gpt.GPT, batches: Sequence[gpt.MicroBatch] | DataLoader, options: argparse.Namespace
) -> None:
    """Train `model` in place; `batches` is gone through once an epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98))
    num_epochs, num_steps = settings.count_steps(options, len(batches), default_steps=gpt.DEFAULT_STEPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, settings.warmup_then_cosine(num_steps))

    with Progress(num_steps, unit="tokens") as progress:
        for _ in range(num_epochs):
            for batch in islice(batches, num_steps - progress.num_done):
                loss = gpt.loss_fn(model, batch)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
                optimizer.step()
                scheduler.step()
                progress.advance(loss.item(), batch[0].numel())


@torch.no_grad()
def evaluate(model: gpt.GPT, dataset: text.Windows) -> float:
    """Return the bits per byte on `dataset`."""
    model.eval()
    figures = [gpt.bits_per_byte(model, batch) for batch in DataLoader(dataset, batch_size=32)]
    model.train()
    return sum(bits.item() * weight for bits, weight in figures) / sum(weight for _, weight in figures)


if __name__ == "__main__":
    main()
