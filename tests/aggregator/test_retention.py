"""Retention: what a kept round needs stays, the bucket says what was let go, and everybody copes with it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from deltapost.adapters.native import NativeBackend
from deltapost.algorithms.retention import Retain, worth_releasing
from deltapost.audit.history import BucketHistory, objects_of
from deltapost.audit.rebuild import rebuild
from deltapost.errors import ConfigurationError, HistoryError, SignatureRefused
from deltapost.learner import following
from deltapost.learner.following import Follower
from deltapost.learner.history import History
from deltapost.ledger import upkeep
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.runs import Standing
from deltapost.ledger.tables import RoundRow
from deltapost.serialization.names import anchor_key, outer_key, parse_key, record_key, retention_key
from deltapost.serialization.retention import RetentionNote
from deltapost_aggregator.computing import RoundComputer
from fixtures.pipeline import RUN, Pipeline, arrays, learner_signing_key, plain_config

ROUNDS = 8
KEPT = 3
THROUGH = ROUNDS - KEPT


@pytest.fixture
def sqlite_ledger(migrated_sqlite_url: str) -> Iterator[Ledger]:
    ledger = open_ledger(migrated_sqlite_url)
    yield ledger
    ledger.close()


def committed(ledger: Ledger, rounds: int = ROUNDS) -> Pipeline:
    """A run of one learner with updates, anchors, outer states, and one refused payload a round."""
    pipeline = Pipeline(
        ledger, config=plain_config(commit_dtype="F4", quorum_size=1, min_quorum=1), learners=("ada",)
    )
    worker = pipeline.worker()
    for version in range(rounds):
        pipeline.post("ada", arrays(500 + version), version=version, steps=0)
        pipeline.post("ada", arrays(version), version=version)
        pipeline.run_to(version + 1, worker)
    return pipeline


def one_pass(pipeline: Pipeline, **how: object) -> int:
    from deltapost_aggregator.housekeeping import Housekeeper

    reach = how.pop("reach", lambda _point: None)
    keeper = Housekeeper(pipeline.context(reach, **how))  # type: ignore[arg-type]
    gone = keeper.step() or 0
    while keeper._units:
        gone += keeper.step() or 0
    return gone


def left(pipeline: Pipeline, area: str) -> list[int]:
    """The base versions that have an object of this area."""
    parsed = (parse_key(info.key) for info in pipeline.store.list(RUN))
    return [key.version for key in parsed if key is not None and key.area == area and key.version is not None]


def released(pipeline: Pipeline) -> int:
    found = BucketHistory.open(pipeline.store, RUN).released(0)
    return found.through if found is not None else 0


def test_a_span_goes_and_what_the_kept_rounds_need_stays(sqlite_ledger: Ledger) -> None:
    pipeline = committed(sqlite_ledger)

    one_pass(pipeline, retain=f"rounds={KEPT}")

    # Rounds 6 to 8 have their deltas and updates; version 5, from which the first of them starts, its state
    assert left(pipeline, "deltas") == left(pipeline, "updates") == [5, 6, 7]
    assert left(pipeline, "anchors") == left(pipeline, "outer") == [4, 5, 6, 7]
    assert left(pipeline, "records") == left(pipeline, "attestations") == list(range(1, ROUNDS + 1))
    assert left(pipeline, "retention") == [THROUGH]


def test_every_kept_round_can_be_run_again(sqlite_ledger: Ledger) -> None:
    pipeline = committed(sqlite_ledger)
    one_pass(pipeline, retain=f"rounds={KEPT}")
    context = pipeline.context()

    for version in range(THROUGH + 1, ROUNDS + 1):
        record = pipeline.record(version)
        before = Standing(version - 1, record.previous, "", "0-0", 0)
        computer = RoundComputer(context, 0, context.services.payloads.part(RUN, 0))
        assert computer.compute(before, record.seal_content()).record == record


def test_nothing_is_let_go_before_the_signed_note_says_so_and_a_killed_pass_is_ended_by_the_next(
    sqlite_ledger: Ledger,
) -> None:
    pipeline = committed(sqlite_ledger)

    class Killed(BaseException):
        pass

    deletes = []

    def reach(point: str) -> None:
        if point == "gc.checked":
            assert released(pipeline) == THROUGH
            deletes.append(point)
            if len(deletes) == 7:
                raise Killed

    with pytest.raises(Killed):
        one_pass(pipeline, reach=reach, retain=f"rounds={KEPT}")
    assert len(left(pipeline, "deltas")) > KEPT

    one_pass(pipeline)  # without a policy of its own: the note is enough

    assert left(pipeline, "deltas") == [5, 6, 7]
    assert left(pipeline, "outer") == [4, 5, 6, 7]


def test_a_fragment_that_the_ledger_has_just_forgotten_lets_nothing_go_and_stops_no_pass(
    sqlite_ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = committed(sqlite_ledger)
    monkeypatch.setattr(upkeep, "owned", lambda *_: [0, 1])

    one_pass(pipeline, retain=f"rounds={KEPT}")

    assert upkeep.releasable(sqlite_ledger, RUN, 1, Retain(rounds=1)) == (0, 0)
    assert released(pipeline) == THROUGH


def test_by_default_everything_that_a_record_names_is_kept(sqlite_ledger: Ledger) -> None:
    pipeline = committed(sqlite_ledger, 3)

    one_pass(pipeline)

    named = [key for version in range(1, 4) for key in objects_of(pipeline.record(version))]
    assert {info.key for info in pipeline.store.list(RUN)} >= set(named)
    assert left(pipeline, "retention") == []


@pytest.mark.parametrize("lie", ["another key", "another record", "another fragment's key", "no document"])
def test_a_note_that_is_not_the_runs_lets_nothing_go(sqlite_ledger: Ledger, lie: str) -> None:
    from deltapost.errors import MalformedMessage
    from deltapost_aggregator import retention
    from fixtures.pipeline import AGGREGATOR_KEY

    pipeline = committed(sqlite_ledger, 5)
    history = BucketHistory.open(pipeline.store, RUN)
    true = retention.planned(sqlite_ledger, history, 0, Retain(rounds=1), at_once=True)
    assert true is not None
    key = AGGREGATOR_KEY
    if lie == "another key":
        key = learner_signing_key("mallory")
    elif lie == "another record":
        true = true.model_copy(update={"record": bytes(32)})
    elif lie == "another fragment's key":
        true = true.model_copy(update={"through": 2, "record": pipeline.record(2).sha256})
    data = RetentionNote.make(true, key).to_bytes() if lie != "no document" else b"\x80"
    pipeline.store.put(retention_key(RUN, 0, 4), data)
    before = {info.key for info in pipeline.store.list("")}

    with pytest.raises((SignatureRefused, HistoryError, MalformedMessage), match=retention_key(RUN, 0, 4)):
        one_pass(pipeline)

    assert {info.key for info in pipeline.store.list("")} == before


def test_days_are_counted_by_the_attestations_times_against_the_databases_clock(ledger: Ledger) -> None:
    committed(ledger, 5)
    with ledger.write() as session:
        session.execute(
            update(RoundRow)
            .where(RoundRow.version <= 3)
            .values(committed_at=ledger.now(session) - timedelta(days=2))
        )

    assert upkeep.releasable(ledger, RUN, 0, Retain(days=1)) == (5, 3)
    assert upkeep.releasable(ledger, RUN, 0, Retain(days=3)) == (5, 0)
    with ledger.write() as session:
        session.execute(update(RoundRow).values(committed_at=ledger.now(session) - timedelta(days=9)))
    # However old: the newest round stays.
    assert upkeep.releasable(ledger, RUN, 0, Retain(days=1)) == (5, 4)
    assert upkeep.releasable(ledger, RUN, 0, Retain(rounds=5)) == (5, 0)
    assert upkeep.releasable(ledger, RUN, 0, Retain(rounds=1)) == (5, 4)


def test_a_rebuild_after_it_has_every_round(sqlite_ledger: Ledger) -> None:
    from fixtures.histories import history, restore

    pipeline = committed(sqlite_ledger)
    one_pass(pipeline, retain="rounds=1")
    before = history(sqlite_ledger)
    restore(sqlite_ledger, {})

    assert rebuild(sqlite_ledger, pipeline.store, RUN).stopped is None
    assert history(sqlite_ledger) == before


def follower(pipeline: Pipeline, directory: Path) -> Follower:
    seen = History(directory / "seen", manifest_sha256=pipeline.plan.manifest_sha256, fragments=1)
    return Follower(pipeline.store, pipeline.plan, seen, NativeBackend(), aggregator_key=None)


def test_a_learner_behind_what_was_let_go_catches_up_by_the_anchor(
    sqlite_ledger: Ledger, tmp_path: Path
) -> None:
    # Given a learner that follows by updates and stopped at version 2
    pipeline = committed(sqlite_ledger, 2)
    learner = follower(pipeline, tmp_path)
    learner.advance(learner.catch_up(0))
    worker = pipeline.worker()
    for version in range(2, ROUNDS):
        pipeline.post("ada", arrays(version), version=version)
        pipeline.run_to(version + 1, worker)

    # When the updates and anchors between are let go
    one_pass(pipeline, retain="rounds=1")
    commit = learner.next_commit(0)

    # Then it gets the newest anchor, with every record on the way
    assert commit is not None
    assert commit.version == ROUNDS
    assert [record.version for record in commit.records] == list(range(3, ROUNDS + 1))


def test_a_learner_further_behind_than_one_walk_passes_over_the_anchors_that_are_gone(
    sqlite_ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LONGEST_WALK", 3)
    pipeline = committed(sqlite_ledger, 1)
    learner = follower(pipeline, tmp_path)
    learner.advance(learner.catch_up(0))
    worker = pipeline.worker()
    newest = 9  # the walks end at versions 4 and 7, and then here
    for version in range(1, newest):
        pipeline.post("ada", arrays(1), version=version)
        pipeline.run_to(version + 1, worker)
    one_pass(pipeline, retain="rounds=1")

    commit = learner.next_commit(0)

    assert commit is not None
    assert commit.version == newest


def test_an_anchor_that_is_let_go_while_a_learner_joins_leads_it_to_the_next(
    sqlite_ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = committed(sqlite_ledger, 2)
    record = pipeline.record(2)
    stale = anchor_key(RUN, 0, 1, record.anchor.sha256)
    read = pipeline.store.get
    moved: list[str] = []

    def get(key: str, **how: int) -> object:
        if key == stale and not moved:  # two more rounds and a pass happen just before it reads
            moved.append(key)
            worker = pipeline.worker()
            for version in (2, 3):
                pipeline.post("ada", arrays(version), version=version)
                pipeline.run_to(version + 1, worker)
            pipeline.store.delete(stale)
        return read(key, **how)

    monkeypatch.setattr(pipeline.store, "get", get)

    assert follower(pipeline, tmp_path).catch_up(0).version == 4


@pytest.mark.parametrize(
    "text", ["", "rounds", "rounds=0", "rounds=-1", "days=0", "days=0.0", "weeks=3", "K"]
)
def test_a_policy_that_says_nothing_is_refused_with_the_two_forms(text: str) -> None:
    with pytest.raises(ConfigurationError, match="rounds=K or days=D"):
        Retain.parse(text)


def test_policies_are_read_and_written_in_one_form() -> None:
    assert [str(Retain.parse(text)) for text in ("rounds=7", "days=1.5", "days=30")] == [
        "rounds=7",
        "days=1.5",
        "days=30",
    ]


def test_rounds_go_in_spans_of_a_quarter_of_what_is_kept() -> None:
    assert not worth_releasing(head=124, before=0, through=24)
    assert worth_releasing(head=125, before=0, through=25)
    assert worth_releasing(head=2, before=0, through=1)
    assert not worth_releasing(head=9, before=8, through=8)


def test_the_state_of_the_newest_version_stays_whatever_the_policy(sqlite_ledger: Ledger) -> None:
    pipeline = committed(sqlite_ledger, 4)

    one_pass(pipeline, retain="rounds=1")

    newest = pipeline.record(4)
    assert pipeline.store.head(anchor_key(RUN, 0, 3, newest.anchor.sha256)).size == newest.anchor.size
    assert pipeline.store.head(outer_key(RUN, 0, 3, newest.outer.sha256)).size == newest.outer.size
    pipeline.post("ada", arrays(4), version=4)
    pipeline.run_to(5)
    assert pipeline.store.head(record_key(RUN, 0, 5)).size > 0
