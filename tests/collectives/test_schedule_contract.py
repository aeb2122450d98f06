"""What every schedule promises, proved symbolically and tried on transports."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.collectives.broadcast import broadcast
from unisono.collectives.choose import choose
from unisono.collectives.direct import direct
from unisono.collectives.execute import Scratch, buffer_key, execute
from unisono.collectives.hierarchical import hierarchical
from unisono.collectives.pairs import can_pair, pairs
from unisono.collectives.schedule import Send
from unisono.collectives.verify import verify
from unisono.errors import UsageError
from unisono.grid import Assignment, Block, assign, even_shares, tree_sum
from unisono.transport.local import LocalTransport
from unisono.transport.threads import ThreadWorld
from worlds import TRANSPORTS, on_process_groups

SCALE = 1 / 3


def even(num_micro_batches, world_size):
    shares = even_shares(num_micro_batches, world_size)
    return assign(num_micro_batches, shares, allow_idle=True)


def leaf(micro_batch, size, dtype):
    """The gradient of one micro-batch: the same whoever makes it, in magnitudes where order matters."""
    generator = torch.Generator().manual_seed(micro_batch)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** (micro_batch % 5)).to(dtype)


def block_sum(block, size, dtype):
    """A block's partial sum, along the tree."""
    if block.is_leaf:
        return leaf(block.start, size, dtype)
    left, right = block.halves()
    return block_sum(left, size, dtype) + block_sum(right, size, dtype)


def expected_sum(num_micro_batches, size, dtype):
    leaves = [leaf(number, size, dtype) for number in range(num_micro_batches)]
    return tree_sum(leaves, torch.add) * SCALE


def bits(tensor):
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def run_sum(schedule, assignment, size, dtype, *, key="bucket"):
    """Return a function that executes a schedule on one rank and gives the result's bytes."""

    def reduce(transport):
        pieces = {block: block_sum(block, size, dtype) for block in assignment.blocks[transport.rank]}
        out = None if pieces else torch.empty(size, dtype=dtype)
        result = execute(schedule, transport, pieces, out=out, key=key, scale=SCALE)
        return bits(result)

    return reduce


ASSIGNMENTS = {
    "one rank": even(8, 1),
    "one micro-batch each": even(2, 2),
    "pairs of 4": even(8, 4),
    "pairs of 4, no power of two": even(6, 4),
    "pairs of 8": even(8, 8),
    "three ranks": even(8, 3),
    "seven ranks, prime grid": even(13, 7),
    "uneven": assign(16, [9, 1, 5, 1]),
    "reordered": assign(8, [1, 5, 2]),
    "idle rank": assign(4, [2, 0, 2], allow_idle=True),
    "one has all": assign(4, [0, 4, 0], allow_idle=True),
    "one micro-batch, three ranks": even(1, 3),
}


@pytest.mark.parametrize("algorithm", ["direct", "auto"])
@pytest.mark.parametrize("transport", ["threads", "mapped", "shared"])
@pytest.mark.parametrize("assignment", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_the_executed_sum_has_the_bits_of_the_tree_on_all_ranks(assignment, transport, algorithm):
    schedule = choose(assignment, algorithm)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for size in (0, 1, 67, 1009):
            results = TRANSPORTS[transport](assignment.world_size, run_sum(schedule, assignment, size, dtype))
            expected = bits(expected_sum(assignment.num_micro_batches, size, dtype))
            assert results == [expected] * assignment.world_size, (dtype, size)


@pytest.mark.parametrize("transport", ["mapped", "shared", "hosts"])
@pytest.mark.parametrize("assignment", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_the_sum_may_take_the_place_of_a_piece_that_peers_see(assignment, transport):
    schedule = choose(assignment, "direct")

    def reduce(transport):
        results = []
        for _ in range(2):
            pieces = {
                block: transport.allocate(f"sums/{number}", 1009, torch.float32)
                for number, block in enumerate(assignment.blocks[transport.rank])
            }
            for block, tensor in pieces.items():
                tensor.copy_(block_sum(block, 1009, torch.float32))
            out = next(iter(pieces.values()), None)
            if out is None:
                out = transport.allocate("out", 1009, torch.float32)
            result = execute(schedule, transport, pieces, out=out, key="bucket", scale=SCALE)
            assert result is out
            results.append(bits(result))
        return results

    expected = bits(expected_sum(assignment.num_micro_batches, 1009, torch.float32))
    found = TRANSPORTS[transport](assignment.world_size, reduce)
    assert found == [[expected] * 2] * assignment.world_size


@pytest.mark.parametrize("name", ["pairs of 4", "uneven", "one has all", "three ranks"])
@pytest.mark.parametrize("algorithm", ["direct", "auto"])
def test_the_sum_over_gloo_has_the_bits_of_the_tree_on_all_ranks(name, algorithm):
    assignment = ASSIGNMENTS[name]
    cases = [(torch.float32, 100_003), (torch.bfloat16, 257), (torch.float32, 1), (torch.float64, 0)]

    def reduce(transport):
        schedule = choose(assignment, algorithm)
        return [run_sum(schedule, assignment, size, dtype)(transport) for dtype, size in cases]

    expected = [bits(expected_sum(assignment.num_micro_batches, size, dtype)) for dtype, size in cases]
    assert on_process_groups(assignment.world_size, reduce) == [expected] * assignment.world_size


@pytest.mark.parametrize("world_size", [*range(1, 10), 16, 33])
def test_direct_exchange_is_proved_for_any_number_of_micro_batches(world_size):
    for num_micro_batches in [*range(1, 18), 29, 32, 37, 40] if world_size < 16 else [1, 33, 40]:
        verify(direct(even(num_micro_batches, world_size)))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16, 32])
