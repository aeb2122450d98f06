"""Models of many kinds, each with a loss, for tests of invariance and against plain PyTorch.

None of them draws random numbers in forward. Rows have 6 features, labels are 0 to 2.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

Loss = Callable[[Any, Any], Any]


def cross_entropy(model: Any, micro_batch: Any) -> Tensor:
    rows, labels = micro_batch
    return functional.cross_entropy(model(rows), labels)


def mlp(inputs: int = 6, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 7), nn.Tanh(), nn.Linear(7, outputs))


class Forward(nn.Module):
    """A module of `parts` whose forward is a function of it."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        self._function = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, rows: Tensor) -> Any:
        return self._function(self, rows)


def tied() -> nn.Module:
    model = Forward(
        lambda m, x: m.out(m.second(m.first(x).relu())), first=nn.Linear(6, 6), second=nn.Linear(6, 6)
    )
    model.second.weight = model.first.weight
    model.add_module("out", nn.Linear(6, 3))
    model.add_module("again", model.out)
    return model


def shared_between_two() -> nn.Module:
    layer = nn.Linear(6, 6)
    towers = nn.ModuleList(
        [nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 3)), nn.Sequential(layer, nn.Linear(6, 3))]
    )
    return Forward(lambda m, x: m.towers[0](x) + m.towers[1](x), towers=towers)


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, rows: Tensor) -> Tensor:
        return self.base(rows) + rows @ self.down.T @ self.up.T


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: dict[str, Tensor]


def checkpointed(use_reentrant: bool) -> Callable[[], nn.Module]:
    def forward(m: Any, rows: Tensor) -> Tensor:
        hidden = m.inputs(rows)
        for _ in range(2):  # the same block twice
            hidden = checkpoint(m.block, hidden, use_reentrant=use_reentrant)
        hidden = checkpoint(m.frozen, hidden, use_reentrant=use_reentrant)
        return m.outputs(hidden)

    def build() -> nn.Module:
        return Forward(
            forward,
            inputs=nn.Linear(6, 5),
            block=nn.Sequential(nn.Linear(5, 5), nn.Tanh()),
            frozen=nn.Linear(5, 5).requires_grad_(False),
            unused=nn.Linear(5, 5),
            outputs=nn.Linear(5, 3),
        )

    return build


def lstm() -> nn.Module:
    def forward(m: Any, rows: Tensor) -> Tensor:
        outputs, _ = m.rnn(rows.reshape(len(rows), 3, 2))
        return m.head(outputs[:, -1])

    return Forward(forward, rnn=nn.LSTM(2, 4, num_layers=2, batch_first=True), head=nn.Linear(4, 3))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(m: Any, rows: Tensor) -> Tensor:
        tokens = m.lift(rows.reshape(len(rows), 3, 2))
        mask = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
        return m.head(m.encoder(tokens, mask=mask).mean(1))

    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Forward(forward, lift=nn.Linear(2, 4), encoder=encoder, head=nn.Linear(4, 3))


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3))
    model(torch.zeros(1, 6))
    return model


def convolution() -> nn.Module:
    body = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.Flatten())
    return nn.Sequential(body, nn.Linear(48, 3)).to(memory_format=torch.channels_last)


def strided() -> nn.Module:
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(6, 7).T / 3)
    assert not model[0].weight.is_contiguous()
    return model


