"""The gradients of one step on their way between workers: bucket by bucket, early or at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from unisono.collectives.gather import gather_tensors
from unisono.gradients.sparse_sums import join_sparse
from unisono.strategies.gradient_plan import GradientPlan
from unisono.strategies.joiner import Joiner


class Reduction:
    """Joins the partial sums of all workers, in the fixed order of the buckets.

    What is known of the final scale before the step is applied early: to each gradient as it is moved, or while
    buckets are joined. The rest is applied at the end.

    Args:
        joiner: runs the collectives.
        key: names the replica.

    Attributes:
        scales_leaves: whether gradients may be scaled one by one; the same on all ranks.
    """

    def __init__(self, joiner: Joiner, *, key: str) -> None:
        self.scales_leaves = True
        self._joiner = joiner
        self._key = key
        self._gradients: GradientPlan
        self._sent: dict[int, Callable[[], Tensor]] = {}
        self._complete: set[int] = set()
        self._num_sent = 0
        self._leaf_scale = 1.0
        self._early_scale = 1.0

    def begin(self, gradients: GradientPlan, *, factor: float, num_micro_batches: int) -> float:
        """Start a pass; return what each gradient is to be multiplied by as it is moved.

        Args:
            gradients: the plan of this step.
            factor: the part of the final scale that is known.
        """
        self._gradients = gradients
        suits = self.scales_leaves and self._suits_leaves(factor, num_micro_batches)
        self._leaf_scale = factor if suits else 1.0
        self._early_scale = factor / self._leaf_scale
        self._complete.clear()
        return self._leaf_scale

    def send(self, number: int) -> None:
        """Note that a bucket is complete, and send all that are, in their fixed order."""
        self._complete.add(number)
        while self._num_sent in self._complete:
            self._start(self._gradients.collector.partials(self._num_sent))

    def send_all(self) -> None:
        """Send all buckets, of a worker without micro-batches."""
        for number in range(len(self._gradients.buckets)):
            self.send(number)

    def send_blank_rest(self) -> None:
        """Send zeros for all buckets that others wait for, from a worker that gave the step up."""
        while self._num_sent < len(self._gradients.buckets):
            self._start(self._joiner.blank(self._gradients.buckets[self._num_sent]))

    def wait_for_unwanted(self) -> None:
        """Wait for sums that were sent early and then not needed: their memory is about to be used again."""
        for wait in self._sent.values():
            wait()
        self._sent.clear()
        self._num_sent = 0

    def finish(self, present: Sequence[bool], *, scale: float) -> None:
        """Join all buckets, times `scale`, and hand the gradients to the parameters. *Collective.*

        Args:
            present: for each parameter, whether any micro-batch has a gradient for it; all know it from the table.
            scale: the whole final scale.
        """
        for number, bucket in enumerate(self._gradients.buckets):
            if number not in self._sent and not any(present[slot.index] for slot in bucket.slots):
                continue
            first, last = (self._gradients.named[bucket.slots[at].index][0] for at in (0, -1))
            operation = f"reduce of bucket {number} ({first} .. {last})"
            total = self._joiner.collect(operation, self._joining(number, scale))
            self._gradients.collector.publish(number, total, present=present)
        if self._gradients.collector.sparse:
            self._finish_sparse(present, scale=scale)
        self._gradients.collector.end_step()

    def _finish_sparse(self, present: Sequence[bool], *, scale: float) -> None:
        """Join the sparse gradients, times `scale`, and hand them to the parameters. *Collective.*"""
        sums = {index: each for index, each in self._gradients.collector.sparse.items() if present[index]}
        parameters = [self._gradients.named[index][1] for index in sums]
        transport = self._joiner.transport
        gather = None if transport.world_size == 1 else partial(gather_tensors, transport)
        totals = self._joiner.collect(
            "reduce of sparse gradients",
            lambda: join_sparse(list(sums.values()), parameters, self._joiner.assignment, gather),
        )
        absent = dict.fromkeys(self._gradients.collector.sparse)
        self._gradients.collector.publish_sparse(absent | dict(zip(sums, totals, strict=True)), scale=scale)

    def _suits_leaves(self, factor: float, num_micro_batches: int) -> bool:
        """Whether the final factor is better applied to each gradient than to their sum. The same on all ranks.

        With two micro-batches that is never more work, and none while a gradient is moved anyway; with more it
        would be. A power of two is exact, but for what is too small; float16 has too many numbers of that kind.
        """
        return (
            num_micro_batches <= 2
            and math.frexp(factor)[0] == 0.5
            and all(bucket.dtype != torch.float16 for bucket in self._gradients.buckets)
        )

    def _start(self, partials: Mapping[Hashable, Tensor]) -> None:
        """Send the following bucket."""
        number = self._num_sent
        self._num_sent += 1
        self._sent[number] = self._joiner.start(
            partials, self._gradients.buckets[number], key=self._name(number), scale=self._early_scale
        )

    def _joining(self, number: int, scale: float) -> Callable[[], Tensor]:
        """Return what yields a bucket's sum times `scale`, sent before or not.

        The part of the scale that was known beforehand is applied while joining, also to what is sent now:
        both must be rounded alike.
        """
        rest = scale / (self._leaf_scale * self._early_scale)
        sent = self._sent.pop(number, None)

        def joined() -> Tensor:
            total = self._join(number) if sent is None else sent()
            return total.mul_(rest) if rest != 1.0 else total

        return joined

    def _join(self, number: int) -> Tensor:
        return self._joiner.join(
            self._gradients.collector.partials(number),
            self._gradients.buckets[number],
            key=self._name(number),
            scale=self._early_scale,
        )

    def _name(self, number: int) -> str:
        return f"{self._key}/bucket{number}"
