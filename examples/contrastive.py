"""An encoder of digits that learns without labels: what train_contrastive.py and plain_contrastive.py train."""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import images
import settings

DEFAULT_STEPS = 120

MicroBatch = tuple[Tensor, Tensor]  # two views of each image, float32 [samples, 1, 8, 8] each


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a run."""
    parser = settings.parser("Train an encoder on pairs of views of digits.", batch_size=256, lr=3e-3)
    return parser.parse_args(arguments)


class Views(Dataset[MicroBatch]):
    """Two views of each image, turned and shifted at random."""

    def __init__(self, dataset: images.Images) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> MicroBatch:
        return self.dataset[index][0], self.dataset[index][0]


class Encoder(nn.Module):
    """Images [batch, 1, 8, 8] -> unit vectors [batch, 32], and the temperature of their similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 32),
        )
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, views: Tensor) -> Tensor:
        return F.normalize(self.body(views))


def embed(model: Encoder, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the vectors of both views."""
    one, other = micro_batch
    return model(one), model(other)


def info_nce(model: Encoder, vectors: tuple[Tensor, Tensor]) -> Tensor:
    """Return how badly each view finds its other one among all of the batch, in nats."""
    similarities = vectors[0] @ vectors[1].T * model.log_scale.exp()
    places = torch.arange(len(similarities), device=similarities.device)
    return (F.cross_entropy(similarities, places) + F.cross_entropy(similarities.T, places)) / 2


@torch.no_grad()
def nearest_label_accuracy(model: Encoder, known: images.Images, asked: images.Images) -> float:
    """Return for how many images the nearest known one has the same label."""
    device = model.log_scale.device

    def vectors(dataset: images.Images) -> Tensor:
        return model(torch.stack([image for image, _ in plain(dataset)]).to(device))

    nearest = (vectors(asked) @ vectors(known).T).argmax(dim=1).cpu()
    return (known.labels[nearest] == asked.labels).float().mean().item()


def plain(dataset: images.Images) -> images.Images:
    """Return the same images without augmentation."""
    return images.Images(dataset.pixels, dataset.labels)
