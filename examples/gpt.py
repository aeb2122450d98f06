"""A small GPT over bytes: what train_gpt.py and plain_gpt.py train."""

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import settings
import text

NUM_BYTES = 256
NUM_VALIDATION_WINDOWS = 512
DEFAULT_STEPS = 300

MicroBatch = tuple[Tensor, Tensor]  # bytes, and the byte that follows each: int64 [windows, context]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a run; their defaults are the main example."""
    parser = settings.parser(
        "Train a small byte-level GPT.",
        data="folder or file of text; the source code of Python's standard library unless given",
        batch_size=32,
        lr=6e-3,
    )
    for size, default in {"context": 128, "layers": 4, "width": 128, "heads": 4}.items():
        parser.add_argument(f"--{size}", type=settings.positive, default=default)
    parser.add_argument("--clip-norm", type=float, default=1.0, help="largest norm of a gradient")
    options = parser.parse_args(arguments)
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width} is not an even multiple of --heads {options.heads}")
    return options


def load_text(options: argparse.Namespace) -> tuple[text.Windows, text.Windows, float]:
    """Return training set, validation set, and the bits per byte that byte frequencies give on the latter."""
    train_text, validation_text = text.read(options.data)
    train_set = text.Windows(train_text, options.context)
    validation_set = text.Windows(validation_text, options.context, limit=NUM_VALIDATION_WINDOWS)
    return train_set, validation_set, text.byte_frequency_bits(train_text, validation_set)


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the position. [..., context, features] kept.

    Attention then sees how far apart two bytes are (rotary position embedding, arXiv 2104.09864).
    """
    context, num_features = x.shape[-2:]
    frequency = 1000.0 ** -torch.linspace(0, 1, num_features // 2, device=x.device)
    angle = torch.arange(context, device=x.device)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Layer(nn.Module):
    """Causal self-attention, then two linear maps; each adds to its input. [batch, context, width] kept."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.mlp[-1].weight)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, features]
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Predicts each next byte: int64 [batch, context] -> logits [batch, context, 256]."""

    def __init__(self, *, num_layers: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.layers = nn.Sequential(*(Layer(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens))))


def build(options: argparse.Namespace) -> GPT:
    """Return a new model of the size that `options` ask for."""
    return GPT(num_layers=options.layers, width=options.width, num_heads=options.heads)


def loss_fn(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    inputs, targets = micro_batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def bits_per_byte(model: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, int]:
    """Return the mean bits per byte, and the number of bytes that it is the mean of."""
    return loss_fn(model, micro_batch) / math.log(2), micro_batch[1].numel()
