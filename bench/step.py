"""A whole training step: ours beside DistributedDataParallel and the ceiling.

Per worker one thread, and one micro-batch in the first part. The ceiling communicates nothing and updates
1/P of the parameters, which is what a step costs if communication is free. The second part cuts one global
batch into more and more micro-batches: the price of a fine grid.

    python bench/step.py [--quick] [--json FILE] [--workers 2]
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import models
import unisono
from measure import Interval, Row, arguments, interval, ratios, report, time_in_turn
from unisono.data.batch import Batch
from unisono.grid import assign, cut, even_shares

Times = dict[str, list[float]]
OURS = {"exact": "DDP", "fast": "DDP", "sharded": "DDP + ZeRO"}
"""Ours, and the peer that each is timed beside."""
TARGETS = {"GPT, 128 x 1 tokens a worker": 0.88, "GPT, 128 x 4 tokens a worker": 0.94}
"""What part of a step the ceiling should take."""


@dataclass(frozen=True)
class Setting:
    """One model with one batch. `samples` are for each worker; `grids` are numbers of micro-batches."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[..., tuple[Tensor, Tensor]]
    samples: int
    grids: tuple[int, ...] = ()
    steps_per_block: int = 2


SETTINGS = (
    Setting("GPT, 128 x 1 tokens a worker", models.GPT, models.gpt_data, 1),
    Setting("GPT, 128 x 4 tokens a worker", models.GPT, models.gpt_data, 4),
    Setting("CNN, 64 images a worker", models.CNN, models.cnn_data, 64),
    Setting(
        "GPT, 128 x 16 tokens in all", models.GPT, models.gpt_data, 8, grids=(2, 4, 8, 16), steps_per_block=1
    ),
)


def main() -> None:
    parser = arguments("Time whole training steps.")
    parser.add_argument("--workers", type=int, default=2)
    settings = parser.parse_args()
    num_rounds = 3 if settings.quick else 30
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, setting in enumerate(SETTINGS):
            # Each of ours in a run of its own: one of several replicas compares their steps, which costs a message.
            found: dict[str, Times] = {}
            for ours in ("exact",) if setting.grids else OURS:
                rendezvous = Path(folder) / f"{number}-{ours}"
                args = (setting, num_rounds, str(rendezvous), ours)
                found[ours] = unisono.launch(measure, settings.workers, *args)[0]
            rows += summary(setting, found)
    report(f"Training step, {settings.workers} workers of 1 thread", rows, json_file=settings.json)


def measure(setting: Setting, num_rounds: int, rendezvous: str, ours: str) -> Times:
    """Time all cases of one setting; every worker runs this."""
    # Both libraries over the loopback device.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with unisono.join(seed=0) as run:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=run.rank, world_size=run.world_size
        )
        cases = grid_cases(run, setting) if setting.grids else peer_cases(run, setting, ours)
        timed = {name: block(step, setting.steps_per_block) for name, step in cases.items()}
        time_in_turn(timed, num_rounds=2)
        times = time_in_turn(timed, num_rounds=num_rounds)
        dist.destroy_process_group()
    return times


def block(step: Callable[[], object], num_steps: int) -> Callable[[], float]:
    """Return what runs some steps between two barriers and returns the seconds one of them took."""

    def timed() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        dist.barrier()
        return (time.perf_counter() - start) / num_steps

    return timed


def peer_cases(run: unisono.Run, setting: Setting, ours: str) -> dict[str, Callable[[], object]]:
    """Return one step of each: ceiling, the peer, and ours."""
    data = setting.data(setting.samples, seed=run.rank)
    return {
        "ceiling": ceiling_step(run, setting, data),
        OURS[ours]: ddp_step(setting, data, zero=ours == "sharded"),
        f"ours {ours}": our_step(
            run,
            setting,
            run.world_size,
            reduction="fast" if ours == "fast" else "exact",
            update="sharded" if ours == "sharded" else "replicated",
        ),
    }


