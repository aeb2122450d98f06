"""Train a small GPT on bytes of text: with one worker, or with as many as you like.

    python examples/train_gpt.py
    unisono run -n 2 examples/train_gpt.py

All of them end with the same fingerprint. plain_gpt.py is the same run without Unisono.
"""

from collections.abc import Sequence
from itertools import islice

import torch

import gpt
import settings
import unisono
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> gpt.GPT:
    options = gpt.parse(arguments)
    train_set, validation_set, frequency_bits = gpt.load_text(options)

    with unisono.join(seed=options.seed) as run:
        model = gpt.build(options).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98))
        replica = run.replicate(model, optimizer, clip_norm=options.clip_norm)
        train = run.load(
            train_set, batch_size=options.batch_size, micro_batches=options.micro_batches, shuffle=True
        )
        num_epochs, num_steps = settings.count_steps(options, len(train), default_steps=gpt.DEFAULT_STEPS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, settings.warmup_then_cosine(num_steps))
        run.register("scheduler", scheduler)

        with Progress(num_steps, unit="tokens", show=run.is_main) as progress:
            for _ in run.epochs(num_epochs):
                for batch in islice(train, num_steps - progress.num_done):
                    loss = replica.step(batch, gpt.loss_fn)
                    scheduler.step()
                    progress.advance(loss, len(batch) * options.context)

        bits = run.evaluate(model, validation_set, gpt.bits_per_byte, batch_size=32)
        fingerprint = run.fingerprint(model)
        if run.is_main:
            print(f"validation       {bits:.3f} bits per byte")
            print(f"byte frequencies {frequency_bits:.3f} bits per byte")
            print(f"fingerprint {fingerprint}")
    return model


if __name__ == "__main__":
    main()
