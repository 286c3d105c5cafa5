"""A seal that cannot be closed is followed by one without what is lost, or the round opens again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from sqlalchemy import select

from deltapost.algorithms.closing import DiLoCoAggregator
from deltapost.errors import LeaseLost, NonFinite, ObjectMissing, StoreUnavailable
from deltapost.ledger import leases, runs, seals
from deltapost.ledger.engine import Ledger
from deltapost.ledger.tables import FragmentRow, SealRow
from deltapost.serialization.messages import SignedMessage
from deltapost.serialization.names import delta_key, record_key
from deltapost.stores import Blob
from deltapost.stores.memory import MemoryStore
from fixtures.pipeline import LEARNERS, RUN, Arrays, Pipeline, arrays, plain_config


class Stopped(BaseException):
    """Stands for SIGKILL."""


def payload_key(pipeline: Pipeline, signed: SignedMessage) -> str:
    message = pipeline.row(signed)
    assert message.payload_sha256 is not None
    return delta_key(RUN, message.learner, 0, message.version, message.payload_sha256)


def sealed_and_killed(pipeline: Pipeline, deltas: list[Arrays]) -> list[SignedMessage]:
    """A quorum of posts, read and sealed by an owner that dies before it computes anything."""
    posted = [pipeline.post(name, delta) for name, delta in zip(LEARNERS, deltas, strict=True)]

    def reach(point: str) -> None:
        if point == "seal.tx_done":
            raise Stopped

    worker = pipeline.worker(reach=reach)
    with pytest.raises(Stopped):
        pipeline.settle(worker)
    return posted


def honest() -> list[Arrays]:
    return [arrays(seed + 1) for seed in range(len(LEARNERS))]


def generations(ledger: Ledger) -> list[tuple[int, int, bool]]:
    with ledger.read() as session:
        rows = session.scalars(select(SealRow).order_by(SealRow.version, SealRow.generation)).all()
    return [(row.version, row.generation, row.withdrawn) for row in rows]


def test_a_payload_lost_after_the_seal_is_left_out_by_the_next_generation(ledger: Ledger) -> None:
    # Given a sealed round, one payload of which is gone
    pipeline = Pipeline(ledger)
    ada, bob, cyd = sealed_and_killed(pipeline, honest())
    pipeline.store.delete(payload_key(pipeline, bob))

    # When another process goes on
    pipeline.run_to(1)

    # Then the record is the next generation's, says who was left out and why, and is marked degraded
    record = pipeline.record(1)
    assert record.generation == 1
    assert [participant.learner for participant in record.participants] == ["ada", "cyd"]
    assert record.verdicts() == {ada.sha256: "accepted", bob.sha256: "missing", cyd.sha256: "accepted"}
    assert record.degraded
    assert generations(ledger) == [(1, 0, False), (1, 1, False)]
    assert pipeline.verdict(bob) == "missing"


def test_a_payload_with_other_bytes_after_the_seal_is_corrupt(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    _, bob, _ = sealed_and_killed(pipeline, honest())
    key = payload_key(pipeline, bob)
    pipeline.store.delete(key)
    pipeline.store.put(key, b"not what was sealed")

    pipeline.run_to(1)

    assert pipeline.record(1).verdicts()[bob.sha256] == "corrupt"


def test_an_object_that_only_reappears_a_moment_later_is_not_lost(ledger: Ledger) -> None:
    # Given a store whose answer about one payload is "no such object" for half a second
    pipeline = Pipeline(ledger)
    _, bob, _ = sealed_and_killed(pipeline, honest())
    key = payload_key(pipeline, bob)
    data = pipeline.store.get(key).data
    pipeline.store.delete(key)
    sleep = pipeline.clock.sleep

    def comes_back(seconds: float) -> None:
        pipeline.store.put(key, data)
        sleep(seconds)

    pipeline.clock.sleep = comes_back  # type: ignore[method-assign]

    # When the round is closed
    pipeline.run_to(1)

    # Then nobody is left out
    assert pipeline.record(1).generation == 0
    assert len(pipeline.record(1).participants) == 3


class TakesTurns(MemoryStore):
    """Hides one object before a moment, and another from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = ""

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        if key == self.hidden:
            raise ObjectMissing(key)
        return super().get(key, offset=offset, length=length)