class Scalars(nn.Module):
    """A parameter without dimension, one without elements, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.ones(0))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, rows: Tensor) -> Tensor:
        return self.body(rows) * self.scale + self.empty.sum() + self.phase.abs()


def partly_in_eval() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].running_mean += 0.5
    model[1].eval()
    return model


def old_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 5)), nn.Linear(5, 3))  # deprecated, and in use


def spectral_norm() -> nn.Module:
    """Its vectors change in every forward pass, by the weights alone."""
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Linear(5, 3))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def parametrized() -> nn.Module:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6), nn.Linear(6, 3))
    parametrize.register_parametrization(model[1], "weight", Symmetric())
    parametrizations.orthogonal(model[2])
    return model


def tokens_loss(model: Any, micro_batch: Any) -> tuple[Tensor, int]:
    """The mean over labels that count; where none does, a nan of weight 0."""
    rows, labels = micro_batch
    kept = labels.masked_fill(labels == 0, -100)
    return functional.cross_entropy(model(rows), kept, ignore_index=-100), int((labels != 0).sum())


def branching_loss(model: Any, micro_batch: Any) -> Tensor:
    """Heads that only some micro-batches use, and a constant for some others."""
    rows, labels = micro_batch
    which = int(rows[0, 0].abs() * 10) % 3
    if which == 2:
        return torch.zeros((), requires_grad=True)
    return functional.cross_entropy(model.heads[which](model.trunk(rows)), labels)


def several_backwards(model: Any, micro_batch: Any) -> Tensor:
    """Two outputs, of which the function sends one back itself."""
    rows, labels = micro_batch
    first, second = model(rows), model(rows * 2)
    functional.cross_entropy(first, labels).backward(retain_graph=True)
    return functional.cross_entropy(second, labels)


def gradient_penalty(model: Any, micro_batch: Any) -> Tensor:
    rows, labels = micro_batch
    rows = rows.clone().requires_grad_()
    outputs = model(rows)
    (slopes,) = torch.autograd.grad(outputs.sum(), rows, create_graph=True)
    return functional.cross_entropy(outputs, labels) + (slopes.norm(dim=1) - 1).square().mean()


def hooked() -> nn.Module:
    """Hooks of every kind that a user may have put there; they see the micro-batch's values."""
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: output + 0.1)
    model[2].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 1.5,))
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)

    def halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    model[2].bias.register_post_accumulate_grad_hook(halve)
    return model


def compiled() -> nn.Module:
    return torch.compile(mlp(), backend="aot_eager")  # type: ignore[return-value]


def wide() -> nn.Module:
    return Forward(lambda m, x: m.body(x.double()).float(), body=mlp().double())


