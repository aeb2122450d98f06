"""Small images of ten classes: scikit-learn's handwritten digits, or a folder in the format of MNIST."""

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from settings import DataError

NUM_CLASSES = 10
TEST_EVERY = 5  # one digit in 5 is kept for the test; an idx folder says itself which images are
IDX_BYTES = b"\0\0\x08"  # how an idx file of bytes begins; then one byte: how many dimensions it has


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images and their labels: (float32 [1, size, size] in 0..1, int64 []).

    Args:
        pixels: uint8 or float32 in 0..1, [samples, size, size].
        labels: int64 [samples].
        augment: turn and shift every image a little, at random, each time it is asked for.
    """

    def __init__(self, pixels: Tensor, labels: Tensor, *, augment: bool = False) -> None:
        self.pixels = pixels
        self.labels = labels
        self.augment = augment

    @property
    def size(self) -> int:
        """Height and width of an image."""
        return self.pixels.shape[-1]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.pixels[index][None]
        if image.dtype == torch.uint8:
            image = image / 255
        return turn_and_shift(image) if self.augment else image, self.labels[index]


def turn_and_shift(image: Tensor) -> Tensor:
    """Return the image turned by up to 0.2 rad and shifted by up to a tenth of its size. [1, size, size] kept."""
    angle, right, down = torch.rand(3) * 0.4 - 0.2
    cos, sin = angle.cos(), angle.sin()
    matrix = torch.stack((cos, -sin, right, sin, cos, down)).view(1, 2, 3)
    grid = F.affine_grid(matrix, [1, *image.shape], align_corners=False)
    return F.grid_sample(image[None], grid, align_corners=False)[0]


def load(folder: Path | None) -> tuple[Images, Images]:
    """Return training images (augmented) and test images.

    Raises:
        DataError: `folder` doesn't hold what it should, or scikit-learn is missing.
    """
    return load_digits() if folder is None else load_idx(folder)


def load_digits() -> tuple[Images, Images]:
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels; every fifth is for the test."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn: pip install scikit-learn, or use --data."
        ) from error
    digits = datasets.load_digits()
    pixels = torch.from_numpy(digits.images).float() / 16
    labels = torch.from_numpy(digits.target).long()
    test = torch.arange(len(labels)) % TEST_EVERY == TEST_EVERY - 1
    return Images(pixels[~test], labels[~test], augment=True), Images(pixels[test], labels[test])


def load_idx(folder: Path) -> tuple[Images, Images]:
    """Return what the four idx files of MNIST or Fashion-MNIST hold."""
    return (
        Images(*read_pair(folder, "train"), augment=True),
        Images(*read_pair(folder, "t10k")),
    )


def read_pair(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Read one file of images and its file of labels: (uint8 [samples, size, size], int64 [samples])."""
    pixels = read_idx(find(folder, f"{name}-images-idx3-ubyte"), num_dimensions=3)
    labels = read_idx(find(folder, f"{name}-labels-idx1-ubyte"), num_dimensions=1).long()
    num_images, height, width = pixels.shape
    if num_images != len(labels):
        raise DataError(f"{folder}: {num_images} {name} images, but {len(labels)} labels.")
    if height != width or height < 4:
        raise DataError(
            f"{folder}: {name} images of {height} x {width} pixels, expected a square of 4 x 4 or more."
        )
    if labels.max() >= NUM_CLASSES:
        raise DataError(f"{folder}: a {name} label {labels.max()}, expected 0 to {NUM_CLASSES - 1}.")
    return pixels, labels


def find(folder: Path, name: str) -> Path:
    """Return the path of an idx file, packed or not."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"{folder}: found neither {name} nor {name}.gz; name a folder with MNIST's four idx files."
    )


def read_idx(path: Path, *, num_dimensions: int) -> Tensor:
    """Read an idx file of bytes: 0 0 8, the number of dimensions, each as 4 bytes, then the numbers. uint8.

    Raises:
        DataError: the file is damaged, or holds something else.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: can't be read: {error}") from error
    start = 4 + 4 * num_dimensions
    if len(content) < start or content[:4] != IDX_BYTES + bytes([num_dimensions]):
        raise DataError(
            f"{path}: begins with {content[:4].hex(' ')}, expected {IDX_BYTES.hex(' ')} {num_dimensions:02x}: "
            f"not an idx file of bytes with {num_dimensions} dimension(s)."
        )
    shape = [int.from_bytes(content[offset : offset + 4], "big") for offset in range(4, start, 4)]
    if not 0 < math.prod(shape) == len(content) - start:
        raise DataError(
            f"{path}: says that it holds {' x '.join(map(str, shape))} bytes, found {len(content) - start}: "
            f"the file is empty or damaged."
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)
