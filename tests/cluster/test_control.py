"""The master of a run, driven message by message."""

from __future__ import annotations

import pytest

from unisono.cluster.control import Master
from unisono.cluster.messages import (
    AddToKey,
    AppendToKey,
    At,
    CheckKeys,
    CompareSet,
    DeleteKey,
    FrameReader,
    GetKeys,
    Hello,
    Keys,
    Left,
    ListKeys,
    Number,
    Refused,
    SetKey,
    Values,
    Welcome,
    Whereabouts,
    WhoIsWhere,
    frame,
)
from unisono.cluster.position import USER_CODE
from unisono.errors import TransportError


@pytest.fixture
def master():
    return Master("run", world_size=3, flags={"backend": "gloo"})


def handle(master, rank, message, now=0.0):
    return master.handle(rank, message, now=now)


def test_a_worker_is_welcomed_with_the_flags(master):
    assert handle(master, 1, Hello("run", 1, 42)) == [(1, Welcome({"backend": "gloo"}))]
    assert master.joined(1)


def test_a_worker_of_another_run_is_refused(master):
    [(_, answer)] = handle(master, 1, Hello("other", 1, 42))
    assert isinstance(answer, Refused)
    assert answer.reason == "this is run run, not other"
    assert not master.joined(1)


def test_a_wait_is_answered_when_the_last_key_is_set(master):
    assert handle(master, 0, GetKeys(7, ["a", "b"])) == []
    assert handle(master, 1, SetKey(1, "a", b"1")) == [(1, Number(1, 1))]
    assert handle(master, 2, SetKey(1, "b", b"2")) == [(2, Number(1, 1)), (0, Values(7, [b"1", b"2"]))]
    assert handle(master, 1, SetKey(2, "b", b"3")) == [(1, Number(2, 1))]


def test_a_key_that_exists_is_answered_at_once(master):
    handle(master, 0, SetKey(1, "a", b"1"))
    assert handle(master, 1, GetKeys(3, ["a"])) == [(1, Values(3, [b"1"]))]


def test_the_waits_of_a_worker_that_is_gone_are_forgotten(master):
    handle(master, 0, GetKeys(7, ["a"]))
    master.forget(0, now=1.0)
    assert handle(master, 1, SetKey(1, "a", b"1")) == [(1, Number(1, 1))]


def test_adding_counts_from_zero_and_wakes_who_waits(master):
    handle(master, 2, GetKeys(9, ["n"]))
    assert handle(master, 0, AddToKey(1, "n", 5)) == [(0, Number(1, 5)), (2, Values(9, [b"5"]))]
    assert handle(master, 1, AddToKey(1, "n", -2)) == [(1, Number(1, 3))]


def test_adding_to_what_is_no_number_is_refused(master):
    handle(master, 0, SetKey(1, "a", b"x"))
    [(_, answer)] = handle(master, 0, AddToKey(2, "a", 1))
    assert "key 'a' is not a number" in answer.reason


def test_compare_set_follows_torchs_contract(master):
    assert handle(master, 0, CompareSet(1, "a", b"", b"first")) == [(0, Values(1, [b"first"]))]
    assert handle(master, 1, CompareSet(1, "a", b"", b"second")) == [(1, Values(1, [b"first"]))]
    assert handle(master, 1, CompareSet(2, "a", b"first", b"second")) == [(1, Values(2, [b"second"]))]
    assert handle(master, 1, CompareSet(3, "none", b"x", b"y")) == [(1, Values(3, [b"x"]))]


def test_keys_can_be_checked_listed_appended_to_and_deleted(master):
    handle(master, 0, AppendToKey(1, "a", b"1"))
    handle(master, 0, AppendToKey(2, "a", b"2"))
    assert handle(master, 0, GetKeys(3, ["a"])) == [(0, Values(3, [b"12"]))]
    assert handle(master, 0, CheckKeys(4, ["a", "b"])) == [(0, Number(4, 0))]
    assert handle(master, 0, ListKeys(5)) == [(0, Keys(5, ["a"]))]
    assert handle(master, 0, DeleteKey(6, "a")) == [(0, Number(6, 1))]
    assert handle(master, 0, DeleteKey(7, "a")) == [(0, Number(7, 0))]


def test_sightings_say_where_and_since_when(master):
    handle(master, 1, Hello("run", 1, 42), now=1.0)
    handle(master, 1, At(4, USER_CODE, 2.0), now=5.0)
    [(_, answer)] = handle(master, 0, WhoIsWhere(1), now=8.0)
    assert isinstance(answer, Whereabouts)
    assert answer.sightings[1]._asdict() == {
        "rank": 1,
        "pid": 42,
        "step": 4,
        "operation": USER_CODE,
        "age_s": 5.0,
        "heartbeat_age_s": 3.0,
        "ended": False,
    }
    assert answer.sightings[2].pid == 0


def test_a_worker_that_left_is_no_member(master):
    handle(master, 1, Hello("run", 1, 42))
    handle(master, 1, Left())
    assert not master.joined(1)
    assert master.sightings(0.0)[1].ended


def test_a_stream_is_cut_at_message_borders_wherever_it_is_split():
    expected = [b"", b"a", b"b" * 300]
    stream = b"".join(map(frame, expected))
    for size in (1, 3, 7, 1000):
        reader = FrameReader()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [payload for piece in pieces for payload in reader.feed(piece)] == expected


def test_a_payload_over_the_limit_is_refused_before_it_arrives():
    with pytest.raises(TransportError, match="message of 1000 bytes announced, at most 999"):
        list(FrameReader(999).feed(frame(b"x" * 1000)[:4]))
