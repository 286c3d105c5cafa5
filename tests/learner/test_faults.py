"""Whatever fails once on a learner's way, it makes up for: nothing is lost, nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

import deltapost
from deltapost.errors import DeltapostError, ObjectMissing, StoreUnavailable, StreamUnavailable
from deltapost.learner import courier, files
from deltapost.ledger.tables import ContributionRow, ParticipantRow
from deltapost.serialization.names import commits_stream
from deltapost.stores.memory import MemoryStore
from deltapost.streams.memory import MemoryLog
from deltapost_aggregator import announcer
from fixtures.served import CLAIMS, SYNC_EVERY, Served, algorithm, eventually, small_model


class Failing:
    """A store or log whose chosen call fails once, the `nth` time it comes with these words in its key."""

    def __init__(
        self, inner: Any, method: str, nth: int, error: type[DeltapostError], words: str = ""
    ) -> None:
        self._inner = inner
        self._method = method
        self._left = nth
        self._error = error
        self._words = words
        self.failed = False
        self.forever = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name != self._method:
            return found

        def call(*arguments: Any, **keywords: Any) -> Any:
            self._left -= self._words in str(arguments[0])
            matches = self._words in str(arguments[0])
            if (self._left == 0 and not self.failed) or (self.forever and matches):
                self.failed = True
                raise self._error("failed once")
            return found(*arguments, **keywords)

        return call


def join_with(served: Served, *, store: Any = None, log: Any = None, **settings: Any) -> deltapost.Run:
    return deltapost.join(
        "tiny",
        small_model(),
        learner="ada",
        store=store or served.store,
        redis_url=log or served.log,
        state_dir=served.directory / "state",
        poll_seconds=0.05,
        repost_seconds=0.3,
        **settings,
    )


def three_rounds(run: deltapost.Run) -> None:
    for version in range(3):
        for parameter in run._model._arrays.values():  # type: ignore[attr-defined]
            parameter -= 0.5
        for _ in range(SYNC_EVERY):
            run.count_step(tokens=8)
            run.publish_due(loss=1.0)
        assert run.wait_for(0, version + 1, timeout=15)


@pytest.mark.parametrize(
    ("method", "words", "nth"),
    [
        ("get", "/records/", 2),
        ("get", "/records/", 3),
        ("get", "/attestations/", 1),
        ("get", "/attestations/", 2),
        ("get", "/anchors/", 1),
        ("get", "/anchors/", 2),
        ("get", "/deltas/", 1),
        ("put", "/deltas/", 1),
        ("put", "/deltas/", 2),
    ],
)
def test_any_store_call_may_fail_once(
    served: Served, monkeypatch: pytest.MonkeyPatch, method: str, words: str, nth: int
) -> None:
    # Given announcements without records, so that all is read from the store
    monkeypatch.setattr(announcer, "MAX_PROOF_BYTES", 0)
    served.join(small_model(), algorithm(fragments=1, in_flight=1)).leave()
    store = Failing(served.store, method, nth, StoreUnavailable, words)

    with join_with(served, store=store) as run:
        three_rounds(run)
        eventually(lambda: not run._journal.unanswered())

        assert run.versions == [3]
    assert store.failed


def test_a_fragment_that_fails_for_good_holds_up_no_other(served: Served) -> None:
    served.join(small_model(), algorithm()).leave()
    store = Failing(served.store, "get", 1, StoreUnavailable, "/anchors/0000/")
    store.forever = True

    with join_with(served, store=store) as run:
        for fragment in (0, 1):
            run.publish_contribution(fragment, 0, delta=small_model(0.5), **CLAIMS)

        assert run.wait_for(1, 1, timeout=15)
        assert run.version(0) == 0


def test_a_refused_contribution_whose_round_closed_is_not_published_again(served: Served) -> None:
    settings = algorithm(fragments=1, in_flight=1)
    with served.join(small_model(), settings) as ada, served.join(small_model(), learner="bob") as bob:
        ada.publish_contribution(0, 0, delta=small_model(0.5), **{**CLAIMS, "tokens": 0})
        eventually(lambda: (entry := ada._journal.find(0, 0)) is not None and entry.refused)
        bob.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        eventually(lambda: (entry := ada._journal.find(0, 0)) is not None and entry.answered)
        for _ in range(SYNC_EVERY):
            ada.count_step(tokens=1)

        assert ada.due() == []
        assert [one.version for one in ada.align()] == [1]


@pytest.mark.parametrize(
    ("method", "nth"), [("append", 3), ("append", 4), ("read", 5), ("bounds", 4), ("epoch", 2)]
)
def test_any_stream_call_may_fail_once(served: Served, method: str, nth: int) -> None:
    served.join(small_model(), algorithm(fragments=1, in_flight=1)).leave()
    log = Failing(served.log, method, nth, StreamUnavailable)

    with join_with(served, log=log) as run:
        three_rounds(run)

        assert run.versions == [3]
    assert log.failed


def test_a_disk_that_is_full_once_costs_no_commit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.join(small_model(), algorithm(fragments=1, in_flight=1)).leave()
    replace = files.os.replace
    failures = iter([False, False, True, False, True, True])

    def full(source: Any, target: Any) -> None:
        if next(failures, False):
            raise OSError(28, "No space left on device")
        replace(source, target)

    with join_with(served) as run:
        monkeypatch.setattr(files.os, "replace", full)
        for _ in range(8 * SYNC_EVERY):
            run.count_step(tokens=8)
            for receipt in run.publish_due():
                assert run.wait_for(0, receipt.version + 1, timeout=15)

        # What could not even be journalled waited for its next turn.
        assert 5 <= run.version(0) < 8


def test_a_refused_contribution_is_replaced_at_the_next_turn_without_a_barrier(served: Served) -> None:
    settings = algorithm(fragments=1, in_flight=1, max_delta_norm=100.0)
    model = small_model()
    with served.join(model, settings) as run:
        model["a"] -= 1e6
        for _ in range(4):
            run.count_step(tokens=1)
        assert [receipt.version for receipt in run.publish_due()] == [0]
        eventually(lambda: (entry := run._journal.find(0, 0)) is not None and entry.refused)

        model["a"] += 1e6
        for _ in range(4):
            run.count_step(tokens=1)
        assert [receipt.repeated for receipt in run.publish_due()] == [False]

        assert run.wait_for(0, 1, timeout=10)
    with served.ledger.read() as session:
        verdicts = {row.verdict for row in session.scalars(select(ContributionRow))}
    assert verdicts == {"outlier", "accepted"}


def test_advice_that_was_lost_is_given_again_when_the_envelope_is_posted_again(served: Served) -> None:
    with served.join(small_model(), algorithm(), repost_seconds=0.3) as run:
        run.publish_contribution(0, 0, delta=small_model(0.5), **{**CLAIMS, "tokens": 0})
        eventually(lambda: (entry := run._journal.find(0, 0)) is not None and entry.refused)
        served.log.trim(commits_stream("tiny"), "9999999999999-0")
    entry = run._journal.find(0, 0)
    assert entry is not None
    run._journal.add(entry.signed, run._journal.payload(entry))  # as if no advice had come

    with served.join(small_model(), repost_seconds=0.3) as again:
        eventually(lambda: (entry := again._journal.find(0, 0)) is not None and entry.refused)


def test_training_goes_on_while_nothing_answers_and_its_contribution_is_posted_later(
    served: Served,
) -> None:
    served.join(small_model(), algorithm(fragments=1, in_flight=1)).leave()

    class Down:
        def __init__(self) -> None:
            self.down = False

        def __getattr__(self, name: str) -> Any:
            if self.down and name == "put":
                raise StoreUnavailable("the store is down")
            return getattr(served.store, name)

    store = Down()
    with join_with(served, store=store) as run:
        store.down = True
        for _ in range(4):
            run.count_step(tokens=1)
        (receipt,) = run.publish_due(loss=float("nan"))
        assert not receipt.posted
        run.align()
        store.down = False

        assert run.wait_for(0, 1, timeout=15)
    with served.ledger.read() as session:
        row = session.scalars(select(ParticipantRow)).one()
    assert row.envelope.hex() == receipt.envelope
    assert row.loss is None


def test_the_seconds_of_a_step_are_measured_although_every_step_aligns(served: Served) -> None:
    with served.join(small_model(), algorithm(fragments=1, in_flight=1, overlap_steps=0)) as run:
        for _ in range(8):
            time.sleep(0.02)
            run.count_step(tokens=1)
            run.publish_due()
            run.align()
    with served.ledger.read() as session:
        seconds = [row.step_seconds for row in session.scalars(select(ParticipantRow))]
    assert len(seconds) == 2
    assert all(value > 0.015 for value in seconds)


def test_a_loop_that_looks_only_now_and_then_misses_no_turn(served: Served) -> None:
    with served.join(small_model(), algorithm()) as run:
        published = []
        for step in range(1, 25):
            run.count_step(tokens=1)
            if step % 3 == 0:
                receipts = run.publish_due()
                published += [receipt.fragment for receipt in receipts]
                for receipt in receipts:
                    assert run.wait_for(receipt.fragment, receipt.version + 1, timeout=10)

    assert set(published) == {0, 1}
    assert len(published) >= 8


def test_a_wait_ends_in_time_even_at_a_barrier(served: Served) -> None:
    served.stop()
    with served.join(small_model(), deltapost.DiLoCo.standard(sync_every=1)) as run:
        run.count_step(tokens=1)
        run.publish_due()
        started = time.monotonic()

        assert not run.wait_for(0, 1, timeout=0.5)
        assert run.align(wait_seconds=0.2) == []

        assert time.monotonic() - started < 5


def test_two_commits_between_two_aligns_still_tell_that_the_first_merged_ones_delta(served: Served) -> None:
    settings = algorithm(fragments=1, in_flight=1)
    with served.join(small_model(), settings) as ada, served.join(small_model(), learner="bob") as bob:
        ada.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        for version in (0, 1):
            assert bob.wait_for(0, version + 1, timeout=10)
            if version == 0:
                bob.publish_contribution(0, 1, delta=small_model(0.5), **CLAIMS)
        eventually(lambda: ada._follower.version(0) == 2)

        aligned = [one for one in ada.align() if one.fragment == 0]

    assert [(one.version, one.merged) for one in aligned] == [(2, True)]


@pytest.mark.slow
def test_a_slow_store_does_not_hold_up_align_or_the_heartbeat(served: Served) -> None:
    served.join(small_model(), algorithm(fragments=1, in_flight=1)).leave()
    slow = Slow(served.store, 4.0)
    log = Counting(served.log)
    with join_with(served, store=slow, log=log, learner_lease_seconds=0.3) as run:
        slow.on = True
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        eventually(lambda: run._courier._announcements.newest(0) == 1)
        longest = 0.0
        alive_before = log.appended
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            started = time.monotonic()
            run.align()
            longest = max(longest, time.monotonic() - started)
            time.sleep(0.01)

    # An align or a heartbeat that waited for the store would have taken those four seconds.
    assert longest < 3.0
    assert log.appended - alive_before >= 2


class Slow:
    """A store whose gets take their time, once that is turned on."""

    def __init__(self, inner: MemoryStore, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self.on = False

    def __getattr__(self, name: str) -> Any:
        if self.on and name == "get":
            time.sleep(self._seconds)
        return getattr(self._inner, name)


class Counting:
    """A log that counts its appends."""

    def __init__(self, inner: MemoryLog) -> None:
        self._inner = inner
        self.appended = 0

    def append(self, *arguments: Any, **keywords: Any) -> str:
        self.appended += 1
        return self._inner.append(*arguments, **keywords)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._inner, name)
        return found


def test_an_upload_that_is_gone_when_it_is_read_back_is_posted_again_and_stops_no_training(
    served: Served,
) -> None:
    served.join(small_model(), algorithm(fragments=1, in_flight=1)).leave()
    store = Failing(served.store, "get", 1, ObjectMissing, "/deltas/")
    with join_with(served, store=store) as run:
        for _ in range(SYNC_EVERY):
            run.count_step(tokens=8)
            run.publish_due(loss=1.0)

        assert store.failed
        assert run.wait_for(0, 1, timeout=15)


def test_a_learner_that_round_after_round_closes_without_is_warned(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(courier, "PASSED_OVER_WARNING", 1)
    with (
        served.join(small_model(), algorithm()) as ada,
        served.join(small_model(), algorithm(), learner="bob") as bob,
    ):
        # Given a round that is closed
        ada.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        assert ada.wait_for(0, 1, timeout=20)

        # When Bob contributes to it
        bob.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)

        # Then he is told what may be wrong, and Ada is not
        eventually(lambda: 'contributions_passed_over run="tiny" learner="bob"' in caplog.text)
        assert 'contributions_passed_over run="tiny" learner="ada"' not in caplog.text


def test_a_commit_whose_announcement_was_lost_is_found_by_a_learner_that_waits_for_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a learner that has published nothing, and an announcement that the stream lost
    monkeypatch.setattr("deltapost.learner.courier.PROBE_SECONDS", 0.2)
    settings = algorithm(fragments=1, in_flight=1)
    with served.join(small_model(), settings) as ada, served.join(small_model(), learner="bob") as bob:
        append = served.log.append

        def losing(stream: str, data: bytes, *, max_length: int | None = None) -> str:
            lost = stream == commits_stream("tiny")
            return "1-1" if lost else append(stream, data, max_length=max_length)

        monkeypatch.setattr(served.log, "append", losing)

        # When a round is committed
        ada.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)

        # Then it is found in the bucket
        assert bob.wait_for(0, 1, timeout=15)
