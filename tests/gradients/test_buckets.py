from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unisono.gradients.buckets import plan_buckets


def test_every_tensor_has_one_slot_of_its_own_shape() -> None:
    tensors = [torch.zeros(shape) for shape in ((3, 4), (), (0,), (17,), (1, 1, 1), (2, 0, 3))]
    buckets = plan_buckets(tensors, bucket_bytes=100, first_bucket_bytes=10)
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted(slot.index for slot in slots) == list(range(len(tensors)))
    assert all(slot.shape == tensors[slot.index].shape for slot in slots)


def test_slots_do_not_overlap_and_begin_at_multiples_of_64_bytes() -> None:
    tensors = [torch.zeros(size) for size in (5, 1, 16, 33, 0, 2)]
    (bucket,) = plan_buckets(tensors, bucket_bytes=10**6, first_bucket_bytes=10**6)
    flat = torch.zeros(bucket.num_elements)
    for slot in bucket.slots:
        assert slot.offset * 4 % 64 == 0
        slot.view(flat).add_(1)
    assert flat.max() == 1
    assert flat.sum() == sum(tensor.numel() for tensor in tensors)


def test_buckets_fill_from_the_last_tensor_because_backward_reaches_it_first() -> None:
    tensors = [torch.zeros(16) for _ in range(4)]
    buckets = plan_buckets(tensors, bucket_bytes=128, first_bucket_bytes=64)
    assert [[slot.index for slot in bucket.slots] for bucket in buckets] == [[3], [2, 1], [0]]


def test_the_order_can_be_given() -> None:
    tensors = [torch.zeros(16) for _ in range(4)]
    buckets = plan_buckets(tensors, order=[2, 0, 3, 1], bucket_bytes=1, first_bucket_bytes=1)
    assert [[slot.index for slot in bucket.slots] for bucket in buckets] == [[2], [0], [3], [1]]


def test_dtypes_never_share_a_bucket_and_each_has_a_small_first_one() -> None:
    tensors = [torch.zeros(16, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float64)]
    buckets = plan_buckets(tensors, bucket_bytes=10**6, first_bucket_bytes=100)
    assert [(bucket.dtype, [slot.index for slot in bucket.slots]) for bucket in buckets] == [
        (torch.float64, [2]),
        (torch.bfloat16, [1]),
        (torch.float64, [0]),
    ]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(7, 5).t(),
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(1, dtype=torch.complex64).expand(5),
        torch.zeros(()),
    ],
    ids=["channels_last", "transposed", "with gaps", "expanded", "0-dim"],
)
def test_a_slot_is_dense_and_laid_out_like_its_tensor_where_that_is_dense(tensor: Tensor) -> None:
    (bucket,) = plan_buckets([tensor], bucket_bytes=1, first_bucket_bytes=1)
    flat = torch.arange(bucket.num_elements).to(tensor.dtype)
    view = bucket.slots[0].view(flat)
    assert view.shape == tensor.shape
    assert sorted(view.flatten().real.tolist()) == list(range(tensor.numel()))
    if tensor.numel() and torch.empty_like(tensor).stride() == tensor.stride():
        assert view.stride() == tensor.stride()


def test_nothing_to_train_needs_no_bucket() -> None:
    assert plan_buckets([], bucket_bytes=1, first_bucket_bytes=1) == ()
