"""The gradient of a global batch in double precision, to say how far the one in use is from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from unisono.collectives.announce import Announcer
from unisono.gradients.buffer_policies import Declared
from unisono.randomness import derive, keyed
from unisono.strategies import Synchronous
from unisono.strategies.base import GlobalBatch, LossFunction, ReplicaContext
from unisono.strategies.weights import unpack_loss
from unisono.transport.local import LocalTransport

Gradients = dict[str, Tensor]
NEGLIGIBLE = 1e-6


class _Silent:
    """Operations that nobody watches."""

    def enter(self, operation: str, step: int, *, waits: bool = True) -> None:
        """Note nothing."""

    def leave(self) -> None:
        """Note nothing."""


def compare_with_float64(
    model: nn.Module,
    batch: GlobalBatch,
    loss_fn: LossFunction,
    *,
    seed: int,
    buffers: Declared | None = None,
) -> dict[str, Any]:
    """Compute one global batch's gradient as the engine does and in float64, dropout off; say how they differ.

    Needs all micro-batches in this process. Works on copies: nothing of `model` changes.

    Returns:
        ``error``: the largest relative error (Euclidean norm) of any parameter's gradient, and its
        ``parameter``. ``mixing``: the same between float64 over the micro-batches and over the whole batch at
        once, or None where a layer mixes samples, the batch can't be put together or the model can't take it
        whole. ``reason``: why there is no comparison, if there is none.
    """
    try:
        ours = _engine_gradients(_without_dropout(model), batch, loss_fn, seed=seed, buffers=buffers or {})
        double = _without_dropout(model).double()
        parts = [(number, _to_double(data)) for number, data in batch]
        exact = _plain_gradients(double, parts, batch.sizes, loss_fn, seed=seed)
    except Exception as error:
        # The comparison runs user code in a precision it was not written for; that it can't is a result.
        return {
            "error": None,
            "parameter": None,
            "mixing": None,
            "reason": f"{type(error).__name__}: {error}",
        }
    largest, parameter = _largest_error(ours, exact)
    mixing = None if _mixes_samples(model) else _mixing_error(double, exact, batch, parts, loss_fn, seed=seed)
    return {"error": largest, "parameter": parameter, "mixing": mixing, "reason": None}


def _engine_gradients(
    model: nn.Module, batch: GlobalBatch, loss_fn: LossFunction, *, seed: int, buffers: Declared
) -> Gradients:
    device = next(model.parameters()).device
    transport = LocalTransport(device=device)
    context = ReplicaContext(
        number=0,
        model=model,
        parameters=lambda: [item for item in model.named_parameters() if item[1].requires_grad],
        transport=transport,
        announcer=Announcer(transport),
        operations=_Silent(),
        device=device,
        seed=seed,
        buffers=buffers,
    )
    engine = Synchronous().bind(context)
    engine.backward(batch, loss_fn, step=0)
    gradients = _gradients(model)
    engine.close()
    return gradients


def _plain_gradients(
    model: nn.Module,
    parts: list[tuple[int, Any]],
    sizes: Any,
    loss_fn: LossFunction,
    *,
    seed: int,
) -> Gradients:
    """Return the weighted mean of the gradients of `parts`, added one after the other."""
    device = next(model.parameters()).device
    model.zero_grad()
    total = 0.0
    with keyed(device) as reseed:
        for number, data in parts:
            reseed(derive(seed, "step", 0, 0, number))
            loss, given = unpack_loss(loss_fn(model, data), number)
            weight = float(sizes[number]) if given is None else given
            if weight and loss.requires_grad:
                (loss * weight).backward()  # type: ignore[no-untyped-call]
                total += weight
    return {name: gradient / total for name, gradient in _gradients(model).items()}


def _mixing_error(
    model: nn.Module,
    exact: Gradients,
    batch: GlobalBatch,
    parts: list[tuple[int, Any]],
    loss_fn: LossFunction,
    *,
    seed: int,
) -> float | None:
    """Return the error of the whole batch's gradient at once against `exact`, None if it can't be had."""
    try:
        whole = _concatenate([data for _, data in parts])
        if whole is None:
            return None
        at_once = _plain_gradients(model, [(0, whole)], [sum(batch.sizes)], loss_fn, seed=seed)
    except Exception:  # user code that was written for micro-batches; that it can't take more is a result
        return None
    error, _ = _largest_error(exact, at_once)
    return error


def _gradients(model: nn.Module) -> Gradients:
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _largest_error(found: Gradients, expected: Gradients) -> tuple[float, str | None]:
    """Return the largest relative error of a parameter's gradient, and the parameter.

    A gradient that is next to nothing beside the others (a bias before batch norm) is all rounding: left out.
    """
    norms = {name: float(value.norm()) for name, value in expected.items()}
    least = NEGLIGIBLE * math.hypot(*norms.values())
    errors = [
        (float((found[name].to(value.dtype) - value).norm()) / norms[name], name)
        for name, value in expected.items()
        if name in found and norms[name] > least
    ]
    return max(errors, default=(0.0, None))


def _without_dropout(model: nn.Module) -> nn.Module:
    clone = copy.deepcopy(model)
    for module in clone.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return clone


def _mixes_samples(model: nn.Module) -> bool:
    return any(isinstance(module, _NormBase) and module.training for module in model.modules())


def _to_double(data: Any) -> Any:
    """Return `data` with every floating-point tensor in it as float64."""
    if isinstance(data, Tensor):
        return data.double() if data.is_floating_point() else data
    if isinstance(data, Mapping):
        return {key: _to_double(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        items = [_to_double(value) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return data


def _concatenate(parts: list[Any]) -> Any:
    """Return micro-batches joined along their first dimension, or None where that can't be done."""
    first = parts[0]
    if isinstance(first, Tensor):
        alike = all(part.dim() and part.shape[1:] == first.shape[1:] for part in parts)
        return torch.cat(parts) if alike else None
    if type(first) in (list, tuple):
        joined = [_concatenate(list(items)) for items in zip(*parts, strict=True)]
        return None if any(item is None for item in joined) else type(first)(joined)
    if type(first) is dict:
        joined_items = {key: _concatenate([part[key] for part in parts]) for key in first}
        return None if any(item is None for item in joined_items.values()) else joined_items
    return None