def created_graph(model: Any, micro_batch: Any) -> Tensor:
    """A penalty on the gradient that a backward call of the function's own has left in ``p.grad``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of reference cycles, which zero_grad breaks
        cross_entropy(model, micro_batch).backward(create_graph=True)
    return sum(0.1 * parameter.grad.square().sum() for parameter in model.parameters())


def inner_step(model: Any, micro_batch: Any) -> Tensor:
    """A loss after one step of gradient descent, differentiated through that step."""
    rows, labels = micro_batch
    weights = dict(model.named_parameters())
    inner = functional.cross_entropy(torch.func.functional_call(model, weights, (rows,)), labels)
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
    return functional.cross_entropy(torch.func.functional_call(model, moved, (rows * 2,)), labels)


def per_sample_gradients(model: Any, micro_batch: Any) -> Tensor:
    weights = dict(model.named_parameters())

    def loss_of_one(weights: Any, row: Tensor, label: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, weights, (row[None],))
        return functional.cross_entropy(outputs, label[None])

    gradients = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))(weights, *micro_batch)
    return cross_entropy(model, micro_batch) + sum(each.square().mean() for each in gradients.values())


def adversarial(model: Any, micro_batch: Any) -> Tensor:
    """The loss on rows moved up the slope of a first backward call, whose gradients are then dropped."""
    rows, labels = micro_batch
    rows = rows.clone().requires_grad_()
    functional.cross_entropy(model(rows), labels).backward()
    assert rows.grad is not None
    model.zero_grad()
    return functional.cross_entropy(model((rows + 0.1 * rows.grad.sign()).detach()), labels)


def frozen_meanwhile(model: Any, micro_batch: Any) -> Tensor:
    """Keeps a layer out of this loss, and lets it be trained again."""
    model[0].requires_grad_(False)
    loss = cross_entropy(model, micro_batch)
    model[0].requires_grad_(True)
    return loss


def clamping(model: Any, micro_batch: Any) -> Tensor:
    """Writes a parameter, but whatever it was, the same in every micro-batch."""
    with torch.no_grad():
        model[0].weight.clamp_(-0.2, 0.2)
    return cross_entropy(model, micro_batch)


def cached_parametrizations(model: Any, micro_batch: Any) -> Tensor:
    with parametrize.cached():
        return cross_entropy(model, micro_batch) + cross_entropy(model, micro_batch)


def saved_on_the_host(model: Any, micro_batch: Any) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return cross_entropy(model, micro_batch)


def recurrent() -> nn.Module:
    """Two directions over packed sequences, and a plain network."""

    def forward(m: Any, rows: Tensor) -> Tensor:
        sequences = rows.reshape(len(rows), 3, 2)
        packed = nn.utils.rnn.pack_padded_sequence(sequences, [3] * len(rows), batch_first=True)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(m.both(packed)[0], batch_first=True)
        return m.plain(hidden)[0][:, -1]

    return Forward(
        forward,
        both=nn.GRU(2, 4, bidirectional=True, batch_first=True),
        plain=nn.RNN(8, 3, batch_first=True),
    )


def experts() -> nn.Module:
    """Every row goes through one of four experts; which of them have any depends on the micro-batch."""

    def forward(m: Any, rows: Tensor) -> Tensor:
        shares = m.router(rows).softmax(-1)
        best = shares.argmax(-1)
        outputs = rows.new_zeros(len(rows), 3)
        for number, expert in enumerate(m.experts):
            (chosen,) = torch.where(best == number)
            if len(chosen):
                outputs = outputs.index_add(0, chosen, expert(rows[chosen]) * shares[chosen, number, None])
        return outputs

    return Forward(forward, router=nn.Linear(6, 4), experts=nn.ModuleList(nn.Linear(6, 3) for _ in range(4)))


def complex_layers() -> nn.Module:
    def forward(m: Any, rows: Tensor) -> Tensor:
        hidden = m.first(rows.to(torch.complex64))
        return m.second(torch.complex(hidden.real.tanh(), hidden.imag.tanh())).abs()

    kind = torch.complex64
    return Forward(forward, first=nn.Linear(6, 5, dtype=kind), second=nn.Linear(5, 3, dtype=kind))


def compiled_in_checkpoints() -> nn.Module:
    block = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.GELU()), backend="aot_eager")
    return Forward(
        lambda m, x: m.head(checkpoint(m.block, x, use_reentrant=False)), block=block, head=nn.Linear(6, 3)
    )


KINDS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "tied": (tied, cross_entropy),
    "shared between two modules": (shared_between_two, cross_entropy),
    "low-rank adapters": (lambda: nn.Sequential(Adapted(nn.Linear(6, 5)), nn.Linear(5, 3)), cross_entropy),
    "own autograd function": (
        lambda: Forward(lambda m, x: m.body(Doubling.apply(x)), body=mlp()),
        cross_entropy,
    ),
    "returns a dataclass": (
        lambda: Forward(lambda m, x: Output(m.body(x), {"x": x}), body=mlp()),
        lambda model, part: functional.cross_entropy(model(part[0]).logits, part[1]),
    ),
    "parameters outside forward": (
        mlp,
        lambda model, part: cross_entropy(model, part) + 0.1 * model[0].weight.square().sum(),
    ),
    "checkpoints": (checkpointed(False), cross_entropy),
    "re-entrant checkpoints": (checkpointed(True), cross_entropy),
    "lstm": (lstm, cross_entropy),
    "transformer": (transformer, cross_entropy),
    "lazy": (lazy, cross_entropy),
    "channels last": (convolution, cross_entropy),
    "not contiguous": (strided, cross_entropy),
    "float64": (wide, cross_entropy),
    "scalar, empty and complex": (Scalars, cross_entropy),
    "partly in eval mode": (partly_in_eval, cross_entropy),
    "parametrized": (parametrized, cross_entropy),
    "hooked": (hooked, cross_entropy),
    "compiled": (compiled, cross_entropy),
    "tokens": (mlp, tokens_loss),
    "branches and constants": (
        lambda: Forward(lambda m, x: x, trunk=nn.Linear(6, 6), heads=nn.ModuleList([nn.Linear(6, 3), mlp()])),
        branching_loss,
    ),
    "several backward calls": (mlp, several_backwards),
    "gradient penalty": (mlp, gradient_penalty),
    "created graph": (mlp, created_graph),
    "inner step": (mlp, inner_step),
    "per-sample gradients": (mlp, per_sample_gradients),
    "adversarial": (mlp, adversarial),
    "frozen meanwhile": (mlp, frozen_meanwhile),
    "clamping": (mlp, clamping),
    "cached parametrizations": (parametrized, cached_parametrizations),
    "saved on the host": (mlp, saved_on_the_host),
    "recurrent": (recurrent, cross_entropy),
    "experts": (experts, cross_entropy),
    "complex layers": (complex_layers, cross_entropy),
    "compiled in checkpoints": (compiled_in_checkpoints, cross_entropy),
}