def test_pairs_are_proved_for_every_grid_that_allows_them(world_size):
    proved = 0
    for num_micro_batches in range(1, 41):
        if can_pair(assignment := even(num_micro_batches, world_size)):
            verify(pairs(assignment))
            proved += 1
    assert proved


@settings(max_examples=60, deadline=None)
@given(shares=st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any))
def test_whatever_is_chosen_is_proved_for_any_shares(shares):
    verify(choose(assign(sum(shares), shares, allow_idle=True)))


@pytest.mark.parametrize("world_size", [*range(1, 10), 16, 33])
def test_broadcast_is_proved_from_any_source(world_size):
    for source in {0, world_size // 2, world_size - 1}:
        verify(broadcast(world_size, source=source))


@pytest.mark.parametrize("transport", [*TRANSPORTS])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_broadcast_gives_all_what_the_source_had(transport, world_size):
    source = world_size - 1

    def share(transport):
        out = torch.arange(100.0) if transport.rank == source else torch.empty(100)
        pieces = {"value": out} if transport.rank == source else {}
        schedule = broadcast(world_size, source=source)
        execute(schedule, transport, pieces, out=out, key="state")
        return out.tolist()

    assert TRANSPORTS[transport](world_size, share) == [torch.arange(100.0).tolist()] * world_size


def test_pairs_are_chosen_where_they_fit_and_direct_exchange_elsewhere():
    assert choose(even(8, 4)).name == "pairs"
    assert choose(even(6, 4)).name == "pairs"
    assert choose(even(8, 3)).name == "direct"
    assert choose(assign(8, [3, 5])).name == "direct"
    assert choose(even(8, 4), "direct").name == "direct"


def test_pairs_follow_the_tree_and_not_the_ranks():
    backwards = Assignment(4, ((Block(2, 4),), (Block(0, 2),)))
    assert can_pair(backwards)
    verify(pairs(backwards))
    assert not can_pair(Assignment(4, ((Block(0, 1),), (Block(1, 4),))))
    assert not can_pair(Assignment(5, ((Block(0, 2),), (Block(2, 4), Block(4, 5)))))


def test_pairs_of_uneven_shares_are_refused_with_the_shares():
    with pytest.raises(UsageError, match=r"the shares are \[3, 5\].*'direct'"):
        choose(assign(8, [3, 5]), "pairs")


def test_an_unknown_algorithm_is_refused_and_the_nearest_is_named():
    with pytest.raises(UsageError, match="'pair' is unknown; did you mean 'pairs'"):
        choose(even(8, 2), "pair")


@pytest.mark.parametrize("transport", ["threads", "mapped"])
@pytest.mark.parametrize("algorithm", ["direct", "auto"])
def test_one_call_after_another_disturbs_nothing(transport, algorithm):
    """Buffers are written again at once, while a peer that is late may still be reading."""
    assignment = even(8, 4)
    schedule = choose(assignment, algorithm)

    def steps(transport):
        scratch, results = Scratch(), []
        (block,) = assignment.blocks[transport.rank]
        buffer = transport.allocate(buffer_key("bucket", block), 1009, torch.float32)
        for step in range(20):
            buffer.copy_(block_sum(block, 1009, torch.float32)).mul_(2.0**step)
            results.append(bits(execute(schedule, transport, {block: buffer}, key="bucket", scratch=scratch)))
        return results

    total = tree_sum([leaf(number, 1009, torch.float32) for number in range(8)], torch.add)
    expected = [bits(total * 2.0**step) for step in range(20)]
    assert TRANSPORTS[transport](4, steps) == [expected] * 4


def test_steps_in_their_stride_take_no_new_memory():
    assignment = even(8, 3)
    schedule = direct(assignment)

    def steps(transport):
        scratch, sizes = Scratch(), []
        for _ in range(3):
            pieces = {
                block: block_sum(block, 1009, torch.float32) for block in assignment.blocks[transport.rank]
            }
            result = execute(schedule, transport, pieces, scratch=scratch)
            assert result is next(iter(pieces.values()))
            sizes.append(scratch.num_bytes)
        return sizes

    for sizes in TRANSPORTS["threads"](3, steps):
        assert len(set(sizes)) == 1
        assert sizes[0] > 0


def test_a_peer_that_maps_nothing_on_another_host_is_sent_the_bytes():
    """Ranks 0 and 1 see each other's memory, rank 2 is elsewhere."""

    assignment = even(8, 3)
    reduce = run_sum(direct(assignment), assignment, 1009, torch.float32)
    world = ThreadWorld(3, hosts=((0, 1), (2,)))
    assert world.run(reduce) == [bits(expected_sum(8, 1009, torch.float32))] * 3
    four = even(8, 4)
    reduce = run_sum(pairs(four), four, 1009, torch.float32)
    world = ThreadWorld(4, hosts=((0, 1), (2, 3)))
    assert world.run(reduce) == [bits(expected_sum(8, 1009, torch.float32))] * 4


HOSTS = {
    "two of two": ((0, 1), (2, 3)),
    "three and one": ((0, 1, 2), (3,)),
    "interleaved": ((0, 2), (1, 3)),
    "one each": ((0,), (1,), (2,), (3,)),
    "one host": ((0, 1, 2, 3),),
    "two, one, one": ((0, 1), (2,), (3,)),
}
SHARES = {
    "even": even(8, 4),
    "odd": even(11, 4),
    "uneven": assign(16, [9, 1, 5, 1]),
    "idle": assign(5, [2, 0, 3, 0], allow_idle=True),
    "idle host": assign(4, [0, 0, 3, 1], allow_idle=True),
    "one has all": assign(4, [0, 4, 0, 0], allow_idle=True),
    "one micro-batch": even(1, 4),
}


@pytest.mark.parametrize("assignment", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_hierarchical_exchange_has_the_bits_of_the_tree_on_any_hosts(hosts, assignment):
    schedule = hierarchical(assignment, hosts)
    verify(schedule)
    for dtype, size in ((torch.float32, 0), (torch.float32, 1), (torch.float64, 67), (torch.bfloat16, 1009)):
        expected = [bits(expected_sum(assignment.num_micro_batches, size, dtype))] * 4
        for world in (ThreadWorld(4), ThreadWorld(4, hosts=hosts)):

            def twice(transport, dtype=dtype, size=size):
                reduce = run_sum(schedule, assignment, size, dtype)
                assert reduce(transport) == reduce(transport)
                return reduce(transport)

            assert world.run(twice) == expected, (dtype, size)


@settings(max_examples=60, deadline=None)
@given(shares=st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any), data=st.data())
def test_hierarchical_exchange_is_proved_for_any_shares_and_hosts(shares, data):
    places = data.draw(st.lists(st.integers(0, 3), min_size=len(shares), max_size=len(shares)))
    by_host = [tuple(rank for rank, at in enumerate(places) if at == host) for host in range(4)]
    hosts = tuple(ranks for ranks in by_host if ranks)
    verify(hierarchical(assign(sum(shares), shares, allow_idle=True), hosts))


def test_each_rank_of_a_host_sends_its_part_of_the_hosts_sum_to_other_hosts():
    """Of two hosts of four ranks each: one chunk of eight out for the sum, one for the result."""
    schedule = hierarchical(even(8, 8), ((0, 1, 2, 3), (4, 5, 6, 7)))
    for rank in range(8):
        sent = [
            each
            for index in range(schedule.num_rounds)
            for each in schedule.round(rank, index).transfers
            if isinstance(each, Send) and (each.peer < 4) != (rank < 4)
        ]
        assert len(sent) == 2
        assert schedule.num_chunks == 8


@pytest.mark.parametrize(
    ("pieces", "out", "message"),
    [
        ({}, None, "begins with"),
        ({Block(0, 4): torch.ones(2)}, None, "begins with"),
        ({Block(0, 8): torch.ones(2, 2)}, None, "flat, contiguous tensors"),
        ({Block(0, 8): torch.ones(4)[::2]}, None, "flat, contiguous tensors"),
        ({Block(0, 8): torch.ones(4)}, torch.ones(5), "of one size and dtype"),
        ({Block(0, 8): torch.ones(4)}, torch.ones(4).double(), "of one size and dtype"),
    ],
)
def test_pieces_that_do_not_fit_the_schedule_are_refused(pieces, out, message):
    with pytest.raises(UsageError, match=message):
        execute(direct(even(8, 1)), LocalTransport(), pieces, out=out)


def test_a_schedule_for_another_world_is_refused():
    with pytest.raises(UsageError, match="for 2 ranks can't run on 1"):
        execute(direct(even(8, 2)), LocalTransport(), {Block(0, 4): torch.ones(1)})


def test_an_idle_rank_must_say_where_the_result_goes():
    assignment = assign(4, [4, 0], allow_idle=True)

    def forget(transport):
        pieces = {block: torch.ones(3) for block in assignment.blocks[transport.rank]}
        if transport.rank == 1:
            with pytest.raises(UsageError, match="must say with out="):
                execute(direct(assignment), transport, pieces)

    TRANSPORTS["threads"](2, forget)
