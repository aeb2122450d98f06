"""Keeps `torch.compile` from choosing kernels by what else a worker has seen.

By default it compiles a function anew, for any shape, once a second shape comes up; the first shape keeps a kernel
of its own. Micro-batches of two sizes then get other kernels, and other bits, depending on which a worker met first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_CONFIG = "torch._dynamo.config"


@contextmanager
def compiled_alike() -> Iterator[None]:
    """Put back at the end what `compile_each_shape` sets."""
    config = sys.modules.get(_CONFIG)
    before = None if config is None else config.automatic_dynamic_shapes
    try:
        yield
    finally:
        config = sys.modules.get(_CONFIG)
        if config is not None:
            config.automatic_dynamic_shapes = True if before is None else before  # type: ignore[attr-defined]


def compile_each_shape() -> None:
    """Have a function compiled for every shape by itself, unless the script asked for ``dynamic=True``.

    Does nothing while nothing is compiled: importing the compiler takes most of a second.
    """
    config = sys.modules.get(_CONFIG)
    if config is not None and config.automatic_dynamic_shapes:
        config.automatic_dynamic_shapes = False  # type: ignore[attr-defined]
