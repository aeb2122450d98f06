import random

import numpy
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import classification, regression

from unisono.errors import UsageError
from unisono.evaluation import evaluate
from unisono.transport.local import LocalTransport
from worlds import on_process_groups, on_threads

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
CLASSES = 5


class Spread(torchmetrics.Metric):
    """Has a state of each kind that the usual metrics lack."""

    def __init__(self):
        super().__init__()
        self.add_state("means", torch.zeros(2), dist_reduce_fx="mean")
        self.add_state("joined", torch.zeros(1), dist_reduce_fx="cat")
        self.add_state("lowest", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.add_state("highest", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("own", torch.zeros(1), dist_reduce_fx=lambda stacked: stacked.prod(0))
        self.add_state("parts", [], dist_reduce_fx=None)

    def update(self, logits, target):
        self.means = logits.mean(0)[:2]
        self.joined = logits[:1, 0]
        self.lowest, self.highest = logits.min(), logits.max()
        self.own = logits[0, :1]
        self.parts.append(target)

    def compute(self):
        small = [self.means, self.joined, self.lowest[None], self.highest[None], self.own]
        return torch.cat([*small, torch.cat(self.parts)])


def make_data(num_samples):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (num_samples,), generator=generator))


def make_model():
    """Without the global generators, which all threads share."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1, generator=generator)
    return model


def loss(model, micro_batch):
    inputs, target = micro_batch
    return nn.functional.cross_entropy(model(inputs), target), len(target)


def correct(model, micro_batch):
    inputs, target = micro_batch
    return (model(inputs).argmax(1) == target).float().mean(), len(target)


def predict(model, micro_batch):
    inputs, target = micro_batch
    return model(inputs), target


def first_logit(model, micro_batch):
    inputs, target = micro_batch
    return model(inputs)[:, 0], target.float()


def metrics():
    return {
        "loss": loss,
        "correct": correct,
        "accuracy": (classification.MulticlassAccuracy(CLASSES, average="micro"), predict),
        "confusion": (classification.MulticlassConfusionMatrix(CLASSES), predict),
        "auroc": classification.MulticlassAUROC(CLASSES),
        "error": (regression.MeanSquaredError(), first_logit),
        "pearson": (regression.PearsonCorrCoef(), first_logit),
        "lowest": (torchmetrics.MinMetric(), lambda model, micro_batch: model(micro_batch[0])),
        "spread": (Spread(), predict),
    }


def run(transport, dataset, given=None, model=None, **options):
    options = {"batch_size": 4, **options}
    return evaluate(
        model or make_model(),
        dataset,
        metrics() if given is None else given,
        transport=transport,
        rank=transport.rank,
        **options,
    )


def as_bytes(figures):
    return {
        name: figure.numpy().tobytes() if isinstance(figure, torch.Tensor) else float(figure).hex()
        for name, figure in figures.items()
    }


@pytest.mark.parametrize("num_samples", [1, 3, 4, 26, 61])
@pytest.mark.filterwarnings("ignore:The variance of predictions or target")
@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
def test_figures_are_identical_for_any_world_size(num_samples):
    dataset = make_data(num_samples)
    chosen = metrics()
    if num_samples < 8:  # Pearson's coefficient is undefined on parts of one sample
        del chosen["pearson"]
    alone = as_bytes(run(LocalTransport(), dataset, chosen))
    for world_size in (2, 3, 4, 7):
        for found in on_threads(world_size, lambda transport: run(transport, dataset, chosen)):
            assert as_bytes(found) == alone


def test_figures_are_those_of_the_whole_dataset():
    dataset = make_data(61)
    found = run(LocalTransport(), dataset)
    inputs, target = dataset.tensors
    model = make_model().eval()
    with torch.no_grad():
        logits = model(inputs)
        exact = nn.functional.cross_entropy(model.double()(inputs.double()), target)
    # float32 forward passes of another batch size
    assert found["loss"] == pytest.approx(exact.item(), rel=1e-6)
    assert found["correct"] == pytest.approx(found["accuracy"], rel=1e-7)
    for name, metric in metrics().items():
        if name in ("loss", "correct", "spread", "lowest"):
            continue
        metric, chosen = metric if isinstance(metric, tuple) else (metric, predict)
        metric.update(*((logits, target) if chosen is predict else (logits[:, 0], target.float())))
        torch.testing.assert_close(torch.as_tensor(found[name]), metric.compute(), rtol=1e-5, atol=1e-6)
    assert found["lowest"] == pytest.approx(logits.min().item(), rel=1e-6)
    parts = logits.split(4)
    spread = torch.cat(
        [
            torch.stack([part.mean(0)[:2] for part in parts]).mean(0),
            torch.stack([part[0, 0] for part in parts]),
            logits.min()[None],
            logits.max()[None],
            torch.stack([part[0, :1] for part in parts]).prod(0),
            target.float(),
        ]
    )
    torch.testing.assert_close(found["spread"], spread)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_padding_never_counts(world_size):
    """10 rows of which the first two are right: 0.2, where a sampler that repeats rows gives 0.33."""
    seen = []

    def right(model, micro_batch):
        seen.extend(micro_batch.tolist())
        return (micro_batch < 2).double().mean(), len(micro_batch)

    def count(model, micro_batch):
        return 1.0, len(micro_batch)

    given = {"accuracy": right, "count": count}
    for found in on_threads(world_size, lambda transport: run(transport, range(10), given, batch_size=2)):
        assert found == {"accuracy": 0.2, "count": 1.0}
    assert sorted(seen) == list(range(10))


def test_predictions_are_gathered_in_the_order_of_the_rows():
    given = (torchmetrics.CatMetric(), lambda model, micro_batch: micro_batch)
    for found in on_threads(4, lambda transport: run(transport, range(10), given, batch_size=2)):
        assert found.tolist() == list(range(10))
    for found in on_threads(4, lambda transport: run(transport, range(3), given, batch_size=1)):
        assert found.tolist() == [0, 1, 2]


def test_one_metric_gives_one_figure():
    dataset = make_data(9)
    assert isinstance(run(LocalTransport(), dataset, loss), float)
    assert isinstance(run(LocalTransport(), dataset, classification.MulticlassAccuracy(CLASSES)), float)


def test_process_groups_give_the_same_figures():
    dataset = make_data(26)
    alone = as_bytes(run(LocalTransport(), dataset))
    for found in on_process_groups(3, lambda transport: run(transport, dataset)):
        assert as_bytes(found) == alone


class Augmented(Dataset):
    def __len__(self):
        return 13

    def __getitem__(self, index):
        return index + torch.rand(()).item() + numpy.random.rand() + random.random()


def noisy(model, micro_batch):
    noise = torch.rand(()).item() + numpy.random.rand() + random.random()
    return micro_batch.mean() + noise, len(micro_batch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_numbers_are_keyed_and_put_back(num_workers):
    model = nn.Identity()

    def figures(seed=3):
        return run(LocalTransport(), Augmented(), noisy, model, num_workers=num_workers, seed=seed)

    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    first = figures()
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    torch.manual_seed(2)
    assert figures() == first == run(LocalTransport(), Augmented(), noisy, model, seed=3)
    assert figures(seed=4) != first


def evaluate_on_a_worker():
    import unisono

    with unisono.join(seed=3) as run:
        return run.evaluate(nn.Identity(), Augmented(), noisy, batch_size=4, num_workers=1)


def test_figures_with_random_augmentation_are_identical_for_any_number_of_processes(launch):
    alone = run(LocalTransport(), Augmented(), noisy, nn.Identity(), seed=3)
    for world_size in (1, 2, 5):
        assert launch(evaluate_on_a_worker, world_size) == [alone] * world_size


def test_the_mode_of_every_submodule_and_of_gradients_is_put_back():
    model = make_model()
    model[2].eval()
    modes = []

    def watching(model, micro_batch):
        modes.append((any(module.training for module in model.modules()), torch.is_grad_enabled()))
        return loss(model, micro_batch)

    run(LocalTransport(), make_data(5), watching, model)
    assert modes == [(False, False)] * 2
    assert [module.training for module in model.modules()] == [True, True, True, False, True]
    assert torch.is_grad_enabled()

    def failing(model, micro_batch):
        raise ValueError("no figure")

    with pytest.raises(ValueError, match="no figure"):
        run(LocalTransport(), make_data(5), failing, model)
    assert [module.training for module in model.modules()] == [True, True, True, False, True]


def test_metrics_with_the_same_function_share_its_calls_and_objects_stay_as_they_were():
    calls = []

    def counted(model, micro_batch):
        calls.append(len(micro_batch[1]))
        return predict(model, micro_batch)

    accuracy = classification.MulticlassAccuracy(CLASSES)
    given = {"accuracy": (accuracy, counted), "f1": (classification.MulticlassF1Score(CLASSES), counted)}
    run(LocalTransport(), make_data(10), given)
    assert calls == [4, 4, 2]
    assert not accuracy.update_called


def test_states_of_a_block_travel_as_one():
    """A sum over 64 micro-batches is one state for each of 4 workers: what travels is small."""

    def spy(transport):
        sizes = []
        all_reduce = transport.all_reduce

        def measured(tensor):
            sizes.append(tensor.nbytes)
            return all_reduce(tensor)

        transport.all_reduce = measured
        found = run(transport, make_data(64), {"loss": loss}, batch_size=1)
        return found, sum(sizes)

    for _, size in on_threads(4, spy):
        assert size < 4 * 100


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (range(3), {"batch_size": 0}, "batch_size=0"),
        (range(3), {"num_workers": -1}, "num_workers=-1"),
        (range(0), {}, "0 samples"),
        (iter([1]), {}, "can't be read by index"),
        (range(3), {"given": {}}, "empty dict"),
        (range(3), {"given": classification.BinaryAccuracy()}, "not a pair"),
    ],
)
def test_bad_input_is_refused(dataset, options, message):
    with pytest.raises(UsageError, match=message):
        run(LocalTransport(), dataset, options.pop("given", loss), **options)
