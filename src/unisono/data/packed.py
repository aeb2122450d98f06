"""A list whose items lie in one piece of memory, so that loader processes share it.

Reading an object of Python's counts references *in* it: a forked process that only reads a list copies page by
page the memory of all its items. Bytes in a tensor are read without writing.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

import torch

from unisono.errors import UsageError

T = TypeVar("T")


class PackedList(Sequence[T]):
    """Keep `items` pickled, back to back in one uint8 tensor; reading one unpickles it. Can't be changed.

    Loader processes share its memory, however long they read, and workers forked after it was made do too.
    Costs some 3 us a read for a short string.

    Args:
        items: anything that can be pickled; read once.

    Raises:
        UsageError: an item can't be pickled; says which.
    """

    def __init__(self, items: Iterable[T]) -> None:
        data, stops = bytearray(), [0]
        for index, item in enumerate(items):
            data += _pickled(index, item)
            stops.append(len(data))
        self._stops = torch.tensor(stops, dtype=torch.int64)
        # Of a copy: a bytearray is a Python object, and its memory is what is to be shared.
        self._data = (
            torch.frombuffer(data, dtype=torch.uint8).clone() if data else torch.empty(0, dtype=torch.uint8)
        )

    def __len__(self) -> int:
        return len(self._stops) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Return an item, or a list of items for a slice. Every read gives a new object."""
        if isinstance(index, slice):
            return [self._read(each) for each in range(len(self))[index]]
        try:
            return self._read(range(len(self))[index])
        except IndexError:
            raise IndexError(f"index {index} of a PackedList of {len(self)} items") from None

    def __repr__(self) -> str:
        return f"PackedList({len(self)} items, {self._data.nbytes + self._stops.nbytes} bytes)"

    def _read(self, index: int) -> T:
        start, stop = self._stops[index : index + 2].tolist()
        item: T = pickle.loads(self._data[start:stop].numpy().tobytes())
        return item


def _pickled(index: int, item: Any) -> bytes:
    try:
        return pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # any class may fail in any way here
        raise UsageError(
            f"item {index} of a PackedList ({type(item).__name__}) can't be pickled: {error}. Keep what it is made "
            f"from, and make it when it is read."
        ) from error
