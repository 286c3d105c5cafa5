"""Every kind of envelope ends in its verdict, in SQL and record; only healthy ones move the anchor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deltapost.ledger.engine import Ledger
from deltapost.limits import REDECIDE_SECONDS
from deltapost.serialization import TensorBytes, pack, unpack
from deltapost.serialization.messages import SignedMessage, sign_message
from deltapost.serialization.names import delta_key
from deltapost.stores.memory import MemoryStore
from fixtures.pipeline import (
    LEARNERS,
    RUN,
    Pipeline,
    arrays,
    healthy,
    learner_signing_key,
    plain_config,
)

MALLORY = "mallory"
DELTA = {learner: arrays(number + 1) for number, learner in enumerate(LEARNERS)}


def anchor_of_the_healthy_alone(ledger: Ledger, rounds: int = 1) -> bytes:
    """The anchor's SHA-256 after rounds with nobody but the three honest learners.

    Closed over another store and stream, in a database of its own.
    """
    del ledger
    from tempfile import TemporaryDirectory

    from deltapost.ledger.engine import open_ledger
    from deltapost.ledger.revisions import migrate

    with TemporaryDirectory() as directory:
        other = open_ledger(f"sqlite:///{directory}/ledger.db")
        migrate(other)
        pipeline = Pipeline(other)
        worker = pipeline.worker()
        for version in range(rounds):
            healthy(pipeline, version)
            pipeline.run_to(version + 1, worker)
        sha256 = pipeline.record(rounds).anchor.sha256
        other.close()
    return sha256


@pytest.fixture
def pipeline(ledger: Ledger) -> Pipeline:
    pipeline = Pipeline(ledger)
    pipeline.register(MALLORY)
    return pipeline


def assert_answered(pipeline: Pipeline, signed: SignedMessage, verdict: str, *, version: int) -> None:
    """The verdict stands in SQL and in the record of `version`; the anchor is that of the healthy alone."""
    record = pipeline.record(version)
    assert pipeline.verdict(signed) == verdict
    assert record.verdicts()[signed.sha256] == verdict
    assert pipeline.row(signed).answered_version == version
    assert [p.learner for p in record.participants] == sorted(LEARNERS)
    assert record.anchor.sha256 == anchor_of_the_healthy_alone(pipeline.ledger, version)


Crafted = Callable[[Pipeline], SignedMessage]


def _post(**claims: Any) -> Crafted:
    return lambda pipeline: pipeline.post(MALLORY, arrays(99), **claims)


def _nan(pipeline: Pipeline) -> SignedMessage:
    bad = {name: array.copy() for name, array in arrays(99).items()}
    bad["b.weight"][3] = np.nan
    entries = {name: TensorBytes("F32", array.shape, array.tobytes()) for name, array in bad.items()}
    return pipeline.post(MALLORY, pack(entries))


def _infinite_norm(pipeline: Pipeline) -> SignedMessage:
    """Finite numbers whose float32 squares are not: a norm no cap could bound."""
    huge = {name: np.full_like(array, 1e30) for name, array in arrays(99).items()}
    return pipeline.post(MALLORY, huge)


def _wrong_shape(pipeline: Pipeline) -> SignedMessage:
    bad = arrays(99)
    entries = {name: TensorBytes("F32", array.shape, array.tobytes()) for name, array in bad.items()}
    entries["a.weight"] = TensorBytes("F32", (5, 4), entries["a.weight"].data)
    return pipeline.post(MALLORY, pack(entries))


def _wrong_dtype(pipeline: Pipeline) -> SignedMessage:
    entries = unpack(pipeline.payload(arrays(99)))
    entries["b.weight"] = TensorBytes("I32", (7,), entries["b.weight"].data)
    return pipeline.post(MALLORY, pack(entries))


def _missing_entry(pipeline: Pipeline) -> SignedMessage:
    entries = dict(unpack(pipeline.payload(arrays(99))))
    del entries["b.weight"]
    return pipeline.post(MALLORY, pack(entries))


def _unreadable(pipeline: Pipeline) -> SignedMessage:
    return pipeline.post(MALLORY, b"\xff" * 200)


def _no_object(pipeline: Pipeline) -> SignedMessage:
    message = pipeline.message(MALLORY, pipeline.payload(arrays(99)))
    signed = sign_message(message, learner_signing_key(MALLORY))
    pipeline.append(signed)
    return signed


def _other_bytes(pipeline: Pipeline) -> SignedMessage:
    """The object under the payload's key has the announced size, and other bytes."""
    payload = pipeline.payload(arrays(99))
    message = pipeline.message(MALLORY, payload)
    pipeline.put(message, payload[:-1] + bytes([payload[-1] ^ 1]))
    signed = sign_message(message, learner_signing_key(MALLORY))
    pipeline.append(signed)
    return signed


