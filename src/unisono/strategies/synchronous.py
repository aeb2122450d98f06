"""The exact synchronous step: the gradient of the global batch's mean loss, the same bits on any workers.

Every worker runs its own micro-batches one after the other and adds their gradients along the tree; then the
partial sums are joined along the rest of the tree. The gradient of micro-batch m is that of
``(w_m / w_ref) * mean loss``; the sum is multiplied by ``w_ref / sum of w``, so that with equal parts the
first factor is 1 and the second one over the number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.collectives.choose import check_algorithm
from unisono.collectives.gather import gather_rows
from unisono.compilation import compile_each_shape
from unisono.errors import MismatchError, TransportError, UsageError
from unisono.gradients.changes import Written, first_of, sum_of_bits
from unisono.gradients.partial_sums import Allocate, count_merges
from unisono.gradients.sparse_sums import declared_sparse
from unisono.randomness import derive, keyed
from unisono.strategies.base import Embed, GlobalBatch, LossFunction, ReplicaContext, StepResult
from unisono.strategies.gradient_plan import Planner, short_digest
from unisono.strategies.joiner import Joiner
from unisono.strategies.reduction import Reduction
from unisono.strategies.statistics import Statistics
from unisono.strategies.step_table import Row, StepTable, TableShape, new_table, write_row
from unisono.strategies.sync_batch_norm import SyncBatchNorms
from unisono.strategies.weights import WeightReference, unpack_loss
from unisono.strategies.whole_batch import Rows, WholeBatchLoss, gather_rows_of, rows_of


@dataclass(frozen=True)
class Synchronous:
    """Every step uses the whole global batch; all workers wait for each other. Gives up nothing.

    Args:
        reduction: ``"exact"`` adds along the tree: the same bits on any number of workers. ``"fast"`` uses
            the backend's own all-reduce: the same mean, bits not promised.
        algorithm: how partial sums travel: ``"direct"``, ``"pairs"``, ``"hierarchical"`` or ``"auto"``. Changes no
            bit.
        overlap: reduce buckets while the last micro-batch still runs backward. ``"auto"`` does so unless
            all workers read each other's memory: then reducing is all computing, for cores that are busy anyway.
        float32_sums: add up gradients of 16-bit parameters in float32 and round once, instead of at every addition.
            Twice the bytes for them.
        bucket_bytes: size of a bucket; `first_bucket_bytes` of the first one. They change no bit.

    Cost per step and worker: about 2 n bytes sent for n bytes of gradients, and one small table.
    """

    reduction: Literal["exact", "fast"] = "exact"
    algorithm: str = "auto"
    overlap: bool | Literal["auto"] = "auto"
    float32_sums: bool = False
    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20

    def __post_init__(self) -> None:
        if self.reduction not in ("exact", "fast"):
            raise UsageError(f"reduction={self.reduction!r}: expected 'exact' or 'fast'.")
        check_algorithm(self.algorithm)
        if self.overlap not in (True, False, "auto"):
            raise UsageError(f"overlap={self.overlap!r}: expected True, False or 'auto'.")
        if self.bucket_bytes < 1 or self.first_bucket_bytes < 1:
            raise UsageError(
                f"bucket_bytes={self.bucket_bytes}, first_bucket_bytes={self.first_bucket_bytes}: "
                f"expected at least 1."
            )

    def bind(self, context: ReplicaContext) -> SynchronousEngine:
        """Return an engine for one replica."""
        return SynchronousEngine(self, context)


@dataclass
class _Pass:
    """One run through the own micro-batches of a global batch."""

    batch: GlobalBatch
    step: int
    table: Tensor
    shape: TableShape
    signature: int
    merges: dict[int, int]
    send_early: bool
    started: bool = False


class SynchronousEngine:
    """`Synchronous` at work on one replica."""

    def __init__(self, strategy: Synchronous, context: ReplicaContext) -> None:
        self._context = context
        wanted = not context.transport.is_on_one_host if strategy.overlap == "auto" else strategy.overlap
        self._overlap = wanted and context.transport.world_size > 1
        self._joiner = Joiner(
            context.transport,
            context.operations,
            context.announcer,
            exact=strategy.reduction == "exact",
            algorithm=strategy.algorithm,
            early=self._overlap,
        )
        self._look_at_buffers()
        self._reference = WeightReference()
        trained = list(context.parameters())
        self._planner = Planner(
            [*context.model.parameters(), *(parameter for _, parameter in trained)],
            bucket_bytes=strategy.bucket_bytes,
            first_bucket_bytes=strategy.first_bucket_bytes,
            alone=context.transport.world_size == 1,
            sparse=declared_sparse(context.model),
            float32_sums=strategy.float32_sums or context.float32_gradients,
            rounds=not context.float32_gradients,
            allocate=self._allocate if context.transport.maps_peers else None,
        )
        self._gradients = self._planner.plan(trained)
        self._reduction = Reduction(self._joiner, key=str(context.number))
        self._loss_scale = 1.0
        self._state = (0, 0)
        self._written_buffers: list[str] = []
        self._gives_up = False
        self._running = 0
        self._failed: Callable[[], StepResult] | None = None
        self._written: Written

    def _allocate(self, bucket: int) -> Allocate:
        """Return what gives a bucket's sums memory that other workers can read."""
        transport, number = self._context.transport, self._context.number
        return lambda at, size, dtype: transport.allocate(f"{number}/sums{bucket}/{at}", size, dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the reference weight, all that outlives a step."""
        return self._reference.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reference.load_state_dict(state)

    def close(self) -> None:
        """Take hooks off and end the thread; harmless if called twice."""
        self._gradients.collector.close()
        self._joiner.close()

    def backward(
        self,
        batch: GlobalBatch,
        loss_fn: LossFunction,
        *,
        step: int,
        loss_scale: float = 1.0,
        embed: Embed | None = None,
        state: int = 0,
    ) -> StepResult:
        """Leave the gradient of the global batch's mean loss in every parameter's ``.grad``.

        *Collective: every rank calls this, in the same order.* The step is skipped, on all workers alike, if one
        of them gave it up, a loss isn't finite, or its total weight is 0.

        Raises:
            UsageError: the loss function returned something that isn't a loss.
            MismatchError: micro-batches disagree about what can't be averaged. Nothing was applied.
            Exception: what the loss function raised; the other workers wait until `abandon` is called.
        """
        self._failed = None
        compile_each_shape()
        self._loss_scale = loss_scale
        self._replan_if_parameters_changed()
        self._sync_batch_norms.begin(batch, step=step)
        self._joiner.begin(f"step {step} of replica {self._context.number}", batch.assignment, step=step)
        written = self._statistics.keeper.begin()
        self._written_buffers = list(written)
        self._state = (state, sum_of_bits(written.values()))
        with self._tidy():
            if embed is not None:
                return self._reduce_whole(batch, loss_fn, embed, step=step)
            return self._reduce_parts(batch, loss_fn, step=step)

    def _reduce_whole(
        self, batch: GlobalBatch, loss_fn: LossFunction, embed: Embed, *, step: int
    ) -> StepResult:
        """Do the step for a loss over the whole batch: one pass for its rows, one for the gradient. *Collective.*"""
        rows = self._exchange_rows(batch, self._embed(batch, embed, step=step))
        if isinstance(rows, StepResult):
            return rows
        try:
            with keyed(self._context.device) as seed:
                seed(derive(self._context.seed, "whole", self._context.number, step))
                loss = WholeBatchLoss(
                    embed,
                    loss_fn,
                    rows,
                    sizes=batch.sizes,
                    parameters=[parameter for _, parameter in self._gradients.named],
                    current=lambda: self._running,
                )
        except Exception:
            numbers = batch.assignment.micro_batches(self._joiner.transport.rank)
            self._failed = partial(
                self._complete_given_up, self._new_pass(batch, step), min(numbers, default=0)
            )
            raise
        if not math.isfinite(loss.loss):
            self._statistics.keeper.restore()
            return StepResult(math.nan, 0.0, f"the loss of the whole batch is {loss.loss}", is_finite=False)
        result = self._reduce_parts(batch, loss, step=step)
        return result if result.skipped else replace(result, loss=loss.loss)

    def _reduce_parts(self, batch: GlobalBatch, loss_fn: LossFunction, *, step: int) -> StepResult:
        table = self._run(batch, loss_fn, step=step)
        try:
            table.check_signatures_agree(batch.assignment.owners, step=step)
        except MismatchError as error:
            self._written.explain(step=step, cause=error)
            if self._written_buffers:
                raise MismatchError(
                    f"{error} On this rank {first_of(self._written_buffers)} were written between steps, by "
                    f"the script or a forward pass in training mode."
                ) from error
            raise
        skipped = table.reason_to_skip(batch.assignment.owners)
        dense: set[int] = set()
        while skipped is None and self._has_to_redo(table, dense):
            table = self._run(batch, loss_fn, step=step)
            skipped = table.reason_to_skip(batch.assignment.owners)
        if skipped is not None:
            return self._skip(skipped, table)
        return self._apply(batch, table, step=step)

    def _has_to_redo(self, table: StepTable, dense: set[int]) -> bool:
        """Say whether the plan was wrong and mend it. All see it in the shared table, so all do the step again.

        Args:
            dense: parameters whose gradient was dense in this step before. They stay so, even if the loss function
                does something else when it is called again; otherwise there might be no end.
        """
        if table.fired_late:
            # From now on nothing is sent or scaled before the end of backward.
            self._overlap = self._reduction.scales_leaves = False
            return True
        found = table.wrongly_planned(self._gradients.collector.sparse)
        wrong = {index: is_sparse for index, is_sparse in found.items() if index not in dense}
        dense |= {index for index, is_sparse in wrong.items() if not is_sparse}
        if wrong:
            self._wait_for_unwanted()
            self._gradients = self._planner.with_sparse(self._gradients, wrong)
        return bool(wrong)

    def skip(self) -> None:
        """Give up the step that is running: called by the loss function."""
        self._gives_up = True

    @property
    def has_failed(self) -> bool:
        """Whether the last `backward` raised on this worker in the middle of a step that others are in."""
        return self._failed is not None

    def abandon(self) -> StepResult:
        """Take part in the rest of a step that failed on this worker, so that all skip it. *Collective.*"""
        assert self._failed is not None
        complete, self._failed = self._failed, None
        with self._tidy():
            return complete()

    def _complete_given_up(self, run: _Pass, number: int) -> StepResult:
        table = self._finish_given_up(run, number)
        table.check_signatures_agree(run.batch.assignment.owners, step=run.step)
        skipped = table.reason_to_skip(run.batch.assignment.owners)
        assert skipped is not None
        return self._skip(skipped, table)

    @contextmanager
    def _tidy(self) -> Iterator[None]:
        """Leave nothing of a step that failed in buffers and gradients."""
        try:
            yield
        except BaseException:
            self._statistics.keeper.restore()
            self._gradients.collector.clear()
            raise

    def _skip(self, reason: str, table: StepTable) -> StepResult:
        self._wait_for_unwanted()
        self._statistics.keeper.restore()
        self._gradients.collector.clear()
        return StepResult(math.nan, 0.0, reason, table.is_finite)

    def _apply(self, batch: GlobalBatch, table: StepTable, *, step: int) -> StepResult:
        table.check_weights_agree()
        self._statistics.check(table, step=step)
        reference = self._reference.of(batch, table.weights)
        self._reduction.finish(table.present(), scale=reference / table.weight / self._loss_scale)
        self._statistics.put(self._joiner, batch.assignment, table, reference=reference)
        self._statistics.keeper.settle()
        self._agree_on_order(batch)
        self._reference.advance(table.weight, batch.assignment.num_micro_batches)
        return StepResult(table.loss, table.weight)

    def _run(self, batch: GlobalBatch, loss_fn: LossFunction, *, step: int) -> StepTable:
        """Run forward and backward of every own micro-batch; share what happened. *Collective.*"""
        run = self._new_pass(batch, step)
        self._gives_up = False
        self._written = Written([*self._gradients.named, *self._context.frozen()])
        self._gradients.collector.accumulate_anew()
        numbers = batch.assignment.micro_batches(self._joiner.transport.rank)
        number = numbers[0] if numbers else 0
        try:
            supply = iter(batch)
            with keyed(self._context.device) as seed, self._sync_batch_norms.replaced():
                for number in numbers:
                    last = number == numbers[-1]
                    if batch.sizes[number] == 0:
                        self._run_empty(run, number, last=last)
                        continue
                    got, micro_batch = next(supply)
                    assert got == number, f"the batch yields micro-batch {got}, expected {number}"
                    self._statistics.keeper.restore()
                    self._running = number
                    seed(derive(self._context.seed, "step", self._context.number, step, number))
                    with self._joiner.doing(f"forward of micro-batch {number}", waits=False):
                        output = loss_fn(self._context.model, micro_batch)
                    if self._gives_up:
                        return self._finish_given_up(run, number)
                    loss, given = unpack_loss(output, number)
                    self._run_backward(run, number, loss=loss, given=given, last=last)
        except (TransportError, MismatchError):
            raise
        except Exception:
            self._failed = partial(self._complete_given_up, run, number)
            raise
        self._start_sums(run, None)
        if run.send_early:
            self._statistics.start(self._joiner)
        return self._share(run)

    def _finish_given_up(self, run: _Pass, number: int) -> StepTable:
        """Do for the rest of a pass what others wait for, and tell them that micro-batch `number` failed."""
        self._sync_batch_norms.give_up()
        self._start_sums(run, None, is_known=False)
        if run.send_early:
            self._reduction.send_blank_rest()
            self._statistics.start(self._joiner, blank=True)
        write_row(run.table, number, Row.of_given_up(run.shape, run.signature))
        return self._share(run)

    def _embed(self, batch: GlobalBatch, embed: Embed, *, step: int) -> dict[int, Rows] | None:
        """Return the rows of all own micro-batches; None if this worker gives the step up."""
        context = self._context
        own: dict[int, Rows] = {}
        self._gives_up = False
        try:
            with keyed(context.device) as seed, self._sync_batch_norms.replaced():
                for number, micro_batch in batch:
                    self._statistics.keeper.restore()
                    seed(derive(context.seed, "step", context.number, step, number))
                    with self._joiner.doing(f"embedding of micro-batch {number}", waits=False):
                        with torch.no_grad():
                            output = embed(context.model, micro_batch)
                        if self._gives_up:
                            return None
                        own[number] = rows_of(output, number)
        except Exception:
            self._failed = partial(self._exchange_rows, batch, None)
            raise
        return own

    def _exchange_rows(self, batch: GlobalBatch, own: dict[int, Rows] | None) -> Any:
        """Return the rows of all micro-batches, or the result of a step that is skipped. *Collective.*"""
        transport = self._joiner.transport
        if own is None:
            self._sync_batch_norms.give_up()
        self._sync_batch_norms.rest()
        operation = "gather of embeddings"
        rows = self._joiner.collect(operation, lambda: gather_rows_of(transport, own, batch.sizes))
        if not isinstance(rows, int):
            return rows
        self._statistics.keeper.restore()
        return StepResult(math.nan, 0.0, f"rank {rows} gave it up while it computed its embeddings")

    def _share(self, run: _Pass) -> StepTable:
        self._sync_batch_norms.rest()
        self._joiner.collect(
            "exchange of the step's table", lambda: gather_rows(self._joiner.transport, run.table)
        )
        return StepTable(run.table, run.shape)

    def _new_pass(self, batch: GlobalBatch, step: int) -> _Pass:
        assignment, keeper = batch.assignment, self._statistics.keeper
        shape = TableShape(
            num_micro_batches=assignment.num_micro_batches,
            num_parameters=len(self._gradients.named),
            num_averaged=len(keeper.averaged),
            num_others=len(keeper.other_names),
        )
        merges = count_merges(assignment.blocks[self._joiner.transport.rank], assignment.num_micro_batches)
        signature = short_digest(
            step,
            self._context.seed,
            self._state,
            assignment.owners,
            batch.sizes,
            batch.nominal_weight,
            batch.digest,
            self._gradients.digest,
        )
        send_early = self._overlap and not self._sync_batch_norms.exchanges
        return _Pass(batch, step, new_table(shape), shape, signature, merges, send_early)

    def _run_backward(
        self, run: _Pass, number: int, *, loss: Tensor, given: float | None, last: bool
    ) -> None:
        weight = float(run.batch.sizes[number]) if given is None else given
        counts = weight != 0 and loss.requires_grad
        self._start_sums(run, given, differentiates=counts)
        factor = weight / self._reference.of(run.batch, {number: weight})
        loss_factor = factor * self._loss_scale
        collector, keeper = self._gradients.collector, self._statistics.keeper
        if weight == 0:
            collector.accumulate_anew()
        elif loss_factor != 1.0:
            collector.multiply(loss_factor)
        self._begin_leaf(run, number, last=last)
        with self._joiner.doing(f"backward of micro-batch {number}", waits=False):
            if counts:
                (loss if loss_factor == 1.0 else loss * loss_factor).backward()  # type: ignore[no-untyped-call]
            else:
                self._sync_batch_norms.backward_nothing()
        present = collector.end_leaf()
        changes = keeper.harvest(number)
        self._statistics.absorb(number, changes.averaged, factor=factor)
        row = Row(
            weight=weight,
            loss=float(loss.detach()),
            gave_weight=given is not None,
            fired_late=collector.fired_late,
            present=present,
            sparse=collector.sparse_in_leaf,
            averaged=[value is not None and weight != 0 for value in changes.averaged],
            digests=changes.digests,
            signature=self._written.sign(run.signature),
        )
        write_row(run.table, number, row)

    def _run_empty(self, run: _Pass, number: int, *, last: bool) -> None:
        """Count an empty micro-batch as a leaf of zeros; its row in the table stays zero."""
        self._start_sums(run, None, is_known=False)
        self._begin_leaf(run, number, last=last)
        self._gradients.collector.end_leaf()
        self._statistics.absorb_nothing(number)

    def _start_sums(
        self, run: _Pass, given: float | None, *, is_known: bool = True, differentiates: bool = False
    ) -> None:
        """Once a pass, before its first backward: agree on the reference weight and clear the sums.

        Args:
            given: the weight that the loss function returned for the first own micro-batch, if any.
            is_known: whether it was called at all.
            differentiates: whether its loss is about to run backward.
        """
        if run.started:
            return
        self._sync_batch_norms.rest(differentiates=differentiates)  # may fail, and be called again to give up
        run.started = True
        if not self._reference.is_agreed:
            self._agree_on_reference(run.batch, given, is_known=is_known)
        self._wait_for_unwanted()
        factor = self._reference.factor_beforehand(run.batch)
        leaf_scale = self._reduction.begin(
            self._gradients, factor=factor, num_micro_batches=run.batch.assignment.num_micro_batches
        )
        self._gradients.collector.begin_step(run.merges, scale=leaf_scale)
        self._statistics.begin_pass(run.merges)
        if run.send_early and not run.merges:
            self._reduction.send_all()

    def _wait_for_unwanted(self) -> None:
        """Wait for sums that were sent early and then not needed: their memory is about to be used again."""
        with self._joiner.doing("end of reductions that were not needed"):
            self._reduction.wait_for_unwanted()
            self._statistics.wait_for_unwanted()

    def _begin_leaf(self, run: _Pass, number: int, *, last: bool) -> None:
        early = run.send_early and last
        self._gradients.collector.begin_leaf(number, on_complete=self._reduction.send if early else None)

    def _agree_on_reference(self, batch: GlobalBatch, given: float | None, *, is_known: bool) -> None:
        owned = batch.assignment.owners[0] == self._joiner.transport.rank
        message = self._reference.message(given)
        if not (owned and is_known):
            message.zero_()
        self._joiner.collect(
            "agreement on the reference weight", lambda: gather_rows(self._joiner.transport, message)
        )
        self._reference.agree(message)

    def _replan_if_parameters_changed(self) -> None:
        old = self._gradients
        self._gradients = self._planner.following(old, list(self._context.parameters()))
        if self._gradients.signature != old.signature or len(self._context.others()) != len(self._others):
            # Whatever changed the parameters may have changed the buffers with them.
            self._look_at_buffers()

    def _look_at_buffers(self) -> None:
        """Find the buffers and layers of the model, and of all other models of the run, that a step may change."""
        context = self._context
        self._others = list(context.others())
        key = str(context.number)
        self._statistics = Statistics(context.model, context.buffers, self._others, key=key)
        self._sync_batch_norms = SyncBatchNorms(context.model, self._joiner, self._others)

    def _agree_on_order(self, batch: GlobalBatch) -> None:
        """After the first step, order the buckets as gradients became ready on the owner of micro-batch 0."""
        ready = self._gradients.collector.ready_order
        if ready is None:
            return
        self._gradients.collector.ready_order = None
        count = len(self._gradients.named)
        order = torch.zeros(1, count, dtype=torch.int64)
        if batch.assignment.owners[0] == self._joiner.transport.rank:
            rest = [index for index in reversed(range(count)) if index not in ready]
            order[0] = torch.tensor([*ready, *rest], dtype=torch.int64)
        self._joiner.collect(
            "agreement on the order of buckets", lambda: gather_rows(self._joiner.transport, order)
        )
        self._gradients.next_order = order[0].tolist()
