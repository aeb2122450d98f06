"""Text as bytes: found, read, split into training and validation, and cut into windows.

Without a path the text is the source code of Python's own standard library, which every machine has.
"""

import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from settings import DataError

MAX_BYTES = 64 << 20  # of a larger --data only this much is read: start-up stays short and memory small
VALIDATION_EVERY = 20  # one file in 20 is kept for validation
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}  # others' code; what some systems leave out


def read(path: Path | None) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and those to validate with, as two uint8 vectors.

    Files are taken in sorted order, every 20th whole for validation. Of a single file it is the end.

    Raises:
        DataError: there is no such path, or no text in it.
    """
    texts = list(contents(library_files() if path is None else files(path)))
    if not texts:
        raise DataError(f"{path}: found no text (non-empty files without zero bytes); name a folder or file.")
    if len(texts) == 1:
        end = len(texts[0]) - len(texts[0]) // VALIDATION_EVERY
        texts = [texts[0][:end], texts[0][end:]]
    kept = set(range(VALIDATION_EVERY - 1, len(texts), VALIDATION_EVERY)) or {len(texts) - 1}
    return (
        join([text for index, text in enumerate(texts) if index not in kept]),
        join([text for index, text in enumerate(texts) if index in kept]),
    )


def library_files() -> Iterator[Path]:
    """Yield the source files of Python's standard library, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    return (path for path in files(library, skip=NOT_LIBRARY) if path.suffix == ".py")


def files(path: Path, *, skip: Collection[str] = ()) -> Iterator[Path]:
    """Yield `path` itself or all files below it, in an order that is the same everywhere."""
    if path.is_file():
        yield path
    elif not path.is_dir():
        raise DataError(f"{path}: no such file or folder.")
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(name for name in subfolders if name not in skip and not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        yield from (file for file in paths if file.is_file())


def contents(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield what is in the files that hold text, up to 64 MiB in all."""
    num_left = MAX_BYTES
    for path in paths:
        try:
            with path.open("rb") as file:
                text = file.read(num_left)
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}.") from error
        if text and b"\0" not in text:
            yield text
            num_left -= len(text)
        if not num_left:
            return


def join(texts: Sequence[bytes]) -> Tensor:
    """Return `texts` as one uint8 vector."""
    joined = bytearray().join(texts)
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `context` bytes side by side, each with the bytes that follow its own: (inputs, targets).

    Args:
        text: uint8 vector.
        context: bytes per window.
        limit: at most this many windows, spread evenly over the text.

    Raises:
        DataError: the text is shorter than one window.
    """

    def __init__(self, text: Tensor, context: int, *, limit: int | None = None) -> None:
        num_windows = (len(text) - 1) // context
        if num_windows < 1:
            raise DataError(
                f"only {len(text)} bytes of text on one side of the split into training and validation; "
                f"a window takes {context + 1}: use more text or a smaller --context."
            )
        self.text = text
        self.context = context
        self.num_windows = num_windows
        self.length = min(num_windows, limit or num_windows)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        start = index * self.num_windows // self.length * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def byte_frequency_bits(text: Tensor, windows: Windows) -> float:
    """Return the bits per byte that byte frequencies alone give: counted in `text`, paid for in `windows`.

    Every byte is counted once more than seen, so that one that `text` lacks costs much but not infinitely.
    """
    counts = torch.bincount(text, minlength=256).double() + 1
    bits = -(counts / counts.sum()).log2()
    return bits[torch.cat([targets for _, targets in windows])].mean().item()
