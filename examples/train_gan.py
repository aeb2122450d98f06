"""Train a GAN on digits: two networks, two optimizers, two steps for each global batch.

    python examples/train_gan.py
    unisono run -n 2 examples/train_gan.py

plain_gan.py is the same run without Unisono.
"""

from collections.abc import Sequence
from itertools import islice

from torch import nn

import gan
import settings
import unisono
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> nn.ModuleDict:
    options = gan.parse(arguments)
    digits = gan.Digits()

    with unisono.join(seed=options.seed) as run:
        generator, discriminator = gan.generator().to(run.device), gan.discriminator().to(run.device)
        makes = run.replicate(generator, gan.optimizer(generator, options))
        judges = run.replicate(discriminator, gan.optimizer(discriminator, options))
        train = run.load(
            digits, batch_size=options.batch_size, micro_batches=options.micro_batches, shuffle=True
        )
        num_epochs, num_steps = settings.count_steps(options, len(train), default_steps=gan.DEFAULT_STEPS)
        pixels = digits.pixels.to(run.device)
        before = gan.gap(generator, pixels)

        with Progress(num_steps, unit="images", show=run.is_main) as progress:
            for _ in run.epochs(num_epochs):
                for batch in islice(train, num_steps - progress.num_done):
                    judges.step(batch, lambda m, part: gan.discriminator_loss(m, generator, part))
                    loss = makes.step(batch, lambda m, part: gan.generator_loss(m, discriminator, part))
                    progress.advance(loss, len(batch))

        both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
        fingerprint = run.fingerprint(both)
        if run.is_main:
            print(f"gap between generated and real digits {before:.3f} -> {gan.gap(generator, pixels):.3f}")
            print(f"fingerprint {fingerprint}")
    return both


if __name__ == "__main__":
    main()
