"""Shapes and basic properties of the examples' models, and their command lines."""

import math
from itertools import pairwise

import pytest
import torch

import cnn
import gpt
import settings

SMALL = ["--context", "8", "--layers", "2", "--width", "16", "--heads", "2"]


@pytest.fixture
def small_gpt():
    torch.manual_seed(0)
    return gpt.build(gpt.parse(SMALL))


@pytest.mark.parametrize("shape", [(1, 8), (3, 8), (3, 1), (2, 20)])
def test_gpt_gives_logits_of_every_next_byte(small_gpt, shape):
    assert small_gpt(torch.randint(256, shape)).shape == (*shape, 256)


def test_gpt_sees_no_later_byte(small_gpt):
    with torch.no_grad():
        for layer in small_gpt.layers:
            layer.attention_out.weight.normal_()
        tokens = torch.randint(256, (1, 8))
        changed = tokens.clone()
        changed[0, 5] = (changed[0, 5] + 1) % 256
        before, after = small_gpt(tokens), small_gpt(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 6], after[0, 6])


def test_attention_depends_on_distances_alone():
    vectors = torch.randn(2, 1, 16).expand(2, 12, 16)
    query, key = gpt.rotate(vectors)
    scores = query @ key.T
    assert torch.allclose(scores[:-1, :-1], scores[1:, 1:], atol=1e-4)


def test_bits_per_byte_is_the_loss_in_bits_weighted_by_bytes(small_gpt):
    micro_batch = (torch.randint(256, (3, 8)), torch.randint(256, (3, 8)))
    bits, num_bytes = gpt.bits_per_byte(small_gpt, micro_batch)
    assert num_bytes == 24
    assert bits.item() == pytest.approx(gpt.loss_fn(small_gpt, micro_batch).item() / math.log(2))
    assert 7.5 < bits < 9.5


@pytest.mark.parametrize("size", [4, 8, 13, 28])
@pytest.mark.parametrize("num_images", [1, 5])
def test_cnn_takes_any_size_of_image_and_batches_of_one(size, num_images):
    model = cnn.CNN(size, dropout=0.3)
    assert model(torch.rand(num_images, 1, size, size)).shape == (num_images, 10)


def test_accuracy_counts_the_images_it_is_the_mean_of():
    model = torch.nn.Flatten()
    right, num_images = cnn.accuracy(
        model, (torch.eye(10)[:, None], torch.tensor([0, 1, 2, 0, 0, 0, 0, 0, 0, 9]))
    )
    assert (right.item(), num_images) == (pytest.approx(0.4), 10)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (3, 25)),
        (["--steps", "7"], (1, 7)),
        (["--steps", "10"], (1, 10)),
        (["--steps", "11"], (2, 11)),
        (["--epochs", "4"], (4, 40)),
        (["--epochs", "4", "--steps", "12"], (2, 12)),
        (["--epochs", "1", "--steps", "99"], (1, 10)),
    ],
)
def test_training_ends_after_steps_or_epochs_whichever_is_first(arguments, expected):
    assert settings.count_steps(gpt.parse(arguments), 10, default_steps=25) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "0 is less than 1"),
        (["--epochs", "-1"], "-1 is less than 1"),
        (["--batch-size", "0"], "--batch-size: 0 is less than 1"),
        (["--micro-batches", "two"], "invalid positive value: 'two'"),
        (["--width", "100", "--heads", "4"], "--width 100 is not an even multiple of --heads 4"),
        (["--stepz", "3"], "unrecognized arguments: --stepz"),
    ],
)
def test_a_bad_command_line_is_refused_with_its_reason(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpt.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("num_steps", [1, 2, 19, 100])
def test_the_learning_rate_rises_once_then_falls_and_never_reaches_zero(num_steps):
    part = settings.warmup_then_cosine(num_steps)
    parts = [part(step) for step in range(num_steps)]
    assert all(0 < value <= 1 for value in parts)
    top = parts.index(max(parts))
    assert all(earlier < later for earlier, later in pairwise(parts[: top + 1]))
    assert all(earlier > later for earlier, later in pairwise(parts[top:]))
