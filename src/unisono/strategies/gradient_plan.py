"""Which parameters are trained and which buckets their gradients travel in; planned anew when that changes."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from unisono.fingerprints import digest_of
from unisono.gradients.buckets import Bucket, plan_buckets
from unisono.gradients.collector import GradientCollector
from unisono.gradients.parameters import Named
from unisono.gradients.partial_sums import Allocate


@dataclass
class GradientPlan:
    """The buckets of one set of parameters.

    Args:
        named: the parameters, in an order that all workers share.
        buckets, collector: where their gradients go.
        signature: what tells this set from another, in this process.
        digest: is the same on all workers if they planned for the same.
        order: the order in which gradients become ready, if it was agreed on.
        next_order: the same, for the next step.
    """

    named: Named
    buckets: tuple[Bucket, ...]
    collector: GradientCollector
    signature: Sequence[object]
    digest: int
    order: Sequence[int] | None = None
    next_order: Sequence[int] | None = None


class Planner:
    """Makes the plans of one replica.

    Args:
        known: parameters that are known to be equal on all workers, trained or not.
        alone: whether there is nobody to agree with.
        sparse: ids of the parameters that are said to have sparse gradients.
        float32_sums: add up gradients of 16 bits in float32.
        rounds: whether they are rounded to 16 bits again afterwards.
        allocate: where the sums of each bucket get their buffers.
    """

    def __init__(
        self,
        known: Iterable[nn.Parameter],
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        alone: bool,
        sparse: Iterable[int] = (),
        float32_sums: bool = False,
        rounds: bool = True,
        allocate: Callable[[int], Allocate] | None = None,
    ) -> None:
        self._known = {id(parameter): weakref.ref(parameter) for parameter in known}
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._alone = alone
        self._float32_sums = float32_sums
        self._rounds = rounds
        self._allocate = allocate
        self._sparse = {key: self._known[key] for key in sparse if key in self._known}

    def plan(self, named: Named) -> GradientPlan:
        """Plan for parameters that were never planned for. Reads the values of those not known to be equal."""
        unknown = [(name, parameter) for name, parameter in named if not self._knows(parameter)]
        self._known |= {id(parameter): weakref.ref(parameter) for _, parameter in unknown}
        facts = [(name, parameter.shape, parameter.dtype) for name, parameter in named]
        values = "" if self._alone or not unknown else digest_of(unknown).hexdigest()
        plan = self._plan(named, digest=short_digest(facts, values), order=None)
        if self._alone:
            plan.collector.ready_order = None
        return plan

    def following(self, old: GradientPlan, named: Named) -> GradientPlan:
        """Return the plan of the next step: `old` itself if it still holds, else one in its place."""
        changed = signature_of(named) != old.signature
        if not changed and old.next_order is None:
            return old
        old.collector.clear()
        old.collector.close()
        if changed:
            return self.plan(named)
        plan = self._plan(named, digest=old.digest, order=old.next_order)
        plan.collector.ready_order = None
        return plan

    def with_sparse(self, old: GradientPlan, sparse: Mapping[int, bool]) -> GradientPlan:
        """Return a plan in the place of `old`, after it turned out which gradients are sparse."""
        for index, is_sparse in sparse.items():
            parameter = old.named[index][1]
            if is_sparse:
                self._sparse[id(parameter)] = weakref.ref(parameter)
            else:
                self._sparse.pop(id(parameter), None)
        ready_order = old.collector.ready_order
        old.collector.clear()
        old.collector.close()
        plan = self._plan(old.named, digest=old.digest, order=old.order)
        plan.collector.ready_order = None if ready_order is None else {}
        return plan

    def _plan(self, named: Named, *, digest: int, order: Sequence[int] | None) -> GradientPlan:
        parameters = [parameter for _, parameter in named]
        whole = reversed(range(len(parameters))) if order is None else order
        buckets = plan_buckets(
            parameters,
            order=[index for index in whole if not self._is_sparse(parameters[index])],
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=self._first_bucket_bytes,
            float32_sums=self._float32_sums,
        )
        collector = GradientCollector(
            parameters,
            buckets,
            float32_sums=self._float32_sums,
            rounds=self._rounds,
            allocate=self._allocate,
        )
        return GradientPlan(named, buckets, collector, signature_of(named), digest, order)

    def _is_sparse(self, parameter: nn.Parameter) -> bool:
        reference = self._sparse.get(id(parameter))
        return reference is not None and reference() is parameter

    def _knows(self, parameter: nn.Parameter) -> bool:
        reference = self._known.get(id(parameter))
        return reference is not None and reference() is parameter


def signature_of(named: Named) -> list[object]:
    """Return what tells one set of parameters from another, in this process."""
    return [(id(p), p.shape, p.dtype, p.device) for _, p in named]


def short_digest(*facts: object) -> int:
    """Return 63 bits that stand for `facts`, the same in every process. Pure."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little") >> 1
