from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import MismatchError
from unisono.strategies.step_table import (
    Row,
    StepTable,
    TableShape,
    bits_float,
    float_bits,
    new_table,
    write_row,
)


def row(**changes: Any) -> Row:
    given: dict[str, Any] = {
        "weight": 1.0,
        "loss": 0.5,
        "gave_weight": False,
        "fired_late": False,
        "present": [],
        "averaged": [],
        "digests": [],
        "signature": 5,
    }
    given |= changes
    given.setdefault("sparse", [False] * len(given["present"]))
    return Row(**given)


def table_of(rows: list[Row | None], *, parameters: int = 0, averaged: int = 0, others: int = 0) -> StepTable:
    """Build the table as two workers would: each fills the rows of its own, then they are added."""
    shape = TableShape(len(rows), parameters, averaged, others)
    halves = [new_table(shape), new_table(shape)]
    for index, filled in enumerate(rows):
        if filled is not None:
            write_row(halves[index % 2], index, filled)
    return StepTable(halves[0] + halves[1], shape)


@given(st.floats())
def test_doubles_travel_as_bits(value: float) -> None:
    bits = float_bits(value)
    assert -(2**63) <= bits < 2**63
    assert float_bits(bits_float(bits)) == bits


@given(st.data(), st.integers(0, 200))
def test_flags_of_any_number_of_parameters_survive(data: st.DataObject, count: int) -> None:
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    one, other = data.draw(flags), data.draw(flags)
    table = table_of([row(present=one), None, row(present=other)], parameters=count)
    assert table.present() == [a or b for a, b in zip(one, other, strict=True)]


def test_the_loss_is_the_weighted_mean() -> None:
    table = table_of([row(weight=1, loss=4.0), row(weight=3, loss=2.0), None])
    assert table.weight == 4
    assert table.loss == 2.5


def test_a_loss_of_weight_zero_counts_as_nothing_even_if_it_is_nan() -> None:
    table = table_of([row(weight=0, loss=math.nan), row(weight=2, loss=3.0)])
    assert table.loss == 3.0


def test_a_nan_loss_with_weight_makes_the_mean_nan() -> None:
    assert math.isnan(table_of([row(loss=math.nan), row(loss=3.0)]).loss)


def test_a_step_without_weight_has_no_loss() -> None:
    table = table_of([row(weight=0), None])
    assert table.weight == 0
    assert math.isnan(table.loss)


def test_one_late_gradient_anywhere_is_known_to_all() -> None:
    assert not table_of([row(), row()]).fired_late
    assert table_of([row(), row(fired_late=True)]).fired_late


@pytest.mark.parametrize(("kinds", "words"), [([1, 0], "0 but only.* 1"), ([0, 0, 1], "2 but only.* 0")])
def test_weights_for_some_micro_batches_only_are_refused(kinds: list[int], words: str) -> None:
    table = table_of([row(gave_weight=bool(kind)) for kind in kinds])
    with pytest.raises(MismatchError, match=words):
        table.check_weights_agree()


def test_empty_micro_batches_need_no_weight() -> None:
    table_of([row(gave_weight=True), None, row(gave_weight=True)]).check_weights_agree()


def test_weights_of_a_buffer_count_those_that_changed_it() -> None:
    rows = [row(weight=2, averaged=[True, False]), row(weight=3, averaged=[True, True]), None]
    assert table_of(rows, averaged=2).averaged_weights() == [5, 3]


def test_changers_of_a_buffer_are_grouped_by_new_value() -> None:
    rows = [row(digests=[7, 0]), row(digests=[0, 0]), row(digests=[7, 0]), row(digests=[9, 0])]
    table = table_of(rows, others=2)
    assert table.changers(0) == {7: [0, 2], 9: [3]}
    assert table.changers(1) == {}


def test_all_kinds_of_cells_have_columns_of_their_own() -> None:
    first = row(present=[True] * 70, averaged=[False] * 65, digests=[2**62, 1])
    second = row(present=[False] * 70, averaged=[True] * 65, digests=[0, 1], weight=4.0)
    table = table_of([first, second], parameters=70, averaged=65, others=2)
    assert table.present() == [True] * 70
    assert table.averaged_weights() == [4.0] * 65
    assert table.changers(0) == {2**62: [0]}
    assert table.changers(1) == {1: [0, 1]}
    assert new_table(TableShape(2, 70, 65, 2)).shape == torch.Size([2, 4 + 2 + 2 + 2 + 2])


def test_rows_of_different_steps_are_refused() -> None:
    table_of([row(), None, row()]).check_signatures_agree([0, 1, 1], step=3)
    with pytest.raises(MismatchError, match=r"step 3: rank 1 \(micro-batch 2\) and rank 0 \(micro-batch 0\)"):
        table_of([row(), None, row(signature=6)]).check_signatures_agree([0, 1, 1], step=3)


def test_gradients_are_sparse_if_all_that_there_are_are_sparse() -> None:
    shape = TableShape(3, 4, 0, 0)
    table = new_table(shape)
    write_row(table, 0, row(present=[True, True, True, False], sparse=[True, True, False, False]))
    write_row(table, 1, row(present=[True, True, False, False], sparse=[True, False, False, False]))
    found = StepTable(table, shape)
    assert found.wrongly_planned([]) == {0: True}
    assert found.wrongly_planned([0, 3]) == {}
    assert found.wrongly_planned([1, 2]) == {0: True, 1: False, 2: False}
