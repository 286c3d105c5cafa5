"""Garbage: what no record names goes once its round is decided; what a record names never does."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deltapost.audit.history import BucketHistory, objects_of
from deltapost.errors import AccessDenied, SignatureRefused, StoreUnavailable
from deltapost.ledger import runs
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.points import GARBAGE_POINTS, Reach, nothing
from deltapost.serialization.names import (
    anchor_key,
    attestation_key,
    delta_key,
    learner_key,
    outer_key,
    parse_key,
    record_key,
)
from deltapost.serialization.records import Attestation, Record
from deltapost.stores import Blob
from deltapost.stores.memory import MemoryStore
from deltapost_aggregator.garbage import Judge, sweep
from deltapost_aggregator.housekeeping import Housekeeper, Housekeeping
from fixtures.histories import FRAGMENTS, ROUNDS, ScriptedRun, copy, restore
from fixtures.pipeline import RUN, Pipeline, arrays, learner_signing_key


class Killed(BaseException):
    """Stands for SIGKILL."""


class Faulty(MemoryStore):
    """A store whose reads of some keys fail."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[str], Exception | None] = lambda _key: None

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        failure = self.fails(key)
        if failure is not None:
            raise failure
        return super().get(key, offset=offset, length=length)


@pytest.fixture
def sqlite_ledger(migrated_sqlite_url: str) -> Iterator[Ledger]:
    ledger = open_ledger(migrated_sqlite_url)
    yield ledger
    ledger.close()


@pytest.fixture
def played(sqlite_ledger: Ledger) -> ScriptedRun:
    scripted = ScriptedRun(sqlite_ledger, store=Faulty())
    scripted.play()
    return scripted


def keys(pipeline: Pipeline) -> set[str]:
    return {info.key for info in pipeline.store.list("")}


def referenced(pipeline: Pipeline) -> set[str]:
    """Everything that some record in the bucket names."""
    found: set[str] = set()
    for fragment in range(FRAGMENTS):
        for data in pipeline.records(fragment):
            found |= objects_of(Record.from_bytes(data))
    return found


def housekeeper(pipeline: Pipeline, reach: Reach = nothing, **settings: Any) -> Housekeeper:
    return Housekeeper(pipeline.context(reach, **settings))


def one_pass(pipeline: Pipeline, reach: Reach = nothing, **settings: Any) -> int:
    """A whole pass of a freshly started process; returns how many objects went."""
    keeper = housekeeper(pipeline, reach, **settings)
    gone = keeper.step() or 0
    while keeper._units:
        gone += keeper.step() or 0
    return gone


def whole_sweep(pipeline: Pipeline, **how: Any) -> Any:
    history = BucketHistory.open(pipeline.store, RUN)
    return sweep(history, Judge(history), list(pipeline.store.list(f"{RUN}/")), **how)


def orphan(pipeline: Pipeline, base: int, seed: int = 77, learner: str = "ada") -> str:
    """A payload that its learner uploaded and never announced."""
    payload = pipeline.payload(arrays(seed))
    pipeline.put(pipeline.message(learner, payload, version=base), payload)
    return delta_key(RUN, learner, 0, base, hashlib.sha256(payload).digest())


def test_after_a_pass_the_bucket_holds_what_records_name_and_what_is_still_open(played: ScriptedRun) -> None:
    # Given refused, late and conflicting payloads, orphans of a killed learner and of a killed close
    pipeline = played.pipeline
    late, still_open = orphan(pipeline, 1), orphan(pipeline, ROUNDS)
    losing = [anchor_key(RUN, 0, 1, bytes(32)), outer_key(RUN, 1, 0, b"x" * 32)]
    for key in losing:
        pipeline.store.put(key, b"of a seal that lost")
    before = keys(pipeline)
    ahead = {
        key
        for key in before
        if (parsed := parse_key(key)) and parsed.area == "deltas" and (parsed.version or 0) >= ROUNDS
    }
    unnamed = (
        {
            key
            for key in before
            if (parsed := parse_key(key)) and parsed.area in ("deltas", "anchors", "updates", "outer")
        }
        - referenced(pipeline)
        - ahead
    )

    gone = one_pass(pipeline)

    assert still_open in ahead
    assert {late, *losing} < unnamed
    assert len(unnamed) > 12
    assert keys(pipeline) == before - unnamed
    assert gone == len(unnamed)
    assert one_pass(pipeline) == 0


