"""Metrics as states that can be merged: one for each micro-batch, joined along the tree, finished at the end.

This file owns what a state is, how two of them become one, how they travel, and the two kinds of metric: a
function of the user, and a torchmetrics object. It talks to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn

from unisono.errors import UsageError

State = dict[str, list[Tensor]]
"""What a metric knows about a block of micro-batches, on the CPU: for each name one tensor, or a list that is
joined at the end."""
Reduction = Callable[[Tensor, Tensor], Tensor]
Call = Callable[[Callable[[Any, Any], Any]], Any]
"""Calls a function of (model, micro-batch) under the micro-batch's random numbers."""


class Metric(Protocol):
    """A metric as this file needs it."""

    @property
    def reductions(self) -> Mapping[str, Reduction | None]:
        """How two states of a name become one; None joins the lists, in the order of the micro-batches."""

    def measure(self, call: Call) -> State:
        """Return the state of one micro-batch."""

    def finish(self, state: State, num_micro_batches: int) -> Any:
        """Return the figure of the state of all micro-batches."""


class WeightedMean:
    """A function's values, averaged with the weights that it returns.

    Args:
        name: for messages.
        function: (model, micro_batch) -> (value, weight).
    """

    reductions: Mapping[str, Reduction | None] = {"sums": torch.add}

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        self._name = name
        self._function = function

    def measure(self, call: Call) -> State:
        result = call(self._function)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise UsageError(
                f"metric {self._name!r} returned {type(result).__name__}, expected a pair (value, weight): the "
                f"mean over the micro-batch and what it was taken over, for instance (loss, number of samples)."
            )
        value, weight = (self._number(item) for item in result)
        if not weight >= 0:
            raise UsageError(f"metric {self._name!r} returned weight {weight}, expected 0 or more.")
        # A mean over nothing is nan; it counts for nothing.
        product = value * weight if weight else 0.0
        return {"sums": [torch.tensor([product, weight], dtype=torch.float64)]}

    def _number(self, item: Any) -> float:
        if isinstance(item, Tensor) and item.numel() != 1:
            raise UsageError(
                f"metric {self._name!r} returned a tensor of shape {tuple(item.shape)}, expected one number."
            )
        return float(item)

    def finish(self, state: State, num_micro_batches: int) -> float:
        total, weight = state["sums"][0].tolist()
        return float(total / weight) if weight else float("nan")


class StatefulMetric:
    """A torchmetrics object, used through ``update``, ``compute``, ``reset`` and the states it declares.

    States with the reductions sum, max and min are merged pairwise, lists are joined; every other reduction is
    given all micro-batches' states stacked, in order, as torchmetrics gives it those of all processes.

    Args:
        name: for messages.
        metric: is cloned; stays as it was.
        predict: (model, micro_batch) -> the arguments of ``update``.
        device: where its states go for ``update``.
    """

    def __init__(
        self, name: str, metric: Any, predict: Callable[[Any, Any], Any], *, device: torch.device | None
    ) -> None:
        self._name = name
        self._predict = predict
        self._metric = metric.clone()
        self._metric.to(torch.device("cpu") if device is None else device)
        self._metric.reset()
        self.reductions = {
            state: None if isinstance(default, list) else _pairwise(metric._reductions[state])
            for state, default in metric._defaults.items()
        }

    def measure(self, call: Call) -> State:
        arguments = call(self._predict)
        self._metric.reset()
        if isinstance(arguments, Mapping):
            self._metric.update(**arguments)
        else:
            self._metric.update(*(arguments if isinstance(arguments, tuple | list) else (arguments,)))
        return {state: self._read(state) for state in self.reductions}

    def _read(self, state: str) -> list[Tensor]:
        value = getattr(self._metric, state)
        tensors = value if isinstance(value, list) else [value]
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise UsageError(
                    f"metric {self._name!r}: state {state!r} holds {type(tensor).__name__}, expected tensors: "
                    f"it can't be sent to other workers."
                )
        return [tensor.detach().cpu() for tensor in tensors]

    def finish(self, state: State, num_micro_batches: int) -> Any:
        metric = self._metric
        metric.reset()
        for name, tensors in state.items():
            setattr(metric, name, self._joined(name, [tensor.to(metric.device) for tensor in tensors]))
        metric._update_count = num_micro_batches
        # It has the states of all workers: torchmetrics must not add them up once more.
        metric._to_sync = False
        figure = metric.compute()
        return figure.item() if isinstance(figure, Tensor) and figure.dim() == 0 else figure

    def _joined(self, name: str, tensors: list[Tensor]) -> Tensor | list[Tensor]:
        if isinstance(self._metric._defaults[name], list):
            return tensors
        if len(tensors) == 1:
            return tensors[0]
        reduction = self._metric._reductions[name]
        if getattr(reduction, "__name__", "") == "dim_zero_cat":
            return torch.cat([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors])
        stacked = torch.stack(tensors)
        reduced: Tensor = stacked if reduction is None else reduction(stacked)
        return reduced


