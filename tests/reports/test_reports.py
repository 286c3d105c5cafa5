"""Public reports that no other test of a part has for its own: each with its source."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from deltapost.adapters.native import NativeBackend
from deltapost.learner.following import Follower
from deltapost.learner.history import History
from deltapost.ledger.engine import open_ledger
from deltapost.serialization.messages import sign_message
from deltapost.serialization.names import envelope_stream
from deltapost_aggregator.worker import FragmentWorker
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, healthy, learner_signing_key, plain_config


@pytest.fixture
def pipeline(migrated_sqlite_url: str) -> Iterator[Pipeline]:
    ledger = open_ledger(migrated_sqlite_url)
    yield Pipeline(ledger)
    ledger.close()


def test_fragments_published_in_different_orders_all_close(migrated_sqlite_url: str) -> None:
    """torchft#206, #205: learners sync fragments in different orders; nobody waits for a global one."""
    ledger = open_ledger(migrated_sqlite_url)
    pipeline = Pipeline(
        ledger, config=plain_config(fragments=2, in_flight=2, quorum_size=2), learners=LEARNERS
    )
    for learner, order in (("ada", (0, 1)), ("bob", (1, 0))):
        for fragment in order:
            pipeline.post(learner, arrays(fragment + 1), fragment=fragment)
    context = pipeline.context()
    for fragment in (1, 0):
        worker = FragmentWorker(context, fragment)
        for _ in range(4):
            worker.step()
    assert (pipeline.head(0), pipeline.head(1)) == (1, 1)
    ledger.close()


def test_a_joiner_that_three_rounds_overtook_adopts_the_newest_at_its_next_look(
    pipeline: Pipeline, tmp_path: Any
) -> None:
    """hivemind#653, #455: a late joiner loops on time-outs and stays out of sync."""
    history = History(tmp_path / "history", manifest_sha256=pipeline.plan.manifest_sha256, fragments=1)
    learner = Follower(pipeline.store, pipeline.plan, history, NativeBackend(), aggregator_key=None)
    worker = pipeline.worker()
    learner.advance(learner.catch_up(0))
    for version in range(3):
        healthy(pipeline, version)
        pipeline.run_to(version + 1, worker)

    commit = learner.next_commit(0)

    assert commit is not None
    assert commit.version == 3
    learner.advance(commit)
    contributed = pipeline.post("ada", arrays(5), version=3)
    pipeline.settle(worker)
    assert pipeline.verdict(contributed) == "accepted"


def test_a_fresh_learners_delta_against_version_0_is_stale_and_moves_nothing(pipeline: Pipeline) -> None:
    """ft-diloco M3: an unhealed worker became the donor while the coordinator restarted."""
    worker = pipeline.worker()
    for version in range(2):
        healthy(pipeline, version)
        pipeline.run_to(version + 1, worker)
    anchor = pipeline.record(2).anchor
    pipeline.register("fresh")
    fresh = pipeline.post("fresh", arrays(9), version=0)

    pipeline.settle(pipeline.worker())  # a new process: nothing of the old one's memory is left

    assert pipeline.verdict(fresh) == "stale"
    assert pipeline.head() == 2
    assert pipeline.record(2).anchor == anchor


def test_slow_learners_are_waited_for_as_long_as_the_grace_window_and_the_audit_shows_who_was_in(
    migrated_sqlite_url: str,
) -> None:
    """ft-diloco M5: 16 of 32 took part though 30 were alive."""
    ledger = open_ledger(migrated_sqlite_url)
    learners = tuple(f"l-{number}" for number in range(10))
    pipeline = Pipeline(ledger, config=plain_config(quorum_size=4, grace_seconds=5.0), learners=learners)
    worker = pipeline.worker()
    for version in range(3):
        paused = {learners[version], learners[version + 1]}
        alive = [learner for learner in learners if learner not in paused]
        for half in (alive[:4], alive[4:]):  # the second half comes within the window
            for learner in half:
                pipeline.post(learner, arrays(ord(learner[-1])), version=version)
            for _ in range(3):
                worker.step()
            pipeline.clock.sleep(2)
        pipeline.clock.sleep(5)
        pipeline.run_to(version + 1, worker)
        assert [p.learner for p in pipeline.record(version + 1).participants] == alive
    ledger.close()


def test_clocks_that_are_ten_years_wrong_change_no_record(
    tmp_path: Any, migrated_sqlite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learners, Redis and aggregator each believe in another time: nothing of it enters a decision."""
    import shutil

    ten_years = 10 * 365 * 86_400
    true_time, true_time_ns = time.time, time.time_ns
    found = []
    for number, skew in enumerate((0, -ten_years, ten_years)):
        monkeypatch.setattr(time, "time", lambda skew=skew: true_time() + skew)
        monkeypatch.setattr(time, "time_ns", lambda skew=skew: true_time_ns() + skew * 10**9)
        ledger = open_ledger(f"sqlite:///{shutil.copy(migrated_sqlite, tmp_path / f'{number}.db')}")
        pipeline = Pipeline(ledger)
        worker = pipeline.worker()
        for version in range(2):
            healthy(pipeline, version)
            pipeline.run_to(version + 1, worker)
        found.append((pipeline.records(), pipeline.dump()))
        ledger.close()
    assert found[0] == found[1] == found[2]


def test_replayed_envelopes_do_nothing_in_later_rounds_other_fragments_and_other_runs(
    migrated_sqlite_url: str,
) -> None:
    """The signature covers run, fragment, base version, counters and payload."""
    ledger = open_ledger(migrated_sqlite_url)
    pipeline = Pipeline(ledger, config=plain_config(fragments=2, in_flight=2))
    context = pipeline.context()
    workers = [FragmentWorker(context, fragment) for fragment in (0, 1)]
    posted = [pipeline.post(learner, arrays(n)) for n, learner in enumerate(LEARNERS)]
    pipeline.run_to(1, workers[0])
    elsewhere = sign_message(pipeline.message("ada", b"x", run="other-run"), learner_signing_key("ada")).frame

    for signed in posted:
        pipeline.append(signed)
        pipeline.append(signed, fragment=1)
    pipeline.log.append(envelope_stream(RUN, 0), elsewhere)
    for worker in workers:
        for _ in range(3):
            worker.step()

    assert [pipeline.row(signed).deliveries for signed in posted] == [2, 2, 2]
    assert all(pipeline.row(signed).answered_version == 1 for signed in posted)
    assert pipeline.unverified() == {(2, "malformed"): 1, (1, "malformed"): 3}
    assert (pipeline.head(0), pipeline.head(1)) == (1, 0)
    ledger.close()
