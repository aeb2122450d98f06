"""The update where every worker steps, and keeps the optimizer's state of, its own part of the parameters.

The user's own optimizers step: meanwhile each parameter shows only this worker's part of itself, and those of
which it has none show no gradient. Then all get each other's parts. (ZeRO stage 1: Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", 2020.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from unisono.collectives.gather import gather_bytes, gather_tensors
from unisono.errors import UsageError
from unisono.gradients.parameters import Optimizers
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
_ALIGNMENT = 64
_Key = list[tuple[int, bool]]


class ShardedUpdate:
    """Steps `optimizers` with the parameters shared out among all workers.

    The state that each keeps is 1/P of the whole, P the number of workers. Costs, beside a step of 1/P of the
    parameters, that each worker gets the other parameters, n (P - 1) / P bytes.

    Args:
        optimizers: returns those in use now.
        transport: connects all workers.
        name: of the replica, for buffers.
    """

    def __init__(self, optimizers: Callable[[], Optimizers], transport: Transport, *, name: str) -> None:
        self._optimizers = optimizers
        self._transport = transport
        self._name = name
        self._parameters: list[nn.Parameter] = []
        self._key: _Key = []
        self._shares: tuple[tuple[Part, ...], ...] = ()
        self._own: dict[Tensor, Part] = {}
        self._cut: dict[Tensor, dict[str, Any]] = {}
        self._kept: dict[int, tuple[object, tuple[list[Tensor], list[Tensor]]]] = {}

    def step(self) -> None:
        """Let the optimizers step. *Collective.* *Blocking.*"""
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
            self._exchange(stepped)

    def state_dicts(self) -> list[dict[str, Any]]:
        """Return the states of the optimizers, whole, the same on all workers. *Collective.* *Blocking.*"""
        self._share_out()
        whole = self._whole_state()
        return [self._with_state(optimizer, whole) for optimizer in self._optimizers()]

    def forget(self) -> None:
        """Take the optimizers' states for whole: they were just loaded."""
        self._cut.clear()

    # --- who has what

    def _share_out(self) -> None:
        """Follow parameters that came, went or changed their kind. *Collective* if there are any."""
        parameters, key = [], []
        for optimizer in self._optimizers():
            cuts = type(optimizer) in ELEMENTWISE
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    is_sparse = parameter.grad is not None and parameter.grad.is_sparse
                    parameters.append(parameter)
                    key.append((id(parameter), cuts and not is_sparse and _is_dense(parameter)))
        if key == self._key:
            return
        whole = self._whole_state()
        self._parameters, self._key = parameters, key
        sizes = [parameter.numel() for parameter in parameters]
        self._shares = share_out(sizes, [cuts for _, cuts in key], self._transport.world_size)
        self._own = {self._parameters[part.index]: part for part in self._shares[self._transport.rank]}
        self._cut.clear()
        self._kept.clear()
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                held = [parameter for parameter in group["params"] if parameter in whole]
                optimizer.state.update({parameter: whole[parameter] for parameter in held})

    @contextmanager
    def _showing_parts(self) -> Iterator[None]:
        """Let each parameter be its own part, with that part of its gradient."""
        hidden = [(each, each.data, each.grad) for each in self._parameters]
        for parameter, data, gradient in hidden:
            part = self._own.get(parameter)
            if gradient is None or (part is not None and _is_whole(part, parameter)):
                continue
            parameter.grad = None
            if part is not None:
                parameter.data = _flat(data)[part.start : part.stop]
                parameter.grad = _flat(_laid_out_like(gradient, data))[part.start : part.stop]
        try:
            yield
        finally:
            for parameter, data, gradient in hidden:
                if parameter.grad is not gradient:
                    parameter.grad = None
                    parameter.data = data
                    parameter.grad = gradient

    # --- exchanging what was updated

    def _exchange(self, stepped: Sequence[bool]) -> None:
        """Give all workers this one's parts of the parameters that were updated, and take theirs.

        Nobody writes its buffer again before all have come to the next gradient, and so have read it.
        """
        transport = self._transport
        if transport.world_size == 1:
            return
        name = f"{self._name}/updated"
        signal = torch.empty(0, dtype=torch.uint8, device=transport.device)
        sizes = [self._num_bytes(rank) for rank in range(transport.world_size)]
        packed = transport.allocate(name, sizes[transport.rank], torch.uint8)
        places, parts = self._views(transport.rank, packed, stepped)
        if parts:
            torch._foreach_copy_(places, parts)
        sends, receives, arriving = [], [], {}
        for peer in range(transport.world_size):
            if peer == transport.rank:
                continue
            if transport.maps(peer):
                sends.append((peer, signal))
                receives.append((peer, torch.empty_like(signal)))
                continue
            arriving[peer] = torch.empty(sizes[peer], dtype=torch.uint8, device=transport.device)
            sends.append((peer, packed))
            receives.append((peer, arriving[peer]))
        transport.start(sends, receives).wait()
        for peer in range(transport.world_size):
            if peer == transport.rank:
                continue
            buffer = arriving.get(peer)
            if buffer is None:
                buffer = transport.peer_view(peer, name)
                assert buffer is not None, "a peer names its buffer before it says that it is filled"
            places, parts = self._views(peer, buffer, stepped)
            if parts:
                torch._foreach_copy_(parts, places)

    def _num_bytes(self, rank: int) -> int:
        return sum(_padded(self._part_bytes(part)) for part in self._shares[rank])

    def _part_bytes(self, part: Part) -> int:
        return (part.stop - part.start) * self._parameters[part.index].element_size()

    def _views(self, rank: int, buffer: Tensor, stepped: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
        """Return where a rank's updated parts lie in its buffer, and in this worker's parameters.

        Views cost microseconds each, so they are kept as long as nothing has moved.
        """
        addresses = [self._parameters[part.index].data_ptr() for part in self._shares[rank]]
        signature = (buffer.data_ptr(), addresses, stepped)
        kept = self._kept.get(rank)
        if kept is not None and kept[0] == signature:
            return kept[1]
        views = self._new_views(rank, buffer, stepped)
        self._kept[rank] = (signature, views)
        return views

    def _new_views(
        self, rank: int, buffer: Tensor, stepped: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor]]:
        places, parts, offset = [], [], 0
        for part in self._shares[rank]:
            num_bytes = self._part_bytes(part)
            if stepped[part.index] and num_bytes:
                parameter = self._parameters[part.index].detach()
                place = buffer[offset : offset + num_bytes].view(parameter.dtype)
                is_dense = _is_dense(parameter)
                places.append(place if is_dense else place.view(parameter.shape))
                parts.append(_flat(parameter)[part.start : part.stop] if is_dense else parameter)
            offset += _padded(num_bytes)
        return places, parts

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
                        whole = _flat(_laid_out_like(value, parameter))
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
        return _laid_out_like(first, parameter).clone() if first.shape == parameter.shape else first.clone()
    whole = torch.empty_like(parameter, dtype=first.dtype)
    _flat(whole).copy_(torch.cat(pieces))
    return whole


def _is_whole(part: Part, parameter: Tensor) -> bool:
    return part.start == 0 and part.stop == parameter.numel()


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in some order."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda each: each[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order in which they lie in memory. A view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _laid_out_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return `tensor` with its elements in the order in which those of `other` lie in memory."""
    if tensor.stride() == other.stride():
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype).copy_(tensor)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
