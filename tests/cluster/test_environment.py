"""Who a process is, and how many cores it may use. Pure but for files in a folder of the test's."""

from __future__ import annotations

import os

import pytest

from unisono.cluster.environment import Environment, announce, detect, usable_cores, variables
from unisono.errors import UsageError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_without_variables_a_process_is_alone():
    assert detect({}) == Environment(kind="alone", rank=0, world_size=1)


def test_a_master_address_alone_makes_no_worker():
    assert detect({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}).kind == "alone"


def test_torchruns_variables_are_read():
    assert detect(TORCHRUN) == Environment(
        kind="torchrun",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        run_id="job.2",
        master_addr="10.0.0.1",
        master_port=29500,
        agent_hosts_store=True,
    )


def test_a_world_started_by_hand_is_on_one_host():
    by_hand = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment = detect(by_hand)
    assert (environment.local_rank, environment.local_world_size) == (3, 4)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_set_variables_are_an_error_that_names_the_missing_one(missing):
    half = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(UsageError, match=f"{missing} is not set"):
        detect(half)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "4", "RANK=4 is out of range: expected from 0 to 3"),
        ("RANK", "-1", "RANK=-1 is out of range"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0 is out of range: expected at least 1"),
        ("LOCAL_RANK", "two", "LOCAL_RANK='two' is not a whole number"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000 is out of range"),
    ],
)
def test_values_that_make_no_sense_are_named(name, value, message):
    with pytest.raises(UsageError, match=message):
        detect(TORCHRUN | {name: value})


def test_a_worker_finds_what_was_announced(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    worker = Environment(
        kind="launcher",
        rank=1,
        world_size=3,
        local_rank=1,
        local_world_size=3,
        run_id="a,b",
        control_fd=7,
        stop_fd=8,
    )
    announce(worker)
    assert detect() == worker


def test_programs_that_a_worker_starts_are_no_workers(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    announce(Environment(kind="launcher", rank=1, world_size=3, control_fd=7, stop_fd=8))
    assert detect(pid=os.getpid() + 1).kind == "alone"
    assert variables() == {}


def cores_with(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return usable_cores(tmp_path)


def test_affinity_limits_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    assert usable_cores(tmp_path) == 5


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1)])
def test_the_quota_of_a_control_group_limits_the_cores(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    files = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": quota}
    assert cores_with(tmp_path, files) == cores


def test_the_quota_of_a_group_above_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        "sys/fs/cgroup/a/cpu.max": "300000 100000",
    }
    assert cores_with(tmp_path, files) == 3


def test_a_container_sees_its_own_group_at_the_top(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    files = {"proc/self/cgroup": "0::/hidden/outside\n", "sys/fs/cgroup/cpu.max": "400000 100000"}
    assert cores_with(tmp_path, files) == 4


def test_control_groups_of_the_first_kind_count(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/job\n2:memory:/job\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "600000",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
    }
    assert cores_with(tmp_path, files) == 6


def test_no_quota_of_the_first_kind_is_minus_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    files = {
        "proc/self/cgroup": "4:cpu:/job\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
    }
    assert cores_with(tmp_path, files) == 64
