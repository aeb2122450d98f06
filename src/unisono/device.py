"""Where a worker computes, and what has to be fixed there so that it computes the same bits as the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.cluster.environment import Environment
from unisono.compilation import compiled_alike
from unisono.errors import UsageError


@contextmanager
def reproducible(device: torch.device, threads_per_worker: int | None, *, strict: bool) -> Iterator[None]:
    """Fix what gives other bits in other processes: the number of threads, and the choice of kernels.

    Deterministic kernels are asked for; an operation that has none gives a warning, or an error with
    `strict`. Accelerators keep torch's own number of host threads unless one is given.
    """
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    if threads_per_worker is not None or device.type == "cpu":
        torch.set_num_threads(threads_per_worker or 1)
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # Filling new memory costs a pass over it, and a model that reads memory it never wrote is wrong anyway.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    try:
        with compiled_alike():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark


def choose_device(environment: Environment, device: str | torch.device | None) -> torch.device:
    """Return this worker's device: as asked, else an accelerator of its own if the host has enough, else CPU."""
    if device is not None:
        return _usable_device(device)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or environment.local_rank >= torch.accelerator.device_count():
        return torch.device("cpu")
    torch.accelerator.set_device_index(environment.local_rank)
    return torch.device(accelerator.type, environment.local_rank)


def _usable_device(device: str | torch.device) -> torch.device:
    """Return `device`, on which something was allocated to see that it is there."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"device={str(device)!r} can't be used here: {reason}") from error
