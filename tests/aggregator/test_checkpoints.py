"""Checkpoints: states lie in the bucket every K versions; whatever needs one in between computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deltapost.adapters.native import NativeBackend
from deltapost.audit.history import BucketHistory
from deltapost.audit.rebuild import rebuild
from deltapost.errors import HistoryError
from deltapost.learner.following import Follower
from deltapost.learner.history import History
from deltapost.ledger import ending
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.serialization import pack
from deltapost.serialization.names import anchor_key, delta_key, parse_key, record_key, update_key
from deltapost_aggregator.garbage import Judge
from deltapost_aggregator.housekeeping import Housekeeper
from deltapost_aggregator.worker import FragmentWorker
from fixtures.histories import history, restore
from fixtures.pipeline import RUN, Pipeline, arrays, plain_config

K = 3
CONFIG = plain_config(commit_dtype="F4", delta_dtype="F4", quorum_size=1, min_quorum=1, checkpoint_every=K)


@pytest.fixture
def sqlite_ledger(migrated_sqlite_url: str) -> Iterator[Ledger]:
    ledger = open_ledger(migrated_sqlite_url)
    yield ledger
    ledger.close()


@pytest.fixture
def pipeline(sqlite_ledger: Ledger) -> Pipeline:
    return Pipeline(sqlite_ledger, config=CONFIG, learners=("ada",))


def commit(pipeline: Pipeline, through: int, worker: FragmentWorker | None = None) -> None:
    """Rounds from the head on, by one worker."""
    worker = worker or pipeline.worker()
    for version in range(pipeline.head(), through):
        pipeline.post("ada", arrays(version), version=version)
        pipeline.run_to(version + 1, worker)


def versions(pipeline: Pipeline, area: str) -> list[int]:
    """The versions *made* by the rounds that have an object of this area."""
    parsed = (parse_key(info.key) for info in pipeline.store.list(RUN))
    return [one.version + 1 for one in parsed if one and one.area == area and one.version is not None]


def lose(pipeline: Pipeline, version: int) -> str:
    """Deletes the payload of the round that made `version`; returns its key."""
    record = pipeline.record(version)
    key = delta_key(RUN, "ada", 0, record.base, record.participants[0].payload.sha256)
    pipeline.store.delete(key)
    return key


def keep_house(pipeline: Pipeline, retain: str) -> None:
    keeper = Housekeeper(pipeline.context(retain=retain))
    keeper.step()
    while keeper._units:
        keeper.step()


def follower(pipeline: Pipeline, directory: Path) -> Follower:
    seen = History(directory / "seen", manifest_sha256=pipeline.plan.manifest_sha256, fragments=1)
    return Follower(pipeline.store, pipeline.plan, seen, NativeBackend(), aggregator_key=None)


def test_states_are_uploaded_at_checkpoints_only_and_records_say_so(pipeline: Pipeline) -> None:
    commit(pipeline, 7)

    assert versions(pipeline, "anchors") == versions(pipeline, "outer") == [3, 6]
    assert versions(pipeline, "updates") == list(range(1, 8))
    assert [pipeline.record(version).checkpoint for version in range(1, 8)] == [
        v % K == 0 for v in range(1, 8)
    ]


def test_every_version_is_what_a_run_with_all_its_states_comes_to(
    pipeline: Pipeline, tmp_path: Path, migrated_sqlite_url: str
) -> None:
    from deltapost.ledger.revisions import migrate

    other = open_ledger(migrated_sqlite_url.replace("migrated.db", "dense.db"))
    migrate(other)
    dense = Pipeline(other, config=replace(CONFIG, checkpoint_every=1), learners=("ada",))
    commit(pipeline, 5)
    commit(dense, 5)

    for version in range(1, 6):
        sparse, whole = pipeline.record(version), dense.record(version)
        assert (sparse.anchor, sparse.outer, sparse.update) == (whole.anchor, whole.outer, whole.update)
    other.close()


@pytest.mark.parametrize("head", [1, 2, 3, 4, 5, 6, 7])
def test_a_new_owner_goes_on_wherever_the_last_one_stopped(pipeline: Pipeline, head: int) -> None:
    commit(pipeline, head)

    commit(pipeline, head + 1, pipeline.worker())

    assert pipeline.head() == head + 1


def test_a_new_owner_closes_one_round_a_step_so_that_its_lease_and_others_get_their_turn(
    pipeline: Pipeline,
) -> None:
    commit(pipeline, 5)
    pipeline.post("ada", arrays(5), version=5)
    worker = pipeline.worker()

    steps = [worker.step() for _ in range(3)]

    # Versions 4 and 5 follow from 3: after the first of them it comes back, with the second it goes on
    assert steps[:2] == ["recovering", "committed"]


def test_an_owner_that_adopts_anothers_rounds_goes_on_from_the_state_it_has(pipeline: Pipeline) -> None:
    first = pipeline.worker(aggregator_name="first")
    commit(pipeline, 4, first)
    before = [key.key for key in pipeline.store.list(f"{RUN}/outer/")]
    # Given a checkpoint that can no longer be read, and a round by somebody else
    first.stop()
    commit(pipeline, 5, second := pipeline.worker(aggregator_name="second"))
    second.stop()
    for key in before:
        pipeline.store.delete(key)

    commit(pipeline, 6, first)

    assert pipeline.head() == 6


def test_a_payload_lost_since_the_checkpoint_is_named_and_once_restored_the_run_goes_on(
    pipeline: Pipeline,
) -> None:
    commit(pipeline, 5)
    kept = {info.key: pipeline.store.get(info.key).data for info in pipeline.store.list(f"{RUN}/deltas/")}
    key = lose(pipeline, 4)
    pipeline.post("ada", arrays(5), version=5)
    worker = pipeline.worker()

    with pytest.raises(HistoryError, match=f"round 4 cannot be closed again.*{key}"):
        pipeline.run_to(6, worker)
    assert pipeline.head() == 5  # and nobody is left out of a round for it

    pipeline.store.put(key, kept[key])
    pipeline.run_to(6, worker)
    assert pipeline.record(6).checkpoint


def test_a_payload_lost_before_the_checkpoint_or_while_its_owner_lives_is_not_missed(
    pipeline: Pipeline,
) -> None:
    worker = pipeline.worker()
    commit(pipeline, 5, worker)
    lose(pipeline, 2)
    lose(pipeline, 5)

    commit(pipeline, 7, worker)
    commit(pipeline, 8)

    assert pipeline.head() == 8


def test_a_round_that_leads_to_another_state_than_its_record_names_stops_the_owner(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltapost.ledger import rounds

    commit(pipeline, 4)
    pipeline.post("ada", arrays(4), version=4)
    read = rounds.record_of

    def altered(ledger: Ledger, run: str, fragment: int, version: int) -> object:
        found = read(ledger, run, fragment, version)
        return found and found.model_copy(update={"outer": pipeline.record(1).anchor})

    monkeypatch.setattr(rounds, "record_of", altered)
    monkeypatch.setattr("deltapost_aggregator.recovering.checkpoint_of", lambda *_: 0)

    with pytest.raises(HistoryError, match="round 1 cannot be closed again: it leads to the outer"):
        pipeline.run_to(5)


@pytest.mark.parametrize("head", [1, 2, 3, 4, 5, 6])
def test_a_learner_that_joins_takes_the_checkpoint_and_the_updates_since(
    pipeline: Pipeline, tmp_path: Path, head: int
) -> None:
    commit(pipeline, head)

    found = follower(pipeline, tmp_path).catch_up(0)

    assert found.version == head
    expected = pipeline.record(head).anchor
    data = pack(found.anchor)
    assert len(data) == expected.size
    updates = [pipeline.record(v).update for v in range(head - head % K + 1, head + 1)]
    whole = (
        pipeline.record(head - head % K).anchor.size if head >= K else pipeline.plan.manifest.genesis[0].size
    )
    assert found.bytes_read == whole + sum(one.size for one in updates if one is not None)


def test_a_learner_that_holds_a_version_takes_updates_only(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(pipeline, 4)
    learner = follower(pipeline, tmp_path)
    learner.advance(learner.catch_up(0))
    commit(pipeline, 5)
    read: list[str] = []
    get = pipeline.store.get

    def counted(key: str, **how: int) -> object:
        parsed = parse_key(key)
        read.append(parsed.area if parsed is not None else key)
        return get(key, **how)

    monkeypatch.setattr(pipeline.store, "get", counted)

    found = learner.next_commit(0)

    # One look past the newest; nothing behind what is held is read
    assert found is not None
    assert (found.version, read) == (5, ["records", "records", "attestations", "updates"])


def test_an_update_or_a_link_that_is_not_the_records_is_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    from deltapost.errors import ForkedHistory

    commit(pipeline, 5)
    record = pipeline.record(4)
    assert record.update is not None
    key = update_key(RUN, 0, 3, record.update.sha256)
    data = pipeline.store.get(key).data
    pipeline.store.delete(key)
    pipeline.store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(HistoryError, match=key):
        follower(pipeline, tmp_path).catch_up(0)

    pipeline.store.delete(record_key(RUN, 0, 4))
    pipeline.store.put(record_key(RUN, 0, 4), record.model_copy(update={"degraded": True}).to_bytes())
    with pytest.raises(ForkedHistory, match="record 5"):
        follower(pipeline, tmp_path).catch_up(0)


def test_a_record_that_says_otherwise_than_the_manifest_is_refused_by_every_reader(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    commit(pipeline, 1)
    record = pipeline.record(1)
    pipeline.store.delete(record_key(RUN, 0, 1))
    pipeline.store.put(record_key(RUN, 0, 1), record.model_copy(update={"checkpoint": True}).to_bytes())

    with pytest.raises(HistoryError, match="checkpoint=True"):
        BucketHistory.open(pipeline.store, RUN).read(0, 1)
    with pytest.raises(HistoryError, match="checkpoint=True"):
        follower(pipeline, tmp_path).catch_up(0)
    restore(pipeline.ledger, {})
    from deltapost.ledger import runs

    runs.admit(pipeline.ledger, pipeline.plan.manifest)
    with pytest.raises(HistoryError, match="checkpoint=True"):
        pipeline.settle()


def test_a_rebuild_between_checkpoints_has_every_round_and_says_what_the_next_one_lacks(
    pipeline: Pipeline,
) -> None:
    commit(pipeline, 5)
    before = history(pipeline.ledger)
    restore(pipeline.ledger, {})

    assert rebuild(pipeline.ledger, pipeline.store, RUN).stopped is None
    assert history(pipeline.ledger) == before
    commit(pipeline, 6)

    owner = pipeline.worker()
    commit(pipeline, 8, owner)
    owner.stop()
    lose(pipeline, 2)
    assert rebuild(pipeline.ledger, pipeline.store, RUN).stopped is None
    key = lose(pipeline, 7)
    stopped = rebuild(pipeline.ledger, pipeline.store, RUN).stopped
    assert stopped is not None
    assert key in stopped


def test_retention_ends_at_a_checkpoint_and_everything_newer_can_be_computed(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    commit(pipeline, 8)

    keep_house(pipeline, "rounds=1")

    # The policy allows 7; 6 is the newest checkpoint at or below it
    released = BucketHistory.open(pipeline.store, RUN).released(0)
    assert released is not None
    assert released.through == 6
    assert versions(pipeline, "anchors") == [6]
    assert versions(pipeline, "deltas") == versions(pipeline, "updates") == [7, 8]
    assert follower(pipeline, tmp_path).catch_up(0).version == 8
    commit(pipeline, 10)


def test_the_last_anchor_of_a_finished_run_lies_in_the_bucket_whole_and_stays(pipeline: Pipeline) -> None:
    commit(pipeline, 5)
    ending.request(pipeline.ledger, RUN)
    worker = pipeline.worker()
    while worker.step() != "finished":
        pass

    last = pipeline.record(5)
    key = anchor_key(RUN, 0, 4, last.anchor.sha256)
    assert pipeline.store.head(key).size == last.anchor.size
    keep_house(pipeline, "rounds=1")
    judge = Judge(BucketHistory.open(pipeline.store, RUN))
    assert judge.judge(key) == "kept"


def test_a_run_whose_state_is_lost_can_still_be_finished(pipeline: Pipeline, tmp_path: Path) -> None:
    commit(pipeline, 5)
    lose(pipeline, 4)
    ending.request(pipeline.ledger, RUN)
    worker = pipeline.worker()
    while worker.step() != "finished":
        pass

    assert ending.state(pipeline.ledger, RUN) == "finished"
    assert follower(pipeline, tmp_path).catch_up(0).version == 5


def test_an_anchor_between_checkpoints_stays_only_until_another_round_follows(pipeline: Pipeline) -> None:
    # Given an owner that was killed after the last anchor, and one before it that was not stopped by then
    worker = pipeline.worker()
    commit(pipeline, 4, worker)
    key = anchor_key(RUN, 0, 3, pipeline.record(4).anchor.sha256)
    pipeline.store.put(key, b"as uploaded before an end that lost")
    history = BucketHistory.open(pipeline.store, RUN)
    assert Judge(history).judge(key) == "open"

    commit(pipeline, 5, worker)

    assert Judge(history).judge(key) == "unnamed"
