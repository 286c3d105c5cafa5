"""Announcements that Redis forgot are made again from the ledger; runs that it forgot are found again."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from deltapost.algorithms.plan import RunPlan
from deltapost.ledger import runs
from deltapost.ledger.engine import Ledger
from deltapost.serialization.messages import CommitMessage, read_message
from deltapost.serialization.names import commits_stream, manifest_key
from deltapost.streams import START, MessageLog
from deltapost.streams.memory import MemoryLog, _Stream
from deltapost_aggregator.discovery import LEDGER_SECONDS, Discovery
from fixtures.pipeline import RUN, Pipeline, healthy


def announced(log: MessageLog) -> list[int]:
    entries = log.read(commits_stream(RUN), START, limit=100)
    messages = [read_message(entry.data or b"").message for entry in entries]
    return [message.version for message in messages if isinstance(message, CommitMessage)]


@pytest.mark.parametrize("older_copy", [False, True], ids=["emptied", "an older copy"])
def test_the_newest_commit_is_announced_again_when_the_stream_forgot_it(
    ledger: Ledger, older_copy: bool
) -> None:
    # Given two announced commits, and an idle owner that has seen that they are there
    pipeline = Pipeline(ledger, log=(log := MemoryLog()))
    worker = pipeline.worker()
    for version in range(2):
        healthy(pipeline, version)
        pipeline.run_to(version + 1, worker)
    pipeline.settle(worker)
    assert announced(log) == [1, 2]
    pipeline.settle(worker)
    assert announced(log) == [1, 2]

    # When Redis forgets them, or comes back with a copy from before the second
    stream = log._streams.pop(commits_stream(RUN))
    if older_copy:
        log._streams[commits_stream(RUN)] = _Stream(
            stream.keys[:1], stream.entries[:1], last_id=stream.entries[0].id
        )
    pipeline.settle(worker)

    # Then the newest one is there again, once
    pipeline.settle(worker)
    assert announced(log) == ([1, 2] if older_copy else [2])


def test_before_the_first_round_there_is_nothing_to_announce(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    pipeline.settle()
    assert announced(pipeline.log) == []


def test_a_run_that_another_aggregator_copied_is_served_without_an_announcement(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    with ledger.write() as session:
        for table in ("fragments", "runs"):
            session.execute(text(f"DELETE FROM {table}"))
    served: list[RunPlan] = []
    discovery = Discovery(pipeline.context().services, served.append)
    discovery.step(0.0)
    assert served == []

    runs.admit(ledger, pipeline.plan.manifest)
    pipeline.clock.sleep(LEDGER_SECONDS)
    discovery.step(0.0)

    assert [plan.run for plan in served] == [RUN]


def test_a_named_run_is_found_in_the_bucket_when_ledger_and_redis_know_nothing(ledger: Ledger) -> None:
    # Given a bucket with a run, a new database and an empty Redis
    pipeline = Pipeline(ledger)
    with ledger.write() as session:
        for table in ("fragments", "runs"):
            session.execute(text(f"DELETE FROM {table}"))
    services = pipeline.context(serve_runs=f"{RUN},not-there-yet").services
    served: list[RunPlan] = []
    discovery = Discovery(services, served.append)

    # When the operator names it
    discovery.step(0.0)

    # Then it is served, and one that does not exist yet is nothing wrong
    assert [plan.run for plan in served] == [RUN]
    assert services.health.problems() == {}
    assert pipeline.store.head(manifest_key(RUN)).size > 0
