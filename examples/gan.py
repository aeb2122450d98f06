"""A generator of digits and its critic: what train_gan.py and plain_gan.py train."""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import images
import settings

DEFAULT_STEPS = 600
NOISE = 16
PIXELS = 64

MicroBatch = tuple[Tensor, Tensor]  # real images float32 [samples, 64] in 0..1, noise float32 [samples, 16]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a run."""
    return settings.parser("Train a GAN on digits.", batch_size=128, lr=2e-3).parse_args(arguments)


class Digits(Dataset[MicroBatch]):
    """Real images, each with noise for a generated one."""

    def __init__(self) -> None:
        train_set, _ = images.load(None)
        self.pixels = train_set.pixels.float().flatten(1) / train_set.pixels.max()

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> MicroBatch:
        return self.pixels[index], torch.randn(NOISE)


def generator() -> nn.Sequential:
    """Return the network noise [batch, 16] -> images [batch, 64]."""
    return nn.Sequential(
        nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, PIXELS), nn.Sigmoid()
    )


def discriminator() -> nn.Sequential:
    """Return the network images [batch, 64] -> logits [batch, 1] that they are real."""
    return nn.Sequential(nn.Linear(PIXELS, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))


def optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Return the optimizer of either network."""
    return torch.optim.Adam(model.parameters(), lr=options.lr, betas=(0.5, 0.99))


def discriminator_loss(critic: nn.Module, generate: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Return how badly `critic` tells real images from generated ones."""
    real, noise = micro_batch
    with torch.no_grad():
        fake = generate(noise)
    return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()


def generator_loss(generate: nn.Module, critic: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Return how seldom generated images are taken for real."""
    _, noise = micro_batch
    return F.softplus(-critic(generate(noise))).mean()


@torch.no_grad()
def gap(generate: nn.Module, pixels: Tensor) -> float:
    """Return how far generated images are from `pixels` in mean and deviation of each pixel."""
    noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(0)).to(pixels.device)
    generate.eval()
    fake = generate(noise)
    generate.train()
    means = (fake.mean(0) - pixels.mean(0)).abs().mean()
    deviations = (fake.std(0) - pixels.std(0)).abs().mean()
    return (means + deviations).item()
