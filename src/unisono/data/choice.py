"""Which loader a dataset gets: one that reads by index, or one that iterates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from unisono.data.epochs import Options
from unisono.data.loader import Loader
from unisono.data.order import MISSING_BATCH_SIZE, Selection
from unisono.data.samples import Collate
from unisono.data.stream import is_stream
from unisono.data.stream_loader import Exchange, StreamLoader
from unisono.errors import UsageError


def make_loader(
    dataset: Any,
    selection: Selection,
    *,
    collate_fn: Collate | None,
    exchange: Exchange,
    notify: Callable[[str], None],
    **options: Unpack[Options],
) -> Loader | StreamLoader:
    """Return the loader that suits `dataset`; arguments as for `Loader` and `StreamLoader`.

    Raises:
        UsageError: arguments that don't suit the kind of dataset, or have no usable value.
    """
    if not is_stream(dataset):
        return Loader(dataset, collate_fn=collate_fn, **vars(selection), **options)
    for name in ("sampler", "batch_sampler"):
        if getattr(selection, name) is not None:
            raise UsageError(
                f"{name} with a {type(dataset).__name__}, which can only be iterated: a sampler needs a dataset with "
                f"__getitem__(index) and __len__()."
            )
    if selection.shuffle:
        raise UsageError(
            f"shuffle=True with a {type(dataset).__name__}, which can only be iterated: shuffle in the dataset, with "
            f"a buffer of its own that draws from the global generators, or from set_epoch(epoch)."
        )
    if selection.batch_size is None:
        raise UsageError(MISSING_BATCH_SIZE)
    return StreamLoader(
        dataset,
        batch_size=selection.batch_size,
        drop_last=selection.drop_last,
        collate_fn=collate_fn,
        exchange=exchange,
        notify=notify,
        **options,
    )
