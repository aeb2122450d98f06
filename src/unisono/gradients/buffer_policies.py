"""What the user declares about buffers: which value is right where micro-batches gave several.

A declaration maps names of buffers, or patterns as of `fnmatch`, to policies. This file finds out what is
declared for which buffer, and computes what has to be computed from all values; it keeps no buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.grid import tree_sum

BufferFunction = Callable[[Tensor, list[Tensor], list[float]], Tensor]
BufferPolicy = str | BufferFunction
Declared = Mapping[str, BufferPolicy]

POLICIES = ("mean", "first", "last", "sum")


def check_declared(model: nn.Module, declared: Declared) -> None:
    """Raise a `UsageError` for a policy that is none, or that no buffer of `model` has or can have."""
    if not isinstance(declared, Mapping):
        raise UsageError(
            f"buffers={declared!r}: expected a mapping from names to policies, such as {{'queue': 'first'}}."
        )
    names = [name for name, _ in _named(model)]
    for key, policy in declared.items():
        if isinstance(policy, str) and policy not in POLICIES:
            nearest = get_close_matches(policy, POLICIES, n=1, cutoff=0.0)[0]
            raise UsageError(
                f"buffers={{{key!r}: {policy!r}}}: there is no such policy; do you mean {nearest!r}? Known are "
                f"{', '.join(POLICIES)} and functions of (start, values, weights)."
            )
        if not isinstance(policy, str) and not callable(policy):
            raise UsageError(
                f"buffers={{{key!r}: {policy!r}}}: expected one of {', '.join(POLICIES)}, or a function of "
                f"(start, values, weights)."
            )
        if not any(_matches(name, key) for name in names):
            nearest_names = get_close_matches(key, names, n=1, cutoff=0.0)
            hint = f"do you mean {nearest_names[0]!r}?" if nearest_names else "it has none at all."
            raise UsageError(f"buffers: {key!r} names no buffer of the model; {hint}")
    policies_of(model, declared)


def policies_of(model: nn.Module, declared: Declared) -> dict[int, BufferPolicy]:
    """Return the policy of each buffer for which one is declared, by the buffer's id.

    An exact name goes before patterns, and a pattern before those that are declared after it.

    Raises:
        UsageError: the policy can't be followed for a buffer of this dtype.
    """
    found: dict[int, BufferPolicy] = {}
    named = _named(model)
    for name, buffer in (*((n, b) for n, b in named if n in declared), *named):
        key = name if name in declared else next((key for key in declared if _matches(name, key)), None)
        if key is not None and id(buffer) not in found:
            found[id(buffer)] = declared[key]
            _check_dtype(name, buffer, declared[key])
    return found


def describe_declared(declared: Declared) -> list[str]:
    """Return what all workers must have declared alike, a line each."""
    return [f"the policy of buffers {key!r} is {_name_of(policy)}" for key, policy in declared.items()]


def combine(
    name: str, policy: BufferPolicy, start: Tensor, values: Mapping[int, Tensor], weights: Sequence[float]
) -> Tensor:
    """Return the value after the step for the policy ``"sum"`` or a function. Pure if the function is.

    Args:
        name: the buffer's.
        start: its value at the start of the step.
        values: the values that micro-batches gave it, by their number.
        weights: of all micro-batches of the grid.

    Raises:
        UsageError: a sum over values of several shapes, or a function that returned something else.
    """
    if policy == "sum":
        return _sum(name, start, values, len(weights))
    assert not isinstance(policy, str)
    numbers = sorted(values)
    value = policy(start.clone(), [values[n] for n in numbers], [weights[n] for n in numbers])
    if not isinstance(value, Tensor):
        raise UsageError(
            f"the function declared for buffer {name!r} returned {type(value).__name__}, expected a tensor."
        )
    return value.detach()


def _sum(name: str, start: Tensor, values: Mapping[int, Tensor], num_micro_batches: int) -> Tensor:
    for number, value in values.items():
        if value.shape != start.shape or value.dtype != start.dtype:
            raise UsageError(
                f"micro-batch {number} made buffer {name!r} {value.dtype} {list(value.shape)}, it was "
                f"{start.dtype} {list(start.shape)}: 'sum' needs a buffer that stays as it is; declare 'first', "
                f"'last' or a function for it."
            )
    changes = [values[n] - start if n in values else None for n in range(num_micro_batches)]
    total = tree_sum(changes, _add)
    return start if total is None else start + total


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _check_dtype(name: str, buffer: Tensor, policy: BufferPolicy) -> None:
    if policy == "mean" and not (buffer.is_floating_point() or buffer.is_complex()):
        raise UsageError(
            f"buffers: {name!r} is {buffer.dtype}, which has no exact mean: declare 'sum', 'first', 'last' or a "
            f"function for it, or make it floating-point."
        )
    if policy == "sum" and buffer.dtype == torch.bool:
        raise UsageError(
            f"buffers: {name!r} is {buffer.dtype}, which has no differences to add: declare 'first', 'last' or a "
            f"function for it."
        )


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all buffers under all their names."""
    return list(model.named_buffers(remove_duplicate=False))


def _matches(name: str, key: str) -> bool:
    return name == key or fnmatchcase(name, key)


def _name_of(policy: Any) -> str:
    if isinstance(policy, str):
        return repr(policy)
    return f"the function {getattr(policy, '__qualname__', type(policy).__qualname__)}"
