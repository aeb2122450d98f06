"""The update where every worker steps, and keeps the optimizer's state of, its own part of the parameters.

The user's own optimizers step: meanwhile each parameter shows only this worker's part of itself, and those of
which it has none show no gradient. Then all get each other's parts. (ZeRO stage 1: Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", 2020.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from unisono.collectives.gather import gather_bytes, gather_tensors
from unisono.errors import UsageError
from unisono.gradients.layout import flat, is_dense, laid_out_like
from unisono.gradients.parameters import Optimizers
from unisono.gradients.part_exchange import PartExchange
from unisono.gradients.shared_parameters import SharedParameters
from unisono.gradients.shares import Part, share_out
from unisono.transport.base import Transport

ELEMENTWISE = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
"""Optimizers that treat every element alone, so that a parameter may be cut. Others update whole parameters."""
_Key = list[tuple[int, bool, bool, torch.dtype]]


class ShardedUpdate:
    """Steps `optimizers` with the parameters shared out among all workers.

    The state that each keeps is 1/P of the whole, P the number of workers. Costs, beside a step of 1/P of the
    parameters, that each worker gets the other parameters, n (P - 1) / P bytes.

    Args:
        optimizers: returns those in use now.
        transport: connects all workers.
        name: of the replica, for buffers.
        frozen: returns parameters that nobody steps, to be shared like those that the optimizers step.
        share_parameters: whether workers of one host have one copy of the parameters; None is where they can.
        is_taken: says whether another replica shares a parameter.
        name_of: returns the name of a parameter.

    Raises:
        UsageError: `share_parameters` is true, and workers don't see each other's memory.
    """

    def __init__(
        self,
        optimizers: Callable[[], Optimizers],
        transport: Transport,
        *,
        name: str,
        frozen: Callable[[], Iterable[nn.Parameter]],
        share_parameters: bool | None,
        is_taken: Callable[[nn.Parameter], bool],
        name_of: Callable[[nn.Parameter], str],
    ) -> None:
        self._optimizers = optimizers
        self._transport = transport
        self._name = name
        self._parameters: list[nn.Parameter] = []
        self._key: _Key = []
        self._shares: tuple[tuple[Part, ...], ...] = ()
        self._own: dict[Tensor, Part] = {}
        self._cut: dict[Tensor, dict[str, Any]] = {}
        self._exchanges: list[PartExchange] = []
        self._common = SharedParameters(
            transport,
            lambda: [*self._held(), *frozen()],
            is_taken=is_taken,
            name_of=name_of,
            share=share_parameters,
        )

    def step(self) -> None:
        """Let the optimizers step. *Collective.* *Blocking.*"""
        self._common.begin()
        self._share_out()
        for optimizer in self._optimizers():
            self._cut_state(optimizer)
        stepped = [parameter.grad is not None for parameter in self._parameters]
        with self._showing_parts():
            for optimizer in self._optimizers():
                optimizer.step()
        for optimizer in self._optimizers():
            self._note_state(optimizer)
        with torch.no_grad():
            for exchange in self._exchanges:
                exchange.run(stepped)
        self._common.end()
        # Also where others have written them, which torch can't know.
        torch.autograd.graph.increment_version(
            [p for p, was_stepped in zip(self._parameters, stepped, strict=True) if was_stepped]
        )

    def state_dicts(self) -> list[dict[str, Any]]:
        """Return the states of the optimizers, whole, the same on all workers. *Collective.* *Blocking.*"""
        self._share_out()
        whole = self._whole_state()
        return [self._with_state(optimizer, whole) for optimizer in self._optimizers()]

    def forget(self) -> None:
        """Take the optimizers' states for whole: they were just loaded."""
        self._cut.clear()

    def share_parameters(self) -> None:
        """Let the workers of each host have one copy of the parameters. *Collective.* *Blocking.*

        Raises:
            UsageError: a parameter can't be shared and has to be.
        """
        self._common.place()

    def shares(self, parameter: nn.Parameter) -> bool:
        """Return whether the workers of a host have one copy of `parameter` through this."""
        return parameter in self._common

    def close(self) -> None:
        """Share no parameters any more."""
        self._common.close()

    # --- who has what

    def _held(self) -> Iterator[nn.Parameter]:
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _share_out(self) -> None:
        """Follow parameters that came, went or changed their kind. *Collective* if there are any."""
        parameters, key = [], []
        for optimizer in self._optimizers():
            cuts = type(optimizer) in ELEMENTWISE
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    is_sparse = parameter.grad is not None and parameter.grad.is_sparse
                    parameters.append(parameter)
                    can_cut = cuts and not is_sparse and is_dense(parameter)
                    key.append((id(parameter), can_cut, parameter in self._common, parameter.dtype))
        if key == self._key:
            return
        whole = self._whole_state()
        self._parameters, self._key = parameters, key
        sizes = [parameter.numel() for parameter in parameters]
        self._shares = share_out(sizes, [can_cut for _, can_cut, *_ in key], self._transport.world_size)
        self._own = {self._parameters[part.index]: part for part in self._shares[self._transport.rank]}
        self._cut.clear()
        self._new_exchanges()
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                held = [parameter for parameter in group["params"] if parameter in whole]
                optimizer.state.update({parameter: whole[parameter] for parameter in held})

    def _new_exchanges(self) -> None:
        """Plan who gets whose parts: of shared parameters one worker of every other host, else all."""
        shared = [parameter in self._common for parameter in self._parameters]
        transport = self._transport

        def parts_that_are(wanted: bool) -> list[list[Part]]:
            return [[part for part in parts if shared[part.index] == wanted] for parts in self._shares]

        def others(owner: int) -> list[int]:
            return [rank for rank in range(transport.world_size) if rank != owner]

        def one_of_each_host(owner: int) -> list[int]:
            (place,) = (ranks.index(owner) for ranks in transport.hosts if owner in ranks)
            return [ranks[place % len(ranks)] for ranks in transport.hosts if owner not in ranks]

        self._exchanges = [
            PartExchange(
                transport,
                f"{self._name}/updated",
                parts_that_are(False),
                lambda index: self._parameters[index],
                others,
            )
        ]
        if any(shared):
            self._exchanges.append(
                PartExchange(
                    transport,
                    f"{self._name}/updated between hosts",
                    parts_that_are(True),
                    lambda index: self._target(self._parameters[index]),
                    one_of_each_host,
                )
            )

    def _target(self, parameter: nn.Parameter) -> Tensor:
        """Return what an update of `parameter` is to write."""
        shared = self._common.shared(parameter)
        return parameter.data if shared is None else shared

    @contextmanager
    def _showing_parts(self) -> Iterator[None]:
        """Let each parameter be its own part, with that part of its gradient."""
        hidden: list[tuple[nn.Parameter, Tensor, Tensor | None, Tensor]] = []
        for parameter in self._parameters:
            gradient, part = parameter.grad, self._own.get(parameter)
            if gradient is None:
                continue
            data, shown = parameter.data, None
            parameter.grad = None
            if part is not None:
                shown, gradient_shown = self._target(parameter), gradient
                if not _is_whole(part, parameter):
                    gradient_shown = flat(laid_out_like(gradient, data))[part.start : part.stop]
                    shown = flat(shown)[part.start : part.stop]
                parameter.data = shown
                parameter.grad = gradient_shown
            hidden.append((parameter, data, shown, gradient))
        try:
            yield
        finally:
            for parameter, data, shown, gradient in hidden:
                if shown is not None and parameter.data_ptr() != shown.data_ptr():
                    shown.copy_(parameter.data)  # the optimizer has put a new tensor in its place
                parameter.grad = None
                parameter.data = data
                parameter.grad = gradient

    # --- the state of the optimizers

    def _cut_state(self, optimizer: optim.Optimizer) -> None:
        """Keep of whatever state is whole the own part."""
        for parameter, state in list(optimizer.state.items()):
            if self._cut.get(parameter) is state:
                continue
            part = self._own.get(parameter)
            if part is None:
                del optimizer.state[parameter]
                continue
            if not _is_whole(part, parameter):
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                        whole = flat(laid_out_like(value, parameter))
                        state[name] = whole[part.start : part.stop].clone()
            self._cut[parameter] = state

    def _note_state(self, optimizer: optim.Optimizer) -> None:
        """Note that what the optimizer has now is of parts."""
        for parameter in self._own:
            if parameter in optimizer.state:
                self._cut[parameter] = optimizer.state[parameter]

    def _whole_state(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of each parameter that this was stepping so far, put together. *Collective.*"""
        parts = sorted(
            (part.index, part.start, rank) for rank, each in enumerate(self._shares) for part in each
        )
        states = {p: s for optimizer in self._optimizers() for p, s in optimizer.state.items()}
        own = {}
        for number, (index, _, rank) in enumerate(parts):
            if rank == self._transport.rank:
                state = states.get(self._parameters[index], {})
                own[number] = {name: state[name] for name in sorted(state)}
        described = {number: _describe(state) for number, state in own.items()}
        facts = [json.loads(each or b"[]") for each in gather_bytes(self._transport, described, len(parts))]
        tensors = [
            (number, name) for number, fact in enumerate(facts) for name, value in fact if value is None
        ]
        mine = {at: own[number][name] for at, (number, name) in enumerate(tensors) if number in own}
        gathered = dict(zip(tensors, gather_tensors(self._transport, mine, len(tensors)), strict=True))
        found: dict[Tensor, dict[str, list[Any]]] = {}
        for number, (index, _, _) in enumerate(parts):
            pieces = found.setdefault(self._parameters[index], {})
            for name, value in facts[number]:
                pieces.setdefault(name, []).append(gathered[number, name] if value is None else value[0])
        return {
            parameter: {name: _joined(pieces, parameter) for name, pieces in each.items()}
            for parameter, each in found.items()
            if each
        }

    def _with_state(self, optimizer: optim.Optimizer, whole: dict[Tensor, dict[str, Any]]) -> dict[str, Any]:
        """Return what ``optimizer.state_dict()`` is with the whole state of its parameters."""
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        parts = dict(optimizer.state)
        try:
            optimizer.state.update({p: state for p, state in whole.items() if p in held})
            return optimizer.state_dict()
        finally:
            optimizer.state.clear()
            optimizer.state.update(parts)


def check_sharded(optimizers: Optimizers) -> None:
    """Raise a `UsageError` unless all optimizers can step parts of the parameters."""
    if not optimizers:
        raise UsageError("update='sharded' shares out the state of optimizers: give run.replicate one.")
    for optimizer in optimizers:
        if isinstance(optimizer, optim.LBFGS):
            raise UsageError(
                "update='sharded': LBFGS computes with all parameters at once; use 'replicated'."
            )


def _describe(state: dict[str, Any]) -> bytes:
    """Return what is in a state but for the values of tensors."""
    for name, value in state.items():
        if not isinstance(value, (Tensor, int, float, bool, str, type(None))):
            raise UsageError(
                f"update='sharded': the optimizer's state {name!r} is a {type(value).__name__}, expected a tensor or "
                f"a number: it can't be sent to other workers."
            )
    facts = [[name, None if isinstance(value, Tensor) else [value]] for name, value in state.items()]
    return json.dumps(facts).encode()


def _joined(pieces: list[Any], parameter: Tensor) -> Any:
    """Return one entry of a parameter's state out of what the owners of its parts have."""
    first = pieces[0]
    sizes = [piece.numel() if isinstance(piece, Tensor) else 0 for piece in pieces]
    is_cut = len(pieces) > 1 and sum(sizes) == parameter.numel() and first.dim() == 1
    if not is_cut:
        if not isinstance(first, Tensor):
            return first
        return laid_out_like(first, parameter).clone() if first.shape == parameter.shape else first.clone()
    whole = torch.empty_like(parameter, dtype=first.dtype)
    flat(whole).copy_(torch.cat(pieces))
    return whole


def _is_whole(part: Part, parameter: Tensor) -> bool:
    return part.start == 0 and part.stop == parameter.numel()
