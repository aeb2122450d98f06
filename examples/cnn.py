"""A small CNN for images of ten classes: what train_images.py and plain_images.py train."""

import argparse
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

import settings
from images import NUM_CLASSES

DEFAULT_STEPS = 240

MicroBatch = tuple[Tensor, Tensor]  # images float32 [samples, 1, size, size], labels int64 [samples]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a run; their defaults are the example on digits."""
    parser = settings.parser(
        "Train a CNN on small images.",
        data="folder with the four idx or idx.gz files of MNIST or Fashion-MNIST; "
        "scikit-learn's digits unless given",
        batch_size=128,
        lr=5e-3,
    )
    parser.add_argument(
        "--dropout", type=float, default=0.3, help="part of the features left out in training"
    )
    return parser.parse_args(arguments)


class CNN(nn.Module):
    """Three convolutions with BatchNorm, two linear maps: [batch, 1, size, size] -> logits [batch, 10].

    Args:
        size: height and width of an image, at least 4.
        dropout: part of the features left out in training.
    """

    def __init__(self, size: int, *, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *convolution(1, 16),
            *convolution(16, 32),
            nn.MaxPool2d(2),
            *convolution(32, 64),
            nn.MaxPool2d(2),
        )
        self.classes = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(64 * (size // 4) ** 2, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, NUM_CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classes(self.features(images))


def convolution(num_in: int, num_out: int) -> tuple[nn.Module, ...]:
    """Return a convolution that keeps height and width, its BatchNorm, and ReLU."""
    return nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU()


def loss_fn(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Return the mean cross-entropy, in nats."""
    images, labels = micro_batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, int]:
    """Return the part of the images that are recognised, and how many images there are."""
    images, labels = micro_batch
    return (model(images).argmax(dim=1) == labels).float().mean(), len(labels)
