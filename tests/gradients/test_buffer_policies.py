"""Which policy is declared for which buffer, and what follows from all values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.gradients.buffer_policies import check_declared, combine, describe_declared, policies_of


class Quantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.zeros(2))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("started", torch.tensor(False), persistent=False)


def model() -> nn.Module:
    return nn.ModuleDict({"a": Quantizer(), "b": nn.Sequential(Quantizer())})


def declared_names(whole: nn.Module, declared: Any) -> dict[str, Any]:
    found = policies_of(whole, declared)
    return {name: found[id(buffer)] for name, buffer in whole.named_buffers() if id(buffer) in found}


def test_names_are_exact_or_patterns_and_the_exact_one_goes_first() -> None:
    declared = {"*.codebook": "mean", "a.*": "first", "a.codebook": "last"}
    assert declared_names(model(), declared) == {
        "a.codebook": "last",
        "a.seen": "first",
        "a.started": "first",
        "b.0.codebook": "mean",
    }


def test_a_shared_buffer_can_be_declared_under_either_name() -> None:
    whole = model()
    whole["b"][0].codebook = whole["a"].codebook
    assert declared_names(whole, {"*": "last", "b.0.codebook": "first"})["a.codebook"] == "first"


def test_what_cannot_be_declared_is_an_error_that_names_the_nearest() -> None:
    wrong: list[tuple[Any, str]] = [
        ({"a.codebok": "mean"}, "'a.codebok' names no buffer of the model; do you mean 'a.codebook'?"),
        ({"*.codebooks": "mean"}, r"'\*.codebooks' names no buffer of the model; do you mean"),
        ({"a.codebook": "men"}, "there is no such policy; do you mean 'mean'?"),
        ({"a.codebook": 3}, "expected one of mean, first, last, sum, or a function"),
        ({"a.seen": "mean"}, "'a.seen' is torch.int64, which has no exact mean"),
        ({"b*": "mean"}, "'b.0.seen' is torch.int64, which has no exact mean"),
        ({"a.started": "sum"}, "'a.started' is torch.bool, which has no differences"),
        ([("a.seen", "sum")], "expected a mapping from names to policies"),
    ]
    for declared, message in wrong:
        with pytest.raises(UsageError, match=message):
            check_declared(model(), declared)
    with pytest.raises(UsageError, match="names no buffer of the model; it has none"):
        check_declared(nn.Linear(1, 1), {"queue": "first"})


def test_every_good_declaration_passes() -> None:
    check_declared(model(), {"*.codebook": "mean", "*.seen": "sum", "?.started": "first", "a.codebook": max})
    check_declared(model(), {})


def test_a_sum_adds_the_changes_along_the_tree() -> None:
    start = torch.tensor([1.0, 1e8])
    changes = [torch.tensor([float(m), 3.0]) for m in range(5)]
    values = {m: start + changes[m] for m in (4, 0, 2, 3)}
    seen = {m: value - start for m, value in values.items()}
    expected = start + ((seen[0] + (seen[2] + seen[3])) + seen[4])
    assert torch.equal(combine("b", "sum", start, values, [1.0] * 5), expected)


def test_a_sum_of_integers_is_exact() -> None:
    start = torch.tensor(2**53 + 1)
    values = {m: start + m for m in range(4)}
    assert combine("n", "sum", start, values, [1.0] * 4) == 2**53 + 7


def test_a_function_gets_values_and_weights_in_the_order_of_the_grid() -> None:
    def function(start: Tensor, values: list[Tensor], weights: list[float]) -> Tensor:
        start.add_(1)  # it may do with it what it likes
        return torch.cat([start, *values, torch.tensor(weights)])

    start = torch.zeros(1)
    values = {3: torch.tensor([3.0]), 1: torch.tensor([1.0])}
    found = combine("b", function, start, values, [0.5, 1.5, 2.5, 3.5])
    assert found.tolist() == [1, 1, 3, 1.5, 3.5]
    assert start.item() == 0


def test_a_sum_over_other_shapes_and_a_function_that_returns_no_tensor_are_errors() -> None:
    with pytest.raises(UsageError, match=r"micro-batch 1 made buffer 'b' torch.float32 \[2\], it was"):
        combine("b", "sum", torch.zeros(1), {1: torch.zeros(2)}, [1.0, 1.0])
    with pytest.raises(UsageError, match="declared for buffer 'b' returned NoneType, expected a tensor"):
        combine("b", lambda *_: None, torch.zeros(1), {0: torch.zeros(1)}, [1.0])  # type: ignore[arg-type,return-value]


def test_what_workers_must_declare_alike_is_told_in_words() -> None:
    assert describe_declared({"a": "sum", "b*": max, "c": nn.ReLU()}) == [
        "the policy of buffers 'a' is 'sum'",
        "the policy of buffers 'b*' is the function max",
        "the policy of buffers 'c' is the function ReLU",
    ]
