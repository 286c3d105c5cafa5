"""The ledger is an index of the registry: lost, it is read back, and the same keys vouch for records."""

from __future__ import annotations

from sqlalchemy import select

from deltapost.ledger import runs
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.revisions import migrate
from deltapost.ledger.tables import LearnerKeyRow
from deltapost.limits import REGISTRY_POLL_SECONDS
from deltapost.serialization.messages import sign_message
from deltapost.serialization.names import attestation_key, registry_key
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, healthy, learner_signing_key
from fixtures.registry import change, registered_pipeline

NEW_KEY = learner_signing_key("ada's new key")


def indexed(pipeline: Pipeline) -> list[tuple[int, str, str, int, bytes]]:
    with pipeline.ledger.read() as session:
        rows = session.scalars(select(LearnerKeyRow).order_by(LearnerKeyRow.number)).all()
    return [(row.number, row.action, row.learner, row.from_version, row.entry) for row in rows]


def test_the_ledger_has_the_entries_as_they_lie_in_the_bucket(ledger: Ledger) -> None:
    pipeline = registered_pipeline(ledger)
    change(pipeline, "revoke", "cyd", from_version=7)
    healthy(pipeline)
    pipeline.run_to(1)

    rows = indexed(pipeline)

    assert [row[:4] for row in rows] == [
        (1, "add", "ada", 0),
        (2, "add", "bob", 0),
        (3, "add", "cyd", 0),
        (4, "revoke", "cyd", 7),
    ]
    assert [row[4] for row in rows] == [
        pipeline.store.get(registry_key(RUN, number)).data for number in range(1, 5)
    ]


def test_an_empty_ledger_reads_the_keys_back_and_vouches_by_the_key_of_the_base(
    ledger: Ledger, migrated_sqlite_url: str
) -> None:
    # Given two rounds, Ada's key rotated in between, the second record not attested by anybody
    pipeline = registered_pipeline(ledger)
    worker = pipeline.worker()
    healthy(pipeline)
    pipeline.run_to(1, worker)
    change(pipeline, "rotate", "ada", NEW_KEY, from_version=1)
    pipeline.clock.sleep(REGISTRY_POLL_SECONDS)
    payload = pipeline.payload(arrays(1))
    message = pipeline.message("ada", payload, version=1)
    signed = sign_message(message, NEW_KEY)
    pipeline.put(message, payload)
    pipeline.append(signed)
    for learner in LEARNERS[1:]:
        pipeline.post(learner, arrays(2), version=1)
    pipeline.run_to(2, worker)
    for version in (1, 2):
        pipeline.store.delete(attestation_key(RUN, 0, version))
    rows, records = indexed(pipeline), pipeline.records()

    # When the database is lost; the envelopes are on the stream still
    pipeline.ledger = open_ledger(migrated_sqlite_url.replace("migrated.db", "again.db"))
    migrate(pipeline.ledger)
    runs.admit(pipeline.ledger, pipeline.plan.manifest)
    for learner, number in zip(LEARNERS, (1, 2, 3), strict=True):
        pipeline.post(learner, arrays(number), version=0)
    pipeline.append(signed)

    pipeline.run_to(2)

    assert pipeline.records() == records
    assert indexed(pipeline) == rows
    pipeline.ledger.close()
