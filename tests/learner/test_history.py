"""A learner follows one history: forged, forked, older or altered ones are refused by name."""

from __future__ import annotations

import hashlib

import pytest
from sqlalchemy import select

import deltapost
from deltapost.errors import (
    ForkedHistory,
    RunMismatch,
    SignatureRefused,
)
from deltapost.ledger.tables import RoundRow
from deltapost.serialization import pack
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.names import (
    anchor_key,
    attestation_key,
    record_key,
)
from deltapost.serialization.records import Attestation, Observations, Record
from fixtures.pipeline import AGGREGATOR_KEY, learner_signing_key
from fixtures.served import CLAIMS, Served, algorithm, small_model


def fork(served: Served, version: int) -> None:
    """Another record, properly attested, takes the place of the one at `version` of fragment 0."""
    record = Record.from_bytes(served.store.get(record_key("tiny", 0, version)).data)
    other = record.model_copy(update={"unverified": {"malformed": 7}})
    observations = Observations(
        owner="x", lease_epoch=1, stream_epoch="", position="0-0", committed_at="2026-11-30T00:00:00+00:00"
    )
    attestation = Attestation.make(other.sha256, observations, AGGREGATOR_KEY)
    for key, data in [
        (record_key("tiny", 0, version), other.to_bytes()),
        (attestation_key("tiny", 0, version), attestation.to_bytes()),
    ]:
        served.store.delete(key)
        served.store.put(key, data)


def commit_two_versions(served: Served) -> None:
    with served.join(small_model(), algorithm()) as run:
        for version in range(2):
            run.publish_contribution(0, version, delta=small_model(0.5), **CLAIMS)
            assert run.wait_for(0, version + 1, timeout=10)
    served.stop()


def test_a_learner_refuses_another_record_at_a_version_it_has_seen(served: Served) -> None:
    commit_two_versions(served)
    fork(served, 2)

    with pytest.raises(ForkedHistory, match="version 2 was seen"):
        served.join(small_model())


def test_a_learner_refuses_a_bucket_that_went_back(served: Served) -> None:
    commit_two_versions(served)
    served.store.delete(record_key("tiny", 0, 2))

    with pytest.raises(ForkedHistory, match="version 2 was seen"):
        served.join(small_model())


def test_a_learner_follows_no_record_that_another_key_attests(served: Served) -> None:
    commit_two_versions(served)
    record = Record.from_bytes(served.store.get(record_key("tiny", 0, 2)).data)
    attestation = Attestation.from_bytes(served.store.get(attestation_key("tiny", 0, 2)).data)
    forged = Attestation.make(
        record.sha256,
        Observations.from_bytes(attestation.observations),
        learner_signing_key("mallory"),
    )
    served.store.delete(attestation_key("tiny", 0, 2))
    served.store.put(attestation_key("tiny", 0, 2), forged.to_bytes())

    with pytest.raises(SignatureRefused, match="aggregator key"):
        served.join(small_model(), learner="bob")


def test_a_learner_waits_for_the_attestation_of_a_record(served: Served) -> None:
    commit_two_versions(served)
    served.store.delete(attestation_key("tiny", 0, 2))

    with served.join(small_model(), learner="bob") as run:
        assert run.version(0) == 1


def test_an_anchor_with_other_bytes_is_refused(served: Served) -> None:
    commit_two_versions(served)
    record = Record.from_bytes(served.store.get(record_key("tiny", 0, 2)).data)
    key = anchor_key("tiny", 0, 1, record.anchor.sha256)
    data = served.store.get(key).data
    served.store.delete(key)
    served.store.put(key, data[:-1] + bytes([data[-1] ^ 1]))

    with pytest.raises(deltapost.DeltapostError, match="does not have the bytes"):
        served.join(small_model(), learner="bob")


def test_a_run_made_anew_under_the_same_name_is_refused(served: Served) -> None:
    served.join(small_model(), algorithm()).leave()
    served.stop()
    for info in list(served.store.list("tiny/")):
        served.store.delete(info.key)

    with pytest.raises(RunMismatch, match="manifest"):
        served.join(small_model(1.0), algorithm())


def test_two_learners_that_create_the_same_run_at_once_get_one_run(served: Served) -> None:
    with (
        served.join(small_model(), algorithm()) as one,
        served.join(small_model(5.0), algorithm(), learner="bob") as two,
    ):
        genesis = pack(one.anchor(0))

        assert one.plan.manifest_sha256 == two.plan.manifest_sha256
        assert two.anchor(0) == one.anchor(0)
        assert one.plan.manifest.genesis[0] == ObjectRef(
            sha256=hashlib.sha256(genesis).digest(), size=len(genesis)
        )


def test_runs_with_equal_learner_names_do_not_meet(served: Served) -> None:
    with (
        served.join(small_model(), algorithm(), run="one") as one,
        served.join(small_model(), algorithm(), run="two") as two,
    ):
        one.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        assert one.wait_for(0, 1, timeout=10)
        assert two.versions == [0, 0]
    with served.ledger.read() as session:
        assert {row.run for row in session.scalars(select(RoundRow))} == {"one"}