def _pairwise(reduction: Any) -> Reduction | None:
    """Return the operation on two states that is the same as torchmetrics' own on a stack of them."""
    known: dict[str, Reduction] = {
        "dim_zero_sum": torch.add,
        "dim_zero_max": torch.maximum,
        "dim_zero_min": torch.minimum,
    }
    return known.get(getattr(reduction, "__name__", ""))


def named_metrics(metrics: Any, device: torch.device | None) -> dict[str, Metric]:
    """Return the metrics by name; a single one under the empty name.

    Raises:
        UsageError: one of them is no metric.
    """
    if not isinstance(metrics, Mapping) or _is_stateful(metrics):
        return {"": _metric("", metrics, device)}
    if not metrics:
        raise UsageError("metrics is an empty dict: give at least one metric.")
    return {name: _metric(name, metric, device) for name, metric in metrics.items()}


def _metric(name: str, metric: Any, device: torch.device | None) -> Metric:
    if isinstance(metric, tuple) and len(metric) == 2 and _is_stateful(metric[0]) and callable(metric[1]):
        return StatefulMetric(name, _checked(name, metric[0]), metric[1], device=device)
    if _is_stateful(metric):
        return StatefulMetric(name, _checked(name, metric), _apply_to_pair, device=device)
    if callable(metric) and not isinstance(metric, type):
        return WeightedMean(name, metric)
    raise UsageError(
        f"metric {name!r} is {metric!r}: expected a function (model, micro_batch) -> (value, weight), a "
        f"torchmetrics object, or a pair (torchmetrics object, predict)."
    )


def _is_stateful(metric: Any) -> bool:
    return not isinstance(metric, type) and all(
        callable(getattr(metric, method, None)) for method in ("update", "compute", "reset")
    )


def _checked(name: str, metric: Any) -> Any:
    """Return a torchmetrics object whose own states are all there is to it."""
    inner = [part for part in metric.modules() if part is not metric] if isinstance(metric, nn.Module) else []
    if not getattr(metric, "_defaults", None) or any(_is_stateful(part) for part in inner):
        raise UsageError(
            f"metric {name!r} is a {type(metric).__name__}, which wraps other metrics: give those themselves, as "
            f"a dict {{name: (metric, predict)}}."
        )
    return metric


def _apply_to_pair(model: Any, micro_batch: Any) -> tuple[Any, Any]:
    """Predict for a torchmetrics object that was given without a function of its own."""
    if not isinstance(micro_batch, tuple | list) or len(micro_batch) != 2:
        raise UsageError(
            f"a micro-batch is a {type(micro_batch).__name__}, not a pair (inputs, targets): give the metric as "
            f"(metric, predict) with predict(model, micro_batch) -> the arguments of its update()."
        )
    inputs, targets = micro_batch
    return model(inputs), targets


def merge(left: list[State], right: list[State], metrics: Sequence[Metric]) -> list[State]:
    """Return the states of a node of the tree from those of its halves."""
    return [
        {
            name: lefts[name] + rights[name]
            if reduction is None
            else [reduction(lefts[name][0], rights[name][0])]
            for name, reduction in metric.reductions.items()
        }
        for lefts, rights, metric in zip(left, right, metrics, strict=True)
    ]


class _Array(msgspec.Struct, array_like=True):
    """A tensor on the wire."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(states: list[State]) -> bytes:
    """Return states as plain data: no pickle, no code."""
    return msgspec.msgpack.encode(
        [{name: [_pack(tensor) for tensor in tensors] for name, tensors in state.items()} for state in states]
    )


def decode(data: bytes) -> list[State]:
    """Return the states that `encode` was given."""
    states = msgspec.msgpack.decode(data, type=list[dict[str, list[_Array]]])
    return [
        {name: [_unpack(array) for array in arrays] for name, arrays in state.items()} for state in states
    ]


def _pack(tensor: Tensor) -> _Array:
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return _Array(
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"",
    )


def _unpack(array: _Array) -> Tensor:
    dtype: torch.dtype = getattr(torch, array.dtype)
    if not array.data:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(array.shape)
