"""The text that the GPT learns from."""

import math
import os
from pathlib import Path

import pytest
import torch

import text
from settings import DataError


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_every_twentieth_file_in_sorted_order_is_kept_for_validation(tmp_path):
    names = [f"{number:02}" for number in range(45)]
    write(tmp_path, {name: f"<{name}>".encode() for name in reversed(names)})
    train, validation = text.read(tmp_path)
    assert as_bytes(validation) == b"<19><39>"
    assert as_bytes(train) == "".join(f"<{name}>" for name in names if name not in ("19", "39")).encode()


def test_the_last_of_a_few_files_is_kept_for_validation(tmp_path):
    train, validation = text.read(write(tmp_path, {"a": b"first", "b/c": b"second", "b/d": b"third"}))
    assert (as_bytes(train), as_bytes(validation)) == (b"firstsecond", b"third")


def test_a_single_file_is_cut_near_its_end(tmp_path):
    path = write(tmp_path, {"all": bytes(range(1, 101))}) / "all"
    train, validation = text.read(path)
    assert as_bytes(train) + as_bytes(validation) == path.read_bytes()
    assert len(validation) == 5


@pytest.mark.parametrize("num_bytes", [1, 7])
def test_a_single_file_too_small_to_cut_leaves_nothing_to_validate_with(tmp_path, num_bytes):
    train, validation = text.read(write(tmp_path, {"all": b"x" * num_bytes}))
    assert (len(train), len(validation)) == (num_bytes, 0)


def test_hidden_binary_empty_and_irregular_files_are_left_out(tmp_path):
    write(
        tmp_path,
        {".git/x": b"hidden", ".y": b"hidden", "data.bin": b"a\0b", "empty": b"", "a": b"A", "z": b"Z"},
    )
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    train, validation = text.read(tmp_path)
    assert (as_bytes(train), as_bytes(validation)) == (b"A", b"Z")


def test_no_more_than_the_stated_size_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_BYTES", 5)
    train, validation = text.read(write(tmp_path, {"a": b"123", "b": b"456", "c": b"789"}))
    assert (as_bytes(train), as_bytes(validation)) == (b"123", b"45")


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: no such file or folder"):
        text.read(tmp_path / "nowhere")


@pytest.mark.parametrize("files", [{}, {"empty": b""}, {"binary": b"\0\1\2"}])
def test_a_folder_without_text_is_an_error(tmp_path, files):
    with pytest.raises(DataError, match="found no text"):
        text.read(write(tmp_path, files))


def test_the_standard_library_is_found_the_same_each_time_and_large_enough():
    train, validation = text.read(None)
    again, _ = text.read(None)
    assert torch.equal(train, again)
    assert len(train) > 1_000_000
    assert len(text.Windows(validation, 128)) >= 512
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in text.library_files())


def test_windows_cover_the_text_once_and_targets_are_the_next_bytes():
    windows = text.Windows(torch.arange(23, dtype=torch.uint8), 5)
    assert len(windows) == 4
    inputs = torch.cat([window[0] for window in windows])
    targets = torch.cat([window[1] for window in windows])
    assert inputs.tolist() == list(range(20))
    assert targets.tolist() == list(range(1, 21))
    assert inputs.dtype == torch.int64


def test_the_window_that_just_fits_is_used():
    assert len(text.Windows(torch.zeros(9, dtype=torch.uint8), 4)) == 2


def test_limited_windows_are_spread_evenly_over_the_text():
    windows = text.Windows(torch.arange(101, dtype=torch.uint8), 10, limit=4)
    assert [int(inputs[0]) for inputs, _ in windows] == [0, 20, 50, 70]


def test_a_limit_larger_than_the_text_changes_nothing():
    assert len(text.Windows(torch.zeros(31, dtype=torch.uint8), 10, limit=512)) == 3


@pytest.mark.parametrize("num_bytes", [0, 1, 8])
def test_text_shorter_than_a_window_is_an_error_that_says_how_much_is_needed(num_bytes):
    with pytest.raises(DataError, match=rf"only {num_bytes} bytes .* a window takes 9"):
        text.Windows(torch.zeros(num_bytes, dtype=torch.uint8), 8)


def test_byte_frequencies_give_what_a_hand_computation_gives():
    train = torch.tensor(list(b"aab"), dtype=torch.uint8)
    windows = text.Windows(torch.tensor(list(b"xabz"), dtype=torch.uint8), 3)
    # With one added to each of 256 counts: a 3, b 2, z 1, of 259. The windows' targets are "abz".
    by_hand = (math.log2(259 / 3) + math.log2(259 / 2) + math.log2(259 / 1)) / 3
    assert text.byte_frequency_bits(train, windows) == pytest.approx(by_hand, rel=1e-12)


def test_byte_frequencies_of_evenly_spread_bytes_give_eight_bits():
    every_byte = torch.arange(256).to(torch.uint8)
    assert text.byte_frequency_bits(every_byte, text.Windows(every_byte, 64)) == pytest.approx(8.0)
