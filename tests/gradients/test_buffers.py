from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.gradients.buffers import BufferKeeper


class Counting(nn.Module):
    """A buffer for every way in which modules write buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.arange(3.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)
        self.queue: Tensor
        self.cache: Tensor


def keeper_of(model: nn.Module) -> BufferKeeper:
    keeper = BufferKeeper(model)
    keeper.begin()
    return keeper


def test_running_statistics_are_averaged_and_the_count_is_not() -> None:
    keeper = keeper_of(nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)))
    assert keeper.averaged_names == ["0.running_mean", "0.running_var", "1.running_mean", "1.running_var"]
    assert keeper.other_names == ["0.num_batches_tracked", "1.num_batches_tracked"]


def test_buffers_that_are_not_saved_or_not_there_are_left_alone() -> None:
    assert keeper_of(Counting()).other_names == ["queue"]


def test_a_forward_pass_of_batch_norm_is_seen_and_undone() -> None:
    model = nn.BatchNorm1d(2)
    keeper = keeper_of(model)
    model(torch.randn(4, 2) + 3)
    mean, var = keeper.harvest().averaged
    assert mean is not None
    assert var is not None
    assert torch.equal(mean, model.running_mean)
    keeper.restore()
    assert model.running_mean.tolist() == [0, 0]
    assert model.num_batches_tracked == 0
    assert keeper.harvest() == type(keeper.harvest())((None, None), (0,))


def test_evaluation_mode_changes_nothing() -> None:
    model = nn.BatchNorm1d(2).eval()
    keeper = keeper_of(model)
    model(torch.randn(4, 2))
    assert keeper.harvest().averaged == (None, None)


def in_place(module: Any) -> None:
    module.queue.add_(1)


def through_data(module: Any) -> None:
    module.queue.data.add_(1)


def assignment(module: Any) -> None:
    module.queue = module.queue + 1


def assigned_data(module: Any) -> None:
    module.queue.data = module.queue + 1


def growth(module: Any) -> None:
    module.queue = torch.arange(5.0)


def other_dtype(module: Any) -> None:
    module.queue = module.queue.double() + 1


WRITES = [in_place, through_data, assignment, assigned_data, growth, other_dtype]


@pytest.mark.parametrize("write", WRITES)
def test_every_way_of_writing_is_seen_and_undone(write: Any) -> None:
    model = Counting()
    original = model.queue
    keeper = keeper_of(model)
    write(model)
    assert keeper.harvest().digests[0] != 0
    for _ in range(2):
        keeper.restore()
        assert model.queue is original
        assert model.queue.tolist() == [0, 1, 2]
        assert model.queue.dtype == torch.float32
        assert keeper.harvest().digests == (0,)


def test_equal_changes_have_equal_digests_and_others_differ() -> None:
    digests = []
    for write in WRITES:
        model = Counting()
        keeper = keeper_of(model)
        write(model)
        digests.append(keeper.harvest().digests[0])
    assert len(set(digests[:4])) == 1
    assert len(set(digests[3:])) == 3


def test_a_tensor_that_the_model_put_in_place_of_a_buffer_is_not_overwritten() -> None:
    model = Counting()
    keeper = keeper_of(model)
    mine = torch.full((3,), 7.0)
    model.queue = mine
    keeper.restore()
    assert mine.tolist() == [7, 7, 7]


def test_a_change_between_steps_is_what_the_next_step_starts_from() -> None:
    model = Counting()
    keeper = keeper_of(model)
    through_data(model)
    keeper.begin()
    assert keeper.harvest().digests == (0,)
    in_place(model)
    keeper.restore()
    assert model.queue.tolist() == [1, 2, 3]


def test_agreed_values_are_put_in_place_whatever_their_shape() -> None:
    model = Counting()
    keeper = keeper_of(model)
    growth(model)
    keeper.harvest()
    value = keeper.changed_value(0)
    assert value is not None
    keeper.restore()
    keeper.put_other(0, value)
    assert model.queue.tolist() == [0, 1, 2, 3, 4]
    keeper.begin()
    assert keeper.harvest().digests == (0,)


def test_a_buffer_that_two_modules_share_comes_once() -> None:
    model = nn.Sequential(Counting(), Counting())
    model[1].queue = model[0].queue
    assert keeper_of(model).other_names == ["0.queue"]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(True),
        torch.zeros(0),
        torch.tensor(2**53 + 1),
        torch.full((2,), torch.nan),
        torch.tensor(1 + 2j),
    ],
    ids=str,
)
def test_any_dtype_and_size_can_be_a_buffer(value: Tensor) -> None:
    model = nn.Module()
    model.register_buffer("b", value.clone())
    keeper = keeper_of(model)
    keeper.restore()
    model.b.zero_()
    keeper.harvest()
    keeper.restore()
    assert torch.equal(torch.nan_to_num(model.b), torch.nan_to_num(value))
