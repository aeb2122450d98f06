"""Train a CNN with BatchNorm, dropout and random augmentation on images of digits.

    python examples/train_images.py
    unisono run -n 2 examples/train_images.py

All of them end with the same fingerprint. plain_images.py is the same run without Unisono.
"""

from collections.abc import Sequence
from itertools import islice

import torch

import cnn
import images
import settings
import unisono
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> cnn.CNN:
    options = cnn.parse(arguments)
    train_set, test_set = images.load(options.data)

    with unisono.join(seed=options.seed) as run:
        model = cnn.CNN(train_set.size, dropout=options.dropout).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        replica = run.replicate(model, optimizer)
        train = run.load(
            train_set, batch_size=options.batch_size, micro_batches=options.micro_batches, shuffle=True
        )
        num_epochs, num_steps = settings.count_steps(options, len(train), default_steps=cnn.DEFAULT_STEPS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, settings.warmup_then_cosine(num_steps))
        run.register("scheduler", scheduler)

        with Progress(num_steps, unit="images", show=run.is_main) as progress:
            for epoch in run.epochs(num_epochs):
                for batch in islice(train, num_steps - progress.num_done):
                    loss = replica.step(batch, cnn.loss_fn)
                    scheduler.step()
                    progress.advance(loss, len(batch))
                accuracy = run.evaluate(model, test_set, cnn.accuracy, batch_size=256)
                if run.is_main:
                    print(f"epoch {epoch + 1:2}  test accuracy {accuracy:.4f}", flush=True)

        fingerprint = run.fingerprint(model)
        if run.is_main:
            print(f"fingerprint {fingerprint}")
    return model


if __name__ == "__main__":
    main()
