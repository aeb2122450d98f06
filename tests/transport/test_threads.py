"""Ranks as threads: injected faults, and the mistakes that this transport finds."""

from __future__ import annotations

import pytest
import torch

from unisono.errors import DeadlineError, MismatchError, UsageError, WorkerLostError
from unisono.transport.threads import Delay, Drop, Lose, ThreadWorld


def ring(transport):
    """Three rounds in which everyone sends to the next and receives from the one before."""
    value = torch.tensor([float(transport.rank)])
    for _ in range(3):
        received = torch.empty(1)
        after, before = (
            (transport.rank + 1) % transport.world_size,
            (transport.rank - 1) % transport.world_size,
        )
        transport.start([(after, value)], [(before, received)]).wait()
        value = received
    return value.item()


def test_results_come_by_rank():
    assert ThreadWorld(4).run(ring) == [1.0, 2.0, 3.0, 0.0]


def test_a_world_can_be_used_again():
    world = ThreadWorld(3)
    assert world.run(ring) == world.run(ring) == [0.0, 1.0, 2.0]


def test_a_lost_rank_is_named_to_those_who_wait_for_it():
    with pytest.raises(WorkerLostError, match=r"lost rank 1 in .*: taken away at its operation 1"):
        ThreadWorld(3, faults=[Lose(rank=1, operation=1)]).run(ring)


def test_the_others_go_on_without_a_lost_rank():
    def pair_up(transport):
        if transport.rank == 1:
            transport.all_reduce(torch.ones(1)).wait()
        total = torch.ones(1)
        transport.pair_sum(total, 2 - transport.rank).wait()
        return total.item()

    assert ThreadWorld(3, faults=[Lose(rank=1, operation=0)]).run(pair_up) == [2.0, None, 2.0]


def test_an_all_reduce_without_a_lost_rank_is_an_error():
    with pytest.raises(WorkerLostError, match="lost rank 2 in an all-reduce"):
        ThreadWorld(3, faults=[Lose(rank=2, operation=0)]).run(
            lambda transport: transport.all_reduce(torch.ones(1)).wait()
        )


def test_a_delayed_message_arrives():
    assert ThreadWorld(2, faults=[Delay(rank=0, operation=1, delay_s=0.05)]).run(ring) == [1.0, 0.0]


def test_a_dropped_message_ends_at_the_deadline_which_says_for_whom():
    world = ThreadWorld(2, faults=[Drop(rank=0, operation=0)], timeout_s=0.2)
    with pytest.raises(DeadlineError, match=r"waited 0.2 s for ranks \[[01]\]"):
        world.run(ring)


def test_the_first_error_is_raised_and_not_its_consequences():
    def fail(transport):
        if transport.rank == 2:
            raise ValueError("row 17")
        return ring(transport)

    with pytest.raises(ValueError, match="row 17"):
        ThreadWorld(3).run(fail)


def test_a_message_of_another_size_is_a_mismatch():
    def exchange(transport):
        peer = 1 - transport.rank
        transport.start([(peer, torch.ones(4 + transport.rank))], [(peer, torch.empty(4))]).wait()

    with pytest.raises(MismatchError, match="rank 0: received 20 bytes from rank 1, expected 16"):
        ThreadWorld(2).run(exchange)


def test_an_all_reduce_of_different_shapes_is_a_mismatch():
    with pytest.raises(MismatchError, match="different kinds"):
        ThreadWorld(2).run(lambda transport: transport.all_reduce(torch.ones(4 + transport.rank)).wait())


def test_a_tensor_with_gaps_is_refused():
    with pytest.raises(UsageError, match="not contiguous"):
        ThreadWorld(2).run(lambda transport: transport.all_reduce(torch.ones(4, 4).t()[1:]).wait())


def test_a_send_is_finished_only_when_the_peer_has_it():
    def overwrite(transport):
        if transport.rank == 0:
            tensor = torch.ones(3)
            transport.start([(1, tensor)], []).wait()
            tensor.zero_()
            transport.start([(1, torch.empty(0))], []).wait()
            return None
        first, signal = torch.empty(3), torch.empty(0)
        transport.start([], [(0, first), (0, signal)]).wait()
        return first.tolist()

    assert ThreadWorld(2).run(overwrite) == [None, [1.0, 1.0, 1.0]]
