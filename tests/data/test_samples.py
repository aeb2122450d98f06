import random

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from unisono.data.samples import Samples, Task, draws_nothing
from unisono.errors import UsageError


class Drawing(Dataset):
    """Samples are what the three generators give."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, torch.rand(()).item(), numpy.random.rand(), random.random()


def load(samples, *tasks):
    return samples.load_here(tasks, None)


def states():
    return torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), random.getstate()


def test_a_sample_draws_the_same_in_any_micro_batch():
    samples = Samples(Drawing(), list, seed=1)
    whole = load(samples, Task(2, 0, 0, 0, [4, 9, 3, 7]))[0]
    parts = load(samples, Task(2, 0, 0, 0, [4]), Task(2, 0, 1, 1, [9, 3]), Task(2, 0, 2, 3, [7]))
    assert parts[0] + parts[1] + parts[2] == whole


def test_draws_differ_between_samples_epochs_and_seeds_in_all_three_libraries():
    rows = [
        row
        for seed in (0, 1)
        for epoch in (0, 1)
        for row in load(Samples(Drawing(), list, seed), Task(epoch, 0, 0, 0, [5, 6]))[0]
    ]
    for column in (1, 2, 3):
        assert len({row[column] for row in rows}) == len(rows)


def test_collation_draws_from_the_micro_batch_not_from_its_samples():
    def collate(samples):
        return torch.rand(()).item()

    one = load(Samples([1, 2, 3], collate, 0), Task(0, 0, 0, 0, [0]), Task(0, 0, 1, 1, [1, 2]))
    again = load(Samples(Drawing(), collate, 0), Task(0, 0, 0, 0, [9]))
    assert one[0] == again[0] != one[1]


def test_generators_are_put_back_after_loading_and_after_an_error():
    before = states()
    load(Samples(Drawing(), None, 0), Task(0, 0, 0, 0, [1, 2]))

    class Failing(Drawing):
        def __getitem__(self, index):
            super().__getitem__(index)
            raise KeyError(index)

    with pytest.raises(KeyError):
        load(Samples(Failing(), None, 0), Task(0, 0, 0, 0, [1, 2]))
    assert states() == before


def test_errors_say_which_sample_and_keep_their_type():
    class Failing(Drawing):
        def __getitem__(self, index):
            raise ValueError("row 7")

    with pytest.raises(ValueError, match="row 7") as caught:
        load(Samples(Failing(), None, 0), Task(3, 1, 2, 9, [7]))
    assert str(caught.value) == "row 7"
    assert caught.value.__notes__ == ["while loading sample 7 of epoch 3, batch 1, micro-batch 2"]

    with pytest.raises(RuntimeError, match="stack") as caught:
        load(Samples([torch.ones(1), torch.ones(2)], None, 0), Task(3, 1, 2, 9, [0, 1]))
    assert caught.value.__notes__ == ["while collating epoch 3, batch 1, micro-batch 2"]


def test_stop_iteration_in_a_dataset_does_not_end_a_loop():
    class Ending(Drawing):
        def __getitem__(self, index):
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        load(Samples(Ending(), None, 0), Task(0, 0, 0, 0, [7]))


def test_only_data_in_memory_is_known_to_draw_nothing():
    tensors = TensorDataset(torch.ones(3))

    class Augmented(TensorDataset):
        pass

    for dataset in (
        [1],
        (1,),
        torch.ones(3),
        tensors,
        Subset(tensors, [0]),
        ConcatDataset([tensors, tensors]),
    ):
        assert draws_nothing(dataset)
    for dataset in (Augmented(torch.ones(3)), Subset(Augmented(torch.ones(3)), [0]), Drawing()):
        assert not draws_nothing(dataset)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))

    def __len__(self):
        return 3


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Stream(), "Stream can't be read by index"),
        (NoLength(), "NoLength has no length"),
        (iter([1]), "can't be read by index"),
        (None, "NoneType can't be read by index"),
    ],
)
def test_datasets_that_can_not_be_read_by_number_are_refused(dataset, message):
    with pytest.raises(UsageError, match=message):
        Samples(dataset, None, 0)


def test_a_collation_that_is_no_function_is_refused():
    with pytest.raises(UsageError, match="collate_fn='pad'"):
        Samples([1], "pad", 0)
