"""What the aggregator does when store, stream, ledger or a stranger are not as they should be."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import redis

from deltapost.errors import HistoryError, MalformedMessage
from deltapost.ledger import runs
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.revisions import migrate
from deltapost.limits import PROBE_SECONDS
from deltapost.serialization import TensorBytes, pack
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.messages import (
    AdviceMessage,
    ContributionMessage,
    read_message,
    sign_message,
)
from deltapost.serialization.names import (
    anchor_key,
    attestation_key,
    commits_stream,
    envelope_stream,
    epoch_key,
    record_key,
)
from deltapost.streams import START
from deltapost.streams.memory import MemoryLog
from deltapost.streams.redis import RedisLog
from deltapost_aggregator.members import MembersReader
from deltapost_aggregator.worker import FragmentWorker
from fixtures.histories import copy, restore
from fixtures.pipeline import (
    LEARNERS,
    RUN,
    Pipeline,
    arrays,
    healthy,
    learner_signing_key,
    plain_config,
    say,
)

DELTA = {learner: arrays(number + 1) for number, learner in enumerate(LEARNERS)}


def forge(pipeline: Pipeline, worker: FragmentWorker) -> str:
    """A record of the next version whose anchor a stranger chose; returns its key."""
    healthy(pipeline)
    pipeline.run_to(1, worker)
    before = pipeline.record(1)
    ones = pack(
        {
            spec.name: TensorBytes("F32", spec.shape, np.ones(spec.shape, np.float32).tobytes())
            for spec in pipeline.plan.specs(0)
        }
    )
    anchor = ObjectRef(sha256=hashlib.sha256(ones).digest(), size=len(ones))
    pipeline.store.put(anchor_key(RUN, 0, 1, anchor.sha256), ones)
    forged = before.model_copy(update={"version": 2, "previous": before.sha256, "anchor": anchor})
    key = record_key(RUN, 0, 2)
    pipeline.store.put(key, forged.to_bytes())
    return key


def test_a_record_that_a_stranger_put_into_the_bucket_is_never_attested(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    worker = pipeline.worker()
    key = forge(pipeline, worker)

    with pytest.raises(HistoryError, match=key):
        pipeline.settle(pipeline.worker())

    assert pipeline.head() == 1
    assert list(pipeline.store.list(attestation_key(RUN, 0, 2))) == []


def test_once_a_forged_record_is_removed_the_run_goes_on(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    key = forge(pipeline, pipeline.worker())
    pipeline.store.delete(key)
    healthy(pipeline, version=1)

    pipeline.run_to(2)

    assert [p.learner for p in pipeline.record(2).participants] == sorted(LEARNERS)


@pytest.mark.parametrize("attested", [True, False])
def test_a_ledger_that_forgot_a_round_adopts_its_record_and_vouches_for_it_if_nobody_has(
    ledger: Ledger, migrated_sqlite_url: str, attested: bool
) -> None:
    pipeline = Pipeline(ledger)
    healthy(pipeline)
    pipeline.run_to(1)
    records, dump = pipeline.records(), pipeline.dump()
    if not attested:
        pipeline.store.delete(attestation_key(RUN, 0, 1))
    pipeline.ledger = open_ledger(migrated_sqlite_url.replace("migrated.db", "again.db"))
    migrate(pipeline.ledger)
    runs.admit(pipeline.ledger, pipeline.plan.manifest)

    pipeline.run_to(1)

    assert pipeline.records() == records
    assert {name: rows for name, rows in pipeline.dump().items() if name != "contributions"} == {
        name: rows for name, rows in dump.items() if name != "contributions"
    }
    pipeline.ledger.close()


def test_a_strange_epoch_name_is_replaced_and_the_run_goes_on(ledger: Ledger, valkey_url: str) -> None:
    log = RedisLog(valkey_url)
    pipeline = Pipeline(ledger, log=log)
    with redis.Redis.from_url(valkey_url) as client:
        client.set(epoch_key(envelope_stream(RUN, 0)), b"\xff\xfe" * 2000)
    healthy(pipeline)

    pipeline.run_to(1)

    name = log.epoch(envelope_stream(RUN, 0))
    assert name is not None
    assert len(name) == 16
    log.close()


def test_a_stream_trimmed_by_somebody_else_gets_one_new_epoch_not_one_a_step(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    worker = pipeline.worker()
    pipeline.post("ada", DELTA["ada"])
    pipeline.settle(worker)
    pipeline.post("bob", DELTA["bob"])
    stream = envelope_stream(RUN, 0)
    pipeline.log.trim(stream, "9999999999999-0")
    names = set()

    for _ in range(8):
        worker.step()
        names.add(pipeline.log.epoch(stream))

    assert len(names - {None}) == 1


def test_whoever_is_live_is_not_known_before_the_members_stream_was_read_to_its_end(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger, config=plain_config(quorum_size=3, min_quorum=1))
    context = pipeline.context()
    worker, members = FragmentWorker(context, 0), MembersReader(context)
    for learner in LEARNERS:
        say(pipeline, learner, 0)
    pipeline.post("ada", DELTA["ada"])

    for _ in range(5):
        worker.step()
    assert pipeline.head() == 0

    members.step()
    for _ in range(5):
        worker.step()
    assert pipeline.head() == 0

    for learner in LEARNERS[1:]:
        pipeline.post(learner, DELTA[learner])
    pipeline.run_to(1, worker)
    assert not pipeline.record(1).degraded


def test_a_round_closes_degraded_with_those_who_are_left(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger, config=plain_config(quorum_size=3, min_quorum=1))
    context = pipeline.context()
    worker, members = FragmentWorker(context, 0), MembersReader(context)
    for learner in LEARNERS:
        say(pipeline, learner, 0)
    members.step()
    for learner in ("ada", "bob"):
        pipeline.post(learner, DELTA[learner])
    worker.step()
    assert pipeline.head() == 0

    for counter in range(1, 6):
        pipeline.clock.sleep(10)
        for learner in ("ada", "bob"):
            say(pipeline, learner, counter)
        members.step()
    pipeline.run_to(1, worker)

    assert pipeline.record(1).degraded
    assert [p.learner for p in pipeline.record(1).participants] == ["ada", "bob"]


def test_a_learner_over_its_quota_of_bytes_is_counted(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    pipeline.register("mallory")
    limit = pipeline.plan.max_payload_bytes(0)
    allowed = pipeline.plan.max_posted_bytes(0) // limit
    for number in range(allowed + 3):
        message = pipeline.message("mallory", bytes(limit), local_step=number, steps=0)
        pipeline.append(sign_message(message, learner_signing_key("mallory")))
    healthy(pipeline)

    pipeline.run_to(1)

    assert pipeline.record(1).over_quota == {"mallory": 3}


def test_a_step_of_a_million_years_is_no_claim() -> None:
    with pytest.raises(MalformedMessage, match="step_seconds"):
        ContributionMessage.from_arguments(
            run=RUN,
            learner="ada",
            fragment=0,
            version=0,
            payload=ObjectRef(sha256=bytes(32), size=1),
            local_step=1,
            steps=1,
            tokens=1,
            step_seconds=1e12,
        )


def before_the_round(pipeline: Pipeline) -> dict[str, bytes]:
    """Commits round 1, puts database and stream back to before it, and hides its record, which it returns."""
    backup = copy(pipeline.ledger)
    healthy(pipeline)
    pipeline.run_to(1)
    hidden = {
        key: pipeline.store.get(key).data for key in (record_key(RUN, 0, 1), attestation_key(RUN, 0, 1))
    }
    for key in hidden:
        pipeline.store.delete(key)
    restore(pipeline.ledger, backup)
    pipeline.log = MemoryLog()
    return hidden


def test_an_owner_with_nothing_to_do_finds_the_record_that_a_paused_one_writes_late(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    late = before_the_round(pipeline)
    worker = pipeline.worker()
    pipeline.settle(worker)
    assert pipeline.head() == 0

    for key, data in late.items():
        pipeline.store.put(key, data)
    pipeline.clock.sleep(PROBE_SECONDS)
    pipeline.settle(worker)

    assert pipeline.head() == 1


def test_whoever_is_ahead_of_an_owner_whose_ledger_was_restored_is_ahead_of_nobody(
    ledger: Ledger,
) -> None:
    # Given a database from before a round, a record that another owner puts there only after this one has
    # looked for it, and a stream that holds nothing but a contribution to the round after it
    pipeline = Pipeline(ledger)
    later = before_the_round(pipeline)
    posted = pipeline.post("ada", arrays(9), version=1)

    def reach(point: str) -> None:
        if point == "intake.read":
            for key, data in later.items():
                pipeline.store.put(key, data)

    # When it reads on
    pipeline.run_to(1, pipeline.worker(reach=reach))
    pipeline.settle(pipeline.worker())

    # Then it adopts the record before it judges, and tells no honest learner that it was refused
    assert pipeline.verdict(posted) == "accepted"
    told = [
        read_message(entry.data or b"") for entry in pipeline.log.read(commits_stream(RUN), START, limit=99)
    ]
    assert [one.message for one in told if isinstance(one.message, AdviceMessage)] == []
