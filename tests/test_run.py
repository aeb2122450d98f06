from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import unisono
from steps import Line, alone, global_batch, line_loss
from unisono.errors import JobError, MismatchError, StepFailedError, UsageError
from unisono.events import Event, Notice, StepFinished
from unisono.run import check_assignment

Launch = Callable[..., list[Any]]


@pytest.fixture
def run() -> Iterator[unisono.Run]:
    with alone() as run:
        yield run


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch use two threads, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def line(run: unisono.Run, **options: Any) -> unisono.Replica:
    model = Line()
    return run.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)


def some_batch(*values: float) -> Any:
    return global_batch([torch.tensor([value]) for value in values or (2.0, 4.0)])


# join


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": 2**63}, "seed=9223372036854775808: expected a number that fits 64 bits"),
        ({"threads_per_worker": 0}, "threads_per_worker=0: expected at least 1"),
        ({"assignment": "fair"}, "assignment='fair': expected 'even'"),
        ({"assignment": [1, 1]}, r"assignment=\[1, 1\] has 2 shares, but the run has 1 workers"),
        ({"assignment": [0]}, r"assignment=\[0\]: expected whole numbers of at least 0, not all of them 0"),
        ({"assignment": [-1]}, r"assignment=\[-1\]: expected whole numbers"),
        ({"assignment": [0.5]}, r"assignment=\[0.5\]: expected whole numbers"),
        ({"backend": "glooo"}, "gloo"),
        ({"device": "tpux"}, "device='tpux' can't be used here"),
        ({"device": "cuda:99"}, "device='cuda:99' can't be used here"),
        ({"step_timeout_s": 0.0}, "step_timeout_s=0.0: expected a positive number"),
    ],
    ids=str,
)
def test_join_refuses_what_can_not_be_done_and_leaves_nothing_behind(
    arguments: dict[str, Any], words: str
) -> None:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with pytest.raises(UsageError, match=words):
        unisono.join(**arguments)
    assert torch.get_num_threads() == threads
    assert torch.are_deterministic_algorithms_enabled() == deterministic


def test_shares_are_checked_against_the_number_of_workers() -> None:
    check_assignment([3, 1], 2)
    check_assignment([0, 1], 2)
    with pytest.raises(UsageError):
        check_assignment([3, 1], 3)


@pytest.mark.usefixtures("two_threads")
def test_a_run_fixes_threads_and_kernels_and_puts_them_back() -> None:
    with alone() as run:
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert (run.rank, run.world_size, run.is_main, run.device.type) == (0, 1, True, "cpu")
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    with alone(threads_per_worker=2):
        assert torch.get_num_threads() == 2


def test_join_seeds_every_generator_from_the_runs_seed() -> None:
    def draws(seed: int) -> tuple[float, float, float]:
        with alone(seed=seed):
            return torch.rand(()).item(), float(numpy.random.rand()), random.random()

    assert draws(3) == draws(3)
    assert not set(draws(3)) & set(draws(-4))


def test_closing_twice_is_harmless_and_takes_the_hooks_off() -> None:
    with alone() as run:
        replica = line(run)
        run.close()
    run.close()
    replica.model.loss(torch.ones(1)).backward()
    assert replica.model.w.grad is not None


# replicate and the pieces of a step


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_norm_to_clip_to_must_be_positive(run: unisono.Run, norm: float) -> None:
    with pytest.raises(UsageError, match="clip_norm="):
        line(run, clip_norm=norm)


def test_backward_clip_and_update_are_a_step(run: unisono.Run) -> None:
    whole, pieces = line(run, clip_norm=0.5), line(run)
    loss = whole.step(some_batch(), line_loss)
    result = pieces.backward(some_batch(), line_loss)
    assert (result.loss, result.weight) == (loss, 2.0)
    assert pieces.model.w.item() == 0.0
    assert pieces.clip(0.5) == 3.0
    pieces.update()
    assert pieces.model.w.item() == whole.model.w.item() == pytest.approx(0.5)
    assert pieces.num_steps == whole.num_steps == 1


