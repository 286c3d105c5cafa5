"""A lease's token fences every transaction: who lost it changes nothing, whatever it still believes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, text

from deltapost.algorithms.sealing import Judged
from deltapost.errors import ForkedHistory, LeaseLost, RunMismatch
from deltapost.ledger import intake, leases, rounds, runs, seals
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.leases import Lease
from deltapost.ledger.runs import Standing
from deltapost.ledger.tables import FragmentRow, RunRow, SealRow
from deltapost.points import at
from deltapost.serialization.records import Attestation, Observations, Record
from fixtures.pipeline import AGGREGATOR_KEY, LEARNERS, RUN, Pipeline, arrays, healthy
from fixtures.served import eventually

OBSERVED = Observations(
    owner="a", lease_epoch=1, stream_epoch="", position="0-0", committed_at="2026-11-30T00:00:00+00:00"
)


@pytest.fixture
def pipeline(ledger: Ledger) -> Pipeline:
    return Pipeline(ledger)


def acquire(ledger: Ledger, owner: str, *, take_own: bool = False) -> Lease | None:
    return leases.acquire(ledger, RUN, 0, owner, take_own=take_own)


def held(ledger: Ledger, owner: str = "a") -> Lease:
    lease = acquire(ledger, owner)
    assert lease is not None
    return lease


def expire(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the database's clock stand an hour later."""
    now = type(ledger).now

    def later(self: Ledger, session: Any) -> datetime:
        return now(self, session) + timedelta(hours=1)

    monkeypatch.setattr(type(ledger), "now", later)


def test_one_owner_at_a_time_holds_a_lease(pipeline: Pipeline) -> None:
    first = held(pipeline.ledger)

    assert acquire(pipeline.ledger, "b") is None
    assert acquire(pipeline.ledger, "a") is None  # nor the same name, but at its start:
    again = acquire(pipeline.ledger, "a", take_own=True)

    assert again is not None
    assert again.token != first.token
    assert again.epoch == first.epoch + 1
    with pytest.raises(LeaseLost):
        leases.renew(pipeline.ledger, first)


