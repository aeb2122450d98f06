"""What all examples share: command line, number of steps, schedule of the learning rate."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path


class DataError(ValueError):
    """The data can't be used. The message says why and what to do."""


def parser(
    description: str, *, data: str | None = None, batch_size: int, lr: float, has_epochs: bool = True
) -> argparse.ArgumentParser:
    """Return a parser for what every example can be told; each adds its own."""
    result = argparse.ArgumentParser(description=description)
    add = result.add_argument
    if data is not None:
        add("--data", type=Path, metavar="PATH", help=data)
    add("--steps", type=positive, help="stop after this many steps")
    if has_epochs:
        add("--epochs", type=positive, help="stop after this many passes over the data")
    add("--batch-size", type=positive, default=batch_size, help="samples per step, over all workers together")
    add("--micro-batches", type=positive, default=8, help="parts of a batch, shared out among the workers")
    add("--lr", type=float, default=lr, help="largest learning rate")
    add("--seed", type=int, default=0, help="of everything random")
    return result


def positive(text: str) -> int:
    """Convert `text` to an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def count_steps(options: argparse.Namespace, steps_per_epoch: int, *, default_steps: int) -> tuple[int, int]:
    """Return (epochs to go through, steps to stop after). Without --steps and --epochs: `default_steps`."""
    num_steps = options.steps or (math.inf if options.epochs else default_steps)
    if options.epochs:
        num_steps = min(num_steps, options.epochs * steps_per_epoch)
    return math.ceil(num_steps / steps_per_epoch), int(num_steps)


def warmup_then_cosine(num_steps: int) -> Callable[[int], float]:
    """Return the schedule of the learning rate: step -> part of the largest rate."""
    num_warmup_steps = max(1, num_steps // 20)

    def part(step: int) -> float:
        decay = (1 + math.cos(math.pi * min(1.0, step / num_steps))) / 2
        return min((step + 1) / num_warmup_steps, decay)

    return part
