import pytest

from unisono.data.plan import AssignmentPlan
from unisono.errors import UsageError
from unisono.grid import assign

A, B, C = assign(8, [4, 4]), assign(8, [6, 2]), assign(8, [3, 3, 2])


def test_a_change_holds_from_its_step_on():
    plan = AssignmentPlan(A)
    plan.change(B, from_step=5)
    plan.change(C, from_step=9)
    assert [plan.at(step) for step in (0, 4, 5, 8, 9, 1000)] == [A, A, B, B, C, C]
    assert plan.changes == ((0, A), (5, B), (9, C))


def test_a_change_replaces_those_recorded_for_later():
    plan = AssignmentPlan(A)
    plan.change(B, from_step=5)
    plan.change(C, from_step=3)
    assert plan.changes == ((0, A), (3, C))
    plan.change(B, from_step=0)
    assert plan.changes == ((0, B),)


def test_wrong_changes_are_refused_and_change_nothing():
    plan = AssignmentPlan(A)
    with pytest.raises(UsageError, match="4 micro-batches in a plan over 8"):
        plan.change(assign(4, [2, 2]), from_step=1)
    with pytest.raises(UsageError, match="from_step=-1"):
        plan.change(B, from_step=-1)
    with pytest.raises(UsageError, match="step=-1"):
        plan.at(-1)
    assert plan.changes == ((0, A),)
