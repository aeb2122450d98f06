"""What only shared memory has: descriptors, strangers, full sockets, deaths of real processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed
from workers import start_worker

import unisono.transport.choose as choose
from unisono.cluster.patient_store import PatientStore
from unisono.errors import DeadlineError, TransportError, UsageError
from unisono.transport.choose import connect_workers
from unisono.transport.pair_sockets import connect_pairs
from unisono.transport.process_group import ProcessGroupTransport
from unisono.transport.shared_memory import SharedMemoryTransport
from worlds import on_shared_memory

CPU = torch.device("cpu")


def end(*processes):
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


WAIT_FOR_DEATH = """
    mine = transport.allocate("mine", 1000, torch.float32).fill_(1)
    transport.start([(1, torch.empty(0))], [(1, torch.empty(0))]).wait()
    theirs = transport.peer_view(1, "theirs")
    print("ready", flush=True)
    try:
        transport.start([], [(1, torch.empty(3))]).wait()
    except WorkerLostError as error:
        print(time.time(), flush=True)
        print(error, flush=True)
    print("its memory", theirs.sum().item(), flush=True)
    transport.close()
"""
HOLD = """
theirs = transport.allocate("theirs", 1000, torch.float32).fill_(2)
transport.start([(0, torch.empty(0))], [(0, torch.empty(0))]).wait()
print("ready", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("has_child", [False, True], ids=["no child", "forked child"])
def test_a_killed_worker_is_noticed_at_once_even_if_a_child_of_it_lives_on(tmp_path, has_child):
    read_end, write_end = os.pipe()
    fork = f"if os.fork() == 0:\n    os.close({write_end}); os.read({read_end}, 1); os._exit(0)\n"
    waiter = start_worker(SharedMemoryTransport, 0, tmp_path / "store", WAIT_FOR_DEATH)
    body = fork + HOLD if has_child else HOLD
    victim = start_worker(SharedMemoryTransport, 1, tmp_path / "store", body, inherited=(read_end, write_end))
    os.close(read_end)
    try:
        assert waiter.stdout.readline() == "ready\n"
        assert victim.stdout.readline() == "ready\n"
        killed = time.time()
        victim.kill()
        assert float(waiter.stdout.readline()) - killed < 0.5
        assert waiter.stdout.readline() == "rank 0: lost rank 1: its connection closed.\n"
        assert waiter.stdout.readline() == "its memory 2000.0\n", "it outlives its owner"
        assert waiter.wait(20) == 0
    finally:
        os.close(write_end)  # ends the child
        end(waiter, victim)


def test_a_worker_that_is_stopped_for_a_while_does_no_harm(tmp_path):
    answer = """
    for number in range(3):
        tensor = torch.full((20_000,), float(number))
        transport.all_reduce(tensor).wait()
        print(tensor.sum().item(), flush=True)
    """
    workers = [start_worker(SharedMemoryTransport, rank, tmp_path / "store", answer) for rank in range(2)]
    try:
        workers[1].send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        workers[1].send_signal(signal.SIGCONT)
        for worker in workers:
            assert worker.communicate(timeout=30)[0].split() == ["0.0", "40000.0", "80000.0"]
    finally:
        end(*workers)


def test_a_process_that_may_open_no_more_files_says_so(tmp_path):
    receive = """
    import resource
    from unisono.errors import TransportError
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, before[1]))
    try:
        transport.start([], [(1, torch.empty(100_000))]).wait()
    except TransportError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    """
    send = """
    transport.start([(0, torch.ones(100_000))], []).wait()
    time.sleep(30)
    """
    workers = [
        start_worker(SharedMemoryTransport, rank, tmp_path / "store", body)
        for rank, body in enumerate((receive, send))
    ]
    try:
        assert "raise the limits of open files (ulimit -n)" in workers[0].communicate(timeout=30)[0]
    finally:
        end(*workers)


def test_sockets_that_are_full_both_ways_do_not_stop_the_ranks():
    num_messages = 200

    def flood(transport):
        peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
        mine = [torch.full((7_000,), float(number)) for number in range(num_messages)]
        sent = [transport.start([(peer, tensor) for peer in peers], []) for tensor in mine]
        got = {peer: [torch.empty(7_000) for _ in mine] for peer in peers}
        for work in sent:
            work.wait()
        for peer in peers:
            transport.start([], [(peer, tensor) for tensor in got[peer]]).wait()
        return all(
            torch.equal(left, right) for peer in peers for left, right in zip(mine, got[peer], strict=True)
        )

    assert on_shared_memory(3, flood) == [True] * 3


def test_sums_come_in_the_order_in_which_they_were_posted_beside_messages():
    def mix(transport):
        peer = 1 - transport.rank
        sums = [torch.full((size,), float(transport.rank + size)) for size in (3, 50_000, 5, 70_000, 2)]
        received = torch.empty(4)
        works = [transport.all_reduce(each) for each in sums]
        exchange = transport.start([(peer, torch.full((4,), float(transport.rank)))], [(peer, received)])
        if transport.rank == 0:
            exchange.wait()
        works[-1].wait()
        exchange.wait()
        for work in works:
            work.wait()
        assert [each.unique().tolist() for each in sums] == [[2.0 * len(each) + 1] for each in sums]
        return received.unique().tolist()

    assert on_shared_memory(2, mix) == [[1.0], [0.0]]


def test_strangers_are_hung_up_on_and_disturb_nobody():
    store = distributed.HashStore()
    connected = []

    def meet():
        connected.append(connect_pairs(store, 0, [0, 1], timeout_s=20))

    host = threading.Thread(target=meet)
    host.start()
    name, secret = (bytes.fromhex(word) for word in store.get("pairs/0").decode().split(" "))
    hellos = (b"", b"x" * 20, b"x" * 5000, secret + (7).to_bytes(4, "little"), b"\0" * 16 + b"\1\0\0\0")
    strangers = []
    for hello in hellos:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        strangers.append(stranger)
        stranger.settimeout(10)
        stranger.connect(name)
        if hello:
            stranger.send(hello)
            assert stranger.recv(1) == b""
    guest = connect_pairs(store, 1, [0, 1], timeout_s=20)
    host.join()
    guest[0].send(b"here")
    assert connected[0][1].recv(10) == b"here"
    for each in (*strangers, *guest.values(), *connected[0].values()):
        each.close()


@pytest.mark.parametrize(
    "make_store",
    [distributed.HashStore, lambda: PatientStore(distributed.HashStore(), timedelta(seconds=30))],
    ids=["torch's", "ours"],
)
def test_a_worker_that_does_not_come_is_named(make_store):
    inner = make_store()
    store = distributed.PrefixStore("run", inner)
    with pytest.raises(
        DeadlineError, match=r"rank 0: waited 0.2 s for 3 workers to come; missing: ranks \[1, 2\]"
    ):
        connect_workers(store, 0, 3, backend=None, device=CPU, timeout_s=0.2, hostname="127.0.0.1")
    with pytest.raises(DeadlineError, match=r"workers on this host to connect; missing: ranks \[1, 2\]"):
        SharedMemoryTransport(distributed.PrefixStore("other", inner), 0, 3, timeout_s=0.2)


def test_a_child_can_not_use_its_parents_transport():
    def fork(transport):
        if transport.rank == 0:
            pid = os.fork()
            if pid == 0:
                try:
                    transport.start([(1, torch.ones(1))], []).wait()
                except TransportError as error:
                    os._exit(7 if "a forked child" in str(error) else 1)
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        tensor = torch.ones(2)
        transport.all_reduce(tensor).wait()
        return tensor.tolist()

    assert on_shared_memory(2, fork) == [[2.0, 2.0]] * 2


def connect_all(identities, monkeypatch, backend=None):
    """Connect as many workers as there are identities; return (kind of transport, notice) or the error of each."""
    store = distributed.HashStore()
    found = [None] * len(identities)
    mine = threading.local()

    def identity():
        if isinstance(identities[mine.rank], OSError):
            raise identities[mine.rank]
        return identities[mine.rank]

    monkeypatch.setattr(choose, "host_identity", identity)
    ready = threading.Barrier(len(identities))

    def work(rank):
        mine.rank = rank
        options = {"backend": backend, "device": CPU, "timeout_s": 20, "hostname": "127.0.0.1"}
        try:
            transport, notice = connect_workers(store, rank, len(identities), **options)
            ready.wait()
            transport.close()
            found[rank] = (type(transport), notice)
        except UsageError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(identities))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_workers_of_one_host_share_memory_and_others_say_why_not(monkeypatch):
    assert connect_all(["a", "a"], monkeypatch) == [(SharedMemoryTransport, None)] * 2
    assert connect_all(["a", "b"], monkeypatch) == [(ProcessGroupTransport, None)] * 2
    unable = connect_all(["a", OSError("no memory files"), "a"], monkeypatch)
    words = (
        "workers talk through gloo and not through shared memory: rank 1 can't share any (no memory files)"
    )
    assert unable == [(ProcessGroupTransport, words)] * 3
    refused = connect_all(["a", "b"], monkeypatch, "shared_memory")
    assert refused == ["backend='shared_memory': rank 1 is not on the host of rank 0: use gloo."] * 2


