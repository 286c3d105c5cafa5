"""A record that nobody attested is vouched for only if it follows from signed, fit contributions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from deltapost.errors import HistoryError, LedgerUnavailable
from deltapost.ledger import intake as ledger_intake
from deltapost.ledger import runs
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.revisions import migrate
from deltapost.serialization.names import anchor_key, attestation_key, delta_key, outer_key, record_key
from deltapost.serialization.records import Record
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, plain_config


class Restored:
    """An honest round whose ledger is gone and whose attestation is missing: only the bucket remembers it."""

    def __init__(self, ledger: Ledger, url: str) -> None:
        self.pipeline = Pipeline(ledger, config=plain_config(min_quorum=2, max_delta_norm=50.0))
        for number, learner in enumerate(LEARNERS):
            self.pipeline.post(learner, arrays(number + 1))
        self.pipeline.run_to(1)
        self.record = self.pipeline.record(1)
        self.pipeline.store.delete(attestation_key(RUN, 0, 1))
        self.pipeline.ledger = open_ledger(url)
        migrate(self.pipeline.ledger)
        runs.admit(self.pipeline.ledger, self.pipeline.plan.manifest)

    def put(self, record: Record) -> None:
        key = record_key(RUN, 0, 1)
        self.pipeline.store.delete(key)
        self.pipeline.store.put(key, record.to_bytes())

    def refused(self, words: str) -> None:
        with pytest.raises(HistoryError, match=words):
            self.pipeline.run_to(1)
        assert self.pipeline.head() == 0
        assert list(self.pipeline.store.list(attestation_key(RUN, 0, 1))) == []


@pytest.fixture
def restored(ledger: Ledger, sqlite_url: str) -> Restored:
    return Restored(ledger, sqlite_url)


def test_an_honest_record_is_vouched_for_with_every_object_it_names(restored: Restored) -> None:
    anchor = anchor_key(RUN, 0, 0, restored.record.anchor.sha256)
    outer = outer_key(RUN, 0, 0, restored.record.outer.sha256)
    restored.pipeline.store.delete(anchor)
    restored.pipeline.store.delete(outer)

    restored.pipeline.run_to(1)

    assert restored.pipeline.record(1) == restored.record
    assert restored.pipeline.store.head(anchor).size == restored.record.anchor.size
    assert restored.pipeline.store.head(outer).size == restored.record.outer.size
    assert restored.pipeline.store.head(attestation_key(RUN, 0, 1)).size > 0


def test_a_ledger_that_fails_meanwhile_says_nothing_about_the_record(
    restored: Restored, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: object) -> None:
        raise LedgerUnavailable("restarting")

    with monkeypatch.context() as patched:
        patched.setattr(ledger_intake, "envelope", unavailable)
        with pytest.raises(LedgerUnavailable):
            restored.pipeline.run_to(1)

    restored.pipeline.run_to(1)
    assert restored.pipeline.record(1) == restored.record


Change = Callable[[Record], Record]


def _claim(**values: Any) -> Change:
    def change(record: Record) -> Record:
        first, *rest = record.participants
        return record.model_copy(update={"participants": (first.model_copy(update=values), *rest)})

    return change


def _only(count: int, **values: Any) -> Change:
    return lambda record: record.model_copy(update={"participants": record.participants[:count], **values})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(_claim(tokens=10**9), "signed another envelope", id="other counters"),
        pytest.param(_claim(learner="bob"), "one for each learner", id="a learner twice"),
        pytest.param(_claim(learner="aaa"), "deltas/aaa/", id="an unknown learner"),
        pytest.param(_claim(envelope=b"e" * 32), "is nowhere", id="an envelope nobody posted"),
        pytest.param(_claim(weight=1.0), "does not follow", id="another weight"),
        pytest.param(_claim(cosine=0.0), "does not follow", id="another cosine"),
        pytest.param(
            lambda record: record.model_copy(update={"anchor": record.outer}),
            "does not follow",
            id="another anchor",
        ),
        pytest.param(_only(1, cosine=None, degraded=True), "no owner seals that", id="below the minimum"),
        pytest.param(_only(2), "no owner seals that", id="degraded and not said"),
        pytest.param(
            lambda record: record.model_copy(update={"degraded": True}),
            "no owner seals that",
            id="said to be degraded",
        ),
    ],
)
def test_an_altered_record_is_refused_by_what_is_wrong_with_it(
    restored: Restored, change: Change, words: str
) -> None:
    restored.put(change(restored.record))

    restored.refused(words)


@pytest.mark.parametrize(
    ("claims", "scale", "words"),
    [
        ({"steps": 1, "tokens": 10**12}, 1.0, "outlier"),
        ({}, 1e3, "outlier"),
        ({"steps": 0}, 1.0, "zero_steps"),
    ],
)
def test_a_signed_contribution_that_intake_would_refuse_is_not_merged_by_the_back_door(
    ledger: Ledger, sqlite_url: str, claims: dict[str, Any], scale: float, words: str
) -> None:
    restored = Restored(ledger, sqlite_url)
    pipeline = restored.pipeline
    big = {name: array * scale for name, array in arrays(9).items()}
    payload = pipeline.payload(big)
    signed = pipeline.post("bob", payload, **claims)
    message = signed.message
    record = restored.record
    participants = [
        participant.model_copy(
            update={
                "envelope": signed.sha256,
                "payload": message.payload,  # type: ignore[union-attr]
                "steps": message.steps,  # type: ignore[union-attr]
                "tokens": message.tokens,  # type: ignore[union-attr]
            }
        )
        if participant.learner == "bob"
        else participant
        for participant in record.participants
    ]
    restored.put(record.model_copy(update={"participants": tuple(participants)}))

    restored.refused(words)


def test_an_envelope_signed_by_another_is_refused(restored: Restored) -> None:
    """Ada's key object is another's: her envelopes no longer verify."""
    from deltapost.serialization.names import learner_key
    from fixtures.pipeline import learner_signing_key

    restored.pipeline.store.delete(learner_key(RUN, "ada"))
    restored.pipeline.store.put(learner_key(RUN, "ada"), learner_signing_key("mallory").public)

    restored.refused("the signature is not learner ada's")


def test_a_payload_that_is_gone_is_named(restored: Restored) -> None:
    claim = restored.record.participants[0]
    key = delta_key(RUN, claim.learner, 0, 0, claim.payload.sha256)
    restored.pipeline.store.delete(key)

    restored.refused(key)


def test_a_payload_announced_twice_is_vouched_for_by_the_envelope_in_the_stream(
    ledger: Ledger, sqlite_url: str
) -> None:
    """Its counters were corrected: the object keeps the first envelope, the stream has both."""
    pipeline = Pipeline(ledger)
    delta = arrays(1)
    first = pipeline.post("ada", delta, steps=0)
    second = pipeline.message("ada", pipeline.payload(delta))
    from deltapost.serialization.messages import sign_message
    from fixtures.pipeline import learner_signing_key

    accepted = sign_message(second, learner_signing_key("ada"))
    pipeline.append(accepted)
    for number, learner in enumerate(LEARNERS[1:]):
        pipeline.post(learner, arrays(number + 2))

    class Killed(BaseException):
        pass

    def reach(point: str) -> None:
        if point == "attest.before_put":
            raise Killed

    with pytest.raises(Killed):
        pipeline.run_to(1, pipeline.worker(reach=reach))
    assert pipeline.record(1).verdicts()[first.sha256] == "zero_steps"
    pipeline.ledger = open_ledger(sqlite_url)
    migrate(pipeline.ledger)
    runs.admit(pipeline.ledger, pipeline.plan.manifest)

    pipeline.run_to(1)

    assert hashlib.sha256(accepted.frame).digest() in pipeline.record(1).verdicts()
    assert pipeline.store.head(attestation_key(RUN, 0, 1)).size > 0
