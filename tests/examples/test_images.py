"""The images that the CNN learns: scikit-learn's digits, and the idx files of MNIST."""

import gzip

import pytest
import torch

import images
from settings import DataError

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx(values: torch.Tensor) -> bytes:
    shape = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return b"\0\0\x08" + bytes([values.dim()]) + shape + values.to(torch.uint8).numpy().tobytes()


def pixels(num_images: int, *, height: int = 4, width: int = 4) -> torch.Tensor:
    return torch.arange(num_images * height * width).view(num_images, height, width) % 256


@pytest.fixture
def folder(tmp_path):
    for name, values in zip(NAMES, (pixels(7), torch.arange(7), pixels(3), torch.arange(3) + 7), strict=True):
        (tmp_path / name).write_bytes(idx(values))
    return tmp_path


def test_digits_are_split_four_to_one_and_only_training_images_are_augmented():
    train, test = images.load(None)
    assert (len(train), len(test), train.size) == (1438, 359, 8)
    assert train.augment
    assert not test.augment
    image, label = test[0]
    assert image.shape == (1, 8, 8)
    assert image.dtype == torch.float32
    assert 0 <= image.min() < image.max() <= 1
    assert label.dtype == torch.int64


def test_augmentation_is_decided_by_the_random_generator_alone():
    train, _ = images.load(None)
    torch.manual_seed(1)
    first, second = train[0][0], train[0][0]
    torch.manual_seed(1)
    assert torch.equal(first, train[0][0])
    assert not torch.equal(first, second)
    assert 0 <= first.min() < first.max() <= 1


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_packed_or_not(folder, packed):
    if packed:
        for name in NAMES:
            (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
            (folder / name).unlink()
    train, test = images.load(folder)
    assert torch.equal(train.pixels, pixels(7).to(torch.uint8))
    assert train.labels.tolist() == list(range(7))
    image, label = test[1]
    assert torch.equal(image, pixels(3)[1][None] / 255)
    assert int(label) == 8


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"found neither {name} nor {name}.gz"):
        images.load(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: found neither"):
        images.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file"),
        (b"\0\0\x08\x03", "not an idx file"),
        (b"PNG" * 10, r"begins with 50 4e 47 50, expected 00 00 08 03"),
        (idx(torch.arange(9)), "not an idx file of bytes with 3 dimension"),
        (idx(pixels(7))[:-1], r"says that it holds 7 x 4 x 4 bytes, found 111"),
        (idx(pixels(7)) + b"\0", "found 113"),
        (idx(pixels(0)), "empty or damaged"),
        (idx(pixels(6)), "6 train images, but 7 labels"),
        (idx(pixels(7, width=5)), "4 x 5 pixels, expected a square"),
        (idx(pixels(7, height=3, width=3)), "3 x 3 pixels"),
    ],
)
def test_a_bad_file_of_images_is_an_error_that_says_what_is_wrong(folder, content, message):
    (folder / NAMES[0]).write_bytes(content)
    with pytest.raises(DataError, match=message):
        images.load(folder)


@pytest.mark.parametrize(
    "damage", [lambda packed: packed[:-9], lambda packed: b"no gzip", lambda packed: packed[:12]]
)
def test_a_damaged_packed_file_is_an_error(folder, damage):
    (folder / NAMES[0]).unlink()
    (folder / f"{NAMES[0]}.gz").write_bytes(damage(gzip.compress(idx(pixels(7)))))
    with pytest.raises(DataError, match="can't be read"):
        images.load(folder)


def test_a_label_that_is_no_class_is_an_error(folder):
    (folder / NAMES[1]).write_bytes(idx(torch.arange(7) + 4))
    with pytest.raises(DataError, match="label 10, expected 0 to 9"):
        images.load(folder)
