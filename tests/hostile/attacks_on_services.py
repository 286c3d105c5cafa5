"""Attacks on an aggregator's intake and on a learner that follows. Run by test_memory.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltapost.adapters.native import NativeBackend
from deltapost.errors import DeltapostError, HistoryError, MalformedMessage
from deltapost.learner.following import Follower
from deltapost.learner.history import History
from deltapost.ledger.engine import open_ledger
from deltapost.ledger.revisions import migrate
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.messages import CommitMessage, sign_message
from deltapost.serialization.names import (
    attestation_key,
    envelope_stream,
    manifest_key,
    record_key,
)
from deltapost.serialization.records import Attestation, Observations, Record
from deltapost.stores import Blob, ObjectInfo
from deltapost_aggregator.discovery import Discovery
from deltapost_aggregator.members import MembersReader
from fixtures.pipeline import AGGREGATOR_KEY, RUN, Pipeline, arrays, healthy, learner_signing_key, say
from hostile.measuring import Attack, run

MALLORY = "mallory"
GIB = 1024**3


def new_pipeline() -> Pipeline:
    ledger = open_ledger(f"sqlite:///{tempfile.mkdtemp()}/ledger.db")
    migrate(ledger)
    pipeline = Pipeline(ledger)
    pipeline.register(MALLORY)
    return pipeline


def closes(pipeline: Pipeline) -> Attack:
    """The honest round behind the attack closes."""
    healthy(pipeline)
    return lambda: pipeline.run_to(1, steps=300)


def flood_of_signed_envelopes() -> Attack:
    pipeline = new_pipeline()
    for number in range(1_000):
        message = pipeline.message(MALLORY, b"%d" % number, metrics={"m": float(number)})
        pipeline.append(sign_message(message, learner_signing_key(MALLORY)))
    return closes(pipeline)


def flood_of_unknown_ids() -> Attack:
    pipeline = new_pipeline()
    key = learner_signing_key("stranger")
    for number in range(4_000):
        pipeline.append(sign_message(pipeline.message(f"stranger-{number}", b"x"), key))
    return closes(pipeline)


def flood_of_large_garbage() -> Attack:
    pipeline = new_pipeline()
    garbage = b"\x80" * 1_000_000
    for _ in range(640):  # the same bytes object: the stream itself holds them once
        pipeline.log.append(envelope_stream(RUN, 0), b"")
    stream = pipeline.log._streams[envelope_stream(RUN, 0)]  # type: ignore[attr-defined]
    stream.entries[:] = [type(entry)(entry.id, garbage) for entry in stream.entries]
    return closes(pipeline)


def flood_of_members() -> Attack:
    pipeline = new_pipeline()
    for number in range(2_000):
        say(pipeline, f"stranger-{number}", 0)
    members = MembersReader(pipeline.context())

    def attack() -> None:
        for _ in range(12):
            members.step()

    return attack


class Oversized:
    """The pipeline's store, in which Mallory's objects have 1 GiB: as many bytes as are asked for."""

    def __init__(self, inner: Any, grows: bool) -> None:
        self._inner, self._grows, self._size = inner, grows, GIB

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        if f"/{MALLORY}/" not in key:
            return self._inner.get(key, offset=offset, length=length)  # type: ignore[no-any-return]
        self._size += GIB if self._grows else 0
        return Blob(bytes(self._size if length is None else min(length, self._size)), self._size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def oversized_objects(*, grows: bool = False, claimed: int = 100) -> Attack:
    pipeline = new_pipeline()
    pipeline.store = Oversized(pipeline.store, grows)
    for number in range(64):
        message = pipeline.message(MALLORY, b"%d" % number)
        message = message.model_copy(update={"payload": ObjectRef(sha256=bytes(32), size=claimed + number)})
        pipeline.append(sign_message(message, learner_signing_key(MALLORY)))
    return closes(pipeline)


def hostile_manifests() -> Attack:
    pipeline = new_pipeline()
    found: list[str] = []
    bombs = [b"\x80" * MAX_DOCUMENT_BYTES, b"\xdd\x00\x7f\xff\xf0" + b"\xa2ab" * 2_700_000, bytes(64 * 2**20)]
    discovery = Discovery(pipeline.context().services, lambda plan: found.append(plan.run))
    for number, bomb in enumerate(bombs):
        pipeline.store.put(manifest_key(f"bomb-{number}"), bomb)
        discovery._want(f"bomb-{number}", None)

    def attack() -> None:
        discovery.step(0.0)
        assert found == [RUN]

    return attack


def follower(pipeline: Pipeline) -> Follower:
    plan = pipeline.plan
    history = History(Path(tempfile.mkdtemp()) / "history", manifest_sha256=plan.manifest_sha256, fragments=1)
    return Follower(pipeline.store, plan, history, NativeBackend(), aggregator_key=None)


def a_learner_meets(prepare: Callable[[Pipeline], None], error: type[DeltapostError]) -> Attack:
    pipeline = new_pipeline()
    prepare(pipeline)
    learner = follower(pipeline)

    def attack() -> None:
        for look in (learner.next_commit, learner.catch_up):
            try:
                look(0)
            except error:
                continue
            raise AssertionError("it was followed")

    return attack


def huge_record(pipeline: Pipeline) -> None:
    pipeline.store.put(record_key(RUN, 0, 1), bytes(256 * 2**20))


def bomb_of_a_record(pipeline: Pipeline) -> None:
    pipeline.store.put(record_key(RUN, 0, 1), b"\xdd\x00\x7f\xff\xf0" + b"\x80" * 8_388_000)


def record_of_a_huge_anchor(pipeline: Pipeline) -> None:
    """Attested with the run's own key: whoever holds it can at most refuse service."""
    healthy(pipeline)
    pipeline.run_to(1)
    honest = pipeline.record(1)
    pipeline.store.delete(record_key(RUN, 0, 1))
    pipeline.store.delete(attestation_key(RUN, 0, 1))
    forged = honest.model_copy(update={"anchor": ObjectRef(sha256=bytes(32), size=GIB)})
    pipeline.store.put(record_key(RUN, 0, 1), forged.to_bytes())
    observations = Observations(
        owner="o",
        lease_epoch=1,
        stream_epoch="e",
        position="0-0",
        committed_at="2026-01-01T00:00:00+00:00",
        quorum_seconds=None,
        grace_seconds=None,
        close_seconds=None,
        sync_seconds=None,
    )
    made = Attestation.make(Record.from_bytes(forged.to_bytes()).sha256, observations, AGGREGATOR_KEY)
    pipeline.store.put(attestation_key(RUN, 0, 1), made.to_bytes())
    inner = pipeline.store

    class Anchors:
        def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
            if "/anchors/" in key:
                return Blob(bytes(min(length or GIB, GIB)), GIB)
            return inner.get(key, offset=offset, length=length)

        def head(self, key: str) -> ObjectInfo:
            return inner.head(key)

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    pipeline.store = Anchors()  # type: ignore[assignment]


