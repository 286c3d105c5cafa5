"""A ledger is made again from the bucket alone, with every round, participant and verdict, and goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import delete, select

from deltapost.audit.rebuild import Rebuilt, rebuild
from deltapost.errors import ConfigurationError, RunMismatch
from deltapost.ledger import leases, registry, runs
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.tables import ContributionRow, FragmentRow, LearnerRow, ParticipantRow, RoundRow
from deltapost.serialization.names import (
    anchor_key,
    attestation_key,
    envelope_stream,
    learner_key,
    manifest_key,
    record_key,
)
from deltapost.serialization.records import Attestation, Manifest
from deltapost.stores.registry import register
from fixtures.histories import FRAGMENTS, ROUNDS, ScriptedRun, copy, history, restore, sequence
from fixtures.pipeline import AGGREGATOR_KEY, LEARNERS, RUN, Pipeline, arrays, learner_signing_key


def play(ledger: Ledger) -> ScriptedRun:
    scripted = ScriptedRun(ledger)
    scripted.play()
    for worker in scripted.workers:
        worker.stop()
    return scripted


@pytest.fixture
def played(migrated_sqlite_url: str) -> Iterator[ScriptedRun]:
    """On SQLite."""
    ledger = open_ledger(migrated_sqlite_url)
    yield play(ledger)
    ledger.close()


@pytest.fixture
def played_on_both(ledger: Ledger) -> ScriptedRun:
    """Once on each kind of database."""
    return play(ledger)


def again(pipeline: Pipeline) -> Rebuilt:
    return rebuild(pipeline.ledger, pipeline.store, RUN)


def test_every_round_participant_verdict_and_count_is_there_again(
    played_on_both: ScriptedRun,
) -> None:
    pipeline = played_on_both.pipeline
    before, order, dump = history(pipeline.ledger), sequence(pipeline.ledger), pipeline.dump()
    assert {len(before[name]) for name in ("rounds", "participants", "contributions", "unverified")} == {
        FRAGMENTS * ROUNDS,
        FRAGMENTS * (3 + 2 + 3),
        FRAGMENTS * (8 + 4 * ROUNDS - 1),
    }
    restore(pipeline.ledger, {})
    seen: list[tuple[int, int]] = []

    rebuilt = rebuild(
        pipeline.ledger, pipeline.store, RUN, progress=lambda done, total: seen.append((done, total))
    )

    assert (rebuilt.stopped, rebuilt.added, rebuilt.learners) == (None, FRAGMENTS * ROUNDS, 4)
    assert history(pipeline.ledger) == before
    assert sequence(pipeline.ledger) == order
    rebuilt_dump = pipeline.dump()
    assert rebuilt_dump["rounds"] == dump["rounds"]
    assert rebuilt_dump["participants"] == dump["participants"]
    assert seen == [(done + 1, FRAGMENTS * ROUNDS) for done in range(FRAGMENTS * ROUNDS)]


def test_after_a_rebuild_the_run_goes_on_and_no_envelope_gets_a_second_verdict(
    played_on_both: ScriptedRun,
) -> None:
    # Given streams in which everything that was ever posted stands again
    played = played_on_both
    pipeline = played.pipeline
    for row in copy(pipeline.ledger)["contributions"]:
        pipeline.log.append(envelope_stream(RUN, row["fragment"]), row["message"])
    restore(pipeline.ledger, {})
    again(pipeline)
    before = history(pipeline.ledger)["contributions"]
    signed = pipeline.post("ada", arrays(999), version=0)  # of a round that closed without it

    # When an aggregator goes on and the learners contribute to the next round
    played.start()
    played.play(range(ROUNDS, ROUNDS + 1))

    # Then it is committed upon the rebuilt head, and what was answered stays as it was answered
    assert [pipeline.head(fragment) for fragment in range(FRAGMENTS)] == [ROUNDS + 1] * FRAGMENTS
    after = history(pipeline.ledger)["contributions"]
    assert set(before) <= set(after)
    assert pipeline.verdict(signed) in {"late", "stale"}
    answered = [
        envelope
        for fragment in range(FRAGMENTS)
        for version in range(1, ROUNDS + 2)
        for envelope in pipeline.record(version, fragment).verdicts()
    ]
    assert len(answered) == len(set(answered))


def test_a_rebuilt_learner_counts_from_the_first_version_it_was_answered_at(played: ScriptedRun) -> None:
    pipeline = played.pipeline
    pipeline.register("newcomer")
    restore(pipeline.ledger, {})

    again(pipeline)

    with pipeline.ledger.read() as session:
        found = {row.learner: row.first_version for row in session.scalars(select(LearnerRow))}
    assert found == {**dict.fromkeys((*LEARNERS, "mallory"), 0), "newcomer": ROUNDS}


def test_registered_keys_are_there_again(played: ScriptedRun) -> None:
    pipeline, creator = played.pipeline, learner_signing_key("creator")
    manifest, new = pipeline.plan.manifest, learner_signing_key("new ada").public
    register(pipeline.store, manifest, creator, "rotate", "ada", new, from_version=9)
    register(pipeline.store, manifest, creator, "revoke", "ada", None, from_version=9)
    restore(pipeline.ledger, {})

    assert again(pipeline).stopped is None
    assert again(pipeline).stopped is None
    assert registry.load(pipeline.ledger, pipeline.plan.manifest).number == 2


def test_the_ledger_keeps_what_it_has_and_gets_what_it_lacks(
    played_on_both: ScriptedRun,
) -> None:
    # Given a ledger that lost a round in the middle, some participants, and an answer
    pipeline = played_on_both.pipeline
    before = history(pipeline.ledger)
    with pipeline.ledger.write() as session:
        for table in (ParticipantRow, RoundRow):
            session.execute(delete(table).where(table.fragment == 0, table.version == 2))
        session.execute(delete(ParticipantRow).where(ParticipantRow.learner == "cyd"))
        envelope = session.scalars(select(ContributionRow.envelope).limit(1)).one()
        session.execute(delete(ContributionRow).where(ContributionRow.envelope == envelope))

    first, second = again(pipeline), again(pipeline)

    assert (first.stopped, first.added) == (None, 0)
    assert first.completed > 1
    assert (second.added, second.completed) == (0, 0)
    assert history(pipeline.ledger) == before


def test_a_ledger_restored_from_an_old_copy_is_brought_to_the_newest_record(ledger: Ledger) -> None:
    scripted = ScriptedRun(ledger)
    scripted.play(range(1))
    backup = copy(ledger)
    scripted.play(range(1, ROUNDS))
    before, order = history(ledger), sequence(ledger)
    for worker in scripted.workers:
        worker.stop()
    for rows in backup["fragments"]:
        rows["lease_token"] = rows["lease_expires_at"] = None
    restore(ledger, backup)

    rebuilt = again(scripted.pipeline)

    assert (rebuilt.stopped, rebuilt.added) == (None, FRAGMENTS * (ROUNDS - 1))
    assert history(ledger) == before
    assert sequence(ledger) == order


def test_a_fragment_that_a_live_aggregator_owns_is_left_to_it(played: ScriptedRun) -> None:
    pipeline = played.pipeline
    restore(pipeline.ledger, {})
    runs.admit(pipeline.ledger, pipeline.plan.manifest)
    lease = leases.acquire(pipeline.ledger, RUN, 1, "alive", take_own=False)
    assert lease is not None

    rebuilt = again(pipeline)

    assert [fragment.head for fragment in rebuilt.fragments] == [ROUNDS, 0]
    assert "'alive' owns it" in (rebuilt.fragments[1].note or "")
    assert rebuilt.stopped is None
    leases.renew(pipeline.ledger, lease)  # it still holds it


def test_a_lease_that_is_taken_over_meanwhile_ends_that_fragment_only(played: ScriptedRun) -> None:
    pipeline = played.pipeline
    restore(pipeline.ledger, {})
    taken: list[bool] = []

    def take_over(done: int, _total: int) -> None:
        if done == 1:
            with pipeline.ledger.write() as session:
                row = session.get(FragmentRow, (RUN, 0))
                assert row is not None
                row.lease_token, row.owner = "another", "another"
            taken.append(True)

    rebuilt = rebuild(pipeline.ledger, pipeline.store, RUN, progress=take_over)

    assert taken
    assert [fragment.head for fragment in rebuilt.fragments] == [0, ROUNDS]
    assert "'another' took it over" in (rebuilt.fragments[0].note or "")


def test_a_record_that_nobody_attested_is_left_to_the_aggregator_which_vouches_for_it(
    played: ScriptedRun,
) -> None:
    pipeline = played.pipeline
    before = history(pipeline.ledger)
    pipeline.store.delete(attestation_key(RUN, 0, ROUNDS))
    restore(pipeline.ledger, {})

    rebuilt = again(pipeline)

    assert rebuilt.stopped is None
    assert [fragment.head for fragment in rebuilt.fragments] == [ROUNDS - 1, ROUNDS]
    assert f"record {ROUNDS} has no attestation" in (rebuilt.fragments[0].note or "")

    played.start()
    played.step_to(ROUNDS, 0)
    differing = {"rounds"}  # the new attestation has its own time and owner
    after = history(pipeline.ledger)
    assert {name for name in before if after[name] != before[name]} == differing


Break = Callable[[Pipeline], str]


def _put(pipeline: Pipeline, key: str, data: bytes) -> str:
    pipeline.store.delete(key)
    pipeline.store.put(key, data)
    return key


def _other_weight(pipeline: Pipeline) -> str:
    record = pipeline.record(2)
    first, *rest = record.participants
    altered = record.model_copy(update={"participants": (first.model_copy(update={"weight": 9.0}), *rest)})
    _put(pipeline, record_key(RUN, 0, 2), altered.to_bytes())
    return attestation_key(RUN, 0, 2)


def _other_key(pipeline: Pipeline) -> str:
    key = attestation_key(RUN, 0, 2)
    found = Attestation.from_bytes(pipeline.store.get(key).data)
    other = Attestation.make(found.record, found.verify(found.record, None), learner_signing_key("mallory"))
    return _put(pipeline, key, other.to_bytes())


def _attested_fork(pipeline: Pipeline) -> str:
    """Written and signed by who has the key, and continuing nothing."""
    found = Attestation.from_bytes(pipeline.store.get(attestation_key(RUN, 0, 2)).data)
    forked = pipeline.record(2).model_copy(update={"previous": bytes(32)})
    observations = found.verify(found.record, None)
    made = Attestation.make(forked.sha256, observations, AGGREGATOR_KEY)
    _put(pipeline, attestation_key(RUN, 0, 2), made.to_bytes())
    return _put(pipeline, record_key(RUN, 0, 2), forked.to_bytes())


def _no_record(pipeline: Pipeline) -> str:
    pipeline.store.delete(record_key(RUN, 0, 2))
    return record_key(RUN, 0, 2)


def _other_fragment(pipeline: Pipeline) -> str:
    return _put(pipeline, record_key(RUN, 0, 2), pipeline.record(2, 1).to_bytes())


@pytest.mark.parametrize(
    "change",
    [
        _other_weight,
        _other_key,
        _attested_fork,
        _no_record,
        _other_fragment,
        lambda pipeline: _put(pipeline, record_key(RUN, 0, 2), b"\x80"),
        lambda pipeline: _put(pipeline, attestation_key(RUN, 0, 2), b"no document"),
    ],
)
def test_the_first_thing_that_does_not_hold_is_named_and_ends_it_there(
    played: ScriptedRun, change: Break
) -> None:
    pipeline = played.pipeline
    before = history(pipeline.ledger)["rounds"]
    saved = {info.key: pipeline.store.get(info.key).data for info in pipeline.store.list(RUN)}
    key = change(pipeline)
    restore(pipeline.ledger, {})

    rebuilt = again(pipeline)

    assert key in (rebuilt.stopped or "")
    assert rebuilt.fragments[0].head == 1
    # What is there is right, and once the object is restored the rest comes.
    assert set(history(pipeline.ledger)["rounds"]) < set(before)
    for name in (record_key(RUN, 0, 2), attestation_key(RUN, 0, 2)):
        _put(pipeline, name, saved[name])
    assert again(pipeline).stopped is None
    assert history(pipeline.ledger)["rounds"] == before


def test_a_state_that_the_next_round_would_start_from_is_missed_at_once(played: ScriptedRun) -> None:
    pipeline = played.pipeline
    key = anchor_key(RUN, 1, ROUNDS - 1, pipeline.record(ROUNDS, 1).anchor.sha256)
    pipeline.store.delete(key)
    restore(pipeline.ledger, {})

    rebuilt = again(pipeline)

    assert key in (rebuilt.stopped or "")
    assert rebuilt.added == FRAGMENTS * ROUNDS


@pytest.mark.parametrize("known", ["another record", "another attestation", "a higher head"])
def test_a_ledger_of_another_history_is_refused(played: ScriptedRun, known: str) -> None:
    pipeline = played.pipeline
    with pipeline.ledger.write() as session:
        row = session.get(RoundRow, (RUN, 0, 2))
        assert row is not None
        if known == "another record":
            row.record = row.record + b"."
        elif known == "another attestation":
            row.attestation = row.attestation + b"."
    if known == "a higher head":
        pipeline.store.delete(record_key(RUN, 0, ROUNDS))
    before = history(pipeline.ledger)

    rebuilt = again(pipeline)

    assert "fragment 0" in (rebuilt.stopped or "")
    assert history(pipeline.ledger) == before


def test_a_learner_whose_key_is_another_is_named(played: ScriptedRun) -> None:
    _put(played.pipeline, learner_key(RUN, "ada"), hashlib.sha256(b"other").digest())

    assert "'ada'" in (again(played.pipeline).stopped or "")


def test_a_run_of_another_manifest_is_refused_and_one_that_is_not_there_is_named(
    played: ScriptedRun,
) -> None:
    pipeline = played.pipeline
    with pytest.raises(ConfigurationError, match=r"no run 'nowhere' in the store: .*nowhere/manifest"):
        rebuild(pipeline.ledger, pipeline.store, "nowhere")
    manifest = Manifest.from_bytes(pipeline.store.get(manifest_key(RUN)).data)
    other = manifest.model_copy(update={"creator_key": bytes(32)})
    _put(pipeline, manifest_key(RUN), other.to_bytes())

    with pytest.raises(RunMismatch):
        again(pipeline)