def test_a_lease_that_ran_out_or_was_given_back_is_free(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = held(pipeline.ledger)
    leases.release(pipeline.ledger, first)
    second = held(pipeline.ledger, "b")

    leases.release(pipeline.ledger, first)  # a late goodbye takes nothing from the new owner
    assert acquire(pipeline.ledger, "a") is None
    expire(pipeline.ledger, monkeypatch)
    third = held(pipeline.ledger, "a")

    assert len({first.token, second.token, third.token}) == 3
    with pytest.raises(LeaseLost):
        leases.renew(pipeline.ledger, second)


def test_a_renewed_lease_does_not_run_out(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = held(pipeline.ledger)
    leases.renew(pipeline.ledger, lease, seconds=7200)

    expire(pipeline.ledger, monkeypatch)

    assert acquire(pipeline.ledger, "b") is None


def judged(pipeline: Pipeline) -> list[Judged]:
    return [
        Judged(f"{number + 1}-0", pipeline.post(learner, arrays(number)), "accepted")
        for number, learner in enumerate(LEARNERS)
    ]


def committed(pipeline: Pipeline) -> Record:
    """A record of version 1, made by another pipeline over another ledger's seal of the same envelopes."""
    worker = pipeline.worker()
    for number, learner in enumerate(LEARNERS):
        pipeline.post(learner, arrays(number))
    pipeline.run_to(1, worker)
    return pipeline.record(1)


Transaction = Callable[[Pipeline, Lease, Standing], object]


def _record(pipeline: Pipeline, lease: Lease, before: Standing) -> object:
    decisions = judged(pipeline)
    return intake.record(pipeline.ledger, lease, before, "3-0", decisions)


def _start_stream(pipeline: Pipeline, lease: Lease, before: Standing) -> object:
    return intake.start_stream(pipeline.ledger, lease, before, "0123456789abcdef", "0-0")


def _waiting(pipeline: Pipeline, lease: Lease, before: Standing) -> object:
    return intake.note_waiting(pipeline.ledger, lease, "nobody is there")


def _seal(pipeline: Pipeline, lease: Lease, before: Standing) -> object:
    return seals.seal(pipeline.ledger, lease, before, quorum_size=1)


def _announced(pipeline: Pipeline, lease: Lease, before: Standing) -> object:
    return rounds.announced(pipeline.ledger, lease, 0)


@pytest.mark.parametrize("transaction", [_record, _start_stream, _waiting, _seal, _announced])
def test_a_transaction_without_the_token_changes_nothing(
    pipeline: Pipeline, transaction: Transaction
) -> None:
    old = held(pipeline.ledger)
    before = runs.standing(pipeline.ledger, RUN, 0)
    acquire(pipeline.ledger, "a", take_own=True)
    dump = pipeline.dump()

    with pytest.raises(LeaseLost):
        transaction(pipeline, old, before)

    assert runs.standing(pipeline.ledger, RUN, 0) == before
    assert pipeline.dump() == dump


@pytest.mark.parametrize(
    "elsewhere", [{"position": "9-0"}, {"head": 1}, {"stream_epoch": "fedcba9876543210"}]
)
@pytest.mark.parametrize("transaction", [_record, _seal])
def test_a_transaction_that_started_from_elsewhere_changes_nothing(
    pipeline: Pipeline, transaction: Transaction, elsewhere: dict[str, Any]
) -> None:
    lease = held(pipeline.ledger)
    before = runs.standing(pipeline.ledger, RUN, 0)

    with pytest.raises(LeaseLost):
        transaction(pipeline, lease, replace(before, **elsewhere))

    assert runs.standing(pipeline.ledger, RUN, 0) == before


def test_a_round_is_indexed_once_and_only_by_its_owner(pipeline: Pipeline) -> None:
    record = committed(pipeline)
    attestation = Attestation.make(record.sha256, OBSERVED, AGGREGATOR_KEY)
    dump = pipeline.dump()
    owner = acquire(pipeline.ledger, "tester", take_own=True)
    assert owner is not None

    with pytest.raises(LeaseLost, match="version 1 already"):
        rounds.index(pipeline.ledger, owner, record, attestation)
    with pytest.raises(LeaseLost):
        rounds.index(pipeline.ledger, replace(owner, token="stolen"), record, attestation)

    assert pipeline.dump() == dump


def test_a_record_that_does_not_continue_the_head_is_no_history_of_this_ledger(pipeline: Pipeline) -> None:
    record = committed(pipeline)
    owner = acquire(pipeline.ledger, "tester", take_own=True)
    assert owner is not None
    stranger = record.model_copy(update={"version": 2, "previous": bytes(32)})
    attestation = Attestation.make(stranger.sha256, OBSERVED, AGGREGATOR_KEY)

    with pytest.raises(ForkedHistory, match="record 2"):
        rounds.index(pipeline.ledger, owner, stranger, attestation)


def test_rounds_are_numbered_without_gaps_in_the_order_of_their_commits(pipeline: Pipeline) -> None:
    from sqlalchemy import select

    from deltapost.ledger.tables import RoundRow

    worker = pipeline.worker()
    for version in range(4):
        for number, learner in enumerate(LEARNERS):
            pipeline.post(learner, arrays(number), version=version)
        pipeline.run_to(version + 1, worker)

    with pipeline.ledger.read() as session:
        rows = session.scalars(select(RoundRow).order_by(RoundRow.version)).all()
    assert [row.sequence for row in rows] == [1, 2, 3, 4]
    assert [row.previous_sha256 for row in rows[1:]] == [row.record_sha256 for row in rows[:-1]]
    assert rows[0].previous_sha256 == pipeline.plan.manifest_sha256


def test_a_record_of_another_seal_rewinds_what_no_record_answered(pipeline: Pipeline) -> None:
    """Verdicts are provisional until a record carries them, and this one is of another seal."""
    record = committed(pipeline)
    lease = acquire(pipeline.ledger, "tester", take_own=True)
    assert lease is not None
    late = pipeline.post("ada", arrays(50), version=1)
    before = runs.standing(pipeline.ledger, RUN, 0)
    intake.record(pipeline.ledger, lease, before, "99999999999999-0", [Judged("9-0", late, "accepted")])
    other = record.model_copy(
        update={
            "version": 2,
            "previous": record.sha256,
            "participants": (record.participants[0].model_copy(update={"envelope": b"o" * 32}),),
            "cosine": None,
        }
    )

    indexed = rounds.index(
        pipeline.ledger, lease, other, Attestation.make(other.sha256, OBSERVED, AGGREGATOR_KEY)
    )

    assert indexed.rewound
    assert pipeline.verdict(late) is None
    assert runs.standing(pipeline.ledger, RUN, 0).position == "0-0"
    assert runs.standing(pipeline.ledger, RUN, 0).head == 2


def test_another_manifest_under_a_known_name_is_refused(pipeline: Pipeline) -> None:
    other = pipeline.plan.manifest.model_copy(update={"creator_key": bytes(32)})

    assert not runs.admit(pipeline.ledger, pipeline.plan.manifest)
    with pytest.raises(RunMismatch, match="one ledger serves one bucket"):
        runs.admit(pipeline.ledger, other)


def test_two_aggregators_that_find_a_run_at_the_same_instant_both_have_it(
    migrated_postgres_url: str, migrated_sqlite_url: str
) -> None:
    # Given another aggregator that is about to write the run's row
    made = open_ledger(migrated_sqlite_url)
    manifest = Pipeline(made).plan.manifest
    made.close()
    ledger = open_ledger(migrated_postgres_url)

    def waits() -> bool:
        locked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        with ledger.read() as session:
            return bool(session.execute(text(locked)).scalar_one())

    with ThreadPoolExecutor(1) as pool:
        with ledger.write() as session:
            common = {"manifest": manifest.to_bytes(), "manifest_sha256": manifest.sha256, "state": "active"}
            session.add(RunRow(run=RUN, created_at=ledger.now(session), **common))
            session.flush()

            # When this one finds it too
            admitted = pool.submit(runs.admit, ledger, manifest)
            eventually(waits)
            session.add(FragmentRow(run=RUN, fragment=0, head=0, head_sha256=manifest.sha256))

        # Then neither is refused
        admitted.result(timeout=20)
    assert runs.standing(ledger, RUN, 0).head == 0
    ledger.close()


def test_an_owner_whose_seal_a_restored_database_does_not_know_writes_no_record(ledger: Ledger) -> None:
    # Given an owner that has computed its round when the seal goes
    pipeline = Pipeline(ledger)
    healthy(pipeline)

    def restored() -> None:
        with ledger.write() as session:
            session.execute(delete(SealRow))

    worker = pipeline.worker(reach=at("objects.verified", 1, restored))

    # When it goes on, then it gives up, and whoever follows seals and closes the round
    assert worker.step() == "not_owner"
    assert pipeline.records() == []
    pipeline.run_to(1)