def hostile_announcements() -> Attack:
    from deltapost.learner.courier import Courier
    from deltapost.learner.inbox import Inbox
    from deltapost.learner.journal import Journal
    from deltapost.serialization.names import commits_stream
    from deltapost.streams import START

    pipeline = new_pipeline()
    key = learner_signing_key("stranger")
    for number in range(4_000):
        message = CommitMessage(run=RUN, fragment=number % 1_000, version=2**53 - number, record=bytes(32))
        frame = sign_message(message, key).frame if number % 2 else b"\x80" * 20_000
        pipeline.log.append(commits_stream(RUN), frame if number % 200 else sign_message(message, key).frame)
    inbox = Inbox()
    courier = Courier(
        run=RUN,
        learner="ada",
        log=pipeline.log,
        follower=follower(pipeline),
        journal=Journal(Path(tempfile.mkdtemp())),
        publisher=None,  # type: ignore[arg-type]
        inbox=inbox,
        announcer=None,  # type: ignore[arg-type]
        position=START,
        poll_seconds=0.0,
        repost_seconds=60.0,
    )

    def attack() -> None:
        for _ in range(17):
            courier.step(0.0)
        inbox.check()
        assert not inbox.has(0)

    return attack


ATTACKS: dict[str, Callable[[], Attack]] = {
    "flood_of_signed_envelopes": flood_of_signed_envelopes,
    "flood_of_unknown_ids": flood_of_unknown_ids,
    "flood_of_large_garbage": flood_of_large_garbage,
    "flood_of_members": flood_of_members,
    "objects_of_1_gib": oversized_objects,
    "objects_of_1_gib_that_grow": lambda: oversized_objects(grows=True),
    "objects_of_1_gib_announced_as_such": lambda: oversized_objects(claimed=GIB),
    "objects_of_1_gib_announced_as_what_fits": lambda: oversized_objects(claimed=1_000_000),
    "hostile_manifests": hostile_manifests,
    "learner_meets_a_huge_record": lambda: a_learner_meets(huge_record, MalformedMessage),
    "learner_meets_a_bomb_of_a_record": lambda: a_learner_meets(bomb_of_a_record, MalformedMessage),
    "learner_meets_a_record_of_a_huge_anchor": lambda: a_learner_meets(record_of_a_huge_anchor, HistoryError),
    "learner_meets_hostile_announcements": hostile_announcements,
}

if __name__ == "__main__":
    arrays(0)
    run(ATTACKS)
