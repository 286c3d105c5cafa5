"""A recorded stream and its seals fix the records, however it is fed and whoever is restarted in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select

from deltapost.algorithms.sealing import OpenRound, Ready, Waiting
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.revisions import migrate
from deltapost.ledger.tables import SealRow
from deltapost.serialization.messages import sign_message
from deltapost.serialization.names import envelope_stream, parse_key
from deltapost.stores.memory import MemoryStore
from deltapost.streams import START, Entry, position_key
from deltapost.streams.memory import MemoryLog, _Stream
from deltapost_aggregator.policy import Stages
from deltapost_aggregator.worker import FragmentWorker
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, learner_signing_key, plain_config

STREAM = envelope_stream(RUN, 0)
ROUNDS = 3


class FixedSeals:
    """A policy that knows nothing but the recorded positions."""

    def __init__(self, positions: dict[int, str]) -> None:
        self._positions = positions

    def begin(self, head: int) -> None:
        """Nothing is timed."""

    def ready(self, view: OpenRound, position: str, /) -> Ready | Waiting:
        if position == self._positions.get(view.head):
            return Ready(degraded=False)
        return Waiting("the recorded seal is further on")

    def full(self, view: OpenRound, position: str, /) -> bool:
        return position == self._positions.get(view.head)

    def stages(self, head: int) -> Stages:
        return Stages()

    def committed(self, step_seconds: float, stages: Stages) -> None:
        """Nothing is learnt."""


class RecordedLog(MemoryLog):
    """A log that is fed entries with the ids they had."""

    def feed(self, entries: list[Entry]) -> None:
        stream = self._streams.setdefault(STREAM, _Stream())
        for entry in entries:
            stream.keys.append(position_key(entry.id))
            stream.entries.append(entry)
            stream.last_id = entry.id


def post_round(pipeline: Pipeline, version: int, chance: random.Random) -> None:
    """A round's posts, with everything that ends in a verdict, in an order that chance draws."""
    posts: list[Callable[[], object]] = []
    for number, learner in enumerate(LEARNERS):
        payload = pipeline.payload(arrays(10 * version + number))
        message = pipeline.message(learner, payload, version=version)
        pipeline.put(message, payload)
        signed = sign_message(message, learner_signing_key(learner))
        posts += [partial(pipeline.append, signed)] * chance.randint(1, 3)
    unseen = pipeline.message("mallory", pipeline.payload(arrays(900 + version)), version=version)
    posts += [
        partial(pipeline.append, sign_message(unseen, learner_signing_key("mallory"))),
        partial(pipeline.post, chance.choice(LEARNERS), arrays(500 + version), version=version),
        partial(pipeline.post, "mallory", arrays(600), version=version + 2),
        partial(pipeline.post, "mallory", arrays(800), version=version, steps=0),
        partial(pipeline.log.append, STREAM, b"\xc1 no message"),
    ]
    if version:
        posts.append(partial(pipeline.post, "mallory", arrays(700), version=version - 1))
    chance.shuffle(posts)
    for post in posts:
        post()


def fresh_ledger(directory: Path, name: str) -> Ledger:
    ledger = open_ledger(f"sqlite:///{directory / name}.db")
    migrate(ledger)
    return ledger


def inputs_of(store: MemoryStore) -> MemoryStore:
    """What learners and creator wrote; nothing of an aggregator's."""
    copy = MemoryStore()
    for info in store.list(""):
        parsed = parse_key(info.key)
        assert parsed is not None
        if parsed.area in ("manifest", "genesis", "learners", "deltas"):
            blob = store.get(info.key)
            copy.put(info.key, blob.data, metadata=blob.metadata)
    return copy


def chunks(entries: list[Entry], size: Callable[[], int]) -> Iterator[list[Entry]]:
    left = list(entries)
    while left:
        count = size()
        yield left[:count]
        left = left[count:]


@pytest.mark.parametrize("seed", range(4))
def test_the_same_stream_and_seals_give_the_same_records(tmp_path: Path, seed: int) -> None:
    # Given a recorded run: its stream, its learners' objects and where its seals reach
    chance = random.Random(seed)
    ledger = fresh_ledger(tmp_path, "recorded")
    store, log = MemoryStore(), MemoryLog()
    recorded = Pipeline(ledger, config=plain_config(delta_dtype="F8_E4M3"), store=store, log=log)
    recorded.register("mallory")
    for version in range(ROUNDS):
        post_round(recorded, version, chance)
    entries = log.read(STREAM, START, limit=1_000)
    recorded.run_to(ROUNDS, steps=80)
    with ledger.read() as session:
        positions = {row.version - 1: row.position for row in session.scalars(select(SealRow))}
    ledger.close()
    expected = recorded.records()
    assert len(expected) == ROUNDS
    verdicts = {verdict for version in (1, 2, 3) for verdict in recorded.record(version).verdicts().values()}
    assert "accepted" in verdicts
    assert len(verdicts) >= 3

    # When it is fed at once, one entry at a time, and in pieces with a new process after each
    ways: dict[str, tuple[Callable[[], int], bool]] = {
        "at-once": (lambda: len(entries), False),
        "one-by-one": (lambda: 1, False),
        "restarted": (lambda: chance.randint(1, 5), True),
    }
    for name, (size, restarted) in ways.items():
        ledger = fresh_ledger(tmp_path, name)
        replayed = Pipeline(
            ledger, config=recorded.config, store=inputs_of(store), log=(feed := RecordedLog())
        )

        def worker(pipeline: Pipeline = replayed) -> FragmentWorker:
            return FragmentWorker(pipeline.context(), 0, FixedSeals(positions))

        working = worker()
        for chunk in chunks(entries, size):
            feed.feed(chunk)
            replayed.settle(working)
            if restarted:
                working = worker()
        replayed.settle(working)

        # Then the records are the same bytes
        assert replayed.records() == expected, name
        ledger.close()


def test_the_seals_matter(tmp_path: Path) -> None:
    """Another position is another round: the test above cannot pass by looking at nothing."""
    ledger = fresh_ledger(tmp_path, "recorded")
    pipeline = Pipeline(ledger)
    for number, learner in enumerate((*LEARNERS, "dan")):
        pipeline.register(learner)
        pipeline.post(learner, arrays(number))
    entries = pipeline.log.read(STREAM, START, limit=10)

    pipeline.settle(FragmentWorker(pipeline.context(), 0, FixedSeals({0: entries[1].id})))

    assert [participant.learner for participant in pipeline.record(1).participants] == ["ada", "bob"]
    ledger.close()
