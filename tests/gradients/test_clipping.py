from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.gradients.clipping import clip_by_norm, gradient_norm


@given(st.lists(st.integers(0, 9000), max_size=5))
def test_the_norm_is_that_of_all_gradients_together(sizes: list[int]) -> None:
    gradients = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    expected = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
    assert gradient_norm(gradients) == pytest.approx(expected, rel=1e-6)


def test_the_norm_does_not_depend_on_the_order_of_gradients() -> None:
    gradients = [torch.randn(size) * 10.0**size for size in (3, 1, 5, 2)]
    assert gradient_norm(gradients) == gradient_norm(gradients[::-1])


def test_a_gradient_cut_at_a_multiple_of_4096_elements_has_the_same_norm_to_the_bit() -> None:
    gradient = torch.randn(20_000)
    assert gradient_norm([gradient]) == gradient_norm(
        [gradient[:8192], gradient[8192:12288], gradient[12288:]]
    )


@pytest.mark.parametrize(
    "gradient",
    [
        torch.tensor(3.0),
        torch.zeros(0),
        torch.tensor([3.0, -4.0], dtype=torch.bfloat16),
        torch.tensor([300.0, -400.0], dtype=torch.float16),
        torch.tensor([3e100, -4e100], dtype=torch.float64),
        torch.tensor([3 + 4j, 12j]),
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(12.0).view(3, 4).t(),
    ],
    ids=["0-dim", "empty", "bfloat16", "float16", "float64", "complex", "channels_last", "transposed"],
)
def test_any_dtype_and_layout_has_the_norm_torch_computes(gradient: torch.Tensor) -> None:
    wide = gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)
    assert gradient_norm([gradient]) == pytest.approx(torch.linalg.vector_norm(wide).item(), rel=1e-6)


def test_clipping_scales_every_gradient_to_the_common_norm() -> None:
    gradients = [torch.full((3,), 2.0), torch.full((2,), -1.0, dtype=torch.float64)]
    assert clip_by_norm(gradients, 1.0) == pytest.approx(math.sqrt(14))
    assert gradient_norm(gradients) == pytest.approx(1.0, rel=1e-5)


def test_gradients_below_the_norm_are_left_alone() -> None:
    gradient = torch.tensor([0.3, 0.4])
    assert clip_by_norm([gradient], 0.6) == pytest.approx(0.5)
    assert gradient.tolist() == torch.tensor([0.3, 0.4]).tolist()


def test_finite_gradients_whose_squares_overflow_are_clipped() -> None:
    gradient = torch.full((5000,), 1e25)
    assert clip_by_norm([gradient], 1.0) == pytest.approx(1e25 * math.sqrt(5000), rel=1e-6)
    assert torch.linalg.vector_norm(gradient) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_gives_nan_and_scales_nothing(odd: float) -> None:
    gradients = [torch.tensor([odd, 2.0]), torch.tensor([5.0])]
    assert math.isnan(clip_by_norm(gradients, 1.0))
    assert gradients[1].item() == 5.0


def test_no_gradients_have_norm_zero() -> None:
    assert clip_by_norm([], 1.0) == 0.0


def test_sparse_gradients_have_the_norm_of_their_rows() -> None:
    def gradient(indices: list[int], values: list[float]) -> torch.Tensor:
        return torch.sparse_coo_tensor([indices], values, (9,), check_invariants=True)

    coalesced, repeated, empty = (
        gradient([1, 4], [3.0, 0.0]).coalesce(),
        gradient([2, 2], [1.0, 3.0]),
        gradient([], []),
    )
    assert gradient_norm([coalesced, repeated, empty]) == 5.0
    assert gradient_norm([empty]) == 0.0
    assert clip_by_norm([coalesced, repeated, empty], 0.5) == 5.0
    assert coalesced.to_dense()[1].item() == pytest.approx(0.3)
    assert repeated.to_dense()[2].item() == pytest.approx(0.4)
