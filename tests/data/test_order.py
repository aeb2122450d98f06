import pytest

from unisono.data.order import PermutedOrder
from unisono.errors import UsageError


def epoch_of(order, epoch):
    return [order.indices(epoch, batch) for batch in range(order.num_batches(epoch))]


@pytest.mark.parametrize("num_samples", [1, 2, 7, 12, 23, 64])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 12, 100])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_is_used_exactly_once_in_every_epoch(num_samples, batch_size, shuffle):
    order = PermutedOrder(num_samples, batch_size, shuffle=shuffle, seed=3)
    for epoch in range(2):
        batches = epoch_of(order, epoch)
        assert sorted(index for batch in batches for index in batch) == list(range(num_samples))
        assert {len(batch) for batch in batches[:-1]} <= {batch_size}
        assert len(batches[-1]) == (num_samples % batch_size or batch_size)


def test_drop_last_leaves_out_only_the_short_batch():
    order = PermutedOrder(11, 4, shuffle=True, drop_last=True)
    assert [len(batch) for batch in epoch_of(order, 0)] == [4, 4]
    assert PermutedOrder(8, 4, drop_last=True).num_batches(0) == 2


def test_without_shuffling_the_order_is_that_of_the_dataset():
    assert epoch_of(PermutedOrder(5, 2), 7) == [[0, 1], [2, 3], [4]]


def test_order_changes_with_epoch_and_seed_and_is_reproducible():
    orders = [
        PermutedOrder(30, 30, shuffle=True, seed=seed).indices(epoch, 0)
        for seed in (0, 1)
        for epoch in range(3)
    ]
    assert len({tuple(order) for order in orders}) == 6
    assert PermutedOrder(30, 30, shuffle=True, seed=1).indices(2, 0) == orders[5]


def test_any_batch_is_found_without_those_before_it():
    order = PermutedOrder(20, 3, shuffle=True)
    batches = {(epoch, batch): order.indices(epoch, batch) for epoch in range(3) for batch in range(7)}
    again = PermutedOrder(20, 3, shuffle=True)
    for epoch, batch in reversed(batches):
        assert again.indices(epoch, batch) == batches[epoch, batch]


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "drop_last", "message"),
    [
        (10, 0, False, "batch_size=0"),
        (10, -3, False, "batch_size=-3"),
        (0, 4, False, "0 samples"),
        (3, 4, True, "drop_last=True leaves no batch"),
    ],
)
def test_an_order_of_nothing_is_refused(num_samples, batch_size, drop_last, message):
    with pytest.raises(UsageError, match=message):
        PermutedOrder(num_samples, batch_size, drop_last=drop_last)
