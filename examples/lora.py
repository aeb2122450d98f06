"""A classifier of digits and low-rank adapters for it: what train_lora.py and plain_lora.py train."""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import images
import settings
from images import NUM_CLASSES

DEFAULT_STEPS = 120
RANK = 4

MicroBatch = tuple[Tensor, Tensor]  # images float32 [samples, 1, 8, 8], labels int64 [samples]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a run. Steps and epochs are those of each of the two parts."""
    parser = settings.parser(
        "Train a classifier on digits, then adapters on digits that lie on their side.",
        batch_size=128,
        lr=5e-3,
    )
    return parser.parse_args(arguments)


def classifier() -> nn.Sequential:
    """Return the network images [batch, 1, 8, 8] -> logits [batch, 10]."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, NUM_CLASSES)
    )


class Adapter(nn.Module):
    """A frozen linear map with a trained addition of low rank (Hu et al., LoRA, 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        device = base.weight.device
        self.down = nn.Parameter(torch.randn(RANK, base.in_features, device=device) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK, device=device))

    def forward(self, rows: Tensor) -> Tensor:
        return self.base(rows) + rows @ self.down.T @ self.up.T


def adapt(model: nn.Sequential) -> None:
    """Freeze the hidden layers of `model`, give them adapters, and give it a new last layer. In place."""
    for index in (1, 3):
        model[index] = Adapter(model[index])
    model[5] = nn.Linear(96, NUM_CLASSES, device=model[5].weight.device)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def turned(dataset: images.Images) -> images.Images:
    """Return the images turned by a quarter."""
    return images.Images(
        dataset.pixels.rot90(1, (1, 2)).contiguous(), dataset.labels, augment=dataset.augment
    )


def loss_fn(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Return the mean cross-entropy, in nats."""
    pixels, labels = micro_batch
    return F.cross_entropy(model(pixels), labels)


def accuracy(model: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, int]:
    """Return the part of the images that are recognised, and how many images there are."""
    pixels, labels = micro_batch
    return (model(pixels).argmax(dim=1) == labels).float().mean(), len(labels)
