"""The GAN, the fine-tuning, the contrastive and the actor-critic example against their plain versions."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from itertools import islice
from typing import Any

import pytest
import torch

Launch = Callable[..., list[Any]]
NAMES = ("gan", "lora", "contrastive", "actor_critic")
SHORT = ["--steps", "4"]


def train(name: str, arguments: list[str]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Run an example; return its weights and what it prints."""
    output = io.StringIO()
    with redirect_stdout(output):
        model = import_module(f"train_{name}").main(arguments)
    return model.state_dict(), output.getvalue().splitlines()


def plain_weights(name: str, arguments: list[str]) -> dict[str, torch.Tensor]:
    """Return the weights of the plain version from the same start, over the same data."""
    import images
    import unisono

    shared: Any = import_module(name)
    plain: Any = import_module(f"plain_{name}")
    options = shared.parse(arguments)
    with unisono.join(seed=options.seed, observer=lambda event: None) as run, redirect_stdout(io.StringIO()):

        def batches_of(dataset: Any) -> list[Any]:
            loader = run.load(dataset, batch_size=options.batch_size, micro_batches=1, shuffle=True)
            return [batch.data[0] for batch in islice(loader, options.steps)]

        if name == "gan":
            model = torch.nn.ModuleDict(
                {"generator": shared.generator(), "discriminator": shared.discriminator()}
            )
            plain.train(model, batches_of(shared.Digits()), options)
        elif name == "contrastive":
            model = shared.Encoder()
            plain.train(model, batches_of(shared.Views(images.load(None)[0])), options)
        elif name == "lora":
            train_set, _ = images.load(None)
            model = shared.classifier()
            plain.train(model, batches_of(train_set), options)
            shared.adapt(model)
            plain.train(model, batches_of(shared.turned(train_set)), options)
        else:
            model = shared.ActorCritic()

            def play() -> Any:
                batch = run.batch(
                    lambda _, size: shared.rollout(model, size),
                    micro_batches=1,
                    batch_size=options.batch_size,
                )
                ((_, rolled),) = batch
                return rolled

            plain.train(model, play, options)
    return model.state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_in_one_micro_batch_an_example_is_plain_pytorch(launch: Launch, name: str) -> None:
    arguments = [*SHORT, "--micro-batches", "1"]
    ((ours, _),) = launch(train, 1, name, arguments)
    (plain,) = launch(plain_weights, 1, name, arguments)
    # A loss over the whole batch is differentiated in two pieces, which rounds differently.
    tolerance = 1e-4 if name == "contrastive" else 0.0
    for key, weights in ours.items():
        assert torch.allclose(weights, plain[key], rtol=0, atol=tolerance), key


@pytest.mark.parametrize("name", NAMES)
def test_workers_end_with_the_bits_of_one(launch: Launch, name: str) -> None:
    ((_, lines),) = launch(train, 1, name, SHORT)
    assert lines[-1].startswith("fingerprint ")
    for world_size in (2, 3):
        (_, found), *others = launch(train, world_size, name, SHORT)
        assert found[-1] == lines[-1]
        assert all(printed == [] for _, printed in others)


def test_they_learn(launch: Launch) -> None:
    found = {name: launch(train, 1, name, [])[0][1] for name in NAMES}
    gap = [float(word) for word in found["gan"][-2].split() if word[0].isdigit()]
    assert gap[1] < gap[0] / 2
    nearest = [float(word) for word in found["contrastive"][-2].split() if word[0].isdigit()]
    assert nearest[1] > nearest[0]
    earned = [float(word) for word in found["actor_critic"][-2].split()[2::2]]
    assert earned[0] < 0 < 0.5 < earned[1]
    turned = [float(word.strip(",")) for word in found["lora"][-3].split()[4:7:2]]
    assert turned[0] < 0.3 < 0.7 < turned[1]
    assert found["lora"][-2] == "frozen weights unchanged"