def grid_cases(run: unisono.Run, setting: Setting) -> dict[str, Callable[[], object]]:
    """Return one step for each number of micro-batches, of one global batch."""
    return {f"M = {grid}": our_step(run, setting, grid) for grid in setting.grids}


def ceiling_step(run: unisono.Run, setting: Setting, data: tuple[Tensor, Tensor]) -> Callable[[], object]:
    """Return a step without communication that updates every P-th part of the parameters."""
    model = setting.model()
    share, total, mine = 0, sum(p.numel() for p in model.parameters()), []
    for parameter in model.parameters():
        if run.rank * total <= share * run.world_size < (run.rank + 1) * total:
            mine.append(parameter)
        share += parameter.numel()
    optimizer = torch.optim.AdamW(mine, lr=1e-4, fused=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        models.loss_fn(model, data).backward()
        optimizer.step()

    return step


def ddp_step(setting: Setting, data: tuple[Tensor, Tensor], *, zero: bool) -> Callable[[], object]:
    """Return a step of DistributedDataParallel with its defaults; with `zero` the optimizer's state is shared out."""
    model = DistributedDataParallel(setting.model())
    optimizer: torch.optim.Optimizer
    if zero:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        models.loss_fn(model, data).backward()
        optimizer.step()

    return step


def our_step(
    run: unisono.Run,
    setting: Setting,
    num_micro_batches: int,
    *,
    reduction: str = "exact",
    update: str = "replicated",
) -> Callable[[], object]:
    """Return a step of ours over the global batch, cut into `num_micro_batches`."""
    model = setting.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    replica = run.replicate(
        model, optimizer, strategy=unisono.Synchronous(reduction=reduction), update=update
    )
    num_samples = setting.samples * run.world_size
    inputs, targets = setting.data(num_samples, seed=0)
    parts = cut(num_samples, num_micro_batches)
    assignment = assign(num_micro_batches, even_shares(num_micro_batches, run.world_size))
    batch = Batch(
        epoch=0,
        index=0,
        assignment=assignment,
        rank=run.rank,
        sizes=tuple(len(part) for part in parts),
        nominal_weight=num_samples / num_micro_batches,
        data={
            number: (
                inputs[parts[number].start : parts[number].stop],
                targets[parts[number].start : parts[number].stop],
            )
            for number in assignment.micro_batches(run.rank)
        },
    )
    return lambda: replica.step(batch, models.loss_fn)


def summary(setting: Setting, found: dict[str, Times]) -> list[Row]:
    """Return the rows of one setting: times, and the ratios that have a target."""
    if setting.grids:
        times = found["exact"]
        first, *others = times
        rows = [_time(setting, name, each) for name, each in times.items()]
        return rows + [_ratio(setting, times, other, first) for other in others]
    times = {name: each for timed in reversed(found.values()) for name, each in timed.items()}
    rows = [_time(setting, name, each) for name, each in times.items()]
    rows.append(_ratio(setting, found["exact"], "ceiling", "DDP"))
    for ours, peer in OURS.items():
        at_least = TARGETS.get(setting.name) if ours != "fast" else None
        rows.append(_ratio(setting, found[ours], "ceiling", f"ours {ours}", at_least=at_least))
        rows.append(_ratio(setting, found[ours], f"ours {ours}", peer, at_most=1.0))
    return rows


def _time(setting: Setting, name: str, times: list[float]) -> Row:
    return Row(f"{setting.name}: {name}", "step", interval(times).median * 1e3, "ms")


def _ratio(
    setting: Setting,
    times: Times,
    over: str,
    under: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """Return a ratio of times; it meets its target unless the whole interval lies on the wrong side."""
    found: Interval = ratios(times, over, under)
    target, meets = None, None
    if at_most is not None:
        target, meets = f"interval reaches {at_most}", found.low <= at_most
    elif at_least is not None:
        target, meets = f"interval reaches {at_least}", found.high >= at_least
    metric = f"ratio of times, 95 % in [{found.low:.3f}, {found.high:.3f}]"
    return Row(f"{setting.name}: {over} / {under}", metric, found.median, "", target, meets)


if __name__ == "__main__":
    main()
