"""Train an actor and a critic on data made on the fly: every step plays new episodes with the current actor.

    python examples/train_actor_critic.py
    unisono run -n 2 examples/train_actor_critic.py

plain_actor_critic.py is the same run without Unisono.
"""

from collections.abc import Sequence

import actor_critic
import unisono
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> actor_critic.ActorCritic:
    options = actor_critic.parse(arguments)

    with unisono.join(seed=options.seed) as run:
        model = actor_critic.ActorCritic().to(run.device)
        replica = run.replicate(model, actor_critic.optimizers(model, options))
        num_steps = options.steps or actor_critic.DEFAULT_STEPS
        before = actor_critic.mean_return(model)

        with Progress(num_steps, unit="episodes", show=run.is_main) as progress:
            for _ in range(num_steps):
                batch = run.batch(
                    lambda _, size: actor_critic.rollout(model, size),
                    micro_batches=options.micro_batches,
                    batch_size=options.batch_size,
                )
                progress.advance(replica.step(batch, actor_critic.loss_fn), len(batch))

        fingerprint = run.fingerprint(model)
        if run.is_main:
            print(f"mean return {before:.3f} -> {actor_critic.mean_return(model):.3f}")
            print(f"fingerprint {fingerprint}")
    return model


if __name__ == "__main__":
    main()
