from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.fingerprints import fingerprint, raw_bytes


def module(**tensors: Tensor) -> nn.Module:
    built = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            built.register_parameter(name, tensor)
        else:
            built.register_buffer(name, tensor)
    return built


def test_the_fingerprint_is_16_hex_digits_that_stay_the_same_over_versions() -> None:
    model = module(w=nn.Parameter(torch.arange(6.0).view(2, 3)), steps=torch.tensor(7))
    assert fingerprint(model) == "18d1a311fefea644"


@pytest.mark.parametrize(
    "other",
    [
        module(v=torch.zeros(2, 3)),
        module(w=torch.zeros(3, 2)),
        module(w=torch.zeros(2, 3, dtype=torch.float64)),
        module(w=torch.zeros(2, 3, dtype=torch.int32)),
        module(w=-torch.zeros(2, 3)),
        module(w=torch.zeros(2, 3), v=torch.zeros(0)),
    ],
    ids=["name", "shape", "dtype", "dtype of the same size", "sign of zero", "one more"],
)
def test_any_difference_gives_another_fingerprint(other: nn.Module) -> None:
    assert fingerprint(other) != fingerprint(module(w=torch.zeros(2, 3)))


def test_layout_in_memory_and_caches_do_not_count() -> None:
    images = torch.arange(120.0).view(2, 3, 4, 5)
    plain, other = module(w=images), module(w=images.to(memory_format=torch.channels_last))
    other.register_buffer("cache", torch.rand(3), persistent=False)
    assert fingerprint(plain) == fingerprint(other)


def test_a_tensor_under_two_names_counts_once() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert fingerprint(module(a=weight, b=weight)) == fingerprint(module(a=weight))


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.tensor(True),
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor([1 + 2j, 3j]).conj(),
        lambda: torch.tensor([1 + 2j, 3j]).imag,
        lambda: torch.tensor([1 + 2j, 3j]).conj().imag,
        lambda: torch.ones(3, dtype=torch.bfloat16),
        lambda: torch.arange(6).view(2, 3).t(),
        lambda: torch.ones(1).expand(4),
        lambda: torch.ones(3).to(torch.float8_e4m3fn),
    ],
)
def test_bytes_of_any_tensor_are_those_of_its_row_major_copy(build: Callable[[], Any]) -> None:
    tensor = build()
    copy = tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg().flatten()
    assert bytes(raw_bytes(tensor)) == bytes(copy.view(torch.uint8).tolist())


def test_one_element_of_a_larger_tensor_has_bytes() -> None:
    column = torch.arange(4).reshape(2, 2)[:1, 1:]
    assert bytes(raw_bytes(column)) == (1).to_bytes(8, "little")
