"""The two models that steps are timed on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
CONTEXT = 128


class Block(nn.Module):
    """One layer of a GPT: causal attention and a perceptron, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """10.9 million parameters with the default sizes; int64 [batch, 128] -> [batch, 128, 256]."""

    def __init__(self, *, num_layers: int = 6, width: int = 384, num_heads: int = 6) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(position))))


class CNN(nn.Module):
    """0.5 million parameters; float32 [batch, 1, 28, 28] -> [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, 32), (32, 64), (64, 128)):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
            layers += [nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(128 * 9, 384), nn.ReLU(), nn.Linear(384, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def gpt_data(num_samples: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return random bytes and the bytes that follow, int64 [num_samples, 128] each."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCABULARY, (num_samples, CONTEXT + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def cnn_data(num_samples: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return random images and labels, float32 [num_samples, 1, 28, 28] and int64 [num_samples]."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(num_samples, 1, 28, 28, generator=generator)
    return images, torch.randint(10, (num_samples,), generator=generator)


def loss_fn(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy, for either model."""
    inputs, targets = micro_batch
    output = model(inputs)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())
