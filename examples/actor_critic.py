"""A walker on a grid that learns by trying: what train_actor_critic.py and plain_actor_critic.py train."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import settings

DEFAULT_STEPS = 150
SIZE = 5  # the goal is the last corner of a square of this size
HORIZON = 16
STEP_COST = 0.05
DISCOUNT = 0.95
MOVES = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])


class Rollout(NamedTuple):
    """Episodes: what was seen, what was done, and what came of it, discounted; [episodes, time] each.

    Args:
        states: int64, the square; SIZE * SIZE once the episode is over.
        actions: int64, an index into MOVES.
        returns: float32.
    """

    states: Tensor
    actions: Tensor
    returns: Tensor


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a run."""
    parser = settings.parser(
        "Train an actor and a critic on a grid.", batch_size=256, lr=0.02, has_epochs=False
    )
    return parser.parse_args(arguments)


class ActorCritic(nn.Module):
    """States int64 [...] -> logits of moves [..., 4] and expected returns [...]."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Embedding(SIZE * SIZE + 1, 16), nn.Tanh(), nn.Linear(16, len(MOVES)))
        self.critic = nn.Sequential(nn.Embedding(SIZE * SIZE + 1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(states), self.critic(states).squeeze(-1)


def optimizers(model: ActorCritic, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return an optimizer for the actor and one for the critic."""
    return [
        torch.optim.Adam(model.actor.parameters(), lr=options.lr),
        torch.optim.Adam(model.critic.parameters(), lr=2 * options.lr),
    ]


@torch.no_grad()
def rollout(model: ActorCritic, num_episodes: int) -> Rollout:
    """Walk from random squares, with random moves as likely as the actor has them."""
    device = next(model.parameters()).device
    moves = MOVES.to(device)
    places = torch.randint(0, SIZE, (num_episodes, 2), device=device)
    over = (places == SIZE - 1).all(1)
    states, actions, rewards = [], [], []
    for _ in range(HORIZON):
        state = torch.where(over, SIZE * SIZE, places[:, 0] * SIZE + places[:, 1])
        action = torch.multinomial(model(state)[0].softmax(-1), 1).squeeze(1)
        places = (places + moves[action]).clamp(0, SIZE - 1)
        arrived = (places == SIZE - 1).all(1) & ~over
        rewards.append(torch.where(over, 0.0, arrived.float() - STEP_COST))
        states.append(state)
        actions.append(action)
        over = over | arrived
    later = torch.zeros(num_episodes, device=device)
    returns = []
    for reward in reversed(rewards):
        later = reward + DISCOUNT * later
        returns.append(later)
    return Rollout(torch.stack(states, 1), torch.stack(actions, 1), torch.stack(returns[::-1], 1))


def loss_fn(model: ActorCritic, rolled: Rollout) -> tuple[Tensor, int]:
    """Return the mean loss of actor and critic over the moves that were made, and how many there were."""
    made = rolled.states != SIZE * SIZE
    logits, values = model(rolled.states[made])
    returns = rolled.returns[made]
    log_probabilities = logits.log_softmax(-1)
    taken = log_probabilities.gather(1, rolled.actions[made][:, None]).squeeze(1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(1)
    actor = -(taken * (returns - values.detach())) - 0.01 * entropy
    return (actor + F.mse_loss(values, returns, reduction="none")).mean(), int(made.sum())


def mean_return(model: ActorCritic, num_episodes: int = 2000) -> float:
    """Return what an episode brings on average, over the same random numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return rollout(model, num_episodes).returns[:, 0].mean().item()
