"""Streams stay bounded on a real server: answered entries really go, and nothing unread ever does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltapost.learner import presence
from deltapost.learner.presence import Presence
from deltapost.ledger import runs
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.serialization.messages import sign_message
from deltapost.serialization.names import commits_stream, envelope_stream, members_stream
from deltapost.streams import START, position_key
from deltapost.streams.redis import RedisLog
from deltapost_aggregator import announcer
from fixtures.pipeline import RUN, Pipeline, arrays, learner_signing_key, plain_config

#: Redis removes whole nodes of up to a hundred entries when it trims approximately.
NODE = 100


@pytest.fixture
def pipeline(migrated_sqlite_url: str, valkey_url: str) -> Iterator[Pipeline]:
    ledger: Ledger = open_ledger(migrated_sqlite_url)
    log = RedisLog(valkey_url)
    yield Pipeline(ledger, config=plain_config(quorum_size=1), learners=("ada",), log=log)
    log.close()
    ledger.close()


@pytest.mark.parametrize(
    "entries", [pytest.param(1_000), pytest.param(10_000, marks=pytest.mark.slow, id="10k")]
)
def test_sealed_entries_go_and_the_stream_stays_under_its_bound(pipeline: Pipeline, entries: int) -> None:
    rounds, stream = 4, envelope_stream(RUN, 0)
    worker = pipeline.worker()
    longest = 0
    for version in range(rounds):
        # Given a round's share of entries, the one that closes it, and one for the round after it
        for _ in range(entries // rounds):
            pipeline.log.append(stream, b"\xc1 counted in the seal")
        pipeline.post("ada", arrays(version), version=version)
        last = pipeline.log.bounds(stream)
        assert last is not None
        longest = max(longest, last.length)
        pipeline.run_to(version + 1, worker, steps=entries)
        unread = sign_message(
            pipeline.message("ada", pipeline.payload(arrays(90)), version=version + 9),
            learner_signing_key("ada"),
        )
        pipeline.append(unread)

        # Then what the seal reached through is gone, whatever XTRIM's options do in this version, …
        bounds = pipeline.log.bounds(stream)
        assert bounds is not None
        assert bounds.length == 1
        assert bounds.removed_through == last.last_id
        # … and nothing that was not read
        position = runs.standing(pipeline.ledger, RUN, 0).position
        assert position_key(bounds.removed_through) <= position_key(position)
        assert [entry.data for entry in pipeline.log.read(stream, START, limit=9)] == [unread.frame]
    assert longest <= entries // rounds + 2


def test_announcements_and_advice_stay_under_their_bound(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "MAX_COMMITS_ENTRIES", 50)
    worker = pipeline.worker()
    posted = [pipeline.post("ada", arrays(1), steps=0, local_step=number) for number in range(60)]
    pipeline.settle(worker)
    for _ in range(4):  # advice is given at once, and again at each delivery
        for signed in posted:
            pipeline.append(signed)
        pipeline.settle(worker)

    bounds = pipeline.log.bounds(commits_stream(RUN))
    assert bounds is not None
    assert 50 <= bounds.length <= 50 + NODE
    assert bounds.removed_through != START


def test_members_messages_stay_under_their_bound(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "MAX_MEMBERS_ENTRIES", 50)
    member = Presence(pipeline.log, learner_signing_key("ada"), RUN, "ada", 1, alive_seconds=3600.0)

    for version in range(400):
        member.pass_round(0, version)

    assert 50 <= pipeline.log.length(members_stream(RUN)) <= 50 + NODE