def test_the_gradient_may_be_changed_before_the_update(run: unisono.Run) -> None:
    replica = line(run)
    replica.backward(some_batch(), line_loss)
    replica.model.w.grad.mul_(2)
    replica.update()
    assert replica.model.w.item() == 6.0
    replica.step(some_batch(), line_loss)
    assert replica.model.w.item() == 3.0


def test_several_backward_calls_average_over_all_their_samples(run: unisono.Run) -> None:
    replica = line(run)
    replica.backward(some_batch(100.0), line_loss)
    replica.backward(some_batch(), line_loss)
    assert replica.model.w.grad.item() == pytest.approx(-106 / 3)
    replica.update()
    assert replica.model.w.item() == pytest.approx(106 / 3)


def test_an_update_without_a_gradient_is_refused(run: unisono.Run) -> None:
    replica = line(run)
    with pytest.raises(UsageError, match=r"step 0: update\(\) without a gradient"):
        replica.update()
    replica.step(some_batch(), line_loss)
    with pytest.raises(UsageError, match="step 1"):
        replica.update()


def test_a_failed_backward_counts_as_nothing_once_it_is_given_up(run: unisono.Run) -> None:
    def fail(model: nn.Module, targets: Tensor) -> Tensor:
        raise MemoryError

    replica = line(run)
    replica.backward(some_batch(), line_loss)
    with pytest.raises(MemoryError):
        replica.backward(some_batch(), fail)
    for go_on in (replica.update, lambda: replica.step(some_batch(), line_loss)):
        with pytest.raises(
            StepFailedError, match=r"step 0 failed on this worker with MemoryError.*replica.skip"
        ):
            go_on()
    replica.skip()
    replica.update()
    assert (replica.model.w.item(), replica.num_steps, replica.skipped) == (3.0, 1, False)


def test_an_error_on_all_workers_leaves_nothing_to_update(run: unisono.Run) -> None:
    replica = line(run)
    with pytest.raises(unisono.MismatchError):
        replica.backward(global_batch([torch.ones(1), torch.ones(2)]), some_weights)
    with pytest.raises(UsageError, match=r"step 0: update\(\) without a gradient"):
        replica.update()
    replica.step(some_batch(), line_loss)
    assert replica.model.w.item() == 3.0


def some_weights(model: Any, targets: Tensor) -> Any:
    loss = line_loss(model, targets)
    return loss if len(targets) == 1 else (loss, 2)


def test_observers_are_told_each_finished_step() -> None:
    events: list[Event] = []
    with unisono.join(observer=events.append) as run:
        first, second = line(run), line(run)
        first.step(some_batch(), line_loss)
        second.step(some_batch(1.0), line_loss)
        second.step(some_batch(1.0), line_loss)
    finished = [event for event in events if isinstance(event, StepFinished)]
    assert finished == [
        StepFinished(replica=0, step=0, loss=5.0, weight=2.0),
        StepFinished(replica=1, step=0, loss=0.5, weight=1.0),
        StepFinished(replica=1, step=1, loss=0.0, weight=1.0),
    ]


def test_idle_cores_are_mentioned_with_the_command_that_uses_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("unisono.run.usable_cores", lambda: 4)
    monkeypatch.setattr("sys.argv", [__file__, "--lr", "0.1"])
    with unisono.join():
        pass
    assert f"unisono run -n 4 {__file__} --lr 0.1" in capsys.readouterr().err
    events: list[Event] = []
    with unisono.join(threads_per_worker=4, observer=events.append):
        pass
    assert not [event for event in events if isinstance(event, Notice)]


# load


class Endless:
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


