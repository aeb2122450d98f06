"""What every transport promises, tried on every transport."""

from __future__ import annotations

import threading

import pytest
import torch

from unisono.errors import TransportError, UsageError, WorkerLostError
from unisono.transport.memory_files import page_bytes
from worlds import TRANSPORTS, WORLD_SIZES, alone

WORLDS = [(name, size) for name in TRANSPORTS for size in WORLD_SIZES]
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
SURVIVING = ("threads", "mapped", "shared")
SIZES = (0, 1, 1009, 70_001)


@pytest.fixture(params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def world(request):
    """Run a function on every rank of one kind of world: ``world(function) -> results``."""
    name, size = request.param
    return lambda function: TRANSPORTS[name](size, function)


@pytest.fixture(params=TRANSPORTS)
def run(request):
    """Run a function on every rank: ``run(world_size, function) -> results``."""
    return TRANSPORTS[request.param]


def sample(rank, size, dtype, salt=0):
    """Tensors that differ by rank and salt and are the same whoever makes them."""
    generator = torch.Generator().manual_seed(1000 * rank + salt)
    values = torch.randint(-100, 100, (size,), generator=generator)
    return (values / 7).to(dtype) if dtype.is_floating_point or dtype.is_complex else values.to(dtype)


def same_bits(left, right):
    return left.dtype == right.dtype and left.numpy(force=True).tobytes() == right.numpy(force=True).tobytes()


def bits(tensor):
    """The bytes of a tensor, whatever its dtype."""
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def test_every_rank_receives_what_every_other_sent_for_any_size_and_dtype(world):
    def exchange(transport):
        peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
        for dtype in DTYPES:
            for size in SIZES[: 3 if dtype is not torch.float32 else 4]:
                mine = sample(transport.rank, size, dtype)
                received = {peer: torch.zeros(size, dtype=dtype) for peer in peers}
                transport.start([(peer, mine) for peer in peers], list(received.items())).wait()
                for peer, tensor in received.items():
                    assert torch.equal(tensor, sample(peer, size, dtype)), (dtype, size, peer)
        return True

    assert all(world(exchange))


def test_messages_of_different_sizes_arrive_in_the_order_in_which_they_were_posted(run):
    sizes = [3, 0, 50_000, 3, 3, 1, 0, 50_000, 2]

    def exchange(transport):
        peer = 1 - transport.rank
        mine = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
        received = [torch.empty(size) for size in sizes]
        # In one call for one rank, in many for the other: only the order counts.
        works = [
            transport.start([(peer, tensor) for tensor in mine], [(peer, tensor) for tensor in received])
        ]
        for work in works:
            work.wait()
        assert all(torch.equal(left, right) for left, right in zip(mine, received, strict=True))

    run(2, exchange)


def test_work_may_be_waited_for_later_and_twice(run):
    def exchange(transport):
        peer = 1 - transport.rank
        received = [torch.empty(5) for _ in range(3)]
        mine = [torch.full((5,), float(number)) for number in range(3)]
        works = [transport.start([(peer, mine[number])], [(peer, received[number])]) for number in range(3)]
        for work in works:
            work.wait()
            work.wait()
        assert [tensor[0].item() for tensor in received] == [0.0, 1.0, 2.0]

    run(2, exchange)


def test_all_reduce_adds_integers_exactly_and_floats_closely_on_all_ranks_alike(world):
    def reduce(transport):
        results = []
        for dtype in DTYPES:
            if dtype is torch.bool:
                continue
            for size in SIZES[:3]:
                tensor = sample(transport.rank, size, dtype)
                transport.all_reduce(tensor).wait()
                wide = torch.complex128 if dtype.is_complex else torch.float64
                expected = sum(sample(rank, size, dtype).to(wide) for rank in range(transport.world_size))
                if not dtype.is_floating_point and not dtype.is_complex:
                    # Small integers wrap around; so does the expected figure.
                    expected = expected.to(torch.int64).to(dtype)
                    assert torch.equal(tensor, expected), (dtype, size)
                else:
                    rounding = 1e-1 if dtype.itemsize == 2 else 1e-4
                    torch.testing.assert_close(tensor.to(wide), expected, rtol=rounding, atol=2 * rounding)
                results.append(bits(tensor))
        return results

    results = world(reduce)
    assert all(each == results[0] for each in results)


def test_all_reduce_of_booleans_says_whether_any_rank_has_it(world):
    def reduce(transport):
        tensor = torch.zeros(transport.world_size + 1, dtype=torch.bool)
        tensor[transport.rank] = tensor[0] = True
        transport.all_reduce(tensor).wait()
        return bits(tensor)

    for result in (results := world(reduce)):
        assert result == bytes([1] * len(results) + [0])


def test_pair_sum_has_the_bits_of_one_addition_on_both_ranks_for_any_size_and_dtype(run):
    def pair(transport):
        peer = transport.rank ^ 1
        for dtype in DTYPES:
            for size in SIZES:
                tensor = sample(transport.rank, size, dtype)
                expected = tensor + sample(peer, size, dtype)
                transport.pair_sum(tensor, peer).wait()
                assert bits(tensor) == bits(expected), (dtype, size)
        return True

    assert all(run(4, pair))


def test_pair_sums_with_several_peers_one_after_the_other_give_the_tree(run):
    def pairs(transport):
        tensor = sample(transport.rank, 70_001, torch.float32)
        for distance in (1, 2, 4):
            transport.pair_sum(tensor, transport.rank ^ distance).wait()
        return bits(tensor)

    leaves = [sample(rank, 70_001, torch.float32) for rank in range(8)]
    expected = ((leaves[0] + leaves[1]) + (leaves[2] + leaves[3])) + (
        (leaves[4] + leaves[5]) + (leaves[6] + leaves[7])
    )
    assert run(8, pairs) == [bits(expected)] * 8


def test_abort_wakes_a_waiter_and_fails_all_that_follows_with_the_reason(run):
    reason = RuntimeError("the launcher says stop")

    def wait(transport):
        if transport.rank == 0:
            return
        work = transport.start([], [(0, torch.empty(3))])
        abort = threading.Thread(target=transport.abort, args=(reason,))
        abort.start()
        with pytest.raises(RuntimeError, match="the launcher says stop"):
            work.wait()
        abort.join()
        with pytest.raises(RuntimeError, match="the launcher says stop"):
            transport.start([(0, torch.empty(3))], []).wait()
        with pytest.raises(RuntimeError, match="the launcher says stop"):
            transport.all_reduce(torch.ones(2)).wait()

    def hold(transport):
        if transport.rank == 1:
            wait(transport)
            done.set()
        else:
            done.wait(20)

    done = threading.Event()
    run(2, hold)


def test_a_peer_that_is_gone_is_an_error_for_who_waits_for_it(run):
    def wait(transport):
        if transport.rank == 1:
            return None
        with pytest.raises(WorkerLostError, match=f"rank {transport.rank}: lost"):
            transport.start([], [(1, torch.empty(3))]).wait()
        return True

    assert run(2, wait) == [True, None]


@pytest.mark.parametrize("name", SURVIVING)
def test_those_who_are_left_go_on_without_a_lost_peer(name):
    def go_on(transport):
        assert transport.survives_lost_peer
        if transport.rank == 1:
            return None
        peer = 2 - transport.rank
        with pytest.raises(WorkerLostError, match=f"rank {transport.rank}: lost rank 1"):
            transport.start([], [(1, torch.empty(3))]).wait()
        received = torch.empty(3)
        transport.start([(peer, torch.full((3,), float(transport.rank)))], [(peer, received)]).wait()
        return received.tolist()

    assert TRANSPORTS[name](3, go_on) == [[2.0] * 3, None, [0.0] * 3]


def test_closing_does_not_wait_for_pending_work_and_may_be_repeated(run):
    def close(transport):
        transport.start([], [((transport.rank + 1) % 2, torch.empty(3))])
        transport.close()
        transport.close()
        with pytest.raises(TransportError, match="closed"):
            transport.all_reduce(torch.ones(1)).wait()

    run(2, close)


def test_there_is_no_message_to_oneself_or_to_a_rank_outside(world):
    def misuse(transport):
        for peer in (transport.rank, transport.world_size, -1):
            with pytest.raises(UsageError, match=f"no peer {peer}"):
                transport.start([(peer, torch.empty(1))], []).wait()

    world(misuse)


def test_a_buffer_is_the_same_until_its_size_changes_and_views_show_it(run):
    def view(transport):
        peer = 1 - transport.rank
        buffer = transport.allocate("gradients", 10, torch.float32)
        assert not buffer.any()
        buffer.fill_(transport.rank + 1)
        signal = torch.empty(0)
        transport.start([(peer, signal)], [(peer, signal)]).wait()
        seen = transport.peer_view(peer, "gradients")
        assert transport.maps(peer) == transport.maps_peers == (seen is not None)
        if seen is not None:
            assert seen.tolist() == [peer + 1.0] * 10
            assert transport.allocate("gradients", 10, torch.float32).data_ptr() == buffer.data_ptr()
        transport.start([(peer, signal)], [(peer, signal)]).wait()
        assert transport.allocate("gradients", 11, torch.float32).numel() == 11

    run(2, view)


def test_a_buffer_may_be_published_under_other_names(run):
    def view(transport):
        peer = 1 - transport.rank
        signal = torch.empty(0)

        def seen(key):
            transport.start([(peer, signal)], [(peer, signal)]).wait()
            found = transport.peer_view(peer, key)
            values = None if found is None else found.tolist()
            transport.start([(peer, signal)], [(peer, signal)]).wait()
            return values

        sums = transport.allocate("sums", 3, torch.float32).fill_(1)
        root = transport.allocate("root", 3, torch.float32).fill_(2)
        maps = transport.maps_peers
        assert transport.publish("root", sums) == maps
        assert seen("root") == ([1.0] * 3 if maps else None)
        again = transport.allocate("root", 3, torch.float32)
        assert not maps or again.data_ptr() == root.data_ptr()
        assert seen("root") == ([2.0] * 3 if maps else None)
        assert seen("sums") == ([1.0] * 3 if maps else None)
        assert not transport.publish("other", torch.ones(3))
        assert seen("other") is None
        transport.allocate("sums", 5, torch.float64).fill_(7)
        assert seen("sums") == ([7.0] * 5 if maps else None)
        return True

    assert run(2, view) == [True, True]


def test_alone_sums_are_what_they_were_and_abort_is_heard():
    def use(transport):
        tensor = torch.arange(3)
        transport.all_reduce(tensor).wait()
        assert tensor.tolist() == [0, 1, 2]
        with pytest.raises(UsageError, match="no peer 1"):
            transport.start([(1, tensor)], [])
        transport.abort(RuntimeError("stop"))
        with pytest.raises(RuntimeError, match="stop"):
            transport.all_reduce(tensor).wait()

    alone(1, use)


def test_ranks_of_a_host_have_common_memory_or_none_at_all(world):
    page = page_bytes()

    def use(transport):
        memory = transport.common_memory(3 * page)
        if memory is None:
            return None
        (near,) = (ranks for ranks in transport.hosts if transport.rank in ranks)
        word = 1 + near[0]

        def meet():
            transport.all_reduce(torch.zeros(1)).wait()

        memory.shared[transport.rank] = 1 + transport.rank
        meet()
        seen = memory.own[: transport.world_size].tolist()
        assert seen == [1 + rank if rank in near else 0 for rank in range(transport.world_size)]
        memory.own[page + 5] = 7
        meet()
        memory.shared[page:] = word
        meet()
        assert memory.written_pages() == [1]
        assert memory.own[[page + 4, page + 5, 2 * page]].tolist() == [0, 7, word], "a copy of its page"
        memory.drop_written()
        assert memory.written_pages() == []
        assert memory.own[page:].tolist() == [word] * 2 * page
        return near

    found = world(use)
    assert found[0] is None or [rank in near for rank, near in enumerate(found)] == [True] * len(found)
    assert len({near is None for near in found}) == 1
