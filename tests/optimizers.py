"""Every optimizer of torch that takes dense gradients, in the variants that compute differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
    "LBFGS with line search": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
