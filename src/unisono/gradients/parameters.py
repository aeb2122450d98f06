"""Which parameters a model and its optimizers have between them, what they are called, and which are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

Optimizers = Sequence[torch.optim.Optimizer]
Named = list[tuple[str, nn.Parameter]]


def named_parameters(model: nn.Module, optimizers: Optimizers) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the model's parameters, then those that only optimizers know; each once, frozen ones too."""
    yield from model.named_parameters()
    yield from outside_parameters(model, optimizers)


def outside_parameters(model: nn.Module, optimizers: Optimizers) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what optimizers update but the model does not hold, such as a temperature used in the loss."""
    seen = {id(parameter) for parameter in model.parameters()}
    for which, optimizer in enumerate(optimizers):
        name = "optimizer" if len(optimizers) == 1 else f"optimizer {which}"
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{name} group {number}, parameter {index}", parameter


class TrainedParameters:
    """What is trained now: what the optimizers hold and is not frozen; without optimizers all of the model.

    Called at every step, since scripts freeze, add and replace parameters in mid-run. Looking at all of them
    takes a fifth of the time of naming them, so names are asked for only when something has changed.

    Args:
        model: the model.
        optimizers: returns those in use now.
        notify: is told in words what the user should know.
        stands_for: returns the parameter that a member of a group stands for, by default itself.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Callable[[], Optimizers],
        notify: Callable[[str], None] = lambda message: None,
        stands_for: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._notify = notify
        self._stands_for = stands_for
        # The parameters themselves, not their ids: an id can come back with another parameter.
        self._seen: list[object] = []
        self._of_model: dict[str, nn.Parameter] = {}
        self._named: Named = []
        self.untrained: list[nn.Parameter] = []
        """Parameters of the model that could have a gradient but are in no optimizer's groups."""
        self.frozen: Named = []
        """Parameters that can't have a gradient now."""

    def __call__(self) -> Named:
        """Return names and parameters, in an order that all workers share."""
        now = list(self._look())
        if len(now) != len(self._seen) or any(a is not b for a, b in zip(now, self._seen, strict=True)):
            self._follow_model()
            self._name()
            self._seen = list(self._look())
        return self._named

    def _look(self) -> Iterator[object]:
        """Yield what decides about who is trained: parameters of the model and of groups, with who is frozen."""
        for parameter in _walk(self._model):
            yield parameter
            yield parameter.requires_grad
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter
                    yield parameter.requires_grad

    def _name(self) -> None:
        optimizers = self._optimizers()
        held = self._held()
        named = list(named_parameters(self._model, optimizers))
        own = [(n, p) for n, p in named if self._stands_for(p) is p]
        active = [(n, p) for n, p in own if p.requires_grad]
        self.frozen = [(n, p) for n, p in own if not p.requires_grad]
        self._named = [item for item in active if not optimizers or id(item[1]) in held]
        self.untrained = [p for _, p in active if optimizers and id(p) not in held]

    def _follow_model(self) -> None:
        """Let new parameters take the places of those that they replaced in the model; say what is left over."""
        before, self._of_model = self._of_model, dict(self._model.named_parameters())
        if not before or not self._optimizers():
            return
        held = self._held()
        in_model = {id(parameter) for parameter in self._of_model.values()}
        for name, parameter in self._of_model.items():
            old = before.get(name)
            if old is parameter or id(parameter) in held:
                continue
            if old is not None and id(old) in held and id(old) not in in_model:
                self._replace(name, old, parameter)
            elif old is None and parameter.requires_grad:
                self._notify(
                    f"parameter {name!r} is new and in no group of the optimizer, so it is not trained: "
                    f"give it to optimizer.add_param_group(...)."
                )

    def _held(self) -> set[int]:
        """Return the ids of the parameters that groups hold."""
        groups = (group for optimizer in self._optimizers() for group in optimizer.param_groups)
        return {id(self._stands_for(parameter)) for group in groups for parameter in group["params"]}

    def _replace(self, name: str, old: nn.Parameter, new: nn.Parameter) -> None:
        for optimizer in self._optimizers():
            for number, group in enumerate(optimizer.param_groups):
                members = list(enumerate(group["params"]))
                places = [(at, member) for at, member in members if self._stands_for(member) is old]
                for at, member in places:
                    group["params"][at] = new
                    optimizer.state.pop(member, None)
                if places:
                    self._notify(
                        f"parameter {name!r} was replaced in the model: group {number} of "
                        f"{type(optimizer).__name__} now holds the new one, whose state starts anew."
                    )


def _walk(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of `module` and all below it; shared ones several times."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child)
