"""Train a classifier, then fine-tune it: hidden layers frozen, low-rank adapters and a new last layer trained.

    python examples/train_lora.py
    unisono run -n 2 examples/train_lora.py

plain_lora.py is the same run without Unisono.
"""

import argparse
from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn

import images
import lora
import settings
import unisono
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> nn.Sequential:
    options = lora.parse(arguments)
    train_set, test_set = images.load(None)

    with unisono.join(seed=options.seed) as run:
        model = lora.classifier().to(run.device)
        train(run, model, train_set, options)
        upright = run.evaluate(model, test_set, lora.accuracy)
        before = run.evaluate(model, lora.turned(test_set), lora.accuracy)
        lora.adapt(model)
        frozen = run.fingerprint(model[1].base)
        train(run, model, lora.turned(train_set), options)
        after = run.evaluate(model, lora.turned(test_set), lora.accuracy)

        fingerprint = run.fingerprint(model)
        if run.is_main:
            num_trained = sum(parameter.numel() for parameter in lora.trained(model))
            num_all = sum(parameter.numel() for parameter in model.parameters())
            print(f"upright digits, before fine-tuning: accuracy {upright:.3f}")
            print(
                f"digits on their side: {before:.3f} -> {after:.3f}, {num_trained:,} of {num_all:,} weights"
            )
            print(f"frozen weights {'unchanged' if run.fingerprint(model[1].base) == frozen else 'CHANGED'}")
            print(f"fingerprint {fingerprint}")
    return model


def train(
    run: unisono.Run, model: nn.Sequential, dataset: images.Images, options: argparse.Namespace
) -> None:
    """Train in place what isn't frozen."""
    replica = run.replicate(model, torch.optim.AdamW(lora.trained(model), lr=options.lr))
    batches = run.load(
        dataset, batch_size=options.batch_size, micro_batches=options.micro_batches, shuffle=True
    )
    num_epochs, num_steps = settings.count_steps(options, len(batches), default_steps=lora.DEFAULT_STEPS)
    with Progress(num_steps, unit="images", show=run.is_main) as progress:
        for _ in range(num_epochs):
            for batch in islice(batches, num_steps - progress.num_done):
                progress.advance(replica.step(batch, lora.loss_fn), len(batch))


if __name__ == "__main__":
    main()
