"""Keeps `torch.compile` from choosing kernels by what else a worker has seen.

By default it compiles a function anew, for any shape, once a second shape comes up; the first shape keeps a kernel
of its own. Micro-batches of two sizes then get other kernels, and other bits, depending on which a worker met first.
And after a number of shapes it gives up on the function: what comes later runs uncompiled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CONFIG = "torch._dynamo.config"
_ALIKE: dict[str, Any] = {
    "automatic_dynamic_shapes": False,
    "recompile_limit": 2**31,
    "accumulated_recompile_limit": 2**31,
}
_before: dict[str, Any] = {}
"""What this process had before; empty while nothing is set."""


@contextmanager
def compiled_alike() -> Iterator[None]:
    """Put back at the end what `compile_each_shape` sets."""
    try:
        yield
    finally:
        for name, value in _before.items():
            setattr(sys.modules[_CONFIG], name, value)
        _before.clear()


def compile_each_shape() -> None:
    """Have a function compiled for every shape by itself, unless the script asked for ``dynamic=True``.

    Does nothing while nothing is compiled: importing the compiler takes most of a second.
    """
    config = sys.modules.get(_CONFIG)
    if config is None or _before:
        return
    for name, value in _ALIKE.items():
        _before[name] = getattr(config, name)
        setattr(config, name, value)
