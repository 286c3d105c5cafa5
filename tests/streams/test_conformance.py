"""What every MessageLog promises, over all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltapost.errors import StreamError
from deltapost.streams import START, Bounds, Entry, MessageLog, position_key

STREAM = "deltapost:{run/0}"


def _append(log: MessageLog, count: int, stream: str = STREAM) -> list[str]:
    return [log.append(stream, b"message %d" % number) for number in range(count)]


def test_a_log_satisfies_the_protocol_and_answers(log: MessageLog) -> None:
    assert isinstance(log, MessageLog)
    log.ping()


def test_what_was_appended_is_read_in_order_with_growing_ids(log: MessageLog) -> None:
    ids = _append(log, 5)
    assert sorted(ids, key=position_key) == ids
    assert len(set(ids)) == 5
    assert log.read(STREAM, START, limit=10) == [
        Entry(each, b"message %d" % number) for number, each in enumerate(ids)
    ]
    assert log.length(STREAM) == 5


def test_a_read_begins_after_its_position_and_stops_at_its_limit(log: MessageLog) -> None:
    ids = _append(log, 5)
    assert [each.id for each in log.read(STREAM, ids[1], limit=2)] == ids[2:4]
    assert log.read(STREAM, ids[4], limit=2) == []
    assert log.read(STREAM, "9999999999999999-0", limit=2) == []


def test_streams_do_not_mix(log: MessageLog) -> None:
    log.append("deltapost:{run/0}", b"zero")
    log.append("deltapost:{run/1}", b"one")
    assert [each.data for each in log.read("deltapost:{run/0}", START, limit=9)] == [b"zero"]
    assert [each.data for each in log.read("deltapost:{run/1}", START, limit=9)] == [b"one"]


@pytest.mark.parametrize("data", [b"", bytes(range(256)), b"\r\n$-1\r\n", b"x" * 16_384, b"y" * 1_048_576])
def test_any_bytes_come_back_as_they_were(log: MessageLog, data: bytes) -> None:
    log.append(STREAM, data)
    assert [each.data for each in log.read(STREAM, START, limit=1)] == [data]


def test_a_read_without_waiting_returns_at_once(log: MessageLog) -> None:
    started = time.monotonic()
    assert log.read(STREAM, START, limit=1) == []
    assert time.monotonic() - started < 0.5


@pytest.mark.parametrize("exists", [False, True])
def test_a_wait_ends_when_its_time_is_up(log: MessageLog, exists: bool) -> None:
    after = log.append(STREAM, b"old") if exists else START
    started = time.monotonic()
    assert log.read(STREAM, after, limit=1, wait_seconds=0.2) == []
    assert 0.19 < time.monotonic() - started < 2.0


@pytest.mark.parametrize("exists", [False, True])
def test_an_append_wakes_a_waiting_reader(log: MessageLog, exists: bool) -> None:
    after = log.append(STREAM, b"old") if exists else START
    appended: list[str] = []
    timer = threading.Timer(0.1, lambda: appended.append(log.append(STREAM, b"new")))
    timer.start()
    started = time.monotonic()
    entries = log.read(STREAM, after, limit=5, wait_seconds=20.0)
    assert time.monotonic() - started < 5.0
    timer.join()
    assert entries == [Entry(appended[0], b"new")]


def test_an_append_to_another_stream_does_not_end_a_wait(log: MessageLog) -> None:
    timer = threading.Timer(0.05, lambda: log.append("deltapost:{run/1}", b"other"))
    timer.start()
    assert log.read(STREAM, START, limit=1, wait_seconds=0.2) == []
    timer.join()


OTHER = "deltapost:{run/1}"


def test_of_many_streams_those_with_news_are_named(log: MessageLog) -> None:
    read = _append(log, 3)[-1]
    after = log.append(OTHER, b"read before this one")
    log.append(OTHER, b"unread")
    positions = {STREAM: read, OTHER: after, "deltapost:{run/2}": START}

    assert log.ready(positions) == {OTHER}
    assert log.ready({**positions, STREAM: START}) == {STREAM, OTHER}
    assert log.ready({}) == set()


def test_a_wait_for_many_streams_ends_with_the_first_news_or_its_time(log: MessageLog) -> None:
    positions = {f"deltapost:{{run/{number}}}": START for number in range(1_024)}
    started = time.monotonic()
    assert log.ready(positions, wait_seconds=0.2) == set()
    assert time.monotonic() - started > 0.19
    timer = threading.Timer(0.1, lambda: log.append("deltapost:{run/700}", b"new"))
    timer.start()

    assert log.ready(positions, wait_seconds=20.0) == {"deltapost:{run/700}"}
    assert time.monotonic() - started < 10.0
    timer.join()


def test_appends_from_many_threads_all_land_once(log: MessageLog) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda number: log.append(STREAM, b"%d" % number), range(200)))
    entries = log.read(STREAM, START, limit=1_000)
    assert {each.id for each in entries} == set(ids)
    assert sorted(int(each.data or b"") for each in entries) == list(range(200))


def test_a_stream_that_is_not_there_is_empty_and_has_no_bounds(log: MessageLog) -> None:
    assert log.bounds(STREAM) is None
    assert log.length(STREAM) == 0
    assert log.read(STREAM, START, limit=1) == []
    assert log.trim(STREAM, "5-0") == 0
    assert log.bounds(STREAM) is None
    assert log.epoch(STREAM) is None


def test_bounds_tell_where_a_stream_stands(log: MessageLog) -> None:
    ids = _append(log, 3)
    assert log.bounds(STREAM) == Bounds(3, ids[0], ids[2], START)


def test_a_trim_removes_exactly_what_is_up_to_its_position(log: MessageLog) -> None:
    ids = _append(log, 10)
    assert log.trim(STREAM, ids[3]) == 4
    assert log.trim(STREAM, ids[3]) == 0
    assert log.trim(STREAM, ids[0]) == 0
    assert [each.id for each in log.read(STREAM, START, limit=99)] == ids[4:]
    assert log.bounds(STREAM) == Bounds(6, ids[4], ids[9], ids[3])


def test_a_trim_between_two_entries_notes_the_lower_one(log: MessageLog) -> None:
    first = log.append(STREAM, b"a")
    between = f"{position_key(first)[0]}-18446744073709551615"
    time.sleep(0.005)
    second = log.append(STREAM, b"b")
    assert log.trim(STREAM, between) == 1
    assert log.bounds(STREAM) == Bounds(1, second, second, first)


def test_a_stream_trimmed_to_nothing_keeps_its_last_id(log: MessageLog) -> None:
    ids = _append(log, 3)
    assert log.trim(STREAM, ids[2]) == 3
    assert log.bounds(STREAM) == Bounds(0, None, ids[2], ids[2])
    later = log.append(STREAM, b"later")
    assert position_key(later) > position_key(ids[2])
    assert log.bounds(STREAM) == Bounds(1, later, later, ids[2])


def test_thousands_of_answered_entries_really_go(log: MessageLog) -> None:
    ids = _append(log, 2_500)
    for start in range(0, 2_500, 250):
        assert log.trim(STREAM, ids[start + 248]) in (249, 250)
        assert log.length(STREAM) == 2_500 - start - 249
        assert log.read(STREAM, ids[start + 248], limit=1)[0].id == ids[start + 249]


def test_a_bounded_append_lets_the_oldest_go_and_bounds_show_it(log: MessageLog) -> None:
    ids = [log.append(STREAM, b"x", max_length=50) for _ in range(500)]
    bounds = log.bounds(STREAM)
    assert bounds is not None
    # Redis removes whole nodes of up to 100 entries.
    assert 50 <= bounds.length <= 150
    first = bounds.first_id
    assert first == ids[-bounds.length]
    assert position_key(ids[-bounds.length - 1]) <= position_key(bounds.removed_through) < position_key(first)


def test_a_log_that_forgot_everything_shows_it(log: MessageLog, forget: Callable[[], None]) -> None:
    position = _append(log, 3)[-1]
    log.claim_epoch(STREAM, "first life")
    forget()
    assert log.epoch(STREAM) is None
    assert log.bounds(STREAM) is None
    assert log.read(STREAM, position, limit=9) == []
    again = log.append(STREAM, b"again")
    assert log.bounds(STREAM) == Bounds(1, again, again, START)
    assert log.claim_epoch(STREAM, "second life") == "second life"


def test_a_life_is_named_once(log: MessageLog) -> None:
    assert log.claim_epoch(STREAM, "a") == "a"
    assert log.claim_epoch(STREAM, "b") == "a"
    assert log.epoch(STREAM) == "a"
    assert log.epoch("deltapost:{run/1}") is None


def test_of_eight_that_name_a_life_at_once_all_learn_the_same_name(log: MessageLog) -> None:
    barrier = threading.Barrier(8)

    def claim(number: int) -> str:
        barrier.wait()
        return log.claim_epoch(STREAM, f"proposed {number}")

    with ThreadPoolExecutor(8) as pool:
        names = set(pool.map(claim, range(8)))
    assert names == {log.epoch(STREAM)}


def test_a_name_is_replaced_only_by_who_knows_it(log: MessageLog) -> None:
    log.claim_epoch(STREAM, "a")
    assert log.replace_epoch(STREAM, old="z", new="b") == "a"
    assert log.replace_epoch(STREAM, old="a", new="b") == "b"
    assert log.replace_epoch(STREAM, old="a", new="c") == "b"
    assert log.epoch(STREAM) == "b"


def test_a_missing_name_is_replaced_too(log: MessageLog) -> None:
    assert log.replace_epoch(STREAM, old="forgotten", new="b") == "b"
    assert log.epoch(STREAM) == "b"


def test_of_eight_that_replace_a_name_at_once_one_does_and_all_learn_which(log: MessageLog) -> None:
    log.claim_epoch(STREAM, "old")
    barrier = threading.Barrier(8)

    def replace(number: int) -> str:
        barrier.wait()
        return log.replace_epoch(STREAM, old="old", new=f"new {number}")

    with ThreadPoolExecutor(8) as pool:
        names = set(pool.map(replace, range(8)))
    assert names == {log.epoch(STREAM)}


@pytest.mark.parametrize(
    "position", ["", "$", ">", "+", "-", "5", "5-", "-5", "5-5-5", "5-5 ", "a-b", f"{2**64}-0"]
)
def test_only_a_complete_id_is_a_position(log: MessageLog, position: str) -> None:
    log.append(STREAM, b"kept")
    with pytest.raises(StreamError, match="no entry id"):
        log.read(STREAM, position, limit=1)
    with pytest.raises(StreamError, match="no entry id"):
        log.trim(STREAM, position)
    assert log.length(STREAM) == 1
