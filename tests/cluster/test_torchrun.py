"""The same scripts under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import sys, time, torch, unisono

    def loss_fn(model, micro_batch):
        return torch.nn.functional.mse_loss(model(micro_batch[0]), micro_batch[1])

    with unisono.join(step_timeout_s=2) as run:
        model = torch.nn.Linear(8, 1)
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01))
        rows = [(torch.randn(8), torch.ones(1)) for _ in range(32)]
        for step, batch in enumerate(run.load(rows, batch_size=8, micro_batches=4)):
            if step == 2 and run.rank == 1 and "stuck" in sys.argv:
                time.sleep(1000)
            replica.step(batch, loss_fn)
        if run.is_main:
            print("fingerprint", run.fingerprint(model))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def torchrun(script, *args):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*command, str(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        out, err = process.communicate(timeout=50)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its workers
        process.communicate(timeout=40)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_torchrun_gives_the_same_fingerprint_as_our_launcher(script, run_script):
    ours = run_script(SCRIPT, 3)
    theirs = torchrun(script)
    assert theirs.returncode == 0, theirs.stderr
    assert theirs.stdout == ours.out


def test_under_torchrun_a_missing_worker_is_named_at_the_deadline(script):
    ended = torchrun(script, "stuck")
    assert ended.returncode == 1
    assert "DeadlineError: rank 0 waited 2." in ended.stderr
    assert "last seen at step 1 in user code" in ended.stderr