def test_the_run_goes_on_over_a_collected_bucket_and_can_be_rebuilt_from_it(played: ScriptedRun) -> None:
    from deltapost.audit.rebuild import rebuild

    pipeline = played.pipeline
    one_pass(pipeline)
    restore(pipeline.ledger, {})

    assert rebuild(pipeline.ledger, pipeline.store, RUN).stopped is None
    played.start()
    played.play(range(ROUNDS, ROUNDS + 1))

    assert referenced(pipeline) <= keys(pipeline)


def test_an_orphan_may_still_become_a_contribution_as_long_as_its_round_is_open(played: ScriptedRun) -> None:
    """A learner that was silent between its upload and its envelope finds its payload where it left it."""
    pipeline = played.pipeline
    delta = arrays(78)
    payload = pipeline.payload(delta)
    pipeline.put(pipeline.message("ada", payload, version=ROUNDS), payload)
    one_pass(pipeline)

    pipeline.post("ada", delta, version=ROUNDS)
    for learner in ("bob", "cyd"):
        pipeline.post(learner, arrays(79), version=ROUNDS)
    played.step_to(ROUNDS + 1, 0)

    assert "ada" in [participant.learner for participant in pipeline.record(ROUNDS + 1).participants]


def test_what_no_name_of_ours_fits_is_reported_and_never_touched(played: ScriptedRun) -> None:
    pipeline = played.pipeline
    strange = [
        f"{RUN}/anchors/0000/0000000000/readme.txt",
        f"{RUN}/deltas/ada/0000/0000000001/{'A' * 64}",
        f"{RUN}/notes/of/an/operator",
        anchor_key(RUN, FRAGMENTS, 0, bytes(32)),
    ]
    for key in strange:
        pipeline.store.put(key, b"somebody's")

    swept = whole_sweep(pipeline)

    assert sorted(swept.foreign) == sorted(strange)
    assert set(strange) <= keys(pipeline)


def test_a_round_whose_record_nobody_attested_decides_nothing(played: ScriptedRun) -> None:
    """Whoever can write to the bucket could have put it there, to have the true inputs deleted."""
    pipeline = played.pipeline
    payload = orphan(pipeline, ROUNDS)
    forged = pipeline.record(ROUNDS).model_copy(
        update={"version": ROUNDS + 1, "previous": pipeline.record(ROUNDS).sha256}
    )
    pipeline.store.put(record_key(RUN, 0, ROUNDS + 1), forged.to_bytes())

    whole_sweep(pipeline)
    assert payload in keys(pipeline)

    observations = Attestation.from_bytes(pipeline.store.get(attestation_key(RUN, 0, 1)).data)
    made = Attestation.make(
        forged.sha256, observations.verify(pipeline.record(1).sha256, None), learner_signing_key("mallory")
    )
    pipeline.store.put(attestation_key(RUN, 0, ROUNDS + 1), made.to_bytes())
    with pytest.raises(SignatureRefused):
        whole_sweep(pipeline)
    assert payload in keys(pipeline)


def test_a_bucket_that_cannot_be_read_stops_it(played: ScriptedRun) -> None:
    pipeline = played.pipeline
    assert isinstance(pipeline.store, Faulty)
    before = keys(pipeline)
    for failure in (StoreUnavailable("down"), AccessDenied("not there, or not allowed")):
        for area in ("records", "attestations"):
            pipeline.store.fails = lambda key, area=area, failure=failure: (  # type: ignore[misc]
                failure if f"/{area}/" in key else None
            )

            with pytest.raises(type(failure)):
                whole_sweep(pipeline)

            assert keys(pipeline) == before


