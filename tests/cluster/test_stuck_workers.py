"""A worker that is alive but does not come: the others' wait ends at the deadline and says who is missing."""

from __future__ import annotations

import re

TRAIN = """
    import os, signal, subprocess, sys, time
    import torch, unisono
    from unisono.errors import TransportError

    variant = sys.argv[1]

    def loss_fn(model, micro_batch):
        return torch.nn.functional.mse_loss(model(micro_batch[0]), micro_batch[1])

    with unisono.join(step_timeout_s=float(sys.argv[2])) as run:
        model = torch.nn.Linear(8, 1)
        replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01))
        rows = [(torch.ones(8), torch.ones(1))] * 64
        for step, batch in enumerate(run.load(rows, batch_size=8, micro_batches=4)):
            if step == 5 and run.rank == 1:
                if variant == "sleep":
                    time.sleep(1000)
                if variant == "pause":
                    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
                if variant in ("stop", "pause"):
                    os.kill(os.getpid(), signal.SIGSTOP)
            cpu, wall = time.process_time(), time.monotonic()
            try:
                replica.step(batch, loss_fn)
            except TransportError:
                print("share of a core:", (time.process_time() - cpu) / (time.monotonic() - wall))
                raise
        print(run.fingerprint(model))
"""


def test_a_worker_stuck_in_user_code_is_named(run_script):
    ran = run_script(TRAIN, 3, "sleep", "2")
    assert ran.outcome.exit_code == 1
    assert ran.seconds < 2 + 5
    last = ran.last_words.splitlines()[-1]
    assert re.search(
        r"worker [02] failed at step 5: DeadlineError: rank [02] waited 2\.\d s at step 5 in ", last
    )
    assert re.search(r"for rank 1 \(pid \d+\): last seen at step 4 in user code, 2\.\d s ago$", last)


def test_waiting_does_not_burn_a_core(run_script):
    ran = run_script(TRAIN, 3, "sleep", "2")
    [share] = re.findall(r"share of a core: (\S+)", ran.out)
    assert float(share) < 0.2


def test_a_stopped_worker_is_named_as_silent_and_does_not_survive(run_script):
    ran = run_script(TRAIN, 3, "stop", "4", grace_s=2.0)
    last = ran.last_words.splitlines()[-1]
    assert re.search(r"for rank 1 \(pid \d+\): last seen .*, no heartbeat for \d\.\d s \(stopped\?\)$", last)
    assert ran.outcome.ended[1] == -9
    assert ran.seconds < 4 + 5


def test_a_pause_shorter_than_the_deadline_changes_nothing(run_script):
    paused = run_script(TRAIN, 3, "pause", "20")
    calm = run_script(TRAIN, 3, "none", "20")
    assert paused.last_words == ""
    assert paused.out == calm.out != ""


def test_a_worker_that_never_joins_is_named(run_script):
    source = """
        import os, time, unisono
        if os.environ["UNISONO_WORKER"].split(",")[1] == "1":
            time.sleep(1000)
        unisono.join(step_timeout_s=1)
    """
    ran = run_script(source, 2)
    assert ran.outcome.exit_code == 1
    last = ran.last_words.splitlines()[-1]
    assert last.endswith("in the meeting of all workers for rank 1, which has not joined the run")
    assert ran.seconds < 10