def test_two_objects_that_are_missing_at_one_look_each_are_not_lost(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a store that hides bob's payload at the first look, and cyd's a moment later
    store = TakesTurns()
    pipeline = Pipeline(ledger, store=store)
    _, bob, cyd = sealed_and_killed(pipeline, honest())
    later = payload_key(pipeline, cyd)
    store.hidden = payload_key(pipeline, bob)
    monkeypatch.setattr(pipeline.clock, "sleep", lambda _seconds: setattr(store, "hidden", later))
    worker = pipeline.worker(payload_cache_bytes=0)
    with pytest.raises(ObjectMissing):
        worker.step()

    # When it shows them again, then nobody is left out
    store.hidden = ""
    pipeline.run_to(1, worker)
    assert len(pipeline.record(1).participants) == 3


class OneObjectFails(MemoryStore):
    """Answers for every object but one."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = ""
        self.full = False

    def put(self, key: str, data: bytes, *, metadata: Mapping[str, str] | None = None) -> bool:
        if self.full:
            raise StoreUnavailable(f"{key}: 503")
        return super().put(key, data, metadata=metadata)

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        if key == self.failing:
            raise StoreUnavailable(f"{key}: 500")
        return super().get(key, offset=offset, length=length)


def test_a_payload_that_fails_for_a_minute_while_others_are_served_is_left_out(ledger: Ledger) -> None:
    store = OneObjectFails()
    pipeline = Pipeline(ledger, store=store)
    _, bob, _ = sealed_and_killed(pipeline, honest())
    store.failing = payload_key(pipeline, bob)
    worker = pipeline.worker()

    # For a minute the round waits and says why
    with pytest.raises(StoreUnavailable):
        worker.step()
    pipeline.clock.sleep(59.0)
    with pytest.raises(StoreUnavailable):
        worker.step()
    with ledger.read() as session:
        assert "500" in (session.scalars(select(FragmentRow.waiting_reason)).one() or "")

    # After it the next generation leaves it out
    pipeline.clock.sleep(2.0)
    pipeline.run_to(1, worker)
    assert pipeline.record(1).verdicts()[bob.sha256] == "missing"


def test_a_payload_that_was_read_in_between_has_not_failed_for_a_minute(ledger: Ledger) -> None:
    # Given a payload that failed once and was read after that, while nothing could be written
    store = OneObjectFails()
    pipeline = Pipeline(ledger, store=store)
    _, bob, _ = sealed_and_killed(pipeline, honest())
    worker = pipeline.worker()
    store.failing = payload_key(pipeline, bob)
    with pytest.raises(StoreUnavailable):
        worker.step()
    store.failing, store.full = "", True
    with pytest.raises(StoreUnavailable, match="503"):
        worker.step()

    # When it fails once more, a minute after the first time
    pipeline.clock.sleep(61.0)
    store.failing, store.full = payload_key(pipeline, bob), False
    with pytest.raises(StoreUnavailable, match="500"):
        worker.step()

    # Then that is the second failure of a moment, and nobody is left out
    store.failing = ""
    pipeline.run_to(1, worker)
    assert len(pipeline.record(1).participants) == 3


def test_below_the_minimum_the_round_opens_again_and_takes_who_comes_back(ledger: Ledger) -> None:
    # Given a sealed round that needs three, and one payload gone
    pipeline = Pipeline(ledger, config=plain_config(min_quorum=3))
    posted = sealed_and_killed(pipeline, honest())
    key = payload_key(pipeline, posted[1])
    data = pipeline.store.get(key).data
    pipeline.store.delete(key)
    worker = pipeline.worker()

    # When it is found out, the seal is withdrawn and the stream read again
    pipeline.settle(worker)
    assert pipeline.head() == 0
    assert generations(ledger) == [(1, 0, True)]
    assert [pipeline.verdict(signed) for signed in posted] == ["accepted", "missing", "accepted"]

    # Then the learner's re-post, with its payload, completes the round
    pipeline.store.put(key, data)
    pipeline.clock.sleep(5.0)
    pipeline.append(posted[1])
    pipeline.run_to(1, worker)
    record = pipeline.record(1)
    assert record.generation == 1
    assert record.verdicts() == {signed.sha256: "accepted" for signed in posted}
    assert [pipeline.row(signed).deliveries for signed in posted] == [1, 2, 1]


def refuse_larger_than(monkeypatch: pytest.MonkeyPatch, norm: float) -> None:
    """Stands for an outer step that overflows: rounds with a delta above `norm` have no finite result."""
    close = DiLoCoAggregator.close_round

    def refusing(self: DiLoCoAggregator, state: object, contributions: object) -> object:
        result = close(self, state, contributions)  # type: ignore[arg-type]
        if any(participant.norm > norm for participant in result.participants):
            raise NonFinite("the master of 'a.weight' is not finite")
        return result

    monkeypatch.setattr(DiLoCoAggregator, "close_round", refusing)


def test_a_result_that_is_not_finite_leaves_out_the_largest_norm(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a merge that overflows as long as bob's delta, the largest, is in it
    pipeline = Pipeline(ledger)
    deltas = honest()
    deltas[1] = {name: 50 * array for name, array in deltas[1].items()}
    refuse_larger_than(monkeypatch, 100.0)
    posted = sealed_and_killed(pipeline, deltas)

    # When the round is closed
    pipeline.run_to(1)

    # Then the next generation names bob's as not finite, and merges the others
    record = pipeline.record(1)
    assert record.generation == 1
    assert record.verdicts()[posted[1].sha256] == "non_finite"
    assert [participant.learner for participant in record.participants] == ["ada", "cyd"]


def test_what_was_left_out_as_not_finite_is_not_sealed_again_for_ever(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a round that cannot do without the contribution that makes it overflow
    pipeline = Pipeline(ledger, config=plain_config(min_quorum=3))
    deltas = honest()
    deltas[1] = {name: 50 * array for name, array in deltas[1].items()}
    refuse_larger_than(monkeypatch, 100.0)
    posted = sealed_and_killed(pipeline, deltas)
    worker = pipeline.worker()

    # When it opens again and the same envelopes are read again
    pipeline.settle(worker)
    pipeline.append(posted[1])
    pipeline.settle(worker)

    # Then the verdict stays, the slot is free, and a smaller delta completes the round
    assert pipeline.verdict(posted[1]) == "non_finite"
    assert generations(ledger) == [(1, 0, True)]
    smaller = pipeline.post("bob", arrays(77))
    pipeline.run_to(1, worker)
    assert pipeline.record(1).verdicts()[smaller.sha256] == "accepted"
    assert pipeline.record(1).verdicts()[posted[1].sha256] == "non_finite"


def test_two_that_were_left_out_as_not_finite_do_not_take_turns_for_ever(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a round of two or more, and two contributions each of which makes it overflow
    pipeline = Pipeline(ledger, config=plain_config(quorum_size=2, min_quorum=2))
    deltas = honest()
    deltas[0] = {name: 50 * array for name, array in deltas[0].items()}
    deltas[1] = {name: 60 * array for name, array in deltas[1].items()}
    refuse_larger_than(monkeypatch, 100.0)
    posted = [pipeline.post(name, delta) for name, delta in zip(LEARNERS, deltas, strict=True)]
    worker = pipeline.worker()

    # When the round was opened again because of the one, and then because of the other
    pipeline.settle(worker)

    # Then both verdicts stay, and the round closes with the next that can be merged
    assert [pipeline.verdict(signed) for signed in posted] == ["non_finite", "non_finite", "accepted"]
    assert generations(ledger) == [(1, 0, True), (1, 1, True)]
    pipeline.post("bob", arrays(77))
    pipeline.run_to(1, worker)
    assert [participant.learner for participant in pipeline.record(1).participants] == ["bob", "cyd"]


def test_the_record_of_an_older_generation_may_win_and_is_adopted(ledger: Ledger) -> None:
    # Given an owner of generation 0 that is stopped before its record, and a payload lost meanwhile
    pipeline = Pipeline(ledger)
    posted = [pipeline.post(name, delta) for name, delta in zip(LEARNERS, honest(), strict=True)]
    stopped: list[str] = []
    other: list[int] = []

    def reach(point: str) -> None:
        if point != "record.before_put" or stopped:
            return
        stopped.append(point)
        pipeline.store.delete(payload_key(pipeline, posted[1]))

        def second(here: str) -> None:
            if here == "seal.generation_tx":
                raise Stopped

        with pytest.raises(Stopped):
            pipeline.settle(pipeline.worker(reach=second))
        other.append(1)

    # When the older owner wakes up and writes its record first
    worker = pipeline.worker(reach=reach)
    for _ in itertools.repeat(None, 6):
        worker.step()
    assert other == [1]
    assert generations(ledger) == [(1, 0, False), (1, 1, False)]
    record = pipeline.record(1)

    # Then that record decides, and the ledger says what it says
    pipeline.run_to(1)
    assert record.generation == 0
    assert pipeline.verdict(posted[1]) == "accepted"
    assert pipeline.store.get(record_key(RUN, 0, 1)).data == record.to_bytes()


def test_a_generation_is_only_added_to_the_seal_in_force(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    _, bob, _ = sealed_and_killed(pipeline, honest())
    lease = leases.acquire(ledger, RUN, 0, "tester", take_own=True)
    assert lease is not None
    standing = runs.standing(ledger, RUN, 0)
    sealed = seals.pending(ledger, RUN, 0, 0)
    assert sealed is not None
    left_out = {bob.sha256: "missing"}
    kwargs = {"quorum_size": 3, "min_quorum": 1}
    seals.leave_out(ledger, lease, standing, sealed, left_out, **kwargs)  # type: ignore[arg-type]

    with pytest.raises(LeaseLost, match="not in force"):
        seals.leave_out(ledger, lease, standing, sealed, left_out, **kwargs)  # type: ignore[arg-type]


def test_a_record_whose_input_is_lost_before_its_attestation_is_still_adopted(ledger: Ledger) -> None:
    # Given an owner that died between its record and the attestation, and a payload lost meanwhile
    pipeline = Pipeline(ledger)
    posted = [pipeline.post(name, delta) for name, delta in zip(LEARNERS, honest(), strict=True)]

    def reach(point: str) -> None:
        if point == "record.put_sent":
            raise Stopped

    with pytest.raises(Stopped):
        pipeline.settle(pipeline.worker(reach=reach))
    pipeline.store.delete(payload_key(pipeline, posted[1]))

    # When another takes over
    pipeline.run_to(1)

    # Then it attests what the ledger says an owner computed, and the run goes on
    assert pipeline.record(1).verdicts() == {signed.sha256: "accepted" for signed in posted}
    for number, learner in enumerate(LEARNERS):
        pipeline.post(learner, arrays(50 + number), version=1)
    pipeline.run_to(2)