@pytest.mark.parametrize(
    ("dataset", "arguments", "words"),
    [
        ([1, 2, 3], {"batch_size": 0}, "batch_size=0"),
        ([1, 2, 3], {"batch_size": 2, "micro_batches": 0}, "micro_batches=0: expected at least 1"),
        ([1, 2, 3], {"batch_size": 2, "num_workers": -1}, "num_workers=-1"),
        ([1, 2, 3], {"batch_size": 2, "collate_fn": 3}, "collate_fn=3"),
        ([1, 2, 3], {"batch_size": 4, "drop_last": True}, "drop_last=True leaves no batch"),
        ([], {"batch_size": 1}, "0 samples"),
        ([1, 2, 3], {}, "batch_size is missing"),
        ([1, 2, 3], {"batch_size": 1, "persistent_workers": True}, "no process to keep"),
        ({1, 2, 3}, {"batch_size": 1}, "set can't be read by index"),
        (iter([1, 2, 3]), {"batch_size": 1}, "can be iterated only once"),
        (Endless(), {"batch_size": 1, "shuffle": True}, "shuffle in the dataset"),
        (Endless(), {"batch_size": 1, "sampler": [0]}, "sampler with a Endless"),
        (Endless(), {}, "batch_size is missing"),
        (Endless(), {"batch_size": 0}, "batch_size=0"),
        (Endless(), {"batch_size": 1, "collate_fn": 3}, "collate_fn=3"),
        (object(), {"batch_size": 1}, "object"),
    ],
    ids=str,
)
def test_load_refuses_what_can_not_be_done(
    run: unisono.Run, dataset: Any, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        run.load(dataset, **arguments)
    assert run.state_dict()["loaders"] == []


def test_a_batch_smaller_than_the_grid_has_empty_micro_batches(run: unisono.Run) -> None:
    (batch,) = run.load([1.0, 2.0, 3.0], batch_size=3, micro_batches=5)
    assert batch.sizes == (1, 1, 1, 0, 0)
    assert [number for number, _ in batch] == [0, 1, 2]


def test_fewer_micro_batches_than_workers_is_an_error_unless_idle_workers_are_allowed(launch: Launch) -> None:
    def work() -> str:
        with unisono.join() as run:
            try:
                run.load([1, 2, 3, 4], batch_size=2, micro_batches=2)
            except UsageError as error:
                return str(error)
            return ""

    assert all("Set micro_batches=3 or more" in message for message in launch(work, 3))
    assert launch(work, 3, flags={"allow_idle": True}) == [""] * 3


def test_shares_are_scaled_to_the_grid(launch: Launch) -> None:
    def work() -> list[int]:
        with unisono.join(assignment=[3, 1]) as run:
            (batch,) = run.load(list(range(16)), batch_size=16, micro_batches=8)
            return [number for number, _ in batch]

    first, second = launch(work, 2)
    assert (len(first), len(second)) == (6, 2)
    assert sorted(first + second) == list(range(8))


# state


class Counter:
    """The least that can be registered."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_what_is_registered_is_part_of_the_state(run: unisono.Run) -> None:
    counter = Counter()
    run.register("counter", counter)
    counter.count = 3
    state = run.state_dict()
    counter.count = 7
    run.load_state_dict(state)
    assert counter.count == 3


def test_register_refuses_a_taken_name_and_what_has_no_state(run: unisono.Run) -> None:
    run.register("counter", Counter())
    with pytest.raises(UsageError, match=r"register\('counter'\): the name is taken"):
        run.register("counter", Counter())
    with pytest.raises(UsageError, match="list has no state_dict"):
        run.register("losses", [])  # type: ignore[arg-type]


def test_a_state_of_a_run_that_was_set_up_differently_is_refused_and_nothing_is_changed(
    run: unisono.Run,
) -> None:
    replica = line(run)
    run.load([1.0, 2.0], batch_size=2)
    state = run.state_dict()
    replica.step(some_batch(), line_loss)
    for key, value, words in (
        ("seed", 5, "its seed is 5, this run's 0"),
        ("replicas", [], "number of replicas is 0, this run's 1"),
        ("loaders", state["loaders"] * 2, "number of loaders is 2"),
        ("registered", {"counter": {}}, r"registered names is \['counter'\]"),
    ):
        with pytest.raises(UsageError, match=words):
            run.load_state_dict(state | {key: value})
    assert (replica.model.w.item(), replica.num_steps) == (3.0, 1)


def test_parameters_that_only_the_optimizer_knows_are_part_of_the_state(run: unisono.Run) -> None:
    model, outside = Line(), nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=1.0)
    replica = run.replicate(model, optimizer)
    state = {"outside": {name: value.clone() for name, value in replica.state_dict()["outside"].items()}}
    replica.step(some_batch(), lambda model, y: model.loss(y) + outside)
    assert outside.item() == 0.0
    replica.load_state_dict(replica.state_dict() | state)
    assert outside.item() == 1.0
    with pytest.raises(UsageError, match="besides the model's parameters"):
        replica.load_state_dict(replica.state_dict() | {"outside": {}})


def test_epochs_go_on_where_the_run_stands() -> None:
    with alone() as run:
        seen = []
        for epoch in run.epochs(4):
            seen.append(epoch)
            if epoch == 2:
                state = run.state_dict()
                break
        assert seen == [0, 1, 2]
    with alone() as run:
        run.load_state_dict(state)
        assert list(run.epochs(4)) == [2, 3]
        assert list(run.epochs(4)) == []
        assert list(run.epochs(5)) == [4]


# several workers


def test_a_run_with_other_seeds_on_its_workers_is_refused(launch: Launch) -> None:
    def work() -> str:
        with unisono.join(seed=unisono_rank()) as run:
            with pytest.raises(MismatchError) as caught:
                line(run)
            return str(caught.value)

    for message in launch(work, 2):
        assert "on rank 0 the run's seed is 0; on rank 1 the run's seed is 1" in message


def unisono_rank() -> int:
    from unisono.cluster.environment import detect

    return detect().rank


def test_models_that_differ_are_an_error_that_names_the_difference(launch: Launch) -> None:
    def work() -> None:
        with unisono.join() as run:
            model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4 + run.rank))
            run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))

    words = r"on rank 0 parameter '1.weight' is torch.float32 \[4, 3\]; on rank 1 parameter '1.weight' is .*\[5, 3\]"
    with pytest.raises(JobError, match=words):
        launch(work, 2)


def test_every_worker_starts_from_rank_0s_weights_and_draws_its_own_numbers_afterwards(
    launch: Launch,
) -> None:
    def work() -> tuple[str, float]:
        with unisono.join() as run:
            torch.manual_seed(100 + run.rank)
            model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1).requires_grad_(False))
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
            data = [torch.randn(3, generator=torch.Generator().manual_seed(row)) for row in range(12)]
            for batch in run.load(data, batch_size=8, micro_batches=2, shuffle=True):
                replica.step(batch, lambda model, rows: model(rows).square().mean())
            return run.fingerprint(model), torch.rand(()).item()

    results = launch(work, 2)
    assert results[0][0] == results[1][0]
    assert results[0][1] != results[1][1], "the user's own generators are the user's"


def test_every_row_comes_once_an_epoch_whatever_the_users_generators_do(launch: Launch) -> None:
    def work() -> list[list[int]]:
        with unisono.join() as run:
            torch.manual_seed(100 + run.rank)
            loader = run.load(list(range(30)), batch_size=8, micro_batches=3, shuffle=True)
            return [[int(row) for batch in loader for _, rows in batch for row in rows] for _ in range(2)]

    results = launch(work, 3)
    for epoch in range(2):
        assert sorted(row for rank in range(3) for row in results[rank][epoch]) == list(range(30))
    assert results[0][0] != results[0][1]


def test_evaluation_counts_each_row_once(launch: Launch) -> None:
    def work() -> float:
        with unisono.join() as run:
            rows = [(torch.zeros(1), float(row < 2)) for row in range(10)]

            def accuracy(model: nn.Module, micro_batch: Any) -> tuple[Tensor, int]:
                return micro_batch[1].mean(), len(micro_batch[1])

            return run.evaluate(nn.Linear(1, 1), rows, accuracy, batch_size=2)

    assert launch(work, 1) + launch(work, 4) == [0.2] * 5


def test_workers_without_a_micro_batch_have_the_same_weights(launch: Launch) -> None:
    def work() -> tuple[float, str, list[int]]:
        with unisono.join() as run:
            replica = line(run)
            loader = run.load(torch.tensor([1.0, 2.0, 6.0]), batch_size=3, micro_batches=2)
            own = []
            for batch in loader:
                own = [number for number, _ in batch]
                replica.step(batch, line_loss)
            return float(replica.model.w), run.fingerprint(replica.model), own

    results = launch(work, 4, flags={"allow_idle": True})
    assert {weight for weight, _, _ in results} == {3.0}
    assert len({fingerprint for _, fingerprint, _ in results}) == 1
    assert sorted(own for _, _, own in results) == [[], [], [0], [1]]
