"""A learner follows one history: forged, forked, older or altered ones are refused by name."""

from __future__ import annotations

import pytest
from sqlalchemy import select

import deltapost
from deltapost.adapters.native import ArrayModel
from deltapost.algorithms.partition import ByBytes
from deltapost.errors import (
    ForkedHistory,
    RunMismatch,
    SignatureRefused,
)
from deltapost.learner.creating import create_run
from deltapost.ledger.tables import RoundRow
from deltapost.serialization.messages import CommitMessage, sign_message
from deltapost.serialization.names import (
    anchor_key,
    attestation_key,
    commits_stream,
    record_key,
)
from deltapost.serialization.records import Attestation, Observations, Record
from fixtures.pipeline import AGGREGATOR_KEY, learner_signing_key
from fixtures.served import CLAIMS, Served, algorithm, small_model

MOMENT = "2026-11-30T00:00:00+00:00"


def fork(served: Served, version: int) -> None:
    """Another record, properly attested, takes the place of the one at `version` of fragment 0."""
    record = Record.from_bytes(served.store.get(record_key("tiny", 0, version)).data)
    other = record.model_copy(update={"unverified": {"malformed": 7}})
    observations = Observations(
        owner="x", lease_epoch=1, stream_epoch="", position="0-0", committed_at=MOMENT
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
    """The second one's manifest meets the first one's: it takes that run, whatever its own model held."""
    key = learner_signing_key("ada")
    models = [ArrayModel(small_model(value)) for value in (0.0, 5.0)]

    plans = [
        create_run(served.store, "tiny", model, algorithm(), key, partition=ByBytes()) for model in models
    ]

    assert plans[0].manifest_sha256 == plans[1].manifest_sha256
    assert plans[1].manifest.genesis == plans[0].manifest.genesis


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


def test_a_record_that_does_not_follow_the_one_seen_stops_the_learner_although_it_is_attested(
    served: Served,
) -> None:
    commit_two_versions(served)
    with served.join(small_model(), learner="bob") as run:
        assert run.version(0) == 2
        record = Record.from_bytes(served.store.get(record_key("tiny", 0, 2)).data)
        stranger = record.model_copy(update={"version": 3, "previous": bytes(32)})
        observations = Observations(
            owner="x",
            lease_epoch=1,
            stream_epoch="",
            position="0-0",
            committed_at=MOMENT,
        )
        attestation = Attestation.make(stranger.sha256, observations, AGGREGATOR_KEY)
        served.store.put(record_key("tiny", 0, 3), stranger.to_bytes())
        served.store.put(attestation_key("tiny", 0, 3), attestation.to_bytes())
        commit = CommitMessage(run="tiny", fragment=0, version=3, record=stranger.sha256)
        served.log.append(commits_stream("tiny"), sign_message(commit, AGGREGATOR_KEY).frame)

        with pytest.raises(ForkedHistory, match="record 3"):
            run.align(wait_seconds=10)
