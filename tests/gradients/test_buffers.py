from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.errors import UsageError
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
    value = keeper.values(0).get(0)
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


def test_only_the_deciding_values_are_kept() -> None:
    kept = {"first": {2: 1}, "last": {5: 3}, "sum": {2: 1, 4: 2, 5: 3}}
    for policy, expected in kept.items():
        model = Counting()
        keeper = BufferKeeper(model, {"queue": policy})
        keeper.begin()
        for number, value in kept["sum"].items():
            keeper.restore()
            model.queue.fill_(value)
            assert keeper.harvest(number).digests == (1,)
        assert {n: int(value[0]) for n, value in keeper.values(0).items()} == expected
        assert keeper.needed(0, [5, 4, 2]) == sorted(expected)
        keeper.forget_values()
        assert not keeper.values(0)


def test_declared_buffers_are_kept_though_not_saved_and_compared_though_large() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(2**15), persistent=False)
    keeper = BufferKeeper(model, {"table": "last"})
    keeper.begin()
    model.table.data.add_(1)
    assert keeper.harvest().digests == (1,)
    keeper.restore()
    assert not model.table.any()


def test_a_declared_mean_is_averaged_and_a_declared_statistic_is_not() -> None:
    model = nn.Sequential(Counting(), nn.BatchNorm1d(2))
    keeper = BufferKeeper(model, {"0.queue": "mean", "1.running_mean": "first"})
    assert keeper.averaged_names == ["0.queue", "1.running_var"]
    assert keeper.other_names == ["1.running_mean", "1.num_batches_tracked"]


def test_a_mean_of_a_buffer_that_grows_is_an_error() -> None:
    model = Counting()
    keeper = BufferKeeper(model, {"queue": "mean"})
    keeper.begin()
    growth(model)
    with pytest.raises(UsageError, match=r"made buffer 'queue' torch.float32 \[5\] on cpu, it was"):
        keeper.harvest()
