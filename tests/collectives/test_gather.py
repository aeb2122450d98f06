"""Tables and byte strings of which every rank has a part."""

from __future__ import annotations

import math

import pytest
import torch

from unisono.collectives.gather import gather_bytes, gather_rows, gather_tensors
from unisono.errors import MismatchError, UsageError
from worlds import TRANSPORTS, alone


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("transport", [*TRANSPORTS])
def test_rows_of_all_ranks_are_on_all_ranks(transport, world_size):
    def gather(transport):
        table = torch.zeros(11, 2, dtype=torch.int64)
        for row in range(transport.rank, 11, world_size):
            table[row] = torch.tensor([row, -(2**62) + row])
        gather_rows(transport, table)
        return table.tolist()

    assert (
        TRANSPORTS[transport](world_size, gather)
        == [[[row, -(2**62) + row] for row in range(11)]] * world_size
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("transport", [*TRANSPORTS])
def test_byte_strings_of_any_length_are_on_all_ranks_in_order(transport, world_size):
    parts = [bytes(range(256)), b"", b"\0\0", b"x" * 100_000, b"", b"last"]

    def gather(transport):
        mine = {number: part for number, part in enumerate(parts) if number % world_size == transport.rank}
        return gather_bytes(transport, mine, len(parts))

    assert TRANSPORTS[transport](world_size, gather) == [parts] * world_size


DTYPES = (
    torch.bool,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.uint16,
    torch.float8_e4m3fn,
)


@pytest.mark.parametrize("transport", [*TRANSPORTS])
def test_tensors_of_any_dtype_and_shape_are_on_all_ranks(transport):
    shapes = ((), (0, 3), (5,), (2, 3))
    values = [torch.arange(math.prod(shape)).reshape(shape).to(dtype) for dtype in DTYPES for shape in shapes]

    def gather(transport):
        mine = {number: part for number, part in enumerate(values) if number % 3 == transport.rank}
        return gather_tensors(transport, mine, len(values))

    for found in TRANSPORTS[transport](3, gather):
        assert [(t.dtype, t.shape, t.tolist()) for t in found] == [
            (t.dtype, t.shape, t.tolist()) for t in values
        ]


def test_nothing_to_gather_gives_nothing():
    assert alone(1, lambda transport: gather_bytes(transport, {}, 0)) == [[]]
    assert alone(1, lambda transport: gather_bytes(transport, {0: b"", 1: b""}, 2)) == [[b"", b""]]
    alone(1, lambda transport: gather_rows(transport, torch.zeros(0, 3, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("owners", "found"), [((0, 0), r"parts \[1\] .* \[0\]"), ((0, 2), r"parts \[1\] .* \[2\]")]
)
def test_a_part_that_is_on_no_rank_or_on_two_is_a_mismatch(owners, found):
    def gather(transport):
        parts = {0: b"a"} if transport.rank == 0 else {}
        if owners[1] == 2:
            parts[1] = b"b"
        with pytest.raises(MismatchError, match=found):
            gather_bytes(transport, parts, 2)

    TRANSPORTS["threads"](2, gather)


def test_a_part_outside_the_range_is_refused():
    with pytest.raises(UsageError, match=r"parts \[2\] are outside of 0 to 1"):
        alone(1, lambda transport: gather_bytes(transport, {2: b""}, 2))
