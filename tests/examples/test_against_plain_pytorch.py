"""The examples against their plain PyTorch versions, and against themselves on other numbers of workers."""

import io
from contextlib import redirect_stdout
from itertools import islice

import pytest
import torch

SMALL_GPT = ["--context", "32", "--layers", "2", "--width", "32", "--heads", "2", "--batch-size", "16"]
NEVER_CLIP = ["--clip-norm", "1e9"]  # the two norms are added in different orders: equal up to rounding


def gpt_weights(arguments):
    """Return the weights that train_gpt.py ends with."""
    import train_gpt

    with redirect_stdout(io.StringIO()):
        return train_gpt.main(arguments).state_dict()


def plain_gpt_weights(arguments):
    """Return the weights of the plain version, from the initial weights and in the order of train_gpt.py."""
    import gpt
    import plain_gpt
    import unisono

    options = gpt.parse(arguments)
    with unisono.join(seed=options.seed) as run, redirect_stdout(io.StringIO()):
        model = gpt.build(options)
        train_set, _, _ = gpt.load_text(options)
        order = run.load(train_set, batch_size=options.batch_size, micro_batches=1, shuffle=True)
        plain_gpt.train(model, [batch.data[0] for batch in islice(order, options.steps)], options)
    return model.state_dict()


def images_weights(arguments):
    """Return the weights and buffers that train_images.py ends with."""
    import train_images

    with redirect_stdout(io.StringIO()):
        return train_images.main(arguments).state_dict()


def plain_images_weights(arguments):
    """Return those of the plain version, from the same start, with the same order and augmentation."""
    import cnn
    import images
    import plain_images
    import unisono

    options = cnn.parse(arguments)
    with unisono.join(seed=options.seed) as run, redirect_stdout(io.StringIO()):
        train_set, test_set = images.load(options.data)
        model = cnn.CNN(train_set.size, dropout=options.dropout)
        order = run.load(train_set, batch_size=options.batch_size, micro_batches=1, shuffle=True)
        batches = [batch.data[0] for batch in islice(order, options.steps)]
        plain_images.train(model, batches, test_set, options)
    return model.state_dict()


def printed(module, arguments):
    """Return the lines that an example prints."""
    from importlib import import_module

    output = io.StringIO()
    with redirect_stdout(output):
        import_module(module).main(arguments)
    return output.getvalue().splitlines()


def differing(first, second):
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def test_gpt_in_one_micro_batch_is_plain_pytorch_bit_for_bit(launch):
    arguments = [*SMALL_GPT, *NEVER_CLIP, "--steps", "6", "--micro-batches", "1"]
    assert differing(launch(gpt_weights, 1, arguments)[0], launch(plain_gpt_weights, 1, arguments)[0]) == []


def test_gpt_in_eight_micro_batches_with_clipping_is_plain_pytorch_up_to_rounding(launch):
    arguments = [*SMALL_GPT, "--steps", "6"]
    ours, plain = launch(gpt_weights, 1, arguments)[0], launch(plain_gpt_weights, 1, arguments)[0]
    # Where a gradient is all but zero, rounding may decide on the sign of Adam's step, about lr = 0.006.
    for name, weights in ours.items():
        difference = (weights - plain[name]).abs()
        assert difference.max() < 0.006, name
        assert difference.median() < 1e-6, name


def test_images_without_dropout_in_one_micro_batch_are_plain_pytorch_bit_for_bit(launch):
    arguments = ["--dropout", "0", "--batch-size", "32", "--steps", "6", "--micro-batches", "1"]
    assert (
        differing(launch(images_weights, 1, arguments)[0], launch(plain_images_weights, 1, arguments)[0])
        == []
    )


def test_gpt_learns_as_well_as_plain_pytorch(launch):
    arguments = [*SMALL_GPT, "--steps", "60"]
    (ours,), (plain,) = (launch(printed, 1, module, arguments) for module in ("train_gpt", "plain_gpt"))
    bits = [float(line.split()[1]) for line in (ours[-3], plain[-2])]
    frequency_bits = [float(line.split()[2]) for line in (ours[-2], plain[-1])]
    assert frequency_bits[0] == frequency_bits[1]
    assert max(bits) < frequency_bits[0]
    assert (
        abs(bits[0] - bits[1]) < 0.15
    )  # other initial weights and another order; seeds differ by up to 0.08


def test_images_are_recognised_as_well_as_by_plain_pytorch(launch):
    arguments = ["--steps", "72"]
    (ours,), (plain,) = (launch(printed, 1, module, arguments) for module in ("train_images", "plain_images"))
    accuracies = [float(line.split()[-1]) for line in (ours[-2], plain[-1])]
    assert min(accuracies) > 0.95
    assert (
        abs(accuracies[0] - accuracies[1]) < 0.03
    )  # ours sees BatchNorm statistics of 16 images, not of 128


@pytest.mark.parametrize(
    ("weights", "arguments"),
    [(gpt_weights, [*SMALL_GPT, "--steps", "3"]), (images_weights, ["--batch-size", "30", "--steps", "3"])],
    ids=["gpt", "images"],
)
def test_three_workers_end_with_the_bits_of_one(launch, weights, arguments):
    alone = launch(weights, 1, arguments)[0]
    for state in launch(weights, 3, arguments):
        assert differing(state, alone) == []
