"""float32 copies of 16-bit parameters, which the optimizers update in their place.

A 16-bit weight of 1 can't take up an update smaller than 1/256 (bfloat16) or 1/2048 (float16). So the optimizers'
groups hold a float32 copy of each, the master, whose gradient is the float32 mean; after an update the parameter
is the master, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.errors import UsageError
from unisono.gradients.buckets import HALVES
from unisono.gradients.parameters import Named, Optimizers


class MasterWeights:
    """The masters of all 16-bit parameters that `optimizers` hold.

    Costs 4 bytes for each element besides what the optimizer keeps. A parameter that the script changes between
    steps gives its master the new value, unless it is written through ``.data``. It is the parameter's ``.grad``,
    of float32 too, that counts: its master gets it before an update.

    Raises:
        UsageError: an optimizer has stepped with a 16-bit parameter already.
    """

    def __init__(self, optimizers: Callable[[], Optimizers]) -> None:
        self._optimizers = optimizers
        # Weak: a master lives as long as some group holds it, also one of an optimizer that is not in use now.
        self._of_master: MutableMapping[nn.Parameter, nn.Parameter] = WeakTensorKeyDictionary()
        self._versions: dict[nn.Parameter, int] = {}
        self.attach()

    def parameter_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that a member of a group stands for."""
        return self._of_master.get(parameter, parameter)

    def without_one(self, named: Named) -> list[nn.Parameter]:
        """Return the parameters that no master stands for."""
        having = set(map(id, self._of_master.values()))
        return [parameter for _, parameter in named if id(parameter) not in having]

    def attach(self) -> None:
        """Put masters into all groups in the places of 16-bit parameters."""
        masters = {parameter: master for master, parameter in self._of_master.items()}
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                for at, parameter in enumerate(group["params"]):
                    if parameter.dtype not in HALVES:
                        continue
                    if parameter not in masters:
                        masters[parameter] = _new_master(parameter)
                        self._of_master[masters[parameter]] = parameter
                        self._versions[parameter] = parameter._version
                    _move_state(optimizer, parameter, masters[parameter])
                    group["params"][at] = masters[parameter]

    def pull(self) -> None:
        """Take over what the script changed in parameters since `push`.

        Raises:
            UsageError: a parameter has become wider than its master.
        """
        for master, parameter in self._of_master.items():
            if parameter.dtype.itemsize > master.dtype.itemsize:
                raise UsageError(
                    f"a parameter with a float32 master became {parameter.dtype}, expected one of 16 bits: convert "
                    f"the model before run.replicate(..., master_weights=True), and build its optimizer anew."
                )
            if parameter._version != self._versions[parameter]:
                with torch.no_grad():
                    master.copy_(parameter)
                self._versions[parameter] = parameter._version

    def take_gradients(self) -> None:
        """Give masters the gradients of their parameters, which are of float32: the same tensors."""
        for master, parameter in self._of_master.items():
            master.grad = parameter.grad

    def push(self) -> None:
        """Round the masters to their parameters."""
        if self._of_master:
            parameters: list[Tensor] = list(self._of_master.values())
            with torch.no_grad():
                torch._foreach_copy_(parameters, list(self._of_master))
            self._versions = {parameter: parameter._version for parameter in self._of_master.values()}


def _new_master(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)


def _move_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, master: nn.Parameter) -> None:
    """Give `master` the state that some optimizers (Adagrad) have before their first step."""
    state = optimizer.state.get(parameter)
    if not state:
        return
    if state.get("step", 1) != 0:
        raise UsageError(
            f"{type(optimizer).__name__} has state of a {parameter.dtype} parameter already: give run.replicate an "
            f"optimizer that has not stepped, with master_weights=True."
        )
    del optimizer.state[parameter]
    optimizer.state[master] = {key: _widened(value) for key, value in state.items()}


def _widened(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value
