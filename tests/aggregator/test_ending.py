"""A run that is finished ends once, whoever is left, and everything that was open is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from deltapost.audit.history import BucketHistory
from deltapost.errors import HistoryError
from deltapost.ledger import ending, runs
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.revisions import migrate
from deltapost.ledger.tables import RunRow
from deltapost.points import END_POINTS, at
from deltapost.serialization.ends import FragmentEnd, RunEnd, read_slot
from deltapost.serialization.messages import SignedMessage
from deltapost.serialization.names import attestation_key, delta_key, end_key, record_key
from deltapost.serialization.records import Attestation, Record
from deltapost_aggregator.garbage import Judge, sweep
from deltapost_aggregator.worker import FragmentWorker
from fixtures.pipeline import AGGREGATOR_KEY, LEARNERS, RUN, Pipeline, arrays, healthy, plain_config


class Killed(BaseException):
    """Stands for SIGKILL."""


def kill() -> None:
    raise Killed


@pytest.fixture
def ledger(migrated_sqlite_url: str) -> Iterator[Ledger]:
    opened = open_ledger(migrated_sqlite_url)
    yield opened
    opened.close()


def finish(pipeline: Pipeline, worker: FragmentWorker | None = None) -> None:
    """Steps a worker until it says that the run is finished."""
    stepping = worker if worker is not None else pipeline.worker()
    for _ in range(20):
        if stepping.step() == "finished":
            return
    raise AssertionError("not finished after 20 steps")


def open_round(pipeline: Pipeline) -> tuple[SignedMessage, SignedMessage]:
    """One committed round, and a second with an accepted contribution and one that was refused."""
    worker = pipeline.worker()
    healthy(pipeline)
    pipeline.run_to(1, worker)
    accepted = pipeline.post("ada", arrays(1), version=1)
    refused = pipeline.post("bob", arrays(2), version=1, steps=0)
    pipeline.settle(worker)
    worker.stop()
    return accepted, refused


def the_end(pipeline: Pipeline, version: int) -> FragmentEnd:
    found = read_slot(pipeline.store.get(record_key(RUN, 0, version)).data)
    assert isinstance(found, FragmentEnd)
    return found


def assert_ended(pipeline: Pipeline, accepted: SignedMessage, refused: SignedMessage) -> None:
    end = the_end(pipeline, 2)
    assert end.previous == pipeline.record(1).sha256
    assert end.verdicts() == {accepted.sha256: "late", refused.sha256: "zero_steps"}
    attestation = Attestation.from_bytes(pipeline.store.get(attestation_key(RUN, 0, 2)).data)
    attestation.verify(end.sha256, AGGREGATOR_KEY.public)
    marker = RunEnd.from_bytes(pipeline.store.get(end_key(RUN)).data)
    marker.verify(AGGREGATOR_KEY.public)
    assert [(ref.version, ref.sha256) for ref in marker.ends] == [(2, end.sha256)]
    assert ending.state(pipeline.ledger, RUN) == "finished"
    assert pipeline.head() == 1
    for signed, verdict in ((accepted, "late"), (refused, "zero_steps")):
        row = pipeline.row(signed)
        assert (row.verdict, row.answered_version) == (verdict, 2)


def race(pipeline: Pipeline, point: str, other: Callable[[], None]) -> FragmentWorker:
    """A worker that is held up at the point while `other` happens, as a paused owner is."""
    return pipeline.worker(reach=at(point, 1, other))


def test_a_finished_run_answers_what_was_open(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    accepted, refused = open_round(pipeline)

    ending.request(ledger, RUN)
    finish(pipeline)

    assert_ended(pipeline, accepted, refused)
    assert runs.active(ledger) == []


def test_nothing_that_comes_after_the_end_is_read_or_merged(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    accepted, refused = open_round(pipeline)
    ending.request(ledger, RUN)
    finish(pipeline)

    later = [pipeline.post(learner, arrays(5), version=1) for learner in LEARNERS]
    finish(pipeline)

    assert_ended(pipeline, accepted, refused)
    assert [pipeline.verdict(signed) for signed in later] == [None] * 3


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("point", END_POINTS)
def test_killed_at_any_point_of_ending_the_next_owner_ends_it_the_same(
    ledger: Ledger, point: str, times: int
) -> None:
    """Between checkpoints, so that the last anchor is written, too."""
    pipeline = Pipeline(ledger, config=plain_config(commit_dtype="F32", checkpoint_every=3))
    accepted, refused = open_round(pipeline)
    ending.request(ledger, RUN)
    kills = 0

    for _ in range(times):
        worker = pipeline.worker(reach=at(point, 1, kill))
        try:
            finish(pipeline, worker)
        except Killed:
            kills += 1
    finish(pipeline)

    assert kills >= 1
    assert_ended(pipeline, accepted, refused)


def test_a_sealed_round_is_committed_before_the_end(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    healthy(pipeline)
    with pytest.raises(Killed):
        pipeline.run_to(1, pipeline.worker(reach=at("seal.tx_done", 1, kill)))

    ending.request(ledger, RUN)
    finish(pipeline)

    assert len(pipeline.record(1).participants) == 3
    assert the_end(pipeline, 2).answers == ()


def test_a_record_that_a_stale_owner_writes_before_the_end_is_adopted_and_the_end_comes_after_it(
    ledger: Ledger, migrated_sqlite_url: str
) -> None:
    # Given a record that was committed while this ledger, restored, knows nothing of it
    pipeline = Pipeline(ledger)
    healthy(pipeline)
    pipeline.run_to(1)
    record = pipeline.store.get(record_key(RUN, 0, 1)).data
    attestation = pipeline.store.get(attestation_key(RUN, 0, 1)).data
    for key in (record_key(RUN, 0, 1), attestation_key(RUN, 0, 1)):
        pipeline.store.delete(key)
    pipeline.ledger = open_ledger(migrated_sqlite_url.replace("migrated.db", "again.db"))
    migrate(pipeline.ledger)
    runs.admit(pipeline.ledger, pipeline.plan.manifest)
    ending.request(pipeline.ledger, RUN)

    # When its owner's record comes just before the end is written
    def stale() -> None:
        pipeline.store.put(record_key(RUN, 0, 1), record)
        pipeline.store.put(attestation_key(RUN, 0, 1), attestation)

    finish(pipeline, race(pipeline, "end.before_put", stale))

    # Then the record stands, and the end follows it
    assert pipeline.head() == 1
    assert isinstance(read_slot(record), Record)
    assert the_end(pipeline, 2).previous == pipeline.record(1).sha256
    pipeline.ledger.close()


def test_an_end_that_takes_the_slot_of_a_sealed_round_is_adopted_and_the_round_never_was(
    ledger: Ledger,
) -> None:
    # Given an owner that has sealed and is paused before its record, while a stale one writes the end
    pipeline = Pipeline(ledger)
    ending.request(ledger, RUN)
    pipeline_end = FragmentEnd(
        run=RUN,
        manifest=pipeline.plan.manifest_sha256,
        fragment=0,
        version=1,
        previous=pipeline.plan.manifest_sha256,
        answers=(),
        unverified={},
        over_quota={},
    )
    with ledger.write() as session:
        row = session.get(RunRow, RUN)
        assert row is not None
        asked, row.finish_requested_at = row.finish_requested_at, None
    posted = [pipeline.post(learner, arrays(1)) for learner in LEARNERS]

    def stale() -> None:
        pipeline.store.put(record_key(RUN, 0, 1), pipeline_end.to_bytes())
        with ledger.write() as session:
            row = session.get(RunRow, RUN)
            assert row is not None
            row.finish_requested_at = asked

    finish(pipeline, race(pipeline, "record.before_put", stale))

    assert the_end(pipeline, 1) == pipeline_end
    assert pipeline.head() == 0
    assert [pipeline.verdict(signed) for signed in posted] == [None] * 3
    assert ending.state(ledger, RUN) == "finished"


def test_an_end_that_nobody_asked_for_is_never_attested(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    healthy(pipeline)
    pipeline.run_to(1)
    forged = FragmentEnd(
        run=RUN,
        manifest=pipeline.plan.manifest_sha256,
        fragment=0,
        version=2,
        previous=pipeline.record(1).sha256,
        answers=(),
        unverified={},
        over_quota={},
    )
    pipeline.store.put(record_key(RUN, 0, 2), forged.to_bytes())

    with pytest.raises(HistoryError, match="nobody asked for"):
        pipeline.settle(pipeline.worker())

    assert list(pipeline.store.list(attestation_key(RUN, 0, 2))) == []
    assert ending.ends(ledger, RUN) == {}


def test_an_empty_ledger_finds_the_end_in_the_bucket(ledger: Ledger, migrated_sqlite_url: str) -> None:
    pipeline = Pipeline(ledger)
    open_round(pipeline)
    ending.request(ledger, RUN)
    finish(pipeline)
    pipeline.ledger = open_ledger(migrated_sqlite_url.replace("migrated.db", "again.db"))
    migrate(pipeline.ledger)
    runs.admit(pipeline.ledger, pipeline.plan.manifest)

    finish(pipeline)

    assert ending.state(pipeline.ledger, RUN) == "finished"
    assert pipeline.head() == 1
    pipeline.ledger.close()


def test_one_fragments_end_makes_up_for_a_request_that_an_older_database_forgot(
    ledger: Ledger, migrated_sqlite_url: str
) -> None:
    # Given a run of which one fragment has ended when the database is replaced by one from before the request
    pipeline = Pipeline(ledger, config=plain_config(fragments=2))
    ending.request(ledger, RUN)
    first = pipeline.worker(0)
    assert "ended" in [first.step() for _ in range(3)]
    pipeline.ledger = open_ledger(migrated_sqlite_url.replace("migrated.db", "again.db"))
    migrate(pipeline.ledger)
    runs.admit(pipeline.ledger, pipeline.plan.manifest)

    # When both fragments are served again
    workers = [pipeline.worker(fragment) for fragment in range(2)]
    for _ in range(6):
        for worker in workers:
            worker.step()

    # Then the run does not go on with a part of the model
    assert ending.state(pipeline.ledger, RUN) == "finished"
    pipeline.ledger.close()


def test_garbage_of_an_ended_fragment_is_collected_and_the_end_is_no_round(ledger: Ledger) -> None:
    # Given an ended run with an orphan of a decided round and one of the round that never was
    pipeline = Pipeline(ledger)
    open_round(pipeline)
    ending.request(ledger, RUN)
    finish(pipeline)
    orphans = []
    for base in (0, 1):
        payload = pipeline.payload(arrays(70 + base))
        message = pipeline.message("cyd", payload, version=base)
        pipeline.put(message, payload)
        orphans.append(delta_key(RUN, "cyd", 0, base, message.payload.sha256))

    # When its garbage is collected
    history = BucketHistory.open(pipeline.store, RUN)
    sweep(history, Judge(history), list(pipeline.store.list(f"{RUN}/")))

    # Then the decided round's orphan is gone, and what no record decides stays
    left = {info.key for info in pipeline.store.list(f"{RUN}/deltas/")}
    assert orphans[0] not in left
    assert orphans[1] in left
    assert history.versions(0) == [1]
