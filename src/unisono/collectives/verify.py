"""Proof that a schedule does what it says, without moving a byte.

All ranks walk through the rounds in step, with symbols in place of tensors. For an exact schedule the symbol of
a piece is the `Block` it must be the sum of, and an addition is legal only if its operands are the two halves
of a node of the tree: addition of two numbers commutes in IEEE arithmetic, so that, and nothing else, fixes the
bits. For others it is the set of initial pieces in the sum, none of which may be there twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from unisono.collectives.schedule import Add, Exchange, Receive, Round, Schedule, Send
from unisono.errors import UnisonoError
from unisono.grid import Block

Symbol = Hashable
_Key = tuple[Hashable, int]


class ScheduleError(UnisonoError):
    """A schedule is wrong. The message names rank, round and operation."""


@dataclass(frozen=True)
class _Place:
    """Where in a schedule something was found."""

    schedule: Schedule
    rank: int
    index: int

    def error(self, operation: object, problem: str) -> ScheduleError:
        return ScheduleError(
            f"schedule {self.schedule.name!r}, rank {self.rank}, round {self.index}, {operation}: {problem}"
        )


def verify(schedule: Schedule) -> None:
    """Raise a `ScheduleError` unless every rank ends with the result in every chunk, and nothing is amiss.

    Cost: time and memory in proportion to all operations of all ranks; meant for up to some hundred ranks.
    """
    held = [_start(schedule, rank) for rank in range(schedule.world_size)]
    for index in range(schedule.num_rounds):
        places = [_Place(schedule, rank, index) for rank in range(schedule.world_size)]
        rounds = [schedule.round(rank, index) for rank in range(schedule.world_size)]
        _transfer(places, rounds, held)
        for place, step in zip(places, rounds, strict=True):
            for add in step.adds:
                _add(place, add, held[place.rank])
    _check_end(schedule, held)


def _start(schedule: Schedule, rank: int) -> dict[_Key, Symbol]:
    """Return what a rank holds at the start: every piece is the symbol of itself."""
    return {
        (piece, chunk): piece if schedule.exact else frozenset([piece])
        for piece in schedule.initial(rank)
        for chunk in range(schedule.num_chunks)
    }


def _transfer(places: list[_Place], rounds: list[Round], held: list[dict[_Key, Symbol]]) -> None:
    """Do the transfers of one round. What arrives was held by its sender when the round began."""
    sent: defaultdict[tuple[int, int], list[tuple[Send, Symbol]]] = defaultdict(list)
    awaited: defaultdict[tuple[int, int], list[Receive]] = defaultdict(list)
    offers: dict[tuple[int, int], list[tuple[Exchange, Symbol]]] = {}
    for place, step in zip(places, rounds, strict=True):
        _check_peers(place, step)
        for each in step.transfers:
            if isinstance(each, Send):
                sent[place.rank, each.peer].append((each, _symbol(place, each, each.piece, held[place.rank])))
            elif isinstance(each, Receive):
                awaited[each.peer, place.rank].append(each)
            else:
                offer = (each, _symbol(place, each, each.mine, held[place.rank]))
                offers.setdefault((place.rank, each.peer), []).append(offer)
    for source, target in sorted({*sent, *awaited}):
        _match(places[source], places[target], sent[source, target], awaited[source, target], held[target])
    for rank, peer in offers:
        _match_exchanges(places[rank], offers[rank, peer], offers.get((peer, rank), []), held[rank])


def _match(
    source: _Place,
    target: _Place,
    sent: list[tuple[Send, Symbol]],
    awaited: list[Receive],
    held: dict[_Key, Symbol],
) -> None:
    """Pair up sends and receives between two ranks, in order."""
    common = min(len(sent), len(awaited))
    if len(sent) != len(awaited):
        extra = sent[common][0] if len(sent) > common else awaited[common]
        raise (source if len(sent) > common else target).error(
            extra,
            f"has no counterpart: rank {source.rank} sends {len(sent)}, rank {target.rank} receives "
            f"{len(awaited)}",
        )
    for (send, symbol), receive in zip(sent, awaited, strict=True):
        if (send.piece, send.chunk) != (receive.piece, receive.chunk):
            raise target.error(receive, f"is matched by {send} of rank {source.rank}")
        if receive.piece == target.schedule.result:
            _check_unsent(target, receive)
        _hold(target, receive.piece, receive.chunk, symbol, held)


def _match_exchanges(
    place: _Place,
    mine: list[tuple[Exchange, Symbol]],
    theirs: list[tuple[Exchange, Symbol]],
    held: dict[_Key, Symbol],
) -> None:
    if len(mine) != len(theirs):
        raise place.error(mine[0][0], f"the peer does {len(theirs)} exchanges, expected {len(mine)}")
    for (exchange, symbol), (other, peer_symbol) in zip(mine, theirs, strict=True):
        expected = Exchange(exchange.theirs, exchange.mine, exchange.out, exchange.chunk, place.rank)
        if other != expected:
            raise place.error(exchange, f"the peer does {other}, expected {expected}")
        del held[exchange.mine, exchange.chunk]
        total = _sum(place, exchange, symbol, peer_symbol)
        _hold_sum(place, exchange, total, held)


def _check_peers(place: _Place, step: Round) -> None:
    """Check that every peer exists, and that exchanges are with one peer only."""
    for each in step.transfers:
        if each.peer == place.rank or not 0 <= each.peer < place.schedule.world_size:
            raise place.error(each, f"there is no peer {each.peer}")
    exchanges = [each for each in step.transfers if isinstance(each, Exchange)]
    if len({each.peer for each in exchanges}) > 1:
        raise place.error(exchanges[-1], "exchanges with more than one peer in one round")


def _check_unsent(place: _Place, receive: Receive) -> None:
    """Check that memory which the result arrives in is not being sent in the same round."""
    for each in place.schedule.round(place.rank, place.index).transfers:
        if isinstance(each, Send) and each.chunk == receive.chunk:
            raise place.error(each, f"is sent while the result of chunk {receive.chunk} arrives")


def _symbol(
    place: _Place, operation: Send | Exchange | Add, piece: Hashable, held: dict[_Key, Symbol]
) -> Symbol:
    """Return what a held piece stands for."""
    chunk = operation.chunk
    if (piece, chunk) not in held:
        raise place.error(operation, f"chunk {chunk} of {piece} is not held; held are {_sorted_text(held)}")
    return held[piece, chunk]


def _add(place: _Place, add: Add, held: dict[_Key, Symbol]) -> None:
    left = _symbol(place, add, add.left, held)
    right = _symbol(place, add, add.right, held)
    if add.left == add.right:
        raise place.error(add, "adds a piece to itself")
    del held[add.left, add.chunk], held[add.right, add.chunk]
    _hold_sum(place, add, _sum(place, add, left, right), held)


def _sum(place: _Place, operation: object, left: Symbol, right: Symbol) -> Symbol:
    """Return the symbol of a sum, or raise if it must not be formed."""
    if not place.schedule.exact:
        assert isinstance(left, frozenset)
        assert isinstance(right, frozenset)
        if left & right:
            raise place.error(operation, f"counts {sorted(map(str, left & right))} twice")
        return left | right
    if isinstance(left, Block) and isinstance(right, Block):
        low, high = sorted((left, right))
        node = Block(low.start, high.stop)
        if low.stop == high.start and node.halves() == (low, high):
            return node
    raise place.error(operation, f"{left} and {right} are not the halves of a node of the tree")


def _hold_sum(place: _Place, operation: Add | Exchange, total: Symbol, held: dict[_Key, Symbol]) -> None:
    if place.schedule.exact and operation.out != total:
        raise place.error(operation, f"forms {total}, but calls it {operation.out}")
    _hold(place, operation.out, operation.chunk, total, held)


def _hold(place: _Place, piece: Hashable, chunk: int, symbol: Symbol, held: dict[_Key, Symbol]) -> None:
    """Note that a rank holds a piece now. The result ends the life of all other pieces of its chunk."""
    if (piece, chunk) in held:
        raise place.error(piece, f"chunk {chunk} is held already")
    if piece == place.schedule.result:
        for key in [key for key in held if key[1] == chunk]:
            del held[key]
    held[piece, chunk] = symbol


def _check_end(schedule: Schedule, held: list[dict[_Key, Symbol]]) -> None:
    every: Symbol = schedule.result
    if not schedule.exact:
        every = frozenset(piece for rank in range(schedule.world_size) for piece in schedule.initial(rank))
    for rank, pieces in enumerate(held):
        for chunk in range(schedule.num_chunks):
            place = _Place(schedule, rank, schedule.num_rounds)
            found = pieces.get((schedule.result, chunk))
            if found is None:
                raise place.error("end", f"chunk {chunk} of the result {schedule.result} is missing")
            if found != every:
                raise place.error("end", f"chunk {chunk} of the result is {found}, expected {every}")


def _sorted_text(held: dict[_Key, Symbol]) -> str:
    """Return what is held, for an error message."""
    return ", ".join(sorted(f"{piece} chunk {chunk}" for piece, chunk in held)[:8]) or "nothing"
