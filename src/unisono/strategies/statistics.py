"""Buffers in a step of many micro-batches: some are averaged, some follow a policy, others must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from unisono.collectives.gather import gather_tensors
from unisono.errors import MismatchError
from unisono.gradients.buckets import plan_buckets
from unisono.gradients.buffer_policies import Declared
from unisono.gradients.buffers import AGREE, BufferKeeper, Others
from unisono.gradients.partial_sums import PartialSums
from unisono.grid import Assignment
from unisono.strategies.joiner import Joiner
from unisono.strategies.step_table import StepTable

_BUCKET_BYTES = 2**20


class Statistics:
    """Brings the buffers of all workers together.

    Those to be averaged are summed along the tree like gradients, weighted over the micro-batches that changed
    them. Of others the deciding values go to everybody, in one message for all buffers.
    """

    def __init__(self, model: nn.Module, declared: Declared, others: Others, *, key: str) -> None:
        self.keeper = BufferKeeper(model, declared, others)
        buckets = plan_buckets(
            self.keeper.averaged, bucket_bytes=_BUCKET_BYTES, first_bucket_bytes=_BUCKET_BYTES
        )
        self._sums = [PartialSums(bucket) for bucket in buckets]
        self._key = key
        self._started: list[Callable[[], Tensor]] = []

    def begin_pass(self, merges: dict[int, int]) -> None:
        self.keeper.forget_values()
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
            if self.keeper.policy(index) != AGREE:
                continue
            values = list(table.changers(index).values())
            if len(values) > 1:
                raise MismatchError(
                    f"step {step}: buffer {name!r} was changed differently by micro-batches {values[0][0]} and "
                    f"{values[1][0]}, so no single value is right. Say which one shall be, with "
                    f"run.replicate(..., buffers={{{name!r}: 'first'}}), or 'last', 'mean', 'sum' or a function; "
                    f"make the change independent of the data; or register the buffer with persistent=False if it is "
                    f"only a cache."
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
        self._put_others(joiner, assignment, table)

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

    def _put_others(self, joiner: Joiner, assignment: Assignment, table: StepTable) -> None:
        """Send the deciding values to those who don't have them, and put what follows from them in place."""
        needed = {}
        for index in range(len(self.keeper.other_names)):
            changers = [number for numbers in table.changers(index).values() for number in numbers]
            if changers:
                needed[index] = self.keeper.needed(index, changers)
        sent = [
            (index, number)
            for index, numbers in needed.items()
            if len(self._holders(index, assignment, table)) < joiner.transport.world_size
            for number in numbers
        ]
        received = self._share(joiner, assignment, sent)
        for index, numbers in needed.items():
            own = self.keeper.values(index)
            if (index, numbers[0]) in received:
                values = {number: own.get(number, received[index, number]) for number in numbers}
            else:
                values = dict(own)  # of micro-batches that all gave it the same value, or of all
            self.keeper.put_other(index, self.keeper.decide(index, values, table.weights))

    def _holders(self, index: int, assignment: Assignment, table: StepTable) -> set[int]:
        """Return the ranks that have all the deciding values of the other buffer number `index`."""
        changers = [number for numbers in table.changers(index).values() for number in numbers]
        if self.keeper.policy(index) == AGREE:
            return {assignment.owners[number] for number in changers}
        owners = {assignment.owners[number] for number in self.keeper.needed(index, changers)}
        return owners if len(owners) == 1 else set()

    def _share(
        self, joiner: Joiner, assignment: Assignment, sent: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], Tensor]:
        """Return the values of other buffers, each (index, micro-batch) that is `sent`. *Collective.*"""
        if not sent:
            return {}
        parts = {
            at: self.keeper.values(index)[number]
            for at, (index, number) in enumerate(sent)
            if assignment.owners[number] == joiner.transport.rank
        }
        names = sorted({self.keeper.other_names[index] for index, _ in sent})
        what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        gathered = joiner.collect(
            f"sharing of buffer {what}", lambda: gather_tensors(joiner.transport, parts, len(sent))
        )
        return dict(zip(sent, gathered, strict=True))
