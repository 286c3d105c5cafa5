"""A pass that Redis lost, or that an aggregator forgot, holds no round open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltapost.errors import StreamUnavailable
from deltapost.learner.presence import MAX_PASSES_PER_ALIVE, Presence
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.serialization.messages import PassMessage, read_message
from deltapost.serialization.names import members_stream
from deltapost.streams import START
from deltapost.streams.memory import MemoryLog
from deltapost_aggregator.members import MembersReader
from deltapost_aggregator.worker import FragmentWorker
from fixtures.pipeline import RUN, Pipeline, arrays, learner_signing_key, plain_config
from fixtures.served import eventually


@pytest.fixture
def ledger(migrated_sqlite_url: str) -> Iterator[Ledger]:
    """What is said on streams is the same on every database."""
    opened = open_ledger(migrated_sqlite_url)
    yield opened
    opened.close()


class FailingLog(MemoryLog):
    """A log that takes nothing while `failing`."""

    failing = False

    def append(self, stream: str, data: bytes, *, max_length: int | None = None) -> str:
        if self.failing:
            raise StreamUnavailable("the stream does not answer")
        return super().append(stream, data, max_length=max_length)


def presence(log: MemoryLog, learner: str = "cyd", alive_seconds: float = 0.02) -> Presence:
    return Presence(log, learner_signing_key(learner), RUN, learner, 1, alive_seconds)


def passes(log: MemoryLog) -> list[tuple[int, int]]:
    entries = log.read(members_stream(RUN), START, limit=10_000)
    messages = [read_message(entry.data or b"").message for entry in entries]
    return [(m.fragment, m.version) for m in messages if isinstance(m, PassMessage)]


def test_a_pass_that_was_lost_is_said_again_and_the_round_closes(ledger: Ledger) -> None:
    # Given a round that waits for Cyd alone, whose pass the stream did not take
    log = FailingLog()
    pipeline = Pipeline(ledger, config=plain_config(quorum_size=3, min_quorum=1), log=log)
    context = pipeline.context()
    worker, members = FragmentWorker(context, 0), MembersReader(context)
    learners = [presence(log, name, alive_seconds=3600.0) for name in ("ada", "bob")]
    cyd = presence(log)
    for learner in learners:
        learner.start()
    cyd.start()
    members.step()
    for name in ("ada", "bob"):
        pipeline.post(name, arrays(1))
    pipeline.settle(worker)
    log.failing = True
    cyd.pass_round(0, 0)
    log.failing = False

    # When its heartbeat goes on
    eventually(lambda: members.step() >= 0 and context.passed(0, 0) == {"cyd"})

    # Then the round closes without it
    pipeline.run_to(1, worker)
    assert [p.learner for p in pipeline.record(1).participants] == ["ada", "bob"]
    for learner in (*learners, cyd):
        learner.stop()


def test_an_aggregator_that_starts_again_learns_the_passes_from_the_stream(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    assert isinstance(pipeline.log, MemoryLog)
    cyd = presence(pipeline.log, alive_seconds=3600.0)
    cyd.start()
    cyd.pass_round(0, 0)
    cyd.stop()

    for _ in range(2):
        context = pipeline.context()
        MembersReader(context).step()
        assert context.passed(0, 0) == {"cyd"}


def test_a_members_stream_that_was_emptied_hears_the_pass_again() -> None:
    log = MemoryLog()
    cyd = presence(log)
    cyd.start()
    cyd.pass_round(0, 4)

    log.trim(members_stream(RUN), "9999999999999-0")

    eventually(lambda: (0, 4) in passes(log))
    cyd.stop()


def test_a_pass_is_said_no_more_once_its_round_is_closed() -> None:
    log = MemoryLog()
    cyd = presence(log)
    cyd.pass_round(0, 4)
    cyd.pass_round(1, 4)
    cyd.closed(0, 4)
    cyd.closed(1, 5)

    cyd._pass_again()

    assert passes(log) == [(0, 4), (1, 4), (0, 4)]


def test_of_many_passes_a_bounded_number_is_said_at_once_and_each_in_its_turn() -> None:
    log = MemoryLog()
    cyd = presence(log)
    fragments = 3 * MAX_PASSES_PER_ALIVE
    for fragment in range(fragments):
        cyd.pass_round(fragment, 1)

    for _ in range(3):
        before = len(passes(log))
        cyd._pass_again()
        assert len(passes(log)) - before == MAX_PASSES_PER_ALIVE

    assert sorted(passes(log)[fragments:]) == [(fragment, 1) for fragment in range(fragments)]


def test_an_older_pass_said_late_takes_no_newer_one_back(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    assert isinstance(pipeline.log, MemoryLog)
    cyd = presence(pipeline.log, alive_seconds=3600.0)
    cyd.start()
    cyd.pass_round(0, 6)
    cyd.pass_round(0, 5)
    cyd.stop()
    context = pipeline.context()

    MembersReader(context).step()

    assert context.passed(0, 6) == {"cyd"}
