"""Buffers in a step of many micro-batches: running statistics are averaged, others must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from unisono.collectives.gather import gather_tensors
from unisono.errors import MismatchError
from unisono.gradients.buckets import plan_buckets
from unisono.gradients.buffers import BufferKeeper
from unisono.gradients.partial_sums import PartialSums
from unisono.grid import Assignment
from unisono.strategies.joiner import Joiner
from unisono.strategies.step_table import StepTable

_BUCKET_BYTES = 2**20


class Statistics:
    """Sums running statistics along the tree like gradients, weighted over the micro-batches that changed them."""

    def __init__(self, model: nn.Module, *, key: str) -> None:
        self.keeper = BufferKeeper(model)
        buckets = plan_buckets(
            self.keeper.averaged, bucket_bytes=_BUCKET_BYTES, first_bucket_bytes=_BUCKET_BYTES
        )
        self._sums = [PartialSums(bucket) for bucket in buckets]
        self._key = key
        self._started: list[Callable[[], Tensor]] = []

    def begin_pass(self, merges: dict[int, int]) -> None:
        for sums in self._sums:
            sums.begin(merges)

    def absorb(self, micro_batch: int, values: Sequence[Tensor | None], *, factor: float) -> None:
        """Add one micro-batch's new values times `factor`, its weight over the reference weight."""
        for sums in self._sums:
            parts = [values[slot.index] for slot in sums.bucket.slots]
            if factor == 0.0:
                parts = [None] * len(parts)
            elif factor != 1.0:
                # Here and not while adding, where the product might be fused and rounded differently.
                parts = [None if part is None else part * factor for part in parts]
            sums.absorb(micro_batch, parts)

    def absorb_nothing(self, micro_batch: int) -> None:
        self.absorb(micro_batch, [None] * len(self.keeper.averaged), factor=0.0)

    def start(self, joiner: Joiner, *, blank: bool = False) -> None:
        """Send what was summed up, before anybody knows whether something changed. *Collective.*

        With `blank` zeros are sent, by a worker that gave the step up.
        """
        for number, sums in enumerate(self._sums):
            partials = joiner.blank(sums.bucket) if blank else sums.partials()
            wait = joiner.start(partials, sums.bucket, key=self._key_of(number), scale=1.0)
            self._started.append(wait)

    def wait_for_unwanted(self) -> None:
        """Wait for what was started and then not needed: its memory is about to be used again."""
        for wait in self._started:
            wait()
        self._started.clear()

    def check(self, table: StepTable, *, step: int) -> None:
        """Raise a `MismatchError` for a buffer that micro-batches changed differently and nobody can average."""
        for index, name in enumerate(self.keeper.other_names):
            values = list(table.changers(index).values())
            if len(values) > 1:
                raise MismatchError(
                    f"step {step}: buffer {name!r} was changed differently by micro-batches {values[0][0]} and "
                    f"{values[1][0]}, so no single value is right. Make the change independent of the data, or "
                    f"register the buffer with persistent=False if it is only a cache."
                )

    def put(self, joiner: Joiner, assignment: Assignment, table: StepTable, *, reference: float) -> None:
        """Give all buffers their values after the step. *Collective.*"""
        weights = table.averaged_weights()
        totals: dict[int, Tensor] = {}
        if any(weights) or self._started:
            started: list[Callable[[], Tensor] | None] = [*self._started] or [None] * len(self._sums)
            for number, wait in enumerate(started):
                totals |= self._total(joiner, number, wait)
            self._started = []
        self.keeper.restore()
        for index, total in totals.items():
            if weights[index]:
                self.keeper.put_averaged(index, total * (reference / weights[index]))
        for index in range(len(self.keeper.other_names)):
            self._put_other(joiner, assignment, table, index)

    def _key_of(self, number: int) -> str:
        return f"{self._key}/statistics{number}"

    def _total(self, joiner: Joiner, number: int, started: Callable[[], Tensor] | None) -> dict[int, Tensor]:
        sums = self._sums[number]
        key = self._key_of(number)
        total = joiner.collect(
            "reduce of running statistics",
            started or (lambda: joiner.join(sums.partials(), sums.bucket, key=key, scale=1.0)),
        )
        return {s.index: view for s, view in zip(sums.bucket.slots, sums.views_of(total), strict=True)}

    def _put_other(self, joiner: Joiner, assignment: Assignment, table: StepTable, index: int) -> None:
        """Put one agreed value in place; workers that ran no micro-batch that changed it are sent it."""
        changers = table.changers(index)
        if not changers:
            return
        (micro_batches,) = changers.values()
        owners = {assignment.owners[number] for number in micro_batches}
        value = self.keeper.changed_value(index)
        if len(owners) < joiner.transport.world_size:
            parts = {0: value} if joiner.transport.rank == min(owners) and value is not None else {}
            (shared,) = joiner.collect(
                f"sharing of buffer {self.keeper.other_names[index]}",
                lambda: gather_tensors(joiner.transport, parts, 1),
            )
            value = shared.to(self.keeper.other(index).device) if value is None else value
        assert value is not None
        self.keeper.put_other(index, value)
