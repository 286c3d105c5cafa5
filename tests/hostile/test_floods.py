"""A flood costs its sender: others' rounds close after a bounded number of steps, requests and rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import func, select

from deltapost.algorithms import sealing
from deltapost.errors import StoreUnavailable
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.tables import ContributionRow
from deltapost.limits import (
    FAILING_OBJECT_SECONDS,
    MAX_ENVELOPES_PER_VERSION,
    REDECIDE_SECONDS,
)
from deltapost.serialization.messages import SignedMessage, sign_message
from deltapost.serialization.names import delta_key, envelope_stream, learner_key, members_stream
from deltapost_aggregator.caution import BATCH_ENTRIES
from deltapost_aggregator.members import MembersReader
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, healthy, learner_signing_key, say

#: Ten thousand in `make test-all`; what must not grow with the flood is asserted in both.
FLOODS = [1_500, pytest.param(10_000, marks=pytest.mark.slow)]
MALLORY = "mallory"


class CountingStore:
    """The pipeline's store; counts requests by verb and area, and fails what `failing` names."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.asked: Counter[str] = Counter()
        self.failing: set[str] = set()

    def get(self, key: str, **keywords: Any) -> Any:
        return self._call("get", key, **keywords)

    def head(self, key: str) -> Any:
        return self._call("head", key)

    def list(self, prefix: str) -> Any:
        return self._call("list", prefix)

    def _call(self, verb: str, key: str, **keywords: Any) -> Any:
        self.asked[f"{verb} {key.split('/')[1]}"] += 1
        if key in self.failing:
            raise StoreUnavailable(f"{key} fails")
        return getattr(self._inner, verb)(key, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def pipeline(migrated_sqlite_url: str) -> Iterator[Pipeline]:
    ledger: Ledger = open_ledger(migrated_sqlite_url)
    pipeline = Pipeline(ledger)
    pipeline.register(MALLORY)
    pipeline.store = CountingStore(pipeline.store)
    yield pipeline
    ledger.close()


def asked(pipeline: Pipeline) -> Counter[str]:
    assert isinstance(pipeline.store, CountingStore)
    return pipeline.store.asked


def forged(pipeline: Pipeline, number: int, learner: str = MALLORY, **claims: Any) -> SignedMessage:
    """An envelope whose payload nobody uploaded."""
    message = pipeline.message(learner, b"%d" % number, **claims)
    return sign_message(message, learner_signing_key(learner))


def close_round(pipeline: Pipeline, *, entries: int, more_steps: int = 6) -> None:
    """The honest round behind the flood closes within the steps that reading the flood takes."""
    healthy(pipeline)
    started = pipeline.clock()
    pipeline.run_to(1, steps=entries // BATCH_ENTRIES + more_steps)
    assert pipeline.clock() - started < 10
    assert [p.learner for p in pipeline.record(1).participants] == sorted(LEARNERS)


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_signed_envelopes_costs_one_learners_quota_of_requests_and_rows(
    pipeline: Pipeline, flood: int
) -> None:
    first = [forged(pipeline, number) for number in range(MAX_ENVELOPES_PER_VERSION + 200)]
    for number in range(flood):  # beyond the quota what is signed anew and what is repeated cost the same
        pipeline.append(first[number % len(first)])

    close_round(pipeline, entries=flood)

    counted = asked(pipeline)
    # Each of its listed envelopes is looked for twice at most before its verdict, and a few times after it;
    # what is over the quota is not fetched: without it there would be ten thousand.
    assert counted["get deltas"] + counted["head deltas"] < 8 * MAX_ENVELOPES_PER_VERSION
    assert counted["get learners"] <= len(LEARNERS) + 1
    record = pipeline.record(1)
    assert len(record.answers) == MAX_ENVELOPES_PER_VERSION
    assert set(record.over_quota) == {MALLORY}
    with pipeline.ledger.read() as session:
        rows = session.scalar(select(func.count()).select_from(ContributionRow))
    assert rows == MAX_ENVELOPES_PER_VERSION + len(LEARNERS)


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_garbage_costs_no_request(pipeline: Pipeline, flood: int) -> None:
    stream = envelope_stream(RUN, 0)
    honest = forged(pipeline, 0).frame
    for number in range(flood):
        pipeline.log.append(stream, b"%d" % number if number % 2 else honest[: number % len(honest)])

    close_round(pipeline, entries=flood)

    assert sum(asked(pipeline).values()) < 40
    assert pipeline.record(1).unverified == {"malformed": flood}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_unknown_ids_costs_one_request_a_batch(pipeline: Pipeline, flood: int) -> None:
    key = learner_signing_key("stranger")
    for number in range(flood):
        message = pipeline.message(f"stranger-{number}", b"x")
        pipeline.append(sign_message(message, key))

    close_round(pipeline, entries=flood)

    counted = asked(pipeline)
    assert counted["list learners"] <= flood // BATCH_ENTRIES + 2
    assert counted["get learners"] <= len(LEARNERS) + 8
    assert pipeline.record(1).unverified == {"unknown_learner": flood}


def test_one_unknown_id_is_asked_for_once_a_second(pipeline: Pipeline) -> None:
    for number in range(1_000):
        pipeline.append(forged(pipeline, number, learner="stranger"))

    close_round(pipeline, entries=1_000)

    assert asked(pipeline)["get learners"] <= len(LEARNERS) + 3
    assert asked(pipeline)["list learners"] == 0


def test_a_learner_that_registered_among_strangers_is_heard(pipeline: Pipeline) -> None:
    for number in range(BATCH_ENTRIES - 1):
        pipeline.append(forged(pipeline, number, learner=f"stranger-{number}"))
    pipeline.register("newcomer")
    newcomer = pipeline.post("newcomer", arrays(9))

    pipeline.worker().step()

    assert pipeline.verdict(newcomer) == "accepted"


def test_unknown_ids_on_the_members_stream_cost_one_request_a_batch(pipeline: Pipeline) -> None:
    for number in range(3_000):
        say(pipeline, f"stranger-{number}", 0)
    for learner in LEARNERS:
        say(pipeline, learner, 0)
    context = pipeline.context()
    members = MembersReader(context)

    while members.step() == 0:
        pass

    assert context.live() == set(LEARNERS)
    assert asked(pipeline)["list learners"] <= 6
    assert asked(pipeline)["get learners"] <= len(LEARNERS) + 8
    assert pipeline.log.length(members_stream(RUN)) == 3_003


def test_envelopes_signed_by_another_lead_to_no_look_at_a_payload(pipeline: Pipeline) -> None:
    """Not even beside an envelope whose payload is missing, when the rest of its batch is looked at."""
    pipeline.append(forged(pipeline, 0))
    for number in range(60):
        message = pipeline.message(MALLORY, b"other %d" % number)
        pipeline.append(sign_message(message, learner_signing_key("stranger")))

    close_round(pipeline, entries=64)

    assert asked(pipeline)["get deltas"] + asked(pipeline)["head deltas"] <= 2 + 2 * len(LEARNERS)
    assert pipeline.record(1).unverified == {"bad_signature": 60}


def test_a_missing_envelope_posted_for_ever_costs_ever_fewer_requests_and_no_pause(
    pipeline: Pipeline,
) -> None:
    missing = forged(pipeline, 0)
    worker = pipeline.worker()
    pipeline.append(missing)
    pipeline.settle(worker)
    asked(pipeline).clear()
    slept = pipeline.clock()

    for _ in range(100):
        pipeline.append(missing)
        pipeline.clock.now += REDECIDE_SECONDS
        pipeline.settle(worker)

    assert asked(pipeline)["get deltas"] <= 9
    assert pipeline.clock() - slept == 100 * REDECIDE_SECONDS
    assert pipeline.row(missing).deliveries == 101


def test_objects_of_one_learner_that_fail_one_after_the_other_hold_up_others_for_a_minute_in_all(
    pipeline: Pipeline,
) -> None:
    store = pipeline.store
    assert isinstance(store, CountingStore)
    pipeline.run_to(0)
    worker = pipeline.worker()
    started = pipeline.clock()
    for number in range(20):
        failing = pipeline.post(MALLORY, arrays(100 + number))
        message: Any = failing.message
        store.failing.add(delta_key(RUN, MALLORY, 0, 0, message.payload.sha256))
        for _ in range(30):
            try:
                worker.step()
            except StoreUnavailable:
                pipeline.clock.sleep(5)
            if pipeline.verdict(failing) == "missing":
                break
        assert pipeline.verdict(failing) == "missing"

    healthy(pipeline)
    pipeline.run_to(1, worker)

    assert pipeline.clock() - started <= FAILING_OBJECT_SECONDS + 15


def test_a_failing_key_holds_up_nothing_before_it(pipeline: Pipeline) -> None:
    store = pipeline.store
    assert isinstance(store, CountingStore)
    accepted = pipeline.post("ada", arrays(1))
    store.failing.add(learner_key(RUN, MALLORY))
    pipeline.append(forged(pipeline, 0))

    with pytest.raises(StoreUnavailable):
        pipeline.worker().step()

    assert pipeline.verdict(accepted) == "accepted"


def test_made_up_learners_cannot_make_a_record_too_large_to_be_written(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each within its own quota, together past what a document may hold: no round would close any more."""
    honest = [pipeline.post(learner, arrays(number + 1)) for number, learner in enumerate(LEARNERS[:2])]
    room = 60 * len(honest[0].frame)
    monkeypatch.setattr(sealing, "MAX_LISTED_BYTES", room)
    for number in range(10):
        pipeline.register(f"sybil-{number}")
        for envelope in range(20):
            pipeline.append(forged(pipeline, envelope, learner=f"sybil-{number}"))
    worker = pipeline.worker()
    pipeline.settle(worker)
    worker.stop()
    pipeline.post(LEARNERS[2], arrays(3))  # its first still has room, and after a restart too

    pipeline.run_to(1, pipeline.worker())

    record = pipeline.record(1)
    assert [p.learner for p in record.participants] == sorted(LEARNERS)
    assert len(record.to_bytes()) < 2 * room
    assert sum(record.over_quota.values()) > 140
