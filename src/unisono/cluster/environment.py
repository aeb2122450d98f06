"""Who this process is: alone, a worker of `unisono run`, or a worker of torchrun; and what it may use.

This is the only file that reads ``os.environ``. It decides nothing and connects to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unisono.errors import UsageError

Kind = Literal["alone", "launcher", "torchrun"]

_WORKER = "UNISONO_WORKER"
_JOINED = "joined"
_ALLOCATOR = ("GLIBC_TUNABLES", "LD_PRELOAD")
_TORCHRUN_IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TORCHRUN_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Environment:
    """The identity of this process in its run.

    Args:
        kind: who started it; ``"alone"`` is a world of one.
        rank: number of this worker, ``0 .. world_size - 1``.
        world_size: number of workers of the run.
        local_rank: number of this worker on its host.
        local_world_size: number of workers on this host.
        run_id: name of the run, different for every run on a host.
        control_fd: ``"launcher"`` only: descriptor of the control channel.
        stop_fd: ``"launcher"`` only: descriptor that becomes readable when this worker was told to end.
        master_addr: ``"torchrun"`` only: host of the store.
        master_port: ``"torchrun"`` only: port of the store.
        agent_hosts_store: ``"torchrun"`` only: the agent already serves the store.
    """

    kind: Kind = "alone"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    run_id: str = "alone"
    control_fd: int | None = None
    stop_fd: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    agent_hosts_store: bool = False


def detect(variables: Mapping[str, str] | None = None, *, pid: int | None = None) -> Environment:
    """Return who this process is. Pure but for its defaults, ``os.environ`` and the own process id.

    A worker's identity names its process id, so programs that a worker starts don't take it for theirs.

    Raises:
        UsageError: only some of torchrun's variables are set, or one has no usable value; or this worker of
            `unisono run` has joined already.
    """
    variables = os.environ if variables is None else variables
    worker = _parse_worker(variables.get(_WORKER, ""), os.getpid() if pid is None else pid)
    if worker is not None:
        return worker
    if any(variables.get(name) for name in _TORCHRUN_IDENTITY):
        return _parse_torchrun(variables)
    return Environment()


def announce(environment: Environment) -> None:
    """Make `detect` return `environment` in this process from now on."""
    parts = (
        os.getpid(),
        environment.rank,
        environment.world_size,
        environment.local_rank,
        environment.local_world_size,
        environment.control_fd,
        environment.stop_fd,
        environment.run_id,
    )
    os.environ[_WORKER] = ",".join(str(part) for part in parts)


def mark_joined() -> None:
    """Make `detect` refuse in this process from now on: its control channel is taken."""
    os.environ[_WORKER] = f"{os.getpid()},{_JOINED}"


def variables() -> dict[str, str]:
    """Return a copy of this process's environment, without any worker's identity."""
    return {name: value for name, value in os.environ.items() if name != _WORKER}


def replace_variables(new: Mapping[str, str]) -> None:
    """Make `new` the environment of this process."""
    os.environ.clear()
    os.environ.update(new)


def sets_allocator(variables: Mapping[str, str] | None = None) -> bool:
    """Whether the user has chosen how this process allocates memory."""
    variables = os.environ if variables is None else variables
    return any(name.startswith("MALLOC_") or name in _ALLOCATOR for name in variables)


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, at least 1: affinity, then every cgroup's quota above it.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    for quota in _cgroup_quotas(root):
        cores = min(cores, int(quota))
    return max(cores, 1)


def _parse_worker(text: str, pid: int) -> Environment | None:
    if not text:
        return None
    owner, identity = text.split(",", 1)
    if int(owner) != pid:
        return None
    if identity == _JOINED:
        raise UsageError(
            "unisono.join was called twice in this process: a worker joins its run once. Keep the run and hand "
            "it to what needs it."
        )
    rank, world_size, local_rank, local_world_size, control_fd, stop_fd, run_id = identity.split(",", 6)
    return Environment(
        kind="launcher",
        rank=int(rank),
        world_size=int(world_size),
        local_rank=int(local_rank),
        local_world_size=int(local_world_size),
        run_id=run_id,
        control_fd=int(control_fd),
        stop_fd=int(stop_fd),
    )


def _parse_torchrun(variables: Mapping[str, str]) -> Environment:
    missing = [name for name in _TORCHRUN_NEEDED if not variables.get(name)]
    if missing:
        found = [name for name in (*_TORCHRUN_IDENTITY, *_TORCHRUN_NEEDED[2:]) if variables.get(name)]
        raise UsageError(
            f"this looks like a torchrun worker ({', '.join(found)} set), but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: start it with torchrun or `unisono run`, "
            f"or unset {', '.join(found)} to run alone"
        )
    world_size = _number(variables, "WORLD_SIZE", low=1)
    rank = _number(variables, "RANK", low=0, high=world_size - 1)
    # A world started by hand with only the four needed variables is on one host.
    local_world_size = _number(variables, "LOCAL_WORLD_SIZE", low=1, high=world_size, default=world_size)
    local_rank = _number(
        variables, "LOCAL_RANK", low=0, high=local_world_size - 1, default=rank % local_world_size
    )
    restart = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Environment(
        kind="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        run_id=f"{variables.get('TORCHELASTIC_RUN_ID', 'run')}.{restart}",
        master_addr=variables["MASTER_ADDR"],
        master_port=_number(variables, "MASTER_PORT", low=1, high=65535),
        agent_hosts_store=variables.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True",
    )


def _number(
    variables: Mapping[str, str], name: str, *, low: int, high: int | None = None, default: int | None = None
) -> int:
    text = variables.get(name, "")
    if not text and default is not None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"environment variable {name}={text!r} is not a whole number") from None
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise UsageError(f"environment variable {name}={value} is out of range: expected {limits}")
    return value


def _cgroup_quotas(root: Path) -> list[float]:
    """Return the limits, in cores, of all control groups this process is in."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += _quotas_up(root / "sys/fs/cgroup", path, _quota_v2)
        elif "cpu" in controllers.split(","):
            quotas += _quotas_up(root / "sys/fs/cgroup" / controllers, path, _quota_v1)
            quotas += _quotas_up(root / "sys/fs/cgroup/cpu", path, _quota_v1)
    return quotas


def _quotas_up(top: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    """Read the quota of a group and of every group above it; in a container the path may not be visible."""
    group = top / path.lstrip("/")
    groups = [group, *(parent for parent in group.parents if parent == top or top in parent.parents)]
    return [quota for quota in map(read, dict.fromkeys([*groups, top])) if quota is not None]


def _quota_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
