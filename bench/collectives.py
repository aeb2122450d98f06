"""An all-reduce on one host: ours through shared memory beside gloo, MPI and a plain copy of as many bytes.

Every worker gets a copy of the result of its own, float32. MPI is timed where mpirun and mpi4py are there; then
all run under mpirun, in the same processes. A copy of the tensor by all workers at once is what the memory can do.

    python bench/collectives.py [--quick] [--json FILE]
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from measure import Row, arguments, interval, ratios, report, time_in_turn
from unisono.transport.shared_memory import SharedMemoryTransport

SIZES = {
    "1 KB": 2**10,
    "64 KB": 2**16,
    "256 KB": 2**18,
    "1 MB": 2**20,
    "25 MB": 25 * 2**20,
    "100 MB": 100 * 2**20,
}
AT_LEAST = {"1 KB": 5.0, "25 MB": 2.5}
"""How many times faster than gloo two workers should be."""
MPI_FROM = 2**18
"""Bytes from which on ours should be ahead of MPI, which below spins on a core of its own."""


def main() -> None:
    parser = arguments("Time all-reduces on one host.")
    parser.add_argument(
        "--worker", type=Path, metavar="FOLDER", help="be one of the workers; for internal use"
    )
    settings = parser.parse_args()
    if settings.worker is not None:
        measure(settings.worker, quick=settings.quick)
        return
    rows: list[Row] = []
    for world_size in (2, 4):
        for size, times in launch(world_size, quick=settings.quick).items():
            rows += summary(f"{world_size} workers, {size}", world_size, size, times)
    report("All-reduce of float32 on one host, workers of 1 thread", rows, json_file=settings.json)


def launch(world_size: int, *, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Start the workers; return size -> case -> seconds."""
    command = [sys.executable, __file__, *(["--quick"] if quick else [])]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--worker", folder]
        if has_mpi():
            mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,vader"]
            subprocess.run([*mpirun, "-n", str(world_size), *command], check=True)
        else:
            environments = [
                os.environ | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world_size)}
                for rank in range(world_size)
            ]
            workers = [subprocess.Popen(command, env=environment) for environment in environments]
            codes = [worker.wait() for worker in workers]
            if any(codes):
                raise SystemExit("a worker failed")
        found: dict[str, dict[str, list[float]]] = json.loads((Path(folder) / "times.json").read_text())
    return found


def has_mpi() -> bool:
    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


def measure(folder: Path, *, quick: bool) -> None:
    """Time all cases of all sizes, as one worker; the first writes what it found."""
    torch.set_num_threads(1)
    rank, world_size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=world_size)
    found = {}
    with SharedMemoryTransport(dist.PrefixStore("shared", store), rank, world_size) as transport:
        for name, num_bytes in SIZES.items():
            cases = {case: timed(run, num_bytes) for case, run in operations(transport, num_bytes).items()}
            time_in_turn(cases, num_rounds=1)
            found[name] = time_in_turn(cases, num_rounds=3 if quick else 30)
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def operations(transport: SharedMemoryTransport, num_bytes: int) -> dict[str, Callable[[], object]]:
    """Return what is timed, each over a tensor of its own."""
    tensors = [torch.zeros(num_bytes // 4) for _ in range(4)]
    ours, gloo, source, target = tensors
    cases: dict[str, Callable[[], object]] = {
        "ours": lambda: transport.all_reduce(ours).wait(),
        "gloo": lambda: dist.all_reduce(gloo),
        "copy": lambda: target.copy_(source),
    }
    if has_mpi():
        from mpi4py import MPI

        buffer: Any = torch.zeros(num_bytes // 4).numpy()
        cases["MPI"] = lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)
    return cases


def timed(operation: Callable[[], object], num_bytes: int) -> Callable[[], float]:
    """Return what repeats an operation for some milliseconds after a barrier and returns the seconds of one."""
    repeats = max(1, min(50, 2**23 // num_bytes))

    def block() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            operation()
        return (time.perf_counter() - start) / repeats

    return block


def summary(case: str, world_size: int, size: str, times: dict[str, list[float]]) -> list[Row]:
    """Return the rows of one size."""
    rows = [Row(f"{case}: {name}", "time", interval(each).median * 1e3, "ms") for name, each in times.items()]
    if (world_size, size) == (2, "1 KB"):
        rows[0] = replace(rows[0], target="at most 0.1", meets=rows[0].value <= 0.1)
    at_least = AT_LEAST.get(size) if world_size == 2 else None
    rows.append(_times_faster(case, times, "gloo", at_least))
    if "MPI" in times:
        rows.append(_times_faster(case, times, "MPI", 1.0 if SIZES[size] >= MPI_FROM else None))
    return rows


def _times_faster(case: str, times: dict[str, list[float]], peer: str, at_least: float | None) -> Row:
    found = ratios(times, peer, "ours")
    return Row(
        f"{case}: {peer} / ours",
        f"ratio of times, 95 % in [{found.low:.2f}, {found.high:.2f}]",
        found.median,
        "",
        None if at_least is None else f"interval reaches {at_least}",
        None if at_least is None else found.high >= at_least,
    )


if __name__ == "__main__":
    main()
