"""Hierarchical exchange: sums are formed within each host, then between hosts, and spread the same way back.

Each chunk has an owner on every host, and one of these owners is the chunk's root. Cost per rank, for H hosts of
L ranks each, n bytes and one block a rank: within the host as a direct exchange of L ranks; between hosts about
2 n (H - 1) / (H L) bytes out and as many in, so that all ranks of a host share its network. Works for any
assignment; moves least between hosts if the blocks of a host are whole subtrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from unisono.collectives.over_blocks import OverBlocks
from unisono.collectives.schedule import Add, Receive, Round, Send, Transfer
from unisono.grid import Assignment, Block

Sum = tuple[Block, Block, Block]
"""Left, right and the node they add up to."""


@dataclass(frozen=True)
class Hierarchical(OverBlocks):
    """The schedule of a hierarchical exchange.

    Args:
        assignment: who has which blocks.
        hosts: the ranks of each host; every rank is on one.
    """

    hosts: tuple[tuple[int, ...], ...]
    name = "hierarchical"
    in_place = False
    num_rounds = 4

    @property
    def num_chunks(self) -> int:
        return len(self.hosts) * max(map(len, self.hosts))

    def round(self, rank: int, index: int) -> Round:
        host = self._host_of[rank]
        if index == 0:
            sums, _ = self._of_hosts[host]
            return Round(tuple(self._gather(rank, host)), self._additions(sums, self._owned(rank, host)))
        if index == 1:
            rooted = [chunk for chunk in self._owned(rank, host) if self._root(chunk) == host]
            return Round(tuple(self._gather_hosts(rank, host)), self._additions(self._above_hosts, rooted))
        return Round(tuple(self._spread_hosts(rank, host) if index == 2 else self._spread(rank, host)))

    # --- who has what

    @cached_property
    def _host_of(self) -> dict[int, int]:
        return {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}

    def _owner(self, host: int, chunk: int) -> int:
        ranks = self.hosts[host]
        return ranks[chunk // len(self.hosts) % len(ranks)]

    def _root(self, chunk: int) -> int:
        """Return the host where a chunk of the result is formed."""
        return chunk % len(self.hosts)

    def _owned(self, rank: int, host: int) -> list[int]:
        return [chunk for chunk in range(self.num_chunks) if self._owner(host, chunk) == rank]

    # --- the rounds

    def _gather(self, rank: int, host: int) -> Iterator[Transfer]:
        """Give each owner on the host its chunks of my blocks, and take my chunks of the others' blocks."""
        for peer in self.hosts[host]:
            if peer == rank:
                continue
            for chunk in self._owned(peer, host):
                for block in self.initial(rank):
                    yield Send(block, chunk, peer)
            for chunk in self._owned(rank, host):
                for block in self.initial(peer):
                    yield Receive(block, chunk, peer)

    def _gather_hosts(self, rank: int, host: int) -> Iterator[Transfer]:
        """Give each root the host's sums of its chunks, and take those of the chunks that have their root here."""
        for chunk in self._owned(rank, host):
            if self._root(chunk) != host:
                for node in self._of_hosts[host][1]:
                    yield Send(node, chunk, self._owner(self._root(chunk), chunk))
                continue
            for other in range(len(self.hosts)):
                if other != host:
                    for node in self._of_hosts[other][1]:
                        yield Receive(node, chunk, self._owner(other, chunk))

    def _spread_hosts(self, rank: int, host: int) -> Iterator[Transfer]:
        """Give the result to the owner on each other host. A host that had all from the start needs nothing."""
        for chunk in self._owned(rank, host):
            if self._root(chunk) == host:
                for other in range(len(self.hosts)):
                    if other != host and self.result not in self._of_hosts[other][1]:
                        yield Send(self.result, chunk, self._owner(other, chunk))
            elif self.result not in self._of_hosts[host][1]:
                yield Receive(self.result, chunk, self._owner(self._root(chunk), chunk))

    def _spread(self, rank: int, host: int) -> Iterator[Transfer]:
        """Give the result to all on the host. Who had all from the start needs nothing."""
        for peer in self.hosts[host]:
            if peer == rank:
                continue
            if self.result not in self.initial(peer):
                for chunk in self._owned(rank, host):
                    yield Send(self.result, chunk, peer)
            if self.result not in self.initial(rank):
                for chunk in self._owned(peer, host):
                    yield Receive(self.result, chunk, peer)

    # --- the sums

    @staticmethod
    def _additions(sums: tuple[Sum, ...], chunks: list[int]) -> tuple[Add, ...]:
        return tuple(Add(left, right, node, chunk) for chunk in chunks for left, right, node in sums)

    @cached_property
    def _of_hosts(self) -> list[tuple[tuple[Sum, ...], list[Block]]]:
        """For each host the sums that it can form alone, and the nodes that it has then."""
        given = {block: rank for rank, blocks in enumerate(self.assignment.blocks) for block in blocks}

        def within(node: Block, ranks: tuple[int, ...], sums: list[Sum]) -> list[Block]:
            if node in given:
                return [node] if given[node] in ranks else []
            left, right = node.halves()
            nodes = within(left, ranks, sums) + within(right, ranks, sums)
            if nodes != [left, right]:
                return nodes
            sums.append((left, right, node))
            return [node]

        found = []
        for ranks in self.hosts:
            sums: list[Sum] = []
            nodes = within(self.result, ranks, sums)
            found.append((tuple(sums), nodes))
        return found

    @cached_property
    def _above_hosts(self) -> tuple[Sum, ...]:
        """The sums above the nodes of all hosts, children before parents."""
        given = {node for _, nodes in self._of_hosts for node in nodes}

        def above(node: Block) -> Iterator[Sum]:
            if node not in given:
                left, right = node.halves()
                yield from above(left)
                yield from above(right)
                yield left, right, node

        return tuple(above(self.result))


def hierarchical(assignment: Assignment, hosts: tuple[tuple[int, ...], ...]) -> Hierarchical:
    """Return the hierarchical exchange for `assignment`, idle ranks included."""
    return Hierarchical(assignment, hosts)
