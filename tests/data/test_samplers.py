import random

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unisono.data.loader import Loader
from unisono.data.plan import AssignmentPlan
from unisono.errors import UsageError
from unisono.grid import assign

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NUM_ROWS = 50


class Buckets:
    """Batches of rows of one length, in a random order; their number depends on the epoch."""

    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rows = torch.randperm(NUM_ROWS).tolist()
        while rows:
            size = 5 + self.epoch if random.random() < 0.5 else 8 - numpy.random.randint(2)
            yield rows[:size]
            rows = rows[size:]


def make_sampler(kind):
    generator = torch.Generator().manual_seed(1)
    weights = torch.arange(NUM_ROWS, dtype=torch.float64)
    return {
        "weighted": lambda: {"sampler": WeightedRandomSampler(weights, 30)},
        "subset": lambda: {"sampler": SubsetRandomSampler(range(7, 40), generator=generator)},
        "list": lambda: {"sampler": [3, 1, 4, 1, 5]},
        "tensors": lambda: {"sampler": torch.arange(9).flip(0)},
        "epoch": lambda: {"sampler": DistributedSampler(range(NUM_ROWS), num_replicas=1, rank=0)},
        "batches": lambda: {
            "batch_sampler": BatchSampler(RandomSampler(range(NUM_ROWS), generator=generator), 7, False)
        },
        "buckets": lambda: {"batch_sampler": Buckets()},
    }[kind]()


KINDS = ["weighted", "subset", "list", "tensors", "epoch", "batches", "buckets"]


def make(kind, *, shares=(4,), rank=0, **options):
    options = {**make_sampler(kind), **options}
    if "sampler" in options:
        options = {"batch_size": 6, **options}
    plan = AssignmentPlan(assign(4, shares, allow_idle=True))
    return Loader(range(NUM_ROWS), micro_batches=4, plan=plan, rank=rank, **options)


def workers(kind, shares, **options):
    return [make(kind, shares=shares, rank=rank, **options) for rank in range(len(shares))]


def epoch_of(loaders):
    """The rows of every global batch of an epoch, from what the workers hold of it."""
    found = []
    for batches in zip(*loaders, strict=True):
        held = {number: rows.tolist() for batch in batches for number, rows in batch}
        found.append([row for number in sorted(held) for row in held[number]])
        assert len({batch.digest for batch in batches}) == 1
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_yields_the_same_epochs_on_any_workers_whatever_they_drew_before(kind):
    alone = make(kind)
    expected = [epoch_of([alone]) for _ in range(3)]
    torch.manual_seed(99)
    for shares, num_workers in (((2, 2), 0), ((1, 0, 3), 1)):
        loaders = workers(kind, shares, num_workers=num_workers)
        assert [epoch_of(loaders) for _ in range(3)] == expected
    if kind not in ("list", "tensors"):
        assert expected[0] != expected[1] != expected[2]
        if kind != "epoch":  # which has a seed of its own
            assert epoch_of([make(kind, seed=1)]) != expected[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_state_goes_on_in_mid_epoch_on_other_workers(kind):
    whole = make(kind)
    expected = [epoch_of([whole]) for _ in range(3)]
    first = make(kind, shares=(2, 2))
    list(first)
    loop = iter(first)
    next(loop)
    state = first.state_dict()
    assert (state["epoch"], state["batch"], state["first_step"]) == (1, 1, len(expected[0]))
    resumed = workers(kind, (1, 3))
    for loader in resumed:
        loader.load_state_dict(state)
    assert epoch_of(resumed) == expected[1][1:]
    assert epoch_of(resumed) == expected[2]
    assert resumed[0].step == sum(map(len, expected))


def test_batches_of_a_batch_sampler_have_their_own_sizes_and_nominal_weights():
    loader = make("buckets")
    batches = list(loader)
    assert {batch.nominal_weight for batch in batches} == {len(batch) / 4 for batch in batches}
    assert len({len(batch) for batch in batches}) > 1
    assert sorted(row for batch in batches for _, rows in batch for row in rows.tolist()) == list(range(50))
    lengths = []
    for _ in range(5):
        lengths.append(len(loader))
        assert len(list(loader)) == lengths[-1]
    assert len(set(lengths)) > 1


def test_a_change_of_the_assignment_holds_at_its_step_where_epochs_differ_in_length():
    loaders = workers("buckets", (2, 2), num_workers=1)
    first, second = (epoch_of([alone]) for alone in [make("buckets")] for _ in range(2))
    changed = assign(4, [1, 3])
    for loader in loaders:
        loader.plan.change(changed, from_step=len(first) + 1)
    assert epoch_of(loaders) == first
    owners = []
    for batches in zip(*loaders, strict=True):
        owners.append(len([number for number, _ in batches[0]]))
    assert owners == [2, *[1] * (len(second) - 1)]


def test_listing_a_sampler_leaves_the_global_generators_alone_and_happens_once_an_epoch():
    class Counting(Buckets):
        count = 0

        def __iter__(self):
            Counting.count += 1
            return super().__iter__()

    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    loader = make("buckets", batch_sampler=Counting())
    for _ in range(3):
        list(loader)
    assert Counting.count == 3
    assert torch.rand(2).tolist() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": [1], "shuffle": True}, "shuffle=True with a sampler"),
        ({"sampler": [1], "drop_last": True}, "drop_last=True with a sampler"),
        ({"batch_sampler": [[1]], "batch_size": None, "shuffle": True}, "shuffle=True with a batch_sampler"),
        ({"sampler": [1], "batch_sampler": [[1]]}, "expected one of them"),
        ({"batch_sampler": [[1]]}, "leave batch_size out"),
        ({"batch_size": None}, "batch_size is missing"),
        ({"sampler": [1], "batch_size": 0}, "batch_size=0"),
        ({"sampler": iter([1])}, "list_iterator can be iterated only once"),
        ({"sampler": 5}, "int can't be iterated"),
        ({"sampler": DistributedSampler(range(8), 2, 0)}, "share of one of 2 workers"),
        (
            {
                "batch_sampler": BatchSampler(DistributedSampler(range(8), 2, 0), 2, False),
                "batch_size": None,
            },
            "share of one of 2 workers",
        ),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options, message):
    options = {"batch_size": 2, **options}
    with pytest.raises(UsageError, match=message):
        Loader(range(8), micro_batches=1, plan=AssignmentPlan(assign(1, [1])), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": [], "batch_size": 2}, "yields nothing in epoch 0"),
        ({"sampler": ["one"], "batch_size": 2}, "sampler yielded 'one'"),
        ({"batch_sampler": SequentialSampler(range(3))}, "yielded 0 as batch 0: expected a list"),
        ({"batch_sampler": [[1], []]}, "no index as batch 1"),
    ],
)
def test_what_a_sampler_can_not_yield_is_an_error(options, message):
    loader = Loader(range(8), micro_batches=1, plan=AssignmentPlan(assign(1, [1])), **options)
    with pytest.raises(UsageError, match=message):
        iter(loader)


def test_a_state_beyond_the_end_of_a_samplers_epoch_is_refused():
    loader = make("list")
    loader.load_state_dict({**loader.state_dict(), "batch": 2})
    with pytest.raises(UsageError, match="batch 2 is no place in an epoch of 1 batches"):
        iter(loader)
