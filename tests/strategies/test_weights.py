from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.grid import Assignment, assign
from unisono.strategies.weights import WeightReference, nearest_power_of_two, unpack_loss


@dataclass
class FakeBatch:
    sizes: tuple[int, ...]
    nominal_weight: float = 4.0

    @property
    def assignment(self) -> Assignment:
        return assign(len(self.sizes), [len(self.sizes)])

    def __iter__(self) -> Any:
        return iter(())


def agreed(given: float | None) -> WeightReference:
    reference = WeightReference()
    reference.agree(reference.message(given))
    return reference


@given(st.floats(1e-300, 1e300))
def test_the_nearest_power_of_two_is_within_a_factor_of_two(value: float) -> None:
    power = nearest_power_of_two(value)
    assert math.frexp(power)[0] == 0.5
    assert abs(power - value) <= min(abs(power / 2 - value), abs(power * 2 - value))


def test_zero_has_the_power_one() -> None:
    assert nearest_power_of_two(0.0) == 1.0


def test_the_reference_for_samples_is_the_nominal_size() -> None:
    reference = agreed(None)
    assert reference.of(FakeBatch((3, 3, 2)), {}) == 4.0
    assert reference.factor_beforehand(FakeBatch((3, 3, 2))) == 0.5
    reference.advance(8.0, 3)
    assert reference.of(FakeBatch((3, 3, 2)), {}) == 4.0


def test_the_reference_for_tokens_is_a_power_of_two_near_the_mean_of_the_step_before() -> None:
    reference = agreed(700.0)
    batch = FakeBatch((3, 3))
    assert reference.of(batch, {}) == 512.0
    reference.advance(1000.0, 5)
    assert reference.of(batch, {}) == 256.0
    reference.advance(0.0, 5)
    assert reference.of(batch, {}) == 256.0
    assert reference.factor_beforehand(batch) == 1.0


def test_a_single_micro_batch_is_its_own_reference() -> None:
    assert agreed(None).of(FakeBatch((7,)), {0: 7.0}) == 7.0
    assert agreed(700.0).of(FakeBatch((7,)), {0: 650.0}) == 650.0
    assert agreed(700.0).of(FakeBatch((7,)), {0: 0.0}) == 1.0


def test_a_message_of_weight_zero_is_still_a_message() -> None:
    reference = agreed(0.0)
    assert reference.is_agreed
    assert not reference.known_beforehand
    assert reference.of(FakeBatch((3, 3)), {}) == 1.0


def test_the_reference_survives_a_checkpoint() -> None:
    reference, other = agreed(700.0), WeightReference()
    assert not other.is_agreed
    other.load_state_dict(reference.state_dict())
    assert other.is_agreed
    assert other.of(FakeBatch((3, 3)), {}) == 512.0


def test_a_loss_comes_alone_or_with_a_weight() -> None:
    loss = torch.tensor(2.0)
    assert unpack_loss(loss, 0) == (loss, None)
    assert unpack_loss((loss, 3), 0) == (loss, 3.0)
    assert unpack_loss((loss, torch.tensor(3)), 0) == (loss, 3.0)
    assert unpack_loss(torch.ones(1), 0)[0].item() == 1.0


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "'NoneType' for micro-batch 5"),
        (1.0, "'float'"),
        (torch.zeros(3), r"a tensor of shape \[3\]"),
        ((torch.zeros(()), 1, 2), "'tuple'"),
        ((torch.zeros(()), -1), "weight -1.0"),
        ((torch.zeros(()), math.nan), "weight nan"),
        ((torch.zeros(()), math.inf), "weight inf"),
    ],
)
def test_anything_else_is_refused_with_what_was_found(output: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        unpack_loss(output, 5)
