import numpy
import pytest
import torch

from unisono.data.parcel import BY_VALUE_BYTES, Parcel, pack, unpack


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.zeros(0, 3),
        torch.arange(7),
        torch.rand(2, 3).bfloat16(),
        torch.rand(2).half(),
        torch.tensor([True, False]),
        torch.complex(torch.rand(3), torch.rand(3)),
        torch.arange(12).reshape(3, 4)[1],
        torch.arange(12).reshape(3, 4)[1:2, 1],
        torch.rand(2, 1, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_small_tensors_come_back_equal_and_writable(tensor):
    parcel = pack({"x": [tensor, "label"], "y": numpy.ones(3)})
    assert isinstance(parcel, Parcel)
    restored = unpack(parcel)
    assert restored["x"][0].dtype == tensor.dtype
    assert torch.equal(restored["x"][0], tensor)
    assert restored["x"][0].stride() == tensor.stride()
    assert restored["x"][1] == "label"
    restored["x"][0].zero_()


def test_a_small_part_of_a_large_tensor_travels_alone():
    parcel = pack(torch.zeros(BY_VALUE_BYTES)[5:10])
    assert len(parcel.data) < 1000


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(BY_VALUE_BYTES // 4 + 1),
        torch.ones(3, 4).t(),
        torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        torch.eye(3).to_sparse(),
    ],
    ids=["large", "transposed", "channels_last", "requires_grad", "parameter", "sparse"],
)
def test_other_tensors_are_left_to_torch(tensor):
    data = [torch.ones(1), tensor]
    assert pack(data) is data
    assert unpack(data) is data


def test_what_can_not_be_pickled_is_an_error_here_not_a_wait_elsewhere():
    with pytest.raises(Exception, match="pickle"):
        pack(lambda: None)
