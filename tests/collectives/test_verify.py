"""The verifier finds what is wrong with a schedule, and says where."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from unisono.collectives.schedule import Add, Exchange, Receive, Round, Send, chunk_bounds
from unisono.collectives.verify import ScheduleError, verify
from unisono.grid import Block

A, B, C, D = (Block(number, number + 1) for number in range(4))
AB, CD, BC, ALL = Block(0, 2), Block(2, 4), Block(1, 3), Block(0, 4)


@dataclass
class Table:
    """A schedule written out: start[rank] and rounds[index][rank]."""

    start: list
    rounds: list
    result: object = AB
    exact: bool = True
    num_chunks: int = 1
    name: str = field(default="table")

    @property
    def world_size(self):
        return len(self.start)

    @property
    def num_rounds(self):
        return len(self.rounds)

    def initial(self, rank):
        return tuple(self.start[rank])

    def round(self, rank, index):
        return self.rounds[index][rank]


SWAP = [[Round((Exchange(A, B, AB, 0, 1),)), Round((Exchange(B, A, AB, 0, 0),))]]
SEND_BACK = [
    [Round((Receive(B, 0, 1),), (Add(A, B, AB, 0),)), Round((Send(B, 0, 0),))],
    [Round((Send(AB, 0, 1),)), Round((Receive(AB, 0, 0),))],
]


@pytest.mark.parametrize("rounds", [SWAP, SEND_BACK])
def test_a_right_schedule_passes(rounds):
    verify(Table([[A], [B]], rounds))


def alone(*adds):
    return [[Round((), adds)]]


WRONG = {
    "a piece that is not held is sent": (
        Table([[A], [B]], [[Round((Send(B, 0, 1),)), Round((Receive(B, 0, 0),))]]),
        "rank 0, round 0, Send.*chunk 0 of .*start=1.* is not held",
    ),
    "a receive has no send": (
        Table([[A], [B]], [[Round((Receive(B, 0, 1),)), Round()]]),
        "rank 0, round 0, Receive.*rank 1 sends 0, rank 0 receives 1",
    ),
    "a send has no receive": (
        Table([[A], [B]], [[Round((Send(A, 0, 1),)), Round()]]),
        "rank 0, round 0, Send.*rank 0 sends 1, rank 1 receives 0",
    ),
    "messages cross": (
        Table(
            [[A, B], [C]],
            [[Round((Send(A, 0, 1), Send(B, 0, 1))), Round((Receive(B, 0, 0), Receive(A, 0, 0)))]],
        ),
        "rank 1, round 0, Receive.*is matched by Send",
    ),
    "a peer does not exist": (Table([[A]], [[Round((Send(A, 0, 1),))]]), "there is no peer 1"),
    "two exchange different things": (
        Table(
            [[A], [B]],
            [[Round((Exchange(A, B, AB, 0, 1),)), Round((Exchange(B, A, ALL, 0, 0),))]],
        ),
        "the peer does Exchange.*expected",
    ),
    "one exchanges alone": (
        Table([[A], [B]], [[Round((Exchange(A, B, AB, 0, 1),)), Round()]]),
        "the peer does 0 exchanges",
    ),
    "the sum is not a node": (
        Table([[A, B, C]], alone(Add(B, C, BC, 0), Add(A, BC, Block(0, 3), 0)), Block(0, 3)),
        "are not the halves",
    ),
    "the sum has another name": (Table([[A, B]], alone(Add(A, B, ALL, 0))), "forms .* but calls it"),
    "an operand was used up": (
        Table([[A, B, C, D]], alone(Add(A, B, AB, 0), Add(A, B, AB, 0)), ALL),
        "round 0, Add.* is not held",
    ),
    "the result is missing": (Table([[A, B]], alone()), "rank 0, round 1, end: chunk 0 of the result"),
    "the result is missing in one chunk": (
        Table([[A, B]], alone(Add(A, B, AB, 0)), num_chunks=2),
        "chunk 1 of the result",
    ),
    "a piece is counted twice": (
        Table([["x", "y"], ["x"]], [], result="x", exact=False),
        "chunk 0 of the result is .*expected",
    ),
    "a sum counts a piece twice": (
        Table(
            [["x"], ["z"]],
            [
                [Round((Send("x", 0, 1),)), Round((Receive("x", 0, 0),), (Add("x", "z", "xz", 0),))],
                [Round((Receive("xz", 0, 1),), (Add("x", "xz", "sum", 0),)), Round((Send("xz", 0, 0),))],
            ],
            result="sum",
            exact=False,
        ),
        r"rank 0, round 1, Add.*counts \['x'\] twice",
    ),
    "the result arrives where a piece is being sent": (
        Table(
            [[A, B], [C]],
            [
                [Round((), (Add(A, B, AB, 0),)), Round()],
                [
                    Round((Send(AB, 0, 1), Receive(C, 0, 1))),
                    Round((Receive(AB, 0, 0), Send(C, 0, 0))),
                ],
            ],
        ),
        "is sent while the result of chunk 0 arrives",
    ),
}


@pytest.mark.parametrize(("schedule", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_schedule_is_refused(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)


def test_an_inexact_sum_must_have_every_piece_once():
    rounds = [[Round((), (Add("x", "y", "xy", 0), Add("xy", "z", "sum", 0)))]]
    verify(Table([["x", "y", "z"]], rounds, result="sum", exact=False))
    with pytest.raises(ScheduleError, match="expected"):
        verify(Table([["x", "y", "z"]], alone(Add("x", "y", "sum", 0)), result="sum", exact=False))


@pytest.mark.parametrize("num_elements", [0, 1, 63, 64, 65, 1009, 12_800])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 8])
def test_chunks_cover_all_elements_once_and_begin_at_multiples_of_64(num_elements, num_chunks):
    bounds = [chunk_bounds(num_elements, num_chunks, chunk) for chunk in range(num_chunks)]
    assert [position for start, stop in bounds for position in range(start, stop)] == list(
        range(num_elements)
    )
    assert all(start % 64 == 0 for start, stop in bounds if start < stop)
