"""A store that fails, or a key that does, holds up what needs it: never more, and never for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deltapost.errors import StoreError, StoreUnavailable
from deltapost.ledger.engine import Ledger
from deltapost.serialization.messages import sign_message
from deltapost.serialization.names import (
    delta_key,
    learner_key,
)
from deltapost_aggregator.members import MembersReader
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


class Store:
    """The pipeline's store, in which `faults` decides what a call raises."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.faults: dict[str, type[StoreError]] = {}
        self.asked = 0

    def get(self, key: str, **keywords: Any) -> Any:
        self.asked += 1
        return self._call("get", key, **keywords)

    def head(self, key: str) -> Any:
        return self._call("head", key)

    def _call(self, name: str, key: str, **keywords: Any) -> Any:
        error = self.faults.get(key)
        if error is not None:
            raise error(f"{key} fails")
        return getattr(self._inner, name)(key, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_member_whose_key_cannot_be_had_now_holds_up_nobody_and_is_heard_later(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    store = Store(pipeline.store)
    pipeline.store = store
    context = pipeline.context()
    members = MembersReader(context)
    store.faults[learner_key(RUN, "ada")] = StoreUnavailable
    for learner in LEARNERS:
        say(pipeline, learner, 0)

    members.step()
    members.step()
    assert context.live() is None

    store.faults.clear()
    members.step()
    assert context.live() == set(LEARNERS)


def test_a_payload_that_fails_holds_up_no_round_that_is_ready(
    ledger: Ledger,
) -> None:
    pipeline = Pipeline(ledger, config=plain_config(quorum_size=2, grace_seconds=5.0))
    store = Store(pipeline.store)
    pipeline.store = store
    worker = pipeline.worker()
    pipeline.post("ada", DELTA["ada"])
    pipeline.post("bob", DELTA["bob"])
    failing = pipeline.post("cyd", DELTA["cyd"])
    message = failing.message
    key = delta_key(RUN, "cyd", 0, 0, message.payload.sha256)  # type: ignore[union-attr]
    store.faults[key] = StoreUnavailable

    with pytest.raises(StoreUnavailable):
        worker.step()
    pipeline.clock.sleep(6)
    for _ in range(2):
        if pipeline.head() == 0:
            worker.step()

    assert pipeline.head() == 1
    assert {p.learner for p in pipeline.record(1).participants} == {"ada", "bob"}


def test_an_object_that_fails_for_a_minute_while_others_are_served_is_missing(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    store = Store(pipeline.store)
    pipeline.store = store
    worker = pipeline.worker()
    failing = pipeline.post("ada", DELTA["ada"])
    store.faults[delta_key(RUN, "ada", 0, 0, failing.message.payload.sha256)] = StoreUnavailable  # type: ignore[union-attr]
    for _ in range(6):
        with pytest.raises(StoreUnavailable):
            worker.step()
        pipeline.clock.sleep(11)

    worker.step()

    assert pipeline.verdict(failing) == "missing"
    assert "others were served" in (pipeline.row(failing).detail or "")


def test_hundreds_of_copies_of_one_envelope_without_an_object_cost_a_few_seconds(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    pipeline.register("mallory")
    payload = pipeline.payload(arrays(99))
    empty = sign_message(pipeline.message("mallory", payload), learner_signing_key("mallory"))
    for _ in range(300):
        pipeline.append(empty)
    started = pipeline.clock()
    healthy(pipeline)

    pipeline.run_to(1)

    assert pipeline.clock() - started < 10
    assert pipeline.row(empty).deliveries == 300


def test_many_envelopes_without_objects_share_one_pause(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    pipeline.register("mallory")
    for number in range(40):
        message = pipeline.message("mallory", pipeline.payload(arrays(number)))
        pipeline.append(sign_message(message, learner_signing_key("mallory")))
    started = pipeline.clock()
    healthy(pipeline)

    pipeline.run_to(1)

    assert pipeline.clock() - started < 5
    assert len(pipeline.record(1).answers) == 40


def test_a_learner_whose_key_fails_for_a_minute_holds_up_the_stream_no_longer(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    pipeline.register("mallory")
    store = Store(pipeline.store)
    pipeline.store = store
    store.faults[learner_key(RUN, "mallory")] = StoreUnavailable
    worker = pipeline.worker()
    pipeline.post("mallory", arrays(99))
    healthy(pipeline)
    for _ in range(6):
        with pytest.raises(StoreUnavailable):
            worker.step()
        pipeline.clock.sleep(11)

    pipeline.run_to(1, worker)

    assert pipeline.record(1).unverified == {"unknown_learner": 1}
    assert [p.learner for p in pipeline.record(1).participants] == sorted(LEARNERS)


def test_objects_that_fail_together_are_given_up_together(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    store = Store(pipeline.store)
    pipeline.store = store
    worker = pipeline.worker()
    for number in range(5):
        pipeline.register(f"slow-{number}")
        signed = pipeline.post(f"slow-{number}", arrays(50 + number))
        key = delta_key(RUN, f"slow-{number}", 0, 0, signed.message.payload.sha256)  # type: ignore[union-attr]
        store.faults[key] = StoreUnavailable
    healthy(pipeline)
    started = pipeline.clock()
    while pipeline.head() == 0:
        try:
            worker.step()
        except StoreUnavailable:
            pipeline.clock.sleep(5)
        assert pipeline.clock() - started < 120

    assert sorted(pipeline.record(1).verdicts().values()) == ["accepted"] * 3 + ["missing"] * 5


def test_one_learner_with_a_failing_key_costs_one_request_a_step(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    store = Store(pipeline.store)
    pipeline.store = store
    store.faults[learner_key(RUN, "ada")] = StoreUnavailable
    members = MembersReader(pipeline.context())
    for counter in range(200):
        say(pipeline, "ada", counter)
    members.step()
    store.asked = 0

    members.step()

    assert store.asked == 1


@pytest.mark.parametrize("area", ["/anchors/", "/outer/", "/updates/"])
def test_no_record_names_an_object_that_does_not_read_back(ledger: Ledger, area: str) -> None:
    """A store that keeps other bytes than it was given: nothing is committed, and the key is named."""
    pipeline = Pipeline(ledger, config=plain_config(commit_dtype="BF16"))
    inner = pipeline.store

    class Altering(Store):
        altering = True

        def get(self, key: str, **keywords: Any) -> Any:
            blob = super().get(key, **keywords)
            if self.altering and area in key:
                return replace(blob, data=blob.data[:-1] + bytes([blob.data[-1] ^ 1]))
            return blob

    store = Altering(inner)
    pipeline.store = store
    worker = pipeline.worker()
    healthy(pipeline)

    with pytest.raises(StoreError, match=area):
        pipeline.run_to(1, worker)
    assert pipeline.records() == []
    assert pipeline.head() == 0

    store.altering = False
    pipeline.run_to(1, worker)
    assert [p.learner for p in pipeline.record(1).participants] == sorted(LEARNERS)
