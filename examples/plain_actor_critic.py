"""The run of train_actor_critic.py in plain PyTorch: one process, no Unisono.

python examples/plain_actor_critic.py
"""

import argparse
from collections.abc import Callable, Sequence

import torch

import actor_critic
from progress import Progress


def main(arguments: Sequence[str] | None = None) -> actor_critic.ActorCritic:
    options = actor_critic.parse(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = actor_critic.ActorCritic()
    before = actor_critic.mean_return(model)
    train(model, lambda: actor_critic.rollout(model, options.batch_size), options)
    print(f"mean return {before:.3f} -> {actor_critic.mean_return(model):.3f}")
    return model


def train(
    model: actor_critic.ActorCritic,
    play: Callable[[], actor_critic.Rollout],
    options: argparse.Namespace,
) -> None:
    """Train `model` in place on episodes that `play` returns."""
    optimizers = actor_critic.optimizers(model, options)
    num_steps = options.steps or actor_critic.DEFAULT_STEPS
    with Progress(num_steps, unit="episodes") as progress:
        for _ in range(num_steps):
            loss, _ = actor_critic.loss_fn(model, play())
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            progress.advance(loss.item(), options.batch_size)


if __name__ == "__main__":
    main()
