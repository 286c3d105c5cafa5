"""Announcements bring record and attestation; whatever of them does not hold, the bucket decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltapost.adapters.native import NativeBackend
from deltapost.learner import announcements
from deltapost.learner.announcements import Announced, Announcements
from deltapost.learner.following import Follower
from deltapost.learner.history import History
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.limits import MAX_COMMITS_ENTRIES, MAX_MESSAGE_BYTES, MAX_PROOF_BYTES
from deltapost.serialization.messages import CommitMessage, Proof, read_message, sign_message
from deltapost.serialization.names import commits_stream
from deltapost.serialization.records import Attestation, Observations, Record
from deltapost.streams import START
from deltapost_aggregator import announcer
from fixtures.pipeline import AGGREGATOR_KEY, RUN, Pipeline, healthy, learner_signing_key
from fixtures.requests import CountedStore

ROUNDS = 3


@pytest.fixture
def pipeline(migrated_sqlite_url: str) -> Iterator[Pipeline]:
    """A run of one fragment with three rounds."""
    ledger = open_ledger(migrated_sqlite_url)
    yield committed(ledger)
    ledger.close()


def committed(ledger: Ledger) -> Pipeline:
    pipeline = Pipeline(ledger, store=CountedStore())
    worker = pipeline.worker()
    for version in range(ROUNDS):
        healthy(pipeline, version)
        pipeline.run_to(version + 1, worker)
    return pipeline


def commits(pipeline: Pipeline) -> dict[int, CommitMessage]:
    """What was announced, by version."""
    entries = pipeline.log.read(commits_stream(RUN), START, limit=99)
    messages = [read_message(entry.data or b"").message for entry in entries]
    return {each.version: each for each in messages if isinstance(each, CommitMessage)}


def follower(pipeline: Pipeline, directory: Path, *, pinned: bool = True) -> Follower:
    """A learner at version 0 whose requests are counted from here on."""
    seen = History(directory / "seen", manifest_sha256=pipeline.plan.manifest_sha256, fragments=1)
    key = AGGREGATOR_KEY.public if pinned else None
    found = Follower(pipeline.store, pipeline.plan, seen, NativeBackend(), aggregator_key=key)
    counted(pipeline).asked.clear()
    return found


def counted(pipeline: Pipeline) -> CountedStore:
    assert isinstance(pipeline.store, CountedStore)
    return pipeline.store


def proven(commit: CommitMessage) -> Proof:
    assert commit.proof is not None
    return commit.proof


def test_an_announced_round_costs_one_request_its_anchor(pipeline: Pipeline, tmp_path: Path) -> None:
    learner = follower(pipeline, tmp_path)

    commit = learner.next_commit(0, Announced(1, {1: commits(pipeline)[1]}))

    assert commit is not None
    assert commit.version == 1
    assert counted(pipeline).asked == {"get anchors": 1}


def test_a_learner_behind_by_several_rounds_takes_their_records_from_the_announcements(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    learner = follower(pipeline, tmp_path)

    commit = learner.next_commit(0, Announced(ROUNDS, commits(pipeline)))

    assert commit is not None
    assert [record.version for record in commit.records] == [1, 2, 3]
    assert commit.records[-1] == pipeline.record(ROUNDS)
    assert counted(pipeline).asked == {"get anchors": 1, "get records": 1}  # the test's own


def test_a_round_whose_announcement_was_missed_is_read_from_the_bucket(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    learner = follower(pipeline, tmp_path)
    found = commits(pipeline)
    del found[2]

    commit = learner.next_commit(0, Announced(ROUNDS, found))

    assert commit is not None
    assert commit.version == ROUNDS
    assert counted(pipeline).asked == {"get anchors": 1, "get records": 1}


def another_key(found: dict[int, CommitMessage]) -> CommitMessage:
    record = Record.from_bytes(proven(found[1]).record)
    seen = Observations(
        owner="x", lease_epoch=1, stream_epoch="", position="0-0", committed_at="2026-11-30T00:00:00+00:00"
    )
    made = Attestation.make(record.sha256, seen, learner_signing_key("stranger"))
    return with_proof(found[1], attestation=made.to_bytes())


def with_proof(commit: CommitMessage, **changes: bytes) -> CommitMessage:
    return commit.model_copy(update={"proof": proven(commit).model_copy(update=changes)})


def altered(found: dict[int, CommitMessage], *, announced: bool, **changes: Any) -> CommitMessage:
    """Another record in the announcement; `announced`: under its own hash."""
    other = Record.from_bytes(proven(found[1]).record).model_copy(update=changes)
    commit = with_proof(found[1], record=other.to_bytes())
    return commit.model_copy(update={"record": other.sha256}) if announced else commit


@pytest.mark.parametrize(
    "change",
    [
        lambda found: with_proof(found[1], record=b""),
        lambda found: with_proof(found[1], record=b"\xc1garbage"),
        lambda found: with_proof(found[1], record=proven(found[1]).record + b"\x00"),
        lambda found: with_proof(found[1], record=proven(found[2]).record),
        lambda found: altered(found, announced=False, degraded=True),
        lambda found: altered(found, announced=True, degraded=True),
        lambda found: altered(found, announced=True, previous=bytes(32)),
        lambda found: altered(found, announced=True, fragment=1),
        lambda found: altered(found, announced=True, version=2),
        lambda found: altered(found, announced=True, run="another-run"),
        lambda found: altered(found, announced=True, manifest=bytes(32)),
        lambda found: with_proof(found[1], attestation=b""),
        lambda found: with_proof(found[1], attestation=b"\x81" * 64),
        lambda found: with_proof(found[1], attestation=proven(found[2]).attestation),
        another_key,
    ],
)
def test_what_does_not_hold_in_an_announcement_is_read_from_the_bucket(
    pipeline: Pipeline, tmp_path: Path, change: Callable[[dict[int, CommitMessage]], CommitMessage]
) -> None:
    learner = follower(pipeline, tmp_path)
    genuine = pipeline.record(1)

    commit = learner.next_commit(0, Announced(1, {1: change(commits(pipeline))}))

    assert commit is not None
    assert commit.records == (genuine,)
    assert counted(pipeline).asked == {"get records": 2, "get attestations": 1, "get anchors": 1}


def test_before_the_aggregators_key_is_known_an_announcement_proves_nothing(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    # Given a learner without a pinned key, and a proof that a stranger's key signed
    learner = follower(pipeline, tmp_path, pinned=False)

    commit = learner.next_commit(0, Announced(1, {1: another_key(commits(pipeline))}))

    assert commit is not None
    assert commit.attested_by == AGGREGATOR_KEY.public
    assert counted(pipeline).asked["get attestations"] == 1


def test_a_record_too_large_for_an_announcement_is_announced_by_its_hash(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "MAX_PROOF_BYTES", proven(commits(pipeline)[1]).size - 1)
    healthy(pipeline, ROUNDS)
    pipeline.run_to(ROUNDS + 1)
    found = commits(pipeline)
    learner = follower(pipeline, tmp_path)

    commit = learner.next_commit(0, Announced(ROUNDS + 1, found))

    assert found[ROUNDS + 1].proof is None
    assert commit is not None
    assert commit.version == ROUNDS + 1
    assert counted(pipeline).asked == {"get anchors": 1, "get records": 1, "get attestations": 1}


def test_the_largest_proof_fits_a_message_and_a_full_stream_some_memory(pipeline: Pipeline) -> None:
    largest = Proof(record=bytes(MAX_PROOF_BYTES - 500), attestation=bytes(500))
    commit = CommitMessage(run="r" * 64, fragment=1023, version=2**53, record=bytes(range(32)), proof=largest)

    frame = sign_message(commit, AGGREGATOR_KEY).frame

    assert read_message(frame).message == commit
    assert len(frame) < MAX_MESSAGE_BYTES
    assert len(frame) * MAX_COMMITS_ENTRIES < 64 * 1024**2


def test_what_a_learner_holds_of_announcements_is_bounded_and_let_go(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = commits(pipeline)[1]
    monkeypatch.setattr(announcements, "MAX_HELD_PROOF_BYTES", 3 * proven(commit).size)
    held = Announcements()
    for version in range(1, 100):
        held.add(commit.model_copy(update={"version": version}))
        held.add(commit.model_copy(update={"version": version}))  # twice is once

    # The newest three are kept, and all that was said of the head
    assert sorted(held.of(0, 0).commits) == [97, 98, 99]
    assert held.of(0, 0).through == 99
    held.looked(0, 98)
    assert sorted(held.of(0, 98).commits) == [99]
    held.looked(0, 99)
    assert held.of(0, 99) == Announced()
    assert replace(Announced(), through=None) == held.of(1, 0)
    assert held._bytes == 0


def test_who_lacks_the_key_makes_a_learner_look_once() -> None:
    held = Announcements()
    held.ring(0)

    assert held.worth_a_look(0, 5)
    assert held.of(0, 5).through is None
    held.looked(0, 5)
    assert not held.worth_a_look(0, 5)
