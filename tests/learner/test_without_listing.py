"""A learner finds the newest record by reading alone, and follows the chain from what it saw last."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deltapost.adapters.native import NativeBackend
from deltapost.errors import (
    AccessDenied,
    ForkedHistory,
    HistoryError,
    NotReadable,
    ObjectMissing,
    StreamDenied,
)
from deltapost.learner import following
from deltapost.learner.creating import find_plan
from deltapost.learner.following import Follower
from deltapost.learner.history import History
from deltapost.serialization.names import RUNS_STREAM, anchor_key, attestation_key, record_key
from deltapost.serialization.records import Attestation, Observations, Record
from deltapost.stores import Blob
from deltapost.stores.memory import MemoryStore
from deltapost.streams.memory import MemoryLog
from fixtures.pipeline import AGGREGATOR_KEY
from fixtures.served import CLAIMS, Served, algorithm, eventually, small_model

OBSERVED = Observations(
    owner="x", lease_epoch=1, stream_epoch="", position="0-0", committed_at="2026-11-30T00:00:00+00:00"
)


class Unlisted(MemoryStore):
    """A store as S3 shows it without the right to list; counts reads, and asks `also` first."""

    def __init__(self, behind: MemoryStore) -> None:
        super().__init__()
        self._behind = behind
        self.reads: list[str] = []
        self.also: Callable[[str], None] = lambda key: None

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        self.reads.append(key)
        self.also(key)
        try:
            return self._behind.get(key, offset=offset, length=length)
        except ObjectMissing:
            raise NotReadable(key, said=f"read of {key} failed: AccessDenied (HTTP 403)") from None

    def put(self, key: str, data: bytes, *, metadata: Mapping[str, str] | None = None) -> bool:
        return self._behind.put(key, data, metadata=metadata)

    def list(self, prefix: str) -> Any:
        raise AssertionError("a learner lists nothing")


def put_chain(served: Served, last: int) -> list[Record]:
    """Continues fragment 0's chain to version `last`; each record is attested, the anchor stays the same."""
    record = Record.from_bytes(served.store.get(record_key("tiny", 0, 1)).data)
    records = [record]
    anchor = served.store.get(anchor_key("tiny", 0, 0, record.anchor.sha256)).data
    for version in range(2, last + 1):
        record = record.model_copy(update={"version": version, "previous": record.sha256})
        served.store.put(record_key("tiny", 0, version), record.to_bytes())
        attestation = Attestation.make(record.sha256, OBSERVED, AGGREGATOR_KEY)
        served.store.put(attestation_key("tiny", 0, version), attestation.to_bytes())
        served.store.put(anchor_key("tiny", 0, record.base, record.anchor.sha256), anchor)
        records.append(record)
    return records


@pytest.fixture
def one_version(served: Served) -> Served:
    with served.join(small_model(), algorithm()) as run:
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        assert run.wait_for(0, 1, timeout=30)
    served.stop()
    return served


def follower(store: MemoryStore, path: Path) -> Follower:
    plan = find_plan(store, "tiny")
    assert plan is not None
    history = History(path, manifest_sha256=plan.manifest_sha256, fragments=2)
    return Follower(store, plan, history, NativeBackend(), aggregator_key=AGGREGATOR_KEY.public)


@pytest.mark.parametrize("last", [1, 2, 3, 100])
def test_the_newest_version_is_found_in_reads_that_grow_with_the_logarithm(
    one_version: Served, tmp_path: Path, last: int
) -> None:
    records = put_chain(one_version, last)
    unlisted = Unlisted(one_version.store)
    looking = follower(unlisted, tmp_path / "history")

    version = looking.catch_up(0).version

    assert version == last == records[-1].version
    # One more reads the record itself.
    assert len([key for key in unlisted.reads if "/records/" in key]) <= 2 * math.log2(last + 1) + 3


def test_a_learner_that_joins_starts_from_the_newest_version(one_version: Served, tmp_path: Path) -> None:
    records = put_chain(one_version, 9)

    commit = follower(Unlisted(one_version.store), tmp_path / "history").catch_up(0)

    assert (commit.version, commit.records) == (9, (records[-1],))


def came_back(one_version: Served, path: Path, store: MemoryStore, seen: Record) -> Follower:
    """The follower of a learner that followed `seen` in an earlier session."""
    looking = follower(store, path)
    looking._history.follow(0, seen.version, seen.sha256, AGGREGATOR_KEY.public)
    return follower(store, path)


