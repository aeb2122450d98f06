"""One model and its optimizers, trained by all workers together."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from unisono.collectives.announce import Announcer
from unisono.errors import MismatchError, StepFailedError, UsageError
from unisono.events import Event, Notice, StepFinished
from unisono.gradients.accumulation import Window
from unisono.gradients.buckets import HALVES
from unisono.gradients.buffer_policies import Declared
from unisono.gradients.changes import Changes, first_of, sum_of_bits
from unisono.gradients.clipping import clip_by_norm, clip_by_value
from unisono.gradients.master_weights import MasterWeights
from unisono.gradients.parameters import Named, TrainedParameters, named_parameters, outside_parameters
from unisono.gradients.sharded_update import ShardedUpdate, check_sharded
from unisono.gradients.snapshot import Snapshot
from unisono.loss_scale import LossScale, are_finite
from unisono.strategies.base import (
    Embed,
    GlobalBatch,
    LossFunction,
    Operations,
    ReplicaContext,
    StepResult,
    Strategy,
)
from unisono.transport.base import Transport

Update = Literal["replicated", "sharded"]
ClipNorm = float | Sequence[float | None] | None


@dataclass(frozen=True)
class Settings:
    """What a user says about one replica; see `Run.replicate`."""

    strategy: Strategy
    clip_norm: ClipNorm = None
    clip_value: float | None = None
    scaler: torch.amp.GradScaler | None = None
    master_weights: bool = False
    update: Update = "replicated"
    share_parameters: bool | None = None
    buffers: Declared = field(default_factory=dict)


@dataclass(frozen=True)
class Surroundings:
    """What the replicas of one run share.

    Args:
        emit: is told what happens.
        before_step: is given each batch and its loss function, and returns the loss function to call.
        replicas: all of the run, in their order; grows.
    """

    transport: Transport
    announcer: Announcer
    operations: Operations
    device: torch.device
    seed: int
    emit: Callable[[Event], None]
    before_step: Callable[[Replica, GlobalBatch, LossFunction], LossFunction]
    replicas: Sequence[Replica]


class Replica:
    """A model that every worker holds a copy of; made by `Run.replicate`.

    `step` is `backward`, `clip` and `update`, for a loop that needs something in between.

    Attributes:
        model: as given.
        num_steps: how many global steps were done, skipped ones included.
        num_skipped: how many of them were skipped.
        skipped: whether the last one was.
        clip_norm: the largest norm of the gradient in `step`, or one for each group of the optimizers; None
            doesn't clip.
        clip_value: the largest magnitude of an element of the gradient in `step`; None doesn't clip.
        buffers: the policies declared for buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        settings: Settings,
        surroundings: Surroundings,
    ) -> None:
        self.model = model
        self.buffers = settings.buffers
        self.number = len(surroundings.replicas)
        self.num_steps = 0
        self.num_skipped = 0
        self.skipped = False
        self.optimizer = optimizer
        self.clip_norm = settings.clip_norm
        self.clip_value = settings.clip_value
        self._check_clipping()
        self._surroundings = surroundings
        self._emit = surroundings.emit
        self._num_batches = 0
        self._window: Window | None = None
        self._failure: Exception | None = None
        self._before: Snapshot | None = None
        self._in_step = False
        self._scale = LossScale(settings.scaler, surroundings.device)
        self._masters = MasterWeights(lambda: self.optimizers if settings.master_weights else ())
        self._check_no_masters_of(surroundings.replicas)
        self._sharded: ShardedUpdate | None = None
        if settings.update == "sharded":
            check_sharded(self.optimizers)
            self._sharded = ShardedUpdate(
                lambda: self.optimizers,
                surroundings.transport,
                name=str(self.number),
                frozen=lambda: self._masters.without_one(self._parameters.frozen),
                share_parameters=settings.share_parameters,
                is_taken=lambda p: any(
                    other.shares(p) for other in surroundings.replicas if other is not self
                ),
                name_of=self._name_of,
            )
        elif settings.update != "replicated":
            raise UsageError(f"update={settings.update!r}: expected 'replicated' or 'sharded'.")
        elif settings.share_parameters:
            raise UsageError(
                "share_parameters=True: workers that share parameters share the update too, with update='sharded'."
            )
        self._parameters = TrainedParameters(
            model,
            lambda: self.optimizers,
            lambda message: self._emit(Notice(message)),
            self._masters.parameter_of,
        )
        self._changes = Changes()
        self._changes.remember(self._watched())
        if not settings.master_weights:
            self._warn_of_halves()
        self._engine = settings.strategy.bind(
            ReplicaContext(
                number=self.number,
                model=model,
                parameters=self._parameters,
                frozen=lambda: self._parameters.frozen,
                transport=surroundings.transport,
                announcer=surroundings.announcer,
                operations=surroundings.operations,
                device=surroundings.device,
                seed=surroundings.seed,
                float32_gradients=settings.master_weights,
                buffers=settings.buffers,
                others=lambda: [
                    (f"replica {other.number}: ", other.model, other.buffers)
                    for other in surroundings.replicas
                    if other is not self
                ],
            )
        )
        if self._sharded is not None:
            surroundings.operations.enter("sharing of the parameters", -1, waits=True)
            self._sharded.share_parameters()
            surroundings.operations.leave()

    @property
    def optimizer(self) -> Any:
        """What updates the parameters: an optimizer, several of them, or None. May be replaced between steps."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.optimizers = as_optimizers(optimizer)
        self._optimizer = optimizer

    def step(self, batch: GlobalBatch, loss_fn: LossFunction, *, embed: Embed | None = None) -> float:
        """Train on one global batch; return its mean loss, the same on every worker.

        *Collective: every rank calls this, in the same order.* A step is skipped on all workers alike if a loss
        is not finite, `skip` was called on one of them, or the total weight is 0.

        Args:
            batch: from `Run.load` or `Run.batch`.
            loss_fn: ``loss_fn(model, micro_batch)`` returns the mean loss over the micro-batch, or a pair
                ``(mean loss, weight)`` where the mean is over something else than samples, such as tokens.
            embed: for a loss over the whole global batch: ``embed(model, micro_batch)`` returns rows, usually one for
                each sample, or a tuple of tensors with as many rows, and ``loss_fn(rows)`` the mean loss of all rows
                of the global batch, in its order. Costs a second forward pass.

        Returns:
            The mean loss of the global batch, weighted like the gradient; nan if there is none, because a worker
            gave the step up. `skipped` says whether the step was applied.

        Raises:
            UsageError: `clip_norm` or `clip_value` doesn't fit the optimizers, or the loss function is at fault.
            MismatchError: workers or micro-batches disagree about what can't be averaged. Nothing was applied.
        """
        self._check_clipping()
        if self._closure_optimizer() is not None:
            return self._step_with_closure(batch, loss_fn, embed)
        result = self._backward(batch, loss_fn, embed, in_step=True)
        self._clip()
        self.update()
        return result.loss

    def backward(
        self, batch: GlobalBatch, loss_fn: LossFunction, *, embed: Embed | None = None
    ) -> StepResult:
        """Leave the gradient of the global batch's mean loss in every parameter's ``.grad``. *Collective.*

        Called several times before `update`, ``.grad`` is the mean over all these batches, by weight; one that
        is skipped counts as nothing. Arguments as in `step`.
        """
        return self._backward(batch, loss_fn, embed, in_step=False)

    def clip(self, max_norm: float, parameters: Iterable[nn.Parameter] | None = None) -> float:
        """Scale the gradient so that its norm is at most `max_norm`; return the norm it had.

        The norm is that of `parameters` together, by default all that are trained, the same bits on every worker.
        If it isn't finite nothing is scaled, and `update` skips the step.
        """
        chosen = self._trained() if parameters is None else map(self._masters.parameter_of, parameters)
        norm = clip_by_norm([p.grad for p in chosen if p.grad is not None], max_norm)
        if self._window is not None and not math.isfinite(norm):
            self._window.norm_is_finite = False
        return norm

    def clip_by_value(self, limit: float) -> None:
        """Limit every element of the gradient to `limit` in magnitude."""
        clip_by_value([p.grad for _, p in self._parameters() if p.grad is not None], limit)

    def update(self) -> None:
        """Let the optimizers apply the gradient. Does nothing but count if the step is skipped.

        Raises:
            UsageError: there is no gradient to apply: `backward` was not called since the last update.
        """
        self.check_not_failed()
        if self._closure_optimizer() is not None:
            raise UsageError(
                f"{type(self._closure_optimizer()).__name__} computes the gradient several times in a step: call "
                f"replica.step(batch, loss_fn), which lets it."
            )
        window, self._window = self._window, None
        if window is None or not (
            window.weight or window.skipped
        ):  # the only backward call failed everywhere
            raise UsageError(
                f"step {self.num_steps}: update() without a gradient; call backward(batch, loss_fn) first."
            )
        skipped = self._reason_to_skip(window)
        if skipped is None:
            self._apply()
        self._finish(window, skipped)

    def skip(self) -> None:
        """Give up the current step, on all workers.

        Within a loss function, which may then return None, or after an error of `step` or `backward` that the
        script catches on this worker, such as running out of memory: the other workers wait for this call.
        """
        if self._failure is None:
            self._engine.skip()
            return
        result = self._engine.abandon()
        self._failure = None
        window = self._window
        assert window is not None, "a batch that failed has no window"
        self._take(window, result)
        self._num_batches += 1
        if self._before is not None:
            self._before.restore()  # again: the evaluation that failed has put back what it began with
            self._before = None
            self._changes.remember(self._watched())
        if self._in_step:
            self._window = None
            self._finish(window, self._reason_to_skip(window))

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizers, parameters that only they know, counts and what the strategy keeps.

        *Collective* if the update is sharded: the optimizers' states are put together.
        """
        optimizers = self.optimizers
        states = (
            [each.state_dict() for each in optimizers]
            if self._sharded is None
            else self._sharded.state_dicts()
        )
        outside = outside_parameters(self.model, self.optimizers)
        return {
            "model": self.model.state_dict(),
            "outside": {name: parameter.detach() for name, parameter in outside},
            "optimizers": states,
            "scaler": self._scale.state_dict(),
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "num_batches": self._num_batches,
            "strategy": self._engine.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, written at any world size. Gradients of `backward` without `update` are forgotten.

        Raises:
            UsageError: the optimizers are others, or have other parameters besides the model's, than when the
                state was taken.
        """
        outside = dict(outside_parameters(self.model, self.optimizers))
        if outside.keys() != state["outside"].keys() or len(self.optimizers) != len(state["optimizers"]):
            raise UsageError(
                f"replica {self.number}: the state has {len(state['optimizers'])} optimizers and "
                f"{sorted(state['outside'])} besides the model's parameters, this replica {len(self.optimizers)} and "
                f"{sorted(outside)}: build the optimizers as they were before loading."
            )
        with torch.no_grad():
            for name, parameter in outside.items():
                parameter.copy_(state["outside"][name])
        self.model.load_state_dict(state["model"])
        for optimizer, part in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(part)
        if self._sharded is not None:
            self._sharded.forget()
        self._scale.load_state_dict(state["scaler"])
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self._num_batches = state["num_batches"]
        self._engine.load_state_dict(state["strategy"])
        self._window = None
        self._masters.push()

    def shares(self, parameter: nn.Parameter) -> bool:
        """Return whether the workers of a host have one copy of `parameter` between them."""
        return self._sharded is not None and self._sharded.shares(parameter)

    def expect_current_values(self) -> None:
        """Take the parameters' values for agreed on: they were just made equal on all workers."""
        self._changes.remember(self._watched())

    def check_not_failed(self) -> None:
        """Raise a `StepFailedError` if the last step failed here and the script has not given it up."""
        if self._failure is not None:
            raise StepFailedError(
                f"step {self.num_steps} failed on this worker with {self._failure!r}, and the others wait for "
                f"it: call replica.skip() where that error is caught, so that all skip the step."
            ) from self._failure

    def close(self) -> None:
        """Take everything off the model that was put on it."""
        self._engine.close()
        if self._sharded is not None:
            self._sharded.close()

    # --- one global batch

    def _backward(
        self, batch: GlobalBatch, loss_fn: LossFunction, embed: Embed | None, *, in_step: bool
    ) -> StepResult:
        self.check_not_failed()
        self._in_step = in_step
        window = self._window
        if window is None or window.was_dropped(self._trained()):
            window = self._window = Window()
        result = self._evaluate(batch, loss_fn, embed, window)
        self._num_batches += 1
        return result

    def _evaluate(
        self, batch: GlobalBatch, loss_fn: LossFunction, embed: Embed | None, window: Window
    ) -> StepResult:
        """Compute one batch's gradient and take it into `window`. *Collective.*"""
        if embed is None:
            loss_fn = self._surroundings.before_step(self, batch, loss_fn)
        trained = self._parameters()
        if trained and not torch.is_grad_enabled():
            raise UsageError(
                f"step {self.num_steps}: gradients are switched off, by torch.no_grad() or torch.inference_mode() "
                f"around this call: call it outside."
            )
        changed = self._changes.find(self._watched())
        # After a look at the parameters, which lets new ones take the places of those they replaced.
        self._masters.attach()
        self._masters.pull()
        if window.weight:
            window.hold(self._trained())
        with self._others_untouched():
            try:
                result = self._engine.backward(
                    batch,
                    loss_fn,
                    step=self._num_batches,
                    loss_scale=self._scale.value,
                    embed=embed,
                    state=sum_of_bits(changed.values()),
                )
            except MismatchError as error:
                window.release()
                if not changed:
                    raise
                raise MismatchError(
                    f"{error} On this rank {first_of(changed)} were written between steps."
                ) from error
            except Exception as error:
                if self._engine.has_failed:
                    self._failure = error
                else:
                    window.release()
                raise
        self._check_none_came(trained)
        if changed:
            self._changes.remember(self._watched())
        self._take(window, result)
        return result

    def _check_none_came(self, before: Named) -> None:
        """Refuse gradients of parameters that the step didn't know of: they are this worker's only."""
        now = self._parameters()
        if now is before:
            return
        known = {parameter for _, parameter in before}
        names = [name for name, parameter in now if parameter not in known and parameter.grad is not None]
        if names:
            raise UsageError(
                f"step {self.num_steps}: {first_of(names)} came to be trained in the middle of the step, within the "
                f"loss function: add and unfreeze parameters between steps."
            )

    def _take(self, window: Window, result: StepResult) -> None:
        window.is_finite = window.is_finite and result.is_finite
        if result.skipped is None:
            window.add(self._trained(), loss=result.loss, weight=result.weight)
        else:
            window.skipped = result.skipped
            window.release()
        self._masters.take_gradients()
        if result.skipped is not None:
            self._emit(Notice(f"step {self.num_steps}: a global batch was skipped: {result.skipped}"))

    @contextmanager
    def _others_untouched(self) -> Iterator[None]:
        """Leave gradients alone that are not this replica's: those of another one of the same model."""
        others = [(parameter, parameter.grad) for parameter in self._parameters.untrained]
        for parameter, _ in others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in others:
                parameter.grad = gradient

    def _check_no_masters_of(self, replicas: Iterable[Replica]) -> None:
        """Refuse an optimizer whose groups hold another replica's masters: here nobody would know of what."""
        held = [parameter for group in self._groups() for parameter in group["params"]]
        for other in replicas:
            if any(other._masters.parameter_of(parameter) is not parameter for parameter in held):
                raise UsageError(
                    f"replica {self.number}: the optimizer holds float32 masters of replica {other.number}, expected "
                    f"the model's own parameters: build an optimizer for every run.replicate."
                )

    def _warn_of_halves(self) -> None:
        dtypes = {str(p.dtype).removeprefix("torch.") for _, p in self._parameters() if p.dtype in HALVES}
        if dtypes:
            self._emit(
                Notice(
                    f"parameters are {' and '.join(sorted(dtypes))}: updates much smaller than a weight are lost. "
                    f"run.replicate(..., master_weights=True) updates float32 copies, from float32 gradients."
                )
            )

    def _name_of(self, parameter: nn.Parameter) -> str:
        of_model = self._masters.parameter_of(parameter)
        return next(name for name, p in named_parameters(self.model, self.optimizers) if p is of_model)

    def _watched(self) -> Named:
        """Return the parameters that must be the same on all workers and that no other replica trains."""
        return [*self._parameters(), *self._parameters.frozen]

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._parameters()]

    # --- one update

    def _clip(self) -> None:
        """Clip as `clip_norm` and `clip_value` say."""
        if self._window is not None and not self._window.weight:
            return
        if isinstance(self.clip_norm, Sequence):
            for limit, group in zip(self.clip_norm, self._groups(), strict=True):
                if limit is not None:
                    self.clip(limit, group["params"])
        elif self.clip_norm is not None:
            self.clip(self.clip_norm)
        if self.clip_value is not None:
            self.clip_by_value(self.clip_value)

    def _check_clipping(self) -> None:
        """Refuse limits that mean nothing, or of which there isn't one for each group."""
        limits = list(self.clip_norm) if isinstance(self.clip_norm, Sequence) else [self.clip_norm]
        if not all(limit is None or limit > 0 for limit in limits):
            raise UsageError(f"clip_norm={self.clip_norm}: expected a positive number, or None.")
        num_groups = len(list(self._groups()))
        if isinstance(self.clip_norm, Sequence) and len(limits) != num_groups:
            raise UsageError(
                f"clip_norm={limits} has {len(limits)} limits, but the optimizers have {num_groups} groups: expected "
                f"one for each; replica.clip_norm can be set when groups are added."
            )
        if self.clip_value is not None and not self.clip_value > 0:
            raise UsageError(f"clip_value={self.clip_value}: expected a positive number, or None.")

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def _reason_to_skip(self, window: Window) -> str | None:
        if not window.weight:
            return window.skipped
        if self._scale.is_active and not are_finite(p.grad for p in self._trained() if p.grad is not None):
            window.is_finite = False
            return f"the gradient is not finite at a loss scale of {self._scale.value:g}"
        return None if window.norm_is_finite else "the norm of the gradient is not finite"

    def _apply(self) -> None:
        self._surroundings.operations.enter("update", self.num_steps, waits=self._sharded is not None)
        self._masters.pull()  # the script may have written parameters since backward
        self._masters.take_gradients()  # or given them other gradients
        if self._sharded is not None:
            self._sharded.step()
        else:
            for optimizer in self.optimizers:
                optimizer.step()
        self._masters.push()
        self._changes.remember(self._watched())
        self._surroundings.operations.leave()

    def _finish(self, window: Window, skipped: str | None) -> None:
        if window.weight and skipped is not None:
            self._emit(Notice(f"step {self.num_steps}: the update was skipped: {skipped}"))
        self._scale.update(is_finite=window.is_finite)
        self.skipped = skipped is not None
        self.num_skipped += self.skipped
        self.num_steps += 1
        self._emit(
            StepFinished(
                self.number, self.num_steps - 1, loss=window.loss, weight=window.weight, skipped=skipped
            )
        )

    def _closure_optimizer(self) -> torch.optim.Optimizer | None:
        return next(filter(needs_closure, self.optimizers), None)

    def _step_with_closure(self, batch: GlobalBatch, loss_fn: LossFunction, embed: Embed | None) -> float:
        """One step of an optimizer that computes loss and gradient as often as it likes. *Collective.*

        If one of these evaluations is to be skipped the whole step is, and what it did so far is taken back.
        """
        self.check_not_failed()
        self._in_step = True
        (optimizer,) = self.optimizers
        self._masters.attach()
        self._masters.pull()
        windows: list[Window] = []

        def closure() -> float:
            self._masters.push()
            self._changes.remember(self._watched())
            self._window = Window()
            windows.append(self._window)
            self._evaluate(batch, loss_fn, embed, self._window)
            self._clip()
            reason = self._reason_to_skip(self._window)
            if reason is not None:
                raise _SkippedError(reason)
            return self._window.loss

        held = [parameter for group in self._groups() for parameter in group["params"]]
        before = Snapshot(self.model, held, optimizer)
        skipped: str | None = None
        try:
            optimizer.step(closure)
        except BaseException as error:
            before.restore()
            if self._failure is None:
                self._window = None
            else:
                self._before = before  # `skip` ends the step
            if not isinstance(error, _SkippedError):
                raise
            skipped = str(error)
        finally:
            self._masters.push()
            self._changes.remember(self._watched())
        self._window = None
        self._num_batches += 1
        window = windows[0] if skipped is None else windows[-1]
        self._finish(window, skipped)
        return window.loss


class _SkippedError(Exception):
    """Ends an optimizer's step from within the function that computes loss and gradient; says why."""


def as_optimizers(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that a user gave: one, several or none.

    Raises:
        UsageError: it is something else, or one that computes the gradient itself is not alone.
    """
    if optimizer is None:
        return ()
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise UsageError(
                f"{type(each).__name__} is no torch.optim.Optimizer: expected one, several or None."
            )
        if needs_closure(each) and len(optimizers) > 1:
            raise UsageError(
                f"{type(each).__name__} computes the gradient several times in a step, so it can't share a replica "
                f"with other optimizers: give it one of its own."
            )
    return optimizers


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``step`` can't be called without a function that computes loss and gradient."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
