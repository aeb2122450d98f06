"""What only process groups have: deadlines at the start, backends by name, deaths of real processes."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed
from workers import start_worker

from unisono.cluster.patient_store import PatientStore
from unisono.errors import DeadlineError, UsageError
from unisono.transport.backends import available_backends
from unisono.transport.process_group import ProcessGroupTransport, check_backend
from worlds import on_process_groups, registered_backend

WAIT_FOR_DEATH = """
    print("ready", flush=True)
    try:
        transport.start([], [(1, torch.empty(3))]).wait()
    except WorkerLostError as error:
        print(time.time(), flush=True)
        print(error, flush=True)
    start = time.monotonic()
    transport.close()
    print("closed", time.monotonic() - start < 2.0, flush=True)
"""


@pytest.mark.parametrize("has_child", [False, True], ids=["no child", "forked child"])
def test_a_killed_worker_is_noticed_at_once_even_if_a_child_of_it_lives_on(tmp_path, has_child):
    read_end, write_end = os.pipe()
    fork = f"if os.fork() == 0:\n    os.close({write_end}); os.read({read_end}, 1); os._exit(0)\n"
    hold = "print('ready', flush=True)\ntime.sleep(30)\n"
    waiter = start_worker(ProcessGroupTransport, 0, tmp_path / "store", WAIT_FOR_DEATH)
    victim = start_worker(
        ProcessGroupTransport,
        1,
        tmp_path / "store",
        fork + hold if has_child else hold,
        inherited=(read_end, write_end),
    )
    os.close(read_end)
    try:
        assert waiter.stdout.readline() == "ready\n"
        assert victim.stdout.readline() == "ready\n"
        killed = time.time()
        victim.kill()
        assert float(waiter.stdout.readline()) - killed < 0.5
        assert "rank 0: lost the connection to another worker" in (message := waiter.stdout.readline())
        assert "receiving 12 bytes from rank 1" in message
        assert waiter.stdout.readline() == "closed True\n"
        assert waiter.wait(20) == 0
    finally:
        os.close(write_end)  # ends the child
        for process in (waiter, victim):
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.parametrize(
    "make_store",
    [distributed.HashStore, lambda: PatientStore(distributed.HashStore(), timedelta(seconds=30))],
    ids=["torch's", "ours"],
)
def test_a_worker_that_does_not_come_is_named(make_store):
    inner = make_store()  # kept: what a store of ours does is lost with its Python object
    store = distributed.PrefixStore("run", inner)
    with pytest.raises(
        DeadlineError, match=r"rank 0: waited 0.2 s for 3 workers to come; missing: ranks \[1, 2\]"
    ):
        ProcessGroupTransport(store, 0, 3, timeout_s=0.2)


def test_an_unknown_backend_is_refused_and_the_nearest_is_named():
    with pytest.raises(
        UsageError, match=r"'glo' is unknown; did you mean 'gloo'\? Available: shared_memory, gloo"
    ):
        check_backend("glo")
    check_backend("gloo")


def test_a_backend_that_this_build_lacks_is_not_called_unknown():
    if "nccl" not in available_backends():
        with pytest.raises(UsageError, match="'nccl' is not part of this build"):
            check_backend("nccl")


def test_a_registered_backend_is_available_by_name():
    with registered_backend("twin"):
        check_backend("twin")
        assert "twin" in available_backends()
    assert "twin" not in available_backends()


@pytest.mark.parametrize(
    ("options", "named"),
    [({"hostname": "no.such.host.invalid"}, "no.such.host.invalid"), ({"interface": "nope0"}, "nope0")],
)
def test_an_address_where_nothing_can_listen_is_refused_with_the_interfaces_there_are(options, named):
    with pytest.raises(UsageError, match=f"{named}.*Interfaces of this host: .*lo"):
        ProcessGroupTransport(distributed.HashStore(), 0, 1, **options)


def test_all_sockets_are_on_loopback_and_are_gone_after_closing():
    def look(transport):
        tensor = torch.ones(100_000)
        transport.pair_sum(tensor, transport.rank ^ 1).wait()
        return {each.split()[1].split(":")[0] for each in _tcp_lines()}

    before = _tcp_lines()
    addresses = on_process_groups(4, look)
    assert set().union(*addresses) <= {"0100007F"}
    assert _tcp_lines() <= before


def _tcp_lines():
    """The TCP sockets of this process that listen or are connected, as the kernel lists them."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    with open("/proc/self/net/tcp") as table:
        return {line for line in table.read().splitlines()[1:] if line.split()[9] in inodes}
