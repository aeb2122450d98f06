"""Moves gradients from ``p.grad`` into the partial sums of their buckets, micro-batch by micro-batch.

Where a micro-batch starts a sum of its own, each gradient is moved as soon as it is there, while it is still in
the processor's cache, and its memory serves the next one: no second copy of all gradients comes to exist. Where
a micro-batch is added to a neighbour, its gradients wait for the end of the backward pass, since a parameter may
still receive more (several backward calls, re-entrant checkpoints). Where somebody waits for complete buckets
they are always taken over at once; a gradient that comes later is then reported, and the step has to be done
again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.gradients.buckets import Bucket, sum_dtype
from unisono.gradients.partial_sums import Allocate, PartialSums
from unisono.gradients.sparse_sums import SparseSums


class GradientCollector:
    """Collects the gradients of one set of parameters into `buckets`; `close` takes its hooks off again.

    Args:
        parameters: those that are trained.
        buckets: where dense gradients go. What is in none of them has a sparse gradient.
        float32_sums: whether `buckets` are so planned; sparse gradients are then added up in float32 too.
        rounds: give parameters gradients of their own dtype where sums have a wider one.
        allocate: ``allocate(number)`` says where the sums of bucket `number` get their buffers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        *,
        float32_sums: bool = False,
        rounds: bool = True,
        allocate: Callable[[int], Allocate] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._rounds = rounds
        dtypes = [sum_dtype(parameter, float32_sums=float32_sums) for parameter in parameters]
        self._wide = {i: dtype for i, dtype in enumerate(dtypes) if dtype != parameters[i].dtype}
        self._buckets = buckets
        self._sums = [
            PartialSums(bucket, None if allocate is None else allocate(number))
            for number, bucket in enumerate(buckets)
        ]
        self._bucket_of = {slot.index: number for number, b in enumerate(buckets) for slot in b.slots}
        self._views: list[list[Tensor] | None] = [None] * len(buckets)
        self._opened: list[list[Tensor] | None] = [None] * len(buckets)
        self._sparse = {
            index: SparseSums() for index in range(len(parameters)) if index not in self._bucket_of
        }
        self._sparse_in_leaf: list[bool] = []
        self._slot_of = {slot.index: at for b in buckets for at, slot in enumerate(b.slots)}
        self._fired = [False] * len(self._parameters)
        self._missing = [0] * len(buckets)
        self._leaf: int | None = None
        self._present: list[bool] = []
        self._on_complete: Callable[[int], None] | None = None
        self._scale = 1.0
        self.fired_late = False
        self.ready_order: dict[int, None] | None = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._on_gradient, index)
            )
            for index, parameter in enumerate(self._parameters)
        ]
        # Each parameter's, in the order in which they are called.
        self._all_hooks: list[Any] = [parameter._post_accumulate_grad_hooks for parameter in self._parameters]

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        for index in self._wide:
            self._set_gradient_dtype(index, self._parameters[index].dtype)

    def begin_step(self, merges: dict[int, int], *, scale: float = 1.0) -> None:
        """Start a step.

        Args:
            merges: what each own micro-batch completes, see `count_merges`.
            scale: what every gradient is multiplied by as it is taken over. Other than 1 it needs gradients that
                come in one piece; one that does not is reported as late.
        """
        self.fired_late = False
        self._scale = scale
        for sums in self._sums:
            sums.begin(merges, scale=scale)
        for sparse in self._sparse.values():
            sparse.begin(merges)

    def clear(self) -> None:
        """Drop all gradients. What comes next is of no step, and of a parameter's own dtype if sums are rounded."""
        self._drop()
        self.end_step()

    def accumulate_anew(self) -> None:
        """Drop all gradients. What comes next is of a step, so autograd adds it up in the dtype of the sums."""
        self._drop()
        for index, dtype in self._wide.items():
            self._set_gradient_dtype(index, dtype)

    def end_step(self) -> None:
        """After all sums were published: let parameters without a gradient have one of their own dtype next."""
        if self._rounds:
            for index in self._wide:
                self._set_gradient_dtype(index, self._parameters[index].dtype)

    def _drop(self) -> None:
        self._leaf = None
        for parameter in self._parameters:
            parameter.grad = None

    def multiply(self, factor: float) -> None:
        """Multiply what the loss function's own backward calls have left in ``p.grad``, if anything."""
        left = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.requires_grad:
                # Not in place: the loss may be a function of it, after backward(create_graph=True).
                parameter.grad = gradient.detach() * factor
            elif gradient is not None:
                left.append(gradient)
        if left:
            torch._foreach_mul_(left, factor)

    def begin_leaf(self, leaf: int, *, on_complete: Callable[[int], None] | None = None) -> None:
        """Start one micro-batch. `on_complete` is told each bucket that was taken over, once."""
        self._leaf, self._on_complete = leaf, on_complete
        self._come_last()
        self._fired = [False] * len(self._parameters)
        self._missing = [len(bucket.slots) for bucket in self._buckets]
        self._views = [None] * len(self._buckets)
        self._opened = [sums.open() if sums.streams(leaf) else None for sums in self._sums]
        self._present = [False] * len(self._parameters)
        self._sparse_in_leaf = [False] * len(self._parameters)

    def end_leaf(self) -> list[bool]:
        """Take over what is left; return for each parameter whether this micro-batch has a gradient for it."""
        for number in range(len(self._buckets)):
            if self._views[number] is None:
                self._absorb(number)
        for index, sums in self._sparse.items():
            self._absorb_sparse(index, sums)
        self._leaf = None
        return self._present

    @property
    def sparse_in_leaf(self) -> list[bool]:
        """For each parameter, whether its gradient in the last micro-batch was sparse."""
        return self._sparse_in_leaf

    @property
    def sparse(self) -> dict[int, SparseSums]:
        """The sums of each parameter that is in no bucket."""
        return self._sparse

    def publish_sparse(self, totals: Mapping[int, Tensor | None], *, scale: float) -> None:
        """Give parameters their sparse gradients, `totals` times `scale`."""
        for index, total in totals.items():
            self._hand_over(index, None if total is None else (total * scale).coalesce())

    def partials(self, bucket: int) -> dict[Hashable, Tensor]:
        """Return this worker's partial sums of one bucket, as flat tensors."""
        return self._sums[bucket].partials()

    def publish(self, bucket: int, total: Tensor, *, present: Sequence[bool]) -> None:
        """Make ``p.grad`` a view of `total` for each parameter of the bucket that is present, else None."""
        views = self._sums[bucket].views_of(total)
        for slot, view in zip(self._buckets[bucket].slots, views, strict=True):
            # Another tensor over the same memory: the user may make it something else, as `model.double()` does.
            self._hand_over(slot.index, view.detach() if present[slot.index] else None)

    def _hand_over(self, index: int, gradient: Tensor | None) -> None:
        parameter = self._parameters[index]
        if index in self._wide and self._rounds:
            parameter.grad = None
            self._set_gradient_dtype(index, parameter.dtype)
            gradient = None if gradient is None else gradient.to(parameter.dtype)
        parameter.grad = gradient

    def _come_last(self) -> None:
        """Let hooks that the user has added meanwhile see gradients before they are taken away."""
        for hooks, hook in zip(self._all_hooks, self._hooks, strict=True):
            if len(hooks) > 1 and hook.id in hooks and next(reversed(hooks)) != hook.id:
                # torch goes by the order of insertion, so move_to_end() would not do.
                hooks[hook.id] = hooks.pop(hook.id)

    def _on_gradient(self, index: int, _: Tensor) -> None:
        if self._leaf is None:
            return  # a backward of the user's own, outside a step
        parameter = self._parameters[index]  # not what we were given: that is what a hook before returned
        if parameter.grad is None:
            raise UsageError(
                f"trained parameter {index} {list(parameter.shape)}: a hook took its gradient away in mid-backward, "
                f"as an optimizer that steps within backward does. That gradient is one micro-batch's: let the "
                f"replica's optimizer step, or change the gradient in place."
            )
        number = self._bucket_of.get(index)
        if number is None:
            return  # sparse ones are taken over at the end
        if self._views[number] is not None:
            self._absorb_late(index, parameter)
            return
        if self._fired[index]:
            self.fired_late = self.fired_late or self._scale != 1.0
            return
        self._fired[index] = True
        if self.ready_order is not None:
            self.ready_order.setdefault(index)
        opened = self._opened[number]
        if opened is not None:
            _move(parameter, opened[self._slot_of[index]], self._scale)
        self._missing[number] -= 1
        if self._missing[number] == 0 and (self._on_complete is not None or opened is not None):
            self._absorb(number)

    def _absorb(self, number: int) -> None:
        assert self._leaf is not None
        slots = self._buckets[number].slots
        gradients = [self._parameters[slot.index].grad for slot in slots]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            gradients = [self._made_dense(slot.index) for slot in slots]
        with torch.no_grad():
            views = self._sums[number].absorb(self._leaf, gradients)
        self._views[number] = views
        for slot, gradient in zip(slots, gradients, strict=True):
            self._present[slot.index] = gradient is not None
            self._parameters[slot.index].grad = None
        if self._on_complete is not None:
            self._on_complete(number)

    def _made_dense(self, index: int) -> Tensor | None:
        """Return a parameter's gradient as the dense one that was planned for; note whether it was not."""
        gradient = self._parameters[index].grad
        self._sparse_in_leaf[index] = gradient is not None and gradient.is_sparse
        return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

    def _absorb_sparse(self, index: int, sums: SparseSums) -> None:
        assert self._leaf is not None
        gradient = self._parameters[index].grad
        self._present[index] = gradient is not None
        self._sparse_in_leaf[index] = gradient is not None and gradient.is_sparse
        # A dense one is of no use here: the step is done again, with a bucket for it.
        sums.absorb(self._leaf, gradient if self._sparse_in_leaf[index] else None)
        self._parameters[index].grad = None

    def _set_gradient_dtype(self, index: int, dtype: torch.dtype) -> None:
        parameter = self._parameters[index]
        if parameter.grad is None or parameter.grad.dtype == dtype:
            parameter.grad_dtype = dtype

    def _absorb_late(self, index: int, parameter: Tensor) -> None:
        """Add a further gradient of a parameter whose bucket was taken over already."""
        number = self._bucket_of[index]
        views = self._views[number]
        assert views is not None
        assert parameter.grad is not None
        assert self._leaf is not None
        # With one of each kind the whole is dense.
        self._sparse_in_leaf[index] = self._sparse_in_leaf[index] and parameter.grad.is_sparse
        if self._on_complete is not None or self._opened[number] is None or self._scale != 1.0:
            self.fired_late = True
        else:
            with torch.no_grad():
                views[self._slot_of[index]].add_(parameter.grad)
        parameter.grad = None


def _move(parameter: Tensor, view: Tensor, scale: float) -> None:
    """Put a parameter's gradient times `scale` into `view` and make that its gradient."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient is not view and not gradient.is_sparse:
        with torch.no_grad():
            if scale == 1.0:
                view.copy_(gradient)
            else:
                torch.mul(gradient, scale, out=view)
        parameter.grad = view