def test_one_that_comes_back_follows_the_chain_from_what_it_saw(one_version: Served, tmp_path: Path) -> None:
    records = put_chain(one_version, 9)
    looking = came_back(one_version, tmp_path / "history", Unlisted(one_version.store), records[2])

    assert looking.catch_up(0).version == 9


def test_a_chain_that_was_forked_between_is_refused_although_both_ends_are_attested(
    one_version: Served, tmp_path: Path
) -> None:
    records = put_chain(one_version, 9)
    looking = came_back(one_version, tmp_path / "history", Unlisted(one_version.store), records[2])
    key = record_key("tiny", 0, 6)
    one_version.store.delete(key)
    one_version.store.put(key, records[5].model_copy(update={"previous": bytes(32)}).to_bytes())

    with pytest.raises(ForkedHistory, match="record 6"):
        looking.catch_up(0)


def test_a_chain_with_a_hole_is_no_chain(one_version: Served, tmp_path: Path) -> None:
    records = put_chain(one_version, 9)
    looking = came_back(one_version, tmp_path / "history", one_version.store, records[2])
    # A hole that doubling and halving steps over: from version 3 it asks for 4, 6, 10, 8 and 9.
    one_version.store.delete(record_key("tiny", 0, 7))

    with pytest.raises(HistoryError, match="no record of 7"):
        looking.catch_up(0)


def test_behind_a_long_absence_the_newest_records_signature_speaks_alone(
    one_version: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(following, "LONGEST_CHECK", 5)
    records = put_chain(one_version, 9)
    unlisted = Unlisted(one_version.store)
    looking = came_back(one_version, tmp_path / "history", unlisted, records[2])

    assert looking.catch_up(0).version == 9

    assert "chain_not_checked" in caplog.text
    assert record_key("tiny", 0, 5) not in unlisted.reads


def test_a_record_that_was_seen_and_may_not_be_read_any_more_is_no_fork(
    one_version: Served, tmp_path: Path
) -> None:
    records = put_chain(one_version, 3)
    unlisted = Unlisted(one_version.store)
    looking = came_back(one_version, tmp_path / "history", unlisted, records[2])
    one_version.store.delete(record_key("tiny", 0, 3))

    with pytest.raises(NotReadable):
        looking.catch_up(0)


def test_wrong_credentials_are_never_taken_for_nothing_new(one_version: Served, tmp_path: Path) -> None:
    unlisted = Unlisted(one_version.store)
    looking = follower(unlisted, tmp_path / "history")

    def expired(key: str) -> None:
        raise AccessDenied("read failed: ExpiredToken (HTTP 403)", hint="the credentials have expired")

    unlisted.also = expired
    for look in (looking.catch_up, looking.next_commit):
        with pytest.raises(AccessDenied, match="ExpiredToken"):
            look(0)


class RefusesRuns(MemoryLog):
    """A log whose ACL lets nobody announce runs."""

    def append(self, stream: str, data: bytes, *, max_length: int | None = None) -> str:
        if stream == RUNS_STREAM:
            raise StreamDenied("refused XADD of 'deltapost:runs'")
        return super().append(stream, data, max_length=max_length)


def test_who_creates_a_run_has_to_announce_it_and_who_joins_it_need_not(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="deltapost")
    served.log = RefusesRuns()

    with pytest.raises(StreamDenied):
        served.join(small_model(), algorithm())
    with served.join(small_model(), learner="bob") as run:
        assert run.versions == [0, 0]

    assert "run_not_announced_again" in caplog.text


class LosesRuns(MemoryLog):
    """A Redis that fails over to a copy without the first announcement of a run."""

    lost = False

    def append(self, stream: str, data: bytes, *, max_length: int | None = None) -> str:
        if stream == RUNS_STREAM and not self.lost:
            self.lost = True
            return "1-0"
        return super().append(stream, data, max_length=max_length)


def test_a_run_that_redis_forgot_before_an_aggregator_read_of_it_is_announced_again(served: Served) -> None:
    log = served.log = LosesRuns()
    with served.join(small_model(), algorithm(), repost_seconds=0.1) as run:
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)

        eventually(lambda: log.bounds(RUNS_STREAM) is not None, seconds=15)

    assert log.lost
