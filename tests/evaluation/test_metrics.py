import pytest
import torch
import torchmetrics
from torchmetrics.classification import BinaryAccuracy

from unisono.errors import UsageError
from unisono.metrics import decode, encode, named_metrics


def measure(metric, *results):
    """Return the figure of `metric` when its function gives `results` for one micro-batch."""
    (named,) = named_metrics(metric, None).values()
    return named.finish(named.measure(lambda function: results[0]), 1)


def test_a_state_survives_the_wire_in_any_dtype_and_shape():
    tensors = [
        torch.tensor(3.5, dtype=torch.float64),
        torch.zeros(0, 4, dtype=torch.int32),
        torch.rand(2, 3).bfloat16(),
        torch.tensor([True, False]),
        torch.tensor([1j]),
        torch.arange(6).reshape(2, 3).t(),
        torch.arange(6).reshape(2, 3)[:1, 0],
    ]
    ((restored,),) = [[state["x"] for state in decode(encode([{"x": tensors}]))]]
    for expected, found in zip(tensors, restored, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)


def test_a_weight_of_zero_counts_for_nothing_even_if_the_mean_is_nan():
    def metric(model, micro_batch):
        return 0

    assert torch.tensor(measure(metric, (float("nan"), 0))).isnan()
    assert measure(metric, (torch.tensor([2.5]), torch.tensor(4))) == 2.5


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (0.5, "returned float, expected a pair"),
        ((1, 2, 3), "expected a pair"),
        ((torch.ones(2), 2), r"shape \(2,\), expected one number"),
        ((1.0, -1), "weight -1.0, expected 0 or more"),
        ((1.0, float("nan")), "weight nan"),
    ],
)
def test_a_function_that_returns_something_else_is_an_error(result, message):
    with pytest.raises(UsageError, match=message):
        measure(lambda model, micro_batch: 0, result)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({}, "empty dict"),
        ("accuracy", "'accuracy': expected a function"),
        (BinaryAccuracy, "expected a function"),
        ({"a": (BinaryAccuracy(), 3)}, "metric 'a'"),
        (torchmetrics.MetricCollection([BinaryAccuracy()]), "wraps other metrics"),
        (BinaryAccuracy() + BinaryAccuracy(), "wraps other metrics"),
        (torchmetrics.MinMaxMetric(BinaryAccuracy()), "wraps other metrics"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, message):
    with pytest.raises(UsageError, match=message):
        named_metrics(metrics, None)
