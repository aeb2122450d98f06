"""Who is missing, and the words for it."""

from __future__ import annotations

from unisono.cluster.position import USER_CODE, Position, Sighting, describe_wait, find_missing

WAITING = "reduce of bucket 2"
POSITION = Position(WAITING, 5, 0.0)


def waiting(rank):
    return Sighting(rank, 4000 + rank, 5, WAITING, 5.0, 0.2)


def test_who_is_in_user_code_is_missing():
    in_user_code = Sighting(1, 4242, 4, USER_CODE, 5.2, 0.1)
    assert find_missing(0, step=5, sightings=[waiting(0), in_user_code, waiting(2)]) == [in_user_code]


def test_who_is_silent_is_missing_wherever_it_was():
    silent = Sighting(1, 4242, 5, WAITING, 9.0, 8.5)
    assert find_missing(0, step=5, sightings=[waiting(0), silent, waiting(2)]) == [silent]


def test_who_left_comes_before_who_is_behind():
    left = Sighting(2, 4002, 4, USER_CODE, 1.0, 1.0, ended=True)
    behind = Sighting(1, 4001, 4, USER_CODE, 5.2, 0.1)
    assert find_missing(0, step=5, sightings=[behind, left]) == [left]


def test_who_is_behind_in_another_operation_is_missing():
    behind = Sighting(1, 4001, 4, "evaluation", 5.2, 0.1)
    assert find_missing(0, step=5, sightings=[waiting(0), behind]) == [behind]


def test_the_sentence_says_who_waited_where_and_for_whom():
    sightings = [waiting(0), Sighting(1, 4242, 4, USER_CODE, 5.2, 0.1)]
    assert describe_wait(0, position=POSITION, waited_s=5.0, sightings=sightings) == (
        "rank 0 waited 5.0 s at step 5 in reduce of bucket 2 "
        "for rank 1 (pid 4242): last seen at step 4 in user code, 5.2 s ago"
    )


def test_a_stopped_worker_is_said_to_be_silent():
    sightings = [Sighting(1, 4242, 4, USER_CODE, 0.5, 6.0)]
    text = describe_wait(0, position=POSITION, waited_s=5.0, sightings=sightings)
    assert text.endswith("6.0 s ago, no heartbeat for 6.0 s (stopped?)")


def test_a_worker_that_never_joined_is_said_to_be_so():
    text = describe_wait(0, position=POSITION, waited_s=5.0, sightings=[waiting(0), Sighting(1)])
    assert text.endswith("for rank 1, which has not joined the run")


def test_a_worker_that_left_is_said_to_have_left():
    left = Sighting(1, 4242, 4, USER_CODE, 2.0, 2.0, ended=True)
    text = describe_wait(0, position=POSITION, waited_s=5.0, sightings=[left])
    assert "for rank 1 (pid 4242), which left the run 2.0 s ago, last seen at step 4 in user code" in text


def test_when_all_wait_for_each_other_nobody_is_blamed():
    text = describe_wait(0, position=POSITION, waited_s=5.0, sightings=[waiting(0), waiting(1)])
    assert "all others" in text


def test_not_knowing_is_said():
    assert "could not be found out" in describe_wait(0, position=POSITION, waited_s=5.0, sightings=[])