def test_a_pass_covers_the_fragments_that_this_process_owns(played: ScriptedRun) -> None:
    pipeline = played.pipeline
    played.workers[1].stop()

    one_pass(pipeline)

    left = {(parse_key(key) or parse_key(record_key(RUN, 0, 1))).fragment for key in _garbage(pipeline)}  # type: ignore[union-attr]
    assert left == {1}
    assert one_pass(pipeline, aggregator_name="somebody-else") == 0


def _garbage(pipeline: Pipeline) -> set[str]:
    swept = {}
    history = BucketHistory.open(pipeline.store, RUN)
    judge = Judge(history)
    for info in pipeline.store.list(f"{RUN}/"):
        swept[info.key] = judge.judge(info.key)
    return {key for key, judgement in swept.items() if judgement == "unnamed"}


def test_where_the_policy_forbids_it_the_bucket_stays_as_it_is_and_rounds_go_on(
    played: ScriptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = played.pipeline
    before = keys(pipeline)

    def refuse(_key: str) -> None:
        raise AccessDenied("no DELETE")

    monkeypatch.setattr(pipeline.store, "delete", refuse)

    assert one_pass(pipeline) == 0
    assert keys(pipeline) == before


@pytest.mark.parametrize("point", GARBAGE_POINTS)
@pytest.mark.parametrize("time", [1, 2])
def test_killed_at_a_step_and_started_again_it_ends_the_same(
    played: ScriptedRun, point: str, time: int
) -> None:
    pipeline, left = played.pipeline, [time]
    expected = keys(pipeline) - _garbage(pipeline)

    def reach(here: str) -> None:
        if here == point:
            left[0] -= 1
            if not left[0]:
                raise Killed

    with pytest.raises(Killed):
        one_pass(pipeline, reach)
    assert referenced(pipeline) <= keys(pipeline)
    one_pass(pipeline)

    assert keys(pipeline) == expected


@pytest.mark.parametrize("point", GARBAGE_POINTS)
def test_stopped_at_a_step_while_the_ledger_is_restored_and_another_owner_goes_on_it_takes_nothing_referenced(
    ledger: Ledger, point: str
) -> None:
    # Given an owner that is stopped between the check and the delete, and a backup from before the rounds
    scripted = ScriptedRun(ledger)
    pipeline = scripted.pipeline
    backup = copy(ledger)
    scripted.play()
    orphan(pipeline, ROUNDS)
    stopped: list[str] = []

    def reach(here: str) -> None:
        if here != point or len(stopped) >= 2:
            return
        stopped.append(here)
        # When the ledger is restored underneath, and another owner adopts, reads again and commits further
        restore(ledger, backup if len(stopped) == 1 else {})
        runs.admit(ledger, pipeline.plan.manifest)
        scripted.start()
        head = len(pipeline.records())
        for fragment in range(FRAGMENTS):
            scripted.step_to(head, fragment)
        scripted.play(range(head, head + 1))

    # And the stopped one goes on
    one_pass(pipeline, reach)

    # Then every object that a record names is there
    assert len(stopped) == 2
    assert pipeline.head(0) == ROUNDS + 2
    assert referenced(pipeline) <= keys(pipeline)
    whole_sweep(pipeline)
    assert referenced(pipeline) <= keys(pipeline)
    assert learner_key(RUN, "ada") in keys(pipeline)


def test_a_finished_run_is_kept_house_for_no_longer(sqlite_ledger: Ledger) -> None:
    pipeline = Pipeline(sqlite_ledger)
    context = pipeline.context()
    housekeeping = Housekeeping(context.services)
    housekeeping.serve(context)
    housekeeping.step(0.0)

    context.finished = True
    housekeeping.step(0.0)

    remembered = weakref.ref(context)
    del context
    gc.collect()
    assert remembered() is None
