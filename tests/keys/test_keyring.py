"""Every message is judged by the key that is in force, and nothing but the creator's word moves that."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from deltapost.errors import StoreUnavailable
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.tables import LearnerRow
from deltapost.limits import REGISTRY_POLL_SECONDS
from deltapost.serialization.messages import sign_message
from deltapost.serialization.names import learner_key, registry_key
from deltapost.stores import Blob
from deltapost.stores.memory import MemoryStore
from deltapost_aggregator.keyring import MAX_REMEMBERED_IDS
from deltapost_aggregator.members import MembersReader
from deltapost_aggregator.worker import FragmentWorker
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, healthy, learner_signing_key, plain_config, say
from fixtures.registry import change, registered_pipeline, signed_entry


@pytest.fixture
def ledger(migrated_sqlite_url: str) -> Iterator[Ledger]:
    """One database is enough here: `test_keys_in_the_ledger` has both."""
    opened = open_ledger(migrated_sqlite_url)
    yield opened
    opened.close()


NEW_KEY = learner_signing_key("ada's new key")
MALLORY = learner_signing_key("mallory")


def close_a_round(pipeline: Pipeline, worker: FragmentWorker, version: int) -> None:
    healthy(pipeline, version)
    pipeline.run_to(version + 1, worker)


def merged(pipeline: Pipeline, version: int) -> list[str]:
    return [participant.learner for participant in pipeline.record(version).participants]


def test_in_a_registered_run_a_key_in_learners_owns_nothing(ledger: Ledger) -> None:
    pipeline = registered_pipeline(ledger)
    pipeline.register("mallory")
    stranger = pipeline.post("mallory", arrays(9))
    healthy(pipeline)

    pipeline.run_to(1)

    assert pipeline.verdict(stranger) is None
    assert pipeline.record(1).unverified == {"unknown_learner": 1}
    with ledger.read() as session:
        assert session.get(LearnerRow, (RUN, "mallory")) is None


def test_a_learner_that_is_added_counts_without_a_restart(ledger: Ledger) -> None:
    pipeline = registered_pipeline(ledger)
    worker = pipeline.worker()
    close_a_round(pipeline, worker, 0)
    change(pipeline, "add", "dora")
    pipeline.clock.sleep(REGISTRY_POLL_SECONDS)
    pipeline.post("dora", arrays(8), version=1)

    close_a_round(pipeline, worker, 1)

    assert "dora" in merged(pipeline, 2)


def test_a_rotation_in_mid_round_takes_both_keys_until_its_version_then_the_new_one_alone(
    ledger: Ledger,
) -> None:
    # Given a round that is open, with Ada's contribution under the old key
    pipeline = registered_pipeline(ledger)
    worker = pipeline.worker()
    first = pipeline.post("ada", arrays(1))
    pipeline.settle(worker)
    change(pipeline, "rotate", "ada", NEW_KEY, from_version=1)
    pipeline.clock.sleep(REGISTRY_POLL_SECONDS)

    # When she says something else under the new one, still in that round
    second = pipeline.post("ada", arrays(4), key=NEW_KEY)
    for number, learner in enumerate(LEARNERS[1:]):
        pipeline.post(learner, arrays(number + 2))
    pipeline.run_to(1, worker)

    # Then both were hers; and from version 1 on the old key signs for nobody
    assert pipeline.record(1).verdicts()[first.sha256] == "accepted"
    assert pipeline.record(1).verdicts()[second.sha256] == "conflict"
    old = pipeline.post("ada", arrays(1), version=1)
    new = pipeline.post("ada", arrays(1), version=1, key=NEW_KEY)
    for number, learner in enumerate(LEARNERS[1:]):
        pipeline.post(learner, arrays(number + 2), version=1)
    pipeline.run_to(2, worker)
    assert pipeline.record(2).unverified == {"bad_signature": 1}
    assert pipeline.verdict(old) is None
    assert pipeline.record(2).verdicts()[new.sha256] == "accepted"


def test_a_key_that_was_replaced_cannot_use_up_the_quota_with_late_envelopes(ledger: Ledger) -> None:
    pipeline = registered_pipeline(ledger)
    worker = pipeline.worker()
    close_a_round(pipeline, worker, 0)
    change(pipeline, "rotate", "ada", NEW_KEY, from_version=1)
    pipeline.clock.sleep(REGISTRY_POLL_SECONDS)

    for number in range(70):
        pipeline.post("ada", b"old key", version=0, local_step=number)
    late = pipeline.post("ada", arrays(7), version=0, key=NEW_KEY)
    pipeline.post("ada", arrays(1), version=1, key=NEW_KEY)
    for number, learner in enumerate(LEARNERS[1:]):
        pipeline.post(learner, arrays(number + 2), version=1)
    pipeline.run_to(2, worker)

    record = pipeline.record(2)
    assert record.unverified == {"bad_signature": 70}
    assert record.over_quota == {}
    assert record.verdicts()[late.sha256] == "late"
    assert "ada" in merged(pipeline, 2)


def test_an_envelope_that_was_verified_stays_known_after_its_key_ended(ledger: Ledger) -> None:
    pipeline = registered_pipeline(ledger)
    worker = pipeline.worker()
    signed = pipeline.post("ada", arrays(1))
    for number, learner in enumerate(LEARNERS[1:]):
        pipeline.post(learner, arrays(number + 2))
    pipeline.run_to(1, worker)
    change(pipeline, "rotate", "ada", NEW_KEY, from_version=1)
    pipeline.clock.sleep(REGISTRY_POLL_SECONDS)

    pipeline.append(signed)
    pipeline.settle(worker)

    assert pipeline.row(signed).deliveries == 2
    assert pipeline.verdict(signed) == "accepted"
    assert pipeline.unverified() == {}


def test_a_learner_that_is_revoked_is_waited_for_no_longer_and_speaks_no_more(ledger: Ledger) -> None:
    # Given three live learners, of which one will say nothing, and a quorum of three
    pipeline = registered_pipeline(ledger, config=plain_config(quorum_size=3, min_quorum=1))
    context = pipeline.context()
    worker, members = FragmentWorker(context, 0), MembersReader(context)
    close_a_round(pipeline, worker, 0)
    for learner in LEARNERS:
        say(pipeline, learner, 0)
    members.step()
    for learner in LEARNERS[:2]:
        pipeline.post(learner, arrays(1), version=1)
    pipeline.settle(worker)
    assert pipeline.head() == 1

    # When it is revoked from the open round on
    change(pipeline, "revoke", "cyd", from_version=1)
    pipeline.clock.sleep(REGISTRY_POLL_SECONDS)
    members.step()
    refused = pipeline.post("cyd", arrays(3), version=1)

    # Then the round closes without it
    assert context.live() == {"ada", "bob"}
    pipeline.run_to(2, worker)
    pipeline.settle(worker)
    assert merged(pipeline, 2) == ["ada", "bob"]
    assert pipeline.verdict(refused) is None
    say(pipeline, "cyd", 1)
    assert members.step() == 0


def test_members_are_judged_by_the_key_at_the_highest_head(ledger: Ledger) -> None:
    pipeline = registered_pipeline(ledger)
    context = pipeline.context()
    worker, members = FragmentWorker(context, 0), MembersReader(context)
    close_a_round(pipeline, worker, 0)
    change(pipeline, "rotate", "ada", NEW_KEY, from_version=1)
    pipeline.clock.sleep(REGISTRY_POLL_SECONDS)
    say(pipeline, "ada", 0)
    say(pipeline, "bob", 0)

    assert members.step() == 1
    say(pipeline, "ada", 1, NEW_KEY)
    assert members.step() == 1
    assert context.live() == {"ada", "bob"}


def test_the_creator_may_rotate_the_key_of_an_id_that_somebody_owns_in_an_open_run(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    worker = pipeline.worker()
    close_a_round(pipeline, worker, 0)
    change(pipeline, "rotate", "ada", NEW_KEY, from_version=1)
    pipeline.clock.sleep(REGISTRY_POLL_SECONDS)

    pipeline.post("ada", arrays(1), version=1)
    pipeline.post("ada", arrays(1), version=1, key=NEW_KEY)
    for learner in LEARNERS[1:]:
        pipeline.post(learner, arrays(2), version=1)
    pipeline.run_to(2, worker)

    assert pipeline.record(2).unverified == {"bad_signature": 1}
    assert len(pipeline.record(2).participants) == 3


@pytest.mark.parametrize("forgery", ["garbage", "another signer", "a gap", "another history"])
def test_a_forged_entry_moves_no_key_shows_in_readiness_and_holds_up_no_round(
    ledger: Ledger, forgery: str
) -> None:
    pipeline = registered_pipeline(ledger)
    manifest = pipeline.plan.manifest
    number = len(LEARNERS) + 1
    last = pipeline.store.get(registry_key(RUN, number - 1)).data

    fields = {"number": number, "previous": hashlib.sha256(last).digest()}
    data = {
        "garbage": b"\xc1 no entry",
        "another signer": signed_entry(manifest, signer=MALLORY, **fields)[1].to_bytes(),
        "a gap": signed_entry(manifest, **{**fields, "number": number + 1})[1].to_bytes(),
        "another history": signed_entry(manifest, **{**fields, "previous": bytes(32)})[1].to_bytes(),
    }[forgery]
    pipeline.store.put(registry_key(RUN, number), data)
    context = pipeline.context()
    worker = FragmentWorker(context, 0)
    pipeline.post("mallory", arrays(9))

    close_a_round(pipeline, worker, 0)

    assert pipeline.record(1).unverified == {"unknown_learner": 1}
    problems = context.services.health.problems()
    assert f"run {RUN} registry" in problems
    pipeline.store.delete(registry_key(RUN, number))
    change(pipeline, "add", "dora")
    pipeline.clock.sleep(REGISTRY_POLL_SECONDS)
    pipeline.post("dora", arrays(8), version=1)
    close_a_round(pipeline, worker, 1)
    assert f"run {RUN} registry" not in context.services.health.problems()
    assert "dora" in merged(pipeline, 2)


def test_an_entry_replaced_in_the_bucket_is_named_and_the_keys_known_before_count(ledger: Ledger) -> None:
    # Given an aggregator that has read three entries
    pipeline = registered_pipeline(ledger)
    close_a_round(pipeline, pipeline.worker(), 0)
    key = registry_key(RUN, 3)

    # When even the creator puts another one in place of the last, for Cyd
    second = pipeline.store.get(registry_key(RUN, 2)).data

    _, other = signed_entry(
        pipeline.plan.manifest, number=3, previous=hashlib.sha256(second).digest(), learner="cyd"
    )
    pipeline.store.delete(key)
    pipeline.store.put(key, other.to_bytes())

    # Then the next start names it, and goes on with what the ledger knows
    context = pipeline.context()
    worker = FragmentWorker(context, 0)
    close_a_round(pipeline, worker, 1)
    assert len(pipeline.record(2).participants) == 3
    assert key in context.services.health.problems()[f"run {RUN} registry"]


class RegistryFails(MemoryStore):
    """A store whose registry does not answer while `failing`."""

    failing = False

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        if self.failing and "/registry/" in key:
            raise StoreUnavailable(f"GET {key} timed out")
        return super().get(key, offset=offset, length=length)


def test_while_the_registry_does_not_answer_known_keys_count_and_nobody_is_called_unknown(
    ledger: Ledger,
) -> None:
    store = RegistryFails()
    pipeline = registered_pipeline(ledger, store=store)
    worker = pipeline.worker()
    close_a_round(pipeline, worker, 0)
    change(pipeline, "add", "dora")
    pipeline.clock.sleep(REGISTRY_POLL_SECONDS)
    store.failing = True
    pipeline.post("dora", arrays(8), version=1)

    with pytest.raises(StoreUnavailable):
        pipeline.settle(worker)
    assert pipeline.unverified() == {}
    store.failing = False
    close_a_round(pipeline, worker, 1)

    assert "dora" in merged(pipeline, 2)


def test_made_up_ids_fill_no_memory(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    keys = pipeline.context().keys
    message = pipeline.message("ada", b"x")
    for number in range(MAX_REMEMBERED_IDS + 10):
        signed = sign_message(message.model_copy(update={"learner": f"id-{number}"}), MALLORY)
        if number < 3:
            refused = keys.refusal(signed, f"id-{number}", 0)
            assert refused is not None
            assert refused.reason == "unknown_learner"
        else:
            keys._owner(f"id-{number}")

    assert len(keys._unknown_until) <= MAX_REMEMBERED_IDS
    with pytest.raises(KeyError):
        pipeline.store._objects[learner_key(RUN, "id-0")]  # type: ignore[attr-defined]
