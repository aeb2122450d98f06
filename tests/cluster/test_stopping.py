"""Ctrl-C, SIGTERM, hang-up and `kill -9` of real jobs leave nothing behind: real launchers, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from unisono.cluster.process import children

LIMIT_S = 10.0
LOOPBACK = "0100007F"

# Two workers with two loader processes each and a child of the user's own; rank 1 is stuck in a wait.
SCRIPT = """
    import os, subprocess, sys, time
    from pathlib import Path
    import torch, unisono

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4000

        def __getitem__(self, index):
            return torch.ones(8), torch.ones(1)

    def loss_fn(model, micro_batch):
        return torch.nn.functional.mse_loss(model(micro_batch[0]), micro_batch[1])

    with unisono.join() as run:
        model = torch.nn.Linear(8, 1)
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for step, batch in enumerate(run.load(Rows(), batch_size=8, micro_batches=2, num_workers=2)):
            replica.step(batch, loss_fn)
            if step == 2 and run.rank == 0:
                subprocess.Popen(["sleep", "1000"])
                Path(sys.argv[1]).touch()
                time.sleep(1000)
"""


class Job:
    """A launcher in a session of its own, and everything that came of it."""

    def __init__(self, folder: Path):
        script, ready = folder / "train.py", folder / "ready"
        script.write_text(textwrap.dedent(SCRIPT))
        self.stderr = (folder / "stderr").open("w")
        command = [sys.executable, "-m", "unisono", "run", "-n", "2", str(script), str(ready)]
        self.launcher = subprocess.Popen(
            command,
            start_new_session=True,
            stderr=self.stderr,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        self.folder = folder
        wait_until(ready.exists, seconds=50)
        self.family = {pid: start_time(pid) for pid in descendants(self.launcher.pid)}

    def survivors(self):
        return [pid for pid, start in self.family.items() if start_time(pid) == start]

    def wait(self):
        code = self.launcher.wait(timeout=LIMIT_S)
        return code, Path(self.stderr.name).read_text()


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    # launcher's children: fork server, two workers, four loader processes, the user's own
    assert len(job.family) >= 8
    yield job
    if job.launcher.poll() is None:
        job.launcher.kill()
        job.launcher.wait()
    job.stderr.close()


def descendants(pid):
    found = children(pid)
    return found + [grandchild for child in found for grandchild in descendants(child)]


def start_time(pid):
    """Return when a living process started, None for one that is gone or dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def wait_until(condition, *, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def addresses_listened_on(job):
    """Return the local addresses of the job's listening TCP sockets, as the kernel writes them."""
    ours = set().union(*(sockets(pid) for pid in (job.launcher.pid, *job.family)))
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in ours}


def sockets(pid):
    """Return the inodes of a process's sockets."""
    targets = [os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
    return {target[8:-1] for target in targets if target.startswith("socket:[")}


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_to_the_whole_group_ends_everything(job, number, exit_code):
    assert addresses_listened_on(job) <= {LOOPBACK}
    os.killpg(job.launcher.pid, number)  # as from a terminal, a batch system or timeout(1)
    check_stopped(job, number, exit_code)


def test_sigterm_to_the_launcher_ends_everything(job):
    job.launcher.send_signal(signal.SIGTERM)
    check_stopped(job, signal.SIGTERM, 143)


def check_stopped(job, number, exit_code):
    assert job.wait() == (exit_code, f"unisono: stopped by {signal.Signals(number).name}\n")
    assert job.survivors() == []


def test_ctrl_c_twice_ends_everything_at_once(job):
    os.killpg(job.launcher.pid, signal.SIGINT)
    os.killpg(job.launcher.pid, signal.SIGINT)
    code, _ = job.wait()
    assert code == 130
    assert job.survivors() == []


def test_killing_the_launcher_ends_everything(job):
    job.launcher.kill()
    job.launcher.wait()
    wait_until(lambda: job.survivors() == [], seconds=LIMIT_S)
    assert list(job.folder.glob("unisono-*")) == []


def test_killing_launcher_and_fork_server_ends_the_workers(job):
    [server] = children(job.launcher.pid)
    workers = children(server)
    os.kill(job.launcher.pid, signal.SIGKILL)
    os.kill(server, signal.SIGKILL)
    job.launcher.wait()
    wait_until(lambda: not set(workers) & set(job.survivors()), seconds=LIMIT_S)
    # Only what the user started and nobody of ours is left to know of is still there.
    wait_until(lambda: len(job.survivors()) == 1, seconds=LIMIT_S)
    [own] = job.survivors()
    os.kill(own, signal.SIGKILL)


def test_killing_the_fork_server_fails_the_job(job):
    [server] = children(job.launcher.pid)
    os.kill(server, signal.SIGKILL)
    code, said = job.wait()
    assert code == 1
    assert "the fork server ended (killed by signal 9)" in said
    assert job.survivors() == []