def _shorter_object(pipeline: Pipeline) -> SignedMessage:
    payload = pipeline.payload(arrays(99))
    message = pipeline.message(MALLORY, payload)
    pipeline.put(message, payload[:-4])
    signed = sign_message(message, learner_signing_key(MALLORY))
    pipeline.append(signed)
    return signed


def _too_large(pipeline: Pipeline) -> SignedMessage:
    return pipeline.post(MALLORY, bytes(pipeline.plan.max_payload_bytes(0) + 1))


@pytest.mark.parametrize(
    ("craft", "verdict"),
    [
        pytest.param(_post(version=1), "ahead", id="ahead"),
        pytest.param(_post(steps=0), "zero_steps", id="zero_steps"),
        pytest.param(_post(tokens=0), "zero_weight", id="zero_weight"),
        pytest.param(_post(steps=10**9), "outlier", id="too_many_steps"),
        pytest.param(_post(steps=1, tokens=10**12), "outlier", id="too_many_tokens"),
        pytest.param(_nan, "non_finite", id="nan"),
        pytest.param(_infinite_norm, "non_finite", id="infinite_norm"),
        pytest.param(_wrong_shape, "schema", id="wrong_shape"),
        pytest.param(_wrong_dtype, "schema", id="wrong_dtype"),
        pytest.param(_missing_entry, "schema", id="missing_entry"),
        pytest.param(_unreadable, "malformed", id="unreadable"),
        pytest.param(_no_object, "missing", id="no_object"),
        pytest.param(_other_bytes, "corrupt", id="other_bytes"),
        pytest.param(_shorter_object, "corrupt", id="shorter_object"),
        pytest.param(_too_large, "too_large", id="too_large"),
    ],
)
def test_a_bad_envelope_gets_its_verdict_and_leaves_the_anchor_alone(
    pipeline: Pipeline, craft: Crafted, verdict: str
) -> None:
    signed = craft(pipeline)
    healthy(pipeline)

    pipeline.run_to(1)

    assert_answered(pipeline, signed, verdict, version=1)


def test_a_duplicate_is_only_counted(pipeline: Pipeline) -> None:
    first = pipeline.post(LEARNERS[0], DELTA[LEARNERS[0]])
    pipeline.append(first)
    pipeline.append(first)
    for learner in LEARNERS[1:]:
        pipeline.post(learner, DELTA[learner])

    pipeline.run_to(1)

    assert pipeline.row(first).deliveries == 3
    assert_answered(pipeline, first, "accepted", version=1)


def test_of_two_contradicting_contributions_the_first_wins(pipeline: Pipeline) -> None:
    first = pipeline.post(LEARNERS[0], DELTA[LEARNERS[0]])
    second = pipeline.post(LEARNERS[0], arrays(77))
    for learner in LEARNERS[1:]:
        pipeline.post(learner, DELTA[learner])

    pipeline.run_to(1)

    assert pipeline.verdict(first) == "accepted"
    assert_answered(pipeline, second, "conflict", version=1)


def test_an_envelope_for_the_round_last_sealed_is_late_and_for_an_older_one_stale(
    pipeline: Pipeline,
) -> None:
    worker = pipeline.worker()
    healthy(pipeline)
    pipeline.run_to(1, worker)
    late = pipeline.post(MALLORY, arrays(99), version=0)
    healthy(pipeline, version=1)
    pipeline.run_to(2, worker)
    stale = pipeline.post(MALLORY, arrays(98), version=0)
    healthy(pipeline, version=2)

    pipeline.run_to(3, worker)

    assert pipeline.record(2).verdicts()[late.sha256] == "late"
    assert pipeline.verdict(late) == "late"
    assert_answered(pipeline, stale, "stale", version=3)