def test_memory_can_be_shared_of_cpus_only():
    options = {"timeout_s": 1, "hostname": "127.0.0.1", "device": torch.device("meta")}
    with pytest.raises(UsageError, match="'shared_memory' moves tensors of CPUs, not of meta"):
        connect_workers(distributed.HashStore(), 0, 2, backend="shared_memory", **options)


def test_no_descriptor_is_left_and_buffers_that_were_replaced_are_gone():
    before = len(os.listdir("/proc/self/fd"))

    def use(transport):
        peer = 1 - transport.rank
        for size in range(1, 30):
            transport.allocate("buffer", size, torch.float32)
            transport.all_reduce(torch.ones(9_000 * size)).wait()
        signal = torch.empty(0)
        transport.start([(peer, signal)], [(peer, signal)]).wait()
        return len(transport._links[peer].files)

    def allocate_many(transport):
        peer = 1 - transport.rank
        held = [transport.allocate(f"buffer {number}", 10, torch.float32) for number in range(300)]
        signal = torch.empty(0)
        transport.start([(peer, signal)], [(peer, signal)]).wait()
        views = [transport.peer_view(peer, f"buffer {number}") for number in range(300)]
        return len(os.listdir("/proc/self/fd")), len(held), len(views)

    assert on_shared_memory(2, use) == [3, 3], "one buffer and those of sums"
    assert all(count < before + 50 for count, *_ in on_shared_memory(2, allocate_many))
    assert len(os.listdir("/proc/self/fd")) == before
