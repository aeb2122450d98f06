"""Runs over several hosts, which are network namespaces of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from namespaces import WHY_NOT, hosts

SCRIPT = """
    import sys, torch, unisono
    from torch import nn

    def loss_fn(model, micro_batch):
        return nn.functional.mse_loss(model(micro_batch[0]), micro_batch[1])

    with unisono.join(step_timeout_s=30) as run:
        print(type(run._transport).__name__, file=sys.stderr)
        for reduction in ("exact", "fast"):
            model = nn.Sequential(nn.Linear(8, 5000), nn.BatchNorm1d(5000), nn.Linear(5000, 1))
            strategy = unisono.Synchronous(reduction=reduction, bucket_bytes=50_000)
            replica = run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01), strategy=strategy)
            rows = [(torch.randn(8), torch.ones(1)) for _ in range(48)]
            for batch in run.load(rows, batch_size=16, micro_batches=8):
                replica.step(batch, loss_fn)
            prints = run.agree(run.fingerprint(model))
            assert prints == run.fingerprint(model)
            if run.is_main and reduction == "exact":
                print("fingerprint", prints)
"""


def nodes_of_torchrun(script, hosts, workers):
    """One torchrun on each host, as many workers on all."""
    for number, (within, _) in enumerate(hosts):
        where = ["--node-rank", str(number), "--master-addr", hosts[0][1], "--master-port", "29400"]
        size = ["--nnodes", str(len(hosts)), "--nproc-per-node", str(workers[0])]
        yield [*within, sys.executable, "-m", "torch.distributed.run", *size, *where, str(script)], {}


def workers_by_hand(script, hosts, workers):
    """Workers that are told who they are in torchrun's way, as many as one likes on each host."""
    for number, (within, _) in enumerate(hosts):
        for local in range(workers[number]):
            identity = {
                "RANK": sum(workers[:number]) + local,
                "WORLD_SIZE": sum(workers),
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": workers[number],
                "MASTER_ADDR": hosts[0][1],
                "MASTER_PORT": 29400,
                "TORCHELASTIC_RUN_ID": "test",
            }
            yield [*within, sys.executable, str(script)], identity


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize(
    ("start", "workers", "transport"),
    [
        (nodes_of_torchrun, (2, 2), "SeveralHosts"),
        (workers_by_hand, (1, 2), "SeveralHosts"),
        (workers_by_hand, (1, 1), "ProcessGroup"),
    ],
    ids=["torchrun", "uneven", "one each"],
)
def test_workers_on_two_hosts_give_the_same_fingerprint(tmp_path, run_script, start, workers, transport):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ours = run_script(SCRIPT, 1)
    with hosts(2) as both:
        processes = []
        for command, identity in start(script, both, workers):
            identity = {name: str(value) for name, value in identity.items()}
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"} | identity,
                )
            )
        try:
            ended = [(*process.communicate(timeout=50), process.returncode) for process in processes]
        finally:
            for process in processes:
                process.terminate()
    assert [code for _, _, code in ended] == [0] * len(processes), ended
    assert "".join(out for out, _, _ in ended) == ours.out
    assert sum(err.count(f"{transport}Transport") for _, err, _ in ended) == sum(workers)
