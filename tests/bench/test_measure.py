"""How benchmarks measure and report."""

import json
from pathlib import Path

import pytest
import torch

import measure
import models


def test_the_interval_is_around_the_median() -> None:
    found = measure.interval([float(value) for value in range(101)])
    assert found.median == 50
    assert (found.low, found.high) == (40, 60)


def test_few_values_are_all_in_the_interval() -> None:
    found = measure.interval([3.0, 1.0, 2.0])
    assert (found.low, found.median, found.high) == (1.0, 2.0, 3.0)


def test_cases_run_forwards_and_backwards_in_every_round() -> None:
    order: list[str] = []

    def case(name: str) -> float:
        order.append(name)
        return float(len(order))

    times = measure.time_in_turn({name: lambda name=name: case(name) for name in "ABC"}, num_rounds=2)
    assert "".join(order) == "ABCCBAABCCBA"
    assert times["A"] == [(1 + 6) / 2, (7 + 12) / 2]


def test_a_ratio_is_taken_round_by_round() -> None:
    times = {"ours": [1.0, 20.0, 3.0], "peer": [2.0, 40.0, 6.0]}
    found = measure.ratios(times, "ours", "peer")
    assert (found.low, found.median, found.high) == (0.5, 0.5, 0.5)


def test_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    rows = [measure.Row("case a", "step", 1.5, "ms"), measure.Row("b / a", "ratio", 0.9, "", "<= 1.0", True)]
    measure.report("Title", rows, json_file=file)
    written = json.loads(file.read_text())
    assert written["rows"][1] == {
        "case": "b / a",
        "metric": "ratio",
        "value": 0.9,
        "unit": "",
        "target": "<= 1.0",
        "meets": True,
    }
    assert {"date", "commit", "machine"} <= written.keys()
    assert "case a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("build", "data", "num_parameters"),
    [(models.GPT, models.gpt_data, 10_893_312), (models.CNN, models.cnn_data, 539_498)],
)
def test_the_models_have_the_stated_sizes_and_train(build, data, num_parameters: int) -> None:
    model = build()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    loss = models.loss_fn(model, data(2, seed=0))
    loss.backward()
    assert torch.isfinite(loss)
