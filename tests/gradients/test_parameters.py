from __future__ import annotations

import torch
from torch import nn

from unisono.gradients.parameters import named_parameters, outside_parameters


def test_parameters_that_only_the_optimizer_knows_come_last_and_once() -> None:
    model = nn.Linear(2, 2)
    scale, shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(3))
    groups = [{"params": [model.weight, scale]}, {"params": [shift, model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    named = list(named_parameters(model, [optimizer]))
    assert [name for name, _ in named] == [
        "weight",
        "bias",
        "optimizer group 0, parameter 1",
        "optimizer group 1, parameter 0",
    ]
    assert named[2][1] is scale
    assert [parameter for _, parameter in outside_parameters(model, [optimizer])] == [scale, shift]


def test_tied_weights_come_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert [name for name, _ in named_parameters(model, [optimizer])] == ["0.weight"]