def test_a_verdict_other_than_accepted_leaves_the_slot_free(pipeline: Pipeline) -> None:
    refused = pipeline.post(LEARNERS[0], arrays(55), steps=0)
    healthy(pipeline)

    pipeline.run_to(1)

    assert_answered(pipeline, refused, "zero_steps", version=1)


def test_a_missing_payload_that_comes_later_is_accepted_at_re_delivery_in_the_same_round(
    pipeline: Pipeline,
) -> None:
    worker = pipeline.worker()
    payload = pipeline.payload(DELTA["ada"])
    message = pipeline.message("ada", payload)
    signed = sign_message(message, learner_signing_key("ada"))
    pipeline.append(signed)
    pipeline.settle(worker)
    assert pipeline.verdict(signed) == "missing"

    pipeline.put(message, payload)
    pipeline.clock.sleep(REDECIDE_SECONDS)
    pipeline.append(signed)
    for learner in ("bob", "cyd"):
        pipeline.post(learner, DELTA[learner])
    pipeline.run_to(1, worker)

    assert pipeline.row(signed).deliveries == 2
    assert_answered(pipeline, signed, "accepted", version=1)


def test_envelopes_nobody_can_be_held_to_are_counted_by_reason_in_sql_and_record(pipeline: Pipeline) -> None:
    payload = pipeline.payload(arrays(99))
    stranger = pipeline.message("stranger", payload)
    pipeline.append(sign_message(stranger, learner_signing_key("stranger")))
    forged = pipeline.message("ada", payload)
    pipeline.append(sign_message(forged, learner_signing_key(MALLORY)))
    stream_of_garbage = [
        b"",
        b"\xc1",
        b"x" * 40_000,
        sign_message(forged, learner_signing_key("ada")).frame[:-1],
    ]
    from deltapost.serialization.names import envelope_stream

    for data in stream_of_garbage:
        pipeline.log.append(envelope_stream(RUN, 0), data)
    other_run = pipeline.message(MALLORY, payload, run="other-run")
    pipeline.append(sign_message(other_run, learner_signing_key(MALLORY)))
    healthy(pipeline)

    pipeline.run_to(1)

    record = pipeline.record(1)
    expected = {"unknown_learner": 1, "bad_signature": 1, "malformed": 5}
    assert record.unverified == expected
    assert pipeline.unverified() == {(1, reason): count for reason, count in expected.items()}
    assert len(record.verdicts()) == 3
    assert record.anchor.sha256 == anchor_of_the_healthy_alone(pipeline.ledger)


def test_a_learner_over_its_quota_is_counted_and_hinders_nobody(pipeline: Pipeline) -> None:
    for number in range(70):
        pipeline.post(MALLORY, b"junk", local_step=number)
    healthy(pipeline)

    pipeline.run_to(1)

    record = pipeline.record(1)
    assert record.over_quota == {MALLORY: 6}
    assert sum(answer.learner == MALLORY for answer in record.answers) == 64
    assert record.anchor.sha256 == anchor_of_the_healthy_alone(pipeline.ledger)


def test_a_payload_is_fetched_by_the_key_we_derive_never_by_another(pipeline: Pipeline) -> None:
    """Mallory's object under Mallory's own prefix does not stand in for one missing under Ada's."""
    payload = pipeline.payload(DELTA["ada"])
    message = pipeline.message("ada", payload)
    pipeline.store.put(delta_key(RUN, MALLORY, 0, 0, message.payload.sha256), payload)
    signed = sign_message(message, learner_signing_key("ada"))
    pipeline.append(signed)

    pipeline.settle()

    assert pipeline.verdict(signed) == "missing"


def test_two_contributions_of_no_weight_leave_the_round_open_and_the_anchor_alone(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger, config=plain_config(quorum_size=2))
    first, second = (pipeline.post(learner, DELTA[learner], tokens=0) for learner in ("ada", "bob"))

    pipeline.settle()

    assert (pipeline.verdict(first), pipeline.verdict(second)) == ("zero_weight", "zero_weight")
    assert pipeline.head() == 0
    assert isinstance(pipeline.store, MemoryStore)
    assert pipeline.records() == []
