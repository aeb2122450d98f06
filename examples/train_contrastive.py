"""Train an encoder with a loss over the whole global batch: every image has to find its other view among all.

    python examples/train_contrastive.py
    unisono run -n 2 examples/train_contrastive.py

plain_contrastive.py is the same run without Unisono.
"""

from collections.abc import Sequence
from itertools import islice

import torch

import contrastive
import images
import settings
import unisono
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> contrastive.Encoder:
    options = contrastive.parse(arguments)
    train_set, test_set = images.load(None)

    with unisono.join(seed=options.seed) as run:
        model = contrastive.Encoder().to(run.device)
        replica = run.replicate(model, torch.optim.AdamW(model.parameters(), lr=options.lr))
        train = run.load(
            contrastive.Views(train_set),
            batch_size=options.batch_size,
            micro_batches=options.micro_batches,
            shuffle=True,
        )
        default = contrastive.DEFAULT_STEPS
        num_epochs, num_steps = settings.count_steps(options, len(train), default_steps=default)
        before = contrastive.nearest_label_accuracy(model, train_set, test_set)

        with Progress(num_steps, unit="images", show=run.is_main) as progress:
            for _ in run.epochs(num_epochs):
                for batch in islice(train, num_steps - progress.num_done):
                    loss = replica.step(
                        batch,
                        lambda vectors: contrastive.info_nce(model, vectors),
                        embed=contrastive.embed,
                    )
                    progress.advance(loss, len(batch))

        fingerprint = run.fingerprint(model)
        if run.is_main:
            after = contrastive.nearest_label_accuracy(model, train_set, test_set)
            print(f"accuracy of the nearest neighbour {before:.3f} -> {after:.3f}")
            print(f"fingerprint {fingerprint}")
    return model


if __name__ == "__main__":
    main()
