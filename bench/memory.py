"""Memory of all workers together: ours, replicated and sharded, beside DistributedDataParallel.

AdamW, one micro-batch a worker. What counts is the proportional set size (PSS), in which memory that several
processes share is counted once, beyond that of workers that have only imported torch.

    python bench/memory.py [--quick] [--json FILE]
"""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import models
import unisono
from measure import Row, arguments, report
from unisono.data.batch import Batch
from unisono.grid import assign

CASES = ("DDP", "DDP + ZeRO", "ours replicated", "ours sharded")
TARGETS = {2: 0.75, 4: 0.65}
"""What part of DDP's memory ours should need."""


def main() -> None:
    settings = arguments("Measure the memory of workers.").parse_args()
    rows: list[Row] = []
    for world_size in (2,) if settings.quick else (2, 4):
        found = {}
        for case in CASES:
            with tempfile.TemporaryDirectory() as folder:
                parts = unisono.launch(measure, world_size, case, str(Path(folder) / "rendezvous"))
            found[case] = sum(parts)
            rows.append(
                Row(f"{world_size} workers: {case}", "memory of all workers", found[case] / 1e6, "MB")
            )
        for case in CASES[1:]:
            ratio = found[case] / found["DDP"]
            target = TARGETS[world_size] if case == "ours sharded" else None
            rows.append(
                Row(
                    f"{world_size} workers: {case} / DDP",
                    "ratio of memory",
                    ratio,
                    "",
                    None if target is None else f"at most {target}",
                    None if target is None else ratio <= target,
                )
            )
    report("Memory of a GPT of 10.9 M parameters (44 MB) with AdamW", rows, json_file=settings.json)


def measure(case: str, rendezvous: str) -> float:
    """Return how many bytes this worker has taken after some steps."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with unisono.join(seed=0) as run:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=run.rank, world_size=run.world_size
        )
        dist.barrier()
        before = proportional_bytes()
        dist.barrier()
        model = models.GPT()
        step = (
            our_step(run, model, case.removeprefix("ours ")) if "ours" in case else ddp_step(run, model, case)
        )
        for _ in range(4):
            step()
        gc.collect()
        dist.barrier()
        taken = proportional_bytes() - before
        dist.barrier()
        dist.destroy_process_group()
    return taken


def our_step(run: unisono.Run, model: torch.nn.Module, update: str):
    """Return a step of ours."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    replica = run.replicate(model, optimizer, update=update)
    data = models.gpt_data(1, seed=run.rank)
    batch = Batch(
        epoch=0,
        index=0,
        assignment=assign(run.world_size, [1] * run.world_size),
        rank=run.rank,
        sizes=(1,) * run.world_size,
        nominal_weight=1.0,
        data={run.rank: data},
    )
    return lambda: replica.step(batch, models.loss_fn)


def ddp_step(run: unisono.Run, model: torch.nn.Module, case: str):
    """Return a step of DistributedDataParallel whose gradients are views of its buckets."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if "ZeRO" in case:
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
    data = models.gpt_data(1, seed=run.rank)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        models.loss_fn(wrapped, data).backward()
        optimizer.step()

    return step


def proportional_bytes() -> int:
    """Return this process's share of the memory it uses."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell proportional set sizes")


if __name__ == "__main__":
    main()
