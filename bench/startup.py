"""From launch to the end of the first step: `unisono run` beside torchrun.

The same script of a linear model, 1, 4 and 16 workers, in turn.

    python bench/startup.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measure import Row, arguments, interval, ratios, report, time_in_turn

SCRIPT = """
    import time

    import torch

    import unisono

    with unisono.join(seed=0) as run:
        model = torch.nn.Linear(8, 1)
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = run.batch(lambda number: torch.randn(4, 8), micro_batches=16)
        replica.step(batch, lambda model, rows: model(rows).square().mean())
        if run.is_main:
            print("done", time.time(), flush=True)
"""
TARGETS = {4: 5.0}
"""How many times faster than torchrun."""


def main() -> None:
    settings = arguments("Time the start of a job.").parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(textwrap.dedent(SCRIPT))
        for num_workers in (1, 4) if settings.quick else (1, 4, 16):
            times = time_in_turn(commands(script, num_workers), num_rounds=1 if settings.quick else 5)
            for name, each in times.items():
                rows.append(
                    Row(f"{num_workers} workers: {name}", "to the first step", interval(each).median, "s")
                )
            found = ratios(times, "torchrun", "unisono run")
            target = TARGETS.get(num_workers)
            rows.append(
                Row(
                    f"{num_workers} workers: torchrun / unisono run",
                    f"ratio of times, all in [{found.low:.2f}, {found.high:.2f}]",
                    found.median,
                    "",
                    None if target is None else f"at least {target}",
                    None if target is None else found.median >= target,
                )
            )
    report("Launch to the end of the first step", rows, json_file=settings.json)


def commands(script: Path, num_workers: int) -> dict[str, Callable[[], float]]:
    """Return what launches the script, each way."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_workers)]
    ours = ["unisono", "run", "-n", str(num_workers)]
    return {
        "unisono run": partial(launch, [sys.executable, "-m", *ours, str(script)]),
        "torchrun": partial(launch, [sys.executable, "-m", *torchrun, str(script)]),
    }


def launch(command: list[str]) -> float:
    """Return the seconds from the start of a command to its first step."""
    start = time.time()
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("done")]
    return float(line.split()[1]) - start


if __name__ == "__main__":
    main()
