"""Fragments are spread over the aggregators that live, and move when one dies, stops, joins or is paused."""

from __future__ import annotations

import threading
import time

import pytest

from deltapost.serialization.messages import CommitMessage, read_message
from deltapost.serialization.names import commits_stream
from deltapost.streams import START
from fixtures.fleet import FRAGMENTS, LEASE_SECONDS, Aggregator, Aggregators
from fixtures.pipeline import RUN
from fixtures.served import eventually

ALL = list(range(FRAGMENTS))


def share_all(*aggregators: Aggregator) -> bool:
    """Whether together they hold every fragment, each one once."""
    return sorted(fragment for each in aggregators for fragment in each.holds()) == ALL


def spread(*aggregators: Aggregator) -> bool:
    """Whether they share all, none of them more than one fragment above another."""
    counts = [len(each.holds()) for each in aggregators]
    return share_all(*aggregators) and max(counts) - min(counts) <= 1


def commits(aggregators: Aggregators) -> list[tuple[int, int, bytes]]:
    """Every announced commit: fragment, version, hash of the record."""
    log = aggregators.pipeline.log
    messages = [
        read_message(entry.data or b"").message for entry in log.read(commits_stream(RUN), START, limit=1_000)
    ]
    return [
        (each.fragment, each.version, each.record) for each in messages if isinstance(each, CommitMessage)
    ]


def test_three_share_evenly_and_commit_each_round_once(aggregators: Aggregators) -> None:
    three = [aggregators.start(name) for name in ("a", "b", "c")]
    eventually(lambda: spread(*three), seconds=60)

    for version in range(2):
        aggregators.post(version)
        aggregators.reach_heads(version + 1)

    eventually(lambda: len(commits(aggregators)) == 2 * FRAGMENTS, seconds=60)
    assert len(set(commits(aggregators))) == 2 * FRAGMENTS


def test_when_one_dies_the_others_have_its_fragments_within_a_lease(aggregators: Aggregators) -> None:
    dying, *others = [aggregators.start(name) for name in ("a", "b", "c")]
    eventually(lambda: spread(dying, *others), seconds=60)
    aggregators.post(0)
    aggregators.reach_heads(1)

    dying.die()
    aggregators.post(1)

    started = time.monotonic()
    aggregators.reach_heads(2)
    assert time.monotonic() - started < 10 * LEASE_SECONDS  # a lease, and a busy machine
    eventually(lambda: spread(*others), seconds=60)


def test_what_one_that_stops_in_order_held_is_the_others_at_once(aggregators: Aggregators) -> None:
    # Given leases that would last for ten minutes
    first = aggregators.start("a", lease_seconds=600.0, poll_seconds=0.1)
    eventually(lambda: first.holds() == ALL, seconds=60)
    second = aggregators.start("b", lease_seconds=600.0, poll_seconds=0.1)

    first.stop()

    eventually(lambda: second.holds() == ALL, seconds=60)
    aggregators.post(0)
    aggregators.reach_heads(1)


def test_one_that_joins_gets_its_share_between_rounds(aggregators: Aggregators) -> None:
    first = aggregators.start("a", lease_seconds=15.0)
    eventually(lambda: first.holds() == ALL, seconds=60)

    second = aggregators.start("b", lease_seconds=15.0)

    version = 0
    while not spread(first, second):
        aggregators.post(version)
        version += 1
        aggregators.reach_heads(version)
    # And then nobody takes anything from anybody
    held = first.holds(), second.holds()
    aggregators.post(version)
    aggregators.reach_heads(version + 1)
    assert (first.holds(), second.holds()) == held


@pytest.mark.slow
def test_one_that_joins_gets_idle_fragments_too(aggregators: Aggregators) -> None:
    first = aggregators.start("a")
    eventually(lambda: first.holds() == ALL, seconds=60)

    second = aggregators.start("b")

    eventually(lambda: spread(first, second), seconds=60)


@pytest.mark.slow
def test_one_that_was_paused_and_wakes_does_no_harm(aggregators: Aggregators) -> None:
    stopped, released = threading.Event(), threading.Event()

    def reach(point: str) -> None:
        if point == "record.before_put" and not released.is_set():
            stopped.set()
            released.wait(60)

    # Given an aggregator that is stopped with rounds computed and their records not written
    paused = aggregators.start("a", reach=reach)
    eventually(lambda: paused.holds() == ALL, seconds=60)
    aggregators.post(0)
    assert stopped.wait(60)
    paused.going.clear()

    # And another that takes over and commits these rounds and the next
    other = aggregators.start("b")
    aggregators.reach_heads(1)
    aggregators.post(1)
    aggregators.reach_heads(2)
    before = [aggregators.pipeline.records(fragment) for fragment in ALL], aggregators.pipeline.dump()

    # When the first goes on
    paused.going.set()
    released.set()
    eventually(lambda: spread(paused, other), seconds=60)

    # Then nothing is other than it was, and both go on
    after = [aggregators.pipeline.records(fragment) for fragment in ALL], aggregators.pipeline.dump()
    assert after == before
    aggregators.post(2)
    aggregators.reach_heads(3)
    assert len(set(commits(aggregators))) == 3 * FRAGMENTS


def test_fragments_that_another_should_take_and_does_not_are_served_all_the_same(
    aggregators: Aggregators,
) -> None:
    stuck, released = threading.Event(), threading.Event()

    def reach(point: str) -> None:
        if point == "intake.read":
            stuck.set()
            released.wait(120)

    # Given one whose only worker is busy with its first fragment for ever, and so takes none of the others
    aggregators.post(0)
    busy = aggregators.start("a", reach=reach, worker_threads=1)
    assert stuck.wait(60)

    # Then another serves these, its share at once and the rest after a lease, and keeps them
    other = aggregators.start("b")
    try:
        eventually(lambda: sum(aggregators.heads()) == FRAGMENTS - 1, seconds=90)
        eventually(lambda: (len(busy.holds()), len(other.holds())) == (0, FRAGMENTS - 1))
    finally:
        released.set()


@pytest.mark.slow
def test_runs_that_only_some_serve_are_shared_by_those(aggregators: Aggregators) -> None:
    everything = aggregators.start("a")
    nothing = aggregators.start("b", serve_runs="another-run")

    eventually(lambda: everything.holds() == ALL, seconds=60)
    eventually(lambda: everything.service._fleet._living == {"a", "b"}, seconds=60)
    aggregators.post(0)
    aggregators.reach_heads(1)

    assert (everything.holds(), nothing.holds()) == (ALL, [])
