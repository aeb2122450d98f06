"""The stores behave as torch's own: one contract, every implementation."""

from __future__ import annotations

import datetime
import socket
import threading
from contextlib import contextmanager

import msgspec
import pytest
from torch import distributed

from unisono.cluster.client import ControlClient
from unisono.cluster.control import Master
from unisono.cluster.messages import FrameReader, ToMaster, encode, frame
from unisono.cluster.patient_store import PatientStore
from unisono.cluster.store import ControlStore
from unisono.errors import DeadlineError, WorkerLostError

SHORT = datetime.timedelta(seconds=0.05)
LONG = datetime.timedelta(seconds=30)


@contextmanager
def patient_stores():
    shared = distributed.HashStore()
    stores = [PatientStore(shared, LONG) for _ in range(2)]
    yield stores, stores[0].abort


@contextmanager
def control_stores():
    """Two workers' stores on one master, which a thread serves."""
    master = Master("run", world_size=2, flags={})
    pairs = [socket.socketpair() for _ in range(2)]
    servers = [threading.Thread(target=serve, args=(master, rank, pairs)) for rank in range(2)]
    clients = [ControlClient(theirs) for _, theirs in pairs]
    for server in servers:
        server.start()
    for rank, client in enumerate(clients):
        client.join("run", rank=rank)
    try:
        yield [ControlStore(client) for client in clients], clients[0].stop
    finally:
        for client, (_, theirs) in zip(clients, pairs, strict=True):
            client.leave()
            theirs.close()
        for server, (ours, _) in zip(servers, pairs, strict=True):
            server.join()
            ours.close()


LOCK = threading.Lock()


def serve(master, rank, pairs):
    reader, decoder = FrameReader(), msgspec.msgpack.Decoder(ToMaster)
    while data := pairs[rank][0].recv(1 << 16):
        for payload in reader.feed(data):
            with LOCK:
                for receiver, answer in master.handle(rank, decoder.decode(payload), now=0.0):
                    pairs[receiver][0].sendall(frame(encode(answer)))


@pytest.fixture(params=[patient_stores, control_stores])
def stores(request):
    with request.param() as (stores, _):
        yield stores


@pytest.fixture(params=[patient_stores, control_stores])
def abortable(request):
    with request.param() as (stores, abort):
        yield stores[0], abort


def test_what_one_sets_the_other_gets(stores):
    mine, theirs = stores
    mine.set("text", "value")
    mine.set("bytes", b"\xff\x00")
    assert theirs.get("text") == b"value"
    assert theirs.get("bytes") == b"\xff\x00"


def test_a_wait_ends_when_the_other_sets_the_key(stores):
    mine, theirs = stores
    seen = []
    waiting = threading.Thread(target=lambda: seen.append(mine.get("late")))
    waiting.start()
    theirs.set("late", "1")
    waiting.join()
    assert seen == [b"1"]


def test_a_wait_in_vain_says_for_which_key(stores):
    with pytest.raises(DeadlineError, match=r"waited 0\.1 s for a, b in the run's store"):
        stores[0].wait(["a", "b"], SHORT)


def test_the_time_out_of_get_can_be_set(stores):
    stores[0].set_timeout(SHORT)
    assert stores[0].timeout == SHORT
    with pytest.raises(DeadlineError):
        stores[0].get("never")


def test_adding_is_seen_by_all(stores):
    mine, theirs = stores
    assert [mine.add("n", 2), theirs.add("n", 3), mine.add("n", -1)] == [2, 5, 4]
    assert theirs.get("n") == b"4"


def test_compare_set_sets_once(stores):
    mine, theirs = stores
    assert mine.compare_set("first", "", "mine") == b"mine"
    assert theirs.compare_set("first", "", "theirs") == b"mine"


def test_keys_can_be_checked_and_deleted(stores):
    mine, theirs = stores
    mine.set("a", "1")
    assert theirs.check(["a"])
    assert not theirs.check(["a", "b"])
    assert theirs.delete_key("a")
    assert not mine.check(["a"])


def test_a_prefix_keeps_runs_apart(stores):
    mine, theirs = stores
    distributed.PrefixStore("one", mine).set("key", "1")
    assert distributed.PrefixStore("one", theirs).get("key") == b"1"
    assert not distributed.PrefixStore("two", theirs).check(["key"])


def test_an_abort_ends_a_wait_that_is_going_on(abortable):
    store, abort = abortable
    errors = []

    def wait():
        try:
            store.get("never")
        except WorkerLostError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    abort(reason := WorkerLostError("worker 2 failed"))
    waiting.join()
    assert errors == [reason]


def test_an_abort_ends_waits_that_come_later(abortable):
    store, abort = abortable
    abort(WorkerLostError("worker 2 failed"))
    with pytest.raises(WorkerLostError, match="worker 2 failed"):
        store.get("never")
