import collections
import dataclasses

import torch

from unisono.data.batch import Batch, move
from unisono.grid import assign

Pair = collections.namedtuple("Pair", ["x", "y"])
META = torch.device("meta")


@dataclasses.dataclass
class Named:
    x: torch.Tensor
    label: str


def test_a_batch_yields_its_own_parts_in_order_as_often_as_asked():
    batch = Batch(
        epoch=0,
        index=2,
        assignment=assign(3, [2, 1]),
        rank=0,
        sizes=(4, 4, 3),
        nominal_weight=4.0,
        data={1: "b", 0: "a"},
    )
    assert list(batch) == list(batch) == [(0, "a"), (1, "b")]
    assert len(batch) == 11
    assert "rank 0 holds [0, 1]" in repr(batch)


def test_a_batch_moves_tensors_when_it_is_iterated():
    batch = Batch(0, 0, assign(1, [1]), 0, (2,), 2.0, {0: torch.ones(2)}, META)
    ((_, data),) = batch
    assert data.device == META
    assert batch.data[0].device.type == "cpu"


def test_tensors_are_moved_in_any_nesting_and_the_rest_is_left():
    x = torch.ones(2)
    packed = torch.nn.utils.rnn.pack_sequence([x])
    ordered = collections.OrderedDict(x=x)
    data = {"a": [x, (x, "s")], "b": Pair(x, 3), "c": Named(x, "cat"), "d": packed, "e": ordered}
    moved = move(data, META)
    tensors = [
        moved["a"][0],
        moved["a"][1][0],
        moved["b"].x,
        moved["c"].x,
        moved["d"].data,
        moved["e"]["x"],
    ]
    assert {tensor.device for tensor in tensors} == {META}
    assert (moved["a"][1][1], moved["b"].y, moved["c"].label) == ("s", 3, "cat")
    assert (type(moved["b"]), type(moved["e"])) == (Pair, collections.OrderedDict)


def test_for_the_cpu_data_is_returned_as_it_is():
    data = {"x": [torch.ones(1)]}
    assert move(data, torch.device("cpu")) is data
    assert move(data, None) is data
