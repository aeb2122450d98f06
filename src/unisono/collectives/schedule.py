"""What a schedule is: who sends which piece to whom in which round, and which two pieces are added.

A piece is a named tensor that spans all elements; a chunk is a range of elements of every piece. Schedules
whose sum follows the summation tree name their pieces by the `Block` they are the sum of.

A schedule is a pure function of (rank, round), generated when asked, so that no one ever holds the rounds of
all ranks. It moves nothing itself: `execute` runs it on a transport, `verify` proves it without one.

Rules, which `verify` checks and `execute` relies on:

- In a round all transfers come first, then the additions, in order. What is sent was held when the round
  began.
- Between one ordered pair of ranks, sends and receives of a round match in order.
- `Add` and `Exchange` use up their operands, whose memory then holds the sum.
- Once a rank holds a chunk of the result, it holds no other piece of that chunk.
- All exchanges of one rank in one round are with one peer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

CHUNK_ALIGNMENT = 64
"""Elements. Chunks begin at multiples of it, so that vectorised kernels see aligned, whole vectors."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a chunk of a piece to a peer. The piece stays held."""

    piece: Hashable
    chunk: int
    peer: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive a chunk of a piece from a peer."""

    piece: Hashable
    chunk: int
    peer: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Form ``out = mine + theirs`` together with a peer, which does the same and ends with the same bits."""

    mine: Hashable
    theirs: Hashable
    out: Hashable
    chunk: int
    peer: int


@dataclass(frozen=True, slots=True)
class Add:
    """Form ``out = left + right`` out of two held pieces."""

    left: Hashable
    right: Hashable
    out: Hashable
    chunk: int


Transfer = Send | Receive | Exchange


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank does in one round."""

    transfers: tuple[Transfer, ...] = ()
    adds: tuple[Add, ...] = ()


class Schedule(Protocol):
    """A collective operation as data.

    Attributes:
        name: for people.
        exact: whether the result is the sum in the order of the summation tree, so that its bits depend on
            nothing else.
        in_place: whether a chunk of what a rank holds at the start is read by no other rank than the one from
            which it gets that chunk of the result. Then the result may take the place of such a piece.
        result: the piece with which every rank ends, in every chunk.
    """

    @property
    def name(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def world_size(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def num_rounds(self) -> int: ...
    @property
    def result(self) -> Hashable: ...

    def initial(self, rank: int) -> tuple[Hashable, ...]:
        """Return the pieces that `rank` holds at the start, in every chunk."""
        ...

    def round(self, rank: int, index: int) -> Round:
        """Return what `rank` does in round `index`. *Pure.*"""
        ...


def chunk_bounds(num_elements: int, num_chunks: int, chunk: int) -> tuple[int, int]:
    """Return the first element of a chunk and the one after its last. Chunks may be empty. *Pure.*"""
    size = -(-num_elements // (num_chunks * CHUNK_ALIGNMENT)) * CHUNK_ALIGNMENT
    return min(chunk * size, num_elements), min((chunk + 1) * size, num_elements)
