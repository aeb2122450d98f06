from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from unisono.randomness import derive, device_generator, keyed, seed_all


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(numpy.random.rand()), random.random()


def test_keys_are_the_same_on_every_machine() -> None:
    assert derive(0, "step", 0, 0, 0) == 9678310086136250829
    assert derive(-1, "sample", 2**62) == 14404564953142839964


def test_keys_differ_for_every_seed_and_every_coordinate() -> None:
    keys = [derive(seed, "step", *at) for seed in (0, 1, -1) for at in ((0, 1), (1, 0), (0, 0, 1), (0,), ())]
    assert len({*keys, derive(0, "init"), derive(0, "order", 0, 1)}) == len(keys) + 2


def test_keys_are_unsigned_and_fill_64_bits() -> None:
    keys = [derive(0, number) for number in range(200)]
    assert min(keys) >= 0
    assert 2**63 < max(keys) < 2**64


def test_seed_all_seeds_torch_numpy_and_random() -> None:
    with keyed() as seed:
        seed_all(7)
        first = draws()
        seed(7)
        assert draws() == first
        seed(8)
        assert not set(draws()) & set(first)


def test_a_key_of_64_bits_is_taken_by_every_generator() -> None:
    with keyed() as seed:
        seed(2**64 - 1)
        assert all(0 <= drawn < 1 for drawn in draws())


def test_generators_are_put_back() -> None:
    before = states()
    with keyed() as seed:
        seed(1)
        draws()
        torch.randn(1)
        random.gauss(0, 1)
        numpy.random.randn()
    assert states() == before


def test_generators_are_put_back_after_an_error() -> None:
    before = states()

    def fail(seed: Callable[[int], None]) -> None:
        seed(1)
        draws()
        raise RuntimeError("in user code")

    with pytest.raises(RuntimeError), keyed() as seed:
        fail(seed)
    assert states() == before


def test_a_half_used_normal_draw_of_the_user_is_put_back_too() -> None:
    numpy.random.seed(3)
    random.seed(3)
    expected = [numpy.random.randn(2).tolist(), [random.gauss(0, 1), random.gauss(0, 1)]]
    numpy.random.seed(3)
    random.seed(3)
    first = [numpy.random.randn(), random.gauss(0, 1)]
    with keyed() as seed:
        seed(1)
        draws()
    second = [numpy.random.randn(), random.gauss(0, 1)]
    assert [list(pair) for pair in zip(first, second, strict=True)] == expected


def test_the_cpu_has_no_generator_of_its_own() -> None:
    assert device_generator(None) is None
    assert device_generator(torch.device("cpu")) is None


def states() -> tuple[Any, ...]:
    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    generators = torch.get_rng_state().tolist(), keys.tolist(), random.getstate()
    return *generators, name, position, has_gauss, gauss
